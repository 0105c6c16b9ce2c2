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

/* One warp; lane 0 does what one thread must do. */
DEVICE void produce(const params &p, shared_memory &s) {
    const bool is_leader = threadIdx.x % 32 == 0, is_dynamic = p.counter_slot >= 0;
    if (VARLEN) {
        const int num_tiles = count_packed_tiles(p) * p.h;
        if (is_leader) s.packed.num_tiles = num_tiles;
        __syncwarp();
    }
    ring<Q_STAGES> q;
    ring<STAGES> k, v;
    ring<TILES> tiles;
    int next = blockIdx.x;
    if (VARLEN && is_dynamic && next >= s.packed.num_tiles && is_leader) fetch_tile(p, s);

    /* The next tile and its Q, one that failed before a new one; or that there is none. */
    const auto announce = [&] {
        const int failed = failed_tile(s), idx = failed >= 0 ? failed : next;
        if (idx >= num_tiles_of(p, s)) return false;
        tile &t = s.tiles[tiles.stage]; /* nobody reads what was there: all have left the tile after it */
        find_tile(p, s.packed, idx, t);
        if (is_leader) {
            t.is_repeat = failed >= 0;
            mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
            load<BLOCK_Q>(s.q[q.stage], &p.q, &s.q_full[q.stage], t.row_0 + t.row, t.head, t.batch, L2_EVICT_FIRST);
        }
        __syncwarp();
        q.next(), tiles.next();
        return true;
    };
    bool is_announced = false, has_reported = false;
    for (;;) {
        if (!is_announced && !announce()) {
            if (is_leader) {
                mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
                s.tiles[tiles.stage].row = has_reported ? END : REPORT;
                mbarrier_arrive(&s.q_full[q.stage]);
            }
            if (has_reported) break;
            q.next(), tiles.next();
            mbarrier_wait(&s.all_done, 0);
            has_reported = true;
            continue;
        }
        const tile &t = s.tiles[tiles.stage == 0 ? TILES - 1 : tiles.stage - 1];
        const int head = t.head / p.heads_per_kv, kv_begin = t.kv_begin;
        is_announced = false;
        /* K is needed one step before V of the same keys. The next tile is taken two key tiles before the last: about four
         * steps before the consumers end this one. Taken when this one begins, while others are still to choose, it spoils
         * the order (10% at head_dim 256, causal); taken two steps before the end, its keys may come late. Its Q goes
         * before this one's last keys where it gains (causal, head_dim 128, 1k: -4% of the cycles; not causal: +3%). */
#pragma unroll 1
        for (int j = t.kv_end - 1; j >= kv_begin - 1; j--) {
            if (is_leader && is_dynamic && !t.is_repeat && j == min(kv_begin + 1, t.kv_end - 1))
                next = fetch_tile(p, s);
            if (j >= kv_begin && is_leader) {
                mbarrier_wait(&s.k_empty[k.stage], k.parity ^ 1);
                load<BLOCK_KV>(s.k[k.stage], &p.k, &s.k_full[k.stage], t.kv_row_0 + j * BLOCK_KV, head, t.kv_batch,
                               L2_EVICT_LAST);
                k.next();
            }
            if (j + 1 < t.kv_end && is_leader) {
                mbarrier_wait(&s.v_empty[v.stage], v.parity ^ 1);
                load<BLOCK_KV>(s.v[v.stage], &p.v, &s.v_full[v.stage], t.kv_row_0 + (j + 1) * BLOCK_KV, head,
                               t.kv_batch, L2_EVICT_LAST);
                v.next();
            }
            if (j == (ANNOUNCES_EARLY ? min(kv_begin + 1, t.kv_end - 1) : kv_begin - 1)) {
                __syncwarp();
                if (is_dynamic)
                    next = __shfl_sync(0xffffffffu, next, 0);
                else if (!t.is_repeat)
                    next += gridDim.x;
                if (ANNOUNCES_EARLY) is_announced = announce();
            }
        }
        __syncwarp();
    }
}

#endif
