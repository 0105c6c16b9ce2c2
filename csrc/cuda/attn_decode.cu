/* The kernel computes attention of few queries over long caches:
 *
 *   O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row
 *   q [b, len_q, h, d]    k, v [caches, rows, h_kv, d] or [pages, page_size, h_kv, d]    o like q    lse [b, h, len_q]
 *
 * Reading the caches once decides the time, so every part of the kernel serves the stream of bytes. The rows of one
 * tile are the len_q queries times the g query heads that share a key head. Keys are read for all these rows
 * together. A *team* of WARPS_Q warps has 16 rows per warp. Each team walks over keys of its own with a ring of its
 * own. Teams never wait for each other.
 *
 *   cp.async, one row of a key or value = d 2 bytes from anywhere: a page holds any number of keys
 *      │
 *      ▼  ring of SLOTS slots of 16 WARPS_Q keys:  K0 V0 K1 V1 K2 ...      SLOTS - 1 on their way, one in use
 *   team: S = Q K^T (mma) ─► softmax ─► P ─► O += P V                      in registers
 *      │
 *      ▼  end of the part: teams are merged in shared memory
 *   whole head ─► o, lse             part of a head ─► partial_o ─► the last CTA to come merges all parts in order
 *
 * Split-KV: all key tiles of the batch lie end to end and are cut into equal shares, one for each group of CTAs. The
 * CTAs read the lengths themselves. The host therefore need not know the lengths, and a captured graph stays right
 * while the lengths grow. Where there are few heads, thread block clusters take the place of CTAs on Hopper. The CTAs
 * of a cluster merge their results in their shared memory.
 *
 * With FLEX a user's functions change and hide scores (apply_mods of attn_decode_softmax.cuh).
 *
 * Specification: ../cpu/reference.c. Design and limits: decode.md. Measurements: measurements/decode.md. */
#include "attn_decode_params.h"
#include "ptx_cluster.cuh"

/* ---- parameters: one row of tiles.def -------------------------------------------------------------------------- */

#if !defined(HEAD_DIM) || !defined(WARPS_Q) || !defined(TEAMS) || !defined(SLOTS) || !defined(CTAS)
#error "tiles: HEAD_DIM columns, TEAMS of WARPS_Q warps of 16 rows, SLOTS of a team's ring, CTAS on an SM"
#endif
#if !defined(BF16) || !defined(HOPPER)
#error "variant: BF16, or fp16 without; HOPPER, or GPUs before Hopper without: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_decode
#endif

#ifndef FLEX
#define FLEX 0
#endif
#if FLEX
#include "flex.cuh"
typedef with_mods<fa_attn_decode_params> params; /* with a user's functions, without a block mask */
#else
typedef fa_attn_decode_params params;
#endif

constexpr int WARPS = WARPS_Q * TEAMS, THREADS = 32 * WARPS;
constexpr int BLOCK_Q = 16 * WARPS_Q;                             /* rows of a tile */
constexpr int WARP_KEYS = FA_DECODE_WARP_KEYS(HEAD_DIM, WARPS_Q); /* keys of a slot that one warp loads */
constexpr int TEAM_KEYS = WARP_KEYS * WARPS_Q;                    /* keys of a slot */
constexpr int BLOCK_KV = TEAM_KEYS * TEAMS;
/* A row has PIECES pieces of 16 bytes. */
constexpr int PIECES = HEAD_DIM * element::BYTES / 16, ROW_BYTES = 16 * PIECES;
/* Clusters need Hopper. Where WARPS_Q is 1, shared memory has room for the slices of other CTAs beside the results of
 * the warps. */
constexpr bool HAS_CLUSTERS = HOPPER && WARPS_Q == 1;
constexpr bool Q_IN_REGISTERS = HEAD_DIM <= 128 && WARPS_Q <= 2;

static_assert(HEAD_DIM % 32 == 0, "rows of 16-byte pieces in groups of 4, which the swizzle permutes");
static_assert(4 * THREADS >= HEAD_DIM, "the CTA has a thread for each vector of a row");
static_assert(SLOTS >= 3, "one slot in use, a K and a V on their way");
static_assert(2 * (FA_DECODE_PAGE_STEPS - 2) >= SLOTS - 1, "the group with a step's page numbers has come");

constexpr bool PAGES_AHEAD = FA_DECODE_PAGES_AHEAD(HEAD_DIM);
static_assert(!PAGES_AHEAD || 32 / WARP_KEYS == FA_DECODE_PAGE_STEPS - 2, "the first asks are for the first steps");

#include "attn_decode_schedule.cuh"
#include "attn_decode_loads.cuh"
#include "attn_decode_append.cuh"
#include "attn_decode_softmax.cuh"
#include "attn_decode_merge.cuh"

/* ---- shared memory --------------------------------------------------------------------------------------------- */

struct shared_memory {
    union {
        alignas(128) element ring[TEAMS][SLOTS][TEAM_KEYS * HEAD_DIM];
        struct {
            warp_results warp; /* the results of the warps, between parts */
            slices from;       /* the slices that the CTAs of the cluster sent */
        };
        staged_parts parts; /* the parts of an item, to be merged */
    };
    alignas(128) element q[BLOCK_Q * HEAD_DIM];
    /* the page numbers of the next steps of each warp */
    int pages[PAGES_AHEAD ? WARPS * FA_DECODE_PAGE_STEPS * WARP_KEYS : 1];
    schedule work;
    int is_last;                /* true: this CTA wrote the last part of an item */
    alignas(8) u64 slices_came; /* mbarrier of one phase: all bytes of `from` have come */
};
static_assert(sizeof(shared_memory) <= FA_DECODE_SHARED_BYTES(HEAD_DIM, WARPS_Q, TEAMS, SLOTS),
              "what the host asks for");

/* ---- one piece ------------------------------------------------------------------------------------------------- */

DEVICE void team_sync(int team) {
    if (WARPS_Q == 1)
        __syncwarp();
    else if (TEAMS == 1)
        __syncthreads();
    else
        bar_sync(1 + team, 32 * WARPS_Q);
}

/* Walks over the key tiles [x.first, x.last) of t. Leaves O, m and l of every warp in shared memory. The whole CTA
 * calls this function. */
DEVICE void attend(const params &p, shared_memory &s, const item &t, piece &x, int head) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / WARPS_Q, warp_q = warp % WARPS_Q;
    const u32 ring = smem_address(s.ring[team]);
    constexpr u32 SLOT_BYTES = TEAM_KEYS * HEAD_DIM * element::BYTES;

    walk c = {nullptr, (u32)t.b_idx, (u32)t.s.kv_row, t.keys.begin, t.keys.end};
    if (p.cache_batch_idx) c.cache_row = clamp(p.cache_batch_idx[t.b_idx], 0, p.num_caches - 1);
    if (p.block_table)
        c.pages = p.block_table + c.cache_row * p.table_stride;
    else if (p.cu_seqlens_k)
        c.cache_row = 0;
    const bool leaves_first = s.work.w.leaves_first && t.s.q_tiles == 1; /* several tiles read each key again */
    const u64 l2_policy = leaves_first ? l2_evict_first() : l2_evict_normal();
    const tile_walk keys = t.keys;

    /* Loads run SLOTS - 1 slots ahead. Loads of K and V alternate, and `load_step` counts their pairs. */
    const u32 k_head = head * p.k.stride_h, v_head = head * p.v.stride_h;
    const int steps = x.last - x.first, begin = (t.keys.begin / BLOCK_KV + x.first) * BLOCK_KV;
    const int first_key = begin + team * TEAM_KEYS;
    loader now, next;
    int load_step = 0, load_slot = 0;
    bool loads_q = !p.rotary_cos; /* Q is part of the first cp.async group */
    const int lane_key = lane % WARP_KEYS;
    auto page_of = [&](int step) -> int & {
        return s.pages[PAGES_AHEAD ? (warp * FA_DECODE_PAGE_STEPS + step % FA_DECODE_PAGE_STEPS) * WARP_KEYS + lane_key
                                   : 0];
    };
    auto first_key_of = [&](int step) { return first_key + step * BLOCK_KV + WARP_KEYS * warp_q; };
    auto ask = [&](int step) { ask_for_page(p, c, first_key_of(step) + lane_key, page_of(step)); };
    if (PAGES_AHEAD && c.pages) {
        ask(lane / WARP_KEYS);
        if (lane < WARP_KEYS) ask(32 / WARP_KEYS);
        cp_async_wait_all();
        __syncwarp();
    }
    next = look_up(p, c, first_key_of(0), page_of(0));
    auto load_k = [&]() {
        if (load_step < steps) {
            now = next;
            if (c.pages) now.page = min(now.page, (u32)p.num_pages - 1); /* the table may hold any number */
            load(p.k, now, k_head, ring + load_slot * SLOT_BYTES + warp_q * WARP_KEYS * HEAD_DIM * element::BYTES, p.d,
                 l2_policy);
            next = look_up(p, c, first_key_of(load_step + 1), page_of(load_step + 1));
            if (PAGES_AHEAD && c.pages && lane < WARP_KEYS) ask(load_step + FA_DECODE_PAGE_STEPS - 1);
        }
        if (loads_q) load_queries(p, smem_address(s.q), t, head);
        loads_q = false;
        cp_async_commit_group();
        load_slot = load_slot + 1 == SLOTS ? 0 : load_slot + 1;
    };
    auto load_v = [&]() {
        if (load_step < steps)
            load(p.v, now, v_head, ring + load_slot * SLOT_BYTES + warp_q * WARP_KEYS * HEAD_DIM * element::BYTES, p.d,
                 l2_policy);
        cp_async_commit_group();
        load_step++;
        load_slot = load_slot + 1 == SLOTS ? 0 : load_slot + 1;
    };

    /* New keys of this part are written before the loads ask for the new keys. The append comes after the first
     * loads, unless the first loads ask for new keys. */
    const new_keys fresh = new_keys_of(p, t, x, begin, begin + steps * BLOCK_KV);
    const bool are_asked_for_first = fresh.first < begin + SLOTS / 2 * BLOCK_KV;
    if (fresh.first < fresh.last && are_asked_for_first) {
        append(p, c, t, head, fresh);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < SLOTS - 1; i++) {
        if (i % 2 == 0)
            load_k();
        else
            load_v();
    }
    if (fresh.first < fresh.last && !are_asked_for_first) append(p, c, t, head, fresh);
    if (p.rotary_cos) load_turned_queries(p, s.q, t, head);
    count_parts(p, s.work.w, t, x);

    softmax_rows stats = {{-INF, -INF}, {0, 0}, {0, 0}};
    float o[GROUPS_O][4];
#pragma unroll
    for (int n = 0; n < GROUPS_O; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = 0;

    /* These are the lane's addresses for ldmatrix: Q as operand A, K as operand B, and V as operand B with keys
     * along the rows. */
    const u32 q_row = 16 * warp_q + lane % 16, q_low = swizzle(q_row) ^ lane / 16;
    const u32 k_row = lane / 16 * 8 + lane % 8, k_low = swizzle(k_row) ^ lane / 8 % 2;
    const u32 v_row = lane % 16, v_low = swizzle(v_row) ^ lane / 16;
    const u32 q_base = smem_address(s.q) + q_row * ROW_BYTES;
    u32 q_regs[Q_IN_REGISTERS ? HEAD_DIM / 16 : 1][4];

    cp_async_wait_group<SLOTS - 2>();
    /* Behind this barrier all threads' shares of Q and of the new keys are visible. */
    __syncthreads();
    if (Q_IN_REGISTERS)
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            ldmatrix_x4(q_regs[Q_IN_REGISTERS ? k : 0], even_piece_address(q_base, q_low, 2 * k));

    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        /* Wait for K. The team has read the slot before K, so that slot is refilled. */
        cp_async_wait_group<SLOTS - 2>();
        team_sync(team);
        if ((SLOTS - 1) % 2 == 0)
            load_k();
        else
            load_v();
        /* S = Q K^T */
        const u32 k_base = ring + slot * SLOT_BYTES + k_row * ROW_BYTES;
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        float scores[GROUPS_S][4];
#pragma unroll
        for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] = 0;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            u32 a[4];
            if (Q_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[i] = q_regs[Q_IN_REGISTERS ? k : 0][i];
            } else {
                ldmatrix_x4(a, even_piece_address(q_base, q_low, 2 * k));
            }
#pragma unroll
            for (int n = 0; n < GROUPS_S / 2; n++) {
                u32 b[4];
                ldmatrix_x4(b, even_piece_address(k_base + 16 * n * ROW_BYTES, k_low, 2 * k));
                mma_m16n8k16<element>(scores[2 * n], a, b[0], b[1]);
                mma_m16n8k16<element>(scores[2 * n + 1], a, b[2], b[3]);
            }
        }
        /* softmax */
        const int key = first_key + step * BLOCK_KV;
#if FLEX
        const u32 seen = apply_mods(scores, p, t, head, 16 * warp_q + lane / 4, key + 2 * (lane % 4));
#else
        const bool is_masked = is_partial<TEAM_KEYS>(key, keys.full_begin, keys.full_end);
        if (p.changes_scores || is_masked) {
            const int row = 16 * warp_q + lane / 4, column = key + 2 * (lane % 4);
            const query_row rows[2] = {row_at(p, t, head, row), row_at(p, t, head, row + 8)};
            if (p.changes_scores) change_scores(scores, p, rows, column);
            if (is_masked) mask_scores(scores, rows, column);
        }
#endif
        softmax_step(scores, o, stats, p);
        /* Wait for V, then refill K's slot. */
        cp_async_wait_group<SLOTS - 2>();
        team_sync(team);
        if ((SLOTS - 1) % 2 == 0)
            load_v();
        else
            load_k();
        /* O += P V */
        const u32 v_base = ring + slot * SLOT_BYTES + v_row * ROW_BYTES;
        const element *v_smem = s.ring[team][slot];
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        /* Do some rows see keys that other rows do not see? A weight of zero times NaN would be NaN. */
#if FLEX
        if (__any_sync(0xffffffffu, seen != ALL_PAIRS) && has_nan_or_inf(v_smem)) {
            accumulate_seen(o, scores, v_smem, seen_pairs{seen});
            continue;
        }
#else
        const bool is_partial =
            max(key, t.keys.begin) < keys.full_begin || min(key + TEAM_KEYS, t.keys.end) > keys.full_end;
        if (is_partial && has_nan_or_inf(v_smem)) {
            const int row = 16 * warp_q + lane / 4;
            const query_row rows[2] = {row_at(p, t, head, row), row_at(p, t, head, row + 8)};
            accumulate_seen(o, scores, v_smem, seen_keys{rows, key});
            continue;
        }
#endif
#pragma unroll
        for (int k = 0; k < GROUPS_S / 2; k++) {
            const u32 a[4] = {cvt_x2<element>(scores[2 * k][0], scores[2 * k][1]),
                              cvt_x2<element>(scores[2 * k][2], scores[2 * k][3]),
                              cvt_x2<element>(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                              cvt_x2<element>(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
            for (int n = 0; n < GROUPS_O / 2; n++) {
                u32 b[4];
                ldmatrix_x4_trans(b, even_piece_address(v_base + 16 * k * ROW_BYTES, v_low, 2 * n));
                mma_m16n8k16<element>(o[2 * n], a, b[0], b[1]);
                mma_m16n8k16<element>(o[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    /* The ring is free when no warp reads the ring and no copy is on its way. */
    cp_async_wait_group<0>();
    __syncthreads();
    if (HAS_CLUSTERS && p.cluster_bits > 0) cluster_arrive_relaxed();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = stats.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int row = lane / 4 + 8 * r;
        if (lane % 4 == 0) {
            s.warp.stats[warp][row][0] = stats.max[r] == -INF ? -INF : stats.max[r] * p.scale_log2 + element::HEADROOM;
            s.warp.stats[warp][row][1] = sum;
        }
#pragma unroll
        for (int n = 0; n < GROUPS_O; n++)
            *(float2 *)&s.warp.o[warp][row][8 * n + 2 * (lane % 4)] = make_float2(o[n][2 * r], o[n][2 * r + 1]);
    }
    __syncthreads();
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const __grid_constant__ params p) {
    extern __shared__ __align__(128) char memory[];
    shared_memory &s = *reinterpret_cast<shared_memory *>(memory);
    if (HOPPER) griddepcontrol_wait(); /* waits for earlier work of the stream, which elsewhere has ended */
    if (p.cu_seqlens_q) fill_unowned_rows(p);
    const bool is_cluster = HAS_CLUSTERS && p.cluster_bits > 0;
    piece x;
    if (is_cluster) {
        if (threadIdx.x == 0) mbarrier_init(&s.slices_came, 1), mbarrier_init_fence();
        find_part(p, s.work, x, blockIdx.z, blockIdx.x);
    } else {
        find_share(p, s.work, blockIdx.y);
    }

#pragma unroll 1
    for (int position = s.work.w.first; position < s.work.w.last;) {
        if (is_cluster || piece_at(p, s.work.w, s.work.t, position, x)) {
            const int head = is_cluster ? blockIdx.y : s.work.t.head_block * p.lanes + blockIdx.x;
            attend(p, s, s.work.t, x, head);
            if (is_cluster) {
                finish_in_cluster(p, s.warp, s.from, &s.slices_came, s.is_last, s.work.t, x, head);
                return;
            }
            finish_piece(p, s.warp, s.work.t, x, head);
            if (x.parts > 1 && is_last_part(p, s.is_last, x, counter_of(p, s.work.t, x, head)))
                merge_parts(p, s.parts, s.work.t, x, head);
            position = s.work.t.begin + x.last;
        } else {
            position = s.work.t.begin + s.work.t.tiles;
        }
        __syncthreads(); /* shared memory is free again */
        if (position >= s.work.t.begin + s.work.t.tiles && position < s.work.w.last) step_item(p, s.work);
    }
}
