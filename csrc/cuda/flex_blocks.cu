/* Makes the map of a block mask (flex_blocks.cuh) of the lists of one call. The lists lie in the GPU's memory, so a
 * CUDA graph can be replayed with other lists.
 *
 *   kinds [mask_b, mask_h, rows, columns] bytes: EMPTY_BLOCK, PARTIAL_BLOCK or FULL_BLOCK
 *
 * A list names blocks in any order. Numbers behind its count are not read as blocks, and numbers outside of the mask
 * are no blocks. A block of both lists is full. One CTA makes one row of blocks. */
#include "flex_blocks.cuh"

#ifndef KERNEL
#define KERNEL flex_blocks
#endif

/* A row of the mask: the row `row` of head h of batch b. */
struct mask_row {
    int b, h, row;
};

/* Gives the blocks of a list their kind. */
DEVICE void mark(const fa_cuda_flex_blocks &p, const fa_cuda_block_list &list, mask_row at, unsigned char *kinds,
                 int kind) {
    if (!list.num) return;
    const int num =
        min(list.num[at.b * list.num_stride[0] + at.h * list.num_stride[1] + at.row * list.num_stride[2]], p.columns);
    const int *blocks =
        list.blocks + at.b * list.blocks_stride[0] + at.h * list.blocks_stride[1] + at.row * list.blocks_stride[2];
    for (int i = threadIdx.x; i < num; i += blockDim.x) {
        const int block = blocks[i * list.blocks_stride[3]];
        if (block >= 0 && block < p.columns) kinds[block] = (unsigned char)kind;
    }
}

extern "C" __global__ void __launch_bounds__(128) KERNEL(const fa_cuda_flex_blocks p) {
    const long long num_rows = (long long)p.mask_b * p.mask_h * p.rows;
    for (long long at = blockIdx.x; at < num_rows; at += gridDim.x) {
        const mask_row row = {(int)(at / p.rows / p.mask_h), (int)(at / p.rows % p.mask_h), (int)(at % p.rows)};
        unsigned char *kinds = p.kinds + at * p.columns;
        for (int i = threadIdx.x; i < p.columns; i += blockDim.x) kinds[i] = EMPTY_BLOCK;
        __syncthreads();
        mark(p, p.partial, row, kinds, p.kind_of_partial);
        __syncthreads(); /* a block of both lists is full */
        mark(p, p.full, row, kinds, FULL_BLOCK);
    }
}
