/* Who works on what in attn_decode_sm90.cu: sequences become items, items laid end to end are cut into equal shares, one
 * for each group of CTAs, and a share falls into pieces. Every CTA finds its own from lengths on the GPU. */
#ifndef FA_ATTN_DECODE_SCHEDULE_CUH
#define FA_ATTN_DECODE_SCHEDULE_CUH

#include "walk.cuh"

/* ---- sequences and their tiles --------------------------------------------------------------------------------- */

/* (x y + add) / z of positions and groups. A division of 64 bits takes 100 instructions, and few problems need one. */
__device__ __noinline__ int times_over(int x, int y, int add, int z) {
    const u64 product = (u64)x * y + (long long)add;
    return product >> 32 ? (int)(product / (u32)z) : (int)((u32)product / (u32)z);
}
DEVICE int divide(int x, fa_division by) { return (int)((u64)(u32)x * by.magic >> by.shift); }

/* Whatever the arrays hold, what comes out lies within the tensors. */
struct sequence {
    int q_row, len_q;   /* its queries: first row if packed, how many */
    int kv_row, len_kv; /* key 0 in its cache, how many */
    int position;       /* where a new key goes in its cache: behind the seqused_k old ones, whatever the padding */
    int q_tiles;
};

DEVICE sequence sequence_at(const params &p, int b_idx) {
    sequence s = {0, p.len_q, 0, p.capacity, 0, 0};
    if (p.cu_seqlens_q) {
        s.q_row = clamp(p.cu_seqlens_q[b_idx], 0, p.total_q);
        s.len_q = clamp(p.cu_seqlens_q[b_idx + 1], s.q_row, p.total_q) - s.q_row;
    }
    int capacity = p.capacity;
    if (p.cu_seqlens_k) {
        const int begin = p.cu_seqlens_k[b_idx], end = p.cu_seqlens_k[b_idx + 1];
        if (p.block_table) {
            s.len_kv = clamp(end - begin, 0, capacity);
        } else {
            s.kv_row = clamp(begin, 0, capacity);
            s.len_kv = clamp(end, s.kv_row, capacity) - s.kv_row;
            capacity = s.len_kv;
        }
    }
    if (p.seqused_k) {
        s.position = clamp(p.seqused_k[b_idx], 0, 1 << 30);
        s.len_kv = min(s.position, capacity);
    }
    s.len_kv = min(s.len_kv + p.len_new, capacity);
    if (p.leftpad_k) {
        const int pad = clamp(p.leftpad_k[b_idx], 0, s.len_kv);
        s.kv_row += pad, s.len_kv -= pad;
    }
    const int rows = s.len_q * p.heads_per_kv;
    s.q_tiles = p.min_rows <= rows && rows <= p.max_rows ? ceil_div(rows, BLOCK_Q) : 0;
    return s;
}

/* The window is read at run time. */
typedef mask_of<false, true> mask;

/* The keys that a tile of queries walks over. */
DEVICE tile_walk keys_of(const params &p, const sequence &s, int q_tile) {
    const int shift = s.len_kv - s.len_q;
    const int first = divide(q_tile * BLOCK_Q, p.by_heads_per_kv);
    const int last = min(divide(q_tile * BLOCK_Q + BLOCK_Q - 1, p.by_heads_per_kv), s.len_q - 1);
    return walk_of_rows(p, first, last, shift, s.len_kv);
}

/* Key tiles of a tile of queries. One that sees no key has one too: somebody must write its zeros. */
DEVICE int tiles_of(const tile_walk &r) { return max(ceil_div(r.end, BLOCK_KV) - r.begin / BLOCK_KV, 1); }

/* Key tiles of one head of a sequence, over all tiles of its queries; most: of one of these, or, where a window makes
 * them unlike, of all. */
struct head_tiles {
    int sum, most;
};
DEVICE head_tiles tiles_of_head(const params &p, const sequence &s) {
    const int whole = max(ceil_div(s.len_kv, BLOCK_KV), 1);
    if (p.window_left < 0 && p.window_right < 0) return {s.q_tiles * whole, s.q_tiles > 0 ? whole : 0};
    int tiles = 0;
#pragma unroll 1
    for (int i = 0; i < s.q_tiles; i++) tiles += tiles_of(keys_of(p, s, i));
    return {tiles, tiles};
}

/* ---- work ------------------------------------------------------------------------------------------------------ */

/* An item is one tile of queries of one key head. The items of a lane, in the order batch, head, tile of queries, are
 * laid end to end: position x is one key tile of one item. */
struct item {
    sequence s;
    tile_walk keys;
    int b_idx, head_block, q_tile;
    int begin, tiles; /* positions */
};

/* The positions [first, last) of one group. The first `longer` groups have size + 1 of them, the others size, the last
 * ones what is left. */
struct share {
    int first, last, group;
    int size, longer;
    bool is_stream; /* all the keys and values of the launch together do not stay in L2 */
};

/* Key tiles [first, last) of an item; part number `idx` of `parts`. */
struct piece {
    int first, last, idx, parts;
    int first_group; /* whose share the item begins in */
};

/* Of one CTA, in shared memory. */
struct schedule {
    share w; /* of this CTA's group */
    item t;  /* at hand. NOTE: here and not in registers, of which attend() has none to spare */
    alignas(16) int tiles[WARPS], items[WARPS], most_tiles[WARPS]; /* that each warp has counted */
};

DEVICE void describe(const params &p, item &t) {
    t.keys = keys_of(p, t.s, t.q_tile);
    t.tiles = tiles_of(t.keys);
}

/* false: there is none. */
DEVICE bool next_item(const params &p, item &t) {
    t.begin += t.tiles;
    t.q_tile++;
    if (t.q_tile >= t.s.q_tiles) {
        t.q_tile = 0;
        t.head_block++;
        if (t.head_block >= p.head_blocks) {
            t.head_block = 0;
            do {
                if (++t.b_idx >= p.b) return false;
                t.s = sequence_at(p, t.b_idx);
            } while (t.s.q_tiles == 0);
        }
    }
    describe(p, t);
    return true;
}

/* Whole CTA. */
DEVICE void step_item(const params &p, schedule &s) {
    item t = s.t;
    const bool is_there = next_item(p, t);
    __syncthreads();
    if (threadIdx.x == 0 && is_there) s.t = t;
    __syncthreads();
}

/* How the positions are shared: by all groups; where all items are alike, so that each is cut evenly, or goes to one group
 * as a whole, if that makes the shares at most an eighth longer. Then no group has the ends of two items, which costs
 * more than what the others could read meanwhile. */
DEVICE void choose_size(const params &p, share &w, int total, int items, int most_tiles) {
    w.size = divide(total, p.by_groups), w.longer = total - w.size * p.groups;
    if (items <= 1 || (long long)items * most_tiles != total) return;
    const int most = w.size + (w.longer > 0);
    int even = divide(items + p.groups - 1, p.by_groups) * most_tiles;
    if (items < p.groups) even = ceil_div(most_tiles, p.groups / items);
    if (even - most > most / 8 || (items < p.groups && most_tiles % even != 0)) return;
    w.size = even, w.longer = 0;
}

/* Counts the positions of a lane, and finds the group's share of them, empty for a group without work, and the item at
 * its beginning. Whole CTA. Every launch waits for this, so it divides by what the host has prepared. */
DEVICE void find_share(const params &p, schedule &s, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int each = ceil_div(p.b, THREADS), first_b = min((int)threadIdx.x * each, p.b);
    const int last_b = min(first_b + each, p.b);
    int tiles = 0, items = 0, most_tiles = 0;
    sequence x;
#pragma unroll 1
    for (int b_idx = first_b; b_idx < last_b; b_idx++) {
        x = sequence_at(p, b_idx);
        const head_tiles of_head = tiles_of_head(p, x);
        tiles += of_head.sum * p.head_blocks, items += x.q_tiles * p.head_blocks;
        most_tiles = max(most_tiles, of_head.most);
    }
    int end = tiles; /* an inclusive scan over the warp */
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
    }
    items = __reduce_add_sync(0xffffffffu, items), most_tiles = __reduce_max_sync(0xffffffffu, most_tiles);
    if (lane == 31) s.tiles[warp] = end, s.items[warp] = items, s.most_tiles[warp] = most_tiles;
    __syncthreads();
    int total = 0;
    items = most_tiles = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        if (i < warp) end += s.tiles[i];
        total += s.tiles[i], items += s.items[i], most_tiles = max(most_tiles, s.most_tiles[i]);
    }
    share w = {0, 0, group, 0, 0, (u64)total * p.lanes * (BLOCK_KV * HEAD_DIM * 4) > 32 << 20};
    choose_size(p, w, total, items, most_tiles);
    w.first = min(group * w.size + min(group, w.longer), total);
    w.last = min(w.first + w.size + (group < w.longer), total);

    if (w.first < w.last && end - tiles <= w.first && w.first < end) {
        item t;
        t.b_idx = first_b, t.begin = end - tiles, t.s = x;
        int head_tiles = tiles;
#pragma unroll 1
        for (; last_b - first_b > 1; t.b_idx++) {
            t.s = sequence_at(p, t.b_idx);
            head_tiles = tiles_of_head(p, t.s).sum * p.head_blocks;
            if (w.first < t.begin + head_tiles) break;
            t.begin += head_tiles;
        }
        t.head_block = 0;
        if (p.head_blocks > 1) {
            head_tiles = divide(head_tiles, p.by_head_blocks);
            t.head_block = (w.first - t.begin) / head_tiles;
            t.begin += t.head_block * head_tiles;
        }
        t.q_tile = 0;
        describe(p, t);
#pragma unroll 1
        while (w.first >= t.begin + t.tiles) {
            t.begin += t.tiles, t.q_tile++;
            describe(p, t);
        }
        s.t = t;
    }
    if (threadIdx.x == 0) s.w = w;
    __syncthreads();
}

constexpr int LEAST_STEPS = 2; /* of a CTA: fewer cost more in the number of parts than they save */
constexpr int UNCUT_STEPS = 4; /* so many take no longer than two parts and their sum */

/* In place of find_share where clusters work: number `number` of p.groups on one head gets one part of one sequence, and
 * of that its CTA `rank` its share, which may be empty. Parts are as short as the groups suffice for, but not too
 * short. Some groups get none. Whole CTA. */
DEVICE void find_part(const params &p, schedule &s, piece &x, int number, int rank) {
    const int lane = threadIdx.x % 32;
    item t;
    t.head_block = t.q_tile = t.begin = 0, t.b_idx = min(lane, p.b - 1);
    t.s = sequence_at(p, t.b_idx);
    describe(p, t);
    const int mine = lane < p.b ? t.tiles : 0, sum = p.b == 1 ? t.tiles : __reduce_add_sync(0xffffffffu, mine);
    const int most = p.b == 1 ? t.tiles : __reduce_max_sync(0xffffffffu, mine);
    const int least_steps = most <= UNCUT_STEPS << p.cluster_bits ? UNCUT_STEPS : LEAST_STEPS;
    int size = max(divide(sum + p.groups - 1, p.by_groups), least_steps << p.cluster_bits);
    int parts = sum <= size ? 1 : ceil_div(t.tiles, size), end = parts;
    if (p.b > 1) {
#pragma unroll 1
        for (;; size += size / 16 + 1) {
            parts = ceil_div(mine, size);
            end = __reduce_add_sync(0xffffffffu, parts);
            if (end <= p.groups) break;
        }
    }
    const bool is_there = number < end;
    if (p.b > 1 && is_there) {
        end = parts;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, end, step);
            if (lane >= step) end += before;
        }
        t.b_idx = __ffs(__ballot_sync(0xffffffffu, number < end)) - 1;
        number -= __shfl_sync(0xffffffffu, end - parts, t.b_idx);
        parts = __shfl_sync(0xffffffffu, parts, t.b_idx);
        t.s = sequence_at(p, t.b_idx);
        describe(p, t);
    }
    const int first = number * size, tiles = min(size, t.tiles - first);
    x = {first + (tiles * rank >> p.cluster_bits), first + (tiles * (rank + 1) >> p.cluster_bits), number, parts, 0};
    if (threadIdx.x == 0) {
        s.t = t;
        s.w.first = 0, s.w.last = is_there;
        s.w.is_stream = (u64)sum * p.h_kv * (BLOCK_KV * HEAD_DIM * 4) > 32 << 20;
    }
    __syncthreads();
}

/* The group whose share holds a position. */
DEVICE int group_at(const share &w, int position) {
    const int behind = position - w.longer * (w.size + 1);
    return behind < 0 ? position / (w.size + 1) : w.longer + behind / w.size;
}

/* The piece of t at or after `position`; false: the group has none left there. An item is cut at the ends of the shares,
 * or, with num_splits, into that many parts, each of which belongs to the group in whose share it begins: then its
 * result does not depend on what else is in the batch. */
DEVICE bool piece_at(const params &p, const share &w, const item &t, int position, piece &x) {
    const int offset = position - t.begin;
    if (p.num_splits == 0) {
        x.first = offset, x.last = min(t.tiles, w.last - t.begin);
        return true;
    }
    x.first_group = 0;
    x.parts = min(p.num_splits, t.tiles);
    x.idx = times_over(offset, x.parts, t.tiles - 1, t.tiles);
    x.first = times_over(x.idx, t.tiles, 0, x.parts), x.last = times_over(x.idx + 1, t.tiles, 0, x.parts);
    return x.idx < x.parts && t.begin + x.first < w.last;
}

/* Which part of how many it is: not known before because nobody needs it while there is nothing to wait for. */
DEVICE void count_parts(const params &p, const share &w, const item &t, piece &x) {
    if (p.num_splits > 0 || (HAS_CLUSTERS && p.cluster_bits > 0)) return;
    const int end = t.begin + t.tiles;
    x.first_group = t.begin >= w.first ? w.group : group_at(w, t.begin);
    x.idx = w.group - x.first_group;
    x.parts = (end <= w.last ? w.group : group_at(w, end - 1)) - x.first_group + 1;
}

#endif
