/* This file has the work of the backward kernels on a warpgroup's registers: products, masks, P, dS, and stores. */
#ifndef FA_ATTN_BWD_SCORES_CUH
#define FA_ATTN_BWD_SCORES_CUH

#include "attn_bwd_tiles.cuh"
#include "quads.cuh"
#include "score.cuh"

#if !FLEX
#define FLEX_SCORE     0
#define FLEX_FACTOR    0
#define FLEX_PARTS     0
#define FLEX_ADDS      0
#define FLEX_PAIR_BITS 0
#endif
constexpr bool LOADS_PAIRS_EARLY = FLEX_PAIR_BITS && !WIDE; /* attn_bwd_pairs.cuh */
#if FLEX
#include "attn_bwd_captures.cuh"
#endif

/* dS is weighted with other numbers than the P of dV. The derivative of a user's score_mod has any size, so such a
 * weight has the exponents of bf16. */
constexpr bool WEIGHTED = SCORE || DROPOUT || FLEX_FACTOR;

/* Above 128 columns other warpgroups compute dS, and the sign of a weight tells them what dropout drops. The user's
 * derivatives have signs of their own, so there the bits are drawn again. */
constexpr bool DROPS_BY_SIGN = DROPOUT && WIDE && !FLEX;

/* The scores before the score_mod are kept instead of weights, because gradients of captures need these scores, or the
 * exact P beside the weights. Then score, P and derivative are computed when dP has come. */
constexpr bool KEEPS_SCORES = FLEX_PARTS && FLEX_FACTOR;
template <bool IS_OF_USER> struct choice_of_weight {
    typedef element type;
};
template <> struct choice_of_weight<true> {
    typedef bf16 type;
};
typedef choice_of_weight<FLEX_FACTOR>::type weight_type;

/* Lane l holds two keys, l / 4 and l / 4 + 8 of its warp's 16. In each group of 8 query rows lane l holds the rows
 * 2 (l % 4) + {0, 1}. Register i of S belongs to key i / 2 % 2 of the two keys and to row row_of(i). */
constexpr int S_REGS = BLOCK_Q / 2, P_REGS = BLOCK_Q / 4, STAT_REGS = BLOCK_Q / 4, KV_REGS = HEAD_DIM / 2;
constexpr int DV_REGS = D_V / 2; /* KV_REGS hold dK */
#if FLEX
typedef captured_sums<S_REGS> sums_of_step;
#endif
DEVICE constexpr int key_of(int i) { return i / 2 % 2; }
DEVICE constexpr int row_of(int i) { return 8 * (i / 4) + i % 2; }
DEVICE constexpr int stat_of(int i) { return i / 8 * 4 + i / 4 % 2 * 2 + i % 2; }

constexpr u32 HIGH = matrix_descriptor_high(ROW_BYTES);

/* Each query row of a thread has one value. four_stats loads four of the values, and load_stats loads all. */
DEVICE float4 four_stats(const float *stats, int group, int lane) {
    return *(const float4 *)(stats + 16 * group + 4 * (lane % 4));
}
DEVICE void load_stats(float (&x)[STAT_REGS], const float *stats, int lane) {
#pragma unroll
    for (int i = 0; i < STAT_REGS; i += 4) {
        const float4 four = four_stats(stats, i / 4, lane);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}

/* Plain kernels of up to 64 columns walk in bursts (attn_bwd_sm90.cu), and all their weights are floats. They compute
 * -dS: the sum of dP begins with D, and the product is subtracted. So dQ and dK subtract, too. This saves negations. */
constexpr bool IN_BURSTS = BLOCK_Q == 128 && !WEIGHTED && !ALIBI && !FLEX;
constexpr int SIGN_OF_DS = IN_BURSTS ? -1 : 1;

/* Loads half of the values that load_stats loads. */
DEVICE void load_half_of_stats(float (&x)[STAT_REGS / 2], const float *stats, int half, int lane) {
#pragma unroll
    for (int i = 0; i < STAT_REGS / 2; i += 4) {
        const float4 four = four_stats(stats, half * (STAT_REGS / 8) + i / 4, lane);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}

/* Other kernels whose weights are P keep some weights as floats. At 64 columns and in fp16 all weights are floats, and
 * dV is done before dP takes the registers of P. Else dP runs beside dV, which leaves registers for 48 of 64 floats, or
 * 16 of 32. */
constexpr bool HAS_ROOM = HEAD_DIM <= 64 && BLOCK_Q < 128;
constexpr int FLOAT_WEIGHTS = FLEX_PARTS         ? 0
                              : HAS_ROOM         ? S_REGS
                              : WEIGHTED || WIDE ? 0
                              : BLOCK_Q < 128    ? 16
                              : BF16             ? 48
                                                 : S_REGS;
constexpr bool DV_FIRST = FLOAT_WEIGHTS == S_REGS && !HAS_ROOM;

/* Other weights are kept as 16 bits and a rest, in fewer registers than as floats. The rest is one byte of what
 * rounding took off.
 *
 * of_two            Returns the rests of two weights in the low bytes. `rounded` holds both weights in 16 bits.
 * added             Returns the weight that became `rounded`. Byte i of `four` is the rest of the weight.
 * LEAVES_REGISTERS  A kernel of this type has registers for a sum of dP that begins with -D, at 64 columns, too. */
template <class T> struct weight_rest;

/* In bf16 the rest is the byte of the float behind the 16 bits. The byte's sign says which way the float was
 * rounded. */
template <> struct weight_rest<bf16> {
    static constexpr bool LEAVES_REGISTERS = true;

    static DEVICE u32 of_two(const float *x, u32) { return prmt(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x0051); }
    static DEVICE float added(float rounded, u32 four, int i) {
        return __uint_as_float(__float_as_uint(rounded) + prmt(four, 0, 0x8800 + 0x1111 * i));
    }
};

/* The exponents of fp16 end sooner than the exponents of bf16. So the rest is the difference times 2^26, in e5m2. */
template <> struct weight_rest<fp16> {
    static constexpr bool LEAVES_REGISTERS = false;
    static constexpr float FACTOR = 1 << 26;

    static DEVICE u32 of_two(const float *x, u32 rounded) {
        float low, high;
        unpack_x2<fp16>(rounded, low, high);
        return cvt_e5m2_x2((x[0] - low) * FACTOR, (x[1] - high) * FACTOR);
    }
    static DEVICE float added(float rounded, u32 four, int i) {
        float rests[2];
        unpack_x2<fp16>(prmt(four, 0, i < 2 ? 0x1404 : 0x3424), rests[0], rests[1]);
        return fmaf(rests[i % 2], 1 / FACTOR, rounded);
    }
};

/* The sum of dP begins with -D, because there are no registers for D itself. In two cases D is read when dP has come:
 *
 *   dropout                            dP is scaled first.
 *   64 columns in fp16, not plain      No registers are left for such a sum. */
constexpr bool STARTS_WITH_D =
    !DROPOUT && (WIDE || weight_rest<element>::LEAVES_REGISTERS || BLOCK_Q < 128 || DV_FIRST);

DEVICE void start_dp_sum(float (&dp)[S_REGS], const float *stats, int lane) {
#pragma unroll
    for (int g = 0; g < S_REGS / 8 && STARTS_WITH_D; g++) {
        const float4 four = four_stats(stats, g, lane);
        float *x = dp + 8 * g;
        x[0] = x[2] = -four.x, x[1] = x[3] = -four.y, x[4] = x[6] = -four.z, x[5] = x[7] = -four.w;
    }
}

/* The same with D instead of -D. Loads of two values need fewer moves than loads of four. */
DEVICE void start_negated_dp_sum(float (&dp)[S_REGS], const float *stats, int lane) {
#pragma unroll
    for (int g = 0; g < S_REGS / 4; g++) {
        const float2 two = ld_shared_x2(stats + 16 * (g / 2) + 4 * (lane % 4) + 2 * (g % 2));
        float *x = dp + 4 * g;
        x[0] = x[2] = two.x, x[1] = x[3] = two.y;
    }
}

/* Issues S^T = K Q^T for the 64 keys of this warpgroup. dP^T = V dO^T is issued alike. With ADDS the product is added
 * to the content of the registers. */
template <int COLUMNS, bool ADDS = false, int SIGN = 1>
DEVICE void issue_scores(float (&s)[S_REGS], u32 kv_desc, u32 q_desc) {
    wgmma_fence();
    constexpr u32 step = matrix_descriptor_bytes(32);
    constexpr bool BY_4 = ROW_BYTES == 128 && COLUMNS % CHUNK == 0; /* A chunk of columns is four products. */
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k += BY_4 ? 4 : 1) {
        const int chunk = k * 16 / CHUNK, in_chunk = k * 16 % CHUNK * element::BYTES;
        const u32 keys = kv_desc + matrix_descriptor_bytes(chunk * KEYS * ROW_BYTES + in_chunk);
        const u32 rows = q_desc + matrix_descriptor_bytes(chunk * BLOCK_Q * ROW_BYTES + in_chunk);
        if constexpr (BY_4)
            wgmma<BLOCK_Q, element>::template ss_4<HIGH, HIGH, step, step, 0, 0, SIGN>(s, keys, rows, ADDS || k > 0);
        else
            wgmma<BLOCK_Q, element>::template ss<HIGH, HIGH, 0, 0, SIGN>(s, keys, rows, ADDS || k > 0);
    }
    wgmma_commit_group();
}

/* Issues dV += P^T dO. dK += dS^T Q is issued alike. */
template <int SIGN = 1, int REGS> DEVICE void issue_update(float (&kv)[REGS], const u32 (&p)[P_REGS], u32 q_desc) {
    wgmma_fence();
    constexpr u32 step = matrix_descriptor_bytes(16 * ROW_BYTES);
    static_assert(BLOCK_Q % 64 == 0, "products of 16 rows are issued by fours");
#pragma unroll
    for (int k = 0; k < BLOCK_Q / 16; k += 4)
        wgmma<2 * REGS, element>::template rs_4<HIGH, step, SIGN>(kv, p + 4 * k, q_desc + k * step);
    wgmma_commit_group();
}

/* Issues dQ = dS K for this warpgroup's rows or columns of dQ. */
DEVICE void issue_dq(float (&dq)[DQ_REGS], u32 ds_desc, u32 k_desc) {
    wgmma_fence();
    constexpr u32 step = matrix_descriptor_bytes(32), k_step = matrix_descriptor_bytes(16 * ROW_BYTES);
    constexpr bool BY_4 = ROW_BYTES == 128 && BLOCK_KV % CHUNK == 0; /* A chunk of keys is four products. */
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; k += BY_4 ? 4 : 1) {
        const int chunk = k * 16 / CHUNK, in_chunk = k * 16 % CHUNK * element::BYTES;
        const u32 ds = ds_desc + matrix_descriptor_bytes(chunk * BLOCK_Q * ROW_BYTES + in_chunk);
        if constexpr (BY_4)
            wgmma<DQ_COLUMNS, element>::template ss_4<HIGH, HIGH, step, k_step, 1, 0, SIGN_OF_DS>(
                dq, ds, k_desc + k * k_step, k > 0);
        else
            wgmma<DQ_COLUMNS, element>::template ss<HIGH, HIGH, 1, 0, SIGN_OF_DS>(dq, ds, k_desc + k * k_step, k > 0);
    }
    wgmma_commit_group();
}

/* The keys and rows of a thread's scores. The tile is read from shared memory when the place is needed, because the
 * registers are for the sums. */
struct place {
    int key; /* this thread's first key, in its sequence */
    int row; /* this thread's first row, plus len_kv - len_q */
    int len_kv;
};
DEVICE place place_of(const tile &t, int q_tile) {
    const int thread = threadIdx.x - 128;
    return {first_key(t) + thread % (2 * KEYS) / 32 * 16 + thread % 32 / 4,
            q_tile * BLOCK_Q + 2 * (thread % 4) + t.len_kv - t.len_q, t.len_kv};
}

#if FLEX
/* This thread's first row and key of a step, in their sequence. */
struct first_pair {
    int row, key;
};
DEVICE first_pair pair_of(const tile &t, int q_tile) {
    const int thread = threadIdx.x - 128;
    return {q_tile * BLOCK_Q + 2 * (thread % 4), first_key(t) + thread % (2 * KEYS) / 32 * 16 + thread % 32 / 4};
}

#include "attn_bwd_pairs.cuh"
#endif

/* Computes the scores of 16 rows from `first` on. `factor` becomes d S / d (scale q.k). */
DEVICE void change_scores(float *s, float (&factor)[8], const params &p, const place &at, int first,
                          const score_head &q_head) {
    const score_of<FAST, true, params> score(p);
#pragma unroll
    for (int i = 0; i < 8; i++)
        s[i] = score(s[i], q_head, at.row + first + row_of(i), at.key + 8 * key_of(i), factor[i]);
}

/* Masks 16 rows from `first` on. The score of a row and a key that do not see each other becomes -inf. */
DEVICE void mask_scores(float *s, const params &p, const place &at, int first) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        /* begin and end count from this thread's first row. Beyond the last row Q is 0, but K may be inf. */
        const int key = at.key + 8 * r;
        int begin = mask::rows_begin_from(p, key, at.row),
            end = mask::rows_end_from(p, key, at.row, at.len_kv - at.row);
        if (key >= at.len_kv) end = 0, begin = 1 << 30;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (key_of(i) == r && (first + row_of(i) < begin || first + row_of(i) >= end)) s[i] = -INF;
    }
}

#include "attn_bwd_dropout.cuh"

#if FLEX
/* Pairs of a thread that do not see each other: a bit for each register of S. With FLEX_HIDDEN these bits come from
 * flex_hidden.cu. */
struct hidden_pairs {
    static constexpr int WORDS = (S_REGS + 31) / 32;
    u32 words[WORDS] = {};

    /* No entry of a list with bits is full if it reaches beyond an end (flex_walks.cu). */
    DEVICE bool load(const tile &t, int entry) {
        if (kind_of(entry) == FULL_BLOCK) return false;
        const int thread = WIDE ? cluster_rank() * (2 * KEYS) + threadIdx.x % (2 * KEYS) : threadIdx.x - 128;
        const u32 *from = t.hidden_of(entry) + thread;
#pragma unroll
        for (int w = 0; w < WORDS; w++) words[w] = __ldg(from + w * HIDDEN_PITCH);
        return true;
    }

    /* The same where the bits lie beside Q. `word` is this thread's, which means nothing if the entry is full. */
    DEVICE bool take(int entry, u32 word) {
        const bool hides = kind_of(entry) != FULL_BLOCK;
        words[0] = hides ? word : 0;
        return hides;
    }

    /* Looks at a step of this entry, and says whether there may be such a pair. Whole warp. */
    DEVICE bool find(const params &p, const tile &t, const mods &mod, int entry) {
        const first_pair at = pair_of(t, query_tile_of(entry));
        const int row = at.row;
        const int rows_left = p.len_q - row, keys_left = p.len_kv - at.key;
        const bool reaches_end = (query_tile_of(entry) + 1) * BLOCK_Q > p.len_q || first_key(t) + KEYS > p.len_kv;
        const block_kind kind = kind_of(entry);
        if (kind == FULL_BLOCK && !reaches_end) return false;
        if (kind == PARTIAL_BLOCK) {
#pragma unroll
            for (int i = 0; i < S_REGS; i++)
                if (!mod.sees_in_block(PARTIAL_BLOCK, row + row_of(i), at.key + 8 * key_of(i)))
                    words[i / 32] |= 1u << i % 32;
        } else if (kind == MIXED_BLOCKS) {
#pragma unroll 1 /* Such tiles are few, and their pairs look up their own blocks. */
            for (int g = 0; g < S_REGS / 4; g++) {
                u32 four = 0;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = min(row + 8 * g + e % 2, p.len_q - 1), j = min(at.key + 8 * (e / 2), p.len_kv - 1);
                    if (!mod.sees(MIXED_BLOCKS, i, j)) four |= 1u << e;
                }
#pragma unroll
                for (int w = 0; w < WORDS; w++)
                    if (g / 8 == w) words[w] |= four << 4 * (g % 8);
            }
        }
        if (reaches_end) {
#pragma unroll
            for (int i = 0; i < S_REGS; i++)
                if (row_of(i) >= rows_left || 8 * key_of(i) >= keys_left) words[i / 32] |= 1u << i % 32;
        }
        return true;
    }
    DEVICE bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
    DEVICE void set(float (&s)[S_REGS], float value) const {
#pragma unroll
        for (int i = 0; i < S_REGS; i++)
            if (has(i)) s[i] = value;
    }
};

/* Rounds a score such that the 24 bits of a weight and its rest hold the nearest number. NOTE: the last bit is set, so
 * that a score never lies in the middle of two numbers of bf16. The rest of such a number has the wrong sign. */
DEVICE float rounded_score(float x) { return __uint_as_float(__float_as_uint(x) + 0x80 | 1); }

/* Returns what the score_mod takes from memory for a head of a work tile. */
DEVICE head_values values_of(const params &p, const tile &t, const mods &mod) {
    head_values of_head = {};
#if FLEX_HEAD_VALUES
    if (p.heads_per_tile == 1)
        of_head = t.of_head;
    else
        mod.load_head(of_head);
#endif
    return of_head;
}

/* Computes P in 16 bits, for dV, with the user's functions. `s` becomes the weights of dS: the exact P, times the
 * derivative of the score_mod. With KEEPS_SCORES `s` becomes the scores before the score_mod. Dropout clears P alone.
 *
 * NOTE: the user's functions are computed for hidden pairs, too. A condition would become a branch of each register,
 * with the loads of captures behind the branch. */
DEVICE void exponentiate_by_mods(float (&s)[S_REGS], const float (&lse)[STAT_REGS], u32 (&P)[P_REGS], const params &p,
                                 const mods &mod, const head_values &of_head, const hidden_pairs &hidden, bool hides,
                                 const dropped_pairs<DROPOUT> &drops, const first_pair &at,
                                 const pairs_of_step &pairs) {
#if FLEX_ADDS
    /* One pass over the registers, behind the branch that hides pairs: the sums run beside the exponentials. A sum of
     * a hidden pair that may be NaN would be NaN with -inf, too. There the branch comes behind the exponentials. NOTE:
     * an infinite slope makes NaN of hidden pairs. It makes NaN of a visible pair of distance 0 anyway. */
    const float factor = p.score_scale * p.scale_log2;
    if (FLEX_IS_FINITE && hides) hidden.set(s, -INF);
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        const int i_step = row_of(i), j_step = 8 * key_of(i);
        const int row = at.row + i_step, key = at.key + j_step;
        const float added = mod.exponent(of_head, pairs.bits(mod, i, row, key), pairs.row(mod, i, row),
                                         -lse[stat_of(i)], row, key, i_step, j_step);
        const float of_row = mod.score_factor(row, pairs.row(mod, i, row));
        s[i] = ex2(fmaf(s[i], factor * of_row, added));
    }
    if (!FLEX_IS_FINITE && hides) hidden.set(s, 0);
#pragma unroll
    for (int i = 0; i < P_REGS; i++) P[i] = drops.rest_of(cvt_x2<element>(s[2 * i], s[2 * i + 1]), i);
#else
#pragma unroll
    for (int i = 0; i < S_REGS && FLEX_SCORE && !FLEX_FACTOR; i++) {
        const int row = at.row + row_of(i), key = at.key + 8 * key_of(i);
        s[i] = mod.score_of(pairs.bits(mod, i, row, key), pairs.row(mod, i, row), __fmul_rn(s[i], p.score_scale), row,
                            key);
    }
    if (!FLEX_FACTOR && hides) hidden.set(s, -INF);
    float probs[2];
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        const int query = at.row + row_of(i), key = at.key + 8 * key_of(i);
        float x = s[i], score = x;
        if (FLEX_FACTOR) {
            x = __fmul_rn(x, p.score_scale);
            score = mod.score_of(pairs.bits(mod, i, query, key), pairs.row(mod, i, query), x, query, key);
            if (hidden.has(i)) score = -INF;
        }
        const float prob = ex2(fmaf(score, p.scale_log2, -lse[stat_of(i)]));
        probs[i % 2] = prob;
        if (i % 2) P[i / 2] = drops.rest_of(cvt_x2<element>(probs[0], probs[1]), i / 2);
        if constexpr (KEEPS_SCORES) {
            s[i] = rounded_score(x);
        } else {
            mod_sums none; /* there are no captures with gradients */
            const float weight = FLEX_FACTOR ? mod.derivative(none, x, prob, query, key) : prob;
            s[i] = FLEX_FACTOR && score == -INF ? prob : weight;
        }
    }
#endif
}
#endif

/* ALiBi alone, without softcap and dropout, in the exponent: 2^(c S - (lse + slope log2 e |distance|)). */
struct alibi_bias {
    float slope;    /* times log2 e */
    float distance; /* of this thread's first row and key; the sums for other pairs are exact */

    DEVICE float lse_of(float lse, int i) const {
        return fmaf(slope, fabsf(distance + (float)(row_of(i) - 8 * key_of(i))), lse);
    }
};
#if ALIBI
DEVICE alibi_bias bias_of(const params &p, const tile &t, int q_tile, int head_in_group) {
    const place at = place_of(t, q_tile);
    const float slope = p.heads_per_tile == 1 ? t.slope : slope_of(p, t.b_idx, t.first_head + head_in_group);
    /* A finite slope stays finite, because an infinite slope makes NaN of the key at distance 0. */
    const float slope_log2 = slope * LOG2_E, most = 3.40282347e38f;
    return {fabsf(slope) < INF ? fmaxf(-most, fminf(slope_log2, most)) : slope_log2, (float)(at.row - at.key)};
}
#endif

/* Computes P in 16 bits, for dV. `s` becomes the weights of dS: the exact P, times softcap's derivative. With
 * DROPS_BY_SIGN a weight's sign bit is set where dropout drops the element. */
DEVICE void exponentiate(float (&s)[S_REGS], const float (&lse)[STAT_REGS], u32 (&P)[P_REGS], const params &p,
                         const tile &t, int q_tile, int head, bool is_masked, const dropped_pairs<DROPOUT> &drops,
                         const alibi_bias &bias = {}) {
    if constexpr (!WEIGHTED) {
        if (is_masked) {
            const place at = place_of(t, q_tile);
#pragma unroll
            for (int g = 0; g < S_REGS / 8; g++) mask_scores(s + 8 * g, p, at, 16 * g);
        }
#pragma unroll
        for (int i = 0; i < S_REGS; i++)
            s[i] = ex2(fmaf(s[i], p.scale_log2, -(ALIBI ? bias.lse_of(lse[stat_of(i)], i) : lse[stat_of(i)])));
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = cvt_x2<element>(s[2 * i], s[2 * i + 1]);
    } else {
        const place at = place_of(t, q_tile);
        score_head q_head = {t.b_idx, head, t.len_kv - t.len_q, 0};
        if (SCORE && p.alibi_slopes) q_head.slope = p.alibi_slopes[t.b_idx * p.alibi_stride_b + head];
#pragma unroll
        for (int g = 0; g < S_REGS / 8; g++) {
            float factor[8], *x = s + 8 * g;
            if (SCORE) change_scores(x, factor, p, at, 16 * g, q_head);
            if (is_masked) mask_scores(x, p, at, 16 * g);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = ex2(fmaf(x[i], p.scale_log2, -lse[stat_of(8 * g + i)]));
#pragma unroll
            for (int i = 0; i < 8; i += 2)
                P[4 * g + i / 2] = drops.rest_of(cvt_x2<element>(x[i], x[i + 1]), 4 * g + i / 2);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (SCORE) x[i] *= factor[i];
                if (DROPS_BY_SIGN && drops.has(8 * g + i)) x[i] = -x[i];
            }
        }
    }
}

constexpr int RESTS = (S_REGS - FLOAT_WEIGHTS) / 4, REST_REGS = RESTS > 0 ? RESTS : 1;

/* Computes the rests of the weights behind the floats, four in a register. */
DEVICE void split_weights(const float (&weights)[S_REGS], const u32 (&rounded)[P_REGS], u32 (&rest)[REST_REGS]) {
#pragma unroll
    for (int i = FLOAT_WEIGHTS / 4; i < S_REGS / 4; i++) {
        u32 two[2];
#pragma unroll
        for (int k = 0; k < 2; k++)
            two[k] = weight_rest<weight_type>::of_two(weights + 4 * i + 2 * k, rounded[2 * i + k]);
        rest[i - FLOAT_WEIGHTS / 4] = prmt(two[0], two[1], 0x5410);
    }
}
DEVICE float weight_of(const u32 (&rounded)[P_REGS], const u32 (&rest)[REST_REGS], int i) {
    float two[2];
    unpack_x2<weight_type>(rounded[i / 2], two[0], two[1]);
    return weight_rest<weight_type>::added(two[i % 2], rest[(i - FLOAT_WEIGHTS) / 4], i % 4);
}

/* Computes dS = P (dP - D) in 16 bits.
 *
 * dp         dP, or dP - D if the sum started with -D
 * stats      D, in shared memory
 * weight(i)  the weight of register i, as `exponentiate` leaves the weights in `s`
 * drops      the elements that dropout drops, if no sign says so
 * end(i, x)  what becomes of dS in register i */
template <class weight_of_register, class end_of_register>
DEVICE void differentiate(const float (&dp)[S_REGS], u32 (&dS)[P_REGS], const float *stats, float keep_scale,
                          weight_of_register weight, const dropped_pairs<DROPOUT && !DROPS_BY_SIGN> &drops,
                          end_of_register end) {
#pragma unroll
    for (int i = 0; i < P_REGS; i++) {
        float x[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float w = weight(2 * i + k);
            x[k] = dp[2 * i + k];
            if (DROPS_BY_SIGN ? __float_as_uint(w) >> 31 : drops.has(2 * i + k)) x[k] = 0;
            if (!STARTS_WITH_D) {
                const float4 four = four_stats(stats, i / 4, threadIdx.x % 4);
                const float d = i % 4 < 2 ? (k ? four.y : four.x) : (k ? four.w : four.z);
                x[k] = DROPOUT ? fmaf(x[k], keep_scale, -d) : x[k] - d;
            }
            x[k] = end(2 * i + k, x[k] * (DROPS_BY_SIGN ? fabsf(w) : w));
        }
        dS[i] = cvt_x2<element>(x[0], x[1]);
    }
}
template <class weight_of_register>
DEVICE void differentiate(const float (&dp)[S_REGS], u32 (&dS)[P_REGS], const float *stats, float keep_scale,
                          weight_of_register weight, const dropped_pairs<DROPOUT && !DROPS_BY_SIGN> &drops) {
    differentiate(dp, dS, stats, keep_scale, weight, drops, [](int, float x) { return x; });
}

#if FLEX
/* Computes dS with the user's functions, and adds up what captures get. kept(i) is the weight of register i, or its
 * score with KEEPS_SCORES. */
template <class kept_of_register>
DEVICE void differentiate_by_mods(const float (&dp)[S_REGS], u32 (&dS)[P_REGS], const float *stats, const float *lse,
                                  const params &p, const tile &t, const mods &mod, const hidden_pairs &hidden,
                                  const dropped_pairs<DROPOUT> &drops, int q_tile, sums_of_step &sums,
                                  kept_of_register kept) {
    const first_pair at = pair_of(t, q_tile);
    const int row = at.row;
    const auto weight = [&](int i) {
        const float x = kept(i);
        if (!KEEPS_SCORES) return x;
        const float4 four = four_stats(lse, i / 8, threadIdx.x % 4);
        const float own = i / 4 % 2 ? (i % 2 ? four.w : four.z) : (i % 2 ? four.y : four.x);
        const float score = mod.score(x, row + row_of(i), at.key + 8 * key_of(i));
        const float prob = ex2(fmaf(score, p.scale_log2, -own));
        return hidden.has(i) ? 0 : prob;
    };
    const auto end = [&](int i, float x) {
        const float score = KEEPS_SCORES ? kept(i) : 0;
        return FLEX_PARTS || KEEPS_SCORES ? sums.derivative(mod, i, score, x, row + row_of(i), at.key + 8 * key_of(i))
                                          : x;
    };
    differentiate(dp, dS, stats, p.keep_scale, weight, drops, end);
}

/* Whole warp. Ends a step's sums, and a work tile's sums. */
DEVICE void give_sums(sums_of_step &sums, const params &p, const tile &t, const mods &mod, int q_tile,
                      int head_in_group, sums_of_heads &of_heads) {
    const int warp = (threadIdx.x - 128) % (2 * KEYS) / 32, lane = threadIdx.x % 32;
    sums.give(mod, {q_tile * BLOCK_Q, first_key(t) + 16 * warp, lane, p.heads_per_tile > 32 ? -1 : head_in_group},
              of_heads);
}
DEVICE void give_sums_of_heads(const params &p, const tile &t, const sums_of_heads &sums) {
    const int lane = threadIdx.x % 32;
    if (FLEX_PARTS && lane < p.heads_per_tile)
        sums_of_step::give_heads(mods(p.flex, p.values, t.b_idx, t.first_head + lane), sums);
}
#endif

#if FLEX
/* The user's functions in a step of attn_bwd_wide_sm90.cu. The warpgroups of P and of dS have one each. */
struct step_mods {
    const int entry;
    const mods mod;
    hidden_pairs hidden;
    bool hides = false;
    const dropped_pairs<DROPOUT> drops;

    /* Q of the step is there. looks: are the hidden pairs wanted? */
    template <class shared_memory>
    DEVICE step_mods(const params &p, const shared_memory &s, const tile &t, int stage, int head_in_group,
                     bool looks = true)
        : entry(uniform(s.words.steps[stage]) >> 2), mod(p.flex, p.values, t.b_idx, t.first_head + head_in_group),
          drops(p, t, t.first_head + head_in_group, query_tile_of(entry), nullptr) {
        if (looks) hides = FLEX_HIDDEN ? hidden.load(t, entry) : hidden.find(p, t, mod, entry);
    }
    DEVICE void exponentiate(float (&S)[S_REGS], const float (&lse)[STAT_REGS], u32 (&P)[P_REGS], const params &p,
                             const tile &t) const {
        exponentiate_by_mods(S, lse, P, p, mod, values_of(p, t, mod), hidden, hides, drops,
                             pair_of(t, query_tile_of(entry)), pairs_of_step());
    }
    DEVICE void differentiate(const float (&dp)[S_REGS], u32 (&dS)[P_REGS], const float *stats, const float *lse,
                              const params &p, const tile &t, sums_of_step &sums, const float (&kept)[S_REGS]) const {
        differentiate_by_mods(dp, dS, stats, lse, p, t, mod, hidden, drops, query_tile_of(entry), sums,
                              [&](int i) { return kept[i]; });
    }
    DEVICE void give(sums_of_step &sums, const params &p, const tile &t, int head_in_group,
                     sums_of_heads &of_heads) const {
        give_sums(sums, p, t, mod, query_tile_of(entry), head_in_group, of_heads);
    }
};
#endif

/* Whole warp. store_ds stores dS of this warp's 16 keys, transposed. A row of shared memory is a query row, 64 keys
 * long. ds_offset returns the place of a lane's first 16-byte piece in a chunk. */
DEVICE u32 ds_offset() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 row = lane % 8 + lane / 16 * 8, piece = (2 * warp + lane / 8 % 2) ^ (lane % 8);
    return row * ROW_BYTES + piece * 16;
}
DEVICE void store_ds(const u32 (&dS)[P_REGS], u32 address) {
#pragma unroll
    for (int g = 0; g < P_REGS / 4; g++)
        stmatrix_x4_trans(address + 16 * g * ROW_BYTES, dS[4 * g], dS[4 * g + 1], dS[4 * g + 2], dS[4 * g + 3]);
}

/* Stores dK or dV of this warp's 16 keys, times `factor`. */
template <int REGS>
DEVICE void store(const float (&kv)[REGS], float factor, const fa_bwd_tensor &out, const tile &t, int key, int d) {
    if (!out.data) return;
    element::output *base =
        (element::output *)out.data + t.b_idx * out.stride_b + t.head_kv * out.stride_h + t.kv_begin * out.stride_row;
    const float factors[2] = {factor, factor};
    store_rows(kv, factors, base, out.stride_row, key, t.len_kv, d);
}

#endif
