/* This kernel runs before attn_bwd_sm90 and attn_bwd_wide_sm90, whose products need two numbers of each query row. The
 * kernel also writes zeros to dQ where a query tile sees no key.
 *
 *   D = rowsum(dO O) - dlse    lse in powers of 2
 *
 * The lse of a row is +inf, hence P = 0, and D is 0, in two cases:
 *   - The row sees no key, or all its scores are -inf. Up to 128 columns slabs with such rows are marked in `turns`.
 *     A sink gives a finite lse to such a row, so the window is asked, too.
 *   - The row lies beyond the sequence.
 *
 * One CTA serves one slab. LANES lanes read a row of HEAD_DIM columns, 16 bytes each. Memory binds: the kernel reads O
 * and dO. */
#if !defined(HEAD_DIM) || !defined(D_V) || !defined(BLOCK_Q) || !defined(BLOCK_KV) || !defined(BF16) || !defined(VARLEN)
#error \
    "HEAD_DIM columns, D_V of V and dO, BLOCK_Q rows of a slab, BLOCK_KV keys of a tile, BF16 or fp16, VARLEN: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_prep
#endif

#include "attn_bwd_params.h"
#include "ptx_sm90.cuh"
#include "attn_bwd_slabs.cuh"
#include "dot.cuh"
#include "score.cuh"

constexpr int THREADS = 256, LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32, ROWS = THREADS / LANES;

/* A slab without rows: none sees a key, and turns begin. NOTE: between sums that fall, this kernel and the backward may
 * disagree on where a slab lies. The backward would wait forever for a turn in old memory. */
DEVICE void forget(const fa_attn_bwd_params &p, int slab) {
    float *stats = p.stats + (long long)slab * (2 * BLOCK_Q);
    for (int i = threadIdx.x; i < 2 * BLOCK_Q; i += THREADS) stats[i] = i < BLOCK_Q ? INF : 0;
    if (threadIdx.x < 2) p.turns[2 * (long long)slab + threadIdx.x] = 0;
}

/* Rows of softmax_d that only round up its size become zero. The slabs of a head share them. */
DEVICE void clear_rows_behind(const fa_attn_bwd_params &p, const slab_rows &t, int slab) {
    const int own = VARLEN ? clamp(p.cu_seqlens_q[p.b], 0, p.len_q) : p.len_q;
    const long long first = own + slab % p.num_slabs * (long long)THREADS, step = p.num_slabs * (long long)THREADS;
    float *d = p.softmax_d.data + t.b_idx * p.softmax_d.stride_b + t.head * p.softmax_d.stride_h;
    for (long long i = first + threadIdx.x; i < p.softmax_d_rows; i += step) d[i] = 0;
}

/* Does a block mask hide all keys from the rows of the slab? */
DEVICE bool is_unlisted(const fa_attn_bwd_params &p, const slab_rows &t) {
    if (!p.ranks) return false;
    const long long mask = (long long)(t.b_idx % p.mask_b) * p.mask_h + t.head % p.mask_h;
    const int q_tile = t.row / BLOCK_Q, q_tiles = ceil_div(p.len_q, BLOCK_Q);
    return p.ranks[(mask * q_tiles + q_tile + 1) * (p.num_kv_tiles + 1) - 1] == 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ fa_attn_bwd_params p) {
    const int slab = blockIdx.x, lane = threadIdx.x % LANES, column = 8 * lane;
    griddepcontrol_wait(); /* for earlier work of the stream */
    const slab_rows t = slab_at(p, slab);
    griddepcontrol_launch_dependents();
    if (slab == 0 && threadIdx.x == 0) *p.tile_counter = 0;
    if (slab == 0)
        for (int i = threadIdx.x; i < 8 * p.num_cut; i += THREADS) p.kv_turns[i] = 0;
    clear_rows_behind(p, t, slab);
    if (t.rows <= 0) {
        forget(p, slab);
        return;
    }

    const element::output *o = (const element::output *)p.o.data + t.b_idx * p.o.stride_b + t.head * p.o.stride_h;
    const element::output *dout =
        (const element::output *)p.dout_rows.data + t.b_idx * p.dout_rows.stride_b + t.head * p.dout_rows.stride_h;
    uint4 x[BLOCK_Q / ROWS], y[BLOCK_Q / ROWS];
#pragma unroll
    for (int i = 0; i < BLOCK_Q / ROWS; i++) {
        const int row = i * ROWS + threadIdx.x / LANES;
        const long long at = t.begin + t.row + row;
        x[i] = y[i] = make_uint4(0, 0, 0, 0);
        if (row < t.rows && column < p.d_v) {
            x[i] = *(const uint4 *)(o + at * p.o.stride_row + column);
            y[i] = *(const uint4 *)(dout + at * p.dout_rows.stride_row + column);
        }
    }

    const int len_q = VARLEN ? span_at(p.cu_seqlens_q, t.b_idx, p.len_q).len : p.len_q;
    const int len_kv = VARLEN ? span_at(p.cu_seqlens_k, t.b_idx, p.len_kv).len : p.len_kv;
    if (p.dq.data) {
        const interval seen = key_tiles_of(p, len_q, len_kv, t.row / BLOCK_Q);
        if (seen.begin == seen.end || is_unlisted(p, t)) {
            element::output *dq = (element::output *)p.dq.data + t.b_idx * p.dq.stride_b + t.head * p.dq.stride_h;
            for (int row = threadIdx.x / LANES; row < t.rows && column < p.d; row += ROWS)
                *(uint4 *)(dq + (long long)(t.begin + t.row + row) * p.dq.stride_row + column) = make_uint4(0, 0, 0, 0);
        }
    }

    float *stats = p.stats + (long long)slab * (2 * BLOCK_Q);
    bool is_blind = false; /* some row of this thread sees no key, or only scores of -inf */
#pragma unroll
    for (int i = 0; i < BLOCK_Q / ROWS; i++) {
        const int row = i * ROWS + threadIdx.x / LANES;
        float sum = add_dot<element::output>(0, x[i], y[i]);
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane != 0) continue;
        float lse = INF;
        if (row < t.rows) {
            lse = p.lse.data[t.b_idx * p.lse.stride_b + t.head * p.lse.stride_h + t.begin + t.row + row];
            const interval seen = keys_of_rows(p, len_q, len_kv, t.row + row, t.row + row);
            const bool sees = lse != INF && lse != -INF && seen.begin < seen.end;
            if (!sees) sum = 0, lse = INF, is_blind = true;
            if (sees && p.dlse.data)
                sum -= p.dlse.data[t.b_idx * p.dlse.stride_b + t.head * p.dlse.stride_h + t.begin + t.row + row];
            p.softmax_d.data[t.b_idx * p.softmax_d.stride_b + t.head * p.softmax_d.stride_h + t.begin + t.row + row] =
                sum;
        } else {
            sum = 0;
        }
        const int place = row / 16 * 16 + stat_place(row % 16);
        stats[place] = lse * LOG2_E;
        stats[BLOCK_Q + place] = sum;
    }
    is_blind = __syncthreads_or(is_blind);
    if (threadIdx.x < 2) p.turns[2 * (long long)slab + threadIdx.x] = !WIDE && threadIdx.x == 1 && is_blind;
}
