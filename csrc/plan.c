/* problem -> plan: the strongest instruction set that is legal here and has a kernel for the pass and the dtype, then
 * its tiles. Every stronger one is ruled out with its reason, so that a user can read why a call runs as it does. */
#include "cpu/cpu.h"
#include "cpu/decode_plan.h"
#include "plan_cuda.h"

#include <stdio.h>

static const char *pass_name(fa_pass pass) { return pass == FA_FWD ? "fwd" : "bwd"; }

static bool has_kernel(const fa_problem *p, fa_isa isa) {
    const fa_cpu_kernels *kernels = fa_cpu_kernels_of(isa, p->dtype);
    return p->pass == FA_FWD ? kernels->fwd != NULL : kernels->bwd != NULL;
}

static void rule_out(fa_plan *plan, const fa_problem *p, const fa_machine *machine, fa_isa isa) {
    fa_ruled_out *r = &plan->ruled_out[plan->num_ruled_out++];
    snprintf(r->kernel, sizeof r->kernel, "attn_%s_%s", pass_name(p->pass), fa_isa_name(isa));
    if (!machine->isa_legal[isa])
        snprintf(r->reason, sizeof r->reason, "this processor or operating system does not offer it");
    else if (isa > machine->isa)
        snprintf(r->reason, sizeof r->reason, "the choice was lowered to %s", fa_isa_name(machine->isa));
    else if (p->dtype == FA_F64)
        snprintf(r->reason, sizeof r->reason, "fp64 runs on the reference only");
    else if (isa >= FA_ISA_AVX512BF16 && p->dtype != FA_BF16)
        snprintf(r->reason, sizeof r->reason, "it multiplies bf16, the tensors are %s", fa_dtype_name(p->dtype));
    else
        snprintf(r->reason, sizeof r->reason, "it has no kernel for this pass");
}

fa_status fa_plan_make(const fa_problem *p, const fa_machine *machine, fa_plan *plan, fa_error *err) {
    if (p->device == FA_CUDA) return fa_plan_cuda(p, machine, plan, err);

    *plan = (fa_plan){.pass = p->pass,
                      .device = p->device,
                      .isa = FA_ISA_REFERENCE,
                      .block_q = 1,
                      .block_kv = 1,
                      .tiles_per_task = 1,
                      .threads = machine->threads,
                      .num_splits = 1};
    for (int isa = FA_NUM_ISAS - 1; isa > FA_ISA_REFERENCE; isa--) {
        if (isa <= (int)machine->isa && machine->isa_legal[isa] && has_kernel(p, (fa_isa)isa)) {
            plan->isa = (fa_isa)isa;
            break;
        }
        rule_out(plan, p, machine, (fa_isa)isa);
    }

    if (plan->isa == FA_ISA_REFERENCE) {
        plan->workspace_bytes = p->pass == FA_FWD ? fa_rotated_q_bytes(p) : 0;
        snprintf(plan->kernel, sizeof plan->kernel, "attn_%s_reference_%s_d%d", pass_name(p->pass),
                 fa_dtype_name(p->dtype), (int)p->d);
        return FA_OK;
    }
    plan->decodes = fa_decode_fits(p);
    if (plan->decodes)
        fa_cpu_plan_decode(p, machine, plan);
    else
        (p->pass == FA_FWD ? fa_cpu_plan_fwd : fa_cpu_plan_bwd)(p, machine, plan);
    snprintf(plan->kernel, sizeof plan->kernel, "attn_%s_%s_%s_d%d_q%dkv%d",
             plan->decodes ? "decode" : pass_name(p->pass), fa_isa_name(plan->isa), fa_dtype_name(p->dtype), (int)p->d,
             plan->block_q, plan->block_kv);
    return FA_OK;
}
