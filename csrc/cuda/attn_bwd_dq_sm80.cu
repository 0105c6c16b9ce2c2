/* This kernel runs after attn_bwd_sm80 and makes dQ of its sums: dQ = scale sums. Rows whose lse is an infinity saw no
 * key, and their dQ is 0. A CTA takes a query tile of one head. A warp takes 16 rows and 32 columns at a time. */
#define F32  0
#define OF_3 0

#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(WARPS)
#error "a row of tiles.def"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_dq_sm80
#endif

#include "attn_bwd_sm80.cuh"
#include "quads.cuh"
#include "score.cuh"

constexpr int NUM_WARPS = 4, PIECES = (HEAD_DIM + 31) / 32; /* pieces of 32 columns */

DEVICE void finish(const params &p, const sequence &s, int head, int first_row) {
    const fa_cuda_problem &a = p.problem;
    const int lane = threadIdx.x % 32;
    const long long slab = slab_at(p, s, head, first_row);
    element::output *dq = (element::output *)a.dq.data + query_offset(a.dq, s, 0, head);
#pragma unroll 1 /* ptxas would keep the addresses of all pieces, and spill some on compute capability 12.0 */
    for (int i = threadIdx.x / 32; i < BLOCK_Q / 16 * PIECES; i += NUM_WARPS) {
        const int block = i / PIECES, piece = i % PIECES, row = first_row + 16 * block;
        float x[16], factor[2];
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[4 * c + e] = 4 * piece + c < HEAD_DIM / 8 ? sums_at(p, slab, block, 4 * piece + c, lane)[32 * e] : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own_row = row + lane / 4 + 8 * half;
            const bool sees = own_row < s.len_q && fabsf(*row_stat(a.lse, s, own_row, head)) != INF;
            factor[half] = a.scale;
            if (!sees)
#pragma unroll
                for (int c = 0; c < 4; c++) x[4 * c + 2 * half] = x[4 * c + 2 * half + 1] = 0;
        }
        store_rows(x, factor, dq + 32 * piece, a.dq.stride_row, row, s.len_q, a.d - 32 * piece);
    }
}

extern "C" __global__ void __launch_bounds__(32 * NUM_WARPS) KERNEL(const params p) {
    const long long num_tasks = (long long)p.problem.b * p.problem.h * p.num_q_tiles;
    for (long long task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int tile = (int)(task % p.num_q_tiles), head = (int)(task / p.num_q_tiles % p.problem.h);
        const sequence s = sequence_at(p.problem, (int)(task / p.num_q_tiles / p.problem.h));
        for (int row = tile * BLOCK_Q; row < s.len_q; row += p.num_q_tiles * BLOCK_Q) finish(p, s, head, row);
    }
}
