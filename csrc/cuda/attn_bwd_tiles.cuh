/* Both backward kernels on Hopper share this file. The file has the keys and queries of a work tile, the producer warp,
 * and the dQ turns. */
#ifndef FA_ATTN_BWD_TILES_CUH
#define FA_ATTN_BWD_TILES_CUH

#include "attn_bwd_params.h"
#include "ptx_sm90.cuh"
#include "attn_bwd_slabs.cuh"
#include "walk.cuh"

#ifndef ALIBI
#define ALIBI 0 /* of a kernel that has ALiBi only with SCORE */
#endif
#ifndef FLEX
#define FLEX 0 /* of a kernel that does not know a user's functions */
#endif
#if FLEX
#include "flex.cuh"
typedef with_mods<fa_attn_bwd_params> params;
#else
typedef fa_attn_bwd_params params;
#endif

constexpr int ROW_BYTES = CHUNK * element::BYTES;                    /* swizzled */
constexpr int CTAS = HEAD_DIM > 128 ? 2 : 1, KEYS = BLOCK_KV / CTAS; /* a tile's keys are shared by a cluster's CTAs */
constexpr int DO_STAGES = HEAD_DIM > 192 ? 1 : 2;                    /* stages of dO that there is room for */

/* The query tile and the query head of a step, or the place of the query tile in a list. A key tile walks from the last
 * query tile to the first. At each query tile the key tile walks through the heads of the group. So the key tiles of
 * one head come to a query tile at the same time. With one head after the other, short causal tiles would wait at the
 * end of each head until the longest tile had been there. */
struct step_place {
    int q_tile, head_in_group;
};
template <bool IS_GROUPED = true> DEVICE step_place place_of_step(const params &p, int q_end, int step) {
    if (!IS_GROUPED) return {q_end - 1 - step, 0};
    const int before = __umulhi(2u * step, p.heads_inverse); /* step / heads_per_tile */
    return {q_end - 1 - before, step - before * p.heads_per_tile};
}

#include "attn_bwd_mods.cuh"

/* The description of a work tile, which all warps of the CTA read. */
struct tile : listed_queries {
    int kv_tile; /* key tile in its sequence; -1: there are no more tiles */
    int b_idx, head_kv;
    int first_head; /* first query head, in its sequence */
    int len_q, len_kv;
    tile_walk
        queries; /* query tiles, or places of the list; full query tiles have BLOCK_Q rows that see BLOCK_KV keys */
    int idx, piece,
        pieces;          /* of a cut tile: its number among cut tiles, the number of this piece, the number of pieces */
    int first_begin;     /* query tiles from here on see no earlier key tile: this key tile begins the sum of dQ */
    int last_end;        /* query tiles before here see no later key tile: this key tile completes the sum of dQ */
    int kv_begin;        /* first row of the sequence in packed k and v */
    int slab_head, slab; /* head number of the first query head, and the sequence's first slab */
    int q_row_0, q_batch;   /* coordinates of the sequence's row 0 in the maps of q and dO */
    int kv_row_0, kv_batch; /* the same in the maps of k and v */
#if ALIBI
    float slope; /* of the first query head */
#endif
#if VARLEN
    int tiles_before; /* key tiles of a head before the sequence */
#endif

    /* Does this key tile begin or complete the sum of dQ of query tile i? `share` is that of listed_queries. */
    DEVICE bool begins_sum(u32 share, int i) const { return has_list() ? share / 2 == 0 : i >= first_begin; }
    DEVICE bool ends_sum(u32 share, int i) const { return has_list() ? (bool)(share % 2) : i < last_end; }
};

DEVICE float slope_of(const params &p, int b_idx, int head) { return p.alibi_slopes[b_idx * p.alibi_stride_b + head]; }

/* first_key returns this CTA's first key of a work tile, in its sequence. */
DEVICE int cluster_rank() { return CTAS > 1 ? blockIdx.x % CTAS : 0; }
DEVICE int first_key(const tile &t) { return t.kv_tile * BLOCK_KV + cluster_rank() * KEYS; }

/* Work tiles are cut where there are too few for all SMs. If all query tiles cost the same, the last work tiles are cut
 * along the queries. Otherwise all work tiles are cut along the query heads. */
constexpr bool CUTS_QUERIES = !WIDE && !CAUSAL && !LOCAL && !VARLEN && !FLEX, CUTS_HEADS = !WIDE && !CUTS_QUERIES;

constexpr u32 SHARED_BASE = 1024;

/* The position in a ring of two stages. Step 2 n + s uses stage s, and the parity is n mod 2. */
struct ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        stage ^= 1;
        if (stage == 0) parity ^= 1;
    }
};

/* do_stage returns the stage of a step's dO. do_parity returns the parity of this stage's barriers. */
DEVICE int do_stage(const ring &r) { return DO_STAGES == 1 ? 0 : r.stage; }
DEVICE u32 do_parity(const ring &r) { return DO_STAGES == 1 ? r.stage : r.parity; }

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

/* The key tiles of a head of a packed sequence. */
DEVICE int num_tiles_of(const params &p, int b_idx) {
    const span kv = span_at(p.cu_seqlens_k, b_idx, p.len_kv);
    if (p.short_rows > 0 && is_left_out(p, span_at(p.cu_seqlens_q, b_idx, p.len_q), kv)) return 0;
    return ceil_div(kv.len, BLOCK_KV);
}

/* Whole warp. Returns the number of key tiles of one head over all packed sequences. Lengths between sums that fall may
 * add up to more than all keys. The workspace has room for the tiles of sums that rise. */
DEVICE int count_packed_tiles(const params &p) {
    int tiles = 0;
#pragma unroll 4
    for (int b_idx = threadIdx.x % 32; b_idx < p.b; b_idx += 32) tiles += num_tiles_of(p, b_idx);
    return min(__reduce_add_sync(0xffffffffu, tiles), p.len_kv / BLOCK_KV + p.b);
}

#if VARLEN
/* Whole warp. Returns the packed sequence that key tile number `idx` of a head falls into. `idx` becomes the tile's
 * number in this sequence. The search goes on from the CTA's tile before, because these tiles mostly come in ascending
 * order. tiles_before counts the key tiles of a head before a sequence. Lane l looks at sequences OWN l to
 * OWN l + OWN - 1 from `first` on. */
DEVICE int find_sequence(const params &p, int &idx, const tile &before, int &tiles_before) {
    constexpr int OWN = 2, ALL = 32 * OWN;
    const int lane = threadIdx.x % 32;
    int first = before.b_idx;
    tiles_before = before.tiles_before;
    if (idx < tiles_before) first = tiles_before = 0;
    for (;; first += ALL) {
        int tiles[OWN], end = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int b_idx = first + OWN * lane + i;
            tiles[i] = b_idx < p.b ? num_tiles_of(p, b_idx) : 0;
            end += tiles[i];
        }
        int rest = idx - tiles_before + end;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, end, step);
            if (lane >= step) end += before;
        }
        rest -= end; /* end: of the lane's tiles, by an inclusive scan; rest: the tile's number behind their begin */
        const u32 reached = __ballot_sync(0xffffffffu, idx - tiles_before < end);
        if (reached) {
            int own = 0;
#pragma unroll
            for (int i = 0; i < OWN - 1; i++)
                if (own == i && rest >= tiles[i]) rest -= tiles[i], own++;
            const int owner = __ffs(reached) - 1;
            rest = __shfl_sync(0xffffffffu, rest, owner);
            tiles_before = idx - rest, idx = rest;
            return first + OWN * owner + __shfl_sync(0xffffffffu, own, owner);
        }
        tiles_before += __shfl_sync(0xffffffffu, end, 31);
    }
}
#endif

/* The mask of this launch. */
typedef mask_of<CAUSAL, LOCAL> mask;

/* Returns the query tiles that see some key of a key tile. */
DEVICE interval queries_of(const params &p, int kv_tile, int len_q, int len_kv) {
    const int shift = len_kv - len_q;
    const int first_key = kv_tile * BLOCK_KV, last_key = min(first_key + BLOCK_KV, len_kv) - 1;
    const int begin = CAUSAL || LOCAL ? mask::rows_begin<FROM_0>(p, first_key, shift) : 0; /* rows */
    const int end = CAUSAL || LOCAL ? mask::rows_end<INSIDE>(p, last_key, shift, len_q) : len_q;
    if (begin >= end) return {ceil_div(begin, BLOCK_Q), ceil_div(begin, BLOCK_Q)};
    return {begin / BLOCK_Q, ceil_div(end, BLOCK_Q)};
}

/* Whole warp. Returns work tile number idx of the launch. With a causal mask the longest work tiles come first. Tiles
 * of one head wait for each other. The head number therefore runs fastest, so that tiles of one head begin apart.
 * Pieces of one tile begin apart, too, because one piece of every cut tile comes before the next pieces. */
DEVICE tile tile_at(const params &p, int idx, int num_kv_tiles, const tile &before) {
    tile t;
    t.pieces = 1, t.piece = 0;
    if (CUTS_QUERIES && idx >= p.num_whole) {
        t.pieces = p.pieces, t.piece = (idx - p.num_whole) / p.num_cut, t.idx = idx - p.num_whole - t.piece * p.num_cut;
        idx = p.num_whole + t.idx;
    }
    const int pieces = CUTS_HEADS ? p.pieces : 1; /* of a key head: each piece has query heads of its own */
    const int num_heads = VARLEN ? p.h_kv : p.b * p.h_kv, in_groups = p.group_heads * num_kv_tiles;
    const int group = idx / in_groups, in_group = idx - group * in_groups;
    const int heads = min(p.group_heads, num_heads * pieces - group * p.group_heads);
    const int part = group * p.group_heads + in_group % heads, piece = CUTS_HEADS ? part / num_heads : 0;
    const int head = part - piece * num_heads; /* dense: counted over the whole batch */
    t.kv_tile = in_group / heads;
    if (CUTS_HEADS) t.pieces = pieces, t.piece = piece, t.idx = head * num_kv_tiles + t.kv_tile;
    t.slab_head = (head * pieces + piece) * p.heads_per_tile;
#if VARLEN
    t.head_kv = head;
    t.b_idx = find_sequence(p, t.kv_tile, before, t.tiles_before);
    const span q = span_at(p.cu_seqlens_q, t.b_idx, p.len_q), kv = span_at(p.cu_seqlens_k, t.b_idx, p.len_kv);
    t.len_q = q.len, t.len_kv = kv.len, t.kv_begin = kv.begin;
    t.q_row_0 = p.len_q - q.len, t.q_batch = q.begin + q.len;
    t.kv_row_0 = p.len_kv - kv.len, t.kv_batch = kv.begin + kv.len;
    t.first_head = t.slab_head, t.slab = slab_begin(p, t.b_idx);
    num_kv_tiles = ceil_div(kv.len, BLOCK_KV);
#else
    t.b_idx = head / p.h_kv, t.head_kv = head - t.b_idx * p.h_kv;
    t.len_q = p.len_q, t.len_kv = p.len_kv, t.kv_begin = 0;
    t.q_row_0 = t.kv_row_0 = 0, t.q_batch = t.kv_batch = t.b_idx;
    t.first_head = t.slab_head - t.b_idx * p.h, t.slab = 0;
#endif
    t.find_list(p, t.b_idx, t.first_head, t.kv_tile);
#if ALIBI
    t.slope = slope_of(p, t.b_idx, t.first_head);
#endif

    const interval seen = queries_of(p, t.kv_tile, t.len_q, t.len_kv);
    t.queries.begin = seen.begin, t.queries.end = seen.end;
    if (CUTS_QUERIES && t.pieces > 1)
        t.queries.begin = seen.end * t.piece / t.pieces, t.queries.end = seen.end * (t.piece + 1) / t.pieces;
    const int shift = t.len_kv - t.len_q;
    const int first_key = t.kv_tile * BLOCK_KV, last_key = min(first_key + BLOCK_KV, t.len_kv) - 1;
    t.queries.full_begin = ceil_div(mask::rows_begin<FROM_0>(p, last_key, shift), BLOCK_Q);
    t.queries.full_end = mask::rows_end<INSIDE>(p, first_key, shift, t.len_q) / BLOCK_Q;
    t.first_begin = t.kv_tile == 0 ? 0 : queries_of(p, t.kv_tile - 1, t.len_q, t.len_kv).end;
    t.last_end = first_key + BLOCK_KV >= t.len_kv ? seen.end : queries_of(p, t.kv_tile + 1, t.len_q, t.len_kv).begin;
    if (last_key - first_key < BLOCK_KV - 1) t.queries.full_end = 0;
    if (t.has_list()) t.queries.begin = 0, t.queries.end = t.list_num;
    return t;
}

/* ---- producer -------------------------------------------------------------------------------------------------- */

/* Returns the first key of CTA `rank` of the cluster in a work tile. Keys beyond the sequence's end may hold anything,
 * because such keys are masked and not stored. But no box may lie outside its map as a whole: see tensor_map.h. */
DEVICE int key_to_load(const tile &t, int rank) {
    const int key = t.kv_tile * BLOCK_KV + rank * KEYS;
    return CTAS > 1 ? min(key, t.len_kv - 1) : key;
}

/* Loads this CTA's keys of K or V. */
template <int NUM_CHUNKS> DEVICE void load_keys(element *dst, const fa_tensor_map *map, u64 *full, const tile &t) {
    const int row = t.kv_row_0 + key_to_load(t, cluster_rank());
#pragma unroll
    for (int c = 0; c < NUM_CHUNKS; c++)
        cp_async_bulk_tensor_load(dst + c * KEYS * CHUNK, map, full, c * CHUNK, row, t.head_kv, t.kv_batch,
                                  L2_EVICT_FIRST);
}

/* The CTAs of a cluster compute half of dQ's columns each: chunk 0 or 1, and half of the columns behind these, from
 * dq_rest_column on. */
constexpr int DQ_REST = HEAD_DIM / 2 - CHUNK;
DEVICE int dq_rest_column() { return 2 * CHUNK + cluster_rank() * DQ_REST; }

/* Loads the other CTA's part of K: the chunks that this CTA's dQ takes. */
DEVICE void load_other_keys(element *dst, const params &p, u64 *full, const tile &t) {
    const int row = t.kv_row_0 + key_to_load(t, cluster_rank() ^ 1);
#pragma unroll
    for (int i = 0; i < 2; i++)
        cp_async_bulk_tensor_load(dst + i * KEYS * CHUNK, &p.k, full,
                                  i ? dq_rest_column() / CHUNK * CHUNK : cluster_rank() * CHUNK, row, t.head_kv,
                                  t.kv_batch, L2_EVICT_FIRST);
}

/* Loads BLOCK_Q rows of Q or dO. The CTAs of a cluster share the rows: each CTA loads every other chunk, for both
 * CTAs. */
template <int NUM_CHUNKS>
DEVICE void load_queries(element *dst, const fa_tensor_map *map, u64 *full, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < NUM_CHUNKS; c += CTAS) {
        const int chunk = c + cluster_rank();
        if (chunk >= NUM_CHUNKS) break;
        element *place = dst + chunk * BLOCK_Q * CHUNK;
        if (CTAS > 1)
            cp_async_bulk_tensor_multicast(place, map, full, chunk * CHUNK, row, head, batch, 3, L2_EVICT_LAST);
        else
            cp_async_bulk_tensor_load(place, map, full, chunk * CHUNK, row, head, batch, L2_EVICT_LAST);
    }
}

/* Whole warp. Takes the next work tile of the launch. In a cluster CTA 0 takes the tile and sends its number to
 * CTA 1. */
template <class shared_memory> DEVICE int take_tile(const params &p, shared_memory &s, u32 &parity) {
    int idx = 0;
    if (threadIdx.x % 32 == 0) {
        if (cluster_rank() == 0) idx = atomicAdd(p.tile_counter, 1);
        if constexpr (CTAS > 1) {
            if (cluster_rank() == 0) {
                mbarrier_wait_cluster(&s.idx_empty, parity ^ 1);
                st_async(&s.idx, &s.idx_full, idx, 1);
            } else {
                mbarrier_arrive_expect_tx(&s.idx_full, 4);
                mbarrier_wait_cluster(&s.idx_full, parity);
                idx = *(volatile int *)&s.idx;
                mbarrier_arrive_remote_release(&s.idx_empty, 0); /* not before the number is read */
            }
        }
    }
    parity ^= 1;
    return __shfl_sync(0xffffffffu, idx, 0);
}

/* A tile's keys come after its first Q and dO, because Q and dO wait for less of the tile before. In a cluster this
 * order is 0.5 to 3% slower. There K comes before Q, and V comes before dO. */
constexpr bool KEYS_FIRST = CTAS > 1;

/* Returns the parity of q_empty that a step's Q waits for. With hidden pairs beside Q, the warpgroups release Q of the
 * last step in every step. Before the first step there is no Q, so the first step releases stage 1, which is free. The
 * barrier of stage 1 is therefore one phase ahead. */
DEVICE u32 q_empty_parity(const ring &r) { return r.parity ^ 1 ^ (HIDDEN_BESIDE_Q ? r.stage : 0); }

/* One lane. Loads what the steps of a work tile need: K and Q, or V and dO, or all four. D comes with dO, or with Q if
 * WIDE. `r` counts the steps. */
template <bool LOADS_Q, bool LOADS_DO, class shared_memory>
DEVICE void load_steps(const params &p, shared_memory &s, const tile &t, ring &r, u32 &kv_parity) {
    constexpr u32 Q_BYTES = sizeof s.q[0], DO_BYTES = sizeof s.dout[0], STAT_BYTES = BLOCK_Q * 4;
    constexpr u32 K_BYTES = sizeof s.k, V_BYTES = sizeof s.v;
    if (t.queries.begin >= t.queries.end) return;
    const auto load_k = [&] {
        mbarrier_wait(&s.k_empty, kv_parity ^ 1);
        if constexpr (CTAS > 1) {
            mbarrier_arrive_expect_tx(&s.k_full, K_BYTES + sizeof s.k_other);
            load_other_keys(s.k_other, p, &s.k_full, t);
        } else {
            mbarrier_arrive_expect_tx(&s.k_full, K_BYTES);
        }
        load_keys<CHUNKS>(s.k, &p.k, &s.k_full, t);
    };
    const auto load_v = [&] {
        mbarrier_wait(&s.v_empty, kv_parity ^ 1);
        mbarrier_arrive_expect_tx(&s.v_full, V_BYTES);
        load_keys<V_CHUNKS>(s.v, &p.v, &s.v_full, t);
    };
    if (KEYS_FIRST && LOADS_Q) load_k();
    if (KEYS_FIRST && LOADS_DO) load_v();
    const int key_row = t.kv_row_0 + key_to_load(t, cluster_rank());
#pragma unroll
    for (int c = 0; c < CHUNKS && !KEYS_FIRST; c++) { /* the tile before still needs the places of K, V */
        cp_async_bulk_prefetch_tensor(&p.k, c * CHUNK, key_row, t.head_kv, t.kv_batch);
        cp_async_bulk_prefetch_tensor(&p.v, c * CHUNK, key_row, t.head_kv, t.kv_batch);
    }
    bool is_first = true;
    list_reader reader;
    reader.begin(t, t.queries.end - 1, t.queries.end - 2);
#pragma unroll 1
    for (int place = t.queries.end - 1, g = 0; place >= t.queries.begin; r.next()) {
        const int entry = reader.entry_of(place), i = query_tile_of(entry);
        reader.look_ahead(t, place - 2);
        const int row = t.q_row_0 + i * BLOCK_Q, head = t.first_head + g;
        const float *stats = p.stats + ((long long)(t.slab_head + g) * p.num_slabs + t.slab + i) * (2 * BLOCK_Q);
        if (LOADS_Q) {
            u64 *full = &s.q_full[r.stage];
            mbarrier_wait(&s.q_empty[r.stage], q_empty_parity(r));
            s.words.set_step(r.stage, t, entry, reader.share);
            const u32 hidden_bytes = s.words.hidden_bytes(entry);
            mbarrier_arrive_expect_tx(full, Q_BYTES + (WIDE ? 2 : 1) * STAT_BYTES + hidden_bytes);
            load_queries<CHUNKS>(s.q[r.stage], &p.q, full, row, head, t.q_batch);
            if (HIDDEN_BESIDE_Q && hidden_bytes)
                cp_async_bulk_load(s.words.hidden, t.hidden_of(entry), hidden_bytes, full);
            cp_async_bulk_load(s.lse[r.stage], stats, STAT_BYTES, full);
            if (WIDE) cp_async_bulk_load(s.d[r.stage], stats + BLOCK_Q, STAT_BYTES, full);
        }
        if (LOADS_DO) {
            u64 *full = &s.do_full[do_stage(r)];
            mbarrier_wait(&s.do_empty[do_stage(r)], do_parity(r) ^ 1);
            mbarrier_arrive_expect_tx(full, DO_BYTES + (WIDE ? 0 : 1) * STAT_BYTES);
            load_queries<V_CHUNKS>(s.dout[do_stage(r)], &p.dout, full, row, head, t.q_batch);
            if (!WIDE) cp_async_bulk_load(s.d[do_stage(r)], stats + BLOCK_Q, STAT_BYTES, full);
        }
        if (!KEYS_FIRST && is_first) load_k(), load_v(), is_first = false;
        if (++g == p.heads_per_tile) {
            g = 0, place--;
            reader.advance();
        }
    }
    kv_parity ^= 1;
}

/* This function is the producer warp. One lane, the leader, does all work that one thread must do. Without LOADS_DO
 * another warp loads V and dO. NOTE: behind elect_one ptxas makes no loop over lanes around TMA's instructions. The
 * wide kernels took 2.2% longer with it (256 columns). */
template <bool LOADS_DO = true, class shared_memory> DEVICE void produce(const params &p, shared_memory &s) {
    const bool is_leader = WIDE ? threadIdx.x % 32 == 0 : elect_one();
    const int num_kv_tiles = VARLEN ? count_packed_tiles(p) : p.num_kv_tiles;
    const int num_tiles = VARLEN ? num_kv_tiles * p.h_kv * (CUTS_HEADS ? p.pieces : 1) : p.num_tiles;
    ring tr, r; /* of tiles, of steps */
    u32 kv_parity = 0, idx_parity = 0;
#if VARLEN
    if (is_leader) s.tiles[1].b_idx = s.tiles[1].tiles_before = 0;
#endif
    for (int idx = take_tile(p, s, idx_parity); idx < num_tiles; tr.next()) {
        const tile &t = s.tiles[tr.stage]; /* stays in shared memory: this warp has few registers */
        mbarrier_wait(&s.tile_empty[tr.stage], tr.parity ^ 1);
        __syncwarp(); /* all lanes have waited, so the leader cannot let two phases pass; they see the tile before */
        {
            const tile found = tile_at(p, idx, num_kv_tiles, s.tiles[tr.stage ^ 1]);
            if (is_leader) s.tiles[tr.stage] = found;
        }
        if (is_leader) {
            mbarrier_arrive(&s.tile_full[tr.stage]);
            load_steps<true, LOADS_DO>(p, s, t, r, kv_parity);
        }
        /* Not sooner: a CTA must soon begin the tile that it takes. Otherwise other CTAs wait for the tile, or end
         * late. The lane that takes it need not be the leader, so it waits for the leader. */
        if (!WIDE) __syncwarp();
        idx = take_tile(p, s, idx_parity);
    }
    if (is_leader) {
        mbarrier_wait(&s.tile_empty[tr.stage], tr.parity ^ 1);
        s.tiles[tr.stage].kv_tile = -1;
        mbarrier_arrive(&s.tile_full[tr.stage]);
    }
}

/* Whole warp. go_through_tiles calls `work` for each work tile of the CTA. lead_through_tiles calls `work` in one
 * lane. */
template <class shared_memory, class work_on_tile> DEVICE void go_through_tiles(shared_memory &s, work_on_tile work) {
    const bool is_leader = WIDE ? threadIdx.x % 32 == 0 : elect_one();
    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        if (t.kv_tile < 0) break;
        work(t, is_leader);
        __syncwarp(); /* all lanes have read the tile, so the leader releases its place */
        if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}
template <class shared_memory, class work_on_tile> DEVICE void lead_through_tiles(shared_memory &s, work_on_tile work) {
    go_through_tiles(s, [&](const tile &t, bool is_leader) {
        if (is_leader) work(t);
    });
}

/* ---- dQ turns -------------------------------------------------------------------------------------------------- */

/* Key tiles add in the order in which they begin. A key tile waits only for key tiles that some CTA has begun. */

/* Returns the dQ turn of a key tile at query tile i: the number of key tiles that add before. `share` is that of
 * listed_queries. */
DEVICE u32 turn_of(const params &p, const tile &t, u32 share, int i) {
    if (t.has_list()) return share / 2;
    const interval seen = key_tiles_of(p, t.len_q, t.len_kv, i);
    return t.kv_tile - seen.begin;
}

/* One lane. Waits until `rank` key tiles have added to the slab. The caller then reads the sum or adds to the sum,
 * maybe through TMA. */
DEVICE void wait_turn(const u32 *turn, u32 rank) {
    u32 seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
    while (seen < rank);
    fence_proxy_async_global();
}
DEVICE void end_turn(u32 *turn) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory"); }

#endif
