/* Attention backward on Hopper for heads of more than 128 columns: the formulas and the frame of attn_bwd_sm90.cu.
 *
 * dK and dV of 64 keys take 256 registers of a warpgroup's threads, more than there are. So the warpgroups share the 64
 * keys of a tile and split the work: one makes P and owns dV, the other makes dS and owns dK. P passes through shared
 * memory as it lies in registers; dS goes there for dQ, of which each makes half of the columns:
 *
 *   producer warp --q_full[s]--> both         warpgroup 1, when dK is there: --q_empty[s]--> producer warp
 *                 --do_full[s]-> both         both                           --do_empty[s]->
 *   warpgroup 0   S^T = K Q^T, P              --p_full[s]-->  warpgroup 1    --p_empty[s]-->
 *                 dV += P^T dO
 *   warpgroup 1   dP^T = V dO^T, dS, dK += dS^T Q   --ds_full[s]--> both     --ds_empty[s]-->
 *   both          dQ = dS K, added to memory from registers
 *
 * There is no shared memory left for dQ. 64 keys a tile mean 4 bytes added to dQ for 640 operations: the L2's rate of
 * additions, 3.3 TB/s, limits this kernel to 450 TFLOPS. */
#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(BLOCK_KV)
#error "tiles: HEAD_DIM columns, BLOCK_Q query rows, BLOCK_KV keys"
#endif
#if !defined(BF16) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE) || \
    !defined(DROPOUT) || !defined(DETERMINISTIC)
#error "variant: BF16 or fp16; CAUSAL, LOCAL, VARLEN, SCORE softcap and ALiBi, DROPOUT, DETERMINISTIC order: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_wide_sm90
#endif

#include "attn_bwd_scores.cuh"

constexpr int THREADS = 384, PRODUCER_REGS = 24, CONSUMER_REGS = 240;
static_assert(BLOCK_KV == 64 && BLOCK_Q == 64, "one warpgroup's product, and P and dS small enough to pass on");

/* ---- shared memory --------------------------------------------------------------------------------------------- */

/* Operands as in attn_bwd_sm90.cu. */
struct shared_memory {
    alignas(1024) u16 k[BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 v[BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 q[2][BLOCK_Q * HEAD_DIM];
    alignas(1024) u16 dout[2][BLOCK_Q * HEAD_DIM];
    alignas(1024) u16 ds[2][BLOCK_Q * BLOCK_KV];
    alignas(1024) uint4 p[2][BLOCK_Q * BLOCK_KV / 8]; /* [register / 4][thread], what dS is weighted with */
    alignas(16) float lse[2][BLOCK_Q];                /* comes with q */
    alignas(16) float d[2][BLOCK_Q];                  /* comes with dout */
    /* Arrivals. full: one, with TMA's bytes; p_full, ds_full: one for each warp of the warpgroup that writes. q_empty,
     * v_empty, p_empty: warps of warpgroup 1; the other empty: all eight. */
    u64 k_full, k_empty, v_full, v_empty;
    u64 q_full[2], q_empty[2], do_full[2], do_empty[2];
    u64 p_full[2], p_empty[2], ds_full[2], ds_empty[2];
    u64 tile_full[2], tile_empty[2];
    tile tiles[2];
};
static_assert(sizeof(shared_memory) <= 232448, "an SM has 227 KiB for one CTA");

/* ---- dQ -------------------------------------------------------------------------------------------------------- */

enum { BAR_TURN = 1 }; /* named barriers 1 and 2: the four warps of a warpgroup, around their additions in turn */

/* Adds dQ of query tile i, this warpgroup's half of the columns. Whole warpgroup. */
DEVICE void add_dq(const float (&dq)[DQ_REGS], const params &p, const tile &t, int head_in_group, int i, int wg) {
    const long long slab = (long long)(t.slab_head + head_in_group) * p.num_slabs + t.slab + i;
    float *dst = p.dq_sums + (slab * 2 + wg) * DQ_FLOATS + threadIdx.x % 128 * 4;
    u32 *turn = p.turns + slab * 2 + wg;
    if (DETERMINISTIC) {
        if (threadIdx.x % 128 == 0) wait_turn(turn, turn_of(p, t, i));
        bar_sync(BAR_TURN + wg, 128);
    }
#pragma unroll
    for (int x = 0; x < DQ_REGS; x += 4) red_add_x4(dst + x * 128, dq[x], dq[x + 1], dq[x + 2], dq[x + 3]);
    if (DETERMINISTIC) {
        __threadfence();
        bar_sync(BAR_TURN + wg, 128);
        if (threadIdx.x % 128 == 0) end_turn(turn);
    }
}

/* ---- consumers ------------------------------------------------------------------------------------------------- */

constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * HEAD_DIM * 2);
constexpr u32 DS_STAGE = matrix_descriptor_bytes(BLOCK_Q * BLOCK_KV * 2);

DEVICE u32 k_descriptor_of_dq(const shared_memory &s, int wg) {
    return matrix_descriptor(smem_address(s.k) + dq_column(wg) / CHUNK * BLOCK_KV * ROW_BYTES, BLOCK_KV * ROW_BYTES);
}

/* Warpgroup 0: P and dV. */
DEVICE void consume_p(const params &p, shared_memory &s) {
    const int warp = threadIdx.x / 32 % 4;
    const bool is_leader = threadIdx.x % 32 == 0;
    const u32 k_desc = matrix_descriptor(smem_address(s.k), 0), k_dq_desc = k_descriptor_of_dq(s, 0);
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), 0);
    const u32 do_desc_0 = matrix_descriptor(smem_address(s.dout), BLOCK_Q * ROW_BYTES);
    const u32 ds_desc_0 = matrix_descriptor(smem_address(s.ds), 0);
    float dV[KV_REGS];
    ring r; /* of steps */
    u32 kv_parity = 0;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        if (uniform(t.kv_tile) < 0) break;
        const int q_begin = uniform(t.q_begin), q_end = uniform(t.q_end);
        const int full_begin = uniform(t.full_begin), full_end = uniform(t.full_end);
        const int num_steps = (q_end - q_begin) * p.heads_per_kv;
#pragma unroll
        for (int i = 0; i < KV_REGS; i++) dV[i] = 0;

        if (num_steps > 0) {
            int q_tile = q_begin, head_in_group = 0, last_q_tile = 0, last_head = 0;
            mbarrier_wait(&s.k_full, kv_parity);
            pin(dV);
            wgmma_fence();
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const int last = r.stage ^ 1;
                const u32 last_parity = r.stage ? r.parity : r.parity ^ 1;
                u32 P[P_REGS], W[WEIGHTED ? P_REGS : 1];
                float S[S_REGS], dQ[DQ_REGS], lse[STAT_REGS];
                /* wait Q: S = K Q^T, P */
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                load_stats(lse, s.lse[r.stage]);
                issue_scores(S, k_desc, q_desc_0 + r.stage * Q_STAGE);
                wgmma_wait_group<0>(S);
                const bool is_masked = q_tile < full_begin || q_tile >= full_end;
                exponentiate(S, lse, P, W, p, t, q_tile, t.head_kv * p.heads_per_kv + head_in_group, is_masked);
                /* P to the other warpgroup */
                mbarrier_wait(&s.p_empty[r.stage], r.parity ^ 1);
                const u32 *weights = WEIGHTED ? W : P;
#pragma unroll
                for (int i = 0; i < P_REGS; i += 4)
                    s.p[r.stage][i * 32 + threadIdx.x % 128] =
                        make_uint4(weights[i], weights[i + 1], weights[i + 2], weights[i + 3]);
                __syncwarp();
                if (is_leader) mbarrier_arrive(&s.p_full[r.stage]);
                /* wait dO: dV += P^T dO; wait dS: dQ of the last step (the first one's is dropped) */
                mbarrier_wait(&s.do_full[r.stage], r.parity);
                pin(P);
                issue_update(dV, P, do_desc_0 + r.stage * Q_STAGE);
                if (step > 0) mbarrier_wait(&s.ds_full[last], last_parity);
                issue_dq(dQ, ds_desc_0 + last * DS_STAGE, k_dq_desc);
                /* dV is there: release dO; dQ is there: release dS */
                wgmma_wait_group<1>(dV);
                if (is_leader) mbarrier_arrive(&s.do_empty[r.stage]);
                wgmma_wait_group<0>(dQ);
                if (step > 0) {
                    if (is_leader) mbarrier_arrive(&s.ds_empty[last]);
                    add_dq(dQ, p, t, last_head, last_q_tile, 0);
                }
                r.next();
                last_q_tile = q_tile, last_head = head_in_group;
                if (++q_tile == q_end) q_tile = q_begin, head_in_group++;
            }

            /* The last step's dQ; nothing is read any more */
            const int last = r.stage ^ 1;
            const u32 last_parity = r.stage ? r.parity : r.parity ^ 1;
            float dQ[DQ_REGS];
            mbarrier_wait(&s.ds_full[last], last_parity);
            issue_dq(dQ, ds_desc_0 + last * DS_STAGE, k_dq_desc);
            wgmma_wait_group<0>(dQ);
            if (is_leader) mbarrier_arrive(&s.ds_empty[last]), mbarrier_arrive(&s.k_empty);
            add_dq(dQ, p, t, last_head, last_q_tile, 0);
            pin(dV);
            kv_parity ^= 1;
        }
        store(dV, p.keep_scale, p.dv, t, t.kv_tile * BLOCK_KV + 16 * warp, p.d);
        __syncwarp();
        if (is_leader) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* Warpgroup 1: dS and dK. */
DEVICE void consume_ds(const params &p, shared_memory &s) {
    const int warp = threadIdx.x / 32 % 4;
    const bool is_leader = threadIdx.x % 32 == 0;
    const u32 v_desc = matrix_descriptor(smem_address(s.v), 0), k_dq_desc = k_descriptor_of_dq(s, 1);
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), BLOCK_Q * ROW_BYTES);
    const u32 do_desc_0 = matrix_descriptor(smem_address(s.dout), 0);
    const u32 ds_desc_0 = matrix_descriptor(smem_address(s.ds), 0);
    float dK[KV_REGS];
    ring r; /* of steps */
    u32 kv_parity = 0;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        if (uniform(t.kv_tile) < 0) break;
        const int q_begin = uniform(t.q_begin), q_end = uniform(t.q_end);
        const int num_steps = (q_end - q_begin) * p.heads_per_kv;
#pragma unroll
        for (int i = 0; i < KV_REGS; i++) dK[i] = 0;

        if (num_steps > 0) {
            int q_tile = q_begin, head_in_group = 0;
            mbarrier_wait(&s.k_full, kv_parity); /* read for dQ; the other warpgroup's wait is not this one's */
            mbarrier_wait(&s.v_full, kv_parity);
            pin(dK);
            wgmma_fence();
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                u32 W[P_REGS], dS[P_REGS];
                float dP[S_REGS], dQ[DQ_REGS], d[STAT_REGS];
                /* wait dO: dP = V dO^T */
                mbarrier_wait(&s.do_full[r.stage], r.parity);
                load_stats(d, s.d[r.stage]);
                issue_scores(dP, v_desc, do_desc_0 + r.stage * Q_STAGE);
                wgmma_wait_group<0>(dP);
                if (is_leader) mbarrier_arrive(&s.do_empty[r.stage]);
                /* wait P: dS */
                mbarrier_wait(&s.p_full[r.stage], r.parity);
#pragma unroll
                for (int i = 0; i < P_REGS; i += 4) {
                    const uint4 x = s.p[r.stage][i * 32 + threadIdx.x % 128];
                    W[i] = x.x, W[i + 1] = x.y, W[i + 2] = x.z, W[i + 3] = x.w;
                }
                differentiate(dP, d, W, dS, p.keep_scale);
                __syncwarp();
                if (is_leader) mbarrier_arrive(&s.p_empty[r.stage]);
                mbarrier_wait(&s.ds_empty[r.stage], r.parity ^ 1);
                store_ds(dS, smem_address(s.ds[r.stage]));
                /* dK += dS^T Q; dS to both */
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                pin(dS);
                issue_update(dK, dS, q_desc_0 + r.stage * Q_STAGE);
                fence_proxy_async();
                __syncwarp();
                if (is_leader) mbarrier_arrive(&s.ds_full[r.stage]);
                mbarrier_wait(&s.ds_full[r.stage], r.parity);
                issue_dq(dQ, ds_desc_0 + r.stage * DS_STAGE, k_dq_desc);
                /* dK is there: release Q; dQ is there: release dS */
                wgmma_wait_group<1>(dK);
                if (is_leader) mbarrier_arrive(&s.q_empty[r.stage]);
                wgmma_wait_group<0>(dQ);
                if (is_leader) mbarrier_arrive(&s.ds_empty[r.stage]);
                add_dq(dQ, p, t, head_in_group, q_tile, 1);
                r.next();
                if (++q_tile == q_end) q_tile = q_begin, head_in_group++;
            }
            if (is_leader) mbarrier_arrive(&s.k_empty), mbarrier_arrive(&s.v_empty);
            pin(dK);
            kv_parity ^= 1;
        }
        store(dK, p.scale, p.dk, t, t.kv_tile * BLOCK_KV + 16 * warp, p.d);
        __syncwarp();
        if (is_leader) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ params p) {
    /* The dynamic shared memory starts at 1024, as in attn_bwd_sm90.cu. */
    extern __shared__ __align__(1024) unsigned char smem[];
    if (smem_address(smem) != SHARED_BASE) __trap();
    shared_memory &s = *(shared_memory *)__cvta_shared_to_generic(SHARED_BASE);
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q), prefetch_tensormap(&p.k), prefetch_tensormap(&p.v), prefetch_tensormap(&p.dout);
        mbarrier_init(&s.k_full, 1), mbarrier_init(&s.k_empty, 8);
        mbarrier_init(&s.v_full, 1), mbarrier_init(&s.v_empty, 4);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 4);
            mbarrier_init(&s.do_full[i], 1), mbarrier_init(&s.do_empty[i], 8);
            mbarrier_init(&s.p_full[i], 4), mbarrier_init(&s.p_empty[i], 4);
            mbarrier_init(&s.ds_full[i], 4), mbarrier_init(&s.ds_empty[i], 8);
            mbarrier_init(&s.tile_full[i], 1), mbarrier_init(&s.tile_empty[i], 8);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (warp == 0) produce(p, s);
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        if (wg == 1)
            consume_p(p, s);
        else
            consume_ds(p, s);
    }
}
