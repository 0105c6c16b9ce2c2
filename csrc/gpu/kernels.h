/* Finds CUDA kernels. A kernel may be loaded already. Otherwise the cubin is among the shipped cubins or in the disk
 * cache, or the kernel's text is compiled now. A compiled cubin is added to the cache. */
#ifndef FA_GPU_KERNELS_H
#define FA_GPU_KERNELS_H

#include "driver.h"
#include "plan/kernel_table.h"

/* Puts a variant into the disk cache, unless the cache or the shipped cubins have the variant. *compiled tells whether
 * the variant was compiled now. No GPU is needed. */
fa_status fa_variant_build(fa_variant variant, bool *compiled, fa_error *err);

/* A kernel that a call on an imagined GPU (driver.h) would load. */
typedef struct {
    char name[FA_VARIANT_NAME_BYTES];
    int arch;
    uint64_t key;     /* stands in the name of the kernel's file */
    bool is_absent;   /* neither in the disk cache nor shipped when the call asked for the kernel */
    bool is_compiled; /* .. and was compiled */
} fa_asked_kernel;

/* What becomes of kernels that are absent. */
typedef enum { FA_ABSENT_NOTED, FA_ABSENT_COMPILED, FA_ABSENT_PENDING } fa_absent_kernels;

/* Each thread has a list of the kernels that its calls on imagined GPUs asked for, each once. The first function
 * empties the list, and says what becomes of kernels that are absent from now on. The second returns the list, which
 * is valid until the thread's next call. */
void fa_asked_kernels_reset(fa_absent_kernels absent);
const fa_asked_kernel *fa_asked_kernels(int *num);

/* Is this thread's call a rehearsal, which only makes kernels pending? */
bool fa_call_is_rehearsal(void);

/* Compiles one of the kernels that are pending, into the disk cache. Any thread may call the function, and several may
 * at once. If a call needs a kernel that is compiled now, the call waits for it. False: no kernel was pending. */
bool fa_kernel_compile_pending(void);

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
