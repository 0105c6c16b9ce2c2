/* This file appends new keys and applies rotary embedding in attn_decode.cu. New keys and values are written
 * into the cache. Keys and queries are turned by rotary embedding.
 *
 *   k_new, v_new [b, len_new, h_kv, d]  ->  cache positions seqused_k[b] ... seqused_k[b] + len_new - 1
 *   a pair (x0, x1) of the first rotary_dim elements  ->  (x0 cos - x1 sin, x0 sin + x1 cos), rounded once
 *
 * The CTA that will read a key also writes the key, before the CTA asks for the key. Where all rows of a key head
 * are one tile of queries, no other CTA reads the key in this launch. For longer queries kvcache.cu runs before this
 * kernel. A position without room in the cache, or on a page that does not exist, is not written.
 *
 * Specification: ../cpu/kvcache.c. */
#ifndef FA_ATTN_DECODE_APPEND_CUH
#define FA_ATTN_DECODE_APPEND_CUH

#include "attn_decode_loads.cuh"

/* ---- rotary ---------------------------------------------------------------------------------------------------- */

/* Two 16-byte pieces of a row hold 16 elements. Where `turns` is true, the pieces hold 8 pairs that turn together.
 * Otherwise the pieces are two neighbours. */
struct two_pieces {
    int first, second;
    bool turns;
};

/* Returns the two pieces number `idx` of a row at `position`. */
DEVICE two_pieces two_pieces_at(const params &p, int idx, int position) {
    const int num = p.rotary_dim / 16;
    const bool turns = p.rotary_cos && position < p.rotary_rows && idx < num;
    if (p.rotary_interleaved || idx >= num) return {2 * idx, 2 * idx + 1, turns};
    return {idx, idx + num, turns};
}

/* Turns the pairs of number `idx`. x holds elements 0..7 of the first piece, then elements 0..7 of the second piece. */
DEVICE void turn(const params &p, int idx, int position, u32 (&x)[8]) {
    const long long at = (long long)position * (p.rotary_dim / 2) + 8 * idx;
    const uint4 cos_pieces = *(const uint4 *)((const element *)p.rotary_cos + at);
    const uint4 sin_pieces = *(const uint4 *)((const element *)p.rotary_sin + at);
    const u32 cos_words[4] = {cos_pieces.x, cos_pieces.y, cos_pieces.z, cos_pieces.w};
    const u32 sin_words[4] = {sin_pieces.x, sin_pieces.y, sin_pieces.z, sin_pieces.w};
    float y_0[8], y_1[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int shift = 16 * (i % 2);
        const float cos = cvt_f32(element{(u16)(cos_words[i / 2] >> shift)});
        const float sin = cvt_f32(element{(u16)(sin_words[i / 2] >> shift)});
        const float x_0 = cvt_f32(element{(u16)(p.rotary_interleaved ? x[i] : x[i / 2] >> shift)});
        const float x_1 = cvt_f32(element{(u16)(p.rotary_interleaved ? x[i] >> 16 : x[4 + i / 2] >> shift)});
        y_0[i] = x_0 * cos - x_1 * sin;
        y_1[i] = x_0 * sin + x_1 * cos;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = p.rotary_interleaved ? cvt_x2<element>(y_0[i], y_1[i]) : cvt_x2<element>(y_0[2 * i], y_0[2 * i + 1]);
        x[4 + i] = p.rotary_interleaved ? cvt_x2<element>(y_0[4 + i], y_1[4 + i])
                                        : cvt_x2<element>(y_1[2 * i], y_1[2 * i + 1]);
    }
}

/* Fetches both pieces of a row in global memory and turns the pairs if at.turns is true. Columns from d on become
 * zeros. */
DEVICE void fetch(const params &p, const uint4 *row, two_pieces at, int idx, int position, u32 (&x)[8]) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 first = 8 * at.first < p.d ? row[at.first] : zero, second = 8 * at.second < p.d ? row[at.second] : zero;
    x[0] = first.x, x[1] = first.y, x[2] = first.z, x[3] = first.w;
    x[4] = second.x, x[5] = second.y, x[6] = second.z, x[7] = second.w;
    if (at.turns) turn(p, idx, position, x);
}

/* Takes the place of load_queries where there is rotary embedding. Writes the turned Q of the item to shared memory.
 * The next __syncthreads makes Q visible. The whole CTA calls this function. */
__device__ __noinline__ void load_turned_queries(const params &p, element *q_smem, const item &t, int head) {
    const int num_rows = t.s.len_q * p.heads_per_kv;
    for (int n = threadIdx.x; n < BLOCK_Q * PIECES / 2; n += THREADS) {
        const int row = n / (PIECES / 2), idx = n % (PIECES / 2), at = t.q_tile * BLOCK_Q + row;
        const int i = divide(at, p.by_heads_per_kv), h_idx = head * p.heads_per_kv + at - i * p.heads_per_kv;
        const int position = t.s.position + (p.rotary_q_by_row ? i : 0);
        const two_pieces pieces = two_pieces_at(p, idx, position);
        u32 x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (at < num_rows) {
            const element *src =
                (const element *)p.q + t.b_idx * p.q_stride_b + i * p.q_stride_row + h_idx * p.q_stride_h;
            fetch(p, (const uint4 *)src, pieces, idx, position, x);
        }
        *(uint4 *)(q_smem + piece_address(0, row, pieces.first) / 2) = make_uint4(x[0], x[1], x[2], x[3]);
        *(uint4 *)(q_smem + piece_address(0, row, pieces.second) / 2) = make_uint4(x[4], x[5], x[6], x[7]);
    }
}

/* ---- append ---------------------------------------------------------------------------------------------------- */

/* Keys [first, last) of a sequence are new. The keys are counted like the other keys of the sequence. */
struct new_keys {
    int first, last;
};

/* Returns the new keys among the keys [begin, end), which a piece reads. Some new keys lie outside the item's
 * window, before or behind all keys that the item reads. Such keys belong to the item's first or last part. */
DEVICE new_keys new_keys_of(const params &p, const item &t, const piece &x, int begin, int end) {
    if (!p.k_new.data) return {0, 0};
    new_keys n = {t.s.position - t.s.kv_row, min(t.s.position + p.len_new, p.capacity) - t.s.kv_row};
    if (x.first > 0) n.first = max(n.first, begin);
    if (x.last < t.tiles) n.last = min(n.last, end);
    return n;
}

/* Writes new keys and their values to the cache. A warp takes one row at a time. The last warp takes the first row,
 * because the first warps turn the queries meanwhile. The whole CTA calls this function. */
__device__ __noinline__ void append(const params &p, walk c, const item &t, int head, new_keys fresh) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = WARPS - 1 - (int)threadIdx.x / 32; row < 2 * (fresh.last - fresh.first); row += WARPS) {
        const int position = t.s.kv_row + fresh.first + row / 2, token = position - t.s.position;
        const bool is_key = row % 2 == 0;
        const fa_decode_cache &from = is_key ? p.k_new : p.v_new, &to = is_key ? p.k : p.v;
        u32 page = c.cache_row, page_row = position;
        if (c.pages) {
            const int idx = divide(position, p.by_page_size);
            page = c.pages[idx], page_row = position - idx * p.page_size;
            if (page >= (u32)p.num_pages) continue;
        }
        two_pieces pieces = two_pieces_at(p, lane, position);
        pieces.turns &= is_key;
        u32 x[8];
        const u32 src = t.b_idx * from.stride_b + token * from.stride_row + head * from.stride_h;
        const u32 dst = page * to.stride_b + page_row * to.stride_row + head * to.stride_h;
        fetch(p, (const uint4 *)from.data + src, pieces, lane, position, x);
        uint4 *cached = (uint4 *)to.data + dst;
        if (8 * pieces.first < p.d) cached[pieces.first] = make_uint4(x[0], x[1], x[2], x[3]);
        if (8 * pieces.second < p.d) cached[pieces.second] = make_uint4(x[4], x[5], x[6], x[7]);
    }
}

#endif
