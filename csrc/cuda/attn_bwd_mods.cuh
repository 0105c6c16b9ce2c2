/* Programmable attention in attn_bwd_sm90.cu and attn_bwd_wide_sm90.cu: the list of query tiles that a key tile walks
 * over.
 *
 * Without programmable attention the query tiles of a work tile are an interval. With a block mask they are a list
 * (flex_walks.cu), and place n of the interval [0, list_num) is an entry of the list: a query tile and the kind of its
 * pairs. The list is in descending order, so its first entry has the last place. The producer reads the entries, and
 * consumers read each entry beside its Q.
 *
 * Key tiles add to the dQ of a query tile in the order in which they begin. flex_walks.cu says which
 * key tile is the first, which is the last, and how many add before. A step's functions: attn_bwd_scores.cuh. */
#ifndef FA_ATTN_BWD_MODS_CUH
#define FA_ATTN_BWD_MODS_CUH

#include "attn_bwd_params.h"

#if FLEX

constexpr int HIDDEN_WORDS = FA_HIDDEN_WORDS(BLOCK_Q), HIDDEN_PITCH = 2 * BLOCK_KV;

DEVICE int query_tile_of(int entry) { return entry >> 2; }
DEVICE block_kind kind_of(int entry) { return FLEX_BLOCKS ? (block_kind)(entry & 3) : KIND_WITHOUT_BLOCKS; }

/* A step's hidden pairs come beside its Q, if shared memory has room for the bits of one step: up to 128 columns and
 * with 64 queries. All warps read the bits of a step before they release Q of the step before. So the next bits have
 * the same place. Q of a work tile's last step is therefore released in the first step of the next work tile. NOTE:
 * with ALiBi as a score_mod the code with bits beside Q is 4% slower. */
constexpr bool HIDDEN_BESIDE_Q = FLEX_HIDDEN && !FLEX_SCORE && !WIDE && HIDDEN_WORDS == 1;

/* Words beside the stages of a step. The producer writes a word beside each Q: 4 times the entry, plus what the
 * warpgroups must know of this step's share of dQ. */
enum { FIRST_SHARE = 1, LAST_SHARE = 2 };
struct step_words {
    int steps[2];
    int turns[WIDE ? 4 : 1]; /* of four steps: 4 times the query tile, plus the words of its share */
    alignas(16) u32 hidden[HIDDEN_BESIDE_Q ? HIDDEN_PITCH : 1];

    /* Bytes of hidden pairs that come with Q. */
    static DEVICE u32 hidden_bytes(int entry) {
        return HIDDEN_BESIDE_Q && kind_of(entry) != FULL_BLOCK ? HIDDEN_PITCH * 4 : 0;
    }

    static DEVICE int share_of(bool is_first, bool is_last) {
        return (is_first ? FIRST_SHARE : 0) | (is_last ? LAST_SHARE : 0);
    }
    /* Above 128 columns the shares come with the turns. */
    template <class tile> DEVICE void set_step(int stage, const tile &t, int entry, u32 share) {
        const int i = query_tile_of(entry);
        steps[stage] = 4 * entry + (WIDE ? 0 : share_of(t.begins_sum(share, i), t.ends_sum(share, i)));
    }
    DEVICE void set_turn(int slot, int i, bool is_first, bool is_last) {
        turns[slot] = 4 * i + share_of(is_first, is_last);
    }
};

/* What a work tile knows of its list. */
struct listed_queries {
    const int *list; /* list_num entries; NULL: there is no block mask */
    int list_num;
    const u32 *hidden; /* flex_hidden.cu, of this key tile */
    const u32 *ranks;  /* of this key tile: rank of the first query tile; the next is `pitch` words behind */
    int pitch;
#if FLEX_HEAD_VALUES
    head_values of_head; /* of the first query head */
#endif

    DEVICE bool has_list() const { return list != nullptr; }
    DEVICE int entry_at(int place) const {
        return FLEX_BLOCKS && list ? __ldg(list + list_num - 1 - max(place, 0)) : 4 * place + KIND_WITHOUT_BLOCKS;
    }
    /* Twice the number of key tiles that add to query tile i before, plus 1 if none adds after. */
    DEVICE u32 share_at(int i) const { return list ? __ldg(ranks + (long long)i * pitch) : 0; }

    DEVICE const u32 *hidden_of(int entry) const {
        return hidden + (long long)query_tile_of(entry) * (HIDDEN_WORDS * HIDDEN_PITCH);
    }

    /* Finds the list of a work tile, and loads the values of its first query head. `kv_tile` comes in as the number of
     * the work tile in the order of its head, and becomes its key tile. */
    DEVICE void find_list(const params &p, int b_idx, int head, int &kv_tile) {
        list = nullptr;
#if FLEX_HEAD_VALUES
        mods(p.flex, p.values, b_idx, head).load_head(of_head);
#endif
        if (!FLEX_BLOCKS || !p.flex.walks) return;
        const long long mask = (long long)(b_idx % p.flex.mask_b) * p.flex.mask_h + head % p.flex.mask_h;
        const int q_tiles = ceil_div(p.len_q, BLOCK_Q);
        if (p.flex.order) kv_tile = __ldg(p.flex.order + mask * p.num_kv_tiles + kv_tile);
        const int *walk = p.flex.walks + (mask * p.num_kv_tiles + kv_tile) * (1 + q_tiles);
        list_num = __ldg(walk), list = walk + 1;
        hidden = p.flex.hidden + (mask * p.num_kv_tiles + kv_tile) * q_tiles * (HIDDEN_WORDS * HIDDEN_PITCH);
        pitch = p.num_kv_tiles + 1, ranks = p.ranks + mask * q_tiles * pitch + kv_tile;
    }
};

/* Reads the entries of a list and their shares ahead of the steps: a share lies behind two loads, one after the other.
 * All members are those of this step, of the next and of the one behind it. A place below 0 stands for any place. */
struct list_reader {
    int entry, next_entry, later_entry;
    u32 share, next_share;

    DEVICE int entry_of(int) const { return entry; }

    template <class tile> DEVICE void begin(const tile &t, int place, int next_place) {
        entry = t.entry_at(place), next_entry = t.entry_at(next_place), share = t.share_at(query_tile_of(entry));
    }
    /* In a step, before it waits. */
    template <class tile> DEVICE void look_ahead(const tile &t, int later_place) {
        next_share = t.share_at(query_tile_of(next_entry)), later_entry = t.entry_at(later_place);
    }
    /* At the end of a step. */
    DEVICE void advance() { entry = next_entry, share = next_share, next_entry = later_entry; }
};

#else

constexpr bool HIDDEN_BESIDE_Q = false;

DEVICE int query_tile_of(int place) { return place; }
struct step_words {
    static constexpr u32 *hidden = nullptr;

    static DEVICE u32 hidden_bytes(int) { return 0; }
    template <class tile> static DEVICE void set_step(int, const tile &, int, u32) {}
};
struct listed_queries {
    static constexpr int list_num = 0;
    static DEVICE bool has_list() { return false; }
    static DEVICE int entry_at(int place) { return place; }
    static DEVICE u32 share_at(int) { return 0; }
    static DEVICE const u32 *hidden_of(int) { return nullptr; }
    static DEVICE void find_list(const params &, int, int, int &) {}
};
struct list_reader {
    static constexpr u32 share = 0;

    static DEVICE int entry_of(int place) { return place; }
    template <class tile> static DEVICE void begin(const tile &, int, int) {}
    template <class tile> static DEVICE void look_ahead(const tile &, int) {}
    static DEVICE void advance() {}
};

#endif

#endif
