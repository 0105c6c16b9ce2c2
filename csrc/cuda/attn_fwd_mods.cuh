/* Programmable attention in attn_fwd_sm90.cu: the walk through a block mask, and the user's functions in a step.
 *
 * Without programmable attention the keys of a work tile are an interval. Place j of the walk is then key tile j. With
 * a block mask, place j is an entry of the work tile's list (flex_walks.cu): a key tile and the kind of its pairs. The
 * scheduler finds the list, the producer reads it one entry ahead, and consumers read each entry beside its K. */
#ifndef FA_ATTN_FWD_MODS_CUH
#define FA_ATTN_FWD_MODS_CUH

#include "key_walk.cuh"

#if FLEX

/* ---- lists ------------------------------------------------------------------------------------------------------ */

DEVICE int key_tile_of(int entry) { return entry >> 2; }
DEVICE block_kind kind_of(int entry) { return (block_kind)(entry & 3); }
/* All pairs of the key tile see each other. */
DEVICE bool is_full(const params &p, int entry) {
    return !FLEX_SCORE && kind_of(entry) == FULL_BLOCK && (key_tile_of(entry) + 1) * BLOCK_KV <= p.len_kv;
}

/* What a work tile knows of its list: the entries, the last place first. NULL: there is no block mask. */
struct listed_tile {
    const int *list;
    DEVICE int entry_at(int top, int place) const {
        return list ? __ldg(list + top - place) : 4 * place + KIND_WITHOUT_BLOCKS;
    }
};

/* The producer's walk. Entries come from memory, so each is asked for one step ahead. */
struct loaded_walk : key_walk {
    listed_tile of = {nullptr};
    int entry = 0, entry_before = 0, entry_after = 0; /* of this step, of the last, and of the next */

    template <class tile> DEVICE void begin(const tile &t) {
        *(key_walk *)this = key_walk_of(t.kv_begin, t.kv_end);
        of.list = t.list;
        entry = has_next() ? of.entry_at(top, top) : 0;
        entry_after = top > bottom ? of.entry_at(top, top - 1) : 0;
    }
    DEVICE int key_tile() const { return key_tile_of(entry); }
    DEVICE int previous_key_tile() const { return key_tile_of(entry_before); }
    DEVICE int take() {
        entry_before = entry, entry = entry_after;
        entry_after = next - 2 >= bottom ? of.entry_at(top, next - 2) : 0;
        return next--;
    }
};

/* Finds query tile number `pos` of a head in the order of flex_order.cu, and its list. One lane. */
template <class tile> DEVICE int find_list(const params &p, int b_idx, int head, int pos, int q_tiles, tile &t) {
    t.list = nullptr, t.kv_begin = 0;
    if (!p.flex.walks) {
        t.kv_end = ceil_div(p.len_kv, BLOCK_KV);
        return q_tiles - 1 - pos;
    }
    const long long mask = (long long)(b_idx % p.flex.mask_b) * p.flex.mask_h + head % p.flex.mask_h;
    const int q_tile = __ldg(p.flex.order + mask * q_tiles + pos);
    const int *walk = p.flex.walks + (mask * q_tiles + q_tile) * (1 + ceil_div(p.len_kv, BLOCK_KV));
    t.kv_end = __ldg(walk), t.list = walk + 1;
    return q_tile;
}

#else

DEVICE int key_tile_of(int place) { return place; }
DEVICE bool is_full(const params &, int) { return false; }
struct listed_tile {};
struct loaded_walk : key_walk {
    template <class tile> DEVICE void begin(const tile &t) {
        *(key_walk *)this = key_walk_of(t.kv_begin, t.kv_end);
    }
    DEVICE int key_tile() const { return next; }
    DEVICE int previous_key_tile() const { return previous(); }
};

#endif

/* The entries that lie beside the stages of K. */
template <int NUM> struct stage_entries {
    int entries[NUM];
};
template <> struct stage_entries<0> {};
constexpr int LISTED_STAGES = FLEX ? STAGES : 0;

#endif
