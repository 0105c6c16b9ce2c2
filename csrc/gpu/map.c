/* Makes tensor maps (cuda/tensor_map.h) with the driver, and keeps them. */
#include "map.h"

#include "plan/gpu_problem.h"
#include "system/lock.h"

enum { MAX_RANK = 5, CHUNK = 64 };

/* All inputs of a map. */
typedef struct {
    void *base;
    uint64_t size[MAX_RANK], stride_bytes[MAX_RANK - 1];
    uint32_t box[MAX_RANK];
    uint32_t rank;
    int data_type;
} description;

static bool is_same(const description *x, const description *y) {
    if (x->base != y->base || x->rank != y->rank || x->data_type != y->data_type) return false;
    for (uint32_t i = 0; i < x->rank; i++)
        if (x->size[i] != y->size[i] || x->box[i] != y->box[i]) return false;
    for (uint32_t i = 0; i + 1 < x->rank; i++)
        if (x->stride_bytes[i] != y->stride_bytes[i]) return false;
    return true;
}

/* The driver takes 0.16 us of a call for each map, and a call has four maps. The layers of a model find their tensors
 * at the addresses of the last step. So each thread keeps its last maps. */
typedef struct {
    fa_tensor_map map;
    description of;
} kept_map;
enum { KEPT_BITS = 6 };
static THREAD_LOCAL kept_map kept_maps[1 << KEPT_BITS];

static kept_map *place_of(const description *of) {
    const uint64_t number = ((uint64_t)(uintptr_t)of->base + of->box[1]) * 0x9e3779b97f4a7c15u;
    return &kept_maps[number >> (64 - KEPT_BITS)];
}

static int type_of(fa_dtype dtype) {
    return dtype == FA_E4M3   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
           : dtype == FA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

static description describe(const fa_problem *p, const fa_view *t, int64_t num_rows, int64_t num_heads, fa_box box) {
    const fa_dtype dtype = t == &p->o ? fa_output_dtype(p->dtype) : p->dtype;
    const uint64_t bytes = fa_dtype_bytes(dtype), rows = (uint64_t)num_rows;
    const uint64_t row_bytes = (uint64_t)t->stride_row * bytes;
    description of = {
        .base = t->data,
        .size = {(uint64_t)box.d, rows, (uint64_t)num_heads, (uint64_t)box.batches},
        .stride_bytes = {row_bytes, (uint64_t)t->stride_h * bytes, (uint64_t)t->stride_b * bytes},
        .box = {(uint32_t)box.columns, (uint32_t)box.rows, (uint32_t)box.heads, 1},
        .rank = 4,
        .data_type = type_of(dtype),
    };
    /* The driver describes no empty tensor. No kernel reads a tile of an empty tensor, so any memory will do. */
    if (rows == 0 || box.batches == 0) {
        of.base = p->q.data ? p->q.data : p->k.data;
        of.size[1] = of.size[2] = of.size[3] = 1;
    } else if (box.packed) {
        of.base = (char *)t->data - rows * row_bytes;
        of.size[3] = rows + 1;
        of.stride_bytes[2] = row_bytes;
    }
    for (int i = 0; i < 3; i++) /* with one row, head or sequence, any stride may stand here */
        if (of.size[i + 1] == 1) of.stride_bytes[i] = 32;
    return of;
}

static description describe_groups(const fa_problem *p, const fa_view *t, int columns, int box_rows) {
    const uint64_t bytes = fa_dtype_bytes(p->dtype), row_bytes = (uint64_t)t->stride_row * bytes;
    const int64_t groups = (p->num_pages - 1) * fa_groups_of_page(p, t) + p->page_size / FA_GROUP;
    return (description){
        .base = t->data,
        .size = {CHUNK, FA_GROUP, (uint64_t)(columns / CHUNK), (uint64_t)groups, (uint64_t)p->h_kv},
        .stride_bytes = {row_bytes, CHUNK * bytes, FA_GROUP * row_bytes,
                         p->h_kv > 1 ? (uint64_t)t->stride_h * bytes : 32},
        .box = {CHUNK, FA_GROUP, (uint32_t)(columns / CHUNK), (uint32_t)(box_rows / FA_GROUP), 1},
        .rank = 5,
        .data_type = type_of(p->dtype),
    };
}

/* Makes a map, or finds it among those kept. */
static fa_status make(const fa_cuda_call *call, const description *described, fa_tensor_map *map, fa_error *err) {
    const description of = *described;
    const uint64_t bytes = of.data_type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2; /* of an element */
    kept_map *kept = place_of(&of);
    if (!is_same(&kept->of, &of)) {
        /* With 256 bytes the L2 fetches what lies beside a box, too. Short sequences then take up to 3% longer, and
         * rows that begin inside a sector up to 18% (cuda/measurements/forward.md, "What TMA asks the L2 for"). */
        const int promotion = CU_TENSOR_MAP_L2_PROMOTION_128B;
        const uint32_t element_stride[MAX_RANK] = {1, 1, 1, 1, 1};
        const int swizzle = of.box[0] * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
        kept->of.rank = 0; /* matches no description, in case the driver refuses */
        fa_status status = fa_driver_check(
            call->driver->cuTensorMapEncodeTiled(&kept->map, of.data_type, of.rank, of.base, of.size, of.stride_bytes,
                                                 of.box, element_stride, 0, swizzle, promotion, 0),
            "describing a tensor to TMA", err);
        if (status != FA_OK) return status;
        kept->of = of;
    }
    *map = kept->map;
    return FA_OK;
}

/* No launch on an imagined GPU reads a map, and none may be kept. */
fa_status fa_cuda_map(const fa_cuda_call *call, const fa_view *t, int64_t num_rows, int64_t num_heads, fa_box box,
                      fa_tensor_map *map, fa_error *err) {
    if (call->gpu->is_imagined) return FA_OK;
    const description of = describe(call->problem, t, num_rows, num_heads, box);
    return make(call, &of, map, err);
}

fa_status fa_cuda_map_of_pages(const fa_cuda_call *call, const fa_view *t, int columns, int box_rows,
                               fa_tensor_map *map, fa_error *err) {
    if (call->gpu->is_imagined) return FA_OK;
    const description of = describe_groups(call->problem, t, columns, box_rows);
    return make(call, &of, map, err);
}
