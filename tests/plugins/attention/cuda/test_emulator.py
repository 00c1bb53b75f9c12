"""The emulator that the CUDA kernels are tested in: it computes what a GPU does, and it does not
let pass what a GPU forbids."""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulation import compiled

from pageloom.contract import native

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler")

KERNELS = r"""
#include <device.cuh>

struct Shared {
    alignas(16) float x[128];
};

void reverse(float* data) {  // through shared memory
    auto& shared = shared_memory<Shared>();
    shared.x[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    data[threadIdx.x] = shared.x[127 - threadIdx.x];
}

void reverse_without_a_barrier(float* data) {
    auto& shared = shared_memory<Shared>();
    shared.x[threadIdx.x] = data[threadIdx.x];
    data[threadIdx.x] = shared.x[127 - threadIdx.x];
}

template <bool WAIT>
void copy_through_shared(float* data) {
    auto& shared = shared_memory<Shared>();
    if (threadIdx.x < 32) {
        copy_start(&shared.x[4 * threadIdx.x], data + 4 * threadIdx.x, threadIdx.x != 1);
        copy_commit();
        if (WAIT) copy_wait<0>();
    }
    __syncthreads();
    data[threadIdx.x] = shared.x[threadIdx.x];
}

void wait_for_the_wrong_group(float* data) {
    auto& shared = shared_memory<Shared>();
    for (int i = 0; i < 2; i++) {
        const int at = 4 * threadIdx.x;
        if (threadIdx.x / 16 == i) copy_start(&shared.x[at], data + at, true);
        copy_commit();
    }
    copy_wait<1>();  // the second is still on its way
    __syncthreads();
    data[threadIdx.x] = shared.x[threadIdx.x];
}

void shuffles(float* data) {
    const float up = __shfl_xor_sync(0xffffffffu, data[threadIdx.x], 1);
    const float first = __shfl_sync(0xffffffffu, data[threadIdx.x], 3);
    const int any = __any_sync(0xffffffffu, threadIdx.x == 70);
    data[threadIdx.x] = 1000 * up + first + 0.5f * any;
}

void diverge(float* data) {
    if (threadIdx.x == 5) __any_sync(0xffffffffu, 1);
    else data[0] = __shfl_sync(0xffffffffu, data[0], 0);
}

void leave_a_shuffle(float* data) {
    if (threadIdx.x != 5) data[0] = __shfl_sync(0xffffffffu, data[0], 0);
}

void leave_a_barrier(float* data) {
    if (threadIdx.x != 5) __syncthreads();
}

void half_a_warp(float* data) {
    if (threadIdx.x < 16) data[0] = __shfl_sync(0xffffu, data[0], 0);
}

void unaligned(float* data) {
    copy_start(&shared_memory<Shared>().x[threadIdx.x], data, true);
}

// data: a 16 x 16, b 16 x 8, c 16 x 8, row by row
template <typename T>
void product(float* data) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    float *b = data + 256, *c = b + 128;
    unsigned x[4], y[2];
    for (int r = 0; r < 4; r++) {
        const float* at = data + (g + r % 2 * 8) * 16 + 2 * t + r / 2 * 8;
        x[r] = pack<T>(at[0], at[1]);
    }
    for (int r = 0; r < 2; r++) {
        const float* at = b + (2 * t + 8 * r) * 8 + g;
        y[r] = pack<T>(at[0], at[8]);
    }
    float z[4];
    for (int r = 0; r < 4; r++) z[r] = c[(g + r / 2 * 8) * 8 + 2 * t + r % 2];
    mma<T>(z, x, y[0], y[1]);
    for (int r = 0; r < 4; r++) c[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = z[r];
}

#define RUN(name, ...)                                                                       \
    extern "C" const char* run_##name(float* data, unsigned threads, unsigned seed) {        \
        return emulator::launch({1, 1, 1}, threads, seed, [=] { __VA_ARGS__(data); });        \
    }
RUN(reverse, reverse)
RUN(reverse_without_a_barrier, reverse_without_a_barrier)
RUN(copy, copy_through_shared<true>)
RUN(copy_without_waiting, copy_through_shared<false>)
RUN(wait_for_the_wrong_group, wait_for_the_wrong_group)
RUN(shuffles, shuffles)
RUN(diverge, diverge)
RUN(leave_a_shuffle, leave_a_shuffle)
RUN(leave_a_barrier, leave_a_barrier)
RUN(half_a_warp, half_a_warp)
RUN(unaligned, unaligned)
RUN(product_bf16, product<bf16>)
RUN(product_fp16, product<fp16>)
"""


@pytest.fixture(scope="module")
def library():
    return compiled(KERNELS)


@pytest.fixture
def launch(library):
    def run(name, data, threads=128, seed=1):
        function = getattr(library, f"run_{name}")
        function.restype = ctypes.c_char_p
        error = function(ctypes.c_void_p(data.data_ptr()), threads, seed)
        return error.decode() if error else None

    return run


@pytest.mark.parametrize("seed", range(1, 20))
def test_threads_meet_at_a_barrier_whatever_their_order(launch, seed):
    data = torch.arange(128.0)
    assert launch("reverse", data, seed=seed) is None
    assert torch.equal(data, torch.arange(128.0).flip(0))


def test_without_the_barrier_the_result_is_wrong(launch):
    for seed in range(1, 20):
        data = torch.arange(128.0)
        assert launch("reverse_without_a_barrier", data, seed=seed) is None
        assert not torch.equal(data, torch.arange(128.0).flip(0))


def test_a_copy_lands_when_it_is_waited_for(launch):
    data, expected = torch.arange(128.0), torch.arange(128.0)
    expected[4:8] = 0
    assert launch("copy", data) is None
    assert torch.equal(data, expected)


@pytest.mark.parametrize(
    ("name", "waited_for"), [("copy_without_waiting", 0), ("wait_for_the_wrong_group", 64)]
)
def test_a_copy_that_is_not_waited_for_may_be_late(launch, name, waited_for):
    data = torch.arange(128.0)
    assert launch(name, data) is None
    assert torch.equal(data[:waited_for], torch.arange(float(waited_for)))
    late = data[waited_for:].isnan()
    assert late.any()
    assert not late.all()


def test_lanes_exchange_values_within_their_warp(launch):
    data = torch.arange(128.0)
    lane, warp = torch.arange(128) % 32, torch.arange(128) // 32
    assert launch("shuffles", data) is None
    assert torch.equal(data, 1000.0 * (warp * 32 + (lane ^ 1)) + warp * 32 + 3 + 0.5 * (warp == 2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("diverge", "lanes of a warp diverge"),
        ("leave_a_shuffle", "some threads left while others wait: 31 lanes of a warp in __shfl_sy"),
        ("leave_a_barrier", "some threads left while others wait"),
        ("half_a_warp", "only whole warps are emulated"),
        ("unaligned", r"not aligned to 16 bytes \(block 0, 0, 0, thread "),
    ],
)
def test_what_a_gpu_forbids_is_an_error(launch, name, message):
    with pytest.raises(AssertionError, match=message):
        assert (error := launch(name, torch.zeros(128))) is None, error


@pytest.mark.parametrize(
    ("name", "dtype"), [("product_bf16", torch.bfloat16), ("product_fp16", torch.float16)]
)
def test_matrix_fragments_are_where_the_ptx_isa_says(launch, name, dtype):
    generator = torch.Generator().manual_seed(0)
    a, b, c = (
        torch.randn(shape, generator=generator).to(dtype).float()
        for shape in ((16, 16), (16, 8), (16, 8))
    )
    data = torch.cat([a.flatten(), b.flatten(), c.flatten()])
    assert launch(name, data, threads=32) is None
    torch.testing.assert_close(data[384:].view(16, 8), a @ b + c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_as_torch_does(launch, dtype):
    x = torch.cat([torch.randn(256), torch.tensor([0.0, -0.0, 65504.0, 1e30, -1e30, 3e-8, 6e-5])])
    # A product with the identity shows what `pack` made of each number.
    for start in range(0, len(x) - 128, 64):
        b = x[start : start + 128]
        b = torch.where(b.to(dtype).isinf(), 0, b)
        data = torch.cat([torch.eye(16).flatten(), b, torch.zeros(128)])
        name = "product_bf16" if dtype is torch.bfloat16 else "product_fp16"
        assert launch(name, data, threads=32) is None
        assert torch.equal(data[384:], b.to(dtype).float())
