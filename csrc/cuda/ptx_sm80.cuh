/* Instructions of every GPU since sm_80 that our kernels use. There is one wrapper per instruction, named after the
 * instruction, with operands in PTX order. The comment above a wrapper says which threads must call it. Headings in
 * brackets are those of the PTX manual. */
#ifndef FA_PTX_SM80_CUH
#define FA_PTX_SM80_CUH

#include "element.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

/* Any thread. The 32-bit address of a place in shared memory, as the instructions take it. [cvta] */
DEVICE u32 smem_address(const void *shared) { return (u32)__cvta_generic_to_shared(shared); }

/* ---- asynchronous copies [cp.async] ---------------------------------------------------------------------------
 * Any thread, for itself. */

/* Any thread: 16 aligned bytes, past the L1. Where is_present is false nothing is read and zeros arrive. */
DEVICE void cp_async_16(u32 dst, const void *src, bool is_present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(is_present ? 16 : 0)
                 : "memory");
}

/* Any thread: the same if does_copy is true. Otherwise nothing is written. There is no branch. */
DEVICE void cp_async_16_if(bool does_copy, u32 dst, const void *src, bool is_present) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2;}" ::"r"(dst),
                 "l"(src), "r"(is_present ? 16 : 0), "r"((u32)does_copy)
                 : "memory");
}

/* Any thread: the same. The L2 reads lines of 128 bytes, and l2_policy says how long it keeps them. */
DEVICE void cp_async_16(u32 dst, const void *src, bool is_present, u64 l2_policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
                 "r"(is_present ? 16 : 0), "l"(l2_policy)
                 : "memory");
}

/* Any thread: 4, 8 or 16 bytes, aligned to their number. Fewer than 16 bytes go through the L1. */
template <int BYTES> DEVICE void cp_async(u32 dst, const void *src, bool is_present) {
    if constexpr (BYTES == 16)
        cp_async_16(dst, src, is_present);
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(BYTES),
                     "r"(is_present ? BYTES : 0)
                     : "memory");
}

/* Any thread: policies for cp_async_16. [createpolicy] */
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

/* Any thread: its copies since the last commit become one group. [cp.async.commit_group] */
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Any thread: at most PENDING of its youngest groups are still on their way afterwards. [cp.async.wait_group] */
template <int PENDING> DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Any thread: all its copies have come afterwards. [cp.async.wait_all] */
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* ---- matrix loads [ldmatrix] ----------------------------------------------------------------------------------
 * Whole warp. The instruction loads four 8x8 matrices of 16-bit elements. Lane 8 i + r gives the address of row r of
 * matrix i, 16 aligned bytes. Lane l receives row l / 4, columns 2 (l % 4) + {0, 1} of each matrix. Transposed, lane l
 * receives column l / 4, rows 2 (l % 4) + {0, 1}. */
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
 * Whole warp. D += A B, for lane l:
 *
 *   D [16, 8] float      register i    row l / 4 + 8 (i / 2), column 2 (l % 4) + i % 2
 *   A [16, 16] pairs     register 0    row l / 4, columns 2 (l % 4) + {0, 1}; 1: row + 8; 2: columns + 8; 3: both
 *   B [16, 8] pairs      register 0    rows 2 (l % 4) + {0, 1}, column l / 4; 1: rows + 8 */
template <class T> __device__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <> DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void mma_m16n8k16<fp16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- named barriers [bar] -------------------------------------------------------------------------------------
 * Whole warps. The hardware has 16 named barriers of a CTA, and __syncthreads uses number 0. `threads` counts the
 * threads that sync and the threads that only arrive. */
DEVICE void bar_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void bar_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
/* Does the same as bar_sync, and returns whether x is true in one of these threads. */
DEVICE bool bar_red_or(u32 id, u32 threads, bool x) {
    u32 y;
    asm volatile("{.reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q;}"
                 : "=r"(y)
                 : "r"(id), "r"(threads), "r"((u32)x)
                 : "memory");
    return y;
}

/* One thread. *counter counts 0 .. last and begins again. The function returns the value before. A thread that counts
 * later sees this thread's earlier writes, and those of its CTA that a barrier has shown to this thread. [atom] */
DEVICE u32 atom_inc_acq_rel(u32 *counter, u32 last) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

/* Any thread, for itself. Adds to a float in memory, in any order with other threads. [red] */
DEVICE void red_add(float *sum, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
}

/* Any thread. Stores 16 bytes at a multiple of 16, by one instruction. The compiler cuts some stores of a uint4 into
 * four. [st] */
DEVICE void st_global_x4(void *to, const u32 (&x)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

/* One thread. Adds 1. A thread that acquires the new value sees this thread's earlier writes, and those of its CTA that
 * a barrier has shown to this thread. [red, ld] */
DEVICE void red_release_inc(u32 *counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
DEVICE u32 ld_acquire(const u32 *counter) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

/* Whole warp, with the same x in every lane. Returns x, which ptxas then knows to be uniform. A shuffled or loaded
 * value is not uniform for ptxas. [redux.sync] */
DEVICE int uniform(int x) { return __reduce_max_sync(0xffffffffu, x); }

/* Whole warp. Returns x, which ptxas then keeps in a register: it does not see that x could be computed anew. */
DEVICE u32 pinned(u32 x) { return __shfl_sync(0xffffffffu, x, threadIdx.x % 32); }

/* Any thread. Reads %laneid anew, so that ptxas computes dependent values where they are used, instead of keeping them
 * in registers through a loop. [%laneid] */
DEVICE int laneid() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* ---- arithmetic -----------------------------------------------------------------------------------------------
 * Any thread, for itself. */

/* 2^x on the special-function unit, which has 16 lanes a clock per SM. The softmax waits for this unit. [ex2] */
DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* log2(x), within 1e-7 near 1 and within 2 units of the last place elsewhere. [lg2] */
DEVICE float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The larger one, or NaN if one is NaN. fmaxf returns the other one then. [max] */
DEVICE float max_nan(float x, float y) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
}

/* The largest of x and the bits of four floats, all as signed integers. [max] */
DEVICE int max_of_bits(int x, float y0, float y1, float y2, float y3) {
    int largest;
    asm("{.reg .b32 y;\n"
        "mov.b32 y, %2; max.s32 %0, %1, y;\n"
        "mov.b32 y, %3; max.s32 %0, %0, y;\n"
        "mov.b32 y, %4; max.s32 %0, %0, y;\n"
        "mov.b32 y, %5; max.s32 %0, %0, y;}"
        : "=&r"(largest)
        : "r"(x), "f"(y0), "f"(y1), "f"(y2), "f"(y3));
    return largest;
}

/* 1 / x. [rcp] */
DEVICE float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* cvt_f32 makes a float of one element. cvt rounds a float to nearest even. For fp32 nothing changes. [cvt] */
DEVICE float cvt_f32(bf16 x) { return __int_as_float((int)x.bits << 16); }
DEVICE float cvt_f32(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE float cvt_f32(fp32 x) { return x.value; }

template <class T> __device__ T cvt(float x);

template <> DEVICE bf16 cvt<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> DEVICE fp16 cvt<fp16>(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> DEVICE fp32 cvt<fp32>(float x) { return {x}; }

/* Rounds two floats into one register, with low in the low half. [cvt] */
template <class T> __device__ u32 cvt_x2(float low, float high);

template <> DEVICE u32 cvt_x2<bf16>(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <> DEVICE u32 cvt_x2<fp16>(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/* The two 16-bit elements of one register, as floats. [cvt] */
template <class T> __device__ void unpack_x2(u32 packed, float &low, float &high);

template <> DEVICE void unpack_x2<bf16>(u32 packed, float &low, float &high) {
    low = __uint_as_float(packed << 16), high = __uint_as_float(packed & 0xffff0000u);
}
template <> DEVICE void unpack_x2<fp16>(u32 packed, float &low, float &high) {
    asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}"
        : "=f"(low), "=f"(high)
        : "r"(packed));
}

/* The products of two pairs of fp16, rounded to nearest even. Subnormals stay. [mul] */
DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 products;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    return products;
}

/* The whole product. NOTE: of the product in C ptxas makes additions of high halves that are 0. On GPUs but Hopper
 * the instruction was not measured, and some kernels spill with it. [mul] */
DEVICE u64 mul_wide(u32 a, u32 b) {
#if __CUDA_ARCH__ == 900
    u64 product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return (u64)a * b;
#endif
}

/* Four of the eight bytes of a and b, a's first. Each hexadecimal digit of `selector` names one byte. A digit that is 8
 * larger fills its byte with the sign of the byte named. [prmt] */
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

#endif
