/* Copies between the caller's rows (any dtype, any stride, any page) and the words that products read.
 *
 *   pack_rows      rows [n][d]  ->  words [n][d / WORD_ELEMS]       K; in the backward and with qv V too
 *   pack_lanes     rows [m][d]  ->  words [d / WORD_ELEMS][m]       Q^T, dO^T: a row becomes a lane
 *   pack_columns   rows [n][d]  ->  words [d][n / WORD_ELEMS]       V^T, K^T: words run along the rows
 *   pack_pairs     rows [m][d]  ->  words [m / WORD_ELEMS][d]       Q, dO in the backward: words join neighbouring rows
 *   unpack_lanes   floats [d][m] times a factor per lane  ->  rows  O, dQ
 *   unpack_row     floats [d] times a factor  ->  row               dK, dV
 *
 * The copy is worth its time. The caller's rows lie h d apart, often a power of two, and would share a few cache sets.
 * Transposes are LANES x LANES words in registers. A NULL row pointer reads as zeros. In the caller's memory nothing
 * past element d is read or written, and the packed words past element d are zero. Only inputs may be FA_E4M3, whose
 * values become fp32 without their descales. */
#ifndef FA_CPU_PACK_H
#define FA_CPU_PACK_H

#include "product.h"

/* Calls fn(arguments..., dtype), with the dtype as a constant. */
#if WORD_ELEMS == 2
#define WITH_DTYPE(dtype, fn, ...)       ((void)(dtype), fn(__VA_ARGS__, FA_BF16))
#define WITH_INPUT_DTYPE(dtype, fn, ...) WITH_DTYPE(dtype, fn, __VA_ARGS__)
#else
#define WITH_DTYPE(dtype, fn, ...)                 \
    ((dtype) == FA_F32   ? fn(__VA_ARGS__, FA_F32) \
     : (dtype) == FA_F16 ? fn(__VA_ARGS__, FA_F16) \
                         : fn(__VA_ARGS__, FA_BF16))
#define WITH_INPUT_DTYPE(dtype, fn, ...) \
    ((dtype) == FA_E4M3 ? fn(__VA_ARGS__, FA_E4M3) : WITH_DTYPE(dtype, fn, __VA_ARGS__))
#endif

INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

INLINE vec load_elems(const void *p, fa_dtype DTYPE) {
#if WORD_ELEMS == 1
    if (DTYPE == FA_E4M3) return vec_load_e4m3(p);
#endif
    return DTYPE == FA_F32 ? vec_load(p) : DTYPE == FA_F16 ? vec_load_f16(p) : vec_load_bf16(p);
}
INLINE void store_elems(void *p, vec a, fa_dtype DTYPE) {
    if (DTYPE == FA_F32)
        vec_store(p, a);
    else if (DTYPE == FA_F16)
        vec_store_f16(p, a);
    else
        vec_store_bf16(p, a);
}

#define DTYPE_BYTES(DTYPE) ((DTYPE) == FA_F32 ? 4 : (DTYPE) == FA_E4M3 ? 1 : 2)

/* Returns an address from which `count` elements can be read: the row from element elem on, or a zero-padded copy. */
INLINE const void *readable(const char *row, int64_t elem, int64_t d, int count, char padded[4 * LANES],
                            fa_dtype DTYPE) {
    if (row && elem + count <= d) return row + elem * DTYPE_BYTES(DTYPE);
    memset(padded, 0, 4 * LANES);
    if (row && elem < d) memcpy(padded, row + elem * DTYPE_BYTES(DTYPE), (size_t)(d - elem) * DTYPE_BYTES(DTYPE));
    return padded;
}

/* Loads LANES words of a row, from element elem on. */
INLINE vec load_row_words(const char *row, int64_t elem, int64_t d, fa_dtype DTYPE) {
    char padded[4 * LANES];
    const void *p = readable(row, elem, d, LANES * WORD_ELEMS, padded, DTYPE);
    return WORD_ELEMS == 2 ? vec_load(p) : load_elems(p, DTYPE);
}

/* Loads LANES elements of WORD_ELEMS neighbouring rows, as words. */
INLINE vec load_column_words(const char *const *row, int64_t elem, int64_t d, fa_dtype DTYPE) {
#if WORD_ELEMS == 2
    char padded[2][4 * LANES];
    return vec_join_rows(readable(row[0], elem, d, LANES, padded[0], DTYPE),
                         readable(row[1], elem, d, LANES, padded[1], DTYPE));
#else
    return load_row_words(row[0], elem, d, DTYPE);
#endif
}

INLINE void pack_rows_of(float *dst, int64_t stride, const char *const *rows, int64_t num_rows, int64_t d,
                         fa_dtype DTYPE) {
    for (int64_t r = 0; r < num_rows; r++) {
        for (int64_t elem = 0; elem < d; elem += LANES * WORD_ELEMS)
            vec_store(dst + r * stride + elem / WORD_ELEMS, load_row_words(rows[r], elem, d, DTYPE));
    }
}

/* num_rows is a multiple of LANES. */
INLINE void pack_lanes_of(float *dst, int64_t stride, const char *const *rows, int64_t num_rows, int64_t d,
                          fa_dtype DTYPE) {
    for (int64_t r = 0; r < num_rows; r += LANES) {
        for (int64_t elem = 0; elem < d; elem += LANES * WORD_ELEMS) {
            vec t[LANES];
            UNROLL for (int i = 0; i < LANES; i++) t[i] = load_row_words(rows[r + i], elem, d, DTYPE);
            vec_transpose(t);
            UNROLL for (int i = 0; i < LANES; i++) vec_store(dst + (elem / WORD_ELEMS + i) * stride + r, t[i]);
        }
    }
}

/* Whether a sum of 0 x over many elements x is zero. 0 x is zero for a finite x and NaN for NaN and inf. Each row has a
 * sum of its own, so that few multiply-adds wait for each other. */
INLINE bool is_zero(vec sum) {
    float lane[LANES];
    bool all = true;
    vec_store(lane, sum);
    for (int i = 0; i < LANES; i++) all &= lane[i] == 0.0f;
    return all;
}

/* num_rows is a multiple of LANES WORD_ELEMS. Returns whether every element is finite. */
INLINE bool pack_columns_of(float *dst, int64_t stride, const char *const *rows, int64_t num_rows, int64_t d,
                            fa_dtype DTYPE) {
    vec poison[2] = {vec_set(0.0f), vec_set(0.0f)}; /* two independent sums */
    for (int64_t r = 0; r < num_rows; r += LANES * WORD_ELEMS) {
        for (int64_t elem = 0; elem < d; elem += LANES) {
            vec t[LANES];
            UNROLL for (int i = 0; i < LANES; i++) {
                t[i] = load_column_words(rows + r + i * WORD_ELEMS, elem, d, DTYPE);
                poison[i % 2] = vec_dot(poison[i % 2], t[i], vec_set(0.0f));
            }
            vec_transpose(t);
            UNROLL for (int i = 0; i < LANES; i++) vec_store(dst + (elem + i) * stride + r / WORD_ELEMS, t[i]);
        }
    }
    return is_zero(vec_add(poison[0], poison[1]));
}

/* num_rows is a multiple of WORD_ELEMS. Returns whether every element is finite. */
INLINE bool pack_pairs_of(float *dst, int64_t stride, const char *const *rows, int64_t num_rows, int64_t d,
                          fa_dtype DTYPE) {
    const vec zero = vec_set(0.0f);
    vec poison = zero;
    for (int64_t r = 0; r < num_rows; r += WORD_ELEMS) {
        vec of_rows = zero;
        for (int64_t elem = 0; elem < d; elem += LANES) {
            const vec words = load_column_words(rows + r, elem, d, DTYPE);
            of_rows = vec_dot(of_rows, words, zero);
            vec_store(dst + r / WORD_ELEMS * stride + elem, words);
        }
        poison = vec_add(poison, of_rows);
    }
    return is_zero(poison);
}

/* Stores count <= LANES elements of a row, from element elem on. */
INLINE void store_row_elems(char *row, int64_t elem, int64_t count, vec a, fa_dtype DTYPE) {
    char padded[4 * LANES];
    if (count == LANES) {
        store_elems(row + elem * DTYPE_BYTES(DTYPE), a, DTYPE);
    } else {
        store_elems(padded, a, DTYPE);
        memcpy(row + elem * DTYPE_BYTES(DTYPE), padded, (size_t)count * DTYPE_BYTES(DTYPE));
    }
}

INLINE void unpack_row_of(char *row, int64_t d, const float *src, float factor, fa_dtype DTYPE) {
    for (int64_t elem = 0; elem < d; elem += LANES) {
        vec scaled = vec_mul(vec_load(src + elem), vec_set(factor));
        store_row_elems(row, elem, d - elem < LANES ? d - elem : LANES, scaled, DTYPE);
    }
}

/* Stores rows of num_lanes lanes. num_lanes need not be a multiple of LANES, because src has room for whole vectors. */
INLINE void unpack_lanes_of(char *const *rows, int64_t num_lanes, int64_t d, const float *src, int64_t stride,
                            const float *factor, fa_dtype DTYPE) {
    for (int64_t lane = 0; lane < num_lanes; lane += LANES) {
        vec scale = vec_load(factor + lane);
        int count = num_lanes - lane < LANES ? (int)(num_lanes - lane) : LANES;
        for (int64_t elem = 0; elem < d; elem += LANES) {
            vec t[LANES];
            UNROLL for (int i = 0; i < LANES; i++) t[i] = vec_mul(vec_load(src + (elem + i) * stride + lane), scale);
            vec_transpose(t);
            int64_t elems = d - elem < LANES ? d - elem : LANES;
            if (count == LANES && elems == LANES) { /* whole vectors go from the registers to memory without a copy */
                UNROLL for (int i = 0; i < LANES; i++)
                    store_elems(rows[lane + i] + elem * DTYPE_BYTES(DTYPE), t[i], DTYPE);
                continue;
            }
            for (int i = 0; i < count; i++) store_row_elems(rows[lane + i], elem, elems, t[i], DTYPE);
        }
    }
}

static inline void pack_rows(float *dst, int64_t stride, const char *const *rows, int64_t num_rows, int64_t d,
                             fa_dtype dtype) {
    WITH_INPUT_DTYPE(dtype, pack_rows_of, dst, stride, rows, num_rows, d);
}
static inline void pack_lanes(float *dst, int64_t stride, const char *const *rows, int64_t num_rows, int64_t d,
                              fa_dtype dtype) {
    WITH_INPUT_DTYPE(dtype, pack_lanes_of, dst, stride, rows, num_rows, d);
}
static inline bool pack_columns(float *dst, int64_t stride, const char *const *rows, int64_t num_rows, int64_t d,
                                fa_dtype dtype) {
    return WITH_INPUT_DTYPE(dtype, pack_columns_of, dst, stride, rows, num_rows, d);
}
static inline bool pack_pairs(float *dst, int64_t stride, const char *const *rows, int64_t num_rows, int64_t d,
                              fa_dtype dtype) {
    return WITH_DTYPE(dtype, pack_pairs_of, dst, stride, rows, num_rows, d);
}
static inline void unpack_row(char *row, int64_t d, const float *src, float factor, fa_dtype dtype) {
    WITH_DTYPE(dtype, unpack_row_of, row, d, src, factor);
}
static inline void unpack_lanes(char *const *rows, int64_t num_lanes, int64_t d, const float *src, int64_t stride,
                                const float *factor, fa_dtype dtype) {
    WITH_DTYPE(dtype, unpack_lanes_of, rows, num_lanes, d, src, stride, factor);
}

#endif
