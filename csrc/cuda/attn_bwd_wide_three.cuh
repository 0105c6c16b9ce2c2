/* Up to 192 columns three warpgroups of attn_bwd_wide_sm90.cu share the work: P and dV, dS and dK, dQ. */
#ifndef FA_ATTN_BWD_WIDE_THREE_CUH
#define FA_ATTN_BWD_WIDE_THREE_CUH

#include "attn_bwd_wide_parts.cuh"

/* Registers of a thread in the warpgroups of P, dS and dQ. An SM has 512 for a thread of each warpgroup. */
constexpr int THREADS = 512, PRODUCER_REGS = 24, DQ_WG_REGS = 88;
constexpr int P_WG_REGS = D_V == 192 ? 208 : 192, DS_WG_REGS = 400 - P_WG_REGS;
static_assert(PRODUCER_REGS + P_WG_REGS + DS_WG_REGS + DQ_WG_REGS <= 512, "setmaxnreg would wait forever");
static_assert(CHUNKS == 3 && DO_STAGES == 2, "the rings have two stages");

/* Steps of 16 columns of K and V that stay in registers, as many as there is room for. They save products the reading
 * of their first operand from shared memory. */
constexpr bool HOLDS = !SCORE && !DROPOUT && !FLEX;
constexpr int K_STEPS_HELD = !HOLDS ? 0 : D_V == 128 ? 12 : 10;
constexpr int V_STEPS_HELD = !HOLDS ? 0 : D_V == 128 ? 8 : D_V == 160 ? 10 : 5;

/* ---- shared memory --------------------------------------------------------------------------------------------- */

constexpr int PAIR_DQ_COLUMNS = HEAD_DIM / 2, PAIR_DQ_REGS = PAIR_DQ_COLUMNS / 2;

/* The operands lie as in attn_bwd_sm90.cu. */
struct shared_memory {
    alignas(1024) element k[KEYS * COLUMNS];
    alignas(1024) element k_other[KEYS * 2 * CHUNK]; /* the other CTA's keys, the columns of this CTA's dQ */
    alignas(1024) element v[KEYS * V_COLUMNS];
    alignas(1024) element q[2][BLOCK_Q * COLUMNS];
    alignas(1024) element dout[2][BLOCK_Q * V_COLUMNS];
    alignas(1024) element ds[2][2][KEYS * BLOCK_Q];   /* [stage][this CTA's keys, the other CTA's]; a row is a key */
    alignas(1024) float4 p[2][BLOCK_Q * KEYS / 4];    /* [stage][register / 4][thread], the weights of dS */
    alignas(16) float lse[2][BLOCK_Q], d[2][BLOCK_Q]; /* come with q */
    /* Arrivals at the barriers:
     *
     *   k_full, v_full, q_full, do_full   one, with TMA's bytes
     *   k_empty                           this CTA's warps that make dQ
     *   v_empty                           this CTA's warps that make dS
     *   q_empty                           the warps of both CTAs that make dS
     *   do_empty                          the warps of both CTAs that make P or dS
     *   p_full                            this CTA's warps that make P
     *   ds_full                           the warps that make dS, with the bytes of the other CTA's dS
     *   ds_empty                          the warps of both CTAs that make dQ
     *   tile_full                         one, of the producer warp
     *   tile_empty                        all twelve consumer warps, produce_dout, open_turns and end_turns
     *   turn_come                         two, open_turns and end_turns
     *   dq_added                          this CTA's warps that make dQ */
    u64 k_full, k_empty, v_full, v_empty;
    u64 q_full[2], q_empty[2], do_full[2], do_empty[2];
    u64 p_full[2], ds_full[2], ds_empty[2];
    u64 tile_full[2], tile_empty[2];
    u64 idx_full, idx_empty; /* the next tile's number, from CTA 0 to CTA 1 */
    u64 turn_come[2], dq_added[2];
    int idx;
    tile tiles[2];
    step_words words;
};
static_assert(sizeof(shared_memory) <= 232448, "an SM has 227 KiB for one CTA");

/* ---- consumers ------------------------------------------------------------------------------------------------- */

/* Issues dQ = dS K for this CTA's columns, from the keys of both CTAs. */
DEVICE void issue_dq_of_pair(float (&dq)[PAIR_DQ_REGS], u32 ds_desc, u32 k_desc, u32 k_other_desc) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; k++) {
        const u32 k_step = matrix_descriptor_bytes(k * 16 % KEYS * ROW_BYTES);
        wgmma<PAIR_DQ_COLUMNS, element>::ss<HIGH, HIGH, 1, 1>(dq, ds_desc + matrix_descriptor_bytes(k * 16 * ROW_BYTES),
                                                              (k * 16 < KEYS ? k_desc : k_other_desc) + k_step, k > 0);
    }
    wgmma_commit_group();
}

constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * COLUMNS * element::BYTES);
constexpr u32 DO_STAGE = matrix_descriptor_bytes(BLOCK_Q * V_COLUMNS * element::BYTES);
constexpr u32 DS_STAGE = matrix_descriptor_bytes(2 * DS_BYTES);

/* The first STEPS steps of 16 columns of K or V, as the first operand of a product in registers. */
template <int STEPS> struct held {
    u32 x[STEPS > 0 ? 4 * STEPS : 1];

    /* Whole warp. Loads this warp's 16 keys of an operand of KEYS keys. */
    DEVICE void load(const element *operand) {
        const int lane = threadIdx.x % 32;
        const u32 row = smem_address(operand) + (threadIdx.x % 128 / 32 * 16 + lane % 16) * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 four[4];
            ldmatrix_x4(four, row + k / 4 * KEYS * ROW_BYTES + ((k % 4 * 2 + lane / 16) ^ lane % 8) * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) x[4 * k + i] = four[i];
        }
        pin(x);
    }
};

/* Issues S^T = K Q^T like issue_scores, with the first steps of K from registers. dP^T = V dO^T is issued alike. */
template <int COLUMNS, bool ADDS, int STEPS>
DEVICE void issue_scores_of_held(float (&s)[S_REGS], const held<STEPS> &kv, u32 kv_desc, u32 q_desc) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) {
        const int chunk = k * 16 / CHUNK, in_chunk = k * 16 % CHUNK * element::BYTES;
        const u32 q_step = q_desc + matrix_descriptor_bytes(chunk * BLOCK_Q * ROW_BYTES + in_chunk);
        if (k < STEPS)
            wgmma<BLOCK_Q, element>::rs_along<HIGH>(s, kv.x + 4 * (k < STEPS ? k : 0), q_step, ADDS || k > 0);
        else
            wgmma<BLOCK_Q, element>::ss<HIGH, HIGH>(
                s, kv_desc + matrix_descriptor_bytes(chunk * KEYS * ROW_BYTES + in_chunk), q_step, ADDS || k > 0);
    }
    wgmma_commit_group();
}

/* Warpgroup 0 computes P and dV. */
DEVICE void consume_p(const params &p, shared_memory &s) {
    const int warp = threadIdx.x / 32 % 4;
    const bool arrives = arrives_for_warp(threadIdx.x % 32);
    const u32 k_desc = matrix_descriptor(smem_address(s.k), 0);
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), 0);
    const u32 do_desc_0 = matrix_descriptor(smem_address(s.dout), BLOCK_Q * ROW_BYTES);
    float dV[DV_REGS];
    held<K_STEPS_HELD> K;
    ring r; /* of steps */
    u32 kv_parity = 0;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        if (uniform(t.kv_tile) < 0) break;
        const tile_walk queries = {uniform(t.queries.begin), uniform(t.queries.end), uniform(t.queries.full_begin),
                                   uniform(t.queries.full_end)};
#pragma unroll
        for (int i = 0; i < DV_REGS; i++) dV[i] = 0;

        if (queries.begin < queries.end) {
            int q_tile = queries.end - 1, head_in_group = 0;
            mbarrier_wait(&s.k_full, kv_parity);
            K.load(s.k);
            pin(dV);
            wgmma_fence();
#pragma unroll 1
            while (q_tile >= queries.begin) {
                u32 P[P_REGS];
                float S[S_REGS], lse[STAT_REGS];
                /* wait Q: S = K Q^T */
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                load_stats(lse, s.lse[r.stage], threadIdx.x % 32);
                issue_scores_of_held<HEAD_DIM, false>(S, K, k_desc, q_desc_0 + r.stage * Q_STAGE);
#if FLEX /* a mask is looked at while S is on its way */
                const step_mods user(p, s, t, r.stage, head_in_group);
#endif
                /* S is there: P, to the other warpgroup too */
                wgmma_wait_group<0>(S);
#if FLEX
                user.exponentiate(S, lse, P, p, t);
#else
                const bool is_masked = is_partial<1>(q_tile, queries.full_begin, queries.full_end);
                const int head = t.first_head + head_in_group;
                exponentiate(S, lse, P, p, t, q_tile, head, is_masked, {p, t, head, q_tile, nullptr});
#endif
                /* P has a place: Q came because dK of the last step but one was there, which was made of the last P. */
#pragma unroll
                for (int i = 0; i < S_REGS; i += 4)
                    s.p[r.stage][i * 32 + threadIdx.x % 128] = make_float4(S[i], S[i + 1], S[i + 2], S[i + 3]);
                __syncwarp();
                if (arrives) mbarrier_arrive(&s.p_full[r.stage]);
                /* wait dO: dV += P^T dO */
                mbarrier_wait(&s.do_full[r.stage], r.parity);
                pin(P);
                issue_update(dV, P, do_desc_0 + r.stage * DO_STAGE);
                /* dV is there: release dO. A release in the next step, behind the wait for Q, is 5 to 8% slower from 4k
                 * on. */
                wgmma_wait_group<0>(dV);
                if (arrives) arrive_in_both(&s.do_empty[r.stage]);
                r.next();
                if (++head_in_group == p.heads_per_tile) head_in_group = 0, q_tile--;
            }
            kv_parity ^= 1;
        }
        store(dV, p.keep_scale, p.dv, t, first_key(t) + 16 * warp, p.d_v);
        __syncwarp();
        if (arrives) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* Warpgroup 1 computes dS and dK. */
DEVICE void consume_ds(const params &p, shared_memory &s) {
    const int warp = threadIdx.x / 32 % 4;
    const bool is_leader = threadIdx.x % 32 == 0, arrives = arrives_for_warp(threadIdx.x % 32);
    const u32 v_desc = matrix_descriptor(smem_address(s.v), 0);
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), BLOCK_Q * ROW_BYTES);
    const u32 do_desc_0 = matrix_descriptor(smem_address(s.dout), 0);
    float dK[KV_REGS];
    held<V_STEPS_HELD> V;
    ring r; /* of steps */
    u32 kv_parity = 0;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        if (uniform(t.kv_tile) < 0) break;
        const int num_steps = uniform((t.queries.end - t.queries.begin) * p.heads_per_tile);
#pragma unroll
        for (int i = 0; i < KV_REGS; i++) dK[i] = 0;
#if FLEX
        sums_of_heads of_heads;
#endif

        if (num_steps > 0) {
            mbarrier_wait(&s.v_full, kv_parity);
            V.load(s.v);
            pin(dK);
            wgmma_fence();
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                u32 dS[P_REGS];
                float W[S_REGS], dP[S_REGS];
                /* dK of the last step is there: release Q. wait Q, with which D comes. wait dO: dP */
                wgmma_wait_group<0>(dK);
                if (arrives && step > 0) arrive_in_both(&s.q_empty[r.stage ^ 1]);
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                start_dp_sum(dP, s.d[r.stage], threadIdx.x % 32);
                mbarrier_wait(&s.do_full[r.stage], r.parity);
                issue_scores_of_held<D_V, STARTS_WITH_D>(dP, V, v_desc, do_desc_0 + r.stage * DO_STAGE);
#if FLEX
                const int head_in_group = place_of_step(p, 0, step).head_in_group;
                const step_mods user(p, s, t, r.stage, head_in_group, KEEPS_SCORES);
                sums_of_step sums;
#endif
                /* wait P; dP is there: release dO, compute dS */
                mbarrier_wait(&s.p_full[r.stage], r.parity);
#pragma unroll
                for (int i = 0; i < S_REGS; i += 4) {
                    const float4 x = s.p[r.stage][i * 32 + threadIdx.x % 128];
                    W[i] = x.x, W[i + 1] = x.y, W[i + 2] = x.z, W[i + 3] = x.w;
                }
                wgmma_wait_group<0>(dP);
                if (arrives) arrive_in_both(&s.do_empty[r.stage]);
#if FLEX
                user.differentiate(dP, dS, s.d[r.stage], s.lse[r.stage], p, t, sums, W);
#else
                differentiate(dP, dS, s.d[r.stage], p.keep_scale, [&](int i) { return W[i]; }, {p, t, 0, 0, nullptr});
#endif
                mbarrier_wait(&s.ds_empty[r.stage], r.parity ^ 1);
                unsigned char *own = (unsigned char *)s.ds[r.stage][0] + warp * (16 * ROW_BYTES);
                store_ds_rows(dS, smem_address(own));
                /* dK += dS^T Q; dS to both CTAs */
                pin(dS);
                issue_update(dK, dS, q_desc_0 + r.stage * Q_STAGE);
                fence_proxy_async();
                __syncwarp();
                if (is_leader) {
                    cp_async_bulk_send(own + DS_BYTES, own, 16 * ROW_BYTES, &s.ds_full[r.stage], cluster_rank() ^ 1);
                    mbarrier_arrive_expect_tx(&s.ds_full[r.stage], 16 * ROW_BYTES);
                } else if (arrives) {
                    mbarrier_arrive(&s.ds_full[r.stage]);
                }
#if FLEX /* gradients of captures, while dK runs */
                user.give(sums, p, t, head_in_group, of_heads);
#endif
                r.next();
            }
            wgmma_wait_group<0>(dK);
            if (arrives) arrive_in_both(&s.q_empty[r.stage ^ 1]), mbarrier_arrive(&s.v_empty);
#if FLEX
            give_sums_of_heads(p, t, of_heads);
#endif
            kv_parity ^= 1;
        }
        store(dK, p.scale, p.dk, t, first_key(t) + 16 * warp, p.d);
        __syncwarp();
        if (arrives) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* Warpgroup 2 computes dQ and adds it to memory. */
DEVICE void consume_dq(const params &p, shared_memory &s) {
    const bool arrives = arrives_for_warp(threadIdx.x % 32);
    const u32 ds_desc = matrix_descriptor(smem_address(s.ds), 0);
    const u32 k_desc = matrix_descriptor(smem_address(s.k) + cluster_rank() * (KEYS * ROW_BYTES),
                                         (dq_rest_column() / CHUNK - (int)cluster_rank()) * (KEYS * ROW_BYTES) +
                                             dq_rest_column() % CHUNK * element::BYTES);
    const u32 k_other_desc =
        matrix_descriptor(smem_address(s.k_other), KEYS * ROW_BYTES + dq_rest_column() % CHUNK * element::BYTES);
    ring r; /* of steps */
    u32 kv_parity = 0;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        if (uniform(t.kv_tile) < 0) break;
        const int q_begin = uniform(t.queries.begin), q_end = uniform(t.queries.end);
        if (q_begin < q_end) {
            int q_tile = q_end - 1, head_in_group = 0;
            mbarrier_wait(&s.k_full, kv_parity); /* the other warpgroup's wait does not serve here */
#pragma unroll 1
            while (q_tile >= q_begin) {
                float dQ[PAIR_DQ_REGS];
                mbarrier_wait(&s.ds_full[r.stage], r.parity);
                issue_dq_of_pair(dQ, ds_desc + r.stage * DS_STAGE, k_desc, k_other_desc);
                wgmma_wait_group<0>(dQ);
                const int i = q_tile, head = head_in_group;
                if (++head_in_group == p.heads_per_tile) head_in_group = 0, q_tile--;
                if (arrives) {
                    arrive_in_both(&s.ds_empty[r.stage]);
                    if (q_tile < q_begin) mbarrier_arrive(&s.k_empty); /* nothing of the tile is read any more */
                }
                add_dq(dQ, p, s, t, i, head, r, cluster_rank() * (SLAB_FLOATS / 2), cluster_rank() * CHUNK,
                       dq_rest_column());
                r.next();
            }
            kv_parity ^= 1;
        }
        __syncwarp();
        if (arrives) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* One thread. Initialises the barriers whose counts depend on the warpgroups. */
DEVICE void init_barriers(shared_memory &s) {
    mbarrier_init(&s.k_empty, of_warps(4)), mbarrier_init(&s.v_empty, of_warps(4));
    for (int i = 0; i < 2; i++) {
        mbarrier_init(&s.q_empty[i], of_warps(CTAS * 4)), mbarrier_init(&s.do_empty[i], of_warps(CTAS * 8));
        mbarrier_init(&s.p_full[i], of_warps(4));
        mbarrier_init(&s.ds_full[i], of_warps(4)), mbarrier_init(&s.ds_empty[i], of_warps(CTAS * 4));
        mbarrier_init(&s.dq_added[i], of_warps(4)), mbarrier_init(&s.tile_empty[i], of_warps(12 + 3));
    }
}

/* Warpgroup wg from 1 on. */
DEVICE void consume(const params &p, shared_memory &s, int wg) {
    if (wg == 1) {
        setmaxnreg_inc<P_WG_REGS>();
        consume_p(p, s);
    } else if (wg == 2) {
        setmaxnreg_inc<DS_WG_REGS>();
        consume_ds(p, s);
    } else {
        setmaxnreg_dec<DQ_WG_REGS>();
        consume_dq(p, s);
    }
}

#endif
