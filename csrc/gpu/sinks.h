/* Learned sinks on a GPU (row_options.h), on PyTorch's stream. */
#ifndef FA_GPU_SINKS_H
#define FA_GPU_SINKS_H

#include "cuda/sinks_params.h"
#include "row_options.h"

/* Writes out' and lse'. Without sinks, inf becomes -inf in lse, and nothing else happens. */
fa_status fa_cuda_add_sinks(const fa_sinks *sinks, fa_error *err);
fa_status fa_cuda_gradient_of_sinks(const fa_sinks *sinks, fa_error *err);

/* The numbers as a kernel reads them. */
static inline fa_cuda_sink_values fa_cuda_read_sinks(const fa_sink_values *sinks) {
    const int dtype = sinks->dtype == FA_F16    ? FA_SINKS_OF_F16
                      : sinks->dtype == FA_BF16 ? FA_SINKS_OF_BF16
                      : sinks->dtype == FA_F32  ? FA_SINKS_OF_F32
                                                : FA_SINKS_OF_F64;
    return (fa_cuda_sink_values){sinks->data, sinks->stride, dtype};
}

static inline fa_cuda_sink_rows fa_cuda_read_sink_rows(const fa_sink_rows *x) {
    return (fa_cuda_sink_rows){x->data, x->stride_b, x->stride_h, x->stride_row};
}

/* What the forward of a problem reads. */
static inline fa_cuda_sinks fa_cuda_sinks_of(const fa_problem *p) {
    return (fa_cuda_sinks){fa_cuda_read_sinks(&p->sinks), fa_cuda_read_sink_rows(&p->sink_shift)};
}

#endif
