/* The kernel combines partial attention results over different keys of the same queries:
 *
 *   lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) out_i
 *
 * A part with an infinite lse_i counts for nothing, whatever its out_i holds. One thread takes four columns of one row
 * of one head, or one column where four are not aligned. It reads the lse of eight parts, then the columns of these
 * parts, and adds them up relative to the largest lse so far, as attention itself does. Threads share nothing, so a
 * row of up to eight parts waits for memory twice.
 *
 * What binds for few rows is latency (measurements/decode.md, Few work tiles).
 *
 * Specification: ../cpu/combine.c. */
#include "combine_params.h"
#include "division.cuh"
#include "ptx_launch.cuh"
#include "ptx_sm80.cuh"
#include "sinks.cuh"

#ifndef F32
#error "dtype of out: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL combine
#endif

constexpr int AT_ONCE = 8; /* parts */

/* Where a thread works. */
struct place {
    long long row, b_idx, col;
    int head;
};

/* 32 bits where they are enough, because a division of 64 bits takes 100 instructions. */
DEVICE place place_of(const fa_combine_params &p, int width) {
    const long long task = (long long)blockIdx.x * FA_COMBINE_THREADS + threadIdx.x;
    if (__builtin_expect(p.num_tasks >> 31, 0)) {
        const long long row = task / p.groups, of_heads = row / p.len;
        return {row - of_heads * p.len, of_heads / p.h, (task - row * p.groups) * width, (int)(of_heads % p.h)};
    }
    const int row = divide((int)task, p.by_groups), of_heads = divide(row, p.by_len), b_idx = divide(of_heads, p.by_h);
    const int group = (int)task - row * (int)p.groups;
    return {row - of_heads * (int)p.len, b_idx, group * width, of_heads - b_idx * p.h};
}

/* exp(x) for x <= 0 and NaN, in few instructions and without branches. Results below 2^-126 are 0. */
DEVICE float exp_of(float x) {
    constexpr float LOG2_OF_E = 1.44269504088896341f, LOG_OF_2 = 0.693147180559945309f;
    if (x < -200) x = -200;
    const float exponent = __fmul_rn(x, LOG2_OF_E), rest = fmaf(x, LOG2_OF_E, -exponent), power = ex2(exponent);
    return fmaf(power, rest * LOG_OF_2, power);
}

/* Combines WIDTH columns of a row. */
template <int WIDTH> DEVICE void combine(const fa_combine_params &p) {
    const float INF = __int_as_float(0x7f800000);
    struct alignas(WIDTH * sizeof(float)) group {
        float x[WIDTH];
    };
    struct alignas(WIDTH * sizeof(element)) rounded {
        element x[WIDTH];
    };
    const place at = place_of(p, WIDTH);
    const float *lse = p.lse_partial + at.b_idx * p.lse_stride_b + at.head * p.lse_stride_h + at.row;
    const float *from = p.out_partial + at.b_idx * p.stride_b + at.row * p.stride_row + at.head * p.stride_h + at.col;
    float max = -INF, sum = 0, out[WIDTH] = {};
    for (int first = 0; first < p.num_parts; first += AT_ONCE) {
        float part_lse[AT_ONCE];
        group part[AT_ONCE];
        const float before = max;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            part_lse[i] = first + i < p.num_parts ? *lse : -INF;
            lse += p.lse_stride_part;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (part_lse[i] == INF) part_lse[i] = -INF;
            max = fmaxf(max, part_lse[i]);
            part[i] = group{};
            if (part_lse[i] != -INF && p.has_columns) part[i] = *(const group *)from;
            from += p.stride_part;
        }
        const float base = max == -INF ? 0 : max;
        float weight[AT_ONCE];
        const float kept = sum * exp_of(before - base);
        float added = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) added += weight[i] = exp_of(part_lse[i] - base);
        sum = kept + added;
        /* The weights add up to 1, so that values near the largest float do not overflow. A weight of 0 may be an
         * underflow: NaN in the part counts. Parts that add nothing leave exactly what is there. */
        const float scale = sum == 0 ? 0 : __fdividef(1, sum);
        const float share = kept > added ? fmaf(-added, scale, 1) : kept * scale;
#pragma unroll
        for (int e = 0; e < WIDTH; e++) out[e] *= share;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int e = 0; e < WIDTH; e++) out[e] = fmaf(weight[i] * scale, part[i].x[e], out[e]);
    }
    row_with_sink x = {sum == 0 ? -INF : max + logf(sum), 1};
    if (p.sinks.values.data)
        x = add_sink(x.lse, sink_of_row(p.sinks.values, p.sinks.shift, at.b_idx, at.head, at.row));
    else if (sum == 0)
        x.lse = p.empty_lse;
    if (at.col == 0 && p.lse) p.lse[at.b_idx * p.lse_stride_to_b + at.head * p.lse_stride_to_h + at.row] = x.lse;
    if (!p.has_columns) return;
    rounded to;
#pragma unroll
    for (int e = 0; e < WIDTH; e++) to.x[e] = cvt<element>(out[e] * x.share);
    *(rounded *)((element *)p.out + at.b_idx * p.out_stride_b + at.row * p.out_stride_row + at.head * p.out_stride_h +
                 at.col) = to;
}

extern "C" __global__ void __launch_bounds__(FA_COMBINE_THREADS, 2) KERNEL(const fa_combine_params p) {
#if __CUDA_ARCH__ >= 900
    griddepcontrol_wait(); /* for the kernel that computes the parts */
#endif
    if ((long long)blockIdx.x * FA_COMBINE_THREADS + threadIdx.x >= p.num_tasks) return;
    if (p.takes_four)
        combine<4>(p);
    else
        combine<1>(p);
}
