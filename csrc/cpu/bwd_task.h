/* The state of a task of the backward. Functions here open tiles, pack blocks of keys and add up dQ of a tile. The
 * algorithm: attn_bwd.h. */
#ifndef FA_CPU_BWD_TASK_H
#define FA_CPU_BWD_TASK_H

#include "pool.h"
#include "bwd_layout.h"
#include "elementwise.h"
#include "flex_bias.h"
#include "flex_step.h"
#include "lanes.h"
#include "nonfinite.h"
#include "pack.h"

typedef struct {
    const fa_problem *p;
    fa_bwd_layout layout;
    fa_task_list *list;
    int threads;
    char *scratch;        /* scratch of worker 0 */
    float *slabs;         /* [ranges][h_kv][slab_tiles][tile_floats] */
    float scale, softcap; /* scale of the product, and softcap in units of log2 */
    float kept;           /* 1 / (1 - dropout_p) */
    bool drops;           /* dropout is on, and keep_max allows a drop */
    bool finds_delta;     /* tasks find delta of their rows */
    fa_isa isa;
    fa_flex_seen seen; /* flex */
    bool adds_bias;    /* flex: the score_mod is `bias` */
    fa_flex_bias bias;
    fa_flex_sums sums;          /* flex: of the gradients of captures */
    double *copies;             /* [num_copies][sums.num] */
    int64_t num_copies;         /* 0: no gradient of a capture is a sum of tasks */
    int64_t num_chains;         /* of the tasks of a copy */
    _Atomic int64_t next_chain; /* the first chain of a copy that no worker has taken */
    atomic_bool failed;         /* flex: no memory for the programs */
} bwd_job;

/* The state of a task: the layout's offsets as pointers, the task's keys, and the packed block of keys. */
typedef struct {
    const bwd_job *job;
    const fa_problem *p;
    fa_sequence s;
    int64_t head_kv, keys_begin, keys_end, seen_first, seen_end; /* some row sees keys [seen_first, seen_end) */
    int64_t range;                                               /* range of the block */
    int64_t first_tile;                                          /* first tile of the pass */
    float *q_t, *dout_t, *q, *dout, *dq_t, *dq_range, *k, *v, *k_t, *scores, *dprob, *ds_words, *dk, *dv;
    uint8_t *bytes, *hidden; /* of dropout; flex: 1 where a pair is masked */
    float *bias;             /* of one tile on some keys of the block */
    fa_bwd_tile *tiles;
    bool k_finite;                      /* all elements of the block's K are finite, where K^T is packed */
    int num_tiles, num_open;            /* tiles of the pass, and how many of them are open */
    int64_t block;                      /* first key of the block */
    const char **key_rows, **next_rows; /* rows of the block and of the next block: K, then V, block_kv each */
    int64_t num_next, num_fetched;      /* rows of the next block, and how many of them are in the prefetch queue */
    int num_steps;                      /* tiles that may see the block, and have not met it yet */
    bool has_sums;                      /* dk and dv hold sums; otherwise nothing was stored yet */
    bool stores;                        /* the step stores its sums, and adds nothing */
    const fa_task *next_task;           /* during the last block: probably the next task of this worker */
    const char **pieces;                /* storage of soon */
    fetch_queue soon;
    const fa_flex_programs *programs; /* flex */
    flex_own_views *own_views;        /* flex */
    const fa_flex_sums_at *places;    /* flex: [captures], where gradients of captures are added */
} bwd_task;

static inline char *bwd_query_row(const fa_problem *p, const fa_sequence *s, const fa_view *view, int64_t row,
                                  int64_t head) {
    return (char *)view->data + fa_query_offset(view, s, row, head) * DTYPE_BYTES(p->dtype);
}

static inline char *bwd_key_row(const bwd_task *t, const fa_view *view, int64_t key) {
    return (char *)view->data + fa_key_offset(t->p, view, &t->s, key, t->head_kv) * DTYPE_BYTES(t->p->dtype);
}

/* Bytes of the longest row of a tensor. Rows are prefetched as if all were so long. */
static inline int64_t bwd_longest_row(const fa_problem *p) {
    return (p->d > p->d_v ? p->d : p->d_v) * DTYPE_BYTES(p->dtype);
}

static float *bwd_slab(const bwd_job *job, const fa_sequence *s, int64_t range, int64_t head_kv, int64_t tile) {
    const fa_bwd_layout *l = &job->layout;
    int64_t row = job->p->cu_seqlens_q ? s->q_row : s->b_idx * job->p->len_q;
    int64_t at = fa_bwd_slab_tile(job->p, s->b_idx, row, l->block_q) + tile;
    return job->slabs + ((range * job->p->h_kv + head_kv) * l->slab_tiles + at) * l->tile_floats;
}

/* Whether a row contributes to the gradients. A row that sees no key does not, and its dout may hold any value. */
static bool contributes(const fa_problem *p, const fa_sequence *s, int64_t row, int64_t head, int64_t *first,
                        int64_t *end) {
    fa_visible_keys(p, s, row, first, end);
    return *first < *end && !fa_is_empty_row(p, *fa_row_stat(&p->lse, s, row, head));
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

/* delta of a row that contributes. */
static float bwd_delta_of_row(const fa_problem *p, const fa_sequence *s, int64_t row, int64_t head) {
    float delta =
        dot_rows(bwd_query_row(p, s, &p->dout, row, head), bwd_query_row(p, s, &p->o, row, head), p->d_v, p->dtype);
    if (fa_flex_of(p) && fa_flex_of(p)->dlse.data) delta -= *fa_row_stat(&fa_flex_of(p)->dlse, s, row, head);
    return delta;
}

/* ---- open a tile ---- */

static void bwd_place_lanes(const fa_problem *p, const fa_sequence *s, int64_t head_kv, int block_q, int64_t idx,
                            fa_bwd_tile *tile) {
    tile->valid_lanes = fa_place_lanes(p, s, head_kv, block_q, idx, tile->row, tile->head);
    tile->lanes = (int)round_up(tile->valid_lanes, FA_PATCH_ROWS);
}

/* Sets the keys that the lanes see, and lse and delta of the lanes. Padding lanes see no key and have lse +inf.
 * finds_delta: softmax_d is written and not read. */
static void bwd_measure_lanes(const fa_problem *p, const fa_sequence *s, bool finds_delta, fa_bwd_tile *tile) {
    tile->first_key = tile->common_end = INT64_MAX;
    tile->end_key = tile->common_first = 0;
    tile->is_idle = false;
    for (int lane = 0; lane < tile->lanes; lane++) {
        bool valid = lane < tile->valid_lanes;
        int64_t row = tile->row[lane], head = tile->head[lane], *first = &tile->first[lane], *end = &tile->end[lane];
        tile->slope[lane] = 0.0f;
        tile->diagonal[lane] = 0;
        if (!valid || !contributes(p, s, row, head, first, end)) {
            *first = *end = 0;
            tile->lse[lane] = INFINITY;
            tile->delta[lane] = 0.0f;
            tile->is_idle = true;
            if (valid) tile->common_end = 0;
            if (valid && finds_delta) *fa_row_stat(&p->softmax_d, s, row, head) = 0.0f;
            continue;
        }
        if (finds_delta) *fa_row_stat(&p->softmax_d, s, row, head) = bwd_delta_of_row(p, s, row, head);
        tile->lse[lane] = (float)(*fa_row_stat(&p->lse, s, row, head) * LOG2_E);
        tile->delta[lane] = *fa_row_stat(&p->softmax_d, s, row, head);
        tile->diagonal[lane] = row + s->len_kv - s->len_q;
        if (p->alibi_slopes) tile->slope[lane] = slope_in_log2(p->alibi_slopes[s->b_idx * p->alibi_stride_b + head]);
        if (*first < tile->first_key) tile->first_key = *first;
        if (*end > tile->end_key) tile->end_key = *end;
        if (*first > tile->common_first) tile->common_first = *first;
        if (*end < tile->common_end) tile->common_end = *end;
    }
}

/* Finds the keys [*first, *last) of [begin, end) from the first to the last one that the tile sees. Flex: to the last
 * block that it may see, whatever views are found. */
static bool bwd_find_keys(const bwd_job *job, const fa_sequence *s, const fa_bwd_tile *tile, int64_t begin, int64_t end,
                          int64_t *first, int64_t *last) {
    *first = tile->first_key > begin ? tile->first_key : begin;
    *last = tile->end_key < end ? tile->end_key : end;
    if (*first >= *last || !fa_flex_of(job->p)) return *first < *last;
    const fa_flex_block_map *map = &job->seen.map;
    const uint8_t *kinds = fa_flex_kinds_of(map, s->b_idx, tile->head[0]);
    const int64_t row = fa_flex_mask_row(map, s->b_idx, tile->row[0]);
    return fa_flex_find_keys(map, kinds, row, row + tile->valid_lanes, *first, *last, first, last);
}

static bool bwd_sees(const bwd_job *job, const fa_sequence *s, const fa_bwd_tile *tile, int64_t begin, int64_t end) {
    int64_t first, last;
    return bwd_find_keys(job, s, tile, begin, end, &first, &last);
}

/* ---- dQ of a tile ---- */

/* dQ is a sum over ranges in their order, and each range is a sum over its blocks, whatever the worker. A task of all
 * ranges adds the ranges up here. The first range lies in dq_t, and each later range in dq_range until the range is
 * complete. If tasks share the ranges, each range has a slab, and the slabs are added last. */
static void bwd_add_range(const bwd_task *t, int i) {
    const fa_bwd_layout *l = &t->job->layout;
    float *dq_t = t->dq_t + i * l->tile_floats;
    const float *dq_range = t->tiles[i].dq_t;
    if (l->shares > 1 || t->tiles[i].dq_range < 0 || dq_range == dq_t) return;
    for (int64_t at = 0; at < l->columns * t->tiles[i].lanes; at += LANES)
        vec_store(dq_t + at, vec_add(vec_load(dq_t + at), vec_load(dq_range + at)));
}

/* dK = dV = 0, unless there are sums. */
static void bwd_start_sums(bwd_task *t) {
    const fa_bwd_layout *l = &t->job->layout;
    if (t->has_sums) return;
    memset(t->dk, 0, (size_t)((t->keys_end - t->keys_begin) * l->columns) * sizeof(float));
    memset(t->dv, 0, (size_t)((t->keys_end - t->keys_begin) * l->v_columns) * sizeof(float));
    t->has_sums = true;
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
    if (t->stores) return;
    memset(tile->dq_t, 0, (size_t)(l->columns * tile->lanes) * sizeof(float));
}

static void bwd_prepare_tile(const bwd_task *t, int i) {
    fa_bwd_tile *tile = &t->tiles[i];
    bwd_place_lanes(t->p, &t->s, t->head_kv, t->job->layout.block_q, t->first_tile + i, tile);
    bwd_measure_lanes(t->p, &t->s, t->job->finds_delta, tile);
    if (fa_flex_of(t->p) && !bwd_find_keys(t->job, &t->s, tile, 0, t->s.len_kv, &tile->first_key, &tile->end_key)) {
        tile->first_key = INT64_MAX;
        tile->end_key = 0;
    }
    tile->dq_range = -1;
}

/* Lists the rows of the lanes, with NULL for lanes that see no key. */
static void bwd_list_queries(const bwd_task *t, const fa_view *view, const fa_bwd_tile *tile, const char **rows) {
    const bool is_even = !fa_stacks_heads(t->p); /* rows of one head lie at equal distances */
    const char *first = bwd_query_row(t->p, &t->s, view, tile->row[0], tile->head[0]);
    const int64_t distance = view->stride_row * DTYPE_BYTES(t->p->dtype);
    for (int lane = 0; lane < tile->lanes; lane++) {
        const bool is_empty = tile->first[lane] >= tile->end[lane];
        rows[lane] = is_empty  ? NULL
                     : is_even ? first + lane * distance
                               : bwd_query_row(t->p, &t->s, view, tile->row[lane], tile->head[lane]);
    }
}

static void bwd_open_tile(const bwd_task *t, int i) {
    const fa_bwd_layout *l = &t->job->layout;
    const fa_problem *p = t->p;
    fa_bwd_tile *tile = &t->tiles[i];
    if (!bwd_sees(t->job, &t->s, tile, t->keys_begin, t->keys_end)) return;
    const char *q_rows[FA_MAX_BLOCK_Q_BWD], *dout_rows[FA_MAX_BLOCK_Q_BWD];
    bwd_list_queries(t, &p->q, tile, q_rows);
    bwd_list_queries(t, &p->dout, tile, dout_rows);
    const int64_t at = i * l->tile_floats, v_at = i * l->v_tile_floats;
    pack_lanes(t->q_t + at, tile->lanes, q_rows, tile->lanes, p->d, p->dtype);
    tile->q_finite = pack_pairs(t->q + at, l->columns, q_rows, tile->lanes, p->d, p->dtype);
    pack_lanes(t->dout_t + v_at, tile->lanes, dout_rows, tile->lanes, p->d_v, p->dtype);
    tile->dout_finite = pack_pairs(t->dout + v_at, l->v_columns, dout_rows, tile->lanes, p->d_v, p->dtype);
    const int64_t num_rows = tile->lanes / WORD_ELEMS;
    if (!tile->q_finite) clear_nonfinite(t->q + at, num_rows * l->columns);
    if (!tile->dout_finite) clear_nonfinite(t->dout + v_at, num_rows * l->v_columns);
}

/* ---- pack a block of keys ---- */

/* Lists rows of K, then of V, of the block that starts at key `block`. Keys that no row sees have NULL. */
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
    pack_rows(t->v, l->v_words, v_rows, l->block_kv, p->d_v, p->dtype);
    if (!p->dq.data) return;
    t->k_finite = pack_columns(t->k_t, l->k_t_stride, k_rows, l->block_kv, p->d, p->dtype);
    if (!t->k_finite) clear_nonfinite(t->k_t, l->columns * l->k_t_stride);
}

#endif
