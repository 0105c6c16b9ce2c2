/* New keys and values are written into the cache, in front of the attention. */
#ifndef FA_GPU_APPEND_H
#define FA_GPU_APPEND_H

#include "gpu_call.h"

/* Writes the new keys and values into the cache and, if there is rotary, the turned queries into q_rotated
 * [b, len_q, h, d] contiguous, fa_rotated_q_bytes of the workspace. Nothing happens where nothing is asked for. */
fa_status fa_cuda_append(const fa_cuda_call *call, void *q_rotated, fa_error *err);

#endif
