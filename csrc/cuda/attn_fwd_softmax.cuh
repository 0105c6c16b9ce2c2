/* The online softmax of attn_fwd_sm90.cu, in registers. The scores of a thread's two rows, as wgmma leaves them,
 * become P. */
#ifndef FA_ATTN_FWD_SOFTMAX_CUH
#define FA_ATTN_FWD_SOFTMAX_CUH

#include "attn_fwd_tiles.cuh"
#include "philox.cuh"
#include "score.cuh"

/* The registers of a thread. Of its warp's 16 rows the thread holds rows l / 4 and l / 4 + 8. In each group of 8
 * columns it holds the columns 2 (l % 4) + {0, 1}. Register i of S belongs to row row_of(i) of the two and to
 * column column_of(i). */
constexpr int S_REGS = BLOCK_KV / 2, O_REGS = D_V / 2, P_REGS = BLOCK_KV * element::BYTES / 8;
DEVICE constexpr int row_of(int i) { return i / 2 % 2; }
DEVICE constexpr int column_of(int i) { return 8 * (i / 4) + i % 2; }

/* Scores are more than products of Q and K, so they may jump from one key tile to the next. */
#if FLEX
constexpr bool SCORES_JUMP = FLEX_SCORE;
#else
constexpr bool SCORES_JUMP = SCORE && element::BYTES == 2;
#endif

/* The online softmax of two rows. m is the row maximum that P is measured from. */
struct online_softmax {
    float max[2];      /* m; -inf while the row has seen no score above -inf */
    float max_log2[2]; /* c m + HEADROOM, which exponents subtract; 0 without m */
    float sum[2];      /* of P, over this thread's columns */
#if FLEX_MAX
    float highest[2] = {-INF, -INF}; /* score of this thread's columns, masked ones aside; NaN if one is NaN */
#endif
};

/* ---- scores ---------------------------------------------------------------------------------------------------- */

/* S becomes the scores of score.cuh, in natural units. first_key and diagonal are those of mask_scores. */
DEVICE void change_scores(float (&S)[S_REGS], const params &p, const score_head &q_head, int first_key, int diagonal) {
    const score_of<FAST, false, params> score(p);
    if (score.softcap > 0) {
        float unused;
#pragma unroll
        for (int i = 0; i < S_REGS; i++) S[i] = score.capped(S[i], unused);
    }
    const float scale = score.softcap > 0 ? 1 : score.scale;
    if (p.alibi_slopes) {
        /* Only one pair's distance is converted. The sums for the others are exact, and pairs of a diagonal share
         * one. */
        const float distance = (float)(diagonal - first_key);
#pragma unroll
        for (int i = 0; i < S_REGS; i++)
            S[i] = fmaf(S[i], scale, -q_head.slope * fabsf(distance + (float)(8 * row_of(i) - column_of(i))));
    } else if (!(score.softcap > 0)) {
#pragma unroll
        for (int i = 0; i < S_REGS; i++) S[i] *= scale;
    }
}

/* Keys that a row does not see get -inf. first_key is the key of this thread's first column. diagonal is this
 * thread's first row plus len_kv - len_q: the last key that the row sees under a causal mask. */
DEVICE void mask_scores(float (&S)[S_REGS], const params &p, int len_kv, int first_key, int diagonal) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const tile_walk keys = keys_of(p, diagonal + 8 * r, diagonal + 8 * r, len_kv);
        const int begin = keys.begin - first_key, end = keys.end - first_key;
#pragma unroll
        for (int i = 0; i < S_REGS; i++)
            if (row_of(i) == r && (column_of(i) >= end || (LOCAL && column_of(i) < begin))) S[i] = -INF;
    }
}

#if FLEX
/* S becomes the scores of the user's score_mod. key is that of this thread's first column, and row its first row. NOTE:
 * the values are a copy. A load of a capture is a volatile statement in CUDA's headers. Behind each load NVRTC would
 * read the parameters again, and do their arithmetic again. In the backward a copy makes ptxas spill. */
DEVICE void score_by_mod(float (&S)[S_REGS], const params &p, const score_head &q_head, int key, int row) {
    const flex_values values = p.values;
    const mod_functions mod(values, q_head.b_idx, q_head.head, 0);
#pragma unroll
    for (int i = 0; i < S_REGS; i++)
        S[i] = mod.score(__fmul_rn(S[i], p.score_scale), row + 8 * row_of(i), key + column_of(i), column_of(i));
}

/* Asks for what the score_mod will read of a step's pairs of a row block, from its first row and key on. Beside a cache
 * a row block may have rows of several heads, so each warp asks for its own row strip. */
DEVICE void prefetch_pairs(const params &p, const score_head &q_head, int key, int row) {
#if FLEX_PREFETCHES
    constexpr int AT_ONCE = 16, PARTS = BLOCK_KV / AT_ONCE; /* keys of 16 bits in 32 bytes */
    constexpr int ROWS = CACHE ? 16 : 64, THREADS_OF_ROWS = 2 * ROWS;
    const mod_functions mod(p.values, q_head.b_idx, q_head.head, 0);
#pragma unroll
    for (int i = threadIdx.x % THREADS_OF_ROWS; i < ROWS * PARTS; i += THREADS_OF_ROWS)
        mod.prefetch(row + i / PARTS, key + i % PARTS * AT_ONCE);
#endif
}

/* The kind of a warp's rows [i, i_last] and keys [j, j_last]. Each lane looks at a block. Whole warp. NOTE: loops that
 * depend on the map, as those of block_map::kind_of, would keep ptxas from seeing that the ring positions of the step
 * are uniform. Each matrix descriptor would then come from vector registers, and a step would take 20% longer. */
DEVICE block_kind kind_of_strip(const block_map &map, int i, int i_last, int j, int j_last) {
    const block_range rows = blocks_of(i, i_last, map.block_q), keys = blocks_of(j, j_last, map.block_kv);
    const int lane = threadIdx.x % 32, columns = keys.last - keys.first + 1;
    const int num = (rows.last - rows.first + 1) * columns;
    u32 bits = lane == 0 && num > 32 ? 1u << MIXED_BLOCKS : 0;
    if (lane < num)
        bits |= 1u << map.kinds[(long long)(rows.first + lane / columns) * map.columns + keys.first + lane % columns];
    bits = __reduce_or_sync(0xffffffffu, bits);
    return bits & (bits - 1) ? MIXED_BLOCKS : (block_kind)(31 - __clz(bits));
}

/* Pairs of a thread that do not see each other: a bit for each register of S. With FLEX_HIDDEN these bits come from
 * flex_hidden.cu. */
struct hidden_pairs {
    static constexpr int WORDS = (S_REGS + 31) / 32;
    u32 words[WORDS];

#if FLEX_HIDDEN
    /* Says whether there may be such a pair in key tile j. No entry of a list with bits is full if it reaches beyond
     * the end (flex_walks.cu). */
    DEVICE bool load(const listed_tile &t, block_kind kind, int j, int row_block) {
        const bool hides = kind != FULL_BLOCK;
        if (hides) {
            const u32 *from =
                t.hidden + (long long)j * (HIDDEN_WORDS * HIDDEN_PITCH) + 128 * row_block + threadIdx.x % 128;
#pragma unroll
            for (int w = 0; w < WORDS; w++) words[w] = __ldg(from + w * HIDDEN_PITCH);
        }
        return hides;
    }
#endif

    /* Says whether there may be such a pair. `kind` is that of the key tile, and len_kv that of its sequence. key and
     * row are those of score_by_mod. While a partial tile is looked at, S is still on its way. IN_LOOPS has the
     * mask_mod once in the text. Whole warp. */
    template <bool IN_LOOPS>
    DEVICE bool find(const params &p, const score_head &q_head, block_kind kind, int key, int row, const int &len_kv) {
        const int lane = threadIdx.x % 32, first_key = key - 2 * (lane % 4), first_row = row - lane / 4;
        const mod_functions mod(p.values, q_head.b_idx, q_head.head, 0);
        const bool reaches_end = first_key + BLOCK_KV > len_kv;
        if (kind == MIXED_BLOCKS) /* The warp's rows may lie in blocks of one kind. */
            kind = kind_of_strip(mods(p.flex, p.values, q_head.b_idx, q_head.head).map, min(first_row, p.len_q - 1),
                                 min(first_row + 15, p.len_q - 1), first_key, min(first_key + BLOCK_KV, len_kv) - 1);
        if (kind == FULL_BLOCK && !reaches_end) return false;
#pragma unroll
        for (int w = 0; w < WORDS; w++) words[w] = 0;
        if (kind == PARTIAL_BLOCK) {
#pragma unroll IN_LOOPS ? 1 : S_REGS
            for (int i = 0; i < S_REGS; i++)
                words[i / 32] |= (u32)!mod.sees_in_block(PARTIAL_BLOCK, row + 8 * row_of(i), key + column_of(i))
                                 << i % 32;
        } else if (kind != FULL_BLOCK) {
            const mods mapped(p.flex, p.values, q_head.b_idx, q_head.head);
#pragma unroll
            for (int w = 0; w < WORDS; w++)
#pragma unroll 1 /* Such tiles are few, and their pairs look up their own blocks. */
                for (int n = 0; n < min(32, S_REGS - 32 * w) / 4; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int i = min(row + 8 * row_of(e), p.len_q - 1);
                        const int j = min(key + 8 * (8 * w + n) + e % 2, len_kv - 1);
                        if (!mapped.sees(kind, i, j)) words[w] |= 1u << (4 * n + e);
                    }
        }
        if (reaches_end) {
#pragma unroll
            for (int w = 0; w < WORDS; w++) words[w] |= columns_from(len_kv - key - 64 * w);
        }
        return true;
    }
    /* Bit i says that column_of(i) is not below `column`, for the first 32 registers. */
    DEVICE static u32 columns_from(int column) {
        const int even = clamp((column + 7) / 8, 0, 8), odd = clamp((column + 6) / 8, 0, 8); /* groups of 8 before */
        return (even < 8 ? 0x55555555u << 4 * even : 0) | (odd < 8 ? 0xaaaaaaaau << 4 * odd : 0);
    }
    DEVICE bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
    DEVICE void hide(float (&S)[S_REGS]) const {
#pragma unroll
        for (int i = 0; i < S_REGS; i++) S[i] = has(i) ? -INF : S[i];
    }
};
#endif

/* ---- the row maximum ------------------------------------------------------------------------------------------- */

/* The largest of the thread's values in each row, as the bits of a float, or 0. The comparison of bits is right while a
 * value is not negative. A negative one loses against 0. NOTE: a wrapper takes the bits. A register of S of which the
 * text itself takes them would hold bits for NVRTC, and each use would convert them: 2% of its time. */
DEVICE void find_largest(const float (&S)[S_REGS], int (&largest)[2]) {
    largest[0] = largest[1] = 0;
#pragma unroll
    for (int i = 0; i < S_REGS; i += 8) {
        largest[0] = max_of_bits(largest[0], S[i], S[i + 1], S[i + 4], S[i + 5]);
        largest[1] = max_of_bits(largest[1], S[i + 2], S[i + 3], S[i + 6], S[i + 7]);
    }
}

/* Says whether a score is so far above m that P might not be a float, or not fit in fp16. Where m is negative, some
 * such scores go unnoticed, and the tile fails. Whole warp. */
DEVICE bool overflows(const float (&S)[S_REGS], const online_softmax &softmax, float scale_log2) {
    int largest[2];
    find_largest(S, largest);
    const float limit = element::MAX_P_LOG2;
    return __any_sync(0xffffffffu, fmaf(__int_as_float(largest[0]), scale_log2, -softmax.max_log2[0]) > limit ||
                                       fmaf(__int_as_float(largest[1]), scale_log2, -softmax.max_log2[1]) > limit);
}

/* The largest x of the four lanes that hold a row. */
DEVICE float max_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* The sum over the four lanes that hold a row. */
DEVICE float sum_of_quad(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

#if FLEX_MAX
/* The row maximum m lags, so the largest score is kept beside m. */
DEVICE void keep_highest(const float (&S)[S_REGS], online_softmax &softmax) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float even = softmax.highest[r], odd = -INF;
#pragma unroll
        for (int i = 2 * r; i < S_REGS; i += 4) even = max_nan(even, S[i]), odd = max_nan(odd, S[i + 1]);
        softmax.highest[r] = max_nan(even, odd);
    }
}
#endif

/* Raises m of row r to the largest score, of which x is that of this thread's columns. The caller multiplies by alpha
 * what it has summed under the old m. is_exact says that m has been the largest score before, too. */
DEVICE void raise_max_of_row(online_softmax &softmax, float (&alpha)[2], int r, float largest, float scale_log2,
                             bool is_exact) {
    const float old = softmax.max[r], old_log2 = softmax.max_log2[r];
    float x = max_of_quad(largest), x_log2 = x * scale_log2 + element::HEADROOM;
    if constexpr (SCORES_JUMP) x = x_log2 == -INF ? -INF : x; /* as make_infinite */
    softmax.max[r] = fmaxf(old, x);
    softmax.max_log2[r] = softmax.max[r] == -INF ? 0 : old == -INF ? x_log2 : fmaxf(old_log2, x_log2);
    const float change = is_exact ? (old - softmax.max[r]) * scale_log2 : old_log2 - softmax.max_log2[r];
    alpha[r] = ex2(old == -INF ? -INF : change);
    softmax.sum[r] *= alpha[r];
}
DEVICE void raise_max(const float (&S)[S_REGS], online_softmax &softmax, float (&alpha)[2], float scale_log2,
                      bool is_exact) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float even = -INF, odd = -INF;
#pragma unroll
        for (int i = 2 * r; i < S_REGS; i += 4) even = fmaxf(even, S[i]), odd = fmaxf(odd, S[i + 1]);
        raise_max_of_row(softmax, alpha, r, fmaxf(even, odd), scale_log2, is_exact);
    }
}

/* Says whether later scores may lie so far above m that P is no float. Two kinds of scores rise like that, and mostly
 * it shows in the key tile that m comes from. Masks that add a large negative number give a negative m. Slopes show
 * between the first, the middle and the last key, where these are not hidden. The next step then takes its row maximum,
 * too. Otherwise the work tile fails, and its repetition takes 50 times as long. */
DEVICE bool may_jump(const float (&S)[S_REGS], const online_softmax &softmax, float scale_log2) {
    constexpr int HALF = S_REGS / 2;
    bool jumps = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float middle = S[HALF + 2 * r];
        const float before = fabsf(S[2 * r] - middle) * scale_log2,
                    behind = fabsf(S[S_REGS - 4 + 2 * r] - middle) * scale_log2;
        jumps |= softmax.max_log2[r] < -64 || (before > 32 && before < INF) || (behind > 32 && behind < INF);
    }
    return jumps;
}

/* A P above this limit, or four P that exceed it together, weighs in its row. It also exceeds the P of m's own key.
 * sum has a quarter of the row's columns and does not include this step. */
DEVICE float limit_of_p(float sum) {
    const float one = __int_as_float((127 - (int)element::HEADROOM) << 23), limit = fmaxf(LARGE_SHARE * sum, one);
    return element::HAS_RANGE_OF_FP32 ? limit : fminf(limit, __int_as_float((127 + element::MAX_P_LOG2) << 23));
}

/* Whole warp. */
DEVICE bool any_exceeds(const int (&largest)[2], const float (&limits)[2]) {
    return __any_sync(0xffffffffu, __int_as_float(largest[0]) > limits[0] || __int_as_float(largest[1]) > limits[1]);
}

/* S is P by now. Where a P exceeds that of m's own key, this raises m to the score of that P, and P follows. Whole
 * warp. */
DEVICE void raise_to_p(float (&S)[S_REGS], online_softmax &softmax, float (&alpha)[2]) {
    int largest[2];
    find_largest(S, largest);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float growth = fmaxf(0, lg2(max_of_quad(__int_as_float(largest[r]))) + element::HEADROOM);
        const float next = softmax.max_log2[r] + growth;
        /* Beyond the range of alpha, P may be inf, too. NaN makes the tile fail. */
        alpha[r] = growth < 120 ? ex2(softmax.max_log2[r] - next) : __int_as_float(0x7fffffff);
        softmax.max_log2[r] = next;
        softmax.sum[r] *= alpha[r];
    }
#pragma unroll
    for (int i = 0; i < S_REGS; i += 4)
        S[i] *= alpha[0], S[i + 1] *= alpha[0], S[i + 2] *= alpha[1], S[i + 3] *= alpha[1];
}

/* Scores beyond the range of fp32 in units of log2 become infinite. There c m would be infinite, and the LSE with it,
 * while c (S - m) is not. */
DEVICE void make_infinite(float (&S)[S_REGS], float scale_log2) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++)
        if (fabsf(S[i] * scale_log2) == INF) S[i] *= INF;
}

/* ---- P --------------------------------------------------------------------------------------------------------- */

/* S becomes P, where every step raises m to the largest score. This is right for huge scores, too. Of those c S - c
 * m would be a difference of roundings. */
DEVICE void exponentiate_exactly(float (&S)[S_REGS], const online_softmax &softmax, float scale_log2) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        const float m = softmax.max[row_of(i)] == -INF ? 0 : softmax.max[row_of(i)];
        S[i] = ex2(fmaf(S[i] - m, scale_log2, -element::HEADROOM));
    }
}

#if FLEX || SCORE
/* The scores of a step of a work tile that is repeated: scores(x, i) is that of register i of S, whose product is x.
 * Hidden pairs have -inf. key and row are those of score_by_mod, and diagonal is that of mask_scores. */
#if FLEX
struct repeated_scores {
    const mod_functions mod;
    const hidden_pairs &hidden;
    float scale;
    int key, row;
    bool hides;
    DEVICE repeated_scores(const params &p, const score_head &q_head, const hidden_pairs &hidden, bool hides, int key,
                           int row)
        : mod(p.values, q_head.b_idx, q_head.head, 0), hidden(hidden), scale(p.score_scale), key(key), row(row),
          hides(hides) {}
    DEVICE float operator()(float x, int i) const {
        if (FLEX_SCORE) x = mod.score(__fmul_rn(x, scale), row + 8 * row_of(i), key + column_of(i));
        return hides && hidden.has(i) ? -INF : x;
    }
};
#else
struct repeated_scores {
    const score_of<FAST, false, params> score;
    const score_head &q_head;
    int key, diagonal, begin[2], end[2];
    DEVICE repeated_scores(const params &p, const score_head &q_head, int len_kv, int key, int diagonal)
        : score(p), q_head(q_head), key(key), diagonal(diagonal) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const tile_walk keys = keys_of(p, diagonal + 8 * r, diagonal + 8 * r, len_kv);
            begin[r] = keys.begin, end[r] = keys.end;
        }
    }
    DEVICE float operator()(float x, int i) const {
        const int r = row_of(i), j = key + column_of(i);
        if (j >= (r ? end[1] : end[0]) || (LOCAL && j < (r ? begin[1] : begin[0]))) return -INF;
        return score(x, q_head, diagonal + 8 * r, j);
    }
};
#endif

/* S becomes P in a step of a work tile that is repeated: scores, make_infinite, raise_max, exponentiate_exactly and
 * sum_rows. Returns a bit for each register of S, that says whether its pair counts. Those of score -inf do not.
 *
 * NOTE: repetitions are rare, so their text is to be short: NVRTC took a quarter of its time for a repetition with
 * unrolled loops. S goes through local memory instead. The local array must have another length than S. Otherwise NVRTC
 * makes one array of both, S is not in registers, and ptxas runs products one by one (C7514). Whole warp. */
DEVICE u64 exponentiate_in_loops(float (&S)[S_REGS], online_softmax &softmax, float (&alpha)[2],
                                 const repeated_scores &scores, float scale_log2) {
    float local[S_REGS + 4];
    float largest[2] = {-INF, -INF}, m[2], sum[2] = {0, 0};
    u64 seen = 0;
#pragma unroll
    for (int i = 0; i < S_REGS; i++) local[i] = S[i];
#pragma unroll 1
    for (int i = 0; i < S_REGS; i++) {
        float x = scores(local[i], i);
        if (fabsf(x * scale_log2) == INF) x *= INF;
        local[i] = x;
        seen |= (u64)(x != -INF) << i;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float own = row_of(i) == r ? x : -INF;
            largest[r] = fmaxf(largest[r], own);
#if FLEX_MAX
            softmax.highest[r] = max_nan(softmax.highest[r], own);
#endif
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        raise_max_of_row(softmax, alpha, r, largest[r], scale_log2, true);
        m[r] = softmax.max[r] == -INF ? 0 : softmax.max[r];
    }
#pragma unroll 1
    for (int i = 0; i < S_REGS; i++) {
        const float x = local[i] - (row_of(i) ? m[1] : m[0]);
        const float prob = ex2(fmaf(x, scale_log2, -element::HEADROOM));
        local[i] = prob;
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] += row_of(i) == r ? prob : 0;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.sum[r] += sum[r];
#pragma unroll
    for (int i = 0; i < S_REGS; i++) S[i] = local[i];
    return seen;
}
#endif

/* Scores become the exponents of P. */
DEVICE void make_exponents(float (&S)[S_REGS], const online_softmax &softmax, float scale_log2) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++) S[i] = fmaf(S[i], scale_log2, -softmax.max_log2[row_of(i)]);
}

/* S becomes P, for the rows asked for. NOTE: a loop's body has no branch that depends on i. NVRTC unrolls the branches
 * first, and decides them later. */
DEVICE void exponentiate_rows(float (&S)[S_REGS], const online_softmax &softmax, float scale_log2, bool first_row,
                              bool second_row) {
#pragma unroll
    for (int i = 0; i < S_REGS; i += 4) {
        if (first_row) {
            S[i] = ex2(fmaf(S[i], scale_log2, -softmax.max_log2[0]));
            S[i + 1] = ex2(fmaf(S[i + 1], scale_log2, -softmax.max_log2[0]));
        }
        if (second_row) {
            S[i + 2] = ex2(fmaf(S[i + 2], scale_log2, -softmax.max_log2[1]));
            S[i + 3] = ex2(fmaf(S[i + 3], scale_log2, -softmax.max_log2[1]));
        }
    }
}

#if FLEX
/* The same where S has the exponents. */
DEVICE void exponentiate_sums(float (&S)[S_REGS], bool first_row, bool second_row) {
#pragma unroll
    for (int i = 0; i < S_REGS; i += 4) {
        if (first_row) S[i] = ex2(S[i]), S[i + 1] = ex2(S[i + 1]);
        if (second_row) S[i + 2] = ex2(S[i + 2]), S[i + 3] = ex2(S[i + 3]);
    }
}
#endif

/* S is P by now. This adds four keys first and keeps the largest of such sums, as the bits of a float. No P is
 * larger. */
DEVICE void sum_rows(const float (&S)[S_REGS], online_softmax &softmax, int (&largest)[2], bool first_row,
                     bool second_row) {
#pragma unroll
    for (int i = 0; i < S_REGS; i += 8) {
        if (first_row) {
            const float four = (S[i] + S[i + 1]) + (S[i + 4] + S[i + 5]);
            softmax.sum[0] += four;
            largest[0] = max(largest[0], __float_as_int(four));
        }
        if (second_row) {
            const float four = (S[i + 2] + S[i + 3]) + (S[i + 6] + S[i + 7]);
            softmax.sum[1] += four;
            largest[1] = max(largest[1], __float_as_int(four));
        }
    }
}

/* Clears the dropped elements of P, by the generator of cpu/dropout.h. One call serves the 16 registers of a patch
 * of 16 rows and 32 keys. Byte i belongs to register i, because that mapping was drawn for these lanes. */
DEVICE void drop(float (&S)[S_REGS], u64 seed, u64 stream, u32 row_patch, u32 key_patch, int keep_max) {
    const u64 low = stream + threadIdx.x % 32;
#pragma unroll
    for (int patch = 0; patch < S_REGS / 16; patch++) {
        u32 words[4];
        philox(words, low, row_patch, key_patch + patch, seed);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if ((int)(words[i / 4] >> 8 * (i % 4) & 0xff) > keep_max) S[16 * patch + i] = 0;
    }
}

#endif
