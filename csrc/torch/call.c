/* What is asked of torch for each tensor of a call. */
#include "call.h"

void fa_tensor_read(AtenTensorHandle handle, fa_tensor *t) {
    int64_t *size = NULL, *stride = NULL;
    t->handle = handle;
    fa_torch.aoti_torch_get_dim(handle, &t->ndim);
    fa_torch.aoti_torch_get_sizes(handle, &size);
    fa_torch.aoti_torch_get_strides(handle, &stride);
    fa_torch.aoti_torch_get_dtype(handle, &t->dtype);
    fa_torch.aoti_torch_get_device_type(handle, &t->device_type);
    fa_torch.aoti_torch_get_device_index(handle, &t->device_idx);
    t->size = size;
    t->stride = stride;
}
