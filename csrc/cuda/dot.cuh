/* The dot product of two pieces of 16 bytes, for rowsum(dO O) of the backward. */
#ifndef FA_DOT_CUH
#define FA_DOT_CUH

#include "ptx_sm80.cuh"

/* Returns sum + a . b. T: fp16 or bf16. */
template <class T> DEVICE float add_dot(float sum, const uint4 &a, const uint4 &b) {
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x_0, x_1, y_0, y_1;
        unpack_x2<T>(x[i], x_0, x_1), unpack_x2<T>(y[i], y_0, y_1);
        sum = fmaf(x_0, y_0, fmaf(x_1, y_1, sum));
    }
    return sum;
}

#endif
