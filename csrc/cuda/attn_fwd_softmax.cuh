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
    float max[2];      /* m: at most the largest score so far, in fp16 at most lazy_margin below it; -inf: no key yet */
    float max_log2[2]; /* c m, what exponents are measured from; 0 while m is -inf */
    float sum[2];      /* of this thread's columns */
    int threshold[2];  /* the bits of m + lazy_margin as an integer: a score at or above it raises m */
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

/* Does some score of this warp exceed what m allows? Floats compare as integers wherever the larger is positive. */
DEVICE bool exceeds_max(const float (&s)[S_REGS], const softmax_rows &rows) {
    int largest[2][2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int &x = largest[row_of(i)][i / 4];
        x = i % 2 ? max(x, __float_as_int(s[i])) : __float_as_int(s[i]);
    }
#pragma unroll
    for (int i = 8; i < S_REGS; i += 2) {
        int &x = largest[row_of(i)][i / 4 % 2];
        x = max(max(x, __float_as_int(s[i])), __float_as_int(s[i + 1]));
    }
    return __any_sync(0xffffffffu, max(largest[0][0], largest[0][1]) >= rows.threshold[0] ||
                                       max(largest[1][0], largest[1][1]) >= rows.threshold[1]);
}

/* Raises m to the largest score. What was summed under the old m is to be multiplied by alpha. */
DEVICE void raise_max(const float (&s)[S_REGS], softmax_rows &rows, float (&alpha)[2], float scale_log2, float margin) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float old = rows.max[r], old_log2 = rows.max_log2[r];
        float even = old, odd = old;
#pragma unroll
        for (int i = 2 * r; i < S_REGS; i += 4) even = fmaxf(even, s[i]), odd = fmaxf(odd, s[i + 1]);
        float x = fmaxf(even, odd);
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        rows.max[r] = x;
        rows.max_log2[r] = x == -INF ? 0 : x * scale_log2;
        alpha[r] = old == -INF ? 0 : ex2(old_log2 - rows.max_log2[r]);
        rows.sum[r] *= alpha[r];
        rows.threshold[r] = x + margin >= 0 ? __float_as_int(x + margin) : (int)0x80000000;
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
