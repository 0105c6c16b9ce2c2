/* Launches a kernel on PyTorch's stream. */
#include "launch.h"

#include <string.h>

#include "host.h"
#include "kernels.h"
#include "memory.h"

/* NOTE: on a full GPU, each step of loading a kernel may succeed, and the first launch still fails. The error is
 * CUDA_ERROR_INVALID_VALUE (H100, driver of CUDA 13). So this error counts as a lack of memory if hardly any memory is
 * free. */
static bool memory_is_short(const fa_driver *driver) {
    enum { SHORT = 64 << 20 };
    size_t free_bytes = 0, bytes = 0;
    return driver->cuMemGetInfo_v2(&free_bytes, &bytes) == 0 && free_bytes < SHORT;
}

/* Loads the kernel if necessary, and launches the kernel. After FA_ENOMEM_GPU nothing has been launched. */
static fa_status launch_once(const fa_cuda_call *call, fa_variant variant, const CUlaunchConfig *config,
                             const void *parameters, fa_error *err) {
    CUkernel kernel;
    void *arguments[] = {(void *)parameters};
    if (!fa_kernel_is_loaded(variant, call->gpu, &kernel)) {
        fa_host.read_environment();
        fa_status status = fa_kernel_load(variant, call->gpu, &kernel, err);
        if (status != FA_OK) return status;
    }
    CUresult result = call->driver->cuLaunchKernelEx(config, (CUfunction)kernel, arguments, NULL);
    if (result == 0) return FA_OK;
    if (result == CUDA_ERROR_INVALID_VALUE && memory_is_short(call->driver)) result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_ERROR_OUT_OF_MEMORY) fa_kernel_give_up(variant, call->gpu, kernel);
    char attempt[FA_VARIANT_NAME_BYTES + 32] = "launching the kernel ";
    fa_variant_name(variant, attempt + strlen(attempt));
    return fa_driver_check(result, attempt, err);
}

fa_status fa_cuda_launch(const fa_cuda_call *call, fa_variant variant, fa_launch launch, const void *parameters,
                         fa_error *err) {
    if (launch.grid_x == 0 || launch.grid_y == 0 || launch.grid_z == 0) return FA_OK;
    CUlaunchAttribute attributes[2];
    unsigned num = 0;
    if (launch.waits_itself)
        attributes[num++] =
            (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value = {1}};
    if (launch.cluster > 0)
        attributes[num++] =
            (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value = {(int)launch.cluster, 1, 1}};
    const CUlaunchConfig config = {
        .grid_x = launch.grid_x,
        .grid_y = launch.grid_y,
        .grid_z = launch.grid_z,
        .block_x = launch.threads,
        .block_y = 1,
        .block_z = 1,
        .shared_bytes = (unsigned)fa_variant_shared_bytes(variant),
        .stream = call->stream,
        .attributes = attributes,
        .num_attributes = num,
    };
    fa_status status = launch_once(call, variant, &config, parameters, err);
    /* The driver needs memory for a kernel's code. At the first launch the driver needs memory for the threads' local
     * memory. torch's allocator may hold unused memory that the driver can have. */
    if (status == FA_ENOMEM_GPU && fa_cuda_make_room(call->driver, call->stream))
        status = launch_once(call, variant, &config, parameters, err);
    return status;
}
