/* What the options of flash_attn_func need besides kernels, on the CPU: flash_attn/_extended.py. */
#ifndef FA_TORCH_OPTIONS_H
#define FA_TORCH_OPTIONS_H

#include "python_api.h"

#include "call.h"
#include "flash_attn.h"
#include "flex_values.h"
#include "outputs.h"

extern PyMethodDef fa_options_functions[];

/* Executes a forward of a plain op with options (direct.h). options: sinks or None, and whether lse is wanted. A row
 * that sees no key has the lse -inf. */
fa_status fa_execute_with_options(const fa_call *call, PyObject *const *options, fa_outputs *outputs, fa_error *err);

/* Reads the sinks of a call and the shift [b, h, rows] of its scores, each of which may be None. The tensors must
 * outlive the problem. */
fa_status fa_read_sinks(PyObject *sinks, PyObject *shift, const fa_tensor *q, fa_flex_tensor tensors[2],
                        fa_problem *problem, fa_error *err);

#endif
