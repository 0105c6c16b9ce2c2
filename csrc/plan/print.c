/* Prints a plan in words, for explain(), FLASH_ATTN_LOG=plan and tests. */
#include "print.h"

#include <stdarg.h>
#include <stdio.h>

/* Text that grows until its buffer is full. */
typedef struct {
    char *text;
    size_t room, at;
} words;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void say(words *w, const char *format, ...) {
    va_list values;
    if (w->at >= w->room) return;
    va_start(values, format);
    const int bytes = vsnprintf(w->text + w->at, w->room - w->at, format, values);
    va_end(values);
    w->at = bytes < 0 ? w->room : w->at + (size_t)bytes;
}

/* "1 tile", "2 tiles" */
static void count(words *w, const char *before, int n, const char *thing, const char *after) {
    say(w, "%s%d %s%s%s", before, n, thing, n == 1 ? "" : "s", after);
}

void fa_plan_print(const fa_plan *plan, char *text, size_t room) {
    const fa_cpu_plan *cpu = &plan->cpu;
    const fa_gpu_plan *gpu = &plan->gpu;
    const bool is_on_cpu = plan->device == FA_CPU;
    words w = {text, room, 0};
    say(&w, "%s on %s, tile %d rows x %d keys", plan->kernel, is_on_cpu ? "cpu" : "cuda", plan->block_q,
        plan->block_kv);
    count(&w, ", ", plan->num_splits, "split", "");
    say(&w, ", %zu bytes of workspace", plan->workspace_bytes);
    if (is_on_cpu) {
        say(&w, ", instruction set %s", fa_isa_name(cpu->isa));
        count(&w, ", ", cpu->tiles_per_task, "tile", " a task");
        count(&w, ", ", cpu->threads, "thread", "");
    }
    if (gpu->group_heads > 0) count(&w, ", ", gpu->group_heads, "head", " walked together");
    if (gpu->tile_heads > 1) say(&w, ", %d heads in a tile", gpu->tile_heads);
    if (gpu->gathers) say(&w, ", pages copied before it");
    if (gpu->aligns) say(&w, ", on copies with aligned rows");
    if (gpu->is_dynamic) say(&w, ", work tiles from a counter");
    if (gpu->cluster > 0) say(&w, ", clusters of %d", gpu->cluster);
    if (gpu->decode.lanes > 0 && gpu->cluster == 0)
        say(&w, ", %d group%s of %d CTA%s", gpu->decode.groups, gpu->decode.groups == 1 ? "" : "s", gpu->decode.lanes,
            gpu->decode.lanes == 1 ? "" : "s");
    if (gpu->decode.lanes > 0 && gpu->decode_low.row >= 0) say(&w, ", a launch before it for sequences of few rows");
    if (gpu->short_rows > 0) say(&w, ", attn_bwd_short before it for sequences of up to %d tokens", gpu->short_rows);
    if (gpu->any_order) say(&w, ", dq added in any order");
    for (int i = 0; i < plan->num_ruled_out; i++)
        say(&w, "; ruled out %s: %s", plan->ruled_out[i].kernel, plan->ruled_out[i].reason);
}
