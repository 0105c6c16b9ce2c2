/* q, k and v become e4m3, with a descale for every sequence and key head. ../quantization.h has the formulas.
 *
 *   x [b, row, h, d]  ->  out [b, row, h, d] e4m3, descale [b, h_kv]
 *
 * HBM gives each element once. A group has one descale: a sequence and key head of a tensor, or a whole tensor. A
 * group consists of pieces, and a piece fits into a slot of shared memory. A persistent CTA does steps, and AHEAD steps
 * are on their way to their slots (cp.async):
 *
 *   load  ->  measure, and publish the piece's maximum  ->  LAG steps later: wait for the group's maximum  ->  write
 *
 * The scheduler warp draws a ticket for each piece, finds the piece, and polls the maxima of the group. The other warps
 * load, measure and write. A published maximum is one word that begins as 0. So the word says as well that the piece
 * is measured, and a CTA needs no fence. Each CTA computes the maximum of a complete group itself.
 *
 * If a CTA draws many pieces of a group, it keeps the last ones. It drops the others after their measure, and lists
 * them. Behind the last piece it loads them again, the youngest first, because the L2 may still hold it.
 *
 * A rotated piece is rotated twice, for its maximum and for its e4m3.
 *
 * NOTE: No CTA may wait for a CTA that is not resident. Tickets are drawn in the order of the pieces. A CTA waits for a
 * group only when it has measured all its pieces of the group, and has drawn a ticket behind the group. Then all pieces
 * of the group are drawn. Of the waiting CTAs, one with the earliest group waits only for CTAs that work.
 *
 * Specification: ../cpu/quantize.c. */
#include "ptx_once.cuh"
#include "quantize_params.h"

#if !defined(ROTATES) || !defined(SLOT_KB) || !defined(CTAS) || !defined(F32)
#error "a row of tiles.def: ROTATES, SLOT_KB, CTAS; dtype: F32, or another: 0 or 1"
#endif

#ifndef KERNEL
#define KERNEL quantize
#endif

constexpr int THREADS = FA_QUANTIZE_THREADS, WARPS = FA_QUANTIZE_WARPS; /* without the scheduler warp */
constexpr int SLOTS = FA_QUANTIZE_SLOTS, LAG = 2;
constexpr int AHEAD = SLOTS - LAG - 1; /* steps whose loads are on their way */
constexpr int STEPS = 8;               /* that are known at once */
constexpr int SLOT_BYTES = SLOT_KB << 10;
constexpr int UNIT = 16 / element::BYTES; /* elements of 16 bytes */
constexpr int CHUNK_UNITS = 8 / UNIT;     /* a chunk is 8 columns */
constexpr int BATCH = 8;                  /* units that a lane reads from shared memory at once */
static_assert(AHEAD >= 1 && LAG + AHEAD + 3 <= STEPS, "steps stay known until they are written");

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

/* What a CTA does in a step. */
enum kind {
    NEW,   /* measures a piece */
    AGAIN, /* loads a dropped piece again */
    NONE,  /* nothing */
    END    /* ends */
};
struct step {
    piece at;
    kind does;
    bool is_dropped; /* a NEW piece that is not written, because the CTA gets more pieces of its group */
};

struct shared {
    char slots[SLOTS][SLOT_BYTES];
    uint4 signs[32]; /* of a chunk, as a mask of 16-bit elements */
    u32 words[2][WARPS], early[2], late; /* maxima of a piece; of the group that is written */
    step steps[STEPS];
};
static_assert(sizeof(shared) <= FA_QUANTIZE_SHARED_BYTES(SLOT_KB), "the launch gives this much");

/* Returns the number of pieces of one key head before a sequence of a packed tensor. */
DEVICE int pieces_before(const fa_quantize_params &p, const fa_quantize_tensor &t, int sequence) {
    const long long rows = (long long)(sequence <= p.b ? t.cu_seqlens[sequence] : t.rows) * t.g;
    return (int)(rows / t.piece_rows) + sequence;
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
    const long long first_row = (long long)(rest - head * num) * t.piece_rows, rows = (long long)positions * t.g;
    const long long position = first_position + first_row / t.g, outer = t.cu_seqlens ? 0 : sequence;
    at.num = (int)max(min(rows - first_row, (long long)t.piece_rows), 0ll);
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
DEVICE int warp() { return (int)threadIdx.x / 32; }

/* Each warp has its part of the rows of a slot. The warp loads its rows and reads them, so warps need no barrier. */
struct part {
    char *memory;
    int first, num; /* rows */
};
DEVICE part part_of(const fa_quantize_tensor &t, const piece &at, char *slot) {
    const int rows = t.rows_of_warp, first = warp() * rows;
    return {slot + warp() * (SLOT_BYTES / WARPS), first, max(0, min(rows, at.num - first))};
}

/* Returns x / divisor. `inverse` is 2^32 / divisor, rounded up; x * divisor is below 2^32. */
DEVICE int divide(int x, u32 inverse) { return inverse ? (int)__umulhi((u32)x, inverse) : x; }

/* Where the rows of a piece are in a tensor whose positions and heads are these steps apart. */
struct row_steps {
    long long of_position;
    long long of_head;
    int g, first_head;
    u32 inverse_g;
};
DEVICE row_steps steps_of(const fa_quantize_tensor &t, const piece &at, long long of_position, long long of_head) {
    return {of_position, of_head, t.g, at.first_head, t.inverse_g};
}
DEVICE long long steps_to(const row_steps &steps, int row) {
    if (steps.g == 1) return row * steps.of_position;
    const int i = steps.first_head + row; /* below g + FA_QUANTIZE_MOST_ROWS */
    const int position = steps.g < FA_QUANTIZE_MOST_ROWS ? divide(i, steps.inverse_g) : i >= steps.g;
    return position * steps.of_position + (i - position * steps.g) * steps.of_head;
}

/* The units of a row are permuted within lines of 8 units. Then these lanes read different banks: lanes that read a
 * unit of 8 consecutive rows; of a line; half a line apart, in 2 rows with 4 lanes each, or in one row. */
DEVICE int place_of(int pitch, int row, int unit) {
    const int line = unit >> 3;
    return row * pitch + (unit ^ (row & 7) ^ (line >> 1 & 1) ^ (line << 1 & 2));
}
DEVICE uint4 &unit_at(const part &mine, int place) { return ((uint4 *)mine.memory)[place]; }

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

template <int N> struct constant {
    static constexpr int VALUE = N;
};

/* Rows of a lane in which a number of lines is on its way at once. */
DEVICE constexpr int rows_at_once(int lines) { return lines == 1 ? 4 : lines == 4 ? 1 : 2; }

/* Calls body with the number of a row's lines as a constant, if the lines are full and few, or with 0. */
template <class Body> DEVICE void with_lines(const fa_quantize_tensor &t, Body body) {
    if (element::BYTES == 2 && t.lines == 1)
        body(constant<1>());
    else if (element::BYTES == 2 && t.lines == 2)
        body(constant<2>());
    else if (element::BYTES == 2 && t.lines == 3)
        body(constant<3>());
    else if (element::BYTES == 2 && t.lines == 4)
        body(constant<4>());
    else
        body(constant<0>());
}

/* Starts to load a piece. Eight lanes load a row. Columns behind the last one become 0, and rows of no sequence. */
DEVICE void load(const fa_quantize_params &p, const piece at, char *slot, u64 l2_policy) {
    const fa_quantize_tensor &t = p.tensors[at.tensor];
    const part mine = part_of(t, at, slot);
    const row_steps steps = steps_of(t, at, t.stride_row, t.stride_h);
    const element *const first = at.x;
    const int pitch = t.pitch, units = at.is_owned ? t.units : 0;
    if (!t.is_aligned) {
        for (int row = lane() / 8; row < mine.num; row += 4)
            for (int unit = lane() % 8; unit < pitch; unit += 8)
                unit_at(mine, place_of(pitch, row, unit)) =
                    load_elements(first + steps_to(steps, mine.first + row), UNIT * unit, at.is_owned ? t.d : 0);
        return;
    }
    with_lines(t, [&](auto lines) {
        constexpr int LINES = decltype(lines)::VALUE, ROWS = LINES ? rows_at_once(LINES) : 1;
        const int num = LINES ? LINES : pitch / 8;
#pragma unroll ROWS
        for (int row = lane() / 8; row < mine.num; row += 4) {
            const element *x = first + steps_to(steps, mine.first + row);
#pragma unroll LINES ? LINES : 1
            for (int i = 0; i < num; i++) {
                const int unit = lane() % 8 + 8 * i, place = place_of(LINES ? 8 * LINES : pitch, row, unit);
                cp_async_16(smem_address(&unit_at(mine, place)), x + UNIT * unit, LINES ? at.is_owned : unit < units,
                            l2_policy);
            }
        }
    });
}

DEVICE void cvt_f32(const uint4 &unit, float *y) {
    const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (element::BYTES == 4)
            y[i] = __int_as_float((int)words[i]);
        else
            unpack_x2<element>(words[i], y[2 * i], y[2 * i + 1]);
    }
}

/* ---- rotation ---------------------------------------------------------------------------------------------------- */

/* A block of N columns of a row is with one lane, or with N / 32 lanes that have 32 columns each. The steps are
 * those of ../quantization.h. The last step is left to the caller, because a maximum needs only a half of the last
 * step.
 *
 * Register i of lane q has column 32 q + i at first. The steps within 32 columns stay in the lane. The last of them
 * is between registers i and i + 16. For the next step, the lane keeps the sums or the differences and exchanges the
 * others with another lane. Then this step is between registers i and i + 16, too. At the end lane q has columns 16
 * q + i and N / 2 + 16 q + i.
 *
 * Exchanged registers have a sign that depends on the lane alone: of sums K + R and of differences K - R. So each
 * step takes one instruction. */
template <int N> struct block {
    static constexpr int LANES = N > 32 ? N / 32 : 1, COLUMNS = N > 32 ? 32 : N, HALF = COLUMNS / 2;
    static constexpr int ROWS = 32 / LANES;      /* of a warp, at once */
    static constexpr int UNITS = COLUMNS / UNIT; /* of a lane */
    float y[COLUMNS];
};

/* The signs of sums and of differences. */
template <int N> DEVICE float2 signs_of_lane() {
    bool is_negative = false,
         is_upper = false; /* of sums; has the lane the upper columns in its registers below HALF? */
#pragma unroll
    for (int step = 1; step < block<N>::LANES; step *= 2) {
        const bool keeps_differences = lane() & step;
        is_negative ^= keeps_differences && is_upper;
        is_upper = keeps_differences;
    }
    return {is_negative ? -1.f : 1.f, is_negative != is_upper ? -1.f : 1.f};
}

/* The whole warp: all steps but the last. */
template <int N> DEVICE void rotate(block<N> &of) {
    constexpr int HALF = block<N>::HALF;
    float *y = of.y;
#pragma unroll
    for (int step = 1; step < HALF; step *= 2)
#pragma unroll
        for (int i = 0; i < 2 * HALF; i++)
            if (!(i & step)) {
                const float a = y[i], b = y[i + step];
                y[i] = a + b, y[i + step] = a - b;
            }
#pragma unroll
    for (int step = 1; step < block<N>::LANES; step *= 2) {
        const float sign = lane() & step ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const float a = y[i], b = y[i + HALF];
            y[i] = fmaf(b, sign, a); /* the products are exact */
            y[i + HALF] = __shfl_xor_sync(0xffffffff, fmaf(b, -sign, a), step);
        }
    }
}

/* 1 / sqrt(n) for a power of two. */
DEVICE constexpr float norm_of(int n) { return n == 1 ? 1.f : n == 2 ? 0.70710678f : norm_of(n / 4) / 2; }

/* Calls body(of, row, place) for a block of the rows of a slot. The block begins with a column. A lane's row counts
 * from the warp's first row. Its first unit is in a place of the slot, the others are in place ^ i. Lanes without a
 * row of their own have the last row again. The whole warp calls this function. */
template <int N, class Body>
DEVICE void for_rows_of_block(const fa_quantize_tensor &t, const part &mine, const shared &smem, int column,
                              Body body) {
    typedef block<N> B;
    const int first = column + B::COLUMNS * (lane() % B::LANES), unit = first / UNIT;
#pragma unroll 1
    for (int from = 0; from < mine.num; from += B::ROWS) {
        B of;
        const int row = min(from + lane() / B::LANES, mine.num - 1), place = place_of(t.pitch, row, unit);
#pragma unroll
        for (int chunk = 0; chunk < B::COLUMNS / 8; chunk++) {
            const uint4 signs = smem.signs[place_of(32, 0, first / 8 + chunk)];
            const u32 masks[4] = {signs.x, signs.y, signs.z, signs.w};
#pragma unroll
            for (int i = 0; i < CHUNK_UNITS; i++) {
                uint4 x = unit_at(mine, place ^ (chunk * CHUNK_UNITS + i));
                if constexpr (element::BYTES == 4)
                    x.x ^= masks[2 * i] << 16, x.y ^= masks[2 * i] & 0x80000000, x.z ^= masks[2 * i + 1] << 16,
                        x.w ^= masks[2 * i + 1] & 0x80000000;
                else
                    x.x ^= masks[0], x.y ^= masks[1], x.z ^= masks[2], x.w ^= masks[3];
                cvt_f32(x, of.y + 8 * chunk + UNIT * i);
            }
        }
        rotate(of);
        body(of, row, from + lane() / B::LANES < mine.num, place);
    }
}

/* Calls body<N>(column) for the blocks of d columns. */
template <int N = 256, class Body> DEVICE void for_blocks(int d, Body body) {
    if (d & N) body(constant<N>(), d & -2 * N);
    if constexpr (N > 8) for_blocks<N / 2>(d, body);
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */

DEVICE bool is_infinite(float x) { return (__float_as_uint(x) & 0x7fffffff) == 0x7f800000; }

/* Returns the maximum of the warp's rows, as the bits of a float. NaN does not count. */
DEVICE u32 measure(const fa_quantize_params &p, const piece at, const shared &smem, char *slot) {
    const fa_quantize_tensor &t = p.tensors[at.tensor];
    const part mine = part_of(t, at, slot);
    float most = 0;
    if (ROTATES && t.rotates) {
        for_blocks(t.d, [&](auto n, int column) {
            constexpr int N = decltype(n)::VALUE;
            typedef block<N> B;
            float of_block = 0;
            for_rows_of_block<N>(t, mine, smem, column, [&](const B &of, int, bool, int place) {
            /* The larger one of |a + b| and |a - b| is |a| + |b|. */
#pragma unroll
                for (int i = 0; i < B::HALF; i++) of_block = fmaxf(of_block, fabsf(of.y[i]) + fabsf(of.y[i + B::HALF]));
                /* An infinity makes every column of its block infinite or NaN. */
                if (!(fabsf(of.y[0]) + fabsf(of.y[B::HALF]) <= 3.402823466e38f))
                    for (int i = 0; i < B::UNITS; i++) {
                        float x[UNIT];
                        cvt_f32(unit_at(mine, place ^ i), x);
                        for (int e = 0; e < UNIT; e++)
                            if (is_infinite(x[e])) of_block = __int_as_float(0x7f800000);
                    }
            });
            most = fmaxf(most, of_block * norm_of(N));
        });
    } else {
        const int num = mine.num * t.pitch;
        u32 pairs[2] = {0, 0};
#pragma unroll 1
        for (int from = lane(); from < num; from += 32 * BATCH) {
            uint4 x[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) x[i] = unit_at(mine, min(from + 32 * i, num - 1));
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if constexpr (element::BYTES == 4) {
                    float y[4];
                    cvt_f32(x[i], y);
                    most = fmaxf(fmaxf(most, fabsf(y[0])), fabsf(y[1]));
                    most = fmaxf(fmaxf(most, fabsf(y[2])), fabsf(y[3]));
                } else {
                    pairs[0] = max_x2<element>(max_x2<element>(pairs[0], x[i].x & 0x7fff7fff), x[i].y & 0x7fff7fff);
                    pairs[1] = max_x2<element>(max_x2<element>(pairs[1], x[i].z & 0x7fff7fff), x[i].w & 0x7fff7fff);
                }
            }
        }
        if constexpr (element::BYTES == 2) {
            float low, high;
            unpack_x2<element>(max_x2<element>(pairs[0], pairs[1]), low, high);
            most = fmaxf(low, high);
        }
    }
    const u32 bits = __float_as_uint(most);
    return __reduce_max_sync(0xffffffff, bits < 0x00800000 ? 0 : bits); /* below 2^-126: 0 */
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

DEVICE u32 cvt_e4m3x4(const float *y) { return cvt_e4m3x2(y[0], y[1]) | cvt_e4m3x2(y[2], y[3]) << 16; }

/* Writes NUM columns at an address that is a multiple of 8 or, for 4 columns, of 4. */
template <int NUM> DEVICE void write_columns(unsigned char *out, const float *y, bool is_aligned_16, u64 l2_policy) {
    if constexpr (NUM == 4) {
        st_global(out, cvt_e4m3x4(y), l2_policy);
    } else if constexpr (NUM == 8) {
        st_global(out, make_uint2(cvt_e4m3x4(y), cvt_e4m3x4(y + 4)), l2_policy);
    } else if (is_aligned_16) {
        st_global(out, make_uint4(cvt_e4m3x4(y), cvt_e4m3x4(y + 4), cvt_e4m3x4(y + 8), cvt_e4m3x4(y + 12)), l2_policy);
    } else {
        write_columns<8>(out, y, false, l2_policy), write_columns<8>(out + 8, y + 8, false, l2_policy);
    }
}

DEVICE float descale_of(u32 most) {
    return most == 0 ? 1 : fmaxf(__fdiv_rn(__int_as_float((int)most), 448.f), 1.17549435e-38f);
}

DEVICE void write_rotated(const fa_quantize_tensor &t, const piece at, const part &mine, const shared &smem,
                          int of_position, float factor, u64 l2_policy) {
    for_blocks(t.d, [&](auto n, int column) {
        constexpr int N = decltype(n)::VALUE;
        typedef block<N> B;
        constexpr int HALF = B::HALF;
        const float2 signs = signs_of_lane<N>();
        const float of_sums = signs.x * norm_of(N), of_differences = signs.y * norm_of(N);
        unsigned char *const out = at.out + column + HALF * (lane() % B::LANES);
        const row_steps steps = steps_of(t, at, of_position, t.d);
        for_rows_of_block<N>(t, mine, smem, column, [&](const B &of, int row, bool is_row, int) {
            float sums[HALF], differences[HALF];
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const float a = of.y[i], b = of.y[i + HALF];
                sums[i] = fmaf(a + b, of_sums, 0.f) * factor; /* + 0: a zero has no sign */
                differences[i] = fmaf(a - b, of_differences, 0.f) * factor;
            }
            if (!is_row) return;
            unsigned char *to = out + steps_to(steps, mine.first + row);
            write_columns<HALF>(to, sums, t.d % 16 == 0, l2_policy);
            write_columns<HALF>(to + N / 2, differences, t.d % 16 == 0, l2_policy);
        });
    });
}

/* Writes rows of full lines of 16-bit elements. Four or six units of a lane are on their way at once. */
template <int LINES>
DEVICE void write_lines(const row_steps &steps, unsigned char *out, const part &mine, float factor, u64 l2_policy) {
    constexpr int ROWS = rows_at_once(LINES);
    for (int from = lane() / 8; from < mine.num; from += 4 * ROWS) {
        uint4 x[ROWS][LINES];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int line = 0; line < LINES; line++)
                x[i][line] = unit_at(mine, place_of(8 * LINES, min(from + 4 * i, mine.num - 1), 8 * line + lane() % 8));
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = from + 4 * i;
            if (row >= mine.num) break;
            unsigned char *const to = out + steps_to(steps, mine.first + row) + 8 * (lane() % 8);
#pragma unroll
            for (int line = 0; line < LINES; line++) {
                float y[8];
                cvt_f32(x[i][line], y);
#pragma unroll
                for (int e = 0; e < 8; e++) y[e] *= factor;
                write_columns<8>(to + 64 * line, y, false, l2_policy);
            }
        }
    }
}

/* Writes rows of any elements and width. */
DEVICE void write_chunks(const row_steps &steps, unsigned char *out, const part &mine, int pitch, int d, float factor,
                         u64 l2_policy) {
    for (int row = lane() / 8; row < mine.num; row += 4)
        for (int column = 8 * (lane() % 8); column < d; column += 64) {
            unsigned char *const to = out + steps_to(steps, mine.first + row) + column;
            float y[8];
#pragma unroll
            for (int i = 0; i < CHUNK_UNITS; i++)
                cvt_f32(unit_at(mine, place_of(pitch, row, column / UNIT + i)), y + UNIT * i);
#pragma unroll
            for (int i = 0; i < 8; i++) y[i] *= factor;
            if (d % 8 == 0)
                write_columns<8>(to, y, false, l2_policy);
            else
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (column + i < d) to[i] = (unsigned char)cvt_e4m3x2(y[i], 0);
        }
}

/* most: the group's maximum, as the bits of a float. */
DEVICE void write(const fa_quantize_params &p, const piece at, const shared &smem, char *slot, u32 most) {
    const fa_quantize_tensor &t = p.tensors[at.tensor];
    const part mine = part_of(t, at, slot);
    const u64 l2_policy = l2_evict_first();
    const float descale = descale_of(most), factor = __fdiv_rn(1.f, descale);
    const int of_position = p.h_kv * t.g * t.d;
    if (threadIdx.x == 0 && at.descale) *at.descale = descale;
    if (ROTATES && t.rotates) {
        write_rotated(t, at, mine, smem, of_position, factor, l2_policy);
        return;
    }
    const row_steps steps = steps_of(t, at, of_position, t.d);
    with_lines(t, [&](auto lines) {
        constexpr int LINES = decltype(lines)::VALUE;
        if constexpr (LINES > 0)
            write_lines<LINES>(steps, at.out, mine, factor, l2_policy);
        else
            write_chunks(steps, at.out, mine, t.pitch, t.d, factor, l2_policy);
    });
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

constexpr u32 INCOMPLETE = 0xffffffff; /* larger than every maximum */

/* What the scheduler warp has seen of a group: the maximum of the pieces before a ticket. */
struct seen {
    u32 end; /* of the group */
    u32 ticket, most;
};

/* The whole warp: looks at further pieces of a group. Returns the group's maximum, or INCOMPLETE. A piece of no group
 * has end = 0, and its maximum is 0. */
DEVICE u32 poll(const fa_quantize_params &p, const piece at, seen &group) {
    constexpr int WORDS = 16; /* of a lane at once */
    if (group.end != at.end) group = {at.end, at.begin, 0};
    while (group.ticket < at.end) {
        u32 words[WORDS], most = group.most;
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            words[i] = group.ticket + 32 * i < at.end
                           ? ld_relaxed(p.maxima + min(group.ticket + 32 * i + lane(), at.end - 1))
                           : 1; /* a maximum of 0 */
#pragma unroll
        for (int i = 0; i < WORDS; i++) most = max(most, words[i] - 1);
        most = __reduce_max_sync(0xffffffff, most);
        if (most == INCOMPLETE) return INCOMPLETE;
        group.most = most, group.ticket += 32 * WORDS;
    }
    return group.most;
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

constexpr u32 NO_TICKET = 0xffffffff;

/* What one lane of the scheduler warp knows. links[ticket] is the piece that was dropped before. */
struct schedule {
    u32 drawn;   /* the ticket of the next new piece */
    u32 dropped; /* the youngest dropped piece of a group that may go on, or NO_TICKET */
    u32 again;   /* the next dropped piece that is loaded again, or NO_TICKET */
    int num_open; /* new pieces that may yet be dropped */
};

/* Finds step idx. A new piece LAG + 1 steps before is written when all steps before this one are measured. It is
 * dropped if the CTA has drawn yet another piece of its group. */
DEVICE void find_step(const fa_quantize_params &p, shared &smem, int idx, u32 bad_tensors, schedule &s) {
    step &before = smem.steps[(idx + STEPS - LAG - 1) % STEPS], &to = smem.steps[idx % STEPS];
    if (idx > LAG && before.does == NEW) {
        s.num_open--;
        before.is_dropped = s.drawn < before.at.end;
        if (before.is_dropped)
            p.links[before.at.ticket] = s.dropped, s.dropped = before.at.ticket;
        else if (s.dropped != NO_TICKET)
            s.again = s.dropped, s.dropped = NO_TICKET;
    }
    const bool is_new = s.again == NO_TICKET;
    const u32 ticket = is_new ? s.drawn : s.again;
    to.is_dropped = false;
    if (ticket >= (u32)p.num_pieces) {
        to.does = s.num_open > 0 ? NONE : END;
        return;
    }
    to.does = is_new ? NEW : AGAIN;
    if (is_new)
        s.num_open++, s.drawn = atom_inc(p.ticket); /* needed only for the next step */
    else
        s.again = p.links[ticket];
    to.at = find_piece(p, ticket, bad_tensors);
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* The masks of a chunk's signs. */
DEVICE uint4 signs_of(u32 bits) {
    u32 masks[4];
#pragma unroll
    for (int i = 0; i < 4; i++) masks[i] = (bits >> 2 * i & 1) << 15 | (bits >> (2 * i + 1) & 1) << 31;
    return {masks[0], masks[1], masks[2], masks[3]};
}

/* The next one in a ring of slots. */
DEVICE int after(int slot) { return slot == SLOTS - 1 ? 0 : slot + 1; }

/* NOTE: In round k all warps know steps k - LAG to k + AHEAD. The scheduler warp finds step k + AHEAD + 1, and says
 * whether the piece of step k + AHEAD - LAG is dropped. Step k + AHEAD gets the slot of step k - LAG - 1. */
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const __grid_constant__ fa_quantize_params p) {
    extern __shared__ __align__(16) char memory[];
    shared &smem = *(shared *)memory;
    const u32 bad = find_bad_tensors(p);
    if (threadIdx.x < 32)
        smem.signs[place_of(32, 0, threadIdx.x)] = signs_of((u32)(p.signs[threadIdx.x / 8] >> threadIdx.x % 8 * 8));
    const bool schedules = warp() == WARPS;
    schedule s = {schedules && lane() == 0 ? atom_inc(p.ticket) : 0, NO_TICKET, NO_TICKET, 0};
    seen group = {INCOMPLETE, 0, 0};
    int loaded = 0, measured = 0, written = 0; /* slots of steps k + AHEAD, k and k - LAG */
    for (int k = -AHEAD - 1;; k++) {
        const step &now = smem.steps[k & (STEPS - 1)], &old = smem.steps[(k - LAG) & (STEPS - 1)];
        const bool measures = k >= 0 && now.does == NEW;
        const kind did = k < LAG ? NONE : old.does;
        const bool writes = did == AGAIN || (did == NEW && !old.is_dropped);
        if (did == END) break;

        /* The scheduler warp finds a step, and looks at the group that is written. The others load and measure. */
        if (schedules) {
            if (lane() == 0) find_step(p, smem, k + AHEAD + 1, bad, s);
            __syncwarp();
            if (writes) {
                const u32 most = poll(p, old.at, group);
                if (lane() == 0) smem.early[k & 1] = most;
            }
        } else {
            if (k >= -AHEAD) {
                const step &next = smem.steps[(k + AHEAD) & (STEPS - 1)];
                __syncwarp(); /* no lane reads the slot */
                if (next.does <= AGAIN)
                    load(p, next.at, smem.slots[loaded], next.does == NEW ? l2_evict_normal() : l2_evict_first());
                cp_async_commit_group();
                loaded = after(loaded);
            }
            if (k >= 0) {
                cp_async_wait_group<AHEAD>();
                __syncwarp();
                const u32 word = measures ? measure(p, now.at, smem, smem.slots[measured]) : 0;
                if (lane() == 0) smem.words[k & 1][warp()] = word;
                measured = after(measured);
            }
        }
        __syncthreads();

        /* The scheduler warp publishes the maximum, and waits for the group if it was not complete. */
        u32 most = writes ? smem.early[k & 1] : 0;
        const bool waits = most == INCOMPLETE;
        if (schedules) {
            if (measures && lane() == 0) {
                u32 of_piece = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) of_piece = max(of_piece, smem.words[k & 1][w]);
                st_relaxed(p.maxima + now.at.ticket, of_piece + 1);
            }
            while (most == INCOMPLETE) most = poll(p, old.at, group);
            if (waits && lane() == 0) smem.late = most;
        }
        if (waits) {
            __syncthreads();
            most = smem.late;
        }
        if (schedules || k < LAG) continue;
        if (writes) write(p, old.at, smem, smem.slots[written], most);
        written = after(written);
    }
}
