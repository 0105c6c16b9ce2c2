/* The Hopper instructions that our kernels use. There is one wrapper per instruction, named after the instruction, with
 * operands in PTX order.
 *
 * The comment above a wrapper says which threads must call it: one lane, a whole warp, or a whole warpgroup of four
 * warps. Addresses in shared memory are 32-bit (`smem_address`). Headings in brackets are those of the PTX manual. */
#ifndef FA_PTX_SM90_CUH
#define FA_PTX_SM90_CUH

#include "ptx_cluster.cuh"
#include "ptx_sm80.cuh"
#include "tensor_map.h"

/* ---- registers [setmaxnreg] -----------------------------------------------------------------------------------
 * All four warps of a warpgroup, once. NOTE: ptxas ignores both unless __launch_bounds__ has its second argument. */

template <int N> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

/* Whole warp. Returns x, which ptxas then keeps in its register. Otherwise ptxas computes a value that follows from the
 * thread's number again at each use, behind an S2R. [shfl.sync] */
DEVICE u32 kept(u32 x) { return __shfl_sync(0xffffffffu, x, threadIdx.x % 32); }

/* ---- TMA [cp.async.bulk.tensor] -------------------------------------------------------------------------------
 * One lane. TMA copies a box of a tensor between global and shared memory. Coordinates count elements, the fastest
 * first. Elements outside the tensor read as zero, count as delivered, and are not written. A box that is loaded must
 * begin inside its tensor (tensor_map.h). Shared memory is aligned to 128 bytes, or to the period of the swizzle. */

enum : u64 { L2_EVICT_FIRST = 0x12F0000000000000ull, L2_EVICT_LAST = 0x14F0000000000000ull };

/* One lane: a map that will be used soon, into the cache. [prefetch.tensormap] */
DEVICE void prefetch_tensormap(const fa_tensor_map *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* One lane: global to shared memory. The bytes count at an mbarrier of this CTA, which must expect them. */
DEVICE void cp_async_bulk_tensor_load(void *dst, const fa_tensor_map *map, u64 *barrier, int c0, int c1, int c2, int c3,
                                      u64 l2_policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(dst)),
                 "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(l2_policy)
                 : "memory");
}

/* The same for a tensor of five dimensions. */
DEVICE void cp_async_bulk_tensor_load(void *dst, const fa_tensor_map *map, u64 *barrier, int c0, int c1, int c2, int c3,
                                      int c4, u64 l2_policy) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem_address(dst)),
                 "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(l2_policy)
                 : "memory");
}

/* Is the lane the one that acts for its warp? The same lane for every call. ptxas knows that no other lane goes on, so
 * TMA's instruction behind it needs no loop over lanes. Whole warp. [elect.sync] */
DEVICE bool elect_one() {
    u32 is_elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is_elected));
    return is_elected;
}

/* One lane: brings a box that will be loaded soon into the L2. [cp.async.bulk.prefetch.tensor] */
DEVICE void cp_async_bulk_prefetch_tensor(const fa_tensor_map *map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3)
                 : "memory");
}

/* One lane: shared to global memory. The store joins the lane's current bulk group. Threads that have written the
 * shared memory must have called fence_proxy_async. */
DEVICE void cp_async_bulk_tensor_store(const fa_tensor_map *map, const void *src, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(smem_address(src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

/* The lane that has stored: its stores and additions since the last commit become one bulk group.
 * [cp.async.bulk.commit_group] */
DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/* The lane that has stored. All its stores and additions have then read their shared memory.
 * [cp.async.bulk.wait_group] */
DEVICE void cp_async_bulk_wait_all_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/* The lane that has stored. All its stores and additions are then done and visible to it. [cp.async.bulk.wait_group] */
DEVICE void cp_async_bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/* One lane: consecutive bytes, global to shared memory. Their number and both addresses are multiples of 16. The bytes
 * count at an mbarrier of this CTA. [cp.async.bulk] */
DEVICE void cp_async_bulk_load(void *dst, const void *src, u32 bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(dst)),
                 "l"(src), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}

/* One lane: global += shared, float by float. Each addition is atomic. The addition joins the lane's current bulk
 * group. [cp.reduce.async.bulk] */
DEVICE void cp_reduce_async_bulk_add(float *dst, const float *src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
                 "r"(smem_address(src)), "r"(bytes)
                 : "memory");
}

/* One lane: global = shared. The store joins the lane's current bulk group. [cp.async.bulk] */
DEVICE void cp_async_bulk_store(float *dst, const float *src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(smem_address(src)),
                 "r"(bytes)
                 : "memory");
}

/* One lane: cp_async_bulk_tensor_load to the same place in every CTA of `ranks`, which has one bit per CTA. The bytes
 * count at the same mbarrier of each of these CTAs. */
DEVICE void cp_async_bulk_tensor_multicast(void *dst, const fa_tensor_map *map, u64 *barrier, int c0, int c1, int c2,
                                           int c3, u16 ranks, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(smem_address(dst)),
        "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ranks), "l"(l2_policy)
        : "memory");
}

/* One lane: consecutive bytes from this CTA's shared memory to CTA `rank` of the cluster. The bytes count at an
 * mbarrier there. `dst` and `barrier` are addresses of this CTA. [cp.async.bulk] */
DEVICE void cp_async_bulk_send(void *dst, const void *src, u32 bytes, u64 *barrier, u32 rank) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     mapa(smem_address(dst), rank)),
                 "r"(smem_address(src)), "r"(bytes), "r"(mapa(smem_address(barrier), rank))
                 : "memory");
}

/* Any thread: arrives when all its copies by cp.async have come. The count of the mbarrier includes such arrivals.
 * [cp.async.mbarrier.arrive] */
DEVICE void cp_async_mbarrier_arrive(u64 *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

/* Every thread that has written shared memory that TMA or wgmma will read. A barrier follows. [fence.proxy.async] */
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* The thread that has learnt that global memory is written, before TMA reads that memory. [fence.proxy.async] */
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/* Any thread: adds to four neighbouring floats in global memory, aligned to 16 bytes. Each addition is atomic. [red] */
DEVICE void red_add_x4(float *dst, float x0, float x1, float x2, float x3) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "f"(x0), "f"(x1), "f"(x2),
                 "f"(x3)
                 : "memory");
}

/* Any threads: waits for a phase of each of two mbarriers. Both are asked before the first answer is there.
 * [mbarrier.try_wait] */
DEVICE void mbarrier_wait_both(u64 *first, u32 first_parity, u64 *second, u32 second_parity) {
    asm volatile("{\n"
                 ".reg .pred first, second;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 first, [%0], %1;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 second, [%2], %3;\n"
                 "and.pred first, first, second;\n"
                 "@first bra finished;\n"
                 "bra again;\n"
                 "finished:\n"
                 "}" ::"r"(smem_address(first)),
                 "r"(first_parity), "r"(smem_address(second)), "r"(second_parity)
                 : "memory");
}

/* ---- matrix stores [stmatrix] ---------------------------------------------------------------------------------
 * Whole warp. The instruction stores four 8x8 matrices of 16-bit elements, in the lane order of the accumulators. Lane
 * 8 i + r gives the address of row r of matrix i, 16 aligned bytes. */
DEVICE void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

/* Whole warp: the same for the transposed matrices. A lane's pair lies in one column, in two neighbouring rows. */
DEVICE void stmatrix_x4_trans(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

/* ---- arithmetic ----------------------------------------------------------------------------------------------- */

/* Any thread: two floats in 8 bits each, with the exponent of fp16. e5m2 is the upper half of fp16's 16 bits. Values
 * that are too large become the largest. [cvt] */
DEVICE u32 cvt_e5m2_x2(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

/* Any thread: four floats in e4m3, the first in the lowest byte. Values that are too large become the largest. [cvt] */
DEVICE u32 cvt_e4m3_x4(float x0, float x1, float x2, float x3) {
    u32 packed;
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};}"
        : "=r"(packed)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return packed;
}

/* Any thread: one e4m3, in the lowest byte, as a float. fp16 holds every e4m3. [cvt] */
DEVICE float cvt_f32_e4m3(u32 byte) {
    float x;
    asm("{.reg .b16 pair, half, unused; .reg .b32 halves;\n"
        "cvt.u16.u32 pair, %1;\n"
        "cvt.rn.f16x2.e4m3x2 halves, pair;\n"
        "mov.b32 {half, unused}, halves;\n"
        "cvt.f32.f16 %0, half;}"
        : "=f"(x)
        : "r"(byte & 0xff));
    return x;
}

/* ---- global memory -------------------------------------------------------------------------------------------- */

/* Any thread. The load stays where it stands in the program. [ld] */
DEVICE float4 ld_global_in_order(const float4 *p) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}

/* Any lanes. Two floats of shared memory, at a multiple of 8. The compiler does not make one load of two of these.
 * [ld] */
DEVICE float2 ld_shared_x2(const float *p) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(smem_address(p)));
    return x;
}

/* ---- wgmma [Asynchronous Warpgroup Level Matrix Instructions] -------------------------------------------------
 * Whole warpgroup, in this order: fence, products, commit, wait. Only then the warpgroup may read D, change A's
 * registers or free the shared memory. D [64, N] is float. Register i of lane l in warp w belongs to
 *
 *   row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2
 *
 * One product contracts 32 bytes of each row: 16 elements of 16 bits, 32 of 8 bits. */

/* Whole warpgroup, before the first product and after registers of D or A have changed. [wgmma.fence] */
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Whole warpgroup: the products since the last commit become one group. [wgmma.commit_group] */
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Any thread, without an instruction. No use of these registers of an asynchronous product moves across this point. */
template <int N> DEVICE void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> DEVICE void pin(u32 (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}

/* Any thread, without an instruction: x is computed here and not later. */
DEVICE void pin(int &x) { asm volatile("" : "+r"(x)); }
DEVICE void pin(const char *&x) { asm volatile("" : "+l"(x)); }

/* Whole warpgroup. At most PENDING of the youngest groups still run afterwards. d belongs to a group that has finished.
 * [wgmma.wait_group] */
template <int PENDING, int N> DEVICE void wgmma_wait_group(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    pin(d);
}

/* c, or NaN in each half where x has NaN or inf. c is 0 or NaN. [fma] */
template <class T> __device__ u32 zeros_x2(u32 x, u32 c);
template <> DEVICE u32 zeros_x2<bf16>(u32 x, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0), "r"(c));
    return d;
}
template <> DEVICE u32 zeros_x2<fp16>(u32 x, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0), "r"(c));
    return d;
}

/* Any thread: has the phase of the mbarrier ended? [mbarrier.test_wait] */
DEVICE bool mbarrier_test(u64 *barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;}"
                 : "=r"(done)
                 : "r"(smem_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}

/* Any thread. Everything that x comes from is computed before the next wgmma_wait_group. NOTE: ptxas moves arithmetic
 * behind such a wait, although the arithmetic should hide the product. ptxas moves no store. The store here never
 * happens: no sum of exponentials, and no number of tiles, has these bits. Other sums are of fast math, without
 * denormals. ptxas must not find that out. From the condition `x < 0` it did, and dropped the store. [st] */
DEVICE void settle(float x, void *shared) {
    asm volatile("{.reg .pred never; .reg .b32 bits; mov.b32 bits, %0; setp.eq.s32 never, bits, 0x80000001;"
                 "@never st.shared.f32 [%1], %0;}" ::"f"(x),
                 "r"(smem_address(shared))
                 : "memory");
}

/* Any thread. 64 bits describe an operand in shared memory. The low word (start, leading byte offset) differs from
 * product to product, so kernels keep it as a number and add steps. The high word (stride byte offset, swizzle) is
 * constant. [Matrix Descriptor Format]
 *
 *   swizzled rows of ROW_BYTES (128, 64 or 32), groups of 8 rows back to back:
 *   contraction along the row ("K-major"):     a step of 16 is 32 bytes, the leading offset is not used
 *   contraction along the rows ("MN-major"):   a step of 16 is 16 rows, the leading offset leads to the next ROW_BYTES
 *                                              of columns */
DEVICE u32 matrix_descriptor(u32 address, u32 leading_bytes) {
    return (address & 0x3ffff) >> 4 | leading_bytes >> 4 << 16; /* without the CTA's rank in its cluster */
}
DEVICE constexpr u32 matrix_descriptor_high(int row_bytes, int group_bytes) {
    return (u32)group_bytes >> 4 | (row_bytes == 128 ? 1u : row_bytes == 64 ? 2u : 3u) << 30;
}
DEVICE constexpr u32 matrix_descriptor_high(int row_bytes) { return matrix_descriptor_high(row_bytes, 8 * row_bytes); }
DEVICE constexpr u32 matrix_descriptor_bytes(int bytes) { return (u32)bytes >> 4; }

/* Lists of registers for the instruction text (R..) and for the operands (D..). */
#define R_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define R_24 R_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define R_32                                                                                                     \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
    "%29,%30,%31"
#define R_40 R_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define R_48 R_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define R_56 R_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define R_64 R_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define R_96                                                                                                         \
    R_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
         "%90,%91,%92,%93,%94,%95"
#define R_128                                                                                                     \
    R_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116," \
         "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define R_80  R_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define R_112 R_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define D_8(i)                                                                                                  \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define D_16  D_8(0), D_8(8)
#define D_24  D_16, D_8(16)
#define D_32  D_8(0), D_8(8), D_8(16), D_8(24)
#define D_40  D_32, D_8(32)
#define D_48  D_32, D_8(32), D_8(40)
#define D_56  D_48, D_8(48)
#define D_64  D_56, D_8(56)
#define D_80  D_64, D_8(64), D_8(72)
#define D_96  D_64, D_8(64), D_8(72), D_8(80), D_8(88)
#define D_112 D_96, D_8(96), D_8(104)
#define D_128 D_96, D_8(96), D_8(104), D_8(112), D_8(120)

/* Whole warpgroup. [wgmma.mma_async]
 *
 * ss   D = A B + (accumulate ? D : 0). A [64, 16] and B [N, 16] are in shared memory, both K-major. With B_ACROSS, B is
 *      [16, N], MN-major. With A_ACROSS, A is [16, 64], MN-major.
 * rs_along  rs with B [N, 16] K-major, D = A B + (accumulate ? D : 0)
 * rs   D += A B. A [64, 16] is in registers, B [16, N] in shared memory, MN-major. Register 0 of A holds the pair in
 *      row l / 4, columns 2 (l % 4) + {0, 1}. Register 1 has row + 8, register 2 columns + 8, register 3 both.
 *
 * ss_4 and rs_4 are four such products, one after the other. The next product's A and B begin A_STEP and B_STEP behind
 * (matrix_descriptor_bytes), and its registers of A follow. The first product adds to D if accumulate, and the others
 * always do. NOTE: each statement has all registers of D as operands. So NVRTC takes less time for one statement with
 * four products than for four statements (measurements/forward.md). */
template <int N, class T> struct wgmma;

/* Product i of four, with the steps as numbers of operands. */
#define WGMMA_SS_OF_4(N, TYPE, REGS, R0, R1, R3, R4, R5, R6, R7, R8, R9, i, ACC)                             \
    "add.u32 low, %" #R0 ", %" #R7 " * " #i ";\n"                                                            \
    "mov.b64 a, {low, %" #R3 "};\n"                                                                          \
    "add.u32 low, %" #R1 ", %" #R8 " * " #i ";\n"                                                            \
    "mov.b64 b, {low, %" #R4 "};\n"                                                                          \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" R_##REGS "}, a, b, " #ACC ", %" #R9 \
                                                                                  ", 1, %" #R6 ", %" #R5 ";\n"
#define WGMMA_RS_OF_4(N, TYPE, REGS, A0, A1, A2, A3, R16, R17, R18, R19, i)       \
    "add.u32 low, %" #R16 ", %" #R18 " * " #i ";\n"                               \
    "mov.b64 b, {low, %" #R17 "};\n"                                              \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" R_##REGS \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, 1, %" #R19 ", 1, 1;\n"

#define WGMMA(N, T, TYPE, REGS, R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10, R11, R12, R13, R14, R15, R16, R17, R18, \
              R19)                                                                                                   \
    template <> struct wgmma<N, T> {                                                                                 \
        template <u32 A_HIGH, u32 B_HIGH, int B_ACROSS = 0, int A_ACROSS = 0, int SIGN = 1>                          \
        static DEVICE void ss(float (&d)[REGS], u32 a, u32 b, int accumulate) {                                      \
            asm volatile("{.reg .pred acc; .reg .b64 a, b;\n"                                                        \
                         "setp.ne.b32 acc, %" #R2 ", 0;\n"                                                           \
                         "mov.b64 a, {%" #R0 ", %" #R3 "};\n"                                                        \
                         "mov.b64 b, {%" #R1 ", %" #R4 "};\n"                                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" R_##REGS               \
                         "}, a, b, acc, %" #R7 ", 1, %" #R6 ", %" #R5 ";}"                                           \
                         : D_##REGS                                                                                  \
                         : "r"(a), "r"(b), "r"(accumulate), "n"(A_HIGH), "n"(B_HIGH), "n"(B_ACROSS), "n"(A_ACROSS),  \
                           "n"(SIGN));                                                                               \
        }                                                                                                            \
        template <u32 A_HIGH, u32 B_HIGH, u32 A_STEP, u32 B_STEP, int B_ACROSS = 0, int A_ACROSS = 0, int SIGN = 1>  \
        static DEVICE void ss_4(float (&d)[REGS], u32 a, u32 b, int accumulate) {                                    \
            asm volatile("{.reg .pred acc; .reg .b32 low; .reg .b64 a, b;\n"                                         \
                         "setp.ne.b32 acc, %" #R2                                                                    \
                         ", 0;\n" WGMMA_SS_OF_4(N, TYPE, REGS, R0, R1, R3, R4, R5, R6, R7, R8, R9, 0, acc)           \
                             WGMMA_SS_OF_4(N, TYPE, REGS, R0, R1, R3, R4, R5, R6, R7, R8, R9, 1, 1)                  \
                                 WGMMA_SS_OF_4(N, TYPE, REGS, R0, R1, R3, R4, R5, R6, R7, R8, R9, 2, 1)              \
                                     WGMMA_SS_OF_4(N, TYPE, REGS, R0, R1, R3, R4, R5, R6, R7, R8, R9, 3, 1) "}"      \
                         : D_##REGS                                                                                  \
                         : "r"(a), "r"(b), "r"(accumulate), "n"(A_HIGH), "n"(B_HIGH), "n"(B_ACROSS), "n"(A_ACROSS),  \
                           "n"(A_STEP), "n"(B_STEP), "n"(SIGN));                                                     \
        }                                                                                                            \
        template <u32 B_HIGH> static DEVICE void rs(float (&d)[REGS], const u32 *a, u32 b) {                         \
            asm volatile("{.reg .b64 b;\n"                                                                           \
                         "mov.b64 b, {%" #R4 ", %" #R5 "};\n"                                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" R_##REGS               \
                         "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, b, 1, 1, 1, 1;}"                              \
                         : D_##REGS                                                                                  \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(B_HIGH));                         \
        }                                                                                                            \
        template <u32 B_HIGH, u32 B_STEP, int SIGN = 1>                                                              \
        static DEVICE void rs_4(float (&d)[REGS], const u32 *a, u32 b) {                                             \
            asm volatile(                                                                                            \
                "{.reg .b32 low; .reg .b64 b;\n" WGMMA_RS_OF_4(N, TYPE, REGS, R0, R1, R2, R3, R16, R17, R18, R19, 0) \
                    WGMMA_RS_OF_4(N, TYPE, REGS, R4, R5, R6, R7, R16, R17, R18, R19, 1)                              \
                        WGMMA_RS_OF_4(N, TYPE, REGS, R8, R9, R10, R11, R16, R17, R18, R19, 2)                        \
                            WGMMA_RS_OF_4(N, TYPE, REGS, R12, R13, R14, R15, R16, R17, R18, R19, 3) "}"              \
                : D_##REGS                                                                                           \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), \
                  "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(b),         \
                  "n"(B_HIGH), "n"(B_STEP), "n"(SIGN));                                                              \
        }                                                                                                            \
        template <u32 B_HIGH> static DEVICE void rs_along(float (&d)[REGS], const u32 *a, u32 b, int accumulate) {   \
            asm volatile("{.reg .pred acc; .reg .b64 b;\n"                                                           \
                         "setp.ne.b32 acc, %" #R6 ", 0;\n"                                                           \
                         "mov.b64 b, {%" #R4 ", %" #R5 "};\n"                                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" R_##REGS               \
                         "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, b, acc, 1, 1, 0;}"                            \
                         : D_##REGS                                                                                  \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(B_HIGH), "r"(accumulate));        \
        }                                                                                                            \
    };
/* Each of the two types in a kernel of its own. */
#if defined(BF16) && BF16
#define WGMMA_16(N, REGS, ...) WGMMA(N, bf16, "bf16", REGS, __VA_ARGS__)
#else
#define WGMMA_16(N, REGS, ...) WGMMA(N, fp16, "f16", REGS, __VA_ARGS__)
#endif

WGMMA_16(32, 16, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35)
WGMMA_16(48, 24, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43)
WGMMA_16(64, 32, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51)
WGMMA_16(80, 40, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59)
WGMMA_16(96, 48, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67)
WGMMA_16(112, 56, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75)
WGMMA_16(128, 64, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83)
WGMMA_16(160, 80, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99)
WGMMA_16(192, 96, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115)
WGMMA_16(256, 128, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145, 146, 147)

#undef WGMMA_16
#undef WGMMA

/* Whole warpgroup. Elements of 8 bits: both matrices are K-major, always. [wgmma.mma_async]
 *
 * ss   D = A B + (accumulate ? D : 0). A [64, 32] and B [N, 32] are in shared memory.
 * rs   The same, but A [64, 32] is in registers. Register 0 of A holds row l / 4, columns 4 (l % 4) + {0, 1, 2, 3}.
 *      Register 1 has row + 8, register 2 columns + 16, register 3 both. */
#define WGMMA_E4M3(N, REGS, R0, R1, R2, R3, R4, R5, R6)                                                               \
    template <> struct wgmma<N, e4m3> {                                                                               \
        template <u32 A_HIGH, u32 B_HIGH> static DEVICE void ss(float (&d)[REGS], u32 a, u32 b, int accumulate) {     \
            asm volatile("{.reg .pred acc; .reg .b64 a, b;\n"                                                         \
                         "setp.ne.b32 acc, %" #R2 ", 0;\n"                                                            \
                         "mov.b64 a, {%" #R0 ", %" #R3 "};\n"                                                         \
                         "mov.b64 b, {%" #R1 ", %" #R4 "};\n"                                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" R_##REGS "}, a, b, acc, 1, 1;}" \
                         : D_##REGS                                                                                   \
                         : "r"(a), "r"(b), "r"(accumulate), "n"(A_HIGH), "n"(B_HIGH));                                \
        }                                                                                                             \
        template <u32 B_HIGH> static DEVICE void rs(float (&d)[REGS], const u32 *a, u32 b, int accumulate) {          \
            asm volatile("{.reg .pred acc; .reg .b64 b;\n"                                                            \
                         "setp.ne.b32 acc, %" #R6 ", 0;\n"                                                            \
                         "mov.b64 b, {%" #R4 ", %" #R5 "};\n"                                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" R_##REGS                        \
                         "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, b, acc, 1, 1;}"                                \
                         : D_##REGS                                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(B_HIGH), "r"(accumulate));         \
        }                                                                                                             \
    };

WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_E4M3(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_E4M3(160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA_E4M3(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_E4M3(224, 112, 112, 113, 114, 115, 116, 117, 118)
WGMMA_E4M3(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef WGMMA_E4M3

#endif
