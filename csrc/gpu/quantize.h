/* Quantises q, k and v to e4m3 on a GPU. */
#ifndef FA_GPU_QUANTIZE_H
#define FA_GPU_QUANTIZE_H

#include "quantization.h"

/* Returns the bytes of workspace. */
size_t fa_cuda_quantize_workspace(const fa_quantization *quantization);

/* Launches the kernel on PyTorch's stream, after a fill of the workspace. */
fa_status fa_cuda_quantize(const fa_quantization *quantization, void *workspace, fa_error *err);

#endif
