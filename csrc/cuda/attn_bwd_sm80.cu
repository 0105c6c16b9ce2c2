/* Attention backward with the instructions of Ampere:
 *
 *   P_ij = exp(s_ij - lse_i)    dP = dO V^T    dS = P (z dP - delta) ds/dqk    z: dropout
 *   dQ = scale dS K             dK = scale dS^T Q             dV = (z P)^T dO
 *
 *   q, o, dO [b, len_q, h, d]    k, v [b, len_kv, h_kv, d], dense or packed    lse, delta [b, h, len_q] float
 *
 * A CTA owns BLOCK_KV keys of one key head. It walks over the query rows that see these keys, BLOCK_Q at a time, of all
 * query heads of the key head. A warp owns 16 BLOCKS of the keys, with their dK and dV in registers. P and dS come
 * out of registers in the order of the first operands of dV and dK. Shared memory gives the second operands, and only
 * dS goes there:
 *
 *   step i   barrier | load Q, dO of i+1 | S = K Q^T | P | dP = V dO^T | dS, store | dV += P^T dO | dK += dS^T Q
 *            and, before the loads in half of the warps and after dK in the others: dQ of i-1 += dS K
 *
 * dQ needs dS of all warps, so it follows one step later. A step then has one barrier, and dS has two places. Because
 * half of the warps add dQ at another time, exponentials of some warps meet products of others (+8%).
 *
 * In bf16, from 96 columns on, there are two groups of warps (GROUPS). A warp then has twice the keys and half of
 * their work, so it reads fewer operands from shared memory. Group 0 makes P and dV, group 1 dP, dS and dK. A warp of
 * group 1 has the keys of a warp of group 0, and takes P from it, as fp16 in the place of dS:
 *
 *   group 0   barrier | load | S = K Q^T | P, store | dV += P^T dO                               | dQ of i-1
 *   group 1   barrier | dQ of i-1 | load | dP = V dO^T | wait for P | dS, store | dK += dS^T Q
 *
 * Heads of more than 128 columns leave no registers for the gradients of whole keys. There SPLIT warps of a group share
 * 16 BLOCKS keys: each makes P and dS of a part of the rows, and adds to a part of the columns of dK and dV. P goes
 * through shared memory for dV, too, and a step has more barriers:
 *
 *   step i   barrier | S | P | dP | dS | store P, dS | barrier | dV, dK | barrier | load Q, dO of i+1 | dQ of i
 *
 * dQ is added to fp32 sums in memory, which attn_bwd_dq_sm80 rounds. The sums grow in any order, or in the order of the
 * key tiles (p.turns).
 *
 * Which limit binds: latency of products and of ldmatrix. At 128 columns shared memory is read 68% of the time (H100).
 *
 * Specification: ../cpu/reference.c. */
#define F32  0
#define OF_3 0

/* A row of tiles.def gives HEAD_DIM columns, BLOCK_Q rows, BLOCK_KV keys, and WARPS in GROUPS. A warp has BLOCKS times
 * 16 keys. CHUNK rows have their scores in registers at the same time. There are STAGES of Q and dO. K_REGS and V_REGS
 * say whether K and V are in registers. AHEAD loads run ahead of the products, and an SM has CTAS. */
#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(BLOCK_KV) || !defined(WARPS) || !defined(GROUPS) || \
    !defined(BLOCKS) || !defined(CHUNK) || !defined(STAGES) || !defined(K_REGS) || !defined(V_REGS) ||      \
    !defined(AHEAD) || !defined(KEPT) || !defined(CTAS) || !defined(SCORE) || !defined(DROPOUT)
#error "a row of tiles.def; SCORE: softcap, ALiBi or a scale that is not positive; DROPOUT: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_sm80
#endif

#include "attn_bwd_sm80.cuh"
#include "attn_bwd_sm80_products.cuh"
#include "attn_bwd_sm80_weights.cuh"
#include "quads.cuh"
#include "task_order.cuh"

/* dQ of a step is computed LAG steps later. */
constexpr int LAG = SPLIT == 1;
/* In tiles with a mask, weights may meet rows with NaN or inf that they do not see, in chunks that a warp leaves out,
 * too. Without SPLIT one group asks its scores. With two groups each thread looks at the pieces that it has copied,
 * before the barrier of the step. With SPLIT all threads look through the tile. */
constexpr bool LOOKS_AT_OWN = GROUPS == 2 && SPLIT == 1;

static_assert(BLOCK_KV * SPLIT == WARP_KEYS * GROUP_WARPS && COLUMNS % SPLIT == 0 && BLOCK_Q % SPLIT == 0,
              "equal shares");
static_assert(OWN_ROWS % CHUNK == 0 && CHUNK % 16 == 0, "mma.m16n8k16 contracts 16 rows at a time");
static_assert(N <= 8, "32 bits say which pairs of a thread dropout keeps");
static_assert(BLOCK_Q <= THREADS, "a thread loads the lse and the delta of a row");
static_assert(STAGES == 2 || (STAGES == 1 && SPLIT > 1), "dQ of the last step reads no query tile");
static_assert(GROUPS == 1 || (GROUPS == 2 && !K_REGS && !V_REGS && BF16),
              "P passes as fp16, which rounds less than bf16");

/* With two groups of warps: chunks of a warp's rows, and words that say what dropout keeps of a chunk. */
constexpr int CHUNKS = OWN_ROWS / CHUNK, KEPT_WORDS = (BLOCKS * N + 7) / 8;
/* Named barriers: a chunk of P is there; a group has stored its weights. */
enum { BAR_P = 1, BAR_GROUP = BAR_P + CHUNKS };
static_assert(BAR_GROUP + 2 <= 16, "the hardware has 16");

struct query_tile {
    factor q[BLOCK_Q * PITCH], dout[BLOCK_Q * PITCH];
};

/* lse is in powers of 2. An lse of inf means that the row saw no key, or does not exist. */
struct query_stats {
    float lse[BLOCK_Q], delta[BLOCK_Q];
};

struct shared_memory {
    factor k[BLOCK_KV * PITCH];
    union {
        query_tile tiles[STAGES];
        factor v_once[V_REGS ? BLOCK_KV * PITCH : 8]; /* on the way to registers, before the first query tile */
    };
    factor v[V_REGS ? 8 : BLOCK_KV * PITCH];
    factor ds[SPLIT > 1 ? 1 : 2][BLOCK_KV * DS_PITCH]; /* [key, row] */
    factor p[SPLIT > 1 ? BLOCK_KV * DS_PITCH : 8];     /* the same, of weights that other warps read */
    query_stats stats[2];
    unsigned task[4];                                                   /* with turns: what the CTA has taken */
    u32 kept[GROUPS == 2 ? CHUNKS * KEPT_WORDS * 32 * GROUP_WARPS : 4]; /* with dropout */
};

/* A query tile of a walk. A key tile walks over the query tiles from `first` to `last` of one query head, then of the
 * next. */
struct query_place {
    int head, row;
};
struct query_walk {
    int first, last;

    DEVICE query_place after(query_place at) const {
        return at.row < last ? query_place{at.head, at.row + BLOCK_Q} : query_place{at.head + 1, first};
    }
    DEVICE query_place before(query_place at) const {
        return at.row > first ? query_place{at.head, at.row - BLOCK_Q} : query_place{at.head - 1, last};
    }
};

/* The kinds of query tiles. They are types, so that each has a loop of its own. */
template <bool MASKED, bool EXACT = false> struct tile_kind {
    static constexpr bool IS_MASKED = MASKED, IS_EXACT = EXACT;
};
typedef tile_kind<false> all_seen;               /* every row sees every key */
typedef tile_kind<true> some_seen;               /* some pairs do not see each other */
typedef tile_kind<true, true> some_seen_exactly; /* and the keys or the tile hold NaN or inf; LOOKS_AT_OWN */

/* ---- a key tile ------------------------------------------------------------------------------------------------ */

/* Waits until the key tiles before this one have added to the slab. The warp calls this function. */
DEVICE void wait_for_turn(const unsigned *turn, unsigned wanted) {
    if (lane() == 0)
        while (ld_acquire(turn) < wanted) {}
    __syncwarp();
}

/* Stores the warp's part of dK or dV: its keys from warp_key on, and its strips of columns from `column` on. */
DEVICE void store_gradient(const fa_cuda_problem &p, const sequence &s, int head_kv, int warp_key, int column,
                           const fa_cuda_view &result, const float (&x)[BLOCKS][OWN_COLUMNS][4], float weight) {
    if (!result.data) return;
    element::output *rows = (element::output *)result.data + key_offset(p, result, s, 0, head_kv) + column;
    const float weights[2] = {weight, weight};
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
        if constexpr (STRIP % 4 == 0) {
#pragma unroll
            for (int c = 0; c < OWN_COLUMNS; c += STRIP)
                store_rows((const float (&)[4 * STRIP]) x[m][c], weights, rows + column_of_own(c), result.stride_row,
                           warp_key + 16 * m, s.len_kv, p.d - column - column_of_own(c));
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int key = warp_key + 16 * m + lane() / 4 + 8 * half;
#pragma unroll
                for (int c = 0; c < OWN_COLUMNS; c++)
                    if (key < s.len_kv && column + column_of(c) < p.d)
                        *(u32 *)(rows + key * result.stride_row + column_of(c)) =
                            cvt_x2<element::output>(x[m][c][2 * half] * weight, x[m][c][2 * half + 1] * weight);
            }
        }
}

/* Computes dK and dV of keys [first_key, first_key + BLOCK_KV) of one key head, and adds to dQ. */
DEVICE void make_gradients(const params &all, shared_memory &shared, const sequence &s, int head_kv, int first_key) {
    const fa_cuda_problem &p = all.problem;
    const lane_type own_lane = {};
    const int group = GROUPS == 1 ? 0 : warp() / GROUP_WARPS, group_warp = GROUPS == 1 ? warp() : warp() % GROUP_WARPS;
    const int num_heads = p.h / p.h_kv, own_key = WARP_KEYS * (group_warp / SPLIT), warp_key = first_key + own_key;
    const int own_column = group_warp % SPLIT * (8 * STRIP), own_row = group_warp % SPLIT * OWN_ROWS;
    const tile_walk seen = rows_of(p, s, first_key, min(first_key + BLOCK_KV, s.len_kv) - 1);
    const query_walk walk = {seen.start<BLOCK_Q>(), (seen.end - 1) / BLOCK_Q * BLOCK_Q};
    const query_place start = {head_kv * num_heads, walk.first};
    const int num_steps = walk.first < seen.end ? seen.num_steps<BLOCK_Q>() * num_heads : 0;
    const bool has_all_keys = first_key + BLOCK_KV <= s.len_kv;
    /* The order of the sums is kept where the sequence is not longer than the caller says. */
    const bool takes_turns = all.turns && s.len_kv <= p.num_tiles * BLOCK_KV;
    u32 k_regs[BLOCKS][K_STEPS][4], v_regs[BLOCKS][K_STEPS][4]; /* those that the row of the table wants */
    float gradients[3 - GROUPS][BLOCKS][OWN_COLUMNS][4];        /* with two groups a warp has one of both */
    auto &dv = gradients[0], &dk = gradients[2 - GROUPS];

    const auto load_keys = [&](factor *tile, const fa_cuda_view &view) {
        load_rows<BLOCK_KV>(tile, (const factor *)view.data + key_offset(p, view, s, first_key, head_kv),
                            view.stride_row, s.len_kv - first_key, p.d);
    };
    typedef tile_loader<BLOCK_Q> query_loader;
    const auto loader_of = [&](const fa_cuda_view &view, query_place at) {
        return query_loader((const factor *)view.data + query_offset(view, s, at.row, at.head), view.stride_row);
    };
    const int first_slab = slab_at(all, s, start.head, start.row);
    query_loader next_q = loader_of(p.q, start), next_dout = loader_of(p.dout, start);
    const u32 own_piece = query_loader::piece_of(smem_address(&shared));
    const auto load_queries = [&](const factor *tile, query_loader &next, const fa_cuda_view &view, query_place at) {
        const u32 to = own_piece + (u32)((const char *)tile - (const char *)&shared);
        if (!KEEPS_PLACES) next = loader_of(view, at);
        if (KEEPS_PLACES && at.row + BLOCK_Q <= s.len_q)
            next.load(to, view.stride_row, query_loader::left() < p.d);
        else
            next.load_rows(to, view.stride_row, query_loader::num_own(s.len_q - at.row, p.d));
        if (!KEEPS_PLACES) return;
        next.from +=
            at.row < walk.last ? BLOCK_Q * view.stride_row : view.stride_h - (walk.last - walk.first) * view.stride_row;
    };
    /* The lse and the delta of one row come to registers first, and to shared memory at the end of the step. */
    float next_lse = INF, next_delta = 0;
    const auto load_stats = [&](query_place at) {
        const int i = at.row + threadIdx.x;
        next_lse = INF, next_delta = 0;
        if (threadIdx.x < BLOCK_Q && i < s.len_q) {
            next_lse = *row_stat(p.lse, s, i, at.head);
            next_delta = *row_stat(p.softmax_d, s, i, at.head);
        }
    };
    const auto store_stats = [&](query_stats &stats) {
        if (threadIdx.x < BLOCK_Q) {
            stats.lse[threadIdx.x] = fabsf(next_lse) == INF ? INF : next_lse * LOG2_E - EXPONENT;
            stats.delta[threadIdx.x] = next_delta;
        }
    };
    const auto load = [&](query_place at, int slot) {
        load_queries(shared.tiles[slot].q, next_q, p.q, at);
        load_queries(shared.tiles[slot].dout, next_dout, p.dout, at);
        cp_async_commit_group();
        load_stats(at);
    };
    /* The slabs of a head's query tiles lie side by side. */
    const auto slab_of = [&](query_place at) {
        if (!KEEPS_PLACES) return slab_at(all, s, at.head, at.row);
        return first_slab + (at.head - start.head) * all.num_slabs + (at.row - start.row) / BLOCK_Q;
    };
    /* The dQ of a step is added in the next step. */
    const auto finish_step = [&](query_place at, int slot, bool skips_unseen) {
        if (!p.dq.data) return;
        const int slab = slab_of(at);
        if (takes_turns) {
            const int first = max(first_key_of_window(p, s, at.row), 0) / BLOCK_KV;
            wait_for_turn(all.turns + slab, (unsigned)(first_key / BLOCK_KV - first));
        }
        add_dq(all, shared.ds[slot], shared.k, slab, skips_unseen, own_lane);
    };
    const auto end_turn = [&](query_place at) {
        if (p.dq.data && all.turns && threadIdx.x == 0) red_release_inc(all.turns + slab_of(at));
    };

#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int c = 0; c < OWN_COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) dk[m][c][e] = dv[m][c][e] = 0;

    bool k_has_nan_or_inf = false;
    if (num_steps > 0) {
        __syncthreads(); /* all warps have finished the last key tile */
        load_keys(shared.k, p.k);
        load_keys(V_REGS ? shared.v_once : shared.v, p.v);
        cp_async_commit_group();
        if (!V_REGS) load(start, 0); /* beside K and V */
        wait_for_tiles<0>();
        k_has_nan_or_inf = has_nan_or_inf<BLOCK_KV>(shared.k);
        if constexpr (K_REGS) load_operands(k_regs, shared.k + own_key * PITCH);
        if constexpr (V_REGS) {
            load_operands(v_regs, shared.v_once + own_key * PITCH);
            __syncthreads(); /* all warps have read V */
            load(start, 0);
        }
        store_stats(shared.stats[0]);
    }

    /* Makes the weights of CHUNK rows of the step from `row` on, and stores them. Without SPLIT dV and dK grow. */
    const auto add_chunk = [&](auto kind, const weigher &weights, int slot, int step, int first_row, int row) {
        constexpr bool IS_MASKED = decltype(kind)::IS_MASKED;
        const query_tile &tile = shared.tiles[slot];
        const query_stats &stats = shared.stats[step % 2];
        float x[BLOCKS][N][4], dp[BLOCKS][N][4], derivatives[BLOCKS][N][4];
        u32 seen[BLOCKS] = {};
        factor *const ds = shared.ds[LAG * slot];
        const int l = own_lane;
        if (IS_MASKED && weights.is_unseen(warp_key, first_row + row)) {
#pragma unroll
            for (int m = 0; m < BLOCKS; m++)
#pragma unroll
                for (int n = 0; n < N; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
            if (SPLIT > 1) store_weights<true>({shared.p, own_key, row, own_lane}, x, seen);
            store_weights<true>({ds, own_key, row, own_lane}, x, seen);
            return;
        }
        multiply_own<K_REGS>(x, k_regs, own_place(shared.k, own_key, 0, l), other_place(tile.q, row, l));
        /* Do rows or keys hold NaN or inf, where some pair is unseen? */
        bool is_exact = IS_MASKED && SPLIT == 1 && is_not_finite(x);
#pragma unroll
        for (int m = 0; m < BLOCKS; m++)
            weights.exponentiate(x[m], derivatives[m], stats.lse + row, warp_key + 16 * m, first_row + row);
        multiply_own<V_REGS>(dp, v_regs, own_place(shared.v, own_key, 0, l), other_place(tile.dout, row, l));
        is_exact |= IS_MASKED && SPLIT == 1 && is_not_finite(dp);
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) {
            weights.weigh(x[m], dp[m], derivatives[m], stats.delta + row, warp_key + 16 * m, first_row + row);
            if (IS_MASKED) seen[m] = weights.mask(x[m], dp[m], stats.lse + row, warp_key + 16 * m, first_row + row);
        }
        if (SPLIT > 1) {
            store_weights<IS_MASKED>({shared.p, own_key, row, own_lane}, x, seen);
            store_weights<IS_MASKED>({ds, own_key, row, own_lane}, dp, seen);
        } else if (IS_MASKED && __any_sync(WHOLE_WARP, is_exact)) {
            store_weights<true>({ds, own_key, row, own_lane}, x, seen);
            __syncwarp();
            accumulate_seen_rows<CHUNK>(dv, ds, own_key, tile.dout, row, 0);
            __syncwarp();
            store_weights<true>({ds, own_key, row, own_lane}, dp, seen);
            __syncwarp();
            accumulate_seen_rows<CHUNK>(dk, ds, own_key, tile.q, row, 0);
        } else {
            store_weights<false>({ds, own_key, row, own_lane}, dp, seen);
            accumulate_pairs(dv, x, tile.dout + row * PITCH, own_lane);
            accumulate_pairs(dk, dp, tile.q + row * PITCH, own_lane);
        }
    };

    /* The same where group 0 makes P, and group 1 makes dS of this P. A lane of group 1 owns the pairs of a lane of
     * group 0. P ds/dqk passes through the place of its dS. */
    const auto add_chunk_of_group = [&](auto kind, const weigher &weights, int slot, int step, int first_row, int row) {
        constexpr bool IS_MASKED = decltype(kind)::IS_MASKED, IS_EXACT = decltype(kind)::IS_EXACT;
        constexpr bool MARKS = SPLIT > 1 ? IS_MASKED : IS_EXACT;
        const query_tile &tile = shared.tiles[slot];
        const query_stats &stats = shared.stats[step % 2];
        factor *const ds = shared.ds[LAG * slot];
        const int l = own_lane, chunk = (row - own_row) / CHUNK;
        u32 *const kept = shared.kept + (chunk * GROUP_WARPS + group_warp) * (32 * KEPT_WORDS) + l;
        const weights_place place(ds, own_key, row, l);
        float x[BLOCKS][N][4];
        u32 seen[BLOCKS] = {};
        if (IS_MASKED && weights.is_unseen(warp_key, first_row + row)) {
            if (group == 0)
                bar_arrive(BAR_P + chunk, 32 * WARPS);
            else
                bar_sync(BAR_P + chunk, 32 * WARPS);
            if (IS_EXACT) __syncthreads(), __syncthreads(); /* as below */
#pragma unroll
            for (int m = 0; m < BLOCKS; m++)
#pragma unroll
                for (int n = 0; n < N; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
            if (group == 1 || SPLIT > 1)
                store_weights<true>({group == 0 ? shared.p : ds, own_key, row, own_lane}, x, seen);
            return;
        }
        if (group == 0) {
            multiply_own<false>(x, k_regs, own_place(shared.k, own_key, 0, l), other_place(tile.q, row, l));
            u32 kept_words[KEPT_WORDS] = {};
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                float derivatives[N][4];
                weights.exponentiate(x[m], derivatives, stats.lse + row, warp_key + 16 * m, first_row + row);
                if (IS_MASKED) seen[m] = weights.mask(x[m], x[m], stats.lse + row, warp_key + 16 * m, first_row + row);
                const u32 bits = weights.kept_pairs(warp_key + 16 * m, first_row + row);
                if (DROPOUT) kept_words[m * N / 8] |= bits << m * N % 8 * 4;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const float *prob = x[m][n];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float *ds_dqk = derivatives[n] + 2 * half;
                        place(m, n, half) = cvt_x2<fp16>(SCORE ? prob[2 * half] * ds_dqk[0] : prob[2 * half],
                                                         SCORE ? prob[2 * half + 1] * ds_dqk[1] : prob[2 * half + 1]);
                    }
                    if (DROPOUT)
#pragma unroll
                        for (int e = 0; e < 4; e++) x[m][n][e] *= weights.kept_scale(bits, n, e);
                }
            }
            if (DROPOUT)
#pragma unroll
                for (int i = 0; i < KEPT_WORDS; i++) kept[32 * i] = kept_words[i];
            if (SPLIT > 1) store_weights<MARKS>({shared.p, own_key, row, own_lane}, x, seen);
            bar_arrive(BAR_P + chunk, 32 * WARPS);
            if (IS_EXACT) {
                __syncthreads(); /* group 1 has read P */
                store_weights<true>(place, x, seen);
                __syncwarp();
                accumulate_seen_rows<CHUNK>(dv, ds, own_key, tile.dout, row, 0);
                __syncthreads();
            } else if (SPLIT == 1) {
                accumulate_pairs(dv, x, tile.dout + row * PITCH, own_lane);
            }
        } else {
            multiply_own<false>(x, v_regs, own_place(shared.v, own_key, 0, l), other_place(tile.dout, row, l));
            bar_sync(BAR_P + chunk, 32 * WARPS);
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 deltas = *(const float2 *)(stats.delta + row + 8 * n + 2 * (l % 4));
                const float own_deltas[2] = {deltas.x * UNIT, deltas.y * UNIT};
#pragma unroll
                for (int m = 0; m < BLOCKS; m++) {
                    const u32 bits = DROPOUT ? kept[32 * (m * N / 8)] >> m * N % 8 * 4 : 0;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float prob[2];
                        unpack_x2<fp16>(place(m, n, half), prob[0], prob[1]);
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            float &dp = x[m][n][2 * half + i];
                            if (DROPOUT) dp *= weights.kept_scale(bits, n, 2 * half + i);
                            dp = prob[i] * fmaf(dp, UNIT, -own_deltas[i]);
                        }
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < BLOCKS; m++)
                if (IS_MASKED) seen[m] = weights.mask(x[m], x[m], stats.lse + row, warp_key + 16 * m, first_row + row);
            if (IS_EXACT) {
                __syncthreads();
                __syncthreads(); /* group 0 has read z P, which lay here */
            }
            store_weights<MARKS>(place, x, seen);
            if (IS_EXACT) {
                __syncwarp();
                accumulate_seen_rows<CHUNK>(dk, ds, own_key, tile.q, row, 0);
            } else if (SPLIT == 1) {
                accumulate_pairs(dk, x, tile.q + row * PITCH, own_lane);
            }
        }
    };

    query_place now = start;
    bool last_skips = false; /* dQ of the last step must skip unseen pairs, because a key holds NaN or inf */
#pragma unroll 1
    for (int step = 0; step < num_steps; step++) {
        const int slot = step % STAGES;
        const query_tile &tile = shared.tiles[slot];
        const auto is_partial_tile = [&] {
            return !has_all_keys || is_partial<BLOCK_Q>(now.row, seen.full_begin, seen.full_end);
        };
        /* This step's rows have come. All warps have stored dS and added dQ of the steps before. */
        cp_async_wait_group<0>();
        bool is_special = threadIdx.x < BLOCK_Q && fabsf(next_lse) == INF;
        if (LOOKS_AT_OWN && is_partial_tile())
            is_special |= query_loader::own_has_nan_or_inf(tile.q) || query_loader::own_has_nan_or_inf(tile.dout);
        is_special = __syncthreads_or(is_special);
        if (step > LAG) end_turn(LAG == 1 ? walk.before(walk.before(now)) : walk.before(now));
        const bool skips = last_skips, adds_first = WARPS < 8 || (warp() < WARPS / 2) == (GROUPS == 1);
        if (LAG == 1 && step > 0 && adds_first) finish_step(walk.before(now), 1 - slot, skips);
        /* The copies come after products, which need no addresses. */
        if (STAGES == 2 && step + 1 < num_steps) load(walk.after(now), 1 - slot);
        const bool is_whole = !is_partial_tile() && !is_special;
        const weigher weights(p, s, now.head, own_lane);
        last_skips = !is_whole && k_has_nan_or_inf;
        bool is_exact = LOOKS_AT_OWN && last_skips;
        if (SPLIT > 1 ? !is_whole : LOOKS_AT_OWN && is_special && !is_exact)
            is_exact = has_nan_or_inf<2 * BLOCK_Q>(tile.q); /* or tile.dout, which follows */
#pragma unroll 1
        for (int row = own_row; row < own_row + OWN_ROWS; row += CHUNK) {
            const auto add = [&](auto kind) {
                if constexpr (GROUPS == 2)
                    add_chunk_of_group(kind, weights, slot, step, now.row, row);
                else
                    add_chunk(kind, weights, slot, step, now.row, row);
            };
            if (is_whole)
                add(all_seen());
            else if (!LOOKS_AT_OWN || !is_exact)
                add(some_seen());
            else if constexpr (LOOKS_AT_OWN)
                add(some_seen_exactly());
        }
        if (SPLIT > 1) {
            /* All warps of a group have stored their weights. */
            if (GROUPS == 2)
                bar_sync(BAR_GROUP + group, 32 * GROUP_WARPS);
            else
                __syncthreads();
            const auto add = [&](auto &gradient, const factor *weights, const factor *rows) {
                if (is_exact)
                    accumulate_seen_rows<BLOCK_Q>(gradient, weights, own_key, rows, 0, own_column);
                else
                    accumulate_shared(gradient, weights, own_key, rows, own_column, own_lane);
            };
            if (GROUPS == 2) {
                add(dv, group == 0 ? shared.p : shared.ds[0], group == 0 ? tile.dout : tile.q);
            } else {
                add(dv, shared.p, tile.dout);
                add(dk, shared.ds[0], tile.q);
            }
            if (STAGES == 1 || GROUPS == 2) __syncthreads(); /* all warps have read the query tile, and stored dS */
            if (STAGES == 1 && step + 1 < num_steps) load(walk.after(now), 0);
            finish_step(now, 0, last_skips);
        }
        if (LAG == 1 && step > 0 && !adds_first) finish_step(walk.before(now), 1 - slot, skips);
        if (step + 1 < num_steps) store_stats(shared.stats[(step + 1) % 2]);
        now = walk.after(now);
    }
    if (num_steps > 0) {
        __syncthreads();
        const query_place last = walk.before(now);
        if (num_steps > LAG) end_turn(LAG == 1 ? walk.before(last) : last);
        if (LAG == 1) {
            finish_step(last, (num_steps - 1) % 2, last_skips);
            if (all.turns) {
                __syncthreads(); /* all warps have added */
                end_turn(last);
            }
        }
    }
    if (GROUPS == 1 || group == 1) store_gradient(p, s, head_kv, warp_key, own_column, p.dk, dk, p.scale);
    if (GROUPS == 1 || group == 0) store_gradient(p, s, head_kv, warp_key, own_column, p.dv, dv, UNIT);
}

/* A task is one key tile of one key head of one sequence. A task of a sequence longer than max_seqlen does several key
 * tiles. With turns the CTAs take their tasks from a counter, so a CTA waits only for tasks that other CTAs have taken
 * before. */
extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) KERNEL(const params p) {
    extern __shared__ __align__(128) char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const fa_cuda_problem &a = p.problem;
    const long long num_tasks = (long long)a.b * a.h_kv * a.num_tiles;
    for (long long task = blockIdx.x;; task += gridDim.x) {
        if (p.turns) {
            __syncthreads(); /* all threads know the last task */
            if (threadIdx.x == 0) shared.task[0] = atomicAdd(p.tile_counter, 1u);
            __syncthreads();
            task = shared.task[0];
        }
        if (task >= num_tasks) return;
        /* NOTE: a number, not a head and a tile. With these ptxas orders the steps of 64 columns worse: 1 to 5%. */
        const long long at = task_in_order(task, a.num_tiles, a.b * a.h_kv, a.group_heads);
        const int tile = (int)(at % a.num_tiles), head_kv = (int)(at / a.num_tiles % a.h_kv);
        const sequence s = sequence_at(a, (int)(at / a.num_tiles / a.h_kv));
        for (int key = tile * BLOCK_KV; key < s.len_kv; key += a.num_tiles * BLOCK_KV)
            make_gradients(p, shared, s, head_kv, key);
    }
}
