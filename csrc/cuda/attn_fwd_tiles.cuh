/* Work tiles of attn_fwd_sm90.cu: which query rows and keys work tile number idx of a launch has. Without a mask
 * the tiles of a head follow each other. With a mask the longest tiles come first. Of packed sequences the longest
 * of 32 comes first. */
#ifndef FA_ATTN_FWD_TILES_CUH
#define FA_ATTN_FWD_TILES_CUH

#include "attn_fwd_cache.cuh"
#include "attn_fwd_mods.cuh"
#include "packed.cuh"
#include "sinks.cuh"

/* What the scheduler tells the other warps to do. REPEAT computes a tile again of which some row strips failed.
 * REPORT has no tile: consumers say that all tiles before it are computed, because some of them may have failed.
 * END ends the CTA. */
enum tile_command { COMPUTE, REPEAT, REPORT, END };

/* What a work tile knows of Q, K and V in 8 bits. 16 bits need no factor, and have sinks. */
template <int ELEMENT_BYTES> struct tile_factors {
    float sink; /* of the head, if there are sinks */
    DEVICE void read(const params &p, int b_idx, int head, int kv_head) {
        if (p.sinks.values.data) sink = sink_of(p.sinks.values, head);
    }
    DEVICE void set_scale(const params &p, float &scale_log2) const {}
};
template <> struct tile_factors<1> {
    static constexpr float sink = 0;
    float qk_factor, v_factor;
    DEVICE static float factor_at(const fa_attn_fwd_factors &f, int b_idx, int kv_head) {
        return f.data ? f.data[b_idx * f.stride_b + kv_head * f.stride_h] : 1;
    }
    DEVICE void read(const params &p, int b_idx, int head, int kv_head) {
        qk_factor = factor_at(p.q_descale, b_idx, kv_head) * factor_at(p.k_descale, b_idx, kv_head);
        v_factor = factor_at(p.v_descale, b_idx, kv_head);
    }
    /* With SCORE the scores themselves are multiplied by the factor. */
    DEVICE void set_scale(const params &p, float &scale_log2) const {
        scale_log2 = SCORE ? p.scale_log2 : qk_factor * p.scale_log2;
    }
};

/* A work tile, as the scheduler describes it to producer and consumers. Q's mbarrier makes it visible to consumers. */
struct tile : tile_factors<element::BYTES>, listed_tile {
    int idx;         /* the tile's number in the launch */
    int row;         /* its first row in its sequence */
    int b_idx, head; /* of heads that share the tile the first */
    int len_q, len_kv;
    int kv_begin, kv_end;    /* Some row sees a key of the key tiles at places kv_begin .. kv_end - 1. */
    int q_origin, q_batch;   /* the sequence's first row as a coordinate of the tensor maps of q and o, and its batch */
    int kv_origin, kv_batch; /* the same for k and v; in a cache the first key and the row */
    int kv_head;
    int lse_origin;    /* the sequence's first row in lse, or in the lse of the tile's part */
    u32 failed_strips; /* REPEAT: a bit for each row strip that failed */
    int command;       /* a tile_command */
    DEVICE bool has_rows() const { return command <= REPEAT; }
};

/* A warp's row strip of a row block: its head, its first row in its sequence, and the sink of its head. */
DEVICE int head_of_strip(const params &p, const tile &t, int row_block, int warp) {
    return CACHE ? t.head + head_in_tile(p, 64 * row_block + 16 * warp) : t.head;
}
DEVICE int row_of_strip(const params &p, const tile &t, int row_block, int warp) {
    const int row = 64 * row_block + 16 * warp;
    return t.row + (CACHE ? row_in_head(p, row) : row);
}
DEVICE float sink_of_strip(const params &p, const tile &t, int row_block, int warp) {
    return CACHE ? sink_of(p.sinks.values, head_of_strip(p, t, row_block, warp)) : t.sink;
}
/* Row block `row_block` of a work tile: its first row in its sequence, and how many rows there are from it on. With
 * rows of several heads the block counts as all rows of a head. */
DEVICE int row_of_block(const params &p, const tile &t, int row_block) {
    if (!CACHE) return t.row + 64 * row_block;
    const int row = row_in_head(p, 64 * row_block);
    return t.row + (row + 64 > p.cache.rows_of_head ? 0 : row);
}
DEVICE int rows_of_block(const params &p, int row_block) {
    if (!CACHE) return 64;
    return row_in_head(p, 64 * row_block) + 64 > p.cache.rows_of_head ? p.cache.rows_of_head : 64;
}

/* Without a tile. No row and no key tile are left, so a consumer that asks finds itself idle. */
DEVICE void set_no_tile(tile &t, tile_command command) {
    t.command = command;
    t.row = t.len_q = t.kv_begin = t.kv_end = 0;
}

/* Packed sequences are looked at in sets of 32. The longest of a set comes first, so that a launch ends with short
 * tiles. */
struct sequence_set {
    int first, begin, end; /* the first sequence; the set's tiles in the launch, of all heads: [begin, end) */
    int lane_begin[32], lane_tiles[32]; /* tiles of sequence first + lane */
    span q[32], kv[32];                 /* where the sequence lies; keys that are not in use are left out */
};

/* Packed: the queries of a sequence that are in use. */
DEVICE span queries_of(const params &p, int b_idx) {
    span q = span_at(p.cu_seqlens_q, b_idx, p.len_q);
    if (p.seqused_q) q.len = clamp(p.seqused_q[b_idx], 0, q.len);
    return q;
}

/* Packed, or in a cache: the keys of a sequence that are in use. */
DEVICE span keys_of_sequence(const params &p, int b_idx) {
    if (CACHE) return keys_in_cache(p, b_idx);
    const span kv = span_at(p.cu_seqlens_k, b_idx, p.len_kv);
    return {kv.begin, p.seqused_k ? clamp(p.seqused_k[b_idx], 0, kv.len) : kv.len};
}

/* Packed: the number of tiles of one head, over all sequences. Whole warp. */
DEVICE int count_packed_tiles(const params &p) {
    int tiles = 0;
#pragma unroll 4
    for (int b_idx = threadIdx.x % 32; b_idx < p.b; b_idx += 32)
        tiles += ceil_div(queries_of(p, b_idx).len, rows_of_head(p));
    return __reduce_add_sync(0xffffffffu, tiles);
}

/* Packed: moves to the set of 32 sequences that tile idx falls into. Whole warp. */
DEVICE void move_to_tile(const params &p, sequence_set &set, int idx) {
    const int lane = threadIdx.x % 32;
    int first = set.first, begin = set.begin, end = set.end;
    if (begin <= idx && idx < end) return;
    if (idx < begin) first = -32, end = 0;
    while (idx >= end) {
        first += 32, begin = end;
        const int b_idx = first + lane;
        int len = -1, my_begin = begin, my_tiles = 0;
        if (b_idx < p.b) {
            const span q = queries_of(p, b_idx), kv = keys_of_sequence(p, b_idx);
            len = kv.len;
            my_tiles = h_in_tiles(p) * ceil_div(q.len, rows_of_head(p));
            set.q[lane] = q, set.kv[lane] = kv;
        }
#pragma unroll 1
        for (int i = 0; i < 32; i++) {
            const int other = __shfl_sync(0xffffffffu, len, i), tiles = __shfl_sync(0xffffffffu, my_tiles, i);
            if (other > len || (other == len && i < lane)) my_begin += tiles;
            end += tiles;
        }
        set.lane_begin[lane] = my_begin, set.lane_tiles[lane] = my_tiles;
    }
    __syncwarp();
    if (lane == 0) set.first = first, set.begin = begin, set.end = end;
    __syncwarp();
}

/* Leaves the key tiles of a part. Parts are equally long but for the last ones, which may be shorter or empty. */
DEVICE void take_part(const params &p, int part, tile &t) {
    const int size = ceil_div(t.kv_end - t.kv_begin, p.cache.num_parts);
    t.kv_begin = min(t.kv_begin + part * size, t.kv_end);
    t.kv_end = min(t.kv_begin + size, t.kv_end);
    t.lse_origin += part * p.cache.part_rows;
}

/* Finds work tile number idx of the launch. Whole warp; one lane writes. */
DEVICE void find_tile(const params &p, sequence_set &set, int idx, tile &t) {
    const bool is_leader = threadIdx.x % 32 == 0;
    /* A dense launch, or a packed sequence, has tiles of q_tiles times heads. in_order is the tile's number there. */
    int in_order = idx, q_tiles = p.num_q_tiles, heads = p.b * h_in_tiles(p);
    int b_idx = 0, len_q = p.len_q, len_kv = p.len_kv;
    if (VARLEN) {
        move_to_tile(p, set, idx);
        const int begin = set.lane_begin[threadIdx.x % 32], tiles = set.lane_tiles[threadIdx.x % 32];
        const int owner = __ffs(__ballot_sync(0xffffffffu, (u32)(idx - begin) < (u32)tiles)) - 1;
        b_idx = set.first + owner;
        in_order -= __shfl_sync(0xffffffffu, begin, owner);
        const span q = set.q[owner], kv = set.kv[owner];
        len_q = q.len, len_kv = kv.len;
        q_tiles = ceil_div(len_q, rows_of_head(p)), heads = h_in_tiles(p);
        if (is_leader) {
            t.q_origin = p.len_q - len_q, t.q_batch = q.begin + len_q, t.lse_origin = q.begin;
            t.kv_origin = p.len_kv - len_kv, t.kv_batch = kv.begin + len_kv;
            if (CACHE) t.kv_origin = kv.begin, t.kv_batch = cache_row(p, b_idx);
        }
    }
    int q_tile, head, part = 0;
    if (is_cut(p)) part = in_order / (q_tiles * heads), in_order -= part * q_tiles * heads;
    if (LONGEST_FIRST) {
        const int group = in_order / (p.group_heads * q_tiles), in_group = in_order - group * p.group_heads * q_tiles;
        const int group_heads = min(p.group_heads, heads - group * p.group_heads);
        q_tile = q_tiles - 1 - in_group / group_heads;
        head = group * p.group_heads + in_group % group_heads;
    } else {
        head = in_order / q_tiles;
        q_tile = in_order - head * q_tiles;
    }
    if (!VARLEN) { /* head has counted over the whole batch. */
        b_idx = head / h_in_tiles(p), head -= b_idx * h_in_tiles(p);
        if (is_leader) t.q_origin = t.lse_origin = t.kv_origin = 0, t.q_batch = t.kv_batch = b_idx;
        if (CACHE) {
            const span kv = keys_of_sequence(p, b_idx);
            len_kv = kv.len;
            if (is_leader) t.kv_origin = kv.begin, t.kv_batch = cache_row(p, b_idx);
        }
    }
    if (CACHE) head *= p.cache.tile_heads;
    if (is_leader) {
#if FLEX_LISTS
        q_tile = find_list(p, b_idx, head, q_tiles - 1 - q_tile, q_tiles, t);
#elif FLEX
        t.first_query = first_query_of(p.flex, b_idx);
#endif
        const int rows = rows_of_head(p), row = q_tile * rows, shift = len_kv - len_q;
        const int last_row = min(row + rows, len_q) - 1;
        const tile_walk keys = keys_of(p, row + shift, last_row + shift, len_kv);
        t.idx = idx, t.row = row, t.b_idx = b_idx, t.head = head, t.kv_head = head / p.heads_per_kv, t.len_q = len_q,
        t.len_kv = len_kv;
        if (!FLEX_LISTS) {
            t.kv_begin = keys.begin / BLOCK_KV;
            t.kv_end = keys.begin < keys.end ? ceil_div(keys.end, BLOCK_KV) : keys.begin / BLOCK_KV;
        }
        if (is_cut(p)) take_part(p, part, t);
        t.read(p, b_idx, head, t.kv_head);
    }
}

#endif
