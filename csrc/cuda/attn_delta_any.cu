/* The first step of the backward computes softmax_d:  delta_i = dO_i . O_i - dlse_i
 *
 * dlse is the gradient of lse in programmable attention, and otherwise 0.
 * delta_i is zero for a row that saw no key. Rows that only round up the size of softmax_d become zero. One warp
 * takes one row.
 *
 * Specification: ../cpu/reference.c. */
#include "cuda_problem.h"
#include "cuda_flex.h"
#include "ptx_sm80.cuh"
#include "sequence.cuh"

#ifndef F32
#error "dtype: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL attn_delta_any
#endif

#ifndef FLEX
#error "programmable attention: 0 or 1"
#endif

constexpr int ROWS = 4; /* rows of a CTA */

#if FLEX
struct problem : fa_cuda_problem {
    fa_cuda_flex flex;
};
#else
typedef fa_cuda_problem problem;
#endif

DEVICE float delta_at(const problem &p, const sequence &s, int i, int head) {
    const float lse = *row_stat(p.lse, s, i, head);
    if (first_key(p, s, i) >= end_key(p, s, i) || fabsf(lse) == __int_as_float(0x7f800000)) return 0;
    const element::output *o = (const element::output *)p.o.data + query_offset(p.o, s, i, head);
    const element *dout = (const element *)p.dout.data + query_offset(p.dout, s, i, head);
    float sum = 0;
    for (int c = threadIdx.x % 32; c < (OF_3 ? p.d_v : p.d); c += 32) sum += cvt_f32(o[c]) * cvt_f32(dout[c]);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
#if FLEX
    if (p.flex.dlse.data) sum -= *row_stat(p.flex.dlse, s, i, head);
#endif
    return sum;
}

/* A task is ROWS rows of one head of one sequence. Further tasks clear the rows behind the last sequence. For dense
 * queries the tasks of each sequence also clear the rows behind the sequence. */
extern "C" __global__ void __launch_bounds__(32 * ROWS) KERNEL(const problem p) {
    const bool is_packed = p.cu_seqlens_q != nullptr, is_first_lane = threadIdx.x % 32 == 0;
    const long long num_tasks = (long long)(p.b + is_packed) * p.h * p.num_tiles;
    for (long long task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int head = (int)(task / p.num_tiles % p.h), b_idx = (int)(task / p.num_tiles / p.h);
        const int first = (int)(task % p.num_tiles) * ROWS + threadIdx.x / 32, step = p.num_tiles * ROWS;
        if (b_idx == p.b) {
            const int owned = clamp(p.cu_seqlens_q[p.b], 0, p.total_q);
            for (int row = owned + first; row < p.softmax_d_rows; row += step)
                if (is_first_lane) p.softmax_d.data[head * p.softmax_d.stride_h + row] = 0;
            continue;
        }
        const sequence s = sequence_at(p, b_idx);
        for (int i = first; i < (is_packed ? s.len_q : p.softmax_d_rows); i += step) {
            const float delta = i < s.len_q ? delta_at(p, s, i, head) : 0;
            if (is_first_lane) *row_stat(p.softmax_d, s, i, head) = delta;
        }
    }
}
