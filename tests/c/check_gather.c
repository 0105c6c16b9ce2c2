/* cuda/gather.cu, compiled for the CPU, against fa_key_offset. Random cases: pages of any size and stride between
 * guarded memory, tables that name no page behind the keys, lengths from two sources, new keys, rows of a table. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <cmocka.h>

#pragma GCC diagnostic ignored "-Wunused-function" /* the cases of attention are not used here */

#include "cuda/gather_params.h"
#include "cuda_device.h"
#include "gpu/gather.h"
#include "plan/gpu_gather.h"

static random_source source = {1};

static int64_t below(int64_t n) { return random_below(&source, n); }

/* A table of pages in random order. Behind the keys of its sequence a row names no page. */
static void draw_pages(fa_problem *p, int64_t rows, const int64_t *keys_of_row, bool at_end) {
    p->paged = true;
    p->page_size = (int64_t[]){1, 2, 3, 5, 12, 20, 100}[below(7)];
    p->block_table_cols = 1 + below(200 / p->page_size);
    p->block_table_stride = p->block_table_cols + below(2);
    p->num_pages = rows * p->block_table_cols;
    int32_t *pages = random_ints(&source, p->num_pages, 1, at_end);
    random_shuffle(&source, pages, p->num_pages);
    int32_t *table = random_ints(&source, (rows - 1) * p->block_table_stride + p->block_table_cols, 1, at_end);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < p->block_table_cols; i++)
            table[row * p->block_table_stride + i] =
                i * p->page_size < keys_of_row[row] ? pages[row * p->block_table_cols + i] : -1;
    p->block_table = table;
}

static tensor draw_pool(const fa_problem *p, int64_t columns, bool at_end) {
    const tensor_layout layout = (tensor_layout)below(NUM_LAYOUTS);
    tensor t = tensor_of(p->dtype, columns, p->num_pages, p->page_size, p->h_kv, layout, at_end);
    for (int64_t i = 0; i < t.num_elements; i++) ((uint16_t *)t.view.data)[i] = (uint16_t)random_bits(&source);
    return t;
}

/* The keys of a sequence, new ones included. Keys that do not fit do not count. */
static fa_sequence sequence_of(const fa_problem *p, int64_t b_idx) {
    const int64_t capacity = p->block_table_cols * p->page_size;
    fa_sequence s = fa_sequence_at(p, b_idx);
    int64_t used = s.len_kv - p->len_new;
    used = used < capacity ? used : capacity;
    s.len_kv = used + p->len_new < capacity ? used + p->len_new : capacity;
    return s;
}

/* Compares the copies of k or of v. */
static void check_copies(const fa_problem *p, const fa_view *pool, const fa_view *copies, int64_t columns,
                         int64_t rows) {
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        const fa_sequence s = sequence_of(p, b_idx);
        for (int64_t j = 0; j < rows; j++)
            for (int64_t head = 0; head < p->h_kv; head++)
                for (int64_t i = 0; i < columns; i++) {
                    const int64_t at = b_idx * copies->stride_b + j * copies->stride_row + head * copies->stride_h + i;
                    const uint16_t got = ((const uint16_t *)copies->data)[at];
                    const uint16_t want = j < s.len_kv
                                              ? ((const uint16_t *)pool->data)[fa_key_offset(p, pool, &s, j, head) + i]
                                          : j < s.len_kv + FA_GATHER_ZEROS ? 0
                                                                           : 0xffff;
                    if (got != want)
                        fail_msg("b_idx %d key %d of %d head %d column %d: %x instead of %x", (int)b_idx, (int)j,
                                 (int)s.len_kv, (int)head, (int)i, got, want);
                }
    }
}

/* Copies the pages of a problem, also where the plan would rather load single keys. *run must keep its address. */
static void gather(cuda_run *run, const fa_problem *p, fa_problem *gathered, bool at_end) {
    fa_error err = {""};
    gpu = (fa_gpu){.capability = 90, .num_sms = 4};
    gpu_kernels = "any,fwd_sm90";
    cuda_run_make(run, p, at_end);
    run->plan.workspace_bytes = fa_gather_bytes(p);
    run->call.workspace = guarded_alloc(run->plan.workspace_bytes, 64, at_end);
    memset(run->call.workspace, 0xff, run->plan.workspace_bytes);
    if (fa_cuda_gather(&run->call, gathered, &err)) fail_msg("%s", err.text);
}

static int num_checked;

static void check_case(bool at_end) {
    static int32_t any_row[1];
    fa_problem p = {.device = FA_CUDA,
                    .dtype = below(2) ? FA_BF16 : FA_F16,
                    .b = 1 + below(3),
                    .h_kv = 1 + below(3),
                    .len_q = 20 + below(80),
                    .scale = 1,
                    .window_left = -1,
                    .window_right = -1};
    p.h = p.h_kv * (1 + below(2)), p.d = 8 * (1 + below(9)), p.d_v = below(2) ? p.d : 8 * (1 + below(9));
    p.total_q = p.b * p.len_q;
    const int64_t rows = p.b + below(2);
    int64_t keys_of_row[8] = {0};
    if (rows > p.b || below(2)) {
        int32_t *row_of = random_ints(&source, rows, 1, at_end);
        random_shuffle(&source, row_of, rows);
        p.cache_batch_idx = row_of, p.cache_rows = rows;
    }
    if (below(2)) p.len_new = 1 + below(30), p.k_new.data = p.v_new.data = any_row;
    /* Lengths may exceed the pages. Packed lengths need packed queries. */
    int32_t *used = random_ints(&source, p.b, 260, at_end), *ends = random_ints(&source, p.b + 1, 1, at_end);
    const bool is_packed = !p.len_new && below(2);
    for (int64_t i = 0; i < p.b; i++) ends[i + 1] = ends[i] + used[i];
    if (is_packed) {
        int32_t *queries = random_ints(&source, p.b + 1, 1, at_end);
        for (int64_t i = 0; i < p.b; i++) queries[i + 1] = (int32_t)((i + 1) * p.len_q);
        p.cu_seqlens_q = queries, p.cu_seqlens_k = ends, p.len_kv = 260;
    } else {
        p.seqused_k = used;
    }
    for (int64_t i = 0; i < p.b; i++) keys_of_row[p.cache_batch_idx ? p.cache_batch_idx[i] : i] = used[i] + p.len_new;
    draw_pages(&p, rows, keys_of_row, at_end);
    if (!p.cu_seqlens_k) p.len_kv = p.block_table_cols * p.page_size;
    p.total_kv = p.b * p.len_kv;
    const tensor k = draw_pool(&p, p.d, at_end), v = draw_pool(&p, p.d_v, at_end);
    p.q = p.o = k.view, p.k = k.view, p.v = v.view;
    if (p.block_table_cols * p.page_size % 8 == 0 && !fa_may_gather(&p)) { /* pages that TMA loads */
        guarded_free_all();
        return;
    }
    assert_true(fa_may_gather(&p));
    cuda_run run;
    fa_problem gathered;
    gather(&run, &p, &gathered, at_end);
    num_checked++;
    const int64_t num = p.block_table_cols * p.page_size;
    assert_true(!gathered.paged && gathered.len_kv == num && !gathered.cache_batch_idx && !gathered.cu_seqlens_k);
    for (int64_t i = 0; i < p.b; i++) assert_int_equal(gathered.seqused_k[i], sequence_of(&p, i).len_kv);
    assert_true((const char *)(gathered.seqused_k + p.b) <= (char *)run.call.workspace + run.plan.workspace_bytes);
    check_copies(&p, &p.k, &gathered.k, p.d, num);
    check_copies(&p, &p.v, &gathered.v, p.d_v, num);
    guarded_free_all();
}

static void test_gather(void **none) {
    (void)none;
    has_16_bytes = true;
    for (int i = 0; i < 200; i++) check_case(i % 3 > 0);
    assert_true(num_checked > 100);
}

/* Two heads lie more than 2^31 pieces of 16 bytes apart. Only their own pages can be touched. */
static void test_far_heads(void **none) {
    (void)none;
    enum { KEYS = 3, COLUMNS = 8 };
    const int64_t stride_h = ((int64_t)1 << 34) + 64;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), far = 2 * (size_t)stride_h / page * page, bytes = far + page;
    uint16_t *pool = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(pool != MAP_FAILED);
    assert_int_equal(mprotect(pool, page, PROT_READ | PROT_WRITE), 0);
    assert_int_equal(mprotect((char *)pool + far, page, PROT_READ | PROT_WRITE), 0);
    static int32_t used[1] = {KEYS}, table[1];
    const fa_view view = {pool, KEYS * COLUMNS, COLUMNS, stride_h};
    fa_problem p = {.device = FA_CUDA,
                    .dtype = FA_BF16,
                    .b = 1,
                    .h = 2,
                    .h_kv = 2,
                    .len_q = 64,
                    .d = COLUMNS,
                    .d_v = COLUMNS,
                    .total_q = 64,
                    .scale = 1,
                    .window_left = -1,
                    .window_right = -1,
                    .paged = true,
                    .seqused_k = used,
                    .block_table = table,
                    .block_table_cols = 1,
                    .num_pages = 1,
                    .page_size = KEYS,
                    .len_kv = KEYS,
                    .total_kv = KEYS,
                    .q = view,
                    .k = view,
                    .v = view,
                    .o = view};
    for (int64_t head = 0; head < 2; head++)
        for (int i = 0; i < KEYS * COLUMNS; i++) pool[head * stride_h + i] = (uint16_t)(100 * head + i);
    cuda_run run;
    fa_problem gathered;
    gather(&run, &p, &gathered, true);
    check_copies(&p, &p.k, &gathered.k, COLUMNS, KEYS);
    check_copies(&p, &p.v, &gathered.v, COLUMNS, KEYS);
    guarded_free_all();
    munmap(pool, bytes);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gather), cmocka_unit_test(test_far_heads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
