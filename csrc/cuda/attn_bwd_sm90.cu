/* Attention backward on Hopper, after attn_bwd_prep:
 *
 *   P = exp(scale Q K^T + mask - lse)    dP = dO V^T    dS = P (dP - D)    D = rowsum(dO O), from attn_bwd_prep
 *   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K, summed over the key tiles in fp32
 *
 *   q, dO, dQ [b, len_q, h, d]    k, v, dK, dV [b, len_kv, h_kv, d]    lse, D: stats    sums of dQ: dq_sums
 *
 * A persistent CTA stays on each SM. Its work tile is BLOCK_KV keys of one key head. For each work tile the CTA walks
 * over the query tiles that see these keys. At each query tile the CTA walks through all query heads of the group. So
 * dK and dV stay in registers.
 *
 * Two warpgroups own 64 keys each. The warpgroups compute S and dP transposed: keys go down, queries go across. P and
 * dS then lie in registers as the products dV and dK take their first operand. Only dS goes through shared memory, for
 * dQ:
 *
 *   producer warp --k_full, v_full--> both warpgroups  --k_empty, v_empty--> producer warp
 *                 --q_full[s]-->      S^T = K Q^T, dK += dS^T Q             --q_empty[s]-->
 *                 --do_full[s]-->     dP^T = V dO^T, dV += P^T dO           --do_empty[s]-->
 *   warpgroup     --ds_full[s]-->     both: dQ = dS K                       --ds_empty[s]-->
 *                 --dq_full[s]-->     writer warp s: adds dQ to memory      --dq_ready[s]-->
 *   writer warp s --sum_full[s]-->    converter, which stores dK and dV too --dq_ready[s]--> warpgroups
 *
 * dQ of a query tile is computed one step later. By then the other warpgroup's dS has long been there. So no warpgroup
 * waits at a barrier of both. The warpgroups drift apart until the tensor cores always have a product to run. A step
 * has four parts:
 *
 *   issue S                  When dK of the last step is done, release Q of the last step.
 *   issue dQ                 This is dQ of the last step. Compute P = exp2 while dQ runs.
 *   dQ to the writer warp    Issue dP and dV. Compute dS while dV runs.
 *   dS to both warpgroups    Issue dK.
 *
 * Plain kernels of up to 64 columns have another order of products: walk_in_bursts.
 *
 * The first key tile of a query tile stores its share of dQ, and the key tiles between add their shares. The warpgroups
 * of the last key tile add the sum to their own share and write dQ. So no memory need be zero before, and no kernel
 * follows. With in_order the key tiles between add in their order, too, and every bit of dQ repeats. dK and dV always
 * repeat. A dQ turn is passed on when the addition has arrived in the L2, 1 to 2 us after its start. The two writer
 * warps have alternate steps, so each writer warp has the time of two steps.
 *
 * A causal work tile completes sums at its end, to which the key tiles before have just come, too. A long work tile of
 * up to 64 columns does not wait for these key tiles. The writer warp adds this share as well and brings the sum. The
 * converter makes dQ of the sum while the warpgroups are in the next work tile.
 *
 * This file has the steps of a warpgroup. Six headers have the rest:
 *
 *   attn_bwd_memory.cuh     operands and barriers
 *   attn_bwd_writers.cuh    dQ, dK and dV to memory
 *   attn_bwd_tiles.cuh      work tiles and the producer warp; shared with attn_bwd_wide_sm90.cu
 *   attn_bwd_scores.cuh     work on registers; shared with attn_bwd_wide_sm90.cu
 *   attn_bwd_pairs.cuh      biases and the like of each pair
 *   attn_bwd_dropout.cuh    which pairs dropout drops; shared with attn_bwd_wide_sm90.cu
 *
 * Specification: cpu/reference.c. Design and limits: backward.md. Measurements: measurements/backward.md. */
#if !defined(HEAD_DIM) || !defined(D_V) || !defined(BLOCK_Q) || !defined(BLOCK_KV)
#error "tiles: HEAD_DIM columns, D_V of V and dO, BLOCK_Q query rows, BLOCK_KV keys"
#endif
#if !defined(BF16) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE) || !defined(DROPOUT)
#error "variant: BF16 or fp16; CAUSAL, LOCAL, VARLEN, SCORE softcap and ALiBi, ALIBI alone, DROPOUT, FLEX: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_sm90
#endif

#include "attn_bwd_scores.cuh"

constexpr int THREADS = 384, PRODUCER_REGS = 24, CONSUMER_REGS = 240;
static_assert(BLOCK_KV == 128, "two warpgroups of 64 keys");
static_assert(BLOCK_Q == 64 || BLOCK_Q == 128, "dQ is cut into two halves of 64 rows or of half the columns");
constexpr bool CONVERTS = CAUSAL && HEAD_DIM <= 64, KEEPS_ADDRESSES = HEAD_DIM > 64 || BLOCK_Q < 128;
static_assert(HEAD_DIM * 2 + BLOCK_Q <= 384, "dK, dV, S and dQ take (2 HEAD_DIM + 2 BLOCK_Q) / 2 of 232 registers");

#include "attn_bwd_memory.cuh"
#include "attn_bwd_writers.cuh"

/* ---- consumers ------------------------------------------------------------------------------------------------- */

/* Whole warp. Writes 16 rows and WIDTH columns of a warp's accumulators, times `factor`, in 16 bits. The result has the
 * form of a box of TMA, whose rows have BYTES bytes. */
template <int WIDTH, int BYTES> DEVICE void write_box(void *box, const float *x, float factor) {
    const u32 row = row_of_box<BYTES>(box);
#pragma unroll
    for (int g = 0; g < WIDTH / 16; g++) {
        u32 two[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            two[k] = cvt_x2<element::output>(x[8 * g + 2 * k] * factor, x[8 * g + 2 * k + 1] * factor);
        write_columns<BYTES>(row, g, two);
    }
}

/* At 64 columns the exponentials of a step take longer than its dQ. Warpgroups that compute them at the same time share
 * the unit, and both wait. So the warpgroups take turns. In bursts they need none. */
constexpr bool TAKES_TURNS = FLOAT_WEIGHTS > 0 && BLOCK_Q == 128 && !IN_BURSTS;
enum { BAR_TURN = 1 }; /* of warpgroup 0; the next barrier is that of warpgroup 1 */

/* Whole warpgroup. The turn passes to the other warpgroup when this thread's P is computed. No P has a sign, so
 * `settle` stores nothing. */
DEVICE void pass_turn(const u32 (&P)[P_REGS], int wg, shared_memory &s) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < P_REGS; i++) bits |= P[i];
    settle(__uint_as_float(bits), &s.words);
    bar_arrive(BAR_TURN + (wg ^ 1), 256);
}

/* Whole warpgroup. Hands dQ of query tile i over to the writer warp. `dq_at` is this lane's place in stage 0. `word` is
 * that of step_words. */
DEVICE void hand_over_dq(float (&dq)[DQ_REGS], const params &p, shared_memory &s, const tile &t, u32 dq_at, int wg,
                         int stage, u32 parity, int i, bool is_last, int word) {
    float4 *pieces = (float4 *)__cvta_shared_to_generic(dq_at + stage * (u32)sizeof s.dq[0]);
    mbarrier_wait(&s.dq_ready[stage], parity);
#if FLEX
    is_last = word & LAST_SHARE;
#endif
    if (!is_last) {
#pragma unroll
        for (int x = 0; x < DQ_REGS / 4; x++)
            if (8 * x < KEPT_COLUMNS || wg == 0)
                pieces[32 * x] = make_float4(dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]);
    } else {
#if FLEX
        const bool adds = !(word & FIRST_SHARE);
#else
        const bool adds = i < t.first_begin;
#endif
        if (adds) {
#pragma unroll
            for (int x = 0; x < DQ_REGS / 4; x++) {
                if (8 * x >= KEPT_COLUMNS && wg != 0) break;
                const float4 sum = pieces[32 * x];
                dq[4 * x] += sum.x, dq[4 * x + 1] += sum.y, dq[4 * x + 2] += sum.z, dq[4 * x + 3] += sum.w;
            }
        }
        __syncwarp(); /* all lanes have read the sum, and the box overwrites the sum */
        write_box<DQ_COLUMNS, DQ_ROW_BYTES>(s.dq[stage][wg] + threadIdx.x / 32 % 4 * warp_floats(wg), dq, p.scale);
    }
}

/* Whole warp. Hands dK or dV of this warp's 16 keys over to the warp that stores dK and dV. `place` has chunks of
 * BLOCK_KV keys. */
DEVICE void hand_over_keys(const float (&kv)[KV_REGS], float factor, element::output *place, u64 *full, int key) {
    constexpr int REST = HEAD_DIM > CHUNK ? HEAD_DIM - CHUNK : 0, FIRST = HEAD_DIM - REST;
    write_box<FIRST, ROW_BYTES>(place + key * CHUNK, kv, factor);
    if (REST > 0) write_box<REST, ROW_BYTES>(place + (BLOCK_KV + key) * CHUNK, kv + (REST > 0 ? FIRST / 2 : 0), factor);
    __syncwarp();
    if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(full);
}

/* Whole warp. Adds the sum of the pieces before to dK or dV of a cut tile. Then leaves the sum to the next piece, if
 * any. All loads are under way together, because the next piece waits for the loads. */
DEVICE void add_pieces(float (&kv)[KV_REGS], float4 *sums, bool is_first, bool is_last) {
    if (!is_first) {
        float4 x[KV_REGS / 4];
#pragma unroll
        for (int i = 0; i < KV_REGS / 4; i++) x[i] = __ldcg(sums + 32 * i);
#pragma unroll
        for (int i = 0; i < KV_REGS / 4; i++)
            kv[4 * i] += x[i].x, kv[4 * i + 1] += x[i].y, kv[4 * i + 2] += x[i].z, kv[4 * i + 3] += x[i].w;
    }
    if (!is_last) {
#pragma unroll
        for (int i = 0; i < KV_REGS / 4; i++)
            __stcg(sums + 32 * i, make_float4(kv[4 * i], kv[4 * i + 1], kv[4 * i + 2], kv[4 * i + 3]));
    }
}

/* Whole warp. The pieces of a cut tile add up dK and dV in their order. The last piece has the sums. */
DEVICE void add_to_pieces(float (&dK)[KV_REGS], float (&dV)[KV_REGS], const params &p, const tile &t, int warp) {
    const bool is_leader = threadIdx.x % 32 == 0, is_first = t.piece == 0, is_last = t.piece == t.pieces - 1;
    float4 *sums = (float4 *)p.kv_sums + (t.idx * 8 + warp) * (2 * KV_REGS / 4 * 32) + threadIdx.x % 32;
    u32 *turn = p.kv_turns + t.idx * 8 + warp;
    if (is_leader) wait_turn(turn, t.piece);
    __threadfence();
    __syncwarp();
    add_pieces(dK, sums, is_first, is_last);
    add_pieces(dV, sums + KV_REGS / 4 * 32, is_first, is_last);
    __threadfence();
    __syncwarp();
    if (is_leader) end_turn(turn);
}

/* Whole warp. Stores zeros to dK or dV of 16 keys that no query sees. d: columns of the gradient. */
DEVICE void store_zeros(const fa_bwd_tensor &out, int d, const tile &t, int key) {
    if (!out.data) return;
    element::output *rows =
        (element::output *)out.data + t.b_idx * out.stride_b + t.head_kv * out.stride_h + t.kv_begin * out.stride_row;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 16 * HEAD_DIM / 8; i += 32) {
        const int j = key + i / (HEAD_DIM / 8), column = i % (HEAD_DIM / 8) * 8;
        if (j < t.len_kv && column < d) *(uint4 *)(rows + j * out.stride_row + column) = make_uint4(0, 0, 0, 0);
    }
}

/* Returns the weights of dS in 16 bits. */
template <int N>
DEVICE const u32 (&weights_among(const u32 (&P)[P_REGS], const u32 (&W)[N])) [P_REGS] {
    if constexpr (WEIGHTED)
        return W;
    else
        return P;
}

/* The parity of the step before. NOTE: the second form makes ptxas keep the parity in a register from step to step.
 * With mods there is no register left. */
DEVICE u32 parity_of_last(const ring &r) {
    if (FLEX) return r.parity ^ r.stage ^ 1;
    return r.stage ? r.parity : r.parity ^ 1;
}

/* Returns x, which is computed here and not later. NOTE: with mods ptxas keeps some addresses in local memory. So they
 * are loaded while a product runs. */
DEVICE u32 early(u32 x) {
    int y = (int)x;
    if (FLEX) pin(y);
    return (u32)y;
}

/* With a sum in the exponent the lse is loaded when S is there, and not before. So its registers are free for what the
 * sum needs, if there are no others. */
constexpr bool LOADS_LSE_LATE = (FLEX_ADDS || LOADS_PAIRS_EARLY) && !HAS_ROOM;

/* The operands of a warpgroup: descriptors of stage 0, and where a lane stores dS and dQ in stage 0. */
struct operands {
    u32 k, v, q, dout; /* of S, dP, dV and dK */
    u32 ds, k_of_dq;
    u32 ds_at, dq_at;
};
constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * COLUMNS * element::BYTES);
constexpr u32 DS_STAGE = matrix_descriptor_bytes(BLOCK_Q * BLOCK_KV * element::BYTES);

/* Whole warpgroup. Plain kernels of up to 64 columns: all steps of a work tile, but for the last dQ. Each step ends
 * with a burst of the tensor cores: dQ of the last step, dV, dK, and S of the next step.
 *
 *   issue S          When dK of the last step is done, release Q. Hand over dQ of the last step but one.
 *   issue dP         Compute P. When dP is there, compute dS.
 *   dS to memory     Issue dQ of the last step, dV and dK.
 *
 * One warpgroup computes P and dS during the burst of the other. For this the warpgroups must be half a step apart. So
 * no wait of a step is for what the other warpgroup does in the same step. P and dS are rounded together, in the
 * registers of the floats. So all weights stay floats until then. `r` counts the steps. */
template <bool IS_GROUPED>
DEVICE void walk_in_bursts(float (&dK)[KV_REGS], float (&dV)[KV_REGS], ring &r, const params &p, shared_memory &s,
                           const tile &t, const tile_walk &queries, const operands &at, int wg, int num_steps,
                           int last_end, u32 kv_parity) {
    static_assert(STARTS_WITH_D || !IN_BURSTS, "dP - D comes from the sum");
    const int lane = threadIdx.x % 32;
    const bool arrives = arrives_for_warp(lane);
    float dQ[DQ_REGS] = {};
    /* Hands over dQ of `step`, which has the stage and the parity of step + 2, the present one. */
    const auto hand_over = [&](int step) {
        const int q_tile = place_of_step<IS_GROUPED>(p, queries.end, step).q_tile;
        hand_over_dq(dQ, p, s, t, at.dq_at, wg, r.stage, r.parity ^ 1, q_tile, q_tile < last_end, 0);
        __syncwarp();
        if (arrives) mbarrier_arrive(&s.dq_full[r.stage]);
    };
#pragma unroll 1
    for (int step = 0; step < num_steps; step++) {
        const int last = r.stage ^ 1;
        const u32 last_parity = parity_of_last(r);
        u32 P[P_REGS], dS[P_REGS];
        float S[S_REGS], dP[S_REGS], lse[STAT_REGS / 2];
        /* wait Q: S = K Q^T */
        mbarrier_wait(&s.q_full[r.stage], r.parity);
        issue_scores<HEAD_DIM>(S, at.k, at.q + r.stage * Q_STAGE);
        /* dK of the last step is there: release Q of the last step. Hand dQ over while S runs. */
        wgmma_wait_group<1>(dK);
        if (arrives && step > 0) mbarrier_arrive(&s.q_empty[last]);
        if (step > 1) hand_over(step - 2);
        /* wait dO; S is there: D - dP = D - V dO^T */
        mbarrier_wait(&s.do_full[r.stage], r.parity);
        if (step == 0) mbarrier_wait(&s.v_full, kv_parity);
        start_negated_dp_sum(dP, s.d[r.stage], lane);
        load_half_of_stats(lse, s.lse[r.stage], 0, lane);
        wgmma_wait_group<0>(S);
        issue_scores<D_V, true, SIGN_OF_DS>(dP, at.v, at.dout + r.stage * Q_STAGE);
        const auto [q_tile, head_in_group] = place_of_step<IS_GROUPED>(p, queries.end, step);
        if (is_partial<1>(q_tile, queries.full_begin, queries.full_end)) {
            const place from = place_of(t, q_tile);
#pragma unroll
            for (int g = 0; g < S_REGS / 8; g++) mask_scores(S + 8 * g, p, from, 16 * g);
        }
        /* P, half of the registers at a time: there is no room for the whole LSE */
        constexpr int HALF = S_REGS / 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float (&x)[HALF] = *(float (*)[HALF])(S + half * HALF);
#pragma unroll
            for (int i = 0; i < HALF; i++) x[i] = fmaf(x[i], p.scale_log2, -lse[stat_of(i)]);
            pin(x);
            if (half == 0) load_half_of_stats(lse, s.lse[r.stage], 1, lane);
#pragma unroll
            for (int i = 0; i < HALF; i++) x[i] = ex2(x[i]);
        }
        pin(S);
        int ds_place = (int)(at.ds_at + r.stage * (BLOCK_Q * BLOCK_KV * element::BYTES));
        pin(ds_place);
        /* dP is there: P and -dS in 16 bits take the registers of the floats */
        wgmma_wait_group<0>(dP);
        pin(S);
#pragma unroll
        for (int i = 0; i < P_REGS; i += 4) {
#pragma unroll
            for (int k = i; k < i + 4; k++) {
                P[k] = cvt_x2<element>(S[2 * k], S[2 * k + 1]);
                dS[k] = cvt_x2<element>(S[2 * k] * dP[2 * k], S[2 * k + 1] * dP[2 * k + 1]);
            }
            pin(*(u32(*)[4])(P + i)), pin(*(u32(*)[4])(dS + i));
        }
        pin(P);
        /* wait for a place for dS: in the first step the last work tile's dK must have left this place */
        mbarrier_wait(step > 0 ? &s.ds_empty[r.stage] : &s.dk_empty, (step > 0 ? r.parity : kv_parity) ^ 1);
        store_ds(dS, (u32)ds_place);
        /* wait dS of the last step: its dQ. dV += P^T dO, dK += dS^T Q. NOTE: the first step multiplies whatever lies
         * in dS, and drops the result. */
        if (step > 0) mbarrier_wait(&s.ds_full[last], last_parity);
        issue_dq(dQ, at.ds + last * DS_STAGE, at.k_of_dq);
        issue_update(dV, P, at.dout + r.stage * Q_STAGE);
        issue_update<SIGN_OF_DS>(dK, dS, at.q + r.stage * Q_STAGE);
        /* dS to both warpgroups */
        fence_proxy_async();
        __syncwarp();
        if (arrives) mbarrier_arrive(&s.ds_full[r.stage]);
        /* dQ and dV are there: release dO, and dS of the last step */
        wgmma_wait_group<1>(dQ);
        pin(dV);
        if (arrives) mbarrier_arrive(&s.do_empty[r.stage]);
        if (arrives && step > 0) mbarrier_arrive(&s.ds_empty[last]);
        r.next();
    }
    wgmma_wait_group<0>(dK);
    if (num_steps > 1) hand_over(num_steps - 2);
}

/* This function is one warpgroup. With IS_GROUPED a work tile may have several query heads. */
template <bool IS_GROUPED> DEVICE void consume(const params &p, shared_memory &s, const int wg) {
    const int lane = KEEPS_ADDRESSES ? kept(threadIdx.x % 32) : threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool arrives = arrives_for_warp(lane);
    /* One address serves both ways of reading an operand, because along the row the leading offset is not used. */
    const u32 k_desc = matrix_descriptor(smem_address(s.k) + wg * 64 * ROW_BYTES, 0);
    const u32 v_desc = matrix_descriptor(smem_address(s.v) + wg * 64 * ROW_BYTES, 0);
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), BLOCK_Q * ROW_BYTES);
    const u32 do_desc_0 = matrix_descriptor(smem_address(s.dout), BLOCK_Q * ROW_BYTES);
    const u32 ds_desc_0 = matrix_descriptor(smem_address(s.ds) + dq_row(wg) * ROW_BYTES, 0);
    const u32 k_dq_desc = matrix_descriptor(smem_address(s.k) + dq_column(wg) / CHUNK * BLOCK_KV * ROW_BYTES +
                                                dq_column(wg) % CHUNK * element::BYTES,
                                            BLOCK_KV * ROW_BYTES);

    /* The addresses at which this lane stores in stage 0. At 128 columns, computing the addresses again in every step,
     * in front of the stores, costs 3 to 4%. At 64 columns, keeping the addresses costs 3 to 7%. */
    u32 ds_at = smem_address(s.ds) + wg * BLOCK_Q * ROW_BYTES + ds_offset();
    u32 dq_at = smem_address(s.dq[0][wg] + warp * warp_floats(wg) + 4 * lane);
    if (KEEPS_ADDRESSES) ds_at = kept(ds_at), dq_at = kept(dq_at);

    if (TAKES_TURNS && wg == 1) bar_arrive(BAR_TURN, 256); /* warpgroup 0 has the first turn */

    float dK[KV_REGS], dV[KV_REGS];
    ring r; /* of steps */
    u32 kv_parity = 0;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        const int kv_tile = uniform(t.kv_tile);
        if (kv_tile < 0) break;
        const tile_walk queries = {uniform(t.queries.begin), uniform(t.queries.end), uniform(t.queries.full_begin),
                                   uniform(t.queries.full_end)};
        const int last_end = CONVERTS && p.converts ? 0 : uniform(t.last_end);
        const int num_steps = (queries.end - queries.begin) * (IS_GROUPED ? p.heads_per_tile : 1);
#pragma unroll
        for (int i = 0; i < KV_REGS; i++) dK[i] = dV[i] = 0;
#if FLEX
        sums_of_heads of_heads;
#endif

        const int key = 64 * wg + 16 * warp; /* this warp's first key, in the work tile */

        if (num_steps > 0) {
            mbarrier_wait(&s.k_full, kv_parity);
            pin(dK), pin(dV);
            wgmma_fence();
            int word = 0; /* of the last step (step_words) */
#if FLEX
            const pairs_of_warp own_pairs = {smem_address(s.pairs[HOLDS_PAIRS ? 4 * wg + warp : 0]), first_key(t) + key,
                                             t.len_kv};
            pairs_of_step pairs;
            const auto load_pairs_of = [&](int step) {
                const step_place place = place_of_step<IS_GROUPED>(p, queries.end, step);
                pairs.load_next(mods(p.flex, p.values, t.b_idx, t.first_head + place.head_in_group), own_pairs,
                                place.q_tile, step < num_steps);
            };
            load_pairs_of(0);
#endif
            if constexpr (IN_BURSTS)
                walk_in_bursts<IS_GROUPED>(dK, dV, r, p, s, t, queries,
                                           {k_desc, v_desc, q_desc_0, do_desc_0, ds_desc_0, k_dq_desc, ds_at, dq_at},
                                           wg, num_steps, last_end, kv_parity);
#pragma unroll 1
            for (int step = 0; !IN_BURSTS && step < num_steps; step++) {
                const int last = r.stage ^ 1;
                const u32 last_parity = parity_of_last(r);
                u32 P[P_REGS], W[WEIGHTED ? P_REGS : 1], rest[REST_REGS], dS[P_REGS];
                float S[S_REGS], dQ[DQ_REGS], dP[S_REGS], lse[STAT_REGS];

                /* wait Q: S = K Q^T */
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                if (!LOADS_LSE_LATE) load_stats(lse, s.lse[r.stage], lane);
#if FLEX
                const int last_word = word, next_word = s.words.steps[r.stage];
                const u32 hidden_word = HIDDEN_BESIDE_Q ? s.words.hidden[threadIdx.x - 128] : 0;
                /* What the score_mod reads of each pair is on its way while S is computed. */
                if (LOADS_PAIRS_EARLY) word = uniform(next_word);
                const mods early_mod(p.flex, p.values, t.b_idx,
                                     t.first_head + place_of_step<IS_GROUPED>(p, queries.end, step).head_in_group);
                pairs.load(early_mod, own_pairs, pair_of(t, query_tile_of(word >> 2)), query_tile_of(word >> 2));
#else
                const int last_word = 0;
#endif
                issue_scores<HEAD_DIM>(S, k_desc, q_desc_0 + r.stage * Q_STAGE);
#if FLEX
                if (!LOADS_PAIRS_EARLY) word = uniform(next_word);
#endif
                /* dK of the last step is there: release Q of the last step, and the place of this step's bits */
                wgmma_wait_group<1>(dK);
                if (arrives && (HIDDEN_BESIDE_Q || step > 0)) mbarrier_arrive(&s.q_empty[last]);
#if FLEX
                pairs.settle(own_pairs);
#endif
                /* wait dS: dQ of the last step. NOTE: the first step multiplies whatever lies in dS, and drops the
                 * result. With a branch around the products, or with a separate first step, ptxas runs the products one
                 * by one (C7512). */
                if (step > 0) mbarrier_wait(&s.ds_full[last], last_parity);
                issue_dq(dQ, ds_desc_0 + last * DS_STAGE, k_dq_desc);
#if FLEX /* a mask is looked at while S is on its way */
                const int entry = word >> 2;
                const int head_in_group = place_of_step<IS_GROUPED>(p, queries.end, step).head_in_group;
                const mods mod(p.flex, p.values, t.b_idx, t.first_head + head_in_group);
                hidden_pairs hidden;
                const bool hides = HIDDEN_BESIDE_Q ? hidden.take(entry, hidden_word)
                                   : FLEX_HIDDEN   ? hidden.load(t, entry)
                                                   : hidden.find(p, t, mod, entry);
#endif
#if FLEX /* computed while S is on its way */
                first_pair at = pair_of(t, query_tile_of(entry));
                if (FLEX_SCORE) pin(at.row), pin(at.key);
                const head_values of_head = values_of(p, t, mod);
                const dropped_pairs<DROPOUT> drops(p, t, t.first_head + head_in_group, query_tile_of(entry),
                                                   &s.dropout);
#endif
#if !FLEX
                const auto [q_tile, head_in_group] = place_of_step<IS_GROUPED>(p, queries.end, step);
                const int head = t.first_head + head_in_group;
                const bool is_masked = is_partial<1>(q_tile, queries.full_begin, queries.full_end);
                const dropped_pairs<DROPOUT> drops(p, t, head, q_tile, &s.dropout);
#endif
#if ALIBI /* loaded while S is on its way */
                const alibi_bias bias = bias_of(p, t, q_tile, head_in_group);
#endif
                /* S is there: P */
                wgmma_wait_group<1>(S);
                if (LOADS_LSE_LATE) load_stats(lse, s.lse[r.stage], lane);
                if (TAKES_TURNS) bar_sync(BAR_TURN + wg, 256);
#if FLEX
                exponentiate_by_mods(S, lse, P, p, mod, of_head, hidden, hides, drops, at, pairs);
#elif ALIBI
                exponentiate(S, lse, P, p, t, q_tile, head, is_masked, drops, bias);
#else
                exponentiate(S, lse, P, p, t, q_tile, head, is_masked, drops);
#endif
#pragma unroll
                for (int i = 0; WEIGHTED && i < P_REGS; i++) W[i] = cvt_x2<weight_type>(S[2 * i], S[2 * i + 1]);
                const auto &weights = weights_among(P, W);
                split_weights(S, weights, rest);
                pin(P); /* compute P here and not later, because dQ runs now */
                if (RESTS > 0) pin(rest);
                if (FLOAT_WEIGHTS > 0) pin(S);
                if (TAKES_TURNS) pass_turn(P, wg, s);
                /* wait dO; dQ is there: release dS, hand dQ over */
                mbarrier_wait(&s.do_full[r.stage], r.parity);
                wgmma_wait_group<0>(dQ);
                if (early(step) > 0) {
                    if (arrives) mbarrier_arrive(&s.ds_empty[last]);
                    const int last_q_tile = place_of_step<IS_GROUPED>(p, queries.end, step - 1).q_tile;
                    hand_over_dq(dQ, p, s, t, dq_at, wg, last, last_parity, last_q_tile, last_q_tile < last_end,
                                 last_word);
                } else {
                    mbarrier_wait(&s.v_full, kv_parity);
                }
                /* dP = V dO^T, dV += P^T dO */
                if (DV_FIRST) {
                    issue_update(dV, P, do_desc_0 + r.stage * Q_STAGE);
                    wgmma_wait_group<0>(dV);
                }
                start_dp_sum(dP, s.d[r.stage], lane);
                issue_scores<D_V, STARTS_WITH_D>(dP, v_desc, do_desc_0 + r.stage * Q_STAGE);
                if (!DV_FIRST) issue_update(dV, P, do_desc_0 + r.stage * Q_STAGE);
                __syncwarp();
                if (arrives && early(step) > 0) mbarrier_arrive(&s.dq_full[last]);
#if FLEX
                load_pairs_of(step + 1);
#endif
                const u32 ds_place = early(ds_at + r.stage * (BLOCK_Q * BLOCK_KV * element::BYTES));
                /* dP is there: dS */
                wgmma_wait_group<!DV_FIRST>(dP);
                const auto weight = [&](int i) { return i < FLOAT_WEIGHTS ? S[i] : weight_of(weights, rest, i); };
#if FLEX
                sums_of_step sums;
                differentiate_by_mods(dP, dS, s.d[r.stage], s.lse[r.stage], p, t, mod, hidden, drops,
                                      query_tile_of(entry), sums, weight);
#else
                differentiate(dP, dS, s.d[r.stage], p.keep_scale, weight, drops);
#endif
                /* Wait for a place for dS. In the first step the last work tile's dK must have left this place.
                 * NOTE: ds_full of the last step has said that both warpgroups have the dQ that read it. But at 96 and
                 * 128 columns the code without the wait was 1 to 2% slower. */
                if (!TAKES_TURNS || step == 0)
                    mbarrier_wait(step > 0 ? &s.ds_empty[r.stage] : &s.dk_empty, (step > 0 ? r.parity : kv_parity) ^ 1);
                store_ds(dS, ds_place);
                /* dK += dS^T Q; dS to both warpgroups */
                issue_update(dK, dS, q_desc_0 + r.stage * Q_STAGE);
                fence_proxy_async();
                __syncwarp();
                if (arrives) mbarrier_arrive(&s.ds_full[r.stage]);
#if FLEX /* gradients of captures, while dV and dK run */
                give_sums(sums, p, t, mod, query_tile_of(entry), head_in_group, of_heads);
#endif
                /* dV is there: release dO */
                wgmma_wait_group<1>(dV);
                if (arrives) mbarrier_arrive(&s.do_empty[r.stage]);

                r.next();
            }

            /* dQ of the last step. When dS of both warpgroups is there, V has been read, and dV takes the place of V.
             * When dQ of both warpgroups is there, dK takes the place of dS. */
            const int last = r.stage ^ 1;
            const u32 last_parity = parity_of_last(r);
            float dQ[DQ_REGS];
            wgmma_wait_group<0>(dK);
            if (arrives && !HIDDEN_BESIDE_Q) mbarrier_arrive(&s.q_empty[last]);
            if (t.pieces > 1) add_to_pieces(dK, dV, p, t, 4 * wg + warp);
            mbarrier_wait(&s.ds_full[last], last_parity);
            issue_dq(dQ, ds_desc_0 + last * DS_STAGE, k_dq_desc);
            hand_over_keys(dV, p.keep_scale, s.v, &s.dv_full, key);
            wgmma_wait_group<0>(dQ);
            if (arrives) mbarrier_arrive(&s.ds_empty[last]), mbarrier_arrive(&s.k_empty);
            mbarrier_wait(&s.ds_empty[last], last_parity);
            hand_over_keys(dK, p.scale, s.ds[0], &s.dk_full, key);
            hand_over_dq(dQ, p, s, t, dq_at, wg, last, last_parity, queries.begin, queries.begin < last_end, word);
            __syncwarp();
            if (arrives) mbarrier_arrive(&s.dq_full[last]);
#if FLEX
            give_sums_of_heads(p, t, of_heads);
#endif
            kv_parity ^= 1;
        } else if (FLEX && t.pieces > 1) { /* other heads may see these keys */
            add_to_pieces(dK, dV, p, t, 4 * wg + warp);
            if (t.piece == t.pieces - 1) {
                store(dK, p.scale, p.dk, t, first_key(t) + key, p.d);
                store(dV, p.keep_scale, p.dv, t, first_key(t) + key, p.d_v);
            }
        } else {
            store_zeros(p.dk, p.d, t, t.kv_tile * BLOCK_KV + key);
            store_zeros(p.dv, p.d_v, t, t.kv_tile * BLOCK_KV + key);
        }
        __syncwarp();
        if (arrives) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ params p) {
    /* There is no static shared memory. So dynamic shared memory starts at 1024, as its alignment asks. With this
     * number in the text every address is a constant, which saves registers of the producer warp. */
    extern __shared__ __align__(1024) unsigned char smem[];
    if (smem_address(smem) != SHARED_BASE) __trap();
    shared_memory &s = *(shared_memory *)__cvta_shared_to_generic(SHARED_BASE);
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q), prefetch_tensormap(&p.k), prefetch_tensormap(&p.v), prefetch_tensormap(&p.dout);
        if (p.dq.data) prefetch_tensormap(&p.dq_rows);
        if (p.dk.data) prefetch_tensormap(&p.dk_tiles);
        if (p.dv.data) prefetch_tensormap(&p.dv_tiles);
        mbarrier_init(&s.k_full, 1), mbarrier_init(&s.k_empty, of_warps(8));
        mbarrier_init(&s.v_full, 1), mbarrier_init(&s.v_empty, 1);
        mbarrier_init(&s.dk_full, of_warps(8)), mbarrier_init(&s.dk_empty, 1), mbarrier_init(&s.dv_full, of_warps(8));
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], of_warps(8));
            mbarrier_init(&s.do_full[i], 1), mbarrier_init(&s.do_empty[i], of_warps(8));
            mbarrier_init(&s.ds_full[i], of_warps(8)), mbarrier_init(&s.ds_empty[i], of_warps(8));
            mbarrier_init(&s.dq_ready[i], of_warps(1)), mbarrier_init(&s.dq_full[i], of_warps(8));
            mbarrier_init(&s.sum_full[i], 1);
            mbarrier_init(&s.tile_full[i], 1), mbarrier_init(&s.tile_empty[i], of_warps(8 + 3));
        }
        mbarrier_init_fence();
    }
    griddepcontrol_wait(); /* for attn_bwd_prep, which may still run when this launch begins */
#if DROPOUT
    if (threadIdx.x < 2) s.dropout.rng_state[threadIdx.x] = p.rng_state[threadIdx.x];
#endif
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (warp == 0) produce(p, s);
        if (warp == 1 || warp == 2) write_dq(p, s, warp - 1);
        if (warp == 3) write_keys(p, s);
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        /* A separate instance for one head gives 1 to 2%. With more options the instance would double the spills. */
        if (HEAD_DIM > 64 || SCORE || ALIBI || DROPOUT || FLEX || p.heads_per_tile > 1)
            consume<true>(p, s, wg - 1);
        else
            consume<false>(p, s, wg - 1);
    }
}
