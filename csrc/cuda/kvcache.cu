/* This kernel works on a cache before attention reads the cache. New keys and values are written in place, and
 * rotary embedding turns the new keys and the queries.
 *
 *   k_new, v_new [b, len_new, h_kv, d]  ->  cache positions seqused_k[b] ... seqused_k[b] + len_new - 1
 *   q [b, len_q, h, d]                  ->  q_rotated, contiguous; packed if q is
 *   a pair (x0, x1) of the first rotary_dim elements  ->  (x0 cos - x1 sin, x0 sin + x1 cos), rounded once
 *
 * cos and sin come from row "position" of rotary_cos and rotary_sin. The first new key and query have position
 * seqlens_rotary[b], or else seqused_k[b]. All other elements are copied bit for bit. One warp takes one row of one
 * head. A position without room in the cache, or on a page that does not exist, is not written.
 *
 * Specification: ../cpu/kvcache.c. */
#include "cuda_problem.h"
#include "e4m3.cuh"
#include "sequence.cuh"

#ifndef F32
#error "dtype: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL kvcache
#endif

/* Returns an element of rotary_cos or rotary_sin. */
DEVICE element::product table_at(const fa_cuda_problem &p, const void *table, long long at) {
    if (E4M3 && p.rotary_e4m3) return cvt_f32(((const e4m3 *)table)[at]);
    return cvt_f32(((const element::output *)table)[at]);
}

/* Copies one row and turns its rotary pairs. The whole warp calls this function, and the lanes share the work. */
DEVICE void copy_turned(const fa_cuda_problem &p, element *dst, const element *src, int position) {
    const int lane = threadIdx.x % 32, pairs = p.rotary_dim / 2;
    const bool turns = p.rotary_cos && position < p.rotary_rows;
    const int num_pairs = turns ? pairs : 0;
    for (int i = lane; i < num_pairs; i += 32) {
        const int idx_0 = p.rotary_interleaved ? 2 * i : i, idx_1 = p.rotary_interleaved ? 2 * i + 1 : i + pairs;
        const element::product cos = table_at(p, p.rotary_cos, (long long)position * pairs + i);
        const element::product sin = table_at(p, p.rotary_sin, (long long)position * pairs + i);
        const element::product x_0 = cvt_f32(src[idx_0]), x_1 = cvt_f32(src[idx_1]);
        dst[idx_0] = cvt<element>((float)(x_0 * cos - x_1 * sin));
        dst[idx_1] = cvt<element>((float)(x_0 * sin + x_1 * cos));
    }
    for (int i = 2 * num_pairs + lane; i < p.d; i += 32) dst[i] = src[i];
}

/* Returns the absolute position of the first appended key. Left padding does not move the position. */
DEVICE int append_position(const fa_cuda_problem &p, int b_idx) {
    return p.seqused_k ? clamp(p.seqused_k[b_idx], 0, 0x40000000) : 0;
}

/* Returns the position by which rotary embedding turns the first new key and query. */
DEVICE int rotary_position(const fa_cuda_problem &p, int b_idx) {
    return OF_3 && p.seqlens_rotary ? clamp(p.seqlens_rotary[b_idx], 0, 0x40000000) : append_position(p, b_idx);
}

/* Returns the element offset of new key t of one key head in k_new or v_new. */
DEVICE long long new_key_offset(const fa_cuda_problem &p, const fa_cuda_view &kv, int b_idx, int t, int head) {
    const int first = OF_3 && p.cu_seqlens_k_new ? clamp(p.cu_seqlens_k_new[b_idx], 0, p.total_new) : 0;
    return b_idx * kv.stride_b + ((long long)first + t) * kv.stride_row + head * kv.stride_h;
}

/* Writes new key and value t of a sequence and key head to their place in the cache. The whole warp calls this
 * function. */
DEVICE void append_token(const fa_cuda_problem &p, int b_idx, int t, int head) {
    const sequence s = sequence_at(p, b_idx);
    const int position = append_position(p, b_idx) + t, columns_v = OF_3 ? p.d_v : p.d;
    if (position >= s.capacity || (OF_3 && t >= num_new_keys(p, b_idx))) return;
    if (p.paged) {
        const int page = s.pages[position / p.page_size];
        if (page < 0 || page >= p.num_pages) return;
    }
    const long long k_at = cache_offset(p, p.k, s, position, head), v_at = cache_offset(p, p.v, s, position, head);
    const element *k_new = (const element *)p.k_new.data + new_key_offset(p, p.k_new, b_idx, t, head);
    const element *v_new = (const element *)p.v_new.data + new_key_offset(p, p.v_new, b_idx, t, head);
    copy_turned(p, (element *)p.k.data + k_at, k_new, OF_3 ? rotary_position(p, b_idx) + t : position);
    for (int i = threadIdx.x % 32; i < columns_v; i += 32) ((element *)p.v.data)[v_at + i] = v_new[i];
}

/* Writes queries first, first + len_q, first + 2 len_q, .. of a sequence and head, turned, to q_rotated. The caller's
 * max_seqlen_q is len_q, and a packed sequence may be longer. The whole warp calls this function. */
DEVICE void rotate_queries(const fa_cuda_problem &p, int b_idx, int first, int head) {
    const sequence s = sequence_at(p, b_idx);
    for (u32 i = first; i < (u32)s.len_q; i += p.len_q) { /* below 2^32, because both are below 2^31 */
        const int t = (int)i;
        const long long row = OF_3 && p.cu_seqlens_q ? (long long)s.q_row + t : (long long)b_idx * p.len_q + t;
        copy_turned(p, (element *)p.q_rotated + (row * p.h + head) * p.d,
                    (const element *)p.q.data + query_offset(p.q, s, t, head),
                    rotary_position(p, b_idx) + (p.rotary_q_by_row ? t : 0));
    }
}

/* A warp does one task at a time. The first tasks are the new tokens of every sequence and key head. The queries of
 * every sequence and head follow. */
extern "C" __global__ void KERNEL(const fa_cuda_problem p) {
    const long long num_appends = (long long)p.b * p.len_new * p.h_kv;
    const long long num_tasks = num_appends + (p.q_rotated ? (long long)p.b * p.len_q * p.h : 0);
    const int warps = blockDim.x / 32;
    for (long long task = (long long)blockIdx.x * warps + threadIdx.x / 32; task < num_tasks;
         task += (long long)gridDim.x * warps) {
        if (task < num_appends) {
            const long long token = task / p.h_kv;
            append_token(p, (int)(token / p.len_new), (int)(token % p.len_new), (int)(task % p.h_kv));
        } else {
            const long long query = (task - num_appends) / p.h;
            rotate_queries(p, (int)(query / p.len_q), (int)(query % p.len_q), (int)((task - num_appends) % p.h));
        }
    }
}
