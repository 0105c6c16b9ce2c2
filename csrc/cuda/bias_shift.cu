/* The shift of each row of attn_bias: its largest bias, if this is finite and below `least`, else 0. One warp takes a
 * row. A bias that is not below `least` ends the row, so hardly anything is read of a usual bias. A row whose sink is
 * far above its biases needs no shift: its probabilities are 0.
 *
 * Specification: shift_of_rows in flash_attn/flex/options.py. */
#include "bias_shift_params.h"
#include "sinks.cuh"

#define INF __int_as_float(0x7f800000)

#ifndef F32
#error "dtype of attn_bias: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL bias_shift
#endif

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int BIASES_OF_LANE = 4; /* that are on their way at once */

/* The whole warp calls this function. */
DEVICE float shift_of(const fa_bias_shift_params &p, const element *bias, long long keys) {
    float largest = -INF;
    for (long long first = threadIdx.x % 32; first - threadIdx.x % 32 < keys; first += 32 * BIASES_OF_LANE) {
        bool is_low = true; /* A NaN is: a mask may hide it. */
#pragma unroll
        for (int i = 0; i < BIASES_OF_LANE; i++) {
            const long long key = first + 32 * i;
            const float x = key < keys ? cvt_f32(bias[key * p.stride_key]) : -INF;
            is_low = is_low && !(x >= p.least);
            largest = fmaxf(largest, x);
        }
        if (!__all_sync(WHOLE_WARP, is_low)) return 0;
    }
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, step));
    return largest == -INF ? 0 : largest;
}

extern "C" __global__ void __launch_bounds__(32 * FA_BIAS_SHIFT_WARPS) KERNEL(const fa_bias_shift_params p) {
    for (long long task = (long long)blockIdx.x * FA_BIAS_SHIFT_WARPS + threadIdx.x / 32; task < p.num_rows;
         task += (long long)gridDim.x * FA_BIAS_SHIFT_WARPS) {
        const long long row = task % p.rows, b_idx = p.sequence ? p.sequence[row] : task / p.rows / p.h;
        const long long row_of_bias = p.row ? min(max(p.row[row], 0ll), p.rows_of_bias - 1) : row;
        const long long keys = p.is_cut ? min(max(row + p.last, 0ll), p.keys - 1) + 1 : p.keys;
        const int head = (int)(task / p.rows % p.h);
        const element *bias =
            (const element *)p.bias + b_idx * p.stride_b + head * p.stride_h + row_of_bias * p.stride_row;
        float shift = shift_of(p, bias, keys);
        if (shift < 0 && p.sinks.data && !(sink_of(p.sinks, head) <= shift - p.least)) shift = 0;
        if (threadIdx.x % 32 == 0) p.shift[task] = shift;
    }
}
