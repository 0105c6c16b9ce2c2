/* What a call does, once its arguments are unpacked. */
#ifndef FA_TORCH_EXECUTE_H
#define FA_TORCH_EXECUTE_H

#include "call.h"
#include "outputs.h"

/* seqused_k as one number for every sequence of q: makes the tensor, which is the caller's to delete. */
fa_status fa_repeat_length(int32_t length, fa_call *call, fa_error *err);

/* Check, plan, allocate, run. The results are the caller's to delete; on failure there are none. */
fa_status fa_execute(const fa_call *call, fa_outputs *outputs, fa_error *err);

#endif
