/* This file computes the softmax of attn_decode.cu in registers. The registers hold scores of 16 rows and
 * TEAM_KEYS keys in mma's accumulator layout. This file also computes P V where NaN in V must not reach rows that do
 * not see the key. */
#ifndef FA_ATTN_DECODE_SOFTMAX_CUH
#define FA_ATTN_DECODE_SOFTMAX_CUH

#include "attn_decode_loads.cuh"
#include "score.cuh"

/* A thread holds registers of two rows, l / 4 and l / 4 + 8 of its warp's 16 rows. In each group of 8 columns a
 * thread holds the columns 2 (l % 4) + {0, 1}. Register i of a group belongs to row i / 2 and column i % 2. */
struct softmax_rows {
    float max[2];  /* m: the largest score so far; -inf: no score above -inf yet */
    float base[2]; /* m, or 0 while m is -inf */
    float sum[2];  /* row sums over this thread's columns */
};

/* A query_row is one of a thread's two rows: the keys that the row sees, and the change of its scores. The kernel
 * computes a query_row where needed, which is seldom. */
struct query_row {
    int begin, end; /* the keys that the row sees */
    int diagonal;   /* the row's own position among the keys */
    score_head q_head;
};

DEVICE query_row row_at(const params &p, const item &t, int head, int row) {
    const int at = min(t.q_tile * BLOCK_Q + row, t.s.len_q * p.heads_per_kv - 1);
    const int i = divide(at, p.by_heads_per_kv);
    const int diagonal = i + t.s.len_kv - t.s.len_q;
    query_row x = {mask::keys_begin<UNBOUNDED>(p, diagonal, 0, 0, 0),
                   mask::keys_end<TO_LENGTH>(p, diagonal, 0, 0, t.s.len_kv),
                   diagonal,
                   {t.b_idx, head * p.heads_per_kv + at - i * p.heads_per_kv, t.s.len_kv - t.s.len_q, 0}};
    if (p.attention_chunk > 0) {
        x.begin = max(x.begin, chunk_begin(diagonal, p.attention_chunk));
        x.end = min(x.end, chunk_end(diagonal, p.attention_chunk, t.s.len_kv));
    }
    if (p.alibi_slopes)
        x.q_head.slope = p.alibi_slopes[t.b_idx * p.alibi_stride_b + head * p.heads_per_kv + at - i * p.heads_per_kv];
    return x;
}

constexpr int GROUPS_S = TEAM_KEYS / 8, GROUPS_O = HEAD_DIM / 8;

/* `key` is this thread's first key. */
DEVICE void change_scores(float (&s)[GROUPS_S][4], const params &p, const query_row (&rows)[2], int key) {
    const score_of<FAST, false, params> score(p);
#pragma unroll
    for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[n][i] = score(s[n][i], rows[i / 2].q_head, rows[i / 2].diagonal, key + 8 * n + i % 2);
}

DEVICE void mask_scores(float (&s)[GROUPS_S][4], const query_row (&rows)[2], int key) {
#pragma unroll
    for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = key + 8 * n + i % 2;
            if (at < rows[i / 2].begin || at >= rows[i / 2].end) s[n][i] = -INF;
        }
}

#if FLEX
/* The bits of a thread's pairs: bit 4 n + i is that of register i of group n. */
constexpr u32 ALL_PAIRS = 0xffffffffu >> (32 - 4 * GROUPS_S);

/* Applies the user's functions to scores from `row` on, and hides pairs. `key` is this thread's first key. Returns the
 * pairs that see each other. A pair of score -inf does not.
 *
 * The functions may be long, so the compiler sees them four times, and not once for each register: the registers move
 * up by a group in each round. */
DEVICE u32 apply_mods(float (&s)[GROUPS_S][4], const params &p, const item &t, int head, int row, int key) {
    const int offset = first_query_of(p.flex, t.b_idx);
    int query[2], q_head[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int at = min(t.q_tile * BLOCK_Q + row + 8 * r, t.s.len_q * p.heads_per_kv - 1);
        query[r] = divide(at, p.by_heads_per_kv);
        q_head[r] = head * p.heads_per_kv + at - query[r] * p.heads_per_kv;
    }
    const mod_functions of_rows[2] = {{p.values, t.b_idx, q_head[0], offset}, {p.values, t.b_idx, q_head[1], offset}};
    u32 seen = 0;
#pragma unroll 1
    for (int n = 0; n < GROUPS_S; n++) {
        float changed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const mod_functions &mod = of_rows[i / 2];
            const int j = key + 8 * n + i % 2, existing = max(min(j, t.s.len_kv - 1), 0);
            const float x = p.changes_scores ? __fmul_rn(s[0][i], p.score_scale) : s[0][i];
            const float score = mod.score(x, query[i / 2], existing);
            const bool in_mask = mod.sees_in_block(KIND_WITHOUT_BLOCKS, query[i / 2], existing);
            const bool sees = in_mask && score != -INF && j < t.s.len_kv;
            seen |= (u32)sees << (4 * n + i);
            changed[i] = sees ? score : -INF;
        }
#pragma unroll
        for (int m = 0; m + 1 < GROUPS_S; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][i] = s[m + 1][i];
#pragma unroll
        for (int i = 0; i < 4; i++) s[GROUPS_S - 1][i] = changed[i];
    }
    return seen;
}
#endif

/* S becomes P. Where a score exceeds m, m rises to the largest score, and O and l are rescaled. The largest P is
 * then a power of two, which 16 bits hold exactly. */
DEVICE void softmax_step(float (&s)[GROUPS_S][4], float (&o)[GROUPS_O][4], softmax_rows &rows, const params &p) {
    float largest[2] = {-INF, -INF};
#pragma unroll
    for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) largest[i / 2] = fmaxf(largest[i / 2], s[n][i]);
    if (__any_sync(0xffffffffu, largest[0] > rows.max[0] || largest[1] > rows.max[1])) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = fmaxf(largest[r], rows.max[r]);
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
            const float alpha = rows.max[r] == -INF ? 0 : ex2((rows.max[r] - x) * p.scale_log2);
            rows.max[r] = x, rows.base[r] = x == -INF ? 0 : x;
            rows.sum[r] *= alpha;
#pragma unroll
            for (int n = 0; n < GROUPS_O; n++) o[n][2 * r] *= alpha, o[n][2 * r + 1] *= alpha;
        }
    }
#pragma unroll
    for (int n = 0; n < GROUPS_S; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = ex2(fmaf(s[n][i] - rows.base[i / 2], p.scale_log2, -element::HEADROOM));
            rows.sum[i / 2] += s[n][i];
        }
}

/* ---- NaN or inf in V ------------------------------------------------------------------------------------------- */

/* Does V of these keys hold NaN or inf? The whole warp calls this function. */
DEVICE bool has_nan_or_inf(const element *v_smem) {
    u32 signs = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < TEAM_KEYS * PIECES; i += 32) {
        const uint4 x = ((const uint4 *)v_smem)[i];
        signs |= nan_or_inf_signs<element>(x.x) | nan_or_inf_signs<element>(x.y) | nan_or_inf_signs<element>(x.z) |
                 nan_or_inf_signs<element>(x.w);
    }
    return __any_sync(0xffffffffu, (signs & element::SIGNS) != 0);
}

/* Which pairs of this thread's row r and key `at` of V see each other? Without mods the keys that each row sees say it,
 * where `key` is the first key of V. With mods the bits of apply_mods say it. */
struct seen_keys {
    const query_row (&rows)[2];
    int key;
    DEVICE bool operator()(int r, int at, int owner) const {
        return rows[r].begin <= key + at && key + at < rows[r].end;
    }
};
struct seen_pairs {
    u32 seen;
    DEVICE bool operator()(int r, int at, int owner) const {
        return __shfl_sync(0xffffffffu, seen, owner) >> (4 * (at / 8) + 2 * r + at % 2) & 1;
    }
};

/* O += P V by FMAs, for the pairs of query and key that see each other. Elsewhere V may hold any value. The lane that
 * holds a value of P sends the value to the other three lanes of its rows. After every 8 keys, P moves up by one group
 * of 8 keys. The whole warp calls this function. */
template <class seen>
DEVICE void accumulate_seen(float (&o)[GROUPS_O][4], float (&probs)[GROUPS_S][4], const element *v_smem,
                            const seen &sees_pair) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int at = 0; at < TEAM_KEYS; at++) {
        const int owner = lane / 4 * 4 + at % 8 / 2;
        float weight[2];
        bool sees[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float low, high; /* P is rounded as in the usual path */
            unpack_x2<element>(__shfl_sync(0xffffffffu, cvt_x2<element>(probs[0][2 * r], probs[0][2 * r + 1]), owner),
                               low, high);
            weight[r] = at % 2 ? high : low;
            sees[r] = sees_pair(r, at, owner);
        }
#pragma unroll
        for (int n = 0; n < GROUPS_O; n++) {
            float v[2];
            unpack_x2<element>(*(const u32 *)(v_smem + (at * PIECES + (n ^ swizzle(at))) * 8 + 2 * (lane % 4)), v[0],
                               v[1]);
#pragma unroll
            for (int i = 0; i < 4; i++) o[n][i] = fmaf(weight[i / 2], sees[i / 2] ? v[i % 2] : 0, o[n][i]);
        }
        if (at % 8 == 7)
#pragma unroll
            for (int n = 1; n < GROUPS_S; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) probs[n - 1][i] = probs[n][i];
    }
    __syncwarp(); /* all lanes have read V */
}

#endif
