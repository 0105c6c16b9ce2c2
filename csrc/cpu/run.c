/* Executes a plan on the CPU. */
#include "run.h"

#include <math.h>
#include <string.h>

#include "dispatch.h"
#include "kvcache.h"
#include "reference.h"
#include "sequence.h"

bool fa_cpu_run(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool) {
    const fa_cpu_kernels *kernels = fa_cpu_kernels_of(plan->cpu.isa, problem->dtype);
    fa_problem p = *problem;
    if (p.pass == FA_BWD) {
        if (plan->cpu.num_decodes > 0 && !kernels->bwd_rows(&p, plan, workspace, pool)) return false;
        return plan->cpu.num_decodes == p.b || kernels->bwd(&p, plan, workspace, pool);
    }
    if (p.k_new.data || p.rotary_cos) {
        if (!fa_cpu_append(problem, workspace, pool)) return false;
        if (p.rotary_cos) /* the plan put the rotated queries at the start of the workspace */
            p.q = (fa_view){workspace, p.cu_seqlens_q ? 0 : p.len_q * p.h * p.d, p.h * p.d, p.d};
    }
    if (p.h == 0) return true; /* without heads there is no group size to divide by */
    char *scratch = (char *)workspace + fa_rotated_q_bytes(problem);
    if (p.s_dmask && !fa_reference_s_dmask(&p, pool)) return false; /* out may lie where q does */
    if (plan->cpu.num_decodes > 0 && !kernels->decode(&p, plan, scratch, pool)) return false;
    if (plan->cpu.num_decodes < p.b && !kernels->fwd(&p, plan, scratch, pool)) return false;
    return true;
}

/* Rows [first, end) of an output become zero. The output is packed, or has one sequence. */
static void zero_rows(const fa_problem *p, const fa_view *t, int64_t first, int64_t end, int64_t num_heads,
                      int64_t columns) {
    const size_t bytes = fa_dtype_bytes(fa_output_dtype(p->dtype));
    if (!t->data) return;
    for (int64_t row = first; row < end; row++)
        for (int64_t head = 0; head < num_heads; head++)
            memset((char *)t->data + (size_t)(row * t->stride_row + head * t->stride_h) * bytes, 0,
                   (size_t)columns * bytes);
}

/* Rows after the last sequence belong to no sequence, and the kernels do not write them. Their lse becomes -inf. Their
 * outputs become zero if the extension allocated the output. With zero_tensors the caller's outputs become zero,
 * too. */
static void fill_unowned_rows(const fa_problem *p, bool zero_tensors) {
    const bool backward = p->pass == FA_BWD;
    if (p->cu_seqlens_q) {
        const int64_t end = p->cu_seqlens_q[p->b];
        if (zero_tensors) zero_rows(p, backward ? &p->dq : &p->o, end, p->total_q, p->h, backward ? p->d : p->d_v);
        for (int64_t head = 0; head < p->h && !backward; head++)
            for (int64_t row = end; row < p->total_q; row++) {
                p->lse.data[head * p->lse.stride_h + row] = -INFINITY;
                if (p->sink_probability.data) p->sink_probability.data[head * p->sink_probability.stride_h + row] = 0;
            }
    }
    if (p->cu_seqlens_k && backward && zero_tensors) {
        const int64_t end = p->cu_seqlens_k[p->b];
        zero_rows(p, &p->dk, end, p->total_kv, p->h_kv, p->d);
        zero_rows(p, &p->dv, end, p->total_kv, p->h_kv, p->d_v);
    }
}

/* dK and dV are zero if q has no heads, because no query reads the keys. */
static void zero_key_gradients(const fa_problem *p) {
    fa_view gradients[] = {p->dk, p->dv};
    const bool packed = p->cu_seqlens_k != NULL;
    for (int i = 0; i < 2; i++)
        for (int64_t b_idx = 0; b_idx < (packed ? 1 : p->b); b_idx++) {
            zero_rows(p, &gradients[i], 0, packed ? p->cu_seqlens_k[p->b] : p->len_kv, p->h_kv, i ? p->d_v : p->d);
            if (gradients[i].data)
                gradients[i].data =
                    (char *)gradients[i].data + gradients[i].stride_b * (int64_t)fa_dtype_bytes(p->dtype);
        }
}

fa_status fa_cpu_run_call(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                          const fa_pool *pool, fa_error *err) {
    if (fa_is_idle(problem)) return FA_OK;
    fill_unowned_rows(problem, zero_tensors);
    if (problem->pass == FA_BWD && problem->h == 0)
        zero_key_gradients(problem);
    else if (!fa_cpu_run(problem, plan, workspace, pool))
        return fa_fail(err, FA_ENOMEM,
                       "torch could not start the threads of the call, or there is no memory for its mods");
    return FA_OK;
}
