/* Keys in a KV cache, in attn_fwd_sm90.cu. The cache consists of pages. Its tensor maps count pages where maps of other
 * tensors count sequences, and keys in a page where others count rows. A key tile comes in boxes of `box` keys. So no
 * box crosses the end of a page. A cache without a block table has one page for each row, and a key tile is one box. */
#ifndef FA_ATTN_FWD_CACHE_CUH
#define FA_ATTN_FWD_CACHE_CUH

#include "attn_fwd_params.h"
#include "packed.cuh"

#ifndef CACHE
#define CACHE 0 /* of a kernel that reads no KV cache */
#endif

/* Few queries leave most rows of a work tile empty. So the heads of one key head may share it: rows_of_head rows are
 * queries of its first head, the next rows the same queries of the next head. A row strip lies within one head. */
DEVICE int rows_of_head(const params &p) { return CACHE ? p.cache.rows_of_head : BLOCK_Q; }
DEVICE int h_in_tiles(const params &p) { return CACHE ? p.cache.h_in_tiles : p.h; }
/* With few work tiles their keys are cut into parts. Each part is a work tile, and combine.cu adds them up. Packed
 * sequences have no parts. */
constexpr bool MAY_BE_CUT = CACHE && !VARLEN;
DEVICE bool is_cut(const params &p) { return MAY_BE_CUT && p.cache.num_parts > 1; }
/* The head that a row of the work tile is of, counted from the tile's first one, and the row's number there. */
DEVICE int head_in_tile(const params &p, int row) { return row * p.cache.rows_inverse >> 16; }
DEVICE int row_in_head(const params &p, int row) { return row - head_in_tile(p, row) * p.cache.rows_of_head; }

/* The row of the cache, or of the block table, that a sequence has. All places lie within the tensors, whatever the
 * arrays of the problem hold. */
DEVICE int cache_row(const params &p, int b_idx) {
    return p.cache.cache_batch_idx ? clamp(p.cache.cache_batch_idx[b_idx], 0, p.cache.rows - 1) : b_idx;
}

/* Returns the number of new keys of a sequence. They have been appended. */
DEVICE int num_new_keys(const params &p, int b_idx) {
    const int *cu_seqlens = p.cache.cu_seqlens_k_new;
    return cu_seqlens ? min(span_at(cu_seqlens, b_idx, p.cache.total_new).len, p.cache.len_new) : p.cache.len_new;
}

/* The keys of a sequence that are in use, as rows of its pages. */
DEVICE span keys_in_cache(const params &p, int b_idx) {
    const int capacity = p.cache.capacity;
    int len = capacity, pad = 0;
    if (p.cu_seqlens_k) len = span_at(p.cu_seqlens_k, b_idx, 0x7fffffff).len;
    if (p.seqused_k) len = p.seqused_k[b_idx];
    len = min(clamp(len, 0, capacity) + num_new_keys(p, b_idx), capacity);
    if (p.cache.leftpad_k) pad = clamp(p.cache.leftpad_k[b_idx], 0, len);
    return {pad, len - pad};
}

/* Where the keys of a work tile lie, and this lane's keys of a key tile: lane i has the box number i. */
struct key_box {
    int page, row;
};
struct cached_keys {
    int row_of_cache = 0, first = 0, len_kv = 0, head = 0;
    key_box box = {0, 0};

    template <class tile> DEVICE void begin(const params &p, const tile &t, int key_tile) {
        row_of_cache = t.kv_batch, first = t.kv_origin, len_kv = t.len_kv, head = t.kv_head;
        find_box(p, key_tile);
    }
    /* The producers ask for a box one step ahead, because page numbers come from memory. A box without a key that is in
     * use lies outside its page, with WHOLE_KEYS behind all pages, and brings zeros. A page number that no page has
     * counts as the last page's. */
    DEVICE void find_box(const params &p, int key_tile) {
        const int in_tile = threadIdx.x % 32 * p.cache.box, key = key_tile * BLOCK_KV + in_tile, row = first + key;
        box = {row_of_cache, row};
        if (key_tile < 0 || in_tile >= BLOCK_KV || key >= len_kv)
            box = WHOLE_KEYS ? key_box{p.cache.num_pages, 0} : key_box{0, p.cache.page_size};
        else if (p.cache.block_table) {
            const int idx = row / p.cache.page_size;
            const int page = p.cache.block_table[row_of_cache * p.cache.table_stride + idx];
            box = {(int)min((u32)page, (u32)p.cache.num_pages - 1), row - idx * p.cache.page_size};
        }
    }
};

#endif
