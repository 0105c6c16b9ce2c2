/* Which elements of P survive dropout. The answer is a pure function of (seed, offset, batch, head, row, column).
 *
 * Philox4x32 with 7 rounds turns a 128-bit counter and the seed into 16 bytes, one byte for each of 16 elements. A
 * patch of 16 rows x 32 columns takes 32 generator calls. The calls are the lanes of a warp in the GPU kernel that
 * first used this mapping.
 *
 *   counter   low 64 bits: offset + (b_idx h + head) 32 + lane;   next 32: row / 16;   top 32: column / 32
 *   lane      4 (r % 8) + (c % 8) / 2               with r = row % 16, c = column % 32
 *   byte      4 (c / 8) + 2 (r / 8) + c % 2         of the 16, little-endian x, y, z, w
 *
 * The element is kept iff byte <= keep_max. Rows and columns count from the start of the sequence. */
#ifndef FA_CPU_DROPOUT_H
#define FA_CPU_DROPOUT_H

#include <stdint.h>

enum { FA_PATCH_ROWS = 16, FA_PATCH_COLS = 32, FA_PHILOX_LANES = 32, FA_PHILOX_ROUNDS = 7 };

/* The low 64 bits of the counter of lane 0. */
static inline uint64_t fa_dropout_stream(uint64_t offset, int64_t b_idx, int64_t h, int64_t head) {
    return offset + (uint64_t)(b_idx * h + head) * FA_PHILOX_LANES;
}

static inline void fa_philox(uint64_t seed, uint64_t low, uint32_t row_patch, uint32_t col_patch, uint32_t out[4]) {
    uint32_t x = (uint32_t)low, y = (uint32_t)(low >> 32), z = row_patch, w = col_patch;
    uint32_t key_0 = (uint32_t)seed, key_1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < FA_PHILOX_ROUNDS; round++) {
        uint64_t product_x = (uint64_t)0xD2511F53u * x, product_z = (uint64_t)0xCD9E8D57u * z;
        x = (uint32_t)(product_z >> 32) ^ y ^ key_0;
        z = (uint32_t)(product_x >> 32) ^ w ^ key_1;
        y = (uint32_t)product_z;
        w = (uint32_t)product_x;
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    out[0] = x, out[1] = y, out[2] = z, out[3] = w;
}

/* The random byte of one element. This function defines the mapping. */
static inline uint8_t fa_dropout_byte(uint64_t seed, uint64_t stream, int64_t row, int64_t col) {
    int r = (int)(row % FA_PATCH_ROWS), c = (int)(col % FA_PATCH_COLS);
    uint32_t out[4];
    fa_philox(seed, stream + (uint64_t)(4 * (r % 8) + c % 8 / 2), (uint32_t)(row / FA_PATCH_ROWS),
              (uint32_t)(col / FA_PATCH_COLS), out);
    return (uint8_t)(out[c / 8] >> 8 * (2 * (r / 8) + c % 2));
}

#endif
