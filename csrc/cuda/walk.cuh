/* A tile of queries walks over keys in steps, and a tile of keys walks over queries. The mask gives the walk. Loads,
 * steps and schedules ask the walk. Today a walk is an interval:
 *
 *   begin      full_begin        full_end      end
 *     | partial    |       full      |  partial |        partial: the mask hides some pair
 *
 * The unit is a row of the other side. In Hopper's backward the unit is a query tile. The generic kernels walk over
 * steps. With a block mask, block_walk (flex_blocks.cuh) takes the place of interval_walk. */
#ifndef FA_WALK_CUH
#define FA_WALK_CUH

#include "mask.cuh"

struct tile_walk {
    int begin, end;           /* some row of the tile sees [begin, end) */
    int full_begin, full_end; /* all rows of the tile see [full_begin, full_end) */

    /* Leaves the keys of the rows' attention chunks. first and last are the rows' diagonals. */
    DEVICE void clip_to_chunks(int chunk, int first, int last, int len_kv) {
        begin = max(begin, chunk_begin(first, chunk)), full_begin = max(full_begin, chunk_begin(last, chunk));
        end = min(end, chunk_end(last, chunk, len_kv)), full_end = min(full_end, chunk_end(first, chunk, len_kv));
    }

    /* Steps begin at multiples of STEP. */
    template <int STEP> DEVICE int start() const { return begin / STEP * STEP; }
    template <int STEP> DEVICE int num_steps() const { return ceil_div(end - start<STEP>(), STEP); }
};

/* Returns the walk of rows [first, last] over keys, inside [0, len_kv]. The window is read at run time. NOTE: this
 * function does not use mask_of's functions, so that each side of the window is tested once. */
template <class params> DEVICE tile_walk walk_of_rows(const params &p, int first, int last, int shift, int len_kv) {
    tile_walk r = {0, len_kv, 0, len_kv};
    if (p.window_right >= 0) {
        r.end = clamp(last + shift + p.window_right + 1, 0, len_kv);
        r.full_end = clamp(first + shift + p.window_right + 1, 0, len_kv);
    }
    if (p.window_left >= 0) {
        r.begin = clamp(first + shift - p.window_left, 0, r.end);
        r.full_begin = max(last + shift - p.window_left, 0);
    }
    return r;
}

/* The same walk where the mask is known at compile time, for rows with the diagonals [first, last]. A diagonal is a row
 * plus len_kv - len_q. */
template <class mask, class params>
DEVICE tile_walk walk_of_diagonals(const params &p, int first, int last, int len_kv) {
    return {mask::template keys_begin<FROM_0>(p, first, 0, 0, 0),
            mask::template keys_end<INSIDE>(p, last, 0, 0, len_kv), mask::template keys_begin<FROM_0>(p, last, 0, 0, 0),
            mask::template keys_end<INSIDE>(p, first, 0, 0, len_kv)};
}

/* Walks over an interval in steps of STEP, in ascending order. first(step) is the first row or key of a step. */
template <int STEP> struct interval_walk {
    int start, num;

    DEVICE interval_walk(const tile_walk &walk) : start(walk.start<STEP>()), num(walk.num_steps<STEP>()) {}
    DEVICE bool exists(int step) const { return step < num; }
    DEVICE int first(int step) const { return start + step * STEP; }
    DEVICE void advance() {}
};

/* Does the mask hide some pair of the step from `first` on? NOTE: is_partial is no method of tile_walk. In a method
 * the operands change places, and the loops of the kernels are compiled differently. */
template <int STEP> DEVICE bool is_partial(int first, int full_begin, int full_end) {
    return first < full_begin || first + STEP > full_end;
}

#endif
