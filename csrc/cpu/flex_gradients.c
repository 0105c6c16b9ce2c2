#include "flex_gradients.h"

static int64_t elements_of(const fa_flex_bound *bound, int capture) {
    int64_t num = 1;
    for (int i = 0; i < bound->program->captures[capture].rank; i++) num *= bound->captures[capture].size[i];
    return num;
}

/* Returns the scatter to a capture, or NULL. *is_only: there is one. */
static const fa_flex_instruction *scatter_to(const fa_flex *flex, int capture, bool *is_only) {
    const fa_flex_program *p = flex->derivative->program;
    const fa_flex_instruction *found = NULL;
    *is_only = true;
    if (!flex->gradients[capture] || !flex->derivative->captures[capture].data) return NULL;
    for (int32_t i = 0; i < p->num_instructions; i++) {
        const fa_flex_instruction *x = &p->instructions[i];
        if (x->op != FA_FLEX_scatter || x->source != capture) continue;
        *is_only = !found;
        found = x;
    }
    return found;
}

/* Which of b, h, q_idx and kv_idx are an index of a scatter, and always inside the capture, or have one value only. */
typedef struct {
    bool b, h, q, kv;
} own_indices;

static own_indices indices_of(const fa_problem *p, const fa_flex_instruction *scatter) {
    const fa_flex_program *program = p->flex->derivative->program;
    const int64_t *size = p->flex->derivative->captures[scatter->source].size;
    own_indices has = {p->b == 1, p->h == 1, p->len_q == 1, p->len_kv == 1};
    for (int dim = 0; dim + 1 < scatter->num_operands; dim++)
        switch ((fa_flex_op)program->instructions[scatter->operand[dim]].op) {
        case FA_FLEX_b: has.b |= size[dim] >= p->b; break;
        case FA_FLEX_h: has.h |= size[dim] >= p->h; break;
        case FA_FLEX_q_idx: has.q |= size[dim] >= p->len_q && !p->flex->q_offset; break;
        case FA_FLEX_kv_idx: has.kv |= size[dim] >= p->len_kv; break;
        default: break;
        }
    return has;
}

fa_flex_sums fa_flex_sums_of(const fa_problem *p, bool owns) {
    const fa_flex *flex = p->flex;
    fa_flex_sums sums = {.num = 0};
    if (!flex->derivative || !flex->gradients) return sums;
    sums.is_wanted = true, sums.by_head = owns;
    sums.by_key = owns && !p->cu_seqlens_k && !p->seqused_k; /* a range has the same keys in all sequences */
    for (int c = 0; c < flex->derivative->program->num_captures; c++) {
        bool is_only;
        const fa_flex_instruction *scatter = scatter_to(flex, c, &is_only);
        sums.at[c] = -1;
        if (!scatter) continue;
        const own_indices has = is_only ? indices_of(p, scatter) : (own_indices){false, false, false, false};
        const bool is_fp64 = flex->derivative->program->captures[c].dtype == FA_FLEX_OF_F64;
        sums.is_own[c] = owns && !is_fp64 && has.b && has.h && has.q && has.kv;
        if (sums.is_own[c]) continue;
        sums.by_head &= has.h, sums.by_key &= has.kv;
        sums.at[c] = sums.num, sums.num += elements_of(flex->derivative, c);
    }
    return sums;
}

void fa_flex_point_at_sums(const fa_flex *flex, const fa_flex_sums *sums, double *copy,
                           fa_flex_sums_at places[FA_FLEX_MAX_CAPTURES]) {
    for (int c = 0; c < flex->derivative->program->num_captures; c++)
        places[c] = (fa_flex_sums_at){.fp64 = sums->at[c] < 0 || !copy ? NULL : copy + sums->at[c],
                                      .fp32 = sums->is_own[c] ? flex->gradients[c] : NULL};
}

void fa_flex_add_sums(const fa_flex *flex, const fa_flex_sums *sums, const double *copies, int64_t num_copies,
                      int64_t begin, int64_t end) {
    enum { SOME = 64 }; /* elements of each copy that lie together are read together */
    const fa_flex_program *p = flex->derivative->program;
    for (int c = 0; c < p->num_captures; c++) {
        if (sums->at[c] < 0) continue;
        const int64_t first = sums->at[c], last = first + elements_of(flex->derivative, c);
        const int64_t stop = end < last ? end : last;
        for (int64_t at = begin > first ? begin : first; at < stop; at += SOME) {
            const int64_t num = stop - at < SOME ? stop - at : SOME;
            double sum[SOME] = {0};
            for (int64_t copy = 0; copy < num_copies; copy++)
                for (int64_t i = 0; i < num; i++) sum[i] += copies[copy * sums->num + at + i];
            for (int64_t i = 0; i < num; i++)
                if (p->captures[c].dtype == FA_FLEX_OF_F64)
                    ((double *)flex->gradients[c])[at + i - first] += sum[i];
                else
                    ((float *)flex->gradients[c])[at + i - first] += (float)sum[i];
        }
    }
}
