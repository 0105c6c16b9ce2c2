/* Sizes of the tiled backward, and its tasks. The ranges of keys follow from the shapes alone, never from the threads.
 * dQ is a sum over ranges, and its bits must not depend on the threads. */
#include "cpu_planners.h"

#include "cpu/dispatch.h"
#include "cpu/bwd_layout.h"

/* Tiles that share a packed block of keys. More tiles would cost less packing and more cache. */
static const int64_t most_tiles = 8;

static int64_t overlap(int64_t begin, int64_t end, int64_t first, int64_t last) {
    int64_t low = begin > first ? begin : first, high = end < last ? end : last;
    return high > low ? high - low : 0;
}

int64_t fa_bwd_tasks(const fa_problem *p, int block_q, int block_kv, int ranges, int shares, fa_task *tasks) {
    if (!tasks) return p->b * p->h_kv * shares;
    int64_t count = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        if (fa_decodes(p, &s)) continue;
        int64_t num_tiles = fa_num_tiles(p, &s, block_q);
        for (int share = 0; share < shares; share++) {
            const int64_t first_range = ranges * share / shares, end_range = ranges * (share + 1) / shares;
            int64_t begin, end, cost = 0;
            fa_bwd_ranges(&s, block_kv, ranges, first_range, end_range, &begin, &end);
            for (int64_t tile = 0; tile < num_tiles; tile++) {
                int64_t row_first, row_end, first_key, end_key;
                fa_tile_rows(p, &s, block_q, tile, tile + 1, &row_first, &row_end);
                fa_rows_keys(p, &s, row_first, row_end, &first_key, &end_key);
                cost += overlap(begin, end, first_key, end_key);
            }
            for (int64_t head_kv = 0; head_kv < p->h_kv; head_kv++)
                tasks[count++] = (fa_task){.cost = cost,
                                           .begin = first_range,
                                           .end = end_range,
                                           .b_idx = (int32_t)b_idx,
                                           .head_kv = (int32_t)head_kv};
        }
    }
    return count;
}

/* Chooses enough ranges to occupy all threads when there are few heads. Each range costs a slab of dQ. A range that is
 * a task of its own also packs Q once more. */
static int choose_ranges(const fa_problem *p) {
    const int64_t wanted_tasks = 64, most_ranges = FA_MAX_RANGES, least_keys = 512;
    int64_t heads = p->b * p->h_kv > 0 ? p->b * p->h_kv : 1, ranges = (wanted_tasks + heads - 1) / heads;
    if (ranges > p->len_kv / least_keys) ranges = p->len_kv / least_keys;
    if (ranges > most_ranges) ranges = most_ranges;
    return ranges < 1 ? 1 : (int)ranges;
}

void fa_cpu_plan_bwd(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const int word_elems = fa_isa_is_for_bf16(plan->cpu.isa) ? 2 : 1;
    const fa_cpu_kernels *kernels = fa_cpu_kernels_of(plan->cpu.isa, p->dtype);
    int block_q = kernels->block_q_bwd ? kernels->block_q_bwd : kernels->block_q;
    /* 49 rows of a window join a tile of 48. With flex all sequences are equally long. */
    const int few_rows = 16;
    if (p->flex && p->len_q > block_q && p->len_q <= block_q + few_rows && plan->cpu.isa != FA_ISA_AMX)
        block_q += few_rows;
    /* K, V, K^T, dK, dV of a block stay in the second-level cache. */
    const bool has_small_blocks = p->flex && p->flex->block_q > 0 && p->flex->block_kv <= 64;
    int block_kv = p->d > 128 || p->d_v > 128 || has_small_blocks ? 64 : 128;
    /* A sequence of one block has the same bits whatever the block's size. With AMX, rows of P and dS lie behind 32
     * keys of scores, so the smallest block has 64 keys. */
    const int least_kv = plan->cpu.isa == FA_ISA_AMX ? 64 : 32;
    while (block_kv > least_kv && p->len_kv <= block_kv / 2) block_kv /= 2;
    const int ranges = choose_ranges(p);
    const fa_sequence longest = {.len_q = p->len_q};
    int64_t tiles = fa_num_tiles(p, &longest, block_q);
    if (tiles > most_tiles) tiles = most_tiles;
    if (tiles < 1) tiles = 1;
    /* Tiles multiply faster than the third-level cache can be read. So the operands of a pass take at most half of the
     * second-level cache. */
    const fa_bwd_layout one = fa_bwd_layout_of(p, word_elems, block_q, block_kv, 1, ranges, ranges);
    const int64_t tile_bytes = (3 * one.tile_floats + 2 * one.v_tile_floats) * 4;
    while (plan->cpu.isa == FA_ISA_AMX && tiles > 1 && tiles * tile_bytes > (int64_t)machine->l2_bytes / 2) tiles--;

    double flops = (double)(p->h * (6 * p->d + 4 * p->d_v)) * (double)p->total_q * (double)p->len_kv;
    int threads = flops < FA_INLINE_FLOPS || machine->threads < 1 ? 1 : machine->threads;
    const int64_t most_tasks = p->b * p->h_kv * ranges;
    if (threads > most_tasks) threads = most_tasks > 0 ? (int)most_tasks : 1;
    const int shares = fa_bwd_shares(p, ranges, threads);
    const int64_t num_tasks = fa_bwd_tasks(p, block_q, block_kv, ranges, shares, NULL);

    fa_bwd_layout layout = fa_bwd_layout_of(p, word_elems, block_q, block_kv, (int)tiles, ranges, shares);
    plan->block_q = block_q;
    plan->block_kv = block_kv;
    plan->cpu.tiles_per_task = (int)tiles;
    plan->cpu.threads = threads;
    plan->num_splits = ranges;
    plan->workspace_bytes = fa_tasks_bytes(num_tasks) + (size_t)threads * layout.scratch_bytes + layout.slabs_bytes +
                            fa_flex_copies_bytes(p, num_tasks) + fa_flex_kinds_bytes(p);
}
