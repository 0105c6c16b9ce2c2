/* Attention forward on Hopper in 8 bits:  O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row.
 *
 *   q [b, len_q, h, d]    k, v [b, len_kv, h_kv, d] in e4m3    o like q in bf16    lse [b, h, len_q] float
 *   q_descale, k_descale, v_descale [b, h_kv] float: q, k and v are multiplied by these factors
 *
 * CTAs, work tiles, roles, pipelines and turns are those of attn_fwd_sm90.cu, and so are the headers. Three things
 * differ.
 *
 *   V   wgmma wants V^T. Transposer warps make it (attn_fwd_fp8_values.cuh):
 *
 *         producer --raw_full[stage]--> transposers --v_full[stage]--> consumers: O += P V --v_empty[stage]-->
 *                 <--raw_empty[stage]--
 *
 *   P   e4m3 ends at 448. The row maximum m makes the largest P 2^7, and it may lag until a P exceeds 448. Then m rises
 *       to the score of that P before P is rounded. Most steps ask only whether a P exceeds 448.
 *
 *   O   The tensor cores keep 14 bits of a sum of 8-bit products. So after FLUSH_STEPS steps the registers of O are
 *       added to sums of 32 bits, and begin again at zero. The sums lie in shared memory. Above 128 columns there is no
 *       room, and they lie in the workspace.
 *
 * A work tile that failed is repeated as in attn_fwd_sm90.cu. A work tile is also repeated if its factor of the scores
 * is no positive normal float.
 *
 * Specification: cpu/reference.c. Design and limits: fp8.md. Measurements: measurements/fp8.md. */
#include "attn_fwd_params.h"
#include "ptx_sm90.cuh"

/* ---- parameters: one row of tiles.def -------------------------------------------------------------------------- */

#if !defined(HEAD_DIM) || !defined(BLOCK_KV) || !defined(WGS) || !defined(STAGES) || !defined(RAW_STAGES)
#error "shape: HEAD_DIM columns, BLOCK_KV keys, WGS warpgroups of 64 rows, STAGES of K and V^T, RAW_STAGES of V"
#endif
#if !defined(Q_STAGES) || !defined(TURN) || !defined(O_WAIT)
#error "schedule: Q_STAGES of Q; TURN and O_WAIT of attn_fwd_schedule.cuh"
#endif
#if !defined(E4M3) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE)
#error "variant: E4M3 is 1; CAUSAL, LOCAL window, VARLEN packed sequences, SCORE softcap and ALiBi: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_fp8_sm90
#endif
#define DROPOUT 0

/* ---- derived constants ----------------------------------------------------------------------------------------- */

constexpr int D_QK = HEAD_DIM, D_V = HEAD_DIM, CTAS = 1;
#include "attn_fwd_schedule.cuh"

constexpr int TRANSPOSERS = 2;
constexpr u32 V_ARRIVALS = of_warps(TRANSPOSERS);
/* 256 columns of O beside 128 keys of S and P leave the other warps 24 registers. */
constexpr bool IS_WIDE = HEAD_DIM / 2 + BLOCK_KV / 2 + BLOCK_KV / 8 > 200;
constexpr int PRODUCER_REGS = WGS == 3 ? 32 : IS_WIDE ? 24 : 40;
constexpr int CONSUMER_REGS = WGS == 3 ? 160 : IS_WIDE ? 240 : 232;
constexpr int V_STAGES = STAGES, V_LOAD_STAGES = RAW_STAGES;
/* O has a place of its own, which also holds its sums of 32 bits. Each warp has chunks of 16 rows. */
constexpr bool O_IN_Q = false, SUMS_IN_SMEM = D_V <= 128;
constexpr int O_ELEMENTS = SUMS_IN_SMEM ? 2 * BLOCK_Q * D_V : 8, O_ROWS = 16, O_ROW_BYTES = 128, O_CHUNK = 64;
constexpr int FLUSH_STEPS = FA_FLUSH_KEYS(D_V) / BLOCK_KV;

static_assert(HEAD_DIM % O_CHUNK == 0, "O leaves in chunks of 64 columns");
static_assert(PRODUCER_REGS + WGS * CONSUMER_REGS <= 512, "an SM has 64 K registers");

#include "attn_fwd_tiles.cuh"
#include "attn_fwd_memory.cuh"
#include "attn_fwd_producer.cuh"
#include "attn_fwd_softmax.cuh"
#include "attn_fwd_repeats.cuh"
#include "attn_fwd_output.cuh"
#include "attn_fwd_fp8_values.cuh"

/* ---- products -------------------------------------------------------------------------------------------------- */

/* S = Q K^T for the 64 rows of a warpgroup. */
DEVICE void issue_scores(float (&S)[S_REGS], u32 q_desc, u32 k_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D_QK; k += 32)
        wgmma<BLOCK_KV, element>::ss<high, high>(
            S, q_desc + matrix_descriptor_bytes(k / CHUNK * BLOCK_Q * ROW_BYTES + k % CHUNK),
            k_desc + matrix_descriptor_bytes(k / CHUNK * BLOCK_KV * ROW_BYTES + k % CHUNK), k > 0);
    wgmma_commit_group();
}

/* O += P V for the 64 rows of a warpgroup. */
DEVICE void issue_output(float (&O)[O_REGS], const u32 (&P)[P_REGS], u32 v_desc) {
    constexpr u32 high = matrix_descriptor_high(KEY_CHUNK);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KV; k += 32)
        wgmma<D_V, element>::rs<high>(
            O, P + k / 8, v_desc + matrix_descriptor_bytes(k / KEY_CHUNK * D_V * KEY_CHUNK + k % KEY_CHUNK));
    wgmma_commit_group();
}

/* ---- the row maximum ------------------------------------------------------------------------------------------- */

/* The factor that makes exponents of 2 of S: positive and normal, or else the work tile is repeated. */
DEVICE bool is_plain(float scale_log2) { return scale_log2 >= 1e-37f && scale_log2 < INF; }

/* S is P by now. This adds up the keys of the rows asked for, and keeps the largest P as the bits of a float. Even and
 * odd columns have a chain of additions each, so that no addition waits for the one before. */
DEVICE void sum_and_compare(const float (&S)[S_REGS], online_softmax &softmax, int (&largest)[2], bool first_row,
                            bool second_row) {
    float odd[2];
#pragma unroll
    for (int i = 0; i < S_REGS; i += 2)
        if (i % 8 < 4 && (row_of(i) == 0 ? first_row : second_row)) {
            const int r = row_of(i);
            softmax.sum[r] += S[i];
            odd[r] = i < 4 ? S[i + 1] : odd[r] + S[i + 1];
            softmax.sum[r] += S[i + 4];
            odd[r] += S[i + 5];
            largest[r] = max(max(largest[r], __float_as_int(S[i])), __float_as_int(S[i + 1]));
            largest[r] = max(max(largest[r], __float_as_int(S[i + 4])), __float_as_int(S[i + 5]));
        }
    if (first_row) softmax.sum[0] += odd[0];
    if (second_row) softmax.sum[1] += odd[1];
}

/* A P above this limit does not fit in e4m3, or it weighs in its row and exceeds the P of m's own key. `sum` has a
 * quarter of the row's columns. */
DEVICE float limit_of_e4m3(float sum) {
    const float one = __int_as_float((127 - (int)element::HEADROOM) << 23);
    return fminf(fmaxf(LARGE_SHARE * sum, one), element::P_LIMIT);
}

/* ---- the consumer ---------------------------------------------------------------------------------------------- */

/* A consumer has taken one work tile and may still hold O of the work tile before. */
enum which_tile { THIS_TILE = 0, PREVIOUS_TILE = 1 };

/* One consumer warpgroup, as in attn_fwd_sm90.cu:
 *
 *   run:  begin_tile  step<true>  step<false> ... step<false>      begin_tile  step<true> ...
 *         last PV     S           S PV            S PV             last PV     S
 *         of the      store O of                                   of this     store O of
 *         tile before the tile before                              tile        this tile
 */
struct consumer {
    const params &p;
    shared_memory &smem;
    const int wg, warp, lane;               /* the consumer's number, the warp in it, the lane in the warp */
    const int column;                       /* the thread's first column in each group of 8 */
    const bool is_leader, arrives;          /* The lane acts for its warp; the lane arrives at mbarriers. */
    const u32 q_desc_0, k_desc_0, v_desc_0; /* matrix descriptors of pipeline stage 0 */

    /* NOTE: these are references. Arrays inside the struct would delay the promotion of its scalars to registers,
     * and ptxas would take matrix descriptors for values that differ between threads. */
    float (&O)[O_REGS];
    u32 (&P)[P_REGS];
    online_softmax &softmax;

    ring<Q_STAGES> q_ring;
    ring<STAGES> k_ring;
    ring<V_STAGES> v_ring;
    ring<TILE_SLOTS> tile_ring;

    int row_block = wg; /* the row block of the work tile that this warpgroup computes */
    int diagonal = 0;   /* The thread's first row would see this key last under a causal mask. */
    row_key_walk walk;
    int goes_on = 0;            /* The work tile has another step. */
    u32 q_desc = 0;             /* the matrix descriptor of the row block */
    int has_o = 0;              /* O holds a work tile that is not stored yet. */
    float scale_log2 = 1;       /* of the work tile: S times this are exponents of 2 */
    int next_flush = 0;         /* O is flushed after the step of this key tile. */
    float flushed_log2[2] = {}; /* max_log2 that the sums are measured from; of no use without them */
    int has_sums = 0;           /* There are sums. */
    score_head q_head = {0, 0, 0, 0};

    static constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * D_QK);
    static constexpr u32 Q_BLOCK = matrix_descriptor_bytes(64 * ROW_BYTES);
    static constexpr u32 K_STAGE = matrix_descriptor_bytes(BLOCK_KV * D_QK);
    static constexpr u32 V_STAGE = matrix_descriptor_bytes(BLOCK_KV * D_V);

    DEVICE consumer(const params &p, shared_memory &smem, int wg, float (&O)[O_REGS], u32 (&P)[P_REGS],
                    online_softmax &softmax)
        : p(p), smem(smem), wg(wg), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), column(2 * (lane % 4)),
          is_leader(lane == 0), arrives(arrives_for_warp(lane)), q_desc_0(matrix_descriptor(smem_address(smem.q), 0)),
          k_desc_0(matrix_descriptor(smem_address(smem.k), 0)), v_desc_0(matrix_descriptor(smem_address(smem.v), 0)),
          O(O), P(P), softmax(softmax) {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = 0;
    }

    /* ---- pipeline stages and turns ---- */

    DEVICE void wait_q() { mbarrier_wait(&smem.q_full[q_ring.stage], q_ring.parity); }
    DEVICE void wait_k() { mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity); }
    DEVICE void wait_v() { mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity); }
    DEVICE void wait_v_and_k() {
        mbarrier_wait_both(&smem.v_full[v_ring.stage], v_ring.parity, &smem.k_full[k_ring.stage], k_ring.parity);
    }
    DEVICE void release_k() {
        if (arrives) mbarrier_arrive(&smem.k_empty[k_ring.stage]);
        k_ring.next();
    }
    DEVICE void release_v() {
        if (arrives) mbarrier_arrive(&smem.v_empty[v_ring.stage]);
        v_ring.next();
    }
    DEVICE int q_stage_of(which_tile which) const { return Q_STAGES == 1 ? 0 : q_ring.stage ^ 1 ^ which; }
    /* This also says that the warp has read the slot of the tile before. The scheduler may overwrite that slot. */
    DEVICE void release_q(which_tile which) {
        __syncwarp();
        if (arrives) mbarrier_arrive(&smem.q_empty[q_stage_of(which)]);
    }
    DEVICE void wait_turn() {
        if (TURN) bar_sync(BAR_TURN + wg, 256);
    }
    DEVICE void pass_turn() {
        if (TURN) bar_arrive(BAR_TURN + (wg + 1 == WGS ? 0 : wg + 1), 256);
    }

    /* ---- the tile that was taken, and the tile before ---- */

    DEVICE const tile &tile_of(which_tile which) const {
        const int slot = tile_ring.stage - 1 - which;
        return smem.tiles[slot < 0 ? slot + TILE_SLOTS : slot];
    }
    DEVICE int row_block_of(which_tile which) const {
        return row_block >= which ? row_block - which : row_block - which + WGS;
    }
    /* The place of O of the warp's row strip. */
    DEVICE element::output *o_smem() const { return smem.o + (SUMS_IN_SMEM ? (4 * wg + warp) * 2 * 16 * D_V : 0); }

    /* ---- parts of a step ---- */

    DEVICE void issue_s(float (&S)[S_REGS]) { issue_scores(S, q_desc, k_desc_0 + k_ring.stage * K_STAGE); }
    DEVICE void issue_pv() { issue_output(O, P, v_desc_0 + v_ring.stage * V_STAGE); }
    DEVICE void begin_rows() {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
        softmax = {{-INF, -INF}, {0, 0}, {0, 0}};
        has_sums = 0;
    }
    DEVICE void rescale_o(const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] *= alpha[row_of(i)];
    }
    DEVICE void change_all_scores(float (&S)[S_REGS], int j) {
        if (SCORE) {
            const float factor = tile_of(THIS_TILE).qk_factor;
#pragma unroll
            for (int i = 0; i < S_REGS; i++) S[i] *= factor;
            change_scores(S, p, q_head, j * BLOCK_KV + column, diagonal);
        }
    }

    /* ---- sums of 32 bits ---- */

    /* The thread's sums in shared memory: four registers of O, then the next lane's. */
    DEVICE float4 *sums() const { return (float4 *)o_smem() + lane; }
    /* The same in the workspace. */
    DEVICE float4 *far_sums() const {
        return (float4 *)p.sums + (long long)((blockIdx.x * WGS + wg) * 4 + warp) * 16 * D_V / 4 + lane;
    }
    /* O += the sums. Of the workspace only a few loads are on their way, because there are no more registers. */
    DEVICE void add_sums() {
        constexpr int BATCH = SUMS_IN_SMEM ? 1 : 4;
        float alpha[2];
#pragma unroll
        for (int r = 0; r < 2; r++) alpha[r] = ex2(flushed_log2[r] - softmax.max_log2[r]);
#pragma unroll
        for (int first = 0; first < O_REGS; first += 4 * BATCH) {
            float4 x[BATCH];
#pragma unroll
            for (int n = 0; n < BATCH; n++)
                x[n] =
                    SUMS_IN_SMEM ? sums()[(first / 4 + n) * 32] : ld_global_in_order(&far_sums()[(first / 4 + n) * 32]);
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
                const int i = first + 4 * n;
                O[i] = fmaf(x[n].x, alpha[0], O[i]), O[i + 1] = fmaf(x[n].y, alpha[0], O[i + 1]);
                O[i + 2] = fmaf(x[n].z, alpha[1], O[i + 2]), O[i + 3] = fmaf(x[n].w, alpha[1], O[i + 3]);
            }
        }
    }
    /* O moves to the sums in shared memory, which are then measured from the row maximum of now. */
    DEVICE void flush_to_smem() {
        if (has_sums) {
            add_sums();
        } else {
            if (is_leader) cp_async_bulk_wait_all_read(); /* O of the last tile has left this place. */
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < O_REGS; i += 4) sums()[i / 4 * 32] = make_float4(O[i], O[i + 1], O[i + 2], O[i + 3]);
        flushed_log2[0] = softmax.max_log2[0], flushed_log2[1] = softmax.max_log2[1];
    }
    /* O is added to the sums in the workspace, which stay measured from the row maximum of the first flush. Where the
     * row maximum has risen beyond the range of fp32 since then, the sums become infinite, and the tile fails. */
    DEVICE void flush_to_workspace() {
        if (!has_sums) {
#pragma unroll
            for (int i = 0; i < O_REGS; i += 4)
                far_sums()[i / 4 * 32] = make_float4(O[i], O[i + 1], O[i + 2], O[i + 3]);
            flushed_log2[0] = softmax.max_log2[0], flushed_log2[1] = softmax.max_log2[1];
        } else {
            const float x = ex2(softmax.max_log2[0] - flushed_log2[0]), y = ex2(softmax.max_log2[1] - flushed_log2[1]);
#pragma unroll
            for (int i = 0; i < O_REGS; i += 4)
                red_add_x4((float *)&far_sums()[i / 4 * 32], O[i] * x, O[i + 1] * x, O[i + 2] * y, O[i + 3] * y);
        }
    }
    DEVICE void flush() {
        if (SUMS_IN_SMEM)
            flush_to_smem();
        else
            flush_to_workspace();
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
        has_sums = 1;
    }
    DEVICE void flush_after(int j) {
        if (j == next_flush && (SUMS_IN_SMEM || p.sums)) {
            flush();
            next_flush -= FLUSH_STEPS;
        }
    }

    /* ---- a step ---- */

    /* One step. The first step of a work tile has no P V. It stores O of the tile before instead. */
    template <bool IS_FIRST> DEVICE void step() {
        /* NOTE: S is a new array in every step. Carried from one step to the next, its old values would stay alive, and
         * ptxas would run the products one by one (C7511). */
        float S[S_REGS], alpha[2];
        int largest[2] = {0, 0};
        const int j = walk.take();
        const bool is_special = IS_FIRST || walk.needs_max(j) || j == 0;
        goes_on = walk.has_next();
        pin(goes_on); /* This is computed before the votes. Behind them every step would wait for it. */

        /* wait K, V and the turn; issue S = Q K^T and O += P V of the keys before */
        if (!IS_FIRST && PV_FIRST)
            wait_v_and_k();
        else
            wait_k();
        wait_turn();
        if (!IS_FIRST) pin(O), pin(P); /* All writes to O and P come before the products. */
        if (!IS_FIRST && PV_FIRST) issue_pv();
        issue_s(S);
        if (!IS_FIRST && !PV_FIRST) wait_v(), issue_pv();
        if (TURN == TURN_WHILE_ISSUING || IS_FIRST) pass_turn();
        if (IS_FIRST) {
            if (has_o) finish_previous_tile();
            begin_rows();
            next_flush = j - FLUSH_STEPS;
        }

        /* wait S; release K, and Q after the last S */
        if (IS_FIRST || PV_FIRST)
            wgmma_wait_group<0>(S);
        else
            wgmma_wait_group<1>(S);
        if (TURN == TURN_UNTIL_SCORES && !IS_FIRST) pass_turn();
        release_k();
        if (!IS_FIRST && PV_FIRST) pin(O), release_v();
        if (walk.is_last(j)) release_q(THIS_TILE);

        /* mask and row max: most steps pass by on one branch; key 0 may be far above all other keys */
        change_all_scores(S, j);
        const bool is_raised = is_special && (IS_FIRST || walk.needs_max(j) || overflows(S, softmax, scale_log2));
        if (is_raised) {
            if (walk.is_partial(j)) mask_scores(S, p, tile_of(THIS_TILE).len_kv, j * BLOCK_KV + column, diagonal);
            raise_max(S, softmax, alpha, scale_log2, false);
            if (__any_sync(0xffffffffu, softmax.max[0] == -INF || softmax.max[1] == -INF)) walk.lacks_max_after(j);
            if (!IS_FIRST && PV_FIRST) rescale_o(alpha);
        }

        /* P = exp2; with SPLITS_SOFTMAX only of the thread's first row */
        exponentiate_rows(S, softmax, scale_log2, true, !SPLITS_SOFTMAX || IS_FIRST);
        const float limits[2] = {limit_of_e4m3(softmax.sum[0]), limit_of_e4m3(softmax.sum[1])};
        sum_and_compare(S, softmax, largest, true, !SPLITS_SOFTMAX || IS_FIRST);

        /* wait O; release V; rescale O to the new row maximum */
        if (!IS_FIRST && !PV_FIRST) {
            settle(SPLITS_SOFTMAX ? softmax.sum[0] : softmax.sum[0] + softmax.sum[1], smem.o);
            wgmma_wait_group<0>(O);
            release_v();
            if (is_raised) rescale_o(alpha);
        }

        /* P = exp2 of the second row, while P of the first row is rounded */
        if (SPLITS_SOFTMAX && !IS_FIRST)
            exponentiate_rows(S, softmax, scale_log2, false, true), sum_and_compare(S, softmax, largest, false, true);
        round_to_bytes(S, P);

        /* A P that e4m3 does not hold raises the row maximum. */
        if (!IS_FIRST && any_exceeds(largest, limits)) {
            raise_to_p(S, softmax, alpha);
            rescale_o(alpha);
            round_to_bytes(S, P);
        }
        if (!IS_FIRST) flush_after(j);
        if (IS_FIRST) has_o = true;
    }

    /* One step of a work tile that failed. Nothing overlaps, each step takes its row maximum, and O takes of V only
     * what each row sees. */
    DEVICE void repeat_step() {
        const tile &t = tile_of(THIS_TILE);
        float S[S_REGS], alpha[2];
        int largest[2] = {0, 0};
        const int j = walk.next, first_key = j * BLOCK_KV;
        const bool has_scale = is_plain(scale_log2);
        const float scale = has_scale ? scale_log2 : 1;
        wait_k();
        wait_turn();
        issue_s(S);
        pass_turn();
        wgmma_wait_group<0>(S);
        release_k();

        change_all_scores(S, j);
        if (!has_scale) {
#pragma unroll
            for (int i = 0; i < S_REGS; i++) S[i] *= scale_log2;
        }
        mask_scores(S, p, t.len_kv, first_key + column, diagonal);
        make_infinite(S, scale);
        raise_max(S, softmax, alpha, scale, true);
        rescale_o(alpha);
        exponentiate_exactly(S, softmax, scale);
        sum_and_compare(S, softmax, largest, true, true);
        round_to_bytes(S, P);

        wait_v();
        const int block_diagonal = t.row + 64 * row_block + t.len_kv - t.len_q;
        const tile_walk keys = keys_of(p, block_diagonal, block_diagonal + 63, t.len_kv);
        if (!uniform(is_partial<BLOCK_KV>(first_key, keys.full_begin, keys.full_end))) {
            pin(O), pin(P);
            issue_pv();
            wgmma_wait_group<0>(O);
        } else {
            accumulate_seen_bytes(O, P, smem.v[v_ring.stage], p, t.len_kv, first_key, diagonal);
        }
        release_v();
    }

    /* A step that only other warpgroups need. The stages and the turn pass through this warpgroup, too. */
    DEVICE void skip_step() {
        wait_k();
        wait_turn();
        pass_turn();
        release_k();
        wait_v();
        release_v();
    }
    DEVICE void skip_unseen_steps() {
#pragma unroll 1
        for (; walk.next_is_unseen(); walk.take()) skip_step();
    }

    /* ---- the end of a work tile ---- */

    DEVICE void store_o(which_tile which, const tile &t, int block, int first_row) {
        float factor[2], lse[2];
        bool is_empty[2];
        finish_softmax(softmax, p, factor, lse);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            is_empty[r] = lse[r] == INF;
            if (!is_empty[r]) factor[r] *= t.v_factor;
        }
        /* A row that sees no key gets zeros, whatever V holds. */
        if (__any_sync(0xffffffffu, is_empty[0] || is_empty[1])) {
#pragma unroll
            for (int i = 0; i < O_REGS; i++)
                if (is_empty[row_of(i)]) O[i] = 0;
        }
        order_columns(O);
        if constexpr (O_BY_TMA)
            store_by_tma(O, factor, p, t, o_smem(), first_row);
        else
            store_directly(O, factor, p, t, first_row);
        store_lse(lse, p, t, first_row);
    }
    /* Stores O of the tile before. A row strip that failed is not stored: the scheduler will give its tile out
     * again. */
    DEVICE void finish_previous_tile() {
        const tile &t = tile_of(PREVIOUS_TILE);
        const int block = row_block_of(PREVIOUS_TILE), first_row = t.row + 64 * block + 16 * warp;
        if (SUMS_IN_SMEM && has_sums) add_sums();
        const bool is_plain_tile = SCORE || is_plain(t.qk_factor * p.scale_log2);
        if (uniform(!is_plain_tile || has_failed(O, softmax))) {
            if (is_leader) note_failure(smem, 4 * wg + warp, t.idx, 4 * block + warp);
        } else {
            store_o(PREVIOUS_TILE, t, block, first_row);
        }
    }
    /* The same outside a step, where no product hides the store. */
    DEVICE void finish_previous_tile_now() {
        if (has_o) finish_previous_tile();
        /* NOTE: the compiler must not know this value. It would split the loop over work tiles by it, and ptxas
         * would take matrix descriptors for values that differ between threads. */
        has_o = uniform(0);
    }

    /* ---- a work tile ---- */

    /* Takes the next work tile. Meanwhile the last P V of the tile before runs. Without a tile before, P V multiplies
     * garbage, and no step uses the result. */
    DEVICE tile_command begin_tile() {
        if (has_o) wait_v();
        pin(O), pin(P);
        issue_pv();
        wait_q();
        q_ring.next(), tile_ring.next();
        /* Later row blocks may see more keys, or may have no row. So the row blocks rotate among the warpgroups. */
        row_block = row_block + 1 == WGS ? 0 : row_block + 1;
        const tile &t = tile_of(THIS_TILE);
        const int shift = t.len_kv - t.len_q, first_row = t.row + 64 * row_block;
        const int last_row = min(first_row + 64, t.len_q) - 1;
        const tile_walk keys = keys_of(p, first_row + shift, last_row + shift, t.len_kv);
        const bool is_idle = first_row > last_row || keys.begin >= keys.end;
        const tile_command command = (tile_command)uniform(t.command);
        walk.seen_top = uniform(is_idle ? -1 : ceil_div(keys.end, BLOCK_KV) - 1);
        walk.next = uniform(t.kv_end) - 1, walk.bottom = uniform(t.kv_begin);
        diagonal = first_row + 16 * warp + lane / 4 + shift;
        scale_log2 = SCORE ? p.scale_log2 : t.qk_factor * p.scale_log2;
        wgmma_wait_group<0>(O);
        if (has_o) release_v();
        /* Later, beside the registers of S, there were spills. */
        if (!SUMS_IN_SMEM && has_sums) add_sums(), has_sums = 0;
        q_desc = q_desc_0 + q_stage_of(THIS_TILE) * Q_STAGE + row_block * Q_BLOCK;
        q_head.b_idx = t.b_idx, q_head.head = t.head, q_head.shift = shift;
        if (SCORE && p.alibi_slopes && command <= REPEAT)
            q_head.slope = p.alibi_slopes[t.b_idx * p.alibi_stride_b + t.head];
        return command;
    }
    /* The row block sees no key of the work tile, or has no row. */
    DEVICE bool is_idle() const { return walk.seen_top < 0; }

    /* The work tile's O stays in registers. The first step of the next tile stores it. */
    DEVICE void compute_tile() {
        walk.begin_rows(p, diagonal - lane / 4, tile_of(THIS_TILE).len_kv);
        skip_unseen_steps();
        step<true>();
#pragma unroll 1
        while (goes_on) step<false>();
    }
    /* Computes and stores a work tile that failed, alone. Only row strips that failed are stored, because the other row
     * strips have been stored before. */
    DEVICE void repeat_tile() {
        skip_unseen_steps();
        begin_rows();
#pragma unroll 1
        for (; walk.has_next(); walk.take()) repeat_step();
        const tile &t = tile_of(THIS_TILE);
        const int strip = 4 * row_block + warp;
        if (uniform(t.failed_strips >> strip & 1)) store_o(THIS_TILE, t, row_block, t.row + 16 * strip);
    }
    /* The row block sees no key, or has no row. is_new says that its zeros are not stored yet. */
    DEVICE void skip_tile(bool is_new) {
#pragma unroll 1
        for (; walk.has_next(); walk.take()) skip_step();
        const tile &t = tile_of(THIS_TILE);
        const int first_row = t.row + 64 * row_block + 16 * warp;
        if (is_new && first_row < t.len_q) store_zeros(p, t, first_row);
    }
    /* Tells the producer that this warp has noted all its failures. */
    DEVICE void report() {
        if (arrives) mbarrier_arrive(&smem.all_done);
    }

    DEVICE void run() {
        if (wg == WGS - 1) pass_turn(); /* Warpgroup 0 has the first turn. */
        for (;;) {
            const tile_command command = begin_tile();
            if (command == COMPUTE && !is_idle()) {
                compute_tile();
                continue;
            }
            finish_previous_tile_now();
            if (command == END) break;
            if (command == REPORT)
                report();
            else if (command == REPEAT && !is_idle())
                repeat_tile();
            else
                skip_tile(command == COMPUTE);
            release_q(THIS_TILE);
        }
        /* Shared memory outlives its readers. NOTE: without TMA there is nothing to wait for. But without this line
         * ptxas takes the loop's matrix descriptors for values that differ between threads. */
        if (is_leader) cp_async_bulk_wait_all_read();
    }
};

/* One consumer warpgroup, for the whole launch. */
DEVICE void consume(const params &p, shared_memory &smem, int wg) {
    float O[O_REGS];
    u32 P[P_REGS];
    online_softmax softmax;
    consumer(p, smem, wg, O, P, softmax).run();
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const __grid_constant__ params p) {
    /* There is no static shared memory, so the dynamic one starts at 1024, as its alignment asks. */
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    shared_memory &smem = *reinterpret_cast<shared_memory *>(smem_bytes);
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q), prefetch_tensormap(&p.k), prefetch_tensormap(&p.v);
        if (O_BY_TMA) prefetch_tensormap(&p.o);
        init_barriers(smem);
        init_value_barriers(smem);
        for (int i = 0; i < 4 * WGS; i++) smem.num_failed[i] = smem.num_seen[i] = 0;
        smem.sequences.first = -32, smem.sequences.begin = smem.sequences.end = 0;
        mbarrier_init_fence();
    }
    griddepcontrol_wait(); /* The kernels before it in the stream have ended. No memory has been touched until here. */
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (threadIdx.x == 0) {
            producer loads = {p, smem};
            loads.run();
            end_values(smem, loads.v);
        }
        if (warp == 1) schedule_tiles(p, smem);
        if (warp >= 2) transposer(smem, warp - 2).run();
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        consume(p, smem, wg - 1);
    }
}
