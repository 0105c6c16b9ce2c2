/* The largest score of each head, of the largest scores of its rows, behind the forward of the call:
 *
 *   largest[h] = max over batch and rows of scores[b, h, row] + shift[b, h, row]      -inf without rows
 *
 * A NaN makes the result NaN. One CTA takes a head, and reads its rows. Latency binds.
 *
 * Specification: ../cpu/max_logits.c. */
#define BF16 1 /* for element.cuh, which wants a dtype; no tensor of this kernel has it */
#include "max_logits_params.h"
#include "sinks.cuh"

#ifndef KERNEL
#define KERNEL max_logits
#endif

constexpr int THREADS = 32 * FA_MAX_LOGITS_WARPS;
constexpr int ROWS_OF_THREAD = 4; /* that are on their way at once */

/* Unlike fmaxf, passes a NaN on. */
DEVICE float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

DEVICE float max_of_warp(float x) {
    for (int step = 16; step > 0; step /= 2) x = max_or_nan(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const fa_max_logits_params p) {
    __shared__ float of_warps[FA_MAX_LOGITS_WARPS];
    const float least = -__int_as_float(0x7f800000);
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float largest = least;
    for (long long b_idx = 0; b_idx < p.b; b_idx++)
        for (long long first = threadIdx.x; first < p.rows; first += ROWS_OF_THREAD * THREADS) {
            float scores[ROWS_OF_THREAD];
#pragma unroll
            for (int i = 0; i < ROWS_OF_THREAD; i++) {
                const long long row = first + i * THREADS;
                scores[i] = row < p.rows
                                ? *sink_row(p.scores, b_idx, head, row) + shift_of_row(p.shift, b_idx, head, row)
                                : least;
            }
#pragma unroll
            for (int i = 0; i < ROWS_OF_THREAD; i++) largest = max_or_nan(largest, scores[i]);
        }
    largest = max_of_warp(largest);
    if (lane == 0) of_warps[warp] = largest;
    __syncthreads();
    if (warp > 0) return;
    largest = max_of_warp(of_warps[lane]);
    if (lane == 0) p.largest[head] = largest;
}
