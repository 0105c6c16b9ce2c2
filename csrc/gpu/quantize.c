/* Launches cuda/quantize.cu. */
#include "quantize.h"

#include "cuda/quantize_params.h"
#include "launch.h"
#include "memory.h"

enum { THREADS = 256, CTAS_OF_AN_SM = 2, PIECE_BYTES = 32 << 10 };

static int64_t num_groups(const fa_quantization *q) { return 3 * (q->is_per_tensor ? 1 : q->b * q->h_kv); }

size_t fa_cuda_quantize_workspace(const fa_quantization *q) {
    return 2 * sizeof(unsigned) * (size_t)(1 + num_groups(q));
}

static fa_quantize_tensor tensor_of(const fa_quantization *q, const fa_quantized *t, int64_t *most_of_a_head) {
    const int64_t bytes = (int64_t)fa_dtype_bytes(q->dtype), row_bytes = t->g * t->d * bytes;
    const int64_t strides =
        (q->b > 1 ? t->x.stride_b : 0) | (t->rows > 1 ? t->x.stride_row : 0) | (t->g * q->h_kv > 1 ? t->x.stride_h : 0);
    const uint64_t low_bits = (uint64_t)(uintptr_t)t->x.data | (uint64_t)(strides * bytes);
    int log2_rows = 0;
    while (row_bytes << (log2_rows + 1) <= PIECE_BYTES) log2_rows++;
    const int64_t whole = t->rows >> log2_rows, dense = t->rows <= 1 ? 1 : ((t->rows - 1) >> log2_rows) + 1;
    *most_of_a_head = t->cu_seqlens ? whole + 1 : dense;
    return (fa_quantize_tensor){.x = t->x.data,
                                .stride_b = t->x.stride_b,
                                .stride_row = t->x.stride_row,
                                .stride_h = t->x.stride_h,
                                .out = t->out,
                                .descale = t->descale,
                                .cu_seqlens = t->cu_seqlens,
                                .rows = (int)t->rows,
                                .g = (int)t->g,
                                .d = (int)t->d,
                                .rotates = t->rotates,
                                .is_aligned = low_bits % 16 == 0 && t->d % 8 == 0,
                                .log2_rows = log2_rows,
                                .pieces_of_head = (int)dense,
                                .num_pieces = (int)(q->h_kv * (t->cu_seqlens ? whole + q->b + 1 : q->b * dense))};
}

/* Returns the row of tiles.def that has room for every tensor. */
static int choose_row(const fa_quantization *q) {
    int row = 0;
    for (int i = 0; i < 3; i++)
        while (fa_quantize_row(row)->lanes * fa_quantize_row(row)->chunks * 8 < q->tensors[i].d) row++;
    return row;
}

/* The lag has room for every ticket that a CTA works on or holds. So a second pass hardly ever waits. */
static fa_quantize_params params_of(const fa_quantization *q, int64_t num_ctas, void *workspace) {
    fa_quantize_params p = {.b = (int)q->b,
                            .h_kv = (int)q->h_kv,
                            .is_per_tensor = q->is_per_tensor,
                            .counters = (unsigned *)workspace,
                            .signs = FA_ROTATION_SIGNS};
    int64_t lag = 0;
    for (int i = 0; i < 3; i++) {
        int64_t most;
        p.tensors[i] = tensor_of(q, &q->tensors[i], &most);
        if (q->is_per_tensor) most = p.tensors[i].num_pieces;
        if (most > lag) lag = most;
        p.num_pieces += p.tensors[i].num_pieces;
    }
    lag += num_ctas;
    p.lag = (int)(lag < p.num_pieces ? lag : p.num_pieces);
    return p;
}

fa_status fa_cuda_quantize(const fa_quantization *q, void *workspace, fa_error *err) {
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(q->device_idx, &place, err);
    if (status != FA_OK) return status;
    const int64_t most_ctas = (int64_t)place.gpu->num_sms * CTAS_OF_AN_SM;
    const fa_quantize_params p = params_of(q, most_ctas, workspace);
    const fa_cuda_call call = {.gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    const fa_variant variant = {FA_QUANTIZE, choose_row(q), fa_dtype_feature(q->dtype), place.gpu->capability};
    const int64_t tickets = 2 * (int64_t)p.num_pieces;
    const fa_launch launch = {(unsigned)(tickets < most_ctas ? tickets : most_ctas), 1, 1, .threads = THREADS};
    if (p.num_pieces > 0) {
        status = fa_cuda_fill(&place, workspace, 0, 2 * (1 + num_groups(q)), err);
        if (status == FA_OK) status = fa_cuda_launch(&call, variant, launch, &p, err);
    }
    fa_cuda_leave(&place);
    return status;
}
