/* Instructions for data that a kernel reads or writes once, for counters of several CTAs, and for e4m3. Each wrapper is
 * named after its instruction, as in ptx_sm80.cuh. Any thread may call them, for itself. */
#ifndef FA_PTX_ONCE_CUH
#define FA_PTX_ONCE_CUH

#include "e4m3.cuh"

/* 16 aligned bytes that nobody writes meanwhile, past the L1. l2_policy says how long the L2 keeps them. [ld] */
DEVICE uint4 ld_global_nc(const void *src, u64 l2_policy) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(src), "l"(l2_policy));
    return x;
}

/* 8 aligned bytes. [st] */
DEVICE void st_global(void *dst, uint2 x, u64 l2_policy) {
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(dst), "r"(x.x), "r"(x.y), "l"(l2_policy)
                 : "memory");
}

/* A thread that acquires a number of a counter sees what was written before the number was released. [ld, red] */
DEVICE u32 ld_acquire(const u32 *counter) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    return x;
}
DEVICE void red_add_release(u32 *counter, u32 x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

/* Other CTAs count at the same time. The function returns the number before. [atom, red] */
DEVICE u32 atom_add(u32 *counter, u32 x) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
    return before;
}
DEVICE void red_max(u32 *counter, u32 x) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
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
