/* Gradients of a score_mod's captures in attn_bwd_sm90.cu.
 *
 * Each scatter of the derivative (csrc/flex/program.h) is a part. A part gives every pair of a query and a key an
 * addend for one element of a capture's gradient. Many pairs of a step share an element. The part's kind says which
 * pairs do (csrc/flex/scatters.h). A thread adds up its pairs of a step first, then the warp adds up, and at last the
 * warp adds to memory. A warp has 16 keys and all queries of the step:
 *
 *   kind                 sums of a thread         shuffles    additions to memory of a warp
 *   FLEX_OF_HEAD         1                        5           none; one per head and work tile
 *   FLEX_OF_KEY          2, of its keys           4           16
 *   FLEX_OF_QUERY        REGS / 2, of its rows    14 or 28    64 or 128
 *   FLEX_OF_DIFFERENCE   REGS / 2 + 2             19 or 33    79 or 143, or one if all have one place
 *   FLEX_OF_PAIR         none                     none        REGS of each thread
 *
 * The numbers are those of REGS = 32 or 64 registers of S, for steps of 64 or 128 queries. */
#ifndef FA_ATTN_BWD_CAPTURES_CUH
#define FA_ATTN_BWD_CAPTURES_CUH

#include "flex.cuh"

/* Where a warp's pairs of a step lie. Register i of a lane belongs to row 8 (i / 4) + 2 (lane % 4) + i % 2 behind
 * `row`, and to key lane / 4 + 8 (i / 2 % 2) behind `key`. */
struct warp_pairs {
    int row, key, lane;
    int head; /* in the group; -1: the sums of heads go to memory at once */
};

#if FLEX_PARTS

/* Adds up x over the lanes whose numbers differ in the bits of MASK. */
template <int MASK> DEVICE float sum_of_lanes(float x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
        if (MASK & bit) x += __shfl_xor_sync(0xffffffffu, x, bit);
    return x;
}

/* Adds up N sums over pairs of lanes that differ in BIT. The lane without BIT keeps the first half of the sums. */
template <int N, int BIT> DEVICE void halve(float *x, int lane) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float own = lane & BIT ? x[i + N / 2] : x[i], other = lane & BIT ? x[i] : x[i + N / 2];
        x[i] = own + __shfl_xor_sync(0xffffffffu, other, BIT);
    }
}

/* The sums of a thread in a step. add() takes register i of a pair, and give() ends the step. head_sum lasts for a
 * work tile. */
template <flex_kind KIND, int REGS> struct part_sums;

/* Lane l keeps the sum of head l of the group. */
template <int REGS> struct part_sums<FLEX_OF_HEAD, REGS> {
    float sum = 0;

    template <int PART> DEVICE void add(const mod_functions &, int, float x, int, int) { sum += x; }
    template <int PART> DEVICE void give(const mod_functions &mod, const warp_pairs &at, float &head_sum) {
        const float total = sum_of_lanes<31>(sum);
        if (at.head == at.lane) head_sum += total;
        if (at.head < 0 && at.lane == 0) mod.add_part<PART>(mod.place_of<PART>(0, 0), total);
    }
};

template <int REGS> struct part_sums<FLEX_OF_KEY, REGS> {
    float sums[2] = {};

    template <int PART> DEVICE void add(const mod_functions &, int i, float x, int, int) { sums[i / 2 % 2] += x; }
    template <int PART> DEVICE void give(const mod_functions &mod, const warp_pairs &at, float &) {
        const float first = sum_of_lanes<3>(sums[0]), second = sum_of_lanes<3>(sums[1]);
        const int key = at.key + at.lane / 4 + 8 * (at.lane % 4);
        if (at.lane % 4 < 2) mod.add_part<PART>(mod.place_of<PART>(0, key), at.lane % 4 ? second : first);
    }
};

template <int REGS> struct part_sums<FLEX_OF_QUERY, REGS> {
    static constexpr int N = REGS / 2;
    float sums[N] = {};

    template <int PART> DEVICE void add(const mod_functions &, int i, float x, int, int) {
        sums[i / 4 * 2 + i % 2] += x;
    }
    template <int PART> DEVICE void give(const mod_functions &mod, const warp_pairs &at, float &) {
        halve<N, 4>(sums, at.lane), halve<N / 2, 8>(sums, at.lane), halve<N / 4, 16>(sums, at.lane);
        const int first = (at.lane & 4 ? N / 2 : 0) + (at.lane & 8 ? N / 4 : 0) + (at.lane & 16 ? N / 8 : 0);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const int row = at.row + 8 * ((first + i) / 2) + 2 * (at.lane % 4) + i % 2;
            mod.add_part<PART>(mod.place_of<PART>(row, 0), sums[i]);
        }
    }
};

/* Adds up diagonals. Lane l has rows 8 u + x, x = 2 (l % 4) + {0, 1}, and keys y = l / 4 and y + 8. A row 8 u + x and
 * key y have the difference 8 u + x - y. The row of u + 1 and key y + 8 have the same. So a thread has two sums for
 * each u from -1 on.
 *
 * Let 8 u + x - y be 8 w + column, where column is one of 8. A lane has an even column and an odd one, for all w. Each
 * column lies in 8 lanes, which add up in three exchanges:
 *
 *   1  Lanes of even y keep the even column, the others the odd one. In both this is the column of x = 2 (l % 4).
 *   2  Of w = 2 a - 2 and 2 a - 1, lanes of even y / 2 keep the first.
 *   3  Of a = 2 c and 2 c + 1, lanes of y < 4 keep the first.
 *
 * At last a lane has w = 4 c + y / 2 - 2 of its column. */
template <int REGS> struct part_sums<FLEX_OF_DIFFERENCE, REGS> {
    static constexpr int N = REGS / 4, W = N + 2, C = (W + 3) / 4;
    float sums[2][N + 1] = {};

    template <int PART> DEVICE void add(const mod_functions &, int i, float x, int, int) {
        sums[i % 2][i / 4 + 1 - i / 2 % 2] += x;
    }
    template <int PART> DEVICE void give(const mod_functions &mod, const warp_pairs &at, float &) {
        const int x = 2 * (at.lane % 4), y = at.lane / 4, middle = y / 2;
        const int next = at.lane / 4 * 4 + (at.lane + 1) % 4, before = at.lane / 4 * 4 + (at.lane + 3) % 4;
        const int from_1 = y % 2 ? before - 4 : at.lane + 4;
        const int from_2 = middle % 2 ? before - 8 : next + 8, from_3 = at.lane ^ 18;
        float column[W], half[2 * C] = {}, values[C];
#pragma unroll
        for (int i = 0; i < W; i++) { /* w is i - 2, and u is w or w + 1 */
            const float kept = x < y ? sum_at(0, i) : sum_at(0, i - 1);
            const float sent = x + 1 < y ? sum_at(1, i) : sum_at(1, i - 1);
            column[i] = kept + __shfl_sync(0xffffffffu, sent, from_1);
        }
#pragma unroll
        for (int a = 0; a < W / 2; a++) {
            const float kept = middle % 2 ? column[2 * a + 1] : column[2 * a];
            const float sent = middle % 2 ? column[2 * a] : column[2 * a + 1];
            half[a] = kept + __shfl_sync(0xffffffffu, sent, from_2);
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float kept = middle / 2 ? half[2 * c + 1] : half[2 * c];
            const float sent = middle / 2 ? half[2 * c] : half[2 * c + 1];
            values[c] = kept + __shfl_sync(0xffffffffu, sent, from_3);
        }
        add_diagonals<PART>(mod, at, values, (x - y + 8) % 8);
    }

    /* The sum of x = 2 (l % 4) + odd and u = i - 1. */
    DEVICE float sum_at(int odd, int i) const { return i >= 0 && i <= N ? sums[odd][i] : 0; }

    /* All pairs may have one place, as far from the diagonal in T5's buckets. Additions to one place wait for each
     * other, so the warp adds once. */
    template <int PART>
    static DEVICE void add_diagonals(const mod_functions &mod, const warp_pairs &at, const float (&values)[C],
                                     int column) {
        const auto place_at = [&](int c) {
            const int w = min(4 * c + at.lane / 8, W - 1) - 2, difference = at.row - at.key + 8 * w + column;
            return mod.place_of<PART>(max(difference, 0), max(-difference, 0));
        };
        const auto first = place_at(0), common = __shfl_sync(0xffffffffu, first, 0);
        decltype(place_at(0)) places[C] = {first};
        bool is_same = first == common;
        float total = values[0];
#pragma unroll
        for (int c = 1; c < C; c++) {
            places[c] = place_at(c), total += values[c];
            is_same = is_same && places[c] == common;
        }
        if (__all_sync(0xffffffffu, is_same)) {
            total = sum_of_lanes<31>(total);
            if (at.lane == 0) mod.add_part<PART>(places[0], total);
        } else {
#pragma unroll
            for (int c = 0; c < C; c++) mod.add_part<PART>(places[c], values[c]);
        }
    }
};

template <int REGS> struct part_sums<FLEX_OF_PAIR, REGS> {
    template <int PART> DEVICE void add(const mod_functions &mod, int, float x, int query, int key) {
        mod.add_part<PART>(mod.place_of<PART>(query, key), x);
    }
    template <int PART> DEVICE void give(const mod_functions &, const warp_pairs &, float &) {}
};

/* The sums of all parts from PART on. */
template <int REGS, int PART = 0, bool EXISTS = (PART < FLEX_PARTS)> struct sums_from {
    part_sums<flex_kind_of(PART), REGS> own;
    sums_from<REGS, PART + 1> others;

    DEVICE void add(const mod_functions &mod, int i, const float *parts, int query, int key) {
        own.template add<PART>(mod, i, parts[PART], query, key);
        others.add(mod, i, parts, query, key);
    }
    DEVICE void give(const mod_functions &mod, const warp_pairs &at, float *of_heads) {
        own.template give<PART>(mod, at, of_heads[PART]);
        others.give(mod, at, of_heads);
    }
    static DEVICE void give_heads(const mod_functions &mod, const float *of_heads) {
        if (flex_kind_of(PART) == FLEX_OF_HEAD) mod.add_part<PART>(mod.place_of<PART>(0, 0), of_heads[PART]);
        sums_from<REGS, PART + 1>::give_heads(mod, of_heads);
    }
};
template <int REGS, int PART> struct sums_from<REGS, PART, false> {
    DEVICE void add(const mod_functions &, int, const float *, int, int) {}
    DEVICE void give(const mod_functions &, const warp_pairs &, float *) {}
    static DEVICE void give_heads(const mod_functions &, const float *) {}
};

/* For each part what a lane keeps until the end of a work tile. */
struct sums_of_heads {
    float sums[FLEX_PARTS] = {};
};

/* All sums of a thread in a step. derivative() returns the gradient of scale q.k for register i. */
template <int REGS> struct captured_sums {
    sums_from<REGS> all;

    DEVICE float derivative(const mod_functions &mod, int i, float score, float grad, int query, int key) {
        float parts[FLEX_PARTS];
        const float result = mod.derivative(parts, score, grad, query, key);
        all.add(mod, i, parts, query, key);
        return result;
    }
    DEVICE void give(const mod_functions &mod, const warp_pairs &at, sums_of_heads &heads) {
        all.give(mod, at, heads.sums);
    }
    /* Ends a work tile. mod is of this lane's head. */
    static DEVICE void give_heads(const mod_functions &mod, const sums_of_heads &heads) {
        sums_from<REGS>::give_heads(mod, heads.sums);
    }
};

#else

struct sums_of_heads {};
template <int REGS> struct captured_sums {
    DEVICE float derivative(const mod_functions &mod, int, float score, float grad, int query, int key) {
        mod_sums none;
        return mod.derivative(none, score, grad, query, key);
    }
    DEVICE void give(const mod_functions &, const warp_pairs &, sums_of_heads &) {}
    static DEVICE void give_heads(const mod_functions &, const sums_of_heads &) {}
};

#endif

#endif
