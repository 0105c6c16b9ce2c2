/* The mods of a call of flash_attn_func with options: which programs they are, and the values of these programs.
 *
 * A *kind* says which options a call has, and which dimensions their tensors have, as the bits of a number. Python
 * makes the programs of a kind once (flash_attn/_extended_directly.py), and they are kept here. */
#ifndef FA_TORCH_OPTION_MODS_H
#define FA_TORCH_OPTION_MODS_H

#include "python_api.h" /* CPython wants to be the first */

#include "call.h"
#include "flash_attn.h"

/* What programs read, as Python numbers them: tensors, then numbers. */
enum {
    FA_VALUE_BIAS,
    FA_VALUE_MASK,
    FA_VALUE_SLOPES,
    FA_VALUE_SHIFT,
    FA_VALUE_PLACES, /* six, of the rows of packed sequences */
    FA_VALUE_LEN_SHIFT = FA_VALUE_PLACES + 6,
    FA_VALUE_LEFT,
    FA_VALUE_RIGHT,
    FA_VALUE_CAP,
    FA_NUM_VALUES
};

typedef struct {
    /* Given. All objects but kind_of may be None.
     *
     * kind_of(kind) returns None or (score, mask, the places of rows that they read, as bits, ..). A program is None
     * or (its text, which values its tensors are, which ones its numbers are, numbers that are no values). blocks: a
     * tuple, or a function of the kind's tuple and the call's mask. on_cpu: the biases are looked at, and the places
     * are made here. given_shift: the shift and its values in fp32, of a bias for which C has no kernel. record: a
     * list that gets the kind's tuple, score, mask, blocks and of_rows. */
    PyObject *kind_of, *attn_bias, *attn_mask, *sinks, *places, *blocks, *given_shift, *record;
    double least; /* a lower largest bias of a row is subtracted before */
    bool on_cpu;
    bool has_raised; /* set if the function `blocks` has, and its exception is that of the thread */
    /* Made, each a new reference or NULL: mods as (text, tensors, numbers) or None, blocks or None, the shift of the
     * rows of packed sequences and its values in fp32 or None, and lists that hold the tensors. */
    PyObject *score, *mask, *made_blocks, *shift, *of_rows, *made_places;
} fa_option_mods;

/* The problem is the checked call. What was made must be dropped, after a failure too. */
fa_status fa_make_option_mods(const fa_call *call, const fa_problem *problem, fa_option_mods *mods, fa_error *err);
void fa_drop_option_mods(fa_option_mods *mods);

#endif
