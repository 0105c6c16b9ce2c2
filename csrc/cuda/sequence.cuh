/* This file does the work of ../sequence.h on the GPU and finds the place of sequence i of a problem. The index
 * arrays may hold any value, but every place lies within the tensors. Offsets and lengths are clamped to the
 * existing rows, and a page number that no page has counts as the last page's.
 *
 * Kernels with OF_3 know what flash-attn 3 adds to the lengths and to the mask. Kernels without READS_CACHE know no
 * pages, left padding, cache_batch_idx and new keys. */
#ifndef FA_SEQUENCE_CUH
#define FA_SEQUENCE_CUH

#include "cuda_problem.h"
#include "walk.cuh"

#ifndef OF_3
#error "additions of flash-attn 3: 0 or 1"
#endif
#ifndef READS_CACHE
#define READS_CACHE 1
#endif

struct sequence {
    int b_idx;
    int q_row;         /* first row of the sequence in q, o, lse (packed), else 0 */
    int len_q, len_kv; /* visible lengths: after seqused_k, append and left padding */
    int kv_batch;      /* index that stride_b of k and v multiplies; unused when paged */
    int kv_row;        /* row of key 0, counted from the start of kv_batch (paged: of page 0) */
    int capacity;      /* keys that fit, left padding included */
    const int *pages;  /* paged: the sequence's row of the block table */
};

/* Returns the number of new keys of a sequence. */
DEVICE int num_new_keys(const fa_cuda_problem &p, int b_idx) {
    if (!OF_3 || !p.cu_seqlens_k_new) return p.len_new;
    const int begin = clamp(p.cu_seqlens_k_new[b_idx], 0, p.total_new);
    return min(clamp(p.cu_seqlens_k_new[b_idx + 1], begin, p.total_new) - begin, p.len_new);
}

DEVICE sequence sequence_at(const fa_cuda_problem &p, int b_idx) {
    const int cache_row =
        READS_CACHE && p.cache_batch_idx ? clamp(p.cache_batch_idx[b_idx], 0, p.cache_rows - 1) : b_idx;
    sequence s = {b_idx, 0, p.len_q, p.len_kv, cache_row, 0, p.len_kv, nullptr};
    if (p.cu_seqlens_q) {
        s.q_row = clamp(p.cu_seqlens_q[b_idx], 0, p.total_q);
        s.len_q = clamp(p.cu_seqlens_q[b_idx + 1], s.q_row, p.total_q) - s.q_row;
    }
    if (OF_3 && p.seqused_q) s.len_q = clamp(p.seqused_q[b_idx], 0, s.len_q);
    if (p.cu_seqlens_k) {
        const int total = READS_CACHE && p.paged ? 0x7fffffff : p.total_kv;
        const int begin = clamp(p.cu_seqlens_k[b_idx], 0, total);
        s.len_kv = s.capacity = clamp(p.cu_seqlens_k[b_idx + 1], begin, total) - begin;
        s.kv_row = READS_CACHE && p.paged ? 0 : begin;
        s.kv_batch = 0;
    }
    if (READS_CACHE && p.paged) {
        s.pages = p.block_table + cache_row * p.block_table_stride;
        s.capacity = (int)min((long long)p.block_table_cols * p.page_size, 0x40000000ll);
    }
    if (p.seqused_k) s.len_kv = p.seqused_k[b_idx];
    s.len_kv = clamp(s.len_kv, 0, s.capacity);
    if (READS_CACHE) s.len_kv = min(s.len_kv + num_new_keys(p, b_idx), s.capacity);
    if (READS_CACHE && p.leftpad_k) {
        const int pad = clamp(p.leftpad_k[b_idx], 0, s.len_kv);
        s.kv_row += pad;
        s.len_kv -= pad;
    }
    return s;
}

/* Returns the element offset of row `row` of one key head. The row is counted from the start of kv_batch or of page
 * 0. */
DEVICE long long cache_offset(const fa_cuda_problem &p, const fa_cuda_view &kv, const sequence &s, int row,
                              int head_kv) {
    long long batch = s.kv_batch;
    if (READS_CACHE && p.paged) {
        batch = (int)min((unsigned)s.pages[row / p.page_size], (unsigned)p.num_pages - 1);
        row %= p.page_size;
    }
    return batch * kv.stride_b + row * kv.stride_row + head_kv * kv.stride_h;
}

DEVICE long long key_offset(const fa_cuda_problem &p, const fa_cuda_view &kv, const sequence &s, int j, int head_kv) {
    return cache_offset(p, kv, s, s.kv_row + j, head_kv);
}

DEVICE long long query_offset(const fa_cuda_view &q, const sequence &s, int i, int head) {
    return s.b_idx * q.stride_b + ((long long)s.q_row + i) * q.stride_row + head * q.stride_h;
}

DEVICE float *row_stat(const fa_cuda_row_stats &t, const sequence &s, int i, int head) {
    return t.data + s.b_idx * t.stride_b + head * t.stride_h + s.q_row + i;
}

/* The generic kernels read the window at run time. */
typedef mask_of<false, true> mask;

/* The window of row i, without attention chunks, is [first_key_of_window, end_key_of_window). */
DEVICE int first_key_of_window(const fa_cuda_problem &p, const sequence &s, int i) {
    return mask::keys_begin<FROM_0>(p, i, s.len_kv, s.len_q, 0);
}

DEVICE int end_key_of_window(const fa_cuda_problem &p, const sequence &s, int i) {
    return mask::keys_end<TO_LENGTH>(p, i, s.len_kv, s.len_q, s.len_kv);
}

/* The visible keys of row i are [first_key, end_key), which is empty when end_key <= first_key. */
DEVICE int first_key(const fa_cuda_problem &p, const sequence &s, int i) {
    const int begin = first_key_of_window(p, s, i);
    return OF_3 && p.attention_chunk > 0 ? max(begin, chunk_begin(i + s.len_kv - s.len_q, p.attention_chunk)) : begin;
}

DEVICE int end_key(const fa_cuda_problem &p, const sequence &s, int i) {
    const int end = end_key_of_window(p, s, i);
    return OF_3 && p.attention_chunk > 0
               ? min(end, chunk_begin(i + s.len_kv - s.len_q, p.attention_chunk) + p.attention_chunk)
               : end;
}

/* Returns the walk of rows [first, last] over keys. */
DEVICE tile_walk keys_of(const fa_cuda_problem &p, const sequence &s, int first, int last) {
    return {first_key(p, s, first), end_key(p, s, last), first_key(p, s, last), end_key(p, s, first)};
}

/* Returns the walk of keys [first, last] over rows. */
DEVICE tile_walk rows_of(const fa_cuda_problem &p, const sequence &s, int first, int last) {
    const int shift = s.len_kv - s.len_q;
    const mask_window w = {p.window_left, p.window_right};
    tile_walk r = {mask::rows_begin<FROM_0>(w, first, shift), mask::rows_end<TO_LENGTH>(w, last, shift, s.len_q),
                   mask::rows_begin<FROM_0>(w, last, shift), mask::rows_end<TO_LENGTH>(w, first, shift, s.len_q)};
    if (OF_3 && p.attention_chunk > 0) {
        const int begin = chunk_begin(first, p.attention_chunk) - shift,
                  full_begin = chunk_begin(last, p.attention_chunk) - shift;
        r = {max(r.begin, begin), min(r.end, full_begin + p.attention_chunk), max(r.full_begin, full_begin),
             min(r.full_end, begin + p.attention_chunk)};
    }
    return r;
}

#endif
