/* The weights of attn_bwd_sm80: P, z P and dS of scores and of dP. */
#ifndef FA_ATTN_BWD_SM80_WEIGHTS_CUH
#define FA_ATTN_BWD_SM80_WEIGHTS_CUH

#include "attn_bwd_sm80_products.cuh"
#include "tile_any.cuh"

/* With two groups of warps P is computed times 2^EXPONENT, and passes as fp16. P is at most 1. Down to 2^-28 it keeps
 * 11 bits. A P above 4 would become infinite. Only a wrong lse gives one, or an lse beyond 8 million, where fp32 has no
 * digits behind the point. dV grows times 2^EXPONENT, too, and has no room for sums above 2^113. */
constexpr int EXPONENT = GROUPS == 2 ? 14 : 0;
constexpr float UNIT = 1.f / (1 << EXPONENT);

/* Makes weights of scores, for one query head. S^T and dP^T [16, CHUNK] become (z P)^T and dS^T. The keys begin at
 * `key`, and the rows at `row`. */
struct weigher {
    const fa_cuda_problem &p;
    const sequence &s;
    int head;
    lane_type own_lane;
    float scale_log2;

    DEVICE weigher(const fa_cuda_problem &p, const sequence &s, int head, lane_type own_lane)
        : p(p), s(s), head(head), own_lane(own_lane), scale_log2((SCORE ? 1 : p.scale) * LOG2_E) {}

    /* S becomes P. With SCORE the derivatives of the scores come, too. */
    DEVICE void exponentiate(float (&x)[N][4], float (&derivatives)[N][4], const float *lse, int key, int row) const {
        const int l = own_lane, left = 2 * (l % 4);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 lses = *(const float2 *)(lse + 8 * n + left);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (SCORE)
                    x[n][e] = scorer(p, s, head)(x[n][e], row + 8 * n + left + e % 2, key + l / 4 + e / 2 * 8,
                                                 derivatives[n][e]);
                x[n][e] = ex2(fmaf(x[n][e], scale_log2, -(e % 2 ? lses.y : lses.x)));
            }
        }
    }

    /* Bit 4 n + e says that dropout keeps element e of fragment n. */
    DEVICE u32 kept_pairs(int key, int row) const {
        return DROPOUT ? dropout(p, s.b_idx, head).kept_rows_are_keys<N>(key, row) : ~0u;
    }
    DEVICE float kept_scale(u32 kept, int n, int e) const { return kept >> (4 * n + e) & 1 ? p.keep_scale : 0; }

    /* P and dP become z P and dS. */
    DEVICE void weigh(float (&x)[N][4], float (&dp)[N][4], const float (&derivatives)[N][4], const float *delta,
                      int key, int row) const {
        const int left = 2 * (own_lane % 4);
        const u32 kept = kept_pairs(key, row);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 deltas = *(const float2 *)(delta + 8 * n + left);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float prob = x[n][e];
                if (DROPOUT) {
                    const float z = kept_scale(kept, n, e);
                    x[n][e] *= z, dp[n][e] *= z;
                }
                dp[n][e] = prob * (dp[n][e] - (e % 2 ? deltas.y : deltas.x));
                if (SCORE) dp[n][e] *= derivatives[n][e];
            }
        }
    }

    /* Weights of pairs that do not see each other become 0. Bit 4 n + e of the result says that the row of element e of
     * fragment n sees the key. */
    DEVICE u32 mask(float (&x)[N][4], float (&ds)[N][4], const float *lse, int key, int row) const {
        /* Row i sees the keys from i + first to i + first + width. Lengths and windows are at most 2^30. A thread reads
         * the lse anew for each of its keys, which spills less. */
        const int shift = s.len_kv - s.len_q, first = p.window_left < 0 ? -(1 << 30) : shift - p.window_left;
        const u32 width = (p.window_right < 0 ? 1u << 30 : (u32)shift + p.window_right) - first;
        const int own_key = key + lane() / 4, left = 2 * (lane() % 4);
        u32 seen = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = own_key + 8 * half;
            const u32 begin = j < s.len_kv ? (u32)(j - row - left) - first : ~0u;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const bool sees = begin - (8 * n + e) <= width && lse[8 * n + left + e] != INF;
                    seen |= (u32)sees << (4 * n + 2 * half + e);
                    if (!sees) x[n][2 * half + e] = ds[n][2 * half + e] = 0;
                }
        }
        return seen;
    }

    /* Does no row of [row, row + CHUNK) see a key of [key, key + WARP_KEYS)? */
    DEVICE bool is_unseen(int key, int row) const {
        return end_key_of_window(p, s, row + CHUNK - 1) <= key || first_key_of_window(p, s, row) >= key + WARP_KEYS;
    }
};

/* Is some element NaN or inf? */
DEVICE bool is_not_finite(const float (&x)[BLOCKS][N][4]) {
    float sum = 0;
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum = fmaf(x[m][n][e], 0, sum);
    return sum != 0;
}

#endif
