/* q, k and v become e4m3, with a descale for every sequence and key head. ../quantization.h has the formulas.
 *
 *   x [b, row, h, d]  ->  out [b, row, h, d] e4m3, descale [b, h_kv]
 *
 * HBM gives each element once. A group has one descale: a sequence and key head of a tensor, or a whole tensor. A group
 * consists of pieces, and a piece fits into a slot of shared memory. A persistent CTA draws a ticket for each piece:
 *
 *   load LOADS pieces ahead (cp.async)  ->  measure, and publish the piece's maximum  ->  keep the piece in its slot
 *   ->  the group is complete: write the kept piece from its slot
 *
 * A published maximum is one word that begins as 0. So the word says as well that the piece is measured, and a CTA
 * needs no fence. Each CTA computes the maximum of a complete group itself.
 *
 * A large group does not fit into the slots of all CTAs. So a CTA drops a measured piece if its slots are taken by a
 * group that cannot be complete yet. It lists the dropped pieces, and loads them again when the group is complete. The
 * last dropped piece comes first, because the L2 may still hold it.
 *
 * NOTE: No CTA may wait for a CTA that is not resident. Tickets are drawn in the order of the pieces. A CTA waits for a
 * group only when its own next unmeasured piece lies behind the group. Then all pieces of the group are drawn. Of the
 * waiting CTAs and the CTAs that measure, one with the earliest group never waits.
 *
 * Specification: ../cpu/quantize.c. */
#include "ptx_once.cuh"
#include "quantize_params.h"

#if !defined(CHUNKS) || !defined(CTAS) || !defined(F32)
#error "a row of tiles.def: CHUNKS, CTAS; dtype: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL quantize
#endif

constexpr int THREADS = FA_QUANTIZE_THREADS, WARPS = THREADS / 32;
constexpr int LOADS = 2, SLOTS = FA_QUANTIZE_SLOTS; /* the other slot keeps a piece */
constexpr int UNIT = 16 / element::BYTES;           /* elements of 16 bytes */
constexpr int CHUNK_UNITS = 8 / UNIT;               /* a chunk is 8 columns */
static_assert(SLOTS == LOADS + 1, "a CTA keeps one piece");

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

/* A piece is a part of the rows of a group. In a group of g query heads, row i is head i % g of position i / g. */
struct piece {
    const element *x; /* of the first position */
    unsigned char *out;
    float *descale;              /* the group's, in its first piece; otherwise NULL */
    u32 ticket, begin, end;      /* tickets [begin, end) are the group; there is none: 0 */
    int tensor, num, first_head; /* num: rows; the first row's head */
    bool is_owned;               /* by a sequence; other rows become 0 */
};

struct shared {
    char slots[SLOTS][FA_QUANTIZE_SLOT_BYTES];
    uint4 signs[32]; /* of a chunk, as a mask of 16-bit elements */
    u32 words[2][2][WARPS];
    piece pieces[SLOTS];
};
static_assert(sizeof(shared) <= FA_QUANTIZE_SHARED_BYTES, "the launch gives this much");

/* Returns the number of pieces of one key head before a sequence of a packed tensor. */
DEVICE int pieces_before(const fa_quantize_params &p, const fa_quantize_tensor &t, int sequence) {
    const long long rows = (long long)(sequence <= p.b ? t.cu_seqlens[sequence] : t.rows) * t.g;
    return (int)(rows >> t.log2_rows) + sequence;
}

/* Sequence p.b of a packed tensor has the rows of no sequence. Sums that make no sense name no sequence. */
DEVICE piece find_piece(const fa_quantize_params &p, u32 ticket, u32 bad_tensors) {
    piece at = {};
    u32 first = 0; /* ticket of the tensor, then of the sequence and head */
    int tensor = 0;
    while (ticket - first >= (u32)p.tensors[tensor].num_pieces) first += p.tensors[tensor++].num_pieces;
    const fa_quantize_tensor &t = p.tensors[tensor];
    const bool is_bad = bad_tensors >> tensor & 1;
    const int idx = (int)(ticket - first);
    int sequence, num, first_position = 0, before = 0, positions = t.rows;
    if (is_bad) {
        sequence = p.b, num = t.num_pieces / p.h_kv;
    } else if (!t.cu_seqlens) {
        num = t.pieces_of_head;
        sequence = idx / (p.h_kv * num);
        before = sequence * num;
    } else {
        int low = 0, high = p.b + 1; /* the sequence is in [low, high) */
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if ((long long)p.h_kv * pieces_before(p, t, middle) <= idx)
                low = middle;
            else
                high = middle;
        }
        before = pieces_before(p, t, low);
        sequence = low;
        num = pieces_before(p, t, low + 1) - before;
        first_position = t.cu_seqlens[low];
        positions = (low < p.b ? t.cu_seqlens[low + 1] : t.rows) - first_position;
    }
    const int rest = idx - p.h_kv * before, head = rest / num;
    const long long first_row = (long long)(rest - head * num) << t.log2_rows, rows = (long long)positions * t.g;
    const long long position = first_position + first_row / t.g, outer = t.cu_seqlens ? 0 : sequence;
    at.num = (int)max(min(rows - first_row, 1ll << t.log2_rows), 0ll);
    at.first_head = (int)(first_row % t.g);
    at.x = (const element *)t.x + outer * t.stride_b + position * t.stride_row + (long long)head * t.g * t.stride_h;
    at.out = t.out + ((outer * t.rows + position) * p.h_kv + head) * t.g * t.d;
    at.ticket = ticket, at.tensor = tensor, at.is_owned = sequence < p.b;
    if (p.is_per_tensor && !is_bad)
        at.begin = first, at.end = first + t.num_pieces;
    else if (at.is_owned)
        at.begin = ticket - (rest - head * num), at.end = at.begin + num;
    if (at.end && ticket == at.begin) at.descale = t.descale + (p.is_per_tensor ? 0 : sequence * p.h_kv + head);
    return at;
}

/* Are the sums what the host could not check? The whole CTA calls this function. */
DEVICE bool has_good_sums(const fa_quantize_params &p, const fa_quantize_tensor &t) {
    bool is_bad = t.cu_seqlens && (t.cu_seqlens[0] != 0 || t.cu_seqlens[p.b] > t.rows);
    for (int i = threadIdx.x; t.cu_seqlens && i < p.b; i += THREADS)
        is_bad = is_bad || t.cu_seqlens[i] > t.cu_seqlens[i + 1];
    return !__syncthreads_or(is_bad);
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

/* ---- slots ------------------------------------------------------------------------------------------------------- */

DEVICE int lane() { return (int)threadIdx.x % 32; }

/* Each warp has its part of the rows of a slot. The warp loads its rows and reads them, so warps need no barrier. */
struct part {
    char *memory;
    int first, num; /* rows */
};
DEVICE part part_of(const fa_quantize_tensor &t, const piece &at, char *slot) {
    const int warp = (int)threadIdx.x / 32, rows = (1 << t.log2_rows) / WARPS, first = warp * rows;
    return {slot + warp * (FA_QUANTIZE_SLOT_BYTES / WARPS), first, max(0, min(rows, at.num - first))};
}

/* Returns x / divisor. `inverse` is 2^32 / divisor, rounded up; x * divisor is below 2^32. */
DEVICE int divide(int x, u32 inverse) { return inverse ? (int)__umulhi((u32)x, inverse) : x; }

/* The steps between a tensor's rows. */
struct row_place {
    int position, head;
};
DEVICE row_place place_of(const fa_quantize_tensor &t, const piece &at, int row) {
    const int i = at.first_head + row; /* below g + FA_QUANTIZE_MOST_ROWS */
    const int position = t.g < FA_QUANTIZE_MOST_ROWS ? divide(i, t.inverse_g) : i >= t.g;
    return {position, i - position * t.g};
}
DEVICE const element *x_of(const fa_quantize_tensor &t, const piece &at, int row) {
    const row_place place = place_of(t, at, row);
    return at.x + place.position * t.stride_row + place.head * t.stride_h;
}
DEVICE unsigned char *out_of(const fa_quantize_params &p, const fa_quantize_tensor &t, const piece &at, int row) {
    const row_place place = place_of(t, at, row);
    return at.out + (long long)place.position * (p.h_kv * t.g * t.d) + place.head * t.d;
}

/* Lanes that read different rows, or 2, 4 or 8 chunks apart, read different banks. */
DEVICE uint4 &unit_of(const part &mine, int unit) { return ((uint4 *)mine.memory)[unit ^ (unit >> 3 & 7)]; }

/* 16 bytes of a row that is not aligned, or has columns left over. Beyond the last column there are zeros. */
DEVICE uint4 load_elements(const element *row, int column, int d) {
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        if (column + i >= d) continue;
        if constexpr (element::BYTES == 4)
            words[i] = ((const u32 *)row)[column + i];
        else
            words[i / 2] |= (u32)((const u16 *)row)[column + i] << 16 * (i % 2);
    }
    return {words[0], words[1], words[2], words[3]};
}

/* Starts to load a piece. */
DEVICE void load(const fa_quantize_params &p, const piece &at, char *slot, u64 l2_policy) {
    const fa_quantize_tensor &t = p.tensors[at.tensor];
    const part mine = part_of(t, at, slot);
    const int num = at.is_owned ? mine.num * t.units : 0;
    if (t.is_aligned) {
#pragma unroll 4
        for (int i = lane(); i < num; i += 32) {
            const int row = divide(i, t.inverse_units), column = UNIT * (i - row * t.units);
            cp_async_16(smem_address(&unit_of(mine, i)), x_of(t, at, mine.first + row) + column, true, l2_policy);
        }
    } else {
        for (int i = lane(); i < num; i += 32) {
            const int row = divide(i, t.inverse_units), column = UNIT * (i - row * t.units);
            unit_of(mine, i) = load_elements(x_of(t, at, mine.first + row), column, t.d);
        }
    }
}

/* Loads a chunk of a row of a slot, as 32-bit words. */
struct chunk {
    u32 words[4 * CHUNK_UNITS];
};
DEVICE chunk load_chunk(const part &mine, int idx) {
    chunk x;
#pragma unroll
    for (int u = 0; u < CHUNK_UNITS; u++) {
        const uint4 four = unit_of(mine, CHUNK_UNITS * idx + u);
        x.words[4 * u] = four.x, x.words[4 * u + 1] = four.y, x.words[4 * u + 2] = four.z, x.words[4 * u + 3] = four.w;
    }
    return x;
}
DEVICE void cvt_f32(const chunk &x, float (&y)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        if constexpr (element::BYTES == 4)
            y[i] = __int_as_float((int)x.words[i]), y[i + 1] = __int_as_float((int)x.words[i + 1]);
        else
            unpack_x2<element>(x.words[i / 2], y[i], y[i + 1]);
    }
}

/* ---- rotation ---------------------------------------------------------------------------------------------------- */

/* Four lanes hold a row of n = d / 8 chunks. Each lane has n / 4 chunks, and n % 4 lanes have one chunk more. A block
 * of the rotation takes m chunks of each lane. At first these chunks are consecutive, so the steps between them stay in
 * the lane. For a step between two lanes, the lanes exchange half of their chunks. Then this step stays in the lane,
 * too, and the warp needs half of the shuffles. */
constexpr int SLOT_ROWS = 8, NUM_CHUNKS = CHUNKS > 0 ? CHUNKS : 1;

/* Returns m of a lane's chunk c. */
DEVICE int block_of(int c, int num_chunks) {
    const int full = num_chunks / 4;
    return c < full ? 1 << (31 - __clz(c ^ full)) : 1;
}

/* Returns the place in the row of a lane's chunk c, before and after the rotation. */
DEVICE int chunk_before(int c, int num_chunks) {
    const int m = block_of(c, num_chunks), i = c & (m - 1);
    return 4 * (c - i) + lane() % 4 * m + i;
}
DEVICE int chunk_after(int c, int num_chunks) {
    const int m = block_of(c, num_chunks), i = c & (m - 1);
    return 4 * (c - i) + lane() % 4 + (m == 8 ? 4 * (i / 4) + 8 * (i % 4) : 4 * i);
}

DEVICE void butterfly(float &a, float &b) {
    const float sum = a + b, difference = a - b;
    a = sum, b = difference;
}
DEVICE void butterflies(float (&a)[8], float (&b)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) butterfly(a[i], b[i]);
}

/* The whole warp: butterflies of two chunks of this lane with the same two of another lane. Then the lower lane has the
 * results of a, and the upper lane has those of b. */
DEVICE void butterflies_of_lanes(float (&a)[8], float (&b)[8], int step) {
    const bool is_upper = lane() & step;
    const float sign = is_upper ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(0xffffffff, is_upper ? a[i] : b[i], step), mine = is_upper ? b[i] : a[i];
        a[i] = mine + other;
        b[i] = fmaf(mine, sign, -sign * other); /* both products are exact */
    }
}

/* The whole warp: butterflies of a chunk with that of another lane, if `takes_part`. */
DEVICE void butterflies_of_lanes(float (&a)[8], int step, bool takes_part) {
    const float sign = lane() & step ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(0xffffffff, a[i], step);
        if (takes_part) a[i] = fmaf(a[i], sign, other); /* the product is exact */
    }
}

/* 1 / sqrt(n) for a power of two. */
DEVICE float norm_of(int n) {
    const int log2_n = 31 - __clz(n);
    return __int_as_float((127 - log2_n / 2) << 23) * (log2_n % 2 ? 0.70710678f : 1.f);
}

/* The whole warp calls this function. */
DEVICE void rotate(float (&y)[NUM_CHUNKS][8], int num_chunks) {
    const int full = num_chunks / 4, left = num_chunks % 4;
#pragma unroll
    for (int c = 0; c < NUM_CHUNKS; c++)
#pragma unroll
        for (int step = 1; step < 8; step *= 2)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!(i & step)) butterfly(y[c][i], y[c][i + step]);
#pragma unroll
    for (int step = 1; step < NUM_CHUNKS; step *= 2)
#pragma unroll
        for (int c = 0; c + step < NUM_CHUNKS; c++)
            if (!(c & step) && block_of(c, num_chunks) > step) butterflies(y[c], y[c + step]);
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int c = 0; c < NUM_CHUNKS; c++) {
            const int m = block_of(c, num_chunks);
            if (m == 1) {
                if (c < full || (c == full && step == 1 && left >= 2))
                    butterflies_of_lanes(y[c], step, c < full || lane() % 4 < 2);
            } else if (step == 1 || m == 2) {
                if (c % 2 == 0 && c + 1 < NUM_CHUNKS) butterflies_of_lanes(y[c], y[c + 1], step);
            } else if (c % 4 < 2 && c + 2 < NUM_CHUNKS) {
                butterflies_of_lanes(y[c], y[c + 2], step);
            }
        }
#pragma unroll
    for (int c = 0; c < NUM_CHUNKS; c++) {
        const int columns = c < full ? 32 * block_of(c, num_chunks) : left >= 2 && lane() % 4 < 2 ? 16 : 8;
        const float norm = norm_of(columns);
#pragma unroll
        for (int i = 0; i < 8; i++) y[c][i] *= norm;
    }
}

/* Calls body(y, row, is_row) for the rows of a slot. A lane's row counts from the warp's first row. Beyond the rows and
 * the columns, y is 0. The whole warp calls this function. */
template <class Body>
DEVICE void for_rotated_rows(const fa_quantize_tensor &t, const part &mine, const shared &smem, Body body) {
    const int num_chunks = t.units / CHUNK_UNITS;
#pragma unroll 1
    for (int row = lane() / 4; row - lane() / 4 < mine.num; row += SLOT_ROWS) {
        float y[NUM_CHUNKS][8];
#pragma unroll
        for (int c = 0; c < NUM_CHUNKS; c++) {
            const int idx = chunk_before(c, num_chunks);
            chunk x = {};
            if (row < mine.num && idx < num_chunks) {
                const uint4 signs = smem.signs[idx];
                const u32 masks[4] = {signs.x, signs.y, signs.z, signs.w};
                x = load_chunk(mine, row * num_chunks + idx);
#pragma unroll
                for (int w = 0; w < 4 * CHUNK_UNITS; w++)
                    if constexpr (element::BYTES == 4)
                        x.words[w] ^= w % 2 ? masks[w / 2] & 0x80000000 : masks[w / 2] << 16;
                    else
                        x.words[w] ^= masks[w];
            }
            cvt_f32(x, y[c]);
        }
        rotate(y, num_chunks);
        body(y, row, row < mine.num);
    }
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */

/* Does the lane's part of a row hold an infinity? Called for few rows. */
DEVICE bool holds_infinity(const part &mine, int row, int num_chunks) {
    bool holds = false;
    for (int idx = lane() % 4; idx < num_chunks; idx += 4) {
        float x[8];
        cvt_f32(load_chunk(mine, row * num_chunks + idx), x);
        for (int i = 0; i < 8; i++) holds = holds || (__float_as_uint(x[i]) & 0x7fffffff) == 0x7f800000;
    }
    return holds;
}

/* Returns the maximum of the warp's rows, as the bits of a float. NaN does not count. */
DEVICE u32 measure(const fa_quantize_params &p, const piece &at, const shared &smem, char *slot) {
    const fa_quantize_tensor &t = p.tensors[at.tensor];
    const part mine = part_of(t, at, slot);
    float most = 0;
    if (!at.is_owned) return 0;
    if (CHUNKS > 0 && t.rotates) {
        for_rotated_rows(t, mine, smem, [&](const float (&y)[NUM_CHUNKS][8], int row, bool is_row) {
            bool is_finite = true;
#pragma unroll
            for (int c = 0; c < NUM_CHUNKS; c++) {
#pragma unroll
                for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(y[c][i]));
                is_finite = is_finite && fabsf(y[c][0]) <= 3.402823466e38f;
            }
            /* A rotated infinity makes every column of its block infinite or NaN. */
            if (!is_finite && is_row && holds_infinity(mine, row, t.units / CHUNK_UNITS))
                most = __int_as_float(0x7f800000);
        });
    } else if constexpr (element::BYTES == 4) {
#pragma unroll 4
        for (int i = lane(); i < mine.num * t.units; i += 32) {
            const uint4 x = unit_of(mine, i);
            most = fmaxf(fmaxf(most, fabsf(__int_as_float((int)x.x))), fabsf(__int_as_float((int)x.y)));
            most = fmaxf(fmaxf(most, fabsf(__int_as_float((int)x.z))), fabsf(__int_as_float((int)x.w)));
        }
    } else {
        u32 pairs[2] = {0, 0};
#pragma unroll 4
        for (int i = lane(); i < mine.num * t.units; i += 32) {
            const uint4 x = unit_of(mine, i);
            pairs[0] = max_x2<element>(max_x2<element>(pairs[0], x.x & 0x7fff7fff), x.y & 0x7fff7fff);
            pairs[1] = max_x2<element>(max_x2<element>(pairs[1], x.z & 0x7fff7fff), x.w & 0x7fff7fff);
        }
        float low, high;
        unpack_x2<element>(max_x2<element>(pairs[0], pairs[1]), low, high);
        most = fmaxf(low, high);
    }
    const u32 bits = __float_as_uint(most);
    return __reduce_max_sync(0xffffffff, bits < 0x00800000 ? 0 : bits); /* below 2^-126: 0 */
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

/* Writes 8 columns, or those that there are. */
DEVICE void write_chunk(unsigned char *row, int column, int d, const float (&y)[8], float factor, u64 l2_policy) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = cvt_e4m3x2(y[2 * i] * factor, y[2 * i + 1] * factor);
    if (d % 8 == 0) {
        st_global(row + column, make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16), l2_policy);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (column + i < d) row[column + i] = (unsigned char)(pairs[i / 2] >> 8 * (i % 2));
    }
}

/* most: the group's maximum, as the bits of a float. */
DEVICE void write(const fa_quantize_params &p, const piece &at, const shared &smem, char *slot, u32 most) {
    const fa_quantize_tensor &t = p.tensors[at.tensor];
    const part mine = part_of(t, at, slot);
    const u64 l2_policy = l2_evict_first();
    const int num_chunks = t.units / CHUNK_UNITS;
    const float descale = most == 0 ? 1 : fmaxf(__fdiv_rn(__int_as_float((int)most), 448.f), 1.17549435e-38f);
    const float factor = __fdiv_rn(1.f, descale);
    if (threadIdx.x == 0 && at.descale) *at.descale = descale;
    if (CHUNKS > 0 && t.rotates && at.is_owned) {
        for_rotated_rows(t, mine, smem, [&](const float (&y)[NUM_CHUNKS][8], int row, bool is_row) {
            unsigned char *out = out_of(p, t, at, mine.first + row);
#pragma unroll
            for (int c = 0; c < NUM_CHUNKS; c++) {
                const int idx = chunk_after(c, num_chunks);
                if (is_row && idx < num_chunks) write_chunk(out, 8 * idx, t.d, y[c], factor, l2_policy);
            }
        });
        return;
    }
#pragma unroll 2
    for (int i = lane(); i < mine.num * num_chunks; i += 32) {
        const int row = divide(i, t.inverse_chunks), column = 8 * (i - row * num_chunks);
        float y[8] = {};
        if (at.is_owned) cvt_f32(load_chunk(mine, i), y);
        write_chunk(out_of(p, t, at, mine.first + row), column, t.d, y, factor, l2_policy);
    }
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

constexpr u32 INCOMPLETE = 0xffffffff; /* larger than every maximum */

/* The whole warp: returns the largest published maximum of its part of a group, plus 1, or INCOMPLETE. Without a group
 * the function returns 0. */
DEVICE u32 poll(const fa_quantize_params &p, const piece &at) {
    u32 most = 0;
    for (u32 i = at.begin + threadIdx.x; i < at.end; i += THREADS) {
        const u32 word = ld_relaxed(p.maxima + i);
        most = max(most, word ? word : INCOMPLETE);
    }
    return __reduce_max_sync(0xffffffff, most);
}

/* The maxima over the warps of two numbers. parity alternates, so one barrier is enough. */
DEVICE uint2 max_of_warps(shared &smem, int &parity, u32 a, u32 b) {
    if (lane() == 0) smem.words[parity][0][threadIdx.x / 32] = a, smem.words[parity][1][threadIdx.x / 32] = b;
    __syncthreads();
    uint2 most = {0, 0};
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        most.x = max(most.x, smem.words[parity][0][w]), most.y = max(most.y, smem.words[parity][1][w]);
    parity ^= 1;
    return most;
}

/* Waits until a group is complete, and returns its maximum, plus 1. */
DEVICE u32 wait(const fa_quantize_params &p, const piece &at, shared &smem, int &parity) {
    while (true) {
        const u32 word = max_of_warps(smem, parity, poll(p, at), 0).x;
        if (word != INCOMPLETE) return word;
        __nanosleep(100);
    }
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* Returns a slot other than these two. -1 is no slot. */
DEVICE int free_slot(int a, int b) { return a != 0 && b != 0 ? 0 : a != 1 && b != 1 ? 1 : 2; }

/* The masks of a chunk's signs. */
DEVICE uint4 signs_of(u32 bits) {
    u32 masks[4];
#pragma unroll
    for (int i = 0; i < 4; i++) masks[i] = (bits >> 2 * i & 1) << 15 | (bits >> (2 * i + 1) & 1) << 31;
    return {masks[0], masks[1], masks[2], masks[3]};
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const __grid_constant__ fa_quantize_params p) {
    extern __shared__ __align__(16) char memory[];
    shared &smem = *(shared *)memory;
    const u32 bad = find_bad_tensors(p), num = (u32)p.num_pieces;
    if (threadIdx.x < 32) smem.signs[threadIdx.x] = signs_of((u32)(p.signs[threadIdx.x / 8] >> threadIdx.x % 8 * 8));
    u32 next = threadIdx.x == 0 ? atom_add(p.ticket, 1) : 0;
    int loading[LOADS] = {-1, -1}, kept = -1, parity = 0; /* slots; -1: none */
    bool has_tickets = true;
    int num_dropped = 0;  /* pieces, of the kept piece's group */
    u32 last_dropped = 0; /* of thread 0; links[ticket] is the one before */
    while (true) {
        /* Load a piece ahead. */
        if (has_tickets) {
            const int slot = free_slot(loading[0], kept);
            __syncthreads(); /* nobody reads the slot */
            if (threadIdx.x == 0) {
                if (next < num) smem.pieces[slot] = find_piece(p, next, bad);
                smem.pieces[slot].ticket = next;
                next = atom_add(p.ticket, 1); /* needed only for the next piece */
            }
            __syncthreads();
            has_tickets = smem.pieces[slot].ticket < num;
            if (has_tickets) {
                load(p, smem.pieces[slot], smem.slots[slot], l2_evict_normal());
                if (loading[0] < 0)
                    loading[0] = slot;
                else
                    loading[1] = slot;
            }
        }
        cp_async_commit_group();
        if (loading[0] < 0 && kept < 0) break;
        if (has_tickets && loading[1] < 0) continue;

        /* Measure the oldest piece. Meanwhile look whether the kept piece's group is complete. */
        const int slot = loading[0];
        u32 word = INCOMPLETE;
        loading[0] = loading[1], loading[1] = -1;
        if (slot >= 0) {
            const piece &at = smem.pieces[slot];
            if (kept >= 0 && smem.pieces[kept].end <= at.ticket) word = poll(p, smem.pieces[kept]);
            cp_async_wait_group<LOADS - 1>();
            __syncwarp();
            const uint2 most = max_of_warps(smem, parity, measure(p, at, smem, smem.slots[slot]), word);
            if (threadIdx.x == 0) st_relaxed(p.maxima + at.ticket, most.x + 1);
            word = most.y;
        }

        /* Write the kept piece, and the dropped pieces. The last dropped piece comes first. */
        const u32 unmeasured = loading[0] < 0 ? num : smem.pieces[loading[0]].ticket;
        if (kept >= 0 && word == INCOMPLETE && smem.pieces[kept].end <= unmeasured)
            word = wait(p, smem.pieces[kept], smem, parity);
        if (kept >= 0 && word != INCOMPLETE) {
            while (true) {
                write(p, smem.pieces[kept], smem, smem.slots[kept], max(word, 1u) - 1);
                if (num_dropped == 0) break;
                __syncthreads(); /* nobody reads the slot */
                if (threadIdx.x == 0) {
                    smem.pieces[kept] = find_piece(p, last_dropped, bad);
                    last_dropped = p.links[last_dropped];
                }
                __syncthreads();
                load(p, smem.pieces[kept], smem.slots[kept], l2_evict_first());
                cp_async_wait_all();
                __syncwarp();
                num_dropped--;
            }
            kept = -1;
        }

        /* Keep the measured piece, or drop it: the kept piece's group goes on. */
        if (slot < 0) continue;
        if (kept < 0) {
            kept = slot;
        } else {
            if (threadIdx.x == 0) {
                const u32 ticket = smem.pieces[slot].ticket;
                p.links[ticket] = last_dropped, last_dropped = ticket;
            }
            num_dropped++;
        }
    }
}
