/* Tests attn_bwd_prep (csrc/cuda/attn_bwd_prep.cu): D, the LSE, the marks of slabs, and zeros in dQ and softmax_d, over
 * random problems. Rows that a window hides have a finite LSE, as a sink gives it, and infinities in dO.
 *
 * All CTAs run the kernel's own code (cuda_emulation.h, hopper_emulation.h).
 *
 * tests/guards/test_check_kernels.py compiles this file for rows of tiles.def. */
#include "hopper_emulation.h"

#include "cuda/attn_bwd_prep.cu"

static void run_kernel(const void *p) { KERNEL(*(const fa_attn_bwd_params *)p); }

static int below(int n) { return (int)(random_bits() % (unsigned)n); }

/* [rows, h, d] */
struct tensor {
    int h, d;
    std::vector<element::output> data;
    tensor(int rows, int h, int d) : h(h), d(d), data((size_t)(rows * h * d)) {
        std::normal_distribution<float> normal;
        for (element::output &x : data) x = cvt<element::output>(normal(random_bits));
    }
    element::output *row(int i, int head) { return &data[(size_t)((i * h + head) * d)]; }
    fa_bwd_tensor view(int len) {
        return {data.data(), VARLEN ? 0 : (long long)len * h * d, (long long)h * d, (long long)d};
    }
};

/* The kinds of a row: it sees keys; the window hides all; all scores are -inf. */
enum row_kind { SEES, HIDDEN, SILENT };

struct problem {
    int b, h, d, d_v, window_left, window_right, num_slabs, softmax_d_rows;
    bool has_dlse;
    std::vector<int> cu_q, cu_kv; /* [b + 1] */

    int len_q(int n) const { return cu_q[n + 1] - cu_q[n]; }
    int len_kv(int n) const { return cu_kv[n + 1] - cu_kv[n]; }
    int stats(int n, int i, int head) const { /* among rows of [h, softmax_d_rows], dense: [b, h, softmax_d_rows] */
        return VARLEN ? head * softmax_d_rows + cu_q[n] + i : (n * h + head) * softmax_d_rows + i;
    }
    int num_stats() const { return (VARLEN ? h : b * h) * softmax_d_rows; }
    bool sees_key(int n, int i) const {
        const int at = i + len_kv(n) - len_q(n);
        for (int j = 0; j < len_kv(n); j++)
            if ((window_left < 0 || j >= at - window_left) && (window_right < 0 || j <= at + window_right)) return true;
        return false;
    }
};

static problem draw_problem() {
    problem x;
    x.b = 1 + below(3), x.h = 1 + below(3), x.d = 8 * (1 + below(HEAD_DIM / 8));
    x.d_v = D_V == HEAD_DIM ? x.d : 8 * (1 + below(D_V / 8));
    x.window_left = below(2) ? -1 : below(100), x.window_right = below(3) ? below(30) : -1;
    x.has_dlse = below(2);
    x.cu_q = x.cu_kv = {0};
    const int len_q = 1 + below(300), len_kv = below(200);
    for (int n = 0; n < x.b; n++) {
        x.cu_q.push_back(x.cu_q[n] + (VARLEN ? below(300) : len_q));
        x.cu_kv.push_back(x.cu_kv[n] + (VARLEN ? below(200) : len_kv));
    }
    x.num_slabs = VARLEN ? x.cu_q[x.b] / BLOCK_Q + x.b : ceil_div(len_q, BLOCK_Q);
    x.softmax_d_rows = VARLEN ? x.cu_q[x.b] + 128 * x.b : ceil_div(len_q, 128) * 128;
    return x;
}

static void check(const problem &x) {
    const int total_q = x.cu_q[x.b], slabs = x.num_slabs * (VARLEN ? x.h : x.b * x.h);
    tensor o(total_q, x.h, x.d_v), dout = o, dq(total_q, x.h, x.d);
    for (element::output &y : dout.data) y = cvt<element::output>((float)(below(200) - 100) / 50);
    const tensor dq_before = dq;
    std::vector<float> lse((size_t)x.num_stats()), dlse = lse, d((size_t)x.num_stats(), NAN);
    std::vector<float> stats((size_t)(slabs * 2 * BLOCK_Q), NAN), want_stats = stats;
    std::vector<unsigned> turns((size_t)(slabs * 2), 77), want_turns((size_t)(slabs * 2), 0);
    std::vector<double> want(d.size(), 0);
    for (size_t i = 0; i < stats.size(); i++) want_stats[i] = i / BLOCK_Q % 2 ? 0 : INFINITY;
    std::vector<bool> is_cleared((size_t)(total_q * x.h)); /* rows of dQ whose tile sees no key */
    for (int n = 0; n < x.b; n++)
        for (int head = 0; head < x.h; head++)
            for (int i = 0; i < x.len_q(n); i++) {
                const int row = x.cu_q[n] + i, place = x.stats(n, i, head),
                          first = VARLEN ? x.cu_q[n] / BLOCK_Q + n : 0;
                const int slab = (VARLEN ? head : n * x.h + head) * x.num_slabs + first + i / BLOCK_Q;
                const row_kind kind = !x.sees_key(n, i) ? HIDDEN : below(20) == 0 ? SILENT : SEES;
                lse[place] = kind == SILENT || (kind == HIDDEN && below(2)) ? (below(2) ? INFINITY : -INFINITY)
                                                                            : (float)(below(100) - 50) / 7;
                dlse[place] = kind == SEES ? (float)(below(100) - 50) / 9 : NAN;
                for (int c = 0; c < x.d_v && kind != SEES; c++) {
                    o.row(row, head)[c] = cvt<element::output>(0);
                    if (below(4) == 0) dout.row(row, head)[c] = cvt<element::output>(INFINITY);
                }
                double sum = x.has_dlse ? -dlse[place] : 0;
                for (int c = 0; c < x.d_v; c++)
                    sum += (double)cvt_f32(o.row(row, head)[c]) * cvt_f32(dout.row(row, head)[c]);
                want[place] = kind == SEES ? sum : 0;
                float *of_row = &want_stats[(size_t)(slab * 2 * BLOCK_Q + i % BLOCK_Q / 16 * 16 + stat_place(i % 16))];
                of_row[0] = kind == SEES ? lse[place] * (float)LOG2_E : INFINITY, of_row[BLOCK_Q] = (float)want[place];
                if (kind != SEES && !WIDE) want_turns[(size_t)(2 * slab + 1)] = 1;
                bool tile_sees = false; /* some tile of keys lies between the first and the last key of its rows */
                const int begin = i / BLOCK_Q * BLOCK_Q, end = min(begin + BLOCK_Q, x.len_q(n));
                for (int k = begin; k < end; k++) tile_sees |= x.sees_key(n, k);
                is_cleared[(size_t)(row * x.h + head)] = !tile_sees;
            }

    unsigned tile_counter = 5, kv_turns[16] = {9, 9, 9, 9, 9, 9, 9, 9, 9};
    fa_attn_bwd_params p = {};
    p.o = o.view(x.len_q(0)), p.dout_rows = dout.view(x.len_q(0)), p.dq = dq.view(x.len_q(0));
    const long long stride_b = VARLEN ? 0 : x.h * x.softmax_d_rows, stride_h = x.softmax_d_rows;
    p.lse = {lse.data(), stride_b, stride_h}, p.softmax_d = {d.data(), stride_b, stride_h};
    if (x.has_dlse) p.dlse = {dlse.data(), stride_b, stride_h};
    p.softmax_d_rows = x.softmax_d_rows, p.stats = stats.data(), p.turns = turns.data();
    p.tile_counter = &tile_counter, p.kv_turns = kv_turns, p.num_cut = 1;
    p.num_slabs = x.num_slabs, p.b = x.b, p.h = p.h_kv = x.h, p.d = x.d, p.d_v = x.d_v;
    p.len_q = VARLEN ? total_q : x.len_q(0), p.len_kv = VARLEN ? x.cu_kv[x.b] : x.len_kv(0);
    p.cu_seqlens_q = x.cu_q.data(), p.cu_seqlens_k = x.cu_kv.data();
    p.window_left = x.window_left, p.window_right = x.window_right;
    const emulated_shape shape = {(unsigned)slabs, 1, 1, 1, THREADS, 0};
    emulate_launch(run_kernel, &p, &shape);

    EXPECT(tile_counter == 0 && kv_turns[0] == 0 && kv_turns[7] == 0 && kv_turns[8] == 9);
    for (int i = 0; i < x.num_stats(); i++) EXPECT(fabs(d[i] - want[i]) <= 1e-4 * (1 + fabs(want[i])));
    for (size_t i = 0; i < stats.size(); i++)
        EXPECT(stats[i] == want_stats[i] || fabs(stats[i] - want_stats[i]) <= 1e-4 * (1 + fabs(want_stats[i])));
    EXPECT(turns == want_turns);
    for (int i = 0; i < total_q * x.h * x.d; i++)
        EXPECT(cvt_f32(dq.data[i]) == (is_cleared[(size_t)(i / x.d)] ? 0 : cvt_f32(dq_before.data[i])));
}

int main(int argc, char **argv) {
    if (argc > 1) random_bits.seed((unsigned)atoi(argv[1]));
    for (int n = argc > 2 ? atoi(argv[2]) : 200; n > 0; n--) check(draw_problem());
    puts("all rows are prepared");
    return 0;
}
