/* One operation after another, each over a whole tile. The number of elements is a constant, so compilers vectorise. */
#include "evaluate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/convert.h"
#include "integers.h"

enum { TILE = FA_FLEX_TILE };
typedef enum { HEAD, ROWS, KEYS, ROW, NUM_STEPS } step;

struct fa_flex_evaluator {
    const fa_flex_bound *bound;
    void **values; /* [num_instructions], TILE elements each. Values of ROWS have one element for each row. */
    void **spread; /* [num_instructions]: TILE copies of the current row's value, or NULL if no value of ROW reads it */
    int32_t *order; /* instructions, the steps one after the other */
    int32_t first[NUM_STEPS + 1];
    int64_t index[4]; /* b, h, first q_idx, first kv_idx */
    void *memory;
};

static size_t element_bytes(uint8_t type) {
    return type == FA_FLEX_BOOL ? 1 : type == FA_FLEX_F32 ? sizeof(float) : sizeof(double);
}

static step step_of(const fa_flex_instruction *x) {
    const bool on_q = x->depends & FA_FLEX_ON_Q, on_kv = x->depends & FA_FLEX_ON_KV;
    if (x->depends & FA_FLEX_ON_SCORE || (on_q && on_kv)) return ROW;
    return on_q ? ROWS : on_kv ? KEYS : HEAD;
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

#define EACH(value)                                \
    for (int i = 0; i < TILE; i++) r[i] = (value); \
    return

#define REAL       float
#define CALL(name) name##f
#include "evaluate_real.def"
#undef REAL
#undef CALL
#define REAL       double
#define CALL(name) name
#include "evaluate_real.def"
#undef REAL
#undef CALL

static void operate_ints(fa_flex_op op, int64_t *r, const int64_t *a, const int64_t *b) {
    switch (op) {
    case FA_FLEX_add: EACH(fa_flex_add_ints(a[i], b[i]));
    case FA_FLEX_sub: EACH(fa_flex_sub_ints(a[i], b[i]));
    case FA_FLEX_mul: EACH(fa_flex_mul_ints(a[i], b[i]));
    case FA_FLEX_floor_divide: EACH(fa_flex_floor_divide(a[i], b[i]));
    case FA_FLEX_trunc_divide: EACH(fa_flex_trunc_divide(a[i], b[i]));
    case FA_FLEX_remainder: EACH(fa_flex_remainder(a[i], b[i]));
    case FA_FLEX_fmod: EACH(fa_flex_fmod(a[i], b[i]));
    case FA_FLEX_minimum: EACH(a[i] < b[i] ? a[i] : b[i]);
    case FA_FLEX_maximum: EACH(a[i] > b[i] ? a[i] : b[i]);
    case FA_FLEX_pow: EACH(fa_flex_pow(a[i], b[i]));
    case FA_FLEX_neg: EACH(fa_flex_sub_ints(0, a[i]));
    case FA_FLEX_abs: EACH(a[i] < 0 ? fa_flex_sub_ints(0, a[i]) : a[i]);
    case FA_FLEX_sign: EACH((a[i] > 0) - (a[i] < 0));
    case FA_FLEX_bit_and: EACH(a[i] & b[i]);
    case FA_FLEX_bit_or: EACH(a[i] | b[i]);
    case FA_FLEX_bit_xor: EACH(a[i] ^ b[i]);
    case FA_FLEX_bit_not: EACH(~a[i]);
    case FA_FLEX_shift_left: EACH(fa_flex_shift_left(a[i], b[i]));
    case FA_FLEX_shift_right: EACH(fa_flex_shift_right(a[i], b[i]));
    case FA_FLEX_wrap_u8: EACH((uint8_t)a[i]);
    case FA_FLEX_wrap_i8: EACH((int8_t)a[i]);
    case FA_FLEX_wrap_i16: EACH((int16_t)a[i]);
    case FA_FLEX_wrap_i32: EACH((int32_t)a[i]);
    default: return; /* the decoder lets no other op pass */
    }
}

static void operate_bools(fa_flex_op op, uint8_t *r, const uint8_t *a, const uint8_t *b) {
    switch (op) {
    case FA_FLEX_bit_and: EACH(a[i] & b[i]);
    case FA_FLEX_bit_or: EACH(a[i] | b[i]);
    case FA_FLEX_bit_xor: EACH(a[i] ^ b[i]);
    case FA_FLEX_bit_not: EACH(a[i] ^ 1);
    default: return; /* the decoder lets no other op pass */
    }
}

#define COMPARE_ALL(name, element)                                                    \
    static void name(fa_flex_op op, uint8_t *r, const element *a, const element *b) { \
        switch (op) {                                                                 \
        case FA_FLEX_eq: EACH(a[i] == b[i]);                                          \
        case FA_FLEX_ne: EACH(a[i] != b[i]);                                          \
        case FA_FLEX_lt: EACH(a[i] < b[i]);                                           \
        default: EACH(a[i] <= b[i]);                                                  \
        }                                                                             \
    }
COMPARE_ALL(compare_bools, uint8_t)
COMPARE_ALL(compare_ints, int64_t)
COMPARE_ALL(compare_floats, float)
COMPARE_ALL(compare_doubles, double)

static void compare(const fa_flex_instruction *x, void *r, const void *a, const void *b) {
    switch (x->type) {
    case FA_FLEX_BOOL: compare_bools((fa_flex_op)x->op, r, a, b); return;
    case FA_FLEX_I64: compare_ints((fa_flex_op)x->op, r, a, b); return;
    case FA_FLEX_F32: compare_floats((fa_flex_op)x->op, r, a, b); return;
    default: compare_doubles((fa_flex_op)x->op, r, a, b); return;
    }
}

/* As x86 converts: a value outside of int64's range, or a NaN, gives the least value. */
static int64_t int_from(double x) { return x >= -0x1p63 && x < 0x1p63 ? (int64_t)x : INT64_MIN; }

#define CONVERT_FROM(name, element, is_int)                          \
    static void name(fa_flex_type to, void *out, const element *a) { \
        if (to == FA_FLEX_BOOL) {                                    \
            uint8_t *r = out;                                        \
            EACH(a[i] != 0);                                         \
        } else if (to == FA_FLEX_I64) {                              \
            int64_t *r = out;                                        \
            EACH(is_int ? (int64_t)a[i] : int_from((double)a[i]));   \
        } else if (to == FA_FLEX_F32) {                              \
            float *r = out;                                          \
            EACH((float)a[i]);                                       \
        } else {                                                     \
            double *r = out;                                         \
            EACH((double)a[i]);                                      \
        }                                                            \
    }
CONVERT_FROM(convert_bools, uint8_t, true)
CONVERT_FROM(convert_ints, int64_t, true)
CONVERT_FROM(convert_floats, float, false)
CONVERT_FROM(convert_doubles, double, false)

static void convert(fa_flex_type from, fa_flex_type to, void *r, const void *a) {
    switch (from) {
    case FA_FLEX_BOOL: convert_bools(to, r, a); return;
    case FA_FLEX_I64: convert_ints(to, r, a); return;
    case FA_FLEX_F32: convert_floats(to, r, a); return;
    default: convert_doubles(to, r, a); return;
    }
}

static void choose(uint8_t type, void *out, const uint8_t *c, const void *yes, const void *no) {
    if (type == FA_FLEX_BOOL) {
        uint8_t *r = out;
        EACH(c[i] ? ((const uint8_t *)yes)[i] : ((const uint8_t *)no)[i]);
    } else if (type == FA_FLEX_F32) {
        float *r = out;
        EACH(c[i] ? ((const float *)yes)[i] : ((const float *)no)[i]);
    } else if (type == FA_FLEX_F64) {
        double *r = out;
        EACH(c[i] ? ((const double *)yes)[i] : ((const double *)no)[i]);
    } else {
        int64_t *r = out;
        EACH(c[i] ? ((const int64_t *)yes)[i] : ((const int64_t *)no)[i]);
    }
}

static void fill(uint8_t type, void *out, fa_flex_number number) {
    if (type == FA_FLEX_BOOL) {
        memset(out, number.b, TILE);
    } else if (type == FA_FLEX_I64) {
        int64_t *r = out;
        EACH(number.i);
    } else {
        double *r = out; /* no constant or parameter is fp32 */
        EACH(number.d);
    }
}

/* ---- gathers ----------------------------------------------------------------------------------------------------- */

static void load(fa_flex_dtype dtype, const void *data, const int64_t *at, void *out) {
    uint8_t *bools = out;
    int64_t *ints = out;
    float *floats = out;
    switch (dtype) {
    case FA_FLEX_OF_BOOL:
        for (int i = 0; i < TILE; i++) bools[i] = ((const uint8_t *)data)[at[i]] != 0;
        return;
    case FA_FLEX_OF_U8:
        for (int i = 0; i < TILE; i++) ints[i] = ((const uint8_t *)data)[at[i]];
        return;
    case FA_FLEX_OF_I8:
        for (int i = 0; i < TILE; i++) ints[i] = ((const int8_t *)data)[at[i]];
        return;
    case FA_FLEX_OF_I16:
        for (int i = 0; i < TILE; i++) ints[i] = ((const int16_t *)data)[at[i]];
        return;
    case FA_FLEX_OF_I32:
        for (int i = 0; i < TILE; i++) ints[i] = ((const int32_t *)data)[at[i]];
        return;
    case FA_FLEX_OF_F16:
        for (int i = 0; i < TILE; i++) floats[i] = fa_f32_from_f16(((const uint16_t *)data)[at[i]]);
        return;
    case FA_FLEX_OF_BF16:
        for (int i = 0; i < TILE; i++) floats[i] = fa_f32_from_bf16(((const uint16_t *)data)[at[i]]);
        return;
    case FA_FLEX_OF_F32:
        for (int i = 0; i < TILE; i++) floats[i] = ((const float *)data)[at[i]];
        return;
    default: /* int64 and fp64 */
        for (int i = 0; i < TILE; i++) ints[i] = ((const int64_t *)data)[at[i]];
    }
}

static void gather(const fa_flex_bound *bound, const fa_flex_instruction *x, void *r, const void *const *indices) {
    const fa_flex_capture *c = &bound->captures[x->source];
    int64_t at[TILE] = {0};
    if (!c->data) {
        memset(r, 0, TILE * element_bytes(x->result));
        return;
    }
    for (int dim = 0; dim < x->num_operands; dim++) {
        const int64_t *index = indices[dim], size = c->size[dim], stride = c->stride[dim];
        for (int i = 0; i < TILE; i++) at[i] += fa_flex_place(index[i], size) * stride;
    }
    load((fa_flex_dtype)bound->program->captures[x->source].dtype, c->data, at, r);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static void count_from(int64_t *r, int64_t first, int64_t by) { EACH(first + i * by); }

static void run(fa_flex_evaluator *e, int32_t idx, step now, const void *scores) {
    const fa_flex_bound *bound = e->bound;
    const fa_flex_instruction *x = &bound->program->instructions[idx];
    const void *in[FA_FLEX_MAX_OPERANDS] = {NULL};
    void *r = e->values[idx];
    for (int i = 0; i < x->num_operands; i++) {
        const int32_t operand = x->operand[i];
        in[i] = now == ROW && e->spread[operand] ? e->spread[operand] : e->values[operand];
    }
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_b: count_from(r, e->index[0], 0); return;
    case FA_FLEX_h: count_from(r, e->index[1], 0); return;
    case FA_FLEX_q_idx: count_from(r, e->index[2], 1); return;
    case FA_FLEX_kv_idx: count_from(r, e->index[3], 1); return;
    case FA_FLEX_score: memcpy(r, scores, TILE * element_bytes(x->type)); return;
    case FA_FLEX_param: fill(x->type, r, bound->params[x->source]); return;
    case FA_FLEX_constant: fill(x->type, r, x->number); return;
    case FA_FLEX_gather: gather(bound, x, r, in); return;
    case FA_FLEX_convert:
        convert((fa_flex_type)bound->program->instructions[x->operand[0]].result, (fa_flex_type)x->type, r, in[0]);
        return;
    case FA_FLEX_where: choose(x->type, r, in[0], in[1], in[2]); return;
    case FA_FLEX_eq:
    case FA_FLEX_ne:
    case FA_FLEX_lt:
    case FA_FLEX_le: compare(x, r, in[0], in[1]); return;
    default: break;
    }
    switch (x->type) {
    case FA_FLEX_BOOL: operate_bools((fa_flex_op)x->op, r, in[0], in[1]); return;
    case FA_FLEX_I64: operate_ints((fa_flex_op)x->op, r, in[0], in[1]); return;
    case FA_FLEX_F32: operate_realf((fa_flex_op)x->op, r, in[0], in[1]); return;
    default: operate_real((fa_flex_op)x->op, r, in[0], in[1]); return;
    }
}

static void run_step(fa_flex_evaluator *e, step now, const void *scores) {
    for (int32_t i = e->first[now]; i < e->first[now + 1]; i++) run(e, e->order[i], now, scores);
}

void fa_flex_start_head(fa_flex_evaluator *e, int64_t b, int64_t h) {
    e->index[0] = b;
    e->index[1] = h;
    run_step(e, HEAD, NULL);
}

void fa_flex_start_rows(fa_flex_evaluator *e, int64_t q_idx) {
    e->index[2] = q_idx;
    run_step(e, ROWS, NULL);
}

void fa_flex_start_keys(fa_flex_evaluator *e, int64_t kv_idx) {
    e->index[3] = kv_idx;
    run_step(e, KEYS, NULL);
}

/* Copies element `row` to all elements of out. */
static void spread_row(uint8_t type, void *out, const void *values, int row) {
    if (type == FA_FLEX_BOOL) {
        memset(out, ((const uint8_t *)values)[row], TILE);
    } else if (type == FA_FLEX_F32) {
        float *r = out, value = ((const float *)values)[row];
        EACH(value);
    } else {
        int64_t *r = out, value = ((const int64_t *)values)[row];
        EACH(value);
    }
}

const void *fa_flex_row(fa_flex_evaluator *e, int row, const void *scores) {
    const fa_flex_program *p = e->bound->program;
    for (int32_t i = e->first[ROWS]; i < e->first[ROWS + 1]; i++) {
        const int32_t idx = e->order[i];
        if (e->spread[idx]) spread_row(p->instructions[idx].result, e->spread[idx], e->values[idx], row);
    }
    run_step(e, ROW, scores);
    const int32_t last = p->num_instructions - 1;
    return e->spread[last] ? e->spread[last] : e->values[last];
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Marks the values of ROWS that the step ROW reads, and the result. */
static void mark_spread(const fa_flex_program *p, uint8_t *is_spread) {
    memset(is_spread, 0, (size_t)p->num_instructions);
    is_spread[p->num_instructions - 1] = 1;
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        for (int i = 0; step_of(x) == ROW && i < x->num_operands; i++) is_spread[x->operand[i]] = 1;
    }
    for (int32_t idx = 0; idx < p->num_instructions; idx++)
        if (step_of(&p->instructions[idx]) != ROWS) is_spread[idx] = 0;
}

static void sort_steps(fa_flex_evaluator *e) {
    const fa_flex_program *p = e->bound->program;
    int32_t num = 0;
    for (int now = 0; now < NUM_STEPS; now++) {
        e->first[now] = num;
        for (int32_t idx = 0; idx < p->num_instructions; idx++)
            if (step_of(&p->instructions[idx]) == (step)now) e->order[num++] = idx;
    }
    e->first[NUM_STEPS] = num;
}

fa_flex_evaluator *fa_flex_evaluator_new(const fa_flex_bound *bound) {
    const fa_flex_program *p = bound->program;
    const size_t num = (size_t)p->num_instructions;
    size_t bytes = 0;
    uint8_t *is_spread = malloc(num);
    fa_flex_evaluator *e = calloc(1, sizeof *e);
    if (!is_spread || !e) goto no_memory;
    mark_spread(p, is_spread);
    for (size_t i = 0; i < num; i++) bytes += TILE * element_bytes(p->instructions[i].result) * (1 + is_spread[i]);
    e->bound = bound;
    e->values = calloc(2 * num, sizeof *e->values);
    e->order = malloc(num * sizeof *e->order);
    e->memory = calloc(1, bytes);
    if (!e->values || !e->order || !e->memory) goto no_memory;
    e->spread = e->values + num;
    sort_steps(e);
    char *at = e->memory;
    for (size_t i = 0; i < num; i++)
        for (int copy = 0; copy <= is_spread[i]; copy++) {
            (copy ? e->spread : e->values)[i] = at;
            at += TILE * element_bytes(p->instructions[i].result);
        }
    free(is_spread);
    return e;
no_memory:
    free(is_spread);
    fa_flex_evaluator_free(e);
    return NULL;
}

void fa_flex_evaluator_free(fa_flex_evaluator *e) {
    if (!e) return;
    free(e->memory);
    free(e->order);
    free(e->values);
    free(e);
}
