/* The largest score of each head on a GPU (row_options.h), on PyTorch's stream. */
#ifndef FA_GPU_MAX_LOGITS_H
#define FA_GPU_MAX_LOGITS_H

#include "row_options.h"

fa_status fa_cuda_max_logits(const fa_max_logits *of, fa_error *err);

#endif
