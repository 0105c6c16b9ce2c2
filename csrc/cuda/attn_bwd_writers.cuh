/* Three warps of attn_bwd_sm90.cu write to memory. Two writer warps add dQ. One warp stores dK and dV. As a converter
 * this warp stores dQ, too. */
#ifndef FA_ATTN_BWD_WRITERS_CUH
#define FA_ATTN_BWD_WRITERS_CUH

#include "attn_bwd_memory.cuh"

/* ---- dQ -------------------------------------------------------------------------------------------------------- */

/* One lane. Stores the 16-bit dQ of a step. The place of the result is then free. */
DEVICE void store_dq(const params &p, shared_memory &s, const tile &t, int stage, int i, int head) {
#pragma unroll 1
    for (int warp = 0; warp < 8; warp++)
        cp_async_bulk_tensor_store(&p.dq_rows, s.dq[stage][warp / 4] + warp % 4 * warp_floats(warp / 4),
                                   dq_column(warp / 4), t.q_row_0 + i * BLOCK_Q + dq_row(warp / 4) + warp % 4 * 16,
                                   t.first_head + head, t.q_batch);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_all_read();
}

/* One lane. A row that sees no key, or only scores of -inf, has a dQ of zeros. The row's dS is zero, but K may hold
 * infinities. So the row's parts of a step's result are overwritten before the store. */
DEVICE void clear_blind_rows(const params &p, shared_memory &s, int stage, const u32 *turn) {
    if (!turn[1]) return;
    const float *lse = p.stats + (turn - p.turns) * BLOCK_Q;
#pragma unroll 1
    for (int row = 0; row < BLOCK_Q; row++) {
        if (lse[row / 16 * 16 + stat_place(row % 16)] != INF) continue;
#pragma unroll 1
        for (int wg = BLOCK_Q == 128 ? row / 64 : 0; wg < (BLOCK_Q == 128 ? row / 64 + 1 : 2); wg++) {
            uint4 *pieces =
                (uint4 *)(s.dq[stage][wg] + row % 64 / 16 * warp_floats(wg)) + row % 16 * (DQ_ROW_BYTES / 16);
#pragma unroll 1
            for (int i = 0; i < DQ_ROW_BYTES / 16; i++) pieces[i] = make_uint4(0, 0, 0, 0);
        }
    }
}

/* This function is writer warp w. One lane writes dQ of the steps of stage w, which are every other step.
 *
 *   first key tile of a query tile:  ready, wait dQ, store
 *   between:                         ready, wait turn, wait dQ, add
 *   last:                            wait turn, ready with the sum, wait result, store result
 *   last, with a converter:          ready, wait turn, wait dQ, add, bring the sum; then ready by the converter */
DEVICE void write_dq(const params &p, shared_memory &s, const int w) {
    const bool converts = CONVERTS && p.converts;
    u32 parity = 0;
    int skip = w; /* steps of the work tile before the next step of this stage */
    bool is_ready = false;
    lead_through_tiles(s, [&](const tile &t) {
        const int num_steps = (t.queries.end - t.queries.begin) * p.heads_per_tile;
        int step = skip;
        const auto place_at = [&](int step) { return place_of_step(p, t.queries.end, step).q_tile; };
        list_reader reader;
        if (step < num_steps) reader.begin(t, place_at(step), place_at(step + 2));
#pragma unroll 1
        for (; step < num_steps; step += 2, reader.advance()) {
            const auto [place, head] = place_of_step(p, t.queries.end, step);
            const int i = query_tile_of(reader.entry_of(place));
            const u32 share = reader.share;
            reader.look_ahead(t, place_at(step + 4));
            const long long slab = (long long)(t.slab_head + head) * p.num_slabs + t.slab + i;
            u32 *turn = p.turns + slab * 2;
            float *sums = p.dq_sums + slab * SLAB_FLOATS;
            /* NOTE: these are begins_sum and ends_sum. Calls of them would reorder the plain kernels' instructions. */
            const bool is_first = t.has_list() ? share / 2 == 0 : i >= t.first_begin;
            const bool is_last = t.has_list() ? share % 2 : i < t.last_end;
            if (!is_ready) mbarrier_arrive_for_others(&s.dq_ready[w]);
            if (p.dq.data && is_last && !is_first && !converts) {
                wait_turn(turn, turn_of(p, t, share, i));
                mbarrier_arrive_expect_tx(&s.dq_ready[w], DQ_BYTES);
                cp_async_bulk_load(s.dq[w], sums, DQ_BYTES, &s.dq_ready[w]);
            } else if (!is_ready) {
                mbarrier_arrive(&s.dq_ready[w]);
            }
            if (p.dq.data && !is_first) {
                if (!is_last || converts) wait_turn(turn, is_last || p.in_order ? turn_of(p, t, share, i) : 1);
            }
            mbarrier_wait(&s.dq_full[w], parity);
            parity ^= 1;
            if (!p.dq.data) continue;
            is_ready = is_last && converts;
            if (is_ready && is_first) { /* this share is the sum */
                mbarrier_arrive(&s.sum_full[w]);
                continue;
            }
            if (is_last && !converts) clear_blind_rows(p, s, w, turn);
            fence_proxy_async(); /* for the warpgroups' stores; in the warpgroups the fence would cost 2% */
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
    if (elect_one()) cp_async_bulk_wait_all();
}

/* ---- dK and dV ------------------------------------------------------------------------------------------------- */

/* One lane. Stores dV from the place of V when the tile's last dP is done. Stores dK from the place of dS when the
 * tile's last dQ is done. dV comes first, because the next tile needs V sooner than a place for its dS. */
DEVICE void store_keys(const params &p, shared_memory &s, const tile &t, const u32 parity) {
    const bool has_sums = t.piece == t.pieces - 1;
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

/* Whole warp. A warp's share of a sum becomes a box of TMA. The box takes the first half of the share's place. */
DEVICE void convert_sum(float *sum, float factor) {
    const float4 *pieces = (const float4 *)sum + threadIdx.x % 32;
    const u32 row = row_of_box<DQ_ROW_BYTES>(sum);
    u32 two[2][4];
#pragma unroll
    for (int g = 0; g < DQ_COLUMNS / 16; g++) {
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            const float4 x = pieces[32 * (2 * g + k / 2)];
            two[g % 2][k] = cvt_x2<element::output>(x.x * factor, x.y * factor);
            two[g % 2][k + 1] = cvt_x2<element::output>(x.z * factor, x.w * factor);
        }
        if (g == 1) {
            __syncwarp(); /* all lanes have read where the box goes */
            write_columns<DQ_ROW_BYTES>(row, 0, two[0]);
        }
        if (g > 0) write_columns<DQ_ROW_BYTES>(row, g, two[g % 2]);
    }
}

/* This function is the warp that stores dK and dV. As a converter the warp also stores dQ in the last steps of a tile,
 * where the tile completes the sums. The places of the last two dQ are not needed before the next tile. So dK and dV
 * are stored before the last two dQ. */
DEVICE void write_keys(const params &p, shared_memory &s) {
    u32 parity = 0, sum_parity = 0; /* sum_parity of stage n: bit n */
    int num_steps_before = 0;
    go_through_tiles(s, [&](const tile &t, const bool is_leader) {
        const int num_steps = (t.queries.end - t.queries.begin) * p.heads_per_tile;
        if (num_steps <= 0) return;
        const int num_sums =
            CONVERTS && p.converts && p.dq.data ? (t.last_end - t.queries.begin) * p.heads_per_tile : 0;
        int step = num_steps - clamp(num_sums, 0, num_steps);
        bool has_stored = false;
#pragma unroll 1
        for (;;) {
            if (!has_stored && step >= num_steps - 2) {
                has_stored = true;
                if (is_leader) store_keys(p, s, t, parity);
                __syncwarp();
            }
            if (!CONVERTS || step == num_steps) break;
            const int stage = (num_steps_before + step) % 2;
            mbarrier_wait(&s.sum_full[stage], sum_parity >> stage & 1);
            sum_parity ^= 1 << stage;
#pragma unroll 1
            for (int warp = 0; warp < 8; warp++)
                convert_sum(s.dq[stage][warp / 4] + warp % 4 * warp_floats(warp / 4), p.scale);
            const auto [i, head] = place_of_step(p, t.queries.end, step);
            __syncwarp(); /* all lanes have written */
            if (is_leader)
                clear_blind_rows(p, s, stage,
                                 p.turns + ((long long)(t.slab_head + head) * p.num_slabs + t.slab + i) * 2);
            fence_proxy_async();
            __syncwarp();
            if (is_leader) store_dq(p, s, t, stage, i, head);
            __syncwarp(); /* The store has left the place of dQ. */
            if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(&s.dq_ready[stage]);
            __syncwarp();
            step++;
        }
        parity ^= 1;
        num_steps_before += num_steps;
    });
    if (elect_one()) cp_async_bulk_wait_all();
}

#endif
