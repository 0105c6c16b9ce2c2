/* q, k and v become e4m3, with a descale for every sequence and key head. ../quantization.h has the formulas.
 *
 *   x [b, row, h, d]  ->  out [b, row, h, d] e4m3, descale [b, h_kv]
 *
 * HBM gives each element once. A group is a sequence and key head of one tensor, and consists of pieces. The first pass
 * over a piece counts the piece's maximum into its group. The second pass follows when the group is complete, reads the
 * same rows from the L2, and writes. Tickets order the passes of all pieces of all tensors, with a lag of a group:
 *
 *   first 0, .. first LAG - 1, first LAG, second 0, first LAG + 1, second 1, ..
 *
 * A persistent CTA draws one ticket after the other. A second pass waits only for tickets that were drawn before. So
 * the CTA with the smallest unfinished ticket never waits, and the kernel needs no CTA that is not resident yet.
 *
 * LANES lanes hold a row: lane l has the chunks of 8 columns l, l + LANES, l + 2 LANES, .. So a load of a warp takes
 * whole sectors. The steps of the rotation stay in a thread, but for those between the lanes.
 *
 * Specification: ../cpu/quantize.c. */
#include "ptx_once.cuh"
#include "quantize_params.h"

#if !defined(LANES) || !defined(CHUNKS) || !defined(F32)
#error "a row of tiles.def: LANES, CHUNKS; dtype: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL quantize
#endif

constexpr int THREADS = 256, CTAS = 4, WARPS = THREADS / 32, ROWS_AT_ONCE = THREADS / LANES;
constexpr int WORDS = 8 * element::BYTES / 4; /* of a chunk */

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

/* Rows [begin, end) of a sequence and key head. Sequence b of a packed tensor has the rows of no sequence. */
struct piece {
    int sequence, head, idx, num; /* piece idx of num of the group */
    int first_row, begin, end;    /* first_row: of the sequence, in a packed tensor */
};

/* Returns the number of pieces of one key head before a sequence. */
DEVICE int pieces_before(const fa_quantize_params &p, const fa_quantize_tensor &t, int sequence) {
    if (!t.cu_seqlens) return sequence * max((t.rows + t.piece_rows - 1) / t.piece_rows, 1);
    return (sequence <= p.b ? t.cu_seqlens[sequence] : t.rows) / t.piece_rows + sequence;
}

/* All threads get the same piece. */
DEVICE piece find_piece(const fa_quantize_params &p, const fa_quantize_tensor &t, int idx) {
    int low = 0, high = p.b + (t.cu_seqlens != nullptr); /* the sequence is in [low, high) */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if ((long long)p.h_kv * pieces_before(p, t, middle) <= idx)
            low = middle;
        else
            high = middle;
    }
    const int before = pieces_before(p, t, low), num = pieces_before(p, t, low + 1) - before;
    const int rest = idx - p.h_kv * before, head = rest / num, i = rest % num;
    int first_row = 0, rows = t.rows;
    if (t.cu_seqlens) {
        first_row = t.cu_seqlens[low];
        rows = (low < p.b ? t.cu_seqlens[low + 1] : t.rows) - first_row;
    }
    const int begin = i * t.piece_rows;
    return {low, head, i, num, first_row, begin, min(begin + t.piece_rows, rows)};
}

/* Are the sums what the host could not check? The whole CTA calls this function. */
DEVICE bool has_good_sums(const fa_quantize_params &p, const fa_quantize_tensor &t) {
    bool is_bad = t.cu_seqlens && (t.cu_seqlens[0] != 0 || t.cu_seqlens[p.b] > t.rows);
    for (int i = threadIdx.x; t.cu_seqlens && i < p.b; i += THREADS)
        is_bad = is_bad || t.cu_seqlens[i] > t.cu_seqlens[i + 1];
    return !__syncthreads_or(is_bad);
}

/* ---- a row ------------------------------------------------------------------------------------------------------- */

/* A thread holds CHUNKS chunks of 8 columns of a row. */
DEVICE int column_of(int chunk) { return 8 * ((int)threadIdx.x % LANES + LANES * chunk); }

DEVICE float cvt_f32(u32 word, int i) {
    if constexpr (element::BYTES == 4)
        return __int_as_float((int)word);
    else
        return cvt_f32(element{(u16)(word >> 16 * (i % 2))});
}

/* Loads the thread's chunks as floats: 0 beyond the last column, and if there is no row. */
DEVICE void load_row(const fa_quantize_tensor &t, const element *row, u64 l2_policy, float (&x)[CHUNKS][8]) {
    u32 words[CHUNKS][WORDS] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int column = column_of(c);
        if (!row || column >= t.d) continue;
        if (t.is_aligned) {
#pragma unroll
            for (int w = 0; w < WORDS; w += 4) {
                const uint4 four = ld_global_nc((const char *)(row + column) + 4 * w, l2_policy);
                words[c][w] = four.x, words[c][w + 1] = four.y;
                words[c][w + 2] = four.z, words[c][w + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (column + i >= t.d) continue;
                if constexpr (element::BYTES == 4)
                    words[c][i] = ((const u32 *)row)[column + i];
                else
                    words[c][i / 2] |= (u32)((const u16 *)row)[column + i] << 16 * (i % 2);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < 8; i++) x[c][i] = cvt_f32(words[c][i * WORDS / 8], i);
}

DEVICE bool is_infinite(float x) { return (__float_as_uint(x) & 0x7fffffff) == 0x7f800000; }

/* Does the thread's part of a row hold an infinity? Called for few rows, so the row is read again. */
DEVICE bool holds_infinity(const fa_quantize_tensor &t, const element *row) {
    bool holds = false;
    for (int c = 0; c < CHUNKS; c++)
        for (int i = column_of(c); i < min(column_of(c) + 8, t.d); i++) holds = holds || is_infinite(cvt_f32(row[i]));
    return holds;
}

/* ---- rotation ---------------------------------------------------------------------------------------------------- */

/* Returns the columns of the Hadamard block of a column. The block is the highest bit where the column differs from d,
 * because the column has the earlier blocks' bits. Columns beyond d are alone. */
DEVICE int block_of(int column, int d) { return column < d ? 1 << (31 - __clz(column ^ d)) : 1; }

DEVICE void butterfly(float &a, float &b) {
    const float sum = a + b, difference = a - b;
    a = sum, b = difference;
}

/* 1 / sqrt(n) for a power of two. */
DEVICE float norm_of(int n) {
    const int log2_n = 31 - __clz(n);
    return __int_as_float((127 - log2_n / 2) << 23) * (log2_n % 2 ? 0.70710678f : 1.f);
}

/* The whole warp calls this function. d is a multiple of 8. */
DEVICE void rotate(float (&x)[CHUNKS][8], int d, const u64 (&signs)[4]) {
    int block[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int column = column_of(c);
        const u32 bits = column < 256 ? (u32)(signs[column / 64] >> column % 64) : 0;
        block[c] = block_of(column, d);
#pragma unroll
        for (int i = 0; i < 8; i++) x[c][i] = __int_as_float((int)(__float_as_uint(x[c][i]) ^ (bits >> i & 1) << 31));
#pragma unroll
        for (int step = 1; step < 8; step *= 2)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!(i & step)) butterfly(x[c][i], x[c][i + step]);
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const float sign = threadIdx.x & step ? -1.f : 1.f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float other = __shfl_xor_sync(0xffffffff, x[c][i], step);
                if (block[c] > 8 * step) x[c][i] = fmaf(x[c][i], sign, other); /* the product is exact */
            }
    }
#pragma unroll
    for (int step = 1; step < CHUNKS; step *= 2)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (!(c & step) && block[c] > 8 * LANES * step)
#pragma unroll
                for (int i = 0; i < 8; i++) butterfly(x[c][i], x[c + step][i]);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < 8; i++) x[c][i] *= norm_of(block[c]);
}

/* ---- passes ------------------------------------------------------------------------------------------------------ */

/* Calls body(y, row of x, row of out) for every row and head of a piece. Without a row of x, y is 0 and the row is
 * NULL. */
template <class Body>
DEVICE void for_rows(const fa_quantize_params &p, const fa_quantize_tensor &t, const piece &at, bool is_owned,
                     u64 l2_policy, Body body) {
    const int num = (at.end - at.begin) * t.g;
    for (int first = 0; first < num; first += ROWS_AT_ONCE) {
        const int i = first + (int)threadIdx.x / LANES, row = at.begin + i / t.g, head = at.head * t.g + i % t.g;
        const long long sequence = t.cu_seqlens ? 0 : at.sequence, packed_row = (long long)at.first_row + row;
        const element *x = nullptr;
        unsigned char *out = nullptr;
        if (i < num) {
            if (is_owned)
                x = (const element *)t.x + sequence * t.stride_b + packed_row * t.stride_row + head * t.stride_h;
            out = t.out + ((sequence * t.rows + packed_row) * p.h_kv * t.g + head) * t.d;
        }
        float y[CHUNKS][8];
        load_row(t, x, l2_policy, y);
        if (t.rotates) rotate(y, t.d, p.signs);
        body(y, x, out);
    }
}

/* A group's maximum, as the bits of a float, and its warps that have counted theirs. */
DEVICE u32 *counters_of(const fa_quantize_params &p, int tensor, const piece &at) {
    const int group = p.is_per_tensor ? tensor : (tensor * p.b + at.sequence) * p.h_kv + at.head;
    return p.counters + 1 + 2 * group;
}

/* The first pass. */
DEVICE void measure(const fa_quantize_params &p, int tensor, const piece &at, bool is_owned) {
    const fa_quantize_tensor &t = p.tensors[tensor];
    float most = 0;
    for_rows(p, t, at, is_owned, l2_evict_normal(),
             [&](const float (&y)[CHUNKS][8], const element *x, unsigned char *) {
                 bool is_finite = true;
#pragma unroll
                 for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
                     for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(y[c][i])); /* ignores NaN */
                     is_finite = is_finite && fabsf(y[c][0]) <= 3.402823466e38f;
                 }
                 /* A rotated infinity makes every column of its block infinite or NaN. */
                 if (t.rotates && !is_finite && x && holds_infinity(t, x)) most = __int_as_float(0x7f800000);
             });
    const u32 bits = __reduce_max_sync(0xffffffff, __float_as_uint(most));
    if (threadIdx.x % 32 == 0) {
        u32 *counters = counters_of(p, tensor, at);
        if (bits > *(volatile u32 *)counters) red_max(counters, bits);
        red_add_release(counters + 1, 1);
    }
}

/* Waits until all pieces of the group are measured. Returns its maximum. The whole warp calls this function. */
DEVICE float wait_for_maximum(const fa_quantize_params &p, int tensor, const piece &at) {
    const u32 *counters = counters_of(p, tensor, at);
    const u32 wanted = (u32)WARPS * (p.is_per_tensor ? p.tensors[tensor].num_pieces : at.num);
    u32 bits = 0;
    if (threadIdx.x % 32 == 0) {
        while (ld_acquire(counters + 1) != wanted) __nanosleep(100);
        bits = ld_acquire(counters);
    }
    return __int_as_float((int)__shfl_sync(0xffffffff, bits, 0));
}

/* The second pass. */
DEVICE void write(const fa_quantize_params &p, const fa_quantize_tensor &t, const piece &at, bool is_owned,
                  float factor) {
    const u64 l2_policy = l2_evict_first();
    for_rows(p, t, at, is_owned, l2_policy, [&](const float (&y)[CHUNKS][8], const element *, unsigned char *out) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = column_of(c);
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = cvt_e4m3x2(y[c][2 * i] * factor, y[c][2 * i + 1] * factor);
            if (!out || column >= t.d) continue;
            if (t.d % 8 == 0) {
                st_global(out + column, make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16), l2_policy);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (column + i < t.d) out[column + i] = (unsigned char)(pairs[i / 2] >> 8 * (i % 2));
            }
        }
    });
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* Sums that make no sense name no sequence, so every row counts as a row of no sequence. */
DEVICE piece unowned_piece(const fa_quantize_params &p, const fa_quantize_tensor &t, int idx) {
    const int num = t.num_pieces / p.h_kv, begin = idx % num * t.piece_rows;
    return {p.b, idx / num, idx % num, num, 0, begin, min(begin + t.piece_rows, t.rows)};
}

DEVICE void do_piece(const fa_quantize_params &p, int idx, bool is_second, u32 bad_tensors) {
    int tensor = 0;
    while (idx >= p.tensors[tensor].num_pieces) idx -= p.tensors[tensor++].num_pieces;
    const fa_quantize_tensor &t = p.tensors[tensor];
    const bool is_bad = bad_tensors >> tensor & 1;
    const piece at = is_bad ? unowned_piece(p, t, idx) : find_piece(p, t, idx);
    const bool is_owned = at.sequence < p.b, has_descale = is_owned || (p.is_per_tensor && !is_bad);
    if (!is_second) {
        if (has_descale) measure(p, tensor, at, is_owned);
        return;
    }
    float factor = 0;
    if (has_descale) {
        const float most = wait_for_maximum(p, tensor, at);
        const float descale = most == 0 ? 1 : fmaxf(__fdiv_rn(most, 448.f), 1.17549435e-38f);
        factor = __fdiv_rn(1.f, descale);
        if (threadIdx.x == 0 && at.idx == 0) t.descale[p.is_per_tensor ? 0 : at.sequence * p.h_kv + at.head] = descale;
    }
    write(p, t, at, is_owned, factor);
}

/* Returns a bit for each tensor whose sums are not what the host could not check. Their descales become NaN. */
DEVICE u32 find_bad_tensors(const fa_quantize_params &p) {
    u32 bad = 0;
#pragma unroll
    for (int tensor = 0; tensor < 3; tensor++) {
        const fa_quantize_tensor &t = p.tensors[tensor];
        if (!t.cu_seqlens || has_good_sums(p, t)) continue;
        bad |= 1u << tensor;
        const int num = p.is_per_tensor ? 1 : p.b * p.h_kv;
        for (int i = threadIdx.x; blockIdx.x == 0 && i < num; i += THREADS) t.descale[i] = __int_as_float(0x7fc00000);
    }
    return bad;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const __grid_constant__ fa_quantize_params p) {
    __shared__ u32 shared_ticket;
    const u32 bad_tensors = find_bad_tensors(p);
    u32 next = 0;
    if (threadIdx.x == 0) next = atom_add(p.counters, 1);
    const u32 num = p.num_pieces, lag = p.lag;
    while (true) {
        if (threadIdx.x == 0) shared_ticket = next;
        __syncthreads();
        const u32 ticket = shared_ticket;
        __syncthreads();
        if (ticket >= 2 * num) break;
        if (threadIdx.x == 0) next = atom_add(p.counters, 1); /* needed only when this ticket is done */
        if (ticket < lag)
            do_piece(p, ticket, false, bad_tensors);
        else if (ticket >= 2 * num - lag)
            do_piece(p, ticket - num, true, bad_tensors);
        else
            do_piece(p, (ticket - lag) / 2 + ((ticket - lag) % 2 ? 0 : lag), (ticket - lag) % 2, bad_tensors);
    }
}
