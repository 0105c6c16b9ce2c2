/* Plans a problem for the CPU. The planner takes the strongest legal instruction set that has a kernel for the pass and
 * the dtype. Then the planner chooses the tiles. A stronger instruction set is ruled out with a reason that the user
 * can read. */
#include "cpu.h"

#include "cpu/decode_plan.h"
#include "cpu/dispatch.h"
#include "cpu/fwd_layout.h"
#include "cpu_planners.h"
#include "sequence.h"

/* Names of kernels by instruction set. */
#define FWD_NAME(id, name)       "attn_fwd_" #name
#define BWD_NAME(id, name)       "attn_bwd_" #name
#define BWD_ROWS_NAME(id, name)  "attn_bwd_rows_" #name
#define MIXED_BWD_NAME(id, name) "attn_bwd_tiles_rows_" #name
#define DECODE_NAME(id, name)    "attn_decode_" #name
#define MIXED_NAME(id, name)     "attn_fwd_decode_" #name
static const char *const fwd_names[FA_NUM_ISAS] = {FA_ISAS(FWD_NAME)};
static const char *const bwd_names[FA_NUM_ISAS] = {FA_ISAS(BWD_NAME)};
static const char *const bwd_rows_names[FA_NUM_ISAS] = {FA_ISAS(BWD_ROWS_NAME)};
static const char *const mixed_bwd_names[FA_NUM_ISAS] = {FA_ISAS(MIXED_BWD_NAME)};
static const char *const decode_names[FA_NUM_ISAS] = {FA_ISAS(DECODE_NAME)};
static const char *const mixed_names[FA_NUM_ISAS] = {FA_ISAS(MIXED_NAME)};

static const char *const *names_of(const fa_plan *plan, const fa_problem *p) {
    if (plan->pass == FA_BWD)
        return plan->cpu.num_decodes == 0 ? bwd_names : plan->cpu.num_decodes < p->b ? mixed_bwd_names : bwd_rows_names;
    if (plan->cpu.num_decodes == 0) return fwd_names;
    return plan->cpu.num_decodes < p->b ? mixed_names : decode_names;
}

/* Names are written piece by piece, because formatting them would cost a short call a tenth of its time. */
static char *append(char *end, const char *text) {
    while (*text) *end++ = *text++;
    *end = '\0';
    return end;
}

static char *append_number(char *end, const char *text, int number) {
    char digits[12], *first = digits + sizeof digits - 1;
    *first = '\0';
    do *--first = (char)('0' + number % 10);
    while (number /= 10);
    return append(append(end, text), first);
}

static void name_kernel(fa_plan *plan, const fa_problem *p) {
    char *end = append(append(plan->kernel, names_of(plan, p)[plan->cpu.isa]), "_");
    end = append_number(append(end, fa_dtype_name(p->dtype)), "_d", (int)p->d);
    if (p->d_v != p->d) end = append_number(end, "v", (int)p->d_v);
    if (plan->cpu.isa != FA_ISA_REFERENCE)
        end = append_number(append_number(end, "_q", plan->block_q), "kv", plan->block_kv);
    if (p->flex) end = append(end, "_flex");
    if (p->bias.data) append(end, "_bias");
}

static bool has_kernel(const fa_problem *p, fa_isa isa) {
    if (p->dtype == FA_E4M3 && (p->pass == FA_BWD || p->qv.data)) return false;
    const fa_cpu_kernels *kernels = fa_cpu_kernels_of(isa, p->dtype);
    return p->pass == FA_FWD ? kernels->fwd != NULL : kernels->bwd != NULL;
}

static const char *why_not(const fa_problem *p, const fa_machine *machine, fa_isa isa) {
    if (!machine->isa_legal[isa]) return "this processor or operating system does not offer it";
    if (isa > machine->isa) return "the choice was lowered: FLASH_ATTN_CPU_ISA or set_cpu_isa()";
    if (p->dtype == FA_F64) return "fp64 runs on the reference only";
    if (p->dtype == FA_E4M3 && p->qv.data) return "qv of e4m3 runs on the reference only";
    if (!fa_isa_is_for_bf16(isa) || p->dtype == FA_BF16) return "it has no kernel for this pass";
    if (p->dtype == FA_E4M3) return "it multiplies bf16, the tensors are e4m3";
    return p->dtype == FA_F16 ? "it multiplies bf16, the tensors are fp16" : "it multiplies bf16, the tensors are fp32";
}

void fa_plan_cpu(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    fa_problem nothing;
    if (fa_is_idle(p)) {
        nothing = *p, nothing.b = 0; /* a loop over the sequences of an expanded tensor might never end */
        p = &nothing;
    }

    *plan = (fa_plan){.pass = p->pass,
                      .device = p->device,
                      .block_q = 1,
                      .block_kv = 1,
                      .num_splits = 1,
                      .cpu = {.isa = FA_ISA_REFERENCE, .tiles_per_task = 1, .threads = machine->threads}};
    for (int isa = FA_NUM_ISAS - 1; isa > FA_ISA_REFERENCE; isa--) {
        if (!fa_cpu_knows((fa_isa)isa)) continue;
        if (isa <= (int)machine->isa && machine->isa_legal[isa] && has_kernel(p, (fa_isa)isa)) {
            plan->cpu.isa = (fa_isa)isa;
            break;
        }
        plan->ruled_out[plan->num_ruled_out++] =
            (fa_ruled_out){names_of(plan, p)[isa], why_not(p, machine, (fa_isa)isa)};
    }

    if (plan->cpu.isa == FA_ISA_REFERENCE) {
        plan->workspace_bytes = (p->pass == FA_FWD ? fa_rotated_q_bytes(p) : 0) + fa_flex_kinds_bytes(p);
        name_kernel(plan, p);
        return;
    }
    const bool is_bwd = p->pass == FA_BWD;
    plan->cpu.num_decodes = fa_num_decodes(p);
    if (plan->cpu.num_decodes > 0) (is_bwd ? fa_cpu_plan_bwd_rows : fa_cpu_plan_decode)(p, machine, plan);
    /* The kernel for few queries and the tiled kernel run one after the other in the same workspace. Each has its own
     * number of threads. The plan's tiles are those of the tiled kernel. */
    if (plan->cpu.num_decodes < p->b || (is_bwd && p->b == 0)) {
        const size_t bytes = plan->workspace_bytes;
        const int num_splits = plan->num_splits;
        (is_bwd ? fa_cpu_plan_bwd : fa_cpu_plan_fwd)(p, machine, plan);
        if (!is_bwd) plan->num_splits = num_splits;
        if (plan->workspace_bytes < bytes) plan->workspace_bytes = bytes;
    }
    name_kernel(plan, p);
}
