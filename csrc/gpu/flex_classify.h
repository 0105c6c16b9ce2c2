/* Finds and lists the blocks of a mask on a GPU, as flex/classify.h does on the CPU. */
#ifndef FA_GPU_FLEX_CLASSIFY_H
#define FA_GPU_FLEX_CLASSIFY_H

#include "flex/classify.h"

/* Returns the bytes of workspace. */
size_t fa_cuda_flex_classify_workspace(const fa_flex_blocks *blocks);

/* Launches two kernels on PyTorch's stream. The captures and the lists lie in the GPU's memory. num_evaluated is not
 * set. */
fa_status fa_cuda_flex_classify(const fa_flex_bound *bound, const fa_flex_blocks *blocks, int device_idx,
                                void *workspace, fa_error *err);

#endif
