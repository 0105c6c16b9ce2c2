/* The loops of an evaluator (evaluate.c), one text for every instruction set. Every loop runs over whole groups of
 * FA_FLEX_GROUP elements, so that vectorised loops have no rest. */
#ifndef FA_FLEX_OPERATIONS_H
#define FA_FLEX_OPERATIONS_H

#include "cpu/macros.h"
#include "program.h"

#define FA_FLEX_GROUP      16
#define FA_FLEX_MOST_LANES 128

/* Lines of a gather or a scatter. They lie one behind the other in memory, and their lanes lie apart (turn.h). Those of
 * a gather are read together, for the lines that come. Those of a scatter wait here, and are added together. */
typedef struct {
    int32_t slope[FA_FLEX_MAX_OPERANDS]; /* what an index grows by from line to line */
    int64_t at, step;                    /* the element of the first lane in the first line; from lane to lane */
    int used, num_lines;                 /* lanes; lines, 0: none is here */
    void *values; /* [FA_FLEX_GROUP lines, FA_FLEX_MOST_LANES], owned; NULL: there is no memory yet */
} fa_flex_turned;

/* An instruction whose operands are places in memory. */
typedef struct {
    const fa_flex_instruction *x;
    uint8_t from; /* the type of the first operand */
    bool is_even; /* a gather or a scatter: the slopes are known */
    int n, used;  /* elements, a multiple of FA_FLEX_GROUP; the first ones, whose values matter */
    void *r;
    const void *in[FA_FLEX_MAX_OPERANDS];
    int32_t slope[FA_FLEX_MAX_OPERANDS]; /* of a gather or scatter: an index grows by it from one element to the next */
    fa_flex_turned *turned;              /* of a gather or scatter, or NULL */
} fa_flex_operation;

/* Lines of a tile. An element of a lane lies at[lane] in memory, and that of the next line `along` behind it. Values
 * have rows of `stride`. num_lanes is a multiple of the vectors of the instruction set. */
typedef struct {
    const int64_t *at; /* [num_lanes] */
    int64_t along, stride;
    int num_lanes, num_lines;
} fa_flex_lines;

typedef struct {
    /* r = the operation of in. Not for indices, scores, parameters, constants, gathers and scatters. */
    void (*operate)(const fa_flex_operation *o);
    /* r = the captured elements at in. */
    void (*gather)(const fa_flex_operation *o, const fa_flex_capture *capture, fa_flex_dtype dtype);
    /* Returns captured elements of fp32 for *num_lines lines, of which `in` is the first. Lines are rows of
     * FA_FLEX_MOST_LANES. NULL unless they are read by lines. */
    const float *(*gather_lines)(const fa_flex_operation *o, const fa_flex_capture *capture, fa_flex_dtype dtype,
                                 int *num_lines);
    /* Adds in[rank] to a contiguous capture of `rank` dimensions at in[0 .. rank - 1]. Lines may wait in `turned`. With
     * only_even just the first index of each dimension is known. false: this is not enough, and nothing was added. */
    bool (*scatter)(const fa_flex_operation *o, const fa_flex_capture *capture, int rank, fa_flex_sums_at to,
                    bool only_even);
    /* Adds the lines that wait. */
    void (*add_waiting)(const fa_flex_operation *o, fa_flex_sums_at to);
    void (*fill)(fa_flex_type type, int n, void *r, const void *element); /* copies one element to all places */
    void (*count)(int n, int64_t *r, int64_t first);                      /* first, first + 1, ... */
    /* values = the elements of fp16, bf16 or fp32 of `lines`; the elements += values. */
    void (*load_bias)(const fa_flex_lines *lines, const void *data, fa_flex_dtype dtype, float *values);
    void (*add_to_bias)(const fa_flex_lines *lines, fa_flex_sums_at to, const float *values);
} fa_flex_operations;

const fa_flex_operations *fa_flex_operations_of(fa_isa isa);

extern const fa_flex_operations fa_flex_operations_scalar;
#if FA_X86
extern const fa_flex_operations fa_flex_operations_avx2, fa_flex_operations_avx512;
#endif
#if FA_NEON
extern const fa_flex_operations fa_flex_operations_neon;
#endif

#endif
