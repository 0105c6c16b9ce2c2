/* What the planners of the GPU ask of a problem and note in a plan. */
#ifndef FA_PLAN_GPU_PROBLEM_H
#define FA_PLAN_GPU_PROBLEM_H

#include "flash_attn.h"

/* A planner's first lines: each condition with the reason why the kernel cannot serve the problem. */
#define NEEDS(condition, reason)         \
    do {                                 \
        if (!(condition)) return reason; \
    } while (0)

/* Do scores become another function of q.k than a positive scale times q.k? A smaller scale than 1e-37 is no normal float,
 * and 0 times the -inf of a masked score is NaN. */
bool fa_changes_scores(const fa_problem *problem);

/* Hopper's kernels compute softcap tanh(x / softcap) as a difference of two numbers as large as softcap. Above this softcap,
 * scores would lose more than 1e-4. */
#define FA_HOPPERS_SOFTCAP 1000
#define FA_SOFTCAP_REASON  "its scores lose their digits with a softcap above 1000"

/* The features of kernel_table.h that the problem asks for, its dtype among them. */
unsigned fa_cuda_features(const fa_problem *problem);

void fa_rule_out(fa_plan *plan, const char *kernel, const char *reason);

/* Can TMA walk over the tensor? It steps by 16 bytes. num_rows: of all sequences; packed: their rows lie in one row. */
bool fa_suits_tma(const fa_problem *problem, const fa_view *tensor, int64_t num_rows, int64_t num_heads, bool packed);

#endif
