// Just enough of a GPU to run a CUDA kernel on one CPU thread, for tests of its logic.
//
// Thread blocks run one after the other; a block's threads are fibers, which switch only where
// threads meet: at __syncthreads, and within a warp at shuffles, votes and matrix products. What a
// real GPU would let go wrong silently is an error here, or at least changes the result:
// - lanes of a warp meet in different operations, or some never come;
// - some threads of a block leave while others wait in __syncthreads;
// - shared memory that was not written reads as NaN;
// - a copy to shared memory (cp.async) lands at once, or as late as when it is waited for;
// - warps take turns, of random length and in random order, and lanes run up or down, so that a
//   missing barrier shows.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

constexpr int LANES = 32, MOST_THREADS = 1024, SHARED_BYTES = 48 * 1024;
constexpr size_t STACK_BYTES = 64 * 1024;

#if defined(__x86_64__)
// Saves the callee-saved registers on the stack it leaves, and takes them from the one it enters.
extern "C" void emulator_switch(void** left, void* entered);
asm(R"(
.text
.weak emulator_switch
.type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size emulator_switch, . - emulator_switch
)");

struct Stack {
    void* at = nullptr;
    void start(char* memory, void (*entry)()) {
        auto top = (uintptr_t)(memory + STACK_BYTES) & ~(uintptr_t)15;
        auto words = (void**)(top - 16);  // the stack as a call leaves it: 8 off a multiple of 16
        words[0] = (void*)entry;
        at = words - 6;
        memset(at, 0, 6 * sizeof(void*));
    }
    void enter(Stack& other) {
        emulator_switch(&at, other.at);
    }
};
#else
struct Stack {
    ucontext_t at;
    void start(char* memory, void (*entry)()) {
        getcontext(&at);
        at.uc_stack.ss_sp = memory;
        at.uc_stack.ss_size = STACK_BYTES;
        makecontext(&at, entry, 0);
    }
    void enter(Stack& other) {
        swapcontext(&at, &other.at);
    }
};
#endif

enum class Waits { No, ForWarp, ForBlock, Done };

struct Copy {
    void* target;
    const void* source;  // null: zeros
};

struct Thread {
    Stack stack;
    Waits waits = Waits::No;
    std::vector<std::vector<Copy>> groups;  // of copies that have not landed; the last one is open
};

struct Warp {
    const char* operation = nullptr;  // in which the lanes meet
    int arrived = 0;
    uint32_t in[LANES][10], out[LANES][4];  // operands and results
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<char> stacks;
    alignas(128) char shared[SHARED_BYTES];
    Stack scheduler;
    int current = 0, waiting = 0, done = 0;
    uint32_t random = 1;
    std::string error;
    std::function<void()> kernel;
    Index thread_index, block_index, block_size, grid_size;

    uint32_t draw() {  // xorshift
        random ^= random << 13, random ^= random >> 17, random ^= random << 5;
        return random;
    }

    Thread& thread() {
        return threads[current];
    }

    void pause() {
        thread().stack.enter(scheduler);
    }

    // Ends the launch: nothing runs after it.
    [[noreturn]] void fail(const std::string& message) {
        if (error.empty())
            error = message + " (block " + std::to_string(block_index.x) + ", " +
                    std::to_string(block_index.y) + ", " + std::to_string(block_index.z) +
                    ", thread " + std::to_string(current) + ")";
        for (;;) pause();
    }

    void run();
    void turn(int warp);
};

inline Block& block() {
    static Block the;
    return the;
}

inline void thread_main() {
    block().kernel();
    auto& b = block();
    b.thread().waits = Waits::Done;
    b.done++;
    for (;;) b.pause();
}

inline void Block::turn(int warp) {
    const int first = warp * LANES, count = std::min<int>(LANES, threads.size() - first);
    const bool down = draw() % 2;
    for (int i = 0; i < count; i++) {
        current = first + (down ? count - 1 - i : i);
        thread_index.x = current;
        if (thread().waits == Waits::No) scheduler.enter(thread().stack);
        if (!error.empty()) return;
    }
}

inline void Block::run() {
    const int count = block_size.x;
    threads.assign(count, {});
    warps.assign((count + LANES - 1) / LANES, {});
    stacks.resize(count * STACK_BYTES);
    memset(shared, 0xff, sizeof shared);  // NaN
    waiting = done = 0;
    for (int i = 0; i < count; i++) threads[i].stack.start(&stacks[i * STACK_BYTES], thread_main);
    const auto runs = [&](int warp) {
        for (int i = warp * LANES; i < std::min<int>((warp + 1) * LANES, count); i++)
            if (threads[i].waits == Waits::No) return true;
        return false;
    };
    while (done < count && error.empty()) {
        bool any = false;
        const int first = draw() % warps.size();
        for (size_t i = 0; i < warps.size() && error.empty(); i++) {
            const int warp = (first + i) % warps.size();
            for (int turns = 1 + draw() % 8; turns && error.empty() && runs(warp); turns--) {
                turn(warp);
                any = true;
            }
        }
        if (any || !error.empty() || done == count) continue;
        if (waiting < count) {
            error = done ? "some threads left while others wait" : "threads wait for each other";
            for (auto& warp : warps)
                if (warp.arrived)
                    error += std::string(": ") + std::to_string(warp.arrived) +
                             " lanes of a warp in " + warp.operation;
            continue;
        }
        waiting = 0;
        for (auto& t : threads) t.waits = Waits::No;
    }
}

inline void sync_block() {
    auto& b = block();
    b.thread().waits = Waits::ForBlock;
    b.waiting++;
    b.pause();
}

// The lanes of a warp meet: the last one computes the results from what all put in.
template <typename Compute>
uint32_t* meet(const char* operation, const void* operands, size_t size, Compute compute) {
    auto& b = block();
    auto& warp = b.warps[b.current / LANES];
    const int lane = b.current % LANES;
    if (warp.arrived && warp.operation != operation && strcmp(warp.operation, operation))
        b.fail(std::string("lanes of a warp diverge: ") + warp.operation + " and " + operation);
    warp.operation = operation;
    memcpy(warp.in[lane], operands, size);
    if (++warp.arrived < LANES) {
        b.thread().waits = Waits::ForWarp;
        b.pause();
    } else {
        compute(warp);
        warp.arrived = 0;
        for (int i = 0; i < LANES; i++) b.threads[b.current - lane + i].waits = Waits::No;
    }
    return warp.out[lane];
}

inline const char* launch(Index grid, unsigned threads, uint32_t seed, std::function<void()> kernel) {
    auto& b = block();
    b.error.clear();
    b.kernel = std::move(kernel);
    b.grid_size = grid;
    b.block_size = {threads, 1, 1};
    b.random = seed | 1;
    if (threads > MOST_THREADS || grid.y > 65535 || grid.z > 65535 || !grid.x || !grid.y || !grid.z)
        b.error = "this grid cannot be launched";
    auto& at = b.block_index;
    for (at.z = 0; at.z < grid.z; at.z++)
        for (at.y = 0; at.y < grid.y; at.y++)
            for (at.x = 0; at.x < grid.x && b.error.empty(); at.x++) b.run();
    return b.error.empty() ? nullptr : b.error.c_str();
}

}  // namespace emulator
