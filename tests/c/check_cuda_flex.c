/* Programmable attention on the generic GPU kernels, compiled for the CPU, against a double loop. The texts of the
 * user's functions are written by hand here, in place of flex/source.c. Random cases: block masks with lists in any
 * order and garbage behind the counts, blocks of any size, rows that see nothing, odd lengths, grouped heads, NaN in
 * keys and values that some rows do not see. Besides, queries with an offset, and caches: lengths of their own, pages
 * in any order, and garbage in places that name no key. The decode kernel and the kernels of short sequences, too, take
 * what suits them. */
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#pragma GCC diagnostic ignored "-Wunused-function" /* the cases of plain attention are not used here */

#include "cpu/reference.h"
#include "cuda_device.h"
#include "dropout_at.h"
#include "flex/flex.h"
#include "flex/source.h"
#include "flex/source_words.h"

/* ---- functions --------------------------------------------------------------------------------------------------- */

/* The words of a flex_values: a captured tensor of floats, its gradient, and a captured tensor of int32. */
enum { TABLE, GRADIENT, DOCUMENTS, NUM_WORDS };
enum { TABLE_SIZE = 8, MOST_OFFSET = 150 };

typedef struct {
    const char *name, *score, *mask, *derivative, *sums; /* bodies of functions; NULL: there is none */
    bool has_gradient;
    /* Of a derivative that is `grad` and adds to one element: the addend, the element, its kind, and whether b chooses
     * it. */
    const char *part, *place, *kind;
    bool has_b;
} mod_text;

static const mod_text mods[] = {
    {.name = "no function"},
    {.name = "causal", .mask = "return q_idx >= kv_idx;"},
    {.name = "documents",
     .mask = "const int *d = (const int *)x.words[2];\n"
             "    return d[min(q_idx, (int)d[-1] - 1)] == d[min(kv_idx, (int)d[-1] - 1)];"},
    {.name = "ALiBi",
     .score = "return score + ((const float *)x.words[0])[h] * (float)(kv_idx - q_idx);",
     .derivative = "if (x.words[1]) sums.sum += grad * (float)(kv_idx - q_idx);\n    return grad;",
     .sums = "flex_add_to(x.words[1], h, sums.sum);",
     .has_gradient = true,
     .part = "grad * (float)(kv_idx - q_idx)",
     .place = "h",
     .kind = "FLEX_OF_HEAD"},
    {.name = "softcap",
     .score = "return 3 * tanhf(score / 3);",
     .derivative = "const float t = tanhf(score / 3);\n    return grad * (1 - t * t);"},
    {.name = "table and causal",
     .score = "return score + ((const float *)x.words[0])[(kv_idx - q_idx) & 7];",
     .mask = "return q_idx >= kv_idx;",
     .derivative = "flex_add_to(x.words[1], (kv_idx - q_idx) & 7, grad);\n    return grad;",
     .sums = "",
     .has_gradient = true,
     .part = "grad",
     .place = "(kv_idx - q_idx) & 7",
     .kind = "FLEX_OF_DIFFERENCE"},
    {.name = "causal by score",
     .score = "return q_idx >= kv_idx ? score : __int_as_float(0xff800000);",
     .derivative = "return q_idx >= kv_idx ? grad : 0;"},
#define TABLE_MOD(text, place_text, kind_text, of_batch)                               \
    {.name = text,                                                                     \
     .score = "return score + ((const float *)x.words[0])[" place_text "];",           \
     .derivative = "flex_add_to(x.words[1], " place_text ", grad);\n    return grad;", \
     .sums = "",                                                                       \
     .has_gradient = true,                                                             \
     .part = "grad",                                                                   \
     .place = place_text,                                                              \
     .kind = kind_text,                                                                \
     .has_b = of_batch}
    TABLE_MOD("table of keys", "(kv_idx + b) & 7", "FLEX_OF_KEY", true),
    TABLE_MOD("table of queries", "q_idx & 7", "FLEX_OF_QUERY", false),
    TABLE_MOD("table of pairs", "(q_idx * 3 + kv_idx + h) & 7", "FLEX_OF_PAIR", false),
};
enum { NO_FUNCTION, CAUSAL, DOCUMENT, ALIBI, SOFTCAP, BIAS, CAUSAL_SCORE, OF_KEYS, OF_QUERIES, OF_PAIRS };

/* The element of the table that a pair adds to its score. */
static int64_t place_in_table(int mod, int64_t b, int64_t h, int64_t i, int64_t j) {
    return mod == OF_KEYS      ? (j + b) & 7
           : mod == OF_QUERIES ? i & 7
           : mod == OF_PAIRS   ? (i * 3 + j + h) & 7
           : mod == BIAS       ? (j - i) & 7
                               : -1;
}

static double score_of(int mod, double s, const float *table, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (mod == ALIBI) return s + (double)table[h] * (double)(j - i);
    if (mod == SOFTCAP) return 3 * tanh(s / 3);
    const int64_t place = place_in_table(mod, b, h, i, j);
    if (place >= 0) return s + (double)table[place];
    return mod == CAUSAL_SCORE && i < j ? -INFINITY : s;
}
static bool mask_of(int mod, const int32_t *documents, int64_t i, int64_t j) {
    if (mod == DOCUMENT) return documents[i] == documents[j];
    return !(mod == CAUSAL || mod == BIAS) || i >= j;
}

/* The functions of the running case. */
static int current_mod;
static const int32_t *current_documents;

/* ---- in place of flex/source.c ----------------------------------------------------------------------------------- */

fa_status fa_flex_source(const fa_flex_program *score, const fa_flex_program *mask, const fa_flex_program *derivative,
                         fa_flex_text of, char **text, fa_error *err) {
    static const char index[] = "int b, int h, int q_idx, int kv_idx) {\n    ", values[] = "const flex_values &x, ";
    const mod_text *m = &mods[current_mod];
    size_t bytes;
    FILE *file = open_memstream(text, &bytes);
    (void)err, (void)of;
    fprintf(file, "#include \"flex_values.cuh\"\n");
    fprintf(file,
            "#define FLEX_SCORE %d\n#define FLEX_MASK %d\n#define FLEX_DERIVATIVE %d\n#define FLEX_SUMS 1\n"
            "#define FLEX_LONG_MASK 0\n",
            score != NULL, mask != NULL, derivative != NULL);
    fprintf(file, "struct flex_values {\n    long long words[%d];\n};\n", NUM_WORDS);
    if (score) {
        fprintf(file,
                "DEVICE float flex_score(%sfloat score, int b, int h, int q_idx, int kv_idx, int = -1) {\n    %s\n}\n",
                values, m->score);
    }
    if (mask) fprintf(file, "DEVICE bool flex_mask(%s%s%s\n}\n", values, index, m->mask);
    if (derivative) {
        fprintf(file, "struct flex_sums {\n    float sum;\n};\n");
        fprintf(file, "DEVICE float flex_derivative(%sflex_sums &sums, float score, float grad, %s%s\n}\n", values,
                index, m->derivative);
        fprintf(file, "DEVICE void flex_add_sums(%sconst flex_sums &sums, int b, int h) {\n    %s\n}\n", values,
                m->sums ? m->sums : "");
    }
    fprintf(file, "#define FLEX_PARTS %d\n", derivative && m->part);
    if (derivative && m->part) {
        fprintf(file,
                "DEVICE constexpr flex_kind flex_kind_of(int) { return %s; }\n"
                "DEVICE constexpr bool flex_place_has_b(int) { return %d; }\n",
                m->kind, m->has_b);
        fprintf(file,
                "DEVICE float flex_derivative(%sfloat (&parts)[1], float, float grad, %sparts[0] = %s;\n"
                "    return grad;\n}\n",
                values, index, m->part);
        fprintf(file, "template <int PART> DEVICE int flex_place_of(%s%sreturn %s;\n}\n", values, index, m->place);
        fprintf(file,
                "template <int PART, class T> DEVICE void flex_add_part(%sT place, float value) {\n"
                "    flex_add_to(x.words[1], place, value);\n}\n",
                values);
    }
    fclose(file);
    return FA_OK;
}

size_t fa_flex_values_bytes(const fa_flex_program *score, const fa_flex_program *mask,
                            const fa_flex_program *derivative) {
    (void)score, (void)mask, (void)derivative;
    return NUM_WORDS * sizeof(int64_t);
}

void fa_flex_fill_values(const fa_flex_bound *score, const fa_flex_bound *mask, const fa_flex_bound *derivative,
                         fa_flex_gradients gradients, void *values) {
    uint64_t *words = values;
    (void)mask;
    words[TABLE] = score ? (uintptr_t)score->captures[0].data : 0;
    words[GRADIENT] = derivative && gradients ? (uintptr_t)gradients[0] : 0;
    words[DOCUMENTS] = (uintptr_t)current_documents;
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static random_source source;
static int64_t below(int64_t n) { return random_below(&source, n); }
#define PICK(...) ((const int64_t[]){__VA_ARGS__}[below((int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))])

typedef struct {
    fa_problem p;
    fa_flex flex;
    fa_flex_program program[3];
    fa_flex_bound bound[3];
    fa_flex_capture capture;
    void *gradient;
    float table[64];
    unsigned char *kinds; /* [mask_b, mask_h, rows, columns]; NULL: no block mask */
    int64_t len_kv[5];    /* [b] keys in use */
    double *q, *k, *v, *dout;
    bool has_sinks;
    float sinks[8], *sink_shift; /* [h] and [b, h, len_q] */
} flex_case;

static bool for_decode; /* aligned rows, d_v = d, no block mask and no maximum */
static bool for_short;  /* aligned rows, d_v = d, few rows, no cache and no maximum */

static fa_view dense(int64_t rows, int64_t h, int64_t d, int64_t b, fa_dtype dtype, bool at_end) {
    const int64_t stride_h = d + (for_decode || for_short ? 8 : 3) * at_end, stride_row = stride_h * h;
    void *data = guarded_alloc((size_t)(b * rows * stride_row) * fa_dtype_bytes(dtype), 16, at_end);
    return (fa_view){data, stride_row * rows, stride_row, stride_h};
}

/* Fills a tensor, and returns what is in it: [b, rows, h, d]. */
static double *filled(const fa_view *t, int64_t b, int64_t rows, int64_t h, int64_t d, fa_dtype dtype) {
    double *copy = malloc((size_t)(b * rows * h * d + 1) * sizeof *copy), *at = copy;
    for (int64_t i = 0; i < b * rows * h; i++)
        for (int64_t c = 0; c < d; c++) {
            const int64_t offset = i * t->stride_h + c;
            fa_store_element(t->data, offset, random_normal(&source), dtype);
            *at++ = fa_load_element(t->data, offset, dtype);
        }
    return copy;
}

static fa_row_stats stats(int64_t b, int64_t h, int64_t rows, bool at_end) {
    return (fa_row_stats){guarded_alloc((size_t)(b * h * rows) * sizeof(float), 4, at_end), h * rows, rows, 0};
}

/* Makes a list of the blocks of a kind, in any order, among numbers that are no blocks. */
static fa_flex_list list_of(const flex_case *c, unsigned char kind, bool at_end) {
    const fa_flex *f = &c->flex;
    const int64_t lists = f->mask_b * f->mask_h * f->rows, room = f->columns;
    int32_t *num = guarded_alloc((size_t)lists * 4, 4, at_end),
            *blocks = guarded_alloc((size_t)(lists * room * 2) * 4, 4, at_end);
    for (int64_t list = 0; list < lists; list++) {
        int32_t n = 0, *to = blocks + list * room * 2;
        for (int64_t i = 0; i < room; i++)
            if (c->kinds[list * room + i] & kind) to[2 * n++] = (int32_t)i;
        for (int32_t i = n - 1; i > 0; i--) {
            const int64_t other = below(i + 1);
            const int32_t x = to[2 * i];
            to[2 * i] = to[2 * other], to[2 * other] = x;
        }
        const bool is_whole = n == room;
        for (int64_t i = n; i < room; i++) to[2 * i] = (int32_t)PICK(0, room - 1, room, -1, INT32_MAX, INT32_MIN);
        if (n < room && (to[2 * n] < 0 || to[2 * n] >= room)) n++; /* a number that is no block */
        num[list] = is_whole && below(2) ? INT32_MAX : n == 0 && below(2) ? INT32_MIN : n;
    }
    return (fa_flex_list){num,
                          blocks,
                          {f->mask_h * f->rows, f->rows, 1},
                          {f->mask_h * f->rows * room * 2, f->rows * room * 2, room * 2, 2}};
}

static void make_block_mask(flex_case *c, bool at_end) {
    fa_flex *f = &c->flex;
    if (for_decode || below(4) == 0) return;
    f->block_q = PICK(1, 16, 24, 32, 64, 100, 128, 1 << 30);
    f->block_kv = PICK(1, 8, 16, 40, 64, 100, 128, 1 << 30);
    f->mask_b = PICK(1, c->p.b), f->mask_h = PICK(1, c->p.h);
    f->blocks_have_offset = f->q_offset && below(2);
    /* Too few rows of blocks, too: then the last rows serve queries with a larger offset. */
    const int64_t num_rows = c->p.len_q + (f->blocks_have_offset ? below(MOST_OFFSET + 1) : 0);
    f->rows = (num_rows + f->block_q - 1) / f->block_q + below(2);
    f->columns = (c->p.len_kv + f->block_kv - 1) / f->block_kv + below(2);
    const int64_t num = f->mask_b * f->mask_h * f->rows * f->columns, density = PICK(0, 10, 50, 90);
    c->kinds = malloc((size_t)num + 1);
    /* bit 0: in the list of partial blocks, bit 1: in the list of full blocks */
    for (int64_t i = 0; i < num; i++) c->kinds[i] = below(100) < density ? (unsigned char)PICK(1, 1, 2, 2, 3) : 0;
    f->partial = list_of(c, 1, at_end);
    if (below(4))
        f->full = list_of(c, 2, at_end);
    else
        for (int64_t i = 0; i < num; i++) c->kinds[i] &= 1;
}

/* What the mods call row i. */
static int64_t query_of(const flex_case *c, int64_t b, int64_t i) { return i + fa_flex_first_query(&c->flex, b); }

static bool sees(const flex_case *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    const fa_flex *f = &c->flex;
    unsigned char kind = 1;
    if (c->kinds) {
        const int64_t most = f->rows * f->block_q - c->p.len_q, offset = query_of(c, b, 0);
        const int64_t row = i + (!f->blocks_have_offset ? 0 : offset < most ? offset : most);
        kind = c->kinds[(((b % f->mask_b) * f->mask_h + h % f->mask_h) * f->rows + row / f->block_q) * f->columns +
                        j / f->block_kv];
    }
    return kind & 2 || (kind == 1 && mask_of(current_mod, current_documents, query_of(c, b, i), j));
}

/* Some problems are caches, which have no backward. */
static bool is_cache(const fa_problem *p) { return p->seqused_k || p->paged; }

/* Takes k or v of the problem as num_pages pages, and returns [b, len_kv, h_kv, d] as the block table says. */
static double *gathered(const fa_problem *p, double *pages, int64_t d) {
    const int64_t row = p->h_kv * d;
    double *copy = malloc((size_t)(p->b * p->len_kv * row + 1) * sizeof *copy);
    for (int64_t i = 0; i < p->b * p->len_kv; i++) {
        const int64_t b = i / p->len_kv, j = i % p->len_kv;
        int64_t page = p->block_table[b * p->block_table_stride + j / p->page_size];
        page = page < 0 ? 0 : page < p->num_pages ? page : p->num_pages - 1;
        memcpy(copy + i * row, pages + (page * p->page_size + j % p->page_size) * row, (size_t)row * sizeof *copy);
    }
    free(pages);
    return copy;
}

/* Gives the problem lengths, and pages of page_size keys (0: none). Numbers that name no key are garbage. */
static void make_cache(flex_case *c, int64_t page_size, bool at_end) {
    fa_problem *p = &c->p;
    int32_t *lengths = guarded_alloc((size_t)p->b * 4, 4, at_end);
    for (int64_t b = 0; b < p->b; b++) {
        lengths[b] = (int32_t)PICK(0, 1, below(p->len_kv + 1), below(p->len_kv + 1), p->len_kv, INT32_MAX, INT32_MIN);
        c->len_kv[b] = lengths[b] < 0 ? 0 : lengths[b] < p->len_kv ? lengths[b] : p->len_kv;
    }
    p->seqused_k = lengths;
    if (page_size == 0) return;
    const int64_t columns = p->len_kv / page_size, num = p->b * columns;
    int32_t *table = guarded_alloc((size_t)num * 4, 4, at_end);
    for (int32_t i = 0; i < num; i++) {
        const int64_t other = below(i + 1);
        table[i] = table[other], table[other] = i;
    }
    for (int64_t i = 0; i < num; i++)
        if (i % columns * page_size >= c->len_kv[i / columns]) table[i] = (int32_t)PICK(-1, INT32_MAX, INT32_MIN);
    p->paged = true;
    p->block_table = table, p->block_table_stride = p->block_table_cols = columns;
    p->page_size = page_size, p->num_pages = num, p->cache_rows = p->b;
}

/* Learned sinks, beside scores of which something was subtracted. */
static void make_sinks(flex_case *c, bool at_end) {
    fa_problem *p = &c->p;
    c->has_sinks = below(3) == 0;
    if (!c->has_sinks) return;
    const int64_t rows = p->b * p->h * p->len_q;
    c->sink_shift = guarded_alloc((size_t)rows * sizeof(float), sizeof(float), at_end);
    for (int i = 0; i < 8; i++) c->sinks[i] = (float)random_normal(&source);
    for (int64_t i = 0; i < rows; i++) /* scores of no function have no shift */
        c->sink_shift[i] = current_mod == NO_FUNCTION ? 0 : (float)PICK(0, -2, 3);
    p->sinks = (fa_sink_values){c->sinks, 1, FA_F32};
    p->sink_shift = (fa_sink_rows){c->sink_shift, p->h * p->len_q, p->len_q, 1};
}

static void make_dropout(fa_problem *p) {
    p->keep_max = 255;
    if (for_decode || below(3)) return;
    p->dropout_p = 0.3, p->keep_max = 178, p->seed = random_bits(&source), p->offset = random_bits(&source);
}

/* Each line is compiled once for each pass, which takes seconds. d_v 0: any width up to d. */
static const struct {
    int mod;
    fa_dtype dtype;
    int64_t d, d_v;
} kernels[] = {
    {NO_FUNCTION, FA_BF16, 64, 0}, {CAUSAL, FA_F32, 40, 0},       {CAUSAL, FA_F16, 130, 0},
    {DOCUMENT, FA_BF16, 48, 0},    {DOCUMENT, FA_F32, 129, 0},    {ALIBI, FA_F32, 65, 0},
    {ALIBI, FA_BF16, 128, 0},      {SOFTCAP, FA_F32, 16, 0},      {BIAS, FA_F32, 40, 0},
    {BIAS, FA_BF16, 80, 300},      {CAUSAL_SCORE, FA_F16, 64, 0}, {CAUSAL_SCORE, FA_F32, 33, 0},
    {OF_KEYS, FA_BF16, 32, 32},    {OF_QUERIES, FA_F16, 32, 32},  {OF_PAIRS, FA_BF16, 48, 48},
};
enum { NUM_KERNELS = sizeof kernels / sizeof *kernels };

static void make_case(flex_case *c, int kernel, bool at_end) {
    const int mod = kernels[kernel].mod;
    const fa_dtype dtype = kernels[kernel].dtype;
    for_short = dtype != FA_F32 && kernels[kernel].d <= 160 && (mod >= OF_KEYS || below(4) == 0);
    for_decode = !for_short && dtype != FA_F32 && below(2);
    const bool has_cache = !for_short && (below(3) == 0 || (for_decode && below(4))),
               is_aligned = for_short || for_decode;
    const int64_t page_size = has_cache ? PICK(0, 5, 16, 64) : 0, round = page_size ? page_size : 1;
    const int64_t h_kv = PICK(1, 2), b = for_short ? PICK(1, 2, 5) : PICK(1, 2),
                  len_q = for_short ? PICK(1, 3, 16, 17, 32, 49, 64) : PICK(1, 3, 17, 64, 129, 150),
                  len_kv = for_short ? PICK(1, 16, 31, 49, 64)
                                     : (PICK(1, 31, 64, 130, 200, 333) + round - 1) / round * round,
                  d = kernels[kernel].d / (is_aligned ? 8 : 1) * (is_aligned ? 8 : 1),
                  d_v = is_aligned            ? d
                        : kernels[kernel].d_v ? kernels[kernel].d_v
                                              : 1 + below(d);
    *c = (flex_case){0};
    current_mod = mod;
    const int64_t num_documents = len_q + MOST_OFFSET + len_kv;
    int32_t *documents = guarded_alloc((size_t)(num_documents + 1) * 4, 4, at_end);
    *documents++ = (int32_t)num_documents;
    for (int64_t i = 0, id = 0; i < num_documents; i++) documents[i] = (int32_t)(id += below(20) == 0);
    current_documents = documents;
    fa_problem *p = &c->p;
    *p = (fa_problem){.pass = FA_FWD,
                      .device = FA_CUDA,
                      .dtype = dtype,
                      .b = b,
                      .h = h_kv * (for_short && below(2) ? 1 : PICK(1, 3)),
                      .h_kv = h_kv,
                      .d = d,
                      .d_v = d_v,
                      .len_q = len_q,
                      .len_kv = len_kv,
                      .total_q = b * len_q,
                      .total_kv = b * len_kv,
                      .empty_lse = -INFINITY,
                      .scale = for_short || below(5) ? 1 / sqrt((double)d) : -0.1,
                      .window_left = -1,
                      .window_right = -1,
                      .flex = &c->flex};
    p->q = dense(len_q, p->h, d, b, dtype, at_end), c->q = filled(&p->q, b, len_q, p->h, d, dtype);
    for (int i = 0; i < 5; i++) c->len_kv[i] = len_kv;
    if (has_cache) make_cache(c, page_size, at_end);
    const int64_t batches = p->paged ? p->num_pages : b, keys = p->paged ? page_size : len_kv;
    p->k = dense(keys, h_kv, d, batches, dtype, at_end), c->k = filled(&p->k, batches, keys, h_kv, d, dtype);
    p->v = dense(keys, h_kv, d_v, batches, dtype, at_end), c->v = filled(&p->v, batches, keys, h_kv, d_v, dtype);
    if (p->paged) c->k = gathered(p, c->k, d), c->v = gathered(p, c->v, d_v);
    p->dout = dense(len_q, p->h, d_v, b, dtype, at_end), c->dout = filled(&p->dout, b, len_q, p->h, d_v, dtype);
    p->o = dense(len_q, p->h, d_v, b, dtype, at_end);
    p->lse = stats(b, p->h, len_q, at_end);
    c->flex.max_scores = stats(b, p->h, len_q, at_end);
    for (int i = 0; i < 64; i++) c->table[i] = (float)random_normal(&source) * (mod == ALIBI ? 0.01f : 1);
    c->capture = (fa_flex_capture){.data = c->table, .size = {TABLE_SIZE}, .stride = {1}};
    const char *bodies[3] = {mods[mod].score, mods[mod].mask, mods[mod].derivative};
    for (int i = 0; i < 3; i++) {
        c->program[i] = (fa_flex_program){.hash = (uint64_t)(8 * mod + i + 1), .num_captures = i == 2};
        c->program[i].captures[0].dtype = FA_FLEX_OF_F32, c->program[i].captures[0].rank = 1;
        c->bound[i] = (fa_flex_bound){.program = &c->program[i], .captures = &c->capture};
        if (bodies[i])
            *(const fa_flex_bound **[]){&c->flex.score, &c->flex.mask, &c->flex.derivative}[i] = &c->bound[i];
    }
    if (!for_short && below(2)) {
        int32_t *offsets = guarded_alloc((size_t)b * 4, 4, at_end);
        for (int64_t i = 0; i < b; i++) offsets[i] = (int32_t)PICK(0, below(MOST_OFFSET + 1), MOST_OFFSET);
        c->flex.q_offset = offsets;
    }
    make_block_mask(c, at_end);
    make_sinks(c, at_end);
    make_dropout(p);
    /* A key whose scores are -inf, and its value is NaN. Without a function it would be seen. */
    if (for_short && mod != SOFTCAP && mod != NO_FUNCTION && below(3) == 0) {
        const int64_t j = below(len_kv), head = below(h_kv), group = p->h / h_kv;
        fa_store_element(p->k.data, j * p->k.stride_row + head * p->k.stride_h, -INFINITY, dtype);
        fa_store_element(p->v.data, j * p->v.stride_row + head * p->v.stride_h, NAN, dtype);
        c->k[(j * h_kv + head) * d] = -INFINITY, c->v[(j * h_kv + head) * d_v] = NAN;
        for (int64_t i = 0; i < len_q * group; i++) {
            const int64_t row = i / group, h = head * group + i % group;
            fa_store_element(p->q.data, row * p->q.stride_row + h * p->q.stride_h, 1, dtype);
            c->q[(row * p->h + h) * d] = 1;
        }
    }
    if (below(3) == 0 && !p->paged) { /* a key that is NaN, where only some rows see it */
        const int64_t j = below(len_kv), at = below(d_v);
        fa_store_element(p->v.data, j * p->v.stride_row + at, NAN, dtype);
        c->v[j * h_kv * d_v + at] = NAN;
    }
}

static void free_case(flex_case *c) {
    free(c->q), free(c->k), free(c->v), free(c->dout), free(c->kinds);
    guarded_free_all();
}

/* ---- the double loop --------------------------------------------------------------------------------------------- */

typedef struct {
    double *o, *lse, *max, *dq, *dk, *dv, gradient[TABLE_SIZE];
} results;

static double *zeros(int64_t num) { return calloc((size_t)num + 1, sizeof(double)); }

static double dot(const double *x, const double *y, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* Computes one query row, with its part of all gradients. */
static void compute_row(const flex_case *c, results *r, int64_t b, int64_t h, int64_t i) {
    const fa_problem *p = &c->p;
    const int64_t row = (b * p->len_q + i) * p->h + h, stat = (b * p->h + h) * p->len_q + i, d = p->d, d_v = p->d_v;
    const double *q = c->q + row * d, *dout = c->dout + row * d_v;
    const int64_t len_kv = c->len_kv[b], query = query_of(c, b, i);
    double *s = zeros(len_kv), max = -INFINITY, sum = 0, *o = r->o + row * d_v;
#define KEY(x, j, d) (x + ((b * p->len_kv + (j)) * p->h_kv + h / (p->h / p->h_kv)) * (d))
    for (int64_t j = 0; j < len_kv; j++) {
        const double score = p->scale * dot(q, KEY(c->k, j, d), d);
        s[j] = sees(c, b, h, i, j) ? score_of(current_mod, score, c->table, b, h, query, j) : -INFINITY;
        if (s[j] > max) max = s[j];
    }
    for (int64_t j = 0; j < len_kv; j++) sum += max == -INFINITY ? 0 : exp(s[j] - max);
    r->max[stat] = max;
    if (c->has_sinks) {
        const double sink = (double)(c->sinks[h] - c->sink_shift[stat]), top = sink > max ? sink : max;
        sum = (max == -INFINITY ? 0 : sum * exp(max - top)) + exp(sink - top), max = top;
    }
    r->lse[stat] = max + log(sum);
    for (int64_t j = 0; j < len_kv; j++)
        for (int64_t x = 0; x < d_v && s[j] > -INFINITY; x++)
            o[x] += exp(s[j] - max) / sum * dropout_at(p, b, h, i, j) * KEY(c->v, j, d_v)[x];
    const double delta = dot(o, dout, d_v) - (c->flex.dlse.data ? c->flex.dlse.data[stat] : 0);
    for (int64_t j = 0; j < len_kv; j++) {
        if (s[j] == -INFINITY) continue;
        const double prob = exp(s[j] - max) / sum, z = dropout_at(p, b, h, i, j);
        const double ds = prob * (z * dot(dout, KEY(c->v, j, d_v), d_v) - delta);
        double change = ds;
        if (current_mod == ALIBI) r->gradient[h] += ds * (double)(j - query);
        const int64_t place = place_in_table(current_mod, b, h, query, j);
        if (place >= 0) r->gradient[place] += ds;
        if (current_mod == SOFTCAP) change *= 1 - s[j] / 3 * (s[j] / 3);
        for (int64_t x = 0; x < d_v; x++) KEY(r->dv, j, d_v)[x] += prob * z * dout[x];
        for (int64_t x = 0; x < d; x++) {
            r->dq[row * d + x] += p->scale * change * KEY(c->k, j, d)[x];
            KEY(r->dk, j, d)[x] += p->scale * change * q[x];
        }
    }
    free(s);
}

static results compute(const flex_case *c) {
    const fa_problem *p = &c->p;
    const int64_t rows = p->b * p->len_q * p->h, keys = p->b * p->len_kv * p->h_kv;
    results r = {zeros(rows * p->d_v), zeros(rows),          zeros(rows), zeros(rows * p->d),
                 zeros(keys * p->d),   zeros(keys * p->d_v), {0}};
    for (int64_t b = 0; b < p->b; b++)
        for (int64_t h = 0; h < p->h; h++)
            for (int64_t i = 0; i < p->len_q; i++) compute_row(c, &r, b, h, i);
    return r;
}

static void free_results(results *r) { free(r->o), free(r->lse), free(r->max), free(r->dq), free(r->dk), free(r->dv); }

/* ---- comparing --------------------------------------------------------------------------------------------------- */

static int current_seed;

static void compare_number(const char *what, int64_t at, double x, double truth, double tolerance) {
    if (x == truth || (isnan(x) && isnan(truth)) || fabs(x - truth) <= tolerance) return;
    fail_msg("--seed %d, %s: %s [%lld] is %g instead of %g", current_seed, mods[current_mod].name, what, (long long)at,
             x, truth);
}

static void compare(const char *what, const fa_view *t, const double *truth, int64_t rows, int64_t d, fa_dtype dtype) {
    double largest = 1;
    for (int64_t i = 0; i < rows * d; i++)
        if (fabs(truth[i]) > largest && fabs(truth[i]) < INFINITY) largest = fabs(truth[i]);
    const double tolerance = largest * (dtype == FA_F32 ? 2e-5 : 0.03);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t x = 0; x < d; x++)
            compare_number(what, i * d + x, fa_load_element(t->data, i * t->stride_h + x, dtype), truth[i * d + x],
                           tolerance);
}

static void check_backward(flex_case *c, const results *truth, bool at_end) {
    fa_problem *p = &c->p;
    const int64_t rows = p->b * p->len_q * p->h, keys = p->b * p->len_kv * p->h_kv;
    p->pass = FA_BWD;
    c->flex.max_scores = (fa_row_stats){0};
    float sums[TABLE_SIZE] = {0};
    c->gradient = sums;
    if (mods[current_mod].has_gradient) c->flex.gradients = &c->gradient;
    p->deterministic = for_short ? below(5) == 0 : below(2);
    p->softmax_d = stats(p->b, p->h, p->len_q, at_end);
    if (below(4)) p->dq = dense(p->len_q, p->h, p->d, p->b, p->dtype, at_end);
    if (below(4)) p->dk = dense(p->len_kv, p->h_kv, p->d, p->b, p->dtype, at_end);
    if (below(4)) p->dv = dense(p->len_kv, p->h_kv, p->d_v, p->b, p->dtype, at_end);
    run_on_cuda(p, at_end);
    if (p->dq.data) compare("dq", &p->dq, truth->dq, rows, p->d, p->dtype);
    if (p->dk.data) compare("dk", &p->dk, truth->dk, keys, p->d, p->dtype);
    if (p->dv.data) compare("dv", &p->dv, truth->dv, keys, p->d_v, p->dtype);
    for (int i = 0; i < TABLE_SIZE && c->flex.gradients; i++)
        compare_number("gradient", i, sums[i], truth->gradient[i],
                       (1 + fabs(truth->gradient[i])) * (p->dtype == FA_F32 ? 2e-3 : 0.5));
}

static int num_cases_of_short;

static void run_case(int seed) {
    const bool at_end = seed / NUM_KERNELS % 2;
    source = (random_source){(uint64_t)seed};
    current_seed = seed;
    flex_case c;
    make_case(&c, seed % NUM_KERNELS, at_end);
    fa_problem *p = &c.p;
    const double tolerance = p->dtype == FA_F32 ? 1e-4 : 0.02;
    const int64_t rows = p->b * p->len_q * p->h;
    gpu.num_sms = below(2) ? 40 : 1;            /* many SMs cut the keys of few queries into parts */
    if (for_short && below(2)) gpu.num_sms = 0; /* units have several sequences */
    if (for_decode || for_short || below(2)) c.flex.max_scores = (fa_row_stats){0};
    gpu.capability = for_decode && below(2) ? 90 : 80;
    gpu_kernels = for_decode ? "any,decode" : for_short ? "any,short" : "any";
    num_cases_of_short += for_short;
    run_on_cuda(p, at_end);
    gpu.capability = 80;
    if (below(2)) c.flex.dlse = stats(p->b, p->h, p->len_q, at_end);
    for (int64_t i = 0; i < rows && c.flex.dlse.data; i++) c.flex.dlse.data[i] = (float)random_normal(&source);
    results truth = compute(&c);
    for (int64_t i = 0; i < rows; i++) {
        compare_number("lse", i, p->lse.data[i], truth.lse[i], tolerance);
        if (c.flex.max_scores.data) compare_number("max_scores", i, c.flex.max_scores.data[i], truth.max[i], tolerance);
    }
    compare("o", &p->o, truth.o, rows, p->d_v, p->dtype);
    if (!is_cache(p)) check_backward(&c, &truth, at_end);
    free_results(&truth);
    free_case(&c);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static int first_seed, last_seed = 8 * NUM_KERNELS - 1;

static void test_cases(void **state) {
    (void)state;
    for (int seed = first_seed; seed <= last_seed; seed++) run_case(seed);
    if (first_seed == last_seed) return;
    assert_true(num_decodes > (last_seed - first_seed) / 12);
    assert_true(num_short[FA_FWD] > num_cases_of_short * 9 / 10 && num_short[FA_BWD] > num_cases_of_short / 3);
}

/* Sums of integers have room for so many parts and no more. */
static void test_sums_of_too_many_pairs(void **state) {
    const fa_machine machine = {.gpu_capability = 80, .gpu_sms = 1};
    fa_plan plan;
    fa_error err = {""};
    flex_case c;
    (void)state;
    make_case(&c, 8, false); /* has a gradient */
    c.p.seqused_k = NULL, c.p.paged = false;
    c.p.pass = FA_BWD;
    c.p.deterministic = true;
    c.gradient = c.table;
    c.flex.gradients = &c.gradient;
    const fa_problem few = c.p;
    c.p.b = 1 << 10, c.p.h = c.p.h_kv = 2, c.p.len_q = c.p.len_kv = 1 << 20;
    assert_int_equal(fa_plan_cuda(&c.p, &machine, &plan, &err), FA_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "2^50 pairs"));
    c.p.h = c.p.h_kv = 1;
    assert_int_equal(fa_plan_cuda(&c.p, &machine, &plan, &err), FA_OK);
    c.p = few;
    free_case(&c);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--seed")) first_seed = last_seed = atoi(argv[2]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cases), cmocka_unit_test(test_sums_of_too_many_pairs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
