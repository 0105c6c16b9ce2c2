/* This file finds the place of a packed sequence. */
#ifndef FA_PACKED_CUH
#define FA_PACKED_CUH

#include "integers.cuh"
#include "ptx_sm80.cuh"

/* A span is the rows of one packed sequence. Offsets are clamped, so no access leaves the tensors, whatever the
 * arrays hold. */
struct span {
    int begin, len;
};
DEVICE span span_at(const int *cu_seqlens, int b_idx, int total) {
    int begin = clamp(cu_seqlens[b_idx], 0, total);
    return {begin, clamp(cu_seqlens[b_idx + 1], begin, total) - begin};
}

#endif
