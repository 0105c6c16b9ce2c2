/* An emulation of ptx_sm90.cuh and ptx_cluster.cuh for one CTA: mbarriers, TMA and wgmma. cuda_emulation.h has the
 * rest, and is included before.
 *
 * What the hardware may do at any time happens at random times here. A copy of TMA happens some time after its issue,
 * and until then its destination holds NaN. A product of a warp runs when its last lane has issued it, or only at the
 * wait for it. A warp or a warpgroup may be slow. So a missing wait gives wrong numbers, often but not always.
 * Registers of A are read at the issue. The warps of a warpgroup must commit and wait for the same products. Fences are
 * not emulated. */
#ifndef HOPPER_EMULATION_H
#define HOPPER_EMULATION_H

#define FA_PTX_SM90_CUH
#include "cuda/tensor_map.h"
#include "expect.h"
#include <deque>
#include <functional>
#include <random>
#include <type_traits>
#include <vector>

extern "C" {
#include "emulate_cuda.h"
#include "emulate_products.h"
}

static std::mt19937 random_bits(1);

/* How this run behaves. */
static struct {
    bool products_are_late, copies_are_immediate;
    unsigned copy_pace;        /* a copy happens at one of so many turns of threads that wait for mbarriers */
    int slow_warp, slow_group; /* -1: none */
} manner;

/* Whole warp, at a wait. A slow warp stands still for a while. */
static void stand_still() {
    const int warp = (int)threadIdx.x / 32;
    if (threadIdx.x % 32 || (warp != manner.slow_warp && warp / 4 != manner.slow_group) || random_bits() % 3 == 0)
        return;
    for (unsigned i = random_bits() % 600; i > 0; i--) emulated_yield(true);
}

/* Single lanes of a slow warp lag behind the others, after a wait and around an election. */
static void lag() {
    const int warp = (int)threadIdx.x / 32;
    if ((warp != manner.slow_warp && warp / 4 != manner.slow_group) || random_bits() % 32) return;
    for (unsigned i = random_bits() % 600; i > 0; i--) emulated_yield(true);
}

/* ---- mbarriers --------------------------------------------------------------------------------------------------- */

struct emulated_mbarrier {
    int count, pending;
    long bytes; /* announced and not there */
    unsigned phase;
    emulated_threads waiters;

    void look() {
        EXPECT(pending >= 0);
        if (pending == 0 && bytes == 0) phase++, pending = count, emulated_wake(&waiters);
    }
};
static emulated_mbarrier mbarriers[(228 << 10) / 8];
static emulated_mbarrier &mbarrier_at(const u64 *barrier) { return mbarriers[smem_address(barrier) / 8]; }

static void init_mbarrier(u64 *barrier, u32 count) { mbarrier_at(barrier) = {(int)count, (int)count, 0, 0, {}}; }
static void mbarrier_arrive(u64 *barrier) { mbarrier_at(barrier).pending--, mbarrier_at(barrier).look(); }
static void announce(u64 *barrier, u32 bytes) { mbarrier_at(barrier).bytes += bytes, mbarrier_arrive(barrier); }
static void complete(u64 *barrier, u32 bytes) { mbarrier_at(barrier).bytes -= bytes, mbarrier_at(barrier).look(); }

/* ---- copies ------------------------------------------------------------------------------------------------------ */

struct emulated_copy {
    unsigned thread;
    bool is_load, is_committed;
    std::function<void()> run;
};
static std::vector<emulated_copy> copies; /* on their way */

static void run_copy(size_t i) {
    const std::function<void()> run = copies[i].run;
    copies.erase(copies.begin() + (long)i);
    run();
}
/* Stores of one thread keep their order. Loads may overtake others. */
static void run_some_copy() {
    size_t i = random_bits() % copies.size();
    for (size_t k = 0; k < i && !copies[i].is_load; k++)
        if (!copies[k].is_load && copies[k].thread == copies[i].thread) i = k;
    run_copy(i);
}
/* So many turns pass. Returns whether copies were on their way. */
static bool pass_turns(unsigned turns) {
    static unsigned num_left; /* turns up to the next copy */
    if (copies.empty()) return false;
    while (!copies.empty() && turns >= num_left) {
        turns -= num_left;
        num_left = 1 + std::geometric_distribution<unsigned>(1. / manner.copy_pace)(random_bits);
        run_some_copy();
    }
    num_left -= copies.empty() ? 0 : turns;
    return true;
}
static const bool copies_pass_turns = (emulated_background = pass_turns, true);
static void add_copy(bool is_load, const std::function<void()> &run) {
    copies.push_back({threadIdx.x, is_load, false, run});
    if (manner.copies_are_immediate) run_copy(copies.size() - 1);
}
static void wait_mbarrier(u64 *barrier, u32 parity) {
    stand_still();
    while (mbarrier_at(barrier).phase % 2 == parity) emulated_wait(&mbarrier_at(barrier).waiters);
    lag();
}

/* Other threads may run before, so lanes of a warp may get different answers. */
static bool mbarrier_test(u64 *barrier, u32 parity) {
    pass_turns(1);
    if (random_bits() % 4 == 0) emulated_yield(true);
    return mbarrier_at(barrier).phase % 2 != parity;
}

/* In place of the functions of cuda_emulation.h, which are for a cluster whose data arrives at once. */
#define mbarrier_init             init_mbarrier
#define mbarrier_arrive_expect_tx announce
#define mbarrier_wait             wait_mbarrier
constexpr u32 ARRIVING_LANES = 1;
static bool arrives_for_warp(u32 lane) { return lane == 0; }
constexpr u32 of_warps(u32 warps) { return warps; }
static void mbarrier_arrive_for_others(u64 *) {}

#if defined(SINGLE_KEYS) && SINGLE_KEYS
/* cp.async of a thread, which run together when it has arrived behind them. */
static std::vector<std::function<void()>> copies_of_thread[1024];
static void copy_16_later(u32 dst, const void *src, bool is_present) {
    EXPECT(dst % 16 == 0 && (uintptr_t)src % 16 == 0);
    copies_of_thread[threadIdx.x].push_back([=] {
        if (is_present)
            memcpy(memory + dst, src, 16);
        else
            memset(memory + dst, 0, 16);
    });
}
static void cp_async_mbarrier_arrive(u64 *barrier) {
    const auto before = copies_of_thread[threadIdx.x];
    copies_of_thread[threadIdx.x].clear();
    add_copy(true, [=] {
        for (const auto &run : before) run();
        mbarrier_arrive(barrier);
    });
}
#define cp_async_16 copy_16_later
#else
static void cp_async_mbarrier_arrive(u64 *) { abort(); }
#endif

/* Rows of 128 or of 64 bytes are swizzled by 16 bytes. */
static u32 swizzled(u32 at, u32 row_bytes) { return at ^ (at >> 7 & (row_bytes / 16 - 1)) << 4; }

#ifdef CACHE
constexpr bool HAS_CACHE = CACHE;
#else
constexpr bool HAS_CACHE = false;
#endif

/* fa_tensor_map holds a pointer to this: a tensor in boxes of swizzled rows. */
struct emulated_map {
    char *data;
    long row_bytes, head_bytes, sequence_bytes;
    int columns, rows, heads, sequences, box_rows, box_row_bytes, box_heads = 1, element_bytes = 2;

    bool has(int column, int row, int head, int sequence) const {
        return column >= 0 && column < columns && row >= 0 && row < rows && head >= 0 && head < heads &&
               sequence >= 0 && sequence < sequences;
    }
    /* Calls `move` with an element of the box in global and in shared memory. Global memory is NULL outside. */
    template <class mover> void each(u32 box, int column, int row, int head, int sequence, mover move) const {
        for (int x = 0; x < box_heads * box_rows; x++)
            for (int j = 0; j < box_row_bytes / element_bytes; j++) {
                const int i = row + x % box_rows, own_head = head + x / box_rows;
                const u32 at = box + (u32)(x * box_row_bytes + j * element_bytes);
                char *element = data + i * row_bytes + own_head * head_bytes + sequence * sequence_bytes;
                move(has(column + j, i, own_head, sequence) ? element + element_bytes * (column + j) : nullptr,
                     memory + swizzled(at, (u32)box_row_bytes));
            }
    }
    int box_bytes() const { return box_heads * box_rows * box_row_bytes; }
};
static const emulated_map &map_of(const fa_tensor_map *map) { return **(const emulated_map *const *)map->words; }

enum : u64 { L2_EVICT_FIRST, L2_EVICT_LAST };
static void prefetch_tensormap(const fa_tensor_map *) {}
static void cp_async_bulk_prefetch_tensor(...) {}
static void cp_async_bulk_tensor_load(void *dst, const fa_tensor_map *map, u64 *barrier, int c0, int c1, int c2, int c3,
                                      u64) {
    const emulated_map m = map_of(map);
    const u32 box = smem_address(dst);
    /* A box may lie outside the columns of a dense tensor. tensor_map.h says why not of a packed one. A box without a
     * used key of a cache lies behind the rows of a page. */
    const bool is_behind = HAS_CACHE && c1 == m.rows;
    EXPECT(box % (HAS_CACHE ? 8 * (u32)m.box_row_bytes : 1024) == 0);
    EXPECT(c0 >= 0 && m.has(VARLEN ? c0 : 0, is_behind ? 0 : c1, c2, c3));
    memset(dst, 0xff, (size_t)m.box_bytes());
    add_copy(true, [=] {
        const size_t bytes = (size_t)m.element_bytes;
        m.each(box, c0, c1, c2, c3,
               [=](const char *from, char *to) { from ? memcpy(to, from, bytes) : memset(to, 0, bytes); });
        complete(barrier, (u32)m.box_bytes());
    });
}

/* Pages of a cache whose keys are loaded whole, in groups of 8 keys and chunks of 128 bytes. A map's rows are groups,
 * and its box has box_rows of them. A box without a used key begins at the group `sequences`. */
static void cp_async_bulk_tensor_load(void *dst, const fa_tensor_map *map, u64 *barrier, int column, int row, int chunk,
                                      int group, int head, u64) {
    const emulated_map m = map_of(map);
    const int chunks = m.columns / 64, box_bytes = m.box_rows * chunks * 1024;
    const u32 box = smem_address(dst);
    EXPECT(box % 1024 == 0 && m.columns % 64 == 0 && m.box_row_bytes == 128 && m.element_bytes == 2);
    EXPECT(column == 0 && row == 0 && chunk == 0 && head >= 0 && head < m.heads);
    EXPECT(group >= 0 && (group < m.rows || group == m.sequences));
    memset(dst, 0xff, (size_t)box_bytes);
    add_copy(true, [=] {
        for (int i = 0; i < box_bytes; i += 16) {
            const int own_group = group + i / (1024 * chunks), own_chunk = i / 1024 % chunks, own_row = i / 128 % 8;
            const char *from =
                m.data + (own_group * 8L + own_row) * m.row_bytes + head * m.head_bytes + own_chunk * 128 + i % 128;
            char *to = memory + swizzled(box + (u32)i, 128);
            own_group < m.rows ? memcpy(to, from, 16) : memset(to, 0, 16);
        }
        complete(barrier, (u32)box_bytes);
    });
}
static void cp_async_bulk_tensor_store(const fa_tensor_map *map, const void *src, int c0, int c1, int c2, int c3) {
    const emulated_map m = map_of(map);
    const u32 box = smem_address(src);
    add_copy(false, [=] {
        const size_t bytes = (size_t)m.element_bytes;
        m.each(box, c0, c1, c2, c3, [=](char *to, const char *from) { to ? memcpy(to, from, bytes) : nullptr; });
    });
}
static void cp_async_bulk_load(void *dst, const void *src, u32 bytes, u64 *barrier) {
    memset(dst, 0xff, bytes);
    add_copy(true, [=] { memcpy(dst, src, bytes), complete(barrier, bytes); });
}
static void cp_async_bulk_store(float *dst, const float *src, u32 bytes) {
    add_copy(false, [=] { memcpy(dst, src, bytes); });
}
static void cp_reduce_async_bulk_add(float *dst, const float *src, u32 bytes) {
    add_copy(false, [=] {
        for (u32 i = 0; i < bytes / 4; i++) dst[i] += src[i];
    });
}
/* Not the first lane: a kernel may not rely on which lane it is. */
static bool elect_one() {
    __ballot_sync(0, true);
    lag();
    return threadIdx.x % 32 == 13;
}
static void cp_async_bulk_commit_group() {
    for (auto &copy : copies)
        if (copy.thread == threadIdx.x) copy.is_committed = true;
}
/* A thread waits for what it has committed itself. */
static void cp_async_bulk_wait_all() {
    for (size_t i = 0; i < copies.size();)
        if (!copies[i].is_load && copies[i].thread == threadIdx.x && copies[i].is_committed)
            run_copy(i);
        else
            i++;
}
static void cp_async_bulk_wait_all_read() { cp_async_bulk_wait_all(); }
static void fence_proxy_async() {}
static void fence_proxy_async_global() {}

/* ---- wgmma ------------------------------------------------------------------------------------------------------- */

/* A product that lanes of a warp have issued, and that has not been waited for. */
struct issued_product {
    emulated_product product;
    unsigned group;
    int num_lanes; /* that have issued it */
    emulated_lane lanes[32];

    void run() const { emulated_multiply(&product, lanes, memory, threadIdx.x % 128 / 32 * 16); }
};
/* Of each warp. num_removed: the number of products before those. Lanes have issued products and committed groups. */
static struct {
    std::deque<issued_product> products;
    unsigned num_removed, num_issued[32], num_groups[32];
} products_of[32];

/* The warps of a warpgroup commit products and wait for them together. So all warps must take the same steps. */
enum { COMMITS = -1 }; /* Other steps are the `pending` of a wait. */
static void step_together(int step) {
    static std::vector<int> steps_of_group[8];
    static size_t num_steps_of_warp[32];
    if (threadIdx.x % 32) return;
    std::vector<int> &steps = steps_of_group[threadIdx.x / 128];
    const size_t i = num_steps_of_warp[threadIdx.x / 32]++;
    if (i == steps.size()) steps.push_back(step);
    EXPECT(steps[i] == step);
}

/* A product runs when the last lane issues it, or at the wait. The lanes must issue the same products. */
static __attribute__((noinline)) void issue(const emulated_product &product, float *d, const u32 *a) {
    auto &warp = products_of[threadIdx.x / 32];
    const u32 lane = threadIdx.x % 32;
    const size_t i = warp.num_issued[lane]++ - warp.num_removed;
    EXPECT(i <= warp.products.size());
    if (i == warp.products.size()) warp.products.push_back({product, warp.num_groups[lane]});
    issued_product &x = warp.products[i];
    EXPECT(!memcmp(&x.product, &product, sizeof product) && x.group == warp.num_groups[lane]);
    x.lanes[lane].d = d;
    if (!product.a_is_shared) memcpy(x.lanes[lane].a, a, sizeof(u32) * 4 * (size_t)product.num_products);
    if (++x.num_lanes == 32 && !manner.products_are_late) x.run();
}
static void wgmma_fence() { asm volatile("" ::: "memory"); }
static void wgmma_commit_group() {
    step_together(COMMITS);
    products_of[threadIdx.x / 32].num_groups[threadIdx.x % 32]++;
}
template <class T, int N> static void pin(T (&d)[N]) { asm volatile("" ::"r"(&d) : "memory"); }
static void pin(int &) {}
static void pin(const char *&) {}
static __attribute__((noinline)) void wait_groups(size_t pending) {
    step_together((int)pending);
    stand_still();
    __syncwarp();
    auto &warp = products_of[threadIdx.x / 32];
    const u32 num_groups = warp.num_groups[threadIdx.x % 32];
    for (; !warp.products.empty() && warp.products[0].group + pending < num_groups; warp.num_removed++) {
        EXPECT(warp.products[0].num_lanes == 32);
        if (manner.products_are_late) warp.products[0].run();
        warp.products.pop_front();
    }
}
template <int PENDING, int N> static void wgmma_wait_group(float (&d)[N]) { wait_groups(PENDING), pin(d); }
static void settle(float, void *) {}

static u32 matrix_descriptor(u32 address, u32 leading_bytes) { return address >> 4 | leading_bytes >> 4 << 16; }
constexpr u32 matrix_descriptor_high(int row_bytes, int group_bytes) { return (u32)(group_bytes << 8 | row_bytes); }
constexpr u32 matrix_descriptor_high(int row_bytes) { return matrix_descriptor_high(row_bytes, 8 * row_bytes); }
constexpr emulated_matrix matrix_of(u32 descriptor, u32 high, u32 step) {
    return {descriptor, high & 0xff, high >> 8, step};
}
constexpr u32 matrix_descriptor_bytes(int bytes) { return (u32)bytes >> 4; }

/* NUM products, one after the other, with A in shared memory or in registers. */
template <int N, class T> struct wgmma {
    static constexpr int REGS = N / 2, FORMAT = std::is_same_v<T, bf16> ? EMULATED_BF16 : EMULATED_F16;

    template <int NUM, u32 A_HIGH, u32 B_HIGH, u32 A_STEP, u32 B_STEP, int B_ACROSS, int SIGN>
    static void issue_ss(float (&d)[REGS], u32 a, u32 b, int accumulate) {
        const emulated_matrix in_a = matrix_of(a, A_HIGH, A_STEP), in_b = matrix_of(b, B_HIGH, B_STEP);
        issue({FORMAT, N, NUM, accumulate != 0, SIGN, true, B_ACROSS, in_a, in_b}, d, nullptr);
        wgmma_fence();
    }
    template <int NUM, u32 B_HIGH, u32 B_STEP, int SIGN> static void issue_rs(float (&d)[REGS], const u32 *a, u32 b) {
        issue({FORMAT, N, NUM, true, SIGN, false, true, {}, matrix_of(b, B_HIGH, B_STEP)}, d, a);
        wgmma_fence();
    }

    template <u32 A_HIGH, u32 B_HIGH, int B_ACROSS = 0, int A_ACROSS = 0, int SIGN = 1>
    static void ss(float (&d)[REGS], u32 a, u32 b, int accumulate) {
        static_assert(!A_ACROSS, "what is emulated");
        issue_ss<1, A_HIGH, B_HIGH, 0, 0, B_ACROSS, SIGN>(d, a, b, accumulate);
    }
    template <u32 A_HIGH, u32 B_HIGH, u32 A_STEP, u32 B_STEP, int B_ACROSS = 0, int A_ACROSS = 0, int SIGN = 1>
    static void ss_4(float (&d)[REGS], u32 a, u32 b, int accumulate) {
        static_assert(!A_ACROSS, "what is emulated");
        issue_ss<4, A_HIGH, B_HIGH, A_STEP, B_STEP, B_ACROSS, SIGN>(d, a, b, accumulate);
    }
    template <u32 B_HIGH> static void rs(float (&d)[REGS], const u32 *a, u32 b) { issue_rs<1, B_HIGH, 0, 1>(d, a, b); }
    template <u32 B_HIGH, u32 B_STEP, int SIGN = 1> static void rs_4(float (&d)[REGS], const u32 *a, u32 b) {
        issue_rs<4, B_HIGH, B_STEP, SIGN>(d, a, b);
    }
};

static void store_matrices(u32 address, const u32 (&m)[4], bool is_transposed) {
    const char *rows = emulated_exchange(&address, sizeof address);
    const int across = (int)threadIdx.x % 32 / 4, along = 2 * ((int)threadIdx.x % 4);
    for (int i = 0; i < 8; i++) {
        const int row = is_transposed ? along + i % 2 : across, column = is_transposed ? across : along + i % 2;
        const u16 element = (u16)(m[i / 2] >> 16 * (i % 2));
        u32 at;
        memcpy(&at, rows + 64 * (8 * (i / 2) + row), sizeof at);
        memcpy(memory + at + 2 * column, &element, sizeof element);
    }
    __syncwarp();
}
static void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    store_matrices(address, {m0, m1, m2, m3}, false);
}
static void stmatrix_x4_trans(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    store_matrices(address, {m0, m1, m2, m3}, true);
}

/* ---- the rest ---------------------------------------------------------------------------------------------------- */

template <int N> static void setmaxnreg_dec() {}
template <int N> static void setmaxnreg_inc() {}
static u32 kept(u32 x) { return x; }
static float2 ld_shared_x2(const float *p) { return {p[0], p[1]}; }
static void *__cvta_shared_to_generic(u32 address) { return memory + address; }
static void __trap() { abort(); }
static void __threadfence() {}
static void __threadfence_block() {}
static unsigned atomicInc(unsigned *place, unsigned last) { return atom_inc_acq_rel(place, last); }
static unsigned __reduce_or_sync(unsigned, unsigned x) {
    const char *all = emulated_exchange(&x, sizeof x);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) memcpy(&x, all + 64 * lane, sizeof x), bits |= x;
    return bits;
}
#define __log2f log2f /* glibc declares this name. */
static int __float_as_int(float x) { return (int)fa_bits_of(x); }
static float max_nan(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
static int max_of_bits(int x, float y0, float y1, float y2, float y3) {
    for (float y : {y0, y1, y2, y3}) x = max(x, __float_as_int(y));
    return x;
}
template <class T> static u32 zeros_x2(u32 x, u32 c) {
    float a[2], b[2];
    unpack_x2<T>(x, a[0], a[1]), unpack_x2<T>(c, b[0], b[1]);
    return cvt_x2<T>(a[0] * 0 + b[0], a[1] * 0 + b[1]);
}
/* e5m2 is the upper half of fp16. Both roundings go to the nearest number. */
static u32 cvt_e5m2(float x) {
    const u32 bits = cvt<fp16>(fminf(fmaxf(x, -57344), 57344)).bits;
    return (bits + 0x7f + (bits >> 8 & 1)) >> 8;
}
static u32 cvt_e5m2_x2(float low, float high) { return cvt_e5m2(low) | cvt_e5m2(high) << 8; }
static float __uint_as_float(u32 x) { return fa_f32_of_bits(x); }
template <class T> static T __ldcg(const T *place) { return *place; }
template <class T> static T __ldg(const T *place) { return *place; }
template <class T> static void __stcg(T *place, T x) { *place = x; }

/* Of clusters, and of columns that are not emulated. */
static void cp_async_bulk_tensor_multicast(...) { abort(); }
static void mbarrier_wait_cluster(u64 *, u32) { abort(); }
static void mbarrier_arrive_remote_release(u64 *, u32) { abort(); }
static void st_async(int *, u64 *, int, u32) { abort(); }

#endif
