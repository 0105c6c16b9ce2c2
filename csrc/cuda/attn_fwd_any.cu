/* Attention forward on every GPU from compute capability 8.0 on, for every problem:
 *
 *   O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row
 *
 *   q [b, len_q, h, d]    k, v [b, len_kv, h_kv, d], packed or paged    o like q    lse [b, h, len_q] float
 *
 * One CTA takes BLOCK_Q rows of one head, 16 a warp, and walks over the keys that they see. Q, one tile of K and one of V
 * lie in shared memory; V arrives while S is computed, the next K during softmax and P V:
 *
 *   load Q, K | wait | load V | S = Q K^T | wait | load next K | softmax | O += P V | wait | ..
 *
 * Masked pairs are left out, never multiplied by zero: a tile of V that holds NaN or inf and that some row sees only in
 * part goes through FMAs that skip them. This is the kernel for what others do not serve: correct first.
 *
 * Specification: ../cpu/reference.c. */
#include "cuda_problem.h"

#if !defined(HEAD_DIM) || !defined(BLOCK_KV) || !defined(WARPS)
#error "a row of tiles.def: HEAD_DIM columns, BLOCK_KV keys, WARPS of 16 query rows"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_any
#endif

#include "tile_any.cuh"

constexpr int BLOCK_Q = 16 * WARPS, N = BLOCK_KV / 8;

static_assert(HEAD_DIM % 16 == 0 && BLOCK_KV % 16 == 0, "mma.m16n8k16 contracts 16 at a time");
static_assert(BLOCK_KV == 16 || BLOCK_KV % 32 == 0, "a dropout patch has 32 keys");
static_assert(BLOCK_KV <= 64, "32 bits say which scores of a thread dropout keeps");

struct shared_memory {
    element q[BLOCK_Q * PITCH], k[BLOCK_KV * PITCH], v[BLOCK_KV * PITCH];
};
static_assert(sizeof(shared_memory) <= 99 * 1024, "compute capabilities 8.6, 8.9 and 12.0 give a CTA 99 KiB");

/* One of the two rows of a thread: what it sees, its largest score so far, the sum of its exponentials. */
struct row_state {
    int first, end; /* visible keys */
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

/* S becomes P = 2^(factor S - base), base = factor max, and O follows the maximum. base is rounded: the same for all of a
 * row, so it cancels in the quotient; lse adds what was rounded away. fmaxf passes over NaN: it comes out through the sum. */
DEVICE void softmax_step(float (&s)[N][4], float (&o)[COLUMNS][4], row_state (&rows)[2], float factor) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        row_state &row = rows[half];
        float largest = row.max;
#pragma unroll
        for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        largest = quad_max(largest);
        const float base = largest == -INF ? 0 : largest * factor;    /* nothing seen yet, or only scores of -inf */
        const float rescale = ex2(__fmul_rn(row.max, factor) - base); /* rounded as base was, not fused */
        row.max = largest;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) sum += s[n][2 * half + e] = ex2(fmaf(s[n][2 * half + e], factor, -base));
        row.sum = row.sum * rescale + sum;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[c][2 * half] *= rescale, o[c][2 * half + 1] *= rescale;
    }
}

/* Rows [first_row, first_row + BLOCK_Q) of one head of one sequence. */
DEVICE void attend(const fa_cuda_problem &p, shared_memory &shared, const sequence &s, int head, int first_row) {
    const int head_kv = head / (p.h / p.h_kv), last_row = min(first_row + BLOCK_Q, s.len_q) - 1;
    const int warp_row = first_row + 16 * warp();
    const scorer score(p, s, head);
    const dropout drop(p, s.b_idx, head);
    const float unit = score.is_plain ? score.scale : 1; /* plain scores are scaled with the exponent */
    const int begin = first_key(p, s, first_row), end = end_key(p, s, last_row);             /* some row sees */
    const int whole_begin = first_key(p, s, last_row), whole_end = end_key(p, s, first_row); /* every row sees */
    row_state rows[2];
    float o[COLUMNS][4], scores[N][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = warp_row + lane() / 4 + 8 * half;
        rows[half] = {first_key(p, s, i), i < s.len_q ? end_key(p, s, i) : 0, -INF, 0};
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0;

    const auto key_row = [&](const fa_cuda_view &kv, int first) {
        return [&p, &s, &kv, first, begin, end, head_kv](int r) {
            const int j = first + r;
            return j >= begin && j < end ? key_offset(p, kv, s, j, head_kv) : -1ll;
        };
    };
    const int start = begin / BLOCK_KV * BLOCK_KV;
    if (start < end) {
        load_tile<BLOCK_Q>(shared.q, p.q.data, p, [&](int r) {
            return first_row + r < s.len_q ? query_offset(p.q, s, first_row + r, head) : -1ll;
        });
        load_tile<BLOCK_KV>(shared.k, p.k.data, p, key_row(p.k, start));
    }
#pragma unroll 1
    for (int first = start; first < end; first += BLOCK_KV) {
        wait_for_tiles(); /* K is there, and everyone has read the last V */
        load_tile<BLOCK_KV>(shared.v, p.v.data, p, key_row(p.v, first));
        multiply_rows(scores, shared.q + 16 * warp() * PITCH, shared.k);
        wait_for_tiles(); /* V is there, and everyone has read K */
        if (first + BLOCK_KV < end) load_tile<BLOCK_KV>(shared.k, p.k.data, p, key_row(p.k, first + BLOCK_KV));

        const bool is_whole = first >= whole_begin && first + BLOCK_KV <= whole_end;
        u32 seen = 0;
        if (!score.is_plain) {
            float unused;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    scores[n][e] = score(scores[n][e], warp_row + lane() / 4 + e / 2 * 8,
                                         first + 8 * n + 2 * (lane() % 4) + e % 2, unused);
        }
        if (!is_whole) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int j = first + 8 * n + 2 * (lane() % 4) + e % 2;
                    const bool sees = j >= rows[e / 2].first && j < rows[e / 2].end;
                    seen |= (u32)sees << (4 * n + e);
                    if (!sees) scores[n][e] = -INF;
                }
        }
        softmax_step(scores, o, rows, unit * LOG2_E);
        if (drop.is_on) { /* after the sum: dropout comes after the normalisation */
            const u32 kept = drop.kept_rows_are_queries<N>(warp_row, first);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!(kept >> (4 * n + e) & 1)) scores[n][e] = 0;
        }
        if (!is_whole && has_nan_or_inf<BLOCK_KV>(shared.v))
            accumulate_exactly(o, scores, shared.v, seen);
        else
            accumulate(o, scores, shared.v);
    }

    element *o_rows[2];
    float factor[2];
    bool is_empty[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = warp_row + lane() / 4 + 8 * half;
        const float sum = quad_sum(rows[half].sum);
        is_empty[half] = rows[half].first >= rows[half].end;
        factor[half] = p.keep_scale / sum;
        o_rows[half] = i < s.len_q ? (element *)p.o.data + query_offset(p.o, s, i, head) : nullptr;
        /* a sum of zero: every score is -inf */
        const float max = rows[half].max, rest = fmaf(max, unit * LOG2_E, -__fmul_rn(max, unit * LOG2_E));
        const float lse = sum == 0 ? sum / sum : max * unit + (lg2(sum) - rest) * LN_2;
        if (i < s.len_q && lane() % 4 == 0) *row_stat(p.lse, s, i, head) = is_empty[half] ? INF : lse;
    }
    store_rows(p, o, o_rows, factor, is_empty);
}

/* Packed rows behind the last sequence belong to nobody: lse -inf, and o zero where that was asked for. */
DEVICE void fill_unowned_rows(const fa_cuda_problem &p, int head, int first, int step) {
    for (int row = first; row < p.total_q; row += step) {
        if (threadIdx.x == 0) p.lse.data[head * p.lse.stride_h + row] = -INF;
        element *o = (element *)p.o.data + row * p.o.stride_row + head * p.o.stride_h;
        for (int i = threadIdx.x; i < p.d && p.zero_tensors; i += blockDim.x) o[i] = (element)0;
    }
}

/* Tasks: the tiles of every head of every sequence, the longest rows of a causal mask first; for packed ones also the rows
 * that no sequence has. A sequence longer than max_seqlen takes several turns. */
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) KERNEL(const fa_cuda_problem p) {
    extern __shared__ __align__(16) char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const bool is_packed = p.cu_seqlens_q != nullptr;
    const long long num_tasks = (long long)(p.b + is_packed) * p.h * p.num_tiles;
    for (long long task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int tile = p.num_tiles - 1 - (int)(task % p.num_tiles);
        const int head = (int)(task / p.num_tiles % p.h), b_idx = (int)(task / p.num_tiles / p.h);
        if (b_idx == p.b) {
            fill_unowned_rows(p, head, clamp(p.cu_seqlens_q[p.b], 0, p.total_q) + tile, p.num_tiles);
            continue;
        }
        const sequence s = sequence_at(p, b_idx);
        for (int row = tile * BLOCK_Q; row < s.len_q; row += p.num_tiles * BLOCK_Q) {
            attend(p, shared, s, head, row);
            __syncthreads(); /* everyone has read Q, K and V */
        }
    }
}
