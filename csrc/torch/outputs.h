/* Allocates the tensors that an op returns. */
#ifndef FA_TORCH_OUTPUTS_H
#define FA_TORCH_OUTPUTS_H

#include "call.h"

/* The tensors that an op returns, in order. */
#define FA_MAX_OUTPUTS 4
typedef struct {
    AtenTensorHandle tensor[FA_MAX_OUTPUTS];
    int num;
} fa_outputs;

/* Allocates the outputs as the fakes in flash_attn/ promise them, and points the problem at them. draw_seed: the
 * dropout seed is drawn too. After a failure no output stays allocated. */
fa_status fa_make_outputs(const fa_call *call, bool draw_seed, fa_problem *problem, fa_outputs *outputs, fa_error *err);

#endif
