/* Allocates the tensors that an op returns. */
#ifndef FA_TORCH_OUTPUTS_H
#define FA_TORCH_OUTPUTS_H

#include "call.h"
#include "combination.h"
#include "quantization.h"

/* The tensors that an op returns, in order. */
#define FA_MAX_OUTPUTS 9
typedef struct {
    AtenTensorHandle tensor[FA_MAX_OUTPUTS];
    int num;
} fa_outputs;

/* Allocates the outputs as the fakes in flash_attn/ promise them, and points the problem at them. draw_seed: the
 * dropout seed is drawn too. After a failure no output stays allocated. */
fa_status fa_make_outputs(const fa_call *call, bool draw_seed, fa_problem *problem, fa_outputs *outputs, fa_error *err);

/* Adds a tensor with these strides to the outputs, on the device of `like`. data: its memory. After a failure the
 * caller drops the outputs. */
fa_status fa_make_output(fa_outputs *outputs, const fa_tensor *like, int64_t ndim, const int64_t *size,
                         const int64_t *stride, int32_t dtype, void **data, fa_error *err);
void fa_drop_outputs(fa_outputs *outputs);

/* Asks for large pages for a gradient of the CPU that the caller allocated. NULL data: nothing happens. */
void fa_ask_for_gradient(const fa_tensor *t);

/* The strides of torch.empty_like(t). */
void fa_empty_like_strides(const fa_tensor *t, int64_t *stride);

/* Makes the results of fwd_combine, out [b, len, h, d] and lse [b, len, h] with rows side by side in memory, and points
 * the combination at them. */
fa_status fa_make_combined(const fa_call *call, int32_t dtype, fa_outputs *outputs, fa_combination *combination,
                           fa_error *err);

/* Makes the results of quantize, three tensors and their three descales, and points the quantisation at them. */
fa_status fa_make_quantized(const fa_call *call, fa_outputs *outputs, fa_quantization *quantization, fa_error *err);

/* Makes the results of get_scheduler_metadata: one int32 that is 0, on the device of a tensor. */
fa_status fa_make_zero(const fa_tensor *like, fa_outputs *outputs, fa_error *err);

#endif
