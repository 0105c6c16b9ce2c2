/* Attention forward on Hopper:  O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row.
 *
 *   q [b, len_q, h, d]    k, v [b, len_kv, h_kv, d]    o like q    lse [b, h, len_q] float
 *
 * CTAS CTAs of an SM, mostly one, stay for the whole launch. Each takes tiles of BLOCK_Q rows of one head, one after the
 * other, and walks over their keys from the last tile to the first. One warp finds tiles, one thread loads, WGS warpgroups
 * of 64 rows each compute:
 *
 *   finder --tile_found--> producer --q_full[s]--> warpgroups: every S of the tile   --q_empty[s]--> producer
 *         <--tile_wanted--          --k_full[s]--> warpgroups: S = Q K^T             --k_empty[s]-->
 *                                   --v_full[s]--> warpgroups: O += P V              --v_empty[s]-->
 *
 * The rings run on across tiles: while one tile ends, the next one's Q and keys arrive, and it is stored while the next
 * one's first scores are computed. Tensor cores work while exp2 runs, in two ways: a warpgroup issues S of the next keys
 * together with P V of the last ones before its softmax, and the warpgroups take turns in issuing, so that their
 * softmaxes fall into different parts of the period:
 *
 *   warpgroup 0   | S1 P0V | softmax 1      | S2 P1V | softmax 2      |
 *   warpgroup 1            | S1 P0V | softmax 1      | S2 P1V | softmax 2
 *
 * The row maximum lags: P = 2^(c S - c m) gives the same quotient for every m that does not overflow. m is the maximum of
 * the first keys that a row sees. Later it is raised where a P exceeds the largest so far and weighs in the row's sum: P
 * is rounded to 16 bits, which costs no digit of a power of two, and m makes the P of its own key one. Asking costs one
 * vote, about the sum that a step has added.
 *
 * What overflows remains inf or NaN: a tile is checked when it ends, and one that failed is done again with the maximum of
 * every step. The same check finds rows that NaN or inf in V has reached through a P of zero, where they do not see the
 * key. Done again, a tile takes of V only what each row sees.
 *
 * This file: the products and what a warpgroup does step by step. Pieces: attn_fwd_tiles.cuh, which tile is where;
 * _memory, rings and barriers; _producer, finder and loads; _softmax, scores to P; _repeats, tiles done again; _output, O
 * to memory.
 *
 * Specification: cpu/reference.c. Limits and measurements: README.md. */
#include "attn_fwd_params.h"
#include "ptx_sm90.cuh"

/* ---- parameters: one row of tiles.def -------------------------------------------------------------------------- */

#if !defined(HEAD_DIM) || !defined(BLOCK_KV) || !defined(WGS) || !defined(STAGES) || !defined(Q_STAGES)
#error "tiles: HEAD_DIM columns, BLOCK_KV keys, WGS warpgroups of 64 rows, STAGES of K and V, Q_STAGES of Q"
#endif
#if !defined(TURN) || !defined(O_WAIT) || !defined(CTAS)
#error \
    "schedule: TURN 0 never, 1 while issuing, 2 until S is there, O_WAIT 0 after, 1 amid, 2 before the exponentials, CTAS"
#endif
#if !defined(BF16) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE) || !defined(DROPOUT)
#error "variant: BF16 or fp16; CAUSAL, LOCAL window, VARLEN packed sequences, SCORE softcap and ALiBi, DROPOUT: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_sm90
#endif

typedef fa_attn_fwd_params params;

constexpr int BLOCK_Q = 64 * WGS;
constexpr int THREADS = 128 * (WGS + 1);
constexpr int PRODUCER_REGS = WGS >= 3 ? 32 : 40;
constexpr int CONSUMER_REGS = WGS == 4 ? 112 : WGS == 3 ? 160 : CTAS == 2 ? 216 : 232;
constexpr int ROW_BYTES = HEAD_DIM % 64 == 0 ? 128 : 64; /* one row of a swizzled chunk */
constexpr int CHUNK = ROW_BYTES / 2, CHUNKS = HEAD_DIM / CHUNK;
constexpr bool O_BY_TMA = HEAD_DIM <= 128;
constexpr bool LONGEST_FIRST = CAUSAL || LOCAL;
constexpr bool PV_FIRST = O_WAIT == 2;
constexpr bool O_IN_Q = O_BY_TMA && !LONGEST_FIRST && BLOCK_KV > 64; /* from where its Q was: V has the room */
constexpr int V_STAGES = O_IN_Q ? STAGES + 1 : STAGES, O_ROWS = O_IN_Q ? BLOCK_Q : 16;
constexpr bool Q_EARLY = WGS < 3 && Q_STAGES > 1; /* before the last V of the tile before */
constexpr bool K_FIRST = Q_STAGES == 1;           /* its place is free before Q's */
constexpr int TILES = Q_STAGES + 2; /* known to consumers: a tile is stored while the next but one may be announced */
constexpr int FAILED = 8;           /* of each warp, not yet repeated: more than the tiles that can be on their way */
/* The largest P of a row is 2^-HEADROOM: of values as large as bf16's, sums over 2^HEADROOM keys stay floats. */
constexpr float HEADROOM = BF16 ? 24 : 0;
constexpr float LARGE_SHARE = 0.4f; /* of what a thread has summed: keys above it are large */
#define INF __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;

static_assert(HEAD_DIM % CHUNK == 0 && BLOCK_KV % 16 == 0, "wgmma contracts 16 at a time, TMA brings whole chunks");
static_assert(Q_STAGES <= 2, "the tile before lies in the other place");
static_assert(BLOCK_KV <= 256, "a TMA box has at most 256 rows");
static_assert(CTAS * (PRODUCER_REGS + WGS * CONSUMER_REGS) <= 512, "64 K registers");
static_assert(!O_IN_Q || TURN, "a warpgroup's warps meet between the last S of a tile, which reads Q, and its O");
static_assert(!DROPOUT || BLOCK_KV % 32 == 0, "dropout: patches of 32 keys");

#include "attn_fwd_memory.cuh"
#include "attn_fwd_output.cuh"
#include "attn_fwd_producer.cuh"
#include "attn_fwd_repeats.cuh"
#include "attn_fwd_softmax.cuh"
#include "attn_fwd_tiles.cuh"

/* ---- products -------------------------------------------------------------------------------------------------- */

/* S = Q K^T for the 64 rows of this warpgroup. */
DEVICE void issue_scores(float (&s)[S_REGS], u32 q_desc, u32 k_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        const int chunk = k * 16 / CHUNK, in_chunk = k * 16 % CHUNK * 2;
        wgmma<BLOCK_KV, BF16>::ss<high, high>(
            s, q_desc + matrix_descriptor_bytes(chunk * BLOCK_Q * ROW_BYTES + in_chunk),
            k_desc + matrix_descriptor_bytes(chunk * BLOCK_KV * ROW_BYTES + in_chunk), k > 0);
    }
    wgmma_commit_group();
}

/* O += P V. */
DEVICE void issue_output(float (&o)[O_REGS], const u32 (&p)[P_REGS], u32 v_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; k++)
        wgmma<HEAD_DIM, BF16>::rs<high>(o, p + 4 * k, v_desc + matrix_descriptor_bytes(k * 16 * ROW_BYTES));
    wgmma_commit_group();
}
/* ---- consumers ------------------------------------------------------------------------------------------------- */

/* A consumer has taken one work tile and may still hold O of the work tile before. */
enum { THIS_TILE = 0, PREVIOUS_TILE = 1 };

/* One consumer warpgroup. It owns 64 rows of each work tile, and each of its warps owns 16 of them. */
struct consumer {
    const params &p;
    shared_memory &smem;
    const int wg, warp, lane;
    const int column; /* the thread's first column in each group of 8 */
    const bool is_leader, arrives;
    const u32 q_desc_0, k_desc_0, v_desc_0; /* matrix descriptors of stage 0 */

    float (&O)[O_REGS];
    u32 (&P)[P_REGS];
    const float scale_log2;
    softmax_rows &rows;
    ring<Q_STAGES> q_ring;
    ring<STAGES> k_ring;
    ring<V_STAGES> v_ring;
    ring<TILES> tile_ring;

    int row_block = wg;            /* which 64 rows of the work tile */
    u32 q_desc = 0;                /* the matrix descriptor of these rows */
    int diagonal = 0;              /* the last key that the thread's first row would see under a causal mask */
    float slope = 0;               /* ALiBi */
    int next_j = -1, kv_begin = 0; /* the key tile of the next step; the last key tile to visit */
    int goes_on = 0;               /* the work tile has another step */
    int exact_end = 0, full_begin = 0, full_end = 0;
    bool has_o = false; /* O of a work tile is not stored yet */

    static constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * HEAD_DIM * 2);
    static constexpr u32 Q_BLOCK = matrix_descriptor_bytes(64 * ROW_BYTES);
    static constexpr u32 KV_STAGE = matrix_descriptor_bytes(BLOCK_KV * HEAD_DIM * 2);

    DEVICE consumer(const params &p, shared_memory &smem, int wg, float (&O)[O_REGS], u32 (&P)[P_REGS],
                    softmax_rows &rows)
        : p(p), smem(smem), wg(wg), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), column(2 * (lane % 4)),
          is_leader(lane == 0), arrives(arrives_for_warp(lane)), q_desc_0(matrix_descriptor(smem_address(smem.q), 0)),
          k_desc_0(matrix_descriptor(smem_address(smem.k), 0)),
          v_desc_0(matrix_descriptor(smem_address(smem.v), BLOCK_KV * ROW_BYTES)), O(O), P(P), rows(rows),
          scale_log2(p.scale_log2) {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = 0;
    }

    /* ---- pipeline stages and turns ---- */

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
    DEVICE int q_stage(int which) const { return Q_STAGES == 1 ? 0 : q_ring.stage ^ 1 ^ which; }
    DEVICE void release_q(int which) {
        __syncwarp(); /* other lanes have read the tile before, whose place may be taken now */
        if (arrives) {
            if (O_IN_Q) cp_async_bulk_wait_all_read();
            mbarrier_arrive(&smem.q_empty[q_stage(which)]);
        }
    }
    DEVICE void wait_turn() {
        if (TURN) bar_sync(BAR_TURN + wg, 256);
    }
    DEVICE void pass_turn() { bar_arrive(BAR_TURN + (wg + 1 == WGS ? 0 : wg + 1), 256); }

    /* Passes over key tiles from next_j down to end, which other warpgroups see. */
    DEVICE void pass_until(int end) {
#pragma unroll 1
        for (; next_j > end; next_j--) {
            wait_k();
            wait_turn();
            if (TURN) pass_turn();
            release_k();
            wait_v();
            release_v();
        }
    }

    /* ---- the work tile ---- */

    DEVICE const tile &tile_of(int which) const {
        const int i = tile_ring.stage - 1 - which;
        return smem.tiles[i < 0 ? i + TILES : i];
    }
    DEVICE int row_block_of(int which) const {
        return row_block >= which ? row_block - which : row_block - which + WGS;
    }
    /* In shared memory, of this warp's 16 rows: where their Q was, or in a place of their own. */
    DEVICE u16 *place_of_o(int which, int block_then) const {
        return O_IN_Q ? smem.q[q_stage(which)] + (64 * block_then + 16 * warp) * CHUNK
                      : smem.o + (4 * wg + warp) * 16 * HEAD_DIM;
    }
    /* O of a tile that was taken, of which these are rows 64 block_then .. */
    DEVICE void finish(int which) {
        const tile &t = tile_of(which);
        const int block_then = row_block_of(which);
        const int first_row = t.row + 64 * block_then + 16 * warp;
        if (uniform(which ? has_failed(O, rows) : (t.repeated >> (4 * block_then + warp) & 1) == 0)) {
            if (which && is_leader) {
                const int num_failed = smem.num_failed[4 * wg + warp];
                smem.failed[4 * wg + warp][num_failed % FAILED] = {t.idx, 4 * block_then + warp};
                __threadfence_block();
                *(volatile int *)&smem.num_failed[4 * wg + warp] = num_failed + 1;
            }
        } else { /* rows that did not fail have been stored */
            float factor[2], lse[2];
            finish_rows(rows, p, t, first_row, factor, lse);
            if (__any_sync(0xffffffffu, lse[0] == INF || lse[1] == INF)) { /* rows that see nothing, whatever V holds */
#pragma unroll
                for (int i = 0; i < O_REGS; i++)
                    if (lse[row_of(i)] == INF) O[i] = 0;
            }
            if constexpr (O_BY_TMA)
                store_by_tma(O, factor, p, t, place_of_o(which, block_then), first_row);
            else
                store_directly(O, factor, p, t, first_row);
            store_lse(lse, p, t, first_row);
        }
    }

    /* ---- a step ---- */

    DEVICE void issue_s(float (&S)[S_REGS]) { issue_scores(S, q_desc, k_desc_0 + k_ring.stage * KV_STAGE); }
    DEVICE void issue_pv() { issue_output(O, P, v_desc_0 + v_ring.stage * KV_STAGE); }
    DEVICE void raise_o(const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] *= alpha[row_of(i)];
    }
    DEVICE void begin_rows() {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
        rows = {{-INF, -INF}, {0, 0}, {0, 0}};
    }
    /* S is by now P. Four keys are added first, and the largest of such sums is kept, as bits: no P is larger. */
    DEVICE void sum_rows(const float (&S)[S_REGS], int (&largest)[2], bool first_row, bool second_row) {
#pragma unroll
        for (int i = 0; i < S_REGS; i += 2)
            if (i % 8 < 4 && (row_of(i) == 0 ? first_row : second_row)) {
                const float four = (S[i] + S[i + 1]) + (S[i + 4] + S[i + 5]);
                rows.sum[row_of(i)] += four;
                largest[row_of(i)] = max(largest[row_of(i)], __float_as_int(four));
            }
    }
    DEVICE void round_p(const float (&S)[S_REGS]) {
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = cvt_x2<BF16>(S[2 * i], S[2 * i + 1]);
    }
    DEVICE void pack(float (&S)[S_REGS], int j) {
        if (DROPOUT) {
            const tile &t = tile_of(THIS_TILE);
            drop(S, smem.seed, smem.offset + (u64)(t.b_idx * p.h + t.head) * 32, (t.row + 64 * row_block) / 16 + warp,
                 j * (BLOCK_KV / 32), p.keep_max);
        }
        round_p(S);
    }

    /* One step. The first of a tile has no P V; it stores the tile before instead. */
    template <bool IS_FIRST> DEVICE void step() {
        /* wait K, V, turn: S = Q K^T, O += P V of the keys before.  NOTE: S is a new array in every step. Carried
         * from one to the next, its old values stay alive, and ptxas runs the products one by one (C7511). */
        float S[S_REGS], alpha[2];
        int largest[2] = {0, 0};
        const int j = next_j--;
        const bool is_special = IS_FIRST || j >= exact_end || j == 0 || (LOCAL && j < full_begin);
        goes_on = next_j >= kv_begin;
        pin(goes_on); /* known before the votes: after them every step would wait for it */
        if (!IS_FIRST && PV_FIRST) wait_v();
        wait_k();
        wait_turn();
        if (!IS_FIRST) pin(O), pin(P); /* all writes to them come before the products */
        if (!IS_FIRST && PV_FIRST) issue_pv();
        issue_s(S);
        if (!IS_FIRST && !PV_FIRST) wait_v(), issue_pv();
        if (TURN == 1 || (TURN && IS_FIRST)) pass_turn();
        if (IS_FIRST) {
            if (has_o) finish(PREVIOUS_TILE);
            begin_rows();
        }
        /* S is there: release K, and Q if it was the last */
        if (IS_FIRST || PV_FIRST)
            wgmma_wait_group<0>(S);
        else
            wgmma_wait_group<1>(S);
        if (TURN == 2 && !IS_FIRST) pass_turn();
        release_k();
        if (!IS_FIRST && PV_FIRST) pin(O), release_v();
        if (!O_IN_Q && j == kv_begin) release_q(THIS_TILE);

        if (SCORE) change_scores(S, p, slope, j * BLOCK_KV + column, diagonal);
        /* Most steps pass by on one branch. The first keys of a sequence may be far above all others. */
        const bool is_raised =
            is_special && (IS_FIRST || j >= exact_end || (LOCAL && j < full_begin) || overflows(S, rows, scale_log2));
        if (is_raised) {
            if (j >= full_end || (LOCAL && j < full_begin))
                mask_scores(S, p, tile_of(THIS_TILE).len_kv, j * BLOCK_KV + column, diagonal);
            raise_max(S, rows, alpha, scale_log2, false);
            /* While a row has seen no score but -inf, there is no anchor yet. */
            if (__any_sync(0xffffffffu, rows.max[0] == -INF || rows.max[1] == -INF))
                exact_end = uniform(min(exact_end, j - 1));
            if (!IS_FIRST && PV_FIRST) raise_o(alpha);
        }
        exponentiate_rows(S, rows, scale_log2, true, O_WAIT != 1 || IS_FIRST);
        const float limits[2] = {limit_of_p(rows.sum[0]), limit_of_p(rows.sum[1])};
        sum_rows(S, largest, true, O_WAIT != 1 || IS_FIRST);
        if (!IS_FIRST && !PV_FIRST) {
            settle(O_WAIT == 1 ? rows.sum[0] : rows.sum[0] + rows.sum[1], smem.o);
            /* O is there: release V, raise O to the new maximum */
            wgmma_wait_group<0>(O);
            release_v();
            if (is_raised) raise_o(alpha);
        }
        /* The second row's exponentials, while the first row's P is packed */
        if (O_WAIT == 1 && !IS_FIRST)
            exponentiate_rows(S, rows, scale_log2, false, true), sum_rows(S, largest, false, true);
        pack(S, j);
        /* A P that weighs in its row raises m: its rounding would show. */
        if (!IS_FIRST && any_exceeds(largest, limits)) {
            raise_to_p(S, rows, alpha);
            raise_o(alpha);
            round_p(S);
        }
        if (IS_FIRST) {
            if (O_IN_Q && has_o) release_q(PREVIOUS_TILE); /* O of the tile before has left it */
            has_o = true;
        }
    }
    /* The same for a tile that failed: one after the other. */
    DEVICE void repeat_step() {
        const tile &t = tile_of(THIS_TILE);
        float S[S_REGS], alpha[2];
        wait_k();
        wait_turn();
        issue_s(S);
        if (TURN) pass_turn();
        wgmma_wait_group<0>(S);
        release_k();
        if (!O_IN_Q && next_j == kv_begin) release_q(THIS_TILE);

        if (SCORE) change_scores(S, p, slope, next_j * BLOCK_KV + column, diagonal);
        mask_scores(S, p, t.len_kv, next_j * BLOCK_KV + column, diagonal);
        raise_max(S, rows, alpha, scale_log2, true);
        raise_o(alpha);
        exponentiate_exactly(S, rows, scale_log2);
        int largest[2] = {0, 0};
        sum_rows(S, largest, true, true);
        pack(S, next_j);

        wait_v();
        const int keys = next_j * BLOCK_KV, first_diagonal = t.row + 64 * row_block + t.len_kv - t.len_q;
        const bool all_seen =
            keys_begin(p, first_diagonal + 63) <= keys && keys + BLOCK_KV <= keys_end(p, first_diagonal, t.len_kv);
        if (uniform(all_seen)) {
            pin(O), pin(P);
            issue_pv();
            wgmma_wait_group<0>(O);
        } else {
            accumulate_seen(O, P, smem.v[v_ring.stage], p, t.len_kv, keys, diagonal);
        }
        release_v();
    }

    DEVICE void run() {
        if (TURN && wg == WGS - 1) pass_turn(); /* warpgroup 0 begins */
        for (;;) {
            /* The last P V of the tile before, while the next tile comes. Without one, of garbage that nobody looks at. */
            if (has_o) wait_v();
            pin(O), pin(P);
            issue_pv();
            mbarrier_wait(&smem.q_full[q_ring.stage], q_ring.parity);
            q_ring.next(), tile_ring.next();
            row_block = row_block + 1 == WGS ? 0 : row_block + 1; /* later rows may see more keys, or none be left */
            const tile &t = tile_of(THIS_TILE);
            const int shift = t.len_kv - t.len_q, first_row = t.row + 64 * row_block;
            const int last_row = min(first_row + 64, t.len_q) - 1;
            const int end = keys_end(p, last_row + shift, t.len_kv);
            const int order = uniform(min(t.row, 0));
            const bool is_idle = first_row > last_row || keys_begin(p, first_row + shift) >= end;
            const int last = uniform(is_idle ? -1 : ceil_div(end, BLOCK_KV) - 1);
            const bool is_repeat = uniform(!is_idle && order == 0 && t.repeated);
            next_j = uniform(t.kv_end) - 1, kv_begin = uniform(t.kv_begin);
            const int row = first_row + 16 * warp; /* the warp's first */
            wgmma_wait_group<0>(O);
            if (has_o) release_v();
            diagonal = row + lane / 4 + shift;
            q_desc = q_desc_0 + q_stage(THIS_TILE) * Q_STAGE + row_block * Q_BLOCK;
            if (SCORE && p.alibi_slopes && order == 0) slope = p.alibi_slopes[t.b_idx * p.alibi_stride_b + t.head];
            if (order < 0 || last < 0 || is_repeat) {
                /* The tile before; then, alone, one that failed */
                for (int before = 1; before >= 0 && (before || is_repeat); before--) {
                    if (before == 0) {
                        pass_until(last);
                        begin_rows();
                        has_o = true;
#pragma unroll 1
                        for (; next_j >= kv_begin; next_j--) repeat_step();
                    }
                    if (O_IN_Q) bar_sync(BAR_GROUP + wg, 128); /* the warps have read the Q whose place O takes */
                    if (has_o) finish(before);
                    if (O_IN_Q && has_o) release_q(before);
                    has_o = false;
                }
                if (order == END) break;
                if (is_repeat) continue;
                if (order == REPORT) {
                    if (arrives) mbarrier_arrive(&smem.all_done);
                } else {
                    pass_until(kv_begin - 1);
                    if (row < t.len_q && !t.repeated) store_zeros(p, t, row);
                }
                release_q(THIS_TILE);
                continue;
            }
            /* Every row of the warp has seen a key before exact_end - 1, and sees all of full_begin .. full_end - 1. */
            const int row_end = keys_end(p, row + shift, t.len_kv);
            exact_end = uniform(min(last, max(row_end - 1, 0) / BLOCK_KV));
            full_end = uniform(row_end / BLOCK_KV);
            if (LOCAL) full_begin = uniform(ceil_div(keys_begin(p, row + 15 + shift), BLOCK_KV));

            /* The last keys first: they hold the diagonal and the end of the sequence, where masks apply. */
            pass_until(last);
            step<true>();
#pragma unroll 1
            while (goes_on) step<false>();
        }
        if (O_BY_TMA && is_leader) cp_async_bulk_wait_all_read(); /* shared memory outlives its readers */
    }
};

DEVICE void consume(const params &p, shared_memory &smem, const int wg) {
    float O[O_REGS];
    u32 P[P_REGS];
    softmax_rows rows;
    consumer(p, smem, wg, O, P, rows).run();
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const __grid_constant__ params p) {
    /* There is no static shared memory, so the dynamic one starts at 1024, as its alignment asks. */
    extern __shared__ __align__(1024) unsigned char smem[];
    shared_memory &s = *reinterpret_cast<shared_memory *>(smem);
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q), prefetch_tensormap(&p.k), prefetch_tensormap(&p.v);
        if (O_BY_TMA) prefetch_tensormap(&p.o);
        const u32 consumers = of_warps(4 * WGS);
        for (int i = 0; i < Q_STAGES; i++) mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], consumers);
        for (int i = 0; i < STAGES; i++) mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], consumers);
        for (int i = 0; i < V_STAGES; i++) mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], consumers);
        mbarrier_init(&s.all_done, consumers);
        mbarrier_init(&s.tile_wanted, 1), mbarrier_init(&s.tile_found, 1);
        for (int i = 0; i < 4 * WGS; i++) s.num_failed[i] = s.num_seen[i] = 0;
        s.packed.first = -32, s.packed.begin = s.packed.end = 0;
        mbarrier_init_fence();
    }
    griddepcontrol_wait(); /* for what the stream does before; nothing in memory has been touched */
    if (DROPOUT && threadIdx.x == 0) s.seed = p.rng_state[0], s.offset = p.rng_state[1];
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (threadIdx.x == 0) produce(p, s);
        if (warp == 1) find_tiles(p, s);
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        consume(p, s, wg - 1);
    }
}
