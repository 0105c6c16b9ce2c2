/* Fills what a kernel divides by. */
#ifndef FA_GPU_DIVISION_H
#define FA_GPU_DIVISION_H

#include "cuda/division.h"

#include <stdint.h>

static inline fa_division fa_division_by(unsigned d) {
    unsigned bits = 0;
    while ((uint64_t)1 << bits < d) bits++;
    return (fa_division){(unsigned)((((uint64_t)1 << (31 + bits)) + d - 1) / d), 31 + bits};
}

#endif
