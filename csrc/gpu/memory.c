/* Fills and copies memory on PyTorch's stream. */
#include "memory.h"

#include "host.h"

fa_status fa_cuda_enter(int device_idx, fa_cuda_place *place, fa_error *err) {
    void *stream = NULL;
    fa_status status = fa_gpu_get(device_idx, &place->gpu, err);
    if (status == FA_OK && !place->gpu->is_imagined) status = fa_host.current_stream(device_idx, &stream, err);
    if (status == FA_OK) status = fa_driver_get(&place->driver, err);
    if (status == FA_OK) status = fa_context_enter(place->gpu, &place->guard, err);
    if (status == FA_OK) place->stream = (CUstream)stream;
    return status;
}

void fa_cuda_leave(const fa_cuda_place *place) { fa_context_leave(&place->guard); }

bool fa_cuda_make_room(const fa_driver *driver, CUstream stream) {
    int capturing = 0;
    if (driver->cuStreamIsCapturing(stream, &capturing) != 0 || capturing) return false;
    fa_host.empty_cache();
    return true;
}

bool fa_cuda_is_capturing(const fa_cuda_place *place) {
    int capturing = 0;
    return place->driver->cuStreamIsCapturing(place->stream, &capturing) == 0 && capturing != 0;
}

static uint64_t address(const void *p) { return (uint64_t)(uintptr_t)p; }

/* A fill does not wait. A copy from the host's memory would, because the driver waits for the stream before it reads
 * the host's memory. */
fa_status fa_cuda_fill(const fa_cuda_place *place, void *to, uint32_t value, int64_t num, fa_error *err) {
    if (num == 0) return FA_OK;
    return fa_driver_check(place->driver->cuMemsetD32Async(address(to), value, (size_t)num, place->stream),
                           "filling the GPU's memory", err);
}

fa_status fa_cuda_write(const fa_cuda_place *place, void *to, const uint64_t *numbers, int num, fa_error *err) {
    fa_status status = FA_OK;
    uint32_t half[2];
    int64_t first = 0;
    for (int64_t i = 1; i <= 2 * num && status == FA_OK; i++) { /* one fill for each run of equal values */
        half[0] = (uint32_t)(numbers[first / 2] >> 32 * (first % 2));
        half[1] = i < 2 * num ? (uint32_t)(numbers[i / 2] >> 32 * (i % 2)) : ~half[0];
        if (half[0] == half[1]) continue;
        status = fa_cuda_fill(place, (uint32_t *)to + first, half[0], i - first, err);
        first = i;
    }
    return status;
}

fa_status fa_cuda_copy(const fa_cuda_place *place, void *to, uint64_t from, size_t bytes, fa_error *err) {
    return fa_driver_check(place->driver->cuMemcpyDtoDAsync_v2(address(to), from, bytes, place->stream),
                           "copying the GPU's memory", err);
}

fa_status fa_cuda_read(const fa_cuda_place *place, void *to, const void *from, size_t bytes, fa_error *err) {
    return fa_driver_check(place->driver->cuMemcpyDtoHAsync_v2(to, address(from), bytes, place->stream),
                           "reading the GPU's memory", err);
}

fa_status fa_cuda_wait(const fa_cuda_place *place, fa_error *err) {
    return fa_driver_check(place->driver->cuStreamSynchronize(place->stream), "waiting for the GPU", err);
}

/* Zeroes rows [0, rows) of a packed tensor [row, heads, d] in the output's dtype. If the heads of a row lie side by
 * side, one fill zeroes all heads. Otherwise there is one fill for each head. */
static CUresult zero_rows(const fa_problem *p, const fa_view *t, int64_t rows, int64_t heads, int64_t d,
                          const fa_driver *driver, CUstream stream) {
    const size_t bytes = fa_dtype_bytes(fa_output_dtype(p->dtype)), head_bytes = (size_t)d * bytes;
    const size_t pitch = (size_t)t->stride_row * bytes;
    if (!t->data || rows == 0 || heads == 0) return 0;
    const bool side_by_side = heads == 1 || t->stride_h == d;
    const size_t width = side_by_side ? head_bytes * (size_t)heads : head_bytes;
    CUresult result = 0;
    for (int64_t head = 0; head < (side_by_side ? 1 : heads) && result == 0; head++) {
        const uint64_t to = address(t->data) + (uint64_t)head * (uint64_t)t->stride_h * bytes;
        result = driver->cuMemsetD2D8Async(to, rows == 1 ? width : pitch, 0, width, (size_t)rows, stream);
    }
    return result;
}

fa_status fa_cuda_zero_tensors(const fa_problem *p, const fa_driver *driver, CUstream stream, fa_error *err) {
    const uint32_t minus_infinity = 0xff800000u;
    CUresult result = 0;
    if (p->pass == FA_FWD) {
        result = zero_rows(p, &p->o, p->total_q, p->h, p->d_v, driver, stream);
        if (result == 0 && p->lse.data && p->h * p->total_q > 0)
            result =
                driver->cuMemsetD32Async(address(p->lse.data), minus_infinity, (size_t)(p->h * p->total_q), stream);
    } else {
        result = zero_rows(p, &p->dq, p->total_q, p->h, p->d, driver, stream);
        if (result == 0) result = zero_rows(p, &p->dk, p->total_kv, p->h_kv, p->d, driver, stream);
        if (result == 0) result = zero_rows(p, &p->dv, p->total_kv, p->h_kv, p->d_v, driver, stream);
    }
    return fa_driver_check(result, "filling the GPU's memory", err);
}

fa_status fa_cuda_zero_key_gradients(const fa_problem *p, const fa_driver *driver, CUstream stream, fa_error *err) {
    const bool packed = p->cu_seqlens_k != NULL;
    const fa_view *gradients[] = {&p->dk, &p->dv};
    CUresult result = 0;
    for (int i = 0; i < 2; i++)
        for (int64_t b_idx = 0; b_idx < (packed ? 1 : p->b) && gradients[i]->data && result == 0; b_idx++) {
            fa_view of_batch = *gradients[i];
            of_batch.data = (char *)of_batch.data + (size_t)(b_idx * of_batch.stride_b) * fa_dtype_bytes(p->dtype);
            result = zero_rows(p, &of_batch, packed ? p->total_kv : p->len_kv, p->h_kv, i == 0 ? p->d : p->d_v, driver,
                               stream);
        }
    return fa_driver_check(result, "filling the GPU's memory", err);
}
