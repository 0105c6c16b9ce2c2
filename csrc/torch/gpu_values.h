/* FLASH_ATTN_CHECK=1: the values inside length and index tensors on a GPU. */
#ifndef FA_TORCH_GPU_VALUES_H
#define FA_TORCH_GPU_VALUES_H

#include "call.h"

extern bool fa_checks_values_on_gpu; /* FLASH_ATTN_CHECK=1 */

/* Copies the values to the host and checks them there (lengths.h). */
fa_status check_values_on_gpu(const fa_call *c, const fa_problem *p, fa_error *err);

#endif
