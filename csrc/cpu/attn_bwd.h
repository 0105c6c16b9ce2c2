/* Attention backward on vectors. P is computed again from lse:
 *
 *   P = exp(scale Q K^T + bias - lse)      delta = rowsum(dO * O)      dS = P * (dO V^T - delta)
 *   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K
 *
 *   q, dq [b, len_q, h, d]      k, dk [b, len_kv, h_kv, d]      lse, softmax_d [b, h, len_q] float
 *   o, dout [b, len_q, h, d_v]  v, dv [b, len_kv, h_kv, d_v]
 *
 * Each lane holds one query, as in the forward (attn_fwd.h). product.h computes all five products.
 *
 *   softmax_d = delta, for every row; if a task has one tile, the task itself finds it
 *   a task is one range of keys, or all ranges, of one (sequence, key/value head), with dK = dV = 0 [keys][d] in fp32:
 *     for each pass of a few tiles of rows and heads that see the task's keys:
 *       pack Q^T, dO^T [d][lanes] and Q, dO [lanes][d];  dQ^T [d][lanes] = 0, for each range
 *       for each block of keys: pack K, V [keys][d], K^T [d][keys]
 *         for each tile: S^T = K Q^T · dP^T = V dO^T · P, dS · dV += P^T dO · dK += dS^T Q · dQ^T += K^T dS^T
 *       task of all ranges: dQ = sum of the ranges' dQ, in order;  task of one range: dQ^T goes to the range's slab
 *     write dK, dV
 *   slabs: dQ = sum of the slabs, in the order of the ranges
 *
 * dK and dV of a key belong to one task and sum over all heads of the group. Ranges follow from the shapes, so the bits
 * do not depend on the threads. A row or key without a visible pair is packed as zeros. NaN reaches only the rows and
 * keys that see it (nonfinite.h). Specification: reference.c. Measurements: README.md. */
#ifndef FA_CPU_ATTN_BWD_H
#define FA_CPU_ATTN_BWD_H

#include "bwd_step.h"

/* ---- delta ---- */

/* Computes delta. Every worker takes its share of the rows of every head, and another share of the next head: a
 * sequence of one row has one share that is not empty. */
static void bwd_delta(int64_t begin, int64_t worker_end, void *ctx) {
    const bwd_job *job = ctx;
    const fa_problem *p = job->p;
    vec_mode mode = vec_enter();
    for (int64_t w = begin; w < worker_end; w++) {
        for (int64_t task = 0; task < p->b * p->h; task++) {
            fa_sequence s = fa_sequence_at(p, task / p->h);
            int64_t head = task % p->h, first, end;
            if (fa_decodes(p, &s)) continue;
            const int64_t share = (w + task) % job->threads;
            const int64_t rows_end = s.len_q * (share + 1) / job->threads, ahead = 8;
            for (int64_t row = s.len_q * share / job->threads; row < rows_end; row++) {
                const int64_t later = row + ahead < rows_end ? row + ahead : row;
                const char *soon[] = {bwd_query_row(p, &s, &p->dout, later, head),
                                      bwd_query_row(p, &s, &p->o, later, head)};
                fetch_now(soon, 2, p->d_v * DTYPE_BYTES(p->dtype));
                *fa_row_stat(&p->softmax_d, &s, row, head) =
                    contributes(p, &s, row, head, &first, &end) ? bwd_delta_of_row(p, &s, row, head) : 0.0f;
            }
        }
    }
    vec_leave(mode);
}

/* ---- write gradients ---- */

static void bwd_write_queries(const fa_problem *p, const fa_sequence *s, const fa_bwd_tile *tile, const float *dq_t) {
    char *rows[FA_MAX_BLOCK_Q_BWD];
    float factor[FA_MAX_BLOCK_Q_BWD];
    for (int lane = 0; lane < tile->lanes; lane++) factor[lane] = (float)p->scale;
    for (int lane = 0; lane < tile->valid_lanes; lane++)
        rows[lane] = bwd_query_row(p, s, &p->dq, tile->row[lane], tile->head[lane]);
    unpack_lanes(rows, tile->valid_lanes, p->d, dq_t, tile->lanes, factor, p->dtype);
}

/* Writes a gradient of d elements, which lie in `columns`. */
static void bwd_write_keys(const bwd_task *t, const fa_view *view, const float *grad, int64_t d, int64_t columns,
                           float factor) {
    const int64_t ahead = 8, row_bytes = d * DTYPE_BYTES(t->p->dtype);
    for (int64_t key = t->keys_begin; key < t->keys_end; key++) {
        const char *soon = key + ahead < t->keys_end ? bwd_key_row(t, view, key + ahead) : NULL;
        fetch_now(&soon, 1, row_bytes);
        unpack_row(bwd_key_row(t, view, key), d, grad + (key - t->keys_begin) * columns, factor, t->p->dtype);
    }
}

/* ---- tasks and workers ---- */

/* The first key of the next block that some tile of the pass sees, or end_key or more. */
static int64_t bwd_next_block(const bwd_task *t, int64_t block, int64_t end_key) {
    const int64_t block_kv = t->job->layout.block_kv;
    for (block += block_kv; fa_flex_of(t->p) && block < end_key; block += block_kv)
        for (int i = 0; i < t->num_tiles; i++)
            if (bwd_sees(t->job, &t->s, &t->tiles[i], block, block + block_kv)) return block;
    return block;
}

/* Flex: adds what the tiles of the pass see of the task's keys to the table. */
static void bwd_find_views(const bwd_task *t) {
    for (int i = 0; i < t->num_tiles; i++) {
        const fa_bwd_tile *tile = &t->tiles[i];
        int64_t key, stop;
        if (bwd_find_keys(t->job, &t->s, tile, t->keys_begin, t->keys_end, &key, &stop))
            fa_flex_see_task(&t->job->seen, t->programs, t->s.b_idx, tile->head[0], tile->row[0],
                             tile->row[0] + tile->valid_lanes, key, stop);
    }
}

/* What a worker needs for its tasks. */
typedef struct {
    fa_flex_programs programs;
    flex_own_views own_views;
    fa_flex_sums_at places[FA_FLEX_MAX_CAPTURES]; /* flex: where gradients of captures are added */
    char *scratch;
} bwd_worker;

/* next: the next task of this worker; NULL: probably the next task of the list. */
static void bwd_run_task(const bwd_job *job, const fa_task *task, const fa_task *next_task, bwd_worker *worker) {
    char *const scratch = worker->scratch;
    const fa_bwd_layout *l = &job->layout;
    const fa_problem *p = job->p;
    bwd_task t = {.job = job,
                  .p = p,
                  .s = fa_sequence_at(p, task->b_idx),
                  .head_kv = task->head_kv,
                  .programs = &worker->programs,
                  .own_views = &worker->own_views,
                  .places = worker->places,
                  .q_t = (float *)(scratch + l->q_t),
                  .dout_t = (float *)(scratch + l->dout_t),
                  .q = (float *)(scratch + l->q),
                  .dout = (float *)(scratch + l->dout),
                  .dq_t = (float *)(scratch + l->dq_t),
                  .dq_range = (float *)(scratch + l->dq_range),
                  .k = (float *)(scratch + l->k),
                  .v = (float *)(scratch + l->v),
                  .k_t = (float *)(scratch + l->k_t),
                  .scores = (float *)(scratch + l->scores),
                  .dprob = (float *)(scratch + l->dprob),
                  .ds_words = (float *)(scratch + l->ds_words),
                  .dk = (float *)(scratch + l->dk),
                  .dv = (float *)(scratch + l->dv),
                  .bytes = (uint8_t *)(scratch + l->bytes),
                  .hidden = (uint8_t *)(scratch + l->hidden),
                  .bias = (float *)(scratch + l->bias),
                  .tiles = (fa_bwd_tile *)(scratch + l->tile),
                  .key_rows = (const char **)(scratch + l->key_rows),
                  .next_rows = (const char **)(scratch + l->key_rows) + 2 * l->block_kv,
                  .pieces = (const char **)(scratch + l->pieces)};
    const int64_t num_tiles = fa_num_tiles(p, &t.s, l->block_q);
    fa_bwd_ranges(&t.s, l->block_kv, l->ranges, task->begin, task->end, &t.keys_begin, &t.keys_end);
    if (t.s.len_q > 0) fa_rows_keys(p, &t.s, 0, t.s.len_q, &t.seen_first, &t.seen_end);
    if (t.keys_end - t.keys_begin > l->block_kv) bwd_start_sums(&t);

    for (; t.first_tile < num_tiles; t.first_tile += l->tiles) {
        t.num_tiles = (int)(num_tiles - t.first_tile < l->tiles ? num_tiles - t.first_tile : l->tiles);
        t.num_open = 0;
        int64_t first_key = INT64_MAX, end_key = 0;
        for (int i = 0; i < t.num_tiles; i++) {
            bwd_prepare_tile(&t, i);
            if (t.tiles[i].first_key < first_key) first_key = t.tiles[i].first_key;
            if (t.tiles[i].end_key > end_key) end_key = t.tiles[i].end_key;
        }
        if (first_key < t.keys_begin) first_key = t.keys_begin;
        if (end_key > t.keys_end) end_key = t.keys_end;
        if (fa_flex_of(p)) bwd_find_views(&t);
        t.block = t.keys_begin + (first_key - t.keys_begin) / l->block_kv * l->block_kv;
        for (bool is_first = true; t.block < end_key; is_first = false) {
            const int64_t next = bwd_next_block(&t, t.block, end_key);
            t.range = fa_bwd_range_of(&t.s, l->block_kv, l->ranges, t.block);
            if (is_first) bwd_list_keys(&t, t.block, t.key_rows);
            if (is_first || !PRODUCT_FETCHES) fetch_now(t.key_rows, 2 * l->block_kv, bwd_longest_row(p));
            bwd_pack_block(&t);
            t.num_next = next < end_key ? 2 * l->block_kv : 0;
            t.num_fetched = 0;
            t.num_steps = 0;
            for (int i = 0; i < t.num_tiles; i++)
                t.num_steps += bwd_sees(job, &t.s, &t.tiles[i], t.block, t.block + l->block_kv);
            if (t.num_next > 0) bwd_list_keys(&t, next, t.next_rows);
            const bool is_last = next >= end_key && t.first_tile + l->tiles >= num_tiles;
            t.next_task = !is_last ? NULL : next_task ? next_task : fa_next_task(job->list);
            for (int i = 0; i < t.num_tiles; i++) bwd_step_tile(&t, i);
            const char **rows = t.key_rows;
            t.key_rows = t.next_rows, t.next_rows = rows;
            t.block = next;
        }
        for (int i = 0; i < t.num_tiles && p->dq.data && l->shares == 1; i++) {
            float *dq_t = t.dq_t + i * l->tile_floats;
            bwd_add_range(&t, i);
            if (t.tiles[i].dq_range < 0) memset(dq_t, 0, (size_t)l->tile_floats * sizeof(float)); /* no visible key */
            bwd_write_queries(p, &t.s, &t.tiles[i], dq_t);
        }
    }
    bwd_start_sums(&t); /* no tile has seen a key */
    if (p->dk.data) bwd_write_keys(&t, &p->dk, t.dk, p->d, l->columns, (float)p->scale);
    if (p->dv.data) bwd_write_keys(&t, &p->dv, t.dv, p->d_v, l->v_columns, job->kept);
}

/* Flex: the chain of a task (flex_gradients.h). */
static int64_t bwd_chain_of(const bwd_job *job, const fa_task *task) {
    const int64_t head = job->sums.by_head ? task->head_kv : 0;
    return job->sums.by_key ? head * job->layout.shares + task->begin : head;
}

static void bwd_clear_copies(int64_t begin, int64_t end, void *ctx) {
    const bwd_job *job = ctx;
    const int64_t num = job->num_copies * job->sums.num;
    for (int64_t w = begin; w < end; w++) {
        const int64_t first = num * w / job->threads, last = num * (w + 1) / job->threads;
        memset(job->copies + first, 0, (size_t)(last - first) * sizeof *job->copies);
    }
}

/* Flex: the next task of a copy behind task `at` of the list, of this chain or, if it is negative, of any. */
static int64_t bwd_next_of_copy(const bwd_job *job, int64_t at, int64_t end, int64_t chain) {
    do at++;
    while (at < end && chain >= 0 && bwd_chain_of(job, &job->list->tasks[at]) != chain);
    return at;
}

/* Flex: runs the chains of all copies that no other worker takes. The chains of a copy do not meet. If there are enough
 * copies, and they are small, one worker runs all chains of a copy side by side, in the order of memory. */
static void bwd_run_copies(bwd_job *job, bwd_worker *worker) {
    enum { COPIES_OF_THREAD = 4, MOST_BYTES = 256 * 1024 };
    const bool is_small = job->sums.num * (int64_t)sizeof(double) <= MOST_BYTES;
    const bool takes_all = is_small && (job->threads == 1 || job->num_copies >= COPIES_OF_THREAD * job->threads);
    const int64_t num = job->list->num_tasks, num_chains = takes_all ? 1 : job->num_chains;
    for (int64_t i;
         (i = atomic_fetch_add_explicit(&job->next_chain, 1, memory_order_relaxed)) < job->num_copies * num_chains;) {
        const int64_t idx = i / num_chains, chain = takes_all ? -1 : i % num_chains;
        const int64_t begin = num * idx / job->num_copies, end = num * (idx + 1) / job->num_copies;
        fa_flex_point_at_sums(fa_flex_of(job->p), &job->sums, job->copies + idx * job->sums.num, worker->places);
        for (int64_t at = bwd_next_of_copy(job, begin - 1, end, chain), next; at < end; at = next) {
            next = bwd_next_of_copy(job, at, end, chain);
            const fa_task *tasks = job->list->tasks;
            bwd_run_task(job, &tasks[at], &tasks[next < end ? next : at], worker);
        }
    }
}

static void bwd_add_copies(int64_t begin, int64_t end, void *ctx) {
    const bwd_job *job = ctx;
    for (int64_t w = begin; w < end; w++)
        fa_flex_add_sums(fa_flex_of(job->p), &job->sums, job->copies, job->num_copies, job->sums.num * w / job->threads,
                         job->sums.num * (w + 1) / job->threads);
}

static void bwd_run_workers(int64_t begin, int64_t end, void *ctx) {
    bwd_job *job = ctx;
    bwd_worker worker;
    worker.own_views.next = 0;
    if (!fa_flex_make_programs(job->p, job->isa, false, &worker.programs)) {
        atomic_store(&job->failed, true);
        return;
    }
    if (fa_flex_of(job->p) && job->sums.is_wanted) {
        fa_flex_point_at_sums(fa_flex_of(job->p), &job->sums, NULL, worker.places);
        fa_flex_scatter_to(worker.programs.derivative, worker.places);
    }
    vec_mode mode = vec_enter();
    product_enter();
    for (int64_t w = begin; w < end; w++) {
        worker.scratch = job->scratch + (size_t)w * job->layout.scratch_bytes;
        if (job->num_copies > 0) bwd_run_copies(job, &worker);
        for (const fa_task *task; job->num_copies == 0 && (task = fa_take_task(job->list));)
            bwd_run_task(job, task, NULL, &worker);
    }
    product_leave();
    vec_leave(mode);
    fa_flex_free_programs(&worker.programs);
}

/* dQ of one tile. The slabs of the ranges that the tile sees are summed in their order, into the first of these
 * slabs. */
static void bwd_sum_tile(const bwd_job *job, const fa_sequence *s, int64_t head_kv, int64_t idx, const float *zeros) {
    const fa_bwd_layout *l = &job->layout;
    fa_bwd_tile tile;
    float *slabs[FA_MAX_RANGES];
    int num_slabs = 0;
    bwd_place_lanes(job->p, s, head_kv, l->block_q, idx, &tile);
    bwd_measure_lanes(job->p, s, false, &tile);
    for (int r = 0; r < l->ranges; r++) {
        int64_t begin, end;
        fa_bwd_ranges(s, l->block_kv, l->ranges, r, r + 1, &begin, &end);
        if (bwd_sees(job, s, &tile, begin, end)) slabs[num_slabs++] = bwd_slab(job, s, r, head_kv, idx);
    }
    for (int64_t i = 0; num_slabs > 1 && i < l->columns * tile.lanes; i += LANES) {
        vec sum = vec_load(slabs[0] + i);
        for (int r = 1; r < num_slabs; r++) sum = vec_add(sum, vec_load(slabs[r] + i));
        vec_store(slabs[0] + i, sum);
    }
    bwd_write_queries(job->p, s, &tile, num_slabs > 0 ? slabs[0] : zeros);
}

static void bwd_sum_slabs(int64_t begin, int64_t end, void *ctx) {
    const bwd_job *job = ctx;
    const fa_problem *p = job->p;
    vec_mode mode = vec_enter();
    for (int64_t w = begin; w < end; w++) {
        float *zeros = (float *)(job->scratch + (size_t)w * job->layout.scratch_bytes + job->layout.q_t);
        int64_t tile_count = 0;
        memset(zeros, 0, (size_t)job->layout.tile_floats * sizeof(float));
        for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
            fa_sequence s = fa_sequence_at(p, b_idx);
            int64_t num_tiles = fa_num_tiles(p, &s, job->layout.block_q);
            for (int64_t i = 0; i < p->h_kv * num_tiles; i++)
                if (tile_count++ % job->threads == w) bwd_sum_tile(job, &s, i / num_tiles, i % num_tiles, zeros);
        }
    }
    vec_leave(mode);
}

/* Fills the map of the blocks, finds the sums of gradients, makes the table of views, and sets the tasks' costs to the
 * keys of blocks that their tiles see. */
static void bwd_start_flex(bwd_job *job, fa_task *tasks, int64_t num_tasks) {
    const fa_problem *p = job->p;
    const fa_bwd_layout *l = &job->layout;
    const int64_t g = p->h / p->h_kv;
    job->sums = fa_flex_sums_of(p, true);
    job->adds_bias = fa_flex_bias_of(p, job->isa, &job->bias);
    job->copies = (double *)((char *)job->slabs + l->slabs_bytes);
    job->num_chains = fa_flex_num_chains(p, &job->sums, l->shares);
    job->num_copies = job->sums.num > 0 ? fa_flex_num_copies(&job->sums, num_tasks, job->num_chains) : 0;
    fa_flex_block_map map = fa_flex_block_map_of(p);
    map.kinds = (uint8_t *)job->copies + fa_flex_copies_bytes(p, num_tasks);
    fa_flex_fill_block_map(&map, fa_flex_of(p));
    for (int64_t i = 0; i < num_tasks && job->threads > 1; i++) {
        fa_task *task = &tasks[i];
        const fa_sequence s = fa_sequence_at(p, task->b_idx);
        int64_t key, key_end;
        fa_bwd_ranges(&s, l->block_kv, l->ranges, task->begin, task->end, &key, &key_end);
        task->cost = 0;
        for (int64_t tile = 0; tile < fa_num_tiles(p, &s, l->block_q); tile++) {
            const uint8_t *kinds = fa_flex_kinds_of(&map, task->b_idx, task->head_kv * g + tile % g);
            const int64_t first = fa_flex_mask_row(&map, task->b_idx, 0);
            int64_t row, row_end;
            fa_tile_rows(p, &s, l->block_q, tile, tile + 1, &row, &row_end);
            task->cost += fa_flex_count_keys(&map, kinds, first + row, first + row_end, key, key_end);
        }
    }
    job->seen = fa_flex_new_seen(p, &map, l->block_q, l->block_kv, LANES);
}

static bool attn_bwd(const fa_problem *p, const fa_plan *plan, void *workspace, const fa_pool *pool) {
    fa_task *tasks = workspace;
    const int shares = fa_bwd_shares(p, plan->num_splits, plan->cpu.threads);
    int64_t num_tasks = fa_bwd_tasks(p, plan->block_q, plan->block_kv, plan->num_splits, shares, tasks);
    fa_task_list list = {tasks, num_tasks, 0};

    bwd_job job = {.p = p,
                   .layout = fa_bwd_layout_of(p, WORD_ELEMS, plan->block_q, plan->block_kv, plan->cpu.tiles_per_task,
                                              plan->num_splits, shares),
                   .list = &list,
                   .threads = plan->cpu.threads,
                   .scratch = (char *)workspace + fa_tasks_bytes(num_tasks),
                   .scale = score_scale(p, 0, 0),
                   .softcap = (float)(p->softcap * LOG2_E),
                   .kept = p->dropout_p > 0 ? (float)(1 / (1 - p->dropout_p)) : 1.0f,
                   .drops = p->dropout_p > 0 && p->keep_max < 255,
                   .finds_delta = fa_bwd_finds_delta(p, plan->block_q, shares),
                   .isa = plan->cpu.isa};
    job.slabs = (float *)(job.scratch + (size_t)plan->cpu.threads * job.layout.scratch_bytes);
    if (fa_flex_of(p)) bwd_start_flex(&job, tasks, num_tasks);
    /* Copies of gradients belong to tasks in their first order. */
    if (plan->cpu.threads > 1 && job.num_copies == 0) fa_sort_tasks(tasks, num_tasks);
    const bool has_copies = job.num_copies > 0;
    void (*const steps[])(int64_t, int64_t, void *) = {
        job.finds_delta ? NULL : bwd_delta, has_copies ? bwd_clear_copies : NULL, bwd_run_workers,
        p->dq.data && shares > 1 ? bwd_sum_slabs : NULL, has_copies ? bwd_add_copies : NULL};
    bool is_done = true;
    for (int i = 0; i < 5 && is_done && !job.failed; i++) {
        if (!steps[i]) continue;
        if (plan->cpu.threads == 1)
            steps[i](0, 1, &job); /* the work is too small to wake other threads */
        else
            is_done = pool->parallel_for(plan->cpu.threads, steps[i], &job);
    }
    if (fa_flex_of(p)) fa_flex_free_seen(&job.seen);
    return is_done && !job.failed;
}

#endif
