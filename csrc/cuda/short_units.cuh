/* attn_fwd_short and attn_bwd_short share this file: the units of a CTA, and their loads.
 *
 * A unit is one head of one sequence, with at most UNIT_ROWS queries and UNIT_ROWS keys. One warp has 16 of the
 * queries, and 16 of the keys. So 1, 2 or 4 of the 4 warps are a unit, and units know nothing of each other. A warp
 * loads its own rows of each tensor, and the whole unit reads them. Rows and columns that do not exist are zeros in
 * shared memory. */
#ifndef FA_SHORT_UNITS_CUH
#define FA_SHORT_UNITS_CUH

#define F32         0
#define OF_3        0
#define WARPS       4
#define BLOCKS      1
#define READS_CACHE 0

/* A row of tiles.def gives HEAD_DIM columns, UNIT_ROWS of a unit, and CTAS of an SM. */
#if !defined(HEAD_DIM) || !defined(UNIT_ROWS) || !defined(CTAS) || !defined(SCORE) || !defined(DROPOUT) || \
    !defined(VARLEN)
#error "a row of tiles.def; SCORE: softcap, ALiBi or a scale that is not positive; DROPOUT, VARLEN (packed): 0 or 1"
#endif

#include "tile_any.cuh"

constexpr int UNIT_WARPS = UNIT_ROWS / 16, UNITS = WARPS / UNIT_WARPS, N = UNIT_ROWS / 8;
static_assert(UNIT_ROWS == 16 || UNIT_ROWS == 32 || UNIT_ROWS == 64,
              "whole units of 4 warps; 32 bits for the pairs of a thread");

DEVICE int unit_of_warp() { return warp() / UNIT_WARPS; }
/* The warp's first query, and its first key. */
DEVICE int first_row_of_warp() { return warp() % UNIT_WARPS * 16; }

/* All threads of the unit meet. Afterwards each sees what the others have written to shared memory. */
DEVICE void meet_in_unit() {
    if (UNIT_WARPS == 1)
        __syncwarp();
    else
        bar_sync(1 + unit_of_warp(), 32 * UNIT_WARPS);
}
/* The same. Returns whether x is true in one of the threads. */
DEVICE bool any_in_unit(bool x) {
    if (UNIT_WARPS > 1) return bar_red_or(1 + unit_of_warp(), 32 * UNIT_WARPS, x);
    __syncwarp();
    return __any_sync(WHOLE_WARP, x);
}

/* The sequence and the head of a unit. */
struct unit_place {
    sequence s;
    int head;
};
DEVICE unit_place unit_of(const fa_cuda_problem &p, int b_idx, int head) {
    if (VARLEN) return {sequence_at(p, b_idx), head};
    return {{b_idx, 0, p.len_q, p.len_kv, b_idx, 0, p.len_kv, nullptr}, head};
}
DEVICE unit_place unit_at(const fa_cuda_problem &p, long long unit) {
    return unit_of(p, (int)((u32)unit / (u32)p.h), (int)((u32)unit % (u32)p.h));
}

/* Is a packed sequence longer than max_seqlen, and too long for a tile? */
DEVICE bool is_long(const sequence &s) { return VARLEN && (s.len_q > UNIT_ROWS || s.len_kv > UNIT_ROWS); }

/* Packed rows behind the last sequence belong to no sequence. The units of a head give them a value together, up to row
 * `end`. */
DEVICE void fill_unowned_stats(const fa_cuda_problem &p, const fa_cuda_row_stats &stats, const unit_place &at, int end,
                               float value) {
    if (!VARLEN) return;
    constexpr long long UNIT_THREADS = 32 * UNIT_WARPS;
    const int thread = lane() + 2 * first_row_of_warp();
    for (long long i = clamp(p.cu_seqlens_q[p.b], 0, p.total_q) + at.s.b_idx * UNIT_THREADS + thread; i < end;
         i += p.b * UNIT_THREADS)
        stats.data[at.head * stats.stride_h + i] = value;
}

/* ---- a warp's own rows ----------------------------------------------------------------------------------------- */

/* LANES lanes take a row, 16 bytes each. Some of them are idle if the row has fewer pieces. */
constexpr int PIECES = HEAD_DIM / 8, LANES = PIECES <= 4 ? 4 : PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;
constexpr int STEP = 32 / LANES, OWN_PIECES = 16 / STEP; /* rows at a time; pieces of a lane */
static_assert(PIECES <= LANES, "a lane has one piece of a row");

DEVICE int top_of_lane() { return lane() / LANES; }
DEVICE int left_of_lane() { return lane() % LANES * 8; }

/* Copies the warp's 16 rows to a tile. `rows` is row 0 of the unit. num_rows rows and `columns` columns exist. */
DEVICE void load_own_rows(factor *tile, const factor *rows, const long long &stride, int num_rows, int columns) {
    const int top = first_row_of_warp() + top_of_lane(), left = left_of_lane();
    const int num_own = left < columns ? num_rows - top : 0;
    const u32 to = smem_address(tile + top * PITCH + left);
    if (LANES == PIECES || left < HEAD_DIM)
#pragma unroll
        for (int i = 0; i < OWN_PIECES; i++) {
            const bool exists = i * STEP < num_own;
            cp_async_16(to + i * STEP * PITCH * factor::BYTES, rows + (exists ? (top + i * STEP) * stride + left : 0),
                        exists);
        }
}

/* Do the lane's own pieces of a tile hold NaN or inf? A lane sees what it has copied before others do. */
DEVICE bool own_has_nan_or_inf(const factor *tile) {
    const factor *own = tile + (first_row_of_warp() + top_of_lane()) * PITCH + left_of_lane();
    u32 signs = 0;
    if (LANES == PIECES || left_of_lane() < HEAD_DIM)
#pragma unroll
        for (int i = 0; i < OWN_PIECES; i++)
            signs |= nan_or_inf_signs<factor>(*(const uint4 *)(own + i * STEP * PITCH));
    return signs & factor::SIGNS;
}

#endif
