/* Tests attn_fwd_fp8_sm90 (csrc/cuda/attn_fwd_fp8_sm90.cu): O and lse against sums in double, with masks, grouped heads
 * and packed sequences. O is added to its sums of 32 bits every 256 keys, so that short problems do so, too.
 *
 * All threads of a CTA run the kernel's own code (cuda_emulation.h, hopper_emulation.h), as in check_fwd_sm90.cpp.
 * tests/guards/test_check_kernels.py compiles this file for rows of tiles.def. */
#include "hopper_emulation.h"

#include <algorithm>

#include "cuda/attn_fwd_params.h"
#undef FA_FLUSH_KEYS
#define FA_FLUSH_KEYS(d) 256

/* ---- products in 8 bits ---------------------------------------------------------------------------------------- */

/* The high half of a descriptor is described in hopper_emulation.h (matrix_of). */
template <int N> struct wgmma<N, e4m3> {
    template <u32 A_HIGH, u32 B_HIGH> static void ss(float (&d)[N / 2], u32 a, u32 b, int accumulate) {
        issue({EMULATED_E4M3, N, 1, accumulate != 0, 1, true, false, matrix_of(a, A_HIGH, 0), matrix_of(b, B_HIGH, 0)},
              d, nullptr);
        wgmma_fence();
    }
    template <u32 B_HIGH> static void rs(float (&d)[N / 2], const u32 *a, u32 b, int accumulate) {
        issue({EMULATED_E4M3, N, 1, accumulate != 0, 1, false, false, {}, matrix_of(b, B_HIGH, 0)}, d, a);
        wgmma_fence();
    }
};

static void mbarrier_wait_both(u64 *a, u32 parity_a, u64 *b, u32 parity_b) {
    mbarrier_wait(a, parity_a), mbarrier_wait(b, parity_b);
}
static u32 cvt_e4m3_x4(float a, float b, float c, float d) { return cvt_e4m3x2(a, b) | cvt_e4m3x2(c, d) << 16; }
static float cvt_f32_e4m3(u32 byte) { return cvt_f32(e4m3{(unsigned char)byte}); }
static float4 ld_global_in_order(const float4 *p) { return *p; }
static void red_add_x4(float *to, float a, float b, float c, float d) {
    to[0] += a, to[1] += b, to[2] += c, to[3] += d;
}

#include "cuda/attn_fwd_fp8_sm90.cu"

#include "hopper_problem.h"

static void run_kernel(const void *p) { KERNEL(*(const params *)p); }

/* ---- problems -------------------------------------------------------------------------------------------------- */

struct problem {
    const char *name;
    std::vector<int> len_q, len_kv;
    int h, h_kv, ctas;
    bool is_dynamic; /* work tiles come from the counter */
};

constexpr float UNTOUCHED = 12345;

struct tensors {
    std::vector<int> q_offsets, k_offsets;
    tensor q, k, v;
    tensor_of<bf16> o;
    std::vector<float> lse;
};

/* The largest difference of lse, if it is wanted, and the relative error of O in all rows. Any number that is not
 * finite is an error. */
static void compare(const problem &x, tensors &t, bool wants_lse) {
    const numbers q(t.q), k(t.k), v(t.v);
    double off = 0, all = 0, worst_lse = 0;
    const int group = x.h / x.h_kv, total_q = t.q.rows;
    for (int n = 0; n < (int)x.len_q.size(); n++)
        for (int head = 0; head < x.h; head++)
            for (int i = 0; i < x.len_q[(size_t)n]; i++) {
                const int q_row = t.q_offsets[(size_t)n] + i, k_row = t.k_offsets[(size_t)n];
                const key_range keys = keys_of_row(i, x.len_q[(size_t)n], x.len_kv[(size_t)n]);
                std::vector<double> s;
                double most = -INFINITY, sum = 0;
                for (int j = keys.begin; j < keys.end; j++) {
                    const double score = dot(q.row(q_row, head), k.row(k_row + j, head / group), HEAD_DIM);
                    s.push_back(score / sqrt(HEAD_DIM)), most = fmax(most, s.back());
                }
                for (double &y : s) y = exp(y - most), sum += y;
                std::vector<double> row(HEAD_DIM);
                for (size_t j = 0; j < s.size(); j++)
                    add_multiple(row.data(), s[j] / sum, v.row(k_row + keys.begin + (int)j, head / group), HEAD_DIM);
                for (int c = 0; c < HEAD_DIM; c++) {
                    const double o = cvt_f32(t.o.row(q_row, head)[c]), right = row[(size_t)c];
                    EXPECT(std::isfinite(o));
                    off += (o - right) * (o - right), all += right * right;
                }
                const double right = s.empty() ? INFINITY : most + log(sum);
                const int of_head = VARLEN ? head * total_q + q_row : (n * x.h + head) * x.len_q[0] + i;
                const double lse = t.lse[(size_t)of_head];
                EXPECT(wants_lse || lse == UNTOUCHED);
                if (wants_lse && lse != right)
                    worst_lse = fmax(worst_lse, std::isfinite(lse) ? fabs(lse - right) : 1e30);
            }
    const double error = all > 0 ? sqrt(off / all) : sqrt(off);
    if (error < 0.05 && worst_lse < 1e-3) return;
    fprintf(stderr, "%s: error of O %g, of lse %g", x.name, error, worst_lse);
    print_manner();
    exit(1);
}

static void check(const problem &x) {
    const int b = (int)x.len_q.size();
    tensors t = {offsets_of(x.len_q), offsets_of(x.len_kv), {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {}};
    const int total_q = t.q_offsets.back(), total_kv = t.k_offsets.back();
    t.q = {total_q, x.h, HEAD_DIM}, t.k = t.v = {total_kv, x.h_kv, HEAD_DIM}, t.o = {total_q, x.h, HEAD_DIM};
    t.q.draw(), t.k.draw(), t.v.draw();
    t.lse.assign((size_t)(total_q * x.h), UNTOUCHED);
    std::vector<float> sums((size_t)(x.ctas * BLOCK_Q * HEAD_DIM), NAN);
    params p = {};
    t.q.fill_map(p.q, x.len_q[0], BLOCK_Q), t.o.fill_map(p.o, x.len_q[0], 16, 1, O_ROW_BYTES);
    t.k.fill_map(p.k, x.len_kv[0], BLOCK_KV), t.v.fill_map(p.v, x.len_kv[0], BLOCK_KV);
    const bool wants_lse = random_bits() % 3 > 0;
    p.lse = wants_lse ? t.lse.data() : nullptr, p.empty_lse = INFINITY;
    p.lse_stride_b = VARLEN ? 0 : x.h * x.len_q[0], p.lse_stride_h = VARLEN ? total_q : x.len_q[0];
    p.o_data = t.o.data.data(), p.o_stride_row = x.h * HEAD_DIM, p.o_stride_h = HEAD_DIM;
    p.o_stride_b = VARLEN ? 0 : x.len_q[0] * x.h * HEAD_DIM;
    p.b = b, p.h = x.h, p.heads_per_kv = x.h / x.h_kv, p.d_v = HEAD_DIM;
    p.len_q = VARLEN ? total_q : x.len_q[0], p.len_kv = VARLEN ? total_kv : x.len_kv[0];
    p.cu_seqlens_q = t.q_offsets.data(), p.cu_seqlens_k = t.k_offsets.data();
    p.num_q_tiles = ceil_div(x.len_q[0], BLOCK_Q), p.num_tiles = p.num_q_tiles * b * x.h;
    p.group_heads = 1 + (int)(random_bits() % (unsigned)x.h), p.counter_slot = x.is_dynamic ? 3 : -1;
    p.score_scale = 1 / sqrtf(HEAD_DIM), p.scale_log2 = (SCORE ? 1 : p.score_scale) * 1.44269504f;
    p.window_left = WINDOW_LEFT, p.window_right = WINDOW_RIGHT, p.keep_max = 255, p.keep_scale = 1;
    p.sums = sums.data();
    const emulated_shape shape = {(unsigned)x.ctas, 1, 1, 1, THREADS, 1024 + (unsigned)sizeof(shared_memory)};
    emulate_launch(run_kernel, &p, &shape);
    EXPECT(copies.empty());
    EXPECT(tile_counters[3] == 0);
    compare(x, t, wants_lse);
}

static const problem PROBLEMS[] = {
#if VARLEN
    {"packed", {130, 0, 1, 300, 129}, {130, 7, 0, 257, 300}, 2, 1, 1, true},
    {"packed, short", {1, 1, 0, 0, 64, 1}, {1, 129, 5, 0, 200, 0}, 2, 2, 2, true},
    {"more CTAs than tiles", {3, 0, 70}, {10, 9, 3}, 1, 1, 5, true},
#else
    {"300", {300}, {300}, 2, 2, 1, false},
    {"129 x 385", {129, 129}, {385, 385}, 2, 1, 2, true},
    {"385 x 129", {385}, {129}, 2, 2, 1, true},
    {"100 x 700", {100, 100}, {700, 700}, 2, 1, 1, true},
    {"1 x 1", {1, 1, 1, 1}, {1, 1, 1, 1}, 2, 1, 1, true},
    {"more CTAs than tiles", {50}, {200}, 2, 1, 4, false},
    {"one key tile", {65, 65, 65}, {40, 40, 40}, 3, 1, 1, true},
#endif
};

int main(int argc, char **argv) {
    check_all(argc, argv, PROBLEMS, 8, 0, 1 + WGS, check); /* as check_fwd_sm90.cpp */
    puts("all rows are right");
}
