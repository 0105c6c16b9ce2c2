/* Adds sums of integers (flex_exact_sums.cuh) to the gradient of a captured tensor. */
#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif
#include "flex_exact_sums.cuh"

#ifndef KERNEL
#define KERNEL flex_exact_sums
#endif

DEVICE double value_of(const fa_cuda_exact_sum &sum, int digits) {
    const int infinities = sum.seen & (PLUS_INF_SEEN | MINUS_INF_SEEN);
    const double inf = __longlong_as_double(0x7ff0000000000000ll);
    if (sum.seen & NAN_SEEN || infinities == (PLUS_INF_SEEN | MINUS_INF_SEEN)) return inf - inf;
    if (infinities) return infinities == PLUS_INF_SEEN ? inf : -inf;
    return ldexp((double)sum.sum, sum.exponent - 1 - EXPONENT_BIAS - digits);
}

extern "C" __global__ void __launch_bounds__(FA_FLEX_SUMS_THREADS) KERNEL(const fa_cuda_exact_sums p) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < p.num;
         i += gridDim.x * (long long)blockDim.x) {
        const double value = value_of(p.sums[i], p.digits);
        if (p.is_double)
            ((double *)p.gradient)[i] += value;
        else
            ((float *)p.gradient)[i] += (float)value;
    }
}
