/* How a CUDA kernel is found: loaded before, among the cubins that ship, in the disk cache, or compiled from its text, which
 * then fills the cache. */
#ifndef FA_GPU_KERNELS_H
#define FA_GPU_KERNELS_H

#include "driver.h"
#include "plan/kernel_table.h"

/* Puts a variant into the disk cache, if neither it nor the shipped cubins have it; *compiled says whether it had to be
 * compiled. Needs no GPU. */
fa_status fa_variant_build(fa_variant variant, bool *compiled, fa_error *err);

/* The kernel, ready to launch on the GPU, whose context is current: if it is loaded; or loaded now, which may take seconds.
 * FA_ENOMEM_GPU, nothing of it stays, and the next call tries again. Any thread. */
bool fa_kernel_is_loaded(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel);
fa_status fa_kernel_load(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err);

/* After a launch that failed for want of memory: the driver may never launch this copy of the kernel. The next call loads
 * another, a few times at most. */
void fa_kernel_give_up(fa_variant variant, const fa_gpu *gpu, CUkernel kernel);

#endif
