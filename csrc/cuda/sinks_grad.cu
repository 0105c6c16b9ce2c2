/* The gradient of learned sinks, after the backward of the call:
 *
 *   gradient[h] = sum over rows of exp(sink - lse') (0 - delta)      delta = dout'.out' - dlse'
 *
 * lse' and out' are those with sinks (sinks.cu). The backward has written delta as softmax_d. One CTA takes a head. Its
 * sum has one order, so its bits are the same each time. Memory binds: the kernel reads lse' and delta.
 *
 * Specification: ../cpu/sinks.c. */
#define BF16 1 /* for element.cuh, which wants a dtype; no tensor of this kernel has it */
#include "sinks.cuh"

/* NOTE: of libdevice, because the fast exponential has an error that grows with its argument. */
extern "C" __device__ float __nv_expf(float);

#ifndef KERNEL
#define KERNEL sinks_grad
#endif

#define INF __int_as_float(0x7f800000)
constexpr int THREADS = 32 * FA_SINKS_GRAD_WARPS;
constexpr int ROWS_OF_THREAD = 4; /* that are on their way at once */
constexpr unsigned WHOLE_WARP = 0xffffffffu;

DEVICE float addend(float sink, float lse, float delta) {
    const float probability = fabsf(lse) == INF ? 0 : __nv_expf(sink - lse);
    return probability == 0 ? 0 : -probability * delta; /* delta may be NaN where the sink has no part */
}

DEVICE void store(const fa_sinks_grad_params &p, int head, float x) {
    switch (p.sinks.dtype) {
    case FA_SINKS_OF_F16: ((fp16 *)p.gradient)[head] = cvt<fp16>(x); break;
    case FA_SINKS_OF_BF16: ((bf16 *)p.gradient)[head] = cvt<bf16>(x); break;
    case FA_SINKS_OF_F32: ((float *)p.gradient)[head] = x; break;
    default: ((double *)p.gradient)[head] = (double)x; break;
    }
}

DEVICE float sum_of_warp(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, step);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const fa_sinks_grad_params p) {
    __shared__ float sums[FA_SINKS_GRAD_WARPS];
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long rows = p.end ? min(max((long long)*p.end, 0ll), p.rows) : p.rows;
    const long long step_b = THREADS / max(rows, 1ll), step_row = THREADS % max(rows, 1ll);
    long long b_idx = threadIdx.x / max(rows, 1ll), row = threadIdx.x % max(rows, 1ll);
    float sum = 0;
    while (rows > 0 && b_idx < p.b) {
        float sink[ROWS_OF_THREAD], lse[ROWS_OF_THREAD], delta[ROWS_OF_THREAD];
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            const bool is_row = b_idx < p.b;
            lse[i] = is_row ? *sink_row(p.lse, b_idx, head, row) : INF;
            delta[i] = is_row ? *sink_row(p.delta, b_idx, head, row) : 0;
            sink[i] = is_row ? sink_of_row(p.sinks, p.shift, b_idx, head, row) : 0;
            row += step_row, b_idx += step_b;
            if (row >= rows) row -= rows, b_idx++;
        }
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) sum += addend(sink[i], lse[i], delta[i]);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = sum_of_warp(lane < FA_SINKS_GRAD_WARPS ? sums[lane] : 0);
    if (lane == 0) store(p, head, sum);
}
