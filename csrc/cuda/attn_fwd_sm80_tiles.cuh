/* What follows from a row of tiles.def in attn_fwd_sm80: how warps share a tile, shared memory, loads of K and V. */
#ifndef FA_ATTN_FWD_SM80_TILES_CUH
#define FA_ATTN_FWD_SM80_TILES_CUH

#include "tile_sm80.cuh"

/* SPLIT warps share WARP_ROWS rows: they divide the keys of S and the columns of O. */
constexpr int WARP_ROWS = 16 * BLOCKS, BLOCK_Q = WARP_ROWS * WARPS / SPLIT;
constexpr int OWN_KEYS = BLOCK_KV / SPLIT, OWN_COLUMNS = COLUMNS / SPLIT, N = OWN_KEYS / 8;
constexpr int P_PITCH = BLOCK_KV + (SWIZZLES ? 0 : 8); /* like PITCH */
/* The maximum of a row has P = 2^-HEADROOM when it is found. It is raised before some P exceeds 2^MOST_LOG2. Numbers of
 * bf16 may be as large as floats. So P is at most 2^-16 there, and sums of P V stay floats. fp16 needs the range. */
constexpr int LAG = 8, HEADROOM = (int)element::HEADROOM, MOST_LOG2 = LAG - HEADROOM;
constexpr float RAISED = 1u << HEADROOM; /* 2^HEADROOM */
/* A step does not look for its maximum, and does its scores again if its sums turn out to be too large. K must still be
 * there. ALiBi raises the maximum in most steps, so scores that are not plain have the maximum first. */
constexpr bool IS_LATE = LATE == 2, TRIES_FIRST = IS_LATE && STAGES == 2 && !SCORE;
/* Do warps that share rows store P at the end of its step? Otherwise they store P at the beginning of the next step. */
constexpr bool STORES_EARLY = SPLIT > 1 && STAGES == 2;

static_assert(!SWIZZLES || BLOCK_KV == 64, "a row of P has eight pieces");
static_assert(8 * OWN_COLUMNS % 32 == 0 || !SWIZZLES, "swizzled strips have 32 columns");
static_assert(OWN_KEYS % 16 == 0, "mma.m16n8k16 contracts 16 at a time");
static_assert(SPLIT == 1 || (IS_LATE && !Q_REGS), "P goes through shared memory");
static_assert(SPLIT <= 2, "a row has 4 floats: a maximum, parts, and is_careful");
static_assert(N <= 8, "32 bits say which pairs of a thread count");
static_assert(STAGES == 1 || (STAGES == 2 && (IS_LATE || !Q_REGS)), "the first V may come while Q is read");

constexpr int STATE = 16 / BYTES; /* a row has four floats beside its Q */

/* The places of the keys of a cache, in a ring of key tiles (attn_fwd_sm80_cache.cuh). */
constexpr int PLACE_TILES = FA_PLACE_TILES_SM80(STAGES);
template <bool HAS_PLACES> struct places_of_keys {
    DEVICE u32 *places_of(int) { return nullptr; }
};
template <> struct places_of_keys<true> {
    alignas(128) u32 places[PLACE_TILES * BLOCK_KV];
    DEVICE u32 *places_of(int tile) { return places + (u32)tile % PLACE_TILES * BLOCK_KV; }
};

struct shared_memory : places_of_keys<CACHE> {
    factor k[STAGES][BLOCK_KV * PITCH];
    union {
        factor v[STAGES][BLOCK_KV * PITCH];
        factor q_once[Q_REGS ? BLOCK_Q * PITCH : 8]; /* on the way to registers, before the first V */
    };
    union {
        factor q[Q_REGS ? 8 : BLOCK_Q * (PITCH + (SWIZZLES ? STATE : 0))];
        float maxima[Q_REGS ? BLOCK_Q : 1]; /* the lagging maxima. If Q stays here, they lie in the state of a row */
    };

    /* Four floats of a row, behind the row of Q. Behind all rows, if they are not padded. */
    DEVICE float *state(int row) {
        return (float *)(SWIZZLES ? q + BLOCK_Q * PITCH + row * STATE : q + row * PITCH + HEAD_DIM);
    }
    /* Is V searched for NaN and inf? If rows are padded, the word lies behind a row of K. */
    DEVICE int &is_careful() { return *(int *)(SWIZZLES ? (factor *)(state(0) + 3) : k[0] + HEAD_DIM); }
    /* P of the step before lies behind this struct, if other warps read it. */
    DEVICE factor *p() { return (factor *)(this + 1); }
    DEVICE float &maximum(int row) { return Q_REGS ? maxima[row] : state(row)[0]; }
    /* What a warp tells the warps that share its rows: a maximum or a sum of its keys. */
    DEVICE float &part(int row, int idx) { return state(row)[1 + idx]; }
};

/* Loads key tiles one after the other, from the last one down. */
struct key_loader : tile_loader<BLOCK_KV> {
    using tile_loader::tile_loader;

    /* If all rows exist, num_own only says whether the thread's columns do. */
    DEVICE void load(u32 to, long long stride, int num_own, int) {
        load_rows(to, stride, num_own);
        from -= BLOCK_KV * stride;
    }
    DEVICE void begin(int) {}
    /* Does the same for piece i of NUM, where all rows exist, or the whole tile does not. */
    DEVICE void load_piece(int i, u32 to, long long stride, int num_own, bool exists, int) {
        load_piece_if(exists, i, to, stride, num_own > NONE + (1 << 29));
        if (i == NUM - 1) from -= BLOCK_KV * stride;
    }
};

/* Fragment c of a warp's O begins so many columns behind the warp's first column. Warps that share swizzled rows take
 * turns of 32 columns. So the first column and these columns have no bit in common. */
DEVICE constexpr int own_column_of(int c) { return SWIZZLES ? c / 4 * 64 + c % 4 * 8 : 8 * c; }

/* P [16 BLOCKS, OWN_KEYS] of a warp, as first operands of 16 keys each. */
typedef u32 weights[BLOCKS][N / 2][4];

#endif
