/* Compares the decode kernel of every instruction set with csrc/cpu/reference.c. The cases have few queries, up to four
 * splits of the keys, and every placement, page size and mask. They include new keys and rotary embedding, in guarded
 * memory (cases.h). check_cuda_decode does the same for attn_decode_sm90 and attn_decode_sm80, which also serve
 * prompts. They are compiled for the CPU (cuda_emulation.h).
 *
 *   check_decode                all tests
 *   check_decode --seed N       one random case in all dtypes, with its errors
 *
 * The tolerance is that of check_kernels.c: E(kernel) <= 2 E(naive) + a max |o|. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#if defined(CHECK_CUDA) /* head sizes of the decode kernel; other kernels serve the rest */
#define HEAD_DIMS           8, 16, 40, 64, 72, 96, 128, 136, 192, 256
#define ROW_PADDING         8
#define DRAWS_ALL_ADDITIONS false
#endif
#include "cases.h"
#include "cpu/decode_plan.h"
#include "naive.h"
#include "pool.h"
#include "sinks.h"

static fa_machine machine;

#if defined(CHECK_CUDA)
#define IS_CUDA true
#include "cuda_device.h"
#else
#define IS_CUDA false
#endif

/* ---- cases ----------------------------------------------------------------------------------------------------- */

/* Turns the last keys of every sequence into new keys. The cache does not have them yet and holds NaN in their
 * places. */
static void draw_append(test_case *c, random_source *r, random_source *more) {
    fa_problem *p = &c->p;
    int64_t most = p->seqused_k && random_chance(r, 70) ? 12 : 0;
    for (int64_t i = 0; i < p->b && most; i++) most = p->seqused_k[i] < most ? p->seqused_k[i] : most;
    if (most == 0) return;
    const int64_t len_new = random_chance(r, 50) ? 1 : 1 + random_below(r, most);
    int32_t *used = (int32_t *)p->seqused_k;
    int32_t *cu_new = NULL;
    if (DRAWS_ALL_ADDITIONS && random_chance(more, 40)) { /* packed new keys: up to len_new of each sequence */
        cu_new = random_ints(more, p->b + 1, 1, c->at_end);
        for (int64_t i = 0; i < p->b; i++) cu_new[i + 1] = cu_new[i] + (int32_t)random_below(more, len_new + 1);
        p->cu_seqlens_k_new = cu_new;
    }
    p->len_new = len_new;
    for (int64_t i = 0; i < p->b; i++) used[i] -= (int32_t)fa_num_new_keys(p, i);
    tensor *caches[] = {&c->k, &c->v}, fresh[2];
    for (int n = 0; n < 2; n++) {
        fresh[n] = tensor_of(p->dtype, caches[n]->columns, cu_new ? 1 : p->b, cu_new ? cu_new[p->b] : len_new, p->h_kv,
                             (tensor_layout)random_below(r, NUM_LAYOUTS), c->at_end);
        if (cu_new) fresh[n].view.stride_b = 0;
        for (int64_t i = 0; i < fresh[n].num_elements; i++)
            fa_store_element(fresh[n].view.data, i, random_normal(r), p->dtype);
        for (int64_t i = 0; i < p->b * len_new * p->h_kv; i++) {
            fa_problem unpadded = *p;
            unpadded.leftpad_k = NULL;
            const fa_sequence s = fa_sequence_at(&unpadded, i / p->h_kv / len_new);
            const int64_t j = used[s.b_idx] + i / p->h_kv % len_new;
            if (i / p->h_kv % len_new >= fa_num_new_keys(p, s.b_idx)) continue;
            memset((char *)caches[n]->view.data +
                       (size_t)fa_key_offset(p, &caches[n]->view, &s, j, i % p->h_kv) * fa_dtype_bytes(p->dtype),
                   0xff, (size_t)caches[n]->columns * fa_dtype_bytes(p->dtype));
        }
    }
    p->k_new = fresh[0].view, p->v_new = fresh[1].view;
    if (p->d < 16 || random_chance(r, 30)) return;
    p->rotary_dim = 16 * (1 + random_below(r, p->d / 16)), p->rotary_rows = p->len_kv;
    p->rotary_interleaved = random_chance(r, 50), p->rotary_q_by_row = random_chance(r, 50);
    const int64_t num = p->rotary_rows * p->rotary_dim / 2;
    const fa_dtype table = p->rotary_dtype = fa_output_dtype(p->dtype);
    void *cos_sin[2];
    for (int n = 0; n < 2; n++) {
        cos_sin[n] = guarded_alloc((size_t)num * fa_dtype_bytes(table), 16, c->at_end);
        for (int64_t i = 0; i < num; i++) fa_store_element(cos_sin[n], i, random_uniform(r), table);
    }
    if (random_chance(more, 40)) p->seqlens_rotary = random_ints(more, p->b, p->len_kv, c->at_end);
    p->rotary_cos = cos_sin[0], p->rotary_sin = cos_sin[1];
}

/* Sizes that random cases do not have. 0: as drawn. */
static struct {
    int64_t b, h_kv, len_kv, attention_chunk;
} given;

static test_case decode_case(uint64_t seed, fa_dtype dtype) {
    random_source source = {seed}, *r = &source, more = source_of_additions(seed);
    test_case c = {.seed = seed, .at_end = random_chance(r, 70), .hides_nan = random_chance(r, 50)};
    fa_problem *p = &c.p;
    c.amplitude = random_chance(r, 15) ? 12 : 1;
    *p = (fa_problem){.pass = FA_FWD, .device = FA_CPU, .dtype = dtype, .b = 1 + random_below(r, 3)};
    int64_t g = random_chance(r, 20) ? 16 : 1 + random_below(r, 8);
    p->h_kv = random_chance(r, 15) ? 9 : 1 + random_below(r, 3);
    if (given.b) p->b = given.b;
    if (given.h_kv) p->h_kv = given.h_kv;
    p->h = p->h_kv * g;
    p->d = p->d_v = head_dims[seed % (uint64_t)COUNT(head_dims)];
    draw_additions(&c, &more);
    p->len_q = random_chance(r, 40) ? 1 : random_below(r, 16 / g + 1);
    if (IS_CUDA && random_chance(r, 8)) p->len_q = 1 + random_below(r, 120 / g); /* prompts: several tiles of rows */
    p->len_kv = random_chance(r, 25) ? 700 + random_below(r, 900) : random_length(r);
    if (given.len_kv) p->len_kv = given.len_kv;
    p->num_splits = random_chance(r, 30) ? 1 + random_below(r, 4) : 0;
    draw_placement(&c, r, &more);
    draw_masks(&c, r, &more);
    if (given.attention_chunk) p->attention_chunk = given.attention_chunk;
    p->dropout_p = 0;
    p->q = c.q.view, p->k = c.k.view, p->v = c.v.view, p->o = c.o.view;
    alloc_row_stats(p, &p->lse, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
    fill_inputs(&c, r);
    draw_append(&c, r, &more);
    return c;
}

/* Returns false if another kernel serves the case. */
#if defined(CHECK_CUDA)
/* Two GPUs take the places of instruction sets. */
enum { HOPPER = FA_ISA_SCALAR, BEFORE_HOPPER };
static const char *name_of(fa_isa isa) { return isa == HOPPER ? "Hopper" : "before Hopper"; }

static int num_served[BEFORE_HOPPER + 1]; /* cases of each GPU */

static bool run_on(fa_isa isa, int threads, const fa_problem *p, bool at_end) {
    static const int num_sms[] = {1, 6, 40};
    const bool is_served = run_decode_on_cuda(p, isa == HOPPER, num_sms[threads - 1], at_end);
    num_served[isa] += is_served;
    return is_served;
}
#else
static const char *name_of(fa_isa isa) { return fa_isa_name(isa); }

static bool run_on(fa_isa isa, int threads, const fa_problem *p, bool at_end) {
    fa_machine lowered = machine;
    fa_plan plan;
    lowered.isa = isa;
    lowered.threads = pool_threads = threads;
    fa_plan_cpu(p, &lowered, &plan);
    assert_true(plan.cpu.num_decodes == (isa == FA_ISA_REFERENCE || fa_is_idle(p) ? 0 : fa_num_decodes(p)));
    if (p->num_splits) assert_true(plan.num_splits <= p->num_splits);
    void *workspace = guarded_alloc(plan.workspace_bytes, 64, at_end);
    assert_true(fa_cpu_run(p, &plan, workspace, &test_pool));
    return true;
}
#endif

/* ---- against the reference ------------------------------------------------------------------------------------- */

/* The largest |x - exact| over the rows of the sequences. *largest receives the largest |exact|. */
static double worst_error(const fa_problem *p, const fa_view *x, fa_dtype dtype, const fa_view *exact,
                          double *largest) {
    double worst = 0;
    *largest = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t i = 0; i < s.len_q; i++)
            for (int64_t head = 0; head < p->h; head++)
                for (int64_t t = 0; t < p->d_v; t++) {
                    int64_t at = fa_query_offset(x, &s, i, head) + t;
                    double expected = ((const double *)exact->data)[at];
                    double error = fabs(fa_load_element(x->data, at, dtype) - expected);
                    if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
                    if (fabs(expected) > *largest) *largest = fabs(expected);
                }
    }
    return worst;
}

static double worst_lse(const fa_problem *p, const fa_row_stats *exact) {
    double worst = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t i = 0; i < s.len_q * p->h; i++) {
            double x = *fa_row_stat(&p->lse, &s, i / p->h, i % p->h), y = *fa_row_stat(exact, &s, i / p->h, i % p->h);
            double error = x == y || (isnan(x) && isnan(y)) ? 0 : fabs(x - y) / (1 + fabs(y));
            if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
        }
    }
    return worst;
}

/* A copy of a problem after fa_cpu_append: its new keys are appended and its queries are rotated. The copy has its own
 * memory. */
typedef struct {
    fa_problem p;
    tensor q, k, v;
} appended;

static tensor tensor_copied(const tensor *t, bool at_end) {
    tensor copy = *t;
    copy.view.data = guarded_alloc(tensor_bytes(t), fa_dtype_bytes(t->dtype), at_end);
    memcpy(copy.view.data, t->view.data, tensor_bytes(t));
    return copy;
}

static appended append_on_cpu(const test_case *c) {
    appended a = {.p = c->p, .q = c->q};
    fa_problem *p = &a.p;
    a.k = tensor_copied(&c->k, c->at_end), a.v = tensor_copied(&c->v, c->at_end);
    p->k = a.k.view, p->v = a.v.view;
    if (!p->k_new.data) return a;
    const bool packed = p->cu_seqlens_q != NULL;
    if (p->rotary_cos)
        a.q = tensor_make(p, packed ? 1 : p->b, packed ? p->total_q : p->len_q, p->h, ROWS_THEN_HEADS, c->at_end);
    if (packed) a.q.view.stride_b = 0;
    fa_cpu_append(p, p->rotary_cos ? a.q.view.data : NULL, &test_pool);
    int32_t *used = guarded_alloc((size_t)p->b * sizeof *used, sizeof *used, c->at_end);
    for (int64_t i = 0; i < p->b; i++) used[i] = p->seqused_k[i] + (int32_t)fa_num_new_keys(p, i);
    p->seqused_k = used, p->q = a.q.view, p->len_new = 0, p->rotary_cos = p->rotary_sin = NULL;
    p->k_new = p->v_new = (fa_view){0}, p->cu_seqlens_k_new = NULL;
    return a;
}

/* Whether the caches agree bit for bit. Rotated values may differ by a unit in the last place. */
static bool is_same_cache(const fa_problem *p, const tensor *x, const tensor *y, bool is_turned) {
    static const double unit[] = {[FA_F16] = 0x1p-10, [FA_BF16] = 0x1p-7, [FA_F32] = 0x1p-23, [FA_E4M3] = 0x1p-3};
    if (!is_turned) return memcmp(x->view.data, y->view.data, tensor_bytes(x)) == 0;
    for (int64_t i = 0; i < x->num_elements; i++) {
        const double a = fa_load_element(x->view.data, i, p->dtype), b = fa_load_element(y->view.data, i, p->dtype);
        if (isnan(a) != isnan(b) || fabs(a - b) > unit[p->dtype] * (fabs(b) + 0.1)) return false;
    }
    return true;
}

static bool check_case(uint64_t seed, fa_dtype dtype, bool verbose) {
    static const double half_unit[] = {
        [FA_F16] = 0x1p-11, [FA_BF16] = 0x1p-8, [FA_F32] = 1e-6, [FA_E4M3] = 0x1p-8 + 1e-5};
    test_case c = decode_case(seed, dtype);
    draw_sinks(&c, seed);
    fa_problem *p = &c.p;
    pool_threads = 1;
    appended after = append_on_cpu(&c);
    const tensor k_before = tensor_copied(&c.k, c.at_end), v_before = tensor_copied(&c.v, c.at_end);
    fa_problem exact = after.p;
    bool good = true;
    exact.dtype = FA_F64;
    exact.q = tensor_descaled(&after.p, &after.q, &p->q_descale, false, c.at_end).view;
    exact.k = tensor_descaled(&after.p, &after.k, &p->k_descale, true, c.at_end).view;
    exact.v = tensor_descaled(&after.p, &after.v, &p->v_descale, true, c.at_end).view;
    exact.o = tensor_widened(&c.o, c.at_end).view;
    if (p->qv.data) exact.qv = tensor_widened(&c.qv, c.at_end).view;
    naive_results naive = {.o = tensor_widened(&c.o, c.at_end).view};
    alloc_row_stats(p, &exact.lse, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
    fa_reference_fwd(&exact, NULL, NULL, &test_pool);
    naive_attention(&after.p, &naive);
    add_sinks_to_naive(p, &exact, &naive.o, c.at_end);
    if (verbose) case_print(&c);
    for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || !takes_dtype((fa_isa)isa, dtype)) continue;
        memset(c.o.view.data, 0xff, tensor_bytes(&c.o));
        memcpy(c.k.view.data, k_before.view.data, tensor_bytes(&c.k));
        memcpy(c.v.view.data, v_before.view.data, tensor_bytes(&c.v));
        if (!run_on((fa_isa)isa, 1 + (int)(seed % 3), p, c.at_end)) continue;
        double largest, error = worst_error(p, &p->o, c.o.dtype, &exact.o, &largest);
        double allowed = (dtype == FA_E4M3 ? 0 : 2) * worst_error(p, &naive.o, FA_F64, &exact.o, &largest) +
                         half_unit[dtype] * largest;
        double lse_error = worst_lse(p, &exact.lse);
        bool same_caches = is_same_cache(p, &c.k, &after.k, p->rotary_cos) && is_same_cache(p, &c.v, &after.v, false);
        bool close = error <= allowed && lse_error <= 2e-5 && same_caches;
        if (verbose || !close)
            printf("  %-10s error %.3g, allowed %.3g of %.3g; lse %.3g%s%s\n", name_of((fa_isa)isa), error, allowed,
                   largest, lse_error, same_caches ? "" : "  WRONG CACHE", close ? "" : "  TOO FAR");
        good = good && close;
    }
    if (!good) {
        case_print(&c);
        printf("  (check_decode, not check_kernels; new keys %d, rotary_dim %d)\n", (int)p->len_new,
               (int)p->rotary_dim);
    }
    guarded_free_all();
    return good;
}

static void check_seeds(fa_dtype dtype) {
    const int num_seeds = IS_CUDA ? 80 : (int)NUM_SEEDS(260);
    bool good = true;
#if defined(CHECK_CUDA)
    num_served[HOPPER] = num_served[BEFORE_HOPPER] = 0;
#endif
    for (uint64_t seed = FIRST_SEED(0); seed < FIRST_SEED((uint64_t)num_seeds); seed++)
        good = check_case(seed, dtype, false) && good;
    assert_true(good);
#if defined(CHECK_CUDA)
    assert_true(num_served[HOPPER] > num_seeds / 2 && num_served[BEFORE_HOPPER] > num_seeds / 2);
#endif
}

#if defined(CHECK_CUDA)
static bool is_for_clusters(uint64_t seed) {
    const test_case c = decode_case(seed, FA_BF16);
    const int64_t rows = c.p.len_q * c.p.h / c.p.h_kv;
    guarded_free_all();
    return !c.p.cu_seqlens_q && c.p.num_splits == 0 && rows > 0 && rows <= 16;
}

/* Seeds that leave 2 after a division by 3 run with 40 SMs. */
static bool check_given(int num_cases, bool wants_clusters) {
    bool good = true;
    for (uint64_t seed = 2; num_cases > 0; seed += 3) {
        if (wants_clusters && !is_for_clusters(seed)) continue;
        good = check_case(seed, FA_BF16, false) && good;
        num_cases--;
    }
    memset(&given, 0, sizeof given);
    return good;
}

/* A head has several clusters of CTAs, each with a part. */
static void test_many_clusters(void **state) {
    (void)state;
    given.b = given.h_kv = 1, given.len_kv = 6000;
    assert_true(check_given(6, true));
}

/* Sequences share few clusters, so that parts grow until there is a cluster for each. */
static void test_few_clusters(void **state) {
    (void)state;
    given.b = 18, given.h_kv = 1, given.len_kv = 750;
    assert_true(check_given(6, true));
}

/* A thread reads the lengths of several sequences. */
static void test_more_sequences_than_threads(void **state) {
    (void)state;
    given.b = 300, given.h_kv = 1, given.len_kv = 40;
    assert_true(check_given(6, false));
}

static void test_chunks(void **state) {
    (void)state;
    given.attention_chunk = 37;
    assert_true(check_given(20, false));
}
#endif

static void test_f32(void **state) { (void)state, check_seeds(FA_F32); }
static void test_bf16(void **state) { (void)state, check_seeds(FA_BF16); }
static void test_f16(void **state) { (void)state, check_seeds(FA_F16); }
static void test_e4m3(void **state) { (void)state, check_seeds(FA_E4M3); }

/* ---- the same bits --------------------------------------------------------------------------------------------- */

enum { LEN = 2300, HEADS_KV = 3, GROUP = 4, DIM = 72, BATCH = 3 };

typedef struct {
    fa_problem p;
    tensor o;
} bits_case;

static bits_case bits_case_make(fa_dtype dtype, int32_t *lengths_used) {
    random_source r = {3};
    bits_case c = {
        .p = {
            .pass = FA_FWD, .dtype = dtype, .b = BATCH, .h = HEADS_KV * GROUP, .h_kv = HEADS_KV, .d = DIM, .d_v = DIM}};
    fa_problem *p = &c.p;
    p->len_q = 2, p->len_kv = LEN, p->scale = 0.12, p->window_left = -1, p->window_right = 0;
    p->total_q = BATCH * 2, p->total_kv = BATCH * LEN, p->seqused_k = lengths_used;
    tensor q = tensor_make(p, BATCH, 2, p->h, ROWS_THEN_HEADS, true), k, v;
    k = tensor_make(p, BATCH, LEN, HEADS_KV, ROWS_THEN_HEADS, true);
    v = tensor_make(p, BATCH, LEN, HEADS_KV, ROWS_THEN_HEADS, true);
    c.o = tensor_make(p, BATCH, 2, p->h, ROWS_THEN_HEADS, true);
    tensor *inputs[] = {&q, &k, &v};
    for (int i = 0; i < 3; i++)
        for (int64_t n = 0; n < inputs[i]->num_elements; n++)
            fa_store_element(inputs[i]->view.data, n, random_normal(&r), dtype);
    p->q = q.view, p->k = k.view, p->v = v.view, p->o = c.o.view;
    alloc_row_stats(p, &p->lse, 2, true);
    return c;
}

/* The output of a sequence depends neither on the threads, nor on the other sequences of the batch, nor on the
 * capacity. */
static void test_same_bits(void **state) {
    (void)state;
    static const int counts[] = {1, 2, 3, 7};
    for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++)
        for (int dtype = FA_F16; dtype <= FA_F32 && machine.isa_legal[isa]; dtype++) {
            int32_t used[BATCH] = {LEN, 900, 17};
            bits_case c = bits_case_make((fa_dtype)dtype, used);
            size_t bytes = (size_t)c.o.num_elements * fa_dtype_bytes((fa_dtype)dtype), row = bytes / BATCH;
            char *expected = malloc(bytes);
            for (int n = 0; n < 4; n++) {
                run_on((fa_isa)isa, counts[n], &c.p, true);
                if (n == 0) memcpy(expected, c.o.view.data, bytes);
                assert_memory_equal(expected, c.o.view.data, bytes);
            }
            used[0] = 1, used[2] = LEN;
            run_on((fa_isa)isa, 2, &c.p, true);
            assert_memory_equal(expected + row, (char *)c.o.view.data + row, row);
            fa_problem alone = c.p;
            alone.b = 1, alone.len_kv = 900, alone.seqused_k = NULL;
            alone.q.data = (char *)c.p.q.data + row;
            alone.k.data = (char *)c.p.k.data + (size_t)c.p.k.stride_b * fa_dtype_bytes((fa_dtype)dtype);
            alone.v.data = (char *)c.p.v.data + (size_t)c.p.v.stride_b * fa_dtype_bytes((fa_dtype)dtype);
            run_on((fa_isa)isa, 1, &alone, true);
            assert_memory_equal(expected + row, c.o.view.data, row);
            free(expected);
            guarded_free_all();
        }
}

/* ---- infinities ------------------------------------------------------------------------------------------------ */

/* A short prompt beside a long cache. One thread computes the prompt, and several threads read the cache. */
static void test_mixed_threads(void **state) {
    (void)state;
    int32_t cu_q[] = {0, 8, 9}, cu_k[] = {0, 8, 8200};
    fa_problem p = {.pass = FA_FWD,
                    .device = FA_CPU,
                    .dtype = FA_F32,
                    .b = 2,
                    .h = 4,
                    .h_kv = 4,
                    .d = 64,
                    .d_v = 64,
                    .scale = 0.125};
    p.len_q = 8, p.len_kv = 8192, p.total_q = 9, p.total_kv = 8200, p.window_left = p.window_right = -1;
    p.cu_seqlens_q = cu_q, p.cu_seqlens_k = cu_k;
    fa_machine eight = machine;
    fa_plan plan;
    eight.threads = 8;
    if (eight.isa == FA_ISA_REFERENCE) return;
    fa_plan_cpu(&p, &eight, &plan);
    assert_int_equal(plan.cpu.num_decodes, 1);
    assert_int_equal(plan.cpu.threads, 1);
    assert_int_equal(plan.cpu.decode_threads, 8);
}

/* An infinite value reaches the rows that see it, as infinity. A NaN that only the last row sees reaches only that
 * row. */
static void test_nonfinite(void **state) {
    (void)state;
    enum { LEN_NAN = 70 };
    for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++)
        for (int dtype = FA_F16; dtype <= (IS_CUDA ? FA_BF16 : FA_F32) && machine.isa_legal[isa]; dtype++) {
            fa_problem p = {
                .pass = FA_FWD, .dtype = (fa_dtype)dtype, .b = 1, .h = 2, .h_kv = 1, .d = 40, .d_v = 40, .scale = 0.1};
            p.len_q = p.total_q = 3, p.len_kv = p.total_kv = LEN_NAN + 1, p.window_left = -1;
            const int32_t used[] = {LEN_NAN + 1}, row[] = {0};
            p.cache_rows = 1, p.seqused_k = used, p.cache_batch_idx = row;
            tensor all[4];
            fa_view *views[] = {&p.q, &p.k, &p.v, &p.o};
            random_source r = {9};
            for (int i = 0; i < 4; i++) {
                bool is_key = i == 1 || i == 2;
                all[i] = tensor_make(&p, 1, is_key ? p.len_kv : p.len_q, is_key ? 1 : 2, ROWS_THEN_HEADS, true);
                *views[i] = all[i].view;
                for (int64_t n = 0; n < all[i].num_elements; n++)
                    fa_store_element(all[i].view.data, n, random_normal(&r), p.dtype);
            }
            alloc_row_stats(&p, &p.lse, 3, true);
            fa_store_element(p.v.data, 5 * p.d + 7, INFINITY, p.dtype);
            fa_store_element(p.v.data, LEN_NAN * p.d + 9, NAN, p.dtype);
            fa_store_element(p.v.data, (LEN_NAN - 1) * p.d + 8, -INFINITY, p.dtype);
            assert_true(run_on((fa_isa)isa, 1, &p, true));
            for (int64_t i = 0; i < 6; i++) { /* row i / 2 of len_q sees keys up to LEN_NAN - 2 + i / 2 */
                for (int64_t t = 0; t < p.d; t++) {
                    double x = fa_load_element(p.o.data, i * p.d + t, p.dtype);
                    if (t == 7)
                        assert_true(x == INFINITY);
                    else if (t == 8 && i / 2 >= 1)
                        assert_true(x == -INFINITY);
                    else
                        assert_true(t == 9 && i / 2 == 2 ? isnan(x) : isfinite(x));
                }
            }
            guarded_free_all();
        }
}

/* ---- a pool that fails ------------------------------------------------------------------------------------------- */

#if !defined(CHECK_CUDA)
/* The failing call is the append, the splits or their sum. In tiled kernels it is the tiles, delta or the sum of
 * slabs. */
static void test_failing_pool(void **state) {
    (void)state;
    for (int isa = FA_ISA_REFERENCE; isa < FA_NUM_ISAS; isa++)
        for (int kind = 0; kind < 3 && machine.isa_legal[isa]; kind++) {
            fa_problem p = {
                .pass = kind == 2 ? FA_BWD : FA_FWD, .dtype = FA_F32, .b = 1, .h = 2, .h_kv = 2, .d = 32, .d_v = 32};
            int32_t used[] = {2300};
            p.len_q = p.total_q = kind == 0 ? 2 : 70, p.len_kv = p.total_kv = 2400, p.cache_rows = 1, p.scale = 0.2;
            p.window_left = p.window_right = -1;
            tensor all[10];
            fa_view *views[] = {&p.q, &p.dout, &p.o, &p.dq, &p.k, &p.v, &p.dk, &p.dv, &p.k_new, &p.v_new};
            random_source r = {31};
            if (kind == 0) p.seqused_k = used, p.len_new = 100;
            for (int i = 0; i < (kind == 0 ? 10 : 8); i++) {
                all[i] = tensor_make(&p, 1, i < 4 ? p.len_q : i < 8 ? p.len_kv : p.len_new, 2, ROWS_THEN_HEADS, true);
                *views[i] = all[i].view;
                for (int64_t e = 0; e < all[i].num_elements; e++)
                    fa_store_element(all[i].view.data, e, random_normal(&r), p.dtype);
            }
            alloc_row_stats(&p, &p.lse, p.len_q, true);
            alloc_row_stats(&p, &p.softmax_d, p.len_q, true);
            for (int64_t i = 0; i < p.h * p.len_q; i++) p.lse.data[i] = 8;
            fa_machine lowered = machine;
            fa_plan plan;
            lowered.isa = (fa_isa)isa, lowered.threads = pool_threads = 3;
            fa_plan_cpu(&p, &lowered, &plan);
            assert_true(notices_a_failing_pool(&p, &plan, guarded_alloc(plan.workspace_bytes, 64, true)));
            guarded_free_all();
        }
}

/* The number of times that the threads meet for b sequences of len_kv keys. */
static int meetings_of(fa_isa isa, int64_t b, int64_t len_kv) {
    enum { MANY = 1000 };
    fa_problem p = {.pass = FA_FWD, .dtype = FA_F32, .b = b, .h = 8, .h_kv = 4, .d = 64, .d_v = 64, .scale = 0.1};
    p.len_q = 1, p.total_q = b, p.len_kv = len_kv, p.total_kv = b * len_kv;
    p.window_left = p.window_right = -1;
    fa_view *views[] = {&p.q, &p.o, &p.k, &p.v};
    for (int i = 0; i < 4; i++) {
        tensor t = tensor_make(&p, b, i < 2 ? 1 : len_kv, i < 2 ? 8 : 4, ROWS_THEN_HEADS, true);
        memset(t.view.data, 0, (size_t)t.num_elements * sizeof(float));
        *views[i] = t.view;
    }
    alloc_row_stats(&p, &p.lse, 1, true);
    fa_machine lowered = machine;
    fa_plan plan;
    lowered.isa = isa, lowered.threads = pool_threads = 3;
    fa_plan_cpu(&p, &lowered, &plan);
    assert_int_equal(plan.cpu.decode_threads, 3);
    pool_fails_in = MANY;
    assert_true(fa_cpu_run(&p, &plan, guarded_alloc(plan.workspace_bytes, 64, true), &test_pool));
    const int num = MANY - pool_fails_in;
    pool_fails_in = -1;
    guarded_free_all();
    return num;
}

/* Threads meet a second time only if there are many partials to add. */
static void test_meetings_of_threads(void **state) {
    (void)state;
    for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || !takes_dtype((fa_isa)isa, FA_F32)) continue;
        assert_int_equal(meetings_of((fa_isa)isa, 1, 1024), 1);
        assert_int_equal(meetings_of((fa_isa)isa, 64, 16), 2);
    }
}
#endif

/* ---- infinite scores -------------------------------------------------------------------------------------------- */

/* A row whose scores are all -inf counts as a row that sees no key. Splits of such scores do not change the output. */
static bool check_infinite_scores(uint64_t seed, fa_dtype dtype) {
    test_case c = decode_case(seed, dtype);
    fa_problem *p = &c.p;
    random_source r = {seed};
    bool good = true;
    if (p->rotary_cos) { /* rotation would change the column */
        guarded_free_all();
        return true;
    }
    plant_infinite_scores(&c, &r);
    if (seed % 2) plant_huge_values(&c);
    pool_threads = 1;
    const appended after = append_on_cpu(&c);
    fa_problem exact = after.p;
    tensor o = tensor_copied(&c.o, c.at_end);
    exact.o = o.view;
    alloc_row_stats(p, &exact.lse, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
    memset(o.view.data, 0xff, (size_t)o.num_elements * fa_dtype_bytes(dtype));
    fa_reference_fwd(&exact, NULL, NULL, &test_pool);
    for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || !takes_dtype((fa_isa)isa, dtype)) continue;
        memset(c.o.view.data, 0xff, (size_t)c.o.num_elements * fa_dtype_bytes(dtype));
        if (!run_on((fa_isa)isa, 1 + (int)(seed % 3), p, c.at_end)) continue;
        const bool same_o = is_same_kind(c.o.view.data, o.view.data, o.num_elements, dtype, 0);
        const bool same_lse = worst_lse(p, &exact.lse) <= 2e-5;
        if (same_o && same_lse) continue;
        printf("  %s:%s%s not what the reference has\n", name_of((fa_isa)isa), same_o ? "" : " o",
               same_lse ? "" : " lse");
        good = false;
    }
    if (!good) {
        case_print(&c);
        printf("  (check_decode, infinite scores; new keys %d)\n", (int)p->len_new);
    }
    guarded_free_all();
    return good;
}

static void test_infinite_scores(void **state) {
    (void)state;
    bool good = true;
    for (uint64_t seed = FIRST_SEED(0); seed < FIRST_SEED(IS_CUDA ? 40 : NUM_SEEDS(130)); seed++)
        for (int dtype = FA_F16; dtype <= (IS_CUDA ? FA_BF16 : FA_F32); dtype++)
            good = check_infinite_scores(seed, (fa_dtype)dtype) && good;
    assert_true(good);
}

/* ---- NaN and infinities in V ------------------------------------------------------------------------------------- */

/* Whether elements are both finite and close, or neither is finite. A weight that underflows turns an infinity into
 * NaN. */
static bool is_as_finite(const tensor *x, const tensor *reference, fa_dtype dtype, double largest) {
    static const double half_unit[] = {[FA_F16] = 0x1p-11, [FA_BF16] = 0x1p-8, [FA_F32] = 1e-6};
    for (int64_t i = 0; i < x->num_elements; i++) {
        const double a = fa_load_element(x->view.data, i, dtype), b = fa_load_element(reference->view.data, i, dtype);
        if (isfinite(a) != isfinite(b)) return false;
        if (isfinite(a) && fabs(a - b) > fmax(1e-4, 8 * half_unit[dtype]) * (largest + fabs(b))) return false;
    }
    return true;
}

/* The elements lie anywhere in V, in every key or in a few keys. Rows that do not see such a key must not change. */
static bool check_nonfinite_values(uint64_t seed, fa_dtype dtype) {
    test_case c = decode_case(seed, dtype);
    fa_problem *p = &c.p;
    random_source r = {seed};
    const int64_t every = 1 + random_below(&r, 40);
    bool good = true;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        const fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t i = 0; i < s.len_kv * p->h_kv; i++) {
            if (random_below(&r, every)) continue;
            const double x = random_chance(&r, 50) ? NAN : random_chance(&r, 50) ? INFINITY : -INFINITY;
            const int64_t row = fa_key_offset(p, &p->v, &s, i / p->h_kv, i % p->h_kv);
            fa_store_element(p->v.data, row + random_below(&r, p->d_v), x, dtype);
        }
    }
    pool_threads = 1;
    const appended after = append_on_cpu(&c);
    const tensor v_before = tensor_copied(&c.v, c.at_end);
    fa_problem exact = after.p;
    const tensor o = tensor_copied(&c.o, c.at_end);
    const size_t bytes = tensor_bytes(&o);
    exact.o = o.view;
    alloc_row_stats(p, &exact.lse, p->cu_seqlens_q ? p->total_q : p->len_q, c.at_end);
    memset(o.view.data, 0xff, bytes);
    fa_reference_fwd(&exact, NULL, NULL, &test_pool);
    for (int isa = FA_ISA_SCALAR; isa < FA_NUM_ISAS; isa++) {
        if (!machine.isa_legal[isa] || !takes_dtype((fa_isa)isa, dtype)) continue;
        memset(c.o.view.data, 0xff, bytes);
        memcpy(c.v.view.data, v_before.view.data, (size_t)c.v.num_elements * fa_dtype_bytes(dtype));
        if (!run_on((fa_isa)isa, 1 + (int)(seed % 3), p, c.at_end)) continue;
        const bool same_o = is_as_finite(&c.o, &o, dtype, 6), same_lse = worst_lse(p, &exact.lse) <= 2e-5;
        if (same_o && same_lse) continue;
        printf("  %s:%s%s not what the reference has\n", name_of((fa_isa)isa), same_o ? "" : " o",
               same_lse ? "" : " lse");
        good = false;
    }
    if (!good) {
        case_print(&c);
        printf("  (check_decode, NaN and infinities in V; new keys %d)\n", (int)p->len_new);
    }
    guarded_free_all();
    return good;
}

static void test_nonfinite_values(void **state) {
    (void)state;
    bool good = true;
    for (uint64_t seed = FIRST_SEED(7000); seed < FIRST_SEED(7000 + (IS_CUDA ? 200 : NUM_SEEDS(130))); seed++)
        for (int dtype = FA_F16; dtype <= (IS_CUDA ? FA_BF16 : FA_F32); dtype++)
            good = check_nonfinite_values(seed, (fa_dtype)dtype) && good;
    assert_true(good);
}

int main(int argc, char **argv) {
    fa_cpu_detect(&machine);
#if defined(CHECK_CUDA)
    for (int isa = 0; isa < FA_NUM_ISAS; isa++) machine.isa_legal[isa] = isa == HOPPER || isa == BEFORE_HOPPER;
#endif
    if (argc > 2 && !strcmp(argv[1], "--seed")) {
        bool good = true;
        for (int dtype = FA_F16; dtype <= (IS_CUDA ? FA_BF16 : FA_E4M3); dtype++)
            good = (dtype == FA_F64 || check_case(strtoull(argv[2], NULL, 10), (fa_dtype)dtype, true)) && good;
        return !good;
    }
#if defined(CHECK_CUDA)
    const struct CMUnitTest cuda_tests[] = {cmocka_unit_test(test_bf16),
                                            cmocka_unit_test(test_f16),
                                            cmocka_unit_test(test_nonfinite),
                                            cmocka_unit_test(test_infinite_scores),
                                            cmocka_unit_test(test_nonfinite_values),
                                            cmocka_unit_test(test_many_clusters),
                                            cmocka_unit_test(test_few_clusters),
                                            cmocka_unit_test(test_more_sequences_than_threads),
                                            cmocka_unit_test(test_chunks)};
    return cmocka_run_group_tests(cuda_tests, NULL, NULL);
#else
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f16),
        cmocka_unit_test(test_e4m3),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_mixed_threads),
        cmocka_unit_test(test_infinite_scores),
        cmocka_unit_test(test_nonfinite_values),
        cmocka_unit_test(test_failing_pool),
        cmocka_unit_test(test_meetings_of_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
