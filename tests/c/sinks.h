/* Learned sinks: drawn numbers, and what csrc/cpu/sinks.c makes of results without sinks. */
#ifndef FA_TEST_SINKS_H
#define FA_TEST_SINKS_H

#include "cases.h"
#include "cpu/element.h"
#include "cpu/sinks.h"
#include "pool.h"

/* Some sinks are infinite, or far above or below all scores. */
static void draw_sinks(test_case *c, uint64_t seed) {
    static const double ends[] = {INFINITY, -INFINITY, 300, -300};
    static const fa_dtype dtypes[] = {FA_F16, FA_BF16, FA_F32, FA_F64};
    random_source source = {~seed * 5}, *r = &source;
    fa_problem *p = &c->p;
    if (p->pass != FA_FWD || p->dtype == FA_E4M3 || random_chance(r, 50)) return;
    p->sinks.dtype = dtypes[random_below(r, COUNT(dtypes))], p->sinks.stride = 1 + random_below(r, 2);
    const size_t bytes = fa_dtype_bytes(p->sinks.dtype);
    void *data = guarded_alloc((size_t)((p->h - 1) * p->sinks.stride + 1) * bytes, bytes, c->at_end);
    for (int64_t i = 0; i < p->h; i++) {
        const double x = random_chance(r, 10) ? ends[random_below(r, COUNT(ends))] : 8 * random_uniform(r) - 4;
        fa_set_element(data, p->sinks.dtype, i * p->sinks.stride, x);
    }
    p->sinks.data = data;
}

/* Adds the sinks of a problem to a result in fp64 and to its lse, both without sinks. The reference, which adds sinks
 * itself, must find the same. */
static void add_sinks(const fa_problem *p, const fa_view *out, const fa_row_stats *lse) {
    const bool is_packed = p->cu_seqlens_q != NULL;
    const fa_sinks sinks = {.dtype = FA_F64,
                            .b = is_packed ? 1 : p->b,
                            .h = p->h,
                            .rows = is_packed ? p->total_q : p->len_q,
                            .d = p->d_v,
                            .sinks = p->sinks,
                            .out = *out,
                            .lse = {lse->data, lse->stride_b, lse->stride_h, 1},
                            .end = is_packed ? p->cu_seqlens_q + p->b : NULL};
    if (p->sinks.data) assert_true(fa_cpu_add_sinks(&sinks, &test_pool));
}

/* Adds the sinks to the naive result. The exact result has them. */
static void add_sinks_to_naive(const fa_problem *p, const fa_problem *exact, const fa_view *naive, bool at_end) {
    fa_row_stats lse;
    fa_problem plain = *exact;
    if (!p->sinks.data) return;
    alloc_row_stats(p, &lse, p->cu_seqlens_q ? p->total_q : p->len_q, at_end);
    plain.sinks.data = NULL;
    plain.sink_probability.data = NULL;
    plain.lse = lse;
    assert_true(fa_reference_fwd(&plain, NULL, NULL, &test_pool)); /* o is written again */
    add_sinks(p, naive, &lse);
    assert_true(fa_reference_fwd(exact, NULL, NULL, &test_pool));
}

#endif
