/* Bounds of what a program reads, for the text of a mask_mod (csrc/flex/source.h). csrc/flex/intervals.c computes the
 * same on the CPU. */
#ifndef FA_FLEX_BOUNDS_CUH
#define FA_FLEX_BOUNDS_CUH

#include "flex_bounds.h"

enum { MOST_SCANNED = 1024 }; /* elements of a capture that one thread looks at */

DEVICE interval bounds_of_int(long long x) { return of_ints(x, x); }
DEVICE interval bounds_of_real(double x) { return x != x ? anything(FA_FLEX_F64) : of_reals(x, x, false); }

DEVICE constexpr int type_of_dtype(int dtype) {
    return dtype == FA_FLEX_OF_BOOL  ? FA_FLEX_BOOL
           : dtype < FA_FLEX_OF_F16  ? FA_FLEX_I64
           : dtype == FA_FLEX_OF_F64 ? FA_FLEX_F64
                                     : FA_FLEX_F32;
}

template <int DTYPE> DEVICE interval bounds_of_element(long long address, long long place) {
    if constexpr (DTYPE == FA_FLEX_OF_BOOL) return bounds_of_int(flex_load<unsigned char>(address, place) != 0);
    if constexpr (DTYPE == FA_FLEX_OF_U8) return bounds_of_int(flex_load<unsigned char>(address, place));
    if constexpr (DTYPE == FA_FLEX_OF_I8) return bounds_of_int(flex_load<signed char>(address, place));
    if constexpr (DTYPE == FA_FLEX_OF_I16) return bounds_of_int(flex_load<short>(address, place));
    if constexpr (DTYPE == FA_FLEX_OF_I32) return bounds_of_int(flex_load<int>(address, place));
    if constexpr (DTYPE == FA_FLEX_OF_I64) return bounds_of_int(flex_load<long long>(address, place));
    if constexpr (DTYPE == FA_FLEX_OF_F16)
        return bounds_of_real(flex_from_f16(flex_load<unsigned short>(address, place)));
    if constexpr (DTYPE == FA_FLEX_OF_BF16)
        return bounds_of_real(flex_from_bf16(flex_load<unsigned short>(address, place)));
    if constexpr (DTYPE == FA_FLEX_OF_F32) return bounds_of_real(flex_load<float>(address, place));
    return bounds_of_real(flex_load<double>(address, place));
}

/* Indices of a gather. There is always room for one. */
template <int RANK> struct index_bounds {
    interval of[RANK > 0 ? RANK : 1];
};

/* The bounds of all elements that the indices reach. words: the address of the capture, then size and stride of each
 * dimension. A capture without elements gives 0. */
template <int DTYPE, int RANK>
DEVICE interval bounds_of_gather(const long long *words, const index_bounds<RANK> &indices) {
    constexpr int type = type_of_dtype(DTYPE);
    long long from[RANK + 1], to[RANK + 1], at[RANK + 1], volume = 1, place = 0;
    if (!words[0]) return type <= FA_FLEX_I64 ? of_ints(0, 0) : of_reals(0, 0, false);
#pragma unroll
    for (int dim = 0; dim < RANK; dim++) {
        const interval index = indices.of[dim];
        const long long size = words[1 + 2 * dim];
        const bool wraps = index.lo < 0 && index.hi >= 0;
        from[dim] = at[dim] = wraps ? 0 : flex_place(index.lo, size);
        to[dim] = wraps ? size - 1 : flex_place(index.hi, size);
        volume = volume > MOST_SCANNED ? volume : volume * least(to[dim] - from[dim] + 1, MOST_SCANNED + 1);
        place += from[dim] * words[2 + 2 * dim];
    }
    if (volume > MOST_SCANNED) return anything(type);
    interval all = bounds_of_element<DTYPE>(words[0], place);
    if constexpr (RANK == 1) {
        const long long stride = words[2];
#pragma unroll 4
        for (long long i = 1; i < volume; i++)
            all = hull(type, all, bounds_of_element<DTYPE>(words[0], place + i * stride));
    } else {
        for (long long i = 1; i < volume; i++) {
            bool is_next = true;
#pragma unroll
            for (int dim = RANK - 1; dim >= 0; dim--) {
                if (!is_next) continue;
                is_next = at[dim] == to[dim];
                place += is_next ? (from[dim] - at[dim]) * words[2 + 2 * dim] : words[2 + 2 * dim];
                at[dim] = is_next ? from[dim] : at[dim] + 1;
            }
            all = hull(type, all, bounds_of_element<DTYPE>(words[0], place));
        }
    }
    return all;
}

#endif
