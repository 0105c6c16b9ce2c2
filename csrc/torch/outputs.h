/* The tensors that an op returns. */
#ifndef FA_TORCH_OUTPUTS_H
#define FA_TORCH_OUTPUTS_H

#include "call.h"

/* The tensors that an op returns, in order, allocated as the fakes in flash_attn/ promise them. Points the
 * problem at them and, if draw_seed, draws the dropout seed. On failure nothing stays allocated. */
#define FA_MAX_OUTPUTS 4
typedef struct {
    AtenTensorHandle tensor[FA_MAX_OUTPUTS];
    int num;
} fa_outputs;
fa_status fa_make_outputs(const fa_call *call, bool draw_seed, fa_problem *problem, fa_outputs *outputs, fa_error *err);

#endif
