/* This file makes the schedule of attn_decode.cu. Sequences become items. Items are laid end to end and cut
 * into equal shares, one for each group of CTAs. A share consists of pieces. Every CTA reads the lengths on the GPU
 * and finds its own share. */
#ifndef FA_ATTN_DECODE_SCHEDULE_CUH
#define FA_ATTN_DECODE_SCHEDULE_CUH

#include "division.cuh"
#include "walk.cuh"

/* ---- sequences and their tiles --------------------------------------------------------------------------------- */

/* Computes (x y + add) / z for positions and groups. A 64-bit division takes 100 instructions, and few problems need
 * a 64-bit division. */
__device__ __noinline__ int times_over(int x, int y, int add, int z) {
    const u64 product = (u64)x * y + (long long)add;
    return product >> 32 ? (int)(product / (u32)z) : (int)((u32)product / (u32)z);
}
/* All members lie within the tensors, whatever the index arrays hold. */
struct sequence {
    int q_row, len_q;   /* the queries: first row (packed), number of rows */
    int kv_row, len_kv; /* the keys: row of key 0 in the cache, number of keys */
    /* position is the place of a new key in the cache, behind the seqused_k old keys. Padding does not change the
     * position. */
    int position;
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

/* Returns the walk of a tile of queries over keys. */
DEVICE tile_walk keys_of(const params &p, const sequence &s, int q_tile) {
    const int shift = s.len_kv - s.len_q;
    const int first = divide(q_tile * BLOCK_Q, p.by_heads_per_kv);
    const int last = min(divide(q_tile * BLOCK_Q + BLOCK_Q - 1, p.by_heads_per_kv), s.len_q - 1);
    tile_walk keys = walk_of_rows(p, first, last, shift, s.len_kv);
    if (p.attention_chunk > 0) keys.clip_to_chunks(p.attention_chunk, first + shift, last + shift, s.len_kv);
    return keys;
}

/* Returns the number of key tiles of a tile of queries. A tile of queries that sees no key counts as one key tile,
 * because a CTA must write the zeros of its rows. */
DEVICE int tiles_of(const tile_walk &r) { return max(ceil_div(r.end, BLOCK_KV) - r.begin / BLOCK_KV, 1); }

/* A head_tiles counts the key tiles of one head of a sequence. `sum` counts over all tiles of its queries. `most` is
 * the largest number of one tile of queries. Where a window or a chunk makes the tiles unlike, `most` is the sum. */
struct head_tiles {
    int sum, most;
};
DEVICE head_tiles tiles_of_head(const params &p, const sequence &s) {
    const int whole = max(ceil_div(s.len_kv, BLOCK_KV), 1);
    if (p.window_left < 0 && p.window_right < 0 && p.attention_chunk == 0)
        return {s.q_tiles * whole, s.q_tiles > 0 ? whole : 0};
    int tiles = 0;
#pragma unroll 1
    for (int i = 0; i < s.q_tiles; i++) tiles += tiles_of(keys_of(p, s, i));
    return {tiles, tiles};
}

/* ---- work ------------------------------------------------------------------------------------------------------ */

/* An item is one tile of queries of one key head. The items of a lane are laid end to end, in the order batch, head,
 * tile of queries. Position x is one key tile of one item. */
struct item {
    sequence s;
    tile_walk keys;
    int b_idx, head_block, q_tile;
    int begin, tiles; /* positions */
};

/* A share is the positions [first, last) of one group. The first `longer` groups have size + 1 positions, and the
 * other groups have `size`. The last groups have the positions that are left. */
struct share {
    int first, last, group;
    int size, longer;
    bool leaves_first; /* true: keys and values leave the L2 first */
};

/* A piece is the key tiles [first, last) of an item. The piece has the part number `idx` of `parts`. */
struct piece {
    int first, last, idx, parts;
    int first_group; /* the group in whose share the item begins */
};

/* A CTA keeps its schedule in shared memory. */
struct schedule {
    share w; /* the share of this CTA's group */
    /* The item that the CTA works on. NOTE: the item lies in shared memory, because attend() has no registers to
     * spare. */
    item t;
    alignas(16) int tiles[WARPS], items[WARPS], most_tiles[WARPS]; /* counts of each warp */
};

DEVICE void describe(const params &p, item &t) {
    t.keys = keys_of(p, t.s, t.q_tile);
    t.tiles = tiles_of(t.keys);
}

/* Steps to the next item. Returns false if there is no further item. */
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

/* Steps the CTA's item to the next item, if there is a next item. The whole CTA calls this function. */
DEVICE void step_item(const params &p, schedule &s) {
    item t = s.t;
    const bool is_there = next_item(p, t);
    __syncthreads();
    if (threadIdx.x == 0 && is_there) s.t = t;
    __syncthreads();
}

/* Merging so many rows takes as long as the reading of one key tile. */
constexpr int MERGED_ROWS = 100 * BLOCK_KV / 64;

/* Chooses how the positions are shared. By default all groups get equal shares. Where all items have equal length,
 * shares may follow the items instead. Each item is then cut evenly or goes to one group as a whole. This happens
 * only if the shares grow by an eighth at most. No group then has the ends of two items. Two ends in a group cost
 * more than the other groups could read meanwhile.
 * With s key tiles in a part, and t in the item, a group reads s tiles, and the last group merges t / s parts. So s is
 * at least the square root of t rows / MERGED_ROWS, with the mean of t. The last groups may get nothing. */
DEVICE void choose_size(const params &p, share &w, int total, int items, int most_tiles) {
    w.size = divide(total, p.by_groups), w.longer = total - w.size * p.groups;
    const int most = w.size + (w.longer > 0), rows = min(p.partial_rows, BLOCK_Q);
    int least = most;
    while (p.num_splits == 0 && least < most_tiles && (float)least * least * MERGED_ROWS * items < (float)total * rows)
        least++;
    if (least > most) w.size = least, w.longer = 0;
    if (least > most || items <= 1 || (long long)items * most_tiles != total) return;
    int even = divide(items + p.groups - 1, p.by_groups) * most_tiles;
    if (items < p.groups) even = ceil_div(most_tiles, p.groups / items);
    if (even - most > most / 8 || (items < p.groups && most_tiles % even != 0)) return;
    w.size = even, w.longer = 0;
}

/* Do keys and values leave the L2 first, where a launch reads so many key tiles? They do if the L2 cannot keep them all
 * for the next call, and what earlier kernels left there may stay meanwhile. A longer launch wants the whole L2
 * (measurements/decode.md). */
DEVICE bool leaves_first(u64 tiles) {
    const u64 bytes = tiles * (BLOCK_KV * HEAD_DIM * 4);
    return bytes > 32 << 20 && bytes <= 256 << 20;
}

/* Counts the positions of a lane. Finds the group's share of the positions and the item at the beginning of the
 * share. A group without work gets an empty share. Every launch waits for this function, so its divisions use
 * numbers that the host has prepared. The whole CTA calls this function. */
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
    int end = tiles; /* becomes an inclusive scan over the warp */
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
    share w = {0, 0, group, 0, 0, leaves_first((u64)total * p.lanes)};
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

/* The least number of steps of a CTA. Fewer steps save less time than the additional parts cost. */
constexpr int LEAST_STEPS = 2;
/* So many steps in one part take no longer than two parts and their sum. */
constexpr int UNCUT_STEPS = 4;

/* Takes the place of find_share where clusters work. Each head has p.groups clusters, and `number` is the number of
 * this cluster. The cluster gets one part of one sequence, and its CTA `rank` gets a share of this part. The share
 * may be empty. Parts are as short as the number of clusters allows, but not too short. Some clusters get no part.
 * The whole CTA calls this function. */
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
        s.w.leaves_first = leaves_first((u64)sum * p.h_kv);
    }
    __syncthreads();
}

/* Returns the group whose share holds a position. */
DEVICE int group_at(const share &w, int position) {
    const int behind = position - w.longer * (w.size + 1);
    return behind < 0 ? position / (w.size + 1) : w.longer + behind / w.size;
}

/* Finds the piece of t at or after `position`. Returns false if the group has no further piece of t. Without
 * num_splits an item is cut at the ends of the shares. With num_splits an item is cut into num_splits parts. Each
 * part belongs to the group in whose share the part begins. The result of the item then does not depend on the rest
 * of the batch. */
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

/* Finds the number of the part and the count of parts. The numbers are found while the first loads are on their way,
 * because no code needs the numbers earlier. */
DEVICE void count_parts(const params &p, const share &w, const item &t, piece &x) {
    if (p.num_splits > 0 || (HAS_CLUSTERS && p.cluster_bits > 0)) return;
    const int end = t.begin + t.tiles;
    x.first_group = t.begin >= w.first ? w.group : group_at(w, t.begin);
    x.idx = w.group - x.first_group;
    x.parts = (end <= w.last ? w.group : group_at(w, end - 1)) - x.first_group + 1;
}

#endif
