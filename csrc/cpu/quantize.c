/* Quantises q, k and v to e4m3 in two passes over pieces of rows. The first pass finds the maximum of each piece, and
 * the second pass writes. Maxima do not depend on their order, so any number of threads gives the same bits. */
#include "quantize.h"

#include <math.h>
#include <stdlib.h>

#include "convert.h"

enum { PIECE_ROWS = 64, MAX_COLUMNS = FA_MAX_HEAD_DIM_V };

/* One call. Pieces are numbered over the three tensors. first[i] is the first piece of tensor i. */
typedef struct {
    const fa_quantization *q;
    int64_t first[4];
    float *maxima;   /* of the pieces */
    float *descales; /* of the groups: tensor, sequence, key head; is_per_tensor: tensor */
} work;

/* A piece: rows [begin, end) of a sequence and key head. Sequence b of a packed tensor has the rows of no sequence. */
typedef struct {
    int tensor;
    int64_t sequence, head, begin, end;
    int64_t first_row; /* of the sequence, in a packed tensor */
} piece;

/* Returns the number of pieces of one key head before a sequence. Some pieces of packed tensors are empty. */
static int64_t pieces_before(const fa_quantized *t, int64_t b, int64_t sequence) {
    if (!t->cu_seqlens) return sequence * ((t->rows + PIECE_ROWS - 1) / PIECE_ROWS);
    return (sequence <= b ? t->cu_seqlens[sequence] : t->rows) / PIECE_ROWS + sequence;
}

static int64_t num_sequences(const fa_quantization *q, const fa_quantized *t) { return q->b + (t->cu_seqlens != NULL); }

static int64_t num_pieces(const fa_quantization *q, const fa_quantized *t) {
    return q->h_kv * pieces_before(t, q->b, num_sequences(q, t));
}

static piece find_piece(const work *w, int64_t idx) {
    piece p = {.tensor = idx < w->first[1] ? 0 : idx < w->first[2] ? 1 : 2};
    const fa_quantized *t = &w->q->tensors[p.tensor];
    const int64_t b = w->q->b, h_kv = w->q->h_kv;
    int64_t low = 0, high = num_sequences(w->q, t); /* the sequence is in [low, high) */
    idx -= w->first[p.tensor];
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (h_kv * pieces_before(t, b, middle) <= idx)
            low = middle;
        else
            high = middle;
    }
    const int64_t before = pieces_before(t, b, low), num = pieces_before(t, b, low + 1) - before;
    const int64_t rest = idx - h_kv * before;
    int64_t rows = t->rows;
    if (t->cu_seqlens) {
        p.first_row = t->cu_seqlens[low];
        rows = (low < b ? t->cu_seqlens[low + 1] : t->rows) - p.first_row;
    }
    p.sequence = low;
    p.head = rest / num;
    p.begin = rest % num * PIECE_ROWS;
    p.end = p.begin + PIECE_ROWS < rows ? p.begin + PIECE_ROWS : rows;
    return p;
}

/* ---- one row ----------------------------------------------------------------------------------------------------- */

static float without_subnormals(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static void load_elements(const void *data, int64_t at, int64_t num, fa_dtype dtype, float *x) {
    const uint16_t *bits = (const uint16_t *)data + at;
    if (dtype == FA_F16)
        for (int64_t i = 0; i < num; i++) x[i] = fa_f32_from_f16(bits[i]);
    else if (dtype == FA_BF16)
        for (int64_t i = 0; i < num; i++) x[i] = fa_f32_from_bf16(bits[i]);
    else
        memcpy(x, (const float *)data + at, (size_t)num * sizeof *x);
}

static void rotate_block(float *x, int64_t n) {
    int log2_n = 0;
    for (int64_t step = 1; step < n; step *= 2, log2_n++)
        for (int64_t i = 0; i < n; i++) {
            if (i & step) continue;
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
        }
    const float norm = ldexpf(log2_n % 2 ? 0x1.6a09e6p-1f : 1, -(log2_n / 2));
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * norm + 0.0f; /* -0 becomes 0 */
}

static void rotate(float *x, int64_t d) {
    static const uint64_t signs[] = FA_ROTATION_SIGNS;
    for (int64_t i = 0; i < d; i++)
        if (signs[i / 64] >> i % 64 & 1) x[i] = -x[i];
    for (int64_t at = 0, n = 256; n > 0; n /= 2)
        if (d & n) rotate_block(x + at, n), at += n;
}

/* Loads a row and rotates it. Returns its maximum, which is infinite if the row holds an infinity. */
static float load_row(const fa_quantization *q, const fa_quantized *t, int64_t at, float *x) {
    float max = 0;
    load_elements(t->x.data, at, t->d, q->dtype, x);
    for (int64_t i = 0; i < t->d; i++) {
        x[i] = without_subnormals(x[i]);
        if (isinf(x[i])) max = INFINITY;
    }
    if (t->rotates) rotate(x, t->d);
    for (int64_t i = 0; i < t->d; i++)
        if (fabsf(x[i]) > max) max = fabsf(x[i]);
    return max;
}

/* ---- passes ------------------------------------------------------------------------------------------------------ */

static int64_t group_of(const work *w, const piece *p) {
    return w->q->is_per_tensor ? p->tensor : (p->tensor * w->q->b + p->sequence) * w->q->h_kv + p->head;
}

/* Returns the element of x where a row of the piece begins. *to is the row's element of out. */
static int64_t row_at(const work *w, const piece *p, int64_t row, int64_t head_of_group, int64_t *to) {
    const fa_quantized *t = &w->q->tensors[p->tensor];
    const int64_t head = p->head * t->g + head_of_group, packed_row = p->first_row + row;
    *to = (((t->cu_seqlens ? packed_row : p->sequence * t->rows + row) * w->q->h_kv * t->g) + head) * t->d;
    return (t->cu_seqlens ? 0 : p->sequence) * t->x.stride_b + packed_row * t->x.stride_row + head * t->x.stride_h;
}

static void measure(int64_t begin, int64_t end, void *ctx) {
    const work *w = ctx;
    for (int64_t idx = begin; idx < end; idx++) {
        const piece p = find_piece(w, idx);
        const fa_quantized *t = &w->q->tensors[p.tensor];
        float x[MAX_COLUMNS], max = 0;
        int64_t to;
        for (int64_t row = p.begin; row < p.end && p.sequence < w->q->b; row++)
            for (int64_t head = 0; head < t->g; head++) {
                const float of_row = load_row(w->q, t, row_at(w, &p, row, head, &to), x);
                if (of_row > max) max = of_row;
            }
        w->maxima[idx] = max;
    }
}

static void write(int64_t begin, int64_t end, void *ctx) {
    const work *w = ctx;
    for (int64_t idx = begin; idx < end; idx++) {
        const piece p = find_piece(w, idx);
        const fa_quantized *t = &w->q->tensors[p.tensor];
        const bool is_owned = p.sequence < w->q->b;
        const float factor = is_owned ? 1 / w->descales[group_of(w, &p)] : 0;
        float x[MAX_COLUMNS];
        for (int64_t row = p.begin; row < p.end; row++)
            for (int64_t head = 0; head < t->g; head++) {
                int64_t to, from = row_at(w, &p, row, head, &to);
                if (is_owned) load_row(w->q, t, from, x);
                for (int64_t i = 0; i < t->d; i++) t->out[to + i] = is_owned ? fa_e4m3_from_f32(x[i] * factor) : 0;
            }
    }
}

static float descale_of(float max) {
    const float descale = max / 448;
    return max == 0 ? 1 : descale > 0x1p-126f ? descale : 0x1p-126f;
}

static void combine_maxima(const work *w, int64_t num_groups) {
    for (int64_t i = 0; i < num_groups; i++) w->descales[i] = 0;
    for (int64_t idx = 0; idx < w->first[3]; idx++) {
        const piece p = find_piece(w, idx);
        if (p.sequence == w->q->b) continue;
        float *max = &w->descales[group_of(w, &p)];
        if (w->maxima[idx] > *max) *max = w->maxima[idx];
    }
    for (int64_t i = 0; i < num_groups; i++) w->descales[i] = descale_of(w->descales[i]);
}

fa_status fa_cpu_quantize(const fa_quantization *q, const fa_pool *pool, fa_error *err) {
    work w = {.q = q};
    for (int i = 0; i < 3; i++) w.first[i + 1] = w.first[i] + num_pieces(q, &q->tensors[i]);
    const int64_t num = w.first[3], groups = q->is_per_tensor ? 1 : q->b * q->h_kv;
    w.maxima = malloc(sizeof(float) * (size_t)(num + 3 * groups + 1));
    if (!w.maxima) return fa_fail(err, FA_ENOMEM, "no memory to find the maxima of q, k and v");
    w.descales = w.maxima + num;
    bool is_done = num == 0 || pool->parallel_for(num, measure, &w);
    combine_maxima(&w, 3 * groups);
    is_done = is_done && (num == 0 || pool->parallel_for(num, write, &w));
    for (int i = 0; i < 3; i++)
        for (int64_t group = 0; group < groups; group++) q->tensors[i].descale[group] = w.descales[i * groups + group];
    free(w.maxima);
    return is_done ? FA_OK : fa_fail(err, FA_ENOMEM, "torch could not start the threads of the call");
}
