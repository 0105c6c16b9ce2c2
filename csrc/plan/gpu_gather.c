#include "gpu_gather.h"

#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"

static size_t round_up_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

static int64_t capacity_of(const fa_problem *p) { return fa_cache_pages_of(p).capacity; }

static size_t bytes_of_copy(const fa_problem *p, int64_t columns) {
    return round_up_256((size_t)(p->b * capacity_of(p) * p->h_kv * columns) * fa_dtype_bytes(p->dtype));
}

size_t fa_gather_bytes(const fa_problem *p) {
    return bytes_of_copy(p, p->d) + bytes_of_copy(p, p->d_v) + round_up_256((size_t)p->b * sizeof(int32_t));
}

/* With num_splits = n the choice of a kernel must not depend on the batch, as the bytes do. */
bool fa_may_gather(const fa_problem *p) {
    enum { MOST_BYTES = 1 << 30, MOST_KEYS = 1 << 30 };
    const fa_cache_pages pages = fa_cache_pages_of(p);
    const int64_t key_bytes = p->h_kv * (p->d + p->d_v) * (int64_t)fa_dtype_bytes(p->dtype);
    return p->paged && !fa_has_more_than_mods(p) && !p->leftpad_k && p->num_splits == 0 && fa_loads_single_keys(p) &&
           (p->dtype == FA_F16 || p->dtype == FA_BF16) && p->d % 8 == 0 && p->d_v % 8 == 0 && p->b > 0 && p->h_kv > 0 &&
           pages.num > 0 && pages.num < INT32_MAX && pages.capacity > 0 && pages.capacity < MOST_KEYS &&
           p->len_new < MOST_KEYS && p->total_new < INT32_MAX && p->cache_rows < INT32_MAX &&
           fa_suits_tma(p, &p->k, pages.num, pages.size, p->h_kv) &&
           fa_suits_tma(p, &p->v, pages.num, pages.size, p->h_kv) && pages.capacity <= MOST_BYTES / key_bytes / p->b;
}

static fa_view view_of(const fa_problem *p, void *data, int64_t columns) {
    return (fa_view){data, capacity_of(p) * p->h_kv * columns, p->h_kv * columns, columns};
}

fa_problem fa_gathered(const fa_problem *p, char *copies) {
    const size_t of_k = bytes_of_copy(p, p->d), of_v = bytes_of_copy(p, p->d_v);
    fa_problem g = *p;
    g.k = view_of(p, copies, p->d);
    g.v = view_of(p, copies ? copies + of_k : NULL, p->d_v);
    /* A planner asks only whether there are lengths. */
    g.seqused_k = copies ? (const int32_t *)(copies + of_k + of_v) : p->block_table;
    g.len_kv = capacity_of(p), g.total_kv = p->b * g.len_kv;
    g.paged = false, g.block_table = NULL, g.num_pages = g.page_size = g.block_table_cols = 0;
    g.cache_batch_idx = NULL, g.cache_rows = 0, g.cu_seqlens_k = NULL;
    g.k_new = g.v_new = (fa_view){0}, g.len_new = g.total_new = 0, g.cu_seqlens_k_new = NULL;
    return g;
}

double fa_us_of_gather(const fa_problem *p) {
    enum { US_START = 4 };
    return US_START + 2 * fa_us_of_cache(p);
}

bool fa_gathers(const fa_problem *p, const fa_machine *machine) {
    if (!fa_may_gather(p)) return false;
    if (fa_why_not_cache_of_sm90(p)) return true;
    const fa_problem gathered = fa_gathered(p, NULL);
    const int sms = machine->gpu_sms;
    return fa_us_of_gather(p) + fa_us_of_fwd_sm90(&gathered, sms) < fa_us_of_fwd_sm90(p, sms);
}
