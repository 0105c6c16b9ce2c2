/* Copies the pages of each sequence side by side, for a kernel that does not read pages of this size:
 *
 *   k, v [pages, page_size, h_kv, d]  ->  k, v [b, rows, h_kv, d]      lengths [b]: keys of each sequence
 *
 * New keys lie in their pages already, and count. Key tiles end behind the last key, so some rows there become zero.
 * A warp copies all heads of one key at a time, 16 bytes a lane. The dtype has 2 bytes.
 *
 * Which limit binds: memory. Each key is read once and written once.
 *
 * Specification: fa_key_offset of ../sequence.h. */
#define OF_3 1 /* new keys may be packed */
#include "gather_params.h"
#include "sequence.cuh"

#ifndef KERNEL
#define KERNEL gather
#endif

constexpr int PIECE = 8;   /* elements of 16 bytes */
constexpr int AT_ONCE = 8; /* A lane has so many pieces on their way. */

/* One row of k or v: `columns` elements of each head. */
struct row_of_heads {
    const uint4 *from;
    uint4 *to;
    int pieces_of_head;
    long long stride_h; /* the heads of `from` lie so many pieces apart */

    DEVICE row_of_heads(const fa_cuda_view &view, long long element, void *copies, long long row, int h_kv, int columns)
        : from((const uint4 *)view.data + element / PIECE), to((uint4 *)copies + row * h_kv * (columns / PIECE)),
          pieces_of_head(columns / PIECE), stride_h(view.stride_h / PIECE) {}

    DEVICE uint4 load(int i) const {
        const int head = i / pieces_of_head;
        return from[head * stride_h + (i - head * pieces_of_head)];
    }
};

/* Copies of_k pieces of k and of_v pieces of v, or writes zeros. The whole warp calls this function. */
DEVICE void copy(const row_of_heads &k, const row_of_heads &v, int of_k, int of_v, bool exists) {
    for (int first = threadIdx.x % 32; first < of_k + of_v; first += 32 * AT_ONCE) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = first + 32 * j;
            x[j] = {0, 0, 0, 0};
            if (exists && i < of_k + of_v) x[j] = i < of_k ? k.load(i) : v.load(i - of_k);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = first + 32 * j;
            if (i < of_k + of_v) *(i < of_k ? k.to + i : v.to + (i - of_k)) = x[j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * FA_GATHER_WARPS) KERNEL(const __grid_constant__ fa_gather_params g) {
    const fa_cuda_problem &p = g.problem;
    const int chunks = ceil_div(g.rows, FA_GATHER_KEYS), warp = threadIdx.x / 32;
    const int of_k = p.h_kv * (p.d / PIECE), of_v = p.h_kv * (p.d_v / PIECE);
    for (long long task = blockIdx.x; task < (long long)p.b * chunks; task += gridDim.x) {
        const int b_idx = (int)(task / chunks), first = (int)(task % chunks) * FA_GATHER_KEYS;
        const sequence s = sequence_at(p, b_idx);
        if (first == 0 && threadIdx.x == 0) g.lengths[b_idx] = s.len_kv;
        const int last = min(min(first + FA_GATHER_KEYS, g.rows), s.len_kv + FA_GATHER_ZEROS);
        for (int key = first + warp; key < last; key += FA_GATHER_WARPS) {
            const bool exists = key < s.len_kv;
            const long long to = (long long)b_idx * g.rows + key;
            const row_of_heads k = {p.k, exists ? cache_offset(p, p.k, s, key, 0) : 0, g.k, to, p.h_kv, p.d};
            const row_of_heads v = {p.v, exists ? cache_offset(p, p.v, s, key, 0) : 0, g.v, to, p.h_kv, p.d_v};
            copy(k, v, of_k, of_v, exists);
        }
    }
}
