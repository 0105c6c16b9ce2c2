/* Prefetches for the next steps. The caller's rows lie further apart than the hardware prefetcher looks ahead. So the
 * engine prefetches these rows itself, in pieces of up to FETCH_LINES cache lines. Products prefetch a few pieces with
 * every register block of C, and the lines arrive while the multiply-add pipes work. A burst of prefetches would wait
 * for memory, and all instructions behind the burst would wait, too.
 *
 * NOTE: a piece costs one load and a few prefetches. Lists that were walked line by line cost 4% of a forward. */
#ifndef FA_CPU_FETCH_H
#define FA_CPU_FETCH_H

#include <stdint.h>

#include "macros.h"

#define FETCH_LINES 4
#define FETCH_BYTES (64 * FETCH_LINES)

typedef struct {
    const char **piece, **end;       /* the remaining pieces */
    int64_t lines, pieces_per_patch; /* cache lines of a piece; pieces for each register block of C */
} fetch_queue;

static inline int64_t fetch_lines(int64_t row_bytes) {
    return row_bytes < FETCH_BYTES ? (row_bytes + 63) / 64 : FETCH_LINES;
}

/* The largest number of pieces of a row. */
static inline int64_t fetch_pieces(int64_t row_bytes) { return (row_bytes + FETCH_BYTES - 1) / FETCH_BYTES; }

/* Adds rows to the queue and skips NULL rows. */
static inline void fetch_later(fetch_queue *q, const char *const *rows, int64_t num_rows, int64_t row_bytes) {
    const char **end = q->end;
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t at = 0; rows[i] && at < row_bytes; at += FETCH_BYTES) *end++ = rows[i] + at;
    q->end = end;
}

/* Adds rows that lie at equal distances. */
static inline void fetch_even_later(fetch_queue *q, const char *row, int64_t distance, int64_t num_rows,
                                    int64_t row_bytes) {
    const char **end = q->end;
    for (int64_t at = 0; at < row_bytes; at += FETCH_BYTES)
        for (int64_t i = 0; i < num_rows; i++) *end++ = row + i * distance + at;
    q->end = end;
}

INLINE void fetch_some(fetch_queue *q) {
    for (int64_t n = q->pieces_per_patch; n > 0 && q->piece < q->end; n--, q->piece++)
        for (int64_t line = 0; line < q->lines; line++) PREFETCH(*q->piece + 64 * line);
}

/* Prefetches whole rows at once, where there is no product to overlap with. */
static inline void fetch_now(const char *const *rows, int64_t num_rows, int64_t row_bytes) {
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t at = 0; rows[i] && at < row_bytes; at += 64) PREFETCH(rows[i] + at);
}

#endif
