/* A warp holds 16 rows of an accumulator, and the four lanes of a quad together hold two of these rows. Each lane
 * holds two columns of every 8. The lanes exchange columns, so that each lane stores 16 bytes of one row. */
#ifndef FA_QUADS_CUH
#define FA_QUADS_CUH

#include "ptx_sm80.cuh"

/* Transposes the 4 x 4 matrix whose rows are the four lanes of a quad. */
DEVICE void transpose_in_quad(u32 (&x)[4]) {
    const int lane = threadIdx.x;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((i & step) == 0) {
                const bool upper = lane & step;
                u32 other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + step], step);
                if (upper)
                    x[i] = other;
                else
                    x[i + step] = other;
            }
}

/* Stores a warp's 16 rows of x times `factor`, as elements of the output. The first row is row `row`, and `base` is
 * the place of row 0. x has 2 N columns. Rows from `end` on and columns from `columns` on do not exist. `stride` is a
 * reference, so that the kernel reads the stride where the stride is used. AT_ONCE: 16 bytes are stored by one
 * instruction for sure. The whole warp calls this function. */
template <bool AT_ONCE = false, int N>
DEVICE void store_rows(const float (&x)[N], const float (&factor)[2], element::output *base, const long long &stride,
                       int row, int end, int columns) {
    const int lane = threadIdx.x % 32;
    if (N % 16) columns = min(columns, 2 * N);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row + lane / 4 + 8 * r;
        element::output *dst = base + i * stride;
#pragma unroll
        for (int g = 0; g < (N + 15) / 16; g++) {
            const float *y = x + 16 * g + 2 * r;
            const float f = factor[r];
            u32 packed[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                packed[k] = 16 * g + 4 * k < N ? cvt_x2<element::output>(y[4 * k] * f, y[4 * k + 1] * f) : 0;
            transpose_in_quad(packed);
            const int column = 32 * g + 8 * (lane % 4);
            if (i >= end || column >= columns) continue;
            if (AT_ONCE)
                st_global_x4(dst + column, packed);
            else
                *(uint4 *)(dst + column) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
}

#endif
