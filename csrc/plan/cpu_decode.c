/* Sizes of the decode kernel. The thread count decides which worker computes a split, but never changes the splits. */
#include "cpu_planners.h"

#include "cpu/dispatch.h"
#include "cpu/decode_plan.h"

/* Below this number of bytes a second thread costs more than it saves: the reads take 15 us. */
static const double inline_bytes = 512 * 1024;

void fa_cpu_plan_decode(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    int64_t most_splits = 1, keys = 0, num_partials = fa_decode_num_partials(p);
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        fa_decode_splits splits = fa_decode_splits_of(p, &s);
        keys += splits.end - splits.first;
        if (splits.num > most_splits) most_splits = splits.num;
    }
    double bytes = (double)keys * (double)(p->h_kv * (p->d + p->d_v)) * (double)fa_dtype_bytes(p->dtype);
    int threads = bytes < inline_bytes || machine->threads < 1 ? 1 : machine->threads;
    int64_t heads = fa_decode_heads_per_task(p, num_partials, threads);
    int64_t num_tasks = num_partials * ((p->h_kv + heads - 1) / heads);
    if (threads > num_tasks) threads = num_tasks > 0 ? (int)num_tasks : 1;
    plan->block_q = (int)fa_decode_group_rows(p);
    plan->block_kv = FA_DECODE_BLOCK;
    plan->cpu.threads = plan->cpu.decode_threads = threads;
    plan->num_splits = (int)most_splits;
    plan->workspace_bytes = fa_rotated_q_bytes(p) + fa_decode_workspace_bytes(p);
}
