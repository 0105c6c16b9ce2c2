/* After attn_bwd_sm90: dQ = scale times the sums, in 16 bits.
 *
 * One CTA per slab, a thread for each thread of the two warpgroups that summed it: what lies in its registers' order
 * becomes rows when the four lanes of a quad exchange their columns. Bound by memory: reads dq_sums, writes dQ. */
#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(BF16) || !defined(VARLEN)
#error "HEAD_DIM columns and BLOCK_Q rows of a slab, BF16 or fp16, VARLEN packed sequences: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_convert
#endif

#include "attn_bwd_params.h"
#include "ptx_sm90.cuh"
#include "attn_bwd_slabs.cuh"

/* The 4 x 4 matrix whose rows are the four lanes of a quad, transposed. */
DEVICE void transpose_in_quad(u32 (&x)[4]) {
    const int lane = threadIdx.x;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((i & step) == 0) {
                const bool upper = lane & step;
                u32 other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + step], step);
                if (upper)
                    x[i] = other;
                else
                    x[i + step] = other;
            }
}

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ fa_attn_bwd_params p) {
    const int slab = blockIdx.x, wg = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const slab_rows t = slab_at(p, slab);
    if (t.rows <= 0) return;
    const float4 *sums = (const float4 *)(p.dq_sums + ((long long)slab * 2 + wg) * DQ_FLOATS) + thread;
    u16 *dq = (u16 *)p.dq.data + t.b_idx * p.dq.stride_b + t.head * p.dq.stride_h;

    float4 x[DQ_REGS / 4];
#pragma unroll
    for (int i = 0; i < DQ_REGS / 4; i++) x[i] = sums[i * 128];
#pragma unroll
    for (int g = 0; g < DQ_COLUMNS / 32; g++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = dq_row(wg) + 16 * (thread / 32) + lane / 4 + 8 * r;
            const int column = dq_column(wg) + 32 * g + 8 * (lane % 4);
            u32 packed[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float4 &y = x[4 * g + k];
                packed[k] = cvt_x2<BF16>((r ? y.z : y.x) * p.scale, (r ? y.w : y.y) * p.scale);
            }
            transpose_in_quad(packed);
            if (row < t.rows && column < p.d)
                *(uint4 *)(dq + (long long)(t.begin + t.row + row) * p.dq.stride_row + column) =
                    make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
}
