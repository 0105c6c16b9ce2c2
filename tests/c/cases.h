/* A random attention problem in guarded memory. The seed alone determines the problem.
 *
 * In half of the cases memory that no visible pair of row and key touches stays NaN. Such memory is padding between
 * rows, left padding, keys past their sequence, unowned pages, and rows and keys that the mask hides from all
 * others. */
#ifndef FA_TEST_CASES_H
#define FA_TEST_CASES_H

#include "cpu/convert.h"
#include "few_seeds.h"
#include "guarded.h"
#include "sequence.h"
#include <math.h>
#include <stdio.h>

/* ---- random numbers ------------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t state;
} random_source;

static uint64_t random_bits(random_source *r) { /* splitmix64 */
    uint64_t z = r->state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int64_t random_below(random_source *r, int64_t n) { return (int64_t)(random_bits(r) % (uint64_t)n); }
static bool random_chance(random_source *r, int percent) { return random_below(r, 100) < percent; }
static double random_uniform(random_source *r) { return (double)(random_bits(r) >> 11) * 0x1p-53; }

/* Nearly normal: the sum of eight numbers, up to 4.9 standard deviations. Logarithm and cosine would take a third of
 * the time of the tests. */
static double random_normal(random_source *r) {
    int64_t sum = -0x40000;
    for (int n = 0; n < 2; n++) {
        const uint64_t bits = random_bits(r);
        for (int i = 0; i < 64; i += 16) sum += (int64_t)(bits >> i & 0xffff);
    }
    return 1.224744871391589 / 65536 * (double)sum; /* the square root of 12 / 8 */
}

/* ---- tensors ------------------------------------------------------------------------------------------------- */

typedef struct {
    fa_view view;
    fa_dtype dtype;
    int64_t columns;      /* elements of a row */
    int64_t num_elements; /* from data to the last element of the last row */
} tensor;

#ifndef ROW_PADDING
#define ROW_PADDING 3 /* elements */
#endif

typedef enum { ROWS_THEN_HEADS, HEADS_THEN_ROWS, PADDED_ROWS, NUM_LAYOUTS } tensor_layout;

/* Do all rows consist of aligned pieces of 16 bytes, without additions of flash-attn 3? Some GPU kernels want this. */
static bool has_16_bytes;

/* Are calls so long that all rows of most tiles see them whole? They have a mask or none, and no other option. */
static bool has_whole_tiles;
/* The same, dense, with up to 64 queries and keys. */
static bool is_short;

static tensor tensor_of(fa_dtype dtype, int64_t columns, int64_t b, int64_t rows, int64_t h, tensor_layout layout,
                        bool at_end) {
    tensor t = {.view = {.stride_b = rows * h * columns, .stride_row = h * columns, .stride_h = columns},
                .dtype = dtype,
                .columns = columns};
    if (layout == HEADS_THEN_ROWS) t.view.stride_row = columns, t.view.stride_h = rows * columns;
    const int64_t padding = has_16_bytes ? 8 : ROW_PADDING;
    if (layout == PADDED_ROWS) t.view.stride_row += padding, t.view.stride_b += padding * (rows + 2);
    if (b * rows * h > 0)
        t.num_elements =
            (b - 1) * t.view.stride_b + (rows - 1) * t.view.stride_row + (h - 1) * t.view.stride_h + columns;
    size_t element = fa_dtype_bytes(dtype);
    t.view.data = guarded_alloc((size_t)t.num_elements * element, has_16_bytes ? 16 : element, at_end);
    return t;
}

/* A tensor like q or k. */
static tensor tensor_make(const fa_problem *p, int64_t b, int64_t rows, int64_t h, tensor_layout layout, bool at_end) {
    return tensor_of(p->dtype, p->d, b, rows, h, layout, at_end);
}

static size_t tensor_bytes(const tensor *t) { return (size_t)t->num_elements * fa_dtype_bytes(t->dtype); }

/* A copy with the same values and strides in fp64. */
static tensor tensor_widened(const tensor *t, bool at_end) {
    tensor wide = *t;
    wide.dtype = FA_F64;
    wide.view.data = guarded_alloc((size_t)t->num_elements * sizeof(double), sizeof(double), at_end);
    for (int64_t i = 0; i < t->num_elements; i++)
        ((double *)wide.view.data)[i] = fa_load_element(t->view.data, i, t->dtype);
    return wide;
}

/* tensor_widened, with the rows of all sequences multiplied by their descales. */
static tensor tensor_descaled(const fa_problem *p, const tensor *t, const fa_descale *descale, bool is_key,
                              bool at_end) {
    tensor wide = tensor_widened(t, at_end);
    for (int64_t b_idx = 0; b_idx < p->b && p->dtype == FA_E4M3; b_idx++) {
        const fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t row = 0; row < (is_key ? s.len_kv : s.len_q); row++)
            for (int64_t head = 0; head < (is_key ? p->h_kv : p->h); head++) {
                const double factor = fa_descale_of(descale, b_idx, is_key ? head : head / (p->h / p->h_kv));
                const int64_t at =
                    is_key ? fa_key_offset(p, &t->view, &s, row, head) : fa_query_offset(&t->view, &s, row, head);
                for (int64_t i = 0; i < t->columns; i++) ((double *)wide.view.data)[at + i] *= factor;
            }
    }
    return wide;
}

static void fill_row(tensor *t, int64_t offset, double amplitude, random_source *r) {
    for (int64_t i = 0; i < t->columns; i++)
        fa_store_element(t->view.data, offset + i, amplitude * random_normal(r), t->dtype);
}

/* ---- a case -------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t seed;
    fa_problem p;
    tensor q, k, v, o, dout, dq, dk, dv, qv;
    bool at_end;
    bool hides_nan; /* untouched rows and keys hold NaN */
    double amplitude;
} test_case;

#ifndef HEAD_DIMS
#define HEAD_DIMS 1, 7, 8, 16, 33, 40, 64, 80, 96, 128, 192, 255, 256
#endif
static const int64_t head_dims[] = {HEAD_DIMS};
static const int64_t head_dims_of_16_bytes[] = {64, 128, 8, 96, 256, 104, 136, 192, 40, 128, 200, 64, 248};
static const int64_t head_dims_of_tiles[] = {32, 48, 64, 80, 96, 112, 128, 160, 192, 256}; /* before Hopper */
static const int64_t v_head_dims[] = {1, 8, 31, 64, 96, 128, 200, 512};
static const int64_t lengths[] = {0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129};
#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))

static const int64_t most_work = 8000000; /* pairs times head_dim; the reference is slow */

static int64_t random_length(random_source *r) {
    return random_chance(r, 20) ? 130 + random_below(r, 300) : lengths[random_below(r, COUNT(lengths))];
}

static int32_t *random_cu_seqlens(random_source *r, int64_t b, int64_t max_len, bool at_end) {
    int32_t *cu = guarded_alloc((size_t)(b + 1) * sizeof *cu, sizeof *cu, at_end);
    cu[0] = 0;
    for (int64_t i = 0; i < b; i++) cu[i + 1] = cu[i] + (int32_t)(i == 0 ? max_len : random_below(r, max_len + 1));
    return cu;
}

static int32_t *random_ints(random_source *r, int64_t n, int64_t limit, bool at_end) {
    int32_t *ints = guarded_alloc((size_t)n * sizeof *ints, sizeof *ints, at_end);
    for (int64_t i = 0; i < n; i++) ints[i] = (int32_t)random_below(r, limit);
    return ints;
}

/* Distinct numbers below n. */
static void random_shuffle(random_source *r, int32_t *numbers, int64_t n) {
    for (int64_t i = 0; i < n; i++) numbers[i] = (int32_t)i;
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = random_below(r, i + 1);
        int32_t held = numbers[i];
        numbers[i] = numbers[j], numbers[j] = held;
    }
}

static float *alloc_row_stats(const fa_problem *p, fa_row_stats *stats, int64_t rows, bool at_end) {
    bool packed = p->cu_seqlens_q != NULL;
    *stats = (fa_row_stats){.stride_h = rows, .stride_b = packed ? 0 : p->h * rows};
    size_t n = (size_t)(p->h * rows * (packed ? 1 : p->b));
    return stats->data = guarded_alloc(n * sizeof(float), sizeof(float), at_end);
}

/* What flash-attn 3 adds to flash-attn 2. The numbers come from a source of their own. The decode kernel for Hopper
 * knows only some additions: empty_lse, packed queries beside a cache and rotary positions. */
#ifndef DRAWS_ALL_ADDITIONS
#define DRAWS_ALL_ADDITIONS true
#endif

static random_source source_of_additions(uint64_t seed) { return (random_source){~seed}; }

static fa_descale random_descale(const test_case *c, random_source *r) {
    const int64_t stride_b = random_below(r, 2) * c->p.h_kv * 2, stride_h = random_below(r, 3);
    if (random_chance(r, 20)) return (fa_descale){0};
    const int64_t n = (c->p.b - 1) * stride_b + (c->p.h_kv - 1) * stride_h + 1;
    float *factors = guarded_alloc((size_t)n * sizeof *factors, sizeof *factors, c->at_end);
    for (int64_t i = 0; i < n; i++) factors[i] = (float)exp2(4 * random_uniform(r) - 2);
    return (fa_descale){factors, stride_b, stride_h};
}

/* The additions that say what is computed. draw_placement draws those that say where rows lie. */
static void draw_additions(test_case *c, random_source *more) {
    fa_problem *p = &c->p;
    p->empty_lse = INFINITY;
    if (has_16_bytes) return;
    if (p->dtype == FA_E4M3) {
        p->q_descale = random_descale(c, more);
        p->k_descale = random_descale(c, more);
        p->v_descale = random_descale(c, more);
    }
    if (DRAWS_ALL_ADDITIONS && random_chance(more, 40)) p->d_v = v_head_dims[random_below(more, COUNT(v_head_dims))];
    if (DRAWS_ALL_ADDITIONS && random_chance(more, 30))
        p->attention_chunk = 1 + random_below(more, random_chance(more, 50) ? 16 : 300);
    if (random_chance(more, 50)) p->empty_lse = -INFINITY;
}

static void draw_masks(test_case *c, random_source *r, random_source *more) {
    fa_problem *p = &c->p;
    p->scale = 1 / sqrt((double)(p->d + (p->qv.data ? p->d_v : 0)));
    if (has_whole_tiles) {
        p->window_left = random_chance(r, 20) ? random_below(r, p->len_kv) : -1;
        p->window_right = random_chance(r, 50) ? 0 : -1;
        return;
    }
    if (random_chance(more, 20)) p->scale = -p->scale;
    p->softcap = random_chance(r, 25) ? 2 + 10 * random_uniform(r) : 0;
    p->window_left = random_chance(r, 30) ? random_below(r, p->len_kv + 2) : -1;
    p->window_right = random_chance(r, 40) ? 0 : random_chance(r, 30) ? random_below(r, p->len_kv + 2) : -1;
    if (random_chance(r, 25)) {
        bool per_batch = random_chance(r, 50);
        int64_t n = per_batch ? p->b * p->h : p->h;
        float *slopes = guarded_alloc((size_t)n * sizeof *slopes, sizeof *slopes, c->at_end);
        for (int64_t i = 0; i < n; i++) slopes[i] = (float)(0.3 * random_uniform(r));
        p->alibi_slopes = slopes;
        p->alibi_stride_b = per_batch ? p->h : 0;
    }
    if (random_chance(r, 25)) {
        p->dropout_p = 0.05 + 0.5 * random_uniform(r);
        p->keep_max = (uint8_t)(255 * (1 - p->dropout_p));
        p->seed = random_bits(r);
        p->offset = random_bits(r) >> random_below(r, 33); /* carries out of the low word included */
    }
}

/* Draws the placement of the keys: dense, packed, or (forward only) a cache. A cache may have pages, left padding and
 * unused keys. */
static void draw_placement(test_case *c, random_source *r, random_source *more) {
    fa_problem *p = &c->p;
    int64_t kind = random_below(r, p->pass == FA_FWD && !has_whole_tiles && !is_short ? 5 : 2), cache_rows = p->b;
    p->total_q = p->b * p->len_q, p->total_kv = p->b * p->len_kv;
    if (kind == 1 || kind == 2) {
        p->cu_seqlens_q = random_cu_seqlens(r, p->b, p->len_q, c->at_end);
        p->cu_seqlens_k = random_cu_seqlens(r, p->b, p->len_kv, c->at_end);
        p->total_q = p->cu_seqlens_q[p->b] + random_below(r, 3);
        p->total_kv = p->cu_seqlens_k[p->b] + random_below(r, 3);
    }
    if (!has_16_bytes && random_chance(more, 30)) { /* queries are packed and keys are not, or the reverse */
        if (p->cu_seqlens_q) {
            p->cu_seqlens_q = NULL;
            p->total_q = p->b * p->len_q;
        } else {
            p->cu_seqlens_q = random_cu_seqlens(more, p->b, p->len_q, c->at_end);
            p->total_q = p->cu_seqlens_q[p->b] + random_below(more, 3);
        }
    }
    if (DRAWS_ALL_ADDITIONS && !has_16_bytes && random_chance(more, 30)) {
        int32_t *used = random_ints(more, p->b, 1, c->at_end);
        for (int64_t i = 0; i < p->b; i++) used[i] = (int32_t)random_below(more, fa_sequence_at(p, i).len_q + 1);
        p->seqused_q = used;
    }
    if (kind >= 3) {
        p->seqused_k = random_ints(r, p->b, p->len_kv + 1, c->at_end);
        if (random_chance(r, 50)) p->leftpad_k = random_ints(r, p->b, p->len_kv + 1, c->at_end);
        if (random_chance(r, 50)) {
            cache_rows += 2;
            int32_t *rows = random_ints(r, cache_rows, 1, c->at_end);
            random_shuffle(r, rows, cache_rows);
            p->cache_batch_idx = rows;
        }
    }
    p->cache_rows = cache_rows;
    tensor_layout kv_layout = (tensor_layout)random_below(r, NUM_LAYOUTS);
    if (kind == 2 || kind == 4) {
        p->page_size = 1 + random_below(r, 40);
        p->block_table_cols = p->len_kv / p->page_size + 2;
        p->block_table_stride = p->block_table_cols;
        p->num_pages = cache_rows * p->block_table_cols;
        int32_t *table = random_ints(r, p->num_pages, 1, c->at_end);
        random_shuffle(r, table, p->num_pages);
        p->paged = true, p->block_table = table;
        for (int64_t i = 0; i < p->b; i++) { /* pages that the sequence does not need do not exist */
            int64_t cache_row = p->cache_batch_idx ? p->cache_batch_idx[i] : i;
            int64_t keys = p->cu_seqlens_k ? p->cu_seqlens_k[i + 1] - p->cu_seqlens_k[i] : p->seqused_k[i];
            for (int64_t col = (keys + p->page_size - 1) / p->page_size; col < p->block_table_cols; col++)
                table[cache_row * p->block_table_stride + col] = -1;
        }
        c->k = tensor_make(p, p->num_pages, p->page_size, p->h_kv, kv_layout, c->at_end);
        c->v = tensor_of(p->dtype, p->d_v, p->num_pages, p->page_size, p->h_kv, kv_layout, c->at_end);
    } else {
        int64_t b = p->cu_seqlens_k ? 1 : cache_rows, rows = p->cu_seqlens_k ? p->total_kv : p->len_kv;
        tensor *all[] = {&c->k, &c->v, &c->dk, &c->dv};
        for (int i = 0; i < (p->pass == FA_BWD ? 4 : 2); i++) {
            const tensor_layout layout = (tensor_layout)random_below(r, NUM_LAYOUTS);
            *all[i] = tensor_of(p->dtype, i % 2 ? p->d_v : p->d, b, rows, p->h_kv, layout, c->at_end);
            if (p->cu_seqlens_k) all[i]->view.stride_b = 0;
        }
    }
    int64_t b = p->cu_seqlens_q ? 1 : p->b, rows = p->cu_seqlens_q ? p->total_q : p->len_q;
    tensor *all[] = {&c->q, &c->o, &c->dout, &c->dq};
    for (int i = 0; i < (p->pass == FA_BWD ? 4 : 2); i++) {
        const tensor_layout layout = (tensor_layout)random_below(r, NUM_LAYOUTS);
        *all[i] = tensor_of(i == 1 ? fa_output_dtype(p->dtype) : p->dtype, i % 3 ? p->d_v : p->d, b, rows, p->h, layout,
                            c->at_end);
        if (p->cu_seqlens_q) all[i]->view.stride_b = 0;
    }
    if (DRAWS_ALL_ADDITIONS && p->pass == FA_FWD && p->dtype != FA_E4M3 && random_chance(more, 20)) {
        c->qv = tensor_of(p->dtype, p->d_v, b, rows, p->h, (tensor_layout)random_below(more, NUM_LAYOUTS), c->at_end);
        if (p->cu_seqlens_q) c->qv.view.stride_b = 0;
        p->qv = c->qv.view;
    }
}

/* Fills every row that sees a key and every key that a row sees. Other rows and keys get numbers only if hides_nan is
 * false. */
static void fill_inputs(test_case *c, random_source *r) {
    fa_problem *p = &c->p;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        int64_t seen_first = s.len_kv, seen_end = 0;
        for (int64_t i = 0; i < s.len_q; i++) {
            int64_t first, end;
            fa_visible_keys(p, &s, i, &first, &end);
            if (first < end && first < seen_first) seen_first = first;
            if (first < end && end > seen_end) seen_end = end;
            if (first >= end && c->hides_nan) continue;
            for (int64_t head = 0; head < p->h; head++) {
                fill_row(&c->q, fa_query_offset(&p->q, &s, i, head), c->amplitude, r);
                if (p->pass == FA_BWD) fill_row(&c->dout, fa_query_offset(&p->dout, &s, i, head), 1, r);
                if (p->qv.data) fill_row(&c->qv, fa_query_offset(&p->qv, &s, i, head), 1, r);
            }
        }
        for (int64_t j = c->hides_nan ? seen_first : 0; j < (c->hides_nan ? seen_end : s.len_kv); j++)
            for (int64_t head = 0; head < p->h_kv; head++) {
                fill_row(&c->k, fa_key_offset(p, &p->k, &s, j, head), 1, r);
                fill_row(&c->v, fa_key_offset(p, &p->v, &s, j, head), 1, r);
            }
    }
}

static inline test_case case_make(uint64_t seed, fa_pass pass, fa_dtype dtype) {
    random_source source = {seed * 2 + pass}, *r = &source, more = source_of_additions(seed * 2 + pass);
    test_case c = {.seed = seed, .at_end = random_chance(r, 70), .hides_nan = random_chance(r, 50)};
    fa_problem *p = &c.p;
    c.amplitude = random_chance(r, 15) ? 12 : 1;
    *p = (fa_problem){.pass = pass, .device = FA_CPU, .dtype = dtype, .b = 1 + random_below(r, 2)};
    p->h_kv = 1 + random_below(r, 2);
    p->h = p->h_kv * (1 + random_below(r, 3));
    p->d = p->d_v = has_16_bytes ? head_dims_of_16_bytes[seed % (uint64_t)COUNT(head_dims_of_16_bytes)]
                                 : head_dims[seed % (uint64_t)COUNT(head_dims)];
    draw_additions(&c, &more);
    if (has_whole_tiles) {
        p->b = 1, p->h = p->h_kv = 1 + random_below(r, 2);
        p->d = p->d_v = head_dims_of_tiles[seed % (uint64_t)COUNT(head_dims_of_tiles)];
    }
    if (is_short) { /* some calls have fewer key heads */
        p->b = 1 + random_below(r, 5);
        p->h = p->h_kv * (seed % 8 ? 1 : 2);
        p->d = p->d_v = 8 * (1 + (int64_t)(seed % 16));
    }
    p->len_q = has_whole_tiles ? (p->pass == FA_FWD ? 256 : 70) + random_below(r, 60) : random_length(r);
    p->len_kv = has_whole_tiles        ? (p->pass == FA_FWD ? 70 : 256) + random_below(r, 120)
                : random_chance(r, 30) ? p->len_q
                                       : random_length(r);
    /* Windows that begin in the last key tile, which the last key fills. */
    const bool is_narrow = has_whole_tiles && seed / (uint64_t)COUNT(head_dims_of_tiles) % 3 == 2;
    if (is_narrow) p->len_q = p->len_q / 64 * 64 + random_below(r, 3), p->len_kv = p->len_kv / 96 * 96 + 96;
    if (p->d <= 33 && random_chance(r, 20))
        p->len_kv = 1024 + random_below(r, 400); /* the backward then has several ranges of keys */
    if (is_short) {
        const int64_t most = 16 << random_below(r, 3);
        p->len_q = 1 + random_below(r, most);
        p->len_kv = random_chance(r, 30) ? p->len_q : 1 + random_below(r, most);
    }
    while (!has_whole_tiles && p->b * p->h * p->len_q * p->len_kv * (p->d + p->d_v) / 2 > most_work)
        p->len_q = p->len_q * 2 / 3;
    draw_placement(&c, r, &more);
    draw_masks(&c, r, &more);
    if (is_narrow) p->window_left = random_below(r, 40), p->window_right = random_chance(r, 30) ? 20 : -1;
    p->q = c.q.view, p->k = c.k.view, p->v = c.v.view, p->o = c.o.view;
    p->dout = c.dout.view, p->dq = c.dq.view, p->dk = c.dk.view, p->dv = c.dv.view;
    int64_t rows = p->cu_seqlens_q ? p->total_q : p->len_q;
    alloc_row_stats(p, &p->lse, rows, c.at_end);
    if (pass == FA_BWD) alloc_row_stats(p, &p->softmax_d, rows + 5, c.at_end);
    p->deterministic = random_chance(r, 50);
    fill_inputs(&c, r);
    return c;
}

/* Plants scores of -inf, and sometimes of +inf, at keys that rows see. One column of k is so large at some keys that
 * four times its value overflows fp32, or the column is infinite. At other keys the column is 0. The large keys are all
 * keys, the first, the last, every second tile, or random keys. An infinite key times the zeros of a lane without a row
 * is NaN, which must not reach the key's gradient. */
static inline void plant_infinite_scores(const test_case *c, random_source *r) {
    const fa_problem *p = &c->p;
    const double huge = p->dtype == FA_F16 || c->seed % 2 ? INFINITY : 0x1.8p127;
    const int64_t column = random_below(r, p->d), kind = random_below(r, 5), tile = 16 << random_below(r, 4);
    const int64_t wrong_rows = random_chance(r, 20) ? 7 : 0;
    const int64_t zero_rows = p->pass == FA_FWD && random_chance(r, 30) ? 3 : 0; /* their dq would include such keys */
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        const fa_sequence s = fa_sequence_at(p, b_idx);
        const int64_t edge = random_below(r, s.len_kv + 1);
        for (int64_t i = 0; i < s.len_q; i++)
            for (int64_t head = 0; head < p->h; head++) {
                const double x = zero_rows && i % zero_rows == 1 ? 0 : wrong_rows && i % wrong_rows == 2 ? -4 : 4;
                fa_store_element(p->q.data, fa_query_offset(&p->q, &s, i, head) + column, p->scale < 0 ? -x : x,
                                 p->dtype);
            }
        for (int64_t j = 0; j < s.len_kv; j++) {
            const bool is_huge = kind == 0   ? true
                                 : kind == 1 ? j < edge
                                 : kind == 2 ? j >= edge
                                 : kind == 3 ? j / tile % 2 == 0
                                             : random_chance(r, 50);
            for (int64_t head = 0; head < p->h_kv; head++)
                fa_store_element(p->k.data, fa_key_offset(p, &p->k, &s, j, head) + column, is_huge ? -huge : 0,
                                 p->dtype);
            /* If a row sees no key, no value of V may appear in its output. */
            if (kind == 0 && p->pass == FA_FWD && !wrong_rows && !zero_rows && s.len_kv > 0 && !p->qv.data)
                fa_store_element(p->v.data, fa_key_offset(p, &p->v, &s, edge % s.len_kv, 0) + column % p->d_v, INFINITY,
                                 p->dtype);
        }
    }
}

/* Whether NaN stands in the same places as in the reference, infinities have the same sign, and finite values are
 * close. `cancelled` is the size of terms that may have cancelled. */
static inline bool is_same_kind(const void *x, const void *reference, int64_t num_elements, fa_dtype dtype,
                                double cancelled) {
    static const double half_unit[] = {[FA_F16] = 0x1p-11, [FA_BF16] = 0x1p-8, [FA_F32] = 1e-6};
    double largest = cancelled, worst = 0;
    bool same = true;
    for (int64_t i = 0; i < num_elements; i++) {
        const double a = fa_load_element(x, i, dtype), b = fa_load_element(reference, i, dtype);
        if (isfinite(a) && isfinite(b))
            worst = fmax(worst, fabs(a - b)), largest = fmax(largest, fabs(b));
        else
            same = same && (a == b || (isnan(a) && isnan(b)));
    }
    return same && worst <= fmax(1e-4, 8 * half_unit[dtype]) * (1 + largest);
}

/* Values whose sums fp32 can just represent. With qv the scores would overflow, so these cases stay as they are. */
#define HUGE_VALUES(dtype) ((dtype) == FA_F16 ? 0x1p8 : 0x1p100)
static inline void plant_huge_values(const test_case *c) {
    const fa_problem *p = &c->p;
    for (int64_t i = 0; i < c->v.num_elements && !p->qv.data; i++) {
        const double x = fa_load_element(c->v.view.data, i, p->dtype);
        fa_store_element(c->v.view.data, i, x * HUGE_VALUES(p->dtype), p->dtype);
    }
}

static void case_print(const test_case *c) {
    const fa_problem *p = &c->p;
    printf(
        "  replay: check_kernels --seed %llu%s   %s %s b %d h %d h_kv %d d %d d_v %d len_q %d len_kv %d window %d,%d "
        "chunk %d softcap %g%s%s%s%s%s%s%s%s%s%s%s\n",
        (unsigned long long)c->seed,
        has_whole_tiles ? " --whole-tiles"
        : has_16_bytes  ? " --16-bytes"
                        : "",
        p->pass == FA_FWD ? "fwd" : "bwd", fa_dtype_name(p->dtype), (int)p->b, (int)p->h, (int)p->h_kv, (int)p->d,
        (int)p->d_v, (int)p->len_q, (int)p->len_kv, (int)p->window_left, (int)p->window_right, (int)p->attention_chunk,
        p->softcap, p->alibi_slopes ? " alibi" : "", p->dropout_p > 0 ? " dropout" : "",
        p->cu_seqlens_q ? " packed-q" : "", p->cu_seqlens_k ? " packed-k" : "", p->paged ? " paged" : "",
        p->leftpad_k ? " leftpad" : "", p->cache_batch_idx ? " cache_batch_idx" : "", p->qv.data ? " qv" : "",
        p->seqused_q ? " seqused_q" : "", c->hides_nan ? " hidden-nan" : "", p->sinks.data ? " sinks" : "");
}

#endif
