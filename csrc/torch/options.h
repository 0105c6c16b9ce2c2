/* What the options of flash_attn_func need besides kernels, on the CPU: flash_attn/_extended.py. */
#ifndef FA_TORCH_OPTIONS_H
#define FA_TORCH_OPTIONS_H

#include "python_api.h"

#include "call.h"
#include "flash_attn.h"
#include "flex_values.h"
#include "outputs.h"
#include "row_options.h"

extern PyMethodDef fa_options_functions[];

/* Executes a forward of a plain op with options (direct.h). options: sinks or None, whether lse is wanted, and whether
 * the sink's probability in each row is wanted, which the CPU returns behind lse. A row that sees no key has the lse
 * -inf. */
fa_status fa_execute_with_options(const fa_call *call, PyObject *const *options, fa_outputs *outputs, fa_error *err);

/* The sinks of a call, the shift [b, h, rows] of its scores, and cu_seqlens_q, behind whose last number rows have no
 * sink. Each may be None. */
typedef struct {
    PyObject *sinks, *shift, *ends;
} fa_sinks_of_call;

/* Reads them. The tensors must outlive the problem. */
fa_status fa_read_sinks(const fa_sinks_of_call *of, const fa_tensor *q, fa_flex_tensor tensors[3], fa_problem *problem,
                        fa_error *err);

/* Makes the largest score of each head, an output [h]. of: all but the place of the result. */
fa_status fa_make_max_logits(fa_max_logits *of, const fa_tensor *like, fa_outputs *outputs, fa_error *err);

/* What the shift of rows of attn_bias needs (row_options.h). Objects but bias may be None. sequence and row say where
 * the bias of each row of packed sequences lies. With is_cut, row i of `rows` sees the keys up to i + last. */
typedef struct {
    PyObject *bias, *sinks, *sequence, *row;
    double least;
    bool is_cut;
    int64_t rows, last;
} fa_shift_request;

/* Is every shift 0? True only for biases on the CPU, of which hardly anything is read. Of the request, bias, least and
 * is_cut count. False: perhaps not. */
fa_status fa_biases_are_high(const fa_shift_request *request, bool *are_high, fa_error *err);

/* Makes the shift, an output [b, h, rows], or 1 in place of a size: fp32, or fp64 of a bias of fp64. FA_EINVAL: nothing
 * here serves the bias. */
fa_status fa_make_shift(const fa_shift_request *request, fa_outputs *outputs, fa_error *err);

/* Of each row of packed sequences: the first and the last key that it sees, the key beside it, its sequence, its place
 * there, and the first key of the sequence. Rows behind the last sequence see nothing. */
enum {
    FA_FIRST_KEY,
    FA_LAST_KEY,
    FA_KEY_BESIDE,
    FA_SEQUENCE,
    FA_PLACE_IN_SEQUENCE,
    FA_FIRST_OF_SEQUENCE,
    FA_NUM_PLACES
};

/* Makes the places of a call on the CPU, int64 [total_q], whose bits are set in `wanted`. right: of the window, with
 * causal. */
fa_status fa_make_packed_places(const fa_call *call, int64_t right, unsigned wanted, fa_outputs *outputs,
                                fa_error *err);

#endif
