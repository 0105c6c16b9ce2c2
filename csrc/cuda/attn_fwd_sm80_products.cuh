/* The products of attn_fwd_sm80 that add to O: P V, and its repetition for rows that do not see all keys. */
#ifndef FA_ATTN_FWD_SM80_PRODUCTS_CUH
#define FA_ATTN_FWD_SM80_PRODUCTS_CUH

#include "attn_fwd_sm80_tiles.cuh"

/* P of a step: in registers, or all keys of the warp's rows in shared memory, from the lane's address `row` on. */
struct weights_source {
    const weights &regs;
    u32 row;
};

/* Runs work(i) of O += P V of a tile, after the products of 16 keys and 16 columns number i. The columns begin at the
 * lane's address `v`. Without ADDS only the work is done. */
template <bool ADDS, class worker>
DEVICE void add_values(float (&o)[BLOCKS][OWN_COLUMNS][4], const weights_source &p, u32 v, const worker &work) {
    constexpr int PAIRS = OWN_COLUMNS / 2, NUM = BLOCK_KV / 16 * PAIRS, PLACES = AHEAD / PAIRS + 2;
    u32 a[PLACES][BLOCKS][4];
    const auto &shared = a;
    if (!ADDS) {
#pragma unroll
        for (int i = 0; i < NUM; i++) work(i);
        return;
    }
    pipelined<NUM>(
        [&](u32(&b)[4], int i) {
            if (SPLIT > 1 && i % PAIRS == 0)
#pragma unroll
                for (int m = 0; m < BLOCKS; m++)
                    ldmatrix_x4(a[i / PAIRS % PLACES][m], moved<P_PITCH>(p.row, 16 * m, 16 * (i / PAIRS)));
            ldmatrix_x4_trans(b, moved(v, 16 * (i / PAIRS), own_column_of(i % PAIRS * 2)));
        },
        [&](const u32(&b)[4], int i) {
            const int k = i / PAIRS, c = i % PAIRS * 2;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                const u32(&w)[4] = *(SPLIT > 1 ? &shared[k % PLACES][m] : &p.regs[m][k % (N / 2)]);
                mma_m16n8k16<factor>(o[m][c], w, b[0], b[1]);
                mma_m16n8k16<factor>(o[m][c + 1], w, b[2], b[3]);
            }
            work(i);
        });
}

/* O += P V by FMAs that skip pairs that do not count. Bit 4 n + e of `counts` belongs to element e of fragment n. The
 * lane that holds two weights of a row sends them to the other three lanes of its rows. */
DEVICE void add_seen_values(float (&o)[BLOCKS][OWN_COLUMNS][4], const weights &p, const factor *v,
                            const u32 (&counts)[BLOCKS]) {
#pragma unroll 1
    for (int owner = 0; owner < 4; owner++) {
        const int from = lane() / 4 * 4 + owner;
        u32 bits[BLOCKS];
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) bits[m] = __shfl_sync(WHOLE_WARP, counts[m], from);
#pragma unroll
        for (int n = 0; n < N; n++) {
            u32 pairs[2 * BLOCKS]; /* the weights of two keys, for each row */
#pragma unroll
            for (int r = 0; r < 2 * BLOCKS; r++)
                pairs[r] = __shfl_sync(WHOLE_WARP, p[r / 2][n / 2][n % 2 * 2 + r % 2], from);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const factor *row = v + (8 * n + 2 * owner + e) * PITCH;
#pragma unroll
                for (int c = 0; c < OWN_COLUMNS; c++) {
                    float x[2];
                    unpack_x2<factor>(*(const u32 *)(row + column_of(c)), x[0], x[1]);
#pragma unroll
                    for (int r = 0; r < 2 * BLOCKS; r++) {
                        float pair[2];
                        unpack_x2<factor>(pairs[r], pair[0], pair[1]);
                        if (bits[r / 2] >> (4 * n + r % 2 * 2 + e) & 1)
#pragma unroll
                            for (int i = 0; i < 2; i++) o[r / 2][c][r % 2 * 2 + i] += pair[e] * x[i];
                    }
                }
            }
        }
    }
}

/* The same with P in shared memory. The rows of P and of the sequence begin at `rows` and at `row`, and the warp's
 * columns at `column`. */
DEVICE void add_seen_shared(float (&o)[BLOCKS][OWN_COLUMNS][4], const factor *rows, const factor *v, int column,
                            const fa_cuda_problem &p, const sequence &s, int row, int first) {
#pragma unroll 1
    for (int j = 0; j < BLOCK_KV; j++)
#pragma unroll
        for (int r = 0; r < 2 * BLOCKS; r++) {
            const int own = 8 * r + lane() / 4, i = row + own, key = first + j;
            if (i >= s.len_q || key < first_key(p, s, i) || key >= end_key(p, s, i)) continue;
            const float weight = cvt_f32(rows[own * P_PITCH + swizzled(own, j)]);
#pragma unroll
            for (int c = 0; c < OWN_COLUMNS; c++) {
                float x[2];
                const int left = swizzled(j, column + own_column_of(c)) + 2 * (lane() % 4);
                unpack_x2<factor>(*(const u32 *)(v + j * PITCH + left), x[0], x[1]);
                o[r / 2][c][r % 2 * 2] += weight * x[0], o[r / 2][c][r % 2 * 2 + 1] += weight * x[1];
            }
        }
}

/* Stores P of a warp's keys, which begin at own_key, for the warps that share its rows. */
DEVICE void store_weights(factor *rows, const weights &p, int own_key) {
    const int row = lane() / 4, left = 2 * (lane() % 4);
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            factor *first = rows + row * P_PITCH + swizzled(row, own_key + 16 * k + 8 * (i / 2)) + left;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) *(u32 *)(first + (16 * m + 8 * (i % 2)) * P_PITCH) = p[m][k][i];
        }
}

#endif
