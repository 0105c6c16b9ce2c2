/* The memory layout of the backward. plan/cpu_bwd.c counts the bytes, and attn_bwd.h fills them. Every array is aligned
 * to 64 bytes.
 *
 *   workspace   tasks | one scratch for each worker | slabs of dQ | flex: sums of the gradients of captures, kinds of
 *               the blocks
 *   scratch     Q^T, dO^T, Q, dO, dQ^T (and dQ^T of one range) of all tiles of a pass |
 *               K, V rows, K^T, S^T, dP^T, dS of one block of keys | dK, dV of the task's keys |
 *               addresses of the rows of K and V of two blocks, and of the rows to prefetch | tiles
 *   slab        dQ^T of every tile, for one range of keys; only if several tasks share the ranges
 *
 * The number of ranges follows from the shapes, because dQ is a sum over ranges. A task computes one range, or all
 * ranges if there are enough tasks. In a task of all ranges the packed tiles of a pass serve all keys. Such a task
 * needs no slabs, because its dQ is complete. */
#ifndef FA_CPU_BWD_LAYOUT_H
#define FA_CPU_BWD_LAYOUT_H

#include "flex_gradients.h"
#include "fwd_layout.h"

#define FA_MAX_BLOCK_Q_BWD 128
#define FA_MAX_RANGES      8

/* One tile: the row and head of each lane, and its statistics. Keys count from key 0 of the sequence. A lane that
 * contributes nothing sees no key. */
typedef struct {
    float lse[FA_MAX_BLOCK_Q_BWD]; /* lse times log2(e); with +inf every P of the lane is 0 */
    float delta[FA_MAX_BLOCK_Q_BWD], slope[FA_MAX_BLOCK_Q_BWD];
    int64_t first[FA_MAX_BLOCK_Q_BWD], end[FA_MAX_BLOCK_Q_BWD], diagonal[FA_MAX_BLOCK_Q_BWD];
    int64_t row[FA_MAX_BLOCK_Q_BWD], head[FA_MAX_BLOCK_Q_BWD];
    int64_t first_key, end_key;       /* some lane sees these keys */
    int64_t common_first, common_end; /* every valid lane sees these keys */
    int lanes, valid_lanes;           /* lanes is a multiple of the vector and of a dropout patch */
    bool is_idle;                     /* some lane contributes nothing */
    int64_t dq_range;                 /* the range that dq_t belongs to; -1: no range yet */
    float *dq_t;                      /* dQ^T of dq_range */
    bool q_finite, dout_finite;       /* all packed elements of Q, of dO are finite; known once the tile is open */
} fa_bwd_tile;

typedef struct {
    int64_t words, v_words;             /* words of a packed row of Q or K, and of V or dO, padded with zeros */
    int64_t columns, v_columns;         /* d and d_v padded to whole transposes */
    int64_t k_t_stride;                 /* words of a row of K^T */
    int64_t task_keys;                  /* the largest number of keys of a task */
    int64_t tile_floats, v_tile_floats; /* floats from one tile to the next, in Q^T, Q, dQ^T, and in dO^T, dO */
    int block_q, block_kv, tiles;
    int ranges, shares; /* ranges of a sequence's keys; the ranges of a share form one task */
    size_t q_t, dout_t, q, dout, dq_t, dq_range, k, v, k_t, scores, dprob, ds_words, bytes, hidden, bias, dk, dv,
        key_rows, pieces, tile;
    size_t scratch_bytes;
    int64_t slab_tiles; /* tiles of one (range, key/value head) in a slab */
    size_t slabs_bytes;
} fa_bwd_layout;

/* The keys [begin, end) of ranges [first, last) of a sequence. Ranges are whole blocks in equal shares. */
static inline void fa_bwd_ranges(const fa_sequence *s, int block_kv, int ranges, int64_t first, int64_t last,
                                 int64_t *begin, int64_t *end) {
    int64_t blocks = (s->len_kv + block_kv - 1) / block_kv;
    *begin = blocks * first / ranges * block_kv;
    *end = blocks * last / ranges * block_kv;
    if (*end > s->len_kv) *end = s->len_kv;
}

/* The range that contains a key. */
static inline int64_t fa_bwd_range_of(const fa_sequence *s, int block_kv, int ranges, int64_t key) {
    int64_t begin, end, r = -1;
    do {
        r++;
        fa_bwd_ranges(s, block_kv, ranges, r, r + 1, &begin, &end);
    } while (end <= key);
    return r;
}

/* The first tile of a sequence in a slab. Sequences never overlap, because a + b rows need at most one tile more than a
 * rows and b rows together. */
static inline int64_t fa_bwd_slab_tile(const fa_problem *p, int64_t b_idx, int64_t row, int block_q) {
    int64_t g = p->h / p->h_kv;
    return fa_stacks_heads(p) ? g * row / block_q + b_idx : g * (row / block_q + b_idx);
}

static inline int64_t fa_bwd_words(int64_t elems, int word_elems) {
    return ((elems + word_elems - 1) / word_elems + 15) / 16 * 16;
}

static inline fa_bwd_layout fa_bwd_layout_of(const fa_problem *p, int word_elems, int block_q, int block_kv, int tiles,
                                             int ranges, int shares) {
    const int64_t words = fa_bwd_words(p->d, word_elems), columns = (p->d + 15) / 16 * 16;
    const int64_t v_words = fa_bwd_words(p->d_v, word_elems), v_columns = (p->d_v + 15) / 16 * 16;
    const int64_t widest = p->d > p->d_v ? p->d : p->d_v;
    const int64_t blocks = (p->len_kv + block_kv - 1) / block_kv, most_ranges = (ranges + shares - 1) / shares;
    fa_bwd_layout l = {.words = words,
                       .v_words = v_words,
                       .columns = columns,
                       .v_columns = v_columns,
                       .k_t_stride = block_kv / word_elems,
                       .task_keys = (blocks * most_ranges + ranges - 1) / ranges * block_kv,
                       .tile_floats = (words > columns ? words : columns) * block_q,
                       .v_tile_floats = (v_words > v_columns ? v_words : v_columns) * block_q,
                       .block_q = block_q,
                       .block_kv = block_kv,
                       .tiles = tiles,
                       .ranges = ranges,
                       .shares = shares};
    const int64_t tile_bytes = tiles * l.tile_floats * 4, v_tile_bytes = tiles * l.v_tile_floats * 4;
    const int64_t pairs = (int64_t)block_kv * block_q;
    size_t at = 0;
    l.q_t = fa_take(&at, tile_bytes);
    l.dout_t = fa_take(&at, v_tile_bytes);
    l.q = fa_take(&at, tile_bytes);
    l.dout = fa_take(&at, v_tile_bytes);
    l.dq_t = fa_take(&at, shares == 1 ? tile_bytes : 0);
    l.dq_range = fa_take(&at, shares == 1 && ranges > 1 ? tile_bytes : 0);
    l.k = fa_take(&at, block_kv * words * 4);
    l.v = fa_take(&at, block_kv * v_words * 4);
    l.k_t = fa_take(&at, columns * l.k_t_stride * 4);
    l.scores = fa_take(&at, pairs * 4);
    l.dprob = fa_take(&at, pairs * 4);
    l.ds_words = fa_take(&at, word_elems == 2 ? pairs * 2 : 0);
    l.bytes = fa_take(&at, p->dropout_p > 0 ? pairs : 0);
    l.hidden = fa_take(&at, fa_flex_of(p) ? pairs : 0);
    l.bias = fa_take(&at, p->bias.data || fa_flex_of(p) ? pairs * 4 : 0);
    l.dk = fa_take(&at, l.task_keys * columns * 4);
    l.dv = fa_take(&at, l.task_keys * v_columns * 4);
    l.key_rows = fa_take(&at, 4 * block_kv * (int64_t)sizeof(void *));
    l.pieces = fa_take(&at, (4 * block_kv + 4 * block_q) * fetch_pieces(widest * 4) * (int64_t)sizeof(void *));
    l.tile = fa_take(&at, tiles * (int64_t)sizeof(fa_bwd_tile));
    l.scratch_bytes = at;
    if (shares > 1) {
        l.slab_tiles = fa_bwd_slab_tile(p, p->b, p->total_q, block_q);
        l.slabs_bytes = (size_t)(ranges * p->h_kv * l.slab_tiles * l.tile_floats * 4);
    }
    return l;
}

/* The number of tasks that share the ranges of a sequence. One task takes all ranges if every thread still has enough
 * tasks. dK and dV of more keys leave the second-level cache for the third-level cache. With narrow rows this costs as
 * much as one task saves. If gradients of captures are sums over tasks, the tasks do not depend on the threads. */
static inline int fa_bwd_shares(const fa_problem *p, int ranges, int threads) {
    if (fa_flex_of(p) && fa_flex_sums_of(p, true).num > 0) return ranges;
    const int64_t tasks_of_thread = 8, most_narrow_keys = 4096;
    const bool enough = threads == 1 || p->b * p->h_kv >= tasks_of_thread * threads;
    return enough && (p->d > 64 || p->len_kv <= most_narrow_keys) ? 1 : ranges;
}

/* Whether tasks find delta of their rows. Then each row belongs to one task, and the task before prefetches the rows of
 * O. */
static inline bool fa_bwd_finds_delta(const fa_problem *p, int block_q, int shares) {
    const fa_sequence longest = {.len_q = p->len_q};
    return shares == 1 && fa_num_tiles(p, &longest, block_q) <= 1;
}

/* The bytes of all copies of the sums of gradients of captures. */
static inline size_t fa_flex_copies_bytes(const fa_problem *p, int64_t num_tasks) {
    if (!fa_flex_of(p)) return 0;
    const fa_flex_sums sums = fa_flex_sums_of(p, true);
    const int64_t heads = p->b * p->h_kv, chains = fa_flex_num_chains(p, &sums, heads > 0 ? num_tasks / heads : 1);
    return (size_t)(fa_flex_num_copies(&sums, num_tasks, chains) * sums.num) * sizeof(double);
}

/* Writes the tasks and returns their number. A task has ranges [begin, end), and its cost is the number of visible
 * keys, summed over tiles. Sequences with fa_decodes have none. With tasks NULL the function counts as if there were no
 * such sequence. */
int64_t fa_bwd_tasks(const fa_problem *problem, int block_q, int block_kv, int ranges, int shares, fa_task *tasks);

#endif
