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
        num = min(num, p.columns);
    }
};

/* Gives the blocks of a row of a list their kind. */
DEVICE void mark(const fa_cuda_flex_blocks &p, const fa_cuda_block_list &list, const listed_row &listed,
                 unsigned char *kinds, int kind) {
    for (int i = (int)(threadIdx.x % 32); i < listed.num; i += 32) {
        const int block = listed.blocks[i * list.blocks_stride[3]];
        if (block >= 0 && block < p.columns) kinds[block] = (unsigned char)kind;
    }
}

/* Makes row `row` of the map of head h of batch b. Whole warp. */
DEVICE void make_row(const fa_cuda_flex_blocks &p, int b, int h, int row) {
    unsigned char *kinds = p.kinds + (((long long)b * p.mask_h + h) * p.rows + row) * p.columns;
    const listed_row partial(p, p.partial, b, h, row), full(p, p.full, b, h, row);
    for (int i = (int)(threadIdx.x % 32); i < p.columns; i += 32) kinds[i] = EMPTY_BLOCK;
    __syncwarp();
    mark(p, p.partial, partial, kinds, p.kind_of_partial);
    __syncwarp(); /* a block of both lists is full */
    mark(p, p.full, full, kinds, FULL_BLOCK);
}

#endif
