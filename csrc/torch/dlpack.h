/* DLPack 1.3, as far as it is used here: a tensor as its C functions show it, and the table of them that torch keeps in
 * torch.Tensor.__dlpack_c_exchange_api__. tests/guards holds this against torch's own copy. */
#ifndef FA_TORCH_DLPACK_H
#define FA_TORCH_DLPACK_H

#include <stdint.h>

enum { FA_DL_CPU = 1, FA_DL_CUDA = 2 };
enum { FA_DL_INT = 0, FA_DL_FLOAT = 2, FA_DL_BFLOAT = 4 };

typedef struct {
    void *data;
    int32_t device_type, device_idx;
    int32_t ndim;
    uint8_t dtype_code, dtype_bits;
    uint16_t dtype_lanes;
    int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} fa_dl_tensor;

typedef struct {
    uint32_t major, minor;
    void *older;
    void (*allocate)(void), (*managed_from_object)(void), (*managed_to_object)(void);
    /* 0, and what t shows belongs to the tensor; or an exception. NULL: a library need not have it. */
    int (*from_object)(void *object, fa_dl_tensor *t);
    void (*current_stream)(void);
} fa_dl_exchange;

#endif
