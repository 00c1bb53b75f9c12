// A CUDA driver that does nothing but say what it was asked, for tests of driver.py.
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

extern "C" {

int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*,
                      unsigned) {
    printf("load %s\n", memcmp(code, "\x7f" "ELF", 4) ? "garbage" : "ELF");
    *library = (void*)0x1000;
    return 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
    if (library != (void*)0x1000) return 1;
    *kernel = strdup(name);
    return 0;
}

int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
                   unsigned, unsigned shared, void* stream, void** params, void** extra) {
    if (x > 1000) return 1;  // CUDA_ERROR_INVALID_VALUE
    const auto* longs = (const int64_t*)params[0];
    printf("launch %s %u %u %u threads %u shared %u stream %ld params %ld %ld extra %d\n",
           (const char*)kernel, x, y, z, threads, shared, (long)stream, (long)longs[0],
           (long)longs[2], extra != nullptr);
    fflush(stdout);
    return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
    Dl_info mine;
    dladdr((void*)&cuGetProcAddress_v2, &mine);
    *function = dlsym(dlopen(mine.dli_fname, RTLD_LAZY), name);
    if (status) *status = *function ? 0 : 1;
    return 0;
}

int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
