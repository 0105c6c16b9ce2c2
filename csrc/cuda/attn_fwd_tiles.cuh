/* Tiles of attn_fwd_sm90.cu: which rows and keys tile number idx of a launch has, and in which order they come: row tiles
 * of a head side by side without a mask, the longest first with one. Packed: the longest of 32 sequences first. */
#ifndef FA_ATTN_FWD_TILES_CUH
#define FA_ATTN_FWD_TILES_CUH

#include "packed.cuh"

/* In place of a tile: say when all before it is done, for some may have to be repeated; or leave. */
enum { REPORT = -1, END = -2 };

/* What the consumers must know of a tile. It lies beside Q and becomes visible with it. */
struct tile {
    int idx; /* its number in the launch */
    int row; /* first row in its sequence, or REPORT, or END */
    int b_idx, head;
    int len_q, len_kv;
    int kv_begin, kv_end;   /* key tiles that some row sees */
    int row_0, batch;       /* coordinates of the sequence's row 0 in the maps of q and o ... */
    int kv_row_0, kv_batch; /* ... and in those of k and v */
    int kv_head;
    int lse_row;  /* where the sequence starts in lse */
    u32 repeated; /* a bit for each 16 rows that failed before: carefully now; 0 for a tile that is new */
};

DEVICE void set_no_tile(tile &t, int row) { t.row = row, t.kv_begin = t.kv_end = 0, t.repeated = 0; }

/* Packed sequences are looked at 32 at a time. Among them the longest comes first, so that a launch ends with short
 * tiles. */
struct window {
    int first, begin, end;              /* first sequence; tiles of the launch, of all heads: [begin, end) */
    int lane_begin[32], lane_tiles[32]; /* tiles of sequence first + lane */
    span q[32], kv[32];                 /* where it lies; without keys that are not used */
};

/* A row sees keys [keys_begin, keys_end). diagonal: the row plus len_kv - len_q, its last key if it is causal. */
DEVICE int keys_begin(const params &p, int diagonal) {
    return LOCAL && p.window_left >= 0 ? max(diagonal - p.window_left, 0) : 0;
}
DEVICE int keys_end(const params &p, int diagonal, int len_kv) {
    if (CAUSAL) return clamp(diagonal + 1, 0, len_kv);
    return LOCAL && p.window_right >= 0 ? clamp(diagonal + p.window_right + 1, 0, len_kv) : len_kv;
}

/* Packed: tiles of one head, over all sequences. Whole warp. */
DEVICE int count_packed_tiles(const params &p) {
    int tiles = 0;
    for (int b_idx = threadIdx.x % 32; b_idx < p.b; b_idx += 32)
        tiles += ceil_div(span_at(p.cu_seqlens_q, b_idx, p.len_q).len, BLOCK_Q);
    return __reduce_add_sync(0xffffffffu, tiles);
}

/* Packed: moves the window of 32 sequences to the one that tile idx falls into. Whole warp. */
DEVICE void move_window(const params &p, window &w, int idx) {
    const int lane = threadIdx.x % 32;
    int first = w.first, begin = w.begin, end = w.end;
    if (begin <= idx && idx < end) return;
    if (idx < begin) first = -32, end = 0;
    while (idx >= end) {
        first += 32, begin = end;
        const int b_idx = first + lane;
        int len = -1, my_begin = begin, my_tiles = 0;
        if (b_idx < p.b) {
            const span q = span_at(p.cu_seqlens_q, b_idx, p.len_q), kv = span_at(p.cu_seqlens_k, b_idx, p.len_kv);
            len = p.seqused_k ? clamp(p.seqused_k[b_idx], 0, kv.len) : kv.len;
            my_tiles = p.h * ceil_div(q.len, BLOCK_Q);
            w.q[lane] = q, w.kv[lane] = {kv.begin, len};
        }
#pragma unroll 1
        for (int i = 0; i < 32; i++) {
            const int other = __shfl_sync(0xffffffffu, len, i), tiles = __shfl_sync(0xffffffffu, my_tiles, i);
            if (other > len || (other == len && i < lane)) my_begin += tiles;
            end += tiles;
        }
        w.lane_begin[lane] = my_begin, w.lane_tiles[lane] = my_tiles;
    }
    __syncwarp();
    if (lane == 0) w.first = first, w.begin = begin, w.end = end;
    __syncwarp();
}

/* Tile number idx of the launch. Whole warp; one lane writes. */
DEVICE void find_tile(const params &p, window &w, int idx, tile &t) {
    const bool is_leader = threadIdx.x % 32 == 0;
    int in_order = idx, q_tiles = p.num_q_tiles, heads = p.b * p.h; /* of one order of row tiles and heads */
    int b_idx = 0, len_q = p.len_q, len_kv = p.len_kv;
    if (VARLEN) {
        move_window(p, w, idx);
        const int begin = w.lane_begin[threadIdx.x % 32], tiles = w.lane_tiles[threadIdx.x % 32];
        const int owner = __ffs(__ballot_sync(0xffffffffu, (u32)(idx - begin) < (u32)tiles)) - 1;
        b_idx = w.first + owner;
        in_order -= __shfl_sync(0xffffffffu, begin, owner);
        const span q = w.q[owner], kv = w.kv[owner];
        len_q = q.len, len_kv = kv.len;
        q_tiles = ceil_div(len_q, BLOCK_Q), heads = p.h;
        if (is_leader) {
            t.row_0 = p.len_q - len_q, t.batch = q.begin + len_q, t.lse_row = q.begin;
            t.kv_row_0 = p.len_kv - len_kv, t.kv_batch = kv.begin + len_kv;
        }
    }
    int q_tile, head;
    if (LONGEST_FIRST) {
        const int group = in_order / (p.group_heads * q_tiles), in_group = in_order - group * p.group_heads * q_tiles;
        const int group_heads = min(p.group_heads, heads - group * p.group_heads);
        q_tile = q_tiles - 1 - in_group / group_heads;
        head = group * p.group_heads + in_group % group_heads;
    } else {
        head = in_order / q_tiles;
        q_tile = in_order - head * q_tiles;
    }
    if (!VARLEN) { /* head counts over the whole batch */
        b_idx = head / p.h, head -= b_idx * p.h;
        if (is_leader) t.row_0 = t.lse_row = t.kv_row_0 = 0, t.batch = t.kv_batch = b_idx;
    }
    if (is_leader) {
        const int row = q_tile * BLOCK_Q, shift = len_kv - len_q, last_row = min(row + BLOCK_Q, len_q) - 1;
        const int begin = keys_begin(p, row + shift), end = keys_end(p, last_row + shift, len_kv);
        t.idx = idx, t.row = row, t.b_idx = b_idx, t.head = head, t.kv_head = head / p.heads_per_kv, t.len_q = len_q,
        t.len_kv = len_kv;
        t.kv_begin = begin / BLOCK_KV;
        t.kv_end = begin < end ? ceil_div(end, BLOCK_KV) : begin / BLOCK_KV;
    }
}

#endif
