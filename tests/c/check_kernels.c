/* Every CPU kernel that this machine can run, held against csrc/cpu/reference.c; the reference held against finite
 * differences of itself and against a naive evaluation; dropout, conversion and cache append against their definitions.
 *
 *   check_kernels                 all tests
 *   check_emulated --emulated     of the kernels that amx_emulation.h stands in for
 *   check_kernels --seed N        one random case in both passes and all dtypes, with its errors
 *   check_kernels --time [part]   GFLOPS of one thread, every kernel with that part in its name
 *
 * The tolerance: with E(x) = max |x - reference in fp64 on the same inputs|, a kernel passes when
 *     E(kernel) <= m E(naive) + a max |reference|,   m = 2 forward, 3 backward,   a = half a unit in the last place
 * (fp32: 1e-6, and in the backward at least of the terms that cancel). Naive rounds every intermediate tensor to the dtype, as a tensor library would (naive.h).
 *
 * Build: make -C tests/c (CC, CFLAGS as usual). */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "cases.h"
#include "naive.h"
#include "pool.h"
#include "cpu/vec_scalar.h"
#include "cpu/elementwise.h"
#include <time.h>

static fa_machine machine;

/* check_cuda: the generic GPU kernels stand in the place of one instruction set. */
#if defined(CHECK_CUDA)
#define IS_CUDA true
#else
#define IS_CUDA false
#endif

#if defined(CHECK_CUDA)
#include "cuda_device.h"
#else
/* plan.c's other branch, which no problem here takes. */
fa_status fa_plan_cuda(const fa_problem *p, const fa_machine *m, fa_plan *plan, fa_error *err);
fa_status fa_plan_cuda(const fa_problem *p, const fa_machine *m, fa_plan *plan, fa_error *err) {
    (void)p, (void)m, (void)plan;
    return fa_fail(err, FA_EUNSUPPORTED, "these tests know no GPU");
}
#endif

static double tolerance_of_dtype(fa_dtype dtype) {
    return dtype == FA_F16 ? 0x1p-11 : dtype == FA_BF16 ? 0x1p-8 : dtype == FA_F32 ? 1e-6 : 1e-14;
}

/* ---- running ------------------------------------------------------------------------------------------------- */

#if defined(CHECK_CUDA)
static void run_on(fa_isa isa, int threads, const fa_problem *p, bool at_end) {
    (void)isa, (void)threads;
    run_on_cuda(p, at_end);
}
#define fa_cpu_append(p, q_rotated, pool) append_on_cuda(p, q_rotated)
#define fa_reference_s_dmask(p, pool)     s_dmask_on_cuda(p)
#else
static void run_on(fa_isa isa, int threads, const fa_problem *p, bool at_end) {
    fa_machine lowered = machine;
    fa_plan plan;
    fa_error err = {""};
    lowered.isa = isa;
    lowered.threads = pool_threads = threads;
    if (fa_plan_make(p, &lowered, &plan, &err)) fail_msg("fa_plan_make: %s", err.text);
    assert_true(plan.kernel[0] && memchr(plan.kernel, 0, sizeof plan.kernel));
    assert_true(plan.threads >= 1 && plan.threads <= threads && plan.isa <= isa);
    void *workspace = guarded_alloc(plan.workspace_bytes, 64, at_end);
    fa_cpu_run(p, &plan, workspace, &test_pool);
}
#endif

static void run_reference(const fa_problem *p) {
    pool_threads = 2;
    (p->pass == FA_FWD ? fa_reference_fwd : fa_reference_bwd)(p, NULL, NULL, &test_pool);
}

/* o and lse, which a backward problem takes as inputs. */
static void run_forward_reference(const fa_problem *p) {
    fa_problem forward = *p;
    forward.pass = FA_FWD;
    run_reference(&forward);
}

/* ---- comparing ----------------------------------------------------------------------------------------------- */

typedef struct {
    double error, largest; /* max |x - reference|; max |reference| */
} deviation;

/* All rows of one output that belong to a sequence. A NaN on one side only is an infinite error. */
static deviation compare(const fa_problem *p, const fa_view *x, fa_dtype dtype, const fa_view *reference, bool is_key) {
    deviation worst = {0, 0};
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t row = 0; row < (is_key ? s.len_kv : s.len_q); row++)
            for (int64_t head = 0; head < (is_key ? p->h_kv : p->h); head++) {
                int64_t offset = is_key ? fa_key_offset(p, x, &s, row, head) : fa_query_offset(x, &s, row, head);
                for (int64_t i = 0; i < p->d; i++) {
                    double a = fa_load_element(x->data, offset + i, dtype);
                    double b = ((const double *)reference->data)[offset + i];
                    double error = isnan(a) && isnan(b) ? 0 : fabs(a - b);
                    if (!(error <= worst.error)) worst.error = isnan(error) ? INFINITY : error;
                    if (fabs(b) > worst.largest) worst.largest = fabs(b);
                }
            }
    }
    return worst;
}

/* Nothing but rows of sequences was written: after wiping those rows, every byte is 0xff again. */
static bool is_clean_outside(const fa_problem *p, const tensor *t, bool is_key) {
    size_t element = fa_dtype_bytes(p->dtype), bytes = (size_t)t->num_elements * element;
    unsigned char *copy = malloc(bytes + 1);
    memcpy(copy, t->view.data, bytes);
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t row = 0; row < (is_key ? s.len_kv : s.len_q); row++)
            for (int64_t head = 0; head < (is_key ? p->h_kv : p->h); head++) {
                int64_t offset =
                    is_key ? fa_key_offset(p, &t->view, &s, row, head) : fa_query_offset(&t->view, &s, row, head);
                memset(copy + (size_t)offset * element, 0xff, (size_t)p->d * element);
            }
    }
    bool clean = true;
    for (size_t i = 0; i < bytes; i++) clean = clean && copy[i] == 0xff;
    free(copy);
    return clean;
}

static double compare_row_stats(const fa_problem *p, const fa_row_stats *x, const fa_row_stats *reference) {
    double worst = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t head = 0; head < p->h; head++)
            for (int64_t i = 0; i < s.len_q; i++) {
                double a = *fa_row_stat(x, &s, i, head), b = *fa_row_stat(reference, &s, i, head);
                if (a == b || (isnan(a) && isnan(b))) continue;
                double error = fabs(a - b) / (1 + fabs(b));
                if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
            }
    }
    return worst;
}

/* ---- one random case ----------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    tensor *ours;
    fa_view exact, naive;
    bool is_key;
} output;

static void wipe(tensor *t, fa_dtype dtype) {
    memset(t->view.data, 0xff, (size_t)t->num_elements * fa_dtype_bytes(dtype));
}

static bool check_outputs(const test_case *c, fa_isa isa, output *outputs, int num_outputs, bool verbose) {
    const fa_problem *p = &c->p;
    bool good = true;
    for (int i = 0; i < num_outputs; i++) {
        output *o = &outputs[i];
        deviation ours = compare(p, &o->ours->view, p->dtype, &o->exact, o->is_key);
        deviation naive = compare(p, &o->naive, FA_F64, &o->exact, o->is_key);
        /* dp - delta may cancel to nothing; its rounding errors, summed over rows or keys, do not */
        double num_terms = (double)(p->len_q * p->h / p->h_kv + p->len_kv), scale = ours.largest;
        if (p->pass == FA_BWD && p->dtype == FA_F32) scale = fmax(scale, c->amplitude * sqrt(num_terms));
        double allowed = (p->pass == FA_FWD ? 2 : 3) * naive.error + tolerance_of_dtype(p->dtype) * scale;
        bool clean = is_clean_outside(p, o->ours, o->is_key), close = ours.error <= allowed;
        if (p->dtype == FA_F32 && naive.error > 1e-4 * scale) close = false; /* the reference errs */
        if (verbose || !close || !clean)
            printf("  %-10s %-3s error %.3g of %.3g, naive %.3g%s%s\n", fa_isa_name(isa), o->name, ours.error,
                   ours.largest, naive.error, close ? "" : "  TOO FAR", clean ? "" : "  WROTE OUTSIDE");
        good = good && close && clean;
    }
    return good;
}

/* softmax_d against its definition on the output that the kernel was given. */
static double delta_error(const fa_problem *p) {
    double worst = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t head = 0; head < p->h; head++)
            for (int64_t i = 0; i < s.len_q; i++) {
                double delta = 0;
                int64_t o = fa_query_offset(&p->o, &s, i, head), dout = fa_query_offset(&p->dout, &s, i, head);
                for (int64_t t = 0; t < p->d && isfinite(*fa_row_stat(&p->lse, &s, i, head)); t++)
                    delta +=
                        fa_load_element(p->o.data, o + t, p->dtype) * fa_load_element(p->dout.data, dout + t, p->dtype);
                double error = fabs(*fa_row_stat(&p->softmax_d, &s, i, head) - delta) / (1 + fabs(delta));
                if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
            }
    }
    return worst;
}

static bool check_isa(const test_case *c, fa_isa isa, output *outputs, const fa_row_stats *exact_lse, bool verbose) {
    const bool backward = c->p.pass == FA_BWD;
    const int threads = 1 + (int)(c->seed % 3);
    unsigned before = control_state();
    fa_problem run = c->p;
    for (int i = 0; i < (backward ? 4 : 1); i++) wipe(outputs[i].ours, run.dtype);
    alloc_row_stats(&run, &run.lse, run.cu_seqlens_q ? run.total_q : run.len_q, c->at_end);
    run.pass = FA_FWD;
    run_on(isa, threads, &run, c->at_end);
    run.pass = c->p.pass;
    if (backward) run_on(isa, threads, &run, c->at_end);

    bool good = backward ? check_outputs(c, isa, outputs + 1, 3, verbose) : check_outputs(c, isa, outputs, 1, verbose);
    double error = backward ? delta_error(&run) : compare_row_stats(&run, &run.lse, exact_lse);
    if (error > 2e-5) {
        printf("  %s: %s off by %g\n", fa_isa_name(isa), backward ? "softmax_d" : "lse", error);
        good = false;
    }
    if (control_state() != before) {
        printf("  %s changed the caller's floating-point control state\n", fa_isa_name(isa));
        good = false;
    }
    return good;
}

/* The gradients that are judged follow from the kernel's own forward, as a user's do. */
static bool check_case(uint64_t seed, fa_pass pass, fa_dtype dtype, bool verbose) {
    test_case c = case_make(seed, pass, dtype);
    fa_problem *p = &c.p, exact = *p;
    const int num_tensors = pass == FA_BWD ? 4 : 1;
    if (verbose) case_print(&c);

    /* the same problem in fp64, and the naive results beside it */
    exact.dtype = FA_F64;
    exact.q = tensor_widened(p, &c.q, c.at_end).view;
    exact.k = tensor_widened(p, &c.k, c.at_end).view;
    exact.v = tensor_widened(p, &c.v, c.at_end).view;
    exact.dout = tensor_widened(p, &c.dout, c.at_end).view;
    naive_results naive = {.o = {0}};
    output outputs[] = {{"o", &c.o, .is_key = false},
                        {"dq", &c.dq, .is_key = false},
                        {"dk", &c.dk, .is_key = true},
                        {"dv", &c.dv, .is_key = true}};
    fa_view *exact_views[] = {&exact.o, &exact.dq, &exact.dk, &exact.dv};
    fa_view *naive_views[] = {&naive.o, &naive.dq, &naive.dk, &naive.dv};
    for (int i = 0; i < num_tensors; i++) {
        outputs[i].exact = *exact_views[i] = tensor_widened(p, outputs[i].ours, c.at_end).view;
        outputs[i].naive = *naive_views[i] = tensor_widened(p, outputs[i].ours, c.at_end).view;
    }
    alloc_row_stats(p, &exact.lse, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
    run_forward_reference(&exact);
    if (pass == FA_BWD) run_reference(&exact);
    naive_attention(p, &naive);

    bool good = true;
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || (isa == FA_ISA_REFERENCE && seed % 8)) continue;
        good = check_isa(&c, (fa_isa)isa, outputs, &exact.lse, verbose) && good;
    }
    if (!good) case_print(&c);
    guarded_free_all();
    return good;
}

#if defined(__has_feature)
#define SANITIZED (__has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer))
#elif defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static void check_seeds(fa_pass pass, fa_dtype dtype, uint64_t num_seeds) {
    bool good = true;
    if (SANITIZED) num_seeds = (num_seeds + 1) / 2; /* they take eight times as long */
    if (IS_CUDA && !getenv("ALL_SEEDS")) num_seeds = COUNT(head_dims);
    for (uint64_t seed = 0; seed < num_seeds; seed++) good = check_case(seed, pass, dtype, false) && good;
    assert_true(good);
}

static void test_fwd_f32(void **state) { (void)state, check_seeds(FA_FWD, FA_F32, 65); }
static void test_fwd_bf16(void **state) { (void)state, check_seeds(FA_FWD, FA_BF16, 65); }
static void test_fwd_f16(void **state) { (void)state, check_seeds(FA_FWD, FA_F16, 39); }
static void test_fwd_f64(void **state) { (void)state, check_seeds(FA_FWD, FA_F64, 13); }
static void test_bwd_f32(void **state) { (void)state, check_seeds(FA_BWD, FA_F32, 65); }
static void test_bwd_bf16(void **state) { (void)state, check_seeds(FA_BWD, FA_BF16, 65); }
static void test_bwd_f16(void **state) { (void)state, check_seeds(FA_BWD, FA_F16, 39); }
static void test_bwd_f64(void **state) { (void)state, check_seeds(FA_BWD, FA_F64, 13); }

/* ---- the same bits for any number of threads ----------------------------------------------------------------- */

static void check_thread_counts(fa_pass pass, fa_dtype dtype, uint64_t seed) {
    static const int counts[] = {1, 2, 3, 7};
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || (isa == FA_ISA_REFERENCE && seed % 4)) continue;
        test_case c = case_make(seed, pass, dtype);
        fa_problem *p = &c.p;
        if (pass == FA_BWD) run_forward_reference(p);
        tensor *outputs[] = {&c.o, &c.dq, &c.dk, &c.dv};
        int first = pass == FA_FWD ? 0 : 1, end = pass == FA_FWD ? 1 : 4;
        void *expected[4] = {NULL};
        for (int n = 0; n < (int)COUNT(counts); n++) {
            run_on((fa_isa)isa, counts[n], p, c.at_end);
            for (int i = first; i < end; i++) {
                size_t bytes = (size_t)outputs[i]->num_elements * fa_dtype_bytes(dtype);
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
    for (uint64_t seed = 1000; seed < 1012; seed++) {
        check_thread_counts(FA_FWD, seed % 2 ? FA_F32 : FA_BF16, seed);
        check_thread_counts(FA_BWD, seed % 2 ? FA_F32 : FA_BF16, seed);
    }
}

/* ---- absent gradients ---------------------------------------------------------------------------------------- */

/* Any subset of dq, dk, dv may be asked for; what is asked for does not depend on the rest. */
static void test_absent_gradients(void **state) {
    (void)state;
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa]) continue;
        for (uint64_t seed = 2000; seed < 2004; seed++) {
            test_case c = case_make(seed, FA_BWD, seed % 2 ? FA_F32 : FA_BF16);
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
                    wipe(outputs[i], p->dtype);
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

/* Vector kernels count denormal numbers as zero (elsewhere than here they cost a hundred times as much as others), whichever
 * thread they are on, and leave the thread as they found it: pool.h watches the pool's threads, this test the caller. */
static void test_denormals(void **state) {
    (void)state;
    static const struct {
        fa_pass pass;
        int64_t len_q;
    } kernels[] = {{FA_FWD, 1}, {FA_FWD, 150}, {FA_BWD, 150}}; /* decode, tiles */
    for (int isa = FA_ISA_AVX2; isa < FA_NUM_ISAS; isa++) {
        for (int n = 0; n < 6 && machine.isa_legal[isa] && control_state() != 0; n++) {
            fa_problem p = {
                .pass = kernels[n / 2].pass, .dtype = FA_F32, .b = 2, .h = 2, .h_kv = 2, .d = 24, .scale = 0.2};
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

/* Rows above a causal mask, and rows whose lse says that they saw no key, with either sign: whatever q and dout hold
 * there, their gradients are zero and nobody else's change by a bit. */
static void test_silent_rows(void **state) {
    (void)state;
    enum { LEN_Q = 90, LEN_KV = 73, NUM_HIDDEN = LEN_Q - LEN_KV };
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
        for (int dtype = FA_F16; dtype <= FA_F32 && machine.isa_legal[isa]; dtype++) {
            fa_problem p = {.pass = FA_BWD, .dtype = (fa_dtype)dtype, .b = 1, .h = 1, .h_kv = 1, .d = 24, .scale = 0.2};
            p.len_q = p.total_q = LEN_Q, p.len_kv = p.total_kv = LEN_KV;
            p.window_left = -1, p.window_right = 0;
            tensor all[8];
            fa_view *views[] = {&p.q, &p.k, &p.v, &p.dout, &p.o, &p.dq, &p.dk, &p.dv};
            random_source r = {23};
            for (int i = 0; i < 8; i++) {
                all[i] = tensor_make(&p, 1, i == 1 || i == 2 || i > 5 ? LEN_KV : LEN_Q, 1, ROWS_THEN_HEADS, true);
                *views[i] = all[i].view;
                for (int64_t n = 0; n < all[i].num_elements && i < 4; n++)
                    fa_store_element(all[i].view.data, n, random_normal(&r), p.dtype);
            }
            alloc_row_stats(&p, &p.lse, LEN_Q, true);
            alloc_row_stats(&p, &p.softmax_d, LEN_Q, true);
            run_forward_reference(&p);
            p.lse.data[40] = INFINITY, p.lse.data[61] = -INFINITY;

            void *expected[3];
            for (int poisoned = 0; poisoned < 2; poisoned++) {
                for (int row = 0; row < LEN_Q; row++) {
                    if (row >= NUM_HIDDEN && row != 40 && row != 61) continue;
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
                    wipe(&all[5 + i], p.dtype);
                }
            }
            for (int64_t i = 0; i < p.d; i++) {
                assert_true(fa_load_element(expected[0], 40 * p.d + i, p.dtype) == 0);
                assert_true(fa_load_element(expected[0], 61 * p.d + i, p.dtype) == 0);
                assert_true(fa_load_element(expected[0], i, p.dtype) == 0);
                assert_true(fa_load_element(expected[1], i, p.dtype) != 0);
            }
            for (int i = 0; i < 3; i++) free(expected[i]);
            guarded_free_all();
        }
    }
}

/* ---- NaN and infinities --------------------------------------------------------------------------------------- */

/* Elements, whole rows among them, become NaN or infinite. Where a bias or large scores let p underflow to 0 in fp32 but
 * not in the reference, 0 x inf is not what the reference has, and only NaN is planted. */
static void plant_nonfinite(const test_case *c, random_source *r) {
    const tensor *inputs[] = {&c->k, &c->v, &c->q, &c->dout};
    const int num_plants = 1 + (int)random_below(r, 3), num_values = c->p.alibi_slopes || c->amplitude > 1 ? 1 : 3;
    for (int n = 0; n < num_plants; n++) {
        const tensor *t = inputs[random_below(r, c->p.pass == FA_BWD ? 4 : 3)];
        const double values[] = {NAN, INFINITY, -INFINITY}, value = values[random_below(r, num_values)];
        const int64_t count = random_chance(r, 50) ? c->p.d : 1;
        if (t->num_elements < count) continue;
        const int64_t at = random_below(r, t->num_elements - count + 1);
        for (int64_t i = at; i < at + count; i++) fa_store_element(t->view.data, i, value, c->p.dtype);
    }
}

/* NaN in the same places as in the reference, infinities with the same sign, and the rest close. */
static bool is_same_kind(const void *x, const void *reference, int64_t num_elements, fa_dtype dtype) {
    double largest = 0, worst = 0;
    bool same = true;
    for (int64_t i = 0; i < num_elements; i++) {
        const double a = fa_load_element(x, i, dtype), b = fa_load_element(reference, i, dtype);
        if (isfinite(a) && isfinite(b))
            worst = fmax(worst, fabs(a - b)), largest = fmax(largest, fabs(b));
        else
            same = same && (a == b || (isnan(a) && isnan(b)));
    }
    return same && worst <= fmax(1e-4, 8 * tolerance_of_dtype(dtype)) * (1 + largest);
}

static bool check_nonfinite(uint64_t seed, fa_pass pass, fa_dtype dtype) {
    test_case c = case_make(seed, pass, dtype);
    fa_problem *p = &c.p;
    random_source r = {seed};
    const struct {
        const char *name;
        tensor *ours;
    } outputs[] = {{"o", &c.o}, {"dq", &c.dq}, {"dk", &c.dk}, {"dv", &c.dv}};
    const int first = pass == FA_BWD ? 1 : 0, end = pass == FA_BWD ? 4 : 1;
    void *expected[4];
    bool good = true;
    plant_nonfinite(&c, &r);
    run_forward_reference(p);
    run_reference(p);
    const fa_row_stats lse = p->lse;
    for (int i = first; i < end; i++) {
        const size_t bytes = (size_t)outputs[i].ours->num_elements * fa_dtype_bytes(dtype);
        memcpy(expected[i] = malloc(bytes + 1), outputs[i].ours->view.data, bytes);
    }
    for (int isa = FA_ISA_REFERENCE + 1; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa]) continue;
        if (pass == FA_FWD) alloc_row_stats(p, &p->lse, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
        for (int i = first; i < end; i++) wipe(outputs[i].ours, dtype);
        run_on((fa_isa)isa, 1 + (int)(seed % 3), p, c.at_end);
        for (int i = first; i < end; i++) {
            if (is_same_kind(outputs[i].ours->view.data, expected[i], outputs[i].ours->num_elements, dtype)) continue;
            printf("  %s: %s is not what the reference has\n", fa_isa_name((fa_isa)isa), outputs[i].name);
            good = false;
        }
        if (compare_row_stats(p, &p->lse, &lse) < 2e-5) continue;
        printf("  %s: lse is not what the reference has\n", fa_isa_name((fa_isa)isa));
        good = false;
    }
    if (!good) case_print(&c);
    for (int i = first; i < end; i++) free(expected[i]);
    guarded_free_all();
    return good;
}

/* Masked, padded, windowed or visible: NaN and infinities reach what the reference lets them reach, and nothing else. */
static void test_nonfinite(void **state) {
    (void)state;
    const uint64_t first = 5000, num_seeds = IS_CUDA || SANITIZED ? COUNT(head_dims) : 8 * COUNT(head_dims);
    bool good = true;
    for (uint64_t seed = first; seed < first + num_seeds; seed++)
        for (int dtype = FA_F16; dtype <= FA_F32; dtype++) {
            good = check_nonfinite(seed, FA_FWD, (fa_dtype)dtype) && good;
            good = check_nonfinite(seed, FA_BWD, (fa_dtype)dtype) && good;
        }
    assert_true(good);
}

/* ---- the reference itself ------------------------------------------------------------------------------------ */

static double weighted_output(const fa_problem *p, const tensor *o, const tensor *dout) {
    double sum = 0;
    run_forward_reference(p);
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t i = 0; i < s.len_q; i++)
            for (int64_t head = 0; head < p->h; head++)
                for (int64_t t = 0; t < p->d; t++) {
                    double weight = ((double *)dout->view.data)[fa_query_offset(&dout->view, &s, i, head) + t];
                    if (!isnan(weight)) /* a row that sees nothing */
                        sum += weight * ((double *)o->view.data)[fa_query_offset(&o->view, &s, i, head) + t];
                }
    }
    return sum;
}

/* The derivative of sum(dout o) along a random direction in q, k and v: by the backward pass and by two forwards. */
static void test_reference_gradients(void **state) {
    (void)state;
    for (uint64_t seed = 3000; seed < 3060; seed++) {
        random_source r = {seed};
        test_case c = case_make(seed, FA_BWD, FA_F64);
        fa_problem *p = &c.p;
        if (p->len_q > 140 || p->len_kv > 140 || p->d > 64) {
            guarded_free_all();
            continue;
        }
        double step = 1e-6, slope = 0;
        weighted_output(p, &c.o, &c.dout);
        run_reference(p);
        tensor *inputs[] = {&c.q, &c.k, &c.v}, *gradients[] = {&c.dq, &c.dk, &c.dv};
        double *directions[3];
        for (int n = 0; n < 3; n++) {
            directions[n] = calloc((size_t)inputs[n]->num_elements + 1, sizeof(double));
            for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
                fa_sequence s = fa_sequence_at(p, b_idx);
                for (int64_t row = 0; row < (n ? s.len_kv : s.len_q); row++)
                    for (int64_t head = 0; head < (n ? p->h_kv : p->h); head++)
                        for (int64_t t = 0; t < p->d; t++) {
                            const fa_view *x = &inputs[n]->view, *g = &gradients[n]->view;
                            int64_t at =
                                t + (n ? fa_key_offset(p, x, &s, row, head) : fa_query_offset(x, &s, row, head));
                            int64_t from =
                                t + (n ? fa_key_offset(p, g, &s, row, head) : fa_query_offset(g, &s, row, head));
                            directions[n][at] = random_normal(&r);
                            slope += directions[n][at] * ((double *)g->data)[from];
                        }
            }
        }
        double ends[2];
        for (int side = 0; side < 2; side++) {
            for (int n = 0; n < 3; n++)
                for (int64_t i = 0; i < inputs[n]->num_elements; i++)
                    ((double *)inputs[n]->view.data)[i] += (side ? -2 : 1) * step * directions[n][i];
            ends[side] = weighted_output(p, &c.o, &c.dout);
        }
        double numeric = (ends[0] - ends[1]) / (2 * step);
        if (!(fabs(numeric - slope) <= 2e-5 * (1 + fabs(slope)) * c.amplitude)) {
            case_print(&c);
            fail_msg("backward says %.12g, two forwards say %.12g", slope, numeric);
        }
        for (int n = 0; n < 3; n++) free(directions[n]);
        guarded_free_all();
    }
}

/* Signs follow the generator, magnitudes are exp(s - row max), zero outside. */
static void test_reference_s_dmask(void **state) {
    (void)state;
    enum { LEN_Q = 19, LEN_KV = 37, ROWS = 128, COLS = 128, D = 8 };
    float q[LEN_Q * D], k[LEN_KV * D];
    static float s_dmask[ROWS * COLS];
    random_source r = {5};
    for (int i = 0; i < LEN_Q * D; i++) q[i] = (float)random_normal(&r);
    for (int i = 0; i < LEN_KV * D; i++) k[i] = (float)random_normal(&r);
    fa_problem p = {.dtype = FA_F32, .b = 1, .h = 1, .h_kv = 1, .d = D, .len_q = LEN_Q, .len_kv = LEN_KV, .scale = 0.3};
    p.q = (fa_view){q, 0, D, D}, p.k = (fa_view){k, 0, D, D};
    p.window_left = -1, p.window_right = 0;
    p.dropout_p = 0.3, p.keep_max = 178, p.seed = 99, p.offset = 7;
    p.s_dmask = s_dmask, p.s_dmask_rows = ROWS, p.s_dmask_cols = COLS;
    memset(s_dmask, 0xff, sizeof s_dmask);
    fa_reference_s_dmask(&p, &test_pool);
    int num_dropped = 0;
    for (int i = 0; i < ROWS; i++) {
        float largest = 0;
        for (int j = 0; j < COLS; j++) {
            float x = s_dmask[i * COLS + j];
            bool visible = i < LEN_Q && j < LEN_KV && j <= i + LEN_KV - LEN_Q;
            bool dropped = visible && fa_dropout_byte(99, 7, i, j) > 178;
            assert_true(visible ? fabsf(x) > 0 && fabsf(x) <= 1 : x == 0);
            assert_int_equal(!!signbit(x), dropped);
            largest = fmaxf(largest, fabsf(x));
            num_dropped += dropped;
        }
        assert_true(largest == (i < LEN_Q ? 1.0f : 0.0f));
    }
    assert_in_range(num_dropped, 100, 250);
}

/* ---- dropout and conversion ---------------------------------------------------------------------------------- */

static void test_philox_known_answers(void **state) {
    (void)state;
    static const struct {
        uint64_t seed, low;
        uint32_t row_patch, col_patch, out[4];
    } known[] = {
        {0, 0, 0, 0, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
        {UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
        {0x299f31d0a4093822,
         0x85a308d3243f6a88,
         0x13198a2e,
         0x03707344,
         {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t out[4];
        fa_philox(known[i].seed, known[i].low, known[i].row_patch, known[i].col_patch, out);
        assert_memory_equal(out, known[i].out, sizeof out);
    }
}

static void test_dropout_patch(void **state) {
    (void)state;
    random_source r = {11};
    for (int n = 0; n < 200; n++) {
        uint64_t seed = random_bits(&r),
                 stream = n % 2 ? random_bits(&r) : 0xffffffffu - (uint64_t)random_below(&r, 40);
        int64_t row_patch = random_below(&r, 1000), col_patch = random_below(&r, 1000);
        uint8_t bytes[FA_PATCH_COLS][FA_PATCH_ROWS];
        dropout_patch(seed, stream, row_patch, col_patch, bytes);
        for (int col = 0; col < FA_PATCH_COLS; col++)
            for (int row = 0; row < FA_PATCH_ROWS; row++)
                assert_int_equal(bytes[col][row], fa_dropout_byte(seed, stream, row_patch * FA_PATCH_ROWS + row,
                                                                  col_patch * FA_PATCH_COLS + col));
    }
}

static void test_conversion(void **state) {
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) { /* widening is exact, narrowing undoes it */
        uint16_t x = (uint16_t)bits;
        bool is_nan_f16 = (x & 0x7fff) > 0x7c00, is_nan_bf16 = (x & 0x7fff) > 0x7f80;
        assert_int_equal(fa_f16_from_f32(fa_f32_from_f16(x)), is_nan_f16 ? x | 0x200 : x);
        assert_int_equal(fa_bf16_from_f32(fa_f32_from_bf16(x)), is_nan_bf16 ? x | 0x40 : x);
        if (is_nan_f16 || (x & 0x7fff) == 0x7c00) continue;
        int exponent = x >> 10 & 31; /* the value by definition */
        double value = ldexp((exponent ? 1024 : 0) + (x & 1023), (exponent ? exponent : 1) - 25);
        assert_true(fa_f32_from_f16(x) == (float)(x & 0x8000 ? -value : value));
    }
    for (uint32_t x = 0; x < 0x7bff; x++) { /* between neighbours: nearest, and ties to even */
        double low = fa_f32_from_f16((uint16_t)x), high = fa_f32_from_f16((uint16_t)(x + 1)), middle = (low + high) / 2;
        assert_int_equal(fa_f16_from_f32((float)middle), x & 1 ? x + 1 : x);
        assert_int_equal(fa_f16_from_f32(nextafterf((float)middle, 0)), x);
        assert_int_equal(fa_f16_from_f32(nextafterf((float)middle, INFINITY)), x + 1);
    }
    for (uint32_t x = 0; x < 0x7f7f; x++) {
        float middle = fa_f32_of_bits(x << 16 | 0x8000);
        assert_int_equal(fa_bf16_from_f32(middle), x & 1 ? x + 1 : x);
        assert_int_equal(fa_bf16_from_f32(fa_f32_of_bits(x << 16 | 0x7fff)), x);
        assert_int_equal(fa_bf16_from_f32(fa_f32_of_bits(x << 16 | 0x8001)), x + 1);
    }
    assert_int_equal(fa_f16_from_f32(65519.996f), 0x7bff);
    assert_int_equal(fa_f16_from_f32(65520), 0x7c00);
    assert_int_equal(fa_f16_from_f32(-INFINITY), 0xfc00);
    assert_int_equal(fa_bf16_from_f32(3.4e38f), 0x7f80);
    assert_true(isnan(fa_f32_from_bf16(fa_bf16_from_f32(fa_f32_of_bits(0x7f800001)))));
}

/* ---- append -------------------------------------------------------------------------------------------------- */

enum { CACHE_LEN = 40, LEN_NEW = 5, APPEND_B = 2, APPEND_H = 4, APPEND_H_KV = 2, APPEND_D = 24, ROTARY_DIM = 16 };

static double turned(const fa_problem *p, const tensor *x, int64_t offset, int64_t t, int64_t position) {
    int64_t pairs = p->rotary_dim / 2;
    double self = fa_load_element(x->view.data, offset + t, p->dtype);
    if (t >= p->rotary_dim || position >= p->rotary_rows) return self;
    int64_t pair = p->rotary_interleaved ? t / 2 : t % pairs;
    bool is_second = p->rotary_interleaved ? t % 2 : t >= pairs;
    int64_t step = p->rotary_interleaved ? 1 : pairs;
    double other = fa_load_element(x->view.data, offset + t + (is_second ? -step : step), p->dtype);
    double cos = fa_load_element(p->rotary_cos, position * pairs + pair, p->dtype);
    double sin = fa_load_element(p->rotary_sin, position * pairs + pair, p->dtype);
    return is_second ? other * sin + self * cos : self * cos - other * sin;
}

static void check_append(fa_dtype dtype, bool paged, bool rotary, bool interleaved, bool q_by_row) {
    random_source r = {17};
    fa_problem p = {.dtype = dtype, .b = APPEND_B, .h = APPEND_H, .h_kv = APPEND_H_KV, .d = APPEND_D};
    p.len_q = 3, p.len_kv = CACHE_LEN, p.len_new = LEN_NEW;
    int32_t used[] = {29, 0}, leftpad[] = {4, 0}, rows[] = {2, 0}, table[3 * 8];
    p.seqused_k = used, p.leftpad_k = leftpad, p.cache_batch_idx = rows, p.cache_rows = 3;
    tensor q = tensor_make(&p, p.b, p.len_q, p.h, PADDED_ROWS, true),
           q_rotated = tensor_make(&p, p.b, p.len_q, p.h, 0, true);
    tensor k_new = tensor_make(&p, p.b, LEN_NEW, p.h_kv, HEADS_THEN_ROWS, true);
    tensor v_new = tensor_make(&p, p.b, LEN_NEW, p.h_kv, PADDED_ROWS, true);
    if (paged) {
        p.page_size = 7, p.block_table_stride = 8, p.block_table_cols = 8, p.num_pages = 24;
        random_shuffle(&r, table, 24);
        p.block_table = table;
    }
    tensor k = tensor_make(&p, paged ? 24 : 3, paged ? 7 : CACHE_LEN, p.h_kv, ROWS_THEN_HEADS, true);
    tensor v = tensor_make(&p, paged ? 24 : 3, paged ? 7 : CACHE_LEN, p.h_kv, HEADS_THEN_ROWS, true);
    p.q = q.view, p.k = k.view, p.v = v.view, p.k_new = k_new.view, p.v_new = v_new.view;
    tensor *inputs[] = {&q, &k_new, &v_new};
    for (int n = 0; n < 3; n++)
        for (int64_t i = 0; i < inputs[n]->num_elements; i++)
            fa_store_element(inputs[n]->view.data, i, random_normal(&r), dtype);
    if (rotary) {
        p.rotary_dim = ROTARY_DIM, p.rotary_rows = 32, p.rotary_interleaved = interleaved, p.rotary_q_by_row = q_by_row;
        void *cos_sin = guarded_alloc(2 * 32 * 8 * fa_dtype_bytes(dtype), fa_dtype_bytes(dtype), true);
        for (int i = 0; i < 2 * 32 * 8; i++) fa_store_element(cos_sin, i, random_normal(&r), dtype);
        p.rotary_cos = cos_sin, p.rotary_sin = (char *)cos_sin + 32 * 8 * fa_dtype_bytes(dtype);
    }
    pool_threads = 3;
    fa_cpu_append(&p, rotary ? q_rotated.view.data : NULL, &test_pool);

    double eps = 4 * tolerance_of_dtype(dtype);
    int64_t num_written = 0;
    for (int64_t b = 0; b < APPEND_B; b++) {
        for (int64_t t = 0; t < LEN_NEW; t++)
            for (int64_t head = 0; head < APPEND_H_KV; head++)
                for (int64_t i = 0; i < APPEND_D; i++) {
                    int64_t position = used[b] + t, page = position, row = rows[b];
                    if (paged) row = table[rows[b] * 8 + position / 7], page = position % 7;
                    int64_t k_at = row * k.view.stride_b + page * k.view.stride_row + head * k.view.stride_h + i;
                    int64_t v_at = row * v.view.stride_b + page * v.view.stride_row + head * v.view.stride_h + i;
                    int64_t k_from = b * p.k_new.stride_b + t * p.k_new.stride_row + head * p.k_new.stride_h;
                    int64_t v_from = b * p.v_new.stride_b + t * p.v_new.stride_row + head * p.v_new.stride_h + i;
                    assert_true(fa_load_element(v.view.data, v_at, dtype) ==
                                fa_load_element(v_new.view.data, v_from, dtype));
                    double is = fa_load_element(k.view.data, k_at, dtype),
                           should = turned(&p, &k_new, k_from, i, position);
                    assert_true(rotary ? fabs(is - should) <= eps * (1 + fabs(should)) : is == should);
                    num_written++;
                }
        for (int64_t t = 0; t < p.len_q && rotary; t++)
            for (int64_t head = 0; head < APPEND_H; head++)
                for (int64_t i = 0; i < APPEND_D; i++) {
                    int64_t from = b * p.q.stride_b + t * p.q.stride_row + head * p.q.stride_h;
                    int64_t at = ((b * p.len_q + t) * APPEND_H + head) * APPEND_D + i;
                    double should = turned(&p, &q, from, i, used[b] + (q_by_row ? t : 0));
                    assert_true(fabs(fa_load_element(q_rotated.view.data, at, dtype) - should) <=
                                eps * (1 + fabs(should)));
                }
    }
    int64_t num_touched = 0;
    for (int64_t i = 0; i < k.num_elements; i++) num_touched += !isnan(fa_load_element(k.view.data, i, dtype));
    assert_int_equal(num_touched, num_written);
    guarded_free_all();
}

static void test_append(void **state) {
    (void)state;
    for (int dtype = FA_F16; dtype <= (IS_CUDA ? FA_F32 : FA_F64); dtype++)
        for (int bits = 0; bits < 16; bits++) check_append((fa_dtype)dtype, bits & 1, bits & 2, bits & 4, bits & 8);
}

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
                    .len_q = LEN,
                    .len_kv = LEN,
                    .total_q = LEN,
                    .total_kv = LEN,
                    .window_left = -1,
                    .window_right = causal ? 0 : -1};
    fa_machine lowered = machine;
    lowered.isa = isa, lowered.threads = pool_threads = 1;
    fa_plan plan;
    fa_error err;
    if (fa_plan_make(&p, &lowered, &plan, &err)) abort();
    if (plan.isa != isa || !strstr(plan.kernel, part)) return;
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

/* -------------------------------------------------------------------------------------------------------------- */

static int replay(uint64_t seed) {
    bool good = true;
    for (int pass = FA_FWD; pass <= FA_BWD; pass++)
        for (int dtype = FA_F16; dtype <= (IS_CUDA ? FA_F32 : FA_F64); dtype++)
            good = check_case(seed, (fa_pass)pass, (fa_dtype)dtype, true) && good;
    return !good;
}

int main(int argc, char **argv) {
    const bool is_emulation = argc > 1 && !strcmp(argv[1], "--emulated");
    fa_cpu_detect(&machine);
    for (int isa = FA_ISA_REFERENCE + 1; is_emulation && isa < FA_NUM_ISAS; isa++)
        machine.isa_legal[isa] = isa == FA_ISA_AVX512BF16 || isa == FA_ISA_AMX;
    if (is_emulation) machine.isa = FA_ISA_AMX;
    for (int isa = 0; IS_CUDA && isa < FA_NUM_ISAS; isa++) machine.isa_legal[isa] = isa == FA_ISA_SCALAR;
    if (argc > 2 && !strcmp(argv[1], "--seed")) return replay(strtoull(argv[2], NULL, 10));
    if (argc > 1 && !strcmp(argv[1], "--time")) return time_kernels(argc > 2 ? argv[2] : ""), 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_dropout_patch),
        cmocka_unit_test(test_conversion),
        cmocka_unit_test(test_append),
        cmocka_unit_test(test_reference_s_dmask),
        cmocka_unit_test(test_reference_gradients),
        cmocka_unit_test(test_fwd_f32),
        cmocka_unit_test(test_fwd_bf16),
        cmocka_unit_test(test_fwd_f16),
        cmocka_unit_test(test_fwd_f64),
        cmocka_unit_test(test_bwd_f32),
        cmocka_unit_test(test_bwd_bf16),
        cmocka_unit_test(test_bwd_f16),
        cmocka_unit_test(test_bwd_f64),
        cmocka_unit_test(test_thread_counts),
        cmocka_unit_test(test_absent_gradients),
        cmocka_unit_test(test_silent_rows),
        cmocka_unit_test(test_denormals),
        cmocka_unit_test(test_nonfinite),
    };
    const struct CMUnitTest emulated_tests[] = {
        cmocka_unit_test(test_fwd_bf16),         cmocka_unit_test(test_bwd_bf16),  cmocka_unit_test(test_thread_counts),
        cmocka_unit_test(test_absent_gradients), cmocka_unit_test(test_nonfinite),
    };
    const struct CMUnitTest cuda_tests[] = {
        cmocka_unit_test(test_append),      cmocka_unit_test(test_reference_s_dmask),
        cmocka_unit_test(test_silent_rows), cmocka_unit_test(test_absent_gradients),
        cmocka_unit_test(test_fwd_f32),     cmocka_unit_test(test_fwd_bf16),
        cmocka_unit_test(test_fwd_f16),     cmocka_unit_test(test_bwd_f32),
        cmocka_unit_test(test_bwd_bf16),    cmocka_unit_test(test_bwd_f16),
        cmocka_unit_test(test_nonfinite),
    };
    if (IS_CUDA) return cmocka_run_group_tests(cuda_tests, NULL, NULL);
    if (is_emulation) return cmocka_run_group_tests(emulated_tests, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
