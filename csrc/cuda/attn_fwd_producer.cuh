/* The producer warp of attn_fwd_sm90.cu: takes tiles from a counter, and brings Q, K and V by TMA. */
#ifndef FA_ATTN_FWD_PRODUCER_CUH
#define FA_ATTN_FWD_PRODUCER_CUH

#include "attn_fwd_repeats.cuh"

/* Next tiles of launches in a dynamic order: each launch counts in a slot of its own and leaves it at zero. */
__device__ u32 tile_counters[FA_TILE_COUNTERS];

template <int ROWS>
DEVICE void load(u16 *dst, const fa_tensor_map *map, u64 *full, int row, int head, int batch, u64 l2_policy) {
    mbarrier_arrive_expect_tx(full, ROWS * HEAD_DIM * 2);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        cp_async_bulk_tensor_load(dst + c * ROWS * CHUNK, map, full, c * CHUNK, row, head, batch, l2_policy);
}

/* Of the launch. Packed, the producer has counted them. */
DEVICE int num_tiles_of(const params &p, const shared_memory &s) { return VARLEN ? s.packed.num_tiles : p.num_tiles; }

/* The next tile of a dynamic order. Every CTA is refused once and all tiles beyond the first of each CTA are given out
 * once: that many fetches are made in all, and the last one brings the counter back to zero. */
DEVICE int fetch_tile(const params &p, const shared_memory &s) {
    return gridDim.x + atomicInc(&tile_counters[p.counter_slot], max(num_tiles_of(p, s), (int)gridDim.x) - 1);
}

/* One warp; lane 0 does what one thread must do.
 *
 * The next tile is prepared while keys of this one are loaded: it is taken from the counter when three key tiles are left
 * (taken when this one begins, while others are still to choose, it spoils the order: 10% at head_dim 256, causal), looked up
 * when two are, and where there is room its Q goes with the last ones. */
DEVICE void produce(const params &p, shared_memory &s) {
    const bool is_leader = threadIdx.x % 32 == 0, is_dynamic = p.counter_slot >= 0;
    if (VARLEN) {
        const int num_tiles = count_packed_tiles(p) * p.h;
        if (is_leader) s.packed.num_tiles = num_tiles;
        __syncwarp();
    }
    ring<Q_STAGES> q;
    ring<STAGES> k;
    ring<V_STAGES> v;
    ring<TILES> tiles;
    int next = blockIdx.x;
    if (VARLEN && is_dynamic && next >= s.packed.num_tiles && is_leader) fetch_tile(p, s);

    /* The tile whose keys are loaded, at first one without any. NOTE: what the loads need is in registers. They are asked
     * for just in time: read from shared memory each time, all was 9% slower (head_dim 128, length 16k). */
    int kv_begin = 0, kv_end = 0, kv_row_0 = 0, kv_head = 0, kv_batch = 0;
    const auto now = [&]() -> const tile & { return s.tiles[tiles.stage == 0 ? TILES - 1 : tiles.stage - 1]; };
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
    /* The next tile, one that failed before a new one; or that there is none. */
    const auto find = [&] {
        const int failed = failed_tile(s), idx = failed >= 0 ? failed : next;
        if (idx >= num_tiles_of(p, s)) return false;
        tile &t = s.tiles[tiles.stage]; /* nobody reads what was there: all have left the tile after it */
        find_tile(p, s.packed, idx, t);
        if (is_leader) t.is_repeat = failed >= 0;
        __syncwarp();
        return true;
    };
    const auto load_q = [&](const tile &t) {
        mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
        load<BLOCK_Q>(s.q[q.stage], &p.q, &s.q_full[q.stage], t.row_0 + t.row, t.head, t.batch, L2_EVICT_FIRST);
    };

    bool is_found = false, has_reported = false; /* the next tile; REPORT has been sent */
    const auto find_next = [&] {
        __syncwarp();
        if (!now().is_repeat) next = is_dynamic ? __shfl_sync(0xffffffffu, next, 0) : next + gridDim.x;
        is_found = find();
    };
    for (;;) {
#pragma unroll 1
        for (int j = kv_end - 1; j >= kv_begin - 1; j--) {
            if (is_leader && is_dynamic && j == min(kv_begin + 2, kv_end - 1) && !now().is_repeat)
                next = fetch_tile(p, s);
            /* K is needed one step before V of the same keys. */
            if (is_leader && j >= kv_begin && !(K_FIRST && j == kv_end - 1)) load_k(j);
            if (is_leader && j + 1 < kv_end) load_v(j + 1);
            if (FINDS_EARLY && j == min(kv_begin + 1, kv_end - 1)) find_next();
            if (Q_EARLY && is_leader && is_found && j == min(kv_begin, kv_end - 1)) load_q(s.tiles[tiles.stage]);
        }
        if (!FINDS_EARLY) find_next();
        __syncwarp();
        kv_begin = kv_end = 0;
        if (is_found) {
            const tile &t = s.tiles[tiles.stage];
            kv_begin = t.kv_begin, kv_end = t.kv_end;
            kv_row_0 = t.kv_row_0, kv_head = t.kv_head, kv_batch = t.kv_batch;
            if (K_FIRST && is_leader && kv_begin < kv_end) load_k(kv_end - 1);
            if (!Q_EARLY && is_leader) load_q(t);
        } else {
            if (is_leader) {
                mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
                set_no_tile(s.tiles[tiles.stage], has_reported ? END : REPORT);
                mbarrier_arrive(&s.q_full[q.stage]);
            }
            if (has_reported) break;
            __syncwarp();
            mbarrier_wait(&s.all_done, 0);
            has_reported = true;
        }
        q.next(), tiles.next();
    }
}

#endif
