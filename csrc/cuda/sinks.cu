/* Learned sinks behind a call whose kernel had none: one more key for each row, of score sink[h] and value 0:
 *
 *   lse' = log(exp(lse) + exp(sink))      out' = out exp(lse - lse')
 *
 * The forwards add sinks in their epilogues (sinks.cuh), and so out is rounded once. Calls of torch's ops come here:
 * transforms, modes that watch the ops, and subclasses of tensors. A row that saw no key keeps out. Its lse is -inf,
 * and comes in as -inf or inf. Without sinks only this lse changes. `lanes` lanes of a warp take one row of one head.
 * All of them read its lse before one writes it.
 *
 * Specification: ../cpu/sinks.c. */
#include "sinks.cuh"

#ifndef F32
#error "dtype of out: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL sinks
#endif

/* Multiplies the four words of a piece. */
DEVICE uint4 scaled(uint4 piece, float factor) {
    constexpr int ELEMENTS = 16 / element::BYTES;
    union {
        uint4 words;
        element elements[ELEMENTS];
    } x = {piece};
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) x.elements[i] = cvt<element>(cvt_f32(x.elements[i]) * factor);
    return x.words;
}

DEVICE void scale_row(const fa_sinks_params &p, element *row, int lane, float factor) {
    for (int i = lane; i < p.pieces; i += p.lanes) ((uint4 *)row)[i] = scaled(((uint4 *)row)[i], factor);
    if (p.pieces > 0) return;
    for (long long i = lane; i < p.d; i += p.lanes) row[i] = cvt<element>(cvt_f32(row[i]) * factor);
}

extern "C" __global__ void __launch_bounds__(32 * FA_SINKS_WARPS) KERNEL(const fa_sinks_params p) {
    const float inf = __int_as_float(0x7f800000);
    const int lane = threadIdx.x % p.lanes, rows_of_warp = 32 / p.lanes;
    const long long warps = (long long)gridDim.x * FA_SINKS_WARPS;
    long long first = ((long long)blockIdx.x * FA_SINKS_WARPS + threadIdx.x / 32) * rows_of_warp;
    for (; first < p.num_rows; first += warps * rows_of_warp) {
        const long long task = first + threadIdx.x % 32 / p.lanes;
        const bool is_row = task < p.num_rows;
        const int head = (int)(task % p.h);
        const long long row = task / p.h % p.rows, b_idx = task / p.h / p.rows;
        float *lse = sink_row(p.lse, b_idx, head, row);
        row_with_sink x = {is_row ? *lse : 0, 1};
        if (x.lse == inf) x.lse = -inf;
        const bool is_empty = x.lse == -inf;
        if (p.sinks.data && is_row) x = add_sink(x.lse, sink_of_row(p.sinks, p.shift, b_idx, head, row));
        __syncwarp();
        if (!is_row) continue;
        if (lane == 0) *lse = x.lse;
        if (p.sinks.data && !is_empty)
            scale_row(p, (element *)p.out + b_idx * p.out_stride_b + row * p.out_stride_row + head * p.out_stride_h,
                      lane, x.share);
    }
}
