/* Each operation maps the bounds of its operands to bounds of its result. */
#include "intervals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/convert.h"
#include "denormals.h"
#include "integers.h"

#include "cuda/flex_bounds.h" /* behind the others */

enum { PIECE = 64, MOST_SCANNED = 1024 }; /* elements of a capture */
enum { MOST_READ = 3 };                   /* operands that bound_op reads, whatever their number */
typedef enum { HEAD, ROWS, KEYS, ROW, NUM_STEPS } step;

static interval of_number(uint8_t type, fa_flex_number number) {
    if (type == FA_FLEX_BOOL) return of_ints(number.b, number.b);
    if (type == FA_FLEX_I64) return of_ints(number.i, number.i);
    return isnan(number.d) ? anything(type) : of_reals(number.d, number.d, false);
}

/* ---- captures ---------------------------------------------------------------------------------------------------- */

struct fa_flex_tables {
    interval *pieces[FA_FLEX_MAX_CAPTURES]; /* bounds of PIECE elements each, for long captures of rank 1 */
};

static interval of_element(fa_flex_dtype dtype, const void *data, int64_t at) {
    double real;
    int64_t integer;
    switch (dtype) {
    case FA_FLEX_OF_BOOL: integer = ((const uint8_t *)data)[at] != 0; return of_ints(integer, integer);
    case FA_FLEX_OF_U8: integer = ((const uint8_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_I8: integer = ((const int8_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_I16: integer = ((const int16_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_I32: integer = ((const int32_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_I64: integer = ((const int64_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_F16: real = (double)fa_f32_from_f16(((const uint16_t *)data)[at]); break;
    case FA_FLEX_OF_BF16: real = (double)fa_f32_from_bf16(((const uint16_t *)data)[at]); break;
    case FA_FLEX_OF_F32: real = (double)((const float *)data)[at]; break;
    default: real = ((const double *)data)[at]; break;
    }
    return isnan(real) ? anything(FA_FLEX_F64) : of_reals(real, real, false);
}

#define SCAN(name, element)                                                               \
    static interval name(const element *data, int64_t stride, int64_t from, int64_t to) { \
        element lo = data[from * stride], hi = lo;                                        \
        for (int64_t i = from + 1; i <= to; i++) {                                        \
            const element x = data[i * stride];                                           \
            lo = x < lo ? x : lo, hi = x > hi ? x : hi;                                   \
        }                                                                                 \
        return of_ints(lo, hi);                                                           \
    }
SCAN(scan_i32, int32_t)
SCAN(scan_i64, int64_t)

/* Elements [from, to] of a capture of rank 1. The dtypes that index tables often have loops of their own. */
static interval of_elements(const fa_flex_bound *bound, int capture, int64_t from, int64_t to) {
    const fa_flex_dtype dtype = (fa_flex_dtype)bound->program->captures[capture].dtype;
    const fa_flex_capture *c = &bound->captures[capture];
    if (dtype == FA_FLEX_OF_I32) return scan_i32(c->data, c->stride[0], from, to);
    if (dtype == FA_FLEX_OF_I64) return scan_i64(c->data, c->stride[0], from, to);
    interval all = of_element(dtype, c->data, from * c->stride[0]);
    for (int64_t i = from + 1; i <= to; i++)
        all = hull((uint8_t)fa_flex_type_of(dtype), all, of_element(dtype, c->data, i * c->stride[0]));
    return all;
}

fa_flex_tables *fa_flex_tables_new(const fa_flex_bound *bound) {
    fa_flex_tables *t = calloc(1, sizeof *t);
    for (int i = 0; t && i < bound->program->num_captures; i++) {
        const int64_t size = bound->captures[i].size[0];
        if (bound->program->captures[i].rank != 1 || size <= MOST_SCANNED) continue;
        t->pieces[i] = malloc((size_t)((size + PIECE - 1) / PIECE) * sizeof *t->pieces[i]);
        if (!t->pieces[i]) {
            fa_flex_tables_free(t);
            return NULL;
        }
        for (int64_t at = 0; at < size; at += PIECE)
            t->pieces[i][at / PIECE] = of_elements(bound, i, at, least(at + PIECE, size) - 1);
    }
    return t;
}

void fa_flex_tables_free(fa_flex_tables *tables) {
    for (int i = 0; tables && i < FA_FLEX_MAX_CAPTURES; i++) free(tables->pieces[i]);
    free(tables);
}

/* Elements [from, to] of a long capture: whole pieces where they fit. */
static interval of_pieces(const fa_flex_bound *bound, const interval *pieces, int capture, int64_t from, int64_t to) {
    const uint8_t type = (uint8_t)fa_flex_type_of((fa_flex_dtype)bound->program->captures[capture].dtype);
    interval all = of_elements(bound, capture, from, from);
    while (from <= to) {
        if (from % PIECE == 0 && from + PIECE - 1 <= to) {
            all = hull(type, all, pieces[from / PIECE]);
            from += PIECE;
        } else {
            const int64_t end = least(from - from % PIECE + PIECE - 1, to);
            all = hull(type, all, of_elements(bound, capture, from, end));
            from = end + 1;
        }
    }
    return all;
}

/* The places that indices from lo to hi reach. */
static void places_of(interval index, int64_t size, int64_t *from, int64_t *to) {
    const bool wraps = index.lo < 0 && index.hi >= 0;
    *from = wraps ? 0 : fa_flex_place(index.lo, size);
    *to = wraps ? size - 1 : fa_flex_place(index.hi, size);
}

static interval gather(const fa_flex_bound *bound, const fa_flex_tables *tables, const fa_flex_instruction *x,
                       const interval *in) {
    const fa_flex_capture *c = &bound->captures[x->source];
    const fa_flex_dtype dtype = (fa_flex_dtype)bound->program->captures[x->source].dtype;
    int64_t from[FA_FLEX_MAX_RANK], to[FA_FLEX_MAX_RANK], at[FA_FLEX_MAX_RANK], volume = 1;
    if (!c->data) return (interval){0}; /* a load from an empty capture gives 0 */
    for (int dim = 0; dim < x->num_operands; dim++) {
        places_of(in[dim], c->size[dim], &from[dim], &to[dim]);
        at[dim] = from[dim];
        volume = volume > MOST_SCANNED ? volume : volume * least(to[dim] - from[dim] + 1, MOST_SCANNED + 1);
    }
    if (tables && tables->pieces[x->source])
        return of_pieces(bound, tables->pieces[x->source], x->source, from[0], to[0]);
    if (volume > MOST_SCANNED) return anything(x->result);
    if (x->num_operands == 1) return of_elements(bound, x->source, from[0], to[0]);
    interval all = {0};
    for (bool is_first = true;; is_first = false) {
        int64_t place = 0;
        for (int dim = 0; dim < x->num_operands; dim++) place += at[dim] * c->stride[dim];
        const interval element = of_element(dtype, c->data, place);
        all = is_first ? element : hull(x->result, all, element);
        int dim = x->num_operands - 1;
        while (dim >= 0 && ++at[dim] > to[dim]) {
            at[dim] = from[dim];
            dim--;
        }
        if (dim < 0) return all;
    }
}

/* ---- steps, as in evaluate.h ------------------------------------------------------------------------------------- */

struct fa_flex_intervals {
    const fa_flex_bound *bound;
    const fa_flex_tables *tables;
    interval *values;                  /* [num_instructions] */
    interval *rows[FA_FLEX_ROW_SLOTS]; /* [num_instructions], values of ROWS */
    int32_t *order;                    /* instructions, the steps one after the other */
    int32_t first[NUM_STEPS + 1];
    uint8_t *is_of_rows; /* [num_instructions] */
    uint8_t *is_same;    /* [num_instructions], of fa_flex_bound_is_same */
    interval index[4];
};

static step step_of(const fa_flex_instruction *x) {
    const bool on_q = x->depends & FA_FLEX_ON_Q, on_kv = x->depends & FA_FLEX_ON_KV;
    if (x->depends & FA_FLEX_ON_SCORE || (on_q && on_kv)) return ROW;
    return on_q ? ROWS : on_kv ? KEYS : HEAD;
}

/* An operation on values of the program. `in`: bounds of the operands. */
static interval bound_operation(const fa_flex_program *p, const fa_flex_instruction *x, const interval *in) {
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_constant: return of_number(x->type, x->number);
    case FA_FLEX_score:
    case FA_FLEX_grad: return anything(x->type);
    case FA_FLEX_scatter: return in[x->num_operands - 1];
    default: return bound_op(x->op, x->type, p->instructions[x->operand[0]].result, in[0], in[1], in[2]);
    }
}

static interval bound_value(const fa_flex_intervals *v, const fa_flex_instruction *x, const interval *in) {
    const fa_flex_bound *bound = v->bound;
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_b: return v->index[0];
    case FA_FLEX_h: return v->index[1];
    case FA_FLEX_q_idx: return v->index[2];
    case FA_FLEX_kv_idx: return v->index[3];
    case FA_FLEX_param: return of_number(x->type, bound->params[x->source]);
    case FA_FLEX_gather: return gather(bound, v->tables, x, in);
    default: return bound_operation(bound->program, x, in);
    }
}

/* `rows`: where values of ROWS are. */
static void run_step(fa_flex_intervals *v, step now, interval *rows) {
    const fa_flex_program *p = v->bound->program;
    const unsigned mode = fa_keep_denormals();
    for (int32_t i = v->first[now]; i < v->first[now + 1]; i++) {
        const fa_flex_instruction *x = &p->instructions[v->order[i]];
        interval in[FA_FLEX_MAX_OPERANDS];
        for (int j = 0; j < x->num_operands; j++) {
            const int32_t operand = x->operand[j];
            in[j] = v->is_of_rows[operand] ? rows[operand] : v->values[operand];
        }
        for (int j = x->num_operands; j < MOST_READ; j++) in[j] = (interval){0};
        (now == ROWS ? rows : v->values)[v->order[i]] = bound_value(v, x, in);
    }
    fa_restore_denormals(mode);
}

void fa_flex_bound_head(fa_flex_intervals *v, int64_t b, int64_t h) {
    v->index[0] = of_ints(b, b);
    v->index[1] = of_ints(h, h);
    run_step(v, HEAD, NULL);
}

void fa_flex_bound_rows(fa_flex_intervals *v, int slot, int64_t first, int64_t last) {
    v->index[2] = of_ints(first, last);
    run_step(v, ROWS, v->rows[slot]);
}

void fa_flex_bound_keys(fa_flex_intervals *v, int64_t first, int64_t last) {
    v->index[3] = of_ints(first, last);
    run_step(v, KEYS, NULL);
}

fa_flex_interval fa_flex_bound_block(fa_flex_intervals *v, int slot) {
    const fa_flex_program *p = v->bound->program;
    const int32_t last = p->num_instructions - 1;
    run_step(v, ROW, v->rows[slot]);
    return v->is_of_rows[last] ? v->rows[slot][last] : v->values[last];
}

/* Whether the bounds leave one value. Zeros are two values: 1 / 0 tells their signs. */
static bool is_one(uint8_t type, interval x) {
    if (type == FA_FLEX_BOOL || type == FA_FLEX_I64) return x.lo == x.hi;
    return x.low == x.high && x.low != 0 && !x.nan;
}

/* A value is the same for all of the keys in three cases. It does not depend on the key, its bounds leave one value, or
 * it is an operation on such values. */
bool fa_flex_bound_is_same(fa_flex_intervals *v, int slot) {
    const fa_flex_program *p = v->bound->program;
    const int32_t last = p->num_instructions - 1;
    for (int32_t idx = 0; idx <= last; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        bool same = x->num_operands > 0;
        for (int i = 0; i < x->num_operands; i++) same &= v->is_same[x->operand[i]];
        const interval bounds = v->is_of_rows[idx] ? v->rows[slot][idx] : v->values[idx];
        v->is_same[idx] = !(x->depends & (FA_FLEX_ON_KV | FA_FLEX_ON_SCORE)) || same || is_one(x->result, bounds);
    }
    return v->is_same[last];
}

fa_flex_intervals *fa_flex_intervals_new(const fa_flex_bound *bound, const fa_flex_tables *tables) {
    const fa_flex_program *p = bound->program;
    const size_t num = (size_t)p->num_instructions;
    fa_flex_intervals *v = calloc(1, sizeof *v);
    if (!v) return NULL;
    v->bound = bound;
    v->tables = tables;
    v->values = calloc(num * (FA_FLEX_ROW_SLOTS + 1), sizeof *v->values);
    v->order = malloc(num * sizeof *v->order);
    v->is_of_rows = malloc(num);
    v->is_same = malloc(num);
    if (!v->values || !v->order || !v->is_of_rows || !v->is_same) {
        fa_flex_intervals_free(v);
        return NULL;
    }
    for (int slot = 0; slot < FA_FLEX_ROW_SLOTS; slot++) v->rows[slot] = v->values + num * (size_t)(slot + 1);
    for (size_t i = 0; i < num; i++) v->is_of_rows[i] = step_of(&p->instructions[i]) == ROWS;
    int32_t count = 0;
    for (int now = 0; now < NUM_STEPS; now++) {
        v->first[now] = count;
        for (int32_t idx = 0; idx < p->num_instructions; idx++)
            if (step_of(&p->instructions[idx]) == (step)now) v->order[count++] = idx;
    }
    v->first[NUM_STEPS] = count;
    return v;
}

void fa_flex_intervals_free(fa_flex_intervals *v) {
    if (!v) return;
    free(v->values);
    free(v->order);
    free(v->is_of_rows);
    free(v->is_same);
    free(v);
}

/* ---- whatever captures and parameters hold ----------------------------------------------------------------------- */

/* Every element of a dtype, and 0. */
static interval of_dtype(fa_flex_dtype dtype) {
    switch (dtype) {
    case FA_FLEX_OF_U8: return of_ints(0, UINT8_MAX);
    case FA_FLEX_OF_I8: return of_ints(INT8_MIN, INT8_MAX);
    case FA_FLEX_OF_I16: return of_ints(INT16_MIN, INT16_MAX);
    case FA_FLEX_OF_I32: return of_ints(INT32_MIN, INT32_MAX);
    default: return anything((uint8_t)fa_flex_type_of(dtype));
    }
}

void fa_flex_bound_always(const fa_flex_program *p, int64_t most_index, int64_t most_param, fa_flex_interval *values) {
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        interval in[FA_FLEX_MAX_OPERANDS] = {{{0}, {0}, false}};
        for (int i = 0; i < x->num_operands; i++) in[i] = values[x->operand[i]];
        switch ((fa_flex_op)x->op) {
        case FA_FLEX_b:
        case FA_FLEX_h:
        case FA_FLEX_q_idx:
        case FA_FLEX_kv_idx: values[idx] = of_ints(0, most_index); break;
        case FA_FLEX_param:
            values[idx] =
                x->type == FA_FLEX_I64 && most_param < INT64_MAX ? of_ints(-most_param, most_param) : anything(x->type);
            break;
        case FA_FLEX_gather: values[idx] = of_dtype((fa_flex_dtype)p->captures[x->source].dtype); break;
        default: values[idx] = bound_operation(p, x, in); break;
        }
    }
}
