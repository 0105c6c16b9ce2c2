/* Shared memory of attn_bwd_sm90.cu: operands, sums and results, their barriers, and where a warp's part of dQ lies. */
#ifndef FA_ATTN_BWD_MEMORY_CUH
#define FA_ATTN_BWD_MEMORY_CUH

#include "attn_bwd_scores.cuh"

/* Operands are stored as TMA writes them and wgmma reads them: chunks of CHUNK columns, rows of ROW_BYTES, the 16-byte
 * pieces of a row swizzled by the row's number. Each chunk starts at a multiple of 1024 bytes, the swizzle's period. */
struct shared_memory {
    alignas(1024) element k[BLOCK_KV * COLUMNS];
    alignas(1024) element v[BLOCK_KV * COLUMNS]; /* in the end dV */
    alignas(1024) element q[2][BLOCK_Q * COLUMNS];
    alignas(1024) element dout[2][BLOCK_Q * COLUMNS];
    alignas(1024) element ds[2][BLOCK_Q * BLOCK_KV]; /* chunks of 64 keys, one from each warpgroup; in the end dK */
    alignas(1024) float dq[2][2][DQ_FLOATS]; /* of two steps, one half from each warpgroup; or the 16-bit result */
    alignas(16) float lse[2][BLOCK_Q];       /* comes with q */
    alignas(16) float d[2][BLOCK_Q];         /* comes with dout */
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

/* A warp's share of a step's dQ is 16 rows of 64 columns, of which the second warpgroup keeps those that heads have. On
 * its way to or from dq_sums it lies as in the registers, 16 bytes of every lane side by side; as a result it has the form
 * of a box of TMA, in the same place. */
constexpr int KEPT_COLUMNS = BLOCK_Q == 128 ? CHUNK : HEAD_DIM - CHUNK;
DEVICE constexpr int warp_floats(int wg) { return 16 * (wg ? KEPT_COLUMNS : CHUNK); }
static_assert(DQ_COLUMNS == CHUNK && 4 * (warp_floats(0) + warp_floats(1)) == SLAB_FLOATS,
              "a warp's result is one box");
constexpr u32 DQ_BYTES = SLAB_FLOATS * 4;

/* 16 columns of a box, from 16 g on, packed as registers of the accumulators lie; row: of the lane, in the box. Whole warp. */
DEVICE void write_columns(u32 row, int g, const u32 (&two)[4]) {
    stmatrix_x4(row + ((2 * g + threadIdx.x % 32 / 16) ^ threadIdx.x % 8) * 16, two[0], two[1], two[2], two[3]);
}
DEVICE u32 row_of_box(const void *box) { return smem_address(box) + threadIdx.x % 16 * ROW_BYTES; }

#endif
