/* Tensors -> problem. */
#ifndef FA_TORCH_ARGS_H
#define FA_TORCH_ARGS_H

#include "call.h"

/* Checks everything a caller can get wrong and fills the problem's inputs. Nothing is written anywhere. On CPU
 * tensors the values inside length and index tensors are checked too; on CUDA nothing is read from the device. */
fa_status fa_check_call(const fa_call *call, fa_problem *problem, fa_error *err);

#endif
