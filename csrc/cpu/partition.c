#include "partition.h"

#include <stdlib.h>

/* Heaviest first; equal ones in the order of memory. */
static int compare_tasks(const void *x, const void *y) {
    const fa_task *a = x, *b = y;
    if (a->cost != b->cost) return a->cost > b->cost ? -1 : 1;
    if (a->b_idx != b->b_idx) return a->b_idx < b->b_idx ? -1 : 1;
    if (a->head_kv != b->head_kv) return a->head_kv < b->head_kv ? -1 : 1;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* Restores the heap, least load on top, after the top's load has grown. */
static void sift_down(fa_worker *heap, int n) {
    fa_worker top = heap[0];
    int at = 0;
    for (int child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && heap[child + 1].load < heap[child].load) child++;
        if (heap[child].load >= top.load) break;
        heap[at] = heap[child];
    }
    heap[at] = top;
}

void fa_assign_tasks(fa_task *tasks, int64_t num_tasks, fa_worker *workers, int num_workers) {
    for (int w = 0; w < num_workers; w++) workers[w] = (fa_worker){.first = -1, .last = -1};
    if (num_workers > 1) qsort(tasks, (size_t)num_tasks, sizeof *tasks, compare_tasks);
    for (int64_t t = 0; t < num_tasks; t++) {
        fa_worker *w = &workers[0];
        tasks[t].next = -1;
        if (w->last < 0)
            w->first = t;
        else
            tasks[w->last].next = t;
        w->last = t;
        w->load += tasks[t].cost + 1; /* + 1: tasks without keys still write their rows */
        sift_down(workers, num_workers);
    }
}

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
            /* Equal shares: 9 tiles in tasks of at most 8 are 5 and 4. */
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
