/* Sizes of the tiled forward. They follow from the problem, the cache and the number of threads. Only block_kv can
 * change a bit of the result. Each sequence's own length decides about its block_kv (cpu/fwd_layout.h). */
#include "cpu_planners.h"

#include "cpu/dispatch.h"
#include "cpu/fwd_layout.h"

static double flops_of(const fa_problem *p) {
    double pairs = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        if (fa_decodes(p, &s)) continue;
        double keys = (double)s.len_kv, window = (double)p->window_left + (double)p->window_right + 1;
        if (p->window_left >= 0 && p->window_right >= 0 && window < keys) keys = window;
        if (p->attention_chunk > 0 && (double)p->attention_chunk < keys) keys = (double)p->attention_chunk;
        pairs += (double)s.len_q * keys;
    }
    return 2 * pairs * (double)(p->h * (p->d + (p->qv.data ? 2 : 1) * p->d_v));
}

static int64_t most_tiles(const fa_problem *p, int block_q) {
    int64_t most = 1;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        int64_t num_tiles = fa_num_tiles(p, &s, block_q);
        if (num_tiles > most) most = num_tiles;
    }
    return most;
}

/* The workspace has room for the largest block of keys. */
static int largest_block(const fa_problem *p) {
    int largest = fa_fwd_block_kv(p, fa_flex_of(p) ? p->len_kv : 0);
    for (int64_t b_idx = 0; b_idx < p->b && !fa_flex_of(p); b_idx++) {
        const int block_kv = fa_fwd_block_kv(p, fa_sequence_at(p, b_idx).len_kv);
        if (block_kv > largest) largest = block_kv;
    }
    return largest;
}

void fa_cpu_plan_fwd(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const int word_elems = fa_isa_is_for_bf16(plan->cpu.isa) ? 2 : 1;
    const fa_cpu_kernels *kernels = fa_cpu_kernels_of(plan->cpu.isa, p->dtype);
    const int block_q = kernels->block_q, buffers = kernels->score_buffers;
    const int block_kv = largest_block(p);

    /* As many tiles share a packed block as the second-level cache holds. */
    int64_t tiles = 16, most = most_tiles(p, block_q);
    if (plan->cpu.isa == FA_ISA_AMX) tiles *= 2; /* a tile on AMX has half as many rows */
    if (tiles > most) tiles = most;
    while (tiles > 1 && fa_fwd_layout_of(p, word_elems, block_q, block_kv, (int)tiles, buffers).scratch_bytes >
                            machine->l2_bytes / 4 * 3)
        tiles--;
    const int64_t num_shares = (most + tiles - 1) / tiles;
    tiles = (most + num_shares - 1) / num_shares; /* all tasks of a head get about as many tiles */

    int threads = flops_of(p) < FA_INLINE_FLOPS || machine->threads < 1 ? 1 : machine->threads;
    while (threads > 1 && tiles > 1 && fa_fwd_tasks(p, block_q, (int)tiles, NULL) < 2 * threads)
        tiles = (tiles + 1) / 2;
    int64_t num_tasks = fa_fwd_tasks(p, block_q, (int)tiles, NULL);
    if (threads > num_tasks) threads = num_tasks > 0 ? (int)num_tasks : 1;

    fa_fwd_layout layout = fa_fwd_layout_of(p, word_elems, block_q, block_kv, (int)tiles, buffers);
    plan->block_q = block_q;
    plan->block_kv = block_kv;
    plan->cpu.tiles_per_task = (int)tiles;
    plan->cpu.threads = threads;
    plan->num_splits = 1;
    plan->workspace_bytes = fa_rotated_q_bytes(p) + fa_tasks_bytes(num_tasks) + (size_t)threads * layout.scratch_bytes +
                            fa_flex_kinds_bytes(p);
}
