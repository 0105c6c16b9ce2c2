/* Makes the map of a block mask (flex_blocks.cuh) of the lists of one call. The lists lie in the GPU's memory, so a
 * CUDA graph can be replayed with other lists.
 *
 *   kinds [mask_b, mask_h, rows, columns] bytes: EMPTY_BLOCK, PARTIAL_BLOCK or FULL_BLOCK
 *
 * A list names blocks in any order. Numbers behind its count are not read as blocks, and numbers outside of the mask
 * are no blocks. A block of both lists is full. */
#ifndef FA_FLEX_MAP_CUH
#define FA_FLEX_MAP_CUH

#include "flex_blocks.cuh"

/* A row of a list. num: blocks of the row; 0 if there is no such list. */
struct listed_row {
    const int *blocks;
    int num;

    DEVICE listed_row(const fa_cuda_flex_blocks &p, const fa_cuda_block_list &list, int b, int h, int row)
        : blocks(list.blocks + b * list.blocks_stride[0] + h * list.blocks_stride[1] + row * list.blocks_stride[2]),
          num(list.num ? list.num[b * list.num_stride[0] + h * list.num_stride[1] + row * list.num_stride[2]] : 0) {
        num = max(min(num, p.columns), 0);
    }
};

/* Blocks first + lane, first + lane + 32, .. of a row of a list; -1 for what is no block. All loads are under way
 * together. */
constexpr int LISTED_AT_ONCE = 4;
DEVICE void load_blocks(int (&blocks)[LISTED_AT_ONCE], const fa_cuda_flex_blocks &p, const fa_cuda_block_list &list,
                        const listed_row &listed, int first) {
#pragma unroll
    for (int n = 0; n < LISTED_AT_ONCE; n++) {
        const int i = first + 32 * n + (int)(threadIdx.x % 32);
        blocks[n] = i < listed.num ? listed.blocks[i * list.blocks_stride[3]] : -1;
    }
}
DEVICE void mark(const fa_cuda_flex_blocks &p, const int (&blocks)[LISTED_AT_ONCE], unsigned char *kinds, int kind) {
#pragma unroll
    for (int n = 0; n < LISTED_AT_ONCE; n++)
        if (blocks[n] >= 0 && blocks[n] < p.columns) kinds[blocks[n]] = (unsigned char)kind;
}

/* Where row `row` of the map of head h of batch b lies. */
DEVICE unsigned char *row_of_map(const fa_cuda_flex_blocks &p, int b, int h, int row) {
    return p.kinds + (((long long)b * p.mask_h + h) * p.rows + row) * p.columns;
}

/* Makes this row at `kinds`. Whole warp. */
DEVICE void make_row(const fa_cuda_flex_blocks &p, int b, int h, int row, unsigned char *kinds) {
    const listed_row partial(p, p.partial, b, h, row), full(p, p.full, b, h, row);
    int of_partial[LISTED_AT_ONCE], of_full[LISTED_AT_ONCE];
    load_blocks(of_partial, p, p.partial, partial, 0), load_blocks(of_full, p, p.full, full, 0);
#pragma unroll 4
    for (int i = (int)(threadIdx.x % 32); i < p.columns; i += 32) kinds[i] = EMPTY_BLOCK;
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < partial.num; first += 32 * LISTED_AT_ONCE) {
        if (first > 0) load_blocks(of_partial, p, p.partial, partial, first);
        mark(p, of_partial, kinds, p.kind_of_partial);
    }
    __syncwarp(); /* a block of both lists is full */
#pragma unroll 1
    for (int first = 0; first < full.num; first += 32 * LISTED_AT_ONCE) {
        if (first > 0) load_blocks(of_full, p, p.full, full, first);
        mark(p, of_full, kinds, FULL_BLOCK);
    }
}

#endif
