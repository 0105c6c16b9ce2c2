/* Orders the own tiles of each mask by the length of their walks (flex_walks.cu), the longest first. So a launch ends
 * with short tiles. Of walks of one length the last query tile comes first, but the first key tile: key tiles walk from
 * the last query tile to the first, and the key tile that begins first must not keep the others waiting for its share.
 *
 *   order [masks, own_tiles]
 *
 * One warp finds the place of one tile: the number of tiles that come before it. */
#include "cuda_flex.h"

#ifndef KERNEL
#define KERNEL flex_order
#endif

extern "C" __global__ void __launch_bounds__(FA_FLEX_WALKS_THREADS) KERNEL(const fa_cuda_flex_walks p) {
    const int lane = (int)(threadIdx.x % 32), warps = (int)blockDim.x / 32;
    const long long num_walks = (long long)p.flex.mask_b * p.flex.mask_h * p.own_tiles, pitch = 1 + p.other_tiles;
    for (long long at = (long long)blockIdx.x * warps + threadIdx.x / 32; at < num_walks;
         at += (long long)gridDim.x * warps) {
        const int own = (int)(at % p.own_tiles);
        const int *nums = p.walks + (at - own) * pitch, num = nums[own * pitch];
        int before = 0;
        for (int first = 0; first < p.own_tiles; first += 32) {
            const int other = first + lane, other_num = other < p.own_tiles ? nums[other * pitch] : -1;
            const bool is_sooner = p.own_keys ? other < own : other > own;
            before += __popc(__ballot_sync(0xffffffffu, other_num > num || (other_num == num && is_sooner)));
        }
        if (lane == 0) p.order[at - own + before] = own;
    }
}
