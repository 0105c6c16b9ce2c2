/* The lanes of a tile. Functions here assign a row and a head to each lane, find the lanes that see a key, and restrict
 * products to these lanes. On the diagonal half of the pairs are masked. Skipping them saves 3% of a causal forward
 * over 2048 keys and 12% over 512 keys. */
#ifndef FA_CPU_LANES_H
#define FA_CPU_LANES_H

#include "bwd_layout.h"
#include "dropout.h"
#include "partition.h"
#include "product.h"

/* Assigns a (row, head of the group) pair to each lane of tile idx, in the order that partition.h describes. Returns
 * the number of valid lanes. Padding lanes up to a multiple of FA_PATCH_ROWS repeat the last valid lane. */
static inline int fa_place_lanes(const fa_problem *p, const fa_sequence *s, int64_t head_kv, int64_t block_q,
                                 int64_t idx, int64_t *row, int64_t *head) {
    const int64_t g = p->h / p->h_kv;
    const bool stacks = fa_stacks_heads(p);
    const int64_t remaining = stacks ? g * s->len_q - idx * block_q : s->len_q - idx / g * block_q;
    const int valid = (int)(remaining < block_q ? remaining : block_q);
    int64_t i = stacks ? idx * block_q / g : idx / g * block_q, k = stacks ? idx * block_q % g : idx % g;
    for (int lane = 0; lane < (valid + FA_PATCH_ROWS - 1) / FA_PATCH_ROWS * FA_PATCH_ROWS; lane++) {
        row[lane] = i;
        head[lane] = head_kv * g + k;
        if (lane + 1 >= valid) continue;
        if (!stacks) {
            i++;
        } else if (++k == g) {
            k = 0;
            i++;
        }
    }
    return valid;
}

/* What the lanes of a tile see of a block. Keys count from the start of the block. A lane sees keys [first, end), whole
 * numbers stored as floats, and no key if first >= end. A vector sees keys from the first to the last one that some of
 * its lanes see; vec_end is 0 if they see none. All of its lanes see the common keys. */
typedef struct {
    float first[FA_MAX_BLOCK_Q_BWD], end[FA_MAX_BLOCK_Q_BWD];
    int vec_first[FA_MAX_BLOCK_Q_BWD / LANES], vec_end[FA_MAX_BLOCK_Q_BWD / LANES];
    int common_first[FA_MAX_BLOCK_Q_BWD / LANES], common_end[FA_MAX_BLOCK_Q_BWD / LANES];
} fa_lane_bounds;

/* Sets the bounds of lanes that see keys [first, end) of the sequence. The block has num_keys keys. */
static inline void fa_bound_lanes(fa_lane_bounds *b, const int64_t *first, const int64_t *end, int64_t lanes,
                                  int64_t block, int64_t num_keys) {
    for (int64_t group = 0; group < lanes; group += LANES) {
        int64_t low = num_keys, high = 0, most = 0, least = num_keys;
        for (int64_t lane = group; lane < group + LANES; lane++) {
            int64_t from = first[lane] - block, to = end[lane] - block;
            from = from < 0 ? 0 : from < num_keys ? from : num_keys;
            to = to < 0 ? 0 : to < num_keys ? to : num_keys;
            b->first[lane] = (float)from;
            b->end[lane] = (float)to;
            low = from < to && from < low ? from : low;
            high = from < to && to > high ? to : high;
            most = from > most ? from : most;
            least = to < least ? to : least;
        }
        b->vec_first[group / LANES] = (int)low;
        b->vec_end[group / LANES] = (int)high;
        b->common_first[group / LANES] = (int)most;
        b->common_end[group / LANES] = (int)least;
    }
}

/* Finds vectors [*vec, *vec_end) of lanes. Vectors outside see no key of [key, stop). */
static inline void fa_vectors_that_see(const fa_lane_bounds *b, int64_t lanes, int64_t key, int64_t stop, int *vec,
                                       int *vec_end) {
    int low = 0, high = (int)(lanes / LANES);
    while (low < high && (b->vec_first[low] >= stop || b->vec_end[low] <= key)) low++;
    while (low < high && (b->vec_first[high - 1] >= stop || b->vec_end[high - 1] <= key)) high--;
    *vec = low;
    *vec_end = high;
}

/* Finds lanes [*lane, *lane_end) in whole words of WORD_ELEMS lanes. Lanes outside see no key of [key, stop). */
static inline void fa_lanes_that_see(const fa_lane_bounds *b, int64_t lanes, int64_t key, int64_t stop, int64_t *lane,
                                     int64_t *lane_end) {
    const float from = (float)key, to = (float)stop;
    int vec, vec_end;
    fa_vectors_that_see(b, lanes, key, stop, &vec, &vec_end);
    int64_t low = vec * LANES, high = vec_end * LANES;
    while (low < high && (b->first[low] >= to || b->end[low] <= from)) low++;
    while (low < high && (b->first[high - 1] >= to || b->end[high - 1] <= from)) high--;
    *lane = low / WORD_ELEMS * WORD_ELEMS;
    *lane_end = low < high ? (high + WORD_ELEMS - 1) / WORD_ELEMS * WORD_ELEMS : *lane;
}

/* The vectors [vec, vec_end) that see some key of a strip of PRODUCT_STRIP_A keys. is_full: all of their lanes see all
 * of its keys. */
typedef struct {
    int vec, vec_end;
    bool is_full;
} fa_strip;

static inline fa_strip fa_strip_at(const fa_lane_bounds *b, int64_t lanes, int64_t key, int64_t stop) {
    fa_strip x = {.is_full = true};
    fa_vectors_that_see(b, lanes, key, stop, &x.vec, &x.vec_end);
    for (int v = x.vec; v < x.vec_end; v++) x.is_full &= b->common_first[v] <= key && stop <= b->common_end[v];
    return x;
}

/* Computes scores of keys [key_0, key_0 + rows) in strips, for the vectors that see some key of the strip. Other scores
 * are not written, because the mask replaces them. strips: NULL, or receives the strips, and lane_max the maxima of
 * those that are full. */
static inline void product_scores_seen(const product_args *p, const fa_lane_bounds *b, int64_t key_0,
                                       fa_strip *strips) {
    const int64_t lanes = p->num_vecs * LANES, rows = p->rows;
    fa_strip next = {0};
    for (int64_t row = 0, stop = 0; row < rows; row = stop) {
        if (row == 0) next = fa_strip_at(b, lanes, key_0, key_0 + (PRODUCT_STRIP_A < rows ? PRODUCT_STRIP_A : rows));
        const fa_strip x = next;
        while (stop < rows && next.vec == x.vec && next.vec_end == x.vec_end && next.is_full == x.is_full) {
            if (strips) strips[stop / PRODUCT_STRIP_A] = x;
            stop += PRODUCT_STRIP_A;
            const int64_t next_stop = stop + PRODUCT_STRIP_A;
            if (stop < rows) next = fa_strip_at(b, lanes, key_0 + stop, key_0 + (next_stop < rows ? next_stop : rows));
        }
        if (stop > rows) stop = rows;
        if (x.vec == x.vec_end) continue;
        product_args part = *p;
        part.a += row * p->a_stride;
        part.b += x.vec * LANES;
        part.c += row * p->c_stride + x.vec * LANES;
        part.rows = stop - row;
        part.num_vecs = x.vec_end - x.vec;
        if (strips && x.is_full) {
            part.lane_max += x.vec * LANES;
            product_scores_max(&part);
        } else {
            product_scores(&part);
        }
    }
}

/* Where a product over keys takes only keys that its lanes see, it takes at most so many lanes together. */
#define SEEN_LANES ((UNROLL_VECS > 3 ? 2 : UNROLL_VECS) * LANES)

/* Lanes up to lane_end, and the keys [key, stop) from the first to the last one that they see. The keys count from
 * key_0, and the first one is a multiple of WORD_ELEMS. */
typedef struct {
    int64_t lane_end, key, stop;
} fa_lanes_seen;

/* The lanes of one vector, and those of [0, most) keys that they see. */
static inline fa_lanes_seen fa_vector_seen(const fa_lane_bounds *b, int64_t lane, int64_t key_0, int64_t most) {
    const int64_t low = b->vec_first[lane / LANES], high = b->vec_end[lane / LANES];
    fa_lanes_seen x = {lane + LANES, low > key_0 ? low - key_0 : 0, high - key_0 < most ? high - key_0 : most};
    if (x.key >= x.stop) x.key = x.stop = 0;
    x.key = x.key / WORD_ELEMS * WORD_ELEMS;
    return x;
}

/* The time of a product with so many lanes, for each key. A single vector uses each broadcast word only once. */
static inline int64_t fa_lanes_cost(int64_t lanes) { return lanes == LANES ? 9 : 8 * lanes / LANES; }

/* Finds the lanes that the product takes together, from `lane` on: another vector joins if the keys that only some of
 * the lanes see cost less than a product of its own. */
static inline fa_lanes_seen fa_next_lanes(const fa_lane_bounds *b, int64_t lane, int64_t lanes, int64_t key_0,
                                          int64_t most) {
    fa_lanes_seen x = fa_vector_seen(b, lane, key_0, most);
    while (x.lane_end < lanes && x.lane_end < lane + SEEN_LANES && x.key < x.stop) {
        const fa_lanes_seen y = fa_vector_seen(b, x.lane_end, key_0, most);
        const int64_t key = x.key < y.key ? x.key : y.key, stop = x.stop > y.stop ? x.stop : y.stop;
        const int64_t apart =
            (x.stop - x.key) * fa_lanes_cost(x.lane_end - lane) + (y.stop - y.key) * fa_lanes_cost(LANES);
        if (y.key == y.stop || (stop - key) * fa_lanes_cost(y.lane_end - lane) > apart) break;
        x = (fa_lanes_seen){y.lane_end, key, stop};
    }
    return x;
}

/* A product that sums over keys from key_0 on. Some vectors of lanes at a time sum over the keys that they see. */
static inline void product_keys_seen(void (*product_fn)(const product_args *), const product_args *p,
                                     const fa_lane_bounds *b, int64_t key_0) {
    fa_lanes_seen x;
    for (int64_t lane = 0; lane < p->num_vecs * LANES; lane = x.lane_end) {
        x = fa_next_lanes(b, lane, p->num_vecs * LANES, key_0, p->num_words * WORD_ELEMS);
        if (x.key == x.stop) continue;
        product_args part = *p;
        part.a += x.key / WORD_ELEMS;
        part.b += x.key / WORD_ELEMS * p->b_stride + lane;
        part.c += lane;
        if (p->alpha) part.alpha += lane;
        part.num_words = (x.stop + WORD_ELEMS - 1) / WORD_ELEMS - x.key / WORD_ELEMS;
        part.num_vecs = (int)((x.lane_end - lane) / LANES);
        product_fn(&part);
    }
}

#endif
