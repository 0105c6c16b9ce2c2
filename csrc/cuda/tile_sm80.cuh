/* The forward and the backward with the instructions of Ampere share this file: loads of tiles, and products of rows of
 * a warp. The warp holds accumulators as in tile_any.cuh. */
#ifndef FA_TILE_SM80_CUH
#define FA_TILE_SM80_CUH

#include "tile_any.cuh"

constexpr int K_STEPS = HEAD_DIM / 16, BYTES = factor::BYTES;

/* ---- loads ----------------------------------------------------------------------------------------------------- */

/* Loads tiles of ROWS rows. LANES threads share a row, and some of them are idle if a row has fewer pieces of 16 bytes.
 * A thread stays in its columns, and its pieces of a tile lie STEP rows apart. */
template <int ROWS> struct tile_loader {
    static constexpr int PIECES = HEAD_DIM / 8, LANES = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;
    static constexpr int STEP = THREADS / LANES, NUM = ROWS / STEP;
    static_assert(ROWS % STEP == 0, "no thread has less to do");
    static_assert(!SWIZZLES || STEP % 8 == 0, "a thread's pieces lie at the same place of their rows");
    static constexpr int NONE = -(1 << 30);
    const factor *from; /* the first of the thread's pieces of the next tile */

    DEVICE static int top() { return threadIdx.x / LANES; }
    DEVICE static int left() { return threadIdx.x % LANES * 8; }
    DEVICE tile_loader(const factor *rows, long long stride) : from(rows + top() * stride + left()) {}
    /* Of num_rows rows so many lie behind the thread's first; none if the thread's columns do not exist. */
    DEVICE static int num_own(int num_rows, int columns) { return left() < columns ? num_rows - top() : NONE; }
    /* The thread's first piece of a tile that begins at `tile` in shared memory. */
    DEVICE static u32 piece_of(u32 tile) { return tile + (top() * PITCH + swizzled(top(), left())) * BYTES; }

    /* Loads to the tile whose first piece of the thread has the address `to`. Rows behind num_own become zero. */
    DEVICE void load_rows(u32 to, long long stride, int num_own) const {
        if (LANES == PIECES || left() < HEAD_DIM)
#pragma unroll
            for (int i = 0; i < NUM; i++)
                cp_async_16(to + i * STEP * PITCH * BYTES, from + i * STEP * stride, i * STEP < num_own);
    }
    /* Does the same for piece i of NUM, where all rows exist. */
    DEVICE void load_piece(int i, u32 to, long long stride, bool has_columns) const {
        const u32 dst = to + i * STEP * PITCH * BYTES;
        if (LANES == PIECES)
            cp_async_16(dst, from + i * STEP * stride, has_columns);
        else
            cp_async_16_if(left() < HEAD_DIM, dst, from + i * STEP * stride, has_columns);
    }
    /* Does the same if the tile exists. Otherwise nothing is written. */
    DEVICE void load_piece_if(bool exists, int i, u32 to, long long stride, bool has_columns) const {
        cp_async_16_if((LANES == PIECES || left() < HEAD_DIM) && exists, to + i * STEP * PITCH * BYTES,
                       from + i * STEP * stride, has_columns);
    }
    /* Does the same as load_piece for all pieces. */
    DEVICE void load(u32 to, long long stride, bool has_columns) const {
#pragma unroll
        for (int i = 0; i < NUM; i++) load_piece(i, to, stride, has_columns);
    }
    /* Do the thread's own pieces of a tile hold NaN or inf? A thread sees what it copied before it meets a barrier. */
    DEVICE static bool own_has_nan_or_inf(const factor *tile) {
        const factor *own = tile + top() * PITCH + swizzled(top(), left());
        u32 signs = 0;
        if (LANES == PIECES || left() < HEAD_DIM)
#pragma unroll
            for (int i = 0; i < NUM; i++) signs |= nan_or_inf_signs<factor>(*(const uint4 *)(own + i * STEP * PITCH));
        return signs & factor::SIGNS;
    }
};

/* Copies ROWS rows of `columns` elements to a tile in shared memory, as tile_loader does. Rows from num_rows on and
 * other columns become zero. */
template <int ROWS>
DEVICE void load_rows(factor *tile, const factor *rows, long long stride, int num_rows, int columns) {
    typedef tile_loader<ROWS> loader;
    constexpr int STEP = loader::STEP;
    const int top = loader::top(), left = loader::left();
    const factor *from = rows + top * stride + left;
    const u32 to = smem_address(tile + top * PITCH + swizzled(top, left));
    const int num_own = left < columns ? num_rows - top : 0;
    if (loader::LANES == loader::PIECES || left < HEAD_DIM)
#pragma unroll
        for (int i = 0; i < loader::NUM; i++)
            cp_async_16(to + i * STEP * PITCH * BYTES, from + i * STEP * stride, i * STEP < num_own);
}

/* ---- products -------------------------------------------------------------------------------------------------- */

/* The lane's address of rows [row, row + 16) of a tile, columns [column, column + 16), for ldmatrix of first operands,
 * and transposed of second ones. */
DEVICE u32 own_place(const factor *tile, int row, int column, int lane) {
    return smem_address(tile + (row + lane % 16) * PITCH + swizzled(lane % 16, column + lane / 16 * 8));
}
/* The same for ldmatrix of second operands, not transposed. */
DEVICE u32 other_place(const factor *tile, int row, int lane) {
    return smem_address(tile + (row + lane / 16 * 8 + lane % 8) * PITCH + swizzled(lane % 8, lane / 8 % 2 * 8));
}

/* The address that lies so many rows below `place` and so many columns to its right: constants, multiples of 8 and 16.
 * With SWIZZLES the tile begins at a multiple of 128 bytes, and of 64 columns the two have no bit in common. */
template <int ROW = PITCH> DEVICE u32 moved(u32 place, int rows, int columns) {
    const u32 bytes = columns * BYTES;
    return SWIZZLES ? (place ^ bytes % 128) + (rows * ROW * BYTES + bytes / 128 * 128)
                    : place + (rows * ROW + columns) * BYTES;
}

/* Loads the warp's 16 BLOCKS rows of a tile in shared memory as first operands. */
DEVICE void load_operands(u32 (&regs)[BLOCKS][K_STEPS][4], const factor *rows) {
    const u32 row = own_place(rows, 0, 0, lane());
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) ldmatrix_x4(regs[m][k], moved(row, 16 * m, 16 * k));
}

/* Runs multiply(regs, i) for i in [0, NUM), after load(regs, i). The loads run AHEAD of the products, because a load
 * takes as long as several products. */
template <int NUM, class loader, class multiplier>
DEVICE void pipelined(const loader &load, const multiplier &multiply) {
    u32 regs[AHEAD + 1][4];
#pragma unroll
    for (int i = 0; i < AHEAD && i < NUM; i++) load(regs[i], i);
#pragma unroll
    for (int i = 0; i < NUM; i++) {
        if (i + AHEAD < NUM) load(regs[(i + AHEAD) % (AHEAD + 1)], i + AHEAD);
        multiply(regs[i % (AHEAD + 1)], i);
    }
}

/* X [16 BLOCKS, 8 N] = A B^T. The warp's rows A are in registers, or begin at own_row in shared memory. B begins at
 * row. beside(i) runs after product i of 16 columns of A and 16 rows of B. */
template <bool IS_IN_REGS, int N, class worker>
DEVICE void multiply_own(float (&x)[BLOCKS][N][4], const u32 (&own)[BLOCKS][K_STEPS][4], u32 own_row, u32 row,
                         const worker &beside) {
    constexpr int PAIRS = N / 2, PLACES = AHEAD / PAIRS + 2;
    u32 a[PLACES][BLOCKS][4];
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < N; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
    pipelined<K_STEPS * PAIRS>(
        [&](u32(&b)[4], int i) {
            const int k = i / PAIRS, n = i % PAIRS * 2;
            if (!IS_IN_REGS && n == 0)
#pragma unroll
                for (int m = 0; m < BLOCKS; m++) ldmatrix_x4(a[k % PLACES][m], moved(own_row, 16 * m, 16 * k));
            ldmatrix_x4(b, moved(row, 8 * n, 16 * k));
        },
        [&](const u32(&b)[4], int i) {
            const int k = i / PAIRS, n = i % PAIRS * 2;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                const u32 *from = IS_IN_REGS ? own[m][k] : a[k % PLACES][m],
                          regs[4] = {from[0], from[1], from[2], from[3]};
                mma_m16n8k16<factor>(x[m][n], regs, b[0], b[1]);
                mma_m16n8k16<factor>(x[m][n + 1], regs, b[2], b[3]);
            }
            beside(i);
        });
}

template <bool IS_IN_REGS, int N>
DEVICE void multiply_own(float (&x)[BLOCKS][N][4], const u32 (&own)[BLOCKS][K_STEPS][4], u32 own_row, u32 row) {
    multiply_own<IS_IN_REGS>(x, own, own_row, row, [](int) {});
}

#endif
