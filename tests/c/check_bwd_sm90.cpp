/* Tests attn_bwd_sm90 (csrc/cuda/attn_bwd_sm90.cu): dQ, dK and dV against sums in double, with masks, grouped heads,
 * packed sequences, cut tiles, a fixed order of dQ, a converter, dropout, and a mask_mod and a score_mod.
 *
 * All threads of one CTA run the kernel's own code (cuda_emulation.h, hopper_emulation.h). The CTA does all work tiles
 * one after the other, so nothing between CTAs is tested. Each problem runs in three manners. In each manner some warp
 * or warpgroup may be slow, and so may be copies.
 *
 * tests/guards/test_check_kernels.py compiles this file for rows of tiles.def, and with mods. Rows with options have
 * ALiBi, but no softcap. The linker places `smem`, the kernel's shared memory, 1024 bytes behind `memory`. */
#include "hopper_emulation.h"

#include "cuda/attn_bwd_tiles.cuh"

/* In place of loads and additions in the L2. */
static void wait_here(const u32 *turn, u32 rank) {
    while (*turn < rank) {
        emulated_yield(pass_turns(1));
    }
}
static void end_here(u32 *turn) { ++*turn; }
#define wait_turn wait_here
#define end_turn  end_here
#include "cuda/attn_bwd_sm90.cu"

#include "cpu/dropout.h"
#include "hopper_problem.h"

static void run_kernel(const void *p) { KERNEL(*(const params *)p); }

struct problem {
    const char *name;
    std::vector<int> len_q, len_kv;
    int h, h_kv, d, d_v;
    bool in_order, converts;
    int group_heads, pieces;
};

static fa_bwd_tensor view(tensor &x, int len) {
    return {x.data.data(), VARLEN ? 0 : (long long)len * x.h * x.d, (long long)x.h * x.d, (long long)x.d};
}

/* What the kernel shall compute, and what attn_bwd_prep leaves for it. */
struct expected {
    std::vector<double> dq, dk, dv;
    std::vector<float> stats;
    std::vector<unsigned> turns;
};

/* Of ALiBi, in kernels that know it. */
constexpr bool HAS_SLOPES = SCORE || ALIBI;
static float slope_of_head(int head) { return HAS_SLOPES ? 0.01f * (float)(1 + head) : 0; }

static unsigned long long rng_state[2] = {5, 7};
constexpr int KEEP_MAX = DROPOUT ? 178 : 255;
constexpr float KEEP_SCALE = DROPOUT ? 1 / 0.7f : 1;

/* What becomes of scale q.k, -inf if the mask hides the pair, and its derivative. */
static double score_of_pair(double x, int n, int head, int i, int j, int diagonal, double &factor) {
    factor = 1;
#if FLEX
    const flex_values none = {};
    if (!flex_mask(none, n, head, i, j)) return -INFINITY;
    factor = flex_factor(i, j);
    return flex_score(none, (float)x, n, head, i, j);
#endif
    return x - slope_of_head(head) * abs(diagonal - j);
}

/* Adds the share of query i of batch n, which has its diagonal at a key of its sequence. `slab` and `place` are those
 * of the row. Rows that see no key get zeros, as attn_bwd_prep writes them where no key tile comes. */
static void add_row(expected &e, const numbers &q, const numbers &k, const numbers &v, const numbers &dout, tensor &dq,
                    int n, int i, int row, int head, int diagonal, int first_key, key_range keys, size_t slab,
                    int place) {
    const int d = q.d, d_v = v.d, head_kv = head / (q.h / k.h);
    const uint64_t stream = fa_dropout_stream(rng_state[1], n, q.h, head);
    const double scale = 1 / sqrt(d);
    std::vector<double> p, factors((size_t)max(keys.end - keys.begin, 0));
    double largest = -INFINITY, sum = 0, delta = 0;
    for (int j = keys.begin; j < keys.end; j++) {
        const double x = scale * dot(q.row(row, head), k.row(first_key + j, head_kv), d);
        p.push_back(score_of_pair(x, n, head, i, j, diagonal, factors[(size_t)(j - keys.begin)]));
        largest = fmax(largest, p.back());
    }
    if (largest == -INFINITY) p.clear();
    for (double x : p) sum += exp(x - largest);
    const double lse = p.empty() ? INFINITY : largest + log(sum);
    std::vector<double> dp, kept;
    for (size_t j = 0; j < p.size(); j++) {
        p[j] = exp(p[j] - lse);
        const bool is_kept = fa_dropout_byte(rng_state[0], stream, i, keys.begin + (int)j) <= KEEP_MAX;
        const double z = is_kept ? KEEP_SCALE : 0;
        dp.push_back(z * dot(dout.row(row, head), v.row(first_key + keys.begin + (int)j, head_kv), d_v));
        kept.push_back(z * p[j]);
        delta += p[j] * dp[j]; /* dO . O */
    }
    for (size_t j = 0; j < p.size(); j++) {
        const size_t key = (size_t)((first_key + keys.begin + (int)j) * k.h + head_kv);
        const double ds = p[j] * (dp[j] - delta) * factors[j] * scale;
        add_multiple(&e.dv[key * d_v], kept[j], dout.row(row, head), d_v);
        add_multiple(&e.dk[key * d], ds, q.row(row, head), d);
        add_multiple(&e.dq[(size_t)((row * q.h + head) * d)], ds, &k.data[key * d], d);
    }
    float *stats = &e.stats[slab * 2 * BLOCK_Q + place / 16 * 16 + stat_place(place % 16)];
    stats[0] = (float)(lse * LOG2_E), stats[BLOCK_Q] = (float)delta;
    if (p.empty()) e.turns[2 * slab + 1] = 1;
    for (int c = 0; c < d && p.empty(); c++) dq.row(row, head)[c] = {0};
}

static double error_of(tensor &x, const std::vector<double> &right) {
    double off = 0, all = 0;
    for (size_t i = 0; i < right.size(); i++) {
        const double difference = cvt_f32(x.data[i]) - right[i];
        off += difference * difference, all += right[i] * right[i];
    }
    return all > 0 ? sqrt(off / all) : sqrt(off);
}

static void check(const problem &x) {
    const int b = (int)x.len_q.size(), group = x.h / x.h_kv, len_q = x.len_q[0], len_kv = x.len_kv[0];
    const std::vector<int> cu_q = offsets_of(x.len_q), cu_kv = offsets_of(x.len_kv);
    const int total_q = cu_q[b], total_kv = cu_kv[b];
    tensor q(total_q, x.h, x.d), dq = q, k(total_kv, x.h_kv, x.d), dk = k;
    tensor dout(total_q, x.h, x.d_v), v(total_kv, x.h_kv, x.d_v), dv = v;
    for (tensor *t : {&q, &dout, &k, &v}) t->draw();

    const int num_slabs = VARLEN ? total_q / BLOCK_Q + b : ceil_div(len_q, BLOCK_Q);
    const size_t slabs = (size_t)(num_slabs * (VARLEN ? x.h : b * x.h));
    expected e = {std::vector<double>(q.data.size()), std::vector<double>(k.data.size()),
                  std::vector<double>(v.data.size()), std::vector<float>(slabs * 2 * BLOCK_Q),
                  std::vector<unsigned>(slabs * 2)};
    for (size_t i = 0; i < e.stats.size(); i++) e.stats[i] = i / BLOCK_Q % 2 ? 0 : INFINITY; /* rows beyond the end */
    const numbers all_q(q), all_k(k), all_v(v), all_dout(dout);
    for (int n = 0; n < b; n++)
        for (int head = 0; head < x.h; head++)
            for (int i = 0; i < x.len_q[n]; i++) {
                const key_range keys = keys_of_row(i, x.len_q[n], x.len_kv[n]);
                const int first = VARLEN ? head * num_slabs + cu_q[n] / BLOCK_Q + n : (n * x.h + head) * num_slabs;
                add_row(e, all_q, all_k, all_v, all_dout, dq, n, i, cu_q[n] + i, head, i + x.len_kv[n] - x.len_q[n],
                        cu_kv[n], keys, (size_t)(first + i / BLOCK_Q), i % BLOCK_Q);
            }

    std::vector<float> sums(slabs * SLAB_FLOATS, NAN);
    const int tiles = VARLEN ? (total_kv / BLOCK_KV + b) * x.h_kv : ceil_div(len_kv, BLOCK_KV) * b * x.h_kv;
    std::vector<float> kv_sums((size_t)(tiles * 8 * 2 * KV_REGS * 32), NAN);
    std::vector<unsigned> kv_turns((size_t)(tiles * 8));
    unsigned tile_counter = 0;
    params p = {};
    q.fill_map(p.q, len_q, BLOCK_Q), dout.fill_map(p.dout, len_q, BLOCK_Q),
        dq.fill_map(p.dq_rows, len_q, 16, 1, DQ_ROW_BYTES);
    k.fill_map(p.k, len_kv, BLOCK_KV), v.fill_map(p.v, len_kv, BLOCK_KV);
    dk.fill_map(p.dk_tiles, len_kv, BLOCK_KV), dv.fill_map(p.dv_tiles, len_kv, BLOCK_KV);
    p.dq = view(dq, len_q), p.dk = view(dk, len_kv), p.dv = view(dv, len_kv);
    p.stats = e.stats.data(), p.dq_sums = sums.data(), p.turns = e.turns.data();
    p.kv_sums = kv_sums.data(), p.kv_turns = kv_turns.data(), p.tile_counter = &tile_counter;
    p.num_slabs = num_slabs, p.b = b, p.h = x.h, p.h_kv = x.h_kv, p.d = x.d, p.d_v = x.d_v;
    p.heads_per_tile = CUTS_HEADS ? group / x.pieces : group, p.heads_inverse = FA_HEADS_INVERSE(p.heads_per_tile);
    p.len_q = VARLEN ? total_q : len_q, p.len_kv = VARLEN ? total_kv : len_kv;
    p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_kv.data();
    p.num_kv_tiles = ceil_div(len_kv, BLOCK_KV), p.pieces = x.pieces;
    p.num_cut = x.pieces == 1 ? 0 : CUTS_QUERIES ? ceil_div(tiles, 2) : tiles;
    p.num_whole = tiles - p.num_cut, p.num_tiles = p.num_whole + p.num_cut * x.pieces;
    p.in_order = x.in_order, p.converts = x.converts, p.group_heads = x.group_heads;
    p.scale = p.score_scale = 1 / sqrtf((float)x.d), p.scale_log2 = (SCORE || FLEX_SCORE ? 1 : p.scale) * (float)LOG2_E;
    std::vector<float> slopes;
    for (int head = 0; head < x.h; head++) slopes.push_back(slope_of_head(head));
    if (HAS_SLOPES) p.alibi_slopes = slopes.data();
    p.rng_state = rng_state;
    p.window_left = WINDOW_LEFT, p.window_right = WINDOW_RIGHT, p.keep_max = KEEP_MAX, p.keep_scale = KEEP_SCALE;

    const emulated_shape shape = {1, 1, 1, 1, THREADS, SHARED_BASE + (unsigned)sizeof(shared_memory)};
    emulate_launch(run_kernel, &p, &shape);
    EXPECT(copies.empty());
    const double errors[] = {error_of(dq, e.dq), error_of(dk, e.dk), error_of(dv, e.dv)}, most = BF16 ? 4e-3 : 5e-4;
    bool is_right = true;
    for (double error : errors) is_right &= error < most; /* false for NaN */
    if (is_right) return;
    fprintf(stderr, "%s: errors of dq, dk, dv %g %g %g", x.name, errors[0], errors[1], errors[2]);
    print_manner();
    exit(1);
}

static const problem PROBLEMS[] = {
#if VARLEN
    {"packed", {130, 0, 1, 300, 129}, {130, 7, 0, 257, 300}, 4, 2, HEAD_DIM, D_V, false, false, 2, 1},
    {"packed, in order", {130, 1, 300}, {130, 9, 257}, 2, 2, HEAD_DIM, D_V, true, false, 2, 1},
    {"packed, narrower V", {65, 20}, {70, 200}, 2, 1, HEAD_DIM, HEAD_DIM - 8, false, false, 2, 1},
    {"packed, narrower Q and K", {65, 20}, {70, 200}, 2, 1, HEAD_DIM - 8, D_V, true, false, 2, 1},
    {"packed, cut tiles", {300, 200}, {300, 200}, 4, 1, HEAD_DIM, D_V, false, false, 2, 2},
    {"packed, maybe a converter", {300, 200}, {300, 200}, 2, 2, HEAD_DIM, D_V, false, true, 2, 1},
#else
    {"300", {300}, {300}, 2, 2, HEAD_DIM, D_V, false, false, 2, 1},
    {"129 x 385", {129, 129}, {385, 385}, 2, 1, HEAD_DIM, D_V, false, false, 1, 1},
    {"385 x 129, in order", {385}, {129}, 2, 2, HEAD_DIM - 24, HEAD_DIM - 24, true, false, 2, 1},
    {"narrow V", {150}, {200}, 2, 1, HEAD_DIM, 8, false, false, 2, 1},
    {"narrow Q and K", {150}, {200}, 2, 2, 8, D_V, true, false, 2, 1},
    {"520, maybe a converter", {520}, {520}, 2, 2, HEAD_DIM, D_V, false, true, 1, 1},
    {"200 x 500, maybe a converter", {200}, {500}, 2, 1, HEAD_DIM, D_V, false, true, 1, 1},
    {"50, maybe a converter", {50}, {50}, 3, 3, HEAD_DIM, D_V, false, true, 1, 1},
    {"500 x 200, maybe a converter", {500}, {200}, 2, 2, HEAD_DIM, D_V, false, true, 2, 1},
    {"cut tiles, in order", {400}, {400}, 4, 1, HEAD_DIM, D_V, true, false, 2, 2},
    {"tiles in four pieces", {400}, {400}, 4, 1, HEAD_DIM, D_V, false, false, 2, 4},
#endif
};

int main(int argc, char **argv) {
    check_all(argc, argv, PROBLEMS, 4, 1, 2, check); /* slow: a warp that loads and writes, or one of the others */
    puts("all gradients are right");
    return 0;
}
