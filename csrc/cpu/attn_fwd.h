/* Attention forward on vectors:  O = softmax(scale Q K^T + bias + mask) V,  lse = log-sum-exp of each row.
 *
 *   q [b, len_q, h, d]    k [b, len_kv, h_kv, d]    v [.., d_v]    o [b, len_q, h, d_v]    lse [b, h, len_q] float
 *
 * The one idea: each lane of a vector holds one query. The engine stores scores as S^T, with one row per key and one
 * lane per query. So the softmax needs no sum across a vector, and K and V enter the products as broadcast words.
 *
 * A task is a few tiles of one (sequence, key/value head). The rows and heads of these tiles share the keys.
 *
 *   open each tile     Q^T [d][lanes] packed, O^T [d][lanes] = 0
 *   for each block of keys that some row sees:
 *       pack K [keys][d] and V^T [d][keys]                      once for all tiles
 *       for each tile that sees the block:
 *           S^T = K Q^T · adjust and mask · max · P = exp2(S - max) · O^T = O^T alpha + V^T P
 *   close each tile    O = O^T / row sum, lse
 *
 * A tile adds its keys in ascending blocks that start at multiples of block_kv, which the length of its own sequence
 * decides. So the bits of an output depend neither on the thread count, nor on the other tiles of the task, nor on the
 * other sequences of the batch.
 *
 * With qv a packed row of Q continues with qv, and a packed row of K continues with V. So one product computes
 * q.k + qv.v. FA_E4M3 is packed without its descales. They multiply the scale of the scores and the factor of O.
 * Specification: reference.c. Measurements: README.md. */
#ifndef FA_CPU_ATTN_FWD_H
#define FA_CPU_ATTN_FWD_H

#include "pool.h"
#include "bias.h"
#include "elementwise.h"
#include "flex_step.h"
#include "fwd_layout.h"
#include "lanes.h"
#include "nonfinite.h"
#include "pack.h"
#include "sinks.h"

/* Where tile unit and vectors overlap, there are two buffers of S^T and two of P. A buffer of P is half as large. */
#define SCORE_BUFFERS (PRODUCT_OVERLAPS ? 3 : 1)

typedef struct {
    const fa_problem *p;
    fa_fwd_layout layout;
    fa_task_list *list;
    char *scratch; /* scratch of worker 0 */
    float softcap; /* in units of log2 */
    bool drops;    /* dropout is on, and keep_max allows a drop */
    fa_isa isa;
    fa_flex_seen seen;  /* flex */
    atomic_bool failed; /* flex: no memory for the programs */
} fwd_job;

/* The state of a task: the layout's offsets as pointers, and the packed block of keys. */
typedef struct {
    const fwd_job *job;
    const fa_problem *p;
    fa_sequence s;
    int64_t head_kv;
    float scale; /* scale of the product */
    float *q_t, *o_t, *k, *v_t, *scores;
    uint8_t *bytes, *hidden; /* of dropout; flex: 1 where a pair is masked */
    float *bias;             /* of one tile on the block */
    fa_fwd_tile *tiles;
    int num_tiles, num_open;            /* tiles of the task, and how many of them are open */
    int num_asked;                      /* tiles whose queries are prefetched, or open */
    int64_t block, block_kv;            /* first key of the block; its keys, at most those of the layout */
    const char **key_rows, **next_rows; /* rows of the block and of the next block: K, then V, block_kv each */
    int64_t num_next, num_fetched;      /* rows of the next block, and how many of them are in the prefetch queue */
    int num_steps;                      /* tiles that may see the block, and have not met it yet */
    const char **pieces;                /* storage of soon */
    fetch_queue soon;
    bool finite;              /* all packed elements of V are finite */
    const fa_task *next_task; /* during the last block: probably the next task of this worker */
    int score_buffer;         /* index of the next buffer of scores, 0 or 1 */
    product_queue queue;
    const fa_flex_programs *programs; /* flex */
    flex_own_views *own_views;        /* flex */
} fwd_task;

/* The keys of a block of a sequence. */
static inline int64_t fwd_block_kv(const fwd_job *job, const fa_sequence *s) {
    return fa_flex_of(job->p) ? job->layout.block_kv : fa_fwd_block_kv(job->p, s->len_kv);
}

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

static inline char *query_row(const fwd_task *t, const fa_view *view, fa_dtype dtype, const fa_fwd_tile *tile,
                              int lane) {
    int64_t offset = fa_query_offset(view, &t->s, tile->row[lane], tile->head[lane]);
    return (char *)view->data + offset * DTYPE_BYTES(dtype);
}

/* Bytes of the longest row of an input. Rows are prefetched as if all were so long. */
static inline int64_t longest_row(const fa_problem *p) { return max_i64(p->d, p->d_v) * DTYPE_BYTES(p->dtype); }

/* ---- open a tile ---- */

/* Flex: the lanes of a tile, for the block of keys that starts at key `block`. */
static flex_tile flex_tile_at(const fwd_task *t, const fa_fwd_tile *tile, int64_t block) {
    return flex_tile_of(t->programs, &t->s, tile->head[0], tile->row[0], tile->lanes, tile->valid_lanes, block,
                        t->block_kv);
}

/* Flex: finds the keys [*first, *end) of [key, key_end) from the first to the last block that the tile may see. */
static bool find_keys(const fwd_task *t, const fa_fwd_tile *tile, int64_t key, int64_t key_end, int64_t *first,
                      int64_t *end) {
    const fa_flex_block_map *map = &t->job->seen.map;
    const uint8_t *kinds = fa_flex_kinds_of(map, t->s.b_idx, tile->head[0]);
    const int64_t row = fa_flex_mask_row(map, t->s.b_idx, tile->row[0]);
    return fa_flex_find_keys(map, kinds, row, row + tile->valid_lanes, key, min_i64(key_end, t->s.len_kv), first, end);
}

/* Does the block of keys that begins at `block` hold a key that the tile sees? */
static bool may_see(const fwd_task *t, const fa_fwd_tile *tile, int64_t block) {
    return tile->first_key < block + t->block_kv && tile->end_key > block;
}

/* Flex: adds what the tiles see to the table. */
static void find_views(const fwd_task *t) {
    for (int i = 0; i < t->num_tiles; i++) {
        const fa_fwd_tile *tile = &t->tiles[i];
        if (tile->first_key < tile->end_key)
            fa_flex_see_task(&t->job->seen, t->programs, t->s.b_idx, tile->head[0], tile->row[0],
                             tile->row[0] + tile->valid_lanes, tile->first_key, tile->end_key);
    }
}

/* Sets the row and head of each lane, and the keys that the lane sees. */
static void place_lanes(const fwd_task *t, fa_fwd_tile *tile, int64_t idx) {
    const fa_problem *p = t->p;
    tile->valid_lanes = fa_place_lanes(p, &t->s, t->head_kv, t->job->layout.block_q, idx, tile->row, tile->head);
    tile->lanes = (int)round_up(tile->valid_lanes, fa_stacks_heads(p) ? LANES : FA_PATCH_ROWS);
    tile->first_key = tile->common_end = INT64_MAX;
    tile->end_key = tile->common_first = 0;
    if (fa_flex_of(p)) { /* each step finds the keys of its lanes */
        for (int lane = 0; lane < tile->lanes; lane++) tile->first[lane] = 0, tile->end[lane] = t->s.len_kv;
        if (find_keys(t, tile, 0, t->s.len_kv, &tile->first_key, &tile->end_key)) return;
        tile->first_key = INT64_MAX;
        tile->end_key = 0;
        return;
    }
    for (int lane = 0; lane < tile->lanes; lane++) {
        tile->diagonal[lane] = tile->row[lane] + t->s.len_kv - t->s.len_q;
        fa_visible_keys(p, &t->s, tile->row[lane], &tile->first[lane], &tile->end[lane]);
        tile->common_first = max_i64(tile->common_first, tile->first[lane]);
        tile->common_end = min_i64(tile->common_end, tile->end[lane]);
        if (tile->first[lane] < tile->end[lane]) {
            tile->first_key = min_i64(tile->first_key, tile->first[lane]);
            tile->end_key = max_i64(tile->end_key, tile->end[lane]);
        }
        if (p->alibi_slopes)
            tile->slope[lane] = slope_in_log2(p->alibi_slopes[t->s.b_idx * p->alibi_stride_b + tile->head[lane]]);
    }
}

/* Lists the rows of the lanes. The rows of a tile of one head lie at equal distances. */
static void list_lanes(const fwd_task *t, const fa_view *view, fa_dtype dtype, const fa_fwd_tile *tile, int lanes,
                       char **rows) {
    if (fa_stacks_heads(t->p)) {
        for (int lane = 0; lane < lanes; lane++) rows[lane] = query_row(t, view, dtype, tile, lane);
        return;
    }
    char *row = query_row(t, view, dtype, tile, 0);
    const int64_t distance = view->stride_row * DTYPE_BYTES(dtype);
    for (int lane = 0; lane < lanes; lane++) {
        rows[lane] = row;
        if (lane + 1 < tile->valid_lanes) row += distance;
    }
}

static void list_queries(const fwd_task *t, const fa_view *view, const fa_fwd_tile *tile, const char **rows) {
    list_lanes(t, view, t->p->dtype, tile, tile->lanes, (char **)rows);
}

static void list_outputs(const fwd_task *t, const fa_fwd_tile *tile, int lanes, char **rows) {
    list_lanes(t, &t->p->o, fa_output_dtype(t->p->dtype), tile, lanes, rows);
}

/* Adds the rows of a tile to the prefetch queue. */
static void fetch_lanes_later(fwd_task *t, const fa_view *view, fa_dtype dtype, const fa_fwd_tile *tile,
                              int64_t row_bytes) {
    if (fa_stacks_heads(t->p)) {
        char *rows[FA_MAX_BLOCK_Q];
        list_lanes(t, view, dtype, tile, tile->valid_lanes, rows);
        fetch_later(&t->soon, (const char *const *)rows, tile->valid_lanes, row_bytes);
    } else {
        fetch_even_later(&t->soon, query_row(t, view, dtype, tile, 0), view->stride_row * DTYPE_BYTES(dtype),
                         tile->valid_lanes, row_bytes);
    }
}

/* O^T = 0 for lanes [lane, lane_end) of a tile. */
static void start_output(const fwd_task *t, int i, int64_t lane, int64_t lane_end) {
    const fa_fwd_layout *l = &t->job->layout;
    float *o_t = t->o_t + i * l->columns * l->block_q;
    for (int64_t c = 0; c < l->columns && lane < lane_end; c++, o_t += t->tiles[i].lanes)
        memset(o_t + lane, 0, (size_t)(lane_end - lane) * sizeof(float));
}

static void open_tile(const fwd_task *t, int i) {
    const fa_fwd_layout *l = &t->job->layout;
    fa_fwd_tile *tile = &t->tiles[i];
    const char *rows[FA_MAX_BLOCK_Q];
    list_queries(t, &t->p->q, tile, rows);
    for (int lane = 0; lane < tile->lanes; lane++) {
        tile->row_max[lane] = -INFINITY;
        tile->row_sum[lane] = 0.0f;
        if (fa_flex_of(t->p)) tile->max_score[lane] = -INFINITY;
    }
    float *q_t = t->q_t + i * l->words * l->block_q;
    pack_lanes(q_t, tile->lanes, rows, tile->lanes, t->p->d, t->p->dtype);
    if (t->p->qv.data) {
        list_queries(t, &t->p->qv, tile, rows);
        pack_lanes(q_t + l->k_words * tile->lanes, tile->lanes, rows, tile->lanes, t->p->d_v, t->p->dtype);
    }
    tile->is_started = PRODUCT_OVERLAPS;
    if (PRODUCT_OVERLAPS) start_output(t, i, 0, tile->lanes);
}

/* ---- pack a block of keys ---- */

/* Lists rows of K, then of V, for keys [begin, end) of the block that starts at key `block`. Other entries are NULL. */
static void list_keys(const fwd_task *t, int64_t block, int64_t begin, int64_t end, const char **rows) {
    const fa_problem *p = t->p;
    const int64_t bytes = DTYPE_BYTES(p->dtype), block_kv = t->block_kv;
    for (int is_v = 0; is_v < 2; is_v++, rows += block_kv) {
        const fa_view *view = is_v ? &p->v : &p->k;
        for (int64_t j = 0; j < begin; j++) rows[j] = NULL;
        for (int64_t j = end; j < block_kv; j++) rows[j] = NULL;
        const char *row = (const char *)view->data, *first = row;
        if (begin < end) first += fa_key_offset(p, view, &t->s, block + begin, t->head_kv) * bytes;
        if (!p->paged)
            for (int64_t j = begin; j < end; j++) rows[j] = first + (j - begin) * view->stride_row * bytes;
        else
            for (int64_t j = begin; j < end; j++)
                rows[j] = row + fa_key_offset(p, view, &t->s, block + j, t->head_kv) * bytes;
    }
}

/* Packs keys [begin, end) of the block. */
static void pack_block(fwd_task *t, int64_t begin, int64_t end) {
    const fa_problem *p = t->p;
    const fa_fwd_layout *l = &t->job->layout;
    const int64_t step = LANES * WORD_ELEMS, from = begin / step * step, to = round_up(end, step);
    const int64_t even = begin / WORD_ELEMS * WORD_ELEMS;
    const char **k_rows = t->key_rows, **v_rows = k_rows + t->block_kv;
    pack_rows(t->k + even * l->words, l->words, k_rows + even, end - even, p->d, p->dtype);
    if (p->qv.data)
        pack_rows(t->k + even * l->words + l->k_words, l->words, v_rows + even, end - even, p->d_v, p->dtype);
    t->finite = pack_columns(t->v_t + from / WORD_ELEMS, l->v_stride, v_rows + from, to - from, p->d_v, p->dtype);
    if (t->finite) return;
    for (int64_t c = 0; c < l->columns; c++)
        clear_nonfinite(t->v_t + c * l->v_stride + from / WORD_ELEMS, (to - from) / WORD_ELEMS);
}

/* ---- a tile meets a block ---- */

/* One tile on one block: the values that the products and the softmax pass to each other. */
typedef struct {
    int tile;
    int64_t begin, end;    /* keys of the block; begin is a multiple of WORD_ELEMS */
    bool masked;           /* some lane does not see all of the keys */
    bool adjusts;          /* scores get options before the softmax; a mask alone is none, unless products overlap */
    bool runs_flex;        /* a score_mod, or bytes that mark the masked pairs */
    flex_sight sight;      /* flex */
    fa_lane_bounds bounds; /* if masked, or flex */
    fa_strip strips[FA_MAX_BLOCK_KV / PRODUCT_STRIP_A]; /* if masked and not adjusted */
    bool rescales;                                      /* some alpha is not 1 */
    float *scores, *p; /* S^T and P, in the same buffer unless products overlap the softmax */
    float new_max[FA_MAX_BLOCK_Q], alpha[FA_MAX_BLOCK_Q];
} fwd_step;

/* Flex: finds the keys that the lanes see. Returns false if they see none. The bounds of the lanes tell what is masked,
 * unless there are gaps between them, or a value that may bring NaN to a masked pair. */
static bool find_flex_step(const fwd_task *t, fa_fwd_tile *tile, fwd_step *step) {
    const fa_flex *flex = fa_flex_of(t->p);
    const flex_tile lanes = flex_tile_at(t, tile, t->block);
    if (!may_see(t, tile, t->block)) return false;
    if (!flex_look(&t->job->seen, &lanes, t->own_views, &step->bounds, &step->sight)) return false;
    step->begin = step->sight.begin;
    step->end = step->sight.end;
    step->masked = step->sight.masked;
    step->runs_flex = flex->score || flex->max_scores.data || !t->finite || step->sight.has_gaps;
    step->adjusts = step->runs_flex || (step->masked && PRODUCT_OVERLAPS) || !(t->scale > 0);
    return true;
}

/* Finds the first tile from `tile` on that sees the block. Returns false if no tile does. */
static bool find_step(const fwd_task *t, int tile, fwd_step *step) {
    const int64_t last = t->block + t->block_kv;
    for (; tile < t->num_tiles; tile++) {
        fa_fwd_tile *x = &t->tiles[tile];
        step->tile = tile;
        if (fa_flex_of(t->p)) {
            if (find_flex_step(t, x, step)) return true;
            continue;
        }
        const int64_t begin = max_i64(x->first_key, t->block), end = min_i64(x->end_key, last);
        if (begin >= end) continue;
        step->begin = (begin - t->block) / WORD_ELEMS * WORD_ELEMS;
        step->end = end - t->block;
        step->runs_flex = false;
        step->masked = x->common_first > t->block + step->begin || x->common_end < end;
        if (step->masked) fa_bound_lanes(&step->bounds, x->first, x->end, x->lanes, t->block, t->block_kv);
        step->adjusts = (step->masked && PRODUCT_OVERLAPS) || t->p->softcap > 0 || t->p->alibi_slopes ||
                        t->p->bias.data || !(t->scale > 0);
        return true;
    }
    return false;
}

/* Adds the rows that the next task reads first. These are nearly all rows of a short sequence. A burst of all these
 * prefetches before the arithmetic did not overlap with the arithmetic. Prefetching the rows of O, too, was no faster,
 * although a store reads its line first. */
static void fetch_task(fwd_task *t, const fa_task *task) {
    const fa_problem *p = t->p;
    const fa_fwd_layout *l = &t->job->layout;
    const fa_sequence s = fa_sequence_at(p, task->b_idx);
    const int64_t bytes = DTYPE_BYTES(p->dtype), row_bytes = longest_row(p), g = p->h / p->h_kv;
    int64_t row, row_end, key, key_end;
    fa_tile_rows(p, &s, l->block_q, task->begin, task->begin + 1, &row, &row_end);
    fa_rows_keys(p, &s, row, row_end, &key, &key_end);
    if (fa_flex_of(p)) {
        const fa_flex_block_map *map = &t->job->seen.map;
        const int64_t first = fa_flex_mask_row(map, task->b_idx, row), tile = task->begin % g;
        const uint8_t *kinds = fa_flex_kinds_of(map, task->b_idx, task->head_kv * g + tile);
        fa_flex_find_keys(map, kinds, first, first + row_end - row, key, key_end, &key, &key_end);
        key = key / t->block_kv * t->block_kv;
    }
    key_end = min_i64(key_end, key + fwd_block_kv(t->job, &s));
    for (int64_t i = 0; i < min_i64((row_end - row) * g, l->block_q); i++) {
        const char *q =
            (const char *)p->q.data + fa_query_offset(&p->q, &s, row + i / g, task->head_kv * g + i % g) * bytes;
        fetch_later(&t->soon, &q, 1, row_bytes);
    }
    for (; key < key_end; key++) {
        const char *rows[] = {(const char *)p->k.data + fa_key_offset(p, &p->k, &s, key, task->head_kv) * bytes,
                              (const char *)p->v.data + fa_key_offset(p, &p->v, &s, key, task->head_kv) * bytes};
        fetch_later(&t->soon, rows, 2, row_bytes);
    }
}

/* Fills the prefetch queue that the products of this step drain. The queue gets this tile's share of the next block of
 * keys, and the queries of the tile that opens next. On the tile's last block the queue also gets the rows of O, and on
 * the task's last step the first rows of the next task. */
static void fetch_during(fwd_task *t, const fwd_step *step) {
    const fa_fwd_layout *l = &t->job->layout;
    const fa_fwd_tile *tile = &t->tiles[step->tile];
    const int64_t row_bytes = longest_row(t->p);
    const int64_t share = (t->num_next - t->num_fetched) / (t->num_steps > 1 ? t->num_steps : 1);
    t->soon = (fetch_queue){.piece = t->pieces, .end = t->pieces, .lines = fetch_lines(row_bytes)};
    fetch_later(&t->soon, t->next_rows + t->num_fetched, share, row_bytes);
    t->num_fetched += share;
    t->num_steps--;
    if (t->num_open < t->num_tiles && t->num_open >= t->num_asked) {
        const fa_fwd_tile *next = &t->tiles[t->num_open];
        t->num_asked = t->num_open + 1;
        fetch_lanes_later(t, &t->p->q, t->p->dtype, next, row_bytes);
    }
    if (tile->end_key <= t->block + t->block_kv)
        fetch_lanes_later(t, &t->p->o, fa_output_dtype(t->p->dtype), tile, row_bytes);
    if (t->next_task && step->tile == t->num_tiles - 1) fetch_task(t, t->next_task);
    const int64_t patches = (step->end - step->begin + l->columns) / (tile->lanes <= 2 * LANES ? 8 : UNROLL_ROWS) + 1;
    t->soon.pieces_per_patch =
        PRODUCT_FETCHES ? (t->soon.end - t->soon.piece) / patches + 1 : t->soon.end - t->soon.piece;
    if (!PRODUCT_FETCHES) fetch_some(&t->soon);
}

/* S^T = K Q^T */
static void step_scores(fwd_task *t, fwd_step *step) {
    const fa_fwd_layout *l = &t->job->layout;
    const fa_fwd_tile *tile = &t->tiles[step->tile];
    while (t->num_open <= step->tile) open_tile(t, t->num_open++);
    fetch_during(t, step);
    const int64_t lanes = tile->lanes, buffer_floats = (int64_t)l->block_kv * l->block_q;
    step->scores = t->scores + (PRODUCT_OVERLAPS ? t->score_buffer * buffer_floats : 0);
    step->p =
        PRODUCT_OVERLAPS ? t->scores + 2 * buffer_floats + t->score_buffer * buffer_floats / WORD_ELEMS : step->scores;
    t->score_buffer ^= 1;
    memcpy(step->new_max, tile->row_max, (size_t)lanes * sizeof(float));
    product_args scores = {.a = t->k + step->begin * l->words,
                           .a_stride = l->words,
                           .b = t->q_t + step->tile * l->words * l->block_q,
                           .b_stride = lanes,
                           .c = step->scores + step->begin * lanes,
                           .c_stride = lanes,
                           .rows = step->end - step->begin,
                           .num_words = l->qk_words,
                           .num_vecs = (int)(lanes / LANES),
                           .scale = t->scale,
                           .lane_max = step->new_max,
                           .soon = &t->soon};
    if (step->masked && !PRODUCT_OVERLAPS)
        product_scores_seen(&scores, &step->bounds, step->begin, step->adjusts ? NULL : step->strips);
    else
        product_later(&t->queue, step->adjusts || PRODUCT_OVERLAPS ? PRODUCT_STORE : PRODUCT_STORE_MAX, &scores);
}

/* P = exp2(S - max), of lanes [lane, lane_end) on keys [begin, end). options: of the scores; NULL: they have none, or
 * they are adjusted already. */
static void softmax_part(fwd_task *t, fwd_step *step, const score_options *options, int64_t lane, int64_t lane_end,
                         int64_t begin, int64_t end) {
    fa_fwd_tile *tile = &t->tiles[step->tile];
    if (options) {
        score_options o = *options;
        if (o.slope) o.slope += lane;
        if (o.bias) o.bias += (begin - step->begin) * tile->lanes + lane;
        o.first += lane, o.end += lane, o.diagonal += lane;
        scores_adjust(step->scores + lane, tile->lanes, lane_end - lane, begin, end, &o, step->new_max + lane);
    }
    const softmax_args softmax = {.scores = step->scores + lane,
                                  .p = step->p + lane,
                                  .stride = tile->lanes,
                                  .lanes = lane_end - lane,
                                  .begin = begin,
                                  .end = end,
                                  .scale = t->scale,
                                  .new_max = step->new_max + lane,
                                  .row_max = tile->row_max + lane,
                                  .row_sum = tile->row_sum + lane,
                                  .alpha = step->alpha + lane,
                                  .bytes = t->job->drops ? t->bytes + lane : NULL,
                                  .keep_max = t->p->keep_max,
                                  .queue = &t->queue};
    if (step->adjusts)
        softmax_step(&softmax);
    else
        softmax_step_scaling(&softmax);
}

/* Masks lanes [lane, lane_end) on keys [begin, end), except in strips that these lanes see whole. */
static void mask_part(const fwd_task *t, fwd_step *step, int64_t lane, int64_t lane_end, int64_t begin, int64_t end) {
    const int64_t lanes = t->tiles[step->tile].lanes;
    for (int64_t key = begin, stop; key < end; key = stop) {
        int64_t masked_end = key;
        for (stop = key; stop < end && masked_end == stop;) { /* joins strips */
            const int64_t strip = (stop - step->begin) / PRODUCT_STRIP_A;
            const fa_strip *x = &step->strips[strip];
            stop = min_i64(step->begin + (strip + 1) * PRODUCT_STRIP_A, end);
            if (!x->is_full || lane < x->vec * LANES || lane_end > x->vec_end * LANES) masked_end = stop;
        }
        if (key < masked_end)
            scores_mask(step->scores + lane, lanes, lane_end - lane, key, masked_end, step->bounds.first + lane,
                        step->bounds.end + lane, t->scale, step->new_max + lane);
    }
}

/* Takes the same lanes and keys together as the product V^T P does. */
static void softmax_seen(fwd_task *t, fwd_step *step, const score_options *options) {
    const fa_fwd_tile *tile = &t->tiles[step->tile];
    const int64_t most = round_up(step->end - step->begin, WORD_ELEMS);
    fa_lanes_seen x;
    for (int64_t lane = 0; lane < tile->lanes; lane = x.lane_end) {
        x = fa_next_lanes(&step->bounds, lane, tile->lanes, step->begin, most);
        if (x.key == x.stop) {
            for (int64_t i = lane; i < x.lane_end; i++) step->alpha[i] = 1.0f;
            continue;
        }
        if (!step->adjusts) mask_part(t, step, lane, x.lane_end, step->begin + x.key, step->begin + x.stop);
        softmax_part(t, step, options, lane, x.lane_end, step->begin + x.key, step->begin + x.stop);
    }
}

/* P = exp2(S - max) */
static void step_softmax(fwd_task *t, fwd_step *step) {
    const fwd_job *job = t->job;
    fa_fwd_tile *tile = &t->tiles[step->tile];
    const int64_t lanes = tile->lanes, begin = step->begin, end = step->end;
    float diagonal[FA_MAX_BLOCK_Q];
    score_options options = {.scale = t->scale,
                             .softcap = job->softcap,
                             .slope = t->p->alibi_slopes ? tile->slope : NULL,
                             .diagonal = diagonal,
                             .bias = t->p->bias.data ? t->bias : NULL,
                             .first = step->bounds.first,
                             .end = step->bounds.end,
                             .masked = step->masked};
    const bool runs_flex = fa_flex_of(t->p) && step->runs_flex, has_options = step->adjusts && !runs_flex;
    if (runs_flex) {
        const flex_tile x = flex_tile_at(t, tile, t->block);
        flex_hide(&x, &step->sight, &step->bounds, begin, end, t->hidden);
        flex_scores(&x, step->scores, begin, end, t->scale, step->sight.has_gaps, t->hidden, step->new_max,
                    fa_flex_of(t->p)->max_scores.data ? tile->max_score : NULL);
        if (!t->finite) flex_hide_infinite(step->scores, lanes, begin, end, t->hidden);
    } else if (has_options) {
        for (int lane = 0; lane < lanes && options.slope; lane++)
            diagonal[lane] = (float)(tile->diagonal[lane] - t->block);
        if (t->p->bias.data)
            bias_tile(t->bias, &t->p->bias, t->s.b_idx, tile->row, tile->head, lanes, t->s.kv_row + t->block + begin,
                      min_i64(end, t->s.len_kv - t->block) - begin);
    }
    if (job->drops)
        dropout_bytes(t->bytes, lanes, begin, end, t->p->seed,
                      fa_dropout_stream(t->p->offset, t->s.b_idx, t->p->h, tile->head[0]), tile->row[0], t->block);
    product_spread(&t->queue, lanes / LANES * ((end - begin + SOFTMAX_KEYS - 1) / SOFTMAX_KEYS));
    if (step->masked && !PRODUCT_OVERLAPS)
        softmax_seen(t, step, has_options ? &options : NULL);
    else
        softmax_part(t, step, has_options ? &options : NULL, 0, lanes, begin, end);
    vec lowest = vec_set(1.0f); /* alpha, which is never above 1 */
    for (int lane = 0; lane < lanes; lane += LANES) lowest = vec_min(vec_load(step->alpha + lane), lowest);
    step->rescales = mask_any(vec_lt(lowest, vec_set(1.0f)));
}

/* O^T = O^T alpha + V^T P. No multiplication is needed where alpha is 1, and no addition in the tile's first step.
 * Padding rows of V^T are zero, so the product takes whole groups of rows. */
static void step_output(fwd_task *t, const fwd_step *step) {
    const fa_fwd_layout *l = &t->job->layout;
    fa_fwd_tile *tile = &t->tiles[step->tile];
    const int64_t lanes = tile->lanes;
    const bool is_first = !tile->is_started;
    product_args output = {.a = t->v_t + step->begin / WORD_ELEMS,
                           .a_stride = l->v_stride,
                           .b = step->p + step->begin / WORD_ELEMS * lanes,
                           .b_stride = lanes,
                           .c = t->o_t + step->tile * l->columns * l->block_q,
                           .c_stride = lanes,
                           .rows = round_up(t->p->d_v, PRODUCT_ROWS),
                           .num_words = (step->end - step->begin + WORD_ELEMS - 1) / WORD_ELEMS,
                           .num_vecs = (int)(lanes / LANES),
                           .alpha = step->alpha,
                           .soon = &t->soon};
    tile->is_started = true;
    if (step->masked && !PRODUCT_OVERLAPS) {
        for (int vec = 0; is_first && vec < lanes / LANES; vec++)
            if (step->bounds.vec_first[vec] >= step->bounds.vec_end[vec])
                start_output(t, step->tile, vec * LANES, (vec + 1) * LANES);
        product_keys_seen(is_first         ? product_scores
                          : step->rescales ? product_rescale
                                           : product_add,
                          &output, &step->bounds, step->begin);
    } else {
        product_later(&t->queue, is_first ? PRODUCT_STORE : step->rescales ? PRODUCT_RESCALE : PRODUCT_ADD, &output);
    }
    if (t->finite) return;
    product_finish(&t->queue);
    for (int64_t key = step->begin; key < step->end; key++) {
        const char *v_row = t->key_rows[t->block_kv + key];
        if (v_row)
            add_key_nonfinite(output.c, step->p, lanes, key, tile->first, tile->end, t->block,
                              fa_flex_of(t->p) ? t->hidden : NULL, v_row, t->p->d_v, t->p->dtype);
    }
}

/* Runs all tiles on the block. If products overlap the softmax, the tile unit works during this tile's softmax. It then
 * computes the scores of the next tile and the output of the previous tile. */
static void step_tiles(fwd_task *t) {
    fwd_step steps[2];
    int n = 0;
    bool more = find_step(t, 0, &steps[0]);
    if (more) step_scores(t, &steps[0]);
    product_finish(&t->queue);
    while (more) {
        fwd_step *step = &steps[n], *next = &steps[n ^= 1];
        more = find_step(t, step->tile + 1, next);
        if (more && PRODUCT_OVERLAPS) step_scores(t, next);
        step_softmax(t, step);
        product_finish(&t->queue);
        step_output(t, step);
        if (more && !PRODUCT_OVERLAPS) step_scores(t, next);
    }
    product_finish(&t->queue);
}

/* ---- close a tile ---- */

/* The row of a lane ends with its sink. Returns the factor of O^T. */
static double end_row_with_sink(const fwd_task *t, const fa_fwd_tile *tile, int lane) {
    const fa_problem *p = t->p;
    const float largest = tile->row_max[lane];
    const double sink = fa_sink_of_row(p, &t->s, tile->row[lane], tile->head[lane]);
    const fa_flex *flex = fa_flex_of(p);
    const bool is_natural = flex && (flex->score || flex->max_scores.data);
    const bool is_rounded = p->softcap > 0 || p->alibi_slopes || is_natural || !(t->scale > 0);
    const double above = (sink_in_log2(sink, largest, is_rounded) - (double)largest) * LN_2;
    const fa_row_end end = fa_end_row(largest * LN_2, tile->row_sum[lane], sink, above);
    fa_store_row_end(p, &t->s, tile->row[lane], tile->head[lane], &end);
    return end.factor;
}

static void close_tile(const fwd_task *t, int i) {
    const fa_problem *p = t->p;
    const fa_fwd_layout *l = &t->job->layout;
    const fa_fwd_tile *tile = &t->tiles[i];
    float factor[FA_MAX_BLOCK_Q], *o_t = t->o_t + i * l->columns * l->block_q;
    char *rows[FA_MAX_BLOCK_Q];
    float kept = p->dropout_p > 0 ? (float)(1 / (1 - p->dropout_p)) : 1.0f;
    if (p->dtype == FA_E4M3) kept *= fa_descale_of(&p->v_descale, t->s.b_idx, t->head_kv);
    list_outputs(t, tile, tile->valid_lanes, rows);
    for (int lane = 0; lane < tile->lanes; lane += LANES)
        vec_store(factor + lane, vec_div(vec_set(kept), vec_load(tile->row_sum + lane)));
    for (int lane = 0; lane < tile->valid_lanes; lane++) {
        const float sum = tile->row_sum[lane];
        const bool is_empty = sum == 0.0f; /* no key, or only scores of -inf: a finite score adds 1 or more */
        if (fa_has_sink(p, &t->s, tile->row[lane]))
            factor[lane] = kept * (float)end_row_with_sink(t, tile, lane);
        else
            fa_store_lse(p, &t->s, tile->row[lane], tile->head[lane],
                         is_empty ? p->empty_lse : (float)(tile->row_max[lane] * LN_2 + log(sum)));
        if (fa_flex_of(p) && fa_flex_of(p)->max_scores.data) {
            const bool has_nan = isnan(sum) && tile->max_score[lane] < INFINITY; /* a maximum passes over NaN */
            *fa_row_stat(&fa_flex_of(p)->max_scores, &t->s, tile->row[lane], tile->head[lane]) =
                has_nan ? sum : tile->max_score[lane];
        }
        if (!is_empty) continue;
        factor[lane] = 0.0f;
        for (int64_t c = 0; c < l->columns; c++) o_t[c * tile->lanes + lane] = 0.0f; /* 0 times inf has left NaN */
    }
    unpack_lanes(rows, tile->valid_lanes, p->d_v, o_t, tile->lanes, factor, fa_output_dtype(p->dtype));
}

/* ---- tasks and workers ---- */

/* Prefetches the block's keys and the first tile's queries, which no earlier product has prefetched. */
static void fetch_block(const fwd_task *t) {
    const int64_t row_bytes = longest_row(t->p);
    const char *rows[FA_MAX_BLOCK_Q];
    fetch_now(t->key_rows, 2 * t->block_kv, row_bytes);
    if (t->num_open > 0) return;
    list_queries(t, &t->p->q, &t->tiles[0], rows);
    fetch_now(rows, t->tiles[0].lanes, row_bytes);
}

/* The first key of the next block that some tile may see, or end_key or more. */
static int64_t next_block(const fwd_task *t, int64_t block, int64_t end_key) {
    const int64_t block_kv = t->block_kv;
    for (block += block_kv; fa_flex_of(t->p) && block < end_key; block += block_kv) {
        int64_t first, end;
        for (int i = 0; i < t->num_tiles; i++)
            if (may_see(t, &t->tiles[i], block) && find_keys(t, &t->tiles[i], block, block + block_kv, &first, &end))
                return block;
    }
    return block;
}

/* Flex: scores are in units of log2 only if nothing reads them in natural units. */
static float flex_score_scale(const fa_problem *p, int64_t b_idx, int64_t head_kv) {
    const bool is_natural = fa_flex_of(p) && (fa_flex_of(p)->score || fa_flex_of(p)->max_scores.data);
    return is_natural ? (float)p->scale : score_scale(p, b_idx, head_kv);
}

static void run_task(const fwd_job *job, const fa_task *task, const fa_flex_programs *programs,
                     flex_own_views *own_views, char *scratch) {
    const fa_fwd_layout *l = &job->layout;
    fwd_task t = {.job = job,
                  .p = job->p,
                  .s = fa_sequence_at(job->p, task->b_idx),
                  .head_kv = task->head_kv,
                  .scale = flex_score_scale(job->p, task->b_idx, task->head_kv),
                  .programs = programs,
                  .own_views = own_views,
                  .q_t = (float *)(scratch + l->q_t),
                  .o_t = (float *)(scratch + l->o_t),
                  .k = (float *)(scratch + l->k),
                  .v_t = (float *)(scratch + l->v_t),
                  .scores = (float *)(scratch + l->scores),
                  .bytes = (uint8_t *)(scratch + l->bytes),
                  .hidden = (uint8_t *)(scratch + l->hidden),
                  .bias = (float *)(scratch + l->bias),
                  .tiles = (fa_fwd_tile *)(scratch + l->tile),
                  .num_tiles = (int)(task->end - task->begin),
                  .key_rows = (const char **)(scratch + l->key_rows),
                  .next_rows = (const char **)(scratch + l->key_rows) + 2 * l->block_kv,
                  .pieces = (const char **)(scratch + l->pieces)};
    t.block_kv = fwd_block_kv(job, &t.s);
    int64_t row_first, row_end, first_key, end_key;
    fa_tile_rows(t.p, &t.s, l->block_q, task->begin, task->end, &row_first, &row_end);
    fa_rows_keys(t.p, &t.s, row_first, row_end, &first_key, &end_key);

    for (int i = 0; i < t.num_tiles; i++) place_lanes(&t, &t.tiles[i], task->begin + i);
    if (fa_flex_of(t.p)) {
        first_key = INT64_MAX, end_key = 0;
        for (int i = 0; i < t.num_tiles; i++) {
            first_key = min_i64(first_key, t.tiles[i].first_key);
            end_key = max_i64(end_key, t.tiles[i].end_key);
        }
        find_views(&t);
    }
    for (t.block = first_key / t.block_kv * t.block_kv; t.block < end_key;) {
        const int64_t begin = max_i64(first_key - t.block, 0), end = min_i64(end_key - t.block, t.block_kv);
        const int64_t next = next_block(&t, t.block, end_key);
        if (t.num_open == 0) list_keys(&t, t.block, begin, end, t.key_rows);
        if (t.num_open == 0 || !PRODUCT_FETCHES) fetch_block(&t);
        pack_block(&t, begin, end);
        t.num_next = next < end_key ? 2 * t.block_kv : 0;
        t.num_fetched = 0;
        t.num_steps = 0;
        for (int i = 0; i < t.num_tiles; i++) t.num_steps += may_see(&t, &t.tiles[i], t.block);
        if (t.num_next > 0) list_keys(&t, next, 0, min_i64(end_key - next, t.block_kv), t.next_rows);
        t.next_task = next >= end_key ? fa_next_task(job->list) : NULL;
        step_tiles(&t);
        t.soon.pieces_per_patch = t.soon.end - t.soon.piece; /* pieces that no register block has taken */
        fetch_some(&t.soon);
        const char **rows = t.key_rows;
        t.key_rows = t.next_rows, t.next_rows = rows;
        t.block = next;
    }
    while (t.num_open < t.num_tiles) open_tile(&t, t.num_open++); /* these tiles see no key */
    for (int i = 0; i < t.num_tiles; i++) close_tile(&t, i);
}

static void run_workers(int64_t begin, int64_t end, void *ctx) {
    fwd_job *job = ctx;
    fa_flex_programs programs;
    flex_own_views own_views;
    own_views.next = 0;
    if (!fa_flex_make_programs(job->p, job->isa, false, &programs)) {
        atomic_store(&job->failed, true);
        return;
    }
    vec_mode mode = vec_enter();
    product_enter();
    for (int64_t w = begin; w < end; w++) {
        for (const fa_task *task; (task = fa_take_task(job->list));)
            run_task(job, task, &programs, &own_views, job->scratch + (size_t)w * job->layout.scratch_bytes);
    }
    product_leave();
    vec_leave(mode);
    fa_flex_free_programs(&programs);
}

/* Fills the map of the blocks, makes the table of views, and sets the tasks' costs to the keys of blocks that their
 * tiles see. */
static void start_flex(fwd_job *job, const fa_plan *plan, fa_task *tasks, int64_t num_tasks) {
    const fa_problem *p = job->p;
    fa_flex_block_map map = fa_flex_block_map_of(p);
    map.kinds = (uint8_t *)job->scratch + (size_t)plan->cpu.threads * job->layout.scratch_bytes;
    fa_flex_fill_block_map(&map, fa_flex_of(p));
    for (int64_t i = 0; i < num_tasks && plan->cpu.threads > 1; i++) {
        fa_task *task = &tasks[i];
        const fa_sequence s = fa_sequence_at(p, task->b_idx);
        const int64_t g = p->h / p->h_kv;
        task->cost = 0;
        for (int64_t tile = task->begin; tile < task->end; tile++) {
            const uint8_t *kinds = fa_flex_kinds_of(&map, task->b_idx, task->head_kv * g + tile % g);
            const int64_t first = fa_flex_mask_row(&map, task->b_idx, 0);
            int64_t row, row_end;
            fa_tile_rows(p, &s, plan->block_q, tile, tile + 1, &row, &row_end);
            task->cost += fa_flex_count_keys(&map, kinds, first + row, first + row_end, 0, s.len_kv);
        }
    }
    job->seen = fa_flex_new_seen(p, &map, plan->block_q, plan->block_kv, LANES);
}

static bool attn_fwd(const fa_problem *p, const fa_plan *plan, void *workspace, const fa_pool *pool) {
    fa_task *tasks = workspace;
    int64_t num_tasks = fa_fwd_tasks(p, plan->block_q, plan->cpu.tiles_per_task, tasks);
    fa_task_list list = {tasks, num_tasks, 0};

    fwd_job job = {.p = p,
                   .layout = fa_fwd_layout_of(p, WORD_ELEMS, plan->block_q, plan->block_kv, plan->cpu.tiles_per_task,
                                              SCORE_BUFFERS),
                   .list = &list,
                   .scratch = (char *)workspace + fa_tasks_bytes(num_tasks),
                   .softcap = (float)(p->softcap * LOG2_E),
                   .drops = p->dropout_p > 0 && p->keep_max < 255,
                   .isa = plan->cpu.isa};
    if (fa_flex_of(p)) start_flex(&job, plan, tasks, num_tasks);
    bool is_done = true;
    if (plan->cpu.threads > 1) {
        fa_sort_tasks(tasks, num_tasks);
        is_done = pool->parallel_for(plan->cpu.threads, run_workers, &job);
    } else {
        run_workers(0, 1, &job); /* the work is too small to wake other threads */
    }
    if (fa_flex_of(p)) fa_flex_free_seen(&job.seen);
    return is_done && !job.failed;
}

#endif
