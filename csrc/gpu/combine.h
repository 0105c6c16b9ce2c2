/* Combines partial attention results on a GPU. */
#ifndef FA_GPU_COMBINE_H
#define FA_GPU_COMBINE_H

#include "combination.h"

fa_status fa_cuda_combine(const fa_combination *combination, fa_error *err);

#endif
