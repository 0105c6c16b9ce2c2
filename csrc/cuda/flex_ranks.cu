/* Says in which order the tiles of keys that a tile of queries sees add to its dQ: in the order in which Hopper's
 * backward begins them (flex_order.cu). The own side of the walks is that of the keys.
 *
 *   ranks [masks, other_tiles, own_tiles + 1]: of a pair of tiles that is not empty, twice the number of own tiles that
 *                                              add before, plus 1 if none adds after. Behind each row stands the number
 *                                              of own tiles that add.
 *
 * One warp serves one tile of queries. Its lanes look at 32 tiles of keys at a time. */
#include "flex_blocks.cuh"

#ifndef KERNEL
#define KERNEL flex_ranks
#endif

extern "C" __global__ void __launch_bounds__(FA_FLEX_WALKS_THREADS) KERNEL(const fa_cuda_flex_walks p) {
    const int lane = (int)(threadIdx.x % 32), warps = (int)blockDim.x / 32;
    const long long num_rows = (long long)p.flex.mask_b * p.flex.mask_h * p.other_tiles;
    for (long long at = (long long)blockIdx.x * warps + threadIdx.x / 32; at < num_rows;
         at += (long long)gridDim.x * warps) {
        const int other = (int)(at % p.other_tiles), mask = (int)(at / p.other_tiles);
        const block_map map(p.flex, mask / p.flex.mask_h, mask % p.flex.mask_h, PARTIAL_BLOCK);
        const int *order = p.order ? p.order + (long long)mask * p.own_tiles : nullptr;
        unsigned *ranks = p.ranks + at * (p.own_tiles + 1), num = 0;
        int last = 0; /* of the tiles so far, the one that adds last */
        for (int first = 0; first < p.own_tiles; first += 32) {
            const int place = first + lane;
            const int own = place >= p.own_tiles ? -1 : order ? order[place] : place;
            const bool adds = own >= 0 && kind_of_pairs(p, map, own, other) != EMPTY_BLOCK;
            const unsigned all = __ballot_sync(0xffffffffu, adds);
            if (adds) ranks[own] = 2 * (num + __popc(all & ((1u << lane) - 1)));
            if (all) last = __shfl_sync(0xffffffffu, own, 31 - __clz(all));
            num += __popc(all);
        }
        __syncwarp();
        if (lane == 0) {
            ranks[p.own_tiles] = num;
            if (num > 0) ranks[last] = 2 * (num - 1) + 1;
        }
    }
}
