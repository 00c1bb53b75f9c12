// All kernels of the backend; the host names the instances that it wants.
#include <cache.cuh>
#include <decode.cuh>
#include <partial.cuh>
#include <plain.cuh>
#include <prefill.cuh>
