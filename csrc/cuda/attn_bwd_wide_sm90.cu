/* Attention backward on Hopper for heads of more than 128 columns. The formulas and the frame come from
 * attn_bwd_sm90.cu.
 *
 * dK and dV of 64 keys take up to 256 registers of a warpgroup's threads, more than there are. So the warpgroups of a
 * CTA share 64 keys and split the work. With 64 keys the sums of dQ would take 4 bytes of additions in the L2 for 640
 * operations. At 3.3 TB/s these additions allow 450 TFLOPS. So two CTAs, a thread block cluster, take neighbouring keys
 * and the same queries. The CTAs exchange dS, and each CTA computes half of dQ's columns from the keys of both.
 *
 * Up to 192 columns (attn_bwd_wide_three.cuh):
 *
 *   produce       --k_full, q_full[s]-->    warpgroups     of both CTAs --q_empty[s]-->   both produce
 *   produce_dout  --v_full, do_full[s]-->   warpgroups     of both CTAs --do_empty[s]-->  both produce_dout
 *   warpgroup 0   S^T = K Q^T, P            --p_full[s]-->   warpgroup 1
 *                 dV += P^T dO
 *   warpgroup 1   dP^T = V dO^T, dS         --ds_full[s]-->  warpgroup 2 of both CTAs  --ds_empty[s]--> warpgroup 1
 *                 dK += dS^T Q
 *   warpgroup 2   dQ = dS K, added to memory from registers, when the dQ turn has come
 *   open_turns    --turn_come[s]--> warpgroup 2  --dq_added[s]--> end_turns
 *
 * Above 192 columns (attn_bwd_wide_two.cuh) the registers suffice for two warpgroups only. These share dQ of the last
 * step. There is room for one stage of dO and of P.
 *
 * Each CTA loads half of Q and dO, for both CTAs.
 *
 * dQ is added up as in attn_bwd_sm90.cu. The first key tile that a query tile sees stores its share, and the key tiles
 * between add their shares. The last key tile adds the sum to its own share and writes dQ. */
#if !defined(HEAD_DIM) || !defined(D_V) || !defined(BLOCK_Q) || !defined(BLOCK_KV)
#error "tiles: HEAD_DIM columns, D_V of V and dO, BLOCK_Q query rows, BLOCK_KV keys"
#endif
#if !defined(BF16) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE) || !defined(DROPOUT)
#error "variant: BF16 or fp16; CAUSAL, LOCAL, VARLEN, SCORE softcap and ALiBi, DROPOUT: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_wide_sm90
#endif

#if HEAD_DIM > 192
#include "attn_bwd_wide_two.cuh"
#else
#include "attn_bwd_wide_three.cuh"
#endif

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    KERNEL(const __grid_constant__ params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    if (smem_address(smem) % 1024) __trap(); /* not SHARED_BASE: in a cluster the upper byte is the rank */
    shared_memory &s = *(shared_memory *)smem;
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q), prefetch_tensormap(&p.k), prefetch_tensormap(&p.v), prefetch_tensormap(&p.dout);
        mbarrier_init(&s.k_full, 1), mbarrier_init(&s.v_full, 1);
        mbarrier_init(&s.idx_full, 1), mbarrier_init(&s.idx_empty, 1);
        for (int i = 0; i < DO_STAGES; i++) mbarrier_init(&s.do_full[i], 1);
        for (int i = 0; i < 2; i++) mbarrier_init(&s.q_full[i], 1);
        for (int i = 0; i < 2; i++) mbarrier_init(&s.tile_full[i], 1), mbarrier_init(&s.turn_come[i], 2);
        init_barriers(s);
        mbarrier_init_fence();
    }
    griddepcontrol_wait(); /* for attn_bwd_prep, which may still run when this launch begins */
    cluster_sync();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (warp == 0) produce<false>(p, s);
        if (warp == 1) open_turns(p, s);
        if (warp == 2) end_turns(p, s);
        if (warp == 3) produce_dout(p, s);
    } else {
        consume(p, s, wg);
    }
    /* A CTA must not end sooner, because the other CTA may still arrive or write here. */
    __syncwarp();
    cluster_sync();
}
