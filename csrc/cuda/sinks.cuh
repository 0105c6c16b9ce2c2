/* Learned sinks: one more key for each row, of score sink[h] and value 0. The epilogue of a forward adds it:
 *
 *   lse' = log(exp(lse) + exp(sink))      out' = share out,  share = exp(lse - lse')
 *
 * Where a shift was subtracted from the scores of a row, it is subtracted from the sink, too. lse' is that without it.
 *
 * Specification: ../cpu/sinks.c. */
#ifndef FA_SINKS_CUH
#define FA_SINKS_CUH

#include "ptx_sm80.cuh"
#include "sinks_params.h"

DEVICE float sink_of(const fa_cuda_sink_values &sinks, int head) {
    const long long at = head * sinks.stride;
    switch (sinks.dtype) {
    case FA_SINKS_OF_F16: return cvt_f32(fp16{((const unsigned short *)sinks.data)[at]});
    case FA_SINKS_OF_BF16: return cvt_f32(bf16{((const unsigned short *)sinks.data)[at]});
    case FA_SINKS_OF_F32: return ((const float *)sinks.data)[at];
    default: return (float)((const double *)sinks.data)[at];
    }
}

DEVICE float *sink_row(const fa_cuda_sink_rows &x, long long b_idx, int head, long long row) {
    return x.data + b_idx * x.stride_b + head * x.stride_h + row * x.stride_row;
}

/* What was subtracted from the scores of a row. */
DEVICE float shift_of_row(const fa_cuda_sink_rows &shift, long long b_idx, int head, long long row) {
    return shift.data ? *sink_row(shift, b_idx, head, row) : 0;
}

/* The sink beside the scores of a row. */
DEVICE float sink_of_row(const fa_cuda_sink_values &sinks, const fa_cuda_sink_rows &shift, long long b_idx, int head,
                         long long row) {
    return sink_of(sinks, head) - shift_of_row(shift, b_idx, head, row);
}

struct row_with_sink {
    float lse, share; /* lse' and the share of the keys */
};

/* A row that saw no key has lse -inf, and keeps its zeros: its share is 0.
 * NOTE: functions of libdevice would spill registers of attn_fwd_any in fp32. */
DEVICE row_with_sink add_sink(float lse, float sink) {
    constexpr float LOG2_OF_E = 1.44269504088896341f, LOG_OF_2 = 0.693147180559945309f;
    const float distance = fabsf(lse == sink ? 0 : sink - lse); /* equal infinities have a distance, too */
    const float exponent = __fmul_rn(distance, LOG2_OF_E);
    float low = ex2(-exponent);
    /* The exponent's rounding shows in fp32. */
    if (element::BYTES == 4 && low > 0) low -= low * LOG_OF_2 * fmaf(distance, LOG2_OF_E, -exponent);
    const float share = __fdividef(sink > lse ? low : 1, 1 + low);
    return {(sink > lse ? sink : lse) + lg2(1 + low) * LOG_OF_2, lse == -__int_as_float(0x7f800000) ? 0 : share};
}

#endif
