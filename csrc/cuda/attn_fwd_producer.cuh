/* The two warps of attn_fwd_sm90.cu that feed the others: one finds tiles, one brings their Q, K and V by TMA. */
#ifndef FA_ATTN_FWD_PRODUCER_CUH
#define FA_ATTN_FWD_PRODUCER_CUH

#include "attn_fwd_repeats.cuh"

/* ---- which tile is next ---------------------------------------------------------------------------------------- */

/* Next tiles of launches in a dynamic order: each launch counts in a slot of its own and leaves it at zero. */
__device__ u32 tile_counters[FA_TILE_COUNTERS];

/* The next tile of a dynamic order. Every CTA is refused once and all tiles beyond the first of each CTA are given out
 * once: that many fetches are made in all, and the last one brings the counter back to zero. Whole warp. */
DEVICE int fetch_tile(const params &p, int num_tiles) {
    int tile = 0;
    if (threadIdx.x % 32 == 0)
        tile = gridDim.x + atomicInc(&tile_counters[p.counter_slot], max(num_tiles, (int)gridDim.x) - 1);
    return __shfl_sync(0xffffffffu, tile, 0);
}

/* The finder. One warp: whenever the producer wants a tile, the next one, or one that failed before a new one; when there
 * is none, that consumers shall REPORT, and when they have, that they shall END. A tile takes 2000 clocks, in which the
 * producer has keys to load. */
DEVICE void find_tiles(const params &p, shared_memory &s) {
    constexpr int NONE = 0x7fffffff;
    const bool is_leader = threadIdx.x % 32 == 0, is_dynamic = p.counter_slot >= 0;
    const int num_tiles = VARLEN ? count_packed_tiles(p) * p.h : p.num_tiles;
    int next = blockIdx.x; /* NONE: consumers have been told to REPORT */
    bool is_taken = false; /* the producer has it */
    if (VARLEN && is_dynamic && next >= num_tiles) fetch_tile(p, num_tiles);
    ring<TILES> tiles;
    for (u32 parity = 0;; parity ^= 1) {
        mbarrier_wait(&s.tile_wanted, parity);
        if (is_taken) next = is_dynamic ? fetch_tile(p, num_tiles) : next + gridDim.x;
        u32 rows = 0;
        const int failed = failed_tile(s, rows), idx = failed >= 0 ? failed : next;
        const bool is_last = idx == NONE;
        tile &t = s.tiles[tiles.stage]; /* nobody reads what was there: all have left the tile after it */
        if (idx < num_tiles) {
            find_tile(p, s.packed, idx, t);
            if (is_leader) t.repeated = rows;
            is_taken = failed < 0;
        } else {
            if (is_leader) set_no_tile(t, is_last ? END : REPORT);
            next = NONE, is_taken = false;
        }
        __syncwarp();
        if (is_leader) mbarrier_arrive(&s.tile_found);
        if (is_last) break;
        tiles.next();
    }
}

/* ---- loads ----------------------------------------------------------------------------------------------------- */

template <int ROWS>
DEVICE void load(u16 *dst, const fa_tensor_map *map, u64 *full, int row, int head, int batch, u64 l2_policy) {
    mbarrier_arrive_expect_tx(full, ROWS * HEAD_DIM * 2);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        cp_async_bulk_tensor_load(dst + c * ROWS * CHUNK, map, full, c * CHUNK, row, head, batch, l2_policy);
}

/* The producer. One thread.
 *
 * The next tile is wanted when three key tiles of this one are left to load (wanted when this one begins, while others
 * are still to choose, it spoils the order: 10% at head_dim 256, causal), and where there is room its Q goes with the
 * last ones. */
DEVICE void produce(const params &p, shared_memory &s) {
    ring<Q_STAGES> q;
    ring<STAGES> k;
    ring<V_STAGES> v;
    ring<TILES> tiles;
    u32 found_parity = 0;

    /* The tile whose keys are loaded, at first one without any. NOTE: what the loads need is in registers. They are asked
     * for just in time: read from shared memory each time, all was 9% slower (head_dim 128, length 16k). */
    int kv_begin = 0, kv_end = 0, kv_row_0 = 0, kv_head = 0, kv_batch = 0;
    const auto load_k = [&](int j) {
        mbarrier_wait(&s.k_empty[k.stage], k.parity ^ 1);
        load<BLOCK_KV>(s.k[k.stage], &p.k, &s.k_full[k.stage], kv_row_0 + j * BLOCK_KV, kv_head, kv_batch,
                       L2_EVICT_LAST);
        k.next();
    };
    const auto load_v = [&](int j) {
        mbarrier_wait(&s.v_empty[v.stage], v.parity ^ 1);
        load<BLOCK_KV>(s.v[v.stage], &p.v, &s.v_full[v.stage], kv_row_0 + j * BLOCK_KV, kv_head, kv_batch,
                       L2_EVICT_LAST);
        v.next();
    };
    /* The next tile's, or without one only its place, in which consumers read what to do. */
    const auto load_q = [&] {
        const tile &t = s.tiles[tiles.stage];
        mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
        if (t.row >= 0)
            load<BLOCK_Q>(s.q[q.stage], &p.q, &s.q_full[q.stage], t.row_0 + t.row, t.head, t.batch, L2_EVICT_FIRST);
        else
            mbarrier_arrive(&s.q_full[q.stage]);
    };
    const auto wait_tile = [&] { mbarrier_wait(&s.tile_found, found_parity), found_parity ^= 1; };

    for (;;) {
#pragma unroll 1
        for (int j = kv_end - 1; j >= kv_begin - 1; j--) {
            if (j == min(kv_begin + 2, kv_end - 1)) mbarrier_arrive(&s.tile_wanted);
            /* K is needed one step before V of the same keys. */
            if (j >= kv_begin && !(K_FIRST && j == kv_end - 1)) load_k(j);
            if (j + 1 < kv_end) load_v(j + 1);
            if (Q_EARLY && j == min(kv_begin, kv_end - 1)) wait_tile(), load_q();
        }
        if (!Q_EARLY) wait_tile();
        const tile &t = s.tiles[tiles.stage];
        kv_begin = t.kv_begin, kv_end = t.kv_end;
        kv_row_0 = t.kv_row_0, kv_head = t.kv_head, kv_batch = t.kv_batch;
        if (K_FIRST && kv_begin < kv_end) load_k(kv_end - 1);
        if (!Q_EARLY) load_q();
        if (t.row == END) break;
        if (t.row == REPORT) mbarrier_wait(&s.all_done, 0);
        q.next(), tiles.next();
    }
}

#endif
