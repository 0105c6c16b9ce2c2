/* Reads the text of a program and checks every word. */
#include "program.h"

#include <stdlib.h>
#include <string.h>

#include "system/hash.h"

enum { INDEX, SCORE, PARAM, CONSTANT, GATHER, CONVERT, SAME, COMPARE, WHERE, SCATTER };
enum { B = 1 << FA_FLEX_BOOL, I = 1 << FA_FLEX_I64, F = 1 << FA_FLEX_F32, D = 1 << FA_FLEX_F64 };

#define FA_FLEX_OP(code, name, operands, rule, types) [code] = {#name, operands, rule, types},
const fa_flex_op_row fa_flex_ops[FA_FLEX_NUM_CODES] = {
#include "ops.def"
};
#undef FA_FLEX_OP

#define FA_FLEX_DTYPE(enumerator, name, type, bytes) type,
static const fa_flex_type types[] = {FA_FLEX_DTYPES(FA_FLEX_DTYPE)};
#undef FA_FLEX_DTYPE

fa_flex_type fa_flex_type_of(fa_flex_dtype dtype) { return types[dtype]; }

typedef struct {
    const uint8_t *at;
    size_t words; /* left */
} reader;

#define REQUIRE(condition, ...)                                        \
    do {                                                               \
        if (!(condition)) return fa_fail(err, FA_EINVAL, __VA_ARGS__); \
    } while (0)
#define TRY(step)                                   \
    do {                                            \
        fa_status try_status = (step);              \
        if (try_status != FA_OK) return try_status; \
    } while (0)

/* Reads a word that must be less than `end`. */
static fa_status read_word(reader *r, uint32_t end, const char *what, uint32_t *word, fa_error *err) {
    REQUIRE(r->words > 0, "the program ends before its %s", what);
    memcpy(word, r->at, sizeof *word);
    r->at += sizeof *word;
    r->words--;
    REQUIRE(*word < end, "the program has %u as %s, which must be less than %u", *word, what, end);
    return FA_OK;
}

static fa_status read_number(reader *r, fa_flex_type type, fa_flex_number *number, fa_error *err) {
    REQUIRE(r->words >= 2, "the program ends before its constant");
    int64_t bits;
    memcpy(&bits, r->at, sizeof bits);
    r->at += sizeof bits;
    r->words -= 2;
    REQUIRE(type != FA_FLEX_BOOL || bits == 0 || bits == 1, "a bool constant of the program is neither 0 nor 1");
    if (type == FA_FLEX_BOOL)
        number->b = bits == 1;
    else
        memcpy(number, &bits, sizeof bits);
    return FA_OK;
}

static fa_status read_source(reader *r, const fa_flex_program *p, int rule, fa_flex_instruction *x, fa_error *err) {
    uint32_t source = 0;
    if (rule == PARAM) {
        TRY(read_word(r, (uint32_t)p->num_params, "parameter", &source, err));
        REQUIRE(p->params[source] == x->type, "parameter %u of the program has another type", source);
    } else {
        TRY(read_word(r, (uint32_t)p->num_captures, "capture", &source, err));
        REQUIRE(fa_flex_type_of(p->captures[source].dtype) == (fa_flex_type)x->type,
                "capture %u of the program has another type", source);
        x->num_operands = (uint8_t)(p->captures[source].rank + (rule == SCATTER));
    }
    x->source = (int32_t)source;
    return FA_OK;
}

/* The type that operand i must have. FA_FLEX_NUM_TYPES: any. */
static fa_flex_type wanted(const fa_flex_instruction *x, int rule, int i) {
    if (rule == GATHER || (rule == SCATTER && i + 1 < x->num_operands)) return FA_FLEX_I64;
    if (rule == CONVERT) return FA_FLEX_NUM_TYPES;
    if (rule == WHERE && i == 0) return FA_FLEX_BOOL;
    return x->type;
}

static uint8_t depends_on(fa_flex_op op) {
    switch (op) {
    case FA_FLEX_b: return FA_FLEX_ON_B;
    case FA_FLEX_h: return FA_FLEX_ON_H;
    case FA_FLEX_q_idx: return FA_FLEX_ON_Q;
    case FA_FLEX_kv_idx: return FA_FLEX_ON_KV;
    case FA_FLEX_score:
    case FA_FLEX_grad: return FA_FLEX_ON_SCORE;
    default: return 0;
    }
}

static fa_status read_instruction(reader *r, const fa_flex_program *p, int32_t idx, fa_error *err) {
    fa_flex_instruction *x = &p->instructions[idx];
    uint32_t word = 0;
    TRY(read_word(r, FA_FLEX_NUM_TYPES << 8, "instruction", &word, err));
    const uint32_t code = word & 0xff;
    REQUIRE(code < FA_FLEX_NUM_CODES && fa_flex_ops[code].name, "instruction %d has the unknown op %u", idx, code);
    const fa_flex_op_row *row = &fa_flex_ops[code];
    x->op = (uint8_t)code;
    x->type = (uint8_t)(word >> 8);
    REQUIRE(row->types >> x->type & 1, "instruction %d: %s does not exist for type %d", idx, row->name, x->type);
    x->result = row->rule == COMPARE ? FA_FLEX_BOOL : x->type;
    x->num_operands = row->operands;
    x->depends = depends_on((fa_flex_op)code);
    if (row->rule == CONSTANT) TRY(read_number(r, x->type, &x->number, err));
    if (row->rule == PARAM || row->rule == GATHER || row->rule == SCATTER) TRY(read_source(r, p, row->rule, x, err));
    for (int i = 0; i < x->num_operands; i++) {
        TRY(read_word(r, (uint32_t)idx, "operand", &word, err));
        const fa_flex_instruction *operand = &p->instructions[word];
        const fa_flex_type want = wanted(x, row->rule, i);
        REQUIRE(want == FA_FLEX_NUM_TYPES || operand->result == want, "instruction %d: operand %d of %s has type %d",
                idx, i, row->name, operand->result);
        x->operand[i] = (int32_t)word;
        x->depends |= operand->depends;
    }
    return FA_OK;
}

static fa_status read_header(reader *r, fa_flex_program *p, fa_error *err) {
    uint32_t word = 0;
    TRY(read_word(r, UINT32_MAX, "magic number", &word, err));
    REQUIRE(word == FA_FLEX_MAGIC, "the text is not a program");
    TRY(read_word(r, FA_FLEX_MAX_CAPTURES + 1, "number of captures", &word, err));
    p->num_captures = (int32_t)word;
    TRY(read_word(r, FA_FLEX_MAX_PARAMS + 1, "number of parameters", &word, err));
    p->num_params = (int32_t)word;
    TRY(read_word(r, FA_FLEX_MAX_INSTRUCTIONS + 1, "number of instructions", &word, err));
    REQUIRE(word > 0, "the program has no instructions");
    p->num_instructions = (int32_t)word;
    for (int i = 0; i < p->num_captures; i++) {
        TRY(read_word(r, FA_FLEX_NUM_DTYPES, "dtype", &word, err));
        p->captures[i].dtype = (uint8_t)word;
        TRY(read_word(r, FA_FLEX_MAX_RANK + 1, "rank", &word, err));
        p->captures[i].rank = (uint8_t)word;
    }
    for (int i = 0; i < p->num_params; i++) {
        TRY(read_word(r, FA_FLEX_NUM_TYPES, "type of a parameter", &word, err));
        p->params[i] = (uint8_t)word;
    }
    return FA_OK;
}

static fa_status read_program(reader *r, fa_flex_program *p, fa_error *err) {
    TRY(read_header(r, p, err));
    p->instructions = calloc((size_t)p->num_instructions, sizeof *p->instructions);
    if (!p->instructions) return fa_fail(err, FA_ENOMEM, "no memory for a program");
    for (int32_t idx = 0; idx < p->num_instructions; idx++) TRY(read_instruction(r, p, idx, err));
    REQUIRE(r->words == 0, "the program has %zu words after its last instruction", r->words);
    return FA_OK;
}

fa_status fa_flex_decode(const void *text, size_t bytes, fa_flex_program *program, fa_error *err) {
    reader r = {text, bytes / 4};
    *program = (fa_flex_program){0};
    REQUIRE(bytes % 4 == 0, "the program has %zu bytes, which is not a multiple of 4", bytes);
    const fa_status status = read_program(&r, program, err);
    program->hash = fa_hash(0, text, bytes);
    if (status != FA_OK) fa_flex_free(program);
    return status;
}

void fa_flex_free(fa_flex_program *program) {
    free(program->instructions);
    program->instructions = NULL;
}

fa_flex_type fa_flex_result(const fa_flex_program *program) {
    return (fa_flex_type)program->instructions[program->num_instructions - 1].result;
}
