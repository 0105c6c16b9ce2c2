/* attn_bwd_sm80 adds to the sums of dQ, and attn_bwd_dq_sm80 reads the sums. Both find their place here.
 *
 * The warps of a CTA divide a query tile [BLOCK_Q, HEAD_DIM] of dQ. Each warp has DQ_BLOCKS blocks of 16 rows, and
 * DQ_COLUMNS fragments of 8 columns. The sums lie as the accumulators of mma.m16n8k16 do, so the 32 lanes of a warp add
 * to 128 consecutive bytes. */
#ifndef FA_ATTN_BWD_SM80_CUH
#define FA_ATTN_BWD_SM80_CUH

#include "attn_bwd_sm80_params.h"
#include "sequence.cuh"

#if !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(WARPS) || !defined(GROUPS)
#error "a row of tiles.def"
#endif
/* Two groups of warps have swizzled tiles (tile_any.cuh), where rows have whole lines of 128 bytes. */
#define SWIZZLES (GROUPS == 2 && HEAD_DIM % 64 == 0)

/* 32 rows of a warp read the fewest bytes of shared memory, if that leaves the warp whole pairs of fragments. */
constexpr bool HAS_TWO_BLOCKS =
    BLOCK_Q % 32 == 0 && WARPS % (BLOCK_Q / 32) == 0 && HEAD_DIM % (WARPS / (BLOCK_Q / 32) * 16) == 0;
constexpr int DQ_BLOCKS = HAS_TWO_BLOCKS ? 2 : 1;
constexpr int DQ_WARPS = BLOCK_Q / (16 * DQ_BLOCKS), DQ_SHARES = WARPS / DQ_WARPS,
              DQ_COLUMNS = HEAD_DIM / 8 / DQ_SHARES;
static_assert(WARPS % DQ_WARPS == 0 && HEAD_DIM % (DQ_SHARES * 16) == 0, "each warp has whole pairs of fragments");

/* A warp has strips of columns, in fragments. Between two of its strips lie those of the other DQ_SHARES - 1 warps. */
constexpr int DQ_STRIP = SWIZZLES ? 2 : DQ_COLUMNS;
static_assert(!SWIZZLES || DQ_SHARES == 4, "swizzled rows want the strips of 64 columns in four warps");
DEVICE int column_of_dq(int fragment) {
    return fragment / DQ_STRIP * (8 * DQ_STRIP * DQ_SHARES) + fragment % DQ_STRIP * 8;
}

typedef fa_attn_bwd_sm80_params params;

/* Returns the number of the slab of row `row` of a sequence, which is a multiple of BLOCK_Q. An int
 * counts slabs, because the sums of one take 16 KB or more. */
DEVICE int slab_at(const params &p, const sequence &s, int head, int row) {
    if (!p.problem.cu_seqlens_q) return (s.b_idx * p.problem.h + head) * p.num_slabs + row / BLOCK_Q;
    return head * p.num_slabs + s.q_row / BLOCK_Q + s.b_idx + row / BLOCK_Q;
}

/* Returns the place of a lane's register 0 of the fragment in block m of rows and fragment c of columns of a tile.
 * Register e lies 32 e behind. */
DEVICE float *sums_at(const params &p, int slab, int m, int c, int lane) {
    const int share = c / DQ_STRIP % DQ_SHARES, own_c = c / (DQ_STRIP * DQ_SHARES) * DQ_STRIP + c % DQ_STRIP;
    const int fragment = ((m / DQ_BLOCKS * DQ_SHARES + share) * DQ_BLOCKS + m % DQ_BLOCKS) * DQ_COLUMNS + own_c;
    return p.dq_sums + (long long)slab * (BLOCK_Q * HEAD_DIM) + fragment * 128 + lane;
}

#endif
