/* Executes a call whose arguments are unpacked. */
#ifndef FA_TORCH_EXECUTE_H
#define FA_TORCH_EXECUTE_H

#include "call.h"
#include "outputs.h"

/* Makes a tensor seqused_k with the same length for every sequence of q. The caller deletes the tensor. */
fa_status fa_repeat_length(int32_t length, fa_call *call, fa_error *err);

/* Checks, plans, allocates and runs a call. The caller deletes the results. After a failure there are no results. */
fa_status fa_execute(const fa_call *call, fa_outputs *outputs, fa_error *err);

/* Plans and runs a problem whose tensors all exist. only_out: the LSE has no memory, because nobody wants it. */
fa_status fa_execute_problem(fa_problem *problem, bool only_out, fa_error *err);

#endif
