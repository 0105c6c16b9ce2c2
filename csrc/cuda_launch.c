/* Launches a kernel on PyTorch's stream. */
#include "cuda_run.h"

#include <string.h>

fa_status fa_cuda_launch(const fa_cuda_call *call, fa_variant variant, fa_launch launch, const void *parameters,
                         fa_error *err) {
    CUkernel kernel;
    if (launch.grid_x == 0 || launch.grid_y == 0 || launch.grid_z == 0) return FA_OK;
    fa_status status = fa_kernel_get(variant, call->gpu, &kernel, err);
    if (status != FA_OK) return status;
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
        .shared_bytes = (unsigned)fa_families[variant.family].rows[variant.row].shared_bytes,
        .stream = call->stream,
        .attributes = attributes,
        .num_attributes = num,
    };
    void *arguments[] = {(void *)parameters};
    const CUresult result = call->driver->cuLaunchKernelEx(&config, (CUfunction)kernel, arguments, NULL);
    if (result == 0) return FA_OK;
    char attempt[FA_VARIANT_NAME_BYTES + 16] = "launching ";
    fa_variant_name(variant, attempt + strlen(attempt));
    return fa_driver_check(result, attempt, err);
}
