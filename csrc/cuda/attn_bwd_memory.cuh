/* The shared memory of attn_bwd_sm90.cu holds operands, sums and results, and their barriers. The file also defines the
 * place of a warp's share of dQ. */
#ifndef FA_ATTN_BWD_MEMORY_CUH
#define FA_ATTN_BWD_MEMORY_CUH

#include "attn_bwd_scores.cuh"

/* Operands lie in the layout that TMA writes and wgmma reads. A chunk has CHUNK columns, and each row of a chunk has
 * ROW_BYTES bytes. The 16-byte pieces of a row are swizzled by the row's number. Each chunk starts at a multiple of
 * 1024 bytes, the swizzle's period. */
struct shared_memory {
    alignas(1024) element k[BLOCK_KV * COLUMNS];
    alignas(1024) element v[BLOCK_KV * COLUMNS]; /* at the end dV */
    alignas(1024) element q[2][BLOCK_Q * COLUMNS];
    alignas(1024) element dout[2][BLOCK_Q * COLUMNS];
    alignas(1024) element ds[2][BLOCK_Q * BLOCK_KV]; /* chunks of 64 keys, one from each warpgroup; at the end dK */
    alignas(1024) float dq[2][2][DQ_FLOATS];         /* half of a step from each warpgroup, or the 16-bit result */
    alignas(16) float lse[2][BLOCK_Q];               /* comes with q */
    alignas(16) float d[2][BLOCK_Q];                 /* comes with dout */
    /* Arrivals at the barriers:
     *
     *   k_full, v_full, q_full, do_full        one, with TMA's bytes
     *   k_empty, q_empty, do_empty, ds_empty   one per consumer warp
     *   ds_full, dq_full, dk_full, dv_full     one per consumer warp
     *   v_empty, dk_empty                      one, of the warp that stores dV and dK
     *   dq_ready                               the writer warp's, with TMA's bytes if a sum comes; or the converter's
     *   sum_full                               the writer warp's, with TMA's bytes
     *   tile_full                              one, of the producer warp
     *   tile_empty                             one per consumer warp, and one per warp that writes to memory */
    u64 k_full, k_empty, v_full, v_empty, dk_full, dk_empty, dv_full;
    u64 q_full[2], q_empty[2], do_full[2], do_empty[2];
    u64 ds_full[2], ds_empty[2];
    u64 dq_ready[2], dq_full[2], sum_full[2];
    u64 tile_full[2], tile_empty[2];
    tile tiles[2];
    step_words words;
    alignas(16) dropout_memory<DROPOUT> dropout;
#if FLEX
    alignas(256) unsigned short pairs[HOLDS_PAIRS ? 8 : 1][HOLDS_PAIRS ? BLOCK_Q * 16 : 1]; /* of each consumer warp */
#endif
};
static_assert(sizeof(shared_memory) <= 232448, "an SM has 227 KiB for one CTA");
static_assert(COLUMNS <= 2 * BLOCK_Q, "dK has the place of both stages of dS");

/* A warp's share of a step's dQ has 16 rows. The second half of the columns keeps only those that slabs have.
 * On the way to or from dq_sums a share lies as in the registers, 16 bytes of every lane side by side. The 16-bit
 * result has the form of a box of TMA, in the same place. */
constexpr int DQ_ROW_BYTES = FA_DQ_BOX(HEAD_DIM, BLOCK_Q) * element::BYTES;
constexpr int KEPT_COLUMNS = BLOCK_Q == 128 ? DQ_COLUMNS : SLAB_COLUMNS - DQ_COLUMNS;
DEVICE constexpr int warp_floats(int wg) { return 16 * (wg ? KEPT_COLUMNS : DQ_COLUMNS); }
static_assert(4 * (warp_floats(0) + warp_floats(1)) == SLAB_FLOATS, "warps have the whole slab");
static_assert(DQ_COLUMNS <= CHUNK && warp_floats(1) * 4 % 1024 == 0 && warp_floats(1) * 4 >= 16 * DQ_ROW_BYTES,
              "a warp's result is one box, where its share was");
constexpr u32 DQ_BYTES = SLAB_FLOATS * 4;

/* Whole warp. Writes 16 columns of a box, from column 16 g on. `two` holds the columns, packed, as the registers of the
 * accumulators lie. `row` is the lane's row in the box, which has BYTES bytes. */
template <int BYTES> DEVICE void write_columns(u32 row, int g, const u32 (&two)[4]) {
    const int swizzle = BYTES == 128 ? threadIdx.x % 8 : threadIdx.x / 2 % 4;
    stmatrix_x4(row + ((2 * g + threadIdx.x % 32 / 16) ^ swizzle) * 16, two[0], two[1], two[2], two[3]);
}
template <int BYTES> DEVICE u32 row_of_box(const void *box) { return smem_address(box) + threadIdx.x % 16 * BYTES; }

#endif
