/* Attention backward on vectors, P computed again from lse:
 *
 *   P = exp(scale Q K^T + bias - lse)      delta = rowsum(dO * O)      dS = P * (dO V^T - delta)
 *   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K
 *
 *   q, o, dout, dq [b, len_q, h, d]    k, v, dk, dv [b, len_kv, h_kv, d]    lse, softmax_d [b, h, len_q] float
 *
 * Queries live in lanes as in the forward (attn_fwd.h), and all five products are the one of product.h.
 *
 *   softmax_d = delta, for every row
 *   a task is one range of keys, or all of them, of one (sequence, key/value head), with dK = dV = 0 [keys][d] in fp32:
 *     for each pass of a few tiles of rows and heads that see its keys:
 *       pack Q^T, dO^T [d][lanes] and Q, dO [lanes][d];  dQ^T [d][lanes] = 0, for each range
 *       for each block of keys: pack K, V [keys][d], K^T [d][keys]
 *         for each tile: S^T = K Q^T · dP^T = V dO^T · P, dS · dV += P^T dO · dK += dS^T Q · dQ^T += K^T dS^T
 *       all ranges: dQ = their sum, in order;  one of several: dQ^T stays in the slab of the range
 *     write dK, dV
 *   slabs: dQ = their sum, in the order of the ranges
 *
 * dK and dV belong to one task and sum over all heads of the group. Ranges follow from the shapes, so the bits depend on no
 * thread. A row or key that no visible pair touches is packed as zeros, and NaN reaches what sees it alone
 * (nonfinite.h).
 * Specification: reference.c. Measurements: README.md. */
#ifndef FA_ATTN_BWD_H
#define FA_ATTN_BWD_H

#include "cpu.h"
#include "bwd_layout.h"
#include "elementwise_bwd.h"
#include "lanes.h"
#include "nonfinite.h"
#include "pack.h"

typedef struct {
    const fa_problem *p;
    fa_bwd_layout layout;
    fa_task_list *list;
    int threads;
    char *scratch;        /* of worker 0 */
    float *slabs;         /* [ranges][h_kv][slab_tiles][tile_floats] */
    float scale, softcap; /* of the product, and of what softcap multiplies, in units of log2 */
    float kept;           /* 1 / (1 - dropout_p) */
    bool drops;           /* dropout is on and can drop something */
} bwd_job;

/* One task at work: the layout's offsets as pointers, its keys, and the block of keys that is packed now. */
typedef struct {
    const bwd_job *job;
    const fa_problem *p;
    fa_sequence s;
    int64_t head_kv, keys_begin, keys_end, seen_first, seen_end; /* some row sees keys [seen_first, seen_end) */
    int64_t range;                                               /* of the block */
    int64_t first_tile;                                          /* of the pass */
    float *q_t, *dout_t, *q, *dout, *dq_t, *dq_range, *k, *v, *k_t, *scores, *dprob, *ds_words, *dk, *dv;
    uint8_t *bytes;
    fa_bwd_tile *tiles;
    bool k_finite;                      /* all of the block's K, where K^T is packed */
    int num_tiles, num_open;            /* tiles of the pass, and how many of them are open */
    int64_t block;                      /* first key of the block */
    const char **key_rows, **next_rows; /* of the block and of the next one: K, then V, block_kv each */
    int64_t num_next, num_fetched;      /* rows of the next block, and how many of them were asked for */
    const fa_task *next_task;           /* during the last block: who comes next */
    const char **pieces;                /* of soon */
    fetch_queue soon;
} bwd_task;

static inline char *bwd_query_row(const fa_problem *p, const fa_sequence *s, const fa_view *view, int64_t row,
                                  int64_t head) {
    return (char *)view->data + fa_query_offset(view, s, row, head) * DTYPE_BYTES(p->dtype);
}

static inline char *bwd_key_row(const bwd_task *t, const fa_view *view, int64_t key) {
    return (char *)view->data + fa_key_offset(t->p, view, &t->s, key, t->head_kv) * DTYPE_BYTES(t->p->dtype);
}

static float *bwd_slab(const bwd_job *job, const fa_sequence *s, int64_t range, int64_t head_kv, int64_t tile) {
    const fa_bwd_layout *l = &job->layout;
    int64_t row = job->p->cu_seqlens_q ? s->q_row : s->b_idx * s->len_q;
    int64_t at = fa_bwd_slab_tile(job->p, s->b_idx, row, l->block_q) + tile;
    return job->slabs + ((range * job->p->h_kv + head_kv) * l->slab_tiles + at) * l->tile_floats;
}

/* ---- delta ---- */

INLINE float dot_rows_of(const char *x, const char *y, int64_t d, fa_dtype DTYPE) {
    vec sum = vec_set(0.0f);
    float lane[LANES], total = 0.0f;
    for (int64_t elem = 0; elem < d; elem += LANES) {
        char x_padded[4 * LANES], y_padded[4 * LANES];
        vec x_vec = load_elems(readable(x, elem, d, LANES, x_padded, DTYPE), DTYPE);
        sum = vec_fma(x_vec, load_elems(readable(y, elem, d, LANES, y_padded, DTYPE), DTYPE), sum);
    }
    vec_store(lane, sum);
    for (int i = 0; i < LANES; i++) total += lane[i];
    return total;
}
static float dot_rows(const char *x, const char *y, int64_t d, fa_dtype dtype) {
    return WITH_DTYPE(dtype, dot_rows_of, x, y, d);
}

/* A row that sees no key contributes nothing, and its dout may be anything. */
static bool contributes(const fa_problem *p, const fa_sequence *s, int64_t row, int64_t head, int64_t *first,
                        int64_t *end) {
    fa_visible_keys(p, s, row, first, end);
    return *first < *end && !isinf(*fa_row_stat(&p->lse, s, row, head));
}

/* Every worker takes its share of the rows of every head. */
static void bwd_delta(int64_t begin, int64_t worker_end, void *ctx) {
    const bwd_job *job = ctx;
    const fa_problem *p = job->p;
    vec_mode mode = vec_enter();
    for (int64_t w = begin; w < worker_end; w++) {
        for (int64_t task = 0; task < p->b * p->h; task++) {
            fa_sequence s = fa_sequence_at(p, task / p->h);
            int64_t head = task % p->h, first, end;
            const int64_t rows_end = s.len_q * (w + 1) / job->threads, ahead = 8;
            for (int64_t row = s.len_q * w / job->threads; row < rows_end; row++) {
                const int64_t later = row + ahead < rows_end ? row + ahead : row;
                const char *soon[] = {bwd_query_row(p, &s, &p->dout, later, head),
                                      bwd_query_row(p, &s, &p->o, later, head)};
                fetch_now(soon, 2, p->d * DTYPE_BYTES(p->dtype));
                const char *dout = bwd_query_row(p, &s, &p->dout, row, head),
                           *o = bwd_query_row(p, &s, &p->o, row, head);
                *fa_row_stat(&p->softmax_d, &s, row, head) =
                    contributes(p, &s, row, head, &first, &end) ? dot_rows(dout, o, p->d, p->dtype) : 0.0f;
            }
        }
    }
    vec_leave(mode);
}

/* ---- open a tile ---- */

static void bwd_place_lanes(const fa_problem *p, const fa_sequence *s, int64_t head_kv, int block_q, int64_t idx,
                            fa_bwd_tile *tile) {
    tile->valid_lanes = fa_place_lanes(p, s, head_kv, block_q, idx, tile->row, tile->head);
    tile->lanes = (int)round_up(tile->valid_lanes, FA_PATCH_ROWS);
}

/* What the lanes see, their lse and delta. Lanes of padding see no key and have lse +inf. */
static void bwd_measure_lanes(const fa_problem *p, const fa_sequence *s, fa_bwd_tile *tile) {
    tile->first_key = tile->common_end = INT64_MAX;
    tile->end_key = tile->common_first = 0;
    for (int lane = 0; lane < tile->lanes; lane++) {
        bool valid = lane < tile->valid_lanes;
        int64_t row = tile->row[lane], head = tile->head[lane], *first = &tile->first[lane], *end = &tile->end[lane];
        tile->slope[lane] = 0.0f;
        tile->diagonal[lane] = 0;
        if (!valid || !contributes(p, s, row, head, first, end)) {
            *first = *end = 0;
            tile->lse[lane] = INFINITY;
            tile->delta[lane] = 0.0f;
            if (valid) tile->common_end = 0;
            continue;
        }
        tile->lse[lane] = (float)(*fa_row_stat(&p->lse, s, row, head) * LOG2_E);
        tile->delta[lane] = *fa_row_stat(&p->softmax_d, s, row, head);
        tile->diagonal[lane] = row + s->len_kv - s->len_q;
        if (p->alibi_slopes) tile->slope[lane] = (float)(p->alibi_slopes[s->b_idx * p->alibi_stride_b + head] * LOG2_E);
        if (*first < tile->first_key) tile->first_key = *first;
        if (*end > tile->end_key) tile->end_key = *end;
        if (*first > tile->common_first) tile->common_first = *first;
        if (*end < tile->common_end) tile->common_end = *end;
    }
}

static bool bwd_sees(const fa_bwd_tile *tile, int64_t begin, int64_t end) {
    return tile->first_key < end && begin < tile->end_key;
}

/* ---- dQ of a tile ---- */

/* dQ is a sum over ranges in their order, and of each over its blocks, whoever computes it. A task of all ranges adds them up
 * here: the first in dq_t, another in dq_range until it is complete. Where they are shared each has a slab; those are added last. */
static void bwd_add_range(const bwd_task *t, int i) {
    const fa_bwd_layout *l = &t->job->layout;
    float *dq_t = t->dq_t + i * l->tile_floats;
    const float *dq_range = t->tiles[i].dq_t;
    if (l->shares > 1 || t->tiles[i].dq_range < 0 || dq_range == dq_t) return;
    for (int64_t at = 0; at < l->columns * t->tiles[i].lanes; at += LANES)
        vec_store(dq_t + at, vec_add(vec_load(dq_t + at), vec_load(dq_range + at)));
}

static void bwd_enter_range(const bwd_task *t, int i) {
    const fa_bwd_layout *l = &t->job->layout;
    fa_bwd_tile *tile = &t->tiles[i];
    if (tile->dq_range == t->range) return;
    bwd_add_range(t, i);
    if (l->shares > 1)
        tile->dq_t = bwd_slab(t->job, &t->s, t->range, t->head_kv, t->first_tile + i);
    else
        tile->dq_t = (tile->dq_range < 0 ? t->dq_t : t->dq_range) + i * l->tile_floats;
    tile->dq_range = t->range;
    memset(tile->dq_t, 0, (size_t)(l->columns * tile->lanes) * sizeof(float));
}

static void bwd_prepare_tile(const bwd_task *t, int i) {
    fa_bwd_tile *tile = &t->tiles[i];
    bwd_place_lanes(t->p, &t->s, t->head_kv, t->job->layout.block_q, t->first_tile + i, tile);
    bwd_measure_lanes(t->p, &t->s, tile);
    tile->dq_range = -1;
}

/* NULL for lanes that see no key. */
static void bwd_list_queries(const bwd_task *t, const fa_view *view, const fa_bwd_tile *tile, const char **rows) {
    for (int lane = 0; lane < tile->lanes; lane++) {
        const bool is_empty = tile->first[lane] >= tile->end[lane];
        rows[lane] = is_empty ? NULL : bwd_query_row(t->p, &t->s, view, tile->row[lane], tile->head[lane]);
    }
}

static void bwd_open_tile(const bwd_task *t, int i) {
    const fa_bwd_layout *l = &t->job->layout;
    const fa_problem *p = t->p;
    fa_bwd_tile *tile = &t->tiles[i];
    if (!bwd_sees(tile, t->keys_begin, t->keys_end)) return;
    const char *q_rows[FA_MAX_BLOCK_Q_BWD], *dout_rows[FA_MAX_BLOCK_Q_BWD];
    bwd_list_queries(t, &p->q, tile, q_rows);
    bwd_list_queries(t, &p->dout, tile, dout_rows);
    const int64_t at = i * l->tile_floats;
    pack_lanes(t->q_t + at, tile->lanes, q_rows, tile->lanes, p->d, p->dtype);
    tile->q_finite = pack_pairs(t->q + at, l->columns, q_rows, tile->lanes, p->d, p->dtype);
    pack_lanes(t->dout_t + at, tile->lanes, dout_rows, tile->lanes, p->d, p->dtype);
    tile->dout_finite = pack_pairs(t->dout + at, l->columns, dout_rows, tile->lanes, p->d, p->dtype);
    const int64_t num_words = tile->lanes / WORD_ELEMS * l->columns;
    if (!tile->q_finite) clear_nonfinite(t->q + at, num_words);
    if (!tile->dout_finite) clear_nonfinite(t->dout + at, num_words);
}

/* ---- pack a block of keys ---- */

/* Rows of K, then of V, of the block that begins with key `block`; NULL for keys that nobody sees. */
static void bwd_list_keys(const bwd_task *t, int64_t block, const char **rows) {
    const int64_t block_kv = t->job->layout.block_kv;
    for (int64_t j = 0; j < block_kv; j++) {
        const bool is_seen = t->seen_first <= block + j && block + j < t->seen_end;
        rows[j] = is_seen ? bwd_key_row(t, &t->p->k, block + j) : NULL;
        rows[block_kv + j] = is_seen ? bwd_key_row(t, &t->p->v, block + j) : NULL;
    }
}

static void bwd_pack_block(bwd_task *t) {
    const fa_problem *p = t->p;
    const fa_bwd_layout *l = &t->job->layout;
    const char **k_rows = t->key_rows, **v_rows = k_rows + l->block_kv;
    pack_rows(t->k, l->words, k_rows, l->block_kv, p->d, p->dtype);
    pack_rows(t->v, l->words, v_rows, l->block_kv, p->d, p->dtype);
    if (!p->dq.data) return;
    t->k_finite = pack_columns(t->k_t, l->k_t_stride, k_rows, l->block_kv, p->d, p->dtype);
    if (!t->k_finite) clear_nonfinite(t->k_t, l->columns * l->k_t_stride);
}

/* ---- a tile meets a block ---- */

/* grad[key] += words[key] . rows over the lanes, for keys [begin, end) of the block. Strips of keys start at the first
 * lane that sees them and stop at the last: on the diagonal half of the lanes see nothing. */
static void bwd_add_keys(bwd_task *t, const fa_bwd_tile *tile, bool masked, float *grad, const float *words,
                         int64_t word_stride, const float *rows, int64_t begin, int64_t end) {
    const fa_bwd_layout *l = &t->job->layout;
    const int64_t strip = masked ? PRODUCT_STRIP_A : end - begin, key_0 = t->block - t->keys_begin;
    for (int64_t key = begin; key < end; key += strip) {
        const int64_t stop = key + strip < end ? key + strip : end;
        int64_t lane = 0, lane_end = tile->lanes;
        if (masked)
            fa_lanes_that_see(tile->first, tile->end, tile->lanes, WORD_ELEMS, t->block + key, t->block + stop, &lane,
                              &lane_end);
        if (lane == lane_end) continue;
        const int64_t word = lane / WORD_ELEMS / PRODUCT_STRIP_K * PRODUCT_STRIP_K;
        const int64_t word_end = (lane_end + WORD_ELEMS - 1) / WORD_ELEMS;
        product_add(&(product_args){.a = words + key * word_stride + word,
                                    .a_stride = word_stride,
                                    .b = rows + word * l->columns,
                                    .b_stride = l->columns,
                                    .c = grad + (key_0 + key) * l->columns,
                                    .c_stride = l->columns,
                                    .rows = stop - key,
                                    .num_words = word_end - word,
                                    .num_vecs = (int)((t->p->d + LANES - 1) / LANES),
                                    .soon = &t->soon});
    }
}

/* The same for elements of the rows that are not finite and were cleared (view: of dO or Q). */
static void bwd_add_keys_nonfinite(const bwd_task *t, const fa_bwd_tile *tile, const fa_view *view, float *grad,
                                   const float *words, int64_t word_stride, int64_t begin, int64_t end) {
    const int64_t columns = t->job->layout.columns;
    for (int lane = 0; lane < tile->valid_lanes; lane++) {
        const int64_t first = tile->first[lane] - t->block, stop = tile->end[lane] - t->block;
        add_lane_nonfinite(grad + (t->block - t->keys_begin) * columns, columns, words, word_stride, lane,
                           first > begin ? first : begin, stop < end ? stop : end,
                           bwd_query_row(t->p, &t->s, view, tile->row[lane], tile->head[lane]), t->p->d, t->p->dtype);
    }
}

/* Some lane, other than those of padding, does not see every key of [begin, end) of the block. */
static bool bwd_is_masked(const bwd_task *t, const fa_bwd_tile *tile, int64_t begin, int64_t end) {
    return tile->common_first > t->block + begin || tile->common_end < t->block + end;
}

/* S and dP of keys [begin, end) of the block become P and dS. at: where the tile's operands lie. */
static void bwd_step_keys(bwd_task *t, const fa_bwd_tile *tile, int64_t at, int64_t begin, int64_t end, float *p_rows,
                          float *ds_rows, int64_t row_stride) {
    const bwd_job *job = t->job;
    const fa_problem *p = t->p;
    const fa_bwd_layout *l = &job->layout;
    const int64_t lanes = tile->lanes, num_keys = end - begin, from = PRODUCT_CACHED ? 0 : begin;

    /* S^T = K Q^T, dP^T = V dO^T */
    product_args scores = {.a = t->k + begin * l->words,
                           .a_stride = l->words,
                           .b = t->q_t + at,
                           .b_stride = lanes,
                           .c = t->scores + from * lanes,
                           .c_stride = lanes,
                           .rows = num_keys,
                           .num_words = (p->d + WORD_ELEMS - 1) / WORD_ELEMS,
                           .num_vecs = (int)(lanes / LANES),
                           .soon = &t->soon};
    product_args dprob = scores;
    dprob.a = t->v + begin * l->words, dprob.b = t->dout_t + at, dprob.c = t->dprob + from * lanes;
    const bool masked = bwd_is_masked(t, tile, begin, end);
    if (masked && !PRODUCT_OVERLAPS) {
        product_scores_seen(&scores, tile->first, tile->end, t->block + begin);
        product_scores_seen(&dprob, tile->first, tile->end, t->block + begin);
    } else {
        product_scores(&scores);
        product_scores(&dprob);
    }

    /* P, dS */
    float first[FA_MAX_BLOCK_Q_BWD], stop[FA_MAX_BLOCK_Q_BWD], diagonal[FA_MAX_BLOCK_Q_BWD];
    const bool hides = masked || tile->lanes > tile->valid_lanes; /* zeros of padding may meet infinite keys: NaN */
    const bool plain = !hides && !p->alibi_slopes && p->softcap == 0 && !job->drops; /* nobody asks for the bounds */
    const int64_t key_0 = t->block + begin;
    for (int lane = 0; lane < lanes && !plain; lane++) {
        int64_t low = tile->first[lane] - key_0, high = tile->end[lane] - key_0;
        first[lane] = (float)(low < 0 ? 0 : low < num_keys ? low : num_keys);
        stop[lane] = (float)(high < 0 ? 0 : high < num_keys ? high : num_keys);
        diagonal[lane] = (float)(tile->diagonal[lane] - key_0);
    }
    gradient_step(&(gradient_args){.scores = scores.c,
                                   .dprob = dprob.c,
                                   .p_rows = p_rows,
                                   .ds_rows = ds_rows,
                                   .row_stride = row_stride,
                                   .ds_words = t->ds_words + begin / 2 * lanes,
                                   .lanes = lanes,
                                   .num_keys = num_keys,
                                   .lse = tile->lse,
                                   .delta = tile->delta,
                                   .bytes = job->drops ? t->bytes + begin * lanes : NULL,
                                   .keep_max = p->keep_max,
                                   .scale = job->scale,
                                   .kept = job->kept,
                                   .options = {.softcap = job->softcap,
                                               .slope = p->alibi_slopes ? tile->slope : NULL,
                                               .diagonal = diagonal,
                                               .first = first,
                                               .end = stop,
                                               .masked = hides}});
}

/* The rows that the next task reads first. Long sequences, whose keys are cut into ranges, do not need it. */
static void bwd_fetch_task(bwd_task *t, const fa_task *task) {
    const fa_problem *p = t->p;
    const fa_bwd_layout *l = &t->job->layout;
    const int64_t row_bytes = p->d * DTYPE_BYTES(p->dtype), g = p->h / p->h_kv;
    const bwd_task next = {.p = p, .s = fa_sequence_at(p, task->b_idx), .head_kv = task->head_kv};
    const int64_t num_keys = next.s.len_kv < l->block_kv ? next.s.len_kv : l->block_kv;
    const int64_t num_lanes = next.s.len_q * g < l->block_q ? next.s.len_q * g : l->block_q;
    if (l->shares > 1) return;
    for (int64_t i = 0; i < num_keys; i++) {
        const char *rows[] = {bwd_key_row(&next, &p->k, i), bwd_key_row(&next, &p->v, i)};
        fetch_later(&t->soon, rows, 2, row_bytes);
    }
    for (int64_t i = 0; i < num_lanes; i++) {
        const int64_t head = next.head_kv * g + i % g;
        const char *rows[] = {bwd_query_row(p, &next.s, &p->q, i / g, head),
                              bwd_query_row(p, &next.s, &p->dout, i / g, head)};
        fetch_later(&t->soon, rows, 2, row_bytes);
    }
}

/* dK and dV of keys of the next block, which a task of all ranges has not touched since its last pass. Of narrow rows enough is
 * left in the second-level cache. */
static void bwd_fetch_gradients(bwd_task *t, int64_t begin, int64_t num_keys) {
    const fa_bwd_layout *l = &t->job->layout;
    const int64_t first = t->block + l->block_kv - t->keys_begin + begin, end = t->keys_end - t->keys_begin;
    if (l->shares > 1 || t->p->d <= 64) return;
    for (int64_t j = first; j < first + num_keys && j < end; j++) {
        const char *rows[] = {(const char *)(t->dk + j * l->columns), (const char *)(t->dv + j * l->columns)};
        fetch_later(&t->soon, rows, 2, l->columns * 4);
    }
}

/* What comes after a step, to be fetched by its products: this tile's share of the next block of keys, for the tile that
 * opens next its rows of Q and dO, and after the task's last step what the next task begins with. */
static void bwd_fetch_during(bwd_task *t, int i, int64_t num_keys) {
    const fa_bwd_layout *l = &t->job->layout;
    const int64_t row_bytes = t->p->d * DTYPE_BYTES(t->p->dtype);
    const int64_t share = (t->num_next - t->num_fetched) / (t->num_tiles - i);
    const char *rows[FA_MAX_BLOCK_Q_BWD];
    t->soon = (fetch_queue){.piece = t->pieces, .end = t->pieces, .lines = fetch_lines(row_bytes)};
    fetch_later(&t->soon, t->next_rows + t->num_fetched, share, row_bytes);
    bwd_fetch_gradients(t, t->num_fetched / 2, share / 2);
    t->num_fetched += share;
    int next = t->num_open;
    while (next < t->num_tiles && !bwd_sees(&t->tiles[next], t->keys_begin, t->keys_end)) next++;
    for (int is_dout = 0; is_dout < 2 && next < t->num_tiles; is_dout++) {
        bwd_list_queries(t, is_dout ? &t->p->dout : &t->p->q, &t->tiles[next], rows);
        fetch_later(&t->soon, rows, t->tiles[next].lanes, row_bytes);
    }
    if (t->next_task && i == t->num_tiles - 1) bwd_fetch_task(t, t->next_task);
    const int64_t patches = (4 * num_keys + l->columns) / UNROLL_ROWS + 1;
    t->soon.pieces = (t->soon.end - t->soon.piece) / patches + 1;
}

static void bwd_step_tile(bwd_task *t, int i) {
    const bwd_job *job = t->job;
    const fa_problem *p = t->p;
    const fa_bwd_layout *l = &job->layout;
    fa_bwd_tile *tile = &t->tiles[i];
    const int64_t lanes = tile->lanes, at = i * l->tile_floats;
    int64_t begin = tile->first_key > t->block ? tile->first_key - t->block : 0;
    int64_t end = tile->end_key - t->block < l->block_kv ? tile->end_key - t->block : l->block_kv;
    if (begin >= end) return;
    begin = begin / 2 * 2, end = round_up(end, 2); /* rows of keys past the last are zeros */
    while (t->num_open <= i) bwd_open_tile(t, t->num_open++);
    if (p->dq.data) bwd_enter_range(t, i);
    bwd_fetch_during(t, i, end - begin);

    /* Rows of P and dS, for bf16 half as long: behind the scores where those are kept short, else over them. */
    const int64_t cached = PRODUCT_CACHED ? PRODUCT_CACHED : l->block_kv;
    const int64_t row_stride = PRODUCT_CACHED ? lanes / WORD_ELEMS : lanes;
    float *p_rows = t->scores + PRODUCT_CACHED * lanes, *ds_rows = t->dprob + PRODUCT_CACHED * lanes;
    if (job->drops)
        dropout_bytes(t->bytes, lanes, begin, end, p->seed,
                      fa_dropout_stream(p->offset, t->s.b_idx, p->h, tile->head[0]), tile->row[0], t->block);
    for (int64_t key = begin, stop; key < end; key = stop) {
        stop = key + cached < end ? key + cached : end;
        bwd_step_keys(t, tile, at, key, stop, p_rows + key * row_stride, ds_rows + key * row_stride, row_stride);
    }

    /* dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T */
    const bool masked = bwd_is_masked(t, tile, begin, end);
    if (p->dv.data) bwd_add_keys(t, tile, masked, t->dv, p_rows, row_stride, t->dout + at, begin, end);
    if (p->dk.data) bwd_add_keys(t, tile, masked, t->dk, ds_rows, row_stride, t->q + at, begin, end);
    if (p->dv.data && !tile->dout_finite)
        bwd_add_keys_nonfinite(t, tile, &p->dout, t->dv, p_rows, row_stride, begin, end);
    if (p->dk.data && !tile->q_finite) bwd_add_keys_nonfinite(t, tile, &p->q, t->dk, ds_rows, row_stride, begin, end);
    if (!p->dq.data) return;
    const float *ds_words = WORD_ELEMS == 2 ? t->ds_words : ds_rows;
    const product_args dq = {.a = t->k_t + begin / WORD_ELEMS,
                             .a_stride = l->k_t_stride,
                             .b = ds_words + begin / WORD_ELEMS * lanes,
                             .b_stride = lanes,
                             .c = tile->dq_t,
                             .c_stride = lanes,
                             .rows = round_up(p->d, PRODUCT_ROWS), /* rows of padding in K^T are zero */
                             .num_words = (end - begin) / WORD_ELEMS,
                             .num_vecs = (int)(lanes / LANES),
                             .soon = &t->soon};
    if (masked && !PRODUCT_OVERLAPS)
        product_keys_seen(product_add, &dq, tile->first, tile->end, t->block + begin);
    else
        product_add(&dq);
    for (int64_t key = begin; key < end && !t->k_finite; key++)
        if (t->key_rows[key])
            add_key_nonfinite(dq.c, ds_words, lanes, key, tile->first, tile->end, t->block, t->key_rows[key], p->d,
                              p->dtype);
}

/* ---- write gradients ---- */

static void bwd_write_queries(const fa_problem *p, const fa_sequence *s, const fa_bwd_tile *tile, const float *dq_t) {
    char *rows[FA_MAX_BLOCK_Q_BWD];
    float factor[FA_MAX_BLOCK_Q_BWD];
    for (int lane = 0; lane < tile->lanes; lane++) factor[lane] = (float)p->scale;
    for (int lane = 0; lane < tile->valid_lanes; lane++)
        rows[lane] = bwd_query_row(p, s, &p->dq, tile->row[lane], tile->head[lane]);
    unpack_lanes(rows, tile->valid_lanes, p->d, dq_t, tile->lanes, factor, p->dtype);
}

static void bwd_write_keys(const bwd_task *t, const fa_view *view, const float *grad, float factor) {
    const int64_t ahead = 8, row_bytes = t->p->d * DTYPE_BYTES(t->p->dtype);
    for (int64_t key = t->keys_begin; key < t->keys_end; key++) {
        const char *soon = key + ahead < t->keys_end ? bwd_key_row(t, view, key + ahead) : NULL;
        fetch_now(&soon, 1, row_bytes);
        unpack_row(bwd_key_row(t, view, key), t->p->d, grad + (key - t->keys_begin) * t->job->layout.columns, factor,
                   t->p->dtype);
    }
}

/* ---- tasks and workers ---- */

static void bwd_run_task(const bwd_job *job, const fa_task *task, char *scratch) {
    const fa_bwd_layout *l = &job->layout;
    const fa_problem *p = job->p;
    bwd_task t = {.job = job,
                  .p = p,
                  .s = fa_sequence_at(p, task->b_idx),
                  .head_kv = task->head_kv,
                  .q_t = (float *)(scratch + l->q_t),
                  .dout_t = (float *)(scratch + l->dout_t),
                  .q = (float *)(scratch + l->q),
                  .dout = (float *)(scratch + l->dout),
                  .dq_t = (float *)(scratch + l->dq_t),
                  .dq_range = (float *)(scratch + l->dq_range),
                  .k = (float *)(scratch + l->k),
                  .v = (float *)(scratch + l->v),
                  .k_t = (float *)(scratch + l->k_t),
                  .scores = (float *)(scratch + l->scores),
                  .dprob = (float *)(scratch + l->dprob),
                  .ds_words = (float *)(scratch + l->ds_words),
                  .dk = (float *)(scratch + l->dk),
                  .dv = (float *)(scratch + l->dv),
                  .bytes = (uint8_t *)(scratch + l->bytes),
                  .tiles = (fa_bwd_tile *)(scratch + l->tile),
                  .key_rows = (const char **)(scratch + l->key_rows),
                  .next_rows = (const char **)(scratch + l->key_rows) + 2 * l->block_kv,
                  .pieces = (const char **)(scratch + l->pieces)};
    const int64_t num_tiles = fa_num_tiles(p, &t.s, l->block_q);
    fa_bwd_ranges(&t.s, l->block_kv, l->ranges, task->begin, task->end, &t.keys_begin, &t.keys_end);
    if (t.s.len_q > 0) fa_rows_keys(p, &t.s, 0, t.s.len_q, &t.seen_first, &t.seen_end);
    const size_t grad_bytes = (size_t)((t.keys_end - t.keys_begin) * l->columns) * sizeof(float);
    memset(t.dk, 0, grad_bytes);
    memset(t.dv, 0, grad_bytes);

    for (; t.first_tile < num_tiles; t.first_tile += l->tiles) {
        t.num_tiles = (int)(num_tiles - t.first_tile < l->tiles ? num_tiles - t.first_tile : l->tiles);
        t.num_open = 0;
        int64_t first_key = INT64_MAX, end_key = 0;
        for (int i = 0; i < t.num_tiles; i++) {
            bwd_prepare_tile(&t, i);
            if (t.tiles[i].first_key < first_key) first_key = t.tiles[i].first_key;
            if (t.tiles[i].end_key > end_key) end_key = t.tiles[i].end_key;
        }
        if (first_key < t.keys_begin) first_key = t.keys_begin;
        if (end_key > t.keys_end) end_key = t.keys_end;
        t.block = t.keys_begin + (first_key - t.keys_begin) / l->block_kv * l->block_kv;
        for (bool is_first = true; t.block < end_key; t.block += l->block_kv, is_first = false) {
            const int64_t next = t.block + l->block_kv;
            t.range = fa_bwd_range_of(&t.s, l->block_kv, l->ranges, t.block);
            if (is_first) bwd_list_keys(&t, t.block, t.key_rows);
            if (is_first || !PRODUCT_FETCHES) fetch_now(t.key_rows, 2 * l->block_kv, p->d * DTYPE_BYTES(p->dtype));
            bwd_pack_block(&t);
            t.num_next = next < end_key ? 2 * l->block_kv : 0;
            t.num_fetched = 0;
            if (t.num_next > 0) bwd_list_keys(&t, next, t.next_rows);
            const bool is_last = next >= end_key && t.first_tile + l->tiles >= num_tiles;
            t.next_task = is_last ? fa_next_task(job->list) : NULL;
            for (int i = 0; i < t.num_tiles; i++) bwd_step_tile(&t, i);
            const char **rows = t.key_rows;
            t.key_rows = t.next_rows, t.next_rows = rows;
        }
        for (int i = 0; i < t.num_tiles && p->dq.data && l->shares == 1; i++) {
            float *dq_t = t.dq_t + i * l->tile_floats;
            bwd_add_range(&t, i);
            if (t.tiles[i].dq_range < 0) memset(dq_t, 0, (size_t)l->tile_floats * sizeof(float)); /* it saw no key */
            bwd_write_queries(p, &t.s, &t.tiles[i], dq_t);
        }
    }
    if (p->dk.data) bwd_write_keys(&t, &p->dk, t.dk, (float)p->scale);
    if (p->dv.data) bwd_write_keys(&t, &p->dv, t.dv, job->kept);
}

static void bwd_run_workers(int64_t begin, int64_t end, void *ctx) {
    const bwd_job *job = ctx;
    vec_mode mode = vec_enter();
    product_enter();
    for (int64_t w = begin; w < end; w++) {
        for (const fa_task *task; (task = fa_take_task(job->list));)
            bwd_run_task(job, task, job->scratch + (size_t)w * job->layout.scratch_bytes);
    }
    product_leave();
    vec_leave(mode);
}

/* dQ of one tile: the slabs of the ranges that it sees, in their order, summed into the first of them. */
static void bwd_sum_tile(const bwd_job *job, const fa_sequence *s, int64_t head_kv, int64_t idx, const float *zeros) {
    const fa_bwd_layout *l = &job->layout;
    fa_bwd_tile tile;
    float *slabs[FA_MAX_RANGES];
    int num_slabs = 0;
    bwd_place_lanes(job->p, s, head_kv, l->block_q, idx, &tile);
    bwd_measure_lanes(job->p, s, &tile);
    for (int r = 0; r < l->ranges; r++) {
        int64_t begin, end;
        fa_bwd_ranges(s, l->block_kv, l->ranges, r, r + 1, &begin, &end);
        if (bwd_sees(&tile, begin, end)) slabs[num_slabs++] = bwd_slab(job, s, r, head_kv, idx);
    }
    for (int64_t i = 0; num_slabs > 1 && i < l->columns * tile.lanes; i += LANES) {
        vec sum = vec_load(slabs[0] + i);
        for (int r = 1; r < num_slabs; r++) sum = vec_add(sum, vec_load(slabs[r] + i));
        vec_store(slabs[0] + i, sum);
    }
    bwd_write_queries(job->p, s, &tile, num_slabs > 0 ? slabs[0] : zeros);
}

static void bwd_sum_slabs(int64_t begin, int64_t end, void *ctx) {
    const bwd_job *job = ctx;
    const fa_problem *p = job->p;
    vec_mode mode = vec_enter();
    for (int64_t w = begin; w < end; w++) {
        float *zeros = (float *)(job->scratch + (size_t)w * job->layout.scratch_bytes + job->layout.q_t);
        int64_t turn = 0;
        memset(zeros, 0, (size_t)job->layout.tile_floats * sizeof(float));
        for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
            fa_sequence s = fa_sequence_at(p, b_idx);
            int64_t num_tiles = fa_num_tiles(p, &s, job->layout.block_q);
            for (int64_t i = 0; i < p->h_kv * num_tiles; i++)
                if (turn++ % job->threads == w) bwd_sum_tile(job, &s, i / num_tiles, i % num_tiles, zeros);
        }
    }
    vec_leave(mode);
}

static void attn_bwd(const fa_problem *p, const fa_plan *plan, void *workspace, const fa_pool *pool) {
    fa_task *tasks = workspace;
    const int shares = fa_bwd_shares(p, plan->num_splits, plan->threads);
    int64_t num_tasks = fa_bwd_tasks(p, plan->block_q, plan->block_kv, plan->num_splits, shares, tasks);
    fa_task_list list = {tasks, num_tasks, 0};
    if (plan->threads > 1) fa_sort_tasks(tasks, num_tasks);

    bwd_job job = {.p = p,
                   .layout = fa_bwd_layout_of(p, WORD_ELEMS, plan->block_q, plan->block_kv, plan->tiles_per_task,
                                              plan->num_splits, shares),
                   .list = &list,
                   .threads = plan->threads,
                   .scratch = (char *)workspace + fa_tasks_bytes(num_tasks),
                   .scale = (float)(p->softcap > 0 ? p->scale / p->softcap : p->scale * LOG2_E),
                   .softcap = (float)(p->softcap * LOG2_E),
                   .kept = p->dropout_p > 0 ? (float)(1 / (1 - p->dropout_p)) : 1.0f,
                   .drops = p->dropout_p > 0 && p->keep_max < 255};
    job.slabs = (float *)(job.scratch + (size_t)plan->threads * job.layout.scratch_bytes);
    void (*const steps[])(int64_t, int64_t, void *) = {bwd_delta, bwd_run_workers,
                                                       p->dq.data && shares > 1 ? bwd_sum_slabs : NULL};
    for (int i = 0; i < 3 && steps[i]; i++) {
        if (plan->threads == 1)
            steps[i](0, 1, &job); /* too little to wake anybody */
        else
            pool->parallel_for(plan->threads, steps[i], &job);
    }
}

#endif
