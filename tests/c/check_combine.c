/* cuda/combine.cu, compiled for the CPU, against cpu/combine.c. Random cases: odd strides between guarded pages, parts
 * that count for nothing and hold NaN, rows without parts, an lse of NaN, values near the largest float. */
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#pragma GCC diagnostic ignored "-Wunused-function" /* the cases of attention are not used here */

#include "cpu/combine.h"
#include "cuda_device.h"
#include "gpu/combine.h"

static fa_gpu combining_gpu = {.capability = 80, .num_sms = 1};

/* In place of gpu/memory.c. */
fa_status fa_cuda_enter(int device_idx, fa_cuda_place *place, fa_error *err) {
    static const fa_driver driver = {.cuLaunchKernelEx = launch};
    (void)device_idx, (void)err;
    *place = (fa_cuda_place){.driver = &driver, .gpu = &combining_gpu};
    return FA_OK;
}
void fa_cuda_leave(const fa_cuda_place *place) { (void)place; }

static uint64_t state = 1;
static int64_t below(int64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)n);
}
static float number(void) { return (float)(below(2001) - 1000) / 250; }

static bool serial_for(int64_t n, void (*fn)(int64_t begin, int64_t end, void *ctx), void *ctx) {
    fn(0, n, ctx);
    return true;
}

/* Memory for out and lse, filled with 0xff. */
static void bring_results(fa_combination *c, bool at_end) {
    const int64_t out_rows = c->b * c->len * c->h, bytes = (int64_t)fa_dtype_bytes(c->dtype);
    c->out = (fa_view){.stride_h = c->d + (c->d % 4 ? 3 : 4) * at_end};
    c->out.stride_row = c->out.stride_h * c->h, c->out.stride_b = c->out.stride_row * c->len;
    c->out.data = guarded_alloc((size_t)(out_rows * c->out.stride_h * bytes), c->d % 4 ? 4 : 4 * (size_t)bytes, at_end);
    c->lse = (fa_row_stats){guarded_alloc((size_t)out_rows * 4, 4, at_end), c->h * c->len, c->len, 0};
}

/* Sizes: many rows with few parts, or few rows. Some have no columns. */
static void check_case(bool at_end, bool has_many_rows) {
    fa_combination c = {.num_parts = 1 + below(at_end || has_many_rows ? 4 : FA_MAX_PARTS),
                        .b = 1 + below(2),
                        .len = 1 + below(has_many_rows ? 300 : 9),
                        .h = 1 + below(3),
                        .d = has_many_rows ? 100 + below(100) : below(70),
                        .dtype = (fa_dtype)below(3),
                        .empty_lse = below(2) ? INFINITY : -INFINITY};
    const bool takes_four = below(2); /* columns at a time */
    if (takes_four) c.d = (c.d + 3) / 4 * 4;
    c.stride_h = c.d + (takes_four ? 4 * below(2) : below(3)), c.stride_row = c.stride_h * c.h,
    c.stride_b = c.stride_row * c.len;
    c.stride_part = c.stride_b * c.b;
    c.lse_stride_h = c.len + below(2), c.lse_stride_b = c.lse_stride_h * c.h, c.lse_stride_part = c.lse_stride_b * c.b;
    const int64_t num_out = c.d == 0 ? 0 : c.num_parts * c.stride_part - (c.stride_h - c.d);
    const int64_t num_lse = c.num_parts * c.lse_stride_part - (c.lse_stride_h - c.len);
    float *parts = guarded_alloc((size_t)num_out * 4, takes_four ? 16 : 4, at_end),
          *lse = guarded_alloc((size_t)num_lse * 4, 4, at_end);
    for (int64_t i = 0; i < num_out; i++) parts[i] = i % c.stride_h == 1 ? 3.3e38f : number();
    for (int64_t i = 0; i < num_lse; i++) lse[i] = below(4) ? 5 * number() : below(2) ? INFINITY : -INFINITY;
    for (int64_t i = 0; i < c.num_parts; i++) lse[i * c.lse_stride_part] = i % 2 ? INFINITY : -INFINITY; /* no part */
    const bool has_nan = c.b * c.len > 1 && below(2);
    if (has_nan) lse[c.b > 1 ? c.lse_stride_b : 1] = NAN;
    for (int64_t at = 0; at < c.num_parts * c.b * c.len * c.h; at++) {
        const int64_t head = at % c.h, row = at / c.h % c.len, b = at / c.h / c.len % c.b, i = at / c.h / c.len / c.b;
        if (c.d > 0 && isinf(lse[i * c.lse_stride_part + b * c.lse_stride_b + head * c.lse_stride_h + row]))
            parts[i * c.stride_part + b * c.stride_b + row * c.stride_row + head * c.stride_h] = NAN;
    }
    c.out_partial = parts, c.lse_partial = lse;

    fa_combination on_gpu = c;
    const fa_pool pool = {serial_for};
    fa_error err = {""};
    bring_results(&c, at_end);
    bring_results(&on_gpu, at_end);
    assert_true(fa_cpu_combine(&c, &pool));
    if (fa_cuda_combine(&on_gpu, &err)) fail_msg("%s", err.text);
    const int64_t rows = c.b * c.len * c.h;
    int64_t num_nan = 0;
    for (int64_t i = 0; i < rows; i++) {
        num_nan += isnan(c.lse.data[i]);
        assert_true(isnan(c.lse.data[i])
                        ? isnan(on_gpu.lse.data[i])
                        : c.lse.data[i] == on_gpu.lse.data[i] ||
                              fabsf(c.lse.data[i] - on_gpu.lse.data[i]) < 1e-5f * (1 + fabsf(c.lse.data[i])));
    }
    assert_int_equal(num_nan, has_nan);
    assert_true(c.lse.data[0] == c.empty_lse && (c.d == 0 || fa_load_element(c.out.data, 0, c.dtype) == 0));
    const double rounding = c.dtype == FA_BF16 ? 0x1p-7 : c.dtype == FA_F16 ? 0x1p-10 : 1e-5;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t col = 0; col < c.d; col++) {
            const double x = fa_load_element(c.out.data, i * c.out.stride_h + col, c.dtype);
            const double y = fa_load_element(on_gpu.out.data, i * c.out.stride_h + col, c.dtype);
            assert_true(isnan(x) ? isnan(y) : x == y || fabs(x - y) <= rounding * fabs(x) + 1e-5);
        }
    const size_t bytes = (size_t)(rows * c.out.stride_h) * fa_dtype_bytes(c.dtype), gap = fa_dtype_bytes(c.dtype);
    if (at_end && c.d < c.out.stride_h) /* elements between rows stay */
        assert_memory_equal((char *)on_gpu.out.data + bytes - gap, "\xff\xff\xff\xff", gap);

    fa_combination out_alone = on_gpu; /* nobody asks for lse */
    bring_results(&out_alone, at_end);
    out_alone.lse.data = NULL;
    if (fa_cuda_combine(&out_alone, &err)) fail_msg("%s", err.text);
    if (c.d > 0) assert_memory_equal(on_gpu.out.data, out_alone.out.data, bytes - (size_t)(c.out.stride_h - c.d) * gap);
    guarded_free_all();
}

static void test_combine(void **unused) {
    (void)unused;
    for (int i = 0; i < 90; i++) check_case(i % 2, i % 3 == 0);
}

/* Short sequences have parts that see nothing behind those that see something. */
static void test_parts_that_see_nothing_change_no_bit(void **unused) {
    (void)unused;
    enum { SEEN = 8, LEN = 200, D = 4 };
    static float parts[FA_MAX_PARTS * LEN * D], lse[FA_MAX_PARTS * LEN], out[2][LEN * D], lse_out[2][LEN];
    for (int64_t i = 0; i < FA_MAX_PARTS * LEN; i++) {
        const bool is_seen = i < SEEN * LEN;
        lse[i] = is_seen ? number() : -INFINITY;
        for (int64_t col = 0; col < D; col++) parts[i * D + col] = is_seen ? number() : NAN;
    }
    for (int all = 0; all < 2; all++) {
        const fa_combination c = {.num_parts = all ? FA_MAX_PARTS : SEEN,
                                  .b = 1,
                                  .len = LEN,
                                  .h = 1,
                                  .d = D,
                                  .out_partial = parts,
                                  .stride_part = LEN * D,
                                  .stride_b = LEN * D,
                                  .stride_row = D,
                                  .stride_h = D,
                                  .lse_partial = lse,
                                  .lse_stride_part = LEN,
                                  .lse_stride_b = LEN,
                                  .lse_stride_h = LEN,
                                  .dtype = FA_F32,
                                  .out = {.data = out[all], .stride_b = LEN * D, .stride_row = D, .stride_h = D},
                                  .lse = {lse_out[all], LEN, LEN, 0}};
        fa_error err = {""};
        if (fa_cuda_combine(&c, &err)) fail_msg("%s", err.text);
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_memory_equal(lse_out[0], lse_out[1], sizeof lse_out[0]);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_combine),
                                       cmocka_unit_test(test_parts_that_see_nothing_change_no_bit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
