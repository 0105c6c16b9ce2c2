/* Tensors as TMA sees them. */
#ifndef FA_GPU_MAP_H
#define FA_GPU_MAP_H

#include "cuda/tensor_map.h"
#include "gpu_call.h"

/* How TMA sees a tensor of 16-bit elements: boxes of so many rows and columns (64, or 32 where 64 does not divide the
 * tile). num_rows: of a sequence, or of the packed tensor. */
typedef struct {
    int rows, columns;
    bool packed;
} fa_box;
fa_status fa_cuda_map(const fa_cuda_call *call, const fa_view *tensor, int64_t num_rows, int64_t num_heads, fa_box box,
                      fa_tensor_map *map, fa_error *err);

#endif
