/* How Hopper's forward goes through the keys of a work tile: by key tiles of BLOCK_KV keys, from the top one down. The
 * top key tiles come first because they hold the diagonal and the end of the sequence, where masks apply. Producer and
 * consumers each have such a cursor. walk.cuh says which keys rows see. */
#ifndef FA_KEY_WALK_CUH
#define FA_KEY_WALK_CUH

#include "packed.cuh"
#include "walk.cuh"

typedef mask_of<CAUSAL, LOCAL> mask;

/* The keys that the rows with the diagonals [first, last] see. */
DEVICE tile_walk keys_of(const params &p, int first, int last, int len_kv) {
    tile_walk keys = walk_of_diagonals<mask>(p, first, last, len_kv);
    if (LOCAL && p.attention_chunk > 0) keys.clip_to_chunks(p.attention_chunk, first, last, len_kv);
    return keys;
}

struct key_walk {
    int next = -1;  /* the key tile of the next step */
    int bottom = 0; /* the key tile of the last step */
    int top = -1;   /* the key tile of the first step; below the bottom if there is no step */

    DEVICE bool has_next() const { return next >= bottom; }
    DEVICE bool is_first() const { return next == top; }
    DEVICE bool is_last(int j) const { return j == bottom; }
    DEVICE int previous() const { return next + 1; }
    DEVICE int take() { return next--; }
    /* Exactly num key tiles are left, or the walk begins now and has fewer. */
    DEVICE bool has_left(int num) const { return next == min(bottom + num - 1, top); }
};

DEVICE key_walk key_walk_of(int kv_begin, int kv_end) { return {kv_end - 1, kv_begin, kv_end - 1}; }

/* The same cursor, with what a consumer warp knows of the key tiles. */
struct row_key_walk : key_walk {
    int seen_top = -1;   /* The row block sees no key tile above this one; -1 if the row block sees none. */
    int exact_begin = 0; /* From this key tile up, a row of the warp may have no row maximum yet. */
    int full_begin = 0, full_end = 0; /* The warp's rows see every key of the key tiles full_begin .. full_end - 1. */

    /* The warpgroup's rows do not see the next key tile, but rows of other warpgroups do. */
    DEVICE bool next_is_unseen() const { return next > seen_top; }
    /* Some row of the warp does not see some key of key tile j. */
    DEVICE bool is_partial(int j) const { return j >= full_end || (LOCAL && j < full_begin); }
    /* The step of key tile j takes its own row maximum before the exponentials. */
    DEVICE bool needs_max(int j) const { return j >= exact_begin || (LOCAL && j < full_begin); }
    /* After key tile j a row of the warp still has no row maximum: the mask hides the tile from the row, or all scores
     * are -inf. The next step then takes its row maximum, too. */
    DEVICE void lacks_max_after(int j) { exact_begin = uniform(min(exact_begin, j - 1)); }
    /* diagonal belongs to the first of the warp's 16 rows. */
    DEVICE void begin_rows(const params &p, int diagonal, int len_kv) {
        if (FLEX) { /* which keys the rows see shows when their scores are there */
            exact_begin = seen_top;
            return;
        }
        const tile_walk keys = keys_of(p, diagonal, diagonal + 15, len_kv);
        exact_begin = uniform(min(seen_top, max(keys.full_end - 1, 0) / BLOCK_KV));
        full_end = uniform(keys.full_end / BLOCK_KV);
        if (LOCAL) full_begin = uniform(ceil_div(keys.full_begin, BLOCK_KV));
    }
};

#endif
