/* Seeds of dropout. */
#ifndef FA_TORCH_SEED_H
#define FA_TORCH_SEED_H

#include "flash_attn.h"

/* Draws a seed from torch's default CPU generator, as an op in Python would do. */
fa_status fa_draw_seed(uint64_t *seed, fa_error *err);

/* Reads seed and offset of torch's default generator of a GPU, and advances the offset by `steps`. This function must
 * not be called during CUDA graph capture. */
fa_status fa_advance_gpu_generator(int device_idx, uint64_t steps, uint64_t state[2], fa_error *err);

/* Draws two numbers on the GPU during CUDA graph capture. Each replay of the graph draws new numbers. They lie at
 * `address` until `owner` is released. */
fa_status fa_draw_on_gpu(int device_idx, uint64_t *address, void **owner, fa_error *err);
void fa_release_drawn(void *owner);

#endif
