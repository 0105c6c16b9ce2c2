/* Launches cuda/align.cu. */
#include "align.h"

#include "cuda/align_params.h"
#include "division.h"
#include "launch.h"
#include "plan/gpu_align.h"
#include "plan/gpu_problem.h"

enum { ELEMENT_BYTES = 2 };

static int unit_bytes(const fa_aligned_tensor *t) {
    const uint64_t offsets =
        16 | (uint64_t)(t->columns * ELEMENT_BYTES) | fa_offsets_of(&t->own, ELEMENT_BYTES, t->b, t->rows, t->heads);
    return (int)(offsets & -offsets);
}

/* Does each row lie as far behind the row before it as one head behind another? */
static bool is_even(const fa_aligned_tensor *t) {
    const int64_t of_row = t->heads * t->own.stride_h;
    return (t->rows == 1 || t->own.stride_row == of_row) && (t->b == 1 || t->own.stride_b == t->rows * of_row);
}

static fa_align_tensor parameters_of(const fa_aligned_tensor *t) {
    const int bytes = unit_bytes(t), num_rows = (int)(t->b * t->rows * t->heads);
    const int pieces = (int)t->copied_columns * ELEMENT_BYTES / 16;
    const bool even = is_even(t);
    const unsigned rows = even ? 1 : (unsigned)t->rows, h = even ? (unsigned)num_rows : (unsigned)t->heads;
    return (fa_align_tensor){
        .own = {t->own.data, t->own.stride_b, t->own.stride_row, t->own.stride_h},
        .copy = t->copy.data,
        .num_rows = num_rows,
        .rows = (int)rows,
        .h = (int)h,
        .rows_of_cta = FA_ALIGN_THREADS * FA_ALIGN_PIECES / pieces,
        .unit_bytes = bytes,
        .units = (int)t->columns * ELEMENT_BYTES / bytes,
        .pieces = pieces,
        .by_pieces = fa_division_by((unsigned)pieces),
        .by_rows = fa_division_by(rows),
        .by_h = fa_division_by(h),
    };
}

typedef struct {
    fa_aligned_tensor all[FA_MAX_ALIGNED];
    int num;
} tensors;

/* Copies inputs and outputs, or the outputs back. */
static fa_status copy(const fa_cuda_call *call, const tensors *t, bool of_outputs, bool is_back, fa_error *err) {
    fa_align_params a = {.is_back = is_back};
    unsigned num = 0, most_ctas = 0;
    for (int i = 0; i < t->num; i++) {
        if (t->all[i].is_output ? !of_outputs : is_back) continue;
        a.tensors[num] = parameters_of(&t->all[i]);
        const unsigned rows = (unsigned)a.tensors[num].num_rows, of_cta = (unsigned)a.tensors[num].rows_of_cta;
        const unsigned ctas = (rows + of_cta - 1) / of_cta;
        most_ctas = ctas > most_ctas ? ctas : most_ctas;
        num++;
    }
    const fa_variant variant = {FA_ALIGN, 0, 0, call->gpu->capability, 0, NULL};
    return fa_cuda_launch(call, variant, (fa_launch){most_ctas, num, 1, .threads = FA_ALIGN_THREADS}, &a, err);
}

fa_status fa_cuda_run_aligned(const fa_cuda_call *call, fa_cuda_launcher *launcher, fa_error *err) {
    const fa_problem *p = call->problem;
    const unsigned wanted = call->plan->gpu.aligns;
    if (!wanted) return launcher(call, err);
    char *copies = (char *)call->workspace + call->plan->workspace_bytes - fa_align_bytes(p, wanted);
    tensors t;
    t.num = fa_align(p, wanted, copies, t.all);
    const fa_problem aligned = fa_aligned(p, t.all, t.num);
    fa_cuda_call of_copies = *call;
    of_copies.problem = &aligned;
    /* Rows that no sequence has, or uses, stay as they are. */
    fa_status status = copy(call, &t, p->cu_seqlens_q || p->seqused_q, false, err);
    if (status == FA_OK) status = launcher(&of_copies, err);
    return status == FA_OK ? copy(call, &t, true, true, err) : status;
}
