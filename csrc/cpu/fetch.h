/* Memory that the next steps need. Rows of the caller lie further apart than the hardware looks ahead, so the engine asks
 * for them itself, in pieces of up to FETCH_LINES cache lines. Products take a few pieces with every patch of C, and the
 * memory arrives while the multiply-add pipes work: a burst of requests would wait for it, and so would everything behind.
 *
 * NOTE: nothing but a load and a few prefetches for each piece: lists that were walked line by line cost 4% of a forward. */
#ifndef FA_CPU_FETCH_H
#define FA_CPU_FETCH_H

#include <stdint.h>

#include "macros.h"

#define FETCH_LINES 4
#define FETCH_BYTES (64 * FETCH_LINES)

typedef struct {
    const char **piece, **end; /* those that are left */
    int64_t lines, pieces;     /* of each piece; with each patch */
} fetch_queue;

static inline int64_t fetch_lines(int64_t row_bytes) {
    return row_bytes < FETCH_BYTES ? (row_bytes + 63) / 64 : FETCH_LINES;
}

/* Pieces of a row, at most. */
static inline int64_t fetch_pieces(int64_t row_bytes) { return (row_bytes + FETCH_BYTES - 1) / FETCH_BYTES; }

/* Adds rows; NULL rows are passed over. */
static inline void fetch_later(fetch_queue *q, const char *const *rows, int64_t num_rows, int64_t row_bytes) {
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t at = 0; rows[i] && at < row_bytes; at += FETCH_BYTES) *q->end++ = rows[i] + at;
}

INLINE void fetch_some(fetch_queue *q) {
    for (int64_t n = q->pieces; n > 0 && q->piece < q->end; n--, q->piece++)
        for (int64_t line = 0; line < q->lines; line++) PREFETCH(*q->piece + 64 * line);
}

/* All at once, where there is nothing to do meanwhile. */
static inline void fetch_now(const char *const *rows, int64_t num_rows, int64_t row_bytes) {
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t at = 0; rows[i] && at < row_bytes; at += 64) PREFETCH(rows[i] + at);
}

#endif
