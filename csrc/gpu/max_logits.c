/* Launches cuda/max_logits.cu. */
#include "max_logits.h"

#include "cuda/max_logits_params.h"
#include "launch.h"
#include "memory.h"
#include "sinks.h"

fa_status fa_cuda_max_logits(const fa_max_logits *of, fa_error *err) {
    fa_cuda_place place;
    const fa_max_logits_params a = {
        .scores = fa_cuda_read_sink_rows(&of->scores),
        .shift = fa_cuda_read_sink_rows(&of->shift),
        .largest = of->largest,
        .b = of->b,
        .rows = of->rows,
    };
    if (of->h == 0) return FA_OK;
    fa_status status = fa_cuda_enter(of->device_idx, &place, err);
    if (status != FA_OK) return status;
    const fa_cuda_call call = {.gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    const fa_variant variant = {FA_MAX_LOGITS, 0, 0, place.gpu->capability, 0, NULL};
    const fa_launch grid = {(unsigned)of->h, 1, 1, .threads = 32 * FA_MAX_LOGITS_WARPS};
    status = fa_cuda_launch(&call, variant, grid, &a, err);
    fa_cuda_leave(&place);
    return status;
}
