/* What Hopper's kernels must know of a block mask before they begin. An own tile of queries walks over tiles of keys,
 * and an own tile of keys over tiles of queries. There are four phases:
 *
 *   map     kinds [masks, rows, columns] (flex_map.cuh)
 *   walks   walks [masks, own_tiles, 1 + other_tiles]: the number of other tiles that are not empty, and behind it 4
 *           times the tile plus its block_kind, for these tiles in descending order. If flex_hidden.cu follows, a full
 *           tile that reaches beyond an end counts as partial: kernels read its bits
 *           pairs [masks, 1 + own_tiles other_tiles]: the number of pairs of tiles that have bits in flex_hidden.cu,
 *           and behind it 4 times own * other_tiles + other plus the block_kind, in any order; -1 is no pair
 *           nums [masks, own_tiles]: the numbers of the walks once more
 *   order   order [masks, own_tiles]: the own tiles by the length of their walks, the longest first. So a launch ends
 *           with short tiles. Of walks of one length the last query tile comes first, but the first key tile: key tiles
 *           walk from the last query tile to the first, and the key tile that begins first must not keep the others
 *           waiting for its share. With group_heads the own tiles keep their order, unless the launch then ends late.
 *           So tiles that walk over the same rows begin together, and the L2 holds the rows.
 *   ranks   ranks [masks, other_tiles, own_tiles + 1]: in which order the tiles of keys that a tile of queries sees add
 *           to its dQ. This is the order in which Hopper's backward begins them. The rank of a pair of tiles that is
 *           not empty is twice the number of own tiles that add before, plus 1 if none adds after. Behind each row
 *           stands the number of own tiles that add. The own side is that of the keys.
 *
 * Often the walks of query tiles need no map. Then there are no phases: see list_query_tile.
 *
 * A cluster runs all phases of a mask, with barriers between them: a launch costs more than a phase. A long problem
 * has a launch for each phase, with all CTAs at work (../gpu/mods.c). One warp serves one row, walk, place or row of
 * ranks. Its lanes look at 32 tiles at a time, and AT_ONCE times as many loads are under way together. */
#include "flex_map.cuh"
#include "ptx_launch.cuh"

#ifndef KERNEL
#define KERNEL flex_walks
#endif

typedef fa_cuda_flex_walks params;
constexpr int AT_ONCE = 4;

/* A warp among those that share a phase, and their masks. */
struct share {
    int warp, warps;
    int first_mask, mask_step;

    DEVICE share(const params &p) {
        const int warps_of_cta = (int)blockDim.x / 32, ctas = p.ctas_of_mask ? p.ctas_of_mask : (int)gridDim.x;
        warp = (int)blockIdx.x % ctas * warps_of_cta + (int)threadIdx.x / 32, warps = ctas * warps_of_cta;
        first_mask = (int)blockIdx.x / ctas, mask_step = (int)gridDim.x / ctas;
    }
};

/* The kinds of the pairs of own tiles and other tiles. A negative tile stands for no tile. NOTE: the loads have no
 * condition, so they are under way together. */
DEVICE void find_kinds(const params &p, const block_map &map, const int (&own)[AT_ONCE], const int (&other)[AT_ONCE],
                       block_kind (&kinds)[AT_ONCE]) {
    if (p.own_shift >= 0) { /* each tile lies in one block */
        const int own_step = p.own_keys ? 1 : map.columns, other_step = p.own_keys ? map.columns : 1;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int own_block = max(own[n], 0) >> p.own_shift, other_block = max(other[n], 0) >> p.other_shift;
            kinds[n] = (block_kind)map.kinds[(long long)own_block * own_step + (long long)other_block * other_step];
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if ((own[n] | other[n]) < 0) kinds[n] = EMPTY_BLOCK;
        return;
    }
    block_pairs pairs[AT_ONCE];
    int first[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const int i = max(own[n], 0) * p.own_tile, i_last = min(i + p.own_tile, p.own_len) - 1;
        const int j = max(other[n], 0) * p.other_tile, j_last = min(j + p.other_tile, p.other_len) - 1;
        pairs[n] = p.own_keys ? map.pairs_of(j, j_last, i, i_last) : map.pairs_of(i, i_last, j, j_last);
        first[n] = map.first_kind(pairs[n]);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        kinds[n] = EMPTY_BLOCK;
        if (own[n] >= 0 && other[n] >= 0) kinds[n] = map.kind_of(pairs[n], first[n]);
    }
}

/* Does a kernel read bits of this pair of tiles? */
DEVICE bool has_bits(const params &p, int own, int other, block_kind kind) {
    const bool reaches_end =
        (other + 1) * p.other_tile > p.other_len || (p.own_keys && (own + 1) * p.own_tile > p.own_len);
    return kind != EMPTY_BLOCK && (kind != FULL_BLOCK || reaches_end);
}

DEVICE unsigned lanes_before() { return (1u << threadIdx.x % 32) - 1; }

/* Lists the walk of an own tile. slot: the place of its first pair of tiles among `pairs`, or 0, if pairs come in any
 * order. Whole warp. Returns the number of its pairs. */
DEVICE int list_walk(const params &p, const block_map &map, int mask, int own, int slot) {
    const int lane = (int)(threadIdx.x % 32);
    int *walk = p.walks + ((long long)mask * p.own_tiles + own) * (1 + p.other_tiles), num = 0, num_pairs = 0;
#pragma unroll 1
    for (int last = p.other_tiles - 1; last >= 0; last -= 32 * AT_ONCE) {
        int owns[AT_ONCE], others[AT_ONCE];
        block_kind kinds[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) others[n] = last - 32 * n - lane, owns[n] = own;
        find_kinds(p, map, owns, others, kinds);
        unsigned with_bits[AT_ONCE];
        int num_with_bits = 0;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const bool needs_bits = p.pairs && has_bits(p, own, others[n], kinds[n]);
            const block_kind kind = needs_bits && kinds[n] == FULL_BLOCK ? PARTIAL_BLOCK : kinds[n];
            const unsigned all = __ballot_sync(0xffffffffu, kind != EMPTY_BLOCK);
            if (kind != EMPTY_BLOCK) walk[1 + num + __popc(all & lanes_before())] = 4 * others[n] + kind;
            num += __popc(all);
            with_bits[n] = __ballot_sync(0xffffffffu, needs_bits);
            num_with_bits += __popc(with_bits[n]);
        }
        if (num_with_bits == 0) continue;
        int *pairs = p.pairs + (long long)mask * (1 + p.own_tiles * p.other_tiles), place = slot + num_pairs;
        if (slot == 0) {
            if (lane == 0) place = 1 + atomicAdd(pairs, num_with_bits);
            place = __shfl_sync(0xffffffffu, place, 0);
        }
        num_pairs += num_with_bits;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int at = place + __popc(with_bits[n] & lanes_before());
            if (with_bits[n] >> lane & 1) pairs[at] = 4 * (own * p.other_tiles + others[n]) + kinds[n];
            place += __popc(with_bits[n]);
        }
    }
    if (lane == 0) {
        walk[0] = num;
        if (slot == 0) p.nums[(long long)mask * p.own_tiles + own] = num;
    }
    return num_pairs;
}

/* Whole warp. Would a launch of the own tiles in their order end late? The estimate lets a tile begin when the work
 * before it is divided among the CTAs. That is too late: a fifth here is a tenth in a simulation. */
DEVICE bool ends_late(const params &p, const int *nums) {
    const int lane = (int)(threadIdx.x % 32);
    float behind = 0, latest = 0; /* the work of the tiles so far; the longest time for which one CTA works alone */
#pragma unroll 1
    for (int last = p.own_tiles - 1; last >= 0; last -= 32 * AT_ONCE) {
        int of_tile[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) of_tile[n] = nums[max(last - 32 * n - lane, 0)];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const float num = last - 32 * n - lane >= 0 ? (float)of_tile[n] : 0;
            float sum = num;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const float other = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum += other;
            }
            latest = fmaxf(latest, num * (float)p.ctas - (behind + sum) * (float)p.group_heads);
            behind += __shfl_sync(0xffffffffu, sum, 31);
        }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) latest = fmaxf(latest, __shfl_xor_sync(0xffffffffu, latest, step));
    return latest > behind * (float)p.num_heads / 5;
}

/* The place of a tile is the number of tiles that come before it. */
DEVICE void find_place(const params &p, int mask, int own) {
    const int lane = (int)(threadIdx.x % 32);
    const int *nums = p.nums + (long long)mask * p.own_tiles, num = nums[own];
    int before = 0; /* of the lane's tiles */
    if (p.group_heads > 0 && !ends_late(p, nums)) {
        if (lane == 0) p.order[(long long)mask * p.own_tiles + own] = own;
        return;
    }
#pragma unroll 4
    for (int other = lane; other < p.own_tiles; other += 32) {
        const int other_num = nums[other];
        before += other_num > num || (other_num == num && (p.own_keys ? other < own : other > own));
    }
    before = __reduce_add_sync(0xffffffffu, before);
    if (lane == 0) p.order[(long long)mask * p.own_tiles + before] = own;
}

DEVICE void rank_tiles(const params &p, const block_map &map, int mask, int other) {
    const int lane = (int)(threadIdx.x % 32);
    const int *order = p.order ? p.order + (long long)mask * p.own_tiles : nullptr;
    unsigned *ranks = p.ranks + ((long long)mask * p.other_tiles + other) * (p.own_tiles + 1), num = 0;
    int last = 0; /* of the tiles so far, the one that adds last */
#pragma unroll 1
    for (int first = 0; first < p.own_tiles; first += 32 * AT_ONCE) {
        int owns[AT_ONCE], others[AT_ONCE];
        block_kind kinds[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int place = first + 32 * n + lane, own = min(place, p.own_tiles - 1);
            others[n] = place < p.own_tiles ? other : -1, owns[n] = order ? order[own] : own;
        }
        find_kinds(p, map, owns, others, kinds);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const unsigned all = __ballot_sync(0xffffffffu, kinds[n] != EMPTY_BLOCK);
            if (kinds[n] != EMPTY_BLOCK) ranks[owns[n]] = 2 * (num + __popc(all & lanes_before()));
            if (all) last = __shfl_sync(0xffffffffu, owns[n], 31 - __clz(all));
            num += __popc(all);
        }
    }
    __syncwarp();
    if (lane == 0) {
        ranks[p.own_tiles] = num;
        if (num > 0) ranks[last] = 2 * (num - 1) + 1;
    }
}

/* ---- without a map ----------------------------------------------------------------------------------------------- */

/* Room for the pairs of a tile in a row with so many partial blocks. */
DEVICE int slots_of(const params &p, int num_partial) {
    const int has_end = p.other_tiles * p.other_tile > p.other_len; /* the last tile has bits if it is full, too */
    return min((num_partial << p.other_shift) + has_end, p.other_tiles);
}

/* Where each tile lies in one block, the own side is that of the queries, and nobody else reads the map, no warp
 * waits for another. A warp makes the row of the map that its tile lies in, for itself alone. The numbers of the
 * lists say what the warp must know of the other rows: how long their walks are, and for how many pairs of tiles
 * they need room. Lists may name a block twice, or what is no block, so both are upper bounds. */
DEVICE void list_query_tile(const params &p, block_map map, int mask, int own) {
    extern __shared__ __align__(16) char memory[];
    unsigned char *kinds = (unsigned char *)memory + threadIdx.x / 32 * FA_FLEX_WALKS_COLUMNS;
    const int lane = (int)(threadIdx.x % 32), row = own >> p.own_shift, first = row << p.own_shift;
    const int b = mask / p.flex.mask_h, h = mask % p.flex.mask_h;
    const listed_row own_partial(p.blocks, p.blocks.partial, b, h, row), own_full(p.blocks, p.blocks.full, b, h, row);
    const int length = own_partial.num + own_full.num, num_slots = slots_of(p, own_partial.num);
    int before = 0, slot = 0; /* of the lane's rows: tiles that begin before, and room of the tiles before this one */
#pragma unroll 4
    for (int r = lane; r << p.own_shift < p.own_tiles; r += 32) {
        const int partial = listed_row(p.blocks, p.blocks.partial, b, h, r).num;
        const int other_length = partial + listed_row(p.blocks, p.blocks.full, b, h, r).num;
        const int tiles = min(p.own_tiles - (r << p.own_shift), 1 << p.own_shift);
        if (other_length > length || (other_length == length && r > row)) before += tiles;
        if (r < row) slot += tiles * slots_of(p, partial);
    }
    before = __reduce_add_sync(0xffffffffu, before) + min(p.own_tiles - first, 1 << p.own_shift) - 1 - (own - first);
    slot = 1 + __reduce_add_sync(0xffffffffu, slot) + (own - first) * num_slots;
    if (lane == 0) p.order[(long long)mask * p.own_tiles + before] = own;

    __syncwarp(); /* the row before has been read */
    make_row(p.blocks, b, h, row, kinds);
    __syncwarp();
    map.kinds = kinds, map.columns = 0; /* all rows of blocks are this one */
    int *pairs = p.pairs + (long long)mask * (1 + p.own_tiles * p.other_tiles);
    for (int i = list_walk(p, map, mask, own, slot) + lane; i < num_slots; i += 32) pairs[slot + i] = -1;
    if (lane == 0 && own == p.own_tiles - 1) pairs[0] = slot + num_slots - 1;
}

DEVICE void list_query_tiles(const params &p) {
    const share s(p);
    for (int mask = s.first_mask; mask < p.flex.mask_b * p.flex.mask_h; mask += s.mask_step) {
        const block_map map(p.flex, 0, 0, PARTIAL_BLOCK);
#pragma unroll 1
        for (int own = s.warp; own < p.own_tiles; own += s.warps) list_query_tile(p, map, mask, own);
    }
}

DEVICE void run_phase(const params &p, int phase) {
    const share s(p);
    const int num = phase == FA_FLEX_MAP_PHASE     ? p.flex.rows
                    : phase == FA_FLEX_RANKS_PHASE ? p.ranks ? p.other_tiles : 0
                    : phase == FA_FLEX_ORDER_PHASE ? p.order ? p.own_tiles : 0
                                                   : p.own_tiles;
    for (int mask = s.first_mask; mask < p.flex.mask_b * p.flex.mask_h; mask += s.mask_step) {
        const int b = mask / p.flex.mask_h, h = mask % p.flex.mask_h;
        const block_map map(p.flex, b, h, PARTIAL_BLOCK);
#pragma unroll 1
        for (int i = s.warp; i < num; i += s.warps) {
            if (phase == FA_FLEX_MAP_PHASE) {
                make_row(p.blocks, b, h, i, row_of_map(p.blocks, b, h, i));
                if (i == 0 && p.pairs) p.pairs[(long long)mask * (1 + p.own_tiles * p.other_tiles)] = 0;
            }
            if (phase == FA_FLEX_WALKS_PHASE) list_walk(p, map, mask, i, 0);
            if (phase == FA_FLEX_ORDER_PHASE) find_place(p, mask, i);
            if (phase == FA_FLEX_RANKS_PHASE) rank_tiles(p, map, mask, i);
        }
    }
}

/* NOTE: without the 1, ptxas keeps to 64 registers and spills. */
extern "C" __global__ void __launch_bounds__(FA_FLEX_WALKS_THREADS, 1) KERNEL(const __grid_constant__ params p) {
    griddepcontrol_wait(); /* for earlier work of the stream */
    griddepcontrol_launch_dependents();
    if (!p.blocks.kinds) return list_query_tiles(p);
    for (int phase = p.first_phase; phase <= p.last_phase; phase++) {
        if (phase > p.first_phase) cluster_sync();
        run_phase(p, phase);
    }
}
