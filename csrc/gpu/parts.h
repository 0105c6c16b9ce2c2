/* Combines partial attention results inside of a call. */
#ifndef FA_GPU_PARTS_H
#define FA_GPU_PARTS_H

#include "combination.h"
#include "gpu_call.h"

fa_status fa_cuda_launch_combine(const fa_cuda_call *call, const fa_combination *combination, fa_error *err);

/* Combines the plan's num_splits parts of a forward into its o and lse. The call is not packed. part_o is [part, b, h,
 * row, d_v], and part_lse is [part, b, h, row]. empty_lse is the lse of a row without keys. */
fa_status fa_cuda_combine_parts(const fa_cuda_call *call, const float *part_o, const float *part_lse, float empty_lse,
                                fa_error *err);

#endif
