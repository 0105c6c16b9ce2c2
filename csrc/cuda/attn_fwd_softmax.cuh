/* The softmax of attn_fwd_sm90.cu, in registers: scores of two rows of a thread, as wgmma leaves them, become P. */
#ifndef FA_ATTN_FWD_SOFTMAX_CUH
#define FA_ATTN_FWD_SOFTMAX_CUH

#include "attn_fwd_tiles.cuh"
#include "philox.cuh"

/* Registers of a thread: it holds two rows, l / 4 and l / 4 + 8 of its warp's 16, and in each group of 8 columns the
 * columns 2 (l % 4) + {0, 1}. Register i of S belongs to row i / 2 % 2 of the two and to column column_of(i). */
constexpr int S_REGS = BLOCK_KV / 2, O_REGS = HEAD_DIM / 2, P_REGS = BLOCK_KV / 4;
DEVICE constexpr int row_of(int i) { return i / 2 % 2; }
DEVICE constexpr int column_of(int i) { return 8 * (i / 4) + i % 2; }

/* The running softmax of two rows. */
struct softmax_rows {
    float max[2];      /* -inf: no score above -inf yet, so there is no m */
    float max_log2[2]; /* c m + HEADROOM, what exponents are measured from; 0 without m */
    float sum[2];      /* of this thread's columns */
};

/* Softcap and ALiBi, in natural units; first_key and diagonal as in mask_scores.
 * softcap tanh(x / softcap) = softcap - 2 softcap / (1 + exp(2 x / softcap)): the hardware's tanh is right to 2^-11 only,
 * which shows in lse. */
DEVICE void change_scores(float (&s)[S_REGS], const params &p, float slope, int first_key, int diagonal) {
    const float exponent = p.softcap > 0 ? p.score_scale * 2 * LOG2_E / p.softcap : 0;
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        float x = p.softcap > 0 ? p.softcap - 2 * p.softcap * rcp(1 + ex2(s[i] * exponent)) : s[i] * p.score_scale;
        s[i] = x - slope * fabsf((float)(diagonal + 8 * row_of(i) - first_key - column_of(i)));
    }
}

/* Keys that a row does not see get -inf. first_key: this thread's first column; diagonal: this thread's first row plus
 * len_kv - len_q, the last key that causal attention would let it see. */
DEVICE void mask_scores(float (&s)[S_REGS], const params &p, int len_kv, int first_key, int diagonal) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int begin = keys_begin(p, diagonal + 8 * r) - first_key;
        const int end = keys_end(p, diagonal + 8 * r, len_kv) - first_key;
#pragma unroll
        for (int i = 0; i < S_REGS; i++)
            if (row_of(i) == r && (column_of(i) >= end || (LOCAL && column_of(i) < begin))) s[i] = -INF;
    }
}

/* The larger of two floats that are not negative, or are both looked at as far as they are not. */
DEVICE int larger(int x, float y) { return max(x, __float_as_int(y)); }

/* Is a score so far above m that P might not be a float, or not in fp16? Where m is negative, some go unnoticed; the tile
 * fails then. Whole warp. */
DEVICE bool overflows(const float (&s)[S_REGS], const softmax_rows &rows, float scale_log2) {
    int largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < S_REGS; i++) largest[row_of(i)] = larger(largest[row_of(i)], s[i]);
    const float limit = BF16 ? 64 : 8;
    return __any_sync(0xffffffffu, fmaf(__int_as_float(largest[0]), scale_log2, -rows.max_log2[0]) > limit ||
                                       fmaf(__int_as_float(largest[1]), scale_log2, -rows.max_log2[1]) > limit);
}

/* The largest of four lanes' x. */
DEVICE float max_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* Raises m to the largest score. What was summed under the old m is to be multiplied by alpha. is_exact: it has been the
 * largest score before. */
DEVICE void raise_max(const float (&s)[S_REGS], softmax_rows &rows, float (&alpha)[2], float scale_log2,
                      bool is_exact) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float old = rows.max[r], old_log2 = rows.max_log2[r];
        float even = -INF, odd = -INF;
#pragma unroll
        for (int i = 2 * r; i < S_REGS; i += 4) even = fmaxf(even, s[i]), odd = fmaxf(odd, s[i + 1]);
        const float x = max_of_quad(fmaxf(even, odd)), x_log2 = x * scale_log2 + HEADROOM;
        rows.max[r] = fmaxf(old, x);
        rows.max_log2[r] = rows.max[r] == -INF ? 0 : old == -INF ? x_log2 : fmaxf(old_log2, x_log2);
        const float change = is_exact ? (old - rows.max[r]) * scale_log2 : old_log2 - rows.max_log2[r];
        alpha[r] = ex2(old == -INF ? -INF : change);
        rows.sum[r] *= alpha[r];
    }
}

/* A P above this, or four of them together, exceeds that of m's own key and weighs in the row. sum: the row's, without the
 * step, of this thread's columns, a quarter of all. */
DEVICE float limit_of_p(float sum) {
    const float one = __int_as_float((127 - (int)HEADROOM) << 23), limit = fmaxf(LARGE_SHARE * sum, one);
    return BF16 ? limit : fminf(limit, 256 * one); /* fp16 has no room for more */
}

/* Whole warp. */
DEVICE bool any_exceeds(const int (&largest)[2], const float (&limits)[2]) {
    return __any_sync(0xffffffffu, __int_as_float(largest[0]) > limits[0] || __int_as_float(largest[1]) > limits[1]);
}

/* S is P by now. Where one exceeds that of m's own key, m is raised to its score, and P follows. Whole warp. */
DEVICE void raise_to_p(float (&s)[S_REGS], softmax_rows &rows, float (&alpha)[2]) {
    int largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < S_REGS; i++) largest[row_of(i)] = larger(largest[row_of(i)], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float growth = fmaxf(0, lg2(max_of_quad(__int_as_float(largest[r]))) + HEADROOM);
        const float next = rows.max_log2[r] + growth;
        /* Beyond what alpha can be, P may be inf, too: NaN, which fails. */
        alpha[r] = growth < 120 ? ex2(rows.max_log2[r] - next) : __int_as_float(0x7fffffff);
        rows.max_log2[r] = next;
        rows.sum[r] *= alpha[r];
    }
#pragma unroll
    for (int i = 0; i < S_REGS; i++) s[i] *= alpha[row_of(i)];
}

/* Scores beyond the numbers of fp32 in units of log2 become infinite: c m would be, and lse with it, while c (S - m) is not. */
DEVICE void make_infinite(float (&s)[S_REGS], float scale_log2) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++)
        if (fabsf(s[i] * scale_log2) == INF) s[i] *= INF;
}

/* S becomes P, where every step raises m to the largest score: right for huge scores, too, of which c S - c m is a
 * difference of roundings. */
DEVICE void exponentiate_exactly(float (&s)[S_REGS], const softmax_rows &rows, float scale_log2) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        const float m = rows.max[row_of(i)] == -INF ? 0 : rows.max[row_of(i)];
        s[i] = ex2(fmaf(s[i] - m, scale_log2, -HEADROOM));
    }
}

/* S becomes P, for the rows asked for. */
DEVICE void exponentiate_rows(float (&s)[S_REGS], const softmax_rows &rows, float scale_log2, bool first_row,
                              bool second_row) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++)
        if (row_of(i) == 0 ? first_row : second_row) s[i] = ex2(fmaf(s[i], scale_log2, -rows.max_log2[row_of(i)]));
}

/* The kept elements of P, by the generator of cpu/dropout.h: one call serves the 16 registers of a patch of 16 rows and
 * 32 keys, byte i for register i, because that mapping was drawn for these lanes. */
DEVICE void drop(float (&s)[S_REGS], u64 seed, u64 stream, u32 row_patch, u32 key_patch, int keep_max) {
    const u64 low = stream + threadIdx.x % 32;
#pragma unroll
    for (int patch = 0; patch < S_REGS / 16; patch++) {
        u32 words[4];
        philox(words, low, row_patch, key_patch + patch, seed);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if ((int)(words[i / 4] >> 8 * (i % 4) & 0xff) > keep_max) s[16 * patch + i] = 0;
    }
}

#endif
