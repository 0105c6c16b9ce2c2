/* The user's functions in attn_fwd_short and attn_bwd_short (flex.cuh).
 *
 * A lane holds 4 N pairs of a unit in registers. So the functions stand in the text once for each of them, and the
 * plan gives long functions to other kernels. What they read of pairs alone is asked for while Q, K and V are on their
 * way. */
#ifndef FA_SHORT_MODS_CUH
#define FA_SHORT_MODS_CUH

#include "short_units.cuh"

#if FLEX

/* The query and the key of element e of fragment n of a lane, in the warp's rows from `row` on. */
DEVICE int query_of(int row, int e) { return row + lane() / 4 + e / 2 * 8; }
DEVICE int key_of(int n, int e) { return 8 * n + 2 * (lane() % 4) + e % 2; }

/* Bit 4 n + e says that the pair exists and the mask shows it. */
DEVICE u32 pairs_in_mask(const mods &mod, const sequence &s, int row) {
    const int last_row = min(row + 15, s.len_q - 1);
    const block_kind kind = s.len_kv > 0 ? mod.map.kind_of(row, last_row, 0, s.len_kv - 1) : EMPTY_BLOCK;
    if (kind == EMPTY_BLOCK) return 0;
    u32 seen = ~0u, exists = 0;
    if (kind == PARTIAL_BLOCK) {
        seen = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                seen |= (u32)mod.sees_in_block(PARTIAL_BLOCK, query_of(row, e), key_of(n, e)) << (4 * n + e);
    } else if (kind == MIXED_BLOCKS) {
        seen = pairs_that_see<N, false, MIXED_BLOCKS>(mod, s.len_q, s.len_kv, query_of(row, 0), key_of(0, 0));
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            exists |= (u32)(query_of(row, e) < s.len_q && key_of(n, e) < s.len_kv) << (4 * n + e);
    return seen & exists;
}

/* The functions of a unit, and what a lane reads of its pairs alone, in the warp's rows from `row` on. */
struct pair_values {
    const mods mod;
    const float scale;
    const int row;
    u32 seen = 0; /* bit 4 n + e: the pair counts */
    unsigned short bits[N][4];
    float rows[2];

    DEVICE pair_values(const problem &p, const unit_place &at, int row)
        : mod(p.flex, p.values, at.s.b_idx, at.head), scale(p.scale), row(row) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) bits[n][e] = mod.pair_bits(query_of(row, e), key_of(n, e));
        rows[0] = mod.row(query_of(row, 0)), rows[1] = mod.row(query_of(row, 2));
        if (row < at.s.len_q) seen = pairs_in_mask(mod, at.s, row);
    }
    /* The score of a pair whose product is qk: qk itself if the functions do not change scores. The pair does not count
     * if the score is -inf. */
    DEVICE float score(float qk, int n, int e) {
        const float scaled = __fmul_rn(qk, scale);
        if (!MODS_CHANGE_SCORES) {
            if (scaled == -INF) seen &= ~(1u << (4 * n + e));
            return qk;
        }
        const float x = mod.score_of(bits[n][e], rows[e / 2], scaled, query_of(row, e), key_of(n, e));
        if (x == -INF) seen &= ~(1u << (4 * n + e));
        return x;
    }
    DEVICE bool sees(int n, int e) const { return seen >> (4 * n + e) & 1; }
    DEVICE bool hides() const { return __any_sync(WHOLE_WARP, seen != (N == 8 ? ~0u : (1u << 4 * N) - 1)); }

    /* Products become scores, -inf of pairs that do not count. */
    DEVICE void change_scores(float (&scores)[N][4]) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float x = score(scores[n][e], n, e);
                scores[n][e] = sees(n, e) ? x : -INF;
            }
    }
};

/* ---- gradients of captures -------------------------------------------------------------------------------------- */

#if FLEX_PARTS

/* What a lane adds to the gradient of a capture by one scatter of the derivative. Pairs that share an element are added
 * up here first: those of one query or key, and those of other sequences of the unit. Other pairs add 0. */
template <int PART> struct part_sums {
    static constexpr flex_kind KIND = flex_kind_of(PART);
    static constexpr int NUM = KIND == FLEX_OF_HEAD    ? 1
                               : KIND == FLEX_OF_QUERY ? 2
                               : KIND == FLEX_OF_KEY   ? 2 * N
                                                       : 4 * N;
    float sums[NUM] = {};

    static DEVICE constexpr int slot_of(int n, int e) {
        return KIND == FLEX_OF_HEAD    ? 0
               : KIND == FLEX_OF_QUERY ? e / 2
               : KIND == FLEX_OF_KEY   ? 2 * n + e % 2
                                       : 4 * n + e;
    }
    /* The pair is the first one of its slot. */
    static DEVICE constexpr bool is_first(int n, int e) {
        return KIND == FLEX_OF_HEAD    ? n == 0 && e == 0
               : KIND == FLEX_OF_QUERY ? n == 0 && e % 2 == 0
               : KIND == FLEX_OF_KEY   ? e < 2
                                       : true;
    }
    DEVICE void add(int n, int e, float x) { sums[slot_of(n, e)] += x; }

    /* Adds the sums to memory, and begins anew. Whole warp. */
    DEVICE void give(const mods &mod, int row) {
        constexpr int LANES_OF_QUERY = 3, LANES_OF_KEY = 28;
        constexpr int SHARED = KIND == FLEX_OF_HEAD    ? LANES_OF_QUERY + LANES_OF_KEY
                               : KIND == FLEX_OF_QUERY ? LANES_OF_QUERY
                               : KIND == FLEX_OF_KEY   ? LANES_OF_KEY
                                                       : 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (!is_first(n, e)) continue;
                float sum = sums[slot_of(n, e)];
                sums[slot_of(n, e)] = 0;
#pragma unroll
                for (int bit = 1; bit < 32; bit *= 2)
                    if (SHARED & bit) sum += __shfl_xor_sync(WHOLE_WARP, sum, bit);
                if ((lane() & SHARED) == 0)
                    mod.template add_part<PART>(mod.template place_of<PART>(query_of(row, e), key_of(n, e)), sum);
            }
    }
};

/* The sums of all parts from PART on. */
template <int PART = 0, bool EXISTS = (PART < FLEX_PARTS)> struct sums_from {
    part_sums<PART> own;
    sums_from<PART + 1> others;

    DEVICE void add(int n, int e, const float (&parts)[FLEX_PARTS]) {
        own.add(n, e, parts[PART]);
        others.add(n, e, parts);
    }
    /* Where a batch has elements of its own, its sums go to memory at its end, and the others at the unit's end. */
    template <bool OF_BATCH> DEVICE void give(const mods &mod, int row) {
        if (flex_place_has_b(PART) == OF_BATCH) own.give(mod, row);
        others.template give<OF_BATCH>(mod, row);
    }
};
template <int PART> struct sums_from<PART, false> {
    DEVICE void add(int, int, const float (&)[FLEX_PARTS]) {}
    template <bool OF_BATCH> DEVICE void give(const mods &, int) {}
};

typedef sums_from<> capture_sums;

/* Returns the gradient of scale qk from that of the score. A pair that counts adds to the sums. */
DEVICE float derivative_of(const pair_values &pairs, capture_sums &sums, float x, float grad, bool sees, int n, int e) {
    float parts[FLEX_PARTS];
    const float result = pairs.mod.derivative(parts, x, grad, query_of(pairs.row, e), key_of(n, e));
#pragma unroll
    for (int i = 0; i < FLEX_PARTS; i++) parts[i] = sees ? parts[i] : 0;
    sums.add(n, e, parts);
    return result;
}

#else

struct capture_sums {
    template <bool OF_BATCH> DEVICE void give(const mods &, int) {}
};
DEVICE float derivative_of(const pair_values &pairs, capture_sums &, float x, float grad, bool, int n, int e) {
    mod_sums none = {};
    return pairs.mod.derivative(none, x, grad, query_of(pairs.row, e), key_of(n, e));
}

#endif

#else /* no functions */

struct pair_values {
    DEVICE pair_values(const problem &, const unit_place &, int) {}
};
struct capture_sums {};

#endif
#endif
