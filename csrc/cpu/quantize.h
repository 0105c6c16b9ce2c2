/* Quantises q, k and v to e4m3 on the CPU. */
#ifndef FA_CPU_QUANTIZE_H
#define FA_CPU_QUANTIZE_H

#include "pool.h"
#include "quantization.h"

/* Returns FA_ENOMEM if there is no memory to work in, or if the pool failed. */
fa_status fa_cpu_quantize(const fa_quantization *quantization, const fa_pool *pool, fa_error *err);

#endif
