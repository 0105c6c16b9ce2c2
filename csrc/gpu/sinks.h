/* Learned sinks on a GPU (row_options.h), on PyTorch's stream. */
#ifndef FA_GPU_SINKS_H
#define FA_GPU_SINKS_H

#include "cuda/sinks_params.h"
#include "row_options.h"

/* Writes out' and lse'. Without sinks, inf becomes -inf in lse, and nothing else happens. */
fa_status fa_cuda_add_sinks(const fa_sinks *sinks, fa_error *err);
fa_status fa_cuda_gradient_of_sinks(const fa_sinks *sinks, fa_error *err);

/* The numbers as a kernel reads them. */
fa_cuda_sink_values fa_cuda_read_sinks(const fa_sink_values *sinks);

#endif
