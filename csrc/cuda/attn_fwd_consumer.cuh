/* The consumer warpgroups of attn_fwd_sm90.cu and attn_fwd_fp8_sm90.cu: S = Q K^T, pipelines, turns, and the way from
 * work tile to work tile. Each kernel adds P V, its step, and the end of a work tile. */
#ifndef FA_ATTN_FWD_CONSUMER_CUH
#define FA_ATTN_FWD_CONSUMER_CUH

#include "attn_fwd_output.cuh"
#include "attn_fwd_repeats.cuh"

/* A launch gives each thread the same number of registers, a multiple of 8. setmaxnreg shares out these. A warpgroup
 * that asks for more waits for ever. */
constexpr int LAUNCH_REGS = (1 << 16) / (CTAS * THREADS) / 8 * 8;
static_assert(!MOVES_REGISTERS || PRODUCER_REGS + WGS * CONSUMER_REGS <= (WGS + 1) * LAUNCH_REGS,
              "a CTA has no more registers");

/* S = Q K^T for the 64 rows of a warpgroup. T is `element`. wgmma contracts 32 bytes at a time. */
template <class T> DEVICE void issue_scores(float (&S)[S_REGS], u32 q_desc, u32 k_desc) {
    constexpr u32 q_high = matrix_descriptor_high(ROW_BYTES), step = matrix_descriptor_bytes(32),
                  k_high = matrix_descriptor_high(ROW_BYTES, GROUP_BYTES_QK);
    constexpr bool BY_4 = T::BYTES == 2 && ROW_BYTES == 128; /* A whole chunk of columns is four products. */
    constexpr int IN_CHUNKS = BY_4 ? D_QK / CHUNK * CHUNK : 0, CONTRACTED = 32 / T::BYTES;
    const auto matrix_at = [](int k, int chunk_bytes) {
        return matrix_descriptor_bytes(k / CHUNK * chunk_bytes + k % CHUNK * T::BYTES);
    };
    constexpr int OF_Q = BLOCK_Q * ROW_BYTES;
    wgmma_fence();
    if constexpr (BY_4) {
#pragma unroll
        for (int k = 0; k < IN_CHUNKS; k += CHUNK)
            wgmma<BLOCK_KV, T>::template ss_4<q_high, k_high, step, step>(S, q_desc + matrix_at(k, OF_Q),
                                                                          k_desc + matrix_at(k, CHUNK_BYTES), k > 0);
    }
#pragma unroll
    for (int k = IN_CHUNKS; k < D_QK; k += CONTRACTED)
        wgmma<BLOCK_KV, T>::template ss<q_high, k_high>(S, q_desc + matrix_at(k, OF_Q),
                                                        k_desc + matrix_at(k, CHUNK_BYTES), k > 0);
    wgmma_commit_group();
}

/* A consumer has taken one work tile and may still hold O of the work tile before. */
enum which_tile { THIS_TILE = 0, PREVIOUS_TILE = 1 };

/* One consumer warpgroup. It computes one row block of each work tile, and passes over key tiles that only other row
 * blocks see. Without a mask it reads a work tile like this:
 *
 *   run:  begin_tile  step<true>  step<false> ... step<false>      begin_tile  step<true> ...
 *         last PV     S           S PV            S PV             last PV     S
 *         of the      store O of                                   of this     store O of
 *         tile before the tile before                              tile        this tile
 *
 * A kernel's struct `consumer` derives from this one. The functions behind this struct call these members of it:
 *
 *   begin_rows             O, its sum and the row maximum at the begin of a work tile
 *   step<IS_FIRST>         takes a key tile and sets goes_on. The first step stores O of the tile before. In 8 bits
 *                          run_steps takes all key tiles of a work tile.
 *   repeat_step            the step of a work tile that failed
 *   issue_pv               O += P V of the last key tile
 *   store_o                stores O and lse of the warp's row strip
 *   close_rows             computes what the store of O needs besides O, while the last P V runs
 *   finish_previous_tile   stores O of the tile before, or notes that it failed. NOTE: As a function of this header it
 *                          changes the machine code of 16 bits, by up to 8 instructions. */
struct consumer_base {
    const params &p;
    shared_memory &smem;
    const int wg, warp, lane;               /* the consumer's number, the warp in it, the lane in the warp */
    const int column;                       /* the thread's first column in each group of 8 */
    const bool is_leader, arrives;          /* The lane acts for its warp; the lane arrives at mbarriers. */
    const u32 q_desc_0, k_desc_0, v_desc_0; /* matrix descriptors of pipeline stage 0 */
    float scale_log2;                       /* S times this are exponents of 2. */

    /* NOTE: these are references. Arrays inside the struct would delay the promotion of its scalars to registers,
     * and ptxas would take matrix descriptors for values that differ between threads. */
    float (&O)[O_REGS];
    u32 (&P)[P_REGS];
    online_softmax &softmax;

    ring<Q_STAGES> q_ring;
    ring<STAGES> k_ring;
    ring<V_STAGES> v_ring;
    ring<TILE_SLOTS> tile_ring;

    int row_block = wg; /* the row block of the work tile that this warpgroup computes */
    int diagonal = 0;   /* The thread's first row would see this key last under a causal mask. With mods: its q_idx. */
    int len_kv = 0;     /* of the work tile, for mods beside a cache */
    row_key_walk walk;
    int goes_on = 0; /* The work tile has another step. */
    u32 q_desc = 0;  /* the matrix descriptor of the row block */
    int has_o = 0;   /* O holds a work tile that is not stored yet. */
    score_head q_head = {0, 0, 0, 0};

    static constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * STORED_QK * element::BYTES);
    static constexpr u32 Q_BLOCK = matrix_descriptor_bytes(64 * ROW_BYTES);
    static constexpr u32 K_STAGE = matrix_descriptor_bytes(BLOCK_KV * STORED_QK * element::BYTES);
    static constexpr u32 V_STAGE = matrix_descriptor_bytes(BLOCK_KV * STORED_V * element::BYTES);

    DEVICE consumer_base(const params &p, shared_memory &smem, int wg, float (&O)[O_REGS], u32 (&P)[P_REGS],
                         online_softmax &softmax)
        : p(p), smem(smem), wg(wg), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), column(2 * (lane % 4)),
          is_leader(lane == 0), arrives(arrives_for_warp(lane)), q_desc_0(matrix_descriptor(smem_address(smem.q), 0)),
          k_desc_0(matrix_descriptor(smem_address(smem.k), 0)),
          v_desc_0(matrix_descriptor(smem_address(smem.v), V_LEADING_BYTES)), scale_log2(p.scale_log2), O(O), P(P),
          softmax(softmax) {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = 0;
    }

    /* ---- pipeline stages and turns ---- */

    DEVICE void wait_q() { mbarrier_wait(&smem.q_full[q_ring.stage], q_ring.parity); }
    DEVICE bool q_has_come() { return mbarrier_test(&smem.q_full[q_ring.stage], q_ring.parity); }
    DEVICE void wait_k() { wait_keys(smem.k_full[k_ring.stage], k_ring.parity); }
    DEVICE void wait_v() { wait_keys(smem.v_full[v_ring.stage], v_ring.parity); }
    /* wgmma reads what threads have copied only behind the fence. */
    DEVICE void wait_keys(u64 &full, u32 parity) {
        mbarrier_wait(&full, parity);
        if (SINGLE_KEYS) fence_proxy_async();
    }
    DEVICE void release_k() {
        if (arrives) mbarrier_arrive(&smem.k_empty[k_ring.stage]);
        k_ring.next();
    }
    DEVICE void release_v() {
        if (arrives) mbarrier_arrive(&smem.v_empty[v_ring.stage]);
        v_ring.next();
    }
    DEVICE int q_stage_of(which_tile which) const { return Q_STAGES == 1 ? 0 : q_ring.stage ^ 1 ^ which; }
    /* This also says that the warp has read the slot of the tile before. The scheduler may overwrite that slot. */
    DEVICE void release_q(which_tile which) {
        __syncwarp();
        if (O_IN_Q) {
            if (elect_one()) cp_async_bulk_wait_all_read();
            __syncwarp();
        }
        if (arrives) mbarrier_arrive(&smem.q_empty[q_stage_of(which)]);
    }
    DEVICE void wait_turn() {
        if (TURN) bar_sync(BAR_TURN + wg, 256);
    }
    DEVICE void pass_turn() {
        if (TURN) bar_arrive(BAR_TURN + (wg + 1 == WGS ? 0 : wg + 1), 256);
    }

    /* ---- the tile that was taken, and the tile before ---- */

    DEVICE const tile &tile_of(which_tile which) const {
        const int slot = tile_ring.stage - 1 - which;
        return smem.tiles[slot < 0 ? slot + TILE_SLOTS : slot];
    }
    DEVICE int row_block_of(which_tile which) const {
        return row_block >= which ? row_block - which : row_block - which + WGS;
    }

    /* ---- parts of a step ---- */

    DEVICE void issue_s(float (&S)[S_REGS]) { issue_scores<element>(S, q_desc, k_desc_0 + k_ring.stage * K_STAGE); }
    DEVICE void begin_rows() {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
        softmax = {{-INF, -INF}, {0, 0}, {0, 0}};
    }
    DEVICE void rescale_o(const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < O_REGS; i += 4)
            O[i] *= alpha[0], O[i + 1] *= alpha[0], O[i + 2] *= alpha[1], O[i + 3] *= alpha[1];
    }

    /* What is known of the key tile at a place of the walk. Its K has come. */
    DEVICE int entry_of(int place) const {
#if FLEX_LISTS
        return uniform(smem.entries[k_ring.stage]);
#else
        return place;
#endif
    }

    /* S of a step in which nothing overlaps. */
    DEVICE void compute_s(float (&S)[S_REGS]) {
        wait_k();
        wait_turn();
        issue_s(S);
        pass_turn();
        wgmma_wait_group<0>(S);
        release_k();
    }
    /* All rows of the row block see all keys of the key tile. */
    DEVICE bool sees_all_of(int first_key) const {
        const tile &t = tile_of(THIS_TILE);
        const int block_diagonal = row_of_block(p, t, row_block) + t.len_kv - t.len_q;
        const tile_walk keys = keys_of(p, block_diagonal, block_diagonal + rows_of_block(p, row_block) - 1, t.len_kv);
        return !uniform(is_partial<BLOCK_KV>(first_key, keys.full_begin, keys.full_end));
    }

    /* A step that only other warpgroups need. The stages and the turn pass through this warpgroup, too. */
    DEVICE void skip_step() {
        wait_k();
        wait_turn();
        pass_turn();
        release_k();
        wait_v();
        release_v();
    }
    DEVICE void skip_unseen_steps() {
#pragma unroll 1
        for (; walk.next_is_unseen(); walk.take()) skip_step();
    }

    /* ---- a work tile ---- */

    /* Waits for the last P V of the tile before. */
    DEVICE void complete_pv() {
        wgmma_wait_group<0>(O);
        if (has_o) release_v();
    }

    /* Takes the next work tile, and waits for the last P V of the tile before. */
    DEVICE tile_command take_tile() {
        wait_q();
        q_ring.next(), tile_ring.next();
        /* Later row blocks may see more keys, or may have no row. So the row blocks rotate among the warpgroups. */
        row_block = row_block + 1 == WGS ? 0 : row_block + 1;
        const tile &t = tile_of(THIS_TILE);
        const int shift = FLEX ? t.first_query : t.len_kv - t.len_q, first_row = row_of_block(p, t, row_block);
        const int last_row = min(first_row + rows_of_block(p, row_block), t.len_q) - 1;
        tile_walk keys = keys_of(p, first_row + shift, last_row + shift, t.len_kv);
        if (MAY_BE_CUT) /* to the tile's part */
            keys.begin = max(keys.begin, t.kv_begin * BLOCK_KV), keys.end = min(keys.end, t.kv_end * BLOCK_KV);
        const bool is_idle = first_row > last_row || (FLEX_LISTS ? t.kv_end == 0 : keys.begin >= keys.end);
        const tile_command command = (tile_command)uniform(t.command);
        walk.seen_top = uniform(is_idle ? -1 : FLEX_LISTS ? t.kv_end - 1 : ceil_div(keys.end, BLOCK_KV) - 1);
        walk.next = uniform(t.kv_end) - 1, walk.bottom = uniform(t.kv_begin);
        diagonal = (CACHE ? row_of_strip(p, t, row_block, warp) : first_row + 16 * warp) + lane / 4 + shift;
        if (FLEX && CACHE) len_kv = uniform(t.len_kv);
        t.set_scale(p, scale_log2);
        if (WALKS_EARLY) { /* Without settle ptxas would do this behind the wait. */
            walk.begin_rows(p, diagonal - lane / 4, t.len_kv);
            settle(__int_as_float(walk.seen_top + walk.next + walk.bottom + walk.exact_begin + walk.full_end), &smem);
        }
        complete_pv();
        q_desc = q_desc_0 + q_stage_of(THIS_TILE) * Q_STAGE + row_block * Q_BLOCK;
        q_head.b_idx = t.b_idx, q_head.head = head_of_strip(p, t, row_block, warp), q_head.shift = shift;
        if (SCORE && p.alibi_slopes && command <= REPEAT)
            q_head.slope = p.alibi_slopes[t.b_idx * p.alibi_stride_b + q_head.head];
        return command;
    }
    /* The row block sees no key of the work tile, or has no row. */
    DEVICE bool is_idle() const { return walk.seen_top < 0; }

    /* The row block sees no key, or has no row. is_new says that its zeros are not stored yet. */
    DEVICE void skip_tile(bool is_new) {
#pragma unroll 1
        for (; walk.has_next(); walk.take()) skip_step();
        const tile &t = tile_of(THIS_TILE);
        const int first_row = row_of_strip(p, t, row_block, warp);
        if (is_new && first_row < t.len_q) store_zeros(p, t, first_row, row_block);
    }
    /* What a kernel adds: the last P V of a work tile runs; a work tile begins; its P V is complete; a repeated tile is
     * computed. */
    DEVICE void close_rows() {}
    DEVICE void begin_steps() {}
    DEVICE void complete_o() {}
    DEVICE void end_repeat() {}

    /* Tells the producer that this warp has noted all its failures. */
    DEVICE void report() {
        if (arrives) mbarrier_arrive(&smem.all_done);
    }
};

/* ---- from work tile to work tile ------------------------------------------------------------------------------- */

/* Stores O of the tile before outside a step, where no product hides the store. */
template <class consumer> DEVICE void finish_previous_tile_now(consumer &c) {
    if (O_IN_Q) bar_sync(BAR_GROUP + c.wg, 128); /* The warps have read the Q whose place O takes. */
    if (c.has_o) {
        c.finish_previous_tile();
        if (O_IN_Q) c.release_q(PREVIOUS_TILE);
    }
    /* NOTE: the compiler must not know this value. It would split the loop over work tiles by it, and ptxas
     * would take matrix descriptors for values that differ between threads. */
    c.has_o = uniform(0);
}

/* Takes the next work tile. Meanwhile the last P V of the tile before runs. Without a tile before, P V multiplies
 * garbage, and no step uses the result. */
template <class consumer> DEVICE tile_command begin_tile(consumer &c) {
    if (c.has_o) c.wait_v();
    pin(c.O), pin(c.P);
    c.issue_pv();
    c.close_rows();
    if constexpr (STORES_EARLY) {
        /* The wait for products wants all warps of the warpgroup, so they decide together. */
        const bool waits_for_q = !bar_red_or(BAR_GROUP + c.wg, 128, c.q_has_come());
        if (uniform(c.has_o && waits_for_q)) {
            c.complete_pv();
            c.finish_tile(THIS_TILE, c.row_block);
            c.has_o = uniform(0);
        }
    }
    const tile_command command = c.take_tile();
    c.complete_o();
    return command;
}

/* Computes and stores a work tile that failed, alone. Only row strips that failed are stored, because the other row
 * strips have been stored before. */
template <class consumer> DEVICE void repeat_tile(consumer &c) {
    c.skip_unseen_steps();
    c.begin_rows();
#pragma unroll 1
    for (; c.walk.has_next(); c.walk.take()) c.repeat_step();
    c.end_repeat();
    if (O_IN_Q) bar_sync(BAR_GROUP + c.wg, 128); /* The warps have read the Q whose place O takes. */
    const tile &t = c.tile_of(THIS_TILE);
    const int strip = 4 * c.row_block + c.warp;
    if (uniform(t.failed_strips >> strip & 1))
        c.store_o(THIS_TILE, t, c.row_block, row_of_strip(c.p, t, c.row_block, c.warp));
}

/* One consumer warpgroup, for the whole launch. A work tile's O stays in registers, and the first step of the next tile
 * stores it. NOTE: NVRTC copies all steps into each function around them, one after the other. So this function calls
 * the steps itself, and the kernel calls this function. */
template <class consumer> DEVICE void run(consumer &c) {
    if (c.wg == WGS - 1) c.pass_turn(); /* Warpgroup 0 has the first turn. */
    for (;;) {
        const tile_command command = begin_tile(c);
        if (command == COMPUTE && !c.is_idle()) {
            if (!WALKS_EARLY) c.walk.begin_rows(c.p, c.diagonal - c.lane / 4, c.tile_of(THIS_TILE).len_kv);
            c.begin_steps();
            c.skip_unseen_steps();
            if constexpr (element::BYTES == 1) {
                c.run_steps();
            } else {
                c.template step<true>();
#pragma unroll 1
                while (c.goes_on) c.template step<false>();
            }
            continue;
        }
        finish_previous_tile_now(c);
        if (command == END) break;
        if (command == REPORT)
            c.report();
        else if (command == REPEAT && !c.is_idle())
            repeat_tile(c);
        else
            c.skip_tile(command == COMPUTE);
        c.release_q(THIS_TILE);
    }
    if (O_BY_TMA && elect_one()) cp_async_bulk_wait_all_read(); /* Shared memory outlives its readers. */
    /* NOTE: where O does not leave by TMA, the warp must meet here all the same. Otherwise ptxas takes the ring
     * positions of kernels for caches for values that differ between threads, and each matrix descriptor comes from
     * vector registers. */
    if (!O_BY_TMA) __syncwarp();
}

#endif
