/* Attention forward on Hopper:  O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row.
 *
 *   q [b, len_q, h, d]    k [b, len_kv, h_kv, d]    v [b, len_kv, h_kv, d_v]    o [b, len_q, h, d_v]
 *   lse [b, h, len_q] float
 *
 * CTAs are persistent: CTAS of them, mostly one, stay on each SM for the whole launch. A CTA takes one work tile after
 * another. A work tile is BLOCK_Q query rows of one head. Over a cache several heads may share it. The CTA walks over
 * their keys in key tiles of BLOCK_KV keys, from the last key tile to the first, one step each. A scheduler warp finds
 * work tiles. One lane of the producer warp loads by TMA. WGS consumer warpgroups compute. Each owns a row block of 64
 * rows, and each of its warps owns a row strip of 16 rows:
 *
 *   scheduler --tile_found--> producer --q_full[stage]--> consumers: every S of the tile --q_empty[stage]--> producer
 *            <--tile_wanted--          --k_full[stage]--> consumers: S = Q K^T           --k_empty[stage]-->
 *                                      --v_full[stage]--> consumers: O += P V            --v_empty[stage]-->
 *
 * Keys of a cache that TMA cannot load together are copied one by one. Four warps do so, and the scheduler is one of
 * them (attn_fwd_single_keys.cuh).
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
 * This file holds P V and the steps of a consumer. key_walk.cuh says which key tiles are visited and masked.
 * attn_fwd_consumer.cuh has the rest of a consumer, and attn_fwd_schedule.cuh what follows from a table row.
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
#if !defined(CACHE) || !defined(SINGLE_KEYS) || !defined(WHOLE_KEYS)
#error "variant: CACHE, keys in a KV cache; SINGLE_KEYS, loaded one by one; WHOLE_KEYS, in boxes of all columns: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_sm90
#endif

/* ---- derived constants ----------------------------------------------------------------------------------------- */

#include "attn_fwd_schedule.cuh"

constexpr int PRODUCER_REGS = SINGLE_KEYS ? 56 : WGS >= 3 ? 32 : 40;
constexpr int CONSUMER_REGS = SINGLE_KEYS ? (CTAS == 2 ? 200 : 224)
                              : WGS == 4  ? 112
                              : WGS == 3  ? 160
                              : CTAS == 2 ? 216
                                          : 232;
/* O leaves from the place of its work tile's Q. V has the room that a place for O would need. O leaves when the next
 * work tile has begun, so the next Q needs a place of its own. Between the last S of a tile, which reads Q, and its O a
 * warpgroup's warps meet at their turn. */
constexpr bool O_IN_Q = O_BY_TMA && TURN && D_V <= D_QK && Q_STAGES > 1 && !LONGEST_FIRST && BLOCK_KV > 64;
#if FLEX_OCTETS
constexpr bool READS_OCTETS = true;
#else
constexpr bool READS_OCTETS = false;
#endif
constexpr int V_STAGES = O_IN_Q ? STAGES + 1 : STAGES, V_LOAD_STAGES = V_STAGES;
constexpr u32 V_ARRIVALS = SINGLE_KEYS ? COPYING_LANES : 1; /* as K_ARRIVALS */
/* The distance between chunks of columns of V. */
constexpr int V_LEADING_BYTES = CHUNK_BYTES;
/* All lanes of the producer's warp walk over the keys, and one of them loads. ptxas then keeps what TMA's instruction
 * takes in uniform registers, and needs no loop over lanes around it. */
constexpr bool PRODUCER_IS_WARP = !FLEX || CACHE;
/* What happens while the last P V of a work tile runs. Each choice is for the kernels that it made faster
 * (measurements/forward.md, "Between work tiles").
 *
 * CLOSES_EARLY  The factor of O, lse and their places are computed. The check for failures reads O in 16 bits. With a
 *               causal mask at 128 columns ptxas orders the exponentials of every step otherwise: +2.2% at 16k.
 * STORES_EARLY  O is stored before the next work tile is taken, if the Q of that tile has not come. Without a mask 256
 *               tokens take 3% longer with it.
 * WALKS_EARLY   The walk of the next work tile is computed before the wait for P V. */
constexpr bool IS_PLAIN = !LONGEST_FIRST && !VARLEN;
constexpr bool CLOSES_EARLY =
    !CACHE && D_QK == D_V && (D_V <= 64 || D_V == 80 || (D_V == 128 && (LOCAL || FLEX || IS_PLAIN)));
constexpr bool STORES_EARLY = D_QK == 256 && CAUSAL && !(CACHE || VARLEN || LOCAL || FLEX || SCORE || DROPOUT);
constexpr bool WALKS_EARLY = STORES_EARLY || (CLOSES_EARLY && D_V == 128 && IS_PLAIN);
static_assert(!CLOSES_EARLY || O_BY_TMA, "the check reads what stmatrix stores");
static_assert(!STORES_EARLY || !O_IN_Q, "warps need not meet before O takes the place of Q");
/* The place of O: elements, rows between its chunks, and the chunks themselves. */
constexpr int O_ELEMENTS = O_BY_TMA && !O_IN_Q ? BLOCK_Q * STORED_V : 8, O_ROWS = O_IN_Q ? BLOCK_Q : 16;
constexpr int O_ROW_BYTES = ROW_BYTES, O_CHUNK = CHUNK, O_CHUNKS = CHUNKS_V;

static_assert(MOVES_REGISTERS || !CACHE, "caches want four warps that feed");
static_assert(!DROPOUT || BLOCK_KV % 32 == 0, "dropout draws patches of 32 keys");

#include "attn_fwd_tiles.cuh"
#include "attn_fwd_memory.cuh"
#include "attn_fwd_producer.cuh"
#include "attn_fwd_softmax.cuh"
#if FLEX
#include "attn_fwd_pairs.cuh"
#endif
#include "attn_fwd_repeats.cuh"
#include "attn_fwd_output.cuh"
#include "attn_fwd_consumer.cuh"

/* ---- products -------------------------------------------------------------------------------------------------- */

/* O += P V for the 64 rows of a warpgroup. */
DEVICE void issue_output(float (&O)[O_REGS], const u32 (&P)[P_REGS], u32 v_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES, GROUP_BYTES_V),
                  step = matrix_descriptor_bytes(2 * GROUP_BYTES_V);
    constexpr int NUM = BLOCK_KV / 16, NUM_BY_4 = NUM / 4 * 4;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < NUM_BY_4; k += 4) wgmma<D_V, element>::rs_4<high, step>(O, P + 4 * k, v_desc + k * step);
#pragma unroll
    for (int k = NUM_BY_4; k < NUM; k++) wgmma<D_V, element>::rs<high>(O, P + 4 * k, v_desc + k * step);
    wgmma_commit_group();
}

/* ---- the consumer ---------------------------------------------------------------------------------------------- */

/* P V, the step, and the end of a work tile. attn_fwd_consumer.cuh has the rest, and calls these functions. */
struct consumer : consumer_base {
    using consumer_base::consumer_base;

    /* O of the warp's row strip goes where the strip's Q was, or to a place of its own. */
    DEVICE element::output *o_smem_of(which_tile which, int block) const {
        return O_IN_Q ? smem.q[q_stage_of(which)] + (64 * block + 16 * warp) * CHUNK
                      : smem.o + (4 * wg + warp) * 16 * STORED_V;
    }

    /* ---- parts of a step ---- */

    DEVICE void issue_pv() { issue_output(O, P, v_desc_0 + v_ring.stage * V_STAGE); }
    DEVICE void round_p(const float (&S)[S_REGS]) {
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = cvt_x2<element>(S[2 * i], S[2 * i + 1]);
    }
    /* S is P by now. Dropout clears some elements after the sums have been taken. */
    DEVICE void drop_and_round_p(float (&S)[S_REGS], int j) {
        if (DROPOUT) {
            const tile &t = tile_of(THIS_TILE);
            const int head = head_of_strip(p, t, row_block, warp), row = row_of_strip(p, t, row_block, warp);
            drop(S, smem.seed, smem.offset + (u64)(t.b_idx * p.h + head) * 32, row / 16, j * (BLOCK_KV / 32),
                 p.keep_max);
        }
        round_p(S);
    }

#if FLEX
    /* The keys of the work tile's sequence. NOTE: a copy would change the machine code of kernels without a cache. */
    DEVICE const int &keys_of_mods() const { return CACHE ? len_kv : p.len_kv; }
    DEVICE u32 pairs_of_warp() const {
        return PAIRS_IN_O ? smem_address(smem.o + (4 * wg + warp) * 16 * STORED_V)
                          : smem_address(smem.pairs[4 * wg + warp]);
    }
    DEVICE void ask_for_pairs_of(int key_tile, bool asks) const {
        ask_for_pairs(pairs_of_warp(), p, q_head, diagonal - lane / 4, key_tile * BLOCK_KV, keys_of_mods(), asks);
    }
    /* Asks for what the score_mod reads of the pairs of a step. `entry` is that of the step. */
    template <bool IS_FIRST> DEVICE void prefetch(int entry) const {
        if (!takes_pairs<IS_FIRST>())
            prefetch_pairs(p, q_head, key_tile_of(entry) * BLOCK_KV, diagonal - lane / 4 - (CACHE ? 0 : 16 * warp));
        else if (IS_FIRST || !KNOWS_NEXT_TILE)
            ask_for_pairs_of(key_tile_of(entry), true);
    }
    /* S becomes the scores of the user's score_mod. The elements of the next step's pairs may be asked for. */
    template <bool IS_FIRST> DEVICE void score(float (&S)[S_REGS], int key) const {
        if (takes_pairs<IS_FIRST>())
            score_by_pairs(S, pairs_of_warp(), p, q_head, key, diagonal);
        else
            score_by_mod(S, p, q_head, key, diagonal);
        if (IS_FIRST && PAIRS_IN_O && elect_one()) cp_async_bulk_wait_all_read(); /* O of the tile before has left. */
        ask_for_next_pairs();
    }
    DEVICE void ask_for_next_pairs() const {
        if (HOLDS_PAIRS && KNOWS_NEXT_TILE) ask_for_pairs_of(walk.next, goes_on);
    }
    /* Finds the pairs of a key tile that do not see each other. May there be any? */
    template <bool IN_LOOPS> DEVICE bool find_hidden(hidden_pairs &hidden, int entry) const {
        const int j = key_tile_of(entry);
#if FLEX_HIDDEN
        return hidden.load(tile_of(THIS_TILE), kind_of(entry), j, row_block);
#else
        return hidden.find<IN_LOOPS>(p, q_head, kind_of(entry), j * BLOCK_KV + column, diagonal, keys_of_mods());
#endif
    }
#endif

    /* ---- a step ---- */

    /* One step. The first step of a work tile has no P V. It stores O of the tile before instead. */
    template <bool IS_FIRST> DEVICE void step() {
        /* NOTE: S is a new array in every step. Carried from one step to the next, its old values would stay alive, and
         * ptxas would run the products one by one (C7511). */
        float S[S_REGS], alpha[2];
        int largest[2] = {0, 0};
        const int place = walk.take();
        const bool is_special = IS_FIRST || walk.needs_max(place) || place == 0;
        goes_on = walk.has_next();
        pin(goes_on); /* This is computed before the votes. Behind them every step would wait for it. */

        /* wait K, V and the turn; issue S = Q K^T and O += P V of the keys before */
        if (!IS_FIRST && PV_FIRST) wait_v();
        wait_k();
#if FLEX
        constexpr bool TAKES_PAIRS = takes_pairs<IS_FIRST>();
        const int early_entry = TAKES_PAIRS ? entry_of(place) : 0;
        if (TAKES_PAIRS) prefetch<IS_FIRST>(early_entry); /* Copies need no registers, so they come first. */
#endif
        wait_turn();
        if (!IS_FIRST) pin(O), pin(P); /* All writes to O and P come before the products. */
        if (!IS_FIRST && PV_FIRST) issue_pv();
        issue_s(S);
        if (!IS_FIRST && !PV_FIRST) wait_v(), issue_pv();
        if (TURN == TURN_WHILE_ISSUING || IS_FIRST) pass_turn();
#if FLEX
        const int entry = TAKES_PAIRS ? early_entry : entry_of(place), j = key_tile_of(entry);
        if (!TAKES_PAIRS) prefetch<IS_FIRST>(entry);
        hidden_pairs hidden;
        bool hides = false;
        constexpr bool FINDS_EARLY = FLEX_HIDDEN || !FLEX_SCORE; /* while S is on its way */
        if (FINDS_EARLY) hides = find_hidden<false>(hidden, entry);
        int is_rare = is_special || hides; /* One branch asks for both, because S waits for each branch. */
        pin(is_rare);
#else
        const int j = place;
#endif
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
        if (!O_IN_Q && walk.is_last(place)) release_q(THIS_TILE);

        /* mask and row max: most steps pass by on one branch; key 0 may be far above all other keys */
        if (SCORE) change_scores(S, p, q_head, j * BLOCK_KV + column, diagonal);
#if FLEX
        constexpr bool ADDS = ADDS_IN_EXPONENT && !IS_FIRST; /* Most steps do without scores. */
        if (ADDS) {
            if (!FINDS_EARLY) hides = find_hidden<false>(hidden, entry), is_rare |= hides;
            if (!is_rare) {
                add_in_exponent(S, pairs_of_warp(), p, q_head, softmax, scale_log2, j * BLOCK_KV + column, diagonal);
                ask_for_next_pairs();
            }
        }
        if (FLEX_SCORE && (!ADDS || is_rare)) {
            score<IS_FIRST>(S, j * BLOCK_KV + column);
            if (!FINDS_EARLY && !ADDS) hides = find_hidden<false>(hidden, entry), is_rare |= hides;
        }
#if FLEX_MAX
        if (hides) hidden.hide(S), hides = false;
        keep_highest(S, softmax);
#endif
        bool is_raised = false;
        if (is_rare) {
            if (hides) hidden.hide(S);
            is_raised = is_special && (IS_FIRST || walk.needs_max(place) || overflows(S, softmax, scale_log2));
        }
#else
        const bool is_raised = is_special && (IS_FIRST || walk.needs_max(place) || overflows(S, softmax, scale_log2));
#endif
        if (is_raised) {
            if (!FLEX && walk.is_partial(place))
                mask_scores(S, p, tile_of(THIS_TILE).len_kv, j * BLOCK_KV + column, diagonal);
            raise_max(S, softmax, alpha, scale_log2, false);
            bool lacks_max = softmax.max[0] == -INF || softmax.max[1] == -INF;
            if constexpr (SCORES_JUMP) lacks_max |= may_jump(S, softmax, scale_log2);
            if (__any_sync(0xffffffffu, lacks_max)) walk.lacks_max_after(place);
            if (!IS_FIRST && PV_FIRST) rescale_o(alpha);
        }
#if FLEX
        if (ADDS && is_rare) make_exponents(S, softmax, scale_log2);
#endif

        /* P = exp2; with SPLITS_SOFTMAX only of the thread's first row */
#if FLEX
        if constexpr (ADDS)
            exponentiate_sums(S, true, !SPLITS_SOFTMAX || IS_FIRST);
        else
#endif
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
        if (SPLITS_SOFTMAX && !IS_FIRST) {
#if FLEX
            if constexpr (ADDS)
                exponentiate_sums(S, false, true);
            else
#endif
                exponentiate_rows(S, softmax, scale_log2, false, true);
            sum_rows(S, softmax, largest, false, true);
        }
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
#if FLEX
        wait_k(); /* The entry comes with K. */
        const int entry = entry_of(walk.next), j = key_tile_of(entry), first_key = j * BLOCK_KV;
#else
        const int j = walk.next, first_key = j * BLOCK_KV;
#endif
        compute_s(S);

#if FLEX
        hidden_pairs hidden;
        const bool hides = find_hidden<true>(hidden, entry);
        const repeated_scores scores(p, q_head, hidden, hides, first_key + column, diagonal);
        const u64 seen = exponentiate_in_loops(S, softmax, alpha, scores, scale_log2);
        rescale_o(alpha);
        drop_and_round_p(S, j);
#elif SCORE
        const repeated_scores scores(p, q_head, t.len_kv, first_key + column, diagonal);
        const u64 seen = exponentiate_in_loops(S, softmax, alpha, scores, scale_log2);
        rescale_o(alpha);
        drop_and_round_p(S, j);
#else
        const u64 seen = 0;
        int largest[2] = {0, 0};
        mask_scores(S, p, t.len_kv, first_key + column, diagonal);
        make_infinite(S, scale_log2);
        raise_max(S, softmax, alpha, scale_log2, true);
        rescale_o(alpha);
        exponentiate_exactly(S, softmax, scale_log2);
        sum_rows(S, softmax, largest, true, true);
        drop_and_round_p(S, j);
#endif

        wait_v();
#if FLEX
        if (is_full(entry, keys_of_mods())) {
#else
        if (sees_all_of(first_key)) {
#endif
            pin(O), pin(P);
            issue_pv();
            wgmma_wait_group<0>(O);
        } else {
            accumulate_seen(O, P, smem.v[v_ring.stage], seen_keys(p, t.len_kv, first_key, diagonal, seen));
        }
        release_v();
    }

    /* A row that sees no key gets zeros, whatever V holds. NOTE: a tile that did not fail does not need this. Its O is
     * finite, and the factor of such a row is 0. */
    DEVICE void end_repeat() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool is_unseen = sum_of_quad(softmax.sum[r]) == 0;
#pragma unroll
            for (int i = 2 * r; i < O_REGS; i += 4) O[i] = is_unseen ? 0 : O[i], O[i + 1] = is_unseen ? 0 : O[i + 1];
        }
    }

    /* ---- the end of a work tile ---- */

    DEVICE void store_o(which_tile which, const tile &t, int block, int first_row) {
        float factor[2], lse[2];
        finish_softmax(softmax, p, factor, lse);
        if (p.sinks.values.data) add_sinks(p, t, first_row, block, factor, lse);
        if (is_cut(p))
            store_part(O, factor, p, t, first_row, block);
        else if constexpr (O_BY_TMA)
            store_by_tma(O, factor, p, t, o_smem_of(which, block), first_row, block);
        else
            store_directly(O, factor, p, t, first_row, block);
        store_lse(lse, p, t, first_row, block);
#if FLEX_MAX
        store_max(softmax, p, t, first_row);
#endif
    }
    row_ends ends;
    /* Computes what the store of the work tile's rows needs besides O. NOTE: a condition around this would keep ptxas
     * from seeing that the ring positions are uniform. So before the first work tile this reads a slot without a tile,
     * and nothing uses the result. */
    DEVICE void close_rows() {
        if (!CLOSES_EARLY) return;
        const tile &t = tile_of(THIS_TILE);
        const int first_row = row_of_strip(p, t, row_block, warp);
        finish_softmax(softmax, p, ends.factor, ends.lse);
        if (p.sinks.values.data) add_sinks(p, t, first_row, row_block, ends.factor, ends.lse);
        const int row = first_row + lane / 4;
        ends.rows_left = lane % 4 == 0 && p.lse ? t.len_q - row : 0;
        ends.head = uniform(head_of_strip(p, t, row_block, warp));
        ends.lse_dst = p.lse + t.b_idx * p.lse_stride_b + ends.head * p.lse_stride_h + t.lse_origin + row;
        ends.row = uniform(t.q_origin + first_row), ends.batch = uniform(t.q_batch);
        ends.place =
            uniform(O_IN_Q ? q_stage_of(THIS_TILE) * (BLOCK_Q * STORED_QK) + (64 * row_block + 16 * warp) * CHUNK
                           : (4 * wg + warp) * 16 * STORED_V);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (ends.lse[r] == INF) ends.lse[r] = p.empty_lse;
            if (has_failed_row(softmax, r)) ends.factor[r] = __int_as_float(0x7fffffff);
        }
        if (WALKS_EARLY)
            settle(ends.factor[0] + ends.factor[1] + ends.lse[0] + ends.lse[1] +
                       __int_as_float((int)(long long)ends.lse_dst + ends.rows_left),
                   &smem);
    }
    /* Stores O of a tile that is complete. A row strip that failed is not stored: the scheduler will give its tile out
     * again. */
    DEVICE void finish_tile(which_tile which, int block) {
        const tile &t = tile_of(which);
        const int first_row = row_of_strip(p, t, block, warp);
        if constexpr (CLOSES_EARLY) {
            element::output *o_smem = (O_IN_Q ? smem.q[0] : smem.o) + ends.place;
            if (put_checked(O, ends, o_smem)) {
                if (is_leader) note_failure(smem, 4 * wg + warp, t.idx, 4 * block + warp);
            } else {
                store_put(ends, p, o_smem);
#if FLEX_MAX
                store_max(softmax, p, t, first_row);
#endif
            }
        } else if (uniform(has_failed(O, softmax))) {
            if (is_leader) note_failure(smem, 4 * wg + warp, t.idx, 4 * block + warp);
        } else {
            store_o(which, t, block, first_row);
        }
    }
    DEVICE void finish_previous_tile() { finish_tile(PREVIOUS_TILE, row_block_of(PREVIOUS_TILE)); }
};

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const __grid_constant__ params p) {
    /* There is no static shared memory, so the dynamic one starts at 1024, as its alignment asks. */
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    shared_memory &smem = *reinterpret_cast<shared_memory *>(smem_bytes);
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q);
        if (!SINGLE_KEYS) prefetch_tensormap(&p.k), prefetch_tensormap(&p.v);
        if (O_BY_TMA) prefetch_tensormap(&p.o);
        init_barriers(smem);
        init_notes(smem);
        mbarrier_init_fence();
    }
    griddepcontrol_wait(); /* The kernels before it in the stream have ended. No memory has been touched until here. */
    if (DROPOUT && threadIdx.x == 0) smem.seed = p.rng_state[0], smem.offset = p.rng_state[1];
    __syncthreads();

    if (wg == FEEDING_GROUP) {
        const int feeder = warp - 4 * FEEDING_GROUP;
        if (MOVES_REGISTERS) setmaxnreg_dec<PRODUCER_REGS>();
        if (feeder == 0 && (PRODUCER_IS_WARP || elect_one())) producer{p, smem}.run();
        if (!SINGLE_KEYS && feeder == 1) schedule_tiles(p, smem, no_share());
        if (SINGLE_KEYS && feeder == 1) schedule_tiles(p, smem, scheduler_share<REST_OF_V>{p, smem});
        if (CACHE && feeder == 2) second_producer<OF_V>{p, smem}.run();
        if (SINGLE_KEYS && feeder == 3) second_producer<REST_OF_K>{p, smem}.run();
    } else {
        if (MOVES_REGISTERS) setmaxnreg_inc<CONSUMER_REGS>();
        float O[O_REGS];
        u32 P[P_REGS];
        online_softmax softmax;
        consumer c(p, smem, wg - FIRST_CONSUMER, O, P, softmax);
        run(c);
    }
}
