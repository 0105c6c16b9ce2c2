/* Attention backward on every GPU from compute capability 8.0 on, for every problem; deterministic.
 *
 *   P_ij = exp(s_ij - lse_i)    dP = dO V^T    dS = P (z dP - delta) (1 - tanh^2 of a softcap)    z: dropout
 *   dQ = scale dS K             dK = scale dS^T Q             dV = (z P)^T dO
 *
 * Three gradients, one loop. A kernel computes one of them (GRAD); a CTA owns OWN rows of it, 16 a warp, and walks over the
 * tiles of the other side, in a fixed order, without atomics:
 *
 *   GRAD      own rows      walks over    S =      dP =      adds
 *   0 dQ      q and dO      k and v       Q K^T    dO V^T    dS K
 *   1 dK      k and v       q and dO      K Q^T    V dO^T    dS Q      all heads of the key's group, one after the other
 *   2 dV      k             q and dO      K Q^T    -         z P dO    the same
 *
 * W, what is multiplied last, stays in registers: the accumulators' order is that of the next product's first operand. The
 * scores are computed three times; in exchange nothing but delta is stored between the kernels, and nothing is summed
 * through memory. Masked pairs are left out, never multiplied by zero, as in attn_fwd_any.cu.
 *
 * Specification: ../cpu/reference.c. */
#include "cuda_problem.h"

#if !defined(HEAD_DIM) || !defined(WALK) || !defined(WARPS) || !defined(GRAD)
#error "a row of tiles.def: HEAD_DIM columns, WARPS of 16 own rows, WALK rows of the other side, GRAD 0 dQ, 1 dK, 2 dV"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_any
#endif

#include "tile_any.cuh"

constexpr int OWN = 16 * WARPS, N = WALK / 8;
constexpr bool OWNS_KEYS = GRAD != 0;

static_assert(HEAD_DIM % 16 == 0 && WALK % 16 == 0, "mma.m16n8k16 contracts 16 at a time");
static_assert(OWNS_KEYS || WALK == 16 || WALK % 32 == 0, "a dropout patch has 32 keys");
static_assert(WALK <= 64, "32 bits say which pairs of a thread dropout keeps");

/* Rows of q or k, and of dO or v. */
struct shared_memory {
    element own_s[OWN * PITCH], own_dp[GRAD == 2 ? 8 : OWN * PITCH];
    element walk_s[WALK * PITCH], walk_dp[WALK * PITCH];
};
static_assert(sizeof(shared_memory) <= 99 * 1024, "compute capabilities 8.6, 8.9 and 12.0 give a CTA 99 KiB");

/* A row without finite lse gives and gets nothing; one with a NaN gives NaN. */
DEVICE bool saw_nothing(float lse) { return fabsf(lse) == INF; }

/* ---- rows ------------------------------------------------------------------------------------------------------ */

/* The rows of the other side that some of the own rows [first, last] meets, and those that all of them meet. */
struct span {
    int begin, end, whole_begin, whole_end;
};

DEVICE span walked_rows(const fa_cuda_problem &p, const sequence &s, int first, int last) {
    if (!OWNS_KEYS) return {first_key(p, s, first), end_key(p, s, last), first_key(p, s, last), end_key(p, s, first)};
    /* key j is seen by the queries from j - shift - right to j - shift + left */
    const int shift = s.len_kv - s.len_q, left = p.window_left, right = p.window_right;
    return {right < 0 ? 0 : max(first - shift - right, 0), left < 0 ? s.len_q : min(last - shift + left + 1, s.len_q),
            right < 0 ? 0 : max(last - shift - right, 0), left < 0 ? s.len_q : min(first - shift + left + 1, s.len_q)};
}

/* Rows from `first` on of a tensor, for load_tile: those of [begin, end), and of queries those that saw something. */
struct row_finder {
    const fa_cuda_problem &p;
    const sequence &s;
    const fa_cuda_view &tensor;
    bool are_keys;
    int head, first, begin, end;

    DEVICE long long operator()(int r) const {
        const int row = first + r;
        if (row < begin || row >= end) return -1;
        if (are_keys) return key_offset(p, tensor, s, row, head / (p.h / p.h_kv));
        return saw_nothing(*row_stat(p.lse, s, row, head)) ? -1 : query_offset(tensor, s, row, head);
    }
};

/* ---- one tile -------------------------------------------------------------------------------------------------- */

/* A query as its pairs need it: the keys it sees, none if it saw nothing. */
struct query {
    int i, first, end;
    float lse, delta;
};

DEVICE query query_at(const fa_cuda_problem &p, const sequence &s, int i, int head) {
    const float lse = i < s.len_q ? *row_stat(p.lse, s, i, head) : INF;
    if (saw_nothing(lse)) return {i, 0, 0, 0, 0};
    return {i, first_key(p, s, i), end_key(p, s, i), lse, GRAD == 2 ? 0 : *row_stat(p.softmax_d, s, i, head)};
}

/* W [16, WALK] from S and dP where every query sees every key, and scores are plain. */
DEVICE void make_plain_weights(const fa_cuda_problem &p, const sequence &s, int head, int own, int walk,
                               float (&w)[N][4], const float (&dp)[N][4]) {
    const int row = own + lane() / 4, column = walk + 2 * (lane() % 4);
    float lse[2], delta[2];
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int x = 0; x < 2; x++) {
            if (!OWNS_KEYS && n > 0) continue; /* of the two rows, or of two columns */
            const int i = OWNS_KEYS ? column + 8 * n + x : row + 8 * x;
            lse[x] = i < s.len_q ? *row_stat(p.lse, s, i, head) : INF;
            if (saw_nothing(lse[x])) lse[x] = INF; /* p is zero */
            if (GRAD != 2) delta[x] = i < s.len_q ? *row_stat(p.softmax_d, s, i, head) : 0;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int x = OWNS_KEYS ? e % 2 : e / 2;
            const float prob = ex2(fmaf(w[n][e], p.scale, -lse[x]) * LOG2_E);
            w[n][e] = GRAD == 2 ? prob : prob * (dp[n][e] - delta[x]);
        }
    }
}

/* W [16, WALK] from S and dP: own rows from `own` on, walked rows from `walk` on. Bit 4 n + e of the result: the query of
 * element e of fragment n sees the key. */
DEVICE u32 make_weights(const fa_cuda_problem &p, const sequence &s, int head, int own, int walk, float (&w)[N][4],
                        const float (&dp)[N][4]) {
    const scorer score(p, s, head);
    const dropout drop(p, s.b_idx, head);
    const int row = own + lane() / 4, column = walk + 2 * (lane() % 4);
    u32 kept = 0xffffffffu, seen = 0;
    if (drop.is_on) kept = OWNS_KEYS ? drop.kept_rows_are_keys<N>(own, walk) : drop.kept_rows_are_queries<N>(own, walk);
    query queries[2]; /* of the two rows, or of two columns */
    if (!OWNS_KEYS) queries[0] = query_at(p, s, row, head), queries[1] = query_at(p, s, row + 8, head);
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (OWNS_KEYS) {
            queries[0] = query_at(p, s, column + 8 * n, head);
            queries[1] = query_at(p, s, column + 8 * n + 1, head);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const query &q = queries[OWNS_KEYS ? e % 2 : e / 2];
            const int j = OWNS_KEYS ? row + e / 2 * 8 : column + 8 * n + e % 2;
            float weight = 0, capped;
            seen |= (u32)(j >= q.first && j < q.end) << (4 * n + e);
            if (j >= q.first && j < q.end) {
                float x = score(w[n][e], q.i, j, capped) - q.lse;
                if (score.is_plain) x = fmaf(w[n][e], score.scale, -q.lse); /* as the forward: not rounded before */
                const float prob = ex2(x * LOG2_E);
                const float z = kept >> (4 * n + e) & 1 ? p.keep_scale : 0;
                weight = GRAD == 2 ? prob * z : prob * (z * dp[n][e] - q.delta) * (1 - capped * capped);
            }
            w[n][e] = weight;
        }
    }
    return seen;
}

/* Adds to o what the walked rows of one query head contribute to the own rows from `own` on. */
DEVICE void walk(const fa_cuda_problem &p, shared_memory &shared, const sequence &s, int head, int own,
                 float (&o)[COLUMNS][4]) {
    const int num_own = OWNS_KEYS ? s.len_kv : s.len_q, warp_own = own + 16 * warp();
    const span met = walked_rows(p, s, own, min(own + OWN, num_own) - 1);
    const fa_cuda_view &view_s = OWNS_KEYS ? p.q : p.k, &view_dp = OWNS_KEYS ? p.dout : p.v;
    const bool is_plain = HEAD_DIM < 256 && !p.rng_state && scorer(p, s, head).is_plain; /* 256: registers */
#pragma unroll 1
    for (int first = met.begin / WALK * WALK; first < met.end; first += WALK) {
        float w[N][4], dp[N][4];
        __syncthreads(); /* everyone has read the last tiles */
        load_tile<WALK>(shared.walk_s, view_s.data, p,
                        row_finder{p, s, view_s, !OWNS_KEYS, head, first, met.begin, met.end});
        load_tile<WALK>(shared.walk_dp, view_dp.data, p,
                        row_finder{p, s, view_dp, !OWNS_KEYS, head, first, met.begin, met.end});
        wait_for_tiles();
        multiply_rows(w, shared.own_s + 16 * warp() * PITCH, shared.walk_s);
        if (GRAD != 2) multiply_rows(dp, shared.own_dp + 16 * warp() * PITCH, shared.walk_dp);

        const element *added = GRAD == 2 ? shared.walk_dp : shared.walk_s;
        const bool is_whole = first >= met.whole_begin && first + WALK <= met.whole_end;
        u32 seen = 0xffffffffu;
        if (is_whole && is_plain)
            make_plain_weights(p, s, head, warp_own, first, w, dp);
        else
            seen = make_weights(p, s, head, warp_own, first, w, dp);
        if (!is_whole && has_nan_or_inf<WALK>(added))
            accumulate_exactly(o, w, added, seen);
        else
            accumulate(o, w, added);
    }
}

/* ---- all tiles ------------------------------------------------------------------------------------------------- */

/* Own rows [own, own + OWN) of one head of the gradient. */
DEVICE void make_gradient(const fa_cuda_problem &p, shared_memory &shared, const sequence &s, int head_own, int own) {
    const int g = p.h / p.h_kv, num_own = OWNS_KEYS ? s.len_kv : s.len_q;
    const int head = OWNS_KEYS ? head_own * g : head_own, num_heads = OWNS_KEYS ? g : 1;
    const fa_cuda_view &view_s = OWNS_KEYS ? p.k : p.q, &view_dp = OWNS_KEYS ? p.v : p.dout;
    const fa_cuda_view &result = GRAD == 0 ? p.dq : GRAD == 1 ? p.dk : p.dv;
    float o[COLUMNS][4];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0;
    __syncthreads(); /* everyone has read the last own rows */
    load_tile<OWN>(shared.own_s, view_s.data, p, row_finder{p, s, view_s, OWNS_KEYS, head, own, 0, num_own});
    if (GRAD != 2)
        load_tile<OWN>(shared.own_dp, view_dp.data, p, row_finder{p, s, view_dp, OWNS_KEYS, head, own, 0, num_own});
#pragma unroll 1
    for (int i = 0; i < num_heads; i++) walk(p, shared, s, head + i, own, o);

    element *rows[2];
    const float factor = GRAD == 2 ? 1 : p.scale, factors[2] = {factor, factor};
    bool is_zero[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = own + 16 * warp() + lane() / 4 + 8 * half;
        rows[half] = nullptr, is_zero[half] = false;
        if (row >= num_own) continue;
        rows[half] = (element *)result.data +
                     (OWNS_KEYS ? key_offset(p, result, s, row, head_own) : query_offset(result, s, row, head));
        is_zero[half] = !OWNS_KEYS && saw_nothing(*row_stat(p.lse, s, row, head));
    }
    store_rows(p, o, rows, factors, is_zero);
}

/* Packed rows behind the last sequence belong to nobody; here they become zero. */
DEVICE void clear_unowned_rows(const fa_cuda_problem &p, int head, int first, int step) {
    const fa_cuda_view &result = GRAD == 0 ? p.dq : GRAD == 1 ? p.dk : p.dv;
    for (int row = first; row < (OWNS_KEYS ? p.total_kv : p.total_q); row += step)
        for (int i = threadIdx.x; i < p.d; i += blockDim.x)
            ((element *)result.data)[row * result.stride_row + head * result.stride_h + i] = (element)0;
}

/* Tasks: the tiles of every head of every sequence; a sequence longer than max_seqlen takes several turns. */
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) KERNEL(const fa_cuda_problem p) {
    extern __shared__ __align__(16) char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const int heads = OWNS_KEYS ? p.h_kv : p.h, *cu_seqlens = OWNS_KEYS ? p.cu_seqlens_k : p.cu_seqlens_q;
    const long long num_tasks = (long long)(p.b + p.zero_tensors) * heads * p.num_tiles;
    for (long long task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int tile = (int)(task % p.num_tiles), head = (int)(task / p.num_tiles % heads);
        const int b_idx = (int)(task / p.num_tiles / heads);
        if (b_idx == p.b) {
            clear_unowned_rows(p, head, clamp(cu_seqlens[p.b], 0, OWNS_KEYS ? p.total_kv : p.total_q) + tile,
                               p.num_tiles);
            continue;
        }
        const sequence s = sequence_at(p, b_idx);
        for (int own = tile * OWN; own < (OWNS_KEYS ? s.len_kv : s.len_q); own += p.num_tiles * OWN)
            make_gradient(p, shared, s, head, own);
    }
}
