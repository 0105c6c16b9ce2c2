/* Tensors as TMA sees them. */
#ifndef FA_GPU_MAP_H
#define FA_GPU_MAP_H

#include "cuda/tensor_map.h"
#include "gpu_call.h"

/* TMA sees a tensor in boxes of rows and columns, mostly of one head. A row of a box has 128 bytes, or 64 if 128 does
 * not divide the row of a tile. */
typedef struct {
    int rows, columns;
    bool packed;
    int64_t d;       /* columns of the tensor */
    int64_t batches; /* sequences, or pages of a cache */
    int heads;       /* of a box */
} fa_box;

/* Describes a tensor to TMA. num_rows counts the rows of a sequence, or of the packed tensor. */
fa_status fa_cuda_map(const fa_cuda_call *call, const fa_view *tensor, int64_t num_rows, int64_t num_heads, fa_box box,
                      fa_tensor_map *map, fa_error *err);

/* The same for K or V of a KV cache in pages whose keys are loaded whole (WHOLE_KEYS). A box has box_rows keys
 * of one head. */
fa_status fa_cuda_map_of_pages(const fa_cuda_call *call, const fa_view *tensor, int columns, int box_rows,
                               fa_tensor_map *map, fa_error *err);

#endif
