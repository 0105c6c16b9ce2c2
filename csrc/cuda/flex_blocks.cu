/* Makes the map of a block mask (flex_map.cuh) for the generic kernels. One warp makes one row of blocks. */
#include "flex_map.cuh"

#ifndef KERNEL
#define KERNEL flex_blocks
#endif

extern "C" __global__ void __launch_bounds__(FA_FLEX_BLOCKS_THREADS) KERNEL(const fa_cuda_flex_blocks p) {
    const int warps = (int)blockDim.x / 32;
    const long long num_rows = (long long)p.mask_b * p.mask_h * p.rows;
    for (long long at = (long long)blockIdx.x * warps + threadIdx.x / 32; at < num_rows;
         at += (long long)gridDim.x * warps) {
        const int b = (int)(at / p.rows / p.mask_h), h = (int)(at / p.rows % p.mask_h), row = (int)(at % p.rows);
        make_row(p, b, h, row, row_of_map(p, b, h, row));
    }
}
