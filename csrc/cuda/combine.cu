/* The kernel combines partial attention results over different keys of the same queries:
 *
 *   lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) out_i
 *
 * A part with an infinite lse_i counts for nothing, whatever its out_i holds. One warp takes one row of one head. First
 * each lane takes every 32nd part, and the weights go to shared memory. Then each lane takes every 32nd column.
 *
 * Specification: ../cpu/combine.c. */
#include "combine_params.h"
#include "ptx_sm80.cuh"
#include "sinks.cuh"

#ifndef F32
#error "dtype of out: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL combine
#endif

constexpr unsigned WHOLE_WARP = 0xffffffffu;

/* Fills the weights of all parts and returns the row's lse. The whole warp calls this function. */
DEVICE float weigh(const fa_combine_params &p, const float *lse, float *weights) {
    const int lane = threadIdx.x % 32;
    const float inf = __int_as_float(0x7f800000);
    float max = -inf, sum = 0;
    for (int i = lane; i < p.num_parts; i += 32) {
        const float part = lse[i * p.lse_stride_part];
        if (part < inf) max = fmaxf(max, part);
    }
    for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(WHOLE_WARP, max, step));
    for (int i = lane; i < p.num_parts; i += 32) {
        const float part = lse[i * p.lse_stride_part];
        weights[i] = fabsf(part) == inf ? 0 : expf(part - max);
        sum += weights[i];
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, step);
    const float scale = sum == 0 ? 0 : 1 / sum;
    for (int i = lane; i < p.num_parts; i += 32) weights[i] *= scale;
    __syncwarp();
    return sum == 0 ? -inf : max + logf(sum);
}

extern "C" __global__ void __launch_bounds__(32 * FA_COMBINE_WARPS) KERNEL(const fa_combine_params p) {
    extern __shared__ __align__(16) char memory[];
    float *weights = (float *)memory + FA_COMBINE_MAX_PARTS * (threadIdx.x / 32);
    for (long long task = (long long)blockIdx.x * FA_COMBINE_WARPS + threadIdx.x / 32; task < p.num_rows;
         task += (long long)gridDim.x * FA_COMBINE_WARPS) {
        const long long row = task % p.len, b_idx = task / p.len / p.h;
        const int head = (int)(task / p.len % p.h);
        row_with_sink x = {weigh(p, p.lse_partial + b_idx * p.lse_stride_b + head * p.lse_stride_h + row, weights), 1};
        if (p.sinks.values.data) x = add_sink(x.lse, sink_of_row(p.sinks.values, p.sinks.shift, b_idx, head, row));
        const float *from = p.out_partial + b_idx * p.stride_b + row * p.stride_row + head * p.stride_h;
        element *to = (element *)p.out + b_idx * p.out_stride_b + row * p.out_stride_row + head * p.out_stride_h;
        for (long long col = threadIdx.x % 32; col < p.d; col += 32) {
            float sum = 0;
            for (int i = 0; i < p.num_parts; i++)
                if (weights[i] != 0) sum = fmaf(weights[i], from[i * p.stride_part + col], sum);
            to[col] = cvt<element>(sum * x.share);
        }
        if (threadIdx.x % 32 == 0) p.lse[task] = x.lse;
        __syncwarp(); /* the next row's weights replace these */
    }
}
