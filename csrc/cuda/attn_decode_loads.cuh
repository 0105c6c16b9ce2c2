/* This file loads the bytes for attn_decode.cu. Rows of keys, values and queries come from anywhere in memory
 * and go to swizzled rows of shared memory. Each lane copies 16 bytes at a time. */
#ifndef FA_ATTN_DECODE_LOADS_CUH
#define FA_ATTN_DECODE_LOADS_CUH

#include "attn_decode_schedule.cuh"

/* Shared memory holds rows of HEAD_DIM elements, with permuted 16-byte pieces. The permutation puts 8 rows of one
 * column into 8 different banks. Where a row is a multiple of 128 bytes, the permutation depends on the row's number
 * mod 8. Other rows (96 columns, 192 bytes) use half the row's number mod 4. */
DEVICE u32 swizzle(u32 row) { return HEAD_DIM % 64 == 0 ? row % 8 : row / 2 % 4; }
DEVICE u32 piece_address(u32 base, u32 row, u32 piece) { return base + (row * PIECES + (piece ^ swizzle(row))) * 16; }

/* Computes the same address as piece_address, where a lane reads many pieces of one row. `piece` is even and known
 * to the compiler. row_base is the row's address. low is the row's swizzle ^ 0 or 1: the lane reads either `piece`
 * or the next piece. */
constexpr u32 PERIOD = HEAD_DIM % 64 == 0 ? 8 : 4;
DEVICE u32 even_piece_address(u32 row_base, u32 low, u32 piece) {
    return row_base + (piece % PERIOD ^ low) * 16 + piece / PERIOD * PERIOD * 16;
}

/* Where the keys lie that a warp loads into one slot, WARP_KEYS of them: lane l knows key l. */
struct loader {
    u32 page, row; /* the block table's page number is not clamped yet */
    u32 present;   /* bit i: key i is present */
};

/* A walk is the place of a sequence's keys. The keys [begin, end) are to be read. */
struct walk {
    const int *pages; /* NULL: not paged */
    u32 cache_row, kv_row;
    int begin, end;
};

/* With PAGES_AHEAD: asks for the page number of a key. The number comes with the thread's next cp.async group. */
DEVICE void ask_for_page(const params &p, const walk &c, int key, int &page) {
    const bool is_present = c.begin <= key && key < c.end;
    cp_async<4>(smem_address(&page), c.pages + (is_present ? divide(c.kv_row + key, p.by_page_size) : 0), is_present);
}

/* Finds the place of this lane's key of the step at `key`. The call comes one step ahead, so that a page number from
 * memory arrives in time. With PAGES_AHEAD `page` is the number that ask_for_page has brought. */
DEVICE loader look_up(const params &p, const walk &c, int key, const int &page) {
    const int lane = threadIdx.x % 32, mine = key + lane;
    const bool is_present = lane < WARP_KEYS && c.begin <= mine && mine < c.end;
    const u32 row = is_present ? c.kv_row + mine : 0;
    loader l = {c.cache_row, row, __ballot_sync(0xffffffffu, is_present)};
    if (c.pages) {
        const u32 idx = divide(row, p.by_page_size);
        l.row = row - idx * (u32)p.page_size;
        l.page = !is_present ? 0 : PAGES_AHEAD ? page : c.pages[idx];
    }
    return l;
}

DEVICE void load(const fa_decode_cache &cache, const loader &l, u32 head_offset, u32 slot_rows, int d, u64 l2_policy) {
    const int lane = threadIdx.x % 32;
    const u32 mine = l.page * cache.stride_b + l.row * cache.stride_row + head_offset;
#pragma unroll
    for (int i = 0; i < WARP_KEYS * PIECES / 32; i++) {
        const u32 idx = 32 * i + lane, row = idx / PIECES, piece = idx % PIECES;
        const u32 offset = __shfl_sync(0xffffffffu, mine, row);
        const bool is_present = (l.present >> row & 1) && (int)(8 * piece) < d;
        cp_async_16(piece_address(slot_rows, row, piece),
                    (const char *)cache.data + (u64)(offset + (is_present ? piece : 0)) * 16, is_present, l2_policy);
    }
}

/* Loads Q of the item. Rows beyond the item's end and columns beyond d become zeros. The whole CTA calls this
 * function. */
DEVICE void load_queries(const params &p, u32 q_smem, const item &t, int head) {
    const int num_rows = t.s.len_q * p.heads_per_kv;
#pragma unroll 1
    for (int idx = threadIdx.x; idx < BLOCK_Q * PIECES; idx += THREADS) {
        const int row = idx / PIECES, piece = idx % PIECES, at = t.q_tile * BLOCK_Q + row;
        const int i = divide(at, p.by_heads_per_kv), h_idx = head * p.heads_per_kv + at - i * p.heads_per_kv;
        const bool is_present = at < num_rows && 8 * piece < p.d;
        const element *src = (const element *)p.q;
        if (is_present)
            src += t.b_idx * p.q_stride_b + (t.s.q_row + i) * p.q_stride_row + h_idx * p.q_stride_h + 8 * piece;
        cp_async_16(piece_address(q_smem, row, piece), src, is_present);
    }
}

#endif
