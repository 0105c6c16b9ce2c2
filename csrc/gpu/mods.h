/* Programmable attention on GPUs. */
#ifndef FA_GPU_MODS_H
#define FA_GPU_MODS_H

#include "launch.h"

/* Makes the map of the block mask in the workspace, if the problem has a block mask. */
fa_status fa_cuda_make_block_map(const fa_cuda_call *call, fa_error *err);

/* Makes the map, the walks of the plan's own tiles over other tiles, and their order. In the backward the own tiles are
 * those of keys, and there are ranks, too. */
fa_status fa_cuda_make_block_walks(const fa_cuda_call *call, fa_error *err);

/* The ranks of Hopper's backward in the workspace (cuda/flex_walks.cu). NULL: there is no block mask. */
const unsigned *fa_cuda_block_ranks(const fa_cuda_call *call);

/* Launches a kernel. The user's functions and what kernels read with them stand behind `parameters` if the variant has
 * FA_FLEX. num_bytes: the size of `parameters`, a multiple of 8. */
fa_status fa_cuda_launch_with_mods(const fa_cuda_call *call, fa_variant variant, fa_launch launch,
                                   const void *parameters, size_t num_bytes, fa_error *err);

#endif
