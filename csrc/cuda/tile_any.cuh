/* The generic forward and backward share this file: tiles in shared memory, products of a warp, scores and dropout.
 *
 * A warp owns BLOCKS blocks of 16 rows. The warp holds every tile [16, 8 n] in the accumulators' order of
 * mma.m16n8k16, whatever the dtype. Fragment n of lane l has the rows l / 4 and, for elements 2 and 3, l / 4 + 8.
 * The fragment has the columns 8 n + 2 (l % 4) + {0, 1}. Tensor cores multiply fp16 and bf16, and ordinary FMAs
 * multiply fp32. All blocks of a warp use each value that the warp reads from the other side's tile. */
#ifndef FA_TILE_ANY_CUH
#define FA_TILE_ANY_CUH

#include "e4m3.cuh"
#include "philox.cuh"
#include "score.cuh"
#include "sequence.cuh"

#ifndef F32
#error "dtype: F32, or another: 0 or 1"
#endif
#ifndef E4M3
#define E4M3 0 /* of kernels that do not know e4m3 */
#endif
#ifndef FLEX
#define FLEX 0 /* of kernels that do not know a user's functions */
#endif
#if FLEX
#include "flex.cuh"
typedef with_mods<fa_cuda_problem> problem;
constexpr bool MODS_CHANGE_SCORES = FLEX_SCORE;
#else
typedef fa_cuda_problem problem;
constexpr bool MODS_CHANGE_SCORES = false;
#endif

using factor = element::factor;

constexpr u32 WHOLE_WARP = 0xffffffffu;

/* ldmatrix and the loads of fp32 require that eight rows of a tile in shared memory begin in different groups of four
 * banks. So rows are 16 bytes longer than their HEAD_DIM elements, or SWIZZLES is 1: then piece c of 16 bytes of row r
 * lies at c ^ r % 8. */
#ifndef SWIZZLES
#define SWIZZLES 0
#endif
constexpr int PITCH = HEAD_DIM + (SWIZZLES ? 0 : 16 / sizeof(factor));
static_assert(!SWIZZLES || HEAD_DIM % 64 == 0, "whole rows of eight pieces");

/* The place of a column in its row. */
DEVICE int swizzled(int row, int column) { return SWIZZLES ? column ^ row % 8 * 8 : column; }
constexpr int THREADS = 32 * WARPS;

DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int warp() { return threadIdx.x / 32; }

#if FLEX
/* Takes fragment 0 out of a tile's registers: the others move up by one place, and `last` comes behind them. */
template <int N> DEVICE void move_up(float (&tile)[N][4], const float (&last)[4]) {
#pragma unroll
    for (int n = 0; n + 1 < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) tile[n][e] = tile[n + 1][e];
#pragma unroll
    for (int e = 0; e < 4; e++) tile[N - 1][e] = last[e];
}
#endif

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

/* Does load_tile's work in pieces of BYTES bytes. Bit r of `present` says that the r-th row of the warp is present. */
template <int ROWS, int BYTES> DEVICE void copy_rows(factor *tile, const factor *own_row, u32 present, int d) {
    constexpr int PIECE = BYTES / sizeof(factor), PIECES = HEAD_DIM / PIECE; /* pieces of a row */
    constexpr int NUM = ROWS / WARPS * PIECES / 32, AT_ONCE = NUM < 8 ? NUM : NUM % 8 == 0 ? 8 : 6;
    static_assert(ROWS / WARPS * PIECES % 32 == 0 && NUM % AT_ONCE == 0, "no lane has less to do");
    factor *own_tile = tile + warp() * (ROWS / WARPS) * PITCH, values[AT_ONCE];
    const int own_lane = laneid();
    /* Where a row has 1, 2, .. 32 pieces, a lane stays in its column and goes down in steps of STEP rows. */
    constexpr int STEP = 32 % PIECES == 0 ? 32 / PIECES : 0;
    const int top = STEP ? own_lane / PIECES : 0, left = STEP ? own_lane % PIECES * PIECE : 0;
    const u32 own_present = STEP && left >= d ? 0 : present >> top;
#pragma unroll 1
    for (int first = 0; first < NUM; first += AT_ONCE) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = own_lane + 32 * (first + n), down = STEP ? (first + n) * STEP : i / PIECES;
            const int column = STEP ? left : i % PIECES * PIECE;
            const factor *row = (const factor *)__shfl_sync(WHOLE_WARP, (u64)own_row, top + down);
            const bool is_there = own_present >> down & 1 && (STEP || column < d);
            factor *to = own_tile + top * PITCH + left + down * PITCH + (column - left);
            if constexpr (BYTES >= 4)
                cp_async<BYTES>(smem_address(to), row + column, is_there);
            else
                values[n] = is_there ? row[column] : factor{};
        }
        /* Values are stored after all AT_ONCE loads. Otherwise each load would wait for memory. */
        if constexpr (BYTES < 4)
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const int i = own_lane + 32 * (first + n);
                own_tile[i / PIECES * PITCH + i % PIECES] = values[n];
            }
    }
}

/* Does load_tile's work for e4m3, which becomes fp16 on the way. The rows come in pieces of BYTES elements. */
template <int ROWS, int BYTES> DEVICE void convert_rows(factor *tile, const e4m3 *own_row, u32 present, int d) {
    constexpr int PIECES = HEAD_DIM / BYTES, NUM = ROWS / WARPS * PIECES / 32;
    constexpr int AT_ONCE = NUM % 4 == 0 ? 4 : 3;
    static_assert(ROWS / WARPS * PIECES % 32 == 0 && NUM % AT_ONCE == 0, "no lane has less to do");
    fp16 *own_tile = (fp16 *)tile + warp() * (ROWS / WARPS) * PITCH;
#pragma unroll 1
    for (int first = 0; first < NUM; first += AT_ONCE) {
        uint2 values[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = laneid() + 32 * (first + n), column = i % PIECES * BYTES;
            const e4m3 *row = (const e4m3 *)__shfl_sync(WHOLE_WARP, (u64)own_row, i / PIECES);
            const bool is_there = present >> i / PIECES & 1 && column < d;
            if (BYTES == 8)
                values[n] = is_there ? *(const uint2 *)(row + column) : make_uint2(0, 0);
            else
                values[n] = make_uint2(is_there ? row[column].bits : 0, 0);
        }
        /* Values are stored after all AT_ONCE loads. Otherwise each load would wait for memory. */
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = laneid() + 32 * (first + n);
            const uint2 low = fp16_of_e4m3(values[n].x), high = fp16_of_e4m3(values[n].y);
            fp16 *to = own_tile + i / PIECES * PITCH + i % PIECES * BYTES;
            if (BYTES == 8)
                *(uint4 *)to = make_uint4(low.x, low.y, high.x, high.y);
            else
                to->bits = (u16)low.x;
        }
    }
}

/* Loads ROWS rows to shared memory, ROWS / WARPS rows by each warp. own_row of lane l is the beginning of the warp's
 * l-th row. Rows that are NULL and columns from `columns` on become zero. All threads call this function. The tile is
 * complete after the wait for its group of copies and a barrier. */
template <int ROWS> DEVICE void load_tile(const fa_cuda_problem &p, factor *tile, const element *own_row, int columns) {
    static_assert(ROWS % WARPS == 0 && ROWS / WARPS <= 32, "a lane for each row of a warp");
    const u32 present = __ballot_sync(WHOLE_WARP, own_row != nullptr);
    if (!own_row) own_row = (const element *)p.q.data; /* a valid address, from which nothing is read */
    const factor *row = (const factor *)own_row;       /* if there is nothing to convert */
    if constexpr (E4M3) {
        if (p.piece_bytes >= 8)
            convert_rows<ROWS, 8>(tile, (const e4m3 *)own_row, present, columns);
        else
            convert_rows<ROWS, 1>(tile, (const e4m3 *)own_row, present, columns);
    } else if (p.piece_bytes == 16)
        copy_rows<ROWS, 16>(tile, row, present, columns);
    else if (p.piece_bytes == 8)
        copy_rows<ROWS, 8>(tile, row, present, columns);
    else if (p.piece_bytes == 4)
        copy_rows<ROWS, 4>(tile, row, present, columns);
    else
        copy_rows<ROWS, sizeof(factor)>(tile, row, present, columns);
}

/* v may have other columns than k. Tiles of HEAD_DIM columns take the columns of v in blocks [first, first + num). The
 * plan gives a problem with several blocks to the widest tiles. */
constexpr bool MAY_HAVE_V_BLOCKS = OF_3 && HEAD_DIM == 256;

struct v_block {
    int first, num;
};
DEVICE v_block v_block_at(const fa_cuda_problem &p, int idx) {
    if (!MAY_HAVE_V_BLOCKS) return {0, OF_3 ? p.d_v : p.d};
    return {idx * HEAD_DIM, min(p.d_v - idx * HEAD_DIM, HEAD_DIM)};
}

/* Waits until all requested tiles but the last PENDING tiles have come, and all warps have finished their earlier
 * work. */
template <int PENDING> DEVICE void wait_for_tiles() {
    cp_async_wait_group<PENDING>();
    __syncthreads();
}

/* Does some element of the tile hold NaN or inf? All threads get the answer. */
template <int ROWS> DEVICE bool has_nan_or_inf(const factor *tile) {
    constexpr int WORDS = HEAD_DIM * (int)sizeof(factor) / 4;
    u32 signs = 0;
    for (int i = 4 * threadIdx.x; i < ROWS * WORDS; i += 4 * THREADS) {
        signs |= nan_or_inf_signs<factor>(*(const uint4 *)((const u32 *)(tile + i / WORDS * PITCH) + i % WORDS));
    }
    return __syncthreads_or((signs & factor::SIGNS) != 0);
}

/* ---- products -------------------------------------------------------------------------------------------------- */

/* S [16 BLOCKS, 8 N] = A B^T, or S += A B^T with ADDS. A are the warp's rows and B are 8 N rows, both in shared
 * memory. Columns from `columns` on are zero, and may be left out. */
template <bool ADDS = false, int N>
DEVICE void multiply_rows(float (&s)[BLOCKS][N][4], const factor *a, const factor *b, int columns = HEAD_DIM) {
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
            if (!ADDS) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
    if constexpr (factor::ON_TENSOR_CORES) {
        static_assert(N % 2 == 0, "ldmatrix brings two fragments at a time");
        constexpr int BYTES = factor::BYTES;
        const u32 a_row = smem_address(a + lane() % 16 * PITCH + lane() / 16 * 8);
        const u32 b_row = smem_address(b + (lane() / 16 * 8 + lane() % 8) * PITCH + lane() / 8 % 2 * 8);
#pragma unroll
        for (int k = 0; k < HEAD_DIM; k += 16) {
            if (k >= columns) break;
            u32 a_regs[BLOCKS][4], b_regs[4];
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) ldmatrix_x4(a_regs[m], a_row + (16 * m * PITCH + k) * BYTES);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                ldmatrix_x4(b_regs, b_row + (8 * n * PITCH + k) * BYTES);
#pragma unroll
                for (int m = 0; m < BLOCKS; m++) {
                    mma_m16n8k16<factor>(s[m][n], a_regs[m], b_regs[0], b_regs[1]);
                    mma_m16n8k16<factor>(s[m][n + 1], a_regs[m], b_regs[2], b_regs[3]);
                }
            }
        }
    } else {
        const factor *a_row = a + lane() / 4 * PITCH, *b_row = b + 2 * (lane() % 4) * PITCH;
#pragma unroll 1
        for (int k = 0; k < columns; k += 4) {
            float4 a_regs[2 * BLOCKS];
#pragma unroll
            for (int m = 0; m < 2 * BLOCKS; m++) a_regs[m] = *(const float4 *)(a_row + 8 * m * PITCH + k);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 y = *(const float4 *)(b_row + (8 * n + e) * PITCH + k);
#pragma unroll
                    for (int m = 0; m < 2 * BLOCKS; m++) {
                        const float4 x = a_regs[m];
                        float &sum = s[m / 2][n][m % 2 * 2 + e];
                        sum += x.x * y.x, sum += x.y * y.y, sum += x.z * y.z, sum += x.w * y.w;
                    }
                }
        }
    }
}

constexpr int COLUMNS = HEAD_DIM / 8; /* fragments of a row of HEAD_DIM */

/* Returns the first of the two neighbouring columns that a thread holds of fragment c of O. In fp32 no tensor core
 * prescribes the order of columns. There the columns of two neighbouring fragments lie side by side, so that one
 * load reads four columns. */
DEVICE int column_of(int c) {
    return factor::ON_TENSOR_CORES ? 8 * c + 2 * (lane() % 4) : 8 * (c - c % 2) + 4 * (lane() % 4) + 2 * (c % 2);
}

/* Loads a thread's columns of fragments c and c + 1 from a row in shared memory. */
DEVICE void load_columns(float (&x)[4], const factor *row, int c) {
    if constexpr (factor::ON_TENSOR_CORES) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = cvt_f32(row[column_of(c + i / 2) + i % 2]);
    } else {
        const float4 four = *(const float4 *)(row + column_of(c));
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    }
}

/* O [16 BLOCKS, HEAD_DIM] += W [16 BLOCKS, 8 N] B by FMAs. B are 8 N rows in shared memory. Bit 4 n + e of `counts`
 * says that the pair of element e of fragment n counts. Where a pair does not count, B may hold any value. With
 * ALL_COUNT all pairs count and `counts` is ignored. The lane that holds a value of W sends the value to the other
 * three lanes of its rows. */
template <bool ALL_COUNT, int N>
DEVICE void accumulate_by_fma(float (&o)[BLOCKS][COLUMNS][4], const float (&w)[BLOCKS][N][4], const factor *b,
                              const u32 (&counts)[BLOCKS]) {
#pragma unroll 1
    for (int owner = 0; owner < 4; owner++) {
        const int from = lane() / 4 * 4 + owner;
        u32 bits[BLOCKS];
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) bits[m] = ALL_COUNT ? 0 : __shfl_sync(WHOLE_WARP, counts[m], from);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const factor *row = b + (8 * n + 2 * owner + e) * PITCH;
                float weights[2 * BLOCKS];
                bool does_count[2 * BLOCKS];
#pragma unroll
                for (int m = 0; m < 2 * BLOCKS; m++) {
                    weights[m] = __shfl_sync(WHOLE_WARP, w[m / 2][n][m % 2 * 2 + e], from);
                    does_count[m] = ALL_COUNT || (bits[m / 2] >> (4 * n + m % 2 * 2 + e) & 1);
                }
#pragma unroll
                for (int c = 0; c < COLUMNS; c += 2) {
                    float x[4];
                    load_columns(x, row, c);
#pragma unroll
                    for (int m = 0; m < 2 * BLOCKS; m++)
                        if (does_count[m])
#pragma unroll
                            for (int i = 0; i < 4; i++) o[m / 2][c + i / 2][m % 2 * 2 + i % 2] += weights[m] * x[i];
                }
            }
    }
}

/* Does the same on tensor cores for 16 bits, with W rounded. This function serves tiles in which every number is
 * finite or every pair counts. */
template <int N>
DEVICE void accumulate(float (&o)[BLOCKS][COLUMNS][4], const float (&w)[BLOCKS][N][4], const factor *b) {
    if constexpr (factor::ON_TENSOR_CORES) {
        constexpr int BYTES = factor::BYTES;
        const u32 b_row = smem_address(b + lane() % 16 * PITCH + lane() / 16 * 8);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 a_regs[BLOCKS][4], b_regs[4];
#pragma unroll
            for (int m = 0; m < BLOCKS; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a_regs[m][i] = cvt_x2<factor>(w[m][n + i / 2][i % 2 * 2], w[m][n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 2) {
                ldmatrix_x4_trans(b_regs, b_row + (8 * n * PITCH + 8 * c) * BYTES);
#pragma unroll
                for (int m = 0; m < BLOCKS; m++) {
                    mma_m16n8k16<factor>(o[m][c], a_regs[m], b_regs[0], b_regs[1]);
                    mma_m16n8k16<factor>(o[m][c + 1], a_regs[m], b_regs[2], b_regs[3]);
                }
            }
        }
    } else {
        const u32 unused[BLOCKS] = {};
        accumulate_by_fma<true>(o, w, b, unused);
    }
}

/* Weights of pairs that do not see each other may lie in shared memory as -0. Other weights are never -0 there. */
constexpr u32 UNSEEN = 0x8000;

/* Marks such pairs among two weights. Bit 0 of `seen` is that of the low one. */
DEVICE u32 mark_unseen(u32 pair, u32 seen) {
    const u32 low = pair & 0xffff, high = pair >> 16;
    return (!(seen & 1) ? UNSEEN : low == UNSEEN ? 0 : low) | (!(seen & 2) ? UNSEEN : high == UNSEEN ? 0 : high) << 16;
}

/* Stores row l / 4 + 8 half of a block of O times `weight`, `columns` elements. If is_zero is set, the row becomes
 * zeros whatever O holds. */
DEVICE void store_row(const fa_cuda_problem &p, element::output *row, const float (&o)[COLUMNS][4], int half,
                      float weight, bool is_zero, int columns) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const int column = column_of(c);
        const float x_0 = is_zero ? 0 : o[c][2 * half] * weight, x_1 = is_zero ? 0 : o[c][2 * half + 1] * weight;
        if constexpr (factor::ON_TENSOR_CORES)
            if (p.piece_bytes >= 4) {
                if (column < columns) *(u32 *)(row + column) = cvt_x2<element::output>(x_0, x_1);
                continue;
            }
        if (column < columns) row[column] = cvt<element::output>(x_0);
        if (column + 1 < columns) row[column + 1] = cvt<element::output>(x_1);
    }
}

/* ---- scores ---------------------------------------------------------------------------------------------------- */

/* Returns the factor of q, k or v for a query head. */
DEVICE float descale_at(const fa_cuda_descale &t, const fa_cuda_problem &p, const sequence &s, int head) {
    return t.data ? t.data[s.b_idx * t.stride_b + head / (p.h / p.h_kv) * t.stride_h] : 1;
}

/* A scorer holds the parameters of score.cuh for one query head. */
struct scorer {
    float score_scale, softcap;
    score_head at;
    bool is_plain; /* the score is scale q.k, and a larger q.k gives a larger score */

    DEVICE scorer(const fa_cuda_problem &p, const sequence &s, int head) {
        score_scale = p.scale, softcap = p.softcap;
        if (E4M3) score_scale *= descale_at(p.q_descale, p, s, head) * descale_at(p.k_descale, p, s, head);
        at = {s.b_idx, head, s.len_kv - s.len_q,
              p.alibi_slopes ? p.alibi_slopes[s.b_idx * p.alibi_stride_b + head] : 0};
        is_plain = score_scale > 0 && score_scale < 1e30f && softcap == 0 && at.slope == 0;
    }

    /* Computes the score of row i and key j from q.k, and the derivative of the score by scale q.k. */
    DEVICE float operator()(float qk, int i, int j, float &derivative) const {
        return score_of<EXACT, true, scorer>(*this)(qk, at, i + at.shift, j, derivative);
    }
};

/* ---- dropout (../cpu/dropout.h) -------------------------------------------------------------------------------- */

struct dropout {
    u64 seed, stream; /* the 64 low bits of lane 0's counter */
    int keep_max;
    bool is_on;

    DEVICE dropout(const fa_cuda_problem &p, int b_idx, int head) {
        is_on = p.rng_state != nullptr;
        seed = is_on ? p.rng_state[0] : 0;
        stream = (is_on ? p.rng_state[1] : 0) + ((u64)b_idx * p.h + head) * 32;
        keep_max = p.keep_max;
    }

    DEVICE void draw(u32 (&out)[4], int row_patch, int col_patch, int philox_lane) const {
        philox(out, stream + philox_lane, row_patch, col_patch, seed);
    }

    DEVICE u32 keeps(u32 word, int byte) const { return (int)(word >> 8 * byte & 255) <= keep_max; }

    /* The 16 rows of a tile are queries from `row` on, and its columns are keys from `column` on. `row` and `column`
     * are multiples of 16. Bit 4 n + e says whether dropout keeps element e of fragment n. The generator's lanes are
     * the warp's lanes, so one draw serves 4 fragments. */
    template <int N> DEVICE u32 kept_rows_are_queries(int row, int column) const {
        u32 kept = 0, words[4];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int at = column / 8 + n;
            if (n == 0 || (N % 4 ? at : n) % 4 == 0) draw(words, row / 16, at / 4, lane());
            const u32 word = N % 4 ? (at % 4 == 0   ? words[0]
                                      : at % 4 == 1 ? words[1]
                                      : at % 4 == 2 ? words[2]
                                                    : words[3])
                                   : words[n % 4];
#pragma unroll
            for (int e = 0; e < 4; e++) kept |= keeps(word, e) << (4 * n + e);
        }
        return kept;
    }

    /* Does the same where the 16 rows are keys and the columns are queries. A draw serves two fragments, for one of
     * two columns. */
    template <int N> DEVICE u32 kept_rows_are_keys(int key, int query) const {
        const int g = lane() / 4, t = lane() % 4;
        u32 kept = 0, words[4];
#pragma unroll
        for (int n = 0; n < N; n += 2)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                draw(words, query / 16 + n / 2, key / 32, 4 * (2 * t + e) + g / 2);
                const u32 first = key % 32 == 0 ? words[0] : words[2], second = key % 32 == 0 ? words[1] : words[3];
#pragma unroll
                for (int r = 0; r < 2; r++) { /* queries 0-7 and 8-15 of the patch */
                    kept |= keeps(first, 2 * r + g % 2) << (4 * (n + r) + e);
                    kept |= keeps(second, 2 * r + g % 2) << (4 * (n + r) + 2 + e);
                }
            }
        return kept;
    }
};

#endif
