/* The products of attn_bwd_sm80: dV and dK of weights in registers or in shared memory, and dQ. */
#ifndef FA_ATTN_BWD_SM80_PRODUCTS_CUH
#define FA_ATTN_BWD_SM80_PRODUCTS_CUH

#include "attn_bwd_sm80.cuh"
#include "tile_sm80.cuh"

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
/* Of a group of warps SPLIT share WARP_KEYS keys: they divide the rows of S and dP, and the columns of dK and dV. */
constexpr int GROUP_WARPS = WARPS / GROUPS, SPLIT = GROUP_WARPS * WARP_KEYS / BLOCK_KV;
constexpr int OWN_COLUMNS = COLUMNS / SPLIT, OWN_ROWS = BLOCK_Q / SPLIT;
/* Weights in shared memory [key, row]. */
constexpr int DS_PITCH = BLOCK_Q + (SWIZZLES ? 0 : 8); /* like PITCH */
static_assert(!SWIZZLES || BLOCK_Q == 64, "rows of eight pieces");

/* A warp owns strips of the columns of dK and dV, in fragments. Between two of its strips lie those of the warps that
 * share its keys. Swizzled rows want strips of 32 columns (tile_sm80.cuh, moved). */
constexpr int STRIP = SWIZZLES ? 4 : OWN_COLUMNS;
DEVICE int column_of_own(int fragment) { return fragment / STRIP * (8 * STRIP * SPLIT) + fragment % STRIP * 8; }

/* ---- dV and dK ------------------------------------------------------------------------------------------------- */

/* The weights of a warp as first operands, [rows / 16, BLOCKS]. */
typedef u32 operands[N / 2][BLOCKS][4];

DEVICE void pack(operands &a, const float (&w)[BLOCKS][N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int m = 0; m < BLOCKS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float (&pair)[4] = w[m][2 * k + i / 2];
                a[k][m][i] = cvt_x2<factor>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
}

/* dV or dK [16 BLOCKS, own columns] += W B. W are the warp's weights, and B are CHUNK rows from `rows` on. */
DEVICE void accumulate_pairs(float (&o)[BLOCKS][OWN_COLUMNS][4], const float (&w)[BLOCKS][N][4], const factor *rows,
                             lane_type own_lane) {
    constexpr int PAIRS = OWN_COLUMNS / 2;
    const u32 row = own_place(rows, 0, 0, own_lane);
    operands a;
    pack(a, w);
    pipelined<N / 2 * PAIRS>(
        [&](u32(&b)[4], int i) { ldmatrix_x4_trans(b, moved(row, 16 * (i / PAIRS), 16 * (i % PAIRS))); },
        [&](const u32(&b)[4], int i) {
            const int k = i / PAIRS, c = i % PAIRS * 2;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                mma_m16n8k16<factor>(o[m][c], a[k][m], b[0], b[1]);
                mma_m16n8k16<factor>(o[m][c + 1], a[k][m], b[2], b[3]);
            }
        });
}

/* The same with the weights of all BLOCK_Q rows, which lie in shared memory from `key` on. The warp's columns of the
 * tile begin at `column`. */
DEVICE void accumulate_shared(float (&o)[BLOCKS][OWN_COLUMNS][4], const factor *weights, int key, const factor *tile,
                              int column, lane_type own_lane) {
    constexpr int PAIRS = OWN_COLUMNS / 2, PLACES = AHEAD / PAIRS + 2;
    const int l = own_lane;
    const u32 rows = own_place(tile, 0, column, l);
    const u32 weight = smem_address(weights + (key + l % 16) * DS_PITCH + swizzled(l % 16, l / 16 * 8));
    u32 a[PLACES][BLOCKS][4];
    pipelined<BLOCK_Q / 16 * PAIRS>(
        [&](u32(&b)[4], int i) {
            const int k = i / PAIRS, c = i % PAIRS * 2;
            if (c == 0)
#pragma unroll
                for (int m = 0; m < BLOCKS; m++) ldmatrix_x4(a[k % PLACES][m], moved<DS_PITCH>(weight, 16 * m, 16 * k));
            ldmatrix_x4_trans(b, moved(rows, 16 * k, column_of_own(c)));
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

/* ---- pairs that do not see each other -------------------------------------------------------------------------- */

/* O [16 BLOCKS_OF_O, 8 NUM_COLUMNS] += W B by FMAs that skip unseen pairs, for NUM rows of B. weight_at(i, m) is the
 * weight of the lane's row 8 m of O and of row i of B. pair_at(i, c) are the lane's columns of fragment c of row i. */
template <int NUM, int BLOCKS_OF_O, int NUM_COLUMNS, class weights, class pairs>
DEVICE void accumulate_seen(float (&o)[BLOCKS_OF_O][NUM_COLUMNS][4], const weights &weight_at, const pairs &pair_at) {
#pragma unroll 1
    for (int i = 0; i < NUM; i++)
#pragma unroll
        for (int m = 0; m < 2 * BLOCKS_OF_O; m++) {
            const factor w = weight_at(i, m);
            if (w.bits == UNSEEN) continue;
            const float weight = cvt_f32(w);
#pragma unroll
            for (int c = 0; c < NUM_COLUMNS; c++) {
                float x[2];
                unpack_x2<factor>(pair_at(i, c), x[0], x[1]);
                o[m / 2][c][m % 2 * 2] += weight * x[0], o[m / 2][c][m % 2 * 2 + 1] += weight * x[1];
            }
        }
}

/* The lane's columns of a tile's row, of the fragment that begins at `column`. */
DEVICE u32 pair_of(const factor *tile, int row, int column) {
    return *(const u32 *)(tile + row * PITCH + swizzled(row, column) + 2 * (lane() % 4));
}

/* dV or dK of the warp's keys from `key` on, and of rows [row, row + NUM) of a tile. */
template <int NUM>
DEVICE void accumulate_seen_rows(float (&o)[BLOCKS][OWN_COLUMNS][4], const factor *weights, int key, const factor *tile,
                                 int row, int column) {
    const int own_key = key + lane() / 4;
    accumulate_seen<NUM>(
        o, [&](int i, int m) { return weights[(own_key + 8 * m) * DS_PITCH + swizzled(own_key, row + i)]; },
        [&](int i, int c) { return pair_of(tile, row + i, column + column_of_own(c)); });
}

/* The places of a lane's weights, of keys from `key` on and rows from `row` on, a multiple of CHUNK. */
struct weights_place {
    u32 *first;
    int left;
    DEVICE weights_place(factor *weights, int key, int row, int lane)
        : first((u32 *)(weights + (key + lane / 4) * DS_PITCH + (SWIZZLES ? 0 : row) + 2 * (lane % 4))),
          left(SWIZZLES ? row / 2 ^ lane / 4 * 4 : 0) {}
    /* The pair of rows of fragment n, of key 16 m + 8 half. */
    DEVICE u32 &operator()(int m, int n, int half) const {
        return first[(8 * m + 4 * half) * DS_PITCH + (SWIZZLES ? left ^ 4 * n : 4 * n)];
    }
};

/* Stores P^T or dS^T [16 BLOCKS, CHUNK] of a warp. */
template <bool MARKS>
DEVICE void store_weights(const weights_place &place, const float (&x)[BLOCKS][N][4], const u32 (&seen)[BLOCKS]) {
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 pair = cvt_x2<factor>(x[m][n][2 * half], x[m][n][2 * half + 1]);
                place(m, n, half) = MARKS ? mark_unseen(pair, seen[m] >> (4 * n + 2 * half)) : pair;
            }
}

/* ---- dQ -------------------------------------------------------------------------------------------------------- */

/* Columns of dQ that a warp has at a time, in fragments. */
constexpr int DQ_GROUP = SPLIT > 1 && DQ_COLUMNS > 4 ? 2 : DQ_COLUMNS;

/* dQ [BLOCK_Q, HEAD_DIM] / scale += dS K, perhaps without unseen pairs. Each warp computes its part of dQ and adds the
 * part to the sums, DQ_GROUP columns at a time: more additions in a row than that would wait for each other. */
DEVICE void add_dq(const params &p, const factor *ds, const factor *k, int slab, bool skips_unseen,
                   lane_type own_lane) {
    const int l = own_lane;
    const int first_block = warp() / DQ_SHARES * DQ_BLOCKS, first = warp() % DQ_SHARES * DQ_STRIP;
    const u32 ds_row =
        smem_address(ds + (l / 16 * 8 + l % 8) * DS_PITCH + swizzled(l % 8, 16 * first_block + l / 8 % 2 * 8));
    const u32 k_row = own_place(k, 0, 8 * first, l);
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
            accumulate_seen<BLOCK_KV>(
                dq,
                [&](int key, int m) { return ds[key * DS_PITCH + swizzled(key, 16 * first_block + l / 4 + 8 * m)]; },
                [&](int key, int c) { return pair_of(k, key, 8 * first + column_of_dq(group + c)); });
        } else {
            pipelined<BLOCK_KV / 16 * PAIRS>(
                [&](u32(&b)[4], int i) {
                    const int key = i / PAIRS, c = group + i % PAIRS * 2;
                    if (i % PAIRS == 0 && (!KEEPS || group == 0))
#pragma unroll
                        for (int m = 0; m < DQ_BLOCKS; m++)
                            ldmatrix_x4_trans(a[key % PLACES][m], moved<DS_PITCH>(ds_row, 16 * key, 16 * m));
                    ldmatrix_x4_trans(b, moved(k_row, 16 * key, column_of_dq(c)));
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

#endif
