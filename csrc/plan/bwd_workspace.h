/* The workspace of the backward on Hopper. A slab is BLOCK_Q query rows of one head (cuda/attn_bwd_slabs.cuh). */
#ifndef FA_PLAN_BWD_WORKSPACE_H
#define FA_PLAN_BWD_WORKSPACE_H

#include "cuda/attn_bwd_params.h"
#include "gpu_problem.h"

typedef struct {
    int64_t num_slabs, num_heads; /* slabs of one head; heads (packed), or heads of all sequences (dense) */
    int64_t num_tiles;            /* key tiles of all heads; packed: an upper bound */
    int64_t num_cut, pieces;      /* the last num_cut key tiles, or all, are cut into pieces */
    int64_t head_pieces;          /* pieces along the query heads of a key head; 1: tiles are cut along the queries */
    size_t dq_sums, stats, kv_sums, turns, kv_turns, tile_counter; /* offsets in bytes */
    size_t bytes;
} fa_bwd_workspace;

/* Returns the number of pieces into which to cut each of `tiles` key tiles, of which there are fewer than CTAs.
 * A tile has `steps` steps and is cut along its `q_tiles` query tiles.
 * Time is counted in steps. A tile's beginning and end take about 2. A piece's turn to add its dK and dV takes 1.
 * CTAs do not begin their pieces together if pieces come in rounds or after whole tiles. Then cutting must save more
 * than a third. */
static inline int64_t fa_bwd_pieces(int64_t tiles, int64_t sms, int64_t q_tiles, int64_t steps, bool behind) {
    int64_t best = 1, best_time = steps + 2;
    for (int64_t n = 2; n <= 16 && n <= q_tiles; n++) {
        const int64_t rounds = (tiles * n + sms - 1) / sms, time = rounds * ((steps + n - 1) / n + 2) + n;
        if ((behind || rounds > 1) && 3 * time >= 2 * (steps + 2)) continue;
        if (time < best_time) best = n, best_time = time;
    }
    return best;
}

/* Returns the number of pieces into which to cut all key tiles along their q_tiles query tiles. 1: they stay whole.
 * The last key tile of a head completes the sums of dQ, and takes 1.22 times as long as others. Where a CTA has few
 * tiles, the last ones to end are such tiles. Time is counted in steps. A piece's beginning and end take 3. A piece
 * keeps 64 steps, and a cut must save 4%. */
static inline int64_t fa_bwd_pieces_of_all(int64_t tiles, int64_t sms, int64_t q_tiles, int64_t steps) {
    double best_time = 0;
    int64_t best = 1;
    for (int64_t n = 1; n <= 16 && n <= q_tiles && (n == 1 || steps / n >= 64); n *= 2) {
        const int64_t rounds = (tiles * n + sms - 1) / sms;
        const double own = (double)steps / (double)n, time = (double)rounds * (own + 3) + 0.22 * own;
        if (n == 1) best_time = 0.96 * time;
        if (time < best_time) best = n, best_time = time;
    }
    return best;
}

/* Returns about how many query rows of one head see a key tile. With a causal mask half of the rows do. */
static inline int64_t fa_bwd_rows_seen(const fa_problem *p, int block_kv) {
    const int64_t rows = p->window_right >= 0 ? p->len_q / 2 : p->len_q;
    if (p->window_left < 0 || p->window_left >= rows || p->window_right >= rows) return rows;
    const int64_t window = p->window_left + (p->window_right > 0 ? p->window_right : 0) + block_kv;
    return window < rows ? window : rows;
}

/* With a mask or packed sequences, key tiles differ in their number of steps. If a CTA has fewer than four tiles, all
 * tiles are cut along the query heads of their key head. Each piece keeps two or more query heads. Pieces must stay
 * long compared to adding up dK and dV. Causal tiles of up to 96 columns must be longer still. Uncut, a CTA with one
 * long and one short tile ends together with the others. */
static inline int64_t fa_bwd_head_pieces(const fa_problem *p, int64_t tiles, int64_t sms, int block_kv) {
    const bool pairs = p->window_left < 0 && p->window_right >= 0 && fa_columns(p) <= 96;
    const int64_t heads_per_kv = p->h / p->h_kv, rows = fa_bwd_rows_seen(p, block_kv) * heads_per_kv;
    int64_t n = 1;
    while (tiles * n < 4 * sms && heads_per_kv % (2 * n) == 0 && heads_per_kv > 2 * n) {
        const int64_t least = 2 * tiles * n < 3 * sms ? 1024 : pairs ? 6144 : 1536;
        if (rows / (2 * n) < least) break;
        n *= 2;
    }
    return n;
}

/* Each packed sequence begins a new slab. sms 0: no tile is cut. Otherwise the tiles of a round that is too small for
 * all SMs are cut. */
static inline fa_bwd_workspace fa_bwd_workspace_of(const fa_problem *p, int d, int block_q, int block_kv, int64_t sms) {
    const bool packed = p->cu_seqlens_q != NULL;
    fa_bwd_workspace w = {.num_slabs = packed         ? p->total_q / block_q + p->b + 1
                                       : p->len_q > 0 ? (p->len_q + block_q - 1) / block_q
                                                      : 1,
                          .num_heads = packed ? p->h : p->b * p->h};
    const size_t slabs = (size_t)(w.num_slabs * w.num_heads), rows = slabs * (size_t)block_q;
    w.pieces = w.head_pieces = 1;
    w.num_tiles = (p->len_kv + block_kv - 1) / block_kv * p->b * p->h_kv;
    if (fa_has_masks_in_groups(p)) {
        w.pieces = w.head_pieces = p->h / p->h_kv;
        w.num_cut = w.num_tiles;
    } else if (!packed && p->window_left < 0 && p->window_right < 0 && !fa_has_mods(p) && sms > 0) {
        const int64_t rest = w.num_tiles % sms, q_tiles = (p->len_q + block_q - 1) / block_q;
        w.pieces = fa_bwd_pieces(rest, sms, q_tiles, q_tiles * (p->h / p->h_kv), w.num_tiles > sms);
        w.num_cut = w.pieces > 1 ? rest : 0;
        const int64_t of_all = fa_bwd_pieces_of_all(w.num_tiles, sms, q_tiles, q_tiles * (p->h / p->h_kv));
        if (of_all > 1) w.pieces = of_all, w.num_cut = w.num_tiles;
    } else if (sms > 0) {
        if (packed) w.num_tiles = (p->total_kv / block_kv + p->b) * p->h_kv; /* upper bound */
        w.pieces = w.head_pieces = fa_bwd_head_pieces(p, w.num_tiles, sms, block_kv);
        w.num_cut = w.pieces > 1 ? w.num_tiles : 0;
    }
    w.stats = w.dq_sums + rows * FA_SLAB_COLUMNS((size_t)d) * sizeof(float);
    w.kv_sums = w.stats + 2 * rows * sizeof(float);
    w.turns = w.kv_sums + (size_t)(w.num_cut * 2 * block_kv * d) * sizeof(float);
    w.kv_turns = w.turns + 2 * slabs * sizeof(unsigned);
    w.tile_counter = w.kv_turns + 8 * (size_t)w.num_cut * sizeof(unsigned);
    w.bytes = w.tile_counter + sizeof(unsigned);
    return w;
}

/* Lists of a block mask come before the workspace. */
static inline size_t fa_bwd_workspace_at(const fa_problem *p, const fa_plan *plan) {
    return (fa_block_walks_at(p) + fa_block_walks_bytes(p, plan) + fa_hidden_bytes(p, plan) + 1023) / 1024 * 1024;
}

#endif
