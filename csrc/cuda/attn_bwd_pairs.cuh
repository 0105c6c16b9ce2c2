/* What the score_mod reads of the pairs of a thread and of their rows, in the backward on Hopper. Of a pair it is 16
 * bits, such as a bias of each query and key. There are three ways to it:
 *
 *   PAIRS_LATE    Each is loaded where its score is computed.
 *   PAIRS_EARLY   All loads go out before S = K Q^T begins.
 *   PAIRS_SHARED  Each warp copies the elements of its 16 keys to shared memory (pair_octets.cuh). Without a block mask
 *                 it does so a step ahead. With one it does so before S begins.
 *
 * A step that loads where it computes waits for memory eight times, because ptxas has registers for a fourth of the
 * loads while S and dQ are on their way. */
#ifndef FA_ATTN_BWD_PAIRS_CUH
#define FA_ATTN_BWD_PAIRS_CUH

#include "pair_octets.cuh"

enum pair_way { PAIRS_LATE, PAIRS_EARLY, PAIRS_SHARED };
constexpr bool HOLDS_PAIRS = LOADS_PAIRS_EARLY && FLEX_OCTETS;
constexpr pair_way PAIR_WAY = HOLDS_PAIRS ? PAIRS_SHARED : LOADS_PAIRS_EARLY ? PAIRS_EARLY : PAIRS_LATE;

/* The next step's query tile is known before its Q comes. */
constexpr bool KNOWS_NEXT_STEP = !FLEX_BLOCKS;

typedef pair_octets<BLOCK_Q, 2> octets; /* all queries of a step and the 16 keys of a warp */

/* Where a warp has the elements of its pairs in shared memory, and its keys. */
struct pairs_of_warp {
    u32 at;
    int key, len_kv;
};

/* load            Begins to load for query tile q_tile. Whole warp.
 * load_next       PAIRS_SHARED: the same a step ahead, if there is a next step.
 * settle          Waits for memory. Whole warp. */
template <pair_way WAY> struct loaded_pairs {
    DEVICE void load(const mods &, const pairs_of_warp &, const first_pair &, int) {}
    DEVICE void load_next(const mods &, const pairs_of_warp &, int, bool) {}
    DEVICE void settle(const pairs_of_warp &) {}
    DEVICE unsigned short bits(const mods &mod, int, int row, int key) const { return mod.pair_bits(row, key); }
    DEVICE float row(const mods &mod, int, int row) const { return mod.row(row); }
};

/* Two elements share a register. A lane keeps the rows of its number, because what is spilled waits for memory, too. */
struct packed_pairs {
    u32 two[S_REGS / 2];
    float rows[BLOCK_Q / 32];

    DEVICE void load_next(const mods &, const pairs_of_warp &, int, bool) {}
    DEVICE void load_rows(const mods &mod, int q_tile) {
#pragma unroll
        for (int n = 0; n < BLOCK_Q / 32; n++) rows[n] = mod.row(q_tile * BLOCK_Q + 32 * n + threadIdx.x % 32);
    }
    DEVICE unsigned short bits(const mods &, int i, int, int) const {
        return (unsigned short)(two[i / 2] >> i % 2 * 16);
    }
    /* Whole warp. */
    DEVICE float row(const mods &, int i, int) const {
        return FLEX_ROW ? __shfl_sync(0xffffffffu, rows[row_of(i) / 32], row_of(i) % 32 + 2 * (threadIdx.x % 4)) : 0;
    }
};

template <> struct loaded_pairs<PAIRS_EARLY> : packed_pairs {
    unsigned short raw[S_REGS];

    DEVICE void load(const mods &mod, const pairs_of_warp &, const first_pair &at, int q_tile) {
#pragma unroll
        for (int i = 0; i < S_REGS; i++) raw[i] = mod.pair_bits(at.row + row_of(i), at.key + 8 * key_of(i));
        load_rows(mod, q_tile);
    }
    DEVICE void settle(const pairs_of_warp &) {
#pragma unroll
        for (int i = 0; i < S_REGS / 2; i++) two[i] = raw[2 * i] | (u32)raw[2 * i + 1] << 16;
        pin(two);
    }
};

template <> struct loaded_pairs<PAIRS_SHARED> : packed_pairs {
    DEVICE void ask(const mods &mod, const pairs_of_warp &own, int q_tile, bool asks) {
        octets::ask(own.at, mod, q_tile * BLOCK_Q, own.key, own.len_kv, asks);
        load_rows(mod, q_tile);
    }
    DEVICE void load(const mods &mod, const pairs_of_warp &own, const first_pair &, int q_tile) {
        if (!KNOWS_NEXT_STEP) ask(mod, own, q_tile, true);
    }
    DEVICE void load_next(const mods &mod, const pairs_of_warp &own, int q_tile, bool goes_on) {
        if (KNOWS_NEXT_STEP) ask(mod, own, max(q_tile, 0), goes_on); /* Behind the last step q_tile may be -1. */
    }
    DEVICE void settle(const pairs_of_warp &own) {
        /* The four matrices of a load are queries 0 to 7 with keys 0 to 7 and 8 to 15, and then queries 8 to 15. */
        const int lane = threadIdx.x % 32;
        octets::wait();
#pragma unroll
        for (int g = 0; g < BLOCK_Q / 16; g++)
            ldmatrix_x4_trans(*(u32(*)[4])(two + 4 * g),
                              own.at + octets::place_of(16 * g + lane / 16 * 8 + lane % 8, lane / 8 % 2));
    }
};
typedef loaded_pairs<PAIR_WAY> pairs_of_step;

#endif
