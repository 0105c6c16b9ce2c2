/* Writes new keys and values into the cache before attention. */
#ifndef FA_GPU_APPEND_H
#define FA_GPU_APPEND_H

#include "gpu_call.h"

/* Writes the new keys and values into the cache. With rotary, the function also writes the rotated queries into
 * q_rotated [b, len_q, h, d]. q_rotated is contiguous and takes fa_rotated_q_bytes of the workspace. Without new keys
 * and rotary nothing is launched. */
fa_status fa_cuda_append(const fa_cuda_call *call, void *q_rotated, fa_error *err);

#endif
