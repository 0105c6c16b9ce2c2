/* Which pairs of a thread dropout drops, in the backward on Hopper: a bit for each register of S.
 *
 * The generator of cpu/dropout.h draws for lanes that hold rows down and keys across, 16 rows and 32 keys at a time.
 * In a word its lane 4 r + c has keys 2 c, 2 c + 1 of rows r and r + 8. Here a lane has one key of rows 2 c, 2 c + 1
 * and of those plus 8. So each lane draws, compares all bytes of a word at once, and collects the bits of 64 rows. Then
 * two shuffles bring the lane the bits of two others.
 *
 * The 32 keys are those of two neighbouring warps. With SHARES_DRAWS each of them draws for half of the rows, and
 * shared memory brings it the rest. */
#ifndef FA_ATTN_BWD_DROPOUT_CUH
#define FA_ATTN_BWD_DROPOUT_CUH

#include "philox.cuh"

/* Two warps draw for the same 32 keys, and share what they draw. Beside hidden pairs there is no room for it where
 * shared memory has 128 columns. */
constexpr bool SHARES_DRAWS = !WIDE && (!HIDDEN_BESIDE_Q || COLUMNS == CHUNK);

/* What the warps of a CTA share for dropout: seed and offset, and the bits that each warp has drawn for its neighbour.
 */
template <bool IS_ON> struct dropout_memory {};
template <> struct dropout_memory<true> {
    u64 rng_state[2];
    u32 drawn[SHARES_DRAWS ? 8 : 1][S_REGS / 32][32]; /* of each consumer warp */
};
enum { BAR_DROPOUT = 3 }; /* of the first two warps; the next barriers are those of the next two */

/* Pairs of a thread that dropout drops. */
template <bool IS_ON> struct dropped_pairs {
    DEVICE dropped_pairs(const params &, const tile &, int, int, dropout_memory<IS_ON> *) {}
    DEVICE bool has(int) const { return false; }
    DEVICE u32 rest_of(u32 two, int) const { return two; }
};
template <> struct dropped_pairs<true> {
    u32 words[S_REGS / 32];

    /* Whole warp. head: the query head. memory: not above 128 columns. With SHARES_DRAWS all warps of a warpgroup must
     * be here. */
    DEVICE dropped_pairs(const params &p, const tile &t, int head, int q_tile, dropout_memory<true> *memory) {
        const int lane = threadIdx.x % 32, key = place_of(t, q_tile).key, half = key / 16 % 2;
        const u64 *state = WIDE ? p.rng_state : memory->rng_state;
        const u64 seed = state[0], low = state[1] + (u64)(t.b_idx * p.h + head) * 32 + lane;
        /* Draws for 32 of 64 rows: bit 8 n + 4 + 2 g + k is that of byte n of word k of 16 rows, the rows number g. */
        const auto draw = [&](int row_patch, u32 &own, u32 &others) {
            own = others = 0;
#pragma unroll
            for (int g = 0; g < 2; g++) {
                u32 drawn[4];
                philox(drawn, low, row_patch + g, key / 32, seed);
#pragma unroll
                for (int k = 0; k < 2; k++) { /* keys 0 to 7 and 8 to 15 of this warp's 16, or of the other's */
                    const u32 low_keys = bytes_above(drawn[k], p.keep_max) & 0x80808080,
                              high_keys = bytes_above(drawn[2 + k], p.keep_max) & 0x80808080;
                    own = own >> 1 | (half ? high_keys : low_keys),
                    others = others >> 1 | (half ? low_keys : high_keys);
                }
            }
        };
#pragma unroll
        for (int w = 0; w < S_REGS / 32; w++) {
            const int row_patch = q_tile * (BLOCK_Q / 16) + 4 * w;
            u32 first, second, unused; /* of 32 rows each */
            if (!SHARES_DRAWS) {
                draw(row_patch, first, unused), draw(row_patch + 2, second, unused);
            } else {
                u32 own, others;
                draw(row_patch + 2 * half, own, others);
                const int warp = threadIdx.x / 32 - 4;
                memory->drawn[warp][w][lane] = others;
                bar_sync(BAR_DROPOUT + warp / 2, 64);
                others = memory->drawn[warp ^ 1][w][lane];
                first = half ? others : own, second = half ? own : others;
            }
            const u32 bits = first >> 4 | second;
            u32 of_row[2];
#pragma unroll
            for (int odd = 0; odd < 2; odd++) /* rows 2 c + odd and 2 c + odd + 8 */
                of_row[odd] = __shfl_sync(0xffffffffu, bits, 8 * (lane % 4) + 4 * odd + lane / 8) >> 8 * (lane / 4 % 2);
            words[w] = (of_row[0] & 0x00ff00ff) | (of_row[1] & 0x00ff00ff) << 8;
        }
    }
    DEVICE bool has(int i) const { return words[i / 32] >> bit_of(i) & 1; }
    /* Two of P in 16 bits, of registers 2 i and 2 i + 1, without those that are dropped. Their bits have the same place
     * in neighbouring bytes. It moves to the bytes' signs, which prmt spreads. */
    DEVICE u32 rest_of(u32 two, int i) const {
        const u32 signs = words[i / 16] << (7 - bit_of(2 * i) % 8);
        return two & ~prmt(signs, 0, bit_of(2 * i) < 16 ? 0x9988 : 0xbbaa);
    }

  private:
    static DEVICE constexpr int bit_of(int i) { return 2 * (i / 8 % 4) + key_of(i) + 8 * (i % 2) + 16 * (i / 4 % 2); }
};

#endif
