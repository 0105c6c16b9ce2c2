/* q, k and v become e4m3, with a descale for every sequence and key head. ../quantization.h has the formulas.
 *
 *   x [b, row, h, d]  ->  out [b, row, h, d] e4m3, descale [b, h_kv]
 *
 * HBM gives each element once. A group is a sequence and key head of one tensor, and consists of pieces. The first pass
 * over a piece counts the piece's maximum into its group. The second pass follows when the group is complete, reads the
 * same rows from the L2, and writes. Tickets order the passes of all pieces of all tensors, with a lag:
 *
 *   first 0, .. first LAG - 1, first LAG, second 0, first LAG + 1, second 1, ..
 *
 * A persistent CTA draws one ticket after the other. A second pass waits only for tickets that were drawn before. So
 * the CTA with the smallest unfinished ticket never waits, and the kernel needs no CTA that is not resident yet. A CTA
 * draws its next ticket early. So LAG is a group and a piece for each CTA, or CTAs would wait in chains.
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

constexpr int THREADS = 256, CTAS = 2, ROWS_AT_ONCE = THREADS / LANES;
constexpr int UNROLL = 2;                     /* rows whose loads a thread has on their way */
constexpr int WORDS = 8 * element::BYTES / 4; /* of a chunk */

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

/* Rows [begin, end) of a sequence and key head. Sequence b of a packed tensor has the rows of no sequence. */
struct piece {
    int sequence, head, idx, num; /* piece idx of num of the group */
    int first_row, begin, end;    /* first_row: of the sequence, in a packed tensor */
};

/* Returns the number of pieces of one key head before a sequence of a packed tensor. */
DEVICE int pieces_before(const fa_quantize_params &p, const fa_quantize_tensor &t, int sequence) {
    return ((sequence <= p.b ? t.cu_seqlens[sequence] : t.rows) >> t.log2_rows) + sequence;
}

/* All threads get the same piece. */
DEVICE piece find_piece(const fa_quantize_params &p, const fa_quantize_tensor &t, int idx) {
    piece at = {};
    int rest = idx, rows = t.rows;
    if (!t.cu_seqlens) {
        at.num = t.pieces_of_head;
        at.sequence = idx / (p.h_kv * at.num);
        rest -= at.sequence * p.h_kv * at.num;
    } else {
        int low = 0, high = p.b + 1; /* the sequence is in [low, high) */
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if ((long long)p.h_kv * pieces_before(p, t, middle) <= idx)
                low = middle;
            else
                high = middle;
        }
        const int before = pieces_before(p, t, low);
        at.sequence = low;
        at.num = pieces_before(p, t, low + 1) - before;
        at.first_row = t.cu_seqlens[low];
        rows = (low < p.b ? t.cu_seqlens[low + 1] : t.rows) - at.first_row;
        rest -= p.h_kv * before;
    }
    at.head = rest / at.num;
    at.idx = rest - at.head * at.num;
    at.begin = at.idx << t.log2_rows;
    at.end = min(at.begin + (1 << t.log2_rows), rows);
    return at;
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

/* Returns element i of a chunk. `word` is the 32-bit word that holds the element. */
template <class T> DEVICE float cvt_f32(u32 word, int i) {
    if constexpr (T::BYTES == 4)
        return __int_as_float((int)word);
    else
        return cvt_f32(T{(u16)(word >> 16 * (i % 2))});
}

/* Loads the thread's chunks: 0 beyond the last column, and if there is no row. */
DEVICE void load_row(const fa_quantize_tensor &t, const element *row, u64 l2_policy, u32 (&words)[CHUNKS][WORDS]) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int column = column_of(c);
#pragma unroll
        for (int w = 0; w < WORDS; w++) words[c][w] = 0;
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

/* Where a row of x and its row of out lie. NULL: there is none. */
struct row_place {
    const element *x;
    unsigned char *out;
};

/* Returns the place of row and head i of a piece. */
DEVICE row_place place_of(const fa_quantize_params &p, const fa_quantize_tensor &t, const piece &at, bool is_owned,
                          int i) {
    if (i >= (at.end - at.begin) * t.g) return {nullptr, nullptr};
    const int row = t.g == 1 ? i : i / t.g, head = at.head * t.g + i - row * t.g;
    const long long sequence = t.cu_seqlens ? 0 : at.sequence, packed_row = (long long)at.first_row + at.begin + row;
    const element *x = (const element *)t.x + sequence * t.stride_b + packed_row * t.stride_row + head * t.stride_h;
    return {is_owned ? x : nullptr, t.out + ((sequence * t.rows + packed_row) * p.h_kv * t.g + head) * t.d};
}

/* Calls body(y, place) for every row and head of a piece. Without a row of x, y is 0. The whole CTA calls this. */
template <class Body>
DEVICE void for_rows(const fa_quantize_params &p, const fa_quantize_tensor &t, const piece &at, bool is_owned,
                     u64 l2_policy, Body body) {
    const int num = (at.end - at.begin) * t.g;
    for (int first = threadIdx.x / LANES; first - (int)threadIdx.x / LANES < num; first += UNROLL * ROWS_AT_ONCE) {
        u32 words[UNROLL][CHUNKS][WORDS];
        row_place places[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            places[u] = place_of(p, t, at, is_owned, first + u * ROWS_AT_ONCE);
            load_row(t, places[u].x, l2_policy, words[u]);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float y[CHUNKS][8];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int i = 0; i < 8; i++) y[c][i] = cvt_f32<element>(words[u][c][i * WORDS / 8], i);
            if (t.rotates) rotate(y, t.d, p.signs);
            body(y, places[u]);
        }
    }
}

/* The first pass. Returns the maximum of the warp's rows, as the bits of a float. */
DEVICE u32 measure(const fa_quantize_params &p, const fa_quantize_tensor &t, const piece &at, bool is_owned) {
    float most = 0;
    for_rows(p, t, at, is_owned, l2_evict_normal(), [&](const float (&y)[CHUNKS][8], const row_place &place) {
        bool is_finite = true;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(y[c][i])); /* ignores NaN */
            is_finite = is_finite && fabsf(y[c][0]) <= 3.402823466e38f;
        }
        /* A rotated infinity makes every column of its block infinite or NaN. */
        if (t.rotates && !is_finite && place.x && holds_infinity(t, place.x)) most = __int_as_float(0x7f800000);
    });
    return __reduce_max_sync(0xffffffff, __float_as_uint(most));
}

/* The second pass. */
DEVICE void write(const fa_quantize_params &p, const fa_quantize_tensor &t, const piece &at, bool is_owned,
                  float factor) {
    const u64 l2_policy = l2_evict_first();
    for_rows(p, t, at, is_owned, l2_policy, [&](const float (&y)[CHUNKS][8], const row_place &place) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = column_of(c);
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) /* a rotated 0 may be -0 */
                pairs[i] = place.x ? cvt_e4m3x2(y[c][2 * i] * factor, y[c][2 * i + 1] * factor) : 0;
            if (!place.out || column >= t.d) continue;
            unsigned char *out = place.out + column;
            if (t.d % 8 == 0) {
                st_global(out, make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16), l2_policy);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (column + i < t.d) out[i] = (unsigned char)(pairs[i / 2] >> 8 * (i % 2));
            }
        }
    });
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

/* A group's maximum, as the bits of a float, and its measured pieces. */
DEVICE u32 *counters_of(const fa_quantize_params &p, int tensor, const piece &at) {
    const int group = p.is_per_tensor ? tensor : (tensor * p.b + at.sequence) * p.h_kv + at.head;
    return p.counters + 2 + 2 * group;
}

/* One thread: counts a piece into its group. */
DEVICE void count_piece(u32 *counters, u32 most) {
    if (most > *(volatile u32 *)counters) red_max(counters, most);
    red_add_release(counters + 1, 1);
}

/* One thread: waits until the group's pieces are measured, and returns the group's maximum. */
DEVICE float wait_for_maximum(const u32 *counters, u32 num_pieces) {
    while (ld_acquire(counters + 1) != num_pieces) __nanosleep(200);
    return __int_as_float((int)*(const volatile u32 *)counters);
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* Sums that make no sense name no sequence, so every row counts as a row of no sequence. */
DEVICE piece unowned_piece(const fa_quantize_params &p, const fa_quantize_tensor &t, int idx) {
    const int num = t.num_pieces / p.h_kv, begin = idx % num << t.log2_rows;
    return {p.b, idx / num, idx % num, num, 0, begin, min(begin + (1 << t.log2_rows), t.rows)};
}

/* What the threads of a CTA share. */
struct shared {
    u32 ticket;
    u32 most;      /* of the piece that is measured */
    float descale; /* of the piece that is written */
};

DEVICE void do_piece(const fa_quantize_params &p, int idx, bool is_second, u32 bad_tensors, shared *smem) {
    int tensor = 0;
    while (idx >= p.tensors[tensor].num_pieces) idx -= p.tensors[tensor++].num_pieces;
    const fa_quantize_tensor &t = p.tensors[tensor];
    const bool is_bad = bad_tensors >> tensor & 1;
    const piece at = is_bad ? unowned_piece(p, t, idx) : find_piece(p, t, idx);
    const bool is_owned = at.sequence < p.b, has_descale = is_owned || (p.is_per_tensor && !is_bad);
    u32 *counters = has_descale ? counters_of(p, tensor, at) : nullptr;
    if (!is_second) {
        if (!has_descale) return;
        const u32 most = measure(p, t, at, is_owned);
        if (threadIdx.x % 32 == 0) atomicMax(&smem->most, most);
        __syncthreads();
        if (threadIdx.x == 0) count_piece(counters, smem->most);
        return;
    }
    float factor = 0;
    if (has_descale) {
        if (threadIdx.x == 0) {
            const float most = wait_for_maximum(counters, p.is_per_tensor ? t.num_pieces : at.num);
            smem->descale = most == 0 ? 1 : fmaxf(__fdiv_rn(most, 448.f), 1.17549435e-38f);
            if (at.idx == 0) t.descale[p.is_per_tensor ? 0 : at.sequence * p.h_kv + at.head] = smem->descale;
        }
        __syncthreads();
        factor = __fdiv_rn(1.f, smem->descale);
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
    extern __shared__ __align__(16) char memory[];
    shared &smem = *(shared *)memory;
    const u32 bad_tensors = find_bad_tensors(p);
    const u32 num = p.num_pieces, lag = p.lag;
    u32 next = 0;
    if (threadIdx.x == 0) next = atom_add(p.counters, 1);
    while (true) {
        __syncthreads(); /* the ticket before is done */
        if (threadIdx.x == 0) smem.ticket = next, smem.most = 0;
        __syncthreads();
        const u32 ticket = smem.ticket;
        if (ticket >= 2 * num) break;
        if (threadIdx.x == 0) next = atom_add(p.counters, 1); /* needed only when this ticket is done */
        if (ticket < lag)
            do_piece(p, ticket, false, bad_tensors, &smem);
        else if (ticket >= 2 * num - lag)
            do_piece(p, ticket - num, true, bad_tensors, &smem);
        else
            do_piece(p, (ticket - lag) / 2 + ((ticket - lag) % 2 ? 0 : lag), (ticket - lag) % 2, bad_tensors, &smem);
    }
}
