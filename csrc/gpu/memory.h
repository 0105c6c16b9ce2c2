/* Small work on a GPU's memory, outside of kernels: PyTorch's stream, fills and copies.
 *
 * Nothing here waits for the device but fa_cuda_read, which is for checks that the user asked for. */
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

/* Is the stream's work being recorded into a CUDA graph instead of done? */
bool fa_cuda_is_capturing(const fa_cuda_place *place);

fa_status fa_cuda_fill(const fa_cuda_place *place, void *to, uint32_t value, int64_t num, fa_error *err);
fa_status fa_cuda_write(const fa_cuda_place *place, void *to, const uint64_t *numbers, int num, fa_error *err);
fa_status fa_cuda_copy(const fa_cuda_place *place, void *to, uint64_t from, size_t bytes, fa_error *err);
/* To the host; there once the stream has been waited for (fa_cuda_wait). */
fa_status fa_cuda_read(const fa_cuda_place *place, void *to, const void *from, size_t bytes, fa_error *err);
fa_status fa_cuda_wait(const fa_cuda_place *place, fa_error *err);

/* Where the GPU's memory is full: torch's allocator gives back what it holds unused. False: it cannot now, since the stream
 * records a CUDA graph. The caller holds no lock. */
bool fa_cuda_make_room(const fa_driver *driver, CUstream stream);

/* zero_tensors of a packed problem, for kernels that leave alone what belongs to no sequence: before they run, out or the
 * gradients become 0 and lse becomes -inf, all of them, since the host does not know where the last sequence ends. */
fa_status fa_cuda_zero_tensors(const fa_problem *problem, const fa_driver *driver, CUstream stream, fa_error *err);

/* dk and dv become 0. */
fa_status fa_cuda_zero_key_gradients(const fa_problem *problem, const fa_driver *driver, CUstream stream,
                                     fa_error *err);

/* Gives a problem whose lse nobody wants one row of the GPU's memory, which all its heads write over each other and nobody
 * reads. Leaves lse as it is where the plan's kernel might read it or the row would be too short. */
fa_status fa_cuda_spare_lse(fa_problem *problem, const fa_plan *plan, fa_error *err);

#endif
