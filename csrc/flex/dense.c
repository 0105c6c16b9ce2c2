/* A task is a tile of rows of one batch and head. */
#include "dense.h"

#include <stdatomic.h>
#include <string.h>

#include "evaluate.h"

enum { TILE = FA_FLEX_TILE };

typedef struct {
    const fa_flex_bound *bound;
    const fa_flex_grid *grid;
    size_t element, score_element; /* bytes */
    int64_t row_tiles;
    atomic_bool failed;
} work;

static size_t element_bytes(fa_flex_type type) { return type == FA_FLEX_BOOL ? 1 : type == FA_FLEX_F32 ? 4 : 8; }

static size_t bytes_of_score(const fa_flex_program *p) {
    for (int32_t i = 0; i < p->num_instructions; i++)
        if (p->instructions[i].op == FA_FLEX_score) return element_bytes((fa_flex_type)p->instructions[i].type);
    return 0;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows [first, first + rows) of one head, and a tile of keys. */
static void write_tile(const work *w, fa_flex_evaluator *e, int64_t head, int64_t first, int64_t kv) {
    const fa_flex_grid *g = w->grid;
    const size_t keys = (size_t)smaller(g->len_kv - kv, TILE);
    double scores[TILE] = {0};
    for (int row = 0; row < smaller(g->len_q - first, TILE); row++) {
        const size_t at = (size_t)((head * g->len_q + first + row) * g->len_kv + kv);
        if (g->scores) memcpy(scores, (const char *)g->scores + at * w->score_element, keys * w->score_element);
        const void *values = fa_flex_line(e, row, scores, NULL);
        memcpy((char *)g->out + at * w->element, values, keys * w->element);
    }
}

static void write_tasks(int64_t begin, int64_t end, void *ctx) {
    work *w = ctx;
    const fa_flex_grid *g = w->grid;
    fa_flex_evaluator *e = fa_flex_evaluator_new(w->bound, FA_ISA_SCALAR, true);
    if (!e) {
        atomic_store(&w->failed, true);
        return;
    }
    for (int64_t task = begin; task < end; task++) {
        const int64_t head = task / w->row_tiles, first = task % w->row_tiles * TILE;
        fa_flex_start_head(e, head / g->h, head % g->h);
        fa_flex_start_lines(e, g->first_q + first, (int)smaller(g->len_q - first, TILE));
        for (int64_t kv = 0; kv < g->len_kv; kv += TILE) {
            fa_flex_start_lanes(e, g->first_kv + kv, (int)smaller(g->len_kv - kv, TILE));
            write_tile(w, e, head, first, kv);
        }
    }
    fa_flex_evaluator_free(e);
}

fa_status fa_flex_evaluate(const fa_flex_bound *bound, const fa_flex_grid *grid, const fa_pool *pool, fa_error *err) {
    work w = {.bound = bound,
              .grid = grid,
              .element = element_bytes(fa_flex_result(bound->program)),
              .score_element = bytes_of_score(bound->program),
              .row_tiles = (grid->len_q + TILE - 1) / TILE};
    const int64_t num = grid->b * grid->h * w.row_tiles;
    if (num == 0 || grid->len_kv == 0) return FA_OK;
    if (!pool->parallel_for(num, write_tasks, &w)) return fa_fail(err, FA_ENOMEM, "torch could not start threads");
    return w.failed ? fa_fail(err, FA_ENOMEM, "no memory to evaluate a mod") : FA_OK;
}
