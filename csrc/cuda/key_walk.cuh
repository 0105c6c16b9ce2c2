/* The key walk: which key tiles of BLOCK_KV keys a work tile visits, in which order, and which of them need a mask.
 * Producer and consumers ask the same walk. Today the key tiles are an interval. */
#ifndef FA_KEY_WALK_CUH
#define FA_KEY_WALK_CUH

#include "mask.cuh"
#include "packed.cuh"

/* A query row sees the keys [keys_begin, keys_end). diagonal is the row plus len_kv - len_q: the last key that the row
 * sees under a causal mask. */
DEVICE int keys_begin(const params &p, int diagonal) {
    return mask_of<CAUSAL, LOCAL>::keys_begin<FROM_0>(p, diagonal, 0, 0, 0);
}
DEVICE int keys_end(const params &p, int diagonal, int len_kv) {
    return mask_of<CAUSAL, LOCAL>::keys_end<INSIDE>(p, diagonal, 0, 0, len_kv);
}

/* The key tiles of a work tile, from the top one down to the bottom one. The top key tiles come first because they hold
 * the diagonal and the end of the sequence, where masks apply. */
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

/* The same walk, as a consumer warp sees the key tiles. */
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
    /* After key tile j a row of the warp still has no row maximum. */
    DEVICE void lacks_max_after(int j) { exact_begin = uniform(min(exact_begin, j - 1)); }
    /* diagonal belongs to the first of the warp's 16 rows. */
    DEVICE void begin_rows(const params &p, int diagonal, int len_kv) {
        const int end = keys_end(p, diagonal, len_kv);
        exact_begin = uniform(min(seen_top, max(end - 1, 0) / BLOCK_KV));
        full_end = uniform(end / BLOCK_KV);
        if (LOCAL) full_begin = uniform(ceil_div(keys_begin(p, diagonal + 15), BLOCK_KV));
    }
};

#endif
