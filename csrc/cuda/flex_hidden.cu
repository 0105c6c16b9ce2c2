/* Finds the pairs of the tiles of a walk (flex_walks.cu) that do not see each other. Hopper's kernels read a bit for
 * each of their registers, instead of computing the mask_mod in every head.
 *
 *   hidden [masks, own_tiles, other_tiles, words, 2 own_tile]: bit i % 32 of word i / 32 belongs to register i of a
 *   thread of the kernel. 128 threads have 64 rows of the own side, as wgmma leaves its sums: rows l / 4 and l / 4 + 8
 *   of a warp's 16, and columns 2 (l % 4) + {0, 1} of each 8 of the other side.
 *
 * Only the words of tiles that are not full, or that reach beyond an end, are written. No other words are read. Keys
 * that do not exist are hidden. So are queries if the own side is that of the keys.
 *
 * flex_walks.cu has listed these pairs of tiles. A CTA takes 64 rows of one. */
#define FLEX_MERGES_LOADS
#include "flex.cuh"
#include "ptx_launch.cuh"

#ifndef KERNEL
#define KERNEL flex_hidden
#endif

struct hidden_params : fa_cuda_flex_walks {
    flex_values values;
};

constexpr int AT_ONCE = FLEX_LONG_MASK ? 2 : 16; /* so many loads of captures are under way together */

/* Fills the words of one other tile. `to` is the thread's first word. */
template <block_kind KIND, bool OWN_KEYS>
DEVICE void fill_words(const fa_cuda_flex_walks &p, const mods &mod, int first_own, int first_other, unsigned *to) {
    const int words = FA_HIDDEN_WORDS(p.other_tile), threads = 2 * p.own_tile;
    const int len_q = OWN_KEYS ? p.other_len : p.own_len, len_kv = OWN_KEYS ? p.own_len : p.other_len;
#pragma unroll 1
    for (int w = 0; w < words; w++) { /* the last word may have bits beyond the registers */
        unsigned word = 0;
#pragma unroll AT_ONCE
        for (int i = 0; i < 32; i++) {
            const int x = first_own + i / 2 % 2 * 8, y = first_other + (8 * w + i / 4) * 8 + i % 2;
            const int q = OWN_KEYS ? y : x, key = OWN_KEYS ? x : y;
            const bool is_seen = mod.sees<KIND>(min(q, len_q - 1), min(key, len_kv - 1));
            const bool exists = key < len_kv && (!OWN_KEYS || q < len_q);
            word |= (unsigned)!(exists & is_seen) << i;
        }
        to[w * threads] = word;
    }
}

template <bool OWN_KEYS>
DEVICE void fill_words(const fa_cuda_flex_walks &p, const mods &mod, int first_own, int first_other, block_kind kind,
                       unsigned *to) {
    if (kind == PARTIAL_BLOCK)
        fill_words<PARTIAL_BLOCK, OWN_KEYS>(p, mod, first_own, first_other, to);
    else if (kind == FULL_BLOCK)
        fill_words<FULL_BLOCK, OWN_KEYS>(p, mod, first_own, first_other, to);
    else
        fill_words<MIXED_BLOCKS, OWN_KEYS>(p, mod, first_own, first_other, to);
}

extern "C" __global__ void __launch_bounds__(FA_FLEX_HIDDEN_THREADS) KERNEL(const __grid_constant__ hidden_params p) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, blocks = p.own_tile / 64;
    const int words = FA_HIDDEN_WORDS(p.other_tile), threads = 2 * p.own_tile, most = p.own_tiles * p.other_tiles;
    griddepcontrol_wait(); /* for flex_walks */
    griddepcontrol_launch_dependents();
    for (int mask = blockIdx.y; mask < p.flex.mask_b * p.flex.mask_h; mask += gridDim.y) {
        const mods mod(p.flex, p.values, mask / p.flex.mask_h, mask % p.flex.mask_h);
        const int *pairs = p.pairs + (long long)mask * (1 + most);
        const int num = blocks * pairs[0];
        for (int i = blockIdx.x; i < num; i += gridDim.x) {
            const int block = i % blocks, pair = pairs[1 + i / blocks], tile = pair >> 2;
            if (pair < 0) continue;
            const int own = tile / p.other_tiles, other = tile % p.other_tiles;
            const int first_own = own * p.own_tile + 64 * block + 16 * warp + lane / 4;
            const int first_other = other * p.other_tile + 2 * (lane % 4);
            unsigned *to = p.hidden + ((long long)mask * most + tile) * words * threads + 128 * block + threadIdx.x;
            if (p.own_keys)
                fill_words<true>(p, mod, first_own, first_other, (block_kind)(pair & 3), to);
            else
                fill_words<false>(p, mod, first_own, first_other, (block_kind)(pair & 3), to);
        }
    }
}
