/* Which query sees which key. Every GPU kernel asks here, for the mask of an element and for the range of a tile.
 *
 * The last query stands beside the last key: query i has the diagonal i + len_kv - len_q among the keys. The window of a
 * query reaches from its diagonal to both sides. A causal mask is a window that has no left end and ends at the diagonal:
 *
 *   query i sees key j   if   diagonal - left <= j <= diagonal + right   and   0 <= j < len_kv
 *
 * Read from the key, the same condition bounds the queries. Key j stands beside row j - (len_kv - len_q):
 *
 *   key j is seen by row i   if   beside - right <= i <= beside + left   and   0 <= i < len_q
 *
 * A kernel names its kind of mask once: mask_of<causal, may have another window>. What both constants exclude costs no
 * instruction. */
#ifndef FA_MASK_CUH
#define FA_MASK_CUH

#include "integers.cuh"

/* [begin, end) */
struct interval {
    int begin, end;
};

/* An OPEN end may lie before 0: that suffices to compare with it. A CLAMPED end lies between 0 and the length. */
enum mask_end { OPEN, CLAMPED };

template <bool IS_CAUSAL, bool MAY_BE_LOCAL> struct mask_of {
    int left, right; /* how far a query sees before and behind its diagonal; -1: to the end. Causal: neither is read. */

    DEVICE bool ends_left() const { return MAY_BE_LOCAL && left >= 0; }
    DEVICE bool ends_right() const { return IS_CAUSAL || (MAY_BE_LOCAL && right >= 0); }
    DEVICE int behind() const { return IS_CAUSAL ? 0 : right; }

    /* The keys that the query at a diagonal sees. */
    template <mask_end END> DEVICE int keys_begin(int diagonal) const {
        return !ends_left() ? 0 : END == OPEN ? diagonal - left : max(diagonal - left, 0);
    }
    template <mask_end END> DEVICE int keys_end(int diagonal, int len_kv) const {
        if (!ends_right()) return len_kv;
        const int end = diagonal + behind() + 1;
        return END == OPEN ? min(end, len_kv) : clamp(end, 0, len_kv);
    }

    /* The rows that see the key beside a row. */
    template <mask_end END> DEVICE int rows_begin(int beside) const {
        return !ends_right() ? 0 : END == OPEN ? beside - behind() : max(beside - behind(), 0);
    }
    template <mask_end END> DEVICE int rows_end(int beside, int len_q) const {
        if (!ends_left()) return len_q;
        const int end = beside + left + 1;
        return END == OPEN ? min(end, len_q) : clamp(end, 0, len_q);
    }
};

#endif
