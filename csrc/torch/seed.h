/* Seeds of dropout. */
#ifndef FA_TORCH_SEED_H
#define FA_TORCH_SEED_H

#include "flash_attn.h"

/* A seed from torch's default CPU generator, as an op in Python would draw it. */
fa_status fa_draw_seed(uint64_t *seed, fa_error *err);

/* Seed and offset of torch's default generator of a GPU, which then moves on by steps. Not while a CUDA graph
 * records: then two numbers are drawn on the GPU, anew in each replay, and lie at address until owner is released. */
fa_status fa_advance_gpu_generator(int device_idx, uint64_t steps, uint64_t state[2], fa_error *err);
fa_status fa_draw_on_gpu(int device_idx, uint64_t *address, void **owner, fa_error *err);
void fa_release_drawn(void *owner);

#endif
