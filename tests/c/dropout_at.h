/* What dropout multiplies a weight by, for the naive evaluations of programmable attention. */
#ifndef FA_TEST_DROPOUT_AT_H
#define FA_TEST_DROPOUT_AT_H

#include "cpu/dropout.h"
#include "flash_attn.h"

static double dropout_at(const fa_problem *p, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (p->dropout_p == 0) return 1;
    const uint64_t stream = fa_dropout_stream(p->offset, b, p->h, h);
    return fa_dropout_byte(p->seed, stream, i, j) <= p->keep_max ? 1 / (1 - p->dropout_p) : 0;
}

#endif
