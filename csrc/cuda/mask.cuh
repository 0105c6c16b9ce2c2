/* The mask decides which query sees which key. Every GPU kernel uses this file, for the mask of an element and for
 * the range of a tile.
 *
 * The last query stands beside the last key. Query i therefore stands beside key i + shift, with
 * shift = len_kv - len_q. This key is the diagonal of the query. The window of a query reaches from the diagonal to
 * both sides:
 *
 *   query i sees key j   if   i + shift - window_left <= j <= i + shift + window_right   and   0 <= j < len_kv
 *   key j is seen by i   if   j - shift - window_right <= i <= j - shift + window_left   and   0 <= i < len_q
 *
 * A window of -1 has no end on its side. A causal mask has no left end, and its window_right is 0.
 *
 * A kernel names its kind of mask once, as mask_of<is causal, may have another window>. A side of the window that
 * both constants exclude costs no instruction.
 *
 * NOTE: the form of these expressions, down to the order of operands, decides how the compiler arranges the kernels
 * around the expressions. Compare the machine code after a change. */
#ifndef FA_MASK_CUH
#define FA_MASK_CUH

#include "integers.cuh"

/* [begin, end) */
struct interval {
    int begin, end;
};

/* The end of a window is clamped to these bounds. An end that is only compared with keys of the sequence needs no
 * bounds. */
enum mask_bounds { UNBOUNDED, FROM_0, TO_LENGTH, INSIDE };
template <mask_bounds BOUNDS> DEVICE int bounded(int x, int length) {
    return BOUNDS == INSIDE      ? clamp(x, 0, length)
           : BOUNDS == FROM_0    ? max(x, 0)
           : BOUNDS == TO_LENGTH ? min(x, length)
                                 : x;
}

/* An attention chunk of c keys: the query beside key x sees only keys of the chunk that holds x. Chunks begin at
 * multiples of c, below 0 too. */
DEVICE int chunk_begin(int x, int chunk) {
    const int rest = x % chunk;
    return x - (rest < 0 ? rest + chunk : rest);
}
DEVICE int chunk_end(int x, int chunk, int length) {
    const int begin = chunk_begin(x, chunk);
    return (unsigned)length - (unsigned)begin > (unsigned)chunk ? max(begin + chunk, 0) : length;
}

/* A window that has been read already. The struct replaces a kernel's parameters. */
struct mask_window {
    int window_left, window_right;
};

/* p are the parameters of any kernel, with window_left and window_right. */
template <bool IS_CAUSAL, bool MAY_BE_LOCAL> struct mask_of {
    /* Query i sees keys [keys_begin, keys_end). Only the difference of the lengths counts. A diagonal comes as
     * (diagonal, 0, 0), and a row with its shift comes as (row, shift, 0). `length` is the bound. Where the window
     * has no end, `length` is also the end. */
    template <mask_bounds BOUNDS, class params>
    static DEVICE int keys_begin(const params &p, int i, int len_kv, int len_q, int length) {
        return MAY_BE_LOCAL && p.window_left >= 0 ? bounded<BOUNDS>(i + len_kv - len_q - p.window_left, length) : 0;
    }
    template <mask_bounds BOUNDS, class params>
    static DEVICE int keys_end(const params &p, int i, int len_kv, int len_q, int length) {
        return IS_CAUSAL || (MAY_BE_LOCAL && p.window_right >= 0)
                   ? bounded<BOUNDS>(i + len_kv - len_q + (IS_CAUSAL ? 0 : p.window_right) + 1, length)
                   : length;
    }

    /* Rows [rows_begin, rows_end) see key j. */
    template <mask_bounds BOUNDS, class params> static DEVICE int rows_begin(const params &p, int j, int shift) {
        return !IS_CAUSAL && (!MAY_BE_LOCAL || p.window_right < 0)
                   ? 0
                   : bounded<BOUNDS>(j - shift - (IS_CAUSAL ? 0 : p.window_right), 0);
    }
    template <mask_bounds BOUNDS, class params>
    static DEVICE int rows_end(const params &p, int j, int shift, int len_q) {
        return !MAY_BE_LOCAL || p.window_left < 0 ? len_q : bounded<BOUNDS>(j - shift + p.window_left + 1, len_q);
    }

    /* These functions do the same for elements. Rows are counted from the row beside key `from`, and num_rows rows
     * exist from there on. A begin of -1 hides no row. */
    template <class params> static DEVICE int rows_begin_from(const params &p, int j, int from) {
        return IS_CAUSAL || (MAY_BE_LOCAL && p.window_right >= 0) ? j - (IS_CAUSAL ? 0 : p.window_right) - from : -1;
    }
    template <class params> static DEVICE int rows_end_from(const params &p, int j, int from, int num_rows) {
        return MAY_BE_LOCAL && p.window_left >= 0 ? min(num_rows, j + p.window_left - from + 1) : num_rows;
    }
};

#endif
