/* The kinds of the blocks of a block mask as bytes, which a kernel makes of the lists of a call.
 *
 *   kinds [mask_b][mask_h][rows][columns]
 *
 * Without a block mask there is one block, which is partial. Without a mask_mod every pair of a partial block is
 * allowed, as in a full block. */
#ifndef FA_FLEX_BLOCK_MAP_H
#define FA_FLEX_BLOCK_MAP_H

#include "flex.h"

typedef struct {
    uint8_t *kinds;
    int64_t mask_b, mask_h, rows, columns, block_q, block_kv;
    const int32_t *offset; /* [b] the row of the mask where query 0 of a batch lies; NULL: 0 */
    bool has_mask_mod;
} fa_flex_block_map;

/* The map of a problem with flex. Its kinds are not there yet. */
static inline fa_flex_block_map fa_flex_block_map_of(const fa_problem *p) {
    const fa_flex *f = p->flex;
    fa_flex_block_map m = {.mask_b = 1, .mask_h = 1, .rows = 1, .columns = 1, .has_mask_mod = f->mask != NULL};
    m.block_q = p->len_q > 0 ? p->len_q : 1;
    m.block_kv = p->len_kv > 0 ? p->len_kv : 1;
    if (f->block_q > 0) {
        m.mask_b = f->mask_b, m.mask_h = f->mask_h, m.rows = f->rows, m.columns = f->columns;
        m.block_q = f->block_q, m.block_kv = f->block_kv;
        m.offset = f->blocks_have_offset ? f->q_offset : NULL;
    }
    return m;
}

static inline size_t fa_flex_block_map_bytes(const fa_flex_block_map *m) {
    return (size_t)(m->mask_b * m->mask_h * m->rows * m->columns);
}

/* Writes the kinds into m->kinds. */
void fa_flex_fill_block_map(const fa_flex_block_map *m, const fa_flex *flex);

/* The kinds [rows][columns] of a batch and a head. */
static inline const uint8_t *fa_flex_kinds_of(const fa_flex_block_map *m, int64_t b_idx, int64_t head) {
    return m->kinds + (b_idx % m->mask_b * m->mask_h + head % m->mask_h) * m->rows * m->columns;
}

/* The row of the mask where query `row` of a batch lies. The functions below take rows of the mask. */
static inline int64_t fa_flex_mask_row(const fa_flex_block_map *m, int64_t b_idx, int64_t row) {
    return m->offset ? row + m->offset[b_idx] : row;
}

/* Whether some row of the mask of [first_row, last_row] has a block in a column. */
static inline bool fa_flex_rows_see(const fa_flex_block_map *m, const uint8_t *kinds, int64_t first_row,
                                    int64_t last_row, int64_t column) {
    for (int64_t r = first_row; r <= last_row; r++)
        if (kinds[r * m->columns + column] != FA_FLEX_EMPTY) return true;
    return false;
}

/* Finds the keys [*first, *end) of [key, key_end) from the first to the last block that some row of [row, row_end)
 * sees. Returns whether there are any. `kinds` belongs to the head. */
static inline bool fa_flex_find_keys(const fa_flex_block_map *m, const uint8_t *kinds, int64_t row, int64_t row_end,
                                     int64_t key, int64_t key_end, int64_t *first, int64_t *end) {
    *first = *end = key_end;
    if (row >= row_end || key >= key_end) return false;
    const int64_t block_kv = m->block_kv, first_row = row / m->block_q, last_row = (row_end - 1) / m->block_q;
    int64_t low = key / block_kv, high = (key_end - 1) / block_kv;
    while (low <= high && !fa_flex_rows_see(m, kinds, first_row, last_row, low)) low++;
    if (low > high) return false;
    while (!fa_flex_rows_see(m, kinds, first_row, last_row, high)) high--;
    *first = low * block_kv > key ? low * block_kv : key;
    *end = (high + 1) * block_kv < key_end ? (high + 1) * block_kv : key_end;
    return true;
}

/* The number of keys of [0, len_kv) that lie in blocks that some row of [row, row_end) sees. */
int64_t fa_flex_count_keys(const fa_flex_block_map *m, const uint8_t *kinds, int64_t row, int64_t row_end, int64_t key,
                           int64_t key_end);

#endif
