/* What a tile walks over, in steps: a tile of queries walks over keys, a tile of keys over queries. The mask gives the
 * walk. Loads, steps and schedules ask the walk. Today a walk is an interval:
 *
 *   begin      full_begin        full_end      end
 *     | partial    |       full      |  partial |        partial: the mask hides some pair
 *
 * The unit is a row of the other side; in Hopper's backward it is a query tile. A list of blocks will take the place of
 * the interval here. */
#ifndef FA_WALK_CUH
#define FA_WALK_CUH

#include "mask.cuh"

struct tile_walk {
    int begin, end;           /* some row of the tile sees these */
    int full_begin, full_end; /* all rows of the tile see these */

    /* Steps begin at multiples of STEP. */
    template <int STEP> DEVICE int start() const { return begin / STEP * STEP; }
    template <int STEP> DEVICE int num_steps() const { return ceil_div(end - start<STEP>(), STEP); }
};

/* The keys that rows [first, last] walk over, inside [0, len_kv]; the window is read at run time. NOTE: not made of
 * mask_of's functions, so that each side of the window is asked for once. */
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

/* Does the mask hide some pair of the step from `first` on? NOTE: this is no method of tile_walk. As a method its
 * operands change places, and the loops of the kernels are compiled differently. */
template <int STEP> DEVICE bool is_partial(int first, int full_begin, int full_end) {
    return first < full_begin || first + STEP > full_end;
}

#endif
