/* Combines the partial results that a caller brings. */
#include "combine.h"

#include "memory.h"
#include "parts.h"

fa_status fa_cuda_combine(const fa_combination *c, fa_error *err) {
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(c->device_idx, &place, err);
    if (status != FA_OK) return status;
    const fa_cuda_call call = {.gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    status = fa_cuda_launch_combine(&call, c, err);
    fa_cuda_leave(&place);
    return status;
}
