/* The kernel computes the attention backward on every GPU from compute capability 8.0 on, for every problem. The
 * results are deterministic.
 *
 *   P_ij = exp(s_ij - lse_i)    dP = dO V^T    dS = P (z dP - delta) (1 - tanh^2 of a softcap)    z: dropout
 *   dQ = scale dS K             dK = scale dS^T Q             dV = (z P)^T dO
 *
 * One loop computes all three gradients. A kernel computes one gradient, or dK and dV together (GRAD). A CTA owns
 * OWN rows, 16 BLOCKS rows per warp. The CTA walks over the tiles of the other side in a fixed order, without
 * atomics:
 *
 *   GRAD          own rows      walks over    S =      dP =      adds
 *   0 dQ          q and dO      k and v       Q K^T    dO V^T    dS K
 *   1 dK          k and v       q and dO      K Q^T    V dO^T    dS Q               all query heads of a key head
 *   2 dV          k             q and dO      K Q^T    -         z P dO             the same
 *   3 dK and dV   k and v       q and dO      K Q^T    V dO^T    dS Q and z P dO    where registers suffice for both
 *
 * z P and dS stay in registers, because the order of the accumulators is the order of the next product's first
 * operand. The scores are computed two or three times. In exchange, the kernels store nothing but delta from one
 * kernel to the next and sum nothing through memory. As in attn_fwd_any.cu, masked pairs are left out and never
 * multiplied by zero.
 *
 * If v has more columns than a tile, each block of columns of dV has a CTA of its own. For dQ and dK the blocks of dO
 * and v come one after the other to the same places and add to dP.
 *
 * Specification: ../cpu/reference.c. */
#include "cuda_problem.h"

/* A row of tiles.def gives HEAD_DIM columns, WARPS of BLOCKS times 16 own rows, and WALK rows of the other side in
 * STAGES. The row also gives CTAS of an SM and GRAD. */
#if !defined(HEAD_DIM) || !defined(WALK) || !defined(WARPS) || !defined(BLOCKS) || !defined(STAGES) || \
    !defined(CTAS) || !defined(GRAD) || !defined(DROPOUT)
#error "a row of tiles.def; DROPOUT beside FLEX: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_any
#endif

#if FLEX
#include "flex_exact_sums.cuh"
#endif
#include "tile_any.cuh"

constexpr int WARP_ROWS = 16 * BLOCKS, OWN = WARP_ROWS * WARPS, N = WALK / 8;
constexpr bool OWNS_KEYS = GRAD != 0, ADDS_DS = GRAD != 2, ADDS_P = GRAD >= 2;
constexpr bool MAY_DROP = DROPOUT || !FLEX; /* plain texts ask for dropout when they run */

static_assert(HEAD_DIM % 16 == 0 && WALK % 16 == 0, "mma.m16n8k16 contracts 16 at a time");
static_assert(OWNS_KEYS || WALK == 16 || WALK % 32 == 0, "a dropout patch has 32 keys");
static_assert(WALK <= 64, "32 bits say which pairs of a thread dropout keeps");

/* own_s and walk_s hold rows of q or k. own_dp and walk_dp hold rows of dO or v. */
struct shared_memory {
    factor own_s[OWN * PITCH], own_dp[ADDS_DS ? OWN * PITCH : 8];
    factor walk_s[STAGES][WALK * PITCH], walk_dp[STAGES][WALK * PITCH];
};
static_assert(sizeof(shared_memory) <= 99 * 1024, "compute capabilities 8.6, 8.9 and 12.0 give a CTA 99 KiB");
static_assert(!MAY_HAVE_V_BLOCKS || (GRAD != 3 && STAGES == 1), "blocks of v need a gradient each, and one stage");

/* ---- rows ------------------------------------------------------------------------------------------------------ */

/* A row_stats is the lse and delta of a query. An lse of inf means that the query saw no key. Such a query gives
 * nothing and gets nothing. A query with an lse of NaN gives NaN. */
struct row_stats {
    float lse, delta;
};

DEVICE row_stats stats_at(const fa_cuda_problem &p, const sequence &s, int i, int head, bool exists) {
    if (!exists) return {INF, 0};
    const float lse = *row_stat(p.lse, s, i, head);
    return {fabsf(lse) == INF ? INF : lse, ADDS_DS ? *row_stat(p.softmax_d, s, i, head) : 0};
}

/* Returns the stats behind the columns of query r in shared memory, where the row of the query is padded. */
DEVICE row_stats &stats_behind(factor *tile, int r) { return *(row_stats *)(tile + r * PITCH + HEAD_DIM); }

/* Returns the place of a row of q, k, v or dO, for load_tile. The place begins at column `first`. */
DEVICE const element *row_at(const fa_cuda_problem &p, const fa_cuda_view &tensor, const sequence &s, int row, int head,
                             bool is_key, int first = 0) {
    return (const element *)tensor.data + first +
           (is_key ? key_offset(p, tensor, s, row, head / (p.h / p.h_kv)) : query_offset(tensor, s, row, head));
}

/* ---- one tile -------------------------------------------------------------------------------------------------- */

/* S and dP [16 BLOCKS, WALK] become z P and dS. This function serves tiles where every query sees every key and the
 * scores are plain. If the thread's rows are queries, `own` holds their stats. If the columns are queries, their
 * stats lie behind the queries in shared memory. */
DEVICE void make_plain_weights(const fa_cuda_problem &p, const row_stats (&own)[BLOCKS][2], factor *queries,
                               float (&s)[BLOCKS][N][4], float (&dp)[BLOCKS][N][4]) {
    factor *first_query = queries + 2 * (laneid() % 4) * PITCH;
    bool is_silent = false;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            row_stats q;
            if (OWNS_KEYS) q = stats_behind(first_query, 8 * n + e % 2), is_silent |= q.lse == INF;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                if (!OWNS_KEYS) q = own[m][e / 2];
                const float prob = ex2(fmaf(s[m][n][e], p.scale, -q.lse) * LOG2_E);
                s[m][n][e] = prob;
                if (ADDS_DS) dp[m][n][e] = prob * (dp[m][n][e] - q.delta);
            }
        }
    if (!is_silent) return;
    /* In shared memory zeros stand for a query that saw no key. Zeros times an infinite key are NaN, so the weights of
     * the query become 0. */
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (stats_behind(first_query, 8 * n + e % 2).lse == INF)
#pragma unroll
                for (int m = 0; m < BLOCKS; m++) s[m][n][e] = dp[m][n][e] = 0;
}

/* Bit 4 n + e says whether dropout keeps element e of fragment n of a block of [16, WALK]. */
DEVICE u32 kept_of(const fa_cuda_problem &p, const sequence &seq, int head, int own_row, int walk) {
    const dropout drop(p, seq.b_idx, head);
    if (!MAY_DROP || !drop.is_on) return 0xffffffffu;
    return OWNS_KEYS ? drop.kept_rows_are_keys<N>(own_row, walk) : drop.kept_rows_are_queries<N>(own_row, walk);
}

DEVICE float kept_scale(const fa_cuda_problem &p, bool is_kept) { return !MAY_DROP ? 1 : is_kept ? p.keep_scale : 0; }

/* Does the same for a block of [16, WALK] and for all problems. Own rows begin at `own_row`, and walked rows begin
 * at `walk`. Bit 4 n + e of the result says that the query of element e of fragment n sees the key. */
DEVICE u32 make_weights(const fa_cuda_problem &p, const sequence &seq, int head, int own_row, int walk,
                        const row_stats (&own)[2], factor *queries, float (&s)[N][4], float (&dp)[N][4]) {
    const scorer score(p, seq, head);
    const int l = laneid(), row = own_row + l / 4, column = walk + 2 * (l % 4);
    const int own_shift = OWNS_KEYS ? 0 : score.at.shift, walk_shift = OWNS_KEYS ? score.at.shift : 0;
    const u32 kept = kept_of(p, seq, head, own_row, walk);
    u32 seen = 0;
    int chunk[2]; /* first position of the chunk that holds the thread's row */
    if (OF_3 && p.attention_chunk > 0)
        for (int half = 0; half < 2; half++) chunk[half] = chunk_begin(row + 8 * half + own_shift, p.attention_chunk);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int across = row + e / 2 * 8, along = column + 8 * n + e % 2;
            const int i = OWNS_KEYS ? along : across, j = OWNS_KEYS ? across : along;
            const row_stats q = OWNS_KEYS ? stats_behind(queries, along - walk) : own[e / 2];
            bool sees = j >= first_key_of_window(p, seq, i) && j < end_key_of_window(p, seq, i) && q.lse != INF;
            if (OF_3 && p.attention_chunk > 0)
                sees = sees && (u32)(along + walk_shift - chunk[e / 2]) < (u32)p.attention_chunk;
            float weight = 0, change = 0, derivative;
            seen |= (u32)sees << (4 * n + e);
            if (sees) {
                float x = score(s[n][e], i, j, derivative) - q.lse;
                if (score.is_plain)
                    x = fmaf(s[n][e], score.score_scale, -q.lse); /* the product is not rounded, as in the forward */
                const float prob = ex2(x * LOG2_E);
                const float z = kept_scale(p, kept >> (4 * n + e) & 1);
                weight = prob * z;
                if (ADDS_DS) change = prob * (z * dp[n][e] - q.delta) * derivative;
            }
            s[n][e] = weight;
            if (ADDS_DS) dp[n][e] = change;
        }
    return seen;
}

#if FLEX
/* Does make_weights' work with the user's functions, for a tile of this kind. mod is of the query head. The loop is
 * that of apply_mods in attn_fwd_any.cu. */
DEVICE u32 make_flex_weights(const fa_cuda_problem &p, const mods &mod, const sequence &seq, int head, block_kind kind,
                             int own_row, int walk, const row_stats (&own)[2], factor *queries, mod_sums &sums,
                             float (&s)[N][4], float (&dp)[N][4]) {
    const int row = own_row + laneid() / 4, column = walk + 2 * (laneid() % 4);
    const u32 kept = kept_of(p, seq, head, own_row, walk);
    const u32 in_mask = pairs_that_see<N, OWNS_KEYS>(mod, kind, seq.len_q, seq.len_kv, row, column);
    u32 seen = 0;
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        float weights[4], changes[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int across = row + e / 2 * 8, along = column + 8 * n + e % 2;
            const int i = OWNS_KEYS ? along : across, j = OWNS_KEYS ? across : along;
            const row_stats q = OWNS_KEYS ? stats_behind(queries, along - walk) : own[e / 2];
            const bool exists = i < seq.len_q && j < seq.len_kv && q.lse != INF;
            const float x = __fmul_rn(s[0][e], p.scale), score = mod.score(x, i, j);
            const bool sees = exists && score != -INF && (in_mask >> (4 * n + e) & 1);
            weights[e] = changes[e] = 0;
            seen |= (u32)sees << (4 * n + e);
            if (sees) {
                const float prob = ex2((score - q.lse) * LOG2_E), z = kept_scale(p, kept >> (4 * n + e) & 1);
                weights[e] = prob * z;
                if (ADDS_DS) changes[e] = mod.derivative(sums, x, prob * (z * dp[0][e] - q.delta), i, j);
            }
        }
        move_up(s, weights);
        if (ADDS_DS) move_up(dp, changes);
    }
    return seen;
}
#endif

/* O += W B. The product uses FMAs where some pair does not count and B holds NaN or inf. */
DEVICE void add(float (&o)[BLOCKS][COLUMNS][4], const float (&w)[BLOCKS][N][4], const factor *b, bool is_whole,
                const u32 (&seen)[BLOCKS]) {
    if (!is_whole && has_nan_or_inf<WALK>(b))
        accumulate_by_fma<false>(o, w, b, seen);
    else
        accumulate(o, w, b);
}

/* The kernel adds up the gradients of its own rows here. `ds` adds up dQ or dK from dS, and `p` adds up dV from z P. */
struct sums {
    float ds[BLOCKS][COLUMNS][4], p[BLOCKS][COLUMNS][4];
};

/* Adds the contribution of the walked rows of one query head to the own rows from `own` on. v is a block of columns of
 * v and dO. load_own_dp loads such a block of the own rows. */
template <class loader>
DEVICE void walk_over(const problem &p, shared_memory &shared, const sequence &s, int head, v_block v, int own,
                      const loader &load_own_dp, sums &o) {
    const int num_own = OWNS_KEYS ? s.len_kv : s.len_q, warp_own = own + WARP_ROWS * warp();
    const int last_own = min(own + OWN, num_own) - 1;
#if FLEX
    const mods mod(p.flex, p.values, s.b_idx, head);
    const tile_walk met = {0, OWNS_KEYS ? s.len_q : s.len_kv, 0, OWNS_KEYS ? s.len_q : s.len_kv};
#else
    const tile_walk met = OWNS_KEYS ? rows_of(p, s, own, last_own) : keys_of(p, s, own, last_own);
#endif
    const fa_cuda_view &view_s = OWNS_KEYS ? p.q : p.k, &view_dp = OWNS_KEYS ? p.dout : p.v;
    /* At 256 columns the registers do not suffice for the short path. */
    const bool is_plain = HEAD_DIM < 256 && !MODS_CHANGE_SCORES && !p.rng_state && scorer(p, s, head).is_plain;
#if FLEX
    block_walk<WALK, STAGES, !OWNS_KEYS> walk(mod.map, own, last_own, met.end);
    mod_sums sums = {};
#else
    interval_walk<WALK> walk(met);
#endif
    row_stats own_stats[BLOCKS][2], next = {INF, 0};
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = warp_own + 16 * m + 8 * half + lane() / 4;
            if (!OWNS_KEYS) own_stats[m][half] = stats_at(p, s, i, head, i < s.len_q);
        }

    /* Each lane finds one row of its warp. The stats of the lane's row of the next tile are already on their way. */
    const auto own_walked = [&](int step) { return walk.first(step) + warp() * (WALK / WARPS) + laneid(); };
    const auto is_met = [&](int row) { return laneid() < WALK / WARPS && row >= met.begin && row < met.end; };
    const auto load = [&](int step) {
        const int slot = step % STAGES, row = own_walked(step), following = own_walked(step + 1);
        const bool is_wanted = is_met(row) && (!OWNS_KEYS || next.lse != INF);
        if (walk.exists(step)) {
            load_tile<WALK>(p, shared.walk_s[slot], is_wanted ? row_at(p, view_s, s, row, head, !OWNS_KEYS) : nullptr,
                            p.d);
            load_tile<WALK>(p, shared.walk_dp[slot],
                            is_wanted ? row_at(p, view_dp, s, row, head, !OWNS_KEYS, v.first) : nullptr, v.num);
        }
        if (OWNS_KEYS) {
            if (walk.exists(step) && laneid() < WALK / WARPS)
                stats_behind(shared.walk_s[slot], warp() * (WALK / WARPS) + laneid()) = next;
            next = stats_at(p, s, following, head, is_met(following));
        }
        cp_async_commit_group();
    };

    if (OWNS_KEYS) next = stats_at(p, s, own_walked(0), head, is_met(own_walked(0)));
    __syncthreads(); /* all warps have read the last tiles */
    if (STAGES == 2) load(0);
#pragma unroll 1
    for (int step = 0; walk.exists(step); walk.advance(), step++) {
        const int first = walk.first(step);
        factor *walk_s = shared.walk_s[step % STAGES], *walk_dp = shared.walk_dp[step % STAGES];
        float scores[BLOCKS][N][4], dp[BLOCKS][N][4];
        if (STAGES == 1) {
            __syncthreads();
            load(step);
        }
        wait_for_tiles<0>(); /* this step's tiles have come, and all warps have read the last tiles */
        if (STAGES == 2) load(step + 1);
        multiply_rows(scores, shared.own_s + WARP_ROWS * warp() * PITCH, walk_s);
        if (ADDS_DS) multiply_rows(dp, shared.own_dp + WARP_ROWS * warp() * PITCH, walk_dp);
        if (MAY_HAVE_V_BLOCKS && ADDS_DS && p.num_v_blocks > 1) {
            const int row = own_walked(step), r = warp() * (WALK / WARPS) + laneid();
            const bool is_wanted = is_met(row) && (!OWNS_KEYS || stats_behind(walk_s, r).lse != INF);
            for (int idx = 1; idx < p.num_v_blocks; idx++) {
                const v_block next_v = v_block_at(p, idx);
                __syncthreads(); /* all warps have read the last block */
                load_own_dp(next_v);
                load_tile<WALK>(p, walk_dp,
                                is_wanted ? row_at(p, view_dp, s, row, head, !OWNS_KEYS, next_v.first) : nullptr,
                                next_v.num);
                cp_async_commit_group();
                wait_for_tiles<0>();
                multiply_rows<true>(dp, shared.own_dp + WARP_ROWS * warp() * PITCH, walk_dp);
            }
            __syncthreads();
            load_own_dp(v); /* for the next step */
        }

#if FLEX
        const block_kind kind = walk.at(step).kind;
        const bool is_whole = !FLEX_SCORE && kind == FULL_BLOCK && first + WALK <= met.end;
#else
        const bool is_whole = !is_partial<WALK>(first, met.full_begin, met.full_end);
#endif
        u32 seen[BLOCKS];
        if (is_whole && is_plain)
            make_plain_weights(p, own_stats, walk_s, scores, dp);
        else
#pragma unroll
            for (int m = 0; m < BLOCKS; m++)
#if FLEX
                seen[m] = make_flex_weights(p, mod, s, head, kind, warp_own + 16 * m, first, own_stats[m], walk_s, sums,
                                            scores[m], dp[m]);
#else
                seen[m] = make_weights(p, s, head, warp_own + 16 * m, first, own_stats[m], walk_s, scores[m], dp[m]);
#endif
        if (ADDS_P) add(o.p, scores, walk_dp, is_whole, seen);
        if (ADDS_DS) add(o.ds, dp, walk_s, is_whole, seen);
    }
#if FLEX
    mod.add(sums);
#endif
}

/* ---- all tiles ------------------------------------------------------------------------------------------------- */

DEVICE void store_rows(const fa_cuda_problem &p, const sequence &s, int head, int row, const fa_cuda_view &result,
                       const float (&o)[BLOCKS][COLUMNS][4], float weight, v_block columns) {
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row + 16 * m + lane() / 4 + 8 * half;
            if (!result.data || i >= (OWNS_KEYS ? s.len_kv : s.len_q)) continue;
            const bool saw_nothing = !OWNS_KEYS && fabsf(*row_stat(p.lse, s, i, head)) == INF;
            element::output *to = (element::output *)result.data + columns.first +
                                  (OWNS_KEYS ? key_offset(p, result, s, i, head) : query_offset(result, s, i, head));
            store_row(p, to, o[m], half, weight, saw_nothing, columns.num);
        }
}

DEVICE void clear(float (&o)[BLOCKS][COLUMNS][4]) {
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[m][c][0] = o[m][c][1] = o[m][c][2] = o[m][c][3] = 0;
}

/* Computes the gradients of own rows [own, own + OWN) of one head, with block v of the columns of v. */
DEVICE void make_gradients(const problem &p, shared_memory &shared, const sequence &s, int head_own, v_block v,
                           int own) {
    const int g = p.h / p.h_kv, num_own = OWNS_KEYS ? s.len_kv : s.len_q;
    const int head = OWNS_KEYS ? head_own * g : head_own, num_heads = OWNS_KEYS ? g : 1;
    const fa_cuda_view &view_s = OWNS_KEYS ? p.k : p.q, &view_dp = OWNS_KEYS ? p.v : p.dout;
    const int warp_own = own + WARP_ROWS * warp(), own_row = warp_own + lane();
    const bool is_wanted =
        lane() < WARP_ROWS && own_row < num_own && (OWNS_KEYS || fabsf(*row_stat(p.lse, s, own_row, head)) != INF);
    sums o;
    if (ADDS_DS) clear(o.ds);
    if (ADDS_P) clear(o.p);
    __syncthreads(); /* all warps have read the last own rows */
    const auto load_own_dp = [&](v_block columns) {
        load_tile<OWN>(p, shared.own_dp,
                       is_wanted ? row_at(p, view_dp, s, own_row, head, OWNS_KEYS, columns.first) : nullptr,
                       columns.num);
    };
    load_tile<OWN>(p, shared.own_s, is_wanted ? row_at(p, view_s, s, own_row, head, OWNS_KEYS) : nullptr, p.d);
    if (ADDS_DS) load_own_dp(v);
#pragma unroll 1
    for (int i = 0; i < num_heads; i++) walk_over(p, shared, s, head + i, v, own, load_own_dp, o);
    cp_async_wait_all(); /* waits for the own rows, if there were no rows to walk over */

    if (ADDS_DS) store_rows(p, s, head_own, warp_own, OWNS_KEYS ? p.dk : p.dq, o.ds, p.scale, {0, p.d});
    if (ADDS_P) store_rows(p, s, head_own, warp_own, p.dv, o.p, 1, v);
}

/* Packed rows behind the last sequence belong to no sequence. The gradients of such rows become zero. */
DEVICE void clear_unowned_rows(const fa_cuda_problem &p, const fa_cuda_view &result, int columns, int head, int first,
                               int step) {
    for (int row = first; result.data && row < (OWNS_KEYS ? p.total_kv : p.total_q); row += step)
        for (int i = threadIdx.x; i < columns; i += blockDim.x)
            ((element::output *)result.data)[row * result.stride_row + head * result.stride_h + i] = element::output{};
}

/* A task is one tile of one head of one sequence, for dV with one block of columns of v. A task of a sequence longer
 * than max_seqlen does several tiles. */
extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) KERNEL(const problem p) {
    extern __shared__ __align__(16) char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const int heads = OWNS_KEYS ? p.h_kv : p.h, *cu_seqlens = OWNS_KEYS ? p.cu_seqlens_k : p.cu_seqlens_q;
    const int num_blocks = MAY_HAVE_V_BLOCKS && GRAD == 2 ? p.num_v_blocks : 1;
    const long long num_tasks = (long long)(p.b + p.zero_tensors) * heads * p.num_tiles * num_blocks;
    for (long long at = blockIdx.x; at < num_tasks; at += gridDim.x) {
        const long long task = at / num_blocks;
        const v_block v = v_block_at(p, (int)(at % num_blocks));
        const int tile = (int)(task % p.num_tiles), head = (int)(task / p.num_tiles % heads);
        const int b_idx = (int)(task / p.num_tiles / heads);
        if (b_idx == p.b) {
            const int first = clamp(cu_seqlens[p.b], 0, OWNS_KEYS ? p.total_kv : p.total_q) + tile;
            if (ADDS_DS) clear_unowned_rows(p, OWNS_KEYS ? p.dk : p.dq, p.d, head, first, p.num_tiles);
            if (ADDS_P) clear_unowned_rows(p, p.dv, OF_3 ? p.d_v : p.d, head, first, p.num_tiles);
            continue;
        }
        const sequence s = sequence_at(p, b_idx);
        for (int own = tile * OWN; own < (OWNS_KEYS ? s.len_kv : s.len_q); own += p.num_tiles * OWN)
            make_gradients(p, shared, s, head, v, own);
    }
}
