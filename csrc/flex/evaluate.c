/* One operation after another, each over all lanes. The loops: operate.h. */
#include "evaluate.h"

#include <stdlib.h>
#include <string.h>

#include "denormals.h"
#include "operations.h"
#include "scatters.h"

enum { MOST = FA_FLEX_MOST_LANES };
typedef enum { HEAD, LINES, LANES, LINE, NUM_STEPS } step;

/* Operands of the step LINE are the spread values, where there are any. */
struct fa_flex_evaluator {
    const fa_flex_bound *bound;
    const fa_flex_operations *operations;
    fa_flex_operation *schedule; /* [num_instructions], the steps one after the other */
    fa_flex_turned *turned;      /* [num_instructions], of the gathers and scatters of schedule */
    int32_t *order;              /* the instructions of schedule */
    int32_t first[NUM_STEPS + 1];
    void **values; /* [num_instructions], MOST elements each */
    void **spread; /* [num_instructions]: the line's value of the step LINES, copied; NULL: the step LINE reads none */
    int64_t index[4]; /* b, h, first line, first lane */
    int num_lines, num_lanes;
    /* What the result adds to the score: a gather of the step LINE, in schedule, or -1; or values, of another step or
     * of differences; or neither. */
    int32_t bias;
    const float *bias_values;
    bool is_difference, are_lanes_shifted; /* the values of the step LANES are those of differences */
    int32_t passed;  /* if a line only scatters the gradient and passes it on: the scatter in schedule; otherwise -1 */
    bool *is_needed; /* [num_instructions] of the step LINE, by the places of this scatter */
    bool lanes_are_keys;
    const fa_flex_sums_at *sums; /* [captures], where scatters add; NULL: nowhere */
    void *memory;
};

static size_t element_bytes(uint8_t type) {
    return type == FA_FLEX_BOOL ? 1 : type == FA_FLEX_F32 ? sizeof(float) : sizeof(double);
}

static step step_of(const fa_flex_evaluator *e, const fa_flex_instruction *x) {
    const int on_lines = e->lanes_are_keys ? FA_FLEX_ON_Q : FA_FLEX_ON_KV;
    const int on_lanes = e->lanes_are_keys ? FA_FLEX_ON_KV : FA_FLEX_ON_Q;
    const bool line = x->depends & on_lines, lane = x->depends & on_lanes;
    if (x->depends & FA_FLEX_ON_SCORE || x->op == FA_FLEX_scatter || (line && lane)) return LINE;
    return line ? LINES : lane ? LANES : HEAD;
}

static int whole_groups(int n) { return (n + FA_FLEX_GROUP - 1) / FA_FLEX_GROUP * FA_FLEX_GROUP; }

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static void gather(const fa_flex_evaluator *e, const fa_flex_operation *o) {
    const int32_t source = o->x->source;
    const fa_flex_capture *c = &e->bound->captures[source];
    if (c->data)
        e->operations->gather(o, c, (fa_flex_dtype)e->bound->program->captures[source].dtype);
    else
        memset(o->r, 0, (size_t)o->n * element_bytes(o->x->result));
}

/* Where a scatter adds. */
static fa_flex_sums_at sums_of(const fa_flex_evaluator *e, int32_t source) {
    return e->sums && e->bound->captures[source].data ? e->sums[source] : (fa_flex_sums_at){NULL, NULL};
}

static void scatter(const fa_flex_evaluator *e, const fa_flex_operation *o) {
    const fa_flex_capture *c = &e->bound->captures[o->x->source];
    const int rank = o->x->num_operands - 1;
    const fa_flex_sums_at to = sums_of(e, o->x->source);
    memcpy(o->r, o->in[rank], (size_t)o->n * element_bytes(o->x->result));
    if (to.fp64 || to.fp32) e->operations->scatter(o, c, rank, to, false);
}

static void run(fa_flex_evaluator *e, const fa_flex_operation *o, const void *scores, const void *grads) {
    const fa_flex_operations *operations = e->operations;
    const fa_flex_instruction *x = o->x;
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_b: operations->fill(FA_FLEX_I64, o->n, o->r, &e->index[0]); return;
    case FA_FLEX_h: operations->fill(FA_FLEX_I64, o->n, o->r, &e->index[1]); return;
    case FA_FLEX_q_idx: operations->count(o->n, o->r, e->index[e->lanes_are_keys ? 2 : 3]); return;
    case FA_FLEX_kv_idx: operations->count(o->n, o->r, e->index[e->lanes_are_keys ? 3 : 2]); return;
    case FA_FLEX_score:
    case FA_FLEX_grad: {
        const void *values = x->op == FA_FLEX_score ? scores : grads;
        if (values) memcpy(o->r, values, (size_t)o->n * element_bytes(x->type)); /* a line always has them */
        return;
    }
    case FA_FLEX_param: operations->fill((fa_flex_type)x->type, o->n, o->r, &e->bound->params[x->source]); return;
    case FA_FLEX_constant: operations->fill((fa_flex_type)x->type, o->n, o->r, &x->number); return;
    case FA_FLEX_gather: gather(e, o); return;
    case FA_FLEX_scatter: scatter(e, o); return;
    default: operations->operate(o);
    }
}

static void run_step(fa_flex_evaluator *e, step now, int n, const void *scores, const void *grads) {
    const unsigned mode = fa_keep_denormals();
    for (int32_t i = e->first[now]; i < e->first[now + 1]; i++) {
        e->schedule[i].n = whole_groups(n);
        e->schedule[i].used = n;
        run(e, &e->schedule[i], scores, grads);
    }
    fa_restore_denormals(mode);
}

void fa_flex_start_head(fa_flex_evaluator *e, int64_t b, int64_t h) {
    if (e->index[0] == b && e->index[1] == h) return;
    e->index[0] = b;
    e->index[1] = h;
    e->num_lines = e->num_lanes = 0;
    run_step(e, HEAD, MOST, NULL, NULL);
}

void fa_flex_start_lines(fa_flex_evaluator *e, int64_t first, int num) {
    if (e->index[2] == first && e->num_lines == num) return;
    e->index[2] = first;
    e->num_lines = num;
    run_step(e, LINES, num, NULL, NULL);
}

void fa_flex_start_lanes(fa_flex_evaluator *e, int64_t first, int num) {
    if (e->index[3] == first && e->num_lanes == num && !e->are_lanes_shifted) return;
    e->index[3] = first;
    e->num_lanes = num;
    e->are_lanes_shifted = false;
    run_step(e, LANES, num, NULL, NULL);
}

/* Copies the values of a line that the step LINE reads to all lanes. */
static void spread_line(fa_flex_evaluator *e, int line, int num_lanes) {
    const fa_flex_program *p = e->bound->program;
    for (int32_t i = e->first[LINES]; i < e->first[LINES + 1]; i++) {
        const int32_t idx = e->order[i];
        if (!e->spread[idx]) continue;
        const uint8_t type = p->instructions[idx].result;
        e->operations->fill((fa_flex_type)type, whole_groups(num_lanes), e->spread[idx],
                            (const char *)e->values[idx] + (size_t)line * element_bytes(type));
    }
}

/* Evaluates the lanes of a line and as many lanes before them as there are further lines. Lane k of the next line has
 * the difference of lane k - 1 of this one. Returns the lanes of this line. */
static const float *find_differences(fa_flex_evaluator *e, int line, int *num_lines) {
    const int rest = e->num_lines - line, room = MOST - whole_groups(e->num_lanes) + 1, num = rest < room ? rest : room;
    const int64_t first = e->index[3];
    if (num < 8) return NULL; /* the lines one by one take as long */
    e->index[3] = first - (num - 1), e->are_lanes_shifted = true;
    run_step(e, LANES, e->num_lanes + num - 1, NULL, NULL);
    spread_line(e, line, e->num_lanes + num - 1);
    run_step(e, LINE, e->num_lanes + num - 1, NULL, NULL);
    e->index[3] = first;
    *num_lines = num;
    return e->bias_values + num - 1;
}

fa_flex_bias_rows fa_flex_bias_lines(fa_flex_evaluator *e, int line) {
    fa_flex_bias_rows rows = {.num_lines = 1, .stride = FA_FLEX_TILE};
    if (e->is_difference) {
        rows.stride = -1, rows.values = find_differences(e, line, &rows.num_lines);
    } else if (e->bias_values) {
        spread_line(e, line, e->num_lanes);
        rows.values = e->bias_values;
    } else if (e->bias >= 0) {
        fa_flex_operation *o = &e->schedule[e->bias];
        const fa_flex_capture *c = &e->bound->captures[o->x->source];
        const fa_flex_dtype dtype = (fa_flex_dtype)e->bound->program->captures[o->x->source].dtype;
        spread_line(e, line, e->num_lanes);
        o->n = whole_groups(e->num_lanes), o->used = e->num_lanes;
        const unsigned mode = fa_keep_denormals();
        if (c->data) rows.values = e->operations->gather_lines(o, c, dtype, &rows.num_lines);
        fa_restore_denormals(mode);
    }
    if (rows.num_lines > e->num_lines - line) rows.num_lines = e->num_lines - line;
    return rows;
}

/* The places of a scatter for the first `num` lanes. */
static void find_places(fa_flex_evaluator *e, int num) {
    for (int32_t i = e->first[LINE]; i < e->first[LINE + 1]; i++) {
        if (!e->is_needed[e->order[i]]) continue;
        e->schedule[i].n = whole_groups(num), e->schedule[i].used = num;
        run(e, &e->schedule[i], NULL, NULL);
    }
}

/* Scatters the gradient of a line. Where places grow evenly, the first one tells all of them. */
static void pass_gradient(fa_flex_evaluator *e, const void *grads) {
    fa_flex_operation o = e->schedule[e->passed];
    const fa_flex_capture *c = &e->bound->captures[o.x->source];
    const int rank = o.x->num_operands - 1, some = e->num_lanes < FA_FLEX_GROUP ? e->num_lanes : FA_FLEX_GROUP;
    const fa_flex_sums_at to = sums_of(e, o.x->source);
    if (!to.fp64 && !to.fp32) return;
    o.n = whole_groups(e->num_lanes), o.used = e->num_lanes, o.in[rank] = grads;
    find_places(e, o.is_even ? some : e->num_lanes);
    if (o.is_even && e->operations->scatter(&o, c, rank, to, true)) return;
    if (o.is_even) find_places(e, e->num_lanes);
    e->operations->scatter(&o, c, rank, to, false);
}

const void *fa_flex_line(fa_flex_evaluator *e, int line, const void *scores, const void *grads) {
    const fa_flex_program *p = e->bound->program;
    if (e->are_lanes_shifted) run_step(e, LANES, e->num_lanes, NULL, NULL), e->are_lanes_shifted = false;
    spread_line(e, line, e->num_lanes);
    const int32_t last = p->num_instructions - 1;
    if (e->passed >= 0) {
        const unsigned mode = fa_keep_denormals();
        pass_gradient(e, grads);
        fa_restore_denormals(mode);
        return grads;
    }
    run_step(e, LINE, e->num_lanes, scores, grads);
    return e->spread[last] ? e->spread[last] : e->values[last];
}

void fa_flex_scatter_to(fa_flex_evaluator *e, const fa_flex_sums_at *sums) { e->sums = sums; }

void fa_flex_add_waiting(fa_flex_evaluator *e) {
    const unsigned mode = fa_keep_denormals();
    for (int32_t i = e->first[LINE]; i < e->first[LINE + 1]; i++)
        if (fa_flex_is_scatter(e->schedule[i].x))
            e->operations->add_waiting(&e->schedule[i], sums_of(e, e->schedule[i].x->source));
    fa_restore_denormals(mode);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Marks the values of LINES that the step LINE reads, and the result. */
static void mark_spread(const fa_flex_evaluator *e, uint8_t *is_spread) {
    const fa_flex_program *p = e->bound->program;
    memset(is_spread, 0, (size_t)p->num_instructions);
    is_spread[p->num_instructions - 1] = 1;
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        for (int i = 0; step_of(e, x) == LINE && i < x->num_operands; i++) is_spread[x->operand[i]] = 1;
    }
    for (int32_t idx = 0; idx < p->num_instructions; idx++)
        if (step_of(e, &p->instructions[idx]) != LINES) is_spread[idx] = 0;
}

/* Finds what the indices of a gather or a scatter grow by from key to key, or from query to query. Returns whether that
 * is known. */
static bool find_slopes(const fa_flex_evaluator *e, const fa_flex_trait *traits, const fa_flex_instruction *x,
                        bool are_keys, int32_t *slope) {
    const int rank = x->num_operands - fa_flex_is_scatter(x);
    bool is_even = true;
    for (int i = 0; i < rank; i++) {
        const int32_t operand = x->operand[i];
        const uint8_t depends = e->bound->program->instructions[operand].depends;
        const bool is_same = !(depends & ((are_keys ? FA_FLEX_ON_KV : FA_FLEX_ON_Q) | FA_FLEX_ON_SCORE));
        slope[i] = is_same ? 0 : are_keys ? traits[operand].of_kv : traits[operand].of_q;
        is_even &= is_same || traits[operand].is_linear;
    }
    return is_even;
}

/* turned: room for lines. */
static void look_at_indices(const fa_flex_evaluator *e, step now, const fa_flex_trait *traits, fa_flex_operation *o,
                            fa_flex_turned *turned) {
    const bool are_keys = e->lanes_are_keys == (now != LINES);
    o->is_even = find_slopes(e, traits, o->x, are_keys, o->slope);
    if (now == LINE && find_slopes(e, traits, o->x, !are_keys, turned->slope)) o->turned = turned;
}

static void sort_steps(fa_flex_evaluator *e, const fa_flex_trait *traits) {
    const fa_flex_program *p = e->bound->program;
    int32_t num = 0;
    for (int now = 0; now < NUM_STEPS; now++) {
        e->first[now] = num;
        for (int32_t idx = 0; idx < p->num_instructions; idx++) {
            const fa_flex_instruction *x = &p->instructions[idx];
            if (step_of(e, x) != (step)now) continue;
            fa_flex_operation *o = &e->schedule[num];
            o->x = x;
            o->r = e->values[idx];
            if (x->num_operands > 0) o->from = p->instructions[x->operand[0]].result;
            for (int i = 0; i < x->num_operands; i++) {
                const int32_t operand = x->operand[i];
                o->in[i] = now == LINE && e->spread[operand] ? e->spread[operand] : e->values[operand];
            }
            if (x->op == FA_FLEX_gather || fa_flex_is_scatter(x))
                look_at_indices(e, (step)now, traits, o, &e->turned[num]);
            e->order[num++] = idx;
        }
    }
    e->first[NUM_STEPS] = num;
}

/* Finds what the result adds to the score, in fp32: a value of another step, a gather, or a value that depends on q_idx
 * and kv_idx by their difference alone. */
static void find_bias(fa_flex_evaluator *e, const fa_flex_trait *traits) {
    const fa_flex_program *p = e->bound->program;
    const fa_flex_instruction *last = &p->instructions[p->num_instructions - 1];
    e->bias = -1;
    if (last->op != FA_FLEX_add || last->type != FA_FLEX_F32) return;
    for (int side = 0; side < 2; side++) {
        const int32_t other = last->operand[1 - side];
        const fa_flex_instruction *x = &p->instructions[other];
        if (p->instructions[last->operand[side]].op != FA_FLEX_score || x->depends & FA_FLEX_ON_SCORE) continue;
        const bool is_of_line = step_of(e, x) == LINE;
        if (!is_of_line)
            e->bias_values = e->spread[other] ? e->spread[other] : e->values[other];
        else if (traits[other].is_difference)
            e->bias_values = e->values[other], e->is_difference = true;
        for (int32_t i = e->first[LINE]; i < e->first[LINE + 1] && is_of_line && !e->is_difference; i++)
            if (e->order[i] == other && x->op == FA_FLEX_gather && e->first[LINE + 1] - e->first[LINE] == 3)
                e->bias = i;
    }
}

/* Marks the instructions of the step LINE that an instruction needs. */
static void mark_needed(fa_flex_evaluator *e, int32_t idx) {
    const fa_flex_instruction *x = &e->bound->program->instructions[idx];
    if (step_of(e, x) != LINE || e->is_needed[idx]) return;
    e->is_needed[idx] = true;
    for (int i = 0; i < x->num_operands; i++) mark_needed(e, x->operand[i]);
}

/* Finds e->passed: the derivative passes the gradient on, and has one scatter, which adds the gradient at places that
 * do not depend on the score. The rest of the step LINE finds these places, or asks whether the gradient is 0, because
 * then the result is 0. */
static void find_passed(fa_flex_evaluator *e) {
    const fa_flex_program *p = e->bound->program;
    int32_t found = -1, num = 0;
    e->passed = -1;
    if (!fa_flex_passes_gradient(p)) return;
    for (int32_t i = e->first[LINE]; i < e->first[LINE + 1]; i++)
        if (fa_flex_is_scatter(e->schedule[i].x)) found = i, num++;
    if (num != 1) return;
    const fa_flex_instruction *x = e->schedule[found].x;
    const int rank = x->num_operands - 1;
    if (x->result != FA_FLEX_F32 || p->instructions[x->operand[rank]].op != FA_FLEX_grad) return;
    for (int i = 0; i < rank; i++)
        if (p->instructions[x->operand[i]].depends & FA_FLEX_ON_SCORE) return;
    for (int i = 0; i < rank; i++) mark_needed(e, x->operand[i]);
    e->passed = found;
}

/* NOTE: flash_attn_3 has no mods, and no loops of vectors for them. */
const fa_flex_operations *fa_flex_operations_of(fa_isa isa) {
#if FA_X86 && !defined FA_NO_FLEX
    if (isa >= FA_ISA_AVX512) return &fa_flex_operations_avx512;
    if (isa == FA_ISA_AVX2) return &fa_flex_operations_avx2;
#endif
#if FA_NEON && !defined FA_NO_FLEX
    if (isa >= FA_ISA_NEON) return &fa_flex_operations_neon;
#endif
    (void)isa;
    return &fa_flex_operations_scalar;
}

fa_flex_evaluator *fa_flex_evaluator_new(const fa_flex_bound *bound, fa_isa isa, bool lanes_are_keys) {
    const fa_flex_program *p = bound->program;
    const size_t num = (size_t)p->num_instructions;
    size_t bytes = 0;
    uint8_t *is_spread = malloc(num);
    fa_flex_trait *traits = fa_flex_traits(p);
    fa_flex_evaluator *e = calloc(1, sizeof *e);
    if (!is_spread || !traits || !e) goto no_memory;
    *e = (fa_flex_evaluator){.bound = bound,
                             .operations = fa_flex_operations_of(isa),
                             .lanes_are_keys = lanes_are_keys,
                             .index = {-1, -1, -1, -1}};
    mark_spread(e, is_spread);
    for (size_t i = 0; i < num; i++) bytes += MOST * element_bytes(p->instructions[i].result) * (1 + is_spread[i]);
    e->values = calloc(2 * num, sizeof *e->values);
    e->order = malloc(num * sizeof *e->order);
    e->schedule = calloc(num, sizeof *e->schedule);
    e->turned = calloc(num, sizeof *e->turned);
    e->is_needed = calloc(num, sizeof *e->is_needed);
    e->memory = calloc(1, bytes);
    if (!e->values || !e->order || !e->schedule || !e->turned || !e->is_needed || !e->memory) goto no_memory;
    e->spread = e->values + num;
    char *at = e->memory;
    for (size_t i = 0; i < num; i++)
        for (int copy = 0; copy <= is_spread[i]; copy++) {
            (copy ? e->spread : e->values)[i] = at;
            at += MOST * element_bytes(p->instructions[i].result);
        }
    sort_steps(e, traits);
    find_bias(e, traits);
    find_passed(e);
    free(traits);
    free(is_spread);
    return e;
no_memory:
    free(traits);
    free(is_spread);
    fa_flex_evaluator_free(e);
    return NULL;
}

void fa_flex_evaluator_free(fa_flex_evaluator *e) {
    if (!e) return;
    for (int32_t i = 0; e->turned && i < e->bound->program->num_instructions; i++) free(e->turned[i].values);
    free(e->turned);
    free(e->is_needed);
    free(e->memory);
    free(e->schedule);
    free(e->order);
    free(e->values);
    free(e);
}
