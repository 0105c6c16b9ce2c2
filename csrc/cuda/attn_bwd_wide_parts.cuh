/* Parts of attn_bwd_wide_sm90.cu that do not depend on how its warpgroups share the work: dQ to memory, and the warps
 * that feed. */
#ifndef FA_ATTN_BWD_WIDE_PARTS_CUH
#define FA_ATTN_BWD_WIDE_PARTS_CUH

#include "attn_bwd_scores.cuh"

static_assert(CTAS == 2 && KEYS == 64 && BLOCK_Q == 64, "one warpgroup's product, and dS small enough to exchange");
static_assert(CHUNKS == 3 || CHUNKS == 4, "each CTA makes one chunk of dQ's columns and half of what is left");

constexpr int DS_BYTES = BLOCK_Q * KEYS * element::BYTES, V_COLUMNS = V_CHUNKS * CHUNK;

/* One lane. Arrives at the barrier of both CTAs. */
DEVICE void arrive_in_both(u64 *barrier) {
    mbarrier_arrive(barrier);
    mbarrier_arrive_remote(barrier, cluster_rank() ^ 1);
}

/* Stores dS of this warp's 16 keys. A row of shared memory is a key, 64 queries long. */
DEVICE void store_ds_rows(const u32 (&dS)[P_REGS], u32 dst) {
    const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int g = 0; g < P_REGS / 4; g++)
        stmatrix_x4(dst + row * ROW_BYTES + (2 * g + lane / 16 ^ lane % 8) * 16, dS[4 * g], dS[4 * g + 1],
                    dS[4 * g + 2], dS[4 * g + 3]);
}

/* ---- dQ -------------------------------------------------------------------------------------------------------- */

/* Stores columns of this warp's 16 rows of dQ. Registers of x behind the first `columns` columns are not used. */
template <int FIRST, int N, int REGS>
DEVICE void store_dq_columns(const float (&dq)[REGS], const params &p, element::output *rows, int row, int end,
                             int column, int columns) {
    constexpr int PADDED = (N + 31) / 32 * 32;
    float x[PADDED / 2];
#pragma unroll
    for (int i = 0; i < PADDED / 2; i++) x[i] = i < N / 2 ? dq[FIRST / 2 + i] : 0;
    const float factors[2] = {p.scale, p.scale};
    store_rows(x, factors, rows + column, p.dq.stride_row, row, end, min(columns, p.d - column));
}

/* The place of a step among the words of four steps. open_turns writes the word of a step when the turn of the step
 * before the last has come, and hence when the step before that one has added. */
DEVICE int slot_of(const ring &r) { return 2 * r.parity + r.stage; }

/* Whole warpgroup. Waits for the dQ turn, then adds columns of a step's dQ.
 *
 * i, head_in_group   query tile and query head of the step; with mods the tile comes from open_turns
 * r                  place of the step in the rings of the dQ turns
 * place              the columns' place in the sums of a slab
 * column, rest       the first column, and the first column behind a whole chunk */
template <int REGS, class shared_memory>
DEVICE void add_dq(float (&dq)[REGS], const params &p, shared_memory &s, const tile &t, int i, int head_in_group,
                   const ring &r, int place, int column, int rest) {
    if (!p.dq.data) return;
#if FLEX
    mbarrier_wait(&s.turn_come[r.stage], r.parity);
    const int turn = uniform(s.words.turns[slot_of(r)]);
    const bool is_first = turn & FIRST_SHARE, is_last = turn & LAST_SHARE;
    i = turn >> 2;
#endif
    const long long slab = (long long)(t.slab_head + head_in_group) * p.num_slabs + t.slab + i;
    float *sums = p.dq_sums + slab * SLAB_FLOATS + place + threadIdx.x % 128 * 4;
#if !FLEX
    const bool is_first = i >= t.first_begin, is_last = i < t.last_end;
    mbarrier_wait(&s.turn_come[r.stage], r.parity);
#endif
    if (is_last) {
        if (!is_first) {
#pragma unroll
            for (int x = 0; x < REGS; x += 4) {
                const float4 sum = __ldcg((const float4 *)(sums + x * 128));
                dq[x] += sum.x, dq[x + 1] += sum.y, dq[x + 2] += sum.z, dq[x + 3] += sum.w;
            }
        }
        /* A row that sees no key, or only scores of -inf, gets zeros. The row's dS is zero, but K may hold
         * infinities. */
        const float *lse = p.stats + slab * (2 * BLOCK_Q) + threadIdx.x % 128 / 32 * 16;
        const bool is_blind[2] = {lse[stat_place(threadIdx.x % 32 / 4)] == INF,
                                  lse[stat_place(threadIdx.x % 32 / 4 + 8)] == INF};
#pragma unroll
        for (int x = 0; x < REGS; x++)
            if (is_blind[x / 2 % 2]) dq[x] = 0;
        const int row = i * BLOCK_Q + threadIdx.x % 128 / 32 * 16;
        element::output *rows = (element::output *)p.dq.data + t.b_idx * p.dq.stride_b +
                                (t.first_head + head_in_group) * p.dq.stride_h +
                                (VARLEN ? t.q_batch - t.len_q : 0) * p.dq.stride_row;
        store_dq_columns<0, CHUNK>(dq, p, rows, row, t.len_q, column, CHUNK);
        if constexpr (2 * REGS > CHUNK) {
            constexpr int REST = 2 * REGS - CHUNK;
            store_dq_columns<CHUNK, REST>(dq, p, rows, row, t.len_q, rest, REST);
        }
    } else if (is_first) {
#pragma unroll
        for (int x = 0; x < REGS; x += 4)
            __stcg((float4 *)(sums + x * 128), make_float4(dq[x], dq[x + 1], dq[x + 2], dq[x + 3]));
    } else {
#pragma unroll
        for (int x = 0; x < REGS; x += 4) red_add_x4(sums + x * 128, dq[x], dq[x + 1], dq[x + 2], dq[x + 3]);
    }
    __syncwarp();
    if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(&s.dq_added[r.stage]);
}

/* Whole warp. One lane calls `work` for each step. `i` is the query tile of the step. */
template <class shared_memory, class work_on_step>
DEVICE void lead_through_steps(const params &p, shared_memory &s, work_on_step work) {
    lead_through_tiles(s, [&](const tile &t) {
#pragma unroll 1
        for (int place = t.queries.end - 1; place >= t.queries.begin && p.dq.data; place--) {
            const int i = query_tile_of(t.entry_at(place));
            u32 *turn = p.turns + ((long long)t.slab_head * p.num_slabs + t.slab + i) * 2 + cluster_rank();
#pragma unroll 1
            for (int g = 0; g < p.heads_per_tile; g++, turn += 2ll * p.num_slabs) work(t, i, turn);
        }
    });
}

/* Two warps handle the dQ turns, so that the warpgroups wait neither for memory nor for fences. This warp looks
 * whether the dQ turn of a step has come, while the step before may still be adding. */
template <class shared_memory> DEVICE void open_turns(const params &p, shared_memory &s) {
    ring r; /* of steps */
    lead_through_steps(p, s, [&](const tile &t, int i, const u32 *turn) {
        const u32 share = t.share_at(i);
        if (!t.begins_sum(share, i)) wait_turn(turn, t.ends_sum(share, i) || p.in_order ? turn_of(p, t, share, i) : 1);
        mbarrier_wait(&s.turn_come[r.stage], r.parity ^ 1);
#if FLEX
        s.words.set_turn(slot_of(r), i, t.begins_sum(share, i), t.ends_sum(share, i));
#endif
        mbarrier_arrive(&s.turn_come[r.stage]);
        r.next();
    });
}

/* When the warpgroups have added, this warp lets the next step but one begin and passes the dQ turn on. The warp's
 * fence also orders the earlier additions of other warps of the CTA, if these warps have arrived. This warp is at most
 * two steps behind. So no phase of dq_added can follow a phase that this warp has not seen. */
template <class shared_memory> DEVICE void end_turns(const params &p, shared_memory &s) {
    ring r; /* of steps */
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.turn_come[0]), mbarrier_arrive(&s.turn_come[1]);
    lead_through_steps(p, s, [&](const tile &t, int i, u32 *turn) {
        mbarrier_wait(&s.dq_added[r.stage], r.parity);
        mbarrier_arrive(&s.turn_come[r.stage]);
        if (!t.ends_sum(t.share_at(i), i)) end_turn(turn);
        r.next();
    });
}

/* This function is the second producer warp, which loads V and dO. One warp for all would wait with dO until Q is
 * released, and with Q until dO is released. */
template <class shared_memory> DEVICE void produce_dout(const params &p, shared_memory &s) {
    ring r; /* of steps */
    u32 kv_parity = 0;
    lead_through_tiles(s, [&](const tile &t) { load_steps<false, true>(p, s, t, r, kv_parity); });
}

#endif
