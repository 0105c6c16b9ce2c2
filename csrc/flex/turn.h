/* Lines of lanes, where the memory of a capture has the lines of one lane one behind the other. LANES lanes of LANES
 * lines are turned in registers.
 *
 *   turn_bytes    values[line][lane] = data[lane * step + line]
 *   turn_floats   values[line][lane] = data[at[lane] + line]
 *   add_turned    sums[at[lane] + line] += values[line][lane]
 *
 * turn_bytes has up to FA_FLEX_GROUP lines, and rows of FA_FLEX_MOST_LANES. There are `used` of `n` lanes. n is a
 * multiple of FA_FLEX_GROUP, and values of lanes that are not used are 0. Nothing else is read or written in memory. */
#ifndef FA_FLEX_TURN_H
#define FA_FLEX_TURN_H

#include "cpu/vec_load_first.h"
#include "operations.h"

static inline int least(int a, int b) { return a < b ? a : b; }

/* Loads the first elements of a row, and zeros behind them. */
INLINE vec load_first(const char *row, int num, fa_flex_dtype DTYPE) {
    if (num <= 0) return vec_set(0.0f);
    if (DTYPE == FA_FLEX_OF_F32)
        return num >= LANES ? vec_load((const float *)row) : vec_load_first((const float *)row, num);
    if (DTYPE == FA_FLEX_OF_F16) return num >= LANES ? vec_load_f16(row) : vec_load_f16_first(row, num);
    return num >= LANES ? vec_load_bf16(row) : vec_load_bf16_first(row, num);
}

INLINE void turn_floats_of(float *values, int64_t stride, const char *data, const int64_t *at, int n, int used,
                           int num_lines, fa_flex_dtype DTYPE) {
    const int64_t bytes = DTYPE == FA_FLEX_OF_F32 ? 4 : 2;
    for (int lane = 0; lane < n; lane += LANES)
        for (int line = 0; line < num_lines; line += LANES) {
            const int lines = least(num_lines - line, LANES), lanes = least(used - lane, LANES);
            const char *from = data + line * bytes;
            float *to = values + line * stride + lane;
            vec t[LANES];
            if (lines == LANES && lanes == LANES) {
                UNROLL for (int i = 0; i < LANES; i++) t[i] = load_first(from + at[lane + i] * bytes, LANES, DTYPE);
            } else {
                for (int i = 0; i < LANES; i++)
                    t[i] = i < lanes ? load_first(from + at[lane + i] * bytes, lines, DTYPE) : vec_set(0.0f);
            }
            for (int i = 0; i < lanes; i++) PREFETCH(from + (at[lane + i] + FA_FLEX_GROUP) * bytes);
            vec_transpose(t);
            for (int i = 0; i < lines; i++) vec_store(to + i * stride, t[i]);
        }
}

OUTLINE void turn_floats(float *values, int64_t stride, const char *data, const int64_t *at, int n, int used,
                         int num_lines, fa_flex_dtype dtype) {
    if (dtype == FA_FLEX_OF_F32)
        turn_floats_of(values, stride, data, at, n, used, num_lines, FA_FLEX_OF_F32);
    else if (dtype == FA_FLEX_OF_F16)
        turn_floats_of(values, stride, data, at, n, used, num_lines, FA_FLEX_OF_F16);
    else
        turn_floats_of(values, stride, data, at, n, used, num_lines, FA_FLEX_OF_BF16);
}

/* Exchanges the bits `mask` of *b with those of *a that lie `shift` above them. */
INLINE void exchange(uint64_t *a, uint64_t *b, int shift, uint64_t mask) {
    const uint64_t changes = (*a >> shift ^ *b) & mask;
    *a ^= changes << shift, *b ^= changes;
}

/* Every byte that is not 0 becomes 1. */
INLINE uint64_t ones_of_bytes(uint64_t x) {
    x = (x | x >> 4) & 0x0f0f0f0f0f0f0f0f;
    x = (x | x >> 2) & 0x0303030303030303;
    return (x | x >> 1) & 0x0101010101010101;
}

/* Eight bytes of eight lanes at a time, in 64-bit numbers. */
OUTLINE void turn_bytes(uint8_t *values, const char *data, int64_t step, int n, int used, int num_lines) {
    for (int lane = 0; lane < n; lane += 8)
        for (int line = 0; line < num_lines; line += 8) {
            const int lines = least(num_lines - line, 8);
            uint64_t t[8];
            for (int i = 0; i < 8; i++) {
                uint8_t bytes[8] = {0};
                if (lane + i < used && lines == 8)
                    memcpy(bytes, data + (lane + i) * step + line, 8);
                else if (lane + i < used)
                    memcpy(bytes, data + (lane + i) * step + line, (size_t)lines);
                t[i] = 0;
                for (int k = 0; k < 8; k++) t[i] |= (uint64_t)bytes[k] << 8 * k;
                t[i] = ones_of_bytes(t[i]);
            }
            for (int i = 0; i < 4; i++) exchange(&t[2 * i], &t[2 * i + 1], 8, 0x00ff00ff00ff00ff);
            for (int i = 0; i < 4; i++) exchange(&t[i + i / 2 * 2], &t[i + i / 2 * 2 + 2], 16, 0x0000ffff0000ffff);
            for (int i = 0; i < 4; i++) exchange(&t[i], &t[i + 4], 32, 0x00000000ffffffff);
            for (int i = 0; i < lines; i++)
                for (int k = 0; k < 8; k++)
                    values[(line + i) * FA_FLEX_MOST_LANES + lane + k] = (uint8_t)(t[i] >> 8 * k);
        }
}

/* Either sums or fp32_sums is NULL. */
OUTLINE void add_turned(double *sums, float *fp32_sums, const int64_t *at, const float *values, int64_t stride,
                        int used, int num_lines) {
    for (int lane = 0; lane < used; lane += LANES)
        for (int line = 0; line < num_lines; line += LANES) {
            const int lines = least(num_lines - line, LANES), lanes = least(used - lane, LANES);
            const int64_t *places = at + lane;
            float of_lanes[LANES][LANES];
            vec t[LANES];
            for (int i = 0; i < lanes; i++)
                if (fp32_sums)
                    PREFETCH(fp32_sums + places[i] + line + FA_FLEX_GROUP);
                else
                    PREFETCH(sums + places[i] + line + FA_FLEX_GROUP);
            for (int i = 0; i < LANES; i++)
                t[i] = i < lines ? vec_load(values + (line + i) * stride + lane) : vec_set(0.0f);
            vec_transpose(t);
            if (fp32_sums && lines == LANES) {
                float *to = fp32_sums + line;
                for (int i = 0; i < lanes; i++) vec_store(to + places[i], vec_add(vec_load(to + places[i]), t[i]));
                continue;
            }
            UNROLL for (int i = 0; i < LANES; i++) vec_store(of_lanes[i], t[i]);
            for (int i = 0; i < lanes; i++) {
                double *to = sums + places[i] + line;
                if (fp32_sums)
                    for (int k = 0; k < lines; k++) fp32_sums[places[i] + line + k] += of_lanes[i][k];
                else if (lines == LANES)
                    for (int k = 0; k < LANES; k++) to[k] += (double)of_lanes[i][k];
                else
                    for (int k = 0; k < lines; k++) to[k] += (double)of_lanes[i][k];
            }
        }
}

#endif
