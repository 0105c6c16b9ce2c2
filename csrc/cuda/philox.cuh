/* Philox 4x32 with 7 rounds is the generator of dropout (../cpu/dropout.h). */
#ifndef FA_PHILOX_CUH
#define FA_PHILOX_CUH

#include "ptx_sm80.cuh"

/* Draws 16 bytes of one lane for a patch of 16 rows and 32 keys. `low` is the low half of the counter and names the
 * lane. */
DEVICE void philox(u32 (&words)[4], u64 low, u32 row_patch, u32 key_patch, u64 seed) {
    u32 x = (u32)low, y = (u32)(low >> 32), z = row_patch, w = key_patch;
    u32 key_0 = (u32)seed, key_1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; round++) {
        const u64 xx = mul_wide(x, 0xD2511F53u), zz = mul_wide(z, 0xCD9E8D57u);
        x = (u32)(zz >> 32) ^ y ^ key_0, y = (u32)zz;
        z = (u32)(xx >> 32) ^ w ^ key_1, w = (u32)xx;
        key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
    }
    words[0] = x, words[1] = y, words[2] = z, words[3] = w;
}

/* Sets the high bit of each byte of a word that is above `most`, 0 to 255. The other bits are anything. */
DEVICE u32 bytes_above(u32 word, int most) {
    const u32 low_bits = (word & 0x7f7f7f7f) + (127 - most % 128) * 0x01010101u; /* high: the low 7 bits are above */
    const u32 either = most < 128 ? 0xffffffffu : 0; /* The high bit alone suffices, or both parts must be there. */
    return (word & low_bits) | ((word | low_bits) & either);
}

#endif
