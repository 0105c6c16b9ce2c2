/* After attn_bwd_wide_sm90: dQ = scale times the sums, in 16 bits. One CTA per slab, a thread for each thread of the two
 * warpgroups that summed it. Bound by memory: reads dq_sums, writes dQ. */
#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(BLOCK_KV) || !defined(BF16) || !defined(VARLEN)
#error "HEAD_DIM columns and BLOCK_Q rows of a slab, BLOCK_KV, BF16 or fp16, VARLEN packed sequences: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_convert
#endif

#include "attn_bwd_params.h"
#include "ptx_sm90.cuh"
#include "attn_bwd_slabs.cuh"

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ fa_attn_bwd_params p) {
    const int slab = blockIdx.x, wg = threadIdx.x / 128;
    const slab_rows t = slab_at(p, slab);
    if (t.rows > 0) convert_dq(p, t, p.dq_sums + ((long long)slab * 2 + wg) * DQ_FLOATS, wg, threadIdx.x % 128);
}
