/* q, k and v become float8_e4m3fn with a factor, its descale, for every sequence and key head:
 *
 *   y       = x, or the rotated x
 *   descale = max |y| / 448, at least 2^-126; 1 if every y is 0; infinite if an x is infinite
 *   out     = e4m3(y * (1 / descale)), rounded to nearest even
 *
 * All arithmetic is fp32 and rounds each step. Magnitudes below 2^-126 count as 0. The maximum ignores NaN, so a NaN
 * stays where it is. The query heads of a key head share a descale. So does the whole tensor, if is_per_tensor.
 *
 * The rotation of a row: columns get signs, then each block of n columns is multiplied by a Hadamard matrix / sqrt(n).
 * The blocks are the powers of two whose sum is d, the largest first. A block takes log2(n) steps. Step i = 0, 1, ..
 * replaces each pair (a, b) of columns that differ in bit i of their index by (a + b, a - b). The last step multiplies
 * by 1 / sqrt(n), and a result of -0 becomes 0. */
#ifndef FA_QUANTIZATION_H
#define FA_QUANTIZATION_H

#include "flash_attn.h"

/* Column c changes its sign if bit c % 64 of element c / 64 is set. The bits are the first outputs of SplitMix64 with
 * seed 0. They never change, because caches keep rotated keys. */
#define FA_ROTATION_SIGNS {0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f, 0xf88bb8a8724c81ec}

/* One of q, k and v. */
typedef struct {
    fa_view x;                 /* [b, row, h, d]; packed: stride_b = 0 */
    uint8_t *out;              /* contiguous, the shape of x */
    float *descale;            /* [b, h_kv] contiguous; is_per_tensor: one float */
    const int32_t *cu_seqlens; /* [b + 1]; NULL: dense */
    int64_t rows;              /* dense: of a sequence; packed: of the tensor */
    int64_t g, d;              /* heads of a key head, columns */
    bool rotates;
} fa_quantized;

typedef struct {
    fa_device device;
    int device_idx;
    fa_dtype dtype; /* of q, k and v: fp16, bf16 or fp32 */
    int64_t b, h_kv;
    bool is_per_tensor;
    fa_quantized tensors[3];
} fa_quantization;

#endif
