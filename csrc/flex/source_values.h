/* The growing CUDA C text of programs (source.h), and the writer of one program's instructions. */
#ifndef FA_FLEX_SOURCE_VALUES_H
#define FA_FLEX_SOURCE_VALUES_H

#include "intervals.h"
#include "program.h"
#include "scatters.h"

typedef struct {
    char *data; /* owned */
    size_t length, room;
    bool is_lost; /* there was no memory */
} fa_text;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void fa_put(fa_text *t, const char *format, ...);

/* Writes the instructions of one program. */
typedef struct {
    fa_text *t;
    const fa_flex_program *p;
    const fa_flex_interval *bounds; /* of each instruction */
    const uint8_t *is_exact;        /* of each instruction: an error of its last digits could grow */
    const fa_flex_trait *traits;    /* of each instruction of a derivative */
    int32_t words;                  /* where the program's words begin */
    bool is_wide;
    bool has_pairs; /* pairs.h; the text has kv_step */
    /* Loads whose results the text has, as `bits` and as `row`; negative: none. */
    int32_t given_bits, given_row;
    bool has_steps; /* of flex_exponent: the text has q_step and kv_step, and traits are those of the score_mod */
} fa_writer;

/* Does a value depend on nothing but b and h? */
static inline bool fa_is_of_head(const fa_flex_program *p, int32_t idx) {
    return (p->instructions[idx].depends & ~(FA_FLEX_ON_B | FA_FLEX_ON_H)) == 0;
}

/* Marks every value that an operation with jumps needs. */
void fa_mark_exact(const fa_flex_program *p, uint8_t *is_exact);

const char *fa_type_of(const fa_writer *w, int32_t idx);
const char *fa_load_type(int dtype); /* the C type of the elements of a capture */
void fa_put_constant(fa_text *t, const fa_flex_instruction *x, bool is_int);
void fa_put_param(const fa_writer *w, const fa_flex_instruction *x);
void fa_put_place(const fa_writer *w, const fa_flex_instruction *x, bool is_contiguous);
void fa_put_instruction(const fa_writer *w, int32_t idx);

/* Marks what the places of the marked scatters need. */
void fa_mark_operands(const fa_flex_program *p, uint8_t *is_needed);

/* Writes the marked instructions, but no scatter. */
void fa_put_needed(const fa_writer *w, const uint8_t *is_needed);

#endif
