/* The op get_scheduler_metadata of flash-attn 3. */
#ifndef FA_TORCH_SCHEDULER_METADATA_H
#define FA_TORCH_SCHEDULER_METADATA_H

#include "call.h"
#include "outputs.h"

fa_status fa_execute_scheduler_metadata(const fa_call *call, fa_outputs *outputs, fa_error *err);

#endif
