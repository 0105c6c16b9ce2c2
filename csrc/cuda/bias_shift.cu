/* The shift of each row of attn_bias: its largest bias, if this is finite and below `least`, else 0. One warp takes a
 * row. A bias that is not below `least` ends the row, so hardly anything is read of a usual bias.
 *
 * Specification: shift_of_rows in flash_attn/flex/options.py. */
#include "bias_shift_params.h"
#include "ptx_sm80.cuh"

#ifndef F32
#error "dtype of attn_bias: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL bias_shift
#endif

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int BIASES_OF_LANE = 4; /* that are on their way at once */

/* The whole warp calls this function. */
DEVICE float shift_of(const fa_bias_shift_params &p, const element *bias) {
    const float inf = __int_as_float(0x7f800000);
    float largest = -inf;
    for (long long first = threadIdx.x % 32; first - threadIdx.x % 32 < p.keys; first += 32 * BIASES_OF_LANE) {
        bool is_low = true; /* A NaN is not. */
#pragma unroll
        for (int i = 0; i < BIASES_OF_LANE; i++) {
            const long long key = first + 32 * i;
            const float x = key < p.keys ? cvt_f32(bias[key * p.stride_key]) : -inf;
            is_low = is_low && x < p.least;
            largest = fmaxf(largest, x);
        }
        if (!__all_sync(WHOLE_WARP, is_low)) return 0;
    }
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, step));
    return largest == -inf ? 0 : largest;
}

extern "C" __global__ void __launch_bounds__(32 * FA_BIAS_SHIFT_WARPS) KERNEL(const fa_bias_shift_params p) {
    for (long long task = (long long)blockIdx.x * FA_BIAS_SHIFT_WARPS + threadIdx.x / 32; task < p.num_rows;
         task += (long long)gridDim.x * FA_BIAS_SHIFT_WARPS) {
        const long long row = task % p.rows, head = task / p.rows % p.h, b_idx = task / p.rows / p.h;
        const float shift =
            shift_of(p, (const element *)p.bias + b_idx * p.stride_b + head * p.stride_h + row * p.stride_row);
        if (threadIdx.x % 32 == 0) p.shift[task] = shift;
    }
}
