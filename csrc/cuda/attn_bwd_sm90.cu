/* Attention backward on Hopper, after attn_bwd_prep:
 *
 *   P = exp(scale Q K^T + mask - lse)    dP = dO V^T    dS = P (dP - D)    D = rowsum(dO O), from attn_bwd_prep
 *   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K, which the key tiles add up in fp32
 *
 *   q, dO, dQ [b, len_q, h, d]    k, v, dK, dV [b, len_kv, h_kv, d]    lse, D: stats    sums of dQ: dq_sums
 *
 * One CTA per SM stays for the whole launch. It takes tiles of BLOCK_KV keys of one key head, one after the other, and
 * walks over the query tiles that see them, through all query heads of the group: dK and dV stay in registers. Two
 * warpgroups own 64 keys each. They compute S and dP transposed, keys down, queries across, because then P and dS lie in
 * registers as the products dV and dK take them; only dS goes through shared memory, for dQ:
 *
 *   producer warp --k_full, v_full--> both warpgroups  --k_empty, v_empty--> producer warp
 *                 --q_full[s]-->      S^T = K Q^T, dK += dS^T Q             --q_empty[s]-->
 *                 --do_full[s]-->     dP^T = V dO^T, dV += P^T dO           --do_empty[s]-->
 *   warpgroup     --ds_full[s]-->     both: dQ = dS K                       --ds_empty[s]-->
 *                 --dq_full[s]-->     writer warp s: adds dQ to memory      --dq_ready[s]-->
 *   writer warp s --sum_full[s]-->    converter, which stores dK and dV too --dq_ready[s]--> warpgroups
 *
 * dQ of a query tile is computed one step later, when the other warpgroup's dS has long been there: nobody waits for a
 * barrier of both, and the warpgroups drift apart until the tensor cores always have a product to run:
 *
 *   issue S            dK of the last step is done: release Q
 *   issue dQ           of the last step; P = exp2 while it runs
 *   dQ to the writer   issue dP, dV; dS while dV runs
 *   dS to both         issue dK
 *
 * The key tiles add to a query tile's dQ in their order: the first stores its share, those between add theirs, and the
 * last one's warpgroups add the sum to theirs and write dQ. So nothing need be zero before, nothing is left to do after,
 * and every bit repeats. A turn is passed on when the addition has arrived in the L2, 1 to 2 us after it was begun: as
 * the two writers have alternate steps, each has the time of two.
 *
 * Causal tiles complete a sum at their end, where the tiles before them have just come, too. Long ones of up to 64 columns
 * do not wait for those: the writer adds this share as well, brings the sum, and the converter makes dQ of it while the
 * warpgroups are in the next tile.
 *
 * Specification: cpu/reference.c. Limits and measurements: README.md. */
#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(BLOCK_KV)
#error "tiles: HEAD_DIM columns, BLOCK_Q query rows, BLOCK_KV keys"
#endif
#if !defined(BF16) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE) || !defined(DROPOUT)
#error "variant: BF16 or fp16; CAUSAL, LOCAL, VARLEN, SCORE softcap and ALiBi, DROPOUT: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_sm90
#endif

#include "attn_bwd_scores.cuh"

constexpr int THREADS = 384, PRODUCER_REGS = 24, CONSUMER_REGS = 240;
static_assert(BLOCK_KV == 128, "two warpgroups of 64 keys");
static_assert(BLOCK_Q == 64 || BLOCK_Q == 128, "dQ is cut into two halves of 64 rows or of half the columns");
constexpr bool CONVERTS = CAUSAL && HEAD_DIM <= 64, KEEPS_ADDRESSES = HEAD_DIM > 64;
static_assert(HEAD_DIM * 2 + BLOCK_Q <= 384, "dK, dV, S and dQ take (2 HEAD_DIM + 2 BLOCK_Q) / 2 of 232 registers");

/* ---- shared memory --------------------------------------------------------------------------------------------- */

/* Operands are stored as TMA writes them and wgmma reads them: chunks of CHUNK columns, rows of ROW_BYTES, the 16-byte
 * pieces of a row swizzled by the row's number. Each chunk starts at a multiple of 1024 bytes, the swizzle's period. */
struct shared_memory {
    alignas(1024) u16 k[BLOCK_KV * COLUMNS];
    alignas(1024) u16 v[BLOCK_KV * COLUMNS]; /* in the end dV */
    alignas(1024) u16 q[2][BLOCK_Q * COLUMNS];
    alignas(1024) u16 dout[2][BLOCK_Q * COLUMNS];
    alignas(1024) u16 ds[2][BLOCK_Q * BLOCK_KV]; /* chunks of 64 keys, one from each warpgroup; in the end dK */
    alignas(1024) float dq[2][2][DQ_FLOATS];     /* of two steps, one half from each warpgroup; or the 16-bit result */
    alignas(16) float lse[2][BLOCK_Q];           /* comes with q */
    alignas(16) float d[2][BLOCK_Q];             /* comes with dout */
    /* Arrivals. full: one, with TMA's bytes; ds_full, dq_full, dk_full, dv_full: one for each consumer warp. empty: one for
     * each consumer warp; v_empty, dk_empty: of the warp that stores dV and dK; tile_empty: consumer warps and writers;
     * dq_ready: the writer's, and TMA's bytes where the sum comes with it; or the converter's. sum_full: the writer's, and
     * TMA's bytes. */
    u64 k_full, k_empty, v_full, v_empty, dk_full, dk_empty, dv_full;
    u64 q_full[2], q_empty[2], do_full[2], do_empty[2];
    u64 ds_full[2], ds_empty[2];
    u64 dq_ready[2], dq_full[2], sum_full[2];
    u64 tile_full[2], tile_empty[2];
    tile tiles[2];
};
static_assert(sizeof(shared_memory) <= 232448, "an SM has 227 KiB for one CTA");
static_assert(COLUMNS <= 2 * BLOCK_Q, "dK has the place of both stages of dS");

/* ---- dQ -------------------------------------------------------------------------------------------------------- */

/* A warp's share of a step's dQ is 16 rows of 64 columns, of which the second warpgroup keeps those that heads have. On
 * its way to or from dq_sums it lies as in the registers, 16 bytes of every lane side by side; as a result it has the form
 * of a box of TMA, in the same place. */
constexpr int KEPT_COLUMNS = BLOCK_Q == 128 ? CHUNK : HEAD_DIM - CHUNK;
DEVICE constexpr int warp_floats(int wg) { return 16 * (wg ? KEPT_COLUMNS : CHUNK); }
static_assert(DQ_COLUMNS == CHUNK && 4 * (warp_floats(0) + warp_floats(1)) == SLAB_FLOATS,
              "a warp's result is one box");
constexpr u32 DQ_BYTES = SLAB_FLOATS * 4;

/* The result of a step to memory; its place is then free. One lane. */
DEVICE void store_dq(const params &p, shared_memory &s, const tile &t, int stage, int i, int head) {
#pragma unroll 1
    for (int warp = 0; warp < 8; warp++)
        cp_async_bulk_tensor_store(&p.dq_rows, s.dq[stage][warp / 4] + warp % 4 * warp_floats(warp / 4),
                                   dq_column(warp / 4), t.q_row_0 + i * BLOCK_Q + dq_row(warp / 4) + warp % 4 * 16,
                                   t.head_kv * p.heads_per_kv + head, t.q_batch);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_all_read();
}

/* Writer w: dQ of the steps of stage w, which are every other one. One lane.
 *
 *   first key tile of a query tile:  ready, wait dQ, store
 *   between:                         ready, wait dQ, wait turn, add
 *   last:                            wait turn, ready with the sum, wait the result, store it
 *   last, with a converter:          ready, wait turn, wait dQ, add, bring the sum; the converter is the next to be ready */
DEVICE void write_dq(const params &p, shared_memory &s, const int w) {
    const bool converts = CONVERTS && p.converts;
    u32 parity = 0;
    int skip = w; /* steps of the tile that come before the next one of this stage */
    bool is_ready = false;
    lead_through_tiles(s, [&](const tile &t) {
        const int num_q_tiles = t.q_end - t.q_begin, num_steps = num_q_tiles * p.heads_per_kv;
        int step = skip, i = t.q_end - 1 - skip, head = 0;
#pragma unroll 1
        for (; step < num_steps; step += 2, i -= 2) {
            while (i < t.q_begin) i += num_q_tiles, head++;
            const long long slab = (long long)(t.slab_head + head) * p.num_slabs + t.slab + i;
            u32 *turn = p.turns + slab * 2;
            float *sums = p.dq_sums + slab * SLAB_FLOATS;
            const bool is_first = i >= t.first_begin, is_last = i < t.last_end;
            if (p.dq.data && is_last && !is_first && !converts) {
                wait_turn_to_read(turn, turn_of(p, t, i));
                mbarrier_arrive_expect_tx(&s.dq_ready[w], DQ_BYTES);
                cp_async_bulk_load(s.dq[w], sums, DQ_BYTES, &s.dq_ready[w]);
            } else if (!is_ready) {
                mbarrier_arrive(&s.dq_ready[w]);
            }
            if (p.dq.data && !is_first) {
                if (!is_last) wait_turn(turn, p.in_order ? turn_of(p, t, i) : 1);
                if (is_last && converts) wait_turn_to_read(turn, turn_of(p, t, i));
            }
            mbarrier_wait(&s.dq_full[w], parity);
            parity ^= 1;
            if (!p.dq.data) continue;
            is_ready = is_last && converts;
            if (is_ready && is_first) { /* it is the sum */
                mbarrier_arrive(&s.sum_full[w]);
                continue;
            }
            fence_proxy_async(); /* for the warpgroups' stores: there it would stand in the way, 2% */
            if (is_last && !converts) {
                store_dq(p, s, t, w, i, head);
                continue;
            }
            if (is_first)
                cp_async_bulk_store(sums, s.dq[w][0], DQ_BYTES);
            else
                cp_reduce_async_bulk_add(sums, s.dq[w][0], DQ_BYTES);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_all();
            if (is_last) {
                fence_proxy_async_global();
                mbarrier_arrive_expect_tx(&s.sum_full[w], DQ_BYTES);
                cp_async_bulk_load(s.dq[w], sums, DQ_BYTES, &s.sum_full[w]);
            } else {
                end_turn(turn);
            }
        }
        skip = step - num_steps;
    });
    if (threadIdx.x % 32 == 0) cp_async_bulk_wait_all();
}

/* ---- dK and dV ------------------------------------------------------------------------------------------------- */

/* One lane stores them: dV from the place of V when the tile's last dP is done, dK from that of dS when its last dQ is. The
 * next tile needs V sooner than a place for its dS. */
DEVICE void store_keys(const params &p, shared_memory &s, const tile &t, const u32 parity) {
    const bool has_sums = !CUTS || t.piece == t.pieces - 1;
#pragma unroll 1
    for (int is_dk = 0; is_dk < 2; is_dk++) {
        mbarrier_wait(is_dk ? &s.dk_full : &s.dv_full, parity);
        if (has_sums && (is_dk ? p.dk.data : p.dv.data)) {
            fence_proxy_async(); /* for the warpgroups' stores */
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                cp_async_bulk_tensor_store(is_dk ? &p.dk_tiles : &p.dv_tiles,
                                           (is_dk ? s.ds[0] : s.v) + c * BLOCK_KV * CHUNK, c * CHUNK,
                                           t.kv_row_0 + t.kv_tile * BLOCK_KV, t.head_kv, t.kv_batch);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_all_read();
        }
        mbarrier_arrive(is_dk ? &s.dk_empty : &s.v_empty);
    }
}

/* 16 columns of a box, from 16 g on, packed as registers of the accumulators lie; row: of the lane, in the box. Whole warp. */
DEVICE void write_columns(u32 row, int g, const u32 (&two)[4]) {
    stmatrix_x4(row + ((2 * g + threadIdx.x % 32 / 16) ^ threadIdx.x % 8) * 16, two[0], two[1], two[2], two[3]);
}
DEVICE u32 row_of_box(const void *box) { return smem_address(box) + threadIdx.x % 16 * ROW_BYTES; }

/* A warp's share of a sum becomes a box in its own place, whose first half that is. Whole warp. */
DEVICE void convert_sum(float *sum, float factor) {
    const float4 *pieces = (const float4 *)sum + threadIdx.x % 32;
    const u32 row = row_of_box(sum);
    u32 two[2][4];
#pragma unroll
    for (int g = 0; g < CHUNK / 16; g++) {
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            const float4 x = pieces[32 * (2 * g + k / 2)];
            two[g % 2][k] = cvt_x2<BF16>(x.x * factor, x.y * factor);
            two[g % 2][k + 1] = cvt_x2<BF16>(x.z * factor, x.w * factor);
        }
        if (g == 1) {
            __syncwarp(); /* all have read where the box goes */
            write_columns(row, 0, two[0]);
        }
        if (g > 0) write_columns(row, g, two[g % 2]);
    }
}

/* One warp: dK and dV; as a converter dQ, too, where the tile completes its sum, which is at the end of each head's steps.
 * Nobody needs the places of the tile's last two steps before the next tile: dK and dV come before those. */
DEVICE void write_keys(const params &p, shared_memory &s) {
    u32 parity = 0, sum_parity = 0; /* of stage n: bit n */
    int num_steps_before = 0;
    go_through_tiles(s, [&](const tile &t, const bool is_leader) {
        const int num_q_tiles = t.q_end - t.q_begin, num_steps = num_q_tiles * p.heads_per_kv;
        if (num_steps <= 0) return;
        const int last = CONVERTS && p.converts && p.dq.data ? min(t.last_end, t.q_end) - 1 : -1;
        int i = last, head = last < t.q_begin ? p.heads_per_kv : 0;
        bool has_stored = false;
#pragma unroll 1
        for (;;) {
            const int step = head * num_q_tiles + t.q_end - 1 - i;
            if (!has_stored && step >= num_steps - 2) {
                has_stored = true;
                if (is_leader) store_keys(p, s, t, parity);
                __syncwarp();
            }
            if (!CONVERTS || head == p.heads_per_kv) break;
            const int stage = (num_steps_before + step) % 2;
            mbarrier_wait(&s.sum_full[stage], sum_parity >> stage & 1);
            sum_parity ^= 1 << stage;
#pragma unroll 1
            for (int warp = 0; warp < 8; warp++)
                convert_sum(s.dq[stage][warp / 4] + warp % 4 * warp_floats(warp / 4), p.scale);
            fence_proxy_async();
            __syncwarp();
            if (is_leader) {
                store_dq(p, s, t, stage, i, head);
                mbarrier_arrive(&s.dq_ready[stage]);
            }
            __syncwarp();
            if (--i < t.q_begin) i = last, head++;
        }
        parity ^= 1;
        num_steps_before += num_steps;
    });
    if (threadIdx.x % 32 == 0) cp_async_bulk_wait_all();
}

/* ---- consumers ------------------------------------------------------------------------------------------------- */

/* 16 rows and WIDTH columns of a warp's accumulators, times a factor, in 16 bits, as a box of TMA of 64 columns. Whole warp. */
template <int WIDTH> DEVICE void write_box(void *box, const float *x, float factor) {
    const u32 row = row_of_box(box);
#pragma unroll
    for (int g = 0; g < WIDTH / 16; g++) {
        u32 two[4];
#pragma unroll
        for (int k = 0; k < 4; k++) two[k] = cvt_x2<BF16>(x[8 * g + 2 * k] * factor, x[8 * g + 2 * k + 1] * factor);
        write_columns(row, g, two);
    }
}

/* dQ of query tile i to the writer, from this lane's place in stage 0 on. Whole warpgroup. */
DEVICE void hand_over_dq(float (&dq)[DQ_REGS], const params &p, shared_memory &s, const tile &t, u32 dq_at, int wg,
                         int stage, u32 parity, int i, bool is_last) {
    float4 *pieces = (float4 *)__cvta_shared_to_generic(dq_at + stage * (u32)sizeof s.dq[0]);
    mbarrier_wait(&s.dq_ready[stage], parity);
    if (!is_last) {
#pragma unroll
        for (int x = 0; x < DQ_REGS / 4; x++)
            if (8 * x < KEPT_COLUMNS || wg == 0)
                pieces[32 * x] = make_float4(dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]);
    } else {
        if (i < t.first_begin) {
#pragma unroll
            for (int x = 0; x < DQ_REGS / 4; x++) {
                if (8 * x >= KEPT_COLUMNS && wg != 0) break;
                const float4 sum = pieces[32 * x];
                dq[4 * x] += sum.x, dq[4 * x + 1] += sum.y, dq[4 * x + 2] += sum.z, dq[4 * x + 3] += sum.w;
            }
        }
        __syncwarp(); /* all have read, and write over it */
        write_box<CHUNK>(s.dq[stage][wg] + threadIdx.x / 32 % 4 * warp_floats(wg), dq, p.scale);
    }
}

/* dK or dV of this warp's 16 keys to the warp that stores it: chunks of BLOCK_KV keys. Whole warp. */
DEVICE void hand_over_keys(const float (&kv)[KV_REGS], float factor, u16 *place, u64 *full, int key) {
    if (HEAD_DIM >= CHUNK) write_box<CHUNK>(place + key * CHUNK, kv, factor);
    if (HEAD_DIM > CHUNK) write_box<HEAD_DIM - CHUNK>(place + (BLOCK_KV + key) * CHUNK, kv + CHUNK / 2, factor);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
}

/* dK or dV of a cut tile, so far: the sum of the pieces before is added, or the sum is left to the next. All loads are under
 * way together: the next piece waits for them. Whole warp. */
DEVICE void add_pieces(float (&kv)[KV_REGS], float4 *sums, bool is_first, bool is_last) {
    if (!is_first) {
        float4 x[KV_REGS / 4];
#pragma unroll
        for (int i = 0; i < KV_REGS / 4; i++) x[i] = __ldcg(sums + 32 * i);
#pragma unroll
        for (int i = 0; i < KV_REGS / 4; i++)
            kv[4 * i] += x[i].x, kv[4 * i + 1] += x[i].y, kv[4 * i + 2] += x[i].z, kv[4 * i + 3] += x[i].w;
    }
    if (!is_last) {
#pragma unroll
        for (int i = 0; i < KV_REGS / 4; i++)
            __stcg(sums + 32 * i, make_float4(kv[4 * i], kv[4 * i + 1], kv[4 * i + 2], kv[4 * i + 3]));
    }
}

/* The pieces of a cut tile add up dK and dV in their order: the last one has the sums. Whole warp. */
DEVICE void add_to_pieces(float (&dK)[KV_REGS], float (&dV)[KV_REGS], const params &p, const tile &t, int warp) {
    const bool is_leader = threadIdx.x % 32 == 0, is_first = t.piece == 0, is_last = t.piece == t.pieces - 1;
    float4 *sums = (float4 *)p.kv_sums + (t.idx * 8 + warp) * (2 * KV_REGS / 4 * 32) + threadIdx.x % 32;
    u32 *turn = p.kv_turns + t.idx * 8 + warp;
    if (is_leader) wait_turn(turn, t.piece);
    __threadfence();
    __syncwarp();
    add_pieces(dK, sums, is_first, is_last);
    add_pieces(dV, sums + KV_REGS / 4 * 32, is_first, is_last);
    __threadfence();
    __syncwarp();
    if (is_leader) end_turn(turn);
}

/* dK or dV of 16 keys that no query sees. Whole warp. */
DEVICE void store_zeros(const fa_bwd_tensor &out, const params &p, const tile &t, int key) {
    if (!out.data) return;
    u16 *rows = (u16 *)out.data + t.b_idx * out.stride_b + t.head_kv * out.stride_h + t.kv_begin * out.stride_row;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 16 * HEAD_DIM / 8; i += 32) {
        const int j = key + i / (HEAD_DIM / 8), column = i % (HEAD_DIM / 8) * 8;
        if (j < t.len_kv && column < p.d) *(uint4 *)(rows + j * out.stride_row + column) = make_uint4(0, 0, 0, 0);
    }
}

/* One warpgroup. */
DEVICE void consume(const params &p, shared_memory &s, const int wg) {
    const int lane = KEEPS_ADDRESSES ? kept(threadIdx.x % 32) : threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool is_leader = lane == 0;
    /* One address serves both ways of reading an operand: along the row the leading offset is not used. */
    const u32 k_desc = matrix_descriptor(smem_address(s.k) + wg * 64 * ROW_BYTES, 0);
    const u32 v_desc = matrix_descriptor(smem_address(s.v) + wg * 64 * ROW_BYTES, 0);
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), BLOCK_Q * ROW_BYTES);
    const u32 do_desc_0 = matrix_descriptor(smem_address(s.dout), BLOCK_Q * ROW_BYTES);
    const u32 ds_desc_0 = matrix_descriptor(smem_address(s.ds) + dq_row(wg) * ROW_BYTES, 0);
    const u32 k_dq_desc =
        matrix_descriptor(smem_address(s.k) + dq_column(wg) / CHUNK * BLOCK_KV * ROW_BYTES, BLOCK_KV * ROW_BYTES);
    constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * COLUMNS * 2);
    constexpr u32 DS_STAGE = matrix_descriptor_bytes(BLOCK_Q * BLOCK_KV * 2);

    /* Where this lane stores in stage 0. Computed again in every step, in front of the stores, it costs 3 to 4% at 128
     * columns, and kept 3 to 7% at 64. */
    u32 ds_at = smem_address(s.ds) + wg * BLOCK_Q * ROW_BYTES + ds_offset();
    u32 dq_at = smem_address(s.dq[0][wg] + warp * warp_floats(wg) + 4 * lane);
    if (KEEPS_ADDRESSES) ds_at = kept(ds_at), dq_at = kept(dq_at);

    float dK[KV_REGS], dV[KV_REGS];
    ring r; /* of steps */
    u32 kv_parity = 0;

    for (ring tr;; tr.next()) {
        mbarrier_wait(&s.tile_full[tr.stage], tr.parity);
        const tile &t = s.tiles[tr.stage];
        const int kv_tile = uniform(t.kv_tile);
        if (kv_tile < 0) break;
        const int q_begin = uniform(t.q_begin), q_end = uniform(t.q_end);
        const int full_begin = uniform(t.full_begin), full_end = uniform(t.full_end);
        const int last_end = CONVERTS && p.converts ? 0 : uniform(t.last_end);
        const int num_steps = (q_end - q_begin) * p.heads_per_kv;
#pragma unroll
        for (int i = 0; i < KV_REGS; i++) dK[i] = dV[i] = 0;

        const int key = 64 * wg + 16 * warp; /* this warp's first, in the tile */

        if (num_steps > 0) {
            int q_tile = q_end - 1, last_q_tile = 0, head = t.head_kv * p.heads_per_kv;
            mbarrier_wait(&s.k_full, kv_parity);
            pin(dK), pin(dV);
            wgmma_fence();
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const int last = r.stage ^ 1;
                const u32 last_parity = r.stage ? r.parity : r.parity ^ 1;
                u32 P[P_REGS], W[WEIGHTED ? P_REGS : 1], dS[P_REGS];
                float S[S_REGS], dQ[DQ_REGS], dP[S_REGS], lse[STAT_REGS], d[STAT_REGS];

                /* wait Q: S = K Q^T */
                mbarrier_wait(&s.q_full[r.stage], r.parity);
                load_stats(lse, s.lse[r.stage], lane);
                issue_scores(S, k_desc, q_desc_0 + r.stage * Q_STAGE);
                /* dK of the last step is there: release its Q */
                wgmma_wait_group<1>(dK);
                if (is_leader && step > 0) mbarrier_arrive(&s.q_empty[last]);
                /* wait dS: dQ of the last step. NOTE: the first step computes one of what lies in dS and drops it. A
                 * branch around the products, or a first step of its own, and ptxas runs them one by one (C7512). */
                if (step > 0) mbarrier_wait(&s.ds_full[last], last_parity);
                issue_dq(dQ, ds_desc_0 + last * DS_STAGE, k_dq_desc);
                /* S is there: P */
                wgmma_wait_group<1>(S);
                const bool is_masked = q_tile < full_begin || q_tile >= full_end;
                exponentiate(S, lse, P, W, p, t, q_tile, head, is_masked);
                pin(P); /* not later: dQ runs now */
                /* wait dO; dQ is there: release dS, hand dQ over */
                mbarrier_wait(&s.do_full[r.stage], r.parity);
                load_stats(d, s.d[r.stage], lane);
                wgmma_wait_group<0>(dQ);
                if (step > 0) {
                    if (is_leader) mbarrier_arrive(&s.ds_empty[last]);
                    hand_over_dq(dQ, p, s, t, dq_at, wg, last, last_parity, last_q_tile, last_q_tile < last_end);
                } else {
                    mbarrier_wait(&s.v_full, kv_parity);
                }
                /* dP = V dO^T, dV += P^T dO */
                issue_scores(dP, v_desc, do_desc_0 + r.stage * Q_STAGE);
                issue_update(dV, P, do_desc_0 + r.stage * Q_STAGE);
                __syncwarp();
                if (is_leader && step > 0) mbarrier_arrive(&s.dq_full[last]);
                /* dP is there: dS */
                wgmma_wait_group<1>(dP);
                differentiate(dP, d, WEIGHTED ? W : P, dS, p.keep_scale);
                /* wait for a place for dS; in the first step it is the last tile's dK that must have left it */
                mbarrier_wait(step > 0 ? &s.ds_empty[r.stage] : &s.dk_empty, (step > 0 ? r.parity : kv_parity) ^ 1);
                store_ds(dS, ds_at + r.stage * (BLOCK_Q * BLOCK_KV * 2));
                /* dK += dS^T Q; dS to both */
                issue_update(dK, dS, q_desc_0 + r.stage * Q_STAGE);
                fence_proxy_async();
                __syncwarp();
                if (is_leader) mbarrier_arrive(&s.ds_full[r.stage]);
                /* dV is there: release dO */
                wgmma_wait_group<1>(dV);
                if (is_leader) mbarrier_arrive(&s.do_empty[r.stage]);

                r.next();
                last_q_tile = q_tile;
                if (--q_tile < q_begin) q_tile = q_end - 1, head++;
            }

            /* The last step's dQ. When both have their dS there, V has been read: its place serves dV. When both have
             * their dQ, the place of dS serves dK. */
            const int last = r.stage ^ 1;
            const u32 last_parity = r.stage ? r.parity : r.parity ^ 1;
            float dQ[DQ_REGS];
            wgmma_wait_group<0>(dK);
            if (is_leader) mbarrier_arrive(&s.q_empty[last]);
            if (CUTS && t.pieces > 1) add_to_pieces(dK, dV, p, t, 4 * wg + warp);
            mbarrier_wait(&s.ds_full[last], last_parity);
            issue_dq(dQ, ds_desc_0 + last * DS_STAGE, k_dq_desc);
            hand_over_keys(dV, p.keep_scale, s.v, &s.dv_full, key);
            wgmma_wait_group<0>(dQ);
            if (is_leader) mbarrier_arrive(&s.ds_empty[last]), mbarrier_arrive(&s.k_empty);
            mbarrier_wait(&s.ds_empty[last], last_parity);
            hand_over_keys(dK, p.scale, s.ds[0], &s.dk_full, key);
            hand_over_dq(dQ, p, s, t, dq_at, wg, last, last_parity, last_q_tile, last_q_tile < last_end);
            __syncwarp();
            if (is_leader) mbarrier_arrive(&s.dq_full[last]);
            kv_parity ^= 1;
        } else {
            store_zeros(p.dk, p, t, t.kv_tile * BLOCK_KV + key);
            store_zeros(p.dv, p, t, t.kv_tile * BLOCK_KV + key);
        }
        __syncwarp();
        if (is_leader) mbarrier_arrive(&s.tile_empty[tr.stage]);
    }
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ params p) {
    /* There is no static shared memory, so the dynamic one starts at 1024, as its alignment asks. Said as a number, every
     * address is a constant, which saves the producer's registers. */
    extern __shared__ __align__(1024) unsigned char smem[];
    if (smem_address(smem) != SHARED_BASE) __trap();
    shared_memory &s = *(shared_memory *)__cvta_shared_to_generic(SHARED_BASE);
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q), prefetch_tensormap(&p.k), prefetch_tensormap(&p.v), prefetch_tensormap(&p.dout);
        if (p.dq.data) prefetch_tensormap(&p.dq_rows);
        if (p.dk.data) prefetch_tensormap(&p.dk_tiles);
        if (p.dv.data) prefetch_tensormap(&p.dv_tiles);
        mbarrier_init(&s.k_full, 1), mbarrier_init(&s.k_empty, 8);
        mbarrier_init(&s.v_full, 1), mbarrier_init(&s.v_empty, 1);
        mbarrier_init(&s.dk_full, 8), mbarrier_init(&s.dk_empty, 1), mbarrier_init(&s.dv_full, 8);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 8);
            mbarrier_init(&s.do_full[i], 1), mbarrier_init(&s.do_empty[i], 8);
            mbarrier_init(&s.ds_full[i], 8), mbarrier_init(&s.ds_empty[i], 8);
            mbarrier_init(&s.dq_ready[i], 1), mbarrier_init(&s.dq_full[i], 8);
            mbarrier_init(&s.sum_full[i], 1);
            mbarrier_init(&s.tile_full[i], 1), mbarrier_init(&s.tile_empty[i], 8 + 3);
        }
        mbarrier_init_fence();
    }
    griddepcontrol_wait(); /* for attn_bwd_prep, which this launch does not wait for */
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (warp == 0) produce(p, s);
        if (warp == 1 || warp == 2) write_dq(p, s, warp - 1);
        if (warp == 3) write_keys(p, s);
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        consume(p, s, wg - 1);
    }
}
