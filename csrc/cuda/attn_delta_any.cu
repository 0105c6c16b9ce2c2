/* The first step of the backward computes softmax_d:  delta_i = dO_i . O_i - dlse_i
 *
 * dlse is the gradient of lse in programmable attention, and otherwise 0.
 * delta_i is zero for a row that saw no key. Rows that only round up the size of softmax_d become zero. LANES lanes
 * take one row, and read 16 bytes each where the rows consist of such pieces.
 *
 * Specification: ../cpu/reference.c. */
#include "cuda_problem.h"
#include "cuda_flex.h"
#include "ptx_sm80.cuh"
#include "dot.cuh"
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

constexpr int LANES = 8, ROWS = 16; /* of a row; of a CTA */

#if FLEX
struct problem : fa_cuda_problem {
    fa_cuda_flex flex;
};
#else
typedef fa_cuda_problem problem;
#endif

/* Returns sum + a . b of 16 bytes. */
DEVICE float add_piece(float sum, const uint4 &a, const uint4 &b) {
    if constexpr (element::BYTES == 4) {
        const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fmaf(__uint_as_float(x[i]), __uint_as_float(y[i]), sum);
        return sum;
    } else {
        return add_dot<element>(sum, a, b);
    }
}

/* All lanes call this function, and the LANES lanes of a row get its delta. is_wanted: the row exists and saw a key. */
DEVICE float delta_at(const problem &p, const sequence &s, int i, int head, bool is_wanted) {
    constexpr int PIECE = 16 / element::BYTES;
    const element::output *o = (const element::output *)p.o.data + query_offset(p.o, s, i, head);
    const element *dout = (const element *)p.dout.data + query_offset(p.dout, s, i, head);
    const int own_lane = threadIdx.x % LANES, columns = is_wanted ? (OF_3 ? p.d_v : p.d) : 0;
    float sum = 0;
    if (p.piece_bytes == 16) {
        for (int c = own_lane * PIECE; c < columns; c += LANES * PIECE)
            sum = add_piece(sum, *(const uint4 *)(o + c), *(const uint4 *)(dout + c));
    } else {
        for (int c = own_lane; c < columns; c += LANES) sum += cvt_f32(o[c]) * cvt_f32(dout[c]);
    }
    for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
#if FLEX
    if (is_wanted && p.flex.dlse.data) sum -= *row_stat(p.flex.dlse, s, i, head);
#endif
    return sum;
}

DEVICE bool saw_a_key(const problem &p, const sequence &s, int i, int head) {
    return first_key(p, s, i) < end_key(p, s, i) && fabsf(*row_stat(p.lse, s, i, head)) != __int_as_float(0x7f800000);
}

/* A task is ROWS rows of one head of one sequence. Further tasks clear the rows behind the last sequence. For dense
 * queries the tasks of each sequence also clear the rows behind the sequence. */
extern "C" __global__ void __launch_bounds__(LANES *ROWS) KERNEL(const problem p) {
    const bool is_packed = p.cu_seqlens_q != nullptr, is_first_lane = threadIdx.x % LANES == 0;
    const long long num_tasks = (long long)(p.b + is_packed) * p.h * p.num_tiles;
    for (long long task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int head = (int)(task / p.num_tiles % p.h), b_idx = (int)(task / p.num_tiles / p.h);
        const int first = (int)(task % p.num_tiles) * ROWS, step = p.num_tiles * ROWS, own = threadIdx.x / LANES;
        if (b_idx == p.b) {
            const int owned = clamp(p.cu_seqlens_q[p.b], 0, p.total_q);
            for (int row = owned + first + own; row < p.softmax_d_rows; row += step)
                if (is_first_lane) p.softmax_d.data[head * p.softmax_d.stride_h + row] = 0;
            continue;
        }
        const sequence s = sequence_at(p, b_idx);
        const int num_rows = is_packed ? s.len_q : p.softmax_d_rows;
        for (int row = first; row < num_rows; row += step) {
            const int i = row + own;
            const float delta = delta_at(p, s, i, head, i < s.len_q && saw_a_key(p, s, i, head));
            if (is_first_lane && i < num_rows) *row_stat(p.softmax_d, s, i, head) = delta;
        }
    }
}
