/* Gradients of captured tensors whose bits do not depend on the order of additions (../cuda/flex_exact_sums.cuh). */
#ifndef FA_GPU_CAPTURE_SUMS_H
#define FA_GPU_CAPTURE_SUMS_H

#include "gpu_call.h"

/* Launches a kernel of the backward that adds to gradients of captures. */
typedef fa_status fa_capture_kernel(const fa_cuda_call *call, const void *context, fa_error *err);

/* Launches the kernel twice, with sums in the workspace in place of the gradients, and then adds the sums to the
 * gradients. */
fa_status fa_cuda_add_exactly(const fa_cuda_call *call, fa_capture_kernel *launch, const void *context, fa_error *err);

#endif
