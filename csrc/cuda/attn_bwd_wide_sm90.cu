/* Attention backward on Hopper for heads of more than 128 columns. The formulas and the frame come from
 * attn_bwd_sm90.cu.
 *
 * dK and dV of 64 keys take 256 registers of a warpgroup's threads, more than there are. So the warpgroups of a CTA
 * share 64 keys and split the work. Warpgroup 0 computes P and owns dV. Warpgroup 1 computes dS and owns dK. With 64
 * keys the sums of dQ would take 4 bytes of additions in the L2 for 640 operations. At 3.3 TB/s these additions allow
 * 450 TFLOPS. So two CTAs, a thread block cluster, take neighbouring keys and the same queries. The CTAs exchange dS,
 * and each CTA computes half of dQ's columns from the keys of both:
 *
 *   producer warp --q_full[s]--> both              warpgroup 1 of both CTAs: --q_empty[s]--> producer warps
 *                 --do_full----> both              both of both CTAs:        --do_empty---->
 *   warpgroup 0   S^T = K Q^T, P                   --p_full-->  warpgroup 1
 *                 dV += P^T dO
 *   warpgroup 1   dP^T = V dO^T, dS, dK += dS^T Q  --ds_full[s]--> both of both CTAs  --ds_empty[s]-->
 *   both          dQ = dS K of the last step, added to memory from registers, when the dQ turn has come
 *   open_turns    --turn_come[s]--> both            both: --dq_added[s]--> end_turns
 *
 * Each CTA loads half of Q and dO, for both CTAs. Above 192 columns there is room for one stage of dO. The next dO
 * comes while dK, S and dQ run.
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
