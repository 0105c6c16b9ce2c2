/* The tile kernels want rows that start at multiples of 16 bytes. Tensors with other rows may be copied to such rows
 * before a tile kernel runs, and its outputs are copied back (cuda/align.cu). */
#ifndef FA_PLAN_GPU_ALIGN_H
#define FA_PLAN_GPU_ALIGN_H

#include "flash_attn.h"

/* A tensor [b, rows, heads, columns] of a problem, and its copy with columns rounded up to a multiple of 8. Packed
 * tensors have b = 1. */
typedef struct {
    size_t at; /* of its view in fa_problem */
    fa_view own, copy;
    int64_t b, rows, heads, columns, copied_columns;
    bool is_packed, is_output;
} fa_aligned_tensor;

/* The tensors that are copied, one bit for each. A plan keeps the bits (fa_gpu_plan.aligns), because it is made before
 * there is memory for results: these are contiguous. */
enum { FA_MAX_ALIGNED = 8 };
unsigned fa_tensors_to_align(const fa_problem *problem);

size_t fa_align_bytes(const fa_problem *problem, unsigned wanted);

/* Places the copies, which begin at `copies`, and returns the number of tensors that are there. A planner has no
 * workspace yet: NULL. */
int fa_align(const fa_problem *problem, unsigned wanted, char *copies, fa_aligned_tensor tensors[FA_MAX_ALIGNED]);

/* The same problem with the copies. */
fa_problem fa_aligned(const fa_problem *problem, const fa_aligned_tensor *tensors, int num);

/* May copies stand for the tensors, because a tile kernel would serve the call if its rows were aligned? */
bool fa_may_align(const fa_problem *problem);

/* Do the copies take less time than the tile kernel saves? */
bool fa_align_pays(const fa_problem *problem, int capability);

#endif
