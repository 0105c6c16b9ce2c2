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
 * Heads of more than 128 columns leave no registers for that. There SPLIT warps share 16 BLOCKS keys: each makes P and
 * dS of a part of the rows, and adds to a part of the columns of dK and dV. P goes through shared memory, too, and a
 * step has more barriers:
 *
 *   step i   barrier | S | P | dP | dS | store P, dS | barrier | dV, dK | barrier | load Q, dO of i+1 | dQ of i
 *
 * dQ is added to fp32 sums in memory, which attn_bwd_dq_sm80 rounds. The sums grow in any order, or in the order of the
 * key tiles (p.turns).
 *
 * Which limit binds: shared memory, which ldmatrix reads 66% of the time at 128 columns (H200).
 *
 * Specification: ../cpu/reference.c. */
#define F32  0
#define OF_3 0

/* A row of tiles.def gives HEAD_DIM columns, BLOCK_Q rows and BLOCK_KV keys, WARPS with BLOCKS times 16 keys each, and
 * CHUNK rows whose scores are in registers at the same time. The row also gives STAGES of Q and dO, says whether K
 * and V are in registers (K_REGS, V_REGS), how many loads run AHEAD of products, and gives CTAS of an SM. */
#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(BLOCK_KV) || !defined(WARPS) || !defined(BLOCKS) || \
    !defined(CHUNK) || !defined(STAGES) || !defined(K_REGS) || !defined(V_REGS) || !defined(AHEAD) ||       \
    !defined(KEPT) || !defined(CTAS) || !defined(SCORE) || !defined(DROPOUT)
#error "a row of tiles.def; SCORE: softcap, ALiBi or a scale that is not positive; DROPOUT: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_bwd_sm80
#endif

#include "tile_any.cuh"
#include "tile_sm80.cuh"
#include "attn_bwd_sm80.cuh"
#include "quads.cuh"

/* Where a thread finds its rows, by KEPT: in registers from KEPT 1 on, its own lane too with KEPT 2. Otherwise the
 * places are computed anew in each step. Without free registers that is faster. */
constexpr bool KEEPS_PLACES = KEPT >= 1, KEEPS_LANE = KEPT == 2;
template <bool IS_KEPT> struct lane_place {
    DEVICE operator int() const { return laneid(); }
};
template <> struct lane_place<true> {
    int place = pinned(lane());
    DEVICE operator int() const { return place; }
};
typedef lane_place<KEEPS_LANE> lane_type;

constexpr int N = CHUNK / 8, WARP_KEYS = 16 * BLOCKS;
/* SPLIT warps share WARP_KEYS keys: they divide the rows of S and dP, and the columns of dK and dV. */
constexpr int SPLIT = WARPS * WARP_KEYS / BLOCK_KV, OWN_COLUMNS = COLUMNS / SPLIT, OWN_ROWS = BLOCK_Q / SPLIT;
/* dQ of a step is computed LAG steps later. */
constexpr int LAG = SPLIT == 1;
constexpr int DS_PITCH = BLOCK_Q + 8; /* like PITCH: eight rows begin in different groups of four banks */

static_assert(BLOCK_KV * SPLIT == WARP_KEYS * WARPS && COLUMNS % SPLIT == 0 && BLOCK_Q % SPLIT == 0, "equal shares");
static_assert(OWN_ROWS % CHUNK == 0 && CHUNK % 16 == 0, "mma.m16n8k16 contracts 16 rows at a time");
static_assert(N <= 8, "32 bits say which pairs of a thread dropout keeps");
static_assert(BLOCK_Q <= THREADS, "a thread loads the lse and the delta of a row");
static_assert(STAGES == 2 || (STAGES == 1 && SPLIT > 1), "dQ of the last step reads no query tile");

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
    unsigned task[4]; /* with turns: what the CTA has taken */
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

/* ---- products -------------------------------------------------------------------------------------------------- */

/* dV or dK [16 BLOCKS, HEAD_DIM] += W B. W are the warp's weights, and B are CHUNK rows from `rows` on. */
DEVICE void accumulate_pairs(float (&o)[BLOCKS][OWN_COLUMNS][4], const float (&w)[BLOCKS][N][4], const factor *rows,
                             lane_type own_lane) {
    constexpr int PAIRS = OWN_COLUMNS / 2;
    const int l = own_lane;
    const u32 row = smem_address(rows + l % 16 * PITCH + l / 16 * 8);
    u32 a[N / 2][BLOCKS][4];
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int m = 0; m < BLOCKS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float (&pair)[4] = w[m][2 * k + i / 2];
                a[k][m][i] = cvt_x2<factor>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
    pipelined<N / 2 * PAIRS>(
        [&](u32(&b)[4], int i) { ldmatrix_x4_trans(b, row + (16 * (i / PAIRS) * PITCH + 16 * (i % PAIRS)) * BYTES); },
        [&](const u32(&b)[4], int i) {
            const int k = i / PAIRS, c = i % PAIRS * 2;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                mma_m16n8k16<factor>(o[m][c], a[k][m], b[0], b[1]);
                mma_m16n8k16<factor>(o[m][c + 1], a[k][m], b[2], b[3]);
            }
        });
}

/* The same with the weights of all BLOCK_Q rows, which begin at `weights` in shared memory. */
DEVICE void accumulate_shared(float (&o)[BLOCKS][OWN_COLUMNS][4], const factor *weights, const factor *rows,
                              lane_type own_lane) {
    constexpr int PAIRS = OWN_COLUMNS / 2, PLACES = AHEAD / PAIRS + 2;
    const int l = own_lane;
    const u32 row = smem_address(rows + l % 16 * PITCH + l / 16 * 8);
    const u32 weight = smem_address(weights + l % 16 * DS_PITCH + l / 16 * 8);
    u32 a[PLACES][BLOCKS][4];
    pipelined<BLOCK_Q / 16 * PAIRS>(
        [&](u32(&b)[4], int i) {
            const int k = i / PAIRS, c = i % PAIRS * 2;
            if (c == 0)
#pragma unroll
                for (int m = 0; m < BLOCKS; m++)
                    ldmatrix_x4(a[k % PLACES][m], weight + (16 * m * DS_PITCH + 16 * k) * BYTES);
            ldmatrix_x4_trans(b, row + (16 * k * PITCH + 8 * c) * BYTES);
        },
        [&](const u32(&b)[4], int i) {
            const int k = i / PAIRS, c = i % PAIRS * 2;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                mma_m16n8k16<factor>(o[m][c], a[k % PLACES][m], b[0], b[1]);
                mma_m16n8k16<factor>(o[m][c + 1], a[k % PLACES][m], b[2], b[3]);
            }
        });
}

/* Columns of dQ that a warp has at a time, in fragments. */
constexpr int DQ_GROUP = SPLIT > 1 && DQ_COLUMNS > 4 ? 2 : DQ_COLUMNS;

/* In tiles with a mask, weights of pairs that do not see each other lie in shared memory as -0. Other weights are never
 * -0 there. */
constexpr u32 UNSEEN = 0x8000;

DEVICE u32 mark_unseen(u32 pair, u32 seen) {
    const u32 low = pair & 0xffff, high = pair >> 16;
    return (!(seen & 1) ? UNSEEN : low == UNSEEN ? 0 : low) | (!(seen & 2) ? UNSEEN : high == UNSEEN ? 0 : high) << 16;
}

/* O [16 BLOCKS_OF_O, 8 NUM_COLUMNS] += W B by FMAs that skip unseen pairs, for NUM rows of B. The weight of a lane's
 * row 8 m of O and of row i of B lies at weights[i STEP + 8 m ROW]. The lane's columns of B begin at `rows`. */
template <int NUM, int STEP, int ROW, int BLOCKS_OF_O, int NUM_COLUMNS>
DEVICE void accumulate_seen(float (&o)[BLOCKS_OF_O][NUM_COLUMNS][4], const factor *weights, const factor *rows) {
#pragma unroll 1
    for (int i = 0; i < NUM; i++)
#pragma unroll
        for (int m = 0; m < 2 * BLOCKS_OF_O; m++) {
            const factor w = weights[i * STEP + 8 * m * ROW];
            if (w.bits == UNSEEN) continue;
            const float weight = cvt_f32(w);
#pragma unroll
            for (int c = 0; c < NUM_COLUMNS; c++) {
                float x[2];
                unpack_x2<factor>(*(const u32 *)(rows + i * PITCH + 8 * c), x[0], x[1]);
                o[m / 2][c][m % 2 * 2] += weight * x[0], o[m / 2][c][m % 2 * 2 + 1] += weight * x[1];
            }
        }
}

/* dQ [BLOCK_Q, HEAD_DIM] / scale += dS K, perhaps without unseen pairs. Each warp computes its part of dQ and adds the
 * part to the sums, DQ_GROUP columns at a time: more additions in a row than that would wait for each other. */
DEVICE void add_dq(const params &p, const factor *ds, const factor *k, int slab, bool skips_unseen,
                   lane_type own_lane) {
    const int l = own_lane;
    const int first_block = warp() / (WARPS / DQ_WARPS) * DQ_BLOCKS, first = warp() % (WARPS / DQ_WARPS) * DQ_COLUMNS;
    const u32 ds_row = smem_address(ds + (l / 16 * 8 + l % 8) * DS_PITCH + 16 * first_block + l / 8 % 2 * 8);
    const u32 k_row = smem_address(k + l % 16 * PITCH + 8 * first + l / 16 * 8);
    float *const sums = sums_at(p, slab, first_block, first, l);
    constexpr bool KEEPS = DQ_GROUP < DQ_COLUMNS; /* the warp's dS are read once */
    constexpr int PAIRS = DQ_GROUP / 2, PLACES = KEEPS ? BLOCK_KV / 16 : AHEAD / PAIRS + 2;
    u32 a[PLACES][DQ_BLOCKS][4];
#pragma unroll
    for (int group = 0; group < DQ_COLUMNS; group += DQ_GROUP) {
        float dq[DQ_BLOCKS][DQ_GROUP][4];
#pragma unroll
        for (int m = 0; m < DQ_BLOCKS; m++)
#pragma unroll
            for (int c = 0; c < DQ_GROUP; c++) dq[m][c][0] = dq[m][c][1] = dq[m][c][2] = dq[m][c][3] = 0;
        if (skips_unseen) {
            accumulate_seen<BLOCK_KV, DS_PITCH, 1>(dq, ds + 16 * first_block + l / 4,
                                                   k + 8 * (first + group) + 2 * (l % 4));
        } else {
            pipelined<BLOCK_KV / 16 * PAIRS>(
                [&](u32(&b)[4], int i) {
                    const int key = i / PAIRS, c = group + i % PAIRS * 2;
                    if (i % PAIRS == 0 && (!KEEPS || group == 0))
#pragma unroll
                        for (int m = 0; m < DQ_BLOCKS; m++)
                            ldmatrix_x4_trans(a[key % PLACES][m], ds_row + (16 * key * DS_PITCH + 16 * m) * BYTES);
                    ldmatrix_x4_trans(b, k_row + (16 * key * PITCH + 8 * c) * BYTES);
                },
                [&](const u32(&b)[4], int i) {
                    const int key = i / PAIRS, c = i % PAIRS * 2;
#pragma unroll
                    for (int m = 0; m < DQ_BLOCKS; m++) {
                        mma_m16n8k16<factor>(dq[m][c], a[key % PLACES][m], b[0], b[1]);
                        mma_m16n8k16<factor>(dq[m][c + 1], a[key % PLACES][m], b[2], b[3]);
                    }
                });
        }
#pragma unroll
        for (int m = 0; m < DQ_BLOCKS; m++)
#pragma unroll
            for (int c = 0; c < DQ_GROUP; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) red_add(sums + (m * DQ_COLUMNS + group + c) * 128 + 32 * e, dq[m][c][e]);
    }
}

/* Stores P^T or dS^T [16 BLOCKS, CHUNK] of a warp. */
template <bool MARKS>
DEVICE void store_weights(factor *ds, const float (&x)[BLOCKS][N][4], const u32 (&seen)[BLOCKS], lane_type own_lane) {
    const int l = own_lane;
    u32 *row = (u32 *)(ds + l / 4 * DS_PITCH + 2 * (l % 4));
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 pair = cvt_x2<factor>(x[m][n][2 * half], x[m][n][2 * half + 1]);
                row[(8 * m + 4 * half) * DS_PITCH + 4 * n] =
                    MARKS ? mark_unseen(pair, seen[m] >> (4 * n + 2 * half)) : pair;
            }
}

/* ---- weights --------------------------------------------------------------------------------------------------- */

/* Makes weights of scores, for one query head. S^T and dP^T [16, CHUNK] become (z P)^T and dS^T. The keys begin at
 * `key`, and the rows at `row`. */
struct weigher {
    const fa_cuda_problem &p;
    const sequence &s;
    int head;
    lane_type own_lane;
    float scale_log2;

    DEVICE weigher(const fa_cuda_problem &p, const sequence &s, int head, lane_type own_lane)
        : p(p), s(s), head(head), own_lane(own_lane), scale_log2((SCORE ? 1 : p.scale) * LOG2_E) {}

    /* S becomes P. With SCORE the derivatives of the scores come, too. */
    DEVICE void exponentiate(float (&x)[N][4], float (&derivatives)[N][4], const float *lse, int key, int row) const {
        const int l = own_lane, left = 2 * (l % 4);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 lses = *(const float2 *)(lse + 8 * n + left);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (SCORE)
                    x[n][e] = scorer(p, s, head)(x[n][e], row + 8 * n + left + e % 2, key + l / 4 + e / 2 * 8,
                                                 derivatives[n][e]);
                x[n][e] = ex2(fmaf(x[n][e], scale_log2, -(e % 2 ? lses.y : lses.x)));
            }
        }
    }

    /* P and dP become z P and dS. */
    DEVICE void weigh(float (&x)[N][4], float (&dp)[N][4], const float (&derivatives)[N][4], const float *delta,
                      int key, int row) const {
        const int left = 2 * (own_lane % 4);
        u32 kept = 0;
        if (DROPOUT) kept = dropout(p, s.b_idx, head).kept_rows_are_keys<N>(key, row);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 deltas = *(const float2 *)(delta + 8 * n + left);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float prob = x[n][e];
                if (DROPOUT) {
                    const float z = kept >> (4 * n + e) & 1 ? p.keep_scale : 0;
                    x[n][e] *= z, dp[n][e] *= z;
                }
                dp[n][e] = prob * (dp[n][e] - (e % 2 ? deltas.y : deltas.x));
                if (SCORE) dp[n][e] *= derivatives[n][e];
            }
        }
    }

    /* Weights of pairs that do not see each other become 0. Bit 4 n + e of the result says that the row of element e of
     * fragment n sees the key. */
    DEVICE u32 mask(float (&x)[N][4], float (&ds)[N][4], const float *lse, int key, int row) const {
        const int own_key = key + lane() / 4, left = 2 * (lane() % 4);
        u32 seen = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = row + 8 * n + left + e, begin = first_key_of_window(p, s, i);
                const int end = lse[8 * n + left + e] == INF ? 0 : end_key_of_window(p, s, i);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int j = own_key + 8 * half;
                    const bool sees = j >= begin && j < end;
                    seen |= (u32)sees << (4 * n + 2 * half + e);
                    if (!sees) x[n][2 * half + e] = ds[n][2 * half + e] = 0;
                }
            }
        return seen;
    }

    /* Does no row of [row, row + CHUNK) see a key of [key, key + WARP_KEYS)? */
    DEVICE bool is_unseen(int key, int row) const {
        return end_key_of_window(p, s, row + CHUNK - 1) <= key || first_key_of_window(p, s, row) >= key + WARP_KEYS;
    }
};

/* Is some element NaN or inf? */
DEVICE bool is_not_finite(const float (&x)[BLOCKS][N][4]) {
    float sum = 0;
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum = fmaf(x[m][n][e], 0, sum);
    return sum != 0;
}

/* Does every row of a query tile see every key? The answers are types, so that each has a loop of its own. */
struct all_seen {
    static constexpr bool value = true;
};
struct some_seen {
    static constexpr bool value = false;
};

/* ---- a key tile ------------------------------------------------------------------------------------------------ */

/* Waits until the key tiles before this one have added to the slab. The warp calls this function. */
DEVICE void wait_for_turn(const unsigned *turn, unsigned wanted) {
    if (lane() == 0)
        while (ld_acquire(turn) < wanted) {}
    __syncwarp();
}

/* Stores the warp's part of dK or dV: its keys from warp_key on, and OWN_COLUMNS fragments from `column` on. */
DEVICE void store_gradient(const fa_cuda_problem &p, const sequence &s, int head_kv, int warp_key, int column,
                           const fa_cuda_view &result, const float (&x)[BLOCKS][OWN_COLUMNS][4], float weight) {
    if (!result.data) return;
    element::output *rows = (element::output *)result.data + key_offset(p, result, s, 0, head_kv) + column;
    const float weights[2] = {weight, weight};
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
        if constexpr (OWN_COLUMNS % 4 == 0) {
            store_rows((const float (&)[4 * OWN_COLUMNS]) x[m], weights, rows, result.stride_row, warp_key + 16 * m,
                       s.len_kv, p.d - column);
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
    const int num_heads = p.h / p.h_kv, own_key = WARP_KEYS * (warp() / SPLIT), warp_key = first_key + own_key;
    const int own_column = warp() % SPLIT * (8 * OWN_COLUMNS), own_row = warp() % SPLIT * OWN_ROWS;
    const tile_walk seen = rows_of(p, s, first_key, min(first_key + BLOCK_KV, s.len_kv) - 1);
    const query_walk walk = {seen.start<BLOCK_Q>(), (seen.end - 1) / BLOCK_Q * BLOCK_Q};
    const query_place start = {head_kv * num_heads, walk.first};
    const int num_steps = walk.first < seen.end ? seen.num_steps<BLOCK_Q>() * num_heads : 0;
    const bool has_all_keys = first_key + BLOCK_KV <= s.len_kv;
    /* The order of the sums is kept where the sequence is not longer than the caller says. */
    const bool takes_turns = all.turns && s.len_kv <= p.num_tiles * BLOCK_KV;
    u32 k_regs[BLOCKS][K_STEPS][4], v_regs[BLOCKS][K_STEPS][4]; /* those that the row of the table wants */
    float dk[BLOCKS][OWN_COLUMNS][4], dv[BLOCKS][OWN_COLUMNS][4];

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
            stats.lse[threadIdx.x] = fabsf(next_lse) == INF ? INF : next_lse * LOG2_E;
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
        wait_for_tiles<0>();
        k_has_nan_or_inf = has_nan_or_inf<BLOCK_KV>(shared.k);
        if constexpr (K_REGS) load_operands(k_regs, shared.k + own_key * PITCH);
        if constexpr (V_REGS) {
            load_operands(v_regs, shared.v_once + own_key * PITCH);
            __syncthreads(); /* all warps have read V */
        }
        load(start, 0);
        store_stats(shared.stats[0]);
    }

    /* Makes the weights of CHUNK rows of the step from `row` on, and stores them. Without SPLIT dV and dK grow. Returns
     * whether the rows or keys may hold NaN or inf, where some pair is unseen. */
    const auto add_chunk = [&](auto kind, const weigher &weights, int slot, int step, int first_row, int row) {
        constexpr bool IS_MASKED = !decltype(kind)::value;
        const query_tile &tile = shared.tiles[slot];
        const query_stats &stats = shared.stats[step % 2];
        float x[BLOCKS][N][4], dp[BLOCKS][N][4], derivatives[BLOCKS][N][4];
        factor *stored_p = shared.p + own_key * DS_PITCH + row;
        factor *stored_ds = shared.ds[LAG * slot] + own_key * DS_PITCH + row;
        if (IS_MASKED && weights.is_unseen(warp_key, first_row + row)) {
            const u32 none[BLOCKS] = {};
#pragma unroll
            for (int m = 0; m < BLOCKS; m++)
#pragma unroll
                for (int n = 0; n < N; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
            if (SPLIT > 1) store_weights<true>(stored_p, x, none, own_lane);
            store_weights<true>(stored_ds, x, none, own_lane);
            return false;
        }
        const int l = own_lane;
        const int offset = (row + l / 16 * 8 + l % 8) * PITCH + l / 8 % 2 * 8;
        const int own_offset = (own_key + l % 16) * PITCH + l / 16 * 8;
        multiply_own<K_REGS>(x, k_regs, smem_address(shared.k + own_offset), smem_address(tile.q + offset));
        bool is_exact = IS_MASKED && is_not_finite(x);
#pragma unroll
        for (int m = 0; m < BLOCKS; m++)
            weights.exponentiate(x[m], derivatives[m], stats.lse + row, warp_key + 16 * m, first_row + row);
        multiply_own<V_REGS>(dp, v_regs, smem_address(shared.v + own_offset), smem_address(tile.dout + offset));
        is_exact |= IS_MASKED && is_not_finite(dp);
        u32 sees[BLOCKS] = {};
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) {
            weights.weigh(x[m], dp[m], derivatives[m], stats.delta + row, warp_key + 16 * m, first_row + row);
            if (IS_MASKED) sees[m] = weights.mask(x[m], dp[m], stats.lse + row, warp_key + 16 * m, first_row + row);
        }
        if (SPLIT > 1) {
            store_weights<IS_MASKED>(stored_p, x, sees, own_lane);
            store_weights<IS_MASKED>(stored_ds, dp, sees, own_lane);
        } else if (IS_MASKED && __any_sync(WHOLE_WARP, is_exact)) {
            const int first = row * PITCH + 2 * (l % 4);
            store_weights<true>(stored_ds, x, sees, own_lane);
            __syncwarp();
            accumulate_seen<CHUNK, 1, DS_PITCH>(dv, stored_ds + l / 4 * DS_PITCH, tile.dout + first);
            __syncwarp();
            store_weights<true>(stored_ds, dp, sees, own_lane);
            __syncwarp();
            accumulate_seen<CHUNK, 1, DS_PITCH>(dk, stored_ds + l / 4 * DS_PITCH, tile.q + first);
        } else {
            store_weights<IS_MASKED>(stored_ds, dp, sees, own_lane);
            accumulate_pairs(dv, x, tile.dout + row * PITCH, own_lane);
            accumulate_pairs(dk, dp, tile.q + row * PITCH, own_lane);
        }
        return is_exact;
    };

    query_place now = start;
    bool last_skips = false; /* dQ of the last step must skip unseen pairs, because a key holds NaN or inf */
#pragma unroll 1
    for (int step = 0; step < num_steps; step++) {
        const int slot = step % STAGES;
        /* This step's rows have come. All warps have stored dS and added dQ of the steps before. */
        cp_async_wait_group<0>();
        const bool has_silent = __syncthreads_or(threadIdx.x < BLOCK_Q && fabsf(next_lse) == INF);
        if (step > LAG) end_turn(LAG == 1 ? walk.before(walk.before(now)) : walk.before(now));
        const bool skips = last_skips, adds_first = WARPS < 8 || warp() < WARPS / 2;
        if (LAG == 1 && step > 0 && adds_first) finish_step(walk.before(now), 1 - slot, skips);
        /* The copies come after products, which need no addresses. */
        if (STAGES == 2 && step + 1 < num_steps) load(walk.after(now), 1 - slot);
        const query_tile &tile = shared.tiles[slot];
        const bool is_whole =
            has_all_keys && !is_partial<BLOCK_Q>(now.row, seen.full_begin, seen.full_end) && !has_silent;
        const weigher weights(p, s, now.head, own_lane);
        bool is_exact = false; /* with SPLIT: weights meet rows with NaN or inf that they may not see */
        last_skips = !is_whole && k_has_nan_or_inf;
#pragma unroll 1
        for (int row = own_row; row < own_row + OWN_ROWS; row += CHUNK) {
            if (is_whole)
                add_chunk(all_seen(), weights, slot, step, now.row, row);
            else
                is_exact |= add_chunk(some_seen(), weights, slot, step, now.row, row);
        }
        if (SPLIT > 1) {
            const factor *p = shared.p + own_key * DS_PITCH, *ds = shared.ds[0] + own_key * DS_PITCH;
            const int l = own_lane, column = own_column + 2 * (l % 4);
            if (__syncthreads_or(is_exact)) { /* all warps have stored their weights */
                accumulate_seen<BLOCK_Q, 1, DS_PITCH>(dv, p + l / 4 * DS_PITCH, tile.dout + column);
                accumulate_seen<BLOCK_Q, 1, DS_PITCH>(dk, ds + l / 4 * DS_PITCH, tile.q + column);
            } else {
                accumulate_shared(dv, p, tile.dout + own_column, own_lane);
                accumulate_shared(dk, ds, tile.q + own_column, own_lane);
            }
            if (STAGES == 1) {
                __syncthreads(); /* all warps have read the query tile */
                if (step + 1 < num_steps) load(walk.after(now), 0);
            }
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
    store_gradient(p, s, head_kv, warp_key, own_column, p.dk, dk, p.scale);
    store_gradient(p, s, head_kv, warp_key, own_column, p.dv, dv, 1);
}

/* A task is one key tile of one key head of one sequence. A task of a sequence longer than max_seqlen does several key
 * tiles. With turns the CTAs take their tasks from a counter, so a CTA waits only for tasks that other CTAs have taken
 * before. */
extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) KERNEL(const params p) {
    extern __shared__ __align__(16) char memory[];
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
        const int tile = (int)(task % a.num_tiles), head_kv = (int)(task / a.num_tiles % a.h_kv);
        const sequence s = sequence_at(a, (int)(task / a.num_tiles / a.h_kv));
        for (int key = tile * BLOCK_KV; key < s.len_kv; key += a.num_tiles * BLOCK_KV)
            make_gradients(p, shared, s, head_kv, key);
    }
}
