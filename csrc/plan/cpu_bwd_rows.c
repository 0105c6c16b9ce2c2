/* Sizes of the backward of few query rows. The thread count decides how many heads a task has, but never the shares. */
#include "cpu_planners.h"

#include "cpu/dispatch.h"
#include "cpu/bwd_rows_plan.h"

/* Below this number of bytes a second thread costs more than it saves, as in decode. */
static const double inline_bytes = 512 * 1024;

void fa_cpu_plan_bwd_rows(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const int word_elems = fa_isa_is_for_bf16(plan->cpu.isa) ? 2 : 1;
    int64_t most_shares = 1, most_rows = 1, tokens = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        const fa_sequence s = fa_sequence_at(p, b_idx);
        if (!fa_decodes(p, &s)) continue;
        const int64_t rows = fa_bwd_rows_of(p, &s, word_elems), num_shares = fa_bwd_rows_num_shares(&s);
        if (num_shares > most_shares) most_shares = num_shares;
        if (rows > most_rows) most_rows = rows;
        tokens += 2 * s.len_kv * p->h_kv + 4 * s.len_q * p->h;
    }
    const double bytes = (double)tokens * (double)(p->d + p->d_v) * (double)fa_dtype_bytes(p->dtype);
    int threads = bytes < inline_bytes || machine->threads < 1 ? 1 : machine->threads;
    const int64_t num_tasks = fa_bwd_rows_count(p, word_elems, threads, NULL, NULL).num_tasks;
    if (threads > num_tasks) threads = num_tasks > 0 ? (int)num_tasks : 1;
    const fa_bwd_rows_sizes sizes = fa_bwd_rows_count(p, word_elems, threads, NULL, NULL);
    plan->block_q = (int)most_rows;
    plan->block_kv = FA_DECODE_BLOCK;
    plan->cpu.threads = plan->cpu.decode_threads = threads;
    plan->num_splits = (int)most_shares;
    plan->workspace_bytes = fa_bwd_rows_scratch_at(p) + (size_t)threads * sizeof(fa_bwd_rows_scratch) +
                            (size_t)sizes.partial_floats * sizeof(float) + fa_bwd_rows_copies_bytes(p, sizes.num_tasks);
}
