/* Above 192 columns two warpgroups of attn_bwd_wide_sm90.cu share the work: P and dV, dS and dK, and half of the CTA's
 * dQ each. Three warpgroups have too few registers for sums of 256 columns, and are 9% slower. */
#ifndef FA_ATTN_BWD_WIDE_TWO_CUH
#define FA_ATTN_BWD_WIDE_TWO_CUH

#include "attn_bwd_wide_parts.cuh"

constexpr int THREADS = 384, PRODUCER_REGS = 24, CONSUMER_REGS = 240;
static_assert(CHUNKS == 4 && DO_STAGES == 1, "each of the four warpgroups makes one chunk of dQ's columns");

/* ---- shared memory --------------------------------------------------------------------------------------------- */

constexpr int PAIR_DQ_REGS = CHUNK / 2, WARPS = 8;

/* The operands lie as in attn_bwd_sm90.cu. */
struct shared_memory {
    alignas(1024) element k[KEYS * COLUMNS];
    alignas(1024) element k_other[KEYS * 2 * CHUNK]; /* the other CTA's keys, the columns of this CTA's dQ */
    alignas(1024) element v[KEYS * V_COLUMNS];
    alignas(1024) element q[2][BLOCK_Q * COLUMNS];
    alignas(1024) element dout[DO_STAGES][BLOCK_Q * V_COLUMNS];
    alignas(1024) element ds[2][2][KEYS * BLOCK_Q];   /* [stage][this CTA's keys, the other CTA's]; a row is a key */
    alignas(1024) float4 p[BLOCK_Q * KEYS / 4];       /* [register / 4][thread], the weights of dS */
    alignas(16) float lse[2][BLOCK_Q], d[2][BLOCK_Q]; /* come with q */
    /* Arrivals at the barriers:
     *
     *   k_full, v_full, q_full, do_full   one, with TMA's bytes
     *   k_empty, v_empty                  this CTA's warps that read K or V
     *   q_empty, do_empty, ds_empty       the warps of both CTAs that read the stage
     *   p_full                            the warps of warpgroup 0
     *   ds_full                           the warps of warpgroup 1, with the bytes of the other CTA's dS
     *   tile_full                         one, of the producer warp
     *   tile_empty                        all eight consumer warps, produce_dout, open_turns and end_turns
     *   turn_come                         two, open_turns and end_turns
     *   dq_added                          all eight consumer warps */
    u64 k_full, k_empty, v_full, v_empty;
    u64 q_full[2], q_empty[2], do_full[DO_STAGES], do_empty[DO_STAGES];
    u64 p_full, ds_full[2], ds_empty[2];
    u64 tile_full[2], tile_empty[2];
    u64 idx_full, idx_empty; /* the next tile's number, from CTA 0 to CTA 1 */
    u64 turn_come[2], dq_added[2];
    int idx;
    tile tiles[2];
    step_words words;
};
static_assert(sizeof(shared_memory) <= 232448, "an SM has 227 KiB for one CTA");

/* ---- consumers ------------------------------------------------------------------------------------------------- */

/* The chunk of dQ's columns that warpgroup wg computes. */
DEVICE int dq_chunk(int wg) { return cluster_rank() + 2 * wg; }

/* Issues dQ = dS K for one chunk of columns. */
DEVICE void issue_dq_of_pair(float (&dq)[PAIR_DQ_REGS], u32 ds_desc, u32 k_desc, u32 k_other_desc) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; k++) {
        const u32 k_step = matrix_descriptor_bytes(k * 16 % KEYS * ROW_BYTES);
        wgmma<CHUNK, element>::ss<HIGH, HIGH, 1, 1>(dq, ds_desc + matrix_descriptor_bytes(k * 16 * ROW_BYTES),
                                                    (k * 16 < KEYS ? k_desc : k_other_desc) + k_step, k > 0);
    }
    wgmma_commit_group();
}

/* The last step, whose dQ is computed in the current step. */
struct last_step {
    int q_tile, head_in_group, stage;
    u32 parity;
};
DEVICE last_step step_before(const ring &r, int q_tile, int head_in_group) {
    return {q_tile, head_in_group, r.stage ^ 1, r.stage ? r.parity : r.parity ^ 1};
}

DEVICE void add_last_dq(float (&dq)[PAIR_DQ_REGS], const params &p, shared_memory &s, const tile &t,
                        const last_step &last, int wg) {
    ring r;
    r.stage = last.stage, r.parity = last.parity;
    add_dq(dq, p, s, t, last.q_tile, last.head_in_group, r, dq_chunk(wg) * (BLOCK_Q * CHUNK), dq_chunk(wg) * CHUNK, 0);
}

constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * COLUMNS * element::BYTES);
constexpr u32 DS_STAGE = matrix_descriptor_bytes(2 * DS_BYTES);

/* The operands of a warpgroup's chunk of dQ: descriptors of dS in stage 0, this CTA's keys and the other CTA's keys. */
struct dq_operands {
    u32 ds, k, k_other;
};
DEVICE dq_operands dq_operands_of(const shared_memory &s, int wg) {
    return {matrix_descriptor(smem_address(s.ds), 0),
            matrix_descriptor(smem_address(s.k) + dq_chunk(wg) * KEYS * ROW_BYTES, 0),
            matrix_descriptor(smem_address(s.k_other) + wg * KEYS * ROW_BYTES, 0)};
}

/* Waits for dS and issues dQ of the last step. A tile's first step has no step before. The first step multiplies
 * whatever lies in dS, and drops the result. */
DEVICE void start_dq(float (&dq)[PAIR_DQ_REGS], shared_memory &s, const dq_operands &x, const last_step &last,
                     bool is_there) {
    if (is_there) mbarrier_wait(&s.ds_full[last.stage], last.parity);
    issue_dq_of_pair(dq, x.ds + last.stage * DS_STAGE, x.k, x.k_other);
}

/* Computes dQ of a tile's last step. Afterwards no operand of the tile is read any more. */
DEVICE void finish_dq(const params &p, shared_memory &s, const dq_operands &x, const tile &t, const last_step &last,
                      int wg) {
    float dQ[PAIR_DQ_REGS];
    start_dq(dQ, s, x, last, true);
    wgmma_wait_group<0>(dQ);
    if (arrives_for_warp(threadIdx.x % 32)) arrive_in_both(&s.ds_empty[last.stage]), mbarrier_arrive(&s.k_empty);
    add_last_dq(dQ, p, s, t, last, wg);
}

/* Warpgroup 0 computes P and dV. */
DEVICE void consume_p(const params &p, shared_memory &s) {
    const int warp = threadIdx.x / 32 % 4;
    const bool arrives = arrives_for_warp(threadIdx.x % 32);
    const u32 k_desc = matrix_descriptor(smem_address(s.k), 0);
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), 0);
    const u32 do_desc_0 = matrix_descriptor(smem_address(s.dout), BLOCK_Q * ROW_BYTES);
    const dq_operands operands = dq_operands_of(s, 0);
    float dV[DV_REGS];
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
            int q_tile = queries.end - 1, head_in_group = 0, last_q_tile = -1, last_head = 0;
            mbarrier_wait(&s.k_full, kv_parity);
            pin(dV);
            wgmma_fence();
#pragma unroll 1
            while (q_tile >= queries.begin) {
                const bool is_first = last_q_tile < 0;
                const last_step last = step_before(r, last_q_tile, last_head);
                u32 P[P_REGS];
                float S[S_REGS], dQ[PAIR_DQ_REGS], lse[STAT_REGS];
                /* wait Q: S = K Q^T */
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                load_stats(lse, s.lse[r.stage], threadIdx.x % 32);
                issue_scores<HEAD_DIM>(S, k_desc, q_desc_0 + r.stage * Q_STAGE);
                /* wait dS: dQ of the last step */
                start_dq(dQ, s, operands, last, !is_first);
                /* S is there: P, to the other warpgroup too. The other warpgroup has read the last P, because its dS is
                 * there. */
#if FLEX
                const step_mods user(p, s, t, r.stage, head_in_group);
                wgmma_wait_group<1>(S);
                user.exponentiate(S, lse, P, p, t);
#else
                wgmma_wait_group<1>(S);
                const bool is_masked = is_partial<1>(q_tile, queries.full_begin, queries.full_end);
                const int head = t.first_head + head_in_group;
                exponentiate(S, lse, P, p, t, q_tile, head, is_masked, {p, t, head, q_tile, nullptr});
#endif
#pragma unroll
                for (int i = 0; i < S_REGS; i += 4)
                    s.p[i * 32 + threadIdx.x % 128] = make_float4(S[i], S[i + 1], S[i + 2], S[i + 3]);
                __syncwarp();
                if (arrives) mbarrier_arrive(&s.p_full);
                /* wait dO: dV += P^T dO */
                mbarrier_wait(&s.do_full[do_stage(r)], do_parity(r));
                pin(P);
                issue_update(dV, P, do_desc_0);
                /* dQ is there: release dS, add dQ */
                wgmma_wait_group<1>(dQ);
                if (!is_first) {
                    if (arrives) arrive_in_both(&s.ds_empty[last.stage]);
                    add_last_dq(dQ, p, s, t, last, 0);
                }
                /* dV is there: release dO. A release in the next step, behind the wait for Q, is 5 to 8% slower from 4k
                 * on. */
                wgmma_wait_group<0>(dV);
                if (arrives) arrive_in_both(&s.do_empty[do_stage(r)]);
                r.next();
                last_q_tile = q_tile, last_head = head_in_group;
                if (++head_in_group == p.heads_per_tile) head_in_group = 0, q_tile--;
            }

            finish_dq(p, s, operands, t, step_before(r, last_q_tile, last_head), 0);
            pin(dV);
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
    const dq_operands operands = dq_operands_of(s, 1);
    float dK[KV_REGS];
    ring r; /* of steps */
    u32 kv_parity = 0;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        if (uniform(t.kv_tile) < 0) break;
        const int q_begin = uniform(t.queries.begin), q_end = uniform(t.queries.end);
#pragma unroll
        for (int i = 0; i < KV_REGS; i++) dK[i] = 0;
#if FLEX
        sums_of_heads of_heads;
#endif

        if (q_begin < q_end) {
            int q_tile = q_end - 1, head_in_group = 0, last_q_tile = -1, last_head = 0;
            mbarrier_wait(&s.k_full, kv_parity); /* dQ reads K; the other warpgroup's wait does not serve here */
            mbarrier_wait(&s.v_full, kv_parity);
            pin(dK);
            wgmma_fence();
#pragma unroll 1
            while (q_tile >= q_begin) {
                const bool is_first = last_q_tile < 0;
                const last_step last = step_before(r, last_q_tile, last_head);
                u32 dS[P_REGS];
                float W[S_REGS], dP[S_REGS], dQ[PAIR_DQ_REGS];
                /* wait dS: dQ of the last step. dK of the last step is there: release Q */
                start_dq(dQ, s, operands, last, !is_first);
                wgmma_wait_group<1>(dK);
                if (arrives && !is_first) arrive_in_both(&s.q_empty[last.stage]);
                /* wait Q, with which D comes. wait dO: dP */
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                start_dp_sum(dP, s.d[r.stage], threadIdx.x % 32);
                mbarrier_wait(&s.do_full[do_stage(r)], do_parity(r));
                issue_scores<D_V, STARTS_WITH_D>(dP, v_desc, do_desc_0);
                /* dQ is there: release dS */
                wgmma_wait_group<1>(dQ);
                if (arrives && !is_first) arrive_in_both(&s.ds_empty[last.stage]);
                /* wait P; dP is there: release dO, compute dS */
                mbarrier_wait(&s.p_full, r.stage);
#pragma unroll
                for (int i = 0; i < S_REGS; i += 4) {
                    const float4 x = s.p[i * 32 + threadIdx.x % 128];
                    W[i] = x.x, W[i + 1] = x.y, W[i + 2] = x.z, W[i + 3] = x.w;
                }
                wgmma_wait_group<0>(dP);
                if (arrives) arrive_in_both(&s.do_empty[do_stage(r)]);
#if FLEX
                const step_mods user(p, s, t, r.stage, head_in_group, KEEPS_SCORES);
                sums_of_step sums;
                user.differentiate(dP, dS, s.d[r.stage], s.lse[r.stage], p, t, sums, W);
#else
                differentiate(dP, dS, s.d[r.stage], p.keep_scale, [&](int i) { return W[i]; }, {p, t, 0, 0, nullptr});
#endif
                mbarrier_wait(&s.ds_empty[r.stage], r.parity ^ 1);
                unsigned char *own = (unsigned char *)s.ds[r.stage][0] + warp * (16 * ROW_BYTES);
                store_ds_rows(dS, smem_address(own));
                /* dK += dS^T Q; dS to both warpgroups of both CTAs */
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
                /* add dQ. An addition in front of dS is 5 to 14% slower, because the other CTA and both next dQ wait
                 * for dS. */
                if (!is_first) add_last_dq(dQ, p, s, t, last, 1);
                r.next();
                last_q_tile = q_tile, last_head = head_in_group;
                if (++head_in_group == p.heads_per_tile) head_in_group = 0, q_tile--;
            }

            const last_step last = step_before(r, last_q_tile, last_head);
            wgmma_wait_group<0>(dK);
            if (arrives) arrive_in_both(&s.q_empty[last.stage]), mbarrier_arrive(&s.v_empty);
#if FLEX
            give_sums_of_heads(p, t, of_heads);
#endif
            finish_dq(p, s, operands, t, last, 1);
            pin(dK);
            kv_parity ^= 1;
        }
        store(dK, p.scale, p.dk, t, first_key(t) + 16 * warp, p.d);
        __syncwarp();
        if (arrives) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* One thread. Initialises the barriers whose counts depend on the warpgroups. */
DEVICE void init_barriers(shared_memory &s) {
    mbarrier_init(&s.k_empty, of_warps(WARPS)), mbarrier_init(&s.v_empty, of_warps(4));
    mbarrier_init(&s.p_full, of_warps(4));
    mbarrier_init(&s.do_empty[0], of_warps(CTAS * WARPS));
    for (int i = 0; i < 2; i++) {
        mbarrier_init(&s.q_empty[i], of_warps(CTAS * 4));
        mbarrier_init(&s.ds_full[i], of_warps(4)), mbarrier_init(&s.ds_empty[i], of_warps(CTAS * WARPS));
        mbarrier_init(&s.dq_added[i], of_warps(WARPS)), mbarrier_init(&s.tile_empty[i], of_warps(WARPS + 3));
    }
}

/* Warpgroup wg from 1 on. */
DEVICE void consume(const params &p, shared_memory &s, int wg) {
    setmaxnreg_inc<CONSUMER_REGS>();
    if (wg == 1)
        consume_p(p, s);
    else
        consume_ds(p, s);
}

#endif
