/* Launches cuda/quantize.cu. */
#include "quantize.h"

#include "cuda/quantize_params.h"
#include "launch.h"
#include "memory.h"

static unsigned inverse_of(int64_t number) {
    return number == 1 ? 0 : (unsigned)((((uint64_t)1 << 32) + (uint64_t)number - 1) / (uint64_t)number);
}

typedef struct fa_pieces {
    int64_t units, pitch; /* of a row, in 16 bytes: what it has, and what it takes in a slot */
    int64_t rows_of_warp, rows, of_head, number;
} fa_pieces;

static fa_pieces pieces_of(const fa_quantization *q, const fa_quantized *t, int slot_kb) {
    fa_pieces p = {.units = (t->d + 7) / 8 * (int64_t)fa_dtype_bytes(q->dtype) / 2};
    p.pitch = (p.units + 7) / 8 * 8;
    const int64_t most_rows = (slot_kb << 10) / (16 * p.pitch) / FA_QUANTIZE_WARPS, rows = t->rows * t->g;
    p.rows_of_warp = most_rows < 4 ? most_rows : most_rows / 4 * 4; /* a warp loads four rows at once */
    p.rows = p.rows_of_warp * FA_QUANTIZE_WARPS;
    p.of_head = rows <= 1 ? 1 : (rows - 1) / p.rows + 1;
    p.number = q->h_kv * (t->cu_seqlens ? rows / p.rows + q->b + 1 : q->b * p.of_head);
    return p;
}

static int64_t number_of_pieces(const fa_quantization *q, int slot_kb) {
    int64_t number = 0;
    for (int i = 0; i < 3; i++) number += pieces_of(q, &q->tensors[i], slot_kb).number;
    return number;
}

static fa_quantize_tensor tensor_of(const fa_quantization *q, const fa_quantized *t, int slot_kb) {
    const fa_pieces pieces = pieces_of(q, t, slot_kb);
    const int64_t bytes = (int64_t)fa_dtype_bytes(q->dtype);
    const int64_t strides =
        (q->b > 1 ? t->x.stride_b : 0) | (t->rows > 1 ? t->x.stride_row : 0) | (t->g * q->h_kv > 1 ? t->x.stride_h : 0);
    const uint64_t low_bits = (uint64_t)(uintptr_t)t->x.data | (uint64_t)(strides * bytes);
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
                                .piece_rows = (int)pieces.rows,
                                .rows_of_warp = (int)pieces.rows_of_warp,
                                .units = (int)pieces.units,
                                .pitch = (int)pieces.pitch,
                                .lines = t->d * bytes == 16 * pieces.pitch ? (int)(pieces.pitch / 8) : 0,
                                .inverse_g = inverse_of(t->g),
                                .pieces_of_head = (int)pieces.of_head,
                                .num_pieces = (int)pieces.number};
}

enum { SMALLEST_SLOT_KB = 12 };

/* Returns the row of tiles.def for a call. Large slots are for the GPUs of data centers since Hopper, whose SMs have
 * 227 KB of shared memory. */
static int choose_row(const fa_quantization *q, int capability) {
    const bool is_large = capability / 10 == 9 || capability / 10 == 10;
    bool rotates = false;
    for (int i = 0; i < 3; i++) rotates = rotates || q->tensors[i].rotates;
    int row = 0;
    while (fa_quantize_row(row)->rotates != rotates || (!is_large && fa_quantize_row(row)->slot_kb > SMALLEST_SLOT_KB))
        row++;
    return row;
}

/* The workspace: the ticket, the maxima, the links. */
static fa_quantize_params params_of(const fa_quantization *q, int slot_kb, void *workspace) {
    fa_quantize_params p = {.b = (int)q->b,
                            .h_kv = (int)q->h_kv,
                            .is_per_tensor = q->is_per_tensor,
                            .ticket = (unsigned *)workspace,
                            .signs = FA_ROTATION_SIGNS};
    for (int i = 0; i < 3; i++)
        p.tensors[i] = tensor_of(q, &q->tensors[i], slot_kb), p.num_pieces += p.tensors[i].num_pieces;
    p.maxima = p.ticket + 1, p.links = p.maxima + p.num_pieces;
    return p;
}

size_t fa_cuda_quantize_workspace(const fa_quantization *q) {
    return sizeof(unsigned) * (size_t)(1 + 2 * number_of_pieces(q, SMALLEST_SLOT_KB));
}

fa_status fa_cuda_quantize(const fa_quantization *q, void *workspace, fa_error *err) {
    if (number_of_pieces(q, SMALLEST_SLOT_KB) > INT32_MAX)
        return fa_fail(
            err, FA_EUNSUPPORTED,
            "quantize on a GPU takes at most 2^31 - 1 pieces of q, k and v; a batch of %lld with %lld key heads "
            "has more",
            (long long)q->b, (long long)q->h_kv);
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(q->device_idx, &place, err);
    if (status != FA_OK) return status;
    const int row = choose_row(q, place.gpu->capability);
    const int64_t most_ctas = (int64_t)place.gpu->num_sms * fa_quantize_row(row)->ctas;
    const fa_quantize_params p = params_of(q, fa_quantize_row(row)->slot_kb, workspace);
    const fa_cuda_call call = {.gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    const fa_variant variant = {FA_QUANTIZE, row, fa_dtype_feature(q->dtype), place.gpu->capability, 0, NULL};
    const int64_t ctas = p.num_pieces < most_ctas ? p.num_pieces : most_ctas;
    const fa_launch launch = {(unsigned)ctas, 1, 1, .threads = FA_QUANTIZE_THREADS};
    if (p.num_pieces > 0) {
        status = fa_cuda_fill(&place, workspace, 0, 1 + (int64_t)p.num_pieces, err);
        if (status == FA_OK) status = fa_cuda_launch(&call, variant, launch, &p, err);
    }
    fa_cuda_leave(&place);
    return status;
}
