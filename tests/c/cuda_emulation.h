/* An emulation of CUDA for the generic kernels and attn_decode_sm90 on a CPU. It covers enough of the language, and of
 * the instructions in ptx_sm80.cuh and ptx_cluster.cuh, to compile the kernel texts as C++. A kernel is compiled with
 * `-include cuda_emulation.h` into a shared object. emulate_cuda.c runs the kernel's CTAs one after the other. The
 * threads of a CTA are coroutines that switch at barriers and warp-wide instructions.
 *
 * The emulation finds wrong numbers, and reads and writes outside of guarded memory. It finds reads of shared memory
 * before a write, or before the wait for cp.async (both give NaN). It finds barriers that some threads do not reach. It
 * finds races only by chance. */
#ifndef CUDA_EMULATION_H
#define CUDA_EMULATION_H

/* The headers of C alone. Reading those of C++ takes as long as all the rest. */
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/convert.h"

/* ---- the engine's side (emulate_cuda.c) ------------------------------------------------------------------------- */

struct emulated_index {
    unsigned x, y, z;
};
extern "C" {
extern emulated_index emulated_thread, emulated_block, emulated_block_size, emulated_grid_size;
extern char memory[]; /* the extern __shared__ memory of kernels */
void emulated_syncthreads(void);
int emulated_syncthreads_or(int x);
/* An exchange among all 32 lanes of a warp. Each lane brings `bytes` bytes. Returns 32 places of 64 bytes, which are
 * valid until the next exchange. */
const char *emulated_exchange(const void *mine, size_t bytes);
void emulated_cp_async(void *dst, const void *src, unsigned bytes, bool is_present);
void emulated_cp_async_commit_group(void);
void emulated_cp_async_wait_group(int pending);
void emulated_bar_sync(unsigned id, unsigned num_threads);
int emulated_bar_red_or(unsigned id, unsigned num_threads, int x);
void emulated_bar_arrive(unsigned id, unsigned num_threads);
void emulated_yield(bool something_happened);
void emulated_cluster_sync(void);
/* The shared memory of another CTA of the cluster. It may be written only between two barriers of the cluster. */
char *emulated_memory_of(unsigned rank);
}

/* ---- the language ------------------------------------------------------------------------------------------------ */

#define __device__
#define __global__ __attribute__((visibility("default")))
#define __shared__
#define __align__(n)
#define __forceinline__
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define DEVICE    inline
#define threadIdx emulated_thread
#define blockIdx  emulated_block
#define blockDim  emulated_block_size
#define gridDim   emulated_grid_size

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static inline int min(int x, int y) { return x < y ? x : y; }
static inline int max(int x, int y) { return x > y ? x : y; }
static inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
static inline long long min(long long x, long long y) { return x < y ? x : y; }
static inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }
static inline long long max(long long x, long long y) { return x > y ? x : y; }
static inline float __int_as_float(int x) { return fa_f32_of_bits((uint32_t)x); }
static inline unsigned __float_as_uint(float x) { return fa_bits_of(x); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline void __syncthreads() { emulated_syncthreads(); }
static inline int __syncthreads_or(int x) { return emulated_syncthreads_or(x); }

template <class T> static inline T __shfl_sync(unsigned, T x, int from) {
    T y;
    memcpy(&y, emulated_exchange(&x, sizeof x) + 64 * from, sizeof y);
    return y;
}

template <class T> static inline T __shfl_xor_sync(unsigned mask, T x, int step) {
    return __shfl_sync(mask, x, (int)(emulated_thread.x % 32) ^ step);
}

static inline int __shfl_up_sync(unsigned mask, int x, int step) {
    const int lane = (int)(emulated_thread.x % 32);
    return __shfl_sync(mask, x, lane < step ? lane : lane - step);
}

static inline unsigned __ballot_sync(unsigned, bool x) {
    const char *all = emulated_exchange(&x, sizeof x);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= (unsigned)(all[64 * lane] != 0) << lane;
    return bits;
}

static inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fdividef(float x, float y) { return x / y; }
/* A CTA may wait for its own threads. CTAs run one after the other, so a CTA that waits for another never ends. */
static unsigned num_naps; /* since a word was published */
static inline void __nanosleep(unsigned) {
    if (++num_naps > 1000) abort();
}
static inline unsigned atomicMax(unsigned *place, unsigned x) {
    const unsigned before = *place;
    *place = x > before ? x : before;
    return before;
}
static inline int atomicMax(int *place, int x) {
    const int before = *place;
    *place = x > before ? x : before;
    return before;
}
static inline void atomicOr(int *place, int x) { *place |= x; }
static inline unsigned long long atomicAdd(unsigned long long *place, unsigned long long x) {
    return (*place += x) - x;
}
static inline int __double2hiint(double x) {
    unsigned long long bits;
    memcpy(&bits, &x, sizeof bits);
    return (int)(bits >> 32);
}
static inline long long __double2ll_rn(double x) { return llrint(x); }
static inline unsigned atomicAdd(unsigned *place, unsigned x) { return (*place += x) - x; }
static inline int atomicAdd(int *place, int x) { return (*place += x) - x; }
static inline float atomicAdd(float *place, float x) { return (*place += x) - x; }
static inline double atomicAdd(double *place, double x) { return (*place += x) - x; }
static inline int __ffs(unsigned bits) { return bits ? __builtin_ctz(bits) + 1 : 0; }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
static inline int __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
static inline void __syncwarp() { __ballot_sync(0, true); }

static inline int __reduce_add_sync(unsigned, int x) {
    const char *all = emulated_exchange(&x, sizeof x);
    int sum = 0;
    for (int lane = 0; lane < 32; lane++) memcpy(&x, all + 64 * lane, sizeof x), sum += x;
    return sum;
}

static inline int __reduce_max_sync(unsigned, int x) {
    const char *all = emulated_exchange(&x, sizeof x);
    int most = x;
    for (int lane = 0; lane < 32; lane++) memcpy(&x, all + 64 * lane, sizeof x), most = max(most, x);
    return most;
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
    return (unsigned)__reduce_max_sync(mask, (int)(x ^ 0x80000000u)) ^ 0x80000000u;
}

/* CTAs run one after the other. */
static inline unsigned atom_inc_acq_rel(unsigned *counter, unsigned last) {
    const unsigned before = *counter;
    *counter = before >= last ? 0 : before + 1;
    return before;
}

/* ---- ptx_sm80.cuh ------------------------------------------------------------------------------------------------ */

#define FA_PTX_SM80_CUH
#include "cuda/element.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* An address in shared memory, counted from the start of `memory`. */
static inline u32 smem_address(const void *shared) { return (u32)((const char *)shared - memory); }

static inline void cp_async_16(u32 dst, const void *src, bool is_present) {
    emulated_cp_async(memory + dst, src, 16, is_present);
}
static inline void cp_async_16_if(bool does_copy, u32 dst, const void *src, bool is_present) {
    if (does_copy) cp_async_16(dst, src, is_present);
}
template <int BYTES> static inline void cp_async(u32 dst, const void *src, bool is_present) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what the hardware copies");
    emulated_cp_async(memory + dst, src, BYTES, is_present);
}
static inline void cp_async_16(u32 dst, const void *src, bool is_present, u64) { cp_async_16(dst, src, is_present); }
static inline u64 l2_evict_first() { return 0; }
static inline u64 l2_evict_normal() { return 0; }
static inline void cp_async_commit_group() { emulated_cp_async_commit_group(); }
template <int PENDING> static inline void cp_async_wait_group() { emulated_cp_async_wait_group(PENDING); }
static inline void cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group<0>();
}
static inline void red_add(float *sum, float x) { *sum += x; }
static inline void st_global_x4(void *to, const u32 (&x)[4]) {
    if ((uintptr_t)to % 16) abort();
    memcpy(to, x, sizeof x);
}
static inline void red_release_inc(u32 *counter) { ++*counter, num_naps = 0; }
static inline u32 ld_acquire(const u32 *counter) {
    __nanosleep(0);
    return *counter;
}
static inline void bar_sync(u32 id, u32 threads) { emulated_bar_sync(id, threads); }
static inline bool bar_red_or(u32 id, u32 threads, bool x) { return emulated_bar_red_or(id, threads, x) != 0; }
static inline void bar_arrive(u32 id, u32 threads) { emulated_bar_arrive(id, threads); }

/* ptx_cluster.cuh and ptx_launch.cuh. Data arrives at once, and every CTA of the cluster waits for the data. */
#define FA_PTX_CLUSTER_CUH
#define FA_PTX_LAUNCH_CUH
static inline void cluster_arrive_relaxed() {}
static inline void griddepcontrol_wait() {}
static inline void griddepcontrol_launch_dependents() {}
static inline void cluster_sync() { emulated_cluster_sync(); }
static inline void cluster_wait() { emulated_cluster_sync(); }
static inline void mbarrier_init(u64 *bytes, u32) { *bytes = 0; }
static inline void mbarrier_init_fence() {}
static inline void mbarrier_arrive_expect_tx(u64 *barrier, u32 bytes) { *barrier += bytes; }
static inline void mbarrier_wait(u64 *barrier, u32) {
    emulated_cluster_sync();
    if (*barrier) abort(); /* other bytes than announced */
}
template <class T> static inline void st_async(float *dst, u64 *barrier, T x, u32 rank) {
    char *there = emulated_memory_of(rank);
    memcpy(there + smem_address(dst), &x, sizeof x);
    *(u64 *)(there + smem_address(barrier)) -= sizeof x;
}

static inline void ldmatrix(u32 (&m)[4], u32 row, bool transposed) {
    const int lane = (int)(emulated_thread.x % 32), across = lane / 4, along = 2 * (lane % 4);
    if (row % 16) abort();
    const char *rows = emulated_exchange(&row, sizeof row);
    for (int i = 0; i < 4; i++) {
        u16 pair[2];
        for (int e = 0; e < 2; e++) {
            u32 from;
            memcpy(&from, rows + 64 * (8 * i + (transposed ? along + e : across)), sizeof from);
            memcpy(&pair[e], memory + from + 2 * (transposed ? across : along + e), sizeof pair[e]);
        }
        m[i] = pair[0] | (u32)pair[1] << 16;
    }
}
static inline void ldmatrix_x4(u32 (&m)[4], u32 row) { ldmatrix(m, row, false); }
static inline void ldmatrix_x4_trans(u32 (&m)[4], u32 row) { ldmatrix(m, row, true); }

static inline float cvt_f32(bf16 x) { return fa_f32_from_bf16(x.bits); }
static inline float cvt_f32(fp16 x) { return fa_f32_from_f16(x.bits); }
static inline float cvt_f32(fp32 x) { return x.value; }
template <class T> inline T cvt(float x);
template <> inline bf16 cvt<bf16>(float x) { return {fa_bf16_from_f32(x)}; }
template <> inline fp16 cvt<fp16>(float x) { return {fa_f16_from_f32(x)}; }
template <> inline fp32 cvt<fp32>(float x) { return {x}; }
template <class T> static inline u32 cvt_x2(float low, float high) {
    return cvt<T>(low).bits | (u32)cvt<T>(high).bits << 16;
}
template <class T> static inline void unpack_x2(u32 packed, float &low, float &high) {
    low = cvt_f32(T{(u16)packed}), high = cvt_f32(T{(u16)(packed >> 16)});
}

static inline u32 mul_f16x2(u32 a, u32 b) {
    float x[2], y[2];
    unpack_x2<fp16>(a, x[0], x[1]), unpack_x2<fp16>(b, y[0], y[1]);
    return cvt_x2<fp16>(x[0] * y[0], x[1] * y[1]);
}
static inline u64 mul_wide(u32 a, u32 b) { return (u64)a * b; }
static inline u32 prmt(u32 a, u32 b, u32 selector) {
    u32 bytes = 0;
    for (int i = 0; i < 4; i++) {
        const u32 digit = selector >> 4 * i & 15;
        u32 byte = ((digit & 7) < 4 ? a : b) >> 8 * (digit & 3) & 255;
        if (digit & 8) byte = byte & 128 ? 255 : 0; /* its sign */
        bytes |= byte << 8 * i;
    }
    return bytes;
}

/* D += A B of a warp. A lane brings its elements of A, of the upper and the lower row in turn, and its elements of B.
 * The products are added in the order of k. */
static __attribute__((noinline)) void emulated_mma(float (&d)[4], const float (&mine)[12]) {
    typedef float vector __attribute__((vector_size(16)));
    const int lane = (int)(emulated_thread.x % 32);
    const char *all = emulated_exchange(mine, sizeof mine);
    const char *rows = all + 64 * (lane / 4 * 4), *columns = all + 64 * (lane % 4 * 8) + 32;
    vector sums, x;
    memcpy(&sums, d, sizeof sums);
    for (int k = 0; k < 16; k += 2) {
        const int from = 64 * (k % 8 / 2), half = k / 8;
        float y[2], z[2]; /* of the two columns */
        memcpy(&x, rows + from + 16 * half, sizeof x);
        memcpy(y, columns + from + 8 * half, sizeof y);
        memcpy(z, columns + from + 8 * half + 64 * 4, sizeof z);
        sums += __builtin_shufflevector(x, x, 0, 0, 1, 1) * vector{y[0], z[0], y[0], z[0]};
        sums += __builtin_shufflevector(x, x, 2, 2, 3, 3) * vector{y[1], z[1], y[1], z[1]};
    }
    memcpy(d, &sums, sizeof sums);
}

template <class T> static inline void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    float mine[12];
    for (int i = 0; i < 4; i += 2) { /* the columns before 8, and the rest */
        unpack_x2<T>(a[i], mine[2 * i], mine[2 * i + 2]);
        unpack_x2<T>(a[i + 1], mine[2 * i + 1], mine[2 * i + 3]);
    }
    unpack_x2<T>(b0, mine[8], mine[9]), unpack_x2<T>(b1, mine[10], mine[11]);
    emulated_mma(d, mine);
}

/* ptx_once.cuh. */
#define FA_PTX_ONCE_CUH
#include "cuda/e4m3.cuh"
template <class T> static inline void st_global(void *dst, T x, u64) {
    if ((size_t)dst % sizeof x) abort();
    memcpy(dst, &x, sizeof x);
}
static inline u32 ld_relaxed(const u32 *word) { return *word; }
static inline void st_relaxed(u32 *word, u32 x) { *word = x, num_naps = 0; }
static inline u32 atom_inc(u32 *counter) { return (*counter)++; }
template <class T> static inline u32 max_x2(u32 a, u32 b) {
    float x[2], y[2];
    unpack_x2<T>(a, x[0], x[1]), unpack_x2<T>(b, y[0], y[1]);
    return cvt_x2<T>(fmaxf(x[0], y[0]), fmaxf(x[1], y[1]));
}
static inline u32 cvt_e4m3x2(float low, float high) { return cvt<e4m3>(low).bits | (u32)cvt<e4m3>(high).bits << 8; }

static inline int uniform(int x) { return __reduce_max_sync(~0u, x); }
static inline u32 pinned(u32 x) { return x; }
static inline int laneid() { return (int)(emulated_thread.x % 32); }
static inline float ex2(float x) { return exp2f(x); }
static inline float lg2(float x) { return log2f(x); }
static inline float rcp(float x) { return 1 / x; }

#endif
