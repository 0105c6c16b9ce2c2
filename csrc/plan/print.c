/* A plan in words: for explain(), FLASH_ATTN_LOG=plan and tests. */
#include "print.h"

#include <stdio.h>

void fa_plan_print(const fa_plan *plan, char *text, size_t room) {
    int at = snprintf(text, room, "%s on %s, tile %d rows x %d keys, %d splits, %zu bytes of workspace", plan->kernel,
                      plan->device == FA_CPU ? "cpu" : "cuda", plan->block_q, plan->block_kv, plan->num_splits,
                      plan->workspace_bytes);
    if (plan->device == FA_CPU && at > 0 && (size_t)at < room)
        at += snprintf(text + at, room - (size_t)at, ", instruction set %s, %d tiles a task, %d threads",
                       fa_isa_name(plan->isa), plan->tiles_per_task, plan->threads);
    if (plan->cluster > 0 && at > 0 && (size_t)at < room)
        at += snprintf(text + at, room - (size_t)at, ", clusters of %d", plan->cluster);
    if (plan->any_order && at > 0 && (size_t)at < room)
        at += snprintf(text + at, room - (size_t)at, ", dq added in any order");
    for (int i = 0; i < plan->num_ruled_out && at > 0 && (size_t)at < room; i++)
        at += snprintf(text + at, room - (size_t)at, "; ruled out %s: %s", plan->ruled_out[i].kernel,
                       plan->ruled_out[i].reason);
}
