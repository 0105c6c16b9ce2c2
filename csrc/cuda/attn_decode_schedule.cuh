/* Who works on what in attn_decode_sm90.cu: sequences become items, items laid end to end are cut into equal shares, one
 * for each group of CTAs, and a share falls into pieces. Every CTA finds its own from lengths on the GPU. */
#ifndef FA_ATTN_DECODE_SCHEDULE_CUH
#define FA_ATTN_DECODE_SCHEDULE_CUH

/* ---- sequences and their tiles --------------------------------------------------------------------------------- */

DEVICE int ceil_div(int x, int y) { return (x + y - 1) / y; }
/* (x y + add) / z of positions and groups. A division of 64 bits takes 100 instructions, and few problems need one. */
__device__ __noinline__ int times_over(int x, int y, int add, int z) {
    const u64 product = (u64)x * y + (long long)add;
    return product >> 32 ? (int)(product / (u32)z) : (int)((u32)product / (u32)z);
}
DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

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
    s.q_tiles = ceil_div(s.len_q * p.heads_per_kv, BLOCK_Q);
    return s;
}

/* Keys [begin, end) that some row of a tile of queries sees, and [full_begin, full_end) that all of them see. */
struct key_range {
    int begin, end, full_begin, full_end;
};

DEVICE key_range keys_of(const params &p, const sequence &s, int q_tile) {
    key_range r = {0, s.len_kv, 0, s.len_kv};
    const int shift = s.len_kv - s.len_q;
    const int first = q_tile * BLOCK_Q / p.heads_per_kv;
    const int last = min((q_tile * BLOCK_Q + BLOCK_Q - 1) / p.heads_per_kv, s.len_q - 1);
    if (p.window_right >= 0) {
        r.end = clamp(last + shift + p.window_right + 1, 0, s.len_kv);
        r.full_end = clamp(first + shift + p.window_right + 1, 0, s.len_kv);
    }
    if (p.window_left >= 0) {
        r.begin = clamp(first + shift - p.window_left, 0, r.end);
        r.full_begin = max(last + shift - p.window_left, 0);
    }
    return r;
}

/* Key tiles of a tile of queries. One that sees no key has one too: somebody must write its zeros. */
DEVICE int tiles_of(const key_range &r) { return max(ceil_div(r.end, BLOCK_KV) - r.begin / BLOCK_KV, 1); }

/* Key tiles of one head of a sequence, over all tiles of its queries. */
DEVICE int tiles_of_head(const params &p, const sequence &s) {
    if (p.window_left < 0 && p.window_right < 0) return s.q_tiles * max(ceil_div(s.len_kv, BLOCK_KV), 1);
    int tiles = 0;
#pragma unroll 1
    for (int i = 0; i < s.q_tiles; i++) tiles += tiles_of(keys_of(p, s, i));
    return tiles;
}

/* ---- work ------------------------------------------------------------------------------------------------------ */

/* An item is one tile of queries of one key head. The items of a lane, in the order batch, head, tile of queries, are
 * laid end to end: position x is one key tile of one item. */
struct item {
    sequence s;
    key_range keys;
    int b_idx, head_block, q_tile;
    int begin, tiles; /* positions */
};

/* The positions [first, last) of one group out of all. */
struct share {
    int first, last, total, group, groups;
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
    int tiles[WARPS], items[WARPS], most_tiles[WARPS]; /* that each warp has counted */
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
        if (t.head_block >= p.h_kv / p.lanes) {
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

/* How many groups share the positions: all of them; where all items are alike, a number that divides each item evenly, or
 * the items among the groups, if that leaves at most a tenth of them idle. Then no group has the ends of two items, which
 * costs more than what the others could read meanwhile. */
DEVICE int choose_groups(const params &p, int total, int items, int most_tiles) {
    const int groups = min(p.groups, total);
    if (total == 0 || (long long)items * most_tiles != total) return groups;
    const int even = items <= groups ? groups / items * items : items / ceil_div(items, groups);
    return (items <= groups || items % even == 0) && even * 10 >= groups * 9 ? even : groups;
}

/* Counts the positions of a lane, and finds the group's share of them, empty for a group without work, and the item at
 * its beginning. Whole CTA. */
DEVICE void find_share(const params &p, schedule &s, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head_blocks = p.h_kv / p.lanes;
    const int each = ceil_div(p.b, THREADS), first_b = min((int)threadIdx.x * each, p.b);
    const int last_b = min(first_b + each, p.b);
    int tiles = 0, items = 0, most_tiles = 0; /* most_tiles: of one item, or more where windows make them unlike */
#pragma unroll 1
    for (int b_idx = first_b; b_idx < last_b; b_idx++) {
        const sequence x = sequence_at(p, b_idx);
        const int head_tiles = tiles_of_head(p, x);
        tiles += head_tiles * head_blocks;
        items += x.q_tiles * head_blocks;
        const bool are_alike = x.q_tiles <= 1 || (p.window_left < 0 && p.window_right < 0);
        most_tiles = max(most_tiles, are_alike ? head_tiles / max(x.q_tiles, 1) : head_tiles);
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
    share w = {0, 0, 0, group, 0, false};
    items = most_tiles = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        if (i < warp) end += s.tiles[i];
        w.total += s.tiles[i], items += s.items[i], most_tiles = max(most_tiles, s.most_tiles[i]);
    }
    w.groups = choose_groups(p, w.total, items, most_tiles);
    w.is_stream = (u64)w.total * p.lanes * (BLOCK_KV * HEAD_DIM * 4) > 32 << 20;
    if (group < w.groups) {
        w.first = times_over(w.total, group, 0, w.groups);
        w.last = times_over(w.total, group + 1, 0, w.groups);
    }

    if (w.first < w.last && end - tiles <= w.first && w.first < end) {
        item t;
        int head_tiles;
        t.b_idx = first_b, t.begin = end - tiles;
#pragma unroll 1
        for (;; t.b_idx++) {
            t.s = sequence_at(p, t.b_idx);
            head_tiles = tiles_of_head(p, t.s);
            if (w.first < t.begin + head_tiles * head_blocks) break;
            t.begin += head_tiles * head_blocks;
        }
        t.head_block = (w.first - t.begin) / head_tiles;
        t.begin += t.head_block * head_tiles;
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

/* The group whose share holds a position: the last one that begins at or before it. */
DEVICE int group_at(const share &w, int position) { return times_over(position + 1, w.groups, -1, w.total); }

/* The piece of t at or after `position`; false: the group has none left there. An item is cut at the ends of the shares,
 * or, with num_splits, into that many parts, each of which belongs to the group in whose share it begins: then its
 * result does not depend on what else is in the batch. */
DEVICE bool piece_at(const params &p, const share &w, const item &t, int position, piece &x) {
    const int offset = position - t.begin;
    if (p.num_splits == 0) {
        /* This group's share begins in the item or before it, and ends in it or beyond it: divide only if need be. */
        const int end = t.begin + t.tiles;
        x.first = offset, x.last = min(t.tiles, w.last - t.begin);
        x.first_group = t.begin >= w.first ? w.group : group_at(w, t.begin);
        x.idx = w.group - x.first_group;
        x.parts = (end <= w.last ? w.group : group_at(w, end - 1)) - x.first_group + 1;
        return true;
    }
    x.first_group = 0;
    x.parts = min(p.num_splits, t.tiles);
    x.idx = times_over(offset, x.parts, t.tiles - 1, t.tiles);
    x.first = times_over(x.idx, t.tiles, 0, x.parts), x.last = times_over(x.idx + 1, t.tiles, 0, x.parts);
    return x.idx < x.parts && t.begin + x.first < w.last;
}

#endif
