/* Tensors as TMA sees them: cuda/tensor_map.h. */
#include "cuda_run.h"

fa_status fa_cuda_map(const fa_cuda_call *call, const fa_view *t, int64_t num_rows, int64_t num_heads, fa_box box,
                      fa_tensor_map *map, fa_error *err) {
    const fa_problem *p = call->problem;
    const uint64_t row_bytes = (uint64_t)t->stride_row * 2, some_rows = num_rows > 0 ? (uint64_t)num_rows : 1;
    uint64_t size[4] = {(uint64_t)p->d, some_rows, (uint64_t)num_heads, (uint64_t)p->b};
    uint64_t stride_bytes[3] = {row_bytes, (uint64_t)t->stride_h * 2, (uint64_t)t->stride_b * 2};
    uint32_t boxes[4] = {(uint32_t)box.columns, (uint32_t)box.rows, 1, 1}, element_stride[4] = {1, 1, 1, 1};
    char *base = t->data;
    if (box.packed) {
        base -= some_rows * row_bytes;
        size[3] = some_rows + 1;
        stride_bytes[2] = row_bytes;
    }
    for (int i = 0; i < 3; i++) /* of one row, head or sequence the stride means nothing and may be anything */
        if (size[i + 1] == 1) stride_bytes[i] = 32;
    /* L2 holds sectors of 32 bytes. Where rows begin amid one, asking for 256 bytes around each piece costs 12% (head_dim
     * 72, length 2048, on an H100); elsewhere it makes no difference. */
    const uint64_t offsets = (uintptr_t)base | size[0] * 2 | stride_bytes[0] | stride_bytes[1] | stride_bytes[2];
    return fa_driver_check(call->driver->cuTensorMapEncodeTiled(
                               map,
                               p->dtype == FA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                               4, base, size, stride_bytes, boxes, element_stride, 0,
                               box.columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                               offsets % 32 ? CU_TENSOR_MAP_L2_PROMOTION_128B : CU_TENSOR_MAP_L2_PROMOTION_256B, 0),
                           "describing a tensor to TMA", err);
}
