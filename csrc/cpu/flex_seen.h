/* Which keys a row sees, by the block mask and the mask_mod of programmable attention.
 *
 * A band is up to 128 query rows, in whole tiles. A view is what the rows of a band see of one block of keys. The views
 * of a call are found before its tasks run, once for all batches and heads that share them:
 *
 *   kinds    [num_b][num_h][bands][blocks]    nothing, everything, or the number of a view
 *   views    the keys of each row, from the first to the last one that it sees
 *   bits     [key][rows]: whether a row sees a key. They are read only where some row sees keys with gaps. Row
 *            8 k + j of 64 is bit k of byte j of a word, so that eight rows are eight bytes, shifted by k.
 *
 * If the views of a call would take too much memory, there is no such table. Then each step finds its own view. */
#ifndef FA_CPU_FLEX_SEEN_H
#define FA_CPU_FLEX_SEEN_H

#include "flex/block_map.h"
#include "flex/evaluate.h"
#include "flex/intervals.h"
#include "pool.h"
#include "sequence.h"

#define FA_FLEX_VIEW_ROWS  FA_FLEX_TILE
#define FA_FLEX_VIEW_WORDS (FA_FLEX_VIEW_ROWS / 64)

/* Keys [first, end) of the block, in bytes. A row that sees no key has first 255 and end 0. */
typedef struct {
    uint8_t first[FA_FLEX_VIEW_ROWS], end[FA_FLEX_VIEW_ROWS];
    bool has_gaps; /* some row does not see all keys of [first, end) */
} fa_flex_view;

enum { FA_FLEX_SEES_NOTHING = -1, FA_FLEX_SEES_ALL = -2, FA_FLEX_SEES_SOME = 0 }; /* of a table: a view's number */

typedef struct {
    const fa_problem *p;
    fa_flex_block_map map;
    int block_kv, band_rows;
    int64_t num_b, num_h, bands, blocks;
    int32_t *kinds; /* NULL: there is no table */
    fa_flex_view *views;
    uint64_t *bits; /* [views][block_kv][FA_FLEX_VIEW_WORDS] */
} fa_flex_seen;

/* Finds the views of a problem. The map is filled, and block_q is the number of rows of a tile. Returns false if there
 * are no threads or no memory. fa_flex_free_seen ends the table. */
bool fa_flex_find_seen(fa_flex_seen *seen, const fa_problem *problem, const fa_flex_block_map *map, fa_isa isa,
                       int block_q, int block_kv, int threads, const fa_pool *pool);
void fa_flex_free_seen(fa_flex_seen *seen);

/* What evaluates a mask_mod. */
typedef struct {
    fa_flex_evaluator *mask;   /* lanes are rows; NULL: there is no mask_mod */
    fa_flex_intervals *bounds; /* tell most strips of keys that are masked or allowed as a whole; may be NULL */
} fa_flex_eyes;

/* Finds what rows [row, row + num_rows) of a head see of the block of keys that starts at key `block`. Writes the view
 * and its bits, and returns FA_FLEX_SEES_*. */
int32_t fa_flex_see(const fa_flex_seen *seen, const fa_flex_eyes *eyes, int64_t b_idx, int64_t head, int64_t row,
                    int num_rows, int64_t block, fa_flex_view *view, uint64_t *bits);

/* The table's kind of the band of a row, on a block of keys. */
static inline int32_t fa_flex_kind_seen(const fa_flex_seen *seen, int64_t b_idx, int64_t head, int64_t row,
                                        int64_t block) {
    const int64_t heads = b_idx % seen->num_b * seen->num_h + head % seen->num_h;
    return seen->kinds[(heads * seen->bands + row / seen->band_rows) * seen->blocks + block / seen->block_kv];
}

/* Whether some row of the tile [row, row_end) may see a key of [key, key_end). */
static inline bool fa_flex_may_see(const fa_flex_seen *seen, int64_t b_idx, int64_t head, int64_t row, int64_t row_end,
                                   int64_t key, int64_t key_end) {
    const fa_flex_block_map *map = &seen->map;
    const int64_t mask_row = fa_flex_mask_row(map, b_idx, row);
    int64_t first, end;
    if (!fa_flex_find_keys(map, fa_flex_kinds_of(map, b_idx, head), mask_row, mask_row + row_end - row, key, key_end,
                           &first, &end))
        return false;
    if (!seen->kinds) return true;
    for (int64_t block = first / seen->block_kv * seen->block_kv; block < end; block += seen->block_kv)
        if (fa_flex_kind_seen(seen, b_idx, head, row, block) != FA_FLEX_SEES_NOTHING) return true;
    return false;
}

#endif
