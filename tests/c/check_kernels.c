/* Compares every CPU kernel that this machine can run with csrc/cpu/reference.c. The reference is compared with finite
 * differences of itself and with a naive evaluation. Dropout, conversion and cache append are compared with their
 * definitions.
 *
 *   check_kernels                 all tests
 *   check_emulated --emulated     tests of the kernels that amx_emulation.h emulates
 *   check_kernels --seed N        one random case in both passes and all dtypes, with its errors
 *   check_kernels --time [part]   GFLOPS of one thread, of every kernel with `part` in its name
 *
 * The tolerance: with E(x) = max |x - reference in fp64 on the same inputs|, a kernel passes when
 *     E(kernel) <= m E(naive) + a max |reference|,   m = 2 forward, 3 backward,   a = half a unit in the last place
 * For fp32 a is 1e-6. For e4m3 m is 0, and a is that of bf16: the kernel must be as exact as fp32 arithmetic. In the
 * backward the reference is at least as large as the terms that cancel. The naive evaluation rounds every intermediate
 * tensor to the dtype, as a tensor library does (naive.h).
 *
 * Build: make -C tests/c (CC, CFLAGS as usual). */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "definitions.h"
#include "naive.h"
#include "cpu/bwd_layout.h"
#include "cpu/decode_plan.h"
#include "sinks.h"
#include <time.h>

/* ---- one random case ----------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    tensor *ours;
    fa_view exact, naive;
    bool is_key;
} output;

static void wipe(tensor *t) { memset(t->view.data, 0xff, tensor_bytes(t)); }

static bool check_outputs(const test_case *c, fa_isa isa, output *outputs, int num_outputs, bool verbose) {
    const fa_problem *p = &c->p;
    bool good = true;
    for (int i = 0; i < num_outputs; i++) {
        output *o = &outputs[i];
        const int64_t columns = o->ours->columns;
        deviation ours = compare(p, &o->ours->view, o->ours->dtype, columns, &o->exact, o->is_key);
        deviation naive = compare(p, &o->naive, FA_F64, columns, &o->exact, o->is_key);
        /* dp - delta may cancel to zero, but its rounding errors, summed over rows or keys, do not cancel. They are
         * errors of sums over d_v elements, and the scale of the gradients follows from d. */
        double num_terms = (double)(p->len_q * p->h / p->h_kv + p->len_kv), scale = ours.largest;
        if (p->pass == FA_BWD && p->dtype == FA_F32)
            scale = fmax(scale, c->amplitude * sqrt(num_terms * fmax(1, (double)p->d_v / (double)p->d)));
        double allowed = (p->pass == FA_FWD ? 2 : 3) * naive.error + tolerance_of_dtype(p->dtype) * scale;
        if (p->dtype == FA_E4M3) allowed = (tolerance_of_dtype(FA_BF16) + 1e-5) * scale;
        allowed += p->dtype == FA_F64 ? 0 : p->dtype == FA_F16 ? 0x1p-24 : 0x1p-126; /* what is less may become 0 */
        bool clean = is_clean_outside(p, o->ours, o->is_key), close = ours.error <= allowed;
        if (p->dtype == FA_F32 && naive.error > 1e-4 * scale) close = false; /* the reference is wrong */
        if (verbose || !close || !clean)
            printf("  %-10s %-3s error %.3g of %.3g, naive %.3g%s%s\n", fa_isa_name(isa), o->name, ours.error,
                   ours.largest, naive.error, close ? "" : "  TOO FAR", clean ? "" : "  WROTE OUTSIDE");
        good = good && close && clean;
    }
    return good;
}

/* The error of softmax_d against its definition, on the output that the kernel was given. */
static double delta_error(const fa_problem *p) {
    double worst = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t head = 0; head < p->h; head++)
            for (int64_t i = 0; i < s.len_q; i++) {
                double delta = 0;
                int64_t o = fa_query_offset(&p->o, &s, i, head), dout = fa_query_offset(&p->dout, &s, i, head);
                for (int64_t t = 0; t < p->d_v && isfinite(*fa_row_stat(&p->lse, &s, i, head)); t++)
                    delta +=
                        fa_load_element(p->o.data, o + t, p->dtype) * fa_load_element(p->dout.data, dout + t, p->dtype);
                double error = fabs(*fa_row_stat(&p->softmax_d, &s, i, head) - delta) / (1 + fabs(delta));
                if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
            }
    }
    return worst;
}

static bool check_isa(const test_case *c, fa_isa isa, output *outputs, const fa_problem *exact, bool verbose) {
    const bool backward = c->p.pass == FA_BWD;
    const int threads = 1 + (int)(c->seed % 3);
    unsigned before = control_state();
    fa_problem run = c->p;
    for (int i = 0; i < (backward ? 4 : 1); i++) wipe(outputs[i].ours);
    alloc_row_stats(&run, &run.lse, run.cu_seqlens_q ? run.total_q : run.len_q, c->at_end);
    if (run.sinks.data && !IS_CUDA)
        alloc_row_stats(&run, &run.sink_probability, run.cu_seqlens_q ? run.total_q : run.len_q, c->at_end);
    run.pass = FA_FWD;
    run_on(isa, threads, &run, c->at_end);
    run.pass = c->p.pass;
    if (backward) run_on(isa, threads, &run, c->at_end);

    bool good = backward ? check_outputs(c, isa, outputs + 1, 3, verbose) : check_outputs(c, isa, outputs, 1, verbose);
    double error = backward ? delta_error(&run) : compare_row_stats(&run, &run.lse, &exact->lse);
    if (error > 2e-5) {
        printf("  %s: %s off by %g\n", fa_isa_name(isa), backward ? "softmax_d" : "lse", error);
        good = false;
    }
    if (run.sink_probability.data) error = compare_row_stats(&run, &run.sink_probability, &exact->sink_probability);
    if (run.sink_probability.data && error > 1e-5) {
        printf("  %s: the probability of a sink is off by %g\n", fa_isa_name(isa), error);
        good = false;
    }
    if (control_state() != before) {
        printf("  %s changed the caller's floating-point control state\n", fa_isa_name(isa));
        good = false;
    }
    return good;
}

/* The tested gradients follow from the kernel's own forward, as the gradients of a user do. */
static bool check_case(uint64_t seed, fa_pass pass, fa_dtype dtype, bool verbose) {
    test_case c = case_make(seed, pass, dtype);
    draw_sinks(&c, seed);
    fa_problem *p = &c.p, exact = *p;
    const int num_tensors = pass == FA_BWD ? 4 : 1;
    if (verbose) case_print(&c);

    /* the same problem in fp64, and the naive results */
    exact.dtype = FA_F64;
    exact.q = tensor_descaled(p, &c.q, &p->q_descale, false, c.at_end).view;
    exact.k = tensor_descaled(p, &c.k, &p->k_descale, true, c.at_end).view;
    exact.v = tensor_descaled(p, &c.v, &p->v_descale, true, c.at_end).view;
    exact.dout = tensor_widened(&c.dout, c.at_end).view;
    if (p->qv.data) exact.qv = tensor_widened(&c.qv, c.at_end).view;
    naive_results naive = {.o = {0}};
    output outputs[] = {{"o", &c.o, .is_key = false},
                        {"dq", &c.dq, .is_key = false},
                        {"dk", &c.dk, .is_key = true},
                        {"dv", &c.dv, .is_key = true}};
    fa_view *exact_views[] = {&exact.o, &exact.dq, &exact.dk, &exact.dv};
    fa_view *naive_views[] = {&naive.o, &naive.dq, &naive.dk, &naive.dv};
    for (int i = 0; i < num_tensors; i++) {
        outputs[i].exact = *exact_views[i] = tensor_widened(outputs[i].ours, c.at_end).view;
        outputs[i].naive = *naive_views[i] = tensor_widened(outputs[i].ours, c.at_end).view;
    }
    alloc_row_stats(p, &exact.lse, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
    if (p->sinks.data) alloc_row_stats(p, &exact.sink_probability, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
    run_forward_reference(&exact);
    if (pass == FA_BWD) run_reference(&exact);
    naive_attention(p, &naive);
    add_sinks_to_naive(p, &exact, &naive.o, c.at_end);

    bool good = true;
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || !takes_dtype((fa_isa)isa, dtype)) continue;
        if (isa == FA_ISA_REFERENCE && dtype != FA_F64 && seed % 8) continue;
        good = check_isa(&c, (fa_isa)isa, outputs, &exact, verbose) && good;
    }
    if (!good) case_print(&c);
    guarded_free_all();
    return good;
}

static void check_seeds(fa_pass pass, fa_dtype dtype, uint64_t num_seeds) {
    bool good = true;
    num_seeds = NUM_SEEDS(num_seeds);
    if (num_seeds < COUNT(head_dims) || (IS_CUDA && !getenv("ALL_SEEDS"))) num_seeds = COUNT(head_dims);
    for (uint64_t seed = FIRST_SEED(0); seed < FIRST_SEED(num_seeds); seed++)
        good = check_case(seed, pass, dtype, false) && good;
    assert_true(good);
}

static void test_fwd_f32(void **state) { (void)state, check_seeds(FA_FWD, FA_F32, 65); }
static void test_fwd_bf16(void **state) { (void)state, check_seeds(FA_FWD, FA_BF16, 65); }
static void test_fwd_f16(void **state) { (void)state, check_seeds(FA_FWD, FA_F16, 39); }
static void test_fwd_e4m3(void **state) { (void)state, check_seeds(FA_FWD, FA_E4M3, 65); }
static void test_fwd_f64(void **state) { (void)state, check_seeds(FA_FWD, FA_F64, 13); }
static void test_bwd_f32(void **state) { (void)state, check_seeds(FA_BWD, FA_F32, 65); }
static void test_bwd_bf16(void **state) { (void)state, check_seeds(FA_BWD, FA_BF16, 65); }
static void test_bwd_f16(void **state) { (void)state, check_seeds(FA_BWD, FA_F16, 39); }
static void test_bwd_f64(void **state) { (void)state, check_seeds(FA_BWD, FA_F64, 13); }

/* ---- the same bits for any number of threads ----------------------------------------------------------------- */

static void check_thread_counts(fa_pass pass, fa_dtype dtype, uint64_t seed) {
    static const int counts[] = {1, 2, 3, 7};
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || !takes_dtype((fa_isa)isa, dtype)) continue;
        if (isa == FA_ISA_REFERENCE && seed % 4) continue;
        test_case c = case_make(seed, pass, dtype);
        fa_problem *p = &c.p;
        if (pass == FA_BWD) run_forward_reference(p);
        tensor *outputs[] = {&c.o, &c.dq, &c.dk, &c.dv};
        int first = pass == FA_FWD ? 0 : 1, end = pass == FA_FWD ? 1 : 4;
        void *expected[4] = {NULL};
        for (int n = 0; n < (int)COUNT(counts); n++) {
            run_on((fa_isa)isa, counts[n], p, c.at_end);
            for (int i = first; i < end; i++) {
                size_t bytes = tensor_bytes(outputs[i]);
                if (n == 0) memcpy(expected[i] = malloc(bytes + 1), outputs[i]->view.data, bytes);
                if (memcmp(expected[i], outputs[i]->view.data, bytes)) {
                    case_print(&c);
                    fail_msg("%s: %d threads give other bits than one", fa_isa_name((fa_isa)isa), counts[n]);
                }
            }
        }
        for (int i = first; i < end; i++) free(expected[i]);
        guarded_free_all();
    }
}

static void test_thread_counts(void **state) {
    (void)state;
    for (uint64_t seed = FIRST_SEED(1000); seed < FIRST_SEED(1000 + NUM_SEEDS(12)); seed++) {
        check_thread_counts(FA_FWD, seed % 2 ? FA_F32 : FA_BF16, seed);
        check_thread_counts(FA_BWD, seed % 2 ? FA_F32 : FA_BF16, seed);
        check_thread_counts(FA_FWD, FA_E4M3, seed);
    }
}

/* ---- tasks ----------------------------------------------------------------------------------------------------- */

/* The number of keys of [begin, end) between the first and the last key that the tile's lanes see. The tile starts at
 * lane idx block_q. A lane is a row and one of the heads that share keys. With dropout a lane is a row of one head. */
static int64_t keys_of_tile(const fa_problem *p, const fa_sequence *s, int block_q, int64_t idx, int64_t begin,
                            int64_t end) {
    const int64_t g = p->h / p->h_kv;
    int64_t low = INT64_MAX, high = -1;
    for (int64_t lane = 0; lane < block_q; lane++) {
        const int64_t row = p->dropout_p > 0 ? idx / g * block_q + lane : (idx * block_q + lane) / g;
        if (row >= s->len_q) continue;
        int64_t first, last;
        fa_visible_keys(p, s, row, &first, &last);
        if (first < low) low = first;
        if (last > high) high = last;
    }
    int64_t count = 0;
    for (int64_t key = begin; key < end; key++) count += low <= key && key < high;
    return count;
}

/* The tasks of a call cover all of its work exactly once. They are sorted by descending cost, and their costs are
 * correct. */
static void check_tasks(const fa_problem *p, int block_q, int tiles_per_task, int ranges, int shares) {
    enum { BLOCK_KV = 32 };
    const bool forward = p->pass == FA_FWD;
    const int64_t most = forward ? fa_fwd_tasks(p, block_q, tiles_per_task, NULL)
                                 : fa_bwd_tasks(p, block_q, BLOCK_KV, ranges, shares, NULL);
    fa_task *tasks = guarded_alloc((size_t)most * sizeof *tasks, 64, true);
    const int64_t count = forward ? fa_fwd_tasks(p, block_q, tiles_per_task, tasks)
                                  : fa_bwd_tasks(p, block_q, BLOCK_KV, ranges, shares, tasks);
    assert_int_equal(count, forward ? most : (p->b - fa_num_decodes(p)) * p->h_kv * shares);
    fa_sort_tasks(tasks, count);
    int64_t places = 0;
    for (int64_t i = 0; i < count; i++) {
        const fa_task *t = &tasks[i], *before = &tasks[i > 0 ? i - 1 : 0];
        assert_true(t->begin < t->end && (!forward || t->end - t->begin <= tiles_per_task) && t->cost <= before->cost);
        if (i > 0 && t->cost == before->cost)
            assert_true(before->b_idx != t->b_idx       ? before->b_idx < t->b_idx
                        : before->head_kv != t->head_kv ? before->head_kv < t->head_kv
                                                        : before->begin < t->begin);
        for (int64_t j = 0; j < i; j++) /* no tile and no range is in two tasks */
            assert_true(tasks[j].b_idx != t->b_idx || tasks[j].head_kv != t->head_kv || tasks[j].end <= t->begin ||
                        t->end <= tasks[j].begin);
        places += t->end - t->begin;
        const fa_sequence s = fa_sequence_at(p, t->b_idx);
        int64_t cost = 0, begin = 0, end = s.len_kv;
        if (!forward) fa_bwd_ranges(&s, BLOCK_KV, ranges, t->begin, t->end, &begin, &end);
        for (int64_t tile = forward ? t->begin : 0; tile < (forward ? t->end : fa_num_tiles(p, &s, block_q)); tile++)
            cost += keys_of_tile(p, &s, block_q, tile, begin, end);
        assert_int_equal(t->cost, cost);
    }
    /* With the check above, each range is in one task. */
    int64_t all = forward ? 0 : (p->b - fa_num_decodes(p)) * p->h_kv * ranges;
    for (int64_t b_idx = 0; forward && b_idx < p->b; b_idx++) {
        const fa_sequence s = fa_sequence_at(p, b_idx);
        all += p->h_kv * fa_num_tiles(p, &s, block_q);
    }
    assert_int_equal(places, all);
}

static void test_tasks(void **state) {
    (void)state;
    for (uint64_t seed = 3000; seed < 3100; seed++)
        for (int pass = FA_FWD; pass <= FA_BWD; pass++) {
            const test_case c = case_make(seed, (fa_pass)pass, FA_F32);
            const int ranges = 1 + (int)(seed % 5);
            check_tasks(&c.p, seed % 2 ? 16 : 48, 1 + (int)(seed % 4), ranges, seed % 3 ? ranges : 1);
            guarded_free_all();
        }
}

/* ---- why not a stronger instruction set -------------------------------------------------------------------------- */

static void test_reasons(void **state) {
    (void)state;
    fa_isa best = FA_ISA_REFERENCE;
    int num_known = 0, num_for_bf16 = 0; /* instruction sets of this architecture */
    for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++) {
        if (!fa_cpu_knows((fa_isa)isa)) continue;
        best = (fa_isa)isa;
        num_known++;
        num_for_bf16 += fa_isa_is_for_bf16(best);
    }
    const struct {
        fa_dtype dtype;
        fa_isa chosen;
        bool is_legal;
        int num;
        const char *reason;
    } cases[] = {
        {FA_F16, best, true, num_for_bf16, "it multiplies bf16, the tensors are fp16"},
        {FA_F32, best, true, num_for_bf16, "it multiplies bf16, the tensors are fp32"},
        {FA_E4M3, best, true, num_for_bf16, "it multiplies bf16, the tensors are e4m3"},
        {FA_F64, best, true, num_known, "fp64 runs on the reference only"},
        {FA_BF16, best, true, 0, ""},
        {FA_F16, FA_ISA_REFERENCE, true, num_known, "the choice was lowered: FLASH_ATTN_CPU_ISA or set_cpu_isa()"},
        {FA_F16, best, false, num_known, "this processor or operating system does not offer it"},
    };
    for (size_t n = 0; n < COUNT(cases); n++)
        for (int pass = FA_FWD; pass <= (cases[n].dtype == FA_E4M3 ? FA_FWD : FA_BWD); pass++) {
            const fa_problem p = {.pass = (fa_pass)pass,
                                  .dtype = cases[n].dtype,
                                  .b = 1,
                                  .h = 1,
                                  .h_kv = 1,
                                  .d = 32,
                                  .d_v = 32,
                                  .len_q = 64,
                                  .len_kv = 64,
                                  .total_q = 64,
                                  .total_kv = 64,
                                  .scale = 1,
                                  .window_left = -1,
                                  .window_right = -1};
            fa_machine all = machine;
            fa_plan plan;
            all.isa = cases[n].chosen;
            for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++) all.isa_legal[isa] = cases[n].is_legal;
            fa_plan_cpu(&p, &all, &plan);
            assert_int_equal(plan.num_ruled_out, cases[n].num);
            for (int i = 0; i < plan.num_ruled_out; i++) assert_string_equal(plan.ruled_out[i].reason, cases[n].reason);
        }
}

/* ---- every value of e4m3 ----------------------------------------------------------------------------------------- */

/* With one key the output is the row of V. The row holds every code, and bf16 holds every value. */
static void test_e4m3_codes(void **state) {
    (void)state;
    for (int isa = 0; isa < FA_NUM_ISAS; isa++)
        for (int64_t len_q = 1; len_q <= 20 && machine.isa_legal[isa]; len_q += 19) { /* decode; tiles */
            uint8_t q[20 * 8] = {0}, k[8] = {0}, v[256];
            uint16_t o[20 * 256];
            float lse[20];
            for (int i = 0; i < 256; i++) v[i] = (uint8_t)i;
            fa_problem p = {.dtype = FA_E4M3, .b = 1, .h = 1, .h_kv = 1, .d = 8, .d_v = 256, .scale = 1};
            p.len_q = p.total_q = len_q, p.len_kv = p.total_kv = 1, p.window_left = p.window_right = -1;
            p.q = (fa_view){q, 0, 8, 8}, p.k = (fa_view){k, 0, 8, 8}, p.v = (fa_view){v, 0, 256, 256};
            p.o = (fa_view){o, 0, 256, 256}, p.lse = (fa_row_stats){lse, 0, 20, 0};
            run_on((fa_isa)isa, 1, &p, true);
            for (int64_t i = 0; i < len_q * 256; i++) {
                const float x = fa_f32_from_bf16(o[i]), expected = fa_f32_from_e4m3(v[i % 256]);
                assert_true(isnan(expected) ? isnan(x) : x == expected);
            }
            guarded_free_all();
        }
}

/* ---- rows of no sequence --------------------------------------------------------------------------------------- */

/* Whether rows from `first` on are zero, rows before them hold numbers, and the padding between rows is untouched. */
static bool is_zero_from(const tensor *t, int64_t first) {
    for (int64_t i = 0; i < t->num_elements; i++) {
        const bool is_padding = i % t->view.stride_row >= t->columns, is_owned = i / t->view.stride_row < first;
        const double x = fa_load_element(t->view.data, i, t->dtype);
        if (is_padding ? !isnan(x) : is_owned ? isnan(x) : x != 0) return false;
    }
    return true;
}

/* A whole call fills the rows behind the last sequence, on the side that is packed. */
static void test_unowned_rows(void **state) {
    (void)state;
    const int32_t cu[] = {0, 3, 5};
    for (int bits = 0; bits < 8; bits++) {
        const bool backward = bits & 1, packs_q = bits & 2, has_heads = bits & 4;
        fa_problem p = {.pass = backward ? FA_BWD : FA_FWD, .dtype = FA_F32, .b = 2, .h = has_heads, .h_kv = 1};
        p.d = 8, p.d_v = 24, p.scale = 0.3, p.window_left = p.window_right = -1, p.empty_lse = INFINITY;
        p.len_q = packs_q ? 3 : 2, p.len_kv = packs_q ? 4 : 3, p.total_q = packs_q ? 7 : 4,
        p.total_kv = packs_q ? 8 : 7;
        if (packs_q) p.cu_seqlens_q = cu;
        if (!packs_q) p.cu_seqlens_k = cu;
        tensor all[8];
        fa_view *views[] = {&p.q, &p.k, &p.v, &p.o, &p.dout, &p.dq, &p.dk, &p.dv};
        random_source r = {43};
        for (int i = 0; i < 8; i++) {
            const bool is_key = i == 1 || i == 2 || i > 5, is_packed = is_key != packs_q;
            const int64_t columns = i == 0 || i == 1 || i == 5 || i == 6 ? p.d : p.d_v,
                          total = is_key ? p.total_kv : p.total_q;
            all[i] = tensor_of(FA_F32, columns, 1, total, 1, PADDED_ROWS, true);
            all[i].view.stride_b = is_packed ? 0 : total / 2 * all[i].view.stride_row;
            for (int64_t n = 0; n < all[i].num_elements && (i < 3 || i == 4); n++)
                fa_store_element(all[i].view.data, n, random_normal(&r), FA_F32);
            *views[i] = all[i].view;
        }
        alloc_row_stats(&p, &p.lse, packs_q ? p.total_q : p.len_q, true);
        alloc_row_stats(&p, &p.softmax_d, packs_q ? p.total_q : p.len_q, true);
        if (backward && has_heads) run_forward_reference(&p);
        fa_plan plan;
        fa_error err;
        pool_threads = 1;
        fa_plan_cpu(&p, &machine, &plan);
        void *workspace = guarded_alloc(plan.workspace_bytes, 64, true);
        assert_int_equal(fa_cpu_run_call(&p, &plan, true, workspace, &test_pool, &err), FA_OK);
        const int64_t q_end = packs_q ? 5 : p.total_q, k_end = packs_q ? p.total_kv : 5;
        if (!has_heads && !backward) {
            guarded_free_all();
            continue;
        }
        if (!backward) {
            assert_true(is_zero_from(&all[3], q_end));
            for (int64_t row = q_end; row < p.total_q; row++) assert_true(p.lse.data[row] == -INFINITY);
        } else {
            if (has_heads) assert_true(is_zero_from(&all[5], q_end));
            for (int i = 6; i < 8; i++) assert_true(is_zero_from(&all[i], has_heads ? k_end : 0));
        }
        guarded_free_all();
    }
}

/* ---- absent gradients ---------------------------------------------------------------------------------------- */

/* A caller may ask for any subset of dq, dk, dv. The requested gradients do not depend on the subset. */
static void test_absent_gradients(void **state) {
    (void)state;
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa]) continue;
        for (uint64_t seed = 2000; seed < 2004; seed++) {
            const fa_dtype dtype = seed % 2 ? FA_F32 : FA_BF16;
            if (!takes_dtype((fa_isa)isa, dtype)) continue;
            test_case c = case_make(seed, FA_BWD, dtype);
            fa_problem *p = &c.p;
            run_forward_reference(p);
            tensor *outputs[] = {&c.dq, &c.dk, &c.dv};
            fa_view *views[] = {&p->dq, &p->dk, &p->dv};
            char *expected[3];
            run_on((fa_isa)isa, 2, p, c.at_end);
            for (int i = 0; i < 3; i++) {
                size_t bytes = (size_t)outputs[i]->num_elements * fa_dtype_bytes(p->dtype);
                memcpy(expected[i] = malloc(bytes + 1), outputs[i]->view.data, bytes);
            }
            for (int wanted = 0; wanted < 7; wanted++) {
                for (int i = 0; i < 3; i++) {
                    wipe(outputs[i]);
                    views[i]->data = wanted >> i & 1 ? outputs[i]->view.data : NULL;
                }
                run_on((fa_isa)isa, 2, p, c.at_end);
                for (int i = 0; i < 3; i++)
                    if (views[i]->data) {
                        size_t bytes = (size_t)outputs[i]->num_elements * fa_dtype_bytes(p->dtype);
                        assert_memory_equal(expected[i], outputs[i]->view.data, bytes);
                    }
            }
            for (int i = 0; i < 3; i++) free(expected[i]);
            guarded_free_all();
        }
    }
}

/* ---- rows that see nothing ----------------------------------------------------------------------------------- */

/* Vector kernels count denormal numbers as zero on every thread, because on some processors denormals cost a hundred
 * times as much. They restore the mode of the thread. pool.h checks the pool's threads, and this test checks the
 * caller. */
static void test_denormals(void **state) {
    (void)state;
    static const struct {
        fa_pass pass;
        int64_t len_q;
    } kernels[] = {{FA_FWD, 1}, {FA_FWD, 150}, {FA_BWD, 150}}; /* decode; tiles; backward */
    for (int isa = FA_ISA_SCALAR + 1; isa < FA_NUM_ISAS; isa++) {
        for (int n = 0; n < 6 && machine.isa_legal[isa] && control_state() != 0; n++) {
            fa_problem p = {.pass = kernels[n / 2].pass,
                            .dtype = FA_F32,
                            .b = 2,
                            .h = 2,
                            .h_kv = 2,
                            .d = 24,
                            .d_v = 24,
                            .scale = 0.2};
            p.len_q = kernels[n / 2].len_q, p.len_kv = 1100, p.total_q = p.b * p.len_q, p.total_kv = p.b * p.len_kv;
            p.window_left = p.window_right = -1;
            tensor all[8];
            fa_view *views[] = {&p.q, &p.dout, &p.o, &p.dq, &p.k, &p.v, &p.dk, &p.dv};
            random_source r = {29};
            for (int i = 0; i < 8; i++) {
                all[i] = tensor_make(&p, 2, i < 4 ? p.len_q : p.len_kv, 2, ROWS_THEN_HEADS, true);
                *views[i] = all[i].view;
                const double size = i == (p.pass == FA_FWD ? 5 : 1) ? 1e-39 : 1; /* v or dout */
                for (int64_t e = 0; e < all[i].num_elements; e++)
                    fa_store_element(all[i].view.data, e, size * (1.5 + sin(random_normal(&r))), p.dtype);
            }
            alloc_row_stats(&p, &p.lse, p.len_q, true);
            alloc_row_stats(&p, &p.softmax_d, p.len_q, true);
            if (p.pass == FA_BWD) run_forward_reference(&p);
            const unsigned before = control_state();
            run_on((fa_isa)isa, n % 2 ? 3 : 1, &p, true);
            assert_int_equal(control_state(), before);
            const tensor *zero = &all[p.pass == FA_FWD ? 2 : 7];
            for (int64_t e = 0; e < zero->num_elements; e++)
                assert_true(fa_load_element(zero->view.data, e, p.dtype) == 0);
            guarded_free_all();
        }
    }
}

/* Rows above a causal mask, and rows whose lse is infinite with either sign, see no key. Whatever q and dout hold
 * there, the gradients of these rows are zero. The gradients of other rows do not change by a bit. */
static void check_silent_rows(int64_t d, int len_kv, bool has_infinite_lse) {
    enum { LEN_Q = 90 };
    const int num_hidden = LEN_Q - len_kv;
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
        for (int dtype = FA_F16; dtype <= FA_F32 && machine.isa_legal[isa]; dtype++) {
            fa_problem p = {.pass = FA_BWD, .dtype = (fa_dtype)dtype, .b = 1, .h = 1, .h_kv = 1, .d = d, .scale = 0.2};
            p.d_v = d;
            p.len_q = p.total_q = LEN_Q, p.len_kv = p.total_kv = len_kv;
            p.window_left = -1, p.window_right = 0;
            tensor all[8];
            fa_view *views[] = {&p.q, &p.k, &p.v, &p.dout, &p.o, &p.dq, &p.dk, &p.dv};
            random_source r = {23};
            for (int i = 0; i < 8; i++) {
                all[i] = tensor_make(&p, 1, i == 1 || i == 2 || i > 5 ? len_kv : LEN_Q, 1, ROWS_THEN_HEADS, true);
                *views[i] = all[i].view;
                for (int64_t n = 0; n < all[i].num_elements && i < 4; n++)
                    fa_store_element(all[i].view.data, n, random_normal(&r), p.dtype);
            }
            alloc_row_stats(&p, &p.lse, LEN_Q, true);
            alloc_row_stats(&p, &p.softmax_d, LEN_Q, true);
            run_forward_reference(&p);
            if (has_infinite_lse) p.lse.data[40] = INFINITY, p.lse.data[61] = -INFINITY;

            void *expected[3];
            for (int poisoned = 0; poisoned < 2; poisoned++) {
                for (int row = 0; row < LEN_Q; row++) {
                    if (row >= num_hidden && (!has_infinite_lse || (row != 40 && row != 61))) continue;
                    for (int64_t i = 0; i < p.d; i++) {
                        fa_store_element(p.q.data, row * p.d + i, poisoned ? NAN : 0, p.dtype);
                        fa_store_element(p.dout.data, row * p.d + i, poisoned ? NAN : 0, p.dtype);
                    }
                }
                run_on((fa_isa)isa, 1, &p, true);
                for (int i = 0; i < 3; i++) {
                    size_t bytes = (size_t)all[5 + i].num_elements * fa_dtype_bytes(p.dtype);
                    if (!poisoned) memcpy(expected[i] = malloc(bytes), all[5 + i].view.data, bytes);
                    assert_memory_equal(expected[i], all[5 + i].view.data, bytes);
                    wipe(&all[5 + i]);
                }
            }
            for (int64_t i = 0; i < p.d; i++) {
                assert_true(!has_infinite_lse || fa_load_element(expected[0], 40 * p.d + i, p.dtype) == 0);
                assert_true(!has_infinite_lse || fa_load_element(expected[0], 61 * p.d + i, p.dtype) == 0);
                assert_true(fa_load_element(expected[0], i, p.dtype) == 0);
                assert_true(fa_load_element(expected[1], i, p.dtype) != 0);
            }
            for (int i = 0; i < 3; i++) free(expected[i]);
            guarded_free_all();
        }
    }
}

/* In 192 columns warps of attn_bwd_sm80 share keys, but each walks over rows of its own. Some of them then meet silent
 * rows alone. The lengths choose a GPU with room for these tiles (cuda_device.h). */
static void test_silent_rows(void **state) {
    (void)state;
    check_silent_rows(24, 73, true);
    check_silent_rows(192, 74, false);
}

static bool is_emulation; /* check_emulated: only the kernels for bf16 run */

/* ---- NaN and infinities --------------------------------------------------------------------------------------- */

/* Elements or whole rows become NaN or infinite. With a bias or large scores p may underflow to 0 in fp32 but not in
 * the reference. Then 0 x inf differs from the reference, so only NaN is planted. */
static void plant_nonfinite(const test_case *c, random_source *r) {
    const tensor *inputs[] = {&c->k, &c->v, &c->q, &c->dout};
    const bool only_nan = c->p.alibi_slopes || c->amplitude > 1 || c->p.dtype == FA_E4M3;
    const int num_plants = 1 + (int)random_below(r, 3), num_values = only_nan ? 1 : 3;
    for (int n = 0; n < num_plants; n++) {
        const tensor *t = inputs[random_below(r, c->p.pass == FA_BWD ? 4 : 3)];
        const double values[] = {NAN, INFINITY, -INFINITY}, value = values[random_below(r, num_values)];
        const int64_t count = random_chance(r, 50) ? t->columns : 1;
        if (t->num_elements < count) continue;
        const int64_t at = random_below(r, t->num_elements - count + 1);
        for (int64_t i = at; i < at + count; i++) fa_store_element(t->view.data, i, value, c->p.dtype);
    }
}

typedef enum { ANY_NONFINITE, INFINITE_SCORES, INFINITE_SCORES_HUGE_VALUES, NUM_PLANTS } plant;

static bool check_nonfinite(uint64_t seed, fa_pass pass, fa_dtype dtype, plant kind) {
    test_case c = case_make(seed, pass, dtype);
    fa_problem *p = &c.p;
    random_source r = {seed};
    const struct {
        const char *name;
        tensor *ours;
    } outputs[] = {{"o", &c.o}, {"dq", &c.dq}, {"dk", &c.dk}, {"dv", &c.dv}};
    const int first = pass == FA_BWD ? 1 : 0, end = pass == FA_BWD ? 4 : 1;
    /* for a row with one key, dp - delta consists of rounding errors only */
    const double cancelled = kind == INFINITE_SCORES_HUGE_VALUES && pass == FA_BWD ? 16 * HUGE_VALUES(dtype) : 0;
    void *expected[4];
    bool good = true;
    if (kind == ANY_NONFINITE) plant_nonfinite(&c, &r);
    if (kind != ANY_NONFINITE) plant_infinite_scores(&c, &r);
    if (kind == INFINITE_SCORES_HUGE_VALUES) plant_huge_values(&c);
    run_forward_reference(p);
    run_reference(p);
    const fa_row_stats lse = p->lse;
    for (int i = first; i < end; i++) {
        const size_t bytes = tensor_bytes(outputs[i].ours);
        memcpy(expected[i] = malloc(bytes + 1), outputs[i].ours->view.data, bytes);
    }
    for (int isa = FA_ISA_REFERENCE + 1; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || !takes_dtype((fa_isa)isa, dtype)) continue;
        if (pass == FA_FWD) alloc_row_stats(p, &p->lse, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
        for (int i = first; i < end; i++) wipe(outputs[i].ours);
        run_on((fa_isa)isa, 1 + (int)(seed % 3), p, c.at_end);
        for (int i = first; i < end; i++) {
            const tensor *x = outputs[i].ours;
            if (is_same_kind(x->view.data, expected[i], x->num_elements, x->dtype, cancelled)) continue;
            printf("  %s: %s is not what the reference has\n", fa_isa_name((fa_isa)isa), outputs[i].name);
            good = false;
        }
        if (compare_row_stats(p, &p->lse, &lse) < 2e-5) continue;
        printf("  %s: lse is not what the reference has\n", fa_isa_name((fa_isa)isa));
        good = false;
    }
    if (!good) case_print(&c), printf("  (nonfinite, plant %d)\n", kind);
    for (int i = first; i < end; i++) free(expected[i]);
    guarded_free_all();
    return good;
}

/* NaN and infinities reach the same outputs as in the reference and no others, with every mask, padding and window. */
static void test_nonfinite(void **state) {
    (void)state;
    const uint64_t first = FIRST_SEED(5000), num_seeds = IS_CUDA || FEW_SEEDS ? COUNT(head_dims) : 8 * COUNT(head_dims);
    bool good = true;
    for (uint64_t seed = first; seed < first + num_seeds; seed++)
        for (int dtype = FA_F16; dtype <= FA_F32; dtype++) {
            if (is_emulation && dtype != FA_BF16) continue;
            good = check_nonfinite(seed, FA_FWD, (fa_dtype)dtype, ANY_NONFINITE) && good;
            good = check_nonfinite(seed, FA_BWD, (fa_dtype)dtype, ANY_NONFINITE) && good;
            if (dtype == FA_F32 && !is_emulation) good = check_nonfinite(seed, FA_FWD, FA_E4M3, ANY_NONFINITE) && good;
        }
    assert_true(good);
}

/* Rows whose scores are all -inf count as rows that see no key. Tiles of such scores do not change the output. */
static void test_infinite_scores(void **state) {
    (void)state;
    const uint64_t first = FIRST_SEED(6000), num_seeds = IS_CUDA || FEW_SEEDS ? COUNT(head_dims) : 2 * COUNT(head_dims);
    bool good = true;
    for (uint64_t seed = first; seed < first + num_seeds; seed++)
        for (int dtype = FA_F16; dtype <= FA_F32; dtype++) {
            if (is_emulation && dtype != FA_BF16) continue;
            const plant kind = seed % 3 ? INFINITE_SCORES : INFINITE_SCORES_HUGE_VALUES;
            good = check_nonfinite(seed, FA_FWD, (fa_dtype)dtype, kind) && good;
            good = check_nonfinite(seed, FA_BWD, (fa_dtype)dtype, kind) && good;
        }
    assert_true(good);
}

/* Aligned problems go to attn_fwd_sm80 and attn_bwd_sm80, but for the backward of 192 and 256 columns on a GPU with
 * little shared memory. */
static void test_16_bytes(void **state) {
    (void)state;
    const uint64_t first = 7000, num_seeds = getenv("ALL_SEEDS") ? 200 : 20;
    bool good = has_16_bytes = true;
#if defined(CHECK_CUDA)
    num_sm80[FA_FWD] = num_sm80[FA_BWD] = num_together[FA_FWD] = num_together[FA_BWD] = 0;
#endif
    for (uint64_t seed = first; seed < first + num_seeds; seed++) {
        const fa_dtype dtype = seed % 3 ? FA_BF16 : FA_F16;
        for (int pass = FA_FWD; pass <= FA_BWD; pass++) {
            const plant kind = (plant[]){ANY_NONFINITE, INFINITE_SCORES}[seed / 10 % 2];
            good = check_case(seed, (fa_pass)pass, dtype, false) && good;
            good = check_nonfinite(seed, (fa_pass)pass, dtype, kind) && good;
        }
    }
    has_16_bytes = false;
    assert_true(good);
#if defined(CHECK_CUDA)
    /* Forwards that read caches are among them. */
    assert_true(num_sm80[FA_FWD] > 2 * (int)num_seeds && num_sm80[FA_BWD] > (int)num_seeds);
    assert_true(num_together[FA_FWD] > 0 && num_together[FA_BWD] > 0);
#endif
}

/* Kernels have loops of their own for tiles that all rows see whole. Each tile size gets calls with such tiles beside
 * others that end with the tensors. In every third round a window begins in the last key tile. */
static void test_whole_tiles(void **state) {
    (void)state;
    const uint64_t first = 8000, num_seeds = (getenv("ALL_SEEDS") ? 45 : 9) * COUNT(head_dims_of_tiles);
    bool good = has_16_bytes = has_whole_tiles = true;
    for (uint64_t seed = first; seed < first + num_seeds; seed++)
        for (int pass = FA_FWD; pass <= FA_BWD; pass++)
            good = check_case(seed, (fa_pass)pass, seed % 3 ? FA_BF16 : FA_F16, false) && good;
    has_16_bytes = has_whole_tiles = false;
    assert_true(good);
}

/* Short sequences have kernels of their own. */
static void test_short(void **state) {
    (void)state;
    const uint64_t first = 9000, num_seeds = getenv("ALL_SEEDS") ? 1000 : 60;
    bool good = has_16_bytes = is_short = true;
#if defined(CHECK_CUDA)
    gpu_kernels = "any,short";
    num_short[FA_FWD] = num_short[FA_BWD] = 0;
#endif
    for (uint64_t seed = first; seed < first + num_seeds; seed++)
        for (int pass = FA_FWD; pass <= FA_BWD; pass++) {
            const fa_dtype dtype = seed % 3 ? FA_BF16 : FA_F16;
            good = check_case(seed, (fa_pass)pass, dtype, false) && good;
            good = check_nonfinite(seed, (fa_pass)pass, dtype, seed % 2 ? ANY_NONFINITE : INFINITE_SCORES) && good;
        }
    has_16_bytes = is_short = false;
#if defined(CHECK_CUDA)
    gpu_kernels = "any,fwd_sm80,bwd_sm80";
    assert_true(num_short[FA_FWD] > (int)num_seeds && num_short[FA_BWD] > (int)num_seeds / 2);
#endif
    assert_true(good);
}

/* delta of rows that see no key is 0, whatever dO holds and although a sink makes the lse finite. Rows that only round
 * up the size of softmax_d become 0. */
static void test_delta_of_short(void **state) {
    (void)state;
    enum { LEN_Q = 20, LEN_KV = 10, ROWS = 128, HIDDEN = 3 };
    float sink = 0.5f;
    fa_problem p = {.pass = FA_BWD,
                    .device = FA_CPU,
                    .dtype = FA_BF16,
                    .b = 1,
                    .h = 1,
                    .h_kv = 1,
                    .d = 64,
                    .d_v = 64,
                    .len_q = LEN_Q,
                    .len_kv = LEN_KV,
                    .total_q = LEN_Q,
                    .total_kv = LEN_KV,
                    .cache_rows = 1,
                    .scale = 0.125,
                    .window_left = -1,
                    .window_right = 0,
                    .empty_lse = INFINITY,
                    .sinks = {.data = &sink, .dtype = FA_F32, .stride = 1}};
    fa_view *views[] = {&p.q, &p.o, &p.dout, &p.dq, &p.k, &p.v, &p.dk, &p.dv};
    random_source source = {3};
    for (int i = 0; i < 8; i++) {
        const tensor t = tensor_make(&p, 1, i < 4 ? LEN_Q : LEN_KV, 1, ROWS_THEN_HEADS, true);
        *views[i] = t.view;
        for (int64_t n = 0; n < t.num_elements; n++) fa_store_element(t.view.data, n, random_normal(&source), FA_BF16);
    }
    alloc_row_stats(&p, &p.lse, LEN_Q, true);
    alloc_row_stats(&p, &p.softmax_d, ROWS, true);
    run_forward_reference(&p);
    assert_true(isfinite(p.lse.data[HIDDEN]));
    fa_store_element(p.dout.data, HIDDEN * p.dout.stride_row + 5, INFINITY, FA_BF16);
    p.sinks.data = NULL;
#if defined(CHECK_CUDA)
    gpu_kernels = "any,short", num_short[FA_BWD] = 0;
#endif
    run_on(FA_ISA_SCALAR, 1, &p, true);
#if defined(CHECK_CUDA)
    gpu_kernels = "any,fwd_sm80,bwd_sm80";
    assert_int_equal(num_short[FA_BWD], 1);
#endif
    for (int i = 0; i < ROWS; i++)
        assert_true(i >= LEN_Q - LEN_KV && i < LEN_Q ? p.softmax_d.data[i] != 0 : p.softmax_d.data[i] == 0);
    guarded_free_all();
}

#if defined(CHECK_CUDA)
/* Rows behind the last sequence: o is 0, and the lse is -inf. */
static void test_rows_of_no_sequence(void **state) {
    (void)state;
    enum { LEN = 12, OWNED = 20, ROWS = 24, HEADS = 3, DIM = 40, SEQUENCES = 2 };
    static const int32_t cu_seqlens[] = {0, LEN, OWNED};
    fa_problem p = {.pass = FA_FWD,
                    .device = FA_CPU,
                    .dtype = FA_BF16,
                    .b = SEQUENCES,
                    .h = HEADS,
                    .h_kv = HEADS,
                    .d = DIM,
                    .d_v = DIM,
                    .len_q = LEN,
                    .len_kv = LEN,
                    .total_q = ROWS,
                    .total_kv = ROWS,
                    .cu_seqlens_q = cu_seqlens,
                    .cu_seqlens_k = cu_seqlens,
                    .scale = 0.125,
                    .window_left = -1,
                    .window_right = -1,
                    .empty_lse = INFINITY};
    fa_view *views[] = {&p.q, &p.k, &p.v, &p.o};
    random_source source = {3};
    for (int i = 0; i < 4; i++) {
        const tensor t = tensor_make(&p, 1, ROWS, HEADS, ROWS_THEN_HEADS, true);
        *views[i] = t.view, views[i]->stride_b = 0;
        for (int64_t n = 0; n < t.num_elements; n++) fa_store_element(t.view.data, n, random_normal(&source), FA_BF16);
    }
    alloc_row_stats(&p, &p.lse, ROWS, true);
    gpu_kernels = "any,short", num_short[FA_FWD] = 0, zero_tensors = true;
    run_on(FA_ISA_SCALAR, 1, &p, true);
    gpu_kernels = "any,fwd_sm80,bwd_sm80", zero_tensors = false;
    assert_int_equal(num_short[FA_FWD], 1);
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t head = 0; head < HEADS; head++) {
            const float lse = p.lse.data[head * p.lse.stride_h + row];
            assert_true(row < OWNED ? isfinite(lse) : lse == -INFINITY);
            for (int64_t n = 0; n < DIM; n++) {
                const int64_t at = row * p.o.stride_row + head * p.o.stride_h + n;
                assert_true((fa_load_element(p.o.data, at, FA_BF16) != 0) == (row < OWNED));
            }
        }
    guarded_free_all();
}
#endif

/* ---- time ---------------------------------------------------------------------------------------------------- */

static double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void time_kernel(fa_isa isa, fa_pass pass, fa_dtype dtype, int64_t d, bool causal, const char *part) {
    enum { HEADS = 2, LEN = 2048 };
    fa_problem p = {.pass = pass,
                    .device = FA_CPU,
                    .dtype = dtype,
                    .b = 1,
                    .h = HEADS,
                    .h_kv = HEADS,
                    .d = d,
                    .d_v = d,
                    .len_q = LEN,
                    .len_kv = LEN,
                    .total_q = LEN,
                    .total_kv = LEN,
                    .window_left = -1,
                    .window_right = causal ? 0 : -1};
    fa_machine lowered = machine;
    lowered.isa = isa, lowered.threads = pool_threads = 1;
    fa_plan plan;
    fa_plan_cpu(&p, &lowered, &plan);
    if (plan.cpu.isa != isa || !strstr(plan.kernel, part)) return;
    p.scale = 1 / sqrt((double)d);
    fa_view *views[] = {&p.q, &p.k, &p.v, &p.dout, &p.o, &p.dq, &p.dk, &p.dv};
    random_source r = {1};
    for (int i = 0; i < 8; i++) {
        tensor t = tensor_make(&p, 1, LEN, HEADS, ROWS_THEN_HEADS, false);
        for (int64_t n = 0; n < t.num_elements; n++) fa_store_element(t.view.data, n, random_normal(&r), dtype);
        *views[i] = t.view;
    }
    alloc_row_stats(&p, &p.lse, LEN, false);
    alloc_row_stats(&p, &p.softmax_d, LEN, false);
    for (int64_t i = 0; i < HEADS * LEN; i++) p.lse.data[i] = 8;
    void *workspace = guarded_alloc(plan.workspace_bytes, 64, false);
    double best = INFINITY, start = thread_seconds();
    for (int n = 0; n < 12 && thread_seconds() - start < 2; n++) {
        double before = thread_seconds();
        fa_cpu_run(&p, &plan, workspace, &test_pool);
        best = fmin(best, thread_seconds() - before);
    }
    double flops = (pass == FA_FWD ? 4.0 : 10.0) * HEADS * LEN * LEN * (double)d / (causal ? 2 : 1);
    printf("%-44s %-6s %8.1f GFLOPS\n", plan.kernel, causal ? "causal" : "full", flops / best * 1e-9);
    fflush(stdout);
    guarded_free_all();
}

static void time_kernels(const char *part) {
    static const fa_dtype dtypes[] = {FA_F32, FA_BF16, FA_F16};
    for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa]) continue;
        for (int i = 0; i < 3; i++)
            for (int pass = FA_FWD; pass <= FA_BWD; pass++)
                for (int64_t d = 64; d <= 128; d *= 2)
                    for (int causal = 0; causal < 2; causal++)
                        time_kernel((fa_isa)isa, (fa_pass)pass, dtypes[i], d, causal, part);
    }
}

/* All keys of a row have the same score: lse is the score plus the log of the number of keys, and o is V. */
static void check_equal_scores(fa_dtype dtype, int64_t d_v, double score, int64_t len_kv) {
    enum { H = 2, LEN_Q = 20, D = 40 };
    fa_problem p = {.dtype = dtype, .b = 1, .h = H, .h_kv = H, .d = D, .d_v = d_v, .len_q = LEN_Q, .len_kv = len_kv};
    p.total_q = p.len_q, p.total_kv = p.len_kv, p.scale = 1, p.window_left = p.window_right = -1;
    const tensor q = tensor_make(&p, 1, LEN_Q, H, ROWS_THEN_HEADS, true);
    const tensor o = tensor_of(dtype, d_v, 1, LEN_Q, H, ROWS_THEN_HEADS, true);
    const tensor k = tensor_make(&p, 1, len_kv, H, ROWS_THEN_HEADS, true);
    const tensor v = tensor_of(dtype, d_v, 1, len_kv, H, ROWS_THEN_HEADS, true);
    const double largest = dtype == FA_BF16 ? 0x1.fep127 : 0x1.fffffep127;
    for (int64_t e = 0; e < q.num_elements; e++)
        fa_store_element(q.view.data, e, e % D == 0 ? score * (1 + (double)e / (64 * D)) : 0, dtype);
    for (int64_t e = 0; e < k.num_elements; e++) fa_store_element(k.view.data, e, e % D == 0, dtype);
    for (int64_t e = 0; e < v.num_elements; e++) fa_store_element(v.view.data, e, largest / 2, dtype);
    p.q = q.view, p.o = o.view, p.k = k.view, p.v = v.view;
    alloc_row_stats(&p, &p.lse, LEN_Q, true);
    run_on(FA_ISA_SCALAR, 1, &p, true);
    for (int64_t row = 0; row < H * LEN_Q; row++) {
        const double rounded = fa_load_element(q.view.data, row * D, dtype), of_keys = log((double)len_kv);
        const double expected = rounded + of_keys, unit = dtype == FA_F32 ? 1e-7 : 1e-6;
        const double lse = p.lse.data[row % H * p.lse.stride_h + row / H];
        if (!(fabs(lse - expected) <= unit * (1 + fabs(rounded) + of_keys)))
            fail_msg("%s, d_v %d, score %g, %d keys: lse %.9g, expected %.9g", fa_dtype_name(dtype), (int)d_v, rounded,
                     (int)len_kv, lse, expected);
    }
    const double tolerance = fmax(tolerance_of_dtype(dtype), 1e-7 * (double)len_kv);
    for (int64_t e = 0; e < o.num_elements; e++)
        if (!(fabs(fa_load_element(o.view.data, e, dtype) / (largest / 2) - 1) <= tolerance))
            fail_msg("%s, d_v %d, score %g, %d keys: o %g", fa_dtype_name(dtype), (int)d_v, score, (int)len_kv,
                     fa_load_element(o.view.data, e, dtype));
    guarded_free_all();
}

/* A sum of three values of V is no float. Above 2^29 the part of P that prevents such sums vanishes beside a score. */
static void test_equal_scores(void **state) {
    (void)state;
    static const double scores[] = {0, 0.3, -5, 20, -23.75, 700.3, -12345, 0x1.fp23, 0x1p24, -0x1p26, 0x1p30, -1e30};
    for (int64_t d_v = 40; d_v <= 48; d_v += 8) /* In bf16 attn_fwd_sm80 takes v with as many columns as k. */
        for (int dtype = FA_BF16; dtype <= FA_F32; dtype++)
            for (size_t i = 0; i < COUNT(scores); i++)
                for (int64_t len_kv = 1; len_kv < 400; len_kv = 3 * len_kv + 1)
                    check_equal_scores((fa_dtype)dtype, d_v, scores[i], len_kv);
}

/* s_dmask of random problems on the emulated GPU: zeros and signs are the reference's, and magnitudes are close. Rows
 * and columns round up the lengths, to odd sizes too. */
static void check_s_dmask(uint64_t seed, fa_dtype dtype) {
    random_source r = {seed};
    test_case c = case_make(seed, FA_FWD, dtype);
    fa_problem *p = &c.p;
    p->qv = (fa_view){0};
    if (p->dropout_p == 0 && random_chance(&r, 80))
        p->dropout_p = 0.3, p->keep_max = 178, p->seed = seed, p->offset = 7;
    p->s_dmask_rows = p->len_q + random_below(&r, 70), p->s_dmask_cols = p->len_kv + random_below(&r, 70);
    const int64_t num = p->b * p->h * p->s_dmask_rows * p->s_dmask_cols;
    const size_t bytes = (size_t)num * fa_dtype_bytes(dtype);
    void *ours = guarded_alloc(bytes, 16, c.at_end && bytes % 16 == 0), *exact = guarded_alloc(bytes, 16, false);
    p->s_dmask = exact;
    (fa_reference_s_dmask)(p, &test_pool);
    p->s_dmask = ours;
    if (num) fa_reference_s_dmask(p, &test_pool);
    for (int64_t i = 0; i < num; i++) {
        const double x = fa_load_element(ours, i, dtype), y = fa_load_element(exact, i, dtype);
        if (signbit(x) == signbit(y) && fabs(x - y) <= tolerance_of_dtype(dtype) + 3e-5) continue;
        case_print(&c);
        fail_msg("%s: %g and not %g in row %d, column %d", fa_dtype_name(dtype), x, y,
                 (int)(i / p->s_dmask_cols % p->s_dmask_rows), (int)(i % p->s_dmask_cols));
    }
    guarded_free_all();
}

static void test_s_dmask(void **state) {
    (void)state;
    for (int dtype = FA_F16; dtype <= FA_F32; dtype++)
        for (uint64_t seed = 0; seed < 39; seed++) check_s_dmask(seed, (fa_dtype)dtype);
}

/* -------------------------------------------------------------------------------------------------------------- */

static int replay(uint64_t seed) {
    bool good = true;
    for (int pass = FA_FWD; pass <= FA_BWD; pass++)
        for (int dtype = FA_F16; dtype <= (pass == FA_FWD ? FA_E4M3 : FA_F64); dtype++)
            if (!IS_CUDA || dtype != FA_F64) good = check_case(seed, (fa_pass)pass, (fa_dtype)dtype, true) && good;
    return !good;
}

int main(int argc, char **argv) {
    is_emulation = argc > 1 && !strcmp(argv[1], "--emulated");
    fa_cpu_detect(&machine);
    for (int isa = FA_ISA_REFERENCE + 1; is_emulation && isa < FA_NUM_ISAS; isa++)
        machine.isa_legal[isa] = isa == FA_ISA_AVX512BF16 || isa == FA_ISA_AMX;
    if (is_emulation) machine.isa = FA_ISA_AMX;
    for (int isa = 0; IS_CUDA && isa < FA_NUM_ISAS; isa++) machine.isa_legal[isa] = isa == FA_ISA_SCALAR;
    has_whole_tiles = argc > 3 && !strcmp(argv[3], "--whole-tiles"); /* replays a case of test_whole_tiles */
    is_short = argc > 3 && !strcmp(argv[3], "--short");
    has_16_bytes = has_whole_tiles || is_short || (argc > 3 && !strcmp(argv[3], "--16-bytes"));
#if defined(CHECK_CUDA)
    if (is_short) gpu_kernels = "any,short";
#endif
    if (argc > 2 && !strcmp(argv[1], "--seed")) return replay(strtoull(argv[2], NULL, 10));
    if (argc > 1 && !strcmp(argv[1], "--time")) return time_kernels(argc > 2 ? argv[2] : ""), 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_visible_keys),
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_dropout_patch),
        cmocka_unit_test(test_conversion),
        cmocka_unit_test(test_append),
        cmocka_unit_test(test_reference_s_dmask),
        cmocka_unit_test(test_reference_gradients),
        cmocka_unit_test(test_fwd_f32),
        cmocka_unit_test(test_fwd_bf16),
        cmocka_unit_test(test_fwd_f16),
        cmocka_unit_test(test_fwd_e4m3),
        cmocka_unit_test(test_e4m3_codes),
        cmocka_unit_test(test_fwd_f64),
        cmocka_unit_test(test_bwd_f32),
        cmocka_unit_test(test_bwd_bf16),
        cmocka_unit_test(test_bwd_f16),
        cmocka_unit_test(test_bwd_f64),
        cmocka_unit_test(test_tasks),
        cmocka_unit_test(test_reasons),
        cmocka_unit_test(test_thread_counts),
        cmocka_unit_test(test_unowned_rows),
        cmocka_unit_test(test_absent_gradients),
        cmocka_unit_test(test_silent_rows),
        cmocka_unit_test(test_denormals),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_infinite_scores),
        cmocka_unit_test(test_16_bytes),
    };
    const struct CMUnitTest emulated_tests[] = {
        cmocka_unit_test(test_fwd_bf16),      cmocka_unit_test(test_bwd_bf16),
        cmocka_unit_test(test_thread_counts), cmocka_unit_test(test_absent_gradients),
        cmocka_unit_test(test_nonfinite),     cmocka_unit_test(test_infinite_scores),
    };
    const struct CMUnitTest cuda_tests[] = {
        cmocka_unit_test(test_append),
        cmocka_unit_test(test_reference_s_dmask),
        cmocka_unit_test(test_silent_rows),
        cmocka_unit_test(test_absent_gradients),
        cmocka_unit_test(test_fwd_f32),
        cmocka_unit_test(test_fwd_bf16),
        cmocka_unit_test(test_fwd_f16),
        cmocka_unit_test(test_bwd_f32),
        cmocka_unit_test(test_bwd_bf16),
        cmocka_unit_test(test_bwd_f16),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_infinite_scores),
        cmocka_unit_test(test_fwd_e4m3),
        cmocka_unit_test(test_16_bytes),
        cmocka_unit_test(test_equal_scores),
        cmocka_unit_test(test_whole_tiles),
        cmocka_unit_test(test_short),
        cmocka_unit_test(test_delta_of_short),
#if defined(CHECK_CUDA)
        cmocka_unit_test(test_rows_of_no_sequence),
#endif
        cmocka_unit_test(test_s_dmask),
    };
    if (getenv("ONLY")) cmocka_set_test_filter(getenv("ONLY"));
    if (IS_CUDA) return cmocka_run_group_tests(cuda_tests, NULL, NULL);
    if (is_emulation) return cmocka_run_group_tests(emulated_tests, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
