/* What the kernels of learned sinks share. */
#ifndef FA_SINKS_CUH
#define FA_SINKS_CUH

#include "ptx_sm80.cuh"
#include "sinks_params.h"

/* NOTE: functions of libdevice, because the fast exponential has an error that grows with its argument. */
extern "C" __device__ float __nv_expf(float);
extern "C" __device__ float __nv_log1pf(float);

DEVICE float inf() { return __int_as_float(0x7f800000); }

DEVICE float sink_of(const fa_cuda_sink_values &sinks, int head) {
    const long long at = head * sinks.stride;
    switch (sinks.dtype) {
    case FA_SINKS_OF_F16: return cvt_f32(fp16{((const unsigned short *)sinks.data)[at]});
    case FA_SINKS_OF_BF16: return cvt_f32(bf16{((const unsigned short *)sinks.data)[at]});
    case FA_SINKS_OF_F32: return ((const float *)sinks.data)[at];
    default: return (float)((const double *)sinks.data)[at];
    }
}

DEVICE float *at_row(const fa_cuda_sink_rows &x, long long b_idx, int head, long long row) {
    return x.data + b_idx * x.stride_b + head * x.stride_h + row * x.stride_row;
}

/* The sink beside the scores of a row. The shift was subtracted from these scores. */
DEVICE float sink_of_row(const fa_cuda_sink_values &sinks, const fa_cuda_sink_rows &shift, long long b_idx, int head,
                         long long row) {
    const float sink = sink_of(sinks, head);
    return shift.data ? sink - *at_row(shift, b_idx, head, row) : sink;
}

#endif
