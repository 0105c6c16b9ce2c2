/* Attention backward on Hopper, between attn_bwd_prep and attn_bwd_convert:
 *
 *   P = exp(scale Q K^T + mask - lse)    dP = dO V^T    dS = P (dP - D)    D = rowsum(dO O), from attn_bwd_prep
 *   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K, which the key tiles add up in fp32
 *
 *   q, dO [b, len_q, h, d]    k, v, dK, dV [b, len_kv, h_kv, d]    lse, D: stats    sums of dQ: dq_sums, for attn_bwd_convert
 *
 * One CTA per SM stays for the whole launch. It takes tiles of BLOCK_KV keys of one key head, one after the other, and
 * walks over the query tiles that see them, through all query heads of the group: dK and dV stay in registers. Two
 * warpgroups own 64 keys each. They compute S and dP transposed, keys down, queries across, because then P and dS lie in
 * registers as the products dV and dK take them; only dS goes through shared memory, for dQ:
 *
 *   producer warp --k_full, v_full--> both warpgroups  --k_empty, v_empty--> producer warp
 *                 --q_full[s]-->      S^T = K Q^T, dK += dS^T Q             --q_empty[s]-->
 *                 --do_full[s]-->     dP^T = V dO^T, dV += P^T dO           --do_empty[s]-->
 *   warpgroup     --ds_full[s]-->     both: dQ = dS K                       --ds_empty[s]-->
 *                 --dq_full[w]-->     writer warp w: adds dQ to memory      --dq_empty[w]-->
 *
 * dQ of a query tile is computed one step later, when the other warpgroup's dS has long been there: nobody waits for a
 * barrier of both, and the warpgroups drift apart until the tensor cores always have a product to run:
 *
 *   issue S            dK of the last step is done: release Q
 *   issue dQ           of the last step; P = exp2 while it runs
 *   dQ to the writer   issue dP, dV; dS while dV runs
 *   dS to both         issue dK
 *
 * Specification: cpu/reference.c. Limits and measurements: README.md. */
#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(BLOCK_KV)
#error "tiles: HEAD_DIM columns, BLOCK_Q query rows, BLOCK_KV keys"
#endif
#if !defined(BF16) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE) || \
    !defined(DROPOUT) || !defined(DETERMINISTIC)
#error "variant: BF16 or fp16; CAUSAL, LOCAL, VARLEN, SCORE softcap and ALiBi, DROPOUT, DETERMINISTIC order: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_sm90
#endif

#include "attn_bwd_scores.cuh"

constexpr int THREADS = 384, PRODUCER_REGS = 24, CONSUMER_REGS = 240;
static_assert(BLOCK_KV == 128, "two warpgroups of 64 keys");
static_assert(BLOCK_Q == 64 || BLOCK_Q == 128, "dQ is cut into two halves of 64 rows or of half the columns");
static_assert(HEAD_DIM * 2 + BLOCK_Q <= 384, "dK, dV, S and dQ take (2 HEAD_DIM + 2 BLOCK_Q) / 2 of 232 registers");

/* ---- shared memory --------------------------------------------------------------------------------------------- */

/* Operands are stored as TMA writes them and wgmma reads them: chunks of CHUNK columns, rows of ROW_BYTES, the 16-byte
 * pieces of a row swizzled by the row's number. Each chunk starts at a multiple of 1024 bytes, the swizzle's period. */
struct shared_memory {
    alignas(1024) u16 k[BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 v[BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 q[2][BLOCK_Q * HEAD_DIM];
    alignas(1024) u16 dout[2][BLOCK_Q * HEAD_DIM];
    alignas(1024) u16 ds[2][BLOCK_Q * BLOCK_KV]; /* chunks of 64 keys, one from each warpgroup */
    alignas(1024) float dq[2][DQ_FLOATS];        /* one of each warpgroup */
    alignas(16) float lse[2][BLOCK_Q];           /* comes with q */
    alignas(16) float d[2][BLOCK_Q];             /* comes with dout */
    /* Arrivals. full: one, with TMA's bytes; ds_full: one for each consumer warp; dq_full: one for each warp of the
     * warpgroup. empty: one for each consumer warp; dq_empty: the writer's; tile_empty: consumer warps and writers. */
    u64 k_full, k_empty, v_full, v_empty;
    u64 q_full[2], q_empty[2], do_full[2], do_empty[2];
    u64 ds_full[2], ds_empty[2];
    u64 dq_full[2], dq_empty[2];
    u64 tile_full[2], tile_empty[2];
    tile tiles[2];
};
static_assert(sizeof(shared_memory) <= 232448, "an SM has 227 KiB for one CTA");

/* ---- writers of dQ --------------------------------------------------------------------------------------------- */

/* One warp for each warpgroup. */
DEVICE void write_dq(const params &p, shared_memory &s, const int wg) {
    const bool is_leader = threadIdx.x % 32 == 0;
    u32 parity = 0;
    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        if (t.kv_tile < 0) break;
        if (is_leader) {
#pragma unroll 1
            for (int g = 0; g < p.heads_per_kv; g++) {
                const long long slab = (long long)(t.slab_head + g) * p.num_slabs + t.slab;
#pragma unroll 1
                for (int i = t.q_begin; i < t.q_end; i++) {
                    u32 *turn = p.turns + (slab + i) * 2 + wg;
                    float *sums = p.dq_sums + ((slab + i) * 2 + wg) * DQ_FLOATS;
                    if (DETERMINISTIC) wait_turn(turn, turn_of(p, t, i));
                    mbarrier_wait(&s.dq_full[wg], parity);
                    parity ^= 1;
                    fence_proxy_async(); /* for the warpgroup's stores: there it would stand in the way, 2% */
                    cp_reduce_async_bulk_add(sums, s.dq[wg], DQ_FLOATS * 4);
                    cp_async_bulk_commit_group();
                    cp_async_bulk_wait_all_read();
                    mbarrier_arrive(&s.dq_empty[wg]);
                    if (DETERMINISTIC) {
                        cp_async_bulk_wait_all();
                        end_turn(turn);
                    }
                }
            }
            mbarrier_arrive(&s.tile_empty[tr.stage]);
        }
        __syncwarp();
    }
    if (is_leader) cp_async_bulk_wait_all();
}

/* ---- consumers ------------------------------------------------------------------------------------------------- */

/* dQ to the writer warp: 16 bytes of every thread side by side. */
DEVICE void store_dq(const float (&dq)[DQ_REGS], float *dst) {
#pragma unroll
    for (int i = 0; i < DQ_REGS / 4; i++)
        *(float4 *)(dst + i * 512 + threadIdx.x % 128 * 4) =
            make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
}

/* One warpgroup. */
DEVICE void consume(const params &p, shared_memory &s, const int wg) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool is_leader = lane == 0;
    /* One address serves both ways of reading an operand: along the row the leading offset is not used. */
    const u32 k_desc = matrix_descriptor(smem_address(s.k) + wg * 64 * ROW_BYTES, 0);
    const u32 v_desc = matrix_descriptor(smem_address(s.v) + wg * 64 * ROW_BYTES, 0);
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), BLOCK_Q * ROW_BYTES);
    const u32 do_desc_0 = matrix_descriptor(smem_address(s.dout), BLOCK_Q * ROW_BYTES);
    const u32 ds_desc_0 = matrix_descriptor(smem_address(s.ds) + dq_row(wg) * ROW_BYTES, 0);
    const u32 k_dq_desc =
        matrix_descriptor(smem_address(s.k) + dq_column(wg) / CHUNK * BLOCK_KV * ROW_BYTES, BLOCK_KV * ROW_BYTES);
    constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * HEAD_DIM * 2);
    constexpr u32 DS_STAGE = matrix_descriptor_bytes(BLOCK_Q * BLOCK_KV * 2);

    float dK[KV_REGS], dV[KV_REGS];
    ring r; /* of steps */
    u32 kv_parity = 0, dq_parity = 1;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        const int kv_tile = uniform(t.kv_tile);
        if (kv_tile < 0) break;
        const int q_begin = uniform(t.q_begin), q_end = uniform(t.q_end);
        const int full_begin = uniform(t.full_begin), full_end = uniform(t.full_end);
        const int num_steps = (q_end - q_begin) * p.heads_per_kv;
#pragma unroll
        for (int i = 0; i < KV_REGS; i++) dK[i] = dV[i] = 0;

        if (num_steps > 0) {
            int q_tile = q_begin, head = t.head_kv * p.heads_per_kv;
            mbarrier_wait(&s.k_full, kv_parity);
            pin(dK), pin(dV);
            wgmma_fence();
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const int last = r.stage ^ 1;
                const u32 last_parity = r.stage ? r.parity : r.parity ^ 1;
                u32 P[P_REGS], W[WEIGHTED ? P_REGS : 1], dS[P_REGS];
                float S[S_REGS], dQ[DQ_REGS], dP[S_REGS], lse[STAT_REGS], d[STAT_REGS];

                /* wait Q: S = K Q^T */
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                load_stats(lse, s.lse[r.stage]);
                issue_scores(S, k_desc, q_desc_0 + r.stage * Q_STAGE);
                /* dK of the last step is there: release its Q */
                wgmma_wait_group<1>(dK);
                if (is_leader && step > 0) mbarrier_arrive(&s.q_empty[last]);
                /* wait dS: dQ of the last step. NOTE: the first step computes one of what lies in dS and drops it. A
                 * branch around the products, or a first step of its own, and ptxas runs them one by one (C7512). */
                if (step > 0) mbarrier_wait(&s.ds_full[last], last_parity);
                issue_dq(dQ, ds_desc_0 + last * DS_STAGE, k_dq_desc);
                /* S is there: P */
                wgmma_wait_group<1>(S);
                const bool is_masked = q_tile < full_begin || q_tile >= full_end;
                exponentiate(S, lse, P, W, p, t, q_tile, head, is_masked);
                pin(P); /* not later: dQ runs now */
                /* wait dO; dQ is there: release dS, hand dQ over */
                mbarrier_wait(&s.do_full[r.stage], r.parity);
                load_stats(d, s.d[r.stage]);
                wgmma_wait_group<0>(dQ);
                if (step > 0) {
                    if (is_leader) mbarrier_arrive(&s.ds_empty[last]);
                    mbarrier_wait(&s.dq_empty[wg], dq_parity);
                    dq_parity ^= 1;
                    store_dq(dQ, s.dq[wg]);
                } else {
                    mbarrier_wait(&s.v_full, kv_parity);
                }
                /* dP = V dO^T, dV += P^T dO */
                issue_scores(dP, v_desc, do_desc_0 + r.stage * Q_STAGE);
                issue_update(dV, P, do_desc_0 + r.stage * Q_STAGE);
                __syncwarp();
                if (is_leader && step > 0) mbarrier_arrive(&s.dq_full[wg]);
                /* dP is there: dS */
                wgmma_wait_group<1>(dP);
                differentiate(dP, d, WEIGHTED ? W : P, dS, p.keep_scale);
                mbarrier_wait(&s.ds_empty[r.stage], r.parity ^ 1);
                store_ds(dS, smem_address(s.ds[r.stage]) + wg * BLOCK_Q * ROW_BYTES);
                /* dK += dS^T Q; dS to both */
                issue_update(dK, dS, q_desc_0 + r.stage * Q_STAGE);
                fence_proxy_async();
                __syncwarp();
                if (is_leader) mbarrier_arrive(&s.ds_full[r.stage]);
                /* dV is there: release dO */
                wgmma_wait_group<1>(dV);
                if (is_leader) mbarrier_arrive(&s.do_empty[r.stage]);

                r.next();
                if (++q_tile == q_end) q_tile = q_begin, head++;
            }

            /* The last step's dQ; nothing is read any more */
            const int last = r.stage ^ 1;
            const u32 last_parity = r.stage ? r.parity : r.parity ^ 1;
            float dQ[DQ_REGS];
            wgmma_wait_group<0>(dK);
            if (is_leader) mbarrier_arrive(&s.q_empty[last]), mbarrier_arrive(&s.v_empty);
            mbarrier_wait(&s.ds_full[last], last_parity);
            issue_dq(dQ, ds_desc_0 + last * DS_STAGE, k_dq_desc);
            wgmma_wait_group<0>(dQ);
            if (is_leader) mbarrier_arrive(&s.ds_empty[last]), mbarrier_arrive(&s.k_empty);
            mbarrier_wait(&s.dq_empty[wg], dq_parity);
            dq_parity ^= 1;
            store_dq(dQ, s.dq[wg]);
            __syncwarp();
            if (is_leader) mbarrier_arrive(&s.dq_full[wg]);
            pin(dK), pin(dV);
            kv_parity ^= 1;
        }

        const int key = t.kv_tile * BLOCK_KV + 64 * wg + 16 * warp; /* the warp's first */
        store(dK, p.scale, p.dk, t, key, p.d);
        store(dV, p.keep_scale, p.dv, t, key, p.d);
        __syncwarp();
        if (is_leader) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ params p) {
    /* There is no static shared memory, so the dynamic one starts at 1024, as its alignment asks. Said as a number, every
     * address is a constant, which saves the producer's registers. */
    extern __shared__ __align__(1024) unsigned char smem[];
    if (smem_address(smem) != SHARED_BASE) __trap();
    shared_memory &s = *(shared_memory *)__cvta_shared_to_generic(SHARED_BASE);
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q), prefetch_tensormap(&p.k), prefetch_tensormap(&p.v), prefetch_tensormap(&p.dout);
        mbarrier_init(&s.k_full, 1), mbarrier_init(&s.k_empty, 8);
        mbarrier_init(&s.v_full, 1), mbarrier_init(&s.v_empty, 8);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 8);
            mbarrier_init(&s.do_full[i], 1), mbarrier_init(&s.do_empty[i], 8);
            mbarrier_init(&s.ds_full[i], 8), mbarrier_init(&s.ds_empty[i], 8);
            mbarrier_init(&s.dq_full[i], 4), mbarrier_init(&s.dq_empty[i], 1);
            mbarrier_init(&s.tile_full[i], 1), mbarrier_init(&s.tile_empty[i], 8 + 2);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (warp == 0) produce(p, s);
        if (warp == 1 || warp == 2) write_dq(p, s, warp - 1);
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        consume(p, s, wg - 1);
    }
}
