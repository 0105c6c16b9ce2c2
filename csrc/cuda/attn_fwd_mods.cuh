/* Programmable attention in attn_fwd_sm90.cu: the walk through a block mask, and what a work tile knows of the user's
 * functions.
 *
 * Without programmable attention the keys of a work tile are an interval. Place j of the walk is then key tile j. With
 * a block mask, place j is an entry of the work tile's list (flex_walks.cu): a key tile and the kind of its pairs. The
 * scheduler finds the list, the producer reads it, and consumers read each entry beside its K. attn_fwd_softmax.cuh has
 * the functions in a step. Beside a KV cache there is no block mask, and place j is key tile j again. */
#ifndef FA_ATTN_FWD_MODS_CUH
#define FA_ATTN_FWD_MODS_CUH

#include "attn_fwd_cache.cuh"
#include "key_walk.cuh"

/* Work tiles have lists. */
#define FLEX_LISTS (FLEX && !CACHE)

constexpr int ENTRIES_AHEAD = 4; /* of the entry that the producer reads */

#if FLEX_LISTS

/* ---- lists ------------------------------------------------------------------------------------------------------ */

DEVICE int key_tile_of(int entry) { return entry >> 2; }
DEVICE block_kind kind_of(int entry) { return FLEX_BLOCKS ? (block_kind)(entry & 3) : KIND_WITHOUT_BLOCKS; }

/* What a work tile knows of its list: the entries, the last place first, and copies of the first of them. NULL: there
 * is no block mask. */
struct listed_tile {
    static constexpr int first_query = 0; /* what the functions call query 0 */
    const int *list;
    const u32 *hidden; /* flex_hidden.cu, of this query tile */
    int first_entries[ENTRIES_AHEAD];
};
constexpr int HIDDEN_WORDS = FA_HIDDEN_WORDS(BLOCK_KV), HIDDEN_PITCH = 2 * BLOCK_Q;

/* The producer's walk. Entries come from memory by cp.async, ENTRIES_AHEAD steps ahead, into a ring in shared memory.
 * The ring begins with the copies in the work tile. NOTE: a load to a register that the next step moves to another
 * register would make the next step wait for memory. */
struct loaded_walk : key_walk {
    int *ring;
    const int *list = nullptr;
    int entry = 0, entry_before = 0; /* of this step, and of the last */

    DEVICE loaded_walk(int *ring) : ring(ring) {}
    template <class tile> DEVICE void begin(const tile &t) {
        *(key_walk *)this = key_walk_of(t.kv_begin, t.kv_end);
        list = t.list;
        if (list)
            for (int i = 0; i < ENTRIES_AHEAD; i++) ring[i] = t.first_entries[i];
        read();
    }
    /* Reads the entry of this step, and asks for a later one in its place. */
    DEVICE void read() {
        const int idx = top - next, later = idx + ENTRIES_AHEAD;
        entry = 4 * next + KIND_WITHOUT_BLOCKS;
        if (!FLEX_BLOCKS || !list || !has_next()) return;
        cp_async_wait_group<ENTRIES_AHEAD - 1>();
        entry = ring[idx % ENTRIES_AHEAD];
        if (later <= top) cp_async<4>(smem_address(&ring[idx % ENTRIES_AHEAD]), list + later, true);
        cp_async_commit_group();
    }
    DEVICE int key_tile() const { return key_tile_of(entry); }
    DEVICE int previous_key_tile() const { return key_tile_of(entry_before); }
    DEVICE int take() {
        const int taken = next--;
        entry_before = entry;
        read();
        return taken;
    }
};

/* Finds query tile number `pos` of a head in the order of flex_walks.cu, and its list. One lane. */
template <class tile> DEVICE int find_list(const params &p, int b_idx, int head, int pos, int q_tiles, tile &t) {
    t.list = nullptr, t.hidden = nullptr, t.kv_begin = 0;
    if (!FLEX_BLOCKS || !p.flex.walks) {
        t.kv_end = ceil_div(p.len_kv, BLOCK_KV);
        return q_tiles - 1 - pos;
    }
    const long long mask = (long long)(b_idx % p.flex.mask_b) * p.flex.mask_h + head % p.flex.mask_h;
    const int q_tile = __ldg(p.flex.order + mask * q_tiles + pos);
    const int kv_tiles = ceil_div(p.len_kv, BLOCK_KV);
    const int *walk = p.flex.walks + (mask * q_tiles + q_tile) * (1 + kv_tiles);
    t.kv_end = __ldg(walk), t.list = walk + 1;
    t.hidden = p.flex.hidden + (mask * q_tiles + q_tile) * kv_tiles * (HIDDEN_WORDS * HIDDEN_PITCH);
    for (int i = 0; i < ENTRIES_AHEAD; i++) t.first_entries[i] = i < kv_tiles ? __ldg(walk + 1 + i) : 0;
    return q_tile;
}

#else

DEVICE int key_tile_of(int place) { return place; }
#if FLEX
static_assert(!FLEX_BLOCKS && !FLEX_HIDDEN && !FLEX_MAX, "beside a cache there are no lists, and no maximum is kept");
DEVICE block_kind kind_of(int) { return KIND_WITHOUT_BLOCKS; }
struct listed_tile {
    int first_query;
};
#else
struct listed_tile {
    static constexpr int first_query = 0;
};
#endif
struct loaded_walk : key_walk {
    DEVICE loaded_walk(int *) {}
    template <class tile> DEVICE void begin(const tile &t) { *(key_walk *)this = key_walk_of(t.kv_begin, t.kv_end); }
    DEVICE int key_tile() const { return next; }
    DEVICE int previous_key_tile() const { return previous(); }
};

#endif

#if FLEX
/* All pairs of the key tile see each other. */
DEVICE bool is_full(int entry, const int &len_kv) {
    return !FLEX_SCORE && kind_of(entry) == FULL_BLOCK && (key_tile_of(entry) + 1) * BLOCK_KV <= len_kv;
}
#endif

/* The entries of the stages of K, and the producer's ring of entries. */
template <int NUM> struct stage_entries {
    int entries[NUM], entry_ring[ENTRIES_AHEAD];
};
template <> struct stage_entries<0> {
    static constexpr int *entry_ring = nullptr;
};
constexpr int LISTED_STAGES = FLEX_LISTS ? STAGES : 0;

#endif
