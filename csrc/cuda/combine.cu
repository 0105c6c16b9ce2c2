/* The kernel combines partial attention results over different keys of the same queries:
 *
 *   lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) out_i
 *
 * A part with an infinite lse_i counts for nothing, whatever its out_i holds. One warp takes one row of one head. First
 * each lane takes every 32nd part, and the weights go to shared memory. Then each lane takes every 32nd group of
 * columns.
 *
 * Specification: ../cpu/combine.c. */
#include "combine_params.h"
#include "ptx_launch.cuh"
#include "ptx_sm80.cuh"
#include "sinks.cuh"

#ifndef F32
#error "dtype of out: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL combine
#endif

constexpr unsigned WHOLE_WARP = 0xffffffffu;

/* Fills the weights of all parts and returns the row's lse. A part that sees no key has weight -1. The whole warp calls
 * this function. */
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
        const float weight = fabsf(part) == inf ? -1 : expf(part - max);
        weights[i] = weight, sum += weight < 0 ? 0 : weight;
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, step);
    const float scale = sum == 0 ? 0 : 1 / sum;
    for (int i = lane; i < p.num_parts; i += 32)
        if (weights[i] > 0) weights[i] *= scale;
    __syncwarp();
    return sum == 0 ? -inf : max + logf(sum);
}

/* Writes the columns of a row. Each lane takes WIDTH columns at a time, and a part's loads do not wait for those of the
 * part before. A part that sees no key is not read. A weight of 0 may be an underflow: NaN in the part counts. */
template <int WIDTH>
DEVICE void write_row(const fa_combine_params &p, const float *from, element *to, const float *weights, float share) {
    constexpr int AT_ONCE = 8;
    struct alignas(WIDTH * sizeof(float)) group {
        float x[WIDTH];
    };
    struct alignas(WIDTH * sizeof(element)) rounded {
        element x[WIDTH];
    };
    for (long long col = threadIdx.x % 32 * WIDTH; col < p.d; col += 32 * WIDTH) {
        float sum[WIDTH] = {};
        for (int first = 0; first < p.num_parts; first += AT_ONCE) {
            group part[AT_ONCE];
            float weight[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                weight[i] = first + i < p.num_parts ? weights[first + i] : -1;
                part[i] = group{};
                if (!(weight[i] < 0)) part[i] = *(const group *)(from + (first + i) * p.stride_part + col);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int e = 0; e < WIDTH; e++) sum[e] = fmaf(weight[i], part[i].x[e], sum[e]);
        }
        rounded out;
#pragma unroll
        for (int e = 0; e < WIDTH; e++) out.x[e] = cvt<element>(sum[e] * share);
        *(rounded *)(to + col) = out;
    }
}

/* The place of a row: its number in its sequence, head and batch. */
struct row_place {
    long long row, b_idx;
    int head;
};
template <class number> DEVICE row_place place_of(const fa_combine_params &p, number task) {
    const number len = (number)p.len, h = (number)p.h, of_heads = task / len;
    return {(long long)(task - of_heads * len), (long long)(of_heads / h), (int)(of_heads % h)};
}

extern "C" __global__ void __launch_bounds__(32 * FA_COMBINE_WARPS) KERNEL(const fa_combine_params p) {
    extern __shared__ __align__(16) char memory[];
    float *weights = (float *)memory + FA_COMBINE_MAX_PARTS * (threadIdx.x / 32);
#if __CUDA_ARCH__ >= 900
    griddepcontrol_wait(); /* for the kernel that computes the parts */
#endif
    for (long long task = (long long)blockIdx.x * FA_COMBINE_WARPS + threadIdx.x / 32; task < p.num_rows;
         task += (long long)gridDim.x * FA_COMBINE_WARPS) {
        /* A division of 64 bits takes 100 instructions. */
        const row_place at = p.num_rows >> 32 ? place_of(p, (unsigned long long)task) : place_of(p, (unsigned)task);
        const float *lse = p.lse_partial + at.b_idx * p.lse_stride_b + at.head * p.lse_stride_h + at.row;
        row_with_sink x = {weigh(p, lse, weights), 1};
        if (p.sinks.values.data)
            x = add_sink(x.lse, sink_of_row(p.sinks.values, p.sinks.shift, at.b_idx, at.head, at.row));
        else if (x.lse == -__int_as_float(0x7f800000))
            x.lse = p.empty_lse;
        const float *from = p.out_partial + at.b_idx * p.stride_b + at.row * p.stride_row + at.head * p.stride_h;
        element *to =
            (element *)p.out + at.b_idx * p.out_stride_b + at.row * p.out_stride_row + at.head * p.out_stride_h;
        if (p.takes_four)
            write_row<4>(p, from, to, weights, x.share);
        else
            write_row<1>(p, from, to, weights, x.share);
        if (threadIdx.x % 32 == 0) p.lse[at.b_idx * p.lse_stride_to_b + at.head * p.lse_stride_to_h + at.row] = x.lse;
        __syncwarp(); /* the next row's weights replace these */
    }
}
