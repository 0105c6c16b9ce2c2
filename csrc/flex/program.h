/* A program: a mask_mod or a score_mod as a list of instructions, without the values of its captures and parameters.
 *
 * The text of a program is a row of 32-bit words in the machine's byte order:
 *
 *   FA_FLEX_MAGIC, number of captures, of parameters, of instructions
 *   each capture: dtype, rank
 *   each parameter: type
 *   each instruction: op | type << 8, the words that its rule in ops.def asks for, the numbers of its operands
 *
 * An operand is the number of an earlier instruction. The last instruction is the result. fa_flex_decode checks every
 * word, so a decoded program can run without further checks.
 *
 * The derivative of a score_mod is a program, too. It also reads `grad`, the gradient of the score_mod's result. Its
 * result is the gradient of the score. On the way its scatters add to gradients of captures. Where grad is 0, the
 * result and all that is scattered are 0, even if the score is infinite. */
#ifndef FA_FLEX_PROGRAM_H
#define FA_FLEX_PROGRAM_H

#include "flash_attn.h"

#define FA_FLEX_MAGIC            0x31584c46u /* "FLX1" */
#define FA_FLEX_MAX_RANK         5
#define FA_FLEX_MAX_OPERANDS     (FA_FLEX_MAX_RANK + 1)
#define FA_FLEX_MAX_CAPTURES     256
#define FA_FLEX_MAX_PARAMS       256
#define FA_FLEX_MAX_INSTRUCTIONS 16384

/* Integers of every width are int64 here, and fp16 and bf16 are fp32. */
typedef enum { FA_FLEX_BOOL, FA_FLEX_I64, FA_FLEX_F32, FA_FLEX_F64, FA_FLEX_NUM_TYPES } fa_flex_type;

/* X(enumerator, torch's name, type of a loaded element, bytes) */
#define FA_FLEX_DTYPES(X)             \
    X(BOOL, bool, FA_FLEX_BOOL, 1)    \
    X(U8, uint8, FA_FLEX_I64, 1)      \
    X(I8, int8, FA_FLEX_I64, 1)       \
    X(I16, int16, FA_FLEX_I64, 2)     \
    X(I32, int32, FA_FLEX_I64, 4)     \
    X(I64, int64, FA_FLEX_I64, 8)     \
    X(F16, float16, FA_FLEX_F32, 2)   \
    X(BF16, bfloat16, FA_FLEX_F32, 2) \
    X(F32, float32, FA_FLEX_F32, 4)   \
    X(F64, float64, FA_FLEX_F64, 8)
#define FA_FLEX_DTYPE(enumerator, name, type, bytes) FA_FLEX_OF_##enumerator,
typedef enum { FA_FLEX_DTYPES(FA_FLEX_DTYPE) FA_FLEX_NUM_DTYPES } fa_flex_dtype;
#undef FA_FLEX_DTYPE

#define FA_FLEX_OP(code, name, operands, rule, types) FA_FLEX_##name = code,
typedef enum {
#include "ops.def"
} fa_flex_op;
#undef FA_FLEX_OP

/* What a value depends on. */
enum { FA_FLEX_ON_B = 1, FA_FLEX_ON_H = 2, FA_FLEX_ON_Q = 4, FA_FLEX_ON_KV = 8, FA_FLEX_ON_SCORE = 16 }; /* or grad */

typedef union {
    bool b;
    int64_t i;
    double d;
} fa_flex_number;

typedef struct {
    uint8_t op;      /* fa_flex_op */
    uint8_t type;    /* the type that the instruction names */
    uint8_t result;  /* the type of the result */
    uint8_t depends; /* FA_FLEX_ON_* */
    uint8_t num_operands;
    int32_t operand[FA_FLEX_MAX_OPERANDS];
    int32_t source;        /* gather, scatter: the capture; param: the parameter */
    fa_flex_number number; /* constant */
} fa_flex_instruction;

static inline bool fa_is_op(const fa_flex_instruction *x, fa_flex_op op) { return x->op == op; }

typedef struct {
    uint64_t hash; /* of the text */
    int32_t num_captures, num_params, num_instructions;
    struct {
        uint8_t dtype, rank;
    } captures[FA_FLEX_MAX_CAPTURES];
    uint8_t params[FA_FLEX_MAX_PARAMS]; /* fa_flex_type */
    fa_flex_instruction *instructions;  /* owned */
} fa_flex_program;

/* A tensor that a program reads. Strides count elements and may be 0 or negative. */
typedef struct {
    const void *data; /* NULL: the tensor has no elements */
    int64_t size[FA_FLEX_MAX_RANK], stride[FA_FLEX_MAX_RANK];
} fa_flex_capture;

/* Where scatters to a capture add, contiguous in its shape. One of the two, or none: nowhere. */
typedef struct {
    double *fp64;
    float *fp32;
} fa_flex_sums_at;

/* The values of one call: as many captures and numbers as the program names. */
typedef struct {
    const fa_flex_program *program;
    const fa_flex_capture *captures;
    const fa_flex_number *params;
} fa_flex_bound;

/* FA_EINVAL: the text is no program. Then nothing is owned. fa_flex_free ends a decoded program. */
fa_status fa_flex_decode(const void *text, size_t bytes, fa_flex_program *program, fa_error *err);
void fa_flex_free(fa_flex_program *program);

/* Returns the type of the program's result. */
fa_flex_type fa_flex_result(const fa_flex_program *program);

/* The type of a loaded element. */
fa_flex_type fa_flex_type_of(fa_flex_dtype dtype);

/* One row of ops.def. name is NULL for a code that is not in use. */
typedef struct {
    const char *name;
    uint8_t operands, rule, types; /* types: 1 << fa_flex_type */
} fa_flex_op_row;
#define FA_FLEX_NUM_CODES 128
extern const fa_flex_op_row fa_flex_ops[FA_FLEX_NUM_CODES];

#endif
