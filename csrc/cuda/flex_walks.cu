/* Lists the tiles that each tile of a kernel walks over, out of the map of a block mask (flex_blocks.cuh). An own tile
 * of queries walks over tiles of keys, and an own tile of keys over tiles of queries.
 *
 *   walks [masks, own_tiles, 1 + other_tiles]: the number of other tiles that are not empty, and behind it 4 times the
 *                                              tile plus its block_kind, for these tiles in descending order
 *
 * One warp lists one walk. Its lanes look at 32 tiles at a time. */
#include "flex_blocks.cuh"

#ifndef KERNEL
#define KERNEL flex_walks
#endif

extern "C" __global__ void __launch_bounds__(FA_FLEX_WALKS_THREADS) KERNEL(const fa_cuda_flex_walks p) {
    const int lane = (int)(threadIdx.x % 32), warps = (int)blockDim.x / 32;
    const long long num_walks = (long long)p.flex.mask_b * p.flex.mask_h * p.own_tiles;
    for (long long at = (long long)blockIdx.x * warps + threadIdx.x / 32; at < num_walks;
         at += (long long)gridDim.x * warps) {
        const int own = (int)(at % p.own_tiles), mask = (int)(at / p.own_tiles);
        const block_map map(p.flex, mask / p.flex.mask_h, mask % p.flex.mask_h, PARTIAL_BLOCK);
        int *walk = p.walks + at * (1 + p.other_tiles), num = 0;
        for (int last = p.other_tiles - 1; last >= 0; last -= 32) {
            const int other = last - lane;
            const block_kind kind = other >= 0 ? kind_of_pairs(p, map, own, other) : EMPTY_BLOCK;
            const unsigned all = __ballot_sync(0xffffffffu, kind != EMPTY_BLOCK);
            if (kind != EMPTY_BLOCK) walk[1 + num + __popc(all & ((1u << lane) - 1))] = 4 * other + kind;
            num += __popc(all);
        }
        if (lane == 0) walk[0] = num;
    }
}
