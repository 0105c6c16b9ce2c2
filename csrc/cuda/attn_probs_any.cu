/* The kernel computes the result of return_attn_probs:
 *
 *   s_dmask [b, h, rows, cols] = +-exp(s_ij - largest s of row i)
 *
 * The sign is minus where dropout removes the pair. The value is zero where row i does not see key j. Rows and
 * columns that only round up the size are zero too.
 *
 * The kernel is made for looking at masks. One CTA takes one row, one thread takes one key, and each score is
 * computed twice. */
#include "cuda_problem.h"

#define HEAD_DIM 256
#define WARPS    4
#define BLOCKS   1
#ifndef KERNEL
#define KERNEL attn_probs_any
#endif

#include "tile_any.cuh"

struct shared_memory {
    float q[HEAD_DIM];
    float largest[THREADS / 32];
};

/* Returns the score of key j. `shared` holds the row of q. */
DEVICE float score_at(const fa_cuda_problem &p, const shared_memory &shared, const sequence &s, const scorer &score,
                      int head, int i, int j) {
    const element *k = (const element *)p.k.data + key_offset(p, p.k, s, j, head / (p.h / p.h_kv));
    float dot = 0, unused;
    for (int c = 0; c < p.d; c++) dot += shared.q[c] * cvt_f32(k[c]);
    return score(dot, i, j, unused);
}

DEVICE void write_row(const fa_cuda_problem &p, shared_memory &shared, const sequence &s, int head, int i,
                      element *result) {
    const scorer score(p, s, head);
    const dropout drop(p, s.b_idx, head);
    const int begin = i < s.len_q ? first_key(p, s, i) : 0, end = i < s.len_q ? end_key(p, s, i) : 0;
    if (begin < end) {
        const element *q = (const element *)p.q.data + query_offset(p.q, s, i, head);
        for (int c = threadIdx.x; c < p.d; c += THREADS) shared.q[c] = cvt_f32(q[c]);
    }
    __syncthreads();
    float largest = -INF;
    for (int j = begin + threadIdx.x; j < end; j += THREADS)
        largest = fmaxf(largest, score_at(p, shared, s, score, head, i, j));
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, step));
    if (lane() == 0) shared.largest[warp()] = largest;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) largest = fmaxf(largest, shared.largest[w]);
    if (largest == -INF) largest = 0; /* there are only scores of -inf, and exp(-inf) is 0 */
    for (long long j = threadIdx.x; j < p.s_dmask_cols; j += THREADS) {
        float x = 0;
        if (j >= begin && j < end) {
            u32 words[4];
            const int r = i % 16, c = (int)(j % 32), byte = 2 * (r / 8) + c % 2;
            x = ex2((score_at(p, shared, s, score, head, i, (int)j) - largest) * LOG2_E);
            drop.draw(words, i / 16, (int)(j / 32), 4 * (r % 8) + c % 8 / 2);
            const u32 word = c < 16 ? (c < 8 ? words[0] : words[1]) : (c < 24 ? words[2] : words[3]);
            if (drop.is_on && !drop.keeps(word, byte)) x = -x;
        }
        result[j] = cvt<element>(x);
    }
    __syncthreads(); /* all threads have read q and largest */
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const fa_cuda_problem p) {
    extern __shared__ __align__(16) char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const long long num_tasks = (long long)p.b * p.h * p.s_dmask_rows;
    for (long long task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int i = (int)(task % p.s_dmask_rows), head = (int)(task / p.s_dmask_rows % p.h);
        const int b_idx = (int)(task / p.s_dmask_rows / p.h);
        write_row(p, shared, sequence_at(p, b_idx), head, i, (element *)p.s_dmask + task * p.s_dmask_cols);
    }
}
