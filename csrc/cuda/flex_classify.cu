/* Finds the kinds of the blocks of a mask_mod: what ../flex/classify.c finds.
 *
 *   kinds [b, h, rows, columns] bytes: EMPTY_BLOCK, PARTIAL_BLOCK or FULL_BLOCK
 *
 * A block behind the last row or key is never full. flex_lists.cu lists the blocks.
 *
 * A CTA has per_cta blocks that lie side by side. Each thread bounds the mask over one of them, which tells the kind of
 * most blocks. The CTA evaluates the others together, one after the other, until it finds a pair that differs from the
 * block's last row and first key. The last row and the first rows come first, because they tell the most. Each warp
 * takes one row then, and AT_ONCE rows in each later turn: where a mask is read from memory, as many loads are under
 * way together. */
#include "flex_blocks.cuh"
#define FLEX_BOUNDS
#define FLEX_MERGES_LOADS
#include "flex_mods.cuh"

#ifndef KERNEL
#define KERNEL flex_classify
#endif

struct classification : fa_cuda_flex_classification {
    flex_values values;
};

/* The queries [i, i_end) and keys [j, j_end) of a block that exist. */
struct mask_block {
    int b, h, i, i_end, j, j_end;
    bool is_whole;

    DEVICE mask_block(const classification &p, long long at) {
        const long long column = at % p.columns, row = at / p.columns % p.rows, head = at / p.columns / p.rows;
        const long long q = row * p.block_q, q_end = q + p.block_q;
        const long long kv = column * p.block_kv, kv_end = kv + p.block_kv;
        b = (int)(head / p.h), h = (int)(head % p.h);
        i = (int)q, i_end = (int)min(q_end, (long long)p.len_q);
        j = (int)kv, j_end = (int)min(kv_end, (long long)p.len_kv);
        is_whole = q_end <= p.len_q && kv_end <= p.len_kv;
    }
};

constexpr int AT_ONCE = FLEX_LONG_MASK ? 1 : 8;

/* Does a pair of the lane's keys in the rows [first, first + ROWS) differ from `expected`? Row 0 stands for the last
 * row of the block, and row r for its row r - 1. Rows behind the last are rows that were looked at before. */
template <int ROWS>
DEVICE bool rows_differ(const classification &p, const mask_block &block, long long first, bool expected) {
    for (long long j = block.j + (int)(threadIdx.x % 32); j < block.j_end; j += 32) {
        bool differs = false;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const long long i = block.i + first + r - 1;
            const int row = first + r == 0 ? block.i_end - 1 : (int)min(i, (long long)block.i_end - 1);
            differs |= flex_mask(p.values, block.b, block.h, row, (int)j) != expected;
        }
        if (differs) return true;
    }
    return false;
}

/* All threads of the CTA call this together, and get the same result. */
DEVICE block_kind kind_of(const classification &p, const mask_block &block) {
    const int num_rows = block.i_end - block.i, warps = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32;
    const bool expected = flex_mask(p.values, block.b, block.h, block.i_end - 1, block.j);
    if (__syncthreads_or(rows_differ<1>(p, block, warp, expected))) return PARTIAL_BLOCK;
    for (long long turn = warps; turn < num_rows; turn += warps * AT_ONCE) {
        const long long first = turn + warp * AT_ONCE;
        const bool differs = first < num_rows && rows_differ<AT_ONCE>(p, block, first, expected);
        if (__syncthreads_or(differs)) return PARTIAL_BLOCK;
    }
    return !expected ? EMPTY_BLOCK : block.is_whole ? FULL_BLOCK : PARTIAL_BLOCK;
}

/* What the bounds of a block tell; MIXED_BLOCKS: nothing. */
DEVICE block_kind kind_by_bounds(const classification &p, const mask_block &block) {
    const interval bounds =
        flex_mask_bounds(p.values, block.b, block.h, block.i, block.i_end - 1, block.j, block.j_end - 1);
    if (bounds.hi == 0) return EMPTY_BLOCK;
    return bounds.lo == 0 ? MIXED_BLOCKS : block.is_whole ? FULL_BLOCK : PARTIAL_BLOCK;
}

extern "C" __global__ void __launch_bounds__(FA_FLEX_CLASSIFY_THREADS)
    KERNEL(const __grid_constant__ classification p) {
    const long long num_blocks = (long long)p.b * p.h * p.rows * p.columns;
    for (long long first = (long long)blockIdx.x * p.per_cta; first < num_blocks;
         first += (long long)gridDim.x * p.per_cta) {
        const int num = (int)min((long long)p.per_cta, num_blocks - first);
        if ((int)threadIdx.x < num) {
            const long long at = first + threadIdx.x;
            p.kinds[at] = (unsigned char)kind_by_bounds(p, mask_block(p, at));
        }
        __syncthreads();
        for (int i = 0; i < num; i++) {
            if (p.kinds[first + i] != MIXED_BLOCKS) continue;
            const block_kind kind = kind_of(p, mask_block(p, first + i)); /* with a barrier behind the line above */
            if (threadIdx.x == 0) p.kinds[first + i] = (unsigned char)kind;
        }
        __syncthreads();
    }
}
