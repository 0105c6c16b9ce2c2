/* Programmable attention of the CPU engine against a naive evaluation in double, on random shapes, masks and mods.
 *
 *   check_flex              all tests, on every instruction set of this machine
 *   check_flex --seed N     one random case, with its errors
 *   check_flex_emulated --emulated     the kernels that amx_emulation.h emulates; the programs need AVX-512 itself
 *
 * The tolerance is a multiple of the dtype's unit in the last place, relative to the largest element of the output. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "cpu/convert.h"
#include "cpu/flex_seen.h"
#include "dropout_at.h"
#include "few_seeds.h"
#include "flex/operations.h"
#include "guarded.h"
#include "mods.h"
#include "pool.h"
#include <time.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static fa_machine machine;

static uint64_t random_state;
static uint64_t draw(void) {
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t x = random_state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
static int64_t below(int64_t n) { return (int64_t)(draw() % (uint64_t)n); }
static double real(void) { return (double)(int64_t)draw() * 0x1p-63; }

/* Whether a case runs on an instruction set. The reference is slow, so it runs a quarter of the cases, and all in
 * fp64. */
static bool runs_on(int isa, uint64_t seed, fa_dtype dtype) {
    if (isa == FA_ISA_REFERENCE && dtype != FA_F64 && seed % 4) return false;
    return machine.isa_legal[isa] && takes_dtype((fa_isa)isa, dtype);
}

/* ---- a random case ------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t seed;
    fa_problem p;
    fa_flex flex;
    int mask, score;
    mod_values values;
    mod_program mask_program, score_program, derivative;
    uint8_t *kinds; /* [mask_b][mask_h][rows][columns] */
    void *gradients[4];
} flex_case;

static void *zeros(int64_t num, size_t bytes) {
    void *data = guarded_alloc((size_t)num * bytes, bytes, true);
    memset(data, 0, (size_t)num * bytes);
    return data;
}

/* A tensor [b][h][row][d] or [b][row][h][d]. */
static fa_view new_tensor(const flex_case *c, int64_t len, int64_t h, int64_t d, double size) {
    const fa_problem *p = &c->p;
    const bool heads_first = draw() % 2;
    fa_view t = {.stride_b = len * h * d, .stride_row = heads_first ? d : h * d, .stride_h = heads_first ? len * d : d};
    t.data = guarded_alloc((size_t)(p->b * len * h * d) * fa_dtype_bytes(p->dtype), fa_dtype_bytes(p->dtype), true);
    for (int64_t i = 0; i < p->b * len * h * d && size > 0; i++) fa_store_element(t.data, i, size * real(), p->dtype);
    return t;
}

static fa_row_stats new_stats(const fa_problem *p) {
    float *data = guarded_alloc((size_t)(p->b * p->h * p->len_q) * 4, 4, true);
    return (fa_row_stats){data, p->h * p->len_q, p->len_q, 0};
}

static void make_values(flex_case *c) {
    mod_values *v = &c->values;
    const fa_problem *p = &c->p;
    *v = (mod_values){.len = (p->len_q > p->len_kv ? p->len_q : p->len_kv) + 1,
                      .len_q = p->len_q,
                      .len_kv = p->len_kv,
                      .h = p->h,
                      .param = 0.5 + real()};
    v->document = zeros(v->len, 4);
    v->slope = zeros(v->h, 4);
    v->slope_64 = zeros(v->h, 8);
    v->bias = zeros(v->h * v->len_q * v->len_kv, 4);
    v->rel = zeros(2 * v->len, 4);
    for (int64_t i = 0, doc = 0; i < v->len; i++) v->document[i] = (int32_t)(doc += draw() % 40 == 0);
    for (int64_t i = 0; i < v->h; i++) v->slope_64[i] = v->slope[i] = (float)(real() / 16);
    for (int64_t i = 0; i < v->h * v->len_q * v->len_kv; i++) v->bias[i] = (float)real();
    for (int64_t i = 0; i < 2 * v->len; i++) v->rel[i] = (float)real();
}

/* Lists blocks of one kind in any order, with garbage behind them. */
static fa_flex_list list_blocks(const flex_case *c, uint8_t kind) {
    const fa_flex *f = &c->flex;
    const int64_t heads = f->mask_b * f->mask_h, rows = f->rows, columns = f->columns;
    int32_t *num = zeros(heads * rows, 4), *blocks = zeros(heads * rows * columns, 4);
    fa_flex_list list = {
        num, blocks, {f->mask_h * rows, rows, 1}, {f->mask_h * rows * columns, rows * columns, columns, 1}};
    for (int64_t row = 0; row < heads * rows; row++) {
        int32_t *at = blocks + row * columns;
        for (int64_t i = 0; i < columns; i++) at[i] = draw() % 2 ? INT32_MAX : -5;
        for (int64_t i = 0; i < columns; i++) {
            const bool twice =
                kind == 1 && c->kinds[row * columns + i] == 2 && i % 2; /* full blocks may also be partial */
            if (c->kinds[row * columns + i] != kind && !twice) continue;
            const int64_t to = below(num[row] + 1);
            at[num[row]++] = at[to];
            at[to] = (int32_t)i;
        }
    }
    return list;
}

static void make_blocks(flex_case *c) {
    static const int64_t sizes[] = {1, 16, 48, 64, 96, 128, 200};
    fa_flex *f = &c->flex;
    const fa_problem *p = &c->p;
    f->mask_b = draw() % 2 ? 1 : p->b;
    f->mask_h = draw() % 2 ? 1 : p->h;
    f->block_q = draw() % 4 ? sizes[below(COUNT(sizes))] : 0;
    if (f->block_q == 0) return;
    f->block_kv = sizes[below(COUNT(sizes))];
    f->rows = (p->len_q + f->block_q - 1) / f->block_q;
    f->columns = (p->len_kv + f->block_kv - 1) / f->block_kv;
    const int64_t num = f->mask_b * f->mask_h * f->rows * f->columns;
    const int64_t odds = 1 + below(6); /* about one block of `odds` is full, and one is partial */
    c->kinds = zeros(num, 1);
    for (int64_t i = 0; i < num; i++) c->kinds[i] = (uint8_t)(below(odds) ? (below(odds) ? 0 : 1) : 2);
    f->partial = list_blocks(c, 1);
    if (draw() % 4) f->full = list_blocks(c, 2);
    for (int64_t i = 0; i < num && !f->full.num; i++)
        c->kinds[i] = c->kinds[i] == 2 && i % f->columns % 2 ? 1 : c->kinds[i] & 1;
}

static flex_case *case_new(uint64_t seed, fa_dtype dtype, fa_pass pass) {
    static const int64_t dims[] = {8, 16, 40, 64, 80, 128, 192, 256},
                         lens[] = {1, 15, 16, 17, 33, 64, 127, 128, 129, 200, 300, 1100};
    static const double lowest[] = {1, 1, 2, 3};
    flex_case *c = calloc(1, sizeof *c);
    fa_problem *p = &c->p;
    random_state = seed * 977 + dtype;
    c->seed = seed;
    const int64_t g = 1 + below(3);
    p->dtype = dtype;
    p->b = 1 + below(2), p->h_kv = 1 + below(2), p->h = g * p->h_kv;
    p->len_q = draw() % 3 ? lens[below(COUNT(lens) - 1)] : 1 + below(260);
    p->len_kv = draw() % 3 ? lens[below(COUNT(lens))] : 1 + below(400);
    p->d = dims[below(COUNT(dims))], p->d_v = draw() % 3 ? p->d : dims[below(COUNT(dims))];
    p->total_q = p->b * p->len_q, p->total_kv = p->b * p->len_kv;
    p->scale = (draw() % 8 ? 1 : -1) * lowest[below(COUNT(lowest))] / sqrt((double)p->d);
    p->window_left = p->window_right = -1;
    p->empty_lse = -INFINITY;
    p->q = new_tensor(c, p->len_q, p->h, p->d, 2);
    p->k = new_tensor(c, p->len_kv, p->h_kv, p->d, 2);
    p->v = new_tensor(c, p->len_kv, p->h_kv, p->d_v, 1);
    p->o = new_tensor(c, p->len_q, p->h, p->d_v, 0);
    p->lse = new_stats(p);
    make_values(c);
    make_blocks(c);
    c->mask = (int)below(NUM_MASKS);
    if (c->mask == NOTHING && draw() % 4) c->mask = DOCUMENT;
    c->score = (int)below(NUM_SCORES);
    p->flex = &c->flex;
    if (c->mask) make_mask(&c->mask_program, c->mask, &c->values), c->flex.mask = &c->mask_program.bound;
    if (c->score) {
        make_score(&c->score_program, c->score, &c->values, dtype == FA_F64, false);
        make_score(&c->derivative, c->score, &c->values, dtype == FA_F64, true);
        c->flex.score = &c->score_program.bound;
    }
    if (draw() % 2) c->flex.max_scores = new_stats(p);
    p->keep_max = 255;
    if (draw() % 4 == 0) p->dropout_p = 0.3, p->keep_max = 178, p->seed = draw(), p->offset = draw();
    if (pass == FA_FWD) return c;
    p->dout = new_tensor(c, p->len_q, p->h, p->d_v, 1);
    p->dq = new_tensor(c, p->len_q, p->h, p->d, 0);
    p->dk = new_tensor(c, p->len_kv, p->h_kv, p->d, 0);
    p->dv = new_tensor(c, p->len_kv, p->h_kv, p->d_v, 0);
    if (draw() % 8 == 0) p->dq.data = NULL;
    if (draw() % 8 == 0) p->dk.data = NULL;
    if (draw() % 8 == 0) p->dv.data = NULL;
    p->softmax_d = new_stats(p);
    if (draw() % 2) {
        c->flex.dlse = new_stats(p);
        for (int64_t i = 0; i < p->b * p->h * p->len_q; i++) c->flex.dlse.data[i] = (float)real();
    }
    if (!c->score) return c;
    c->flex.derivative = &c->derivative.bound;
    c->flex.gradients = c->gradients;
    c->gradients[1] = zeros(p->h, dtype == FA_F64 ? 8 : 4);
    c->gradients[2] = zeros(p->h * p->len_q * p->len_kv, 4);
    c->gradients[3] = zeros(2 * c->values.len, 4);
    return c;
}

static void case_free(flex_case *c) {
    fa_flex_free(&c->mask_program.program);
    fa_flex_free(&c->score_program.program);
    fa_flex_free(&c->derivative.program);
    free(c);
    guarded_free_all();
}

/* ---- the naive evaluation ------------------------------------------------------------------------------------ */

/* q, dout, o, dq [b][h][len_q][..], k, v, dk, dv [b][h_kv][len_kv][..] */
typedef struct {
    const double *q, *k, *v, *dout;
    double *o, *lse, *max_scores, *dq, *dk, *dv, *slope, *bias, *rel;
} naive;

static double at(const flex_case *c, const fa_view *t, int64_t b, int64_t h, int64_t row, int64_t i) {
    return fa_load_element(t->data, b * t->stride_b + h * t->stride_h + row * t->stride_row + i, c->p.dtype);
}

/* A tensor as doubles [b][h][len][d]. */
static double *doubles_of(const flex_case *c, const fa_view *t, int64_t h, int64_t len, int64_t d) {
    double *x = zeros(c->p.b * h * len * d, 8);
    for (int64_t i = 0; i < c->p.b * h * len * d; i++)
        x[i] = at(c, t, i / d / len / h, i / d / len % h, i / d % len, i % d);
    return x;
}

static bool is_visible(const flex_case *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    const fa_flex *f = &c->flex;
    const bool allowed = mask_of(c->mask, &c->values, b, h, i, j);
    if (f->block_q == 0) return allowed;
    const int64_t head = b % f->mask_b * f->mask_h + h % f->mask_h;
    const uint8_t kind = c->kinds[(head * f->rows + i / f->block_q) * f->columns + j / f->block_kv];
    return kind == 2 || (kind == 1 && allowed);
}

/* Four sums, because an addition waits for the one before it. */
static double dot(const double *x, const double *y, int64_t n) {
    double sum[4] = {0, 0, 0, 0};
    int64_t t = 0;
    for (; t + 4 <= n; t += 4)
        for (int64_t l = 0; l < 4; l++) sum[l] += x[t + l] * y[t + l];
    for (; t < n; t++) sum[0] += x[t] * y[t];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static void add_scaled(double *acc, double factor, const double *x, int64_t n) {
    for (int64_t t = 0; t < n; t++) acc[t] += factor * x[t];
}

static void naive_row(const flex_case *c, naive *n, int64_t b, int64_t h, int64_t i, bool backward) {
    const fa_problem *p = &c->p;
    const int64_t kv = h / (p->h / p->h_kv), row = (b * p->h + h) * p->len_q + i, keys = (b * p->h_kv + kv) * p->len_kv;
    double *s = malloc((size_t)(p->len_kv + 1) * 16), *factor = s + p->len_kv + 1, largest = -INFINITY, sum = 0;
    const double *q = n->q + row * p->d, *dout = n->dout + row * p->d_v;
    for (int64_t j = 0; j < p->len_kv; j++) {
        s[j] = -INFINITY;
        if (!is_visible(c, b, h, i, j)) continue;
        const double qk = dot(q, n->k + (keys + j) * p->d, p->d);
        s[j] = score_of(c->score, &c->values, p->scale * qk, h, i, j, &factor[j]);
        largest = fmax(largest, s[j]);
    }
    for (int64_t j = 0; j < p->len_kv; j++) {
        s[j] = s[j] == -INFINITY ? 0 : exp(s[j] - largest);
        sum += s[j];
    }
    n->max_scores[row] = largest;
    n->lse[row] = sum > 0 ? largest + log(sum) : -INFINITY;
    double delta = c->flex.dlse.data ? -c->flex.dlse.data[row] : 0;
    double *o = n->o + row * p->d_v;
    for (int64_t j = 0; j < p->len_kv; j++)
        if (s[j] > 0) add_scaled(o, s[j] / sum * dropout_at(p, b, h, i, j), n->v + (keys + j) * p->d_v, p->d_v);
    if (backward) delta += dot(o, dout, p->d_v);
    for (int64_t j = 0; j < p->len_kv && backward; j++) {
        if (!(s[j] > 0)) continue;
        const double prob = s[j] / sum, *k = n->k + (keys + j) * p->d, *v = n->v + (keys + j) * p->d_v;
        const double z = dropout_at(p, b, h, i, j);
        add_scaled(n->dv + (keys + j) * p->d_v, prob * z, dout, p->d_v);
        const double after = prob * (z * dot(dout, v, p->d_v) - delta), ds = after * factor[j] * p->scale;
        add_gradient(c->score, &c->values, after, h, i, j, n->slope, n->bias, n->rel);
        add_scaled(n->dq + row * p->d, ds, k, p->d);
        add_scaled(n->dk + (keys + j) * p->d, ds, q, p->d);
    }
    free(s);
}

static naive naive_of(const flex_case *c, bool backward) {
    const fa_problem *p = &c->p;
    const int64_t rows = p->b * p->h * p->len_q, keys = p->b * p->h_kv * p->len_kv;
    naive n = {
        .q = doubles_of(c, &p->q, p->h, p->len_q, p->d),
        .k = doubles_of(c, &p->k, p->h_kv, p->len_kv, p->d),
        .v = doubles_of(c, &p->v, p->h_kv, p->len_kv, p->d_v),
        .dout = backward ? doubles_of(c, &p->dout, p->h, p->len_q, p->d_v) : zeros(rows * p->d_v, 8),
        .o = zeros(rows * p->d_v, 8),
        .lse = zeros(rows, 8),
        .max_scores = zeros(rows, 8),
        .dq = zeros(rows * p->d, 8),
        .dk = zeros(keys * p->d, 8),
        .dv = zeros(keys * p->d_v, 8),
        .slope = zeros(p->h, 8),
        .bias = zeros(p->h * p->len_q * p->len_kv, 8),
        .rel = zeros(2 * c->values.len, 8),
    };
    for (int64_t row = 0; row < rows; row++)
        naive_row(c, &n, row / p->len_q / p->h, row / p->len_q % p->h, row % p->len_q, backward);
    return n;
}

enum { TABLE_BYTES = 64 << 20 };

/* ---- comparing ----------------------------------------------------------------------------------------------- */

typedef struct {
    double error, largest;
} deviation;

static void deviate(deviation *worst, double ours, double want) {
    const double error = ours == want || (isnan(ours) && isnan(want)) ? 0 : fabs(ours - want);
    if (!(error <= worst->error)) worst->error = isnan(error) ? INFINITY : error;
    if (fabs(want) > worst->largest && isfinite(want)) worst->largest = fabs(want);
}

static bool is_close(const flex_case *c, const char *isa, const char *name, deviation x, double allowed, bool verbose) {
    const bool good = x.error <= allowed;
    if (verbose || !good)
        printf("  seed %d %s %-10s %-10s error %.3g of %.3g%s\n", (int)c->seed, fa_dtype_name(c->p.dtype), isa, name,
               x.error, x.largest, good ? "" : "  TOO FAR");
    return good;
}

static deviation deviation_of(const flex_case *c, const fa_view *t, int64_t h, int64_t len, int64_t d,
                              const double *want) {
    deviation x = {0, 0};
    for (int64_t i = 0; t->data && i < c->p.b * h * len * d; i++)
        deviate(&x, at(c, t, i / d / len / h, i / d / len % h, i / d % len, i % d), want[i]);
    return x;
}

static deviation deviation_of_stats(const flex_case *c, const fa_row_stats *t, const double *want) {
    deviation x = {0, 0};
    for (int64_t i = 0; i < c->p.b * c->p.h * c->p.len_q; i++) deviate(&x, t->data[i], want[i]);
    return x;
}

static void wipe(const fa_problem *p, const fa_view *t, int64_t num) {
    if (t->data) memset(t->data, 0xff, (size_t)num * fa_dtype_bytes(p->dtype));
}

static void run_on(fa_isa isa, int threads, const fa_problem *p) {
    fa_machine lowered = machine;
    fa_plan plan;
    fa_error err = {""};
    lowered.isa = isa;
    lowered.threads = pool_threads = threads;
    fa_plan_cpu(p, &lowered, &plan);
    void *workspace = guarded_alloc(plan.workspace_bytes, 64, false);
    assert_int_equal(fa_cpu_run_call(p, &plan, false, workspace, &test_pool, &err), FA_OK);
}

static double unit_of(fa_dtype dtype) {
    return dtype == FA_F64 ? 1e-11 : dtype == FA_F32 ? 4e-6 : dtype == FA_F16 ? 0x1p-10 : 0x1p-7;
}

static bool check_gradients(const flex_case *c, const naive *n, const char *isa, double unit, bool verbose) {
    const mod_values *v = &c->values;
    deviation x = {0, 0};
    for (int64_t i = 0; i < v->h && c->score == SLOPE; i++)
        deviate(&x, c->p.dtype == FA_F64 ? ((double *)c->gradients[1])[i] : ((float *)c->gradients[1])[i], n->slope[i]);
    for (int64_t i = 0; i < v->h * v->len_q * v->len_kv && (c->score == BIAS || c->score == ADDS); i++)
        deviate(&x, ((float *)c->gradients[2])[i], n->bias[i]);
    for (int64_t i = 0; i < 2 * v->len && c->score == REL; i++) deviate(&x, ((float *)c->gradients[3])[i], n->rel[i]);
    return is_close(c, isa, "captures", x, unit * (x.largest + (c->score == SLOPE ? (double)v->len : 1)), verbose);
}

static bool check_isa(flex_case *c, fa_isa isa, const naive *n, bool backward, bool verbose) {
    fa_problem p = c->p;
    const char *name = fa_isa_name(isa);
    const double unit = unit_of(p.dtype), stats = p.dtype == FA_F64 ? 1e-6 : 4e-5;
    const int threads = 1 + (int)(c->seed % 3);
    bool good = true;
    fa_flex_most_table_bytes = c->seed % 4 ? TABLE_BYTES : 0; /* 0: each step finds its own view */
    wipe(&p, &p.o, p.b * p.h * p.len_q * p.d_v);
    memset(p.lse.data, 0xff, (size_t)(p.b * p.h * p.len_q) * 4);
    run_on(isa, threads, &p);
    deviation x = deviation_of(c, &p.o, p.h, p.len_q, p.d_v, n->o);
    good = is_close(c, name, "o", x, 2 * unit * (x.largest + 1e-3), verbose) && good;
    x = deviation_of_stats(c, &p.lse, n->lse);
    good = is_close(c, name, "lse", x, stats * (x.largest + 1), verbose) && good;
    if (c->flex.max_scores.data) {
        x = deviation_of_stats(c, &c->flex.max_scores, n->max_scores);
        good = is_close(c, name, "max_scores", x, stats * (x.largest + 1), verbose) && good;
    }
    if (!backward) return good;
    const double grads = p.dtype == FA_F64 ? 2e-6 : 4 * unit; /* lse and softmax_d are fp32 */
    p.pass = FA_BWD;
    wipe(&p, &p.dq, p.b * p.h * p.len_q * p.d);
    wipe(&p, &p.dk, p.b * p.h_kv * p.len_kv * p.d);
    wipe(&p, &p.dv, p.b * p.h_kv * p.len_kv * p.d_v);
    if (c->score) {
        memset(c->gradients[1], 0, (size_t)p.h * (p.dtype == FA_F64 ? 8 : 4));
        memset(c->gradients[2], 0, (size_t)(p.h * p.len_q * p.len_kv) * 4);
        memset(c->gradients[3], 0, (size_t)(2 * c->values.len) * 4);
    }
    run_on(isa, threads, &p);
    x = deviation_of(c, &p.dq, p.h, p.len_q, p.d, n->dq);
    good = is_close(c, name, "dq", x, grads * (x.largest + 1), verbose) && good;
    x = deviation_of(c, &p.dk, p.h_kv, p.len_kv, p.d, n->dk);
    good = is_close(c, name, "dk", x, grads * (x.largest + 1), verbose) && good;
    x = deviation_of(c, &p.dv, p.h_kv, p.len_kv, p.d_v, n->dv);
    good = is_close(c, name, "dv", x, grads * (x.largest + 1), verbose) && good;
    if (c->score) good = check_gradients(c, n, name, grads, verbose) && good;
    return good;
}

static bool check_seed(uint64_t seed, fa_dtype dtype, fa_pass pass, bool verbose) {
    flex_case *c = case_new(seed, dtype, pass);
    const fa_problem *p = &c->p;
    const naive n = naive_of(c, pass == FA_BWD);
    bool good = true;
    for (int isa = 0; isa < FA_NUM_ISAS; isa++)
        if (runs_on(isa, seed, dtype)) good = check_isa(c, (fa_isa)isa, &n, pass == FA_BWD, verbose) && good;
    if (verbose || !good)
        printf("  b %d h %d/%d len %d %d d %d %d mask %d score %d blocks %d %d of %d %d, heads %d %d\n", (int)p->b,
               (int)p->h, (int)p->h_kv, (int)p->len_q, (int)p->len_kv, (int)p->d, (int)p->d_v, c->mask, c->score,
               (int)c->flex.rows, (int)c->flex.columns, (int)c->flex.block_q, (int)c->flex.block_kv,
               (int)c->flex.mask_b, (int)c->flex.mask_h);
    case_free(c);
    return good;
}

static void check_seeds(fa_dtype dtype, fa_pass pass, uint64_t num) {
    bool good = true;
    for (uint64_t seed = FIRST_SEED(0); seed < FIRST_SEED(NUM_SEEDS(num)); seed++)
        good = check_seed(seed, dtype, pass, false) && good;
    assert_true(good);
}

/* ---- the same bits for any number of threads ----------------------------------------------------------------- */

static uint64_t hash_of(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; data && i < bytes; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    return hash;
}

/* The bits of all results of a backward, which adds to gradients of captures that begin as zeros. */
static uint64_t bits_of(flex_case *c, fa_isa isa, int threads) {
    const fa_problem *p = &c->p;
    const size_t element = fa_dtype_bytes(p->dtype);
    const size_t sizes[] = {0, (size_t)p->h, (size_t)(p->h * p->len_q * p->len_kv), (size_t)(2 * c->values.len)};
    for (int i = 1; i < 4 && c->score; i++) memset(c->gradients[i], 0, sizes[i] * 4);
    run_on(isa, threads, p);
    uint64_t hash = hash_of(0, p->dq.data, (size_t)(p->b * p->h * p->len_q * p->d) * element);
    hash = hash_of(hash, p->dk.data, (size_t)(p->b * p->h_kv * p->len_kv * p->d) * element);
    hash = hash_of(hash, p->dv.data, (size_t)(p->b * p->h_kv * p->len_kv * p->d_v) * element);
    for (int i = 1; i < 4 && c->score; i++) hash = hash_of(hash, c->gradients[i], sizes[i] * 4);
    return hash;
}

static void test_thread_counts(void **state) {
    (void)state;
    for (uint64_t seed = FIRST_SEED(100); seed < FIRST_SEED(100 + NUM_SEEDS(30)); seed++) {
        flex_case *c = case_new(seed, seed % 2 ? FA_F32 : FA_BF16, FA_BWD);
        for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
            if (!runs_on(isa, seed, c->p.dtype)) continue;
            c->p.pass = FA_FWD;
            run_on((fa_isa)isa, 1, &c->p);
            c->p.pass = FA_BWD;
            const uint64_t one = bits_of(c, (fa_isa)isa, 1);
            assert_true(one == bits_of(c, (fa_isa)isa, 2) && one == bits_of(c, (fa_isa)isa, 7));
            fa_flex_most_table_bytes = 0;
            assert_true(one == bits_of(c, (fa_isa)isa, 1) && one == bits_of(c, (fa_isa)isa, 3));
            fa_flex_most_table_bytes = TABLE_BYTES;
        }
        case_free(c);
    }
}

/* ---- views of a mask ----------------------------------------------------------------------------------------- */

/* Compares what one row of a view sees with every pair. Returns whether it sees something; *all: whether everything. */
static bool check_view_row(const flex_case *c, const fa_flex_view *view, const uint64_t *bits, int64_t b, int64_t h,
                           int64_t i, int row, int64_t block, int64_t end, bool *all, bool *gaps) {
    int64_t first = 255, stop = 0, num = 0;
    for (int64_t j = block; j < end; j++) {
        const bool sees = is_visible(c, b, h, i, j);
        const uint64_t word = bits[(j - block) * FA_FLEX_VIEW_WORDS + row / 64];
        if (sees != (word >> (row % 8 * 8 + row % 64 / 8) & 1))
            fail_msg("seed %d: bit of query %d and key %d", (int)c->seed, (int)i, (int)j);
        if (sees && num++ == 0) first = j - block;
        if (sees) stop = j - block + 1;
    }
    if (view->first[row] != first || view->end[row] != stop)
        fail_msg("seed %d: query %d sees keys %d to %d of block %d, not %d to %d", (int)c->seed, (int)i, (int)first,
                 (int)stop, (int)block, view->first[row], view->end[row]);
    *all = *all && num == end - block;
    *gaps = *gaps || (num > 0 && num < stop - first);
    return num > 0;
}

static void check_views(const flex_case *c, const fa_flex_seen *seen, const fa_flex_programs *programs, int64_t b,
                        int64_t h, int64_t row, int64_t block) {
    const int64_t rows = c->p.len_q - row < seen->band_rows ? c->p.len_q - row : seen->band_rows;
    const int64_t end = c->p.len_kv - block < seen->block_kv ? c->p.len_kv : block + seen->block_kv;
    uint64_t bits[FA_FLEX_TILE * FA_FLEX_VIEW_WORDS];
    fa_flex_view view;
    const int32_t kind = fa_flex_see(seen, programs, b, h, row, (int)rows, block, &view, bits);
    bool any = false, all = true, gaps = false;
    for (int i = 0; i < rows; i++)
        any = check_view_row(c, &view, bits, b, h, row + i, i, block, end, &all, &gaps) || any;
    for (int64_t i = rows; i < FA_FLEX_VIEW_ROWS; i++) assert_true(view.first[i] == 255 && view.end[i] == 0);
    for (int i = 0; i < FA_FLEX_VIEW_ROWS; i++) {
        const fa_flex_row_bounds x = view.vectors[i / seen->vec_rows];
        assert_true(x.low <= view.first[i] && view.first[i] <= x.most && x.least <= view.end[i] &&
                    view.end[i] <= x.high);
    }
    assert_int_equal(view.has_gaps, gaps);
    assert_int_equal(kind, all ? FA_FLEX_SEES_ALL : any ? FA_FLEX_SEES_SOME : FA_FLEX_SEES_NOTHING);
    fa_flex_see_task(seen, programs, b, h, row, row + rows, block, end); /* of this head, or of one like it */
    const int32_t found = *fa_flex_kind_seen(seen, b, h, row, block);
    assert_int_equal(found >= 0 ? FA_FLEX_SEES_SOME : found, kind);
    if (found < 0) return;
    assert_memory_equal(&seen->views[found], &view, sizeof view);
    const size_t words = (size_t)(end - block) * FA_FLEX_VIEW_WORDS;
    if (gaps) assert_memory_equal(seen->bits + found * seen->block_kv * FA_FLEX_VIEW_WORDS, bits, words * 8);
}

static void test_views(void **state) {
    static const int tiles[] = {32, 48, 64, 128}, blocks[] = {32, 64, 128};
    (void)state;
    for (uint64_t seed = FIRST_SEED(400); seed < FIRST_SEED(400 + NUM_SEEDS(60)); seed++) {
        flex_case *c = case_new(seed, FA_F32, FA_FWD);
        fa_flex_block_map map = fa_flex_block_map_of(&c->p);
        map.kinds = zeros((int64_t)fa_flex_block_map_bytes(&map), 1);
        fa_flex_fill_block_map(&map, &c->flex);
        fa_flex_seen seen =
            fa_flex_new_seen(&c->p, &map, tiles[below(COUNT(tiles))], blocks[below(COUNT(blocks))], 4 << below(3));
        fa_flex_programs programs;
        assert_true(seen.kinds && fa_flex_make_programs(&c->p, FA_ISA_SCALAR, false, &programs));
        for (int64_t head = 0; head < c->p.b * c->p.h; head++)
            for (int64_t row = 0; row < c->p.len_q; row += seen.band_rows)
                for (int64_t block = 0; block < c->p.len_kv; block += seen.block_kv)
                    check_views(c, &seen, &programs, head / c->p.h, head % c->p.h, row, block);
        fa_flex_free_programs(&programs);
        fa_flex_free_seen(&seen);
        case_free(c);
    }
}

/* ---- NaN and infinity beside a mask -------------------------------------------------------------------------- */

static void store(const flex_case *c, const fa_view *t, int64_t b, int64_t h, int64_t row, double x) {
    fa_store_element(t->data, b * t->stride_b + h * t->stride_h + row * t->stride_row, x, c->p.dtype);
}

static bool is_row_finite(const flex_case *c, const fa_view *t, int64_t b, int64_t h, int64_t row, int64_t d) {
    bool finite = true;
    for (int64_t i = 0; t->data && i < d; i++) finite = finite && isfinite(at(c, t, b, h, row, i));
    return finite;
}

/* Whether row i and key j of a head are a pair that is not masked. */
static bool is_pair(const flex_case *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    return is_visible(c, b, h, i, j) && !(c->score == HIDES && (i + j) % 5 == 0);
}

/* A NaN in one row of q, k, v or dout reaches only rows and keys that form a pair with that row, and then keys of these
 * rows. */
static bool check_nan(flex_case *c, fa_isa isa, int where) {
    fa_problem *p = &c->p;
    const fa_view *views[] = {&p->q, &p->k, &p->v, &p->dout};
    const bool on_key = where == 1 || where == 2;
    const int64_t g = p->h / p->h_kv, b = below(p->b), head = below(p->h), kv = head / g;
    const int64_t row = below(p->len_q), key = below(p->len_kv);
    bool good = true, *reached = calloc((size_t)(p->h * p->len_q), 1);
    if (where != 3) store(c, views[where], b, on_key ? kv : head, on_key ? key : row, NAN);
    p->pass = FA_FWD;
    run_on(isa, 2, p);
    if (where == 3) store(c, views[where], b, head, row, NAN); /* o and lse are inputs of the backward */
    p->pass = FA_BWD;
    run_on(isa, 2, p);
    for (int64_t n = 0; n < p->b * p->h * p->len_q; n++) {
        const int64_t nb = n / p->len_q / p->h, nh = n / p->len_q % p->h, ni = n % p->len_q;
        const bool is_reached =
            nb == b && (on_key ? nh / g == kv && is_pair(c, b, nh, ni, key) : nh == head && ni == row);
        if (nb == b) reached[nh * p->len_q + ni] = is_reached;
        if (!is_reached) good = good && is_row_finite(c, &p->o, nb, nh, ni, p->d_v);
        if (!is_reached) good = good && is_row_finite(c, &p->dq, nb, nh, ni, p->d);
    }
    for (int64_t n = 0; n < p->b * p->h_kv * p->len_kv; n++) {
        const int64_t nb = n / p->len_kv / p->h_kv, nh = n / p->len_kv % p->h_kv, nj = n % p->len_kv;
        bool is_reached = false;
        for (int64_t x = nh * g * p->len_q; x < (nh + 1) * g * p->len_q && nb == b; x++)
            is_reached = is_reached || (reached[x] && is_pair(c, b, x / p->len_q, x % p->len_q, nj));
        if (is_reached) continue;
        good = good && is_row_finite(c, &p->dk, nb, nh, nj, p->d) && is_row_finite(c, &p->dv, nb, nh, nj, p->d_v);
    }
    if (!good) printf("  %s: NaN of tensor %d crosses the mask, seed %d\n", fa_isa_name(isa), where, (int)c->seed);
    free(reached);
    return good;
}

static void test_nonfinite(void **state) {
    (void)state;
    bool good = true;
    for (uint64_t seed = FIRST_SEED(200); seed < FIRST_SEED(200 + NUM_SEEDS(60)); seed++)
        for (int isa = 0; isa < FA_NUM_ISAS; isa++) {
            const fa_dtype dtype = seed % 2 ? FA_F32 : FA_BF16;
            if (!runs_on(isa, seed, dtype)) continue;
            flex_case *c = case_new(seed, dtype, FA_BWD);
            good = check_nan(c, (fa_isa)isa, (int)(seed / 2 % 4)) && good;
            case_free(c);
        }
    assert_true(good);
}

/* ---- the loops of each instruction set against those in portable C ------------------------------------------- */

enum { NUM_ELEMENTS = 64 };
typedef union {
    uint8_t b[8 * NUM_ELEMENTS];
    int64_t i[NUM_ELEMENTS];
    float f[NUM_ELEMENTS];
    double d[NUM_ELEMENTS];
} elements;

static void fill_elements(elements *x, fa_flex_type type) {
    static const double special[] = {INFINITY, -INFINITY, NAN, 0, -0.0, 1e-39, 88.7, -104, 9.1, 1};
    for (int i = 0; i < NUM_ELEMENTS; i++) {
        const double number = draw() % 4 ? 20 * real() : special[below(COUNT(special))];
        if (type == FA_FLEX_BOOL) x->b[i] = draw() % 2;
        if (type == FA_FLEX_I64) x->i[i] = draw() % 8 ? below(21) - 10 : (int64_t)draw();
        if (type == FA_FLEX_F32) x->f[i] = (float)number;
        if (type == FA_FLEX_F64) x->d[i] = number;
    }
}

/* Functions of fp32 may differ by some units in the last place. */
static bool are_alike(const elements *x, const elements *y, fa_flex_type result) {
    const size_t bytes = result == FA_FLEX_BOOL ? 1 : result == FA_FLEX_F32 ? 4 : 8;
    if (result != FA_FLEX_F32) return !memcmp(x, y, bytes * NUM_ELEMENTS);
    bool alike = true;
    for (int i = 0; i < NUM_ELEMENTS; i++)
        alike = alike && (x->f[i] == y->f[i] || (isnan(x->f[i]) && isnan(y->f[i])) ||
                          fabsf(x->f[i] - y->f[i]) <= 5e-7f * fabsf(y->f[i]) + 1e-44f);
    return alike;
}

static void check_operation(const fa_flex_operations *operations, int op, fa_flex_type type, fa_flex_type from) {
    const bool is_where = op == FA_FLEX_where, compares = op >= FA_FLEX_eq && op <= FA_FLEX_le;
    elements in[3], ours = {{0}}, want = {{0}};
    for (int i = 0; i < 3; i++) fill_elements(&in[i], is_where && i == 0 ? FA_FLEX_BOOL : from);
    const fa_flex_instruction x = {.op = (uint8_t)op, .type = (uint8_t)type};
    fa_flex_operation o = {.x = &x, .from = (uint8_t)from, .n = NUM_ELEMENTS, .in = {&in[0], &in[1], &in[2]}};
    o.r = &want;
    fa_flex_operations_scalar.operate(&o);
    o.r = &ours;
    operations->operate(&o);
    if (!are_alike(&ours, &want, compares ? FA_FLEX_BOOL : type))
        fail_msg("%s of type %d from %d differs", fa_flex_ops[op].name, type, from);
}

static void test_operations(void **state) {
    (void)state;
    random_state = 1;
    const fa_flex_operations *tables[] = {&fa_flex_operations_scalar,
#if FA_X86
                                          machine.isa_legal[FA_ISA_AVX2] ? &fa_flex_operations_avx2 : NULL,
                                          machine.isa_legal[FA_ISA_AVX512] ? &fa_flex_operations_avx512 : NULL
#elif FA_NEON
                                          &fa_flex_operations_neon
#endif
    };
    for (size_t n = 0; n < COUNT(tables); n++)
        for (int op = FA_FLEX_convert; op < FA_FLEX_NUM_CODES && tables[n]; op++)
            for (int type = 0; type < FA_FLEX_NUM_TYPES; type++)
                for (int from = 0; from < FA_FLEX_NUM_TYPES; from++)
                    if (op != FA_FLEX_grad && op != FA_FLEX_scatter && fa_flex_ops[op].types >> type & 1 &&
                        (from == type || op == FA_FLEX_convert))
                        check_operation(tables[n], op, (fa_flex_type)type, (fa_flex_type)from);
}

static void test_fwd_f32(void **state) { (void)state, check_seeds(FA_F32, FA_FWD, 60); }
static void test_fwd_bf16(void **state) { (void)state, check_seeds(FA_BF16, FA_FWD, 60); }
static void test_fwd_f16(void **state) { (void)state, check_seeds(FA_F16, FA_FWD, 20); }
static void test_fwd_f64(void **state) { (void)state, check_seeds(FA_F64, FA_FWD, 30); }
static void test_bwd_f32(void **state) { (void)state, check_seeds(FA_F32, FA_BWD, 60); }
static void test_bwd_bf16(void **state) { (void)state, check_seeds(FA_BF16, FA_BWD, 60); }
static void test_bwd_f16(void **state) { (void)state, check_seeds(FA_F16, FA_BWD, 20); }
static void test_bwd_f64(void **state) { (void)state, check_seeds(FA_F64, FA_BWD, 30); }

int main(int argc, char **argv) {
    fa_cpu_detect(&machine);
    const bool is_emulation = argc > 1 && !strcmp(argv[1], "--emulated");
    if (is_emulation && !machine.isa_legal[FA_ISA_AVX512]) {
        puts("check_flex_emulated: no test ran, because this processor lacks AVX-512");
        return 0;
    }
    for (int isa = FA_ISA_REFERENCE; is_emulation && isa < FA_NUM_ISAS; isa++)
        machine.isa_legal[isa] = isa == FA_ISA_AVX512BF16 || isa == FA_ISA_AMX;
    if (argc == 3 && !strcmp(argv[1], "--seed")) {
        const uint64_t seed = strtoull(argv[2], NULL, 0);
        static const fa_dtype dtypes[] = {FA_F32, FA_BF16, FA_F16, FA_F64};
        bool good = true;
        for (size_t i = 0; i < 2 * COUNT(dtypes); i++)
            good = check_seed(seed, dtypes[i / 2], i % 2 ? FA_BWD : FA_FWD, true) && good;
        return !good;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_operations),    cmocka_unit_test(test_fwd_f32), cmocka_unit_test(test_fwd_bf16),
        cmocka_unit_test(test_fwd_f16),       cmocka_unit_test(test_fwd_f64), cmocka_unit_test(test_bwd_f32),
        cmocka_unit_test(test_bwd_bf16),      cmocka_unit_test(test_bwd_f16), cmocka_unit_test(test_bwd_f64),
        cmocka_unit_test(test_thread_counts), cmocka_unit_test(test_views),   cmocka_unit_test(test_nonfinite)};
    const struct CMUnitTest emulated_tests[] = {cmocka_unit_test(test_fwd_bf16), cmocka_unit_test(test_bwd_bf16),
                                                cmocka_unit_test(test_thread_counts), cmocka_unit_test(test_views),
                                                cmocka_unit_test(test_nonfinite)};
    if (is_emulation) return cmocka_run_group_tests(emulated_tests, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
