/* Compares the kernel quantize with csrc/cpu/quantize.c, bit for bit. The kernel is compiled for the CPU
 * (cuda_emulation.h). Tensors are dense or packed, lie in guarded memory at any stride, and hold NaN, infinities and
 * zero heads.
 *
 *   check_quantize              all cases
 *   check_quantize --seed N     one case */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "cases.h"
#include "pool.h"
#include "cuda_device.h"
#include "cpu/quantize.h"
#include "gpu/quantize.h"

static fa_driver driver;

fa_status fa_cuda_enter(int device_idx, fa_cuda_place *place, fa_error *err) {
    (void)device_idx, (void)err;
    driver = (fa_driver){.cuLaunchKernelEx = launch, .cuMemsetD32Async = clear};
    *place = (fa_cuda_place){.driver = &driver, .gpu = &gpu};
    return FA_OK;
}
void fa_cuda_leave(const fa_cuda_place *place) { (void)place; }
fa_status fa_cuda_fill(const fa_cuda_place *place, void *to, uint32_t value, int64_t num, fa_error *err) {
    return fa_driver_check(place->driver->cuMemsetD32Async((uintptr_t)to, value, (size_t)num, NULL), "a fill", err);
}

static int pick(int num) { return rand() / 7 % num; }
#define PICK(...) ((int[]){__VA_ARGS__}[pick((int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)))])

/* ---- a case ------------------------------------------------------------------------------------------------------ */

static void fill(const fa_quantization *q, const fa_quantized *t, int64_t rows, int64_t batches) {
    const bool has_specials = pick(3) == 0, has_zeros = pick(4) == 0;
    for (int64_t b_idx = 0; b_idx < batches; b_idx++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < q->h_kv * t->g; head++)
                for (int64_t i = 0; i < t->d; i++) {
                    double x = (pick(2001) - 1000) / 250.0;
                    if (pick(50) == 0) x *= 100;
                    if (has_zeros && head == 0) x = 0;
                    if (has_specials && pick(3000) == 0) x = PICK(0, 1) ? NAN : PICK(0, 1) ? INFINITY : -INFINITY;
                    fa_store_element(t->x.data,
                                     b_idx * t->x.stride_b + row * t->x.stride_row + head * t->x.stride_h + i, x,
                                     q->dtype);
                }
}

/* rows: of a sequence; packed: of the tensor. The strides are those of a slice of a larger tensor. */
static void make_tensor(const fa_quantization *q, fa_quantized *t, bool packed, int64_t rows) {
    const int64_t heads = q->h_kv * t->g, gap = PICK(0, 0, 8, 1), h_gap = PICK(0, 0, 1) * (t->d + gap);
    const int64_t batches = packed ? 1 : q->b;
    t->rows = rows;
    t->x.stride_h = t->d + gap;
    t->x.stride_row = heads * t->x.stride_h + h_gap;
    if (pick(3) == 0) t->x.stride_h = rows * (t->d + gap), t->x.stride_row = t->d + gap; /* heads outside */
    t->x.stride_b = packed ? 0 : heads * rows * (t->d + gap) + rows * h_gap;
    const int64_t num = batches && rows && heads ? (batches - 1) * t->x.stride_b + (rows - 1) * t->x.stride_row +
                                                       (heads - 1) * t->x.stride_h + t->d
                                                 : 0;
    const size_t alignment = PICK(16, 16, 4);
    t->x.data = guarded_alloc((size_t)num * fa_dtype_bytes(q->dtype), alignment, pick(2));
    if (packed) {
        int32_t *sums = guarded_alloc((size_t)(q->b + 1) * sizeof *sums, 4, true);
        sums[0] = 0;
        for (int64_t i = 0; i < q->b; i++) {
            const int64_t left = rows - sums[i], len = pick(4) == 0 ? 0 : pick((int)(2 * rows / q->b + 2));
            sums[i + 1] = sums[i] + (int32_t)(len < left ? len : left);
        }
        t->cu_seqlens = sums;
    }
    fill(q, t, rows, batches);
}

static int64_t out_bytes(const fa_quantization *q, const fa_quantized *t) {
    return (t->cu_seqlens ? 1 : q->b) * t->rows * q->h_kv * t->g * t->d;
}

static fa_quantization copy_of(const fa_quantization *q) {
    fa_quantization copy = *q;
    for (int i = 0; i < 3; i++) {
        const int64_t groups = q->is_per_tensor ? 1 : q->b * q->h_kv;
        copy.tensors[i].out = guarded_alloc((size_t)out_bytes(q, &q->tensors[i]), 8, true);
        copy.tensors[i].descale = guarded_alloc((size_t)groups * sizeof(float), 4, true);
    }
    return copy;
}

static void compare(const fa_quantization *ours, const fa_quantization *truth, int seed) {
    const int64_t groups = truth->is_per_tensor ? truth->b * truth->h_kv > 0 : truth->b * truth->h_kv;
    for (int i = 0; i < 3; i++) {
        const fa_quantized *x = &ours->tensors[i], *y = &truth->tensors[i];
        for (int64_t at = 0; at < out_bytes(truth, y); at++)
            if (x->out[at] != y->out[at] && ((x->out[at] & y->out[at]) & 0x7f) != 0x7f)
                fail_msg("--seed %d: tensor %d, byte %lld is %x instead of %x", seed, i, (long long)at, x->out[at],
                         y->out[at]);
        for (int64_t at = 0; at < groups; at++)
            if (memcmp(&x->descale[at], &y->descale[at], sizeof(float)))
                fail_msg("--seed %d: tensor %d, descale %lld is %g instead of %g", seed, i, (long long)at,
                         x->descale[at], y->descale[at]);
    }
}

static void run_case(int seed) {
    srand((unsigned)seed);
    fa_error err = {""};
    gpu.capability = seed % 2 ? 80 : 90;
    gpu.num_sms = PICK(1, 1, 5, 40);
    fa_quantization q = {.device = FA_CPU,
                         .dtype = (fa_dtype)PICK(FA_F16, FA_BF16, FA_BF16, FA_F32),
                         .b = PICK(0, 1, 2, 5, 9),
                         .h_kv = PICK(1, 1, 2, 3),
                         .is_per_tensor = pick(4) == 0};
    const bool rotates = pick(2), packed_q = pick(2), packed_k = pick(4) ? packed_q : !packed_q;
    const int d =
        rotates ? 8 * PICK(1, 2, 8, 8, 10, 12, 16, 16, 24, 25, 31, 32) : PICK(1, 7, 36, 64, 100, 128, 192, 256);
    const int64_t rows_q = PICK(0, 1, 17, 100, 300), rows_k = PICK(0, 3, 129, 260, 700);
    for (int i = 0; i < 3; i++)
        q.tensors[i] = (fa_quantized){
            .g = i ? 1 : PICK(1, 1, 2, 3), .d = i == 2 ? PICK(d, d, 8, 320, 512) : d, .rotates = rotates && i < 2};
    make_tensor(&q, &q.tensors[0], packed_q, rows_q);
    for (int i = 1; i < 3; i++) make_tensor(&q, &q.tensors[i], packed_k, rows_k);

    fa_quantization truth = copy_of(&q), ours = copy_of(&q);
    pool_threads = 1 + pick(3);
    if (fa_cpu_quantize(&truth, &test_pool, &err)) fail_msg("--seed %d: %s", seed, err.text);
    void *workspace = guarded_alloc(fa_cuda_quantize_workspace(&ours), 4, true);
    if (fa_cuda_quantize(&ours, workspace, &err)) fail_msg("--seed %d: %s", seed, err.text);
    compare(&ours, &truth, seed);
    guarded_free_all();
}

static int first_seed, last_seed = 100;

static void test_cases(void **state) {
    (void)state;
    for (int seed = first_seed; seed <= last_seed; seed++) run_case(seed);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--seed")) first_seed = last_seed = atoi(argv[2]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cases)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
