/* What a score_mod reads of each pair alone, in attn_fwd_sm90.cu (pair_octets.cuh). Each warp copies the elements of
 * its 16 rows and of a step's keys. Without a block mask it does so a step ahead. With one it does so when K has come,
 * which brings the key tile's number.
 *
 *   memory ──cp.async──► 16 rows x BLOCK_KV keys of a warp ──ldmatrix──► bits of S[i], S[i + 1] in a register
 */
#ifndef FA_ATTN_FWD_PAIRS_CUH
#define FA_ATTN_FWD_PAIRS_CUH

#include "attn_fwd_memory.cuh"
#include "attn_fwd_softmax.cuh"
#include "pair_octets.cuh"

/* The warp need not wait for K to know the next key tile. */
constexpr bool KNOWS_NEXT_TILE = !FLEX_LISTS || !FLEX_BLOCKS;

/* Does a step take the elements from shared memory? O of the tile before may be there in the first step. */
template <bool IS_FIRST> DEVICE constexpr bool takes_pairs() { return HOLDS_PAIRS && !(IS_FIRST && PAIRS_IN_O); }

constexpr int VECTORS_OF_ROW = BLOCK_KV / 8;
typedef pair_octets<16, VECTORS_OF_ROW> octets;

/* Asks for the elements of rows [row, row + 16) and of the key tile from `key` on. They go to the warp's place `to`.
 * Whole warp. */
DEVICE void ask_for_pairs(u32 to, const params &p, const score_head &q_head, int row, int key, int len_kv, bool asks) {
    const flex_values values = p.values; /* as in score_by_mod */
    octets::ask(to, mod_functions(values, q_head.b_idx, q_head.head, 0), row, key, len_kv, asks);
}

/* S[i] becomes make(i, half, S[i], bits): half is row_of(i). `bits` is the element of the pair, which has been asked
 * for, or 0 without HOLDS_PAIRS. Whole warp. */
template <class make_score> DEVICE void for_each_pair(float (&S)[S_REGS], u32 from, make_score make) {
    /* The four matrices of a load are rows 0 to 7 and 8 to 15 of one vector, and then of the next. */
    const int lane = threadIdx.x % 32, matrix = lane / 8, matrix_row = matrix % 2 * 8 + lane % 8;
    if (HOLDS_PAIRS) octets::wait();
#pragma unroll
    for (int vector = 0; vector < VECTORS_OF_ROW; vector += 2) {
        u32 bits[4] = {0, 0, 0, 0};
        if (HOLDS_PAIRS) ldmatrix_x4(bits, from + octets::place_of(matrix_row, vector + matrix / 2));
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int i = 4 * vector + k, half = row_of(i);
            S[i] = make(i, half, S[i], (unsigned short)(bits[2 * (k / 4) + half] >> 16 * (k % 2)));
        }
    }
}

/* S becomes the scores of the score_mod. key and row are those of score_by_mod. Whole warp. */
DEVICE void score_by_pairs(float (&S)[S_REGS], u32 from, const params &p, const score_head &q_head, int key, int row) {
    const flex_values values = p.values;
    const mod_functions mod(values, q_head.b_idx, q_head.head, 0);
    const float of_row[2] = {mod.row(row), mod.row(row + 8)}, scale = p.score_scale;
    for_each_pair(S, from, [&](int i, int half, float x, unsigned short bits) {
        return mod.score_of(bits, of_row[half], __fmul_rn(x, scale), row + 8 * half, key + column_of(i));
    });
}

/* The score_mod is the score plus something, and what it reads of pairs is in shared memory. Where the row maximum
 * stays and no pair is hidden, S becomes the exponents of P at once. */
#if FLEX_ADDS
constexpr bool ADDS_IN_EXPONENT = !FLEX_MAX && (HOLDS_PAIRS || !FLEX_PREFETCHES);
DEVICE void add_in_exponent(float (&S)[S_REGS], u32 from, const params &p, const score_head &q_head,
                            const online_softmax &softmax, float scale_log2, int key, int row) {
    const flex_values values = p.values;
    const mod_functions mod(values, q_head.b_idx, q_head.head, 0);
    head_values of_head;
    mod.load_head(of_head);
    const float of_row[2] = {mod.row(row), mod.row(row + 8)}, scale = p.score_scale * scale_log2;
    const float factor[2] = {scale * mod.score_factor(row, of_row[0]), scale * mod.score_factor(row + 8, of_row[1])};
    for_each_pair(S, from, [&](int i, int half, float x, unsigned short bits) {
        const int i_step = 8 * half, j_step = column_of(i);
        return fmaf(x, factor[half],
                    mod.exponent(of_head, bits, of_row[half], -softmax.max_log2[half], row + i_step, key + j_step,
                                 i_step, j_step));
    });
}
#else
constexpr bool ADDS_IN_EXPONENT = false;
DEVICE void add_in_exponent(float (&)[S_REGS], u32, const params &, const score_head &, const online_softmax &, float,
                            int, int) {}
#endif

#endif
