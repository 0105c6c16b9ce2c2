/* Instructions for data that a kernel writes once, for words of several CTAs, for maxima, and for e4m3. Each wrapper is
 * named after its instruction, as in ptx_sm80.cuh. Any thread may call them, for itself. */
#ifndef FA_PTX_ONCE_CUH
#define FA_PTX_ONCE_CUH

#include "e4m3.cuh"

/* 4, 8 and 16 aligned bytes. [st] */
DEVICE void st_global(void *dst, u32 x, u64 l2_policy) {
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(dst), "r"(x), "l"(l2_policy) : "memory");
}
DEVICE void st_global(void *dst, uint4 x, u64 l2_policy) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(dst), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w), "l"(l2_policy)
                 : "memory");
}
DEVICE void st_global(void *dst, uint2 x, u64 l2_policy) {
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(dst), "r"(x.x), "r"(x.y), "l"(l2_policy)
                 : "memory");
}

/* A word that other CTAs write or read at the same time. The L2 has it. Nothing else is ordered by it. [ld, st] */
DEVICE u32 ld_relaxed(const u32 *word) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
DEVICE void st_relaxed(u32 *word, u32 x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(x) : "memory");
}

/* Other CTAs count at the same time. The function returns the number before, below 2^32 - 32. For atom.add, and for a
 * limit that it knows, ptxas makes code that waits for the result at once. [atom] */
DEVICE u32 atom_inc(u32 *counter) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(0xffffffff - threadIdx.x % 32)
                 : "memory");
    return before;
}

/* The larger elements of two pairs. A NaN counts only if the other element is NaN, too. [max] */
template <class T> __device__ u32 max_x2(u32 a, u32 b);

template <> DEVICE u32 max_x2<bf16>(u32 a, u32 b) {
    u32 most;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}
template <> DEVICE u32 max_x2<fp16>(u32 a, u32 b) {
    u32 most;
    asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}

/* Two e4m3, rounded to nearest even and saturated at 448. [cvt] */
DEVICE u32 cvt_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return cvt<e4m3>(low).bits | (u32)cvt<e4m3>(high).bits << 8;
#endif
}

#endif
