/* The forwards that read their options at run time share this file: maxima and sums of quads, scores, masks, dropout,
 * and the rows of packed tensors that belong to no sequence. Fragments lie as in tile_any.cuh. */
#ifndef FA_ROWS_ANY_CUH
#define FA_ROWS_ANY_CUH

#include "tile_any.cuh"

/* A row_state is the state of one row of a thread: the largest score so far and the sum of the exponentials. A
 * thread has two rows in each block. */
struct row_state {
    float max, sum;
};

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

/* Applies softcap and ALiBi to the scores of a block of rows from `row` on and of keys from `first` on. */
template <int N>
DEVICE void change_scores(const fa_cuda_problem &p, const sequence &s, int head, float (&scores)[N][4], int row,
                          int first) {
    const scorer score(p, s, head);
    float unused;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            scores[n][e] =
                score(scores[n][e], row + lane() / 4 + e / 2 * 8, first + 8 * n + 2 * (lane() % 4) + e % 2, unused);
}

/* Scores of keys that a row does not see become -inf. Bit 4 n + e of the result says that the pair of element e of
 * fragment n counts. */
template <int N>
DEVICE u32 mask_scores(const fa_cuda_problem &p, const sequence &s, float (&scores)[N][4], int row, int first) {
    u32 seen = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane() / 4 + 8 * half;
        int begin = first_key_of_window(p, s, i), end = i < s.len_q ? end_key_of_window(p, s, i) : 0;
        if (OF_3 && p.attention_chunk > 0) {
            const int chunk = chunk_begin(i + s.len_kv - s.len_q, p.attention_chunk);
            begin = max(begin, chunk), end = min(end, chunk + p.attention_chunk);
        }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                const int j = first + 8 * n + 2 * (lane() % 4) + e % 2;
                const bool sees = j >= begin && j < end;
                seen |= (u32)sees << (4 * n + e);
                if (!sees) scores[n][e] = -INF;
            }
    }
    return seen;
}

/* Dropout comes after the normalisation and therefore after the sum. */
template <int N>
DEVICE void drop_scores(const fa_cuda_problem &p, const sequence &s, int head, float (&scores)[N][4], int row,
                        int first) {
    const u32 kept = dropout(p, s.b_idx, head).kept_rows_are_queries<N>(row, first);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (!(kept >> (4 * n + e) & 1)) scores[n][e] = 0;
}

/* Packed rows behind the last sequence belong to no sequence. The LSE of such a row becomes -inf, and its o becomes
 * zero if zero_tensors is set. */
DEVICE void fill_unowned_rows(const fa_cuda_problem &p, int head, int first, int step) {
    for (int row = first; row < p.total_q; row += step) {
        if (threadIdx.x == 0) p.lse.data[head * p.lse.stride_h + row] = -INF;
        element::output *o = (element::output *)p.o.data + row * p.o.stride_row + head * p.o.stride_h;
        for (int i = threadIdx.x; i < (OF_3 ? p.d_v : p.d) && p.zero_tensors; i += blockDim.x) o[i] = element::output{};
    }
}

#endif
