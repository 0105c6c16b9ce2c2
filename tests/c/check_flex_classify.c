/* Compares the kernels flex_classify and flex_lists with csrc/flex/classify.c, list by list. The kernels are compiled
 * for the CPU (cuda_emulation.h), with the texts that csrc/flex/source.c writes. Lists and map lie in guarded memory.
 * Blocks have any size, and many are cut.
 *
 *   check_flex_classify              all cases
 *   check_flex_classify --seed N     one case */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#pragma GCC diagnostic ignored "-Wunused-function" /* the cases of attention are not used here */

#include "cases.h"
#include "cuda_device.h"
#include "flex/classify.h"
#include "gpu/flex_classify.h"
#include "mods.h"
#include "pool.h"

static fa_driver driver = {.cuLaunchKernelEx = launch};

fa_status fa_cuda_enter(int device_idx, fa_cuda_place *place, fa_error *err) {
    (void)device_idx, (void)err;
    *place = (fa_cuda_place){.driver = &driver, .gpu = &gpu};
    return FA_OK;
}
void fa_cuda_leave(const fa_cuda_place *place) { (void)place; }

static random_source source;
static int64_t below(int64_t n) { return random_below(&source, n); }
#define PICK(...) ((const int64_t[]){__VA_ARGS__}[below((int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))])

enum { EVERYTHING = NUM_MASKS, NUM_CASES };

static void make_everything(mod_program *m, const mod_values *v) {
    begin_program(m, v, false);
    const uint32_t i = put(m, FA_FLEX_q_idx, FA_FLEX_I64, 0);
    put(m, FA_FLEX_eq, FA_FLEX_I64, 2, i, i);
    end_program(m);
}

enum { NUM_LISTS = 8 };
static int32_t *make_list(int64_t num) { return guarded_alloc((size_t)num * sizeof(int32_t), 4, below(2)); }

/* Makes the lists of a mask. num: how many numbers each list has. */
static fa_flex_blocks with_lists(fa_flex_blocks k, const int64_t num[4], int32_t *lists[NUM_LISTS]) {
    for (int i = 0; i < NUM_LISTS; i++) lists[i] = make_list(num[i % 4]);
    k.partial = (fa_flex_lists){lists[0], lists[1], lists[2], lists[3]};
    k.full = (fa_flex_lists){lists[4], lists[5], lists[6], lists[7]};
    return k;
}

static void run_case(int seed) {
    static const char *const names[] = {"num_kv", "kv", "num_q", "q"};
    int32_t document[128];
    float numbers[512] = {0};
    int32_t *ours[NUM_LISTS], *truth[NUM_LISTS];
    mod_program m;
    fa_error err = {""};
    source = (random_source){(uint64_t)seed};
    const fa_flex_blocks sizes = {.b = PICK(1, 2),
                                  .h = PICK(1, 3),
                                  .len_q = PICK(1, 7, 16, 33, 64, 100),
                                  .len_kv = PICK(1, 5, 16, 32, 70, 128),
                                  .block_q = PICK(1, 4, 16, 33, 64, INT32_MAX),
                                  .block_kv = PICK(2, 3, 16, 40, 128, INT32_MAX)};
    document[0] = 0;
    for (int i = 1; i < 128; i++) document[i] = document[i - 1] + (below(20) == 0);
    const mod_values v = {.document = document, .slope = numbers, .bias = numbers, .rel = numbers, .len = 128, .h = 3};
    const int mod = 1 + seed % (NUM_CASES - 1);
    if (mod == EVERYTHING)
        make_everything(&m, &v);
    else
        make_mask(&m, mod, &v);

    const int64_t heads = sizes.b * sizes.h, rows = (sizes.len_q + sizes.block_q - 1) / sizes.block_q,
                  columns = (sizes.len_kv + sizes.block_kv - 1) / sizes.block_kv;
    const int64_t num[] = {heads * rows, heads * rows * columns, heads * columns, heads * rows * columns};
    fa_flex_blocks want = with_lists(sizes, num, truth), got = with_lists(sizes, num, ours);
    const size_t bytes = fa_cuda_flex_classify_workspace(&got);
    assert_int_equal(bytes, heads * rows * columns);
    if (fa_flex_classify(&m.bound, &want, &test_pool, &err)) fail_msg("--seed %d: %s", seed, err.text);
    if (fa_cuda_flex_classify(&m.bound, &got, 0, guarded_alloc(bytes, 1, true), &err))
        fail_msg("--seed %d: %s", seed, err.text);
    for (int i = 0; i < NUM_LISTS; i++)
        for (int64_t at = 0; at < num[i % 4]; at++)
            if (ours[i][at] != truth[i][at])
                fail_msg("--seed %d: %s of %s blocks [%lld] is %d instead of %d", seed, names[i % 4],
                         i < 4 ? "partial" : "full", (long long)at, ours[i][at], truth[i][at]);
    fa_flex_free(&m.program);
    guarded_free_all();
}

static int first_seed, last_seed = 150;

static void test_cases(void **state) {
    (void)state;
    for (int seed = first_seed; seed <= last_seed; seed++) run_case(seed);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--seed")) first_seed = last_seed = atoi(argv[2]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cases)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
