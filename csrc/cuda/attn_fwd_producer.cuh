/* The warps of attn_fwd_sm90.cu that feed the consumers. The scheduler warp finds work tiles. One lane of the producer
 * warp loads Q, K and V by TMA. With a KV cache all its lanes load K, and another warp loads V. Single keys are copied
 * by all four warps: two copy K, one copies most of V, and the scheduler warp copies the rest of V. */
#ifndef FA_ATTN_FWD_PRODUCER_CUH
#define FA_ATTN_FWD_PRODUCER_CUH

#include "attn_fwd_repeats.cuh"
#include "attn_fwd_single_keys.cuh"

/* ---- the scheduler --------------------------------------------------------------------------------------------- */

/* The counters of launches in a dynamic order. Each launch counts in a slot of its own and leaves the slot at zero. */
__device__ u32 tile_counters[FA_TILE_COUNTERS];

/* The next tile of a dynamic order. Each CTA begins with a tile of its own, fetches the others, and is refused
 * once. So the number of fetches is known, and the last fetch brings the counter back to zero. Whole warp. */
DEVICE int fetch_tile(const params &p, int num_tiles) {
    int tile = 0;
    if (threadIdx.x % 32 == 0)
        tile = gridDim.x + atomicInc(&tile_counters[p.counter_slot], max(num_tiles, (int)gridDim.x) - 1);
    return __shfl_sync(0xffffffffu, tile, 0);
}

/* The scheduler loads nothing. */
struct no_share {
    DEVICE void load_until_wanted(const tile &, u32) {}
};

/* The scheduler. One warp. Whenever the producer wants a work tile, the scheduler gives out a tile that failed, or
 * else the next tile. When no tile is left, consumers shall REPORT. When they have reported and no failed tile is
 * left, they shall END. Finding a tile takes 2000 clocks, in which the producer has keys to load. Between requests the
 * scheduler loads its share of the keys, no_share or a scheduler_share. */
template <class key_share> DEVICE void schedule_tiles(const params &p, shared_memory &smem, key_share share) {
    constexpr int NONE = 0x7fffffff;
    const bool is_leader = threadIdx.x % 32 == 0, is_dynamic = p.counter_slot >= 0;
    const int num_tiles = VARLEN ? count_packed_tiles(p) * h_in_tiles(p) : p.num_tiles;
    int next = blockIdx.x; /* NONE: consumers have been told to REPORT. */
    bool is_taken = false; /* The tile `next` has been given out. */
    if (VARLEN && is_dynamic && next >= num_tiles) fetch_tile(p, num_tiles);
    ring<TILE_SLOTS> slots;
    for (u32 parity = 0;; parity ^= 1) {
        mbarrier_wait(&smem.tile_wanted, parity);
        if (is_taken) next = is_dynamic ? fetch_tile(p, num_tiles) : next + gridDim.x;
        u32 strips = 0;
        const int failed = failed_tile(smem, strips), idx = failed >= 0 ? failed : next;
        const bool is_last = idx == NONE;
        tile &t = smem.tiles[slots.stage]; /* All consumers have left the tile after the one in this slot. */
        if (idx < num_tiles) {
            find_tile(p, smem.sequences, idx, t);
            if (is_leader) t.failed_strips = strips, t.command = strips ? REPEAT : COMPUTE;
            is_taken = failed < 0;
        } else {
            if (is_leader) set_no_tile(t, is_last ? END : REPORT);
            next = NONE, is_taken = false;
        }
        __syncwarp();
        if (is_leader) mbarrier_arrive(&smem.tile_found);
        share.load_until_wanted(t, parity ^ 1);
        if (is_last) break;
        slots.next();
    }
}

/* ---- loads ----------------------------------------------------------------------------------------------------- */

/* Loads ROWS rows and CHUNKS chunks of columns of one head into a pipeline stage. The map has the coordinates. */
template <int ROWS, int CHUNKS>
DEVICE void load(element *dst, const fa_tensor_map *map, u64 *full, int row, int head, int batch, u64 l2_policy) {
    if (PRODUCER_IS_WARP && !elect_one()) return;
    mbarrier_arrive_expect_tx(full, ROWS * CHUNKS * ROW_BYTES);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        cp_async_bulk_tensor_load(dst + c * ROWS * CHUNK, map, full, c * CHUNK, row, head, batch, l2_policy);
}

/* The same for the keys of a key tile in a cache. Each lane loads the keys of its box, chunk by chunk or whole. Whole
 * warp. */
template <int CHUNKS, bool IS_V>
DEVICE void load_boxes(const params &p, element *dst, const fa_tensor_map *map, u64 *full, const cached_keys &keys) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) mbarrier_arrive_expect_tx(full, BLOCK_KV * CHUNKS * ROW_BYTES);
    __syncwarp();
    if (lane * p.cache.box >= BLOCK_KV) return;
    if (WHOLE_KEYS) {
        const int group = keys.box.page * p.cache.page_groups[IS_V] + keys.box.row / 8;
        cp_async_bulk_tensor_load(dst + lane * p.cache.box * CHUNKS * CHUNK, map, full, 0, 0, 0, group, keys.head,
                                  L2_EVICT_LAST);
        return;
    }
    dst += lane * p.cache.box * CHUNK;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        cp_async_bulk_tensor_load(dst + c * BLOCK_KV * CHUNK, map, full, c * CHUNK, keys.box.row, keys.head,
                                  keys.box.page, L2_EVICT_LAST);
}

/* What a warp loads of each key tile of a cache. The places of the next one are looked up one step ahead, because page
 * numbers come from memory. Single keys take four warps: two load K, and two load V. TMA leaves no rest
 * of K and V. Whole warp. */
enum cache_share { OF_K, REST_OF_K, OF_V, REST_OF_V };
template <cache_share SHARE> struct cache_loader {
    static constexpr bool IS_V = SHARE == OF_V || SHARE == REST_OF_V;
    static constexpr int CHUNKS = IS_V ? CHUNKS_V : CHUNKS_QK;

    DEVICE static element *stage_of(shared_memory &smem, int stage) { return IS_V ? smem.v[stage] : smem.k[stage]; }
    DEVICE static u64 *full_of(shared_memory &smem, int stage) {
        return IS_V ? &smem.v_full[stage] : &smem.k_full[stage];
    }
    DEVICE static u64 *empty_of(shared_memory &smem, int stage) {
        return IS_V ? &smem.v_empty[stage] : &smem.k_empty[stage];
    }
#if SINGLE_KEYS
    static constexpr int BEGIN = SHARE == REST_OF_K ? OF_K_COPIES : SHARE == REST_OF_V ? OF_V_COPIES : 0;
    static constexpr int END = SHARE == OF_K ? OF_K_COPIES : SHARE == OF_V ? OF_V_COPIES : COPIES;
    single_keys<BEGIN, END, CHUNKS, IS_V ? D_V : D_QK> keys;

    DEVICE static const fa_attn_fwd_rows &rows_of(const params &p) { return IS_V ? p.cache.v : p.cache.k; }
    template <class tile> DEVICE void begin(const params &p, const tile &t, int key_tile) {
        keys.begin(p, rows_of(p), t, key_tile);
    }
    DEVICE void load(const params &p, shared_memory &smem, int stage, int next) {
        keys.load(p, rows_of(p), smem.places[IS_V], stage_of(smem, stage), full_of(smem, stage), next);
    }
#else
    cached_keys keys;

    template <class tile> DEVICE void begin(const params &p, const tile &t, int key_tile) {
        keys.begin(p, t, key_tile);
    }
    DEVICE void load(const params &p, shared_memory &smem, int stage, int next) {
        load_boxes<CHUNKS, IS_V>(p, stage_of(smem, stage), IS_V ? &p.v : &p.k, full_of(smem, stage), keys);
        keys.find_box(p, next);
    }
#endif
};

/* Where V is loaded to. NOTE: a template looks only at the members that its kernel has. */
struct v_stage {
    element *dst;
    u64 *full, *empty;
};
template <class memory> DEVICE v_stage v_stage_of(memory &smem, int stage) {
    if constexpr (element::BYTES == 1)
        return {smem.raw_v[stage], &smem.raw_full[stage], &smem.raw_empty[stage]};
    else
        return {smem.v[stage], &smem.v_full[stage], &smem.v_empty[stage]};
}

/* The producer. A warp, of which one lane loads, or a single thread. With a cache each lane loads its box.
 *
 * It asks for the next work tile when three key tiles of this one are left to load. A request when this tile begins
 * spoils the order of tiles, because other CTAs still choose: 10% at head_dim 256, causal. Where Q has a second place,
 * the next Q goes with the last keys of this tile. */
struct producer {
    const params &p;
    shared_memory &smem;
    ring<Q_STAGES> q;
    ring<STAGES> k;
    ring<V_LOAD_STAGES> v;
    ring<TILE_SLOTS> slots;
    u32 found_parity = 0;

    /* The work tile whose keys are loaded, at first one without keys. NOTE: what the loads need is in registers.
     * Keys are asked for just in time. Reading the tile from shared memory each time cost 9% (head_dim 128, length
     * 16k). */
    loaded_walk walk{smem.entry_ring};
    int kv_origin = 0, kv_head = 0, kv_batch = 0;
    cache_loader<OF_K> cached; /* with a cache */

    DEVICE bool is_leader() const { return !PRODUCER_IS_WARP || threadIdx.x % 32 == 0; }
    /* x, which all lanes have, in a uniform register. Boxes of a cache have lanes of their own. */
    DEVICE static int known(int x) { return PRODUCER_IS_WARP && !CACHE ? uniform(x) : x; }

    DEVICE void load_k() {
        mbarrier_wait(&smem.k_empty[k.stage], k.parity ^ 1);
#if FLEX_LISTS
        smem.entries[k.stage] = walk.entry;
#endif
        if (CACHE) {
            cached.load(p, smem, k.stage, walk.key_tile() - 1);
        } else {
            load<BLOCK_KV, CHUNKS_QK>(smem.k[k.stage], &p.k, &smem.k_full[k.stage],
                                      kv_origin + walk.key_tile() * BLOCK_KV, kv_head, kv_batch, L2_EVICT_LAST);
        }
        k.next();
    }
    DEVICE void load_v() {
        const v_stage to = v_stage_of(smem, v.stage);
        mbarrier_wait(to.empty, v.parity ^ 1);
        load<BLOCK_KV, CHUNKS_V>(to.dst, &p.v, to.full, kv_origin + walk.previous_key_tile() * BLOCK_KV, kv_head,
                                 kv_batch, L2_EVICT_LAST);
        v.next();
    }
    /* Q of the next tile. Without a tile consumers only learn from Q's mbarrier that there is a command. */
    DEVICE void load_q() {
        const tile &t = smem.tiles[slots.stage];
        mbarrier_wait(&smem.q_empty[q.stage], q.parity ^ 1);
        /* All lanes have waited. Without keys no other step would hold the leader back. */
        if (PRODUCER_IS_WARP) __syncwarp();
        if (t.has_rows())
            load<BLOCK_Q, CHUNKS_QK>(smem.q[q.stage], &p.q, &smem.q_full[q.stage], t.q_origin + t.row, t.head,
                                     t.q_batch, L2_EVICT_FIRST);
        else if (is_leader())
            mbarrier_arrive(&smem.q_full[q.stage]);
    }
    DEVICE void want_tile() {
        if (PRODUCER_IS_WARP) __syncwarp(); /* All lanes have waited for the last tile. */
        if (is_leader()) mbarrier_arrive(&smem.tile_wanted);
    }
    /* Gives the work tile to the warp that loads V. That warp has read the work tile before in this place. */
    DEVICE void give_tile() {
        mbarrier_wait(&smem.read[q.stage], q.parity ^ 1);
        mbarrier_arrive(&smem.given[q.stage]);
    }
    DEVICE void wait_tile() {
        mbarrier_wait(&smem.tile_found, found_parity), found_parity ^= 1;
        if (CACHE && is_leader()) give_tile();
    }

    /* K is needed one step before V of the same keys. So the loop runs one round longer than the walk. */
    DEVICE void load_keys() {
#pragma unroll 1
        for (; walk.next >= walk.bottom - 1; walk.take()) {
            if (walk.has_left(3)) want_tile();
            if (walk.has_next() && !(K_FIRST && walk.is_first())) load_k();
            if (!CACHE && !walk.is_first()) load_v();
            if (Q_EARLY && walk.has_left(1)) wait_tile(), load_q();
        }
    }

    DEVICE void run() {
        for (;;) {
            load_keys();
            if (!Q_EARLY) wait_tile();
            const tile &t = smem.tiles[slots.stage];
            walk.begin(t);
            kv_origin = known(t.kv_origin), kv_head = known(t.kv_head), kv_batch = known(t.kv_batch);
            walk.next = known(walk.next), walk.top = known(walk.top), walk.bottom = known(walk.bottom);
            if (CACHE) cached.begin(p, t, walk.key_tile());
            if (K_FIRST && walk.has_next()) load_k();
            if (!Q_EARLY) load_q();
            if (t.command == END) break;
            if (t.command == REPORT) mbarrier_wait(&smem.all_done, 0);
            q.next(), slots.next();
        }
    }
};

/* A warp's walk over the keys of its work tiles in a cache. It loads its share of each key tile. Whole warp. */
template <cache_share SHARE> struct cached_walk {
    typedef cache_loader<SHARE> loader;
    const params &p;
    shared_memory &smem;
    ring<loader::IS_V ? V_STAGES : STAGES> stages;
    loaded_walk walk{smem.entry_ring}; /* at first without keys */
    loader cached;

    DEVICE void begin(const tile &t) {
        walk.begin(t);
        cached.begin(p, t, walk.key_tile());
    }
    DEVICE bool has_next() const { return walk.has_next(); }
    DEVICE void load_next() {
        mbarrier_wait(loader::empty_of(smem, stages.stage), stages.parity ^ 1);
        cached.load(p, smem, stages.stage, walk.key_tile() - 1);
        stages.next(), walk.take();
    }
};

/* With a cache: loads its share. The producer gives each work tile to it, so V does not wait for Q. Whole warp. */
template <cache_share SHARE> struct second_producer {
    const params &p;
    shared_memory &smem;

    DEVICE void run() {
        ring<Q_STAGES> places; /* of work tiles that are given */
        cached_walk<SHARE> keys{p, smem};
        ring<TILE_SLOTS> slots;
        for (;; places.next(), slots.next()) {
            mbarrier_wait(&smem.given[places.stage], places.parity);
            const tile &t = smem.tiles[slots.stage];
            if (t.command == END) break;
            keys.begin(t);
            __syncwarp(); /* All lanes have waited and read. */
            if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(&smem.read[places.stage]);
#pragma unroll 1
            while (keys.has_next()) keys.load_next();
        }
    }
};

/* The scheduler's share of single keys. The producer wants the next work tile amid the keys of this one. So the
 * scheduler gives out the next work tile first, and loads the last keys of this one then. Whole warp. */
template <cache_share SHARE> struct scheduler_share {
    const params &p;
    shared_memory &smem;
    cached_walk<SHARE> keys{p, smem};

    /* Does the producer want a work tile? Lanes may see its arrival at different times, so the first lane decides for
     * all. Otherwise some lanes would load while others give out the tile. */
    DEVICE bool is_wanted(u32 parity) const {
        return __shfl_sync(0xffffffffu, mbarrier_test(&smem.tile_wanted, parity), 0);
    }
    /* Loads the rest of the work tile before. Then loads keys of the work tile just found, until the next one is
     * wanted. NOTE: one loop does both, so that the instructions of a load are there once. */
    DEVICE void load_until_wanted(const tile &found, u32 parity) {
        bool has_begun = false;
#pragma unroll 1
        for (;;) {
            if (!has_begun && !keys.has_next()) keys.begin(found), has_begun = true;
            if (!keys.has_next() || (has_begun && is_wanted(parity))) break;
            keys.load_next();
        }
    }
};

#endif
