#include "pairs.h"

bool fa_flex_reads_keys(const fa_flex_program *p, const fa_flex_instruction *x) {
    if (x->op != FA_FLEX_gather || p->captures[x->source].rank == 0) return false;
    const int last = p->captures[x->source].rank - 1, dtype = p->captures[x->source].dtype;
    if (p->instructions[x->operand[last]].op != FA_FLEX_kv_idx) return false;
    for (int i = 0; i < last; i++)
        if (p->instructions[x->operand[i]].depends & (FA_FLEX_ON_KV | FA_FLEX_ON_SCORE)) return false;
    return dtype == FA_FLEX_OF_F16 || dtype == FA_FLEX_OF_BF16 || dtype == FA_FLEX_OF_F32;
}

bool fa_flex_has_pairs(const fa_flex_bound *bound, int64_t len_kv) {
    const fa_flex_program *p = bound->program;
    bool has_pairs = false;
    for (int32_t i = 0; i < p->num_instructions; i++) {
        const fa_flex_instruction *x = &p->instructions[i];
        if (!fa_flex_reads_keys(p, x)) continue;
        const fa_flex_capture *c = &bound->captures[x->source];
        const int last = p->captures[x->source].rank - 1;
        const uintptr_t bytes = p->captures[x->source].dtype == FA_FLEX_OF_F32 ? 8 : 4;
        if (!c->data || (uintptr_t)c->data % bytes || c->stride[last] != 1 || c->size[last] % 2 ||
            c->size[last] < len_kv)
            return false;
        for (int dim = 0; dim < last; dim++)
            if (c->size[dim] > 1 && c->stride[dim] % 2) return false;
        has_pairs = true;
    }
    return has_pairs;
}

/* Does an instruction load an element at q_idx? Is kv_idx an index, too, as at_kv says? All other indices must be those
 * of the head, or numbers. */
static bool loads_at(const fa_flex_program *p, const fa_flex_instruction *x, bool at_kv) {
    bool has_q = false, has_kv = false;
    if (x->op != FA_FLEX_gather) return false;
    for (int i = 0; i < x->num_operands; i++) {
        const fa_flex_instruction *index = &p->instructions[x->operand[i]];
        switch ((fa_flex_op)index->op) {
        case FA_FLEX_q_idx: has_q = true; break;
        case FA_FLEX_kv_idx: has_kv = true; break;
        case FA_FLEX_b:
        case FA_FLEX_h:
        case FA_FLEX_constant:
        case FA_FLEX_param: break;
        default: return false;
        }
    }
    return has_q && has_kv == at_kv;
}

static int count(const fa_flex_program *p, bool at_kv, int32_t *last) {
    int num = 0;
    for (int32_t idx = 0; p && idx < p->num_instructions; idx++)
        if (loads_at(p, &p->instructions[idx], at_kv)) num++, *last = idx;
    return num;
}

int fa_count_pair_loads(const fa_flex_program *p, int32_t *last) { return count(p, true, last); }

int32_t fa_pair_of_bits(const fa_flex_program *p) {
    int32_t only;
    if (count(p, true, &only) != 1) return -1;
    const int dtype = p->captures[p->instructions[only].source].dtype;
    return dtype == FA_FLEX_OF_F16 || dtype == FA_FLEX_OF_BF16 ? only : -1;
}

int32_t fa_row_beside_pair(const fa_flex_program *p) {
    int32_t only;
    if (fa_pair_of_bits(p) < 0 || count(p, false, &only) != 1) return -1;
    return p->captures[p->instructions[only].source].dtype == FA_FLEX_OF_F32 ? only : -1;
}

bool fa_flex_has_octets(const fa_flex_bound *bound, int64_t len_kv) {
    const int32_t load = fa_pair_of_bits(bound->program);
    if (load < 0) return false;
    const fa_flex_instruction *x = &bound->program->instructions[load];
    const fa_flex_capture *c = &bound->captures[x->source];
    const int last = bound->program->captures[x->source].rank - 1;
    if (!fa_flex_reads_keys(bound->program, x) || !c->data || (uintptr_t)c->data % 16) return false;
    if (c->stride[last] != 1 || c->size[last] % 8 || c->size[last] < len_kv) return false;
    for (int dim = 0; dim < last; dim++)
        if (c->size[dim] > 1 && c->stride[dim] % 8) return false;
    return true;
}

bool fa_loads_beside_pair(const fa_flex_program *p) {
    const int32_t pair = fa_pair_of_bits(p), row = fa_row_beside_pair(p);
    for (int32_t idx = 0; p && idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        if (idx != pair && idx != row && x->op == FA_FLEX_gather && x->depends & (FA_FLEX_ON_Q | FA_FLEX_ON_KV))
            return true;
    }
    return false;
}
