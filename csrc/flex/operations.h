/* The loops of an evaluator (evaluate.c), one text for every instruction set. Every loop runs over whole groups of
 * FA_FLEX_GROUP elements, so that vectorised loops have no rest. */
#ifndef FA_FLEX_OPERATIONS_H
#define FA_FLEX_OPERATIONS_H

#include "cpu/macros.h"
#include "program.h"

#define FA_FLEX_GROUP      16
#define FA_FLEX_MOST_LANES 128

/* Elements of a capture for the next lines of a gather whose lines lie one behind the other in memory, and whose lanes
 * lie apart. A line is read in whole vectors for each lane, and turned. */
typedef struct {
    int32_t slope[FA_FLEX_MAX_OPERANDS]; /* what an index grows by from line to line */
    const char *at; /* the place of the first lane in the first of the lines; NULL: nothing is here */
    int64_t step;   /* from lane to lane, in elements */
    int n;
    void *values; /* [FA_FLEX_GROUP lines, FA_FLEX_MOST_LANES], owned; NULL: there is no memory yet */
} fa_flex_turned;

/* An instruction whose operands are places in memory. n is a multiple of FA_FLEX_GROUP. */
typedef struct {
    const fa_flex_instruction *x;
    uint8_t from; /* the type of the first operand */
    bool is_even; /* a gather: the slopes are known */
    int n;
    void *r;
    const void *in[FA_FLEX_MAX_OPERANDS];
    int32_t slope[FA_FLEX_MAX_OPERANDS]; /* of a gather: what an index grows by from one element to the next */
    fa_flex_turned *turned;              /* of a gather, or NULL */
} fa_flex_operation;

typedef struct {
    /* r = the operation of in. Not for indices, scores, parameters, constants, gathers and scatters. */
    void (*operate)(const fa_flex_operation *o);
    /* r = the captured elements at in. */
    void (*gather)(const fa_flex_operation *o, const fa_flex_capture *capture, fa_flex_dtype dtype);
    /* Places of the elements of a contiguous capture of `rank` dimensions. */
    void (*place)(const fa_flex_operation *o, const fa_flex_capture *capture, int rank, int64_t *at);
    void (*fill)(fa_flex_type type, int n, void *r, const void *element); /* copies one element to all places */
    void (*count)(int n, int64_t *r, int64_t first);                      /* first, first + 1, ... */
} fa_flex_operations;

extern const fa_flex_operations fa_flex_operations_scalar;
#if FA_X86
extern const fa_flex_operations fa_flex_operations_avx2, fa_flex_operations_avx512;
#endif
#if FA_NEON
extern const fa_flex_operations fa_flex_operations_neon;
#endif

#endif
