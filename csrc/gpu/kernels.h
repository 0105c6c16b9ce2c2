/* Finds CUDA kernels. A kernel may be loaded already. Otherwise the cubin is among the shipped cubins or in the disk
 * cache, or the kernel's text is compiled now. A compiled cubin is added to the cache. */
#ifndef FA_GPU_KERNELS_H
#define FA_GPU_KERNELS_H

#include "driver.h"
#include "plan/kernel_table.h"

/* Puts a variant into the disk cache, unless the cache or the shipped cubins have the variant. *compiled tells whether
 * the variant was compiled now. No GPU is needed. */
fa_status fa_variant_build(fa_variant variant, bool *compiled, fa_error *err);

/* Both functions return a kernel that is ready to launch on the GPU, whose context is current. Any thread may call
 * them. The first function returns false if the kernel is not loaded. The second function loads the kernel if
 * necessary, which may take seconds. After FA_ENOMEM_GPU no part of the kernel stays loaded, and the next call tries
 * again. */
bool fa_kernel_is_loaded(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel);
fa_status fa_kernel_load(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err);

/* Gives up a copy of a kernel after a launch that lacked memory, because the driver may never launch this copy. The
 * next call loads another copy. This happens a few times at most. */
void fa_kernel_give_up(fa_variant variant, const fa_gpu *gpu, CUkernel kernel);

#endif
