/* Turns tensors into a problem. */
#ifndef FA_TORCH_ARGS_H
#define FA_TORCH_ARGS_H

#include "call.h"

/* Checks every argument of a call and fills the problem's inputs. No tensor is written. On the CPU, the values inside
 * length and index tensors are checked too. On CUDA nothing is read from the device, unless FLASH_ATTN_CHECK=1. */
fa_status fa_check_call(const fa_call *call, fa_problem *problem, fa_error *err);

/* Reads the probability of dropout, and the seed and offset of its generator, an int64 tensor of 2 elements on q's
 * device. The GPU's stay where they are. */
fa_status fa_read_dropout_p(double dropout_p, fa_problem *problem, fa_error *err);
fa_status fa_read_rng_state(const fa_tensor *rng_state, const fa_tensor *q, fa_problem *problem, fa_error *err);

/* Does an op of flash-attn 3 take keys of d columns with values of d_v columns? */
bool fa_head_dims_of_3_fit(int64_t d, int64_t d_v);

#endif
