/* The kernel computes the result of return_attn_probs:
 *
 *   s_dmask [b, h, rows, cols] = +-exp(s_ij - largest s of row i)
 *
 * The sign is minus where dropout removes the pair. The value is zero where row i does not see key j. Rows and
 * columns that only round up the size are zero too.
 *
 * One CTA takes BLOCK_Q rows of one head, 16 rows per warp, and walks twice over the keys that these rows see. The
 * first walk finds the largest score of each row. The second walk computes the scores again and stores the results.
 * Q and STAGES tiles of K lie in shared memory:
 *
 *   load Q, K | wait | S = Q K^T | row max   | wait | load next K | ..      first walk
 *             | wait | S = Q K^T | exp, sign | wait | load next K | ..      second walk
 *
 * Specification: ../cpu/reference.c. */
#include "cuda_problem.h"

#define HEAD_DIM 256
#define WARPS    4
#define BLOCKS   1
#ifndef KERNEL
#define KERNEL attn_probs_any
#endif

#include "tile_any.cuh"
#include "rows_any.cuh"

constexpr int BLOCK_Q = 16 * WARPS, BLOCK_KV = F32 ? 32 : 64, STAGES = F32 ? 1 : 2, N = BLOCK_KV / 8;

static_assert(BLOCK_KV % 32 == 0, "a dropout patch has 32 keys");

struct shared_memory {
    factor q[BLOCK_Q * PITCH], k[STAGES][BLOCK_KV * PITCH];
};
static_assert(sizeof(shared_memory) <= 99 * 1024, "compute capabilities 8.6, 8.9 and 12.0 give a CTA 99 KiB");

/* The rows of a task: rows [first, first + BLOCK_Q) of one head. `result` is the place of row 0 of this head. */
struct task_rows {
    int head, first;
    element *result;
};

DEVICE void store_pair(const fa_cuda_problem &p, element *row, int j, float x_0, float x_1) {
    if (j + 1 < p.s_dmask_cols && p.s_dmask_cols % 2 == 0) { /* then pairs are aligned */
        if constexpr (F32)
            *(float2 *)(row + j) = make_float2(x_0, x_1);
        else
            *(u32 *)(row + j) = cvt_x2<element>(x_0, x_1);
        return;
    }
    if (j < p.s_dmask_cols) row[j] = cvt<element>(x_0);
    if (j + 1 < p.s_dmask_cols) row[j + 1] = cvt<element>(x_1);
}

/* Stores zeros in columns [begin, end) of all rows of the task. */
DEVICE void clear_columns(const fa_cuda_problem &p, const task_rows &rows, long long begin, long long end) {
    const long long num_rows = min((long long)BLOCK_Q, p.s_dmask_rows - rows.first);
    for (int row = warp(); row < num_rows; row += WARPS) {
        element *to = rows.result + (rows.first + row) * p.s_dmask_cols;
        for (long long j = begin + 2 * lane(); j < end; j += 64) store_pair(p, to, (int)j, 0, 0);
    }
}

/* Stores the results of the warp's rows from `row` on and of keys from `first` on. `seen` is mask_scores'. */
DEVICE void store_probs(const fa_cuda_problem &p, const task_rows &rows, const dropout &drop,
                        const float (&scores)[N][4], const float (&largest)[2], u32 seen, int row, int first) {
    const u32 kept = drop.is_on ? drop.kept_rows_are_queries<N>(row, first) : ~0u;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane() / 4 + 8 * half;
        const float base = largest[half] == -INF ? 0 : largest[half]; /* only scores of -inf, and exp(-inf) is 0 */
        if (i >= p.s_dmask_rows) continue;
#pragma unroll
        for (int n = 0; n < N; n++) {
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int bit = 4 * n + 2 * half + e;
                x[e] = ex2((scores[n][2 * half + e] - base) * LOG2_E);
                if (!(kept >> bit & 1)) x[e] = -x[e];
                if (!(seen >> bit & 1)) x[e] = 0;
            }
            store_pair(p, rows.result + i * p.s_dmask_cols, first + 8 * n + 2 * (lane() % 4), x[0], x[1]);
        }
    }
}

/* Computes the rows of a task. */
DEVICE void write_rows(const fa_cuda_problem &p, shared_memory &shared, const sequence &s, const task_rows &rows) {
    const int warp_row = rows.first + 16 * warp(), last_row = min(rows.first + BLOCK_Q, s.len_q) - 1;
    const int head_kv = rows.head / (p.h / p.h_kv);
    tile_walk keys = {0, 0, 0, 0};
    if (rows.first < s.len_q) keys = keys_of(p, s, rows.first, last_row);
    if (keys.end < keys.begin) keys.end = keys.begin;
    const interval_walk<BLOCK_KV> walk(keys);
    const int num_steps = keys.begin < keys.end ? 2 * walk.num : 0;
    const long long begin = walk.start, end = num_steps ? begin + (long long)walk.num * BLOCK_KV : begin;
    clear_columns(p, rows, 0, min(begin, p.s_dmask_cols));
    clear_columns(p, rows, end, p.s_dmask_cols);

    const auto load_keys = [&](int step) {
        const int l = laneid(), j = walk.first(step % max(walk.num, 1)) + warp() * (BLOCK_KV / WARPS) + l;
        const bool is_wanted = l < BLOCK_KV / WARPS && j >= keys.begin && j < keys.end;
        const element *row = is_wanted ? (const element *)p.k.data + key_offset(p, p.k, s, j, head_kv) : nullptr;
        if (step < num_steps) load_tile<BLOCK_KV>(p, shared.k[step % STAGES], row, p.d);
        cp_async_commit_group();
    };
    if (num_steps > 0) {
        const int i = warp_row + lane();
        const bool is_wanted = lane() < 16 && i < s.len_q;
        load_tile<BLOCK_Q>(p, shared.q,
                           is_wanted ? (const element *)p.q.data + query_offset(p.q, s, i, rows.head) : nullptr, p.d);
        for (int step = 0; step < STAGES; step++) load_keys(step);
    }
    const scorer score(p, s, rows.head);
    const dropout drop(p, s.b_idx, rows.head);
    float largest[2] = {-INF, -INF};
#pragma unroll 1
    for (int step = 0; step < num_steps; step++) {
        const bool is_second = step >= walk.num;
        const int first = walk.first(is_second ? step - walk.num : step);
        float scores[BLOCKS][N][4], unused;
        wait_for_tiles<STAGES - 1>();
        multiply_rows(scores, shared.q + 16 * warp() * PITCH, shared.k[step % STAGES], p.d);
        __syncthreads(); /* all warps have read K */
        load_keys(step + STAGES);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                scores[0][n][e] = score(scores[0][n][e], warp_row + lane() / 4 + e / 2 * 8,
                                        first + 8 * n + 2 * (lane() % 4) + e % 2, unused);
        const u32 seen = mask_scores(p, s, scores[0], warp_row, first);
        if (is_second) {
            store_probs(p, rows, drop, scores[0], largest, seen, warp_row, first);
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < N; n++)
                largest[half] = fmaxf(largest[half], fmaxf(scores[0][n][2 * half], scores[0][n][2 * half + 1]));
            largest[half] = quad_max(largest[half]);
        }
    }
}

/* The last tile of a head comes first, because its rows are the longest rows of a causal mask. */
extern "C" __global__ void __launch_bounds__(THREADS, 2) KERNEL(const fa_cuda_problem p) {
    extern __shared__ __align__(16) char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const long long num_tiles = (p.s_dmask_rows + BLOCK_Q - 1) / BLOCK_Q, num_tasks = num_tiles * p.b * p.h;
    for (long long task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const long long head = task / num_tiles;
        const task_rows rows = {(int)(head % p.h), (int)(num_tiles - 1 - task % num_tiles) * BLOCK_Q,
                                (element *)p.s_dmask + head * p.s_dmask_rows * p.s_dmask_cols};
        write_rows(p, shared, sequence_at(p, (int)(head / p.h)), rows);
        __syncthreads(); /* all warps have read Q and K */
    }
}
