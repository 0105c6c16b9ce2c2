/* Plans a problem for a GPU. The plan names the first kernel of the list that serves the problem. Each kernel has a
 * planner in a file of its own. A planner is a pure function, and has one line with a reason for each problem that the
 * kernel cannot serve. */
#include "gpu.h"

#include <stdio.h>
#include <string.h>

#include "flex/flex.h"
#include "gpu_align.h"
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"

/* The best kernels come first. */
static const struct {
    fa_pass pass;
    const char *name;
    fa_cuda_planner *plan;
    bool takes_flex;       /* programmable attention */
    bool takes_flex_cache; /* .. with q_offset, lengths or pages */
    bool takes_copies;     /* it reads aligned rows, and copies of others (gpu_align.h) */
} planners[] = {
    {FA_FWD, "attn_decode_sm90", fa_plan_decode_sm90, true, true, true},
    {FA_FWD, "attn_fwd_short", fa_plan_fwd_short, true, false, true},
    {FA_FWD, "attn_fwd_sm90", fa_plan_fwd_sm90, true, true, true},
    {FA_FWD, "attn_fwd_fp8_sm90", fa_plan_fwd_fp8_sm90, false, false, false},
    {FA_FWD, "attn_decode_sm80", fa_plan_decode_sm80, true, true, true},
    {FA_FWD, "attn_fwd_sm80", fa_plan_fwd_sm80, false, false, true},
    {FA_FWD, "attn_fwd_any", fa_plan_fwd_any, true, true, false},
    {FA_BWD, "attn_bwd_short", fa_plan_bwd_short, true, false, true},
    {FA_BWD, "attn_bwd_sm90", fa_plan_bwd_sm90, true, false, true},
    {FA_BWD, "attn_bwd_sm80", fa_plan_bwd_sm80, false, false, true},
    {FA_BWD, "attn_bwd_any", fa_plan_bwd_any, true, true, false},
};

/* Takes the first kernel that serves the problem, or only a tile kernel. reasons: why there is none, unless NULL. */
static bool plan_first(const fa_problem *p, const fa_machine *machine, bool has_tiles, fa_plan *plan, char *reasons,
                       size_t room) {
    size_t at = 0;
    for (size_t i = 0; i < sizeof planners / sizeof *planners; i++) {
        const char *why;
        if (planners[i].pass != p->pass || (has_tiles && !planners[i].takes_copies)) continue;
        if (!fa_allows_kernel(machine, planners[i].name))
            why = "FLASH_ATTN_CUDA_KERNEL rules it out";
        else if (p->flex && !planners[i].takes_flex)
            why = "it takes no mod and no block mask";
        else if (fa_is_flex_cache(p) && !planners[i].takes_flex_cache)
            why = "it takes no q_offset, kv_len and block_table";
        else
            why = planners[i].plan(p, machine, plan);
        if (!why) return true;
        fa_rule_out(plan, planners[i].name, why);
        if (at < room)
            at += (size_t)snprintf(reasons + at, room - at, "%s%s: %s", at ? "; " : "", planners[i].name, why);
    }
    return false;
}

/* A tile kernel may run on copies of the tensors, if this takes less time than a generic kernel. is_last: no kernel
 * takes the tensors themselves. */
static bool plan_on_copies(const fa_problem *p, const fa_machine *machine, bool is_last, fa_plan *plan) {
    enum { ALIGNMENT = 256 };
    fa_aligned_tensor tensors[FA_MAX_ALIGNED];
    if (!fa_may_align(p) || !(is_last || fa_align_pays(p, machine->gpu_capability))) return false;
    const fa_plan before = *plan;
    const unsigned wanted = fa_tensors_to_align(p);
    const fa_problem aligned = fa_aligned(p, tensors, fa_align(p, wanted, NULL, tensors));
    if (!plan_first(&aligned, machine, true, plan, NULL, 0)) {
        *plan = before;
        return false;
    }
    plan->gpu.aligns = wanted;
    plan->workspace_bytes = (plan->workspace_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + fa_align_bytes(p, wanted);
    return true;
}

fa_status fa_plan_cuda(const fa_problem *p, const fa_machine *machine, fa_plan *plan, fa_error *err) {
    if (machine->gpu_capability < 80)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: this GPU has compute capability %d.%d, and the kernels begin at 8.0; use "
                       "torch.nn.functional.scaled_dot_product_attention",
                       machine->gpu_capability / 10, machine->gpu_capability % 10);
    *plan = (fa_plan){.pass = p->pass, .device = p->device, .num_splits = 1, .gpu = {.decode_low = {.row = -1}}};
    fa_machine rest = *machine; /* without the multiprocessors that the call leaves to others */
    if (rest.gpu_sms > 0 && p->sm_margin > 0)
        rest.gpu_sms = p->sm_margin < rest.gpu_sms ? rest.gpu_sms - (int)p->sm_margin : 1;
    plan->gpu.num_sms = rest.gpu_sms;
    char reasons[FA_MESSAGE_BYTES - 64] = "";
    if (plan_on_copies(p, &rest, false, plan) || plan_first(p, &rest, false, plan, reasons, sizeof reasons) ||
        plan_on_copies(p, &rest, true, plan)) {
        fa_variant_name(fa_plan_variant(plan, machine->gpu_capability), plan->kernel);
        return FA_OK;
    }
    return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: no kernel takes this call. %s", reasons);
}
