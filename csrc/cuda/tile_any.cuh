/* What the generic forward and backward share: tiles in shared memory, products of a warp, scores, dropout.
 *
 * A warp owns 16 rows. Everything it holds of a tile [16, 8 n] lies in the accumulators' order of mma.m16n8k16, whatever the
 * dtype: fragment n of lane l has rows l / 4 and (elements 2, 3) l / 4 + 8, columns 8 n + 2 (l % 4) + {0, 1}. fp16 and
 * bf16 are multiplied by tensor cores, fp32 by ordinary FMAs. */
#ifndef FA_TILE_ANY_CUH
#define FA_TILE_ANY_CUH

#include "element.cuh"
#include "sequence.cuh"

#define INF __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;
constexpr u32 WHOLE_WARP = 0xffffffffu;

/* Rows of a tile in shared memory are 16 bytes longer than their HEAD_DIM elements: eight rows then begin in different
 * groups of four banks, which is what ldmatrix and the loads of fp32 ask for. */
constexpr int PIECE = 16 / sizeof(element), PITCH = HEAD_DIM + PIECE;
constexpr int THREADS = 32 * WARPS;
constexpr int LOADS_AT_ONCE = HEAD_DIM == 256 ? 1 : 4; /* of a thread: addresses take registers */

DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int warp() { return threadIdx.x / 32; }
DEVICE int ceil_div(int x, int y) { return (x + y - 1) / y; }

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

/* ROWS rows to shared memory. offset(r) is where row r begins in data, in elements, or -1: such rows, and columns from d
 * on, become zero. All threads; complete after cp_async_wait_all and a barrier. */
template <int ROWS, class Offset>
DEVICE void load_tile(element *tile, const void *data, const fa_cuda_problem &p, Offset offset) {
    const element *source = (const element *)data;
    if (p.is_aligned) {
        constexpr int PIECES = HEAD_DIM / PIECE, STEP = THREADS / PIECES;
        static_assert(THREADS % PIECES == 0 && ROWS % STEP == 0, "a thread keeps its columns");
        const int column = threadIdx.x % PIECES * PIECE, first = threadIdx.x / PIECES;
        const u32 dst = smem_address(tile + first * PITCH + column);
#pragma unroll LOADS_AT_ONCE
        for (int i = 0; i < ROWS / STEP; i++) {
            const long long at = column < p.d ? offset(first + i * STEP) : -1;
            cp_async_16(dst + i * STEP * PITCH * (int)sizeof(element), at >= 0 ? source + at + column : source,
                        at >= 0);
        }
    } else {
        constexpr int AT_ONCE = 2 * LOADS_AT_ONCE; /* one after the other, each would wait for memory */
        static_assert(ROWS * HEAD_DIM % (AT_ONCE * THREADS) == 0, "no thread has less to do");
        for (int first = threadIdx.x; first < ROWS * HEAD_DIM; first += AT_ONCE * THREADS) {
            element values[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const int i = first + n * THREADS, column = i % HEAD_DIM;
                const long long at = column < p.d ? offset(i / HEAD_DIM) : -1;
                values[n] = at >= 0 ? source[at + column] : (element)0;
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const int i = first + n * THREADS;
                tile[i / HEAD_DIM * PITCH + i % HEAD_DIM] = values[n];
            }
        }
    }
}

DEVICE void wait_for_tiles() {
    cp_async_wait_all();
    __syncthreads();
}

/* Does some element of the tile lack a finite value? All threads get the answer. */
template <int ROWS> DEVICE bool has_nan_or_inf(const element *tile) {
    bool found = false;
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const float x = to_float(tile[i / HEAD_DIM * PITCH + i % HEAD_DIM]);
        found |= !(fabsf(x) < INF);
    }
    return __syncthreads_or(found);
}

/* ---- products -------------------------------------------------------------------------------------------------- */

/* S [16, 8 N] = A B^T: A the warp's 16 rows, B 8 N rows, both in shared memory. */
template <int N> DEVICE void multiply_rows(float (&s)[N][4], const element *a, const element *b) {
#pragma unroll
    for (int n = 0; n < N; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#if F32
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll 1
    for (int k = 0; k < HEAD_DIM; k += 4) {
        const float4 a_0 = *(const float4 *)(a + g * PITCH + k), a_1 = *(const float4 *)(a + (g + 8) * PITCH + k);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float4 b_0 = *(const float4 *)(b + (8 * n + 2 * t) * PITCH + k);
            const float4 b_1 = *(const float4 *)(b + (8 * n + 2 * t + 1) * PITCH + k);
            s[n][0] += a_0.x * b_0.x, s[n][0] += a_0.y * b_0.y, s[n][0] += a_0.z * b_0.z, s[n][0] += a_0.w * b_0.w;
            s[n][1] += a_0.x * b_1.x, s[n][1] += a_0.y * b_1.y, s[n][1] += a_0.z * b_1.z, s[n][1] += a_0.w * b_1.w;
            s[n][2] += a_1.x * b_0.x, s[n][2] += a_1.y * b_0.y, s[n][2] += a_1.z * b_0.z, s[n][2] += a_1.w * b_0.w;
            s[n][3] += a_1.x * b_1.x, s[n][3] += a_1.y * b_1.y, s[n][3] += a_1.z * b_1.z, s[n][3] += a_1.w * b_1.w;
        }
    }
#else
    static_assert(N % 2 == 0, "ldmatrix brings two fragments at a time");
    constexpr int BYTES = sizeof(element);
    const u32 a_row = smem_address(a + lane() % 16 * PITCH + lane() / 16 * 8);
    const u32 b_row = smem_address(b + (lane() / 16 * 8 + lane() % 8) * PITCH + lane() / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < HEAD_DIM; k += 16) {
        u32 a_regs[4], b_regs[4];
        ldmatrix_x4(a_regs, a_row + k * BYTES);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(b_regs, b_row + (8 * n * PITCH + k) * BYTES);
            mma_m16n8k16<BF16>(s[n], a_regs, b_regs[0], b_regs[1]);
            mma_m16n8k16<BF16>(s[n + 1], a_regs, b_regs[2], b_regs[3]);
        }
    }
#endif
}

constexpr int COLUMNS = HEAD_DIM / 8; /* fragments of a row of HEAD_DIM */

/* O [16, HEAD_DIM] += W [16, 8 N] B by FMAs: B 8 N rows in shared memory. Bit 4 n + e of `counts`: the pair of element e of
 * fragment n counts; where it does not, B may hold anything. W travels from the lane that holds it to the other three of
 * its rows. */
template <int N>
DEVICE void accumulate_exactly(float (&o)[COLUMNS][4], const float (&w)[N][4], const element *b, u32 counts) {
    const element *b_row = b + 2 * (lane() % 4);
#pragma unroll 1
    for (int owner = 0; owner < 4; owner++) {
        const int from = lane() / 4 * 4 + owner;
        const u32 bits = __shfl_sync(WHOLE_WARP, counts, from);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float w_0 = __shfl_sync(WHOLE_WARP, w[n][e], from);
                const float w_1 = __shfl_sync(WHOLE_WARP, w[n][2 + e], from);
                const bool counts_0 = bits >> (4 * n + e) & 1, counts_1 = bits >> (4 * n + 2 + e) & 1;
                const element *row = b_row + (8 * n + 2 * owner + e) * PITCH;
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    const float b_0 = to_float(row[8 * c]), b_1 = to_float(row[8 * c + 1]);
                    if (counts_0) o[c][0] += w_0 * b_0, o[c][1] += w_0 * b_1;
                    if (counts_1) o[c][2] += w_1 * b_0, o[c][3] += w_1 * b_1;
                }
            }
    }
}

/* The same on tensor cores for 16 bits, W rounded: for tiles in which every number is finite or every pair counts. */
template <int N> DEVICE void accumulate(float (&o)[COLUMNS][4], const float (&w)[N][4], const element *b) {
#if F32
    accumulate_exactly(o, w, b, 0xffffffffu);
#else
    constexpr int BYTES = sizeof(element);
    const u32 b_row = smem_address(b + lane() % 16 * PITCH + lane() / 16 * 8);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b_regs[4];
        const u32 a_regs[4] = {cvt_x2<BF16>(w[n][0], w[n][1]), cvt_x2<BF16>(w[n][2], w[n][3]),
                               cvt_x2<BF16>(w[n + 1][0], w[n + 1][1]), cvt_x2<BF16>(w[n + 1][2], w[n + 1][3])};
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            ldmatrix_x4_trans(b_regs, b_row + (8 * n * PITCH + 8 * c) * BYTES);
            mma_m16n8k16<BF16>(o[c], a_regs, b_regs[0], b_regs[1]);
            mma_m16n8k16<BF16>(o[c + 1], a_regs, b_regs[2], b_regs[3]);
        }
    }
#endif
}

/* Stores rows l / 4 and l / 4 + 8 of O, times their factors. A row whose pointer is NULL is left out; one that is_zero
 * becomes zero whatever O holds. */
DEVICE void store_rows(const fa_cuda_problem &p, const float (&o)[COLUMNS][4], element *const (&rows)[2],
                       const float (&factor)[2], const bool (&is_zero)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (!rows[half]) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int column = 8 * c + 2 * (lane() % 4);
            const float x_0 = is_zero[half] ? 0 : o[c][2 * half] * factor[half];
            const float x_1 = is_zero[half] ? 0 : o[c][2 * half + 1] * factor[half];
#if !F32
            if (p.is_aligned) {
                if (column < p.d) *(u32 *)(rows[half] + column) = cvt_x2<BF16>(x_0, x_1);
                continue;
            }
#endif
            if (column < p.d) rows[half][column] = to_element(x_0);
            if (column + 1 < p.d) rows[half][column + 1] = to_element(x_1);
        }
    }
}

/* ---- scores ---------------------------------------------------------------------------------------------------- */

/* Within 2 units of the last place, near zero too, which the hardware's tanh is not. */
DEVICE float tanh_exactly(float x) {
    const float a = fabsf(x), x2 = x * x;
    if (a < 0.55f)
        return x + x * x2 *
                       (-0.333333194f +
                        x2 * (0.133326024f + x2 * (-0.0538538545f + x2 * (0.0210777503f - x2 * 0.00628246367f))));
    const float y = 1 - 2 / (ex2(2 * LOG2_E * a) + 1);
    return x < 0 ? -y : y;
}

struct scorer {
    float scale, softcap, slope;
    int shift;     /* len_kv - len_q */
    bool is_plain; /* the score is scale q.k, and a larger q.k is a larger score */

    DEVICE scorer(const fa_cuda_problem &p, const sequence &s, int head) {
        scale = p.scale, softcap = p.softcap, shift = s.len_kv - s.len_q;
        slope = p.alibi_slopes ? p.alibi_slopes[s.b_idx * p.alibi_stride_b + head] : 0;
        is_plain = scale > 0 && scale < 1e30f && softcap == 0 && slope == 0;
    }

    /* The score of row i and key j from q.k; capped becomes tanh(s / softcap), 0 without a softcap. */
    DEVICE float operator()(float qk, int i, int j, float &capped) const {
        float x = __fmul_rn(qk, scale); /* rounded, not fused: the same in both passes */
        capped = 0;
        if (softcap > 0) {
            capped = tanh_exactly(x / softcap);
            x = softcap * capped;
        }
        return slope == 0 ? x : x - slope * (float)abs(i + shift - j);
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
        const u64 low = stream + philox_lane;
        u32 x = (u32)low, y = (u32)(low >> 32), z = row_patch, w = col_patch;
        u32 key_0 = (u32)seed, key_1 = (u32)(seed >> 32);
#pragma unroll
        for (int round = 0; round < 7; round++) {
            const u64 product_x = (u64)0xD2511F53u * x, product_z = (u64)0xCD9E8D57u * z;
            x = (u32)(product_z >> 32) ^ y ^ key_0;
            z = (u32)(product_x >> 32) ^ w ^ key_1;
            y = (u32)product_z;
            w = (u32)product_x;
            key_0 += 0x9E3779B9u;
            key_1 += 0xBB67AE85u;
        }
        out[0] = x, out[1] = y, out[2] = z, out[3] = w;
    }

    DEVICE u32 keeps(u32 word, int byte) const { return (int)(word >> 8 * byte & 255) <= keep_max; }

    /* A tile whose 16 rows are queries from `row`, its columns keys from `column`, multiples of 16: bit 4 n + e says
     * whether element e of fragment n is kept. The generator's lanes are the warp's: one draw serves 4 fragments. */
    template <int N> DEVICE u32 kept_rows_are_queries(int row, int column) const {
        u32 kept = 0, words[4];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int at = column / 8 + n;
            if (n == 0 || n % 4 == 0) draw(words, row / 16, at / 4, lane());
            const u32 word = N < 4 ? (at % 4 == 0   ? words[0]
                                      : at % 4 == 1 ? words[1]
                                      : at % 4 == 2 ? words[2]
                                                    : words[3])
                                   : words[n % 4];
#pragma unroll
            for (int e = 0; e < 4; e++) kept |= keeps(word, e) << (4 * n + e);
        }
        return kept;
    }

    /* The same where the 16 rows are keys and the columns queries: a draw serves two fragments, for one of two columns. */
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
