/* Which keys a row sees, by the block mask and the mask_mod of programmable attention.
 *
 * A band is up to 128 query rows, in whole tiles. A view is what the rows of a band see of one block of keys. A call
 * has a table of views, for all batches and heads that share them. A task first finds the views of its rows and keys
 * that no other task has found or is about to find:
 *
 *   kinds    [num_b][num_h][bands][blocks]    nothing, everything, the number of a view, or not found yet
 *   views    for each row the first and the last key that it sees. For each vector of rows, bounds of these
 *   bits     [key][rows]: whether a row sees a key. They are read only where some row sees keys with gaps. Row
 *            8 k + j of 64 is bit k of byte j of a word, so that eight rows are eight bytes, shifted by k.
 *
 * A step whose view is not in the table finds it for itself: another worker is about to find it, or a table would take
 * too much memory. */
#ifndef FA_CPU_FLEX_SEEN_H
#define FA_CPU_FLEX_SEEN_H

#include "flex/block_map.h"
#include "flex/evaluate.h"
#include "flex_programs.h"
#include "sequence.h"

#include <stdatomic.h>

#define FA_FLEX_VIEW_ROWS  FA_FLEX_TILE
#define FA_FLEX_VIEW_WORDS (FA_FLEX_VIEW_ROWS / 64)

#define FA_FLEX_VIEW_VECS (FA_FLEX_VIEW_ROWS / 4) /* no vector has fewer lanes */

/* Bounds of some rows: the least first key, the greatest end, the greatest first key, the least end. */
typedef struct {
    uint8_t low, high, most, least;
} fa_flex_row_bounds;

/* Keys [first, end) of the block, in bytes. A row that sees no key has first 255 and end 0. */
typedef struct {
    uint8_t first[FA_FLEX_VIEW_ROWS], end[FA_FLEX_VIEW_ROWS];
    fa_flex_row_bounds vectors[FA_FLEX_VIEW_VECS]; /* of the rows of each vector */
    bool has_gaps;                                 /* some row does not see all keys of [first, end) */
} fa_flex_view;

/* Kinds from 0 on are numbers of views. View n is not found yet: FA_FLEX_NOT_FOUND - n. */
enum { FA_FLEX_SEES_SOME = 0, FA_FLEX_SEES_NOTHING = -1, FA_FLEX_SEES_ALL = -2, FA_FLEX_NOT_FOUND = -3 };
#define FA_FLEX_IS_BUSY INT32_MIN /* a worker is about to find the view */

typedef struct {
    const fa_problem *p;
    fa_flex_block_map map;
    int block_kv, band_rows;
    int vec_rows; /* rows of a vector */
    int64_t num_b, num_h, bands, blocks;
    _Atomic int32_t *kinds; /* NULL: there is no table */
    fa_flex_view *views;
    uint64_t *bits; /* [views][block_kv][FA_FLEX_VIEW_WORDS] */
} fa_flex_seen;

/* What a table may take. Tests lower it. NOTE: bits that no step reads are not written, so most of this memory is never
 * touched. */
extern int64_t fa_flex_most_table_bytes;

/* The table of a problem, whose map is filled; block_q is the number of rows of a tile, and vec_rows that of a vector.
 * No view is found yet. Without memory there is no table. */
fa_flex_seen fa_flex_new_seen(const fa_problem *problem, const fa_flex_block_map *map, int block_q, int block_kv,
                              int vec_rows);
void fa_flex_free_seen(fa_flex_seen *seen);

/* Finds what rows [row, row + num_rows) of a head see of the block of keys that starts at key `block`. Writes the view
 * and its bits, and returns FA_FLEX_SEES_*. */
int32_t fa_flex_see(const fa_flex_seen *seen, const fa_flex_programs *programs, int64_t b_idx, int64_t head,
                    int64_t row, int num_rows, int64_t block, fa_flex_view *view, uint64_t *bits);

/* Finds the views of rows [row, row_end) and keys [key, key_end) that are not in the table. */
void fa_flex_see_task(const fa_flex_seen *seen, const fa_flex_programs *programs, int64_t b_idx, int64_t head,
                      int64_t row, int64_t row_end, int64_t key, int64_t key_end);

/* The kind of the band of a row, on a block of keys. */
static inline _Atomic int32_t *fa_flex_kind_seen(const fa_flex_seen *seen, int64_t b_idx, int64_t head, int64_t row,
                                                 int64_t block) {
    const int64_t heads = b_idx % seen->num_b * seen->num_h + head % seen->num_h;
    return &seen->kinds[(heads * seen->bands + row / seen->band_rows) * seen->blocks + block / seen->block_kv];
}

#endif
