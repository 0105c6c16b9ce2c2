/* cuda/align.cu, compiled for the CPU. A launcher that only looks at its problem stands for a kernel: inputs must lie
 * there, element by element, on rows of whole 16 bytes, and what it writes must arrive in the call's tensors. Random
 * tensors lie between guarded memory, with gaps that nobody may touch. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#pragma GCC diagnostic ignored "-Wunused-function" /* the cases of attention are not used here */

#define ROW_PADDING 5
#include "cuda_device.h"
#include "plan/gpu_align.h"
#include "plan/gpu_problem.h"

static random_source source = {1};

static int64_t below(int64_t n) { return random_below(&source, n); }

/* A tensor of the problem as it was, and what is expected of it. */
typedef struct {
    size_t at;
    tensor t;
    uint16_t *before;
    int64_t b, rows, heads;
    bool is_output, is_fresh; /* fresh: there is no memory yet when the call is planned */
} expected;

static expected all[8];
static int num_all;

static fa_view *view_at(fa_problem *p, size_t at) { return (fa_view *)(void *)((char *)p + at); }
static const fa_view *seen_at(const fa_problem *p, size_t at) {
    return (const fa_view *)(const void *)((const char *)p + at);
}

static int64_t place(const fa_view *v, int64_t b_idx, int64_t row, int64_t head) {
    return b_idx * v->stride_b + row * v->stride_row + head * v->stride_h;
}

/* What a kernel writes to an output, and what zeros behind it must not reach the call's tensor. */
static uint16_t result_of(int tensor_idx, int64_t element) {
    return (uint16_t)(40503u * (unsigned)element + tensor_idx);
}

static void draw(fa_problem *p, size_t at, int64_t b, int64_t rows, int64_t heads, int64_t columns, bool is_output,
                 bool at_end) {
    const bool is_fresh = is_output && below(2);
    has_16_bytes = is_fresh || (below(3) == 0 && columns % 8 == 0);
    const tensor_layout layout = is_fresh ? ROWS_THEN_HEADS : (tensor_layout)below(NUM_LAYOUTS);
    expected *e = &all[num_all++];
    *e = (expected){.at = at, .b = b, .rows = rows, .heads = heads, .is_output = is_output, .is_fresh = is_fresh};
    e->t = tensor_of(p->dtype, columns, b, rows, heads, layout, at_end);
    if (p->cu_seqlens_q) e->t.view.stride_b = 0;
    const size_t bytes = tensor_bytes(&e->t);
    for (int64_t i = 0; i < e->t.num_elements; i++) ((uint16_t *)e->t.view.data)[i] = (uint16_t)random_bits(&source);
    e->before = malloc(bytes);
    memcpy(e->before, e->t.view.data, bytes);
    *view_at(p, at) = e->t.view;
}

/* The problem as a planner sees it. */
static fa_problem planned(const fa_problem *p) {
    fa_problem early = *p;
    for (int n = 0; n < num_all; n++)
        if (all[n].is_fresh) view_at(&early, all[n].at)->data = NULL;
    return early;
}

static int num_launches;
static bool keeps_rows; /* outputs arrive with what they held */

static fa_status look(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    (void)err;
    num_launches++;
    assert_true(p->d % 8 == 0 && p->d_v % 8 == 0);
    for (int n = 0; n < num_all; n++) {
        const expected *e = &all[n];
        const fa_view *v = seen_at(p, e->at);
        const int64_t wide = (e->t.columns + 7) / 8 * 8;
        assert_true(fa_suits_tma(p, v, e->b, e->rows, e->heads));
        int64_t element = 0;
        for (int64_t b_idx = 0; b_idx < e->b; b_idx++)
            for (int64_t row = 0; row < e->rows; row++)
                for (int64_t head = 0; head < e->heads; head++)
                    for (int64_t i = 0; i < wide; i++) {
                        uint16_t *x = (uint16_t *)v->data + place(v, b_idx, row, head) + i;
                        const int64_t own = place(&e->t.view, b_idx, row, head) + i;
                        const uint16_t want = i < e->t.columns ? e->before[own] : 0;
                        if ((!e->is_output || keeps_rows || v->data == e->t.view.data) && *x != want)
                            fail_msg("tensor %d, row %d, head %d, column %d: %x instead of %x", n, (int)row, (int)head,
                                     (int)i, *x, want);
                        if (e->is_output) *x = result_of(n, i < e->t.columns ? element++ : -1);
                    }
    }
    return FA_OK;
}

/* Outputs have arrived, and no other element has changed. */
static void check_after(void) {
    for (int n = 0; n < num_all; n++) {
        const expected *e = &all[n];
        int64_t element = 0;
        for (int64_t b_idx = 0; b_idx < e->b && e->is_output; b_idx++)
            for (int64_t row = 0; row < e->rows; row++)
                for (int64_t head = 0; head < e->heads; head++)
                    for (int64_t i = 0; i < e->t.columns; i++)
                        e->before[place(&e->t.view, b_idx, row, head) + i] = result_of(n, element++);
        for (int64_t i = 0; i < e->t.num_elements; i++) {
            const uint16_t got = ((const uint16_t *)e->t.view.data)[i];
            if (got != e->before[i]) fail_msg("tensor %d, element %d: %x instead of %x", n, (int)i, got, e->before[i]);
        }
        free(e->before);
    }
}

static void check_case(bool at_end) {
    static int32_t ends[2];
    fa_problem p = {.device = FA_CUDA,
                    .pass = below(2) ? FA_BWD : FA_FWD,
                    .dtype = below(2) ? FA_BF16 : FA_F16,
                    .b = 1 + below(3),
                    .h_kv = 1 + below(3),
                    .len_q = 1 + below(90),
                    .len_kv = 1 + below(90),
                    .scale = 1,
                    .window_left = -1,
                    .window_right = -1};
    p.h = p.h_kv * (1 + below(2)), p.d = 1 + below(256), p.d_v = below(2) ? p.d : 1 + below(256);
    if (below(2)) p.d = (p.d + 7) / 8 * 8;
    if (below(2)) p.d_v = (p.d_v + 7) / 8 * 8;
    p.total_q = p.b * p.len_q, p.total_kv = p.b * p.len_kv;
    if (below(3) == 0) p.cu_seqlens_q = p.cu_seqlens_k = ends, p.zero_tensors = below(2);
    if (!p.cu_seqlens_q && below(3) == 0) p.seqused_q = ends;
    const bool packed = p.cu_seqlens_q, is_bwd = p.pass == FA_BWD;
    const int64_t b = packed ? 1 : p.b, rows_q = packed ? p.total_q : p.len_q, rows_kv = packed ? p.total_kv : p.len_kv;
    num_all = 0;
    draw(&p, offsetof(fa_problem, q), b, rows_q, p.h, p.d, false, at_end);
    draw(&p, offsetof(fa_problem, k), b, rows_kv, p.h_kv, p.d, false, at_end);
    draw(&p, offsetof(fa_problem, v), b, rows_kv, p.h_kv, p.d_v, false, at_end);
    draw(&p, offsetof(fa_problem, o), b, rows_q, p.h, p.d_v, !is_bwd, at_end);
    if (is_bwd) {
        draw(&p, offsetof(fa_problem, dout), b, rows_q, p.h, p.d_v, false, at_end);
        if (below(4)) draw(&p, offsetof(fa_problem, dq), b, rows_q, p.h, p.d, true, at_end);
        if (below(4)) draw(&p, offsetof(fa_problem, dk), b, rows_kv, p.h_kv, p.d, true, at_end);
        if (below(4)) draw(&p, offsetof(fa_problem, dv), b, rows_kv, p.h_kv, p.d_v, true, at_end);
    }
    keeps_rows = packed || p.seqused_q;
    fa_error err = {""};
    cuda_run run;
    gpu_kernels = NULL;
    cuda_run_make(&run, &p, at_end);
    const fa_problem early = planned(&p);
    run.plan.gpu.aligns = fa_tensors_to_align(&early);
    run.plan.workspace_bytes = 256 * (size_t)below(3) + fa_align_bytes(&early, run.plan.gpu.aligns);
    run.call.workspace = guarded_alloc(run.plan.workspace_bytes, 256, at_end);
    memset(run.call.workspace, 0xff, run.plan.workspace_bytes);
    if (fa_cuda_run_aligned(&run.call, look, &err)) fail_msg("%s", err.text);
    check_after();
    guarded_free_all();
}

static void test_copies(void **none) {
    (void)none;
    for (int i = 0; i < 600; i++) check_case(i % 3 > 0);
    assert_int_equal(num_launches, 600);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_copies)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
