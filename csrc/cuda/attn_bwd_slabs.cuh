/* A slab holds the sums and the statistics of BLOCK_Q query rows of one head, for all backward kernels on Hopper. Slabs
 * are numbered per head. A packed sequence has whole slabs of its own. */
#ifndef FA_ATTN_BWD_SLABS_CUH
#define FA_ATTN_BWD_SLABS_CUH

#include "attn_bwd_params.h"
#include "mask.cuh"
#include "packed.cuh"
#include "ptx_sm90.cuh"

constexpr bool WIDE = HEAD_DIM > 128; /* the table rows of attn_bwd_wide_sm90 */

/* Columns come in chunks. Shared memory holds whole chunks. Columns beyond the
 * heads' columns are zero, or are not written. */
constexpr int CHUNK = 64, CHUNKS = (HEAD_DIM + CHUNK - 1) / CHUNK, COLUMNS = CHUNKS * CHUNK;
constexpr int V_CHUNKS = (D_V + CHUNK - 1) / CHUNK; /* of V and dO */
static_assert(D_V == HEAD_DIM || (WIDE && D_V % CHUNK == 0), "two kinds of columns: above 128 columns only");
static_assert(HEAD_DIM % 16 == 0, "lanes store 16 bytes each");

/* Two warpgroups compute dQ of a slab. Of 128 rows each warpgroup has 64. Of 64 rows each warpgroup has half
 * of the columns. */
constexpr int DQ_COLUMNS = BLOCK_Q == 128 ? HEAD_DIM : COLUMNS * BLOCK_Q / 128, DQ_REGS = DQ_COLUMNS / 2;
constexpr int DQ_FLOATS = 64 * DQ_COLUMNS;
static_assert(BLOCK_Q < 128 || HEAD_DIM <= CHUNK, "128 rows have no more than a chunk of columns");
/* Sums of a slab: DQ_FLOATS of the first warpgroup, then the second's. */
constexpr int SLAB_COLUMNS = FA_SLAB_COLUMNS(HEAD_DIM), SLAB_FLOATS = BLOCK_Q * SLAB_COLUMNS;
DEVICE constexpr int dq_row(int wg) { return BLOCK_Q == 128 ? 64 * wg : 0; }
DEVICE constexpr int dq_column(int wg) { return BLOCK_Q == 128 ? 0 : DQ_COLUMNS * wg; }

/* Returns the place of row i among the statistics of 16 rows. The four numbers that a lane of a quad needs are
 * neighbours. */
DEVICE constexpr int stat_place(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

/* Returns the keys that rows [first_row, last_row] see, from the first key of the first row to the last key of the last
 * row. The window is read at run time, because attn_bwd_prep has no constant CAUSAL. */
DEVICE interval keys_of_rows(const fa_attn_bwd_params &p, int len_q, int len_kv, int first_row, int last_row) {
    typedef mask_of<false, true> mask;
    const int shift = len_kv - len_q;
    return {mask::keys_begin<INSIDE>(p, first_row, shift, 0, len_kv),
            mask::keys_end<INSIDE>(p, last_row, shift, 0, len_kv)};
}

/* Returns the key tiles that some row of query tile i sees. */
DEVICE interval key_tiles_of(const fa_attn_bwd_params &p, int len_q, int len_kv, int i) {
    const int first_row = i * BLOCK_Q, last_row = min(first_row + BLOCK_Q, len_q) - 1;
    const interval keys = keys_of_rows(p, len_q, len_kv, first_row, last_row);
    const int begin = keys.begin / BLOCK_KV;
    return {begin, keys.begin < keys.end ? ceil_div(keys.end, BLOCK_KV) : begin};
}

/* Packed: does attn_bwd_short take the sequence? */
DEVICE bool is_left_out(const fa_attn_bwd_params &p, const span &q, const span &kv) {
    return q.len <= p.short_rows && kv.len <= p.short_rows && p.short_rows > 0;
}

/* Returns the first slab of a packed sequence. The slabs of two sequences do not meet, because
 * floor((begin + len) / n) + 1 >= floor(begin / n) + ceil(len / n). */
DEVICE int slab_begin(const fa_attn_bwd_params &p, int b_idx) {
    return clamp(p.cu_seqlens_q[b_idx], 0, p.len_q) / BLOCK_Q + b_idx;
}

/* The rows of a slab. */
struct slab_rows {
    int b_idx, head;
    int row;   /* first row, in its sequence */
    int begin; /* first row of the sequence in a packed tensor */
    int rows;  /* number of rows, up to BLOCK_Q; 0 or less: none */
};
DEVICE slab_rows slab_at(const fa_attn_bwd_params &p, int slab) {
    slab_rows t;
    const int head = slab / p.num_slabs, in_head = slab - head * p.num_slabs;
    if (VARLEN) {
        int low = 0, high = p.b - 1; /* finds the last sequence that begins at or before the slab */
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (slab_begin(p, middle) <= in_head)
                low = middle;
            else
                high = middle - 1;
        }
        const span q = span_at(p.cu_seqlens_q, low, p.len_q);
        t.b_idx = low, t.head = head, t.begin = q.begin;
        t.row = (in_head - slab_begin(p, low)) * BLOCK_Q;
        const bool is_own = !is_left_out(p, q, span_at(p.cu_seqlens_k, low, p.len_kv));
        t.rows = t.row < 0 || !is_own ? 0 : min(q.len - t.row, BLOCK_Q);
    } else {
        t.b_idx = head / p.h, t.head = head - t.b_idx * p.h, t.begin = 0;
        t.row = in_head * BLOCK_Q;
        t.rows = min(p.len_q - t.row, BLOCK_Q);
    }
    return t;
}

#endif
