/* Programmable attention between the two products, for one tile on one block of keys. A lane is a query row of one
 * head, and a line is a key. The programs run line by line, over all lanes.
 *
 *   flex_look         the keys that each lane sees, by the block mask and the mask_mod (flex_seen.h)
 *   flex_hide         bytes [key][lanes]: 0 where the lane sees the key, 1 where the pair is masked
 *   flex_scores       scale -> score_mod -> mask; the scores become scores in units of log2
 *
 * A mask without gaps needs no bytes. It is a range of keys for each lane, as causal masks and windows are, and the
 * products skip what no lane sees. flex_step_bwd.h has the stage of the backward. */
#ifndef FA_CPU_FLEX_STEP_H
#define FA_CPU_FLEX_STEP_H

#include "elementwise.h"
#include "flex/evaluate.h"
#include "flex_programs.h"
#include "flex_seen.h"
#include "lanes.h"

/* The lanes of a tile: valid_lanes rows of a head from `row` on. The mods call the first one `query`. Keys count from
 * the start of the block, which begins at key `block` and has num_keys keys of the sequence. */
typedef struct {
    const fa_flex_programs *programs;
    int64_t b_idx, head, row, query, block;
    int lanes, valid_lanes, num_keys;
} flex_tile;

static inline flex_tile flex_tile_of(const fa_flex_programs *programs, const fa_sequence *s, int64_t head, int64_t row,
                                     int lanes, int valid_lanes, int64_t block, int64_t block_kv) {
    const int64_t rest = s->len_kv - block;
    return (flex_tile){.programs = programs,
                       .b_idx = s->b_idx,
                       .head = head,
                       .row = row,
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

/* ---- what the lanes see ---- */

/* A view that a step has found for itself. Two of them, because a step finds its view while another one runs. */
typedef struct {
    fa_flex_view view[2];
    uint64_t bits[2][FA_FLEX_TILE * FA_FLEX_VIEW_WORDS];
    int next;
} flex_own_views;

/* What a tile sees of a block: some of the keys [begin, end) of the block. */
typedef struct {
    int64_t begin, end;
    int64_t common_first, common_end; /* every valid lane sees these keys, but for gaps */
    bool masked;                      /* some lane does not see all of the keys */
    bool has_gaps;                    /* some lane does not see all keys between its first and its last */
    const uint64_t *bits;
    int row; /* of the view: lane 0 */
} flex_sight;

/* Sets the bounds of all lanes to those of a block seen whole. */
static inline void flex_bound_whole(fa_lane_bounds *b, int lanes, int num_keys) {
    for (int lane = 0; lane < lanes; lane += LANES) {
        vec_store(b->first + lane, vec_set(0.0f));
        vec_store(b->end + lane, vec_set((float)num_keys));
        b->vec_first[lane / LANES] = b->common_first[lane / LANES] = 0;
        b->vec_end[lane / LANES] = b->common_end[lane / LANES] = num_keys;
    }
}

/* Finds what the tile sees. Returns false if no lane sees a key. Lanes behind valid_lanes see all keys or none. */
OUTLINE bool flex_look(const fa_flex_seen *seen, const flex_tile *t, flex_own_views *own, fa_lane_bounds *b,
                       flex_sight *sight) {
    const fa_flex_view *view = &own->view[own->next];
    int32_t kind = FA_FLEX_NOT_FOUND;
    *sight = (flex_sight){.bits = own->bits[own->next]};
    if (seen->kinds)
        kind = atomic_load_explicit(fa_flex_kind_seen(seen, t->b_idx, t->head, t->row, t->block), memory_order_acquire);
    const bool is_own = kind <= FA_FLEX_NOT_FOUND;
    if (is_own) {
        kind = fa_flex_see(seen, t->programs, t->b_idx, t->head, t->row, t->valid_lanes, t->block,
                           &own->view[own->next], own->bits[own->next]);
    } else if (kind >= 0) {
        view = &seen->views[kind];
        sight->bits = seen->bits + (int64_t)kind * seen->block_kv * FA_FLEX_VIEW_WORDS;
        sight->row = (int)(t->row % seen->band_rows);
    }
    if (kind == FA_FLEX_SEES_NOTHING) return false;
    int low = 0, high = t->num_keys, most = 0, least = t->num_keys;
    if (kind == FA_FLEX_SEES_ALL) {
        flex_bound_whole(b, t->lanes, t->num_keys);
    } else {
        low = 255, high = 0, most = 0, least = 255;
        for (int lane = 0; lane < t->lanes; lane += LANES) {
            const fa_flex_row_bounds x = view->vectors[(sight->row + lane) / LANES];
            low = x.low < low ? x.low : low, high = x.high > high ? x.high : high;
            most = x.most > most ? x.most : most, least = x.least < least ? x.least : least;
            b->vec_first[lane / LANES] = x.low;
            b->vec_end[lane / LANES] = x.high;
            b->common_first[lane / LANES] = x.most;
            b->common_end[lane / LANES] = x.least;
            vec_store(b->first + lane, vec_load_bytes(view->first + sight->row + lane));
            vec_store(b->end + lane, vec_load_bytes(view->end + sight->row + lane));
        }
        sight->has_gaps = view->has_gaps;
    }
    sight->begin = low / WORD_ELEMS * WORD_ELEMS, sight->end = high;
    sight->common_first = most, sight->common_end = least;
    sight->masked = most > sight->begin || least < high || sight->has_gaps;
    if (low < high && is_own) own->next ^= 1;
    return low < high;
}

/* Fills eight bytes, from the lowest bits of eight bytes that say which lanes see a key. */
static inline void flex_hide_eight(uint8_t *line, uint64_t sees) {
    UNROLL for (int i = 0; i < 8; i++) line[i] = (uint8_t)((~sees >> 8 * i) & 1); /* one store */
}

/* Fills a line for key `key`, of lanes that see all keys between their bounds. */
INLINE void flex_hide_line(int lanes, uint8_t *line, int64_t key, const fa_lane_bounds *b) {
    const vec seen = vec_set_bits(0), masked = vec_set_bits(1), j = vec_set((float)key);
    for (int lane = 0; lane < lanes; lane += LANES) {
        const vec_mask visible = keys_visible(vec_load(b->first + lane), vec_load(b->end + lane), j);
        vec_store_bytes(line + lane, vec_select(visible, seen, masked), 0);
    }
}

/* Fills `hidden` for keys [begin, end) of the block. */
OUTLINE void flex_hide(const flex_tile *t, const flex_sight *sight, const fa_lane_bounds *b, int64_t begin, int64_t end,
                       uint8_t *hidden) {
    uint64_t sees[FA_FLEX_TILE / 64] = {0};
    bool is_seen_whole = !sight->masked && end <= t->num_keys && begin >= sight->begin && end <= sight->end;
    for (int lane = 0; lane < t->lanes; lane += LANES)
        is_seen_whole = is_seen_whole && !mask_any(vec_le(vec_load(b->end + lane), vec_load(b->first + lane)));
    if (is_seen_whole) {
        memset(hidden + begin * t->lanes, 0, (size_t)((end - begin) * t->lanes));
        return;
    }
    for (int lane = 0; lane < t->lanes && sight->has_gaps; lane++)
        sees[lane / 64] |= (uint64_t)(b->first[lane] < b->end[lane]) << (lane % 8 * 8 + lane % 64 / 8);
    for (int64_t key = begin; key < end; key++) {
        uint8_t *line = hidden + key * t->lanes;
        if (key >= t->num_keys) {
            memset(line, 1, (size_t)t->lanes);
        } else if (sight->has_gaps) {
            for (int lane = 0; lane < t->lanes; lane += 8) {
                const int row = sight->row + lane;
                const uint64_t bits = sight->bits[key * FA_FLEX_VIEW_WORDS + row / 64] >> row % 64 / 8;
                flex_hide_eight(line + lane, bits & sees[lane / 64] >> lane % 64 / 8);
            }
        } else {
            flex_hide_line(t->lanes, line, key, b);
        }
    }
}

/* ---- scores ---- */

INLINE void flex_scale(float *line, int64_t lanes, float scale) {
    for (int64_t lane = 0; lane < lanes; lane += LANES)
        vec_store(line + lane, vec_mul(vec_load(line + lane), vec_set(scale)));
}

/* What a score_mod adds to the scores of the lines from `begin` on. */
typedef struct {
    fa_flex_bias_rows rows;
    int begin;
} flex_bias;

/* Scales the scores of a line, and returns what the score_mod makes of them. The next line comes next, or a later one.
 * `sums` has room for a line. Without a score_mod the scaled scores are returned. */
INLINE const float *flex_modify(fa_flex_evaluator *score, flex_bias *bias, int key, float *line, int lanes, float scale,
                                float *sums) {
    if (score && key >= bias->begin + bias->rows.num_lines)
        bias->rows = fa_flex_bias_lines(score, key), bias->begin = key;
    if (!bias->rows.values) {
        flex_scale(line, lanes, scale);
        return score ? fa_flex_line(score, key, line, NULL) : line;
    }
    const float *added = bias->rows.values + (key - bias->begin) * bias->rows.stride;
    for (int lane = 0; lane < lanes; lane += LANES) {
        const vec x = vec_mul(vec_load(line + lane), vec_set(scale));
        vec_store(line + lane, x);
        vec_store(sums + lane, vec_add(x, vec_load(added + lane)));
    }
    return sums;
}

/* Scores of keys [begin, end) become scores in units of log2, with -inf where they are hidden. lane_max receives the
 * maxima in units of log2, and max_scores, unless it is NULL, the maxima before. Without a score_mod and without
 * max_scores `scale` contains log2(e). With gaps some keys may be hidden from all lanes. */
OUTLINE void flex_scores(const flex_tile *t, float *scores, int64_t begin, int64_t end, float scale, bool has_gaps,
                         const uint8_t *hidden, float *lane_max, float *max_scores) {
    const vec lowest = vec_set(-INFINITY);
    fa_flex_evaluator *score = t->programs->score;
    const vec to_log2 = vec_set(score || max_scores ? (float)LOG2_E : 1.0f);
    flex_bias bias = {{NULL, 0, 0}, 0};
    float sums[FA_FLEX_TILE];
    if (score) flex_start(score, t);
    for (int64_t key = begin; key < end; key++) {
        float *line = scores + key * t->lanes;
        const uint8_t *hides = hidden + key * t->lanes;
        if (has_gaps && !memchr(hides, 0, (size_t)t->lanes)) {
            for (int lane = 0; lane < t->lanes; lane += LANES) vec_store(line + lane, lowest);
            continue;
        }
        const float *s = flex_modify(score, &bias, (int)key, line, t->lanes, scale, sums);
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
