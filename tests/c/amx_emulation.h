/* Emulation of AVX512-BF16 and AMX for processors without them. The Makefile puts this header in front of
 * attn_avx512bf16.c and attn_amx.c. The vocabulary of these files becomes vec_scalar.h with words of two bf16. The tile
 * instructions become the functions below. All other code is the code of the library.
 *
 * There are eight full tiles, as product_enter() of product_amx.h configures them. Denormal inputs count as zero. */
#ifndef FA_TEST_AMX_EMULATION_H
#define FA_TEST_AMX_EMULATION_H

#define VEC_BF16_WORDS
#define FA_CPU_VEC_AVX512_H /* vec_scalar.h replaces vec_avx512.h */
#define VERBS               "cpu/vec_scalar.h"
#include "outlined_verbs.h"

typedef struct {
    uint32_t word[16][16]; /* [row][64 bytes] */
} emulated_tile;

typedef struct {
    emulated_tile tile[8];
    int is_configured;
} emulated_tiles;

static _Thread_local emulated_tiles amx;

/* Tiles start as zeros. Other tile configurations are not emulated. */
static inline void _tile_loadconfig(const void *config) {
    const uint8_t *bytes = config;
    for (int t = 0; t < 8; t++)
        if (bytes[0] != 1 || bytes[16 + 2 * t] != 64 || bytes[17 + 2 * t] != 0 || bytes[48 + t] != 16) __builtin_trap();
    memset(&amx, 0, sizeof amx);
    amx.is_configured = 1;
}
static inline void _tile_release(void) { amx.is_configured = 0; }

static inline emulated_tile *emulated_tile_at(int t) {
    if (!amx.is_configured) __builtin_trap(); /* a processor raises #UD here */
    return &amx.tile[t];
}

static inline void _tile_zero(int t) { memset(emulated_tile_at(t), 0, sizeof(emulated_tile)); }

static inline void _tile_loadd(int t, const void *base, long stride) {
    emulated_tile *tile = emulated_tile_at(t);
    for (int r = 0; r < 16; r++) memcpy(tile->word[r], (const char *)base + r * stride, 64);
}

static inline void _tile_stored(int t, void *base, long stride) {
    const emulated_tile *tile = emulated_tile_at(t);
    for (int r = 0; r < 16; r++) memcpy((char *)base + r * stride, tile->word[r], 64);
}

static inline float emulated_bf16(uint32_t high_half) {
    float x;
    if ((high_half & 0x7f800000) == 0) high_half &= 0x80000000;
    memcpy(&x, &high_half, sizeof x);
    return x;
}

/* C[row][lane] += sum over 16 words of A[row][word] . B[word][lane]. Every place is a constant. So sanitizers would
 * find nothing here. */
__attribute__((no_sanitize("address", "undefined"))) static inline void _tile_dpbf16ps(int c, int a, int b) {
    emulated_tile *sums = emulated_tile_at(c), *rows = emulated_tile_at(a), *words = emulated_tile_at(b);
    float even[16][16], odd[16][16]; /* of B */
    for (int i = 0; i < 256; i++) {
        even[i / 16][i % 16] = emulated_bf16(words->word[i / 16][i % 16] << 16);
        odd[i / 16][i % 16] = emulated_bf16(words->word[i / 16][i % 16] & 0xffff0000);
    }
    for (int r = 0; r < 16; r++) {
        float sum[16];
        memcpy(sum, sums->word[r], sizeof sum);
        for (int k = 0; k < 16; k++) {
            const float x = emulated_bf16(rows->word[r][k] << 16), y = emulated_bf16(rows->word[r][k] & 0xffff0000);
            for (int lane = 0; lane < 16; lane++) sum[lane] += x * even[k][lane] + y * odd[k][lane];
        }
        memcpy(sums->word[r], sum, sizeof sum);
    }
}

#endif
