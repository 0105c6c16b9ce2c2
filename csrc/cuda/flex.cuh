/* The user's functions in a kernel: a score_mod, its derivative, and a mask_mod with a block mask (../flex/flex.h).
 *
 * flex_mods.cuh is generated from the functions of a call (../flex/source.h), and lies beside no other text. A kernel
 * with the constant FLEX includes the generated text and has its parameters behind those of other kernels. */
#ifndef FA_FLEX_CUH
#define FA_FLEX_CUH

#include "flex_blocks.cuh"
#include "flex_mods.cuh"

/* What a thread adds to gradients of captures later, because only b and h choose the elements. */
#if FLEX_DERIVATIVE
typedef flex_sums mod_sums;
#else
struct mod_sums {};
#endif

#if !FLEX_ADDS
#define FLEX_HEAD_VALUES 0
#endif
/* What the sum in an exponent takes from memory for a head. */
struct head_values {
    float x[FLEX_HEAD_VALUES > 0 ? FLEX_HEAD_VALUES : 1];
};

/* The kind of all tiles if there is no block mask. */
constexpr block_kind KIND_WITHOUT_BLOCKS = FLEX_MASK ? PARTIAL_BLOCK : FULL_BLOCK;

/* The parameters of a kernel, with those of the user's functions behind. */
template <class base> struct with_mods : base {
    fa_cuda_flex flex;
    flex_values values;
};

/* What the functions of a batch call query 0. */
DEVICE int first_query_of(const fa_cuda_flex &flex, int b_idx) {
    return flex.q_offset ? clamp(flex.q_offset[b_idx], 0, 1 << 30) : 0;
}

/* The functions of one batch and query head. */
struct mod_functions {
    const flex_values &values;
    int b_idx, head;
    int first; /* what the functions call query 0 */

    DEVICE mod_functions(const flex_values &values, int b_idx, int head, int first)
        : values(values), b_idx(b_idx), head(head), first(first) {}

    /* Returns the score of query i and key j from scale q.k. j_step: a constant as odd as j; -1: none is known. */
    DEVICE float score(float x, int i, int j, int j_step = -1) const {
#if FLEX_SCORE
        return flex_score(values, x, b_idx, head, first + i, j, j_step);
#else
        return x;
#endif
    }

    /* What the score_mod reads of query i and key j alone, if that is 16 bits. Then row() is what it reads of query i
     * alone, if that is a float. Otherwise both are 0, and nobody reads them. */
    DEVICE unsigned short pair_bits(int i, int j) const {
#if FLEX_PAIR_BITS
        return flex_pair_bits(values, b_idx, head, first + i, j);
#else
        return 0;
#endif
    }
    DEVICE float row(int i) const {
#if FLEX_ROW
        return flex_row(values, b_idx, head, first + i);
#else
        return 0;
#endif
    }
    /* The score, from both. */
    DEVICE float score_of(unsigned short bits, float row, float x, int i, int j) const {
#if FLEX_PAIR_BITS
        return flex_score_of(values, bits, row, x, b_idx, head, first + i, j);
#else
        return score(x, i, j);
#endif
    }

    /* Where pair_bits reads: with FLEX_OCTETS the first of 8 elements in 16 aligned bytes, if j is a multiple of 8. */
    DEVICE const unsigned short *pair_place(int i, int j) const {
#if FLEX_OCTETS
        return flex_pair_place(values, b_idx, head, first + i, j);
#else
        return nullptr;
#endif
    }

    /* Asks the L1 for what score() will read of query i and key j alone, and of the next keys in the same 32 bytes. */
    DEVICE void prefetch(int i, int j) const {
#if FLEX_PREFETCHES
        flex_prefetch(values, b_idx, head, first + i, j);
#endif
    }

#if FLEX_ADDS
    DEVICE void load_head(head_values &of_head) const { flex_head_values(values, of_head.x, b_idx, head); }

    /* 0 if query i has no score but what is added to it, else 1. `of_row` is row(i). */
    DEVICE float score_factor(int i, float of_row) const {
        return flex_score_factor(values, b_idx, head, first + i, of_row);
    }

    /* Returns start + log2 e (score - score_factor scale q.k). The pair is one of many of a thread, and i_step and
     * j_step are constants: the thread's first pair is that of i - i_step and j - j_step. */
    DEVICE float exponent(const head_values &of_head, unsigned short bits, float row, float start, int i, int j,
                          int i_step, int j_step) const {
#if FLEX_PAIR_BITS
        return flex_exponent(values, of_head.x, start, b_idx, head, first + i, j, i_step, j_step, bits, row);
#else
        return flex_exponent(values, of_head.x, start, b_idx, head, first + i, j, i_step, j_step);
#endif
    }
#endif

    /* Returns the gradient of scale q.k from the gradient of the score, and adds to the gradients of captures. */
    DEVICE float derivative(mod_sums &sums, float x, float grad, int i, int j) const {
#if FLEX_DERIVATIVE
        return flex_derivative(values, sums, x, grad, b_idx, head, first + i, j);
#else
        return grad;
#endif
    }

    /* Adds the sums of this thread to memory. */
    DEVICE void add(const mod_sums &sums) const {
#if FLEX_DERIVATIVE
        flex_add_sums(values, sums, b_idx, head);
#endif
    }

#if FLEX_PARTS
    /* The same, but leaves in `parts` what each scatter adds. */
    DEVICE float derivative(float (&parts)[FLEX_PARTS], float x, float grad, int i, int j) const {
        return flex_derivative(values, parts, x, grad, b_idx, head, first + i, j);
    }

    /* Returns the place in a capture's gradient to which query i and key j add. */
    template <int PART> DEVICE auto place_of(int i, int j) const {
        return flex_place_of<PART>(values, b_idx, head, first + i, j);
    }
    template <int PART, class T> DEVICE void add_part(T place, float value) const {
        flex_add_part<PART>(values, place, value);
    }
#endif

    /* Does query i see key j in a block of this kind? */
    DEVICE bool sees_in_block(block_kind kind, int i, int j) const {
#if FLEX_MASK
        if (kind == PARTIAL_BLOCK) return flex_mask(values, b_idx, head, first + i, j);
#endif
        return kind != EMPTY_BLOCK;
    }
};

/* The functions, with the map of the block mask. */
struct mods : mod_functions {
    block_map map;

    DEVICE mods(const fa_cuda_flex &flex, const flex_values &values, int b_idx, int head)
        : mod_functions(values, b_idx, head, first_query_of(flex, b_idx)), map(flex, b_idx, head, KIND_WITHOUT_BLOCKS) {
    }

    /* Does query i see key j? Both exist, and their tile has this kind. */
    DEVICE bool sees(block_kind kind, int i, int j) const {
        return sees_in_block(kind == MIXED_BLOCKS ? map.kind_at(i, j) : kind, i, j);
    }

    /* The same for loops over many pairs. NOTE: the mask_mod has no condition. Behind one, a load waits for the load
     * before, and the compiler moves nothing out of the loop. */
    template <block_kind KIND> DEVICE bool sees(int i, int j) const {
        if (KIND == FULL_BLOCK) return true;
        const bool is_seen = sees_in_block(PARTIAL_BLOCK, i, j);
        if (KIND == PARTIAL_BLOCK) return is_seen;
        const block_kind kind = map.kind_at(i, j);
        return kind == FULL_BLOCK || (kind == PARTIAL_BLOCK && is_seen);
    }
};

/* The pairs of a thread of mma.sync that see each other, 8 N columns of rows x and x + 8 from column y on: bit 4 n + e
 * is that of element e of fragment n. Rows are queries, or with ROWS_ARE_KEYS keys. Pairs that do not exist have
 * any bit. */
template <int N, bool ROWS_ARE_KEYS, block_kind KIND>
DEVICE unsigned pairs_that_see(const mods &mod, int len_q, int len_kv, int x, int y) {
    static_assert(4 * N <= 32, "a word has a bit for each pair");
    unsigned seen = 0;
#pragma unroll 1
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = x + e / 2 * 8, column = y + 8 * n + e % 2;
            const int i = min(ROWS_ARE_KEYS ? column : row, len_q - 1),
                      j = min(ROWS_ARE_KEYS ? row : column, len_kv - 1);
            seen |= (unsigned)mod.template sees<KIND>(i, j) << (4 * n + e);
        }
    return seen;
}
template <int N, bool ROWS_ARE_KEYS>
DEVICE unsigned pairs_that_see(const mods &mod, block_kind kind, int len_q, int len_kv, int x, int y) {
    if (kind == FULL_BLOCK) return 0xffffffffu;
    if (kind == PARTIAL_BLOCK) return pairs_that_see<N, ROWS_ARE_KEYS, PARTIAL_BLOCK>(mod, len_q, len_kv, x, y);
    return pairs_that_see<N, ROWS_ARE_KEYS, MIXED_BLOCKS>(mod, len_q, len_kv, x, y);
}

#endif
