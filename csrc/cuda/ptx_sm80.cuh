/* Instructions of every GPU since sm_80 that our kernels use: one wrapper each, named after the instruction, operands in
 * PTX order. Addresses in shared memory are 32-bit (`smem_address`). */
#ifndef FA_PTX_SM80_CUH
#define FA_PTX_SM80_CUH

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

DEVICE u32 smem_address(const void *shared) { return (u32)__cvta_generic_to_shared(shared); }

/* ---- asynchronous copies [cp.async] ---------------------------------------------------------------------------
 * One thread: 16 bytes, aligned, past L1. Where is_present is false nothing is read and zeros arrive. */
DEVICE void cp_async_16(u32 dst, const void *src, bool is_present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(is_present ? 16 : 0)
                 : "memory");
}
/* The same; l2_policy says how long L2 keeps what it reads: lines of 128 bytes. [createpolicy] */
DEVICE void cp_async_16(u32 dst, const void *src, bool is_present, u64 l2_policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
                 "r"(is_present ? 16 : 0), "l"(l2_policy)
                 : "memory");
}
/* 4, 8 or 16 bytes, as aligned as they are long; fewer than 16 through L1. */
template <int BYTES> DEVICE void cp_async(u32 dst, const void *src, bool is_present) {
    if constexpr (BYTES == 16)
        cp_async_16(dst, src, is_present);
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(BYTES),
                     "r"(is_present ? BYTES : 0)
                     : "memory");
}
DEVICE u64 l2_evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE u64 l2_evict_normal() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* At most PENDING of the calling thread's youngest groups are still on their way. */
template <int PENDING> DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* All of them have come. */
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* ---- matrix loads [ldmatrix] ----------------------------------------------------------------------------------
 * Whole warp. Four 8x8 matrices of 16-bit elements; lane 8 i + r holds the address of row r of matrix i, 16 bytes. Lane
 * l receives row l / 4, columns 2 (l % 4) + {0, 1} of each; transposed: column l / 4, rows 2 (l % 4) + {0, 1}. */
DEVICE void ldmatrix_x4(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

/* ---- products [mma] -------------------------------------------------------------------------------------------
 * Whole warp. D += A B, D [16, 8] float: register i of lane l is row l / 4 + 8 (i / 2), column 2 (l % 4) + i % 2.
 * A [16, 16], four registers of pairs: row l / 4, columns 2 (l % 4) + {0, 1}; row + 8; columns + 8; both.
 * B [16, 8], two: rows 2 (l % 4) + {0, 1}, column l / 4; rows + 8. */
template <bool IS_BF16> DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (IS_BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- named barriers [bar] -------------------------------------------------------------------------------------
 * 16 of them, in hardware. Whole warps; `threads` counts those that sync and those that only arrive. Number 0 is
 * __syncthreads'. */
DEVICE void bar_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void bar_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/* One thread: *counter counts 0 .. last and begins again; returns what it was. Writes before it, the CTA's that a barrier
 * has shown to this thread among them, are seen by whoever counts later. [atom] */
DEVICE u32 atom_inc_acq_rel(u32 *counter, u32 last) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

/* %laneid, read anew: what follows from it is computed where it is needed, not kept in registers through a loop. */
DEVICE int laneid() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* ---- arithmetic ----------------------------------------------------------------------------------------------- */

/* 2^x on the special-function unit, 16 lanes a clock per SM: the unit that softmax waits for. */
DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* log2(x): within 1e-7 near 1, 2 units of the last place elsewhere. */
DEVICE float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* One 16-bit element as a float, and a float rounded to nearest even. */
template <bool IS_BF16> DEVICE float cvt_f32(u16 x) {
    float y;
    if constexpr (IS_BF16)
        y = __int_as_float((int)x << 16);
    else
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
template <bool IS_BF16> DEVICE u16 cvt_16(float x) {
    u16 y;
    if constexpr (IS_BF16)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

/* Two floats, rounded, in one register: low in the low half. */
template <bool IS_BF16> DEVICE u32 cvt_x2(float low, float high) {
    u32 packed;
    if constexpr (IS_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/* The two of one register. */
template <bool IS_BF16> DEVICE void unpack_x2(u32 packed, float &low, float &high) {
    if constexpr (IS_BF16)
        low = __uint_as_float(packed << 16), high = __uint_as_float(packed & 0xffff0000u);
    else
        asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}"
            : "=f"(low), "=f"(high)
            : "r"(packed));
}

/* Four of the eight bytes of a and b, a's first: a digit of `selector` for each, 8 more for its sign in all bits. [prmt] */
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

#endif
