/* A block mask says for each block of queries and keys whether pairs are seen. Kernels read the mask as a map, which
 * flex_blocks.cu makes of the lists of a call:
 *
 *   EMPTY_BLOCK     no pair is seen
 *   PARTIAL_BLOCK   the mask_mod decides
 *   FULL_BLOCK      all pairs are seen
 *
 * The tiles of a kernel need not be the blocks of the map. A tile may touch several blocks, and a block several tiles.
 * A tile whose blocks are all of one kind has this kind. Any other tile is MIXED_BLOCKS, and its pairs look up their
 * own blocks.
 *
 * A walk takes the tiles of the other side in ascending order, and skips empty tiles. The lanes of a warp look at 32
 * tiles at a time. So the walk costs one round of loads for 32 tiles, and needs no lists for the other direction. */
#ifndef FA_FLEX_BLOCKS_CUH
#define FA_FLEX_BLOCKS_CUH

#include "cuda_flex.h"
#include "integers.cuh"

enum block_kind { EMPTY_BLOCK, PARTIAL_BLOCK, FULL_BLOCK, MIXED_BLOCKS };

/* The blocks [first, last] that a range of rows or keys touches. */
struct block_range {
    int first, last;
};
DEVICE block_range blocks_of(int first, int last, int block) {
    return {(int)((unsigned)first / block), (int)((unsigned)last / block)}; /* an unsigned division is shorter */
}
struct block_pairs {
    block_range rows, keys;
};

/* The map of one batch and head. */
struct block_map {
    const unsigned char *kinds; /* [rows, columns]; NULL: there is no block mask */
    int columns, block_q, block_kv;
    int offset;         /* the row of the block mask where query 0 lies */
    block_kind without; /* the kind of all tiles without a block mask */

    DEVICE block_map(const fa_cuda_flex &f, int b_idx, int head, block_kind without)
        : kinds(f.kinds), columns(f.columns), block_q(f.block_q), block_kv(f.block_kv), offset(0), without(without) {
        if (f.block_offset) offset = clamp(f.block_offset[b_idx], 0, f.most_offset);
        if (kinds) kinds += ((long long)(b_idx % f.mask_b) * f.mask_h + head % f.mask_h) * f.rows * columns;
    }

    /* Returns the kind of the pairs of these blocks. All exist, and `first` is the kind of the first block. */
    DEVICE block_kind kind_of(const block_pairs &at, int first) const {
        if (at.rows.first == at.rows.last && at.keys.first == at.keys.last) return (block_kind)first;
        const unsigned char *row = kinds + (long long)at.rows.first * columns;
        for (int r = at.rows.first; r <= at.rows.last; r++, row += columns)
            for (int c = at.keys.first; c <= at.keys.last; c++)
                if (row[c] != first) return MIXED_BLOCKS;
        return (block_kind)first;
    }
    DEVICE int first_kind(const block_pairs &at) const {
        return kinds[(long long)at.rows.first * columns + at.keys.first];
    }

    /* Returns the blocks of a tile of queries [i, i_last] and keys [j, j_last]. All exist. */
    DEVICE block_pairs pairs_of(int i, int i_last, int j, int j_last) const {
        return {blocks_of(i + offset, i_last + offset, block_q), blocks_of(j, j_last, block_kv)};
    }
    DEVICE block_kind kind_of(int i, int i_last, int j, int j_last) const {
        if (!kinds) return without;
        const block_pairs at = pairs_of(i, i_last, j, j_last);
        return kind_of(at, first_kind(at));
    }

    /* Returns the kind of the block of query i and key j. */
    DEVICE block_kind kind_at(int i, int j) const {
        return (block_kind)kinds[(long long)((i + offset) / block_q) * columns + j / block_kv];
    }
};

/* A tile of the other side: its first row or key, and its kind. */
struct walk_step {
    int first;
    block_kind kind;
};

/* Walks over the tiles of STEP rows or keys in [begin, end), where begin is the first of a tile, as interval_walk
 * does over an interval. The own side of the tiles has rows or keys [own, own_last]. Besides the current step, AHEAD
 * more steps are known. All lanes of a warp call advance() together. */
template <int STEP, int AHEAD, bool OVER_KEYS> struct block_walk {
    static_assert(STEP % 4 == 0, "two bits of a step are its kind");
    const block_map &map;
    int own, own_last, end;
    int next;          /* first row or key that the lanes have not looked at */
    unsigned left = 0; /* of 32 tiles before `next`: not empty, and not taken yet */
    int own_kind = 0;  /* of the lane's tile of these 32 */
    /* The current step and the next steps, as first + kind; behind the last step, first is not less than end. */
    int known[AHEAD + 1];
    int current = 0;

    DEVICE block_walk(const block_map &map, int own, int own_last, int end, int begin = 0)
        : map(map), own(own), own_last(own_last), end(end), next(begin) {
#pragma unroll
        for (int i = 0; i <= AHEAD; i++) known[i] = take();
    }

    /* Returns one of the known steps. NOTE: a number that is no constant would move the array to local memory. */
    DEVICE walk_step at(int step) const {
        int r = known[0];
#pragma unroll
        for (int i = 1; i <= AHEAD; i++)
            if (step == current + i) r = known[i];
        return {r & ~3, (block_kind)(r & 3)};
    }
    DEVICE bool exists(int step) const { return at(step).first < end; }
    DEVICE int first(int step) const { return at(step).first; }
    DEVICE void advance() {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) known[i] = known[i + 1];
        known[AHEAD] = take();
        current++;
    }

    DEVICE int take() {
        while (left == 0) {
            if (next >= end) return ceil_div(end, STEP) * STEP;
            const long long at = next + (long long)(threadIdx.x % 32) * STEP;
            const int last = (int)min(at + STEP, (long long)end) - 1;
            own_kind = EMPTY_BLOCK;
            if (at < end)
                own_kind =
                    OVER_KEYS ? map.kind_of(own, own_last, (int)at, last) : map.kind_of((int)at, last, own, own_last);
            left = __ballot_sync(0xffffffffu, own_kind != EMPTY_BLOCK);
            next += 32 * STEP;
        }
        const int tile = __ffs(left) - 1;
        left &= left - 1;
        return next + (tile - 32) * STEP + __shfl_sync(0xffffffffu, own_kind, tile);
    }
};

#endif
