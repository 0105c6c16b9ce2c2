/* Attention forward on Hopper:  O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row.
 *
 *   q [b, len_q, h, d]    k [b, len_kv, h_kv, d]    v [b, len_kv, h_kv, d_v]    o [b, len_q, h, d_v]
 *   lse [b, h, len_q] float
 *
 * CTAs are persistent: CTAS of them, mostly one, stay on each SM for the whole launch. A CTA takes one work tile after
 * another. A work tile is BLOCK_Q query rows of one head. The CTA walks over their keys in key tiles of BLOCK_KV keys,
 * from the last key tile to the first, one step each. A scheduler warp finds work tiles. One producer thread loads by
 * TMA. WGS consumer warpgroups compute. Each owns a row block of 64 rows, and each of its warps owns a row strip of 16
 * rows:
 *
 *   scheduler --tile_found--> producer --q_full[stage]--> consumers: every S of the tile --q_empty[stage]--> producer
 *            <--tile_wanted--          --k_full[stage]--> consumers: S = Q K^T           --k_empty[stage]-->
 *                                      --v_full[stage]--> consumers: O += P V            --v_empty[stage]-->
 *
 * The pipelines run on across work tiles. While one work tile ends, Q and the keys of the next one arrive. Its O is
 * stored while the first scores of the next work tile are computed.
 *
 * Tensor cores work while exp2 runs, for two reasons. First, a warpgroup issues S of the next keys together with P V
 * of the last keys before its softmax. Second, the warpgroups take turns in issuing products, so that their softmaxes
 * fall into different parts of the period:
 *
 *   warpgroup 0   | S1 P0V | softmax 1      | S2 P1V | softmax 2      |
 *   warpgroup 1            | S1 P0V | softmax 1      | S2 P1V | softmax 2
 *
 * The row maximum m of the online softmax lags. P = 2^(c S - c m) gives the same quotient for every m that does not
 * overflow. m is the maximum of the first key tile that a row sees. Later steps raise m only where a P exceeds the P
 * of m's own key and weighs in the row's sum. Rounding P to 16 bits costs a power of two no digit, and m makes the P
 * of its own key a power of two. The question costs one vote about the sum that a step has added.
 *
 * An overflow remains inf or NaN. So a work tile is checked when it ends, and a tile that failed is repeated with the
 * row maximum of every step. The same check finds rows that a NaN or inf of V has reached through a P of zero,
 * although the rows do not see its key. The repetition takes of V only what each row sees.
 *
 * This file holds the products and the steps of a consumer. key_walk.cuh says which key tiles are visited and masked.
 * attn_fwd_tiles.cuh says where a work tile lies, _memory holds shared memory, _producer the scheduler and the loads,
 * _softmax S to P, _repeats the check and the repetition, _output O to global memory.
 *
 * Specification: cpu/reference.c. Design and limits: forward.md. Measurements: measurements/forward.md. */
#include "attn_fwd_params.h"
#include "ptx_sm90.cuh"

/* ---- parameters: one row of tiles.def -------------------------------------------------------------------------- */

#if !defined(D_QK) || !defined(D_V) || !defined(BLOCK_KV) || !defined(WGS) || !defined(STAGES) || !defined(Q_STAGES)
#error "shape: D_QK columns of Q and K, D_V of V and O, BLOCK_KV keys, WGS of 64 rows, STAGES of K and V, Q_STAGES"
#endif
#if !defined(TURN) || !defined(O_WAIT) || !defined(CTAS)
#error "schedule: TURN and O_WAIT of attn_fwd_schedule.cuh, and CTAS of an SM"
#endif
#if !defined(BF16) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE) || !defined(DROPOUT)
#error "variant: BF16 or fp16; CAUSAL, LOCAL window, VARLEN packed sequences, SCORE softcap and ALiBi, DROPOUT: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_sm90
#endif

/* ---- derived constants ----------------------------------------------------------------------------------------- */

#include "attn_fwd_schedule.cuh"

constexpr int PRODUCER_REGS = WGS >= 3 ? 32 : 40;
constexpr int CONSUMER_REGS = WGS == 4 ? 112 : WGS == 3 ? 160 : CTAS == 2 ? 216 : 232;
/* O leaves from the place of its work tile's Q. V has the room that a place for O would need. */
constexpr bool O_IN_Q = O_BY_TMA && D_V <= D_QK && !LONGEST_FIRST && BLOCK_KV > 64;
constexpr int V_STAGES = O_IN_Q ? STAGES + 1 : STAGES, V_LOAD_STAGES = V_STAGES;
constexpr u32 V_ARRIVALS = 1;
/* The place of O: elements, rows between its chunks, and the chunks themselves. */
constexpr int O_ELEMENTS = O_BY_TMA && !O_IN_Q ? BLOCK_Q * D_V : 8, O_ROWS = O_IN_Q ? BLOCK_Q : 16;
constexpr int O_ROW_BYTES = ROW_BYTES, O_CHUNK = CHUNK;

static_assert(CTAS * (PRODUCER_REGS + WGS * CONSUMER_REGS) <= 512, "an SM has 64 K registers");
static_assert(!O_IN_Q || TURN, "a warpgroup's warps meet between the last S of a tile, which reads Q, and its O");
static_assert(!DROPOUT || BLOCK_KV % 32 == 0, "dropout draws patches of 32 keys");

#include "attn_fwd_tiles.cuh"
#include "attn_fwd_memory.cuh"
#include "attn_fwd_producer.cuh"
#include "attn_fwd_softmax.cuh"
#include "attn_fwd_repeats.cuh"
#include "attn_fwd_output.cuh"

/* ---- products -------------------------------------------------------------------------------------------------- */

/* S = Q K^T for the 64 rows of a warpgroup. */
DEVICE void issue_scores(float (&S)[S_REGS], u32 q_desc, u32 k_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D_QK / 16; k++) {
        const int chunk = k * 16 / CHUNK, in_chunk = k * 16 % CHUNK * element::BYTES;
        wgmma<BLOCK_KV, element>::ss<high, high>(
            S, q_desc + matrix_descriptor_bytes(chunk * BLOCK_Q * ROW_BYTES + in_chunk),
            k_desc + matrix_descriptor_bytes(chunk * BLOCK_KV * ROW_BYTES + in_chunk), k > 0);
    }
    wgmma_commit_group();
}

/* O += P V for the 64 rows of a warpgroup. */
DEVICE void issue_output(float (&O)[O_REGS], const u32 (&P)[P_REGS], u32 v_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; k++)
        wgmma<D_V, element>::rs<high>(O, P + 4 * k, v_desc + matrix_descriptor_bytes(k * 16 * ROW_BYTES));
    wgmma_commit_group();
}

/* ---- the consumer ---------------------------------------------------------------------------------------------- */

/* A consumer has taken one work tile and may still hold O of the work tile before. */
enum which_tile { THIS_TILE = 0, PREVIOUS_TILE = 1 };

/* One consumer warpgroup. It computes one row block of each work tile, and passes over key tiles that only other row
 * blocks see. Without a mask it reads a work tile like this:
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
    const float scale_log2;

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
    int goes_on = 0; /* The work tile has another step. */
    u32 q_desc = 0;  /* the matrix descriptor of the row block */
    int has_o = 0;   /* O holds a work tile that is not stored yet. */
    score_head q_head = {0, 0, 0, 0};

    static constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * D_QK * element::BYTES);
    static constexpr u32 Q_BLOCK = matrix_descriptor_bytes(64 * ROW_BYTES);
    static constexpr u32 K_STAGE = matrix_descriptor_bytes(BLOCK_KV * D_QK * element::BYTES);
    static constexpr u32 V_STAGE = matrix_descriptor_bytes(BLOCK_KV * D_V * element::BYTES);

    DEVICE consumer(const params &p, shared_memory &smem, int wg, float (&O)[O_REGS], u32 (&P)[P_REGS],
                    online_softmax &softmax)
        : p(p), smem(smem), wg(wg), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), column(2 * (lane % 4)),
          is_leader(lane == 0), arrives(arrives_for_warp(lane)), q_desc_0(matrix_descriptor(smem_address(smem.q), 0)),
          k_desc_0(matrix_descriptor(smem_address(smem.k), 0)),
          v_desc_0(matrix_descriptor(smem_address(smem.v), BLOCK_KV * ROW_BYTES)), scale_log2(p.scale_log2), O(O), P(P),
          softmax(softmax) {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = 0;
    }

    /* ---- pipeline stages and turns ---- */

    DEVICE void wait_q() { mbarrier_wait(&smem.q_full[q_ring.stage], q_ring.parity); }
    DEVICE void wait_k() { mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity); }
    DEVICE void wait_v() { mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity); }
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
        if (arrives) {
            if (O_IN_Q) cp_async_bulk_wait_all_read();
            mbarrier_arrive(&smem.q_empty[q_stage_of(which)]);
        }
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
    /* O of the warp's row strip goes where the strip's Q was, or to a place of its own. */
    DEVICE element::output *o_smem_of(which_tile which, int block) const {
        return O_IN_Q ? smem.q[q_stage_of(which)] + (64 * block + 16 * warp) * CHUNK
                      : smem.o + (4 * wg + warp) * 16 * D_V;
    }

    /* ---- parts of a step ---- */

    DEVICE void issue_s(float (&S)[S_REGS]) { issue_scores(S, q_desc, k_desc_0 + k_ring.stage * K_STAGE); }
    DEVICE void issue_pv() { issue_output(O, P, v_desc_0 + v_ring.stage * V_STAGE); }
    DEVICE void begin_rows() {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
        softmax = {{-INF, -INF}, {0, 0}, {0, 0}};
    }
    DEVICE void rescale_o(const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] *= alpha[row_of(i)];
    }
    DEVICE void round_p(const float (&S)[S_REGS]) {
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = cvt_x2<element>(S[2 * i], S[2 * i + 1]);
    }
    /* S is P by now. Dropout clears some elements after the sums have been taken. */
    DEVICE void drop_and_round_p(float (&S)[S_REGS], int j) {
        if (DROPOUT) {
            const tile &t = tile_of(THIS_TILE);
            drop(S, smem.seed, smem.offset + (u64)(t.b_idx * p.h + t.head) * 32, (t.row + 64 * row_block) / 16 + warp,
                 j * (BLOCK_KV / 32), p.keep_max);
        }
        round_p(S);
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
        if (!IS_FIRST && PV_FIRST) wait_v();
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
        }

        /* wait S; release K, and Q after the last S */
        if (IS_FIRST || PV_FIRST)
            wgmma_wait_group<0>(S);
        else
            wgmma_wait_group<1>(S);
        if (TURN == TURN_UNTIL_SCORES && !IS_FIRST) pass_turn();
        release_k();
        if (!IS_FIRST && PV_FIRST) pin(O), release_v();
        if (!O_IN_Q && walk.is_last(j)) release_q(THIS_TILE);

        /* mask and row max: most steps pass by on one branch; key 0 may be far above all other keys */
        if (SCORE) change_scores(S, p, q_head, j * BLOCK_KV + column, diagonal);
        const bool is_raised = is_special && (IS_FIRST || walk.needs_max(j) || overflows(S, softmax, scale_log2));
        if (is_raised) {
            if (walk.is_partial(j)) mask_scores(S, p, tile_of(THIS_TILE).len_kv, j * BLOCK_KV + column, diagonal);
            raise_max(S, softmax, alpha, scale_log2, false);
            if (__any_sync(0xffffffffu, softmax.max[0] == -INF || softmax.max[1] == -INF)) walk.lacks_max_after(j);
            if (!IS_FIRST && PV_FIRST) rescale_o(alpha);
        }

        /* P = exp2; with SPLITS_SOFTMAX only of the thread's first row */
        exponentiate_rows(S, softmax, scale_log2, true, !SPLITS_SOFTMAX || IS_FIRST);
        const float limits[2] = {limit_of_p(softmax.sum[0]), limit_of_p(softmax.sum[1])};
        sum_rows(S, softmax, largest, true, !SPLITS_SOFTMAX || IS_FIRST);

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
        drop_and_round_p(S, j);

        /* A P that weighs in its row raises the row maximum. Otherwise its rounding would show in O. */
        if (!IS_FIRST && any_exceeds(largest, limits)) {
            raise_to_p(S, softmax, alpha);
            rescale_o(alpha);
            round_p(S);
        }
        if (IS_FIRST) {
            if (O_IN_Q && has_o) release_q(PREVIOUS_TILE); /* O of the tile before has left the place of its Q. */
            has_o = true;
        }
    }

    /* One step of a work tile that failed. Nothing overlaps, each step takes its row maximum, and O takes of V only
     * what each row sees. */
    DEVICE void repeat_step() {
        const tile &t = tile_of(THIS_TILE);
        float S[S_REGS], alpha[2];
        int largest[2] = {0, 0};
        const int j = walk.next, first_key = j * BLOCK_KV;
        wait_k();
        wait_turn();
        issue_s(S);
        pass_turn();
        wgmma_wait_group<0>(S);
        release_k();

        if (SCORE) change_scores(S, p, q_head, first_key + column, diagonal);
        mask_scores(S, p, t.len_kv, first_key + column, diagonal);
        make_infinite(S, scale_log2);
        raise_max(S, softmax, alpha, scale_log2, true);
        rescale_o(alpha);
        exponentiate_exactly(S, softmax, scale_log2);
        sum_rows(S, softmax, largest, true, true);
        drop_and_round_p(S, j);

        wait_v();
        const int block_diagonal = t.row + 64 * row_block + t.len_kv - t.len_q;
        const tile_walk keys = keys_of(p, block_diagonal, block_diagonal + 63, t.len_kv);
        if (!uniform(is_partial<BLOCK_KV>(first_key, keys.full_begin, keys.full_end))) {
            pin(O), pin(P);
            issue_pv();
            wgmma_wait_group<0>(O);
        } else {
            accumulate_seen(O, P, smem.v[v_ring.stage], p, t.len_kv, first_key, diagonal);
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
        finish_softmax(softmax, p, factor, lse);
        /* A row that sees no key gets zeros, whatever V holds. */
        if (__any_sync(0xffffffffu, lse[0] == INF || lse[1] == INF)) {
#pragma unroll
            for (int i = 0; i < O_REGS; i++)
                if (lse[row_of(i)] == INF) O[i] = 0;
        }
        if constexpr (O_BY_TMA)
            store_by_tma(O, factor, p, t, o_smem_of(which, block), first_row);
        else
            store_directly(O, factor, p, t, first_row);
        store_lse(lse, p, t, first_row);
    }
    /* Stores O of the tile before. A row strip that failed is not stored: the scheduler will give its tile out
     * again. */
    DEVICE void finish_previous_tile() {
        const tile &t = tile_of(PREVIOUS_TILE);
        const int block = row_block_of(PREVIOUS_TILE), first_row = t.row + 64 * block + 16 * warp;
        if (uniform(has_failed(O, softmax))) {
            if (is_leader) note_failure(smem, 4 * wg + warp, t.idx, 4 * block + warp);
        } else {
            store_o(PREVIOUS_TILE, t, block, first_row);
        }
    }
    /* The same outside a step, where no product hides the store. */
    DEVICE void finish_previous_tile_now() {
        if (O_IN_Q) bar_sync(BAR_GROUP + wg, 128); /* The warps have read the Q whose place O takes. */
        if (has_o) {
            finish_previous_tile();
            if (O_IN_Q) release_q(PREVIOUS_TILE);
        }
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
        wgmma_wait_group<0>(O);
        if (has_o) release_v();
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
        if (O_IN_Q) bar_sync(BAR_GROUP + wg, 128); /* The warps have read the Q whose place O takes. */
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
        if (O_BY_TMA && is_leader) cp_async_bulk_wait_all_read(); /* Shared memory outlives its readers. */
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
        for (int i = 0; i < 4 * WGS; i++) smem.num_failed[i] = smem.num_seen[i] = 0;
        smem.sequences.first = -32, smem.sequences.begin = smem.sequences.end = 0;
        mbarrier_init_fence();
    }
    griddepcontrol_wait(); /* The kernels before it in the stream have ended. No memory has been touched until here. */
    if (DROPOUT && threadIdx.x == 0) smem.seed = p.rng_state[0], smem.offset = p.rng_state[1];
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (threadIdx.x == 0) producer{p, smem}.run();
        if (warp == 1) schedule_tiles(p, smem);
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        consume(p, smem, wg - 1);
    }
}
