/* Chooses the planner of the problem's device. */
#include "plan.h"

#include "cpu.h"
#include "flex/flex.h"
#include "gpu.h"

/* Whether the program gives `result`, reads scores and gradients only in the type `score`, and reads or scatters
 * gradients only if it is a derivative. A mask reads no score: `score` is FA_FLEX_NUM_TYPES. */
static bool fits(const fa_flex_bound *bound, fa_flex_type result, fa_flex_type score, bool is_derivative) {
    if (!bound) return true;
    for (int32_t i = 0; i < bound->program->num_instructions; i++) {
        const fa_flex_instruction *x = &bound->program->instructions[i];
        if ((x->op == FA_FLEX_score || x->op == FA_FLEX_grad) && x->type != score) return false;
        if ((x->op == FA_FLEX_grad || x->op == FA_FLEX_scatter) && !is_derivative) return false;
    }
    return fa_flex_result(bound->program) == result;
}

/* A flex problem has no options of its own but dropout (flex/flex.h). Its programs have the types of its tensors. */
static fa_status check_flex(const fa_problem *p, fa_error *err) {
    const fa_flex *f = p->flex;
    const fa_flex_type score = p->dtype == FA_F64 ? FA_FLEX_F64 : FA_FLEX_F32;
    const bool is_dense = !p->cu_seqlens_q && !p->cu_seqlens_k && !p->seqused_q && !p->leftpad_k && !p->cache_batch_idx;
    const bool is_cache = p->seqused_k || p->paged;
    const bool is_plain = p->window_left < 0 && p->window_right < 0 && p->attention_chunk == 0 && p->softcap == 0 &&
                          !p->alibi_slopes && !p->s_dmask && !p->wants_s_dmask && !p->qv.data && !p->k_new.data &&
                          !p->rotary_cos && p->dtype != FA_E4M3;
    const bool has_blocks =
        f->block_q == 0 || (f->block_q > 0 && f->block_kv > 0 && f->mask_b > 0 && f->mask_h > 0 &&
                            f->rows * f->block_q >= p->len_q && f->columns * f->block_kv >= p->len_kv);
    if (!is_dense || !is_plain) return fa_fail(err, FA_EINVAL, "flex does not go with packed tensors or other options");
    if (is_cache && p->pass == FA_BWD) return fa_fail(err, FA_EUNSUPPORTED, "flex has no backward through a KV cache");
    if (!has_blocks) return fa_fail(err, FA_EINVAL, "the block mask is smaller than the scores");
    if (!fits(f->score, score, score, false) || !fits(f->mask, FA_FLEX_BOOL, FA_FLEX_NUM_TYPES, false) ||
        !fits(f->derivative, score, score, true))
        return fa_fail(err, FA_EINVAL, "a program of the problem is no score_mod, mask_mod or derivative for %s",
                       fa_dtype_name(p->dtype));
    return FA_OK;
}

fa_status fa_plan_make(const fa_problem *problem, const fa_machine *machine, fa_plan *plan, fa_error *err) {
    const fa_status status = problem->flex ? check_flex(problem, err) : FA_OK;
    if (status != FA_OK) return status;
    if (problem->device == FA_CUDA) return fa_plan_cuda(problem, machine, plan, err);
    fa_plan_cpu(problem, machine, plan);
    return FA_OK;
}
