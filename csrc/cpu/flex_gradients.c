#include "flex_gradients.h"

static int64_t elements_of(const fa_flex_bound *bound, int capture) {
    int64_t num = 1;
    for (int i = 0; i < bound->program->captures[capture].rank; i++) num *= bound->captures[capture].size[i];
    return num;
}

static bool is_wanted(const fa_flex *flex, int capture) {
    const fa_flex_program *p = flex->derivative->program;
    if (!flex->gradients[capture] || !flex->derivative->captures[capture].data) return false;
    for (int32_t i = 0; i < p->num_instructions; i++)
        if (p->instructions[i].op == FA_FLEX_scatter && p->instructions[i].source == capture) return true;
    return false;
}

fa_flex_sums fa_flex_sums_of(const fa_flex *flex) {
    fa_flex_sums sums = {.num = 0};
    if (!flex->derivative || !flex->gradients) return sums;
    for (int c = 0; c < flex->derivative->program->num_captures; c++) {
        sums.at[c] = is_wanted(flex, c) ? sums.num : -1;
        if (sums.at[c] >= 0) sums.num += elements_of(flex->derivative, c);
    }
    return sums;
}

void fa_flex_point_at_sums(const fa_flex *flex, const fa_flex_sums *sums, double *copy,
                           double *addresses[FA_FLEX_MAX_CAPTURES]) {
    for (int c = 0; c < flex->derivative->program->num_captures; c++)
        addresses[c] = sums->at[c] < 0 ? NULL : copy + sums->at[c];
}

void fa_flex_add_sums(const fa_flex *flex, const fa_flex_sums *sums, const double *copies, int64_t num_copies,
                      int64_t begin, int64_t end) {
    const fa_flex_program *p = flex->derivative->program;
    for (int c = 0; c < p->num_captures; c++) {
        if (sums->at[c] < 0) continue;
        const int64_t first = sums->at[c], last = first + elements_of(flex->derivative, c);
        for (int64_t i = begin > first ? begin : first; i < end && i < last; i++) {
            double sum = 0;
            for (int64_t copy = 0; copy < num_copies; copy++) sum += copies[copy * sums->num + i];
            if (p->captures[c].dtype == FA_FLEX_OF_F64)
                ((double *)flex->gradients[c])[i - first] += sum;
            else
                ((float *)flex->gradients[c])[i - first] += (float)sum;
        }
    }
}
