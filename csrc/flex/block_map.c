#include "block_map.h"

#include <string.h>

static void mark(const fa_flex_block_map *m, const fa_flex_list *list, int64_t b, int64_t h, int64_t row, uint8_t kind,
                 uint8_t *kinds) {
    if (!list->num) return;
    const int32_t *blocks =
        list->blocks + b * list->blocks_stride[0] + h * list->blocks_stride[1] + row * list->blocks_stride[2];
    const int64_t listed = list->num[b * list->num_stride[0] + h * list->num_stride[1] + row * list->num_stride[2]];
    for (int64_t i = 0; i < listed && i < m->columns; i++) {
        const int64_t column = blocks[i * list->blocks_stride[3]];
        if (column >= 0 && column < m->columns) kinds[column] = kind;
    }
}

void fa_flex_fill_block_map(const fa_flex_block_map *m, const fa_flex *flex) {
    if (flex->block_q == 0) {
        m->kinds[0] = FA_FLEX_PARTIAL;
        return;
    }
    uint8_t *kinds = m->kinds;
    memset(kinds, FA_FLEX_EMPTY, fa_flex_block_map_bytes(m));
    for (int64_t b = 0; b < m->mask_b; b++)
        for (int64_t h = 0; h < m->mask_h; h++)
            for (int64_t row = 0; row < m->rows; row++, kinds += m->columns) {
                mark(m, &flex->partial, b, h, row, FA_FLEX_PARTIAL, kinds);
                mark(m, &flex->full, b, h, row, FA_FLEX_FULL, kinds);
            }
}

int64_t fa_flex_count_keys(const fa_flex_block_map *m, const uint8_t *kinds, int64_t row, int64_t row_end, int64_t key,
                           int64_t key_end) {
    int64_t count = 0, first, end;
    for (int64_t at = key; at < key_end; at = (at / m->block_kv + 1) * m->block_kv) {
        const int64_t next = (at / m->block_kv + 1) * m->block_kv;
        if (fa_flex_find_keys(m, kinds, row, row_end, at, next < key_end ? next : key_end, &first, &end))
            count += end - first;
    }
    return count;
}
