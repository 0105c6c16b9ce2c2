/* Small work on a GPU's memory outside of kernels: PyTorch's stream, fills and copies.
 *
 * Only fa_cuda_read and fa_cuda_wait may wait for the device. They serve checks that the user asked for. */
#ifndef FA_GPU_MEMORY_H
#define FA_GPU_MEMORY_H

#include "driver.h"

/* PyTorch's current stream on a GPU, with the GPU's context current until fa_cuda_leave. */
typedef struct {
    const fa_driver *driver;
    const fa_gpu *gpu;
    CUstream stream;
    fa_context_guard guard;
} fa_cuda_place;
fa_status fa_cuda_enter(int device_idx, fa_cuda_place *place, fa_error *err);
void fa_cuda_leave(const fa_cuda_place *place);

/* Is the stream under CUDA graph capture? */
bool fa_cuda_is_capturing(const fa_cuda_place *place);

fa_status fa_cuda_fill(const fa_cuda_place *place, void *to, uint32_t value, int64_t num, fa_error *err);
fa_status fa_cuda_write(const fa_cuda_place *place, void *to, const uint64_t *numbers, int num, fa_error *err);
fa_status fa_cuda_copy(const fa_cuda_place *place, void *to, uint64_t from, size_t bytes, fa_error *err);

/* Copies to the host. The copy is complete after fa_cuda_wait. */
fa_status fa_cuda_read(const fa_cuda_place *place, void *to, const void *from, size_t bytes, fa_error *err);
fa_status fa_cuda_wait(const fa_cuda_place *place, fa_error *err);

/* Makes torch's allocator give back unused memory when the GPU's memory is full. False: this is impossible during CUDA
 * graph capture. The caller must not hold a lock. */
bool fa_cuda_make_room(const fa_driver *driver, CUstream stream);

/* Does zero_tensors for kernels that do not write rows outside of all sequences of a packed problem. Before the kernel
 * runs, out or the gradients become 0, and lse becomes -inf. All rows are filled, because the host does not know where
 * the last sequence ends. */
fa_status fa_cuda_zero_tensors(const fa_problem *problem, const fa_driver *driver, CUstream stream, fa_error *err);

/* Fills dk and dv with 0. */
fa_status fa_cuda_zero_key_gradients(const fa_problem *problem, const fa_driver *driver, CUstream stream,
                                     fa_error *err);

#endif
