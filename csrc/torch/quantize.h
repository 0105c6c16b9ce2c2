/* The op quantize of flash-attn 3. */
#ifndef FA_TORCH_QUANTIZE_H
#define FA_TORCH_QUANTIZE_H

#include "call.h"
#include "outputs.h"

fa_status fa_execute_quantize(const fa_call *call, fa_outputs *outputs, fa_error *err);

#endif
