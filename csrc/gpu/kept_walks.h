/* The walks of a block mask that stays as it is, which outlive a call. */
#ifndef FA_GPU_KEPT_WALKS_H
#define FA_GPU_KEPT_WALKS_H

#include "flash_attn.h"
#include "flex/flex.h"

/* Can the walks of the plan outlive the call? Then fills in their bytes and the key of the call, and says whether they
 * are wanted, because those of the earlier call are others. Walks are not kept while a CUDA graph is recorded, whose
 * replays look at the lists anew. */
fa_status fa_cuda_find_kept_walks(const fa_problem *problem, const fa_plan *plan, fa_kept_walks *kept, fa_error *err);

#endif
