#include "partition.h"

#include <stdlib.h>

static int compare_tasks(const void *x, const void *y) {
    const fa_task *a = x, *b = y;
    if (a->cost != b->cost) return a->cost > b->cost ? -1 : 1;
    if (a->b_idx != b->b_idx) return a->b_idx < b->b_idx ? -1 : 1;
    if (a->head_kv != b->head_kv) return a->head_kv < b->head_kv ? -1 : 1;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

void fa_sort_tasks(fa_task *tasks, int64_t num_tasks) { qsort(tasks, (size_t)num_tasks, sizeof *tasks, compare_tasks); }

static int64_t cost_of_tiles(const fa_problem *p, const fa_sequence *s, int block_q, int64_t begin, int64_t end) {
    int64_t cost = 0;
    for (int64_t tile = begin; tile < end; tile++) {
        int64_t row_first, row_end, first_key, end_key;
        fa_tile_rows(p, s, block_q, tile, tile + 1, &row_first, &row_end);
        fa_rows_keys(p, s, row_first, row_end, &first_key, &end_key);
        cost += end_key - first_key;
    }
    return cost;
}

int64_t fa_fwd_tasks(const fa_problem *p, int block_q, int tiles_per_task, fa_task *tasks) {
    int64_t count = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        int64_t num_tiles = fa_num_tiles(p, &s, block_q), num_tasks = (num_tiles + tiles_per_task - 1) / tiles_per_task;
        for (int64_t t = 0; tasks && t < num_tasks; t++) {
            /* Tasks get equal shares: 9 tiles in tasks of at most 8 become tasks of 5 and 4. */
            int64_t begin = num_tiles * t / num_tasks, end = num_tiles * (t + 1) / num_tasks;
            int64_t cost = cost_of_tiles(p, &s, block_q, begin, end);
            for (int64_t head_kv = 0; head_kv < p->h_kv; head_kv++)
                tasks[count + head_kv * num_tasks + t] = (fa_task){
                    .cost = cost, .begin = begin, .end = end, .b_idx = (int32_t)b_idx, .head_kv = (int32_t)head_kv};
        }
        count += p->h_kv * num_tasks;
    }
    return count;
}
