/* The shift of each row of attn_bias: its largest bias, if this is finite and below `least`, else 0. A bias that is not
 * below `least` ends the row, and hardly anything is read of a usual bias: each lane looks at the first and at the last
 * bias of a row of its own. The whole warp takes the rows that are left, one after the other. A row whose sink is far
 * above its biases needs no shift: its probabilities are 0.
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

/* The biases of a row: the first one, and how many count. */
struct bias_row {
    const element *first;
    long long keys;
    int head;
};
template <class integer> DEVICE bias_row row_of(const fa_bias_shift_params &p, long long task) {
    const integer all = (integer)task / (integer)p.rows; /* rows of batches and heads before */
    const long long row = task - (long long)all * p.rows, b_idx = p.sequence ? p.sequence[row] : all / (integer)p.h;
    const long long row_of_bias = p.row ? min(max(p.row[row], 0ll), p.rows_of_bias - 1) : row;
    const int head = (int)(all % (integer)p.h);
    return {(const element *)p.bias + b_idx * p.stride_b + head * p.stride_h + row_of_bias * p.stride_row,
            p.is_cut ? min(max(row + p.last, 0ll), p.keys - 1) + 1 : p.keys, head};
}

extern "C" __global__ void __launch_bounds__(32 * FA_BIAS_SHIFT_WARPS) KERNEL(const fa_bias_shift_params p) {
    const int lane = threadIdx.x % 32;
    const bool is_small = p.num_rows < 1ll << 31; /* divisions of 32 bits take a fraction of the time */
    for (long long first = ((long long)blockIdx.x * FA_BIAS_SHIFT_WARPS + threadIdx.x / 32) * p.rows_of_warp;
         first < p.num_rows; first += (long long)gridDim.x * FA_BIAS_SHIFT_WARPS * p.rows_of_warp) {
        const long long task = first + lane;
        const bool exists = lane < p.rows_of_warp && task < p.num_rows;
        bias_row own = {nullptr, 0, 0};
        if (exists) own = is_small ? row_of<unsigned>(p, task) : row_of<long long>(p, task);
        bool is_low = exists && own.keys > 0;
        if (is_low) {
            const float x = cvt_f32(own.first[0]), y = cvt_f32(own.first[(own.keys - 1) * p.stride_key]);
            is_low = !(x >= p.least) && !(y >= p.least);
        }
        float shift = 0;
        for (unsigned left = __ballot_sync(WHOLE_WARP, is_low); left; left &= left - 1) {
            const int owner = __ffs(left) - 1;
            const element *row = (const element *)__shfl_sync(WHOLE_WARP, (unsigned long long)own.first, owner);
            const float found = shift_of(p, row, __shfl_sync(WHOLE_WARP, own.keys, owner));
            if (lane == owner) shift = found;
        }
        if (shift < 0 && p.sinks.data && !(sink_of(p.sinks, own.head) <= shift - p.least)) shift = 0;
        if (exists) p.shift[task] = shift;
    }
}
