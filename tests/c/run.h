/* Runs a problem on one instruction set, on the reference or on the emulated GPU, and compares the outputs. cmocka.h
 * must be included before. */
#ifndef FA_TEST_RUN_H
#define FA_TEST_RUN_H

#include "cases.h"
#include "pool.h"

static fa_machine machine;

/* In check_cuda the generic GPU kernels replace the kernels of one instruction set. */
#if defined(CHECK_CUDA)
#define IS_CUDA true
#else
#define IS_CUDA false
#endif

#if defined(CHECK_CUDA)
#include "cuda_device.h"
#endif

static double tolerance_of_dtype(fa_dtype dtype) {
    return dtype == FA_F16    ? 0x1p-11
           : dtype == FA_BF16 ? 0x1p-8
           : dtype == FA_F32  ? 1e-6
           : dtype == FA_E4M3 ? 0x1p-4
                              : 1e-14;
}

/* ---- running ------------------------------------------------------------------------------------------------- */

#if defined(CHECK_CUDA)
static void run_on(fa_isa isa, int threads, const fa_problem *p, bool at_end) {
    (void)isa, (void)threads;
    /* With many SMs heads are walked together, and the keys of few queries are cut into parts. */
    static const int num_sms[] = {1, 5, 40};
    gpu.num_sms = num_sms[(p->len_q + p->h) % 3];
    run_on_cuda(p, at_end);
}
#define fa_cpu_append(p, q_rotated, pool) append_on_cuda(p, q_rotated)
#define fa_reference_s_dmask(p, pool)     s_dmask_on_cuda(p)
#else
static void run_on(fa_isa isa, int threads, const fa_problem *p, bool at_end) {
    fa_machine lowered = machine;
    fa_plan plan;
    lowered.isa = isa;
    lowered.threads = pool_threads = threads;
    fa_plan_cpu(p, &lowered, &plan);
    assert_true(plan.kernel[0] && memchr(plan.kernel, 0, sizeof plan.kernel));
    assert_true(plan.cpu.threads >= 1 && plan.cpu.threads <= threads && plan.cpu.isa <= isa);
    void *workspace = guarded_alloc(plan.workspace_bytes, 64, at_end);
    assert_true(fa_cpu_run(p, &plan, workspace, &test_pool));
}
#endif

static void run_reference(const fa_problem *p) {
    pool_threads = 2;
    (p->pass == FA_FWD ? fa_reference_fwd : fa_reference_bwd)(p, NULL, NULL, &test_pool);
}

/* o and lse are inputs of a backward problem. */
static void run_forward_reference(const fa_problem *p) {
    fa_problem forward = *p;
    forward.pass = FA_FWD;
    run_reference(&forward);
}

/* ---- comparing ----------------------------------------------------------------------------------------------- */

typedef struct {
    double error, largest; /* max |x - reference|; max |reference| */
} deviation;

/* Compares all rows of one output that belong to a sequence. A NaN on only one side counts as an infinite error. */
static deviation compare(const fa_problem *p, const fa_view *x, fa_dtype dtype, int64_t columns,
                         const fa_view *reference, bool is_key) {
    deviation worst = {0, 0};
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t row = 0; row < (is_key ? s.len_kv : s.len_q); row++)
            for (int64_t head = 0; head < (is_key ? p->h_kv : p->h); head++) {
                int64_t offset = is_key ? fa_key_offset(p, x, &s, row, head) : fa_query_offset(x, &s, row, head);
                for (int64_t i = 0; i < columns; i++) {
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

/* Whether only rows of sequences were written. The function wipes these rows, and then every byte must be 0xff
 * again. */
static bool is_clean_outside(const fa_problem *p, const tensor *t, bool is_key) {
    size_t element = fa_dtype_bytes(t->dtype), bytes = tensor_bytes(t);
    unsigned char *copy = malloc(bytes + 1);
    memcpy(copy, t->view.data, bytes);
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t row = 0; row < (is_key ? s.len_kv : s.len_q); row++)
            for (int64_t head = 0; head < (is_key ? p->h_kv : p->h); head++) {
                int64_t offset =
                    is_key ? fa_key_offset(p, &t->view, &s, row, head) : fa_query_offset(&t->view, &s, row, head);
                memset(copy + (size_t)offset * element, 0xff, (size_t)t->columns * element);
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

#endif
