/* NaN and infinity next to a mask. The products give a masked pair P = dS = 0, but 0 x NaN is NaN. So NaN would reach
 * lanes and keys that do not see the element. Packing therefore detects non-finite elements, and clear_nonfinite sets
 * them to zero in the packed operand. Afterwards the functions below add these elements to the pairs that see them:
 *
 *   O^T += V^T P,   dQ^T += K^T dS      elements of a key, to the lanes that see the key
 *   dV += P^T dO,   dK += dS^T Q        elements of a lane, to the keys that the lane sees
 *
 * S and dP need no such step, because masked elements of S and dP are not read. For finite rows the only cost is one
 * multiply-add for each packed vector. */
#ifndef FA_CPU_NONFINITE_H
#define FA_CPU_NONFINITE_H

#include "bwd_layout.h"
#include "product.h"

OUTLINE void clear_nonfinite(float *words, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = fa_bits_of(words[i]);
        if (WORD_ELEMS == 1 && (bits & 0x7f800000) == 0x7f800000) bits = 0;
        if (WORD_ELEMS == 2 && (bits & 0x7f800000) == 0x7f800000) bits &= 0xffff;
        if (WORD_ELEMS == 2 && (bits & 0x7f80) == 0x7f80) bits &= 0xffff0000;
        memcpy(&words[i], &bits, sizeof bits);
    }
}

/* Element `half` of a word, as a float. */
static inline float word_element(const float *word, int64_t half) {
    if (WORD_ELEMS == 1) return *word;
    return fa_f32_of_bits(half ? fa_bits_of(*word) & 0xffff0000 : fa_bits_of(*word) << 16);
}

/* Loads a row and pads it with zeros to whole vectors. Returns whether some element is not finite. */
OUTLINE bool load_nonfinite(float row[FA_MAX_HEAD_DIM_V], const char *data, int64_t d, fa_dtype dtype) {
    bool found = false;
    for (int64_t c = 0; c < FA_MAX_HEAD_DIM_V; c++) {
        row[c] = c < d ? (float)fa_load_element(data, c, dtype) : 0.0f;
        found |= row[c] - row[c] != 0.0f;
    }
    return found;
}

/* out[c][lane] += x[key][lane] row[c]. row is the key's row of V or K, and x holds words along the keys. `key` counts
 * from the start of the block, and the bounds of a lane count from the start of the sequence. hidden [key][lanes] marks
 * masked pairs; NULL: the bounds tell all. */
OUTLINE void add_key_nonfinite(float *out, const float *x, int64_t lanes, int64_t key, const int64_t *first,
                               const int64_t *end, int64_t block, const uint8_t *hidden, const char *data, int64_t d,
                               fa_dtype dtype) {
    float row[FA_MAX_HEAD_DIM_V], weight[FA_MAX_BLOCK_Q_BWD], sees[FA_MAX_BLOCK_Q_BWD];
    if (!load_nonfinite(row, data, d, dtype)) return;
    for (int64_t lane = 0; lane < lanes; lane++) {
        weight[lane] = word_element(x + key / WORD_ELEMS * lanes + lane, key % WORD_ELEMS);
        sees[lane] = first[lane] <= block + key && block + key < end[lane] ? 1.0f : 0.0f;
        if (hidden && hidden[key * lanes + lane]) sees[lane] = 0.0f;
    }
    for (int64_t c = 0; c < d; c++) {
        if (row[c] - row[c] == 0.0f) continue;
        for (int64_t lane = 0; lane < lanes; lane += LANES) {
            const vec old = vec_load(out + c * lanes + lane);
            const vec sum = vec_fma(vec_load(weight + lane), vec_set(row[c]), old);
            vec_store(out + c * lanes + lane, vec_select(vec_le(vec_load(sees + lane), vec_set(0.0f)), old, sum));
        }
    }
}

/* out[key][c] += x[key][lane] row[c] for keys [begin, end). row is the lane's row of Q or dO, and x holds words along
 * the lanes. hidden [key][lanes] marks masked pairs; NULL: there are none. */
OUTLINE void add_lane_nonfinite(float *out, int64_t out_stride, const float *x, int64_t x_stride, int64_t lane,
                                int64_t begin, int64_t end, const uint8_t *hidden, int64_t lanes, const char *data,
                                int64_t d, fa_dtype dtype) {
    float row[FA_MAX_HEAD_DIM_V];
    if (begin >= end || !load_nonfinite(row, data, d, dtype)) return;
    for (int64_t key = begin; key < end; key++) {
        if (hidden && hidden[key * lanes + lane]) continue;
        const vec weight = vec_set(word_element(x + key * x_stride + lane / WORD_ELEMS, lane % WORD_ELEMS));
        for (int64_t c = 0; c < d; c += LANES) {
            const vec elems = vec_load(row + c), old = vec_load(out + key * out_stride + c);
            const vec_mask finite = vec_le(vec_sub(elems, elems), vec_set(0.0f));
            vec_store(out + key * out_stride + c, vec_select(finite, old, vec_fma(weight, elems, old)));
        }
    }
}

#endif
