/* Programmable attention between the two products, for one tile on one block of keys. A lane is a query row of one
 * head, and a line is a key. The programs run line by line, over all lanes.
 *
 *   flex_hide         bytes [key][lanes]: 0 where the lane sees the key, 1 where the pair is masked
 *   flex_scores       scale -> score_mod -> mask; the scores become scores in units of log2
 *
 * flex_step_bwd.h has the stage of the backward. */
#ifndef FA_CPU_FLEX_STEP_H
#define FA_CPU_FLEX_STEP_H

#include "elementwise.h"
#include "flex/block_map.h"
#include "flex/evaluate.h"
#include "flex_programs.h"

/* The lanes of a tile: valid_lanes rows of a head. The block mask has them from mask_row on, and the mods
 * call the first one `query`. `kinds` belongs to the head. Keys count from the start of the block, which begins at key
 * `block` and has num_keys keys of the sequence. */
typedef struct {
    const fa_flex_programs *programs;
    const fa_flex_block_map *map;
    const uint8_t *kinds;
    int64_t b_idx, head, mask_row, query, block;
    int lanes, valid_lanes, num_keys;
} flex_tile;

static inline flex_tile flex_tile_of(const fa_flex_programs *programs, const fa_flex_block_map *map,
                                     const fa_sequence *s, int64_t head, int64_t row, int lanes, int valid_lanes,
                                     int64_t block, int64_t block_kv) {
    const int64_t rest = s->len_kv - block;
    return (flex_tile){.programs = programs,
                       .map = map,
                       .kinds = fa_flex_kinds_of(map, s->b_idx, head),
                       .b_idx = s->b_idx,
                       .head = head,
                       .mask_row = fa_flex_mask_row(map, s->b_idx, row),
                       .query = row + fa_flex_first_query(programs->flex, s->b_idx),
                       .block = block,
                       .lanes = lanes,
                       .valid_lanes = valid_lanes,
                       .num_keys = (int)(rest < block_kv ? rest : block_kv)};
}

static inline void flex_start(fa_flex_evaluator *e, const flex_tile *t) {
    fa_flex_start_head(e, t->b_idx, t->head);
    fa_flex_start_lines(e, t->block, t->num_keys);
    fa_flex_start_lanes(e, t->query, t->valid_lanes);
}

/* The kinds of the lanes in one column of blocks, as bytes of 0 and 1. */
typedef struct {
    uint8_t hidden[FA_FLEX_TILE], full[FA_FLEX_TILE];
    bool any_partial;
} flex_column;

/* `never` marks lanes that see nothing; NULL: no lane is so. */
static inline void flex_read_column(const flex_tile *t, int64_t column, const uint8_t *never, flex_column *c) {
    const fa_flex_block_map *m = t->map;
    c->any_partial = false;
    for (int lane = 0; lane < t->lanes; lane++) {
        const int last = lane < t->valid_lanes ? lane : t->valid_lanes - 1;
        const uint8_t kind = t->kinds[(t->mask_row + last) / m->block_q * m->columns + column];
        const bool hidden = kind == FA_FLEX_EMPTY || (never && never[lane]);
        c->hidden[lane] = hidden;
        c->full[lane] = kind == FA_FLEX_FULL || !m->has_mask_mod;
        c->any_partial |= !hidden && !c->full[lane];
    }
}

/* hidden = the column's hidden lanes, and those of partial blocks that are not allowed. */
static inline void flex_hide_line(int lanes, uint8_t *restrict line, const uint8_t *restrict hidden,
                                  const uint8_t *restrict full, const uint8_t *restrict allowed) {
    for (int group = 0; group < lanes; group += 16)
        for (int i = group; i < group + 16; i++) line[i] = hidden[i] | (uint8_t)((full[i] | allowed[i]) ^ 1);
}

/* Fills `hidden` for keys [begin, end) of the block. */
OUTLINE void flex_hide(const flex_tile *t, int64_t begin, int64_t end, const uint8_t *never, uint8_t *hidden) {
    flex_column c = {.any_partial = false};
    int64_t column_end = begin;
    fa_flex_evaluator *mask = NULL;
    for (int64_t key = begin; key < end; key++) {
        uint8_t *line = hidden + key * t->lanes;
        if (key >= t->num_keys) {
            memset(line, 1, (size_t)t->lanes);
            continue;
        }
        if (key >= column_end) {
            const int64_t column = (t->block + key) / t->map->block_kv;
            flex_read_column(t, column, never, &c);
            column_end = (column + 1) * t->map->block_kv - t->block;
            if (c.any_partial && !mask) flex_start(mask = t->programs->mask, t);
        }
        if (c.any_partial)
            flex_hide_line(t->lanes, line, c.hidden, c.full, fa_flex_line(mask, (int)key, NULL, NULL));
        else
            memcpy(line, c.hidden, (size_t)t->lanes);
    }
}

/* Whether every lane sees every key of [begin, end), because all blocks are full. */
static inline bool flex_sees_all(const flex_tile *t, int64_t begin, int64_t end) {
    const fa_flex_block_map *m = t->map;
    const uint8_t least = m->has_mask_mod ? FA_FLEX_FULL : FA_FLEX_PARTIAL;
    for (int64_t r = t->mask_row / m->block_q; r <= (t->mask_row + t->valid_lanes - 1) / m->block_q; r++)
        for (int64_t c = (t->block + begin) / m->block_kv; c <= (t->block + end - 1) / m->block_kv; c++)
            if (t->kinds[r * m->columns + c] < least) return false;
    return true;
}

INLINE void flex_scale(float *line, int64_t lanes, float scale) {
    for (int64_t lane = 0; lane < lanes; lane += LANES)
        vec_store(line + lane, vec_mul(vec_load(line + lane), vec_set(scale)));
}

/* Scores of keys [begin, end) become scores in units of log2, with -inf where they are hidden. lane_max receives the
 * maxima in units of log2, and max_scores, unless it is NULL, the maxima before. Without a score_mod and without
 * max_scores `scale` contains log2(e). */
OUTLINE void flex_scores(const flex_tile *t, float *scores, int64_t begin, int64_t end, float scale,
                         const uint8_t *hidden, float *lane_max, float *max_scores) {
    const vec lowest = vec_set(-INFINITY);
    fa_flex_evaluator *score = t->programs->score;
    const vec to_log2 = vec_set(score || max_scores ? (float)LOG2_E : 1.0f);
    if (score) flex_start(score, t);
    for (int64_t key = begin; key < end; key++) {
        float *line = scores + key * t->lanes;
        const uint8_t *hides = hidden + key * t->lanes;
        flex_scale(line, t->lanes, scale);
        const float *s = score ? fa_flex_line(score, (int)key, line, NULL) : line;
        for (int lane = 0; lane < t->lanes; lane += LANES) {
            vec x = vec_select(mask_bytes_le(hides + lane, 0), vec_load(s + lane), lowest);
            if (max_scores) vec_store(max_scores + lane, vec_max(x, vec_load(max_scores + lane)));
            x = vec_mul(x, to_log2);
            vec_store(lane_max + lane, vec_max(x, vec_load(lane_max + lane)));
            vec_store(line + lane, x);
        }
    }
}

/* Marks pairs of keys [begin, end) with a score of -inf. */
OUTLINE void flex_hide_infinite(const float *scores, int64_t lanes, int64_t begin, int64_t end, uint8_t *hidden) {
    for (int64_t i = begin * lanes; i < end * lanes; i++)
        if (scores[i] == -INFINITY) hidden[i] = 1;
}

#endif
