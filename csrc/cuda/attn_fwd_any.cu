/* The kernel computes the attention forward on every GPU from compute capability 8.0 on, for every problem:
 *
 *   O = softmax(scale (Q K^T + QV V^T) + mask) V,  lse = log-sum-exp of each row
 *
 *   q [b, len_q, h, d]    k [b, len_kv, h_kv, d], packed or paged    lse [b, h, len_q] float
 *   qv, o like q and v like k, with d_v columns
 *
 * One CTA takes BLOCK_Q rows of one head, 16 BLOCKS rows per warp, and walks over the keys that these rows see. Q
 * and STAGES tiles of K and of V lie in shared memory. With one stage, V arrives while S is computed. The next K
 * arrives during softmax and P V:
 *
 *   load Q, K | wait | load V | S = Q K^T | wait | load next K | softmax | O += P V | wait | ..
 *
 * Masked pairs are left out and never multiplied by zero. A tile of V may hold NaN or inf, and some row may see only
 * a part of the tile. Such a tile goes through FMAs that skip masked pairs. This kernel serves the calls that no
 * other kernel serves, so correctness comes before speed.
 *
 * If v has more columns than a tile, each block of columns of O has a CTA of its own, which computes the scores anew.
 * If there is qv, the blocks of QV and V come one after the other to the places of Q and K, and add to S.
 *
 * Specification: ../cpu/reference.c. */
#include "cuda_problem.h"

/* A row of tiles.def gives HEAD_DIM columns, BLOCK_KV keys, WARPS of BLOCKS times 16 query rows and STAGES of K and
 * V. The row also gives CTAS of an SM. */
#if !defined(HEAD_DIM) || !defined(BLOCK_KV) || !defined(WARPS) || !defined(BLOCKS) || !defined(STAGES) || \
    !defined(CTAS) || !defined(DROPOUT)
#error "a row of tiles.def; DROPOUT beside FLEX: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_any
#endif

#include "tile_any.cuh"
#include "rows_any.cuh"
#include "sinks.cuh"

constexpr int WARP_ROWS = 16 * BLOCKS, BLOCK_Q = WARP_ROWS * WARPS, N = BLOCK_KV / 8;
#include "softmax_any.cuh"
constexpr bool MAY_DROP = DROPOUT || !FLEX;           /* plain texts ask for dropout when they run */
constexpr int MIN_CTAS = OF_3 && CTAS > 2 ? 2 : CTAS; /* attention chunks need registers */

static_assert(HEAD_DIM % 16 == 0 && BLOCK_KV % 16 == 0, "mma.m16n8k16 contracts 16 at a time");
static_assert(BLOCK_KV == 16 || BLOCK_KV % 32 == 0, "a dropout patch has 32 keys");
static_assert(BLOCK_KV <= 64, "32 bits say which scores of a thread dropout keeps");

struct shared_memory {
    factor q[BLOCK_Q * PITCH], k[STAGES][BLOCK_KV * PITCH], v[STAGES][BLOCK_KV * PITCH];
};
static_assert(sizeof(shared_memory) <= 99 * 1024, "compute capabilities 8.6, 8.9 and 12.0 give a CTA 99 KiB");

#if FLEX
/* Applies the user's functions to a block of rows from `row` on and of keys from `first` on: the score_mod, and the
 * mask of a tile of this kind. Pairs of score -inf are masked, too. The result is mask_scores'.
 *
 * The functions may be long, so the compiler sees them four times, and not once for each register: a loop takes one
 * fragment after another, and the registers move up by a fragment in each round. What depends only on the row is
 * computed before the loop. */
DEVICE u32 apply_mods(const mods &mod, const sequence &s, float scale, float (&scores)[N][4], block_kind kind, int row,
                      int first) {
    const int first_row = row + lane() / 4, first_key = first + 2 * (lane() % 4);
    const u32 in_mask = pairs_that_see<N, false>(mod, kind, s.len_q, s.len_kv, first_row, first_key);
    u32 seen = 0;
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        float changed[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = first_row + e / 2 * 8, j = first_key + 8 * n + e % 2;
            const bool exists = i < s.len_q && j < s.len_kv;
            const float score = mod.score(__fmul_rn(scores[0][e], scale), i, j);
            const bool sees = exists && score != -INF && (in_mask >> (4 * n + e) & 1);
            seen |= (u32)sees << (4 * n + e);
            changed[e] = sees ? score : -INF;
        }
        move_up(scores, changed);
    }
    return seen;
}
#endif

#if FLEX
/* Writes the columns of a row of a part. */
DEVICE void store_part(float *to, const float (&o)[COLUMNS][4], int half, float weight, bool is_empty, int num) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = column_of(c) + e;
            if (column < num) to[column] = is_empty ? 0 : o[c][2 * half + e] * weight;
        }
}
#endif

/* Writes o and lse of row l / 4 + 8 half of a block. The CTA of the first block of columns writes lse. */
DEVICE void finish_row(const problem &p, const sequence &s, int head, v_block v, int part, int i,
                       const float (&o)[COLUMNS][4], int half, row_state row, float unit, float sink) {
    const float sum = quad_sum(row.sum);
    if (i >= s.len_q) return;
    const bool is_empty = saw_nothing(row, sum, unit);
    float lse = lse_of(row, sum, unit);
#if FLEX
    if (p.num_parts > 1) {
        const long long at = (((long long)part * p.b + s.b_idx) * p.h + head) * p.len_q + i;
        if (lane() % 4 == 0) p.part_lse[at] = lse;
        store_part(p.part_o + at * p.d_v, o, half, is_empty ? 0 : p.keep_scale / sum, is_empty, p.d_v);
        return;
    }
#endif
    float weight = (E4M3 ? p.keep_scale * descale_at(p.v_descale, p, s, head) : p.keep_scale) / sum;
    if (p.sinks.values.data) {
        const row_with_sink x = add_sink(lse, sink - shift_of_row(p.sinks.shift, s.b_idx, head, i));
        lse = x.lse, weight *= x.share;
    } else if (is_empty) {
        lse = p.empty_lse;
    }
    if (lane() % 4 == 0 && v.first == 0) *row_stat(p.lse, s, i, head) = lse;
#if FLEX
    if (lane() % 4 == 0 && v.first == 0 && p.flex.max_scores.data) {
        const bool has_nan = sum != sum && row.max < INF; /* fmaxf passes over a score of NaN */
        *row_stat(p.flex.max_scores, s, i, head) = is_empty ? -INF : has_nan ? sum : row.max * unit;
    }
#endif
    store_row(p, (element::output *)p.o.data + query_offset(p.o, s, i, head) + v.first, o, half, weight, is_empty,
              v.num);
}

/* Computes rows [first_row, first_row + BLOCK_Q) of one head of one sequence, the columns of block v, over one part of
 * the keys. */
DEVICE void attend(const problem &p, shared_memory &shared, const sequence &s, int head, v_block v_columns, int part,
                   int first_row) {
    const int head_kv = head / (p.h / p.h_kv), warp_row = first_row + WARP_ROWS * warp();
    const int last_row = min(first_row + BLOCK_Q, s.len_q) - 1;
#if FLEX
    const mods mod(p.flex, p.values, s.b_idx, head);
    const int part_keys = ceil_div(ceil_div(s.len_kv, p.num_parts), BLOCK_KV) * BLOCK_KV;
    const int begin = (int)min((long long)part * part_keys, (long long)s.len_kv);
    const int end = (int)min((long long)begin + part_keys, (long long)s.len_kv);
    const tile_walk keys = {begin, end, begin, end};
#else
    const tile_walk keys = keys_of(p, s, first_row, last_row);
#endif
    const scorer score(p, s, head);
    const bool is_used = warp_row < s.len_q, is_plain = !MODS_CHANGE_SCORES && score.is_plain;
    const float unit = is_plain ? score.score_scale : 1; /* the exponent scales plain scores */
    row_state rows[BLOCKS][2];
    float o[BLOCKS][COLUMNS][4], scores[BLOCKS][N][4];
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) {
        rows[m][0] = rows[m][1] = {-INF, 0};
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[m][c][0] = o[m][c][1] = o[m][c][2] = o[m][c][3] = 0;
    }

#if FLEX
    block_walk<BLOCK_KV, STAGES, true> walk(mod.map, first_row, last_row, end, begin);
#else
    interval_walk<BLOCK_KV> walk(keys);
#endif
    const auto load_keys = [&](factor *tile, const fa_cuda_view &kv, v_block columns, int step) {
        const int l = laneid(), j = walk.first(step) + warp() * (BLOCK_KV / WARPS) + l;
        const bool is_wanted = l < BLOCK_KV / WARPS && j >= keys.begin && j < keys.end;
        const element *row =
            is_wanted ? (const element *)kv.data + key_offset(p, kv, s, j, head_kv) + columns.first : nullptr;
        if (walk.exists(step)) load_tile<BLOCK_KV>(p, tile, row, columns.num);
        cp_async_commit_group();
    };
    const auto load_queries = [&](const fa_cuda_view &q, v_block columns) {
        const int i = warp_row + lane();
        const bool is_wanted = lane() < WARP_ROWS && i < s.len_q;
        load_tile<BLOCK_Q>(p, shared.q,
                           is_wanted ? (const element *)q.data + query_offset(q, s, i, head) + columns.first : nullptr,
                           columns.num);
    };
    const v_block all = {0, p.d};
    if (walk.exists(0)) {
        load_queries(p.q, all);
        load_keys(shared.k[0], p.k, all, 0);
        for (int step = 1; step < STAGES; step++)
            load_keys(shared.v[step - 1], p.v, v_columns, step - 1), load_keys(shared.k[step], p.k, all, step);
    }
#pragma unroll 1
    for (int step = 0; walk.exists(step); walk.advance(), step++) {
        const int first = walk.first(step);
        factor *k = shared.k[step % STAGES], *v = shared.v[step % STAGES];
        wait_for_tiles<2 * STAGES - 2>(); /* K has come, and all warps have read the last V */
        load_keys(shared.v[(step + STAGES - 1) % STAGES], p.v, v_columns, step + STAGES - 1);
        if (is_used) multiply_rows(scores, shared.q + WARP_ROWS * warp() * PITCH, k);
        if (MAY_HAVE_V_BLOCKS && !FLEX && p.qv.data) {
            for (int idx = 0; idx < p.num_v_blocks; idx++) {
                __syncthreads(); /* all warps have read Q and K */
                load_queries(p.qv, v_block_at(p, idx));
                load_keys(k, p.v, v_block_at(p, idx), step);
                wait_for_tiles<0>();
                if (is_used) multiply_rows<true>(scores, shared.q + WARP_ROWS * warp() * PITCH, k);
            }
            __syncthreads();
            load_queries(p.q, all); /* for the next step */
            cp_async_commit_group();
        }
        wait_for_tiles<2 * STAGES - 2>(); /* V has come, and all warps have read K */
        load_keys(shared.k[step % STAGES], p.k, all, step + STAGES);

#if FLEX
        const block_kind kind = walk.at(step).kind;
        const bool is_whole = !FLEX_SCORE && kind == FULL_BLOCK && first + BLOCK_KV <= s.len_kv;
#else
        const bool is_whole = !is_partial<BLOCK_KV>(first, keys.full_begin, keys.full_end);
#endif
        const bool is_exact = !is_whole && has_nan_or_inf<BLOCK_KV>(v);
        if (!is_used) continue;
        u32 seen[BLOCKS];
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) {
#if FLEX
            if (!is_whole || !is_plain)
                seen[m] =
                    apply_mods(mod, s, is_plain ? 1 : score.score_scale, scores[m], kind, warp_row + 16 * m, first);
#else
            if (!is_plain) change_scores(p, s, head, scores[m], warp_row + 16 * m, first);
            if (!is_whole) seen[m] = mask_scores(p, s, scores[m], warp_row + 16 * m, first);
#endif
        }
        softmax_step(scores, o, rows, unit * LOG2_E);
        if (MAY_DROP && p.rng_state)
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) drop_scores(p, s, head, scores[m], warp_row + 16 * m, first);
        if (is_exact)
            accumulate_by_fma<false>(o, scores, v, seen);
        else
            accumulate(o, scores, v);
    }

    const float sink = p.sinks.values.data ? sink_of(p.sinks.values, head) : 0;
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            finish_row(p, s, head, v_columns, part, warp_row + 16 * m + lane() / 4 + 8 * half, o[m], half,
                       rows[m][half], unit, sink);
}

/* A task is one tile of one head of one sequence, for one block of columns of v and one part of the keys. The last tile
 * comes first, because its rows are the longest rows of a causal mask. Packed calls have further tasks for the rows
 * that belong to no sequence. A task of a sequence longer than max_seqlen does several tiles. */
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS) KERNEL(const problem p) {
    extern __shared__ __align__(16) char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const bool is_packed = p.cu_seqlens_q != nullptr;
    const int num_blocks = MAY_HAVE_V_BLOCKS ? p.num_v_blocks : 1, num_parts = FLEX ? p.num_parts : 1;
    const long long num_tasks = (long long)(p.b + is_packed) * p.h * p.num_tiles * num_blocks * num_parts;
    for (long long at = blockIdx.x; at < num_tasks; at += gridDim.x) {
        const long long task = at / num_blocks / num_parts;
        const int part = (int)(at / num_blocks % num_parts);
        const v_block v = v_block_at(p, (int)(at % num_blocks));
        const int tile = p.num_tiles - 1 - (int)(task % p.num_tiles);
        const int head = (int)(task / p.num_tiles % p.h), b_idx = (int)(task / p.num_tiles / p.h);
        if (b_idx == p.b) {
            if (v.first == 0) fill_unowned_rows(p, head, clamp(p.cu_seqlens_q[p.b], 0, p.total_q) + tile, p.num_tiles);
            continue;
        }
        const sequence s = sequence_at(p, b_idx);
        for (int row = tile * BLOCK_Q; row < s.len_q; row += p.num_tiles * BLOCK_Q) {
            attend(p, shared, s, head, v, part, row);
            __syncthreads(); /* all warps have read Q, K and V */
        }
    }
}
