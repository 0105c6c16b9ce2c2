/* Attention of few queries over long caches:  O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row.
 *
 *   q [b, len_q, h, d]    k, v [caches, rows, h_kv, d] or [pages, page_size, h_kv, d]    o like q    lse [b, h, len_q]
 *
 * The time is that of reading the caches once, so everything serves the stream of bytes. The g query heads that share a
 * key head times the len_q queries are the rows of one tile: keys are read for all of them together. A *team* of WARPS_Q
 * warps (16 rows each) walks over keys of its own with a ring of its own; teams never wait for each other.
 *
 *   cp.async, one row of a key or value = d 2 bytes from anywhere: a page holds any number of keys
 *      │
 *      ▼  ring of SLOTS slots of 16 WARPS_Q keys:  K0 V0 K1 V1 K2 ...      SLOTS - 1 on their way, one in use
 *   team: S = Q K^T (mma) ─► softmax ─► P ─► O += P V                      in registers
 *      │
 *      ▼  end of the piece: teams are merged in shared memory
 *   whole head ─► o, lse                part of one ─► partial_o ─► the last CTA to come merges all parts in order
 *
 * All key tiles of the batch, laid end to end, are cut into equal shares: one for each group of CTAs, from lengths that
 * the CTAs read themselves. So the host need not know them, and a captured graph stays right while they grow.
 *
 * Specification: cpu/reference.c. Limits and measurements: README.md. */
#include "attn_decode_params.h"
#include "ptx_sm80.cuh"

/* ---- parameters: one row of tiles.def -------------------------------------------------------------------------- */

#if !defined(HEAD_DIM) || !defined(WARPS_Q) || !defined(TEAMS) || !defined(SLOTS) || !defined(CTAS)
#error "tiles: HEAD_DIM columns, TEAMS of WARPS_Q warps of 16 rows, SLOTS of a team's ring, CTAS on an SM"
#endif
#ifndef BF16
#error "variant: BF16, or fp16 without: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_decode_sm90
#endif

typedef fa_attn_decode_params params;

constexpr int WARPS = WARPS_Q * TEAMS, THREADS = 32 * WARPS;
constexpr int BLOCK_Q = 16 * WARPS_Q;                             /* rows of a tile */
constexpr int WARP_KEYS = FA_DECODE_WARP_KEYS(HEAD_DIM, WARPS_Q); /* of a slot, that one warp loads */
constexpr int TEAM_KEYS = WARP_KEYS * WARPS_Q;                    /* of a slot */
constexpr int BLOCK_KV = TEAM_KEYS * TEAMS;
constexpr int PIECES = HEAD_DIM / 8, ROW_BYTES = 16 * PIECES; /* of a row: pieces of 16 bytes */
constexpr bool Q_IN_REGISTERS = HEAD_DIM <= 128 && WARPS_Q <= 2;
#define INF __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;

static_assert(HEAD_DIM % 32 == 0, "rows of 16-byte pieces in groups of 4, which the swizzle permutes");
static_assert(SLOTS >= 3, "one slot in use, a K and a V on their way");

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
    int q_tiles;
};

DEVICE sequence sequence_at(const params &p, int b_idx) {
    sequence s = {0, p.len_q, 0, p.capacity, 0};
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
    if (p.seqused_k) s.len_kv = min(max(p.seqused_k[b_idx], 0), capacity);
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

/* ---- shared memory --------------------------------------------------------------------------------------------- */

/* Rows of HEAD_DIM elements, their 16-byte pieces permuted so that 8 rows of one column fall into 8 different banks:
 * where a row is a multiple of 128 bytes by its number mod 8, else (96 columns, 192 bytes) by half its number mod 4. */
DEVICE u32 swizzle(u32 row) { return HEAD_DIM % 64 == 0 ? row % 8 : row / 2 % 4; }
DEVICE u32 piece_address(u32 base, u32 row, u32 piece) { return base + (row * PIECES + (piece ^ swizzle(row))) * 16; }

/* The same where many pieces of one row are read, two after an even `piece` known to the compiler: row_base is the row's
 * address, low the swizzle of the row ^ 0 or 1. */
constexpr u32 PERIOD = HEAD_DIM % 64 == 0 ? 8 : 4;
DEVICE u32 even_piece_address(u32 row_base, u32 low, u32 piece) {
    return row_base + (piece % PERIOD ^ low) * 16 + piece / PERIOD * PERIOD * 16;
}

struct shared_memory {
    union {
        alignas(128) u16 ring[TEAMS][SLOTS][TEAM_KEYS * HEAD_DIM];
        struct {                              /* between pieces: the warps' results */
            float o[WARPS][16][HEAD_DIM + 8]; /* padded: 8 rows of 4 columns are stored at once */
            float stats[WARPS][16][2];        /* m in exponents of 2, l */
        } warp;
    };
    alignas(128) u16 q[BLOCK_Q * HEAD_DIM];
    share w; /* of this CTA's group */
    item t;  /* at hand. NOTE: here and not in registers, of which attend() has none to spare */
    int tiles[WARPS], items[WARPS], most_tiles[WARPS]; /* that each warp has counted */
    int is_last;                                       /* this CTA brought an item's last part */
};
static_assert(sizeof(shared_memory) <= FA_DECODE_SHARED_BYTES(HEAD_DIM, WARPS_Q, TEAMS, SLOTS),
              "what the host asks for");

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
DEVICE void step_item(const params &p, shared_memory &s) {
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
DEVICE void find_share(const params &p, shared_memory &s, int group) {
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

/* Where part number idx of an item lies in partial_o: a share cuts at most two items, the one it begins in and the one
 * it ends in. */
DEVICE int part_place(const params &p, const item &t, const piece &x, int head, int idx) {
    if (p.num_splits == 0) return 2 * ((x.first_group + idx) * p.lanes + blockIdx.x % p.lanes) + (idx == 0);
    return ((t.b_idx * p.h_kv + head) * p.max_q_tiles + t.q_tile) * p.num_splits + idx;
}

/* ---- loads ----------------------------------------------------------------------------------------------------- */

/* The loading half of a warp's walk: WARP_KEYS keys of each slot. Lane l looks after key l % WARP_KEYS. */
struct loader {
    u32 page, row; /* of this lane's key; the page as the block table has it */
    u32 present;   /* bit i: key i is there */
};

/* Where a sequence's keys lie, and which of them [begin, end) are to be read. */
struct walk {
    const int *pages; /* NULL: not paged */
    u32 cache_row, kv_row;
    int begin, end;
};

/* Where this lane's key of the step at `key` lies; `key` is the warp's first. Asked one step ahead: the page
 * number is on its way meanwhile. */
DEVICE void look_up(const params &p, const walk &c, int key, loader &l) {
    const int mine = key + (int)threadIdx.x % WARP_KEYS;
    const bool is_present = c.begin <= mine && mine < c.end;
    l.present = __ballot_sync(0xffffffffu, is_present);
    const u32 row = is_present ? (u32)(c.kv_row + mine) : 0;
    if (c.pages) {
        const u32 idx = row / (u32)p.page_size;
        l.row = row - idx * (u32)p.page_size;
        l.page = is_present ? c.pages[idx] : 0;
    } else {
        l.row = row;
        l.page = c.cache_row;
    }
}

DEVICE void load(const fa_decode_cache &cache, const loader &l, u32 head_offset, u32 slot_rows, int d, u64 l2_policy) {
    const int lane = threadIdx.x % 32;
    const u32 mine = l.page * cache.stride_b + l.row * cache.stride_row + head_offset;
#pragma unroll
    for (int i = 0; i < WARP_KEYS * PIECES / 32; i++) {
        const u32 idx = 32 * i + lane, row = idx / PIECES, piece = idx % PIECES;
        const u32 offset = __shfl_sync(0xffffffffu, mine, row);
        const bool is_present = (l.present >> row & 1) && (int)(8 * piece) < d;
        cp_async_16(piece_address(slot_rows, row, piece),
                    (const char *)cache.data + (u64)(offset + (is_present ? piece : 0)) * 16, is_present, l2_policy);
    }
}

DEVICE void team_sync(int team) {
    if (WARPS_Q == 1)
        __syncwarp();
    else if (TEAMS == 1)
        __syncthreads();
    else
        bar_sync(1 + team, 32 * WARPS_Q);
}

/* ---- softmax --------------------------------------------------------------------------------------------------- */

/* Registers of a thread: it holds two rows, l / 4 and l / 4 + 8 of its warp's 16, and in each group of 8 columns the
 * columns 2 (l % 4) + {0, 1}: register i of a group belongs to row i / 2, column i % 2. */
struct softmax_rows {
    float max[2];      /* m: at most lazy_margin below the largest score so far; -inf: no key yet */
    float max_log2[2]; /* c m, what exponents are measured from; 0 while m is -inf */
    float limit[2];    /* m + lazy_margin: a score above it raises m */
    float sum[2];      /* of this thread's columns */
};

/* One of a thread's two rows: what it sees, and how its scores change. Found anew where it is needed, which is seldom. */
struct query_row {
    int begin, end; /* keys */
    int diagonal;   /* its own position among the keys */
    float slope;
};

DEVICE query_row row_at(const params &p, const item &t, int head, int row) {
    const int at = min(t.q_tile * BLOCK_Q + row, t.s.len_q * p.heads_per_kv - 1), i = at / p.heads_per_kv;
    query_row x = {0, t.s.len_kv, i + t.s.len_kv - t.s.len_q, 0};
    if (p.window_left >= 0) x.begin = x.diagonal - p.window_left;
    if (p.window_right >= 0) x.end = min(x.diagonal + p.window_right + 1, t.s.len_kv);
    if (p.alibi_slopes)
        x.slope = p.alibi_slopes[t.b_idx * p.alibi_stride_b + head * p.heads_per_kv + at - i * p.heads_per_kv];
    return x;
}

constexpr int GROUPS_S = TEAM_KEYS / 8, GROUPS_O = HEAD_DIM / 8;

/* Softcap and ALiBi, in natural units; key: this thread's first. The hardware's tanh is right to 2^-11 only. */
DEVICE void change_scores(float (&s)[GROUPS_S][4], const params &p, const query_row (&rows)[2], int key) {
    const float exponent = p.softcap > 0 ? p.score_scale * 2 * LOG2_E / p.softcap : 0;
#pragma unroll
    for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x =
                p.softcap > 0 ? p.softcap - 2 * p.softcap * rcp(1 + ex2(s[n][i] * exponent)) : s[n][i] * p.score_scale;
            s[n][i] = x - rows[i / 2].slope * fabsf((float)(rows[i / 2].diagonal - (key + 8 * n + i % 2)));
        }
}

DEVICE void mask_scores(float (&s)[GROUPS_S][4], const query_row (&rows)[2], int key) {
#pragma unroll
    for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = key + 8 * n + i % 2;
            if (at < rows[i / 2].begin || at >= rows[i / 2].end) s[n][i] = -INF;
        }
}

/* S becomes P. Where a score exceeds what m allows, m is raised to the largest, and O and l follow. */
DEVICE void softmax_step(float (&s)[GROUPS_S][4], float (&o)[GROUPS_O][4], softmax_rows &rows, const params &p) {
    float largest[2] = {-INF, -INF};
#pragma unroll
    for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) largest[i / 2] = fmaxf(largest[i / 2], s[n][i]);
    if (__any_sync(0xffffffffu, largest[0] > rows.limit[0] || largest[1] > rows.limit[1])) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = fmaxf(largest[r], rows.max[r]);
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
            const float max_log2 = x == -INF ? 0 : x * p.scale_log2;
            const float alpha = rows.max[r] == -INF ? 0 : ex2(rows.max_log2[r] - max_log2);
            rows.max[r] = x, rows.max_log2[r] = max_log2, rows.limit[r] = x + p.lazy_margin;
            rows.sum[r] *= alpha;
#pragma unroll
            for (int n = 0; n < GROUPS_O; n++) o[n][2 * r] *= alpha, o[n][2 * r + 1] *= alpha;
        }
    }
#pragma unroll
    for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = ex2(fmaf(s[n][i], p.scale_log2, -rows.max_log2[i / 2]));
            rows.sum[i / 2] += s[n][i];
        }
}

/* ---- one piece ------------------------------------------------------------------------------------------------- */

/* Q of the item, rows beyond its end and columns beyond d as zeros. Whole CTA. */
DEVICE void load_queries(const params &p, shared_memory &s, const item &t, int head) {
    const int num_rows = t.s.len_q * p.heads_per_kv;
#pragma unroll 1
    for (int idx = threadIdx.x; idx < BLOCK_Q * PIECES; idx += THREADS) {
        const int row = idx / PIECES, piece = idx % PIECES, at = t.q_tile * BLOCK_Q + row;
        const int i = at / p.heads_per_kv, h_idx = head * p.heads_per_kv + at - i * p.heads_per_kv;
        const bool is_present = at < num_rows && 8 * piece < p.d;
        const u16 *src = (const u16 *)p.q;
        if (is_present)
            src += t.b_idx * p.q_stride_b + (t.s.q_row + i) * p.q_stride_row + h_idx * p.q_stride_h + 8 * piece;
        cp_async_16(piece_address(smem_address(s.q), row, piece), src, is_present);
    }
}

/* Walks over the key tiles [x.first, x.last) of t and leaves O, m and l of every warp in shared memory. Whole CTA. */
DEVICE void attend(const params &p, shared_memory &s, const item &t, const piece &x, int head) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / WARPS_Q, warp_q = warp % WARPS_Q;
    const u32 ring = smem_address(s.ring[team]);
    constexpr u32 SLOT_BYTES = TEAM_KEYS * HEAD_DIM * 2;

    walk c = {nullptr, (u32)t.b_idx, (u32)t.s.kv_row, t.keys.begin, t.keys.end};
    if (p.cache_batch_idx) c.cache_row = clamp(p.cache_batch_idx[t.b_idx], 0, p.num_caches - 1);
    if (p.block_table)
        c.pages = p.block_table + c.cache_row * p.table_stride;
    else if (p.cu_seqlens_k)
        c.cache_row = 0;
    /* What is read once and will not be there next time leaves L2 first. */
    const u64 l2_policy = s.w.is_stream && t.s.q_tiles == 1 ? l2_evict_first() : l2_evict_normal();
    const int full_begin = t.keys.full_begin, full_end = t.keys.full_end;

    /* Loads run SLOTS - 1 slots ahead: K and V in turns, `load_step` counts pairs. */
    const u32 k_head = head * p.k.stride_h, v_head = head * p.v.stride_h;
    const int first_key = (t.keys.begin / BLOCK_KV + x.first) * BLOCK_KV + team * TEAM_KEYS;
    const int steps = x.last - x.first;
    loader now, next;
    int load_step = 0, load_slot = 0;
    look_up(p, c, first_key + WARP_KEYS * warp_q, next);
    auto load_k = [&]() {
        if (load_step < steps) {
            now = next;
            if (c.pages) now.page = min(now.page, (u32)p.num_pages - 1); /* whatever the table holds */
            load(p.k, now, k_head, ring + load_slot * SLOT_BYTES + warp_q * WARP_KEYS * HEAD_DIM * 2, p.d, l2_policy);
            look_up(p, c, first_key + (load_step + 1) * BLOCK_KV + WARP_KEYS * warp_q, next);
        }
        cp_async_commit_group();
        load_slot = load_slot + 1 == SLOTS ? 0 : load_slot + 1;
    };
    auto load_v = [&]() {
        if (load_step < steps)
            load(p.v, now, v_head, ring + load_slot * SLOT_BYTES + warp_q * WARP_KEYS * HEAD_DIM * 2, p.d, l2_policy);
        cp_async_commit_group();
        load_step++;
        load_slot = load_slot + 1 == SLOTS ? 0 : load_slot + 1;
    };
    load_queries(p, s, t, head); /* joins the first group */
#pragma unroll
    for (int i = 0; i < SLOTS - 1; i++) {
        if (i % 2 == 0)
            load_k();
        else
            load_v();
    }

    softmax_rows stats = {{-INF, -INF}, {0, 0}, {-INF, -INF}, {0, 0}};
    float o[GROUPS_O][4];
#pragma unroll
    for (int n = 0; n < GROUPS_O; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = 0;

    /* The lane's places in the matrices that ldmatrix reads: of Q as A, of K as B, of V as B with keys along the rows. */
    const u32 q_row = 16 * warp_q + lane % 16, q_low = swizzle(q_row) ^ lane / 16;
    const u32 k_row = lane / 16 * 8 + lane % 8, k_low = swizzle(k_row) ^ lane / 8 % 2;
    const u32 v_row = lane % 16, v_low = swizzle(v_row) ^ lane / 16;
    const u32 q_base = smem_address(s.q) + q_row * ROW_BYTES;
    u32 q_regs[Q_IN_REGISTERS ? HEAD_DIM / 16 : 1][4];

    cp_async_wait_group<SLOTS - 2>();
    __syncthreads(); /* every thread's part of Q */
    if (Q_IN_REGISTERS)
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            ldmatrix_x4(q_regs[Q_IN_REGISTERS ? k : 0], even_piece_address(q_base, q_low, 2 * k));

    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        /* wait K; the slot before it is free for all of the team: refill it */
        cp_async_wait_group<SLOTS - 2>();
        team_sync(team);
        if ((SLOTS - 1) % 2 == 0)
            load_k();
        else
            load_v();
        /* S = Q K^T */
        const u32 k_base = ring + slot * SLOT_BYTES + k_row * ROW_BYTES;
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        float scores[GROUPS_S][4];
#pragma unroll
        for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] = 0;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            u32 a[4];
            if (Q_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[i] = q_regs[Q_IN_REGISTERS ? k : 0][i];
            } else {
                ldmatrix_x4(a, even_piece_address(q_base, q_low, 2 * k));
            }
#pragma unroll
            for (int n = 0; n < GROUPS_S / 2; n++) {
                u32 b[4];
                ldmatrix_x4(b, even_piece_address(k_base + 16 * n * ROW_BYTES, k_low, 2 * k));
                mma_m16n8k16<BF16>(scores[2 * n], a, b[0], b[1]);
                mma_m16n8k16<BF16>(scores[2 * n + 1], a, b[2], b[3]);
            }
        }
        /* softmax */
        const int key = first_key + step * BLOCK_KV;
        const bool is_masked = key < full_begin || key + TEAM_KEYS > full_end;
        if (p.changes_scores || is_masked) {
            const int row = 16 * warp_q + lane / 4, column = key + 2 * (lane % 4);
            const query_row rows[2] = {row_at(p, t, head, row), row_at(p, t, head, row + 8)};
            if (p.changes_scores) change_scores(scores, p, rows, column);
            if (is_masked) mask_scores(scores, rows, column);
        }
        softmax_step(scores, o, stats, p);
        /* wait V, refill K's slot */
        cp_async_wait_group<SLOTS - 2>();
        team_sync(team);
        if ((SLOTS - 1) % 2 == 0)
            load_v();
        else
            load_k();
        /* O += P V */
        const u32 v_base = ring + slot * SLOT_BYTES + v_row * ROW_BYTES;
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
#pragma unroll
        for (int k = 0; k < GROUPS_S / 2; k++) {
            const u32 a[4] = {cvt_x2<BF16>(scores[2 * k][0], scores[2 * k][1]),
                              cvt_x2<BF16>(scores[2 * k][2], scores[2 * k][3]),
                              cvt_x2<BF16>(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                              cvt_x2<BF16>(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
            for (int n = 0; n < GROUPS_O / 2; n++) {
                u32 b[4];
                ldmatrix_x4_trans(b, even_piece_address(v_base + 16 * k * ROW_BYTES, v_low, 2 * n));
                mma_m16n8k16<BF16>(o[2 * n], a, b[0], b[1]);
                mma_m16n8k16<BF16>(o[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    /* The ring is free when nobody reads it and nothing is on its way. */
    cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = stats.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int row = lane / 4 + 8 * r;
        if (lane % 4 == 0) {
            s.warp.stats[warp][row][0] = stats.max[r] == -INF ? -INF : stats.max_log2[r];
            s.warp.stats[warp][row][1] = sum;
        }
#pragma unroll
        for (int n = 0; n < GROUPS_O; n++)
            *(float2 *)&s.warp.o[warp][row][8 * n + 2 * (lane % 4)] = make_float2(o[n][2 * r], o[n][2 * r + 1]);
    }
    __syncthreads();
}

/* ---- results --------------------------------------------------------------------------------------------------- */

/* What row `row` of the tile is: its query and head. */
struct row_place {
    int i, h_idx;
};
DEVICE row_place place_of(const params &p, const item &t, int head, int row) {
    const int at = t.q_tile * BLOCK_Q + row, i = at / p.heads_per_kv;
    return {i, head * p.heads_per_kv + at - i * p.heads_per_kv};
}

/* Four columns of a row that is finished: o = sum of the parts / l. */
DEVICE void write_output(const params &p, const item &t, int head, int row, int column, const float (&o)[4], float max,
                         float sum) {
    const row_place at = place_of(p, t, head, row);
    const float factor = sum == 0 ? 0 : 1 / sum;
    if (column < p.d) {
        u16 *dst = (u16 *)p.o + t.b_idx * p.o_stride_b + (t.s.q_row + at.i) * p.o_stride_row + at.h_idx * p.o_stride_h;
        *(uint2 *)(dst + column) =
            make_uint2(cvt_x2<BF16>(o[0] * factor, o[1] * factor), cvt_x2<BF16>(o[2] * factor, o[3] * factor));
    }
    if (column == 0)
        p.lse[t.b_idx * p.lse_stride_b + at.h_idx * p.lse_stride_h + t.s.q_row + at.i] =
            sum == 0 ? INF : ((max == -INF ? 0 : max) + lg2(sum)) * LN_2;
}

/* The weight of a part whose maximum is `part` in a sum measured from `max`. */
DEVICE float weight(float part, float max) { return part == -INF ? 0 : ex2(part - max); }

/* Merges the teams. A whole item is written out, a part goes to partial_o. Whole CTA. */
DEVICE void finish_piece(const params &p, shared_memory &s, const item &t, const piece &x, int head) {
    const int num_rows = min(BLOCK_Q, t.s.len_q * p.heads_per_kv - t.q_tile * BLOCK_Q);
    const int place = x.parts == 1 ? 0 : part_place(p, t, x, head, x.idx);
    for (int idx = threadIdx.x; idx < num_rows * (HEAD_DIM / 4); idx += THREADS) {
        const int row = idx / (HEAD_DIM / 4), column = idx % (HEAD_DIM / 4) * 4;
        float max = -INF, sum = 0, o[4] = {0, 0, 0, 0};
#pragma unroll
        for (int team = 0; team < TEAMS; team++) max = fmaxf(max, s.warp.stats[team * WARPS_Q + row / 16][row % 16][0]);
#pragma unroll
        for (int team = 0; team < TEAMS; team++) {
            const int warp = team * WARPS_Q + row / 16;
            const float w = weight(s.warp.stats[warp][row % 16][0], max);
            const float4 y = *(const float4 *)&s.warp.o[warp][row % 16][column];
            sum += w * s.warp.stats[warp][row % 16][1];
            o[0] += w * y.x, o[1] += w * y.y, o[2] += w * y.z, o[3] += w * y.w;
        }
        if (x.parts == 1) {
            write_output(p, t, head, row, column, o, max, sum);
        } else {
            const long long at = (long long)place * p.partial_rows + row;
            *(float4 *)(p.partial_o + at * HEAD_DIM + column) = make_float4(o[0], o[1], o[2], o[3]);
            if (column == 0) *(float2 *)(p.partial_stats + at * 2) = make_float2(max, sum);
        }
    }
}

__device__ u32 own_counters[FA_DECODE_COUNTER_SLOTS][FA_DECODE_MAX_CTAS];

/* After a part has been written: is it the last of its item? The counter comes back to zero with it. Whole CTA. */
DEVICE bool is_last_part(const params &p, shared_memory &s, const item &t, const piece &x, int head) {
    __syncthreads();
    if (threadIdx.x == 0) {
        fence_acq_rel(); /* of the whole CTA's writes, which the barrier has handed to this thread */
        /* With equal shares at most one item begins in a share and goes on beyond it. */
        const int idx = p.num_splits == 0 ? x.first_group * p.lanes + blockIdx.x % p.lanes
                                          : (t.b_idx * p.h_kv + head) * p.max_q_tiles + t.q_tile;
        u32 *counter = (p.counters ? p.counters : own_counters[p.counter_slot]) + idx;
        s.is_last = atomicInc(counter, x.parts - 1) == (u32)x.parts - 1;
        fence_acq_rel();
    }
    __syncthreads();
    return s.is_last;
}

/* Four columns of VECTORS rows out of all parts, PARTS of them asked for at once, m and l with o: they join the sum as a
 * softmax over parts. idx: of the first vector, the next ones lie THREADS further; beyond `num` nothing is written. */
template <int VECTORS, int PARTS>
DEVICE void merge_vectors(const params &p, const item &t, const piece &x, int head, int idx, int num) {
    const int place_0 = part_place(p, t, x, head, 0), place_1 = part_place(p, t, x, head, 1);
    const int place_step = p.num_splits == 0 ? 2 * p.lanes : 1;
    int row[VECTORS], column[VECTORS];
    float o[VECTORS][4] = {}, max[VECTORS], sum[VECTORS] = {};
#pragma unroll
    for (int n = 0; n < VECTORS; n++) {
        const int at = min(idx + n * THREADS, num - 1);
        row[n] = at / (HEAD_DIM / 4), column[n] = at % (HEAD_DIM / 4) * 4, max[n] = -INF;
    }
    for (int first = 0; first < x.parts; first += PARTS) {
        float4 part[VECTORS][PARTS];
        float2 stats[VECTORS][PARTS];
#pragma unroll
        for (int k = 0; k < PARTS; k++) {
            const int i = min(first + k, x.parts - 1);
            const int place = i == 0 ? place_0 : place_1 + (i - 1) * place_step;
#pragma unroll
            for (int n = 0; n < VECTORS; n++) {
                const long long at = (long long)place * p.partial_rows + row[n];
                stats[n][k] = __ldcg((const float2 *)p.partial_stats + at);
                part[n][k] = __ldcg((const float4 *)(p.partial_o + at * HEAD_DIM + column[n]));
            }
        }
#pragma unroll
        for (int n = 0; n < VECTORS; n++) {
            float next = max[n];
#pragma unroll
            for (int k = 0; k < PARTS; k++) next = fmaxf(next, stats[n][k].x);
            const float keep = weight(max[n], next);
            max[n] = next, sum[n] *= keep;
            o[n][0] *= keep, o[n][1] *= keep, o[n][2] *= keep, o[n][3] *= keep;
#pragma unroll
            for (int k = 0; k < PARTS; k++)
                if (first + k < x.parts) {
                    const float w = weight(stats[n][k].x, next);
                    const float4 y = part[n][k];
                    sum[n] += w * stats[n][k].y;
                    o[n][0] += w * y.x, o[n][1] += w * y.y, o[n][2] += w * y.z, o[n][3] += w * y.w;
                }
        }
    }
#pragma unroll
    for (int n = 0; n < VECTORS; n++)
        if (idx + n * THREADS < num) write_output(p, t, head, row[n], column[n], o[n], max[n], sum[n]);
}

/* The parts of an item, in their order, whoever came last. Whole CTA. Latency is all that counts here, and the memory is
 * busy: what fits into the registers is asked for at once. The order of the sum does not depend on the way taken. */
DEVICE void merge_parts(const params &p, const item &t, const piece &x, int head) {
    const int num = min(BLOCK_Q, t.s.len_q * p.heads_per_kv - t.q_tile * BLOCK_Q) * (HEAD_DIM / 4);
    for (int idx = threadIdx.x; idx < num; idx += 2 * THREADS)
        if (num <= THREADS)
            merge_vectors<1, 8>(p, t, x, head, idx, num);
        else
            merge_vectors<2, 4>(p, t, x, head, idx, num);
}

/* Packed rows behind the last sequence belong to nobody: lse -inf, and o zero where that was asked for. */
DEVICE void fill_unowned_rows(const params &p) {
    const int begin = clamp(p.cu_seqlens_q[p.b], 0, p.total_q);
#pragma unroll 1
    for (int row = begin + blockIdx.x; row < p.total_q; row += gridDim.x)
        for (int h_idx = 0; h_idx < p.h; h_idx++) {
            u16 *o = (u16 *)p.o + row * p.o_stride_row + h_idx * p.o_stride_h;
            for (int i = threadIdx.x; i < p.d && p.zero_tensors; i += THREADS) o[i] = 0;
            if (threadIdx.x == 0) p.lse[h_idx * p.lse_stride_h + row] = -INF;
        }
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const __grid_constant__ params p) {
    extern __shared__ __align__(128) unsigned char smem[];
    shared_memory &s = *reinterpret_cast<shared_memory *>(smem);
    const int group = blockIdx.x / p.lanes, lane = blockIdx.x - group * p.lanes;
    if (p.cu_seqlens_q) fill_unowned_rows(p);
    find_share(p, s, group);

#pragma unroll 1
    for (int position = s.w.first; position < s.w.last;) {
        piece x;
        if (piece_at(p, s.w, s.t, position, x)) {
            const int head = s.t.head_block * p.lanes + lane;
            attend(p, s, s.t, x, head);
            finish_piece(p, s, s.t, x, head);
            if (x.parts > 1 && is_last_part(p, s, s.t, x, head)) merge_parts(p, s.t, x, head);
            position = s.t.begin + x.last;
        } else {
            position = s.t.begin + s.t.tiles;
        }
        __syncthreads(); /* shared memory is free again */
        if (position >= s.t.begin + s.t.tiles && position < s.w.last) step_item(p, s);
    }
}
