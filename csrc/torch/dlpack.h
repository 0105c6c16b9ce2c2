/* The part of DLPack 1.3 that is used here: a tensor, and the table of C functions that torch keeps in
 * torch.Tensor.__dlpack_c_exchange_api__. tests/guards compares these structs with torch's own copy. */
#ifndef FA_TORCH_DLPACK_H
#define FA_TORCH_DLPACK_H

#include <stdint.h>

enum { FA_DL_CPU = 1, FA_DL_CUDA = 2 };
enum { FA_DL_INT = 0, FA_DL_FLOAT = 2, FA_DL_BFLOAT = 4, FA_DL_E4M3 = 10 };

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
    /* Fills t and returns 0. t then points into the tensor's memory. Otherwise there is an exception. A library need
     * not have this function; then the pointer is NULL. */
    int (*from_object)(void *object, fa_dl_tensor *t);
    void (*current_stream)(void);
} fa_dl_exchange;

#endif
