/* Attention forward on Hopper in 8 bits:  O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row.
 *
 *   q [b, len_q, h, d]    k, v [b, len_kv, h_kv, d] in e4m3    o like q in bf16    lse [b, h, len_q] float
 *   q_descale, k_descale, v_descale [b, h_kv] float: q, k and v are multiplied by these factors
 *
 * CTAs, work tiles, roles, pipelines and turns are those of attn_fwd_sm90.cu, and so are the headers. Three things
 * differ:
 *
 *   V   wgmma wants V^T. Transposer warps make it (attn_fwd_fp8_values.cuh):
 *
 *         producer --raw_full[stage]--> transposers --v_full[stage]--> consumers: O += P V --v_empty[stage]-->
 *                 <--raw_empty[stage]--
 *
 *   P   e4m3 ends at 448. The row maximum m makes the largest P 2^7, and it lags. m rises before e4m3 would cut a P, or
 *       before the rounding of a P would show in O. A step asks for both in one vote.
 *
 *   O   The tensor cores keep 14 bits of a sum of 8-bit products. So after FLUSH_STEPS steps the registers of O are
 *       added to sums of 32 bits, and begin again at zero. The sums lie in shared memory. Above 128 columns there is
 *       little room, and they lie in the workspace. With a causal mask half of 192 columns has room.
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
/* V^T is one chunk of columns. */
constexpr int V_LEADING_BYTES = 0;
constexpr bool PRODUCER_IS_WARP = true;
/* Options of the end of a work tile that 16 bits have (attn_fwd_sm90.cu). */
constexpr bool CLOSES_EARLY = false, STORES_EARLY = false, WALKS_EARLY = false;
/* A row block's Q is in registers during its work tile. Shared memory then has less to move in each step. */
constexpr bool HOLDS_Q = HEAD_DIM == 192;
constexpr int Q_REGS = HOLDS_Q ? HEAD_DIM / 8 : 1;
/* 256 columns of O beside 128 keys of S and P leave the other warps 24 registers. So do 192 columns of Q and O. */
constexpr bool IS_WIDE = HEAD_DIM > 128;
constexpr int PRODUCER_REGS = WGS == 3 ? 32 : IS_WIDE ? 24 : 40;
constexpr int CONSUMER_REGS = WGS == 3 ? 160 : IS_WIDE ? 240 : 232;
constexpr int V_STAGES = STAGES, V_LOAD_STAGES = RAW_STAGES;
constexpr bool READS_OCTETS = false; /* there are no functions of a user */
/* O has a place of its own, which also holds its sums of 32 bits. Each warp has chunks of 16 rows. Above 128 columns
 * the place has only sums, and only those of the first registers of O. The others lie in the workspace. */
constexpr bool O_IN_Q = false, SUMS_IN_SMEM = D_V <= 128;
constexpr int SMEM_COLUMNS = D_V <= 128 ? D_V : D_V == 192 && CAUSAL ? 96 : 0, SMEM_SUM_REGS = SMEM_COLUMNS / 2;
constexpr int O_ELEMENTS = SMEM_COLUMNS ? 2 * BLOCK_Q * SMEM_COLUMNS : 8, O_ROWS = 16, O_ROW_BYTES = 128, O_CHUNK = 64,
              O_CHUNKS = D_V / O_CHUNK;
constexpr int FLUSH_STEPS = FA_FLUSH_KEYS(D_V) / BLOCK_KV;
/* Plain steps have a loop of their own. Where P V ends amid or after the exponentials, its wait would be in the loop
 * and in the rare code, and the warps of a warpgroup must not meet in different waits. */
constexpr bool HAS_PLAIN_STEPS = PV_FIRST;

static_assert(HEAD_DIM % O_CHUNK == 0, "O leaves in chunks of 64 columns");

#include "attn_fwd_tiles.cuh"
#include "attn_fwd_memory.cuh"
#include "attn_fwd_producer.cuh"
#include "attn_fwd_softmax.cuh"
#include "attn_fwd_repeats.cuh"
#include "attn_fwd_output.cuh"
#include "attn_fwd_consumer.cuh"
#include "attn_fwd_fp8_values.cuh"

/* ---- products -------------------------------------------------------------------------------------------------- */

/* O = P V + (accumulate ? O : 0) for the 64 rows of a warpgroup. */
DEVICE void issue_output(float (&O)[O_REGS], const u32 (&P)[P_REGS], u32 v_desc, int accumulate) {
    constexpr u32 high = matrix_descriptor_high(KEY_CHUNK);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KV; k += 32)
        wgmma<D_V, element>::rs<high>(O, P + k / 8,
                                      v_desc + matrix_descriptor_bytes(k / KEY_CHUNK * D_V * KEY_CHUNK + k % KEY_CHUNK),
                                      k > 0 || accumulate);
    wgmma_commit_group();
}

/* S = Q K^T for the 64 rows of a warpgroup, with Q in registers. */
DEVICE void issue_scores_of_registers(float (&S)[S_REGS], const u32 (&Q)[Q_REGS], u32 k_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D_QK; k += 32)
        wgmma<BLOCK_KV, element>::rs<high>(
            S, Q + k / 8, k_desc + matrix_descriptor_bytes(k / CHUNK * BLOCK_KV * ROW_BYTES + k % CHUNK), k > 0);
    wgmma_commit_group();
}

/* ---- the row maximum ------------------------------------------------------------------------------------------- */

/* The factor that makes exponents of 2 of S: positive and normal, or else the work tile is repeated. */
DEVICE bool is_plain(float scale_log2) { return scale_log2 >= 1e-37f && scale_log2 < INF; }

/* A P above this limit does not fit in e4m3. Or it weighs in its row and exceeds the P of m's own key. sum has a
 * quarter of the row's columns. */
DEVICE float limit_of_e4m3(float sum) {
    const float one = __int_as_float((127 - (int)element::HEADROOM) << 23);
    return fminf(fmaxf(LARGE_SHARE * sum, one), element::P_LIMIT);
}

/* Whole warp. */
DEVICE bool some_p_exceeds(const float (&P)[S_REGS], const float (&limits)[2]) {
    int largest[2];
    find_largest(P, largest);
    return any_exceeds(largest, limits);
}

/* ---- the consumer ---------------------------------------------------------------------------------------------- */

/* P V, the step with its flush, and the end of a work tile. attn_fwd_consumer.cuh has the rest, and calls these
 * functions. */
struct consumer : consumer_base {
    u32 (&Q)[Q_REGS]; /* the row block's Q as an operand */

    DEVICE consumer(const params &p, shared_memory &smem, int wg, float (&O)[O_REGS], u32 (&P)[P_REGS],
                    u32 (&Q)[Q_REGS], online_softmax &softmax)
        : consumer_base(p, smem, wg, O, P, softmax), Q(Q) {
#pragma unroll
        for (int i = 0; i < Q_REGS; i++) Q[i] = 0;
    }

    int next_flush = 0;         /* O is flushed after the step of this key tile. */
    float flushed_log2[2] = {}; /* the max_log2 that the sums are measured from */
    int has_sums = 0;           /* There are sums. */
    int has_o_values = 1;       /* 0: O has moved to the sums, and the next P V replaces its registers. */

    DEVICE void wait_v_and_k() {
        mbarrier_wait_both(&smem.v_full[v_ring.stage], v_ring.parity, &smem.k_full[k_ring.stage], k_ring.parity);
    }

    /* The place of O of the warp's row strip. */
    DEVICE element::output *o_smem() const { return smem.o + (4 * wg + warp) * 2 * 16 * SMEM_COLUMNS; }

    /* ---- parts of a step ---- */

    /* Four registers of Q are an operand of 64 rows and 32 columns. */
    DEVICE void load_q_registers() {
        const int row = 64 * row_block + 16 * warp + lane % 16;
        const u32 q = smem_address(smem.q[q_stage_of(THIS_TILE)]) + row * ROW_BYTES;
        constexpr int VECTORS = ROW_BYTES / 16;
#pragma unroll
        for (int k = 0; k < D_QK / 32; k++) {
            u32 m[4];
            const int chunk = 2 * k / VECTORS, vector = 2 * k % VECTORS + lane / 16;
            ldmatrix_x4(m, q + chunk * BLOCK_Q * ROW_BYTES + swizzled<ROW_BYTES>(vector, row) * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) Q[4 * k + i] = m[i];
        }
    }
    DEVICE void issue_s(float (&S)[S_REGS]) {
        if constexpr (HOLDS_Q) {
            pin(Q);
            issue_scores_of_registers(S, Q, k_desc_0 + k_ring.stage * K_STAGE);
        } else {
            consumer_base::issue_s(S);
        }
    }
    DEVICE void issue_pv() {
        issue_output(O, P, v_desc_0 + v_ring.stage * V_STAGE, has_o_values);
        has_o_values = 1;
    }
    DEVICE void begin_rows() {
        consumer_base::begin_rows();
        has_sums = 0, next_flush = walk.next - FLUSH_STEPS;
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

    /* The thread's sums: four registers of O, then the next lane's. No other thread reads them. */
    DEVICE float4 *sums_in_smem(int i) const { return (float4 *)o_smem() + lane + i / 4 * 32; }
    DEVICE float4 *sums_in_workspace(int i) const {
        return (float4 *)p.sums + (long long)((blockIdx.x * WGS + wg) * 4 + warp) * 16 * D_V / 4 + lane + i / 4 * 32;
    }
    DEVICE float4 load_sums(int i) const {
        return i < SMEM_COLUMNS / 2 ? *sums_in_smem(i) : ld_global_in_order(sums_in_workspace(i));
    }
    DEVICE void store_sums(int i, float4 x) const {
        if (i < SMEM_SUM_REGS)
            *sums_in_smem(i) = x;
        else
            *sums_in_workspace(i) = x;
    }
    /* O += the sums. Of the workspace as many loads are on their way as the registers of S and P have room for. */
    DEVICE void add_sums() {
        constexpr int BATCH = SUMS_IN_SMEM ? 1 : O_REGS / 8;
        float alpha[2];
#pragma unroll
        for (int r = 0; r < 2; r++) alpha[r] = ex2(flushed_log2[r] - softmax.max_log2[r]);
#pragma unroll
        for (int first = 0; first < O_REGS; first += 4 * BATCH) {
            float4 x[BATCH];
#pragma unroll
            for (int n = 0; n < BATCH; n++) x[n] = load_sums(first + 4 * n);
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
            if (elect_one()) cp_async_bulk_wait_all_read(); /* O of the last tile has left this place. */
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < O_REGS; i += 4) store_sums(i, make_float4(O[i], O[i + 1], O[i + 2], O[i + 3]));
        flushed_log2[0] = softmax.max_log2[0], flushed_log2[1] = softmax.max_log2[1];
    }
    DEVICE static float factor_of_rise(float log2) {
        return LOCAL && log2 < -64 ? __int_as_float(0x7fffffff) : ex2(log2);
    }
    /* O is added to the sums in the workspace, which stay measured from the row maximum of the first flush. Where the
     * row maximum has risen beyond the range of fp32 since then, the sums become infinite, and the tile fails. A row
     * whose attention chunk hid all keys up to the first flush had no maximum, and its sums are measured from 0. A
     * maximum far below 0 would make them subnormal, and is NaN instead. */
    DEVICE void flush_to_workspace() {
        if (!has_sums) {
#pragma unroll
            for (int i = 0; i < O_REGS; i += 4) store_sums(i, make_float4(O[i], O[i + 1], O[i + 2], O[i + 3]));
            flushed_log2[0] = softmax.max_log2[0], flushed_log2[1] = softmax.max_log2[1];
        } else {
            const float x = factor_of_rise(softmax.max_log2[0] - flushed_log2[0]);
            const float y = factor_of_rise(softmax.max_log2[1] - flushed_log2[1]);
#pragma unroll
            for (int i = 0; i < O_REGS; i += 4)
                if (i < SMEM_SUM_REGS) {
                    const float4 old = *sums_in_smem(i);
                    *sums_in_smem(i) = make_float4(fmaf(O[i], x, old.x), fmaf(O[i + 1], x, old.y),
                                                   fmaf(O[i + 2], y, old.z), fmaf(O[i + 3], y, old.w));
                } else {
                    red_add_x4((float *)sums_in_workspace(i), O[i] * x, O[i + 1] * x, O[i + 2] * y, O[i + 3] * y);
                }
        }
    }
    DEVICE void flush() {
        if (SUMS_IN_SMEM)
            flush_to_smem();
        else
            flush_to_workspace();
        has_sums = 1, has_o_values = 0;
    }
    DEVICE void flush_after(int j) {
        if (j == next_flush && (SUMS_IN_SMEM || p.sums)) {
            flush();
            next_flush -= FLUSH_STEPS;
        }
    }
    /* Registers of S leave no room to add sums of the workspace in the step that stores O. */
    DEVICE void complete_o() {
        if (!SUMS_IN_SMEM && has_sums) add_sums(), has_sums = 0;
    }
    /* The sums of a repeated tile are always measured from the row maximum of now. Its scores may be huge, and then a
     * difference of max_log2 is one of roundings. */
    DEVICE void rescale_sums(const float (&alpha)[2]) {
        if (has_sums) {
#pragma unroll 1
            for (int i = 0; i < O_REGS; i += 4) {
                const float4 x = load_sums(i);
                store_sums(i, make_float4(x.x * alpha[0], x.y * alpha[0], x.z * alpha[1], x.w * alpha[1]));
            }
        }
        flushed_log2[0] = softmax.max_log2[0], flushed_log2[1] = softmax.max_log2[1];
    }
    DEVICE void end_repeat() {
        if (has_sums) add_sums(), has_sums = 0;
        __syncwarp(); /* O may go to the place of the sums. */
    }

    /* ---- a step ---- */

    /* The products of a step: S = Q K^T, and O += P V of the keys before. The first step of a work tile has no P V. It
     * stores O of the tile before instead. NOTE: the four warps of a warpgroup meet in wgmma, so all of them take the
     * same copy of this function. */
    template <bool IS_FIRST> DEVICE void multiply(float (&S)[S_REGS], int j) {
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

        /* wait S; release K */
        if (IS_FIRST || PV_FIRST)
            wgmma_wait_group<0>(S);
        else
            wgmma_wait_group<1>(S);
        if (TURN == TURN_UNTIL_SCORES && !IS_FIRST) pass_turn();
        release_k();
        if (!IS_FIRST && PV_FIRST) pin(O), release_v();
    }

    /* S becomes P in 32 bits, and P is rounded. limits are those of P. Returns whether some P may exceed them. */
    template <bool IS_FIRST> DEVICE bool compute_p(float (&S)[S_REGS], float (&limits)[2], int j, bool is_special) {
        float alpha[2];
        int largest[2] = {0, 0};

        /* release Q after the last S */
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
        limits[0] = limit_of_e4m3(softmax.sum[0]), limits[1] = limit_of_e4m3(softmax.sum[1]);
        sum_rows(S, softmax, largest, true, !SPLITS_SOFTMAX || IS_FIRST);

        /* The question whether P fits is asked before the wait for P V, which hides the vote. */
        bool may_exceed = false;
        if (!IS_FIRST && !PV_FIRST && !SPLITS_SOFTMAX) may_exceed = any_exceeds(largest, limits);

        /* wait O; release V; rescale O to the new row maximum */
        if (!IS_FIRST && !PV_FIRST) {
            settle(SPLITS_SOFTMAX ? softmax.sum[0] : softmax.sum[0] + softmax.sum[1], smem.o);
            wgmma_wait_group<0>(O);
            release_v();
            if (is_raised) rescale_o(alpha);
        }

        /* P = exp2 of the second row, while P of the first row is rounded */
        if (SPLITS_SOFTMAX && !IS_FIRST)
            exponentiate_rows(S, softmax, scale_log2, false, true), sum_rows(S, softmax, largest, false, true);
        round_to_bytes(S, P);
        if (!IS_FIRST && (PV_FIRST || SPLITS_SOFTMAX)) may_exceed = any_exceeds(largest, limits);
        return may_exceed;
    }
    /* The same in a plain step, whose row maximum stays, and whose key tile is not the last. */
    DEVICE bool compute_plain_p(float (&S)[S_REGS], float (&limits)[2], int j) {
        int largest[2] = {0, 0};
        change_all_scores(S, j);
        exponentiate_rows(S, softmax, scale_log2, true, true);
        limits[0] = limit_of_e4m3(softmax.sum[0]), limits[1] = limit_of_e4m3(softmax.sum[1]);
        sum_rows(S, softmax, largest, true, true);
        round_to_bytes(S, P);
        return any_exceeds(largest, limits);
    }

    /* A P that e4m3 does not hold raises the row maximum. Sums of four P have said whether to look at each P. */
    DEVICE void finish_step(float (&S)[S_REGS], const float (&limits)[2], int j, bool may_exceed) {
        if (may_exceed && some_p_exceeds(S, limits)) {
            float alpha[2];
            raise_to_p(S, softmax, alpha);
            rescale_o(alpha);
            round_to_bytes(S, P);
        }
        flush_after(j);
    }

    template <bool IS_FIRST> DEVICE void step() {
        /* NOTE: S is a new array in every step. Carried from one step to the next, its old values would stay alive, and
         * ptxas would run the products one by one (C7511). */
        float S[S_REGS], limits[2];
        const int j = walk.take();
        const bool is_special = IS_FIRST || walk.needs_max(j) || j == 0;
        goes_on = walk.has_next();
        pin(goes_on); /* This is computed before the votes. Behind them every step would wait for it. */
        multiply<IS_FIRST>(S, j);
        const bool may_exceed = compute_p<IS_FIRST>(S, limits, j, is_special);
        if (IS_FIRST)
            has_o = true;
        else
            finish_step(S, limits, j, may_exceed);
    }

    /* Plain steps, and the step behind them. NOTE: the inner loop has no rare code in its middle. Each jump over such
     * code costs 20 to 30 clocks. */
    DEVICE void plain_steps() {
        /* Plain are the key tiles between these two. A flush, too, ends the loop. */
        const int above = max(max(walk.bottom, next_flush), LOCAL ? max(walk.full_begin - 1, 0) : 0);
        const int below = walk.exact_begin;
        float S[S_REGS], limits[2];
        int j, is_plain;
#pragma unroll 1
        for (;;) {
            float new_S[S_REGS]; /* see the note on S in step() */
            j = walk.take();
            is_plain = above < j && j < below;
            multiply<false>(new_S, j);
            const bool stops = !is_plain || compute_plain_p(new_S, limits, j);
#pragma unroll
            for (int i = 0; i < S_REGS; i++) S[i] = new_S[i];
            if (stops) break;
        }
        goes_on = walk.has_next();
        if (is_plain)
            finish_step(S, limits, j, true);
        else
            finish_step(S, limits, j, compute_p<false>(S, limits, j, walk.needs_max(j) || j == 0));
    }
    DEVICE void run_steps() {
        step<true>();
#pragma unroll 1
        while (goes_on) {
            if (HAS_PLAIN_STEPS)
                plain_steps();
            else
                step<false>();
        }
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
        compute_s(S);

        change_all_scores(S, j);
        if (!has_scale) {
#pragma unroll
            for (int i = 0; i < S_REGS; i++) S[i] *= scale_log2;
        }
        mask_scores(S, p, t.len_kv, first_key + column, diagonal);
        make_infinite(S, scale);
        raise_max(S, softmax, alpha, scale, true);
        rescale_o(alpha), rescale_sums(alpha);
        exponentiate_exactly(S, softmax, scale);
        sum_rows(S, softmax, largest, true, true);
        round_to_bytes(S, P);

        wait_v();
        if (sees_all_of(first_key)) {
            pin(O), pin(P);
            issue_pv();
            wgmma_wait_group<0>(O);
        } else {
            accumulate_seen_bytes(O, P, smem.v[v_ring.stage], p, t.len_kv, first_key, diagonal);
        }
        release_v();
        flush_after(j);
        if (!has_o_values) {
#pragma unroll
            for (int i = 0; i < O_REGS; i++) O[i] = 0;
            has_o_values = 1;
        }
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
            store_by_tma(O, factor, p, t, o_smem(), first_row, block);
        else
            store_directly(O, factor, p, t, first_row, block);
        store_lse(lse, p, t, first_row, block);
    }
    DEVICE void begin_steps() {
        if constexpr (HOLDS_Q) load_q_registers();
    }
    /* Stores O of the tile before. A row strip that failed is not stored: the scheduler will give its tile out
     * again. */
    DEVICE void finish_previous_tile() {
        const tile &t = tile_of(PREVIOUS_TILE);
        const int block = row_block_of(PREVIOUS_TILE), first_row = row_of_strip(p, t, block, warp);
        if (SUMS_IN_SMEM && has_sums) add_sums();
        const bool is_plain_tile = SCORE || is_plain(t.qk_factor * p.scale_log2);
        if (uniform(!is_plain_tile || has_failed(O, softmax))) {
            if (is_leader) note_failure(smem, 4 * wg + warp, t.idx, 4 * block + warp);
        } else {
            store_o(PREVIOUS_TILE, t, block, first_row);
        }
    }
};

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
        init_notes(smem);
        mbarrier_init_fence();
    }
    griddepcontrol_wait(); /* The kernels before it in the stream have ended. No memory has been touched until here. */
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (warp == 0) {
            producer loads = {p, smem};
            loads.run();
            if (elect_one()) end_values(smem, loads.v);
        }
        if (warp == 1) schedule_tiles(p, smem, no_share());
        if (warp >= 2) transposer(smem, warp - 2).run();
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        float O[O_REGS];
        u32 P[P_REGS], Q[Q_REGS];
        online_softmax softmax;
        consumer c(p, smem, wg - 1, O, P, Q, softmax);
        run(c);
    }
}
