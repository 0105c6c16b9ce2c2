/* The op fwd_combine of flash-attn 3. */
#ifndef FA_TORCH_COMBINE_H
#define FA_TORCH_COMBINE_H

#include "call.h"
#include "outputs.h"

fa_status fa_execute_combine(const fa_call *call, fa_outputs *outputs, fa_error *err);

#endif
