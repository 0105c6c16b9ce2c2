#include "flex_bias.h"

#include "flex/integers.h"
#include "flex/scatters.h"
#include "flex_gradients.h"

/* Finds the places of a gather or a scatter. Its indices must be b, h, q_idx, kv_idx or numbers, and never outside of
 * the capture, because an index outside is clamped. */
static bool find_places(const fa_problem *p, const fa_flex_program *program, const fa_flex_instruction *x, int rank,
                        const int64_t *sizes, const int64_t *strides, fa_flex_places *places) {
    *places = (fa_flex_places){0};
    for (int dim = 0; dim < rank; dim++) {
        const fa_flex_instruction *index = &program->instructions[x->operand[dim]];
        const int64_t size = sizes[dim], stride = size == 1 ? 0 : strides[dim];
        int64_t *step, num;
        switch ((fa_flex_op)index->op) {
        case FA_FLEX_b: step = &places->b, num = p->b; break;
        case FA_FLEX_h: step = &places->h, num = p->h; break;
        case FA_FLEX_q_idx: step = &places->q, num = p->len_q; break;
        case FA_FLEX_kv_idx: step = &places->kv, num = p->len_kv; break;
        case FA_FLEX_constant: places->first += fa_flex_place(index->number.i, size) * stride; continue;
        default: return false;
        }
        if (size != 1 && size < num) return false;
        *step += stride;
    }
    return true;
}

/* Finds the capture that the derivative adds to. Returns false if the derivative does anything else. */
static bool find_scatter(const fa_problem *p, fa_flex_bias *bias) {
    const fa_flex_bound *bound = p->flex->derivative;
    bias->capture = -1;
    if (!bound) return true;
    const fa_flex_program *program = bound->program;
    if (!fa_flex_passes_gradient(program)) return false;
    for (int32_t i = 0; i < program->num_instructions; i++) {
        const fa_flex_instruction *x = &program->instructions[i];
        const int rank = x->num_operands - 1;
        int64_t strides[FA_FLEX_MAX_RANK], num = 1;
        if (!fa_flex_is_scatter(x)) continue;
        if (bias->capture >= 0 || x->result != FA_FLEX_F32 ||
            program->instructions[x->operand[rank]].op != FA_FLEX_grad)
            return false;
        const int64_t *sizes = bound->captures[x->source].size;
        for (int dim = rank - 1; dim >= 0; num *= sizes[dim--]) strides[dim] = num;
        if (!find_places(p, program, x, rank, sizes, strides, &bias->of_sum)) return false;
        bias->capture = x->source;
    }
    return true;
}

bool fa_flex_bias_of(const fa_problem *p, fa_isa isa, fa_flex_bias *bias) {
    const fa_flex *f = fa_flex_of(p);
    *bias = (fa_flex_bias){.operations = fa_flex_operations_of(isa)};
    if (!f || !f->score || f->q_offset || p->cu_seqlens_q || p->cu_seqlens_k) return false;
    const fa_flex_program *program = f->score->program;
    const fa_flex_instruction *last = &program->instructions[program->num_instructions - 1];
    if (last->op != FA_FLEX_add || last->type != FA_FLEX_F32) return false;
    for (int side = 0; side < 2; side++) {
        const fa_flex_instruction *x = &program->instructions[last->operand[1 - side]];
        if (program->instructions[last->operand[side]].op != FA_FLEX_score || x->op != FA_FLEX_gather) continue;
        const fa_flex_capture *capture = &f->score->captures[x->source];
        bias->data = capture->data;
        bias->dtype = (fa_flex_dtype)program->captures[x->source].dtype;
        return capture->data &&
               find_places(p, program, x, x->num_operands, capture->size, capture->stride, &bias->of_value) &&
               find_scatter(p, bias);
    }
    return false;
}

bool fa_flex_is_for_few_rows(const fa_problem *p) {
    const int64_t most_elements = 1 << 20;
    const fa_flex *f = fa_flex_of(p);
    fa_flex_bias bias;
    if (!f || f->mask || f->block_q > 0 || !fa_flex_bias_of(p, FA_ISA_SCALAR, &bias)) return false;
    if (bias.capture < 0) return true;
    int64_t num = 1;
    for (int i = 0; i < f->derivative->program->captures[bias.capture].rank; i++)
        num *= f->derivative->captures[bias.capture].size[i];
    return num <= most_elements || fa_flex_sums_of(p, true).num == 0;
}
