/* The bias of one tile on one block of keys, in the form of the scores: [keys][lanes], in units of log2.
 *
 * A bias is often a mask, and its largest negative numbers stand for "masked" as -inf does. Their product with log2(e)
 * would overflow to -inf, and a row of such numbers would lose its uniform average. So numbers below -2^127 get a
 * smaller slope, which keeps them finite and keeps their order. */
#ifndef FA_CPU_BIAS_H
#define FA_CPU_BIAS_H

#include "elementwise.h"
#include "pack.h"

#define FAR_SLOPE 0.55f

INLINE vec bias_in_log2(vec bias) {
    const vec near = vec_mul(bias, vec_set((float)LOG2_E));
    const vec far = vec_fma(bias, vec_set(FAR_SLOPE), vec_set(-(float)(LOG2_E - FAR_SLOPE) * 0x1p127f));
    return vec_select(vec_lt(bias, vec_set(-0x1p127f)), far, near);
}

INLINE float bias_elem(const char *at, fa_dtype DTYPE) {
    float lane[LANES];
    char padded[4 * LANES] = {0};
    memcpy(padded, at, (size_t)DTYPE_BYTES(DTYPE));
    vec_store(lane, load_elems(padded, DTYPE));
    return lane[0];
}

/* rows [lanes]: where a lane's bias of the first key lies. Neighbouring lanes of the same row are common. */
INLINE void bias_tile_of(float *dst, int64_t lanes, const char *const *rows, int64_t num_keys, int64_t stride_key,
                         fa_dtype DTYPE) {
    bool shared = true;
    for (int64_t lane = 1; lane < lanes; lane++) shared &= rows[lane] == rows[0];
    if (stride_key == 1 && shared) {
        for (int64_t key = 0; key < num_keys; key += LANES) {
            const int64_t count = num_keys - key < LANES ? num_keys - key : LANES;
            float of_keys[LANES];
            char padded[4 * LANES];
            vec_store(of_keys, bias_in_log2(load_elems(readable(rows[0], key, num_keys, LANES, padded, DTYPE), DTYPE)));
            for (int i = 0; i < count; i++, dst += lanes)
                for (int64_t lane = 0; lane < lanes; lane += LANES) vec_store(dst + lane, vec_set(of_keys[i]));
        }
        return;
    }
    if (stride_key != 1) {
        for (int64_t key = 0; key < num_keys; key++, dst += lanes)
            for (int64_t lane = 0; lane < lanes; lane += LANES) {
                float line[LANES];
                for (int i = 0; i < LANES; i++)
                    line[i] = bias_elem(rows[lane + i] + key * stride_key * DTYPE_BYTES(DTYPE), DTYPE);
                vec_store(dst + lane, bias_in_log2(vec_load(line)));
            }
        return;
    }
    for (int64_t lane = 0; lane < lanes; lane += LANES)
        for (int64_t key = 0; key < num_keys; key += LANES) {
            const int64_t count = num_keys - key < LANES ? num_keys - key : LANES;
            vec t[LANES];
            char padded[4 * LANES];
            UNROLL for (int i = 0; i < LANES; i++) t[i] =
                bias_in_log2(load_elems(readable(rows[lane + i], key, num_keys, LANES, padded, DTYPE), DTYPE));
            vec_transpose(t);
            for (int i = 0; i < count; i++) vec_store(dst + (key + i) * lanes + lane, t[i]);
        }
}

/* Fills dst for keys [key, key + num_keys) of the bias, which counts left padding. A lane holds row[lane] of
 * head[lane]. */
OUTLINE void bias_tile(float *dst, const fa_scores *bias, int64_t b_idx, const int64_t *row, const int64_t *head,
                       int64_t lanes, int64_t key, int64_t num_keys) {
    const char *rows[2 * FA_PATCH_COLS * FA_PATCH_ROWS];
    const fa_dtype dtype = bias->dtype;
    for (int64_t lane = 0; lane < lanes; lane++)
        rows[lane] = (const char *)bias->data + (b_idx * bias->stride_b + head[lane] * bias->stride_h +
                                                 row[lane] * bias->stride_row + key * bias->stride_key) *
                                                    DTYPE_BYTES(dtype);
    if (dtype == FA_F32)
        bias_tile_of(dst, lanes, rows, num_keys, bias->stride_key, FA_F32);
    else if (dtype == FA_F16)
        bias_tile_of(dst, lanes, rows, num_keys, bias->stride_key, FA_F16);
    else
        bias_tile_of(dst, lanes, rows, num_keys, bias->stride_key, FA_BF16);
}

#endif
