/* What a problem asks of a GPU kernel. */
#include "gpu_problem.h"

#include "kernel_table.h"

bool fa_changes_scores(const fa_problem *p) { return p->softcap > 0 || p->alibi_slopes || !(p->scale >= 1e-37); }

unsigned fa_cuda_features(const fa_problem *p) {
    const bool windowed = p->window_left >= 0 || p->window_right >= 0;
    const bool is_causal = p->window_left < 0 && p->window_right == 0;
    return (is_causal  ? FA_CAUSAL
            : windowed ? FA_LOCAL
                       : 0u) |
           (p->cu_seqlens_q ? FA_VARLEN : 0u) | (fa_changes_scores(p) ? FA_SCORE : 0u) |
           (p->dropout_p > 0 ? FA_DROPOUT : 0u) | fa_dtype_feature(p->dtype);
}

void fa_rule_out(fa_plan *plan, const char *kernel, const char *reason) {
    if (plan->num_ruled_out == FA_MAX_RULED_OUT) return;
    plan->ruled_out[plan->num_ruled_out++] = (fa_ruled_out){kernel, reason};
}

bool fa_suits_tma(const fa_problem *p, const fa_view *t, int64_t num_rows, int64_t num_heads, bool packed) {
    const int64_t elements = 16 / (int64_t)fa_dtype_bytes(p->dtype);
    /* A stride of a dimension of one element is never taken. */
    return (uintptr_t)t->data % 16 == 0 && (num_rows <= 1 || t->stride_row % elements == 0) &&
           (num_heads <= 1 || t->stride_h % elements == 0) && (packed || p->b <= 1 || t->stride_b % elements == 0);
}
