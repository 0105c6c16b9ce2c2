#include "gpu_align.h"

#include <stddef.h>

#include "gpu_problem.h"

enum { PIECE = 8, ELEMENT_BYTES = 2 }; /* elements of 16 bytes */

static int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Every tensor that a tile kernel reads or writes by rows. */
static const struct {
    size_t at;
    bool is_of_q, has_d_v, is_output, is_of_bwd;
} tensors_of_problem[] = {
    {offsetof(fa_problem, q), true, false, false, false},  {offsetof(fa_problem, k), false, false, false, false},
    {offsetof(fa_problem, v), false, true, false, false},  {offsetof(fa_problem, o), true, true, true, false},
    {offsetof(fa_problem, dout), true, true, false, true}, {offsetof(fa_problem, dq), true, false, true, true},
    {offsetof(fa_problem, dk), false, false, true, true},  {offsetof(fa_problem, dv), false, true, true, true},
};

static fa_aligned_tensor tensor_of(const fa_problem *p, int i) {
    const bool is_of_q = tensors_of_problem[i].is_of_q, packed = is_of_q ? p->cu_seqlens_q : p->cu_seqlens_k;
    const int64_t columns = tensors_of_problem[i].has_d_v ? p->d_v : p->d;
    const int64_t total = is_of_q ? p->total_q : p->total_kv, len = is_of_q ? p->len_q : p->len_kv;
    const size_t at = tensors_of_problem[i].at;
    return (fa_aligned_tensor){
        .at = at,
        .own = *(const fa_view *)(const void *)((const char *)p + at),
        .is_packed = packed,
        .b = packed ? 1 : p->b,
        .rows = packed ? total : len,
        .heads = is_of_q ? p->h : p->h_kv,
        .columns = columns,
        .copied_columns = round_up(columns, PIECE),
        /* A backward reads o. */
        .is_output = tensors_of_problem[i].is_output && (tensors_of_problem[i].is_of_bwd || p->pass == FA_FWD),
    };
}

static bool is_odd(const fa_aligned_tensor *t, uint64_t multiple) {
    return t->own.data && fa_offsets_of(&t->own, ELEMENT_BYTES, t->b, t->rows, t->heads) % multiple;
}

static bool is_of_pass(const fa_problem *p, int i) { return p->pass == FA_BWD || !tensors_of_problem[i].is_of_bwd; }

unsigned fa_tensors_to_align(const fa_problem *p) {
    unsigned wanted = 0;
    for (int i = 0; i < FA_MAX_ALIGNED; i++) {
        const fa_aligned_tensor t = tensor_of(p, i);
        if (is_of_pass(p, i) && (t.columns % PIECE || is_odd(&t, 16))) wanted |= 1u << i;
    }
    return wanted;
}

static int64_t bytes_of_copy(const fa_aligned_tensor *t) {
    return round_up(t->b * t->rows * t->heads * t->copied_columns * ELEMENT_BYTES, 256);
}

int fa_align(const fa_problem *p, unsigned wanted, char *copies, fa_aligned_tensor tensors[FA_MAX_ALIGNED]) {
    static _Alignas(256) char nowhere[256]; /* aligned as any workspace */
    char *at = copies ? copies : nowhere;
    int num = 0;
    for (int i = 0; i < FA_MAX_ALIGNED; i++) {
        if (!(wanted >> i & 1)) continue;
        fa_aligned_tensor t = tensor_of(p, i);
        const int64_t row = t.heads * t.copied_columns;
        t.copy = (fa_view){at, t.is_packed ? 0 : t.rows * row, row, t.copied_columns};
        if (copies) at += bytes_of_copy(&t);
        if (t.own.data) tensors[num++] = t;
    }
    return num;
}

size_t fa_align_bytes(const fa_problem *p, unsigned wanted) {
    int64_t bytes = 0;
    for (int i = 0; i < FA_MAX_ALIGNED; i++) {
        const fa_aligned_tensor t = tensor_of(p, i);
        if (wanted >> i & 1) bytes += bytes_of_copy(&t);
    }
    return (size_t)bytes;
}

fa_problem fa_aligned(const fa_problem *p, const fa_aligned_tensor *tensors, int num) {
    fa_problem aligned = *p;
    for (int i = 0; i < num; i++) *(fa_view *)(void *)((char *)&aligned + tensors[i].at) = tensors[i].copy;
    aligned.d = round_up(p->d, PIECE), aligned.d_v = round_up(p->d_v, PIECE);
    return aligned;
}

/* A KV cache may be much longer than the keys that a call reads, so it is not copied. */
bool fa_may_align(const fa_problem *p) {
    const bool is_short = p->dtype == FA_F16 || p->dtype == FA_BF16;
    if (!is_short || p->b <= 0 || p->h <= 0 || p->h_kv <= 0 || p->total_q <= 0 || p->total_kv <= 0 || p->paged ||
        p->leftpad_k || p->cache_batch_idx || p->k_new.data || p->rotary_cos || p->qv.data || p->wants_s_dmask ||
        (p->seqused_k && !p->cu_seqlens_k))
        return false;
    for (int i = 0; i < FA_MAX_ALIGNED; i++) {
        const fa_aligned_tensor t = tensor_of(p, i);
        if (t.rows <= 0 || t.rows >= INT32_MAX / t.b / t.heads) return false;
    }
    return fa_tensors_to_align(p) != 0;
}

/* The keys that a row may see. */
static double keys_of_row(const fa_problem *p) {
    const double keys = p->cu_seqlens_k ? (double)p->total_kv / (double)p->b : (double)p->len_kv;
    const double window = (double)p->window_left + (double)p->window_right + 1;
    return p->window_left >= 0 && p->window_right >= 0 && window < keys ? window : keys;
}

/* A copied row costs what the tile kernel saves with so many pairs of a query and a key (cuda/generic.md). With rows at
 * odd elements, which slow down the generic kernels most, a quarter of the pairs suffices. */
bool fa_align_pays(const fa_problem *p, int capability) {
    enum { BEFORE_HOPPER_FWD = 128, BEFORE_HOPPER_BWD = 24, HOPPER_FWD = 33, HOPPER_BWD = 2, ODD = 4 };
    const int least = capability == 90 ? (p->pass == FA_BWD ? HOPPER_BWD : HOPPER_FWD)
                                       : (p->pass == FA_BWD ? BEFORE_HOPPER_BWD : BEFORE_HOPPER_FWD);
    const unsigned wanted = fa_tensors_to_align(p);
    double rows = 0;
    bool has_odd = false;
    for (int i = 0; i < FA_MAX_ALIGNED; i++) {
        const fa_aligned_tensor t = tensor_of(p, i);
        if (!(wanted >> i & 1)) continue;
        rows += (double)t.b * (double)t.rows * (double)t.heads;
        has_odd |= t.columns % 2 || is_odd(&t, 4);
    }
    return (double)p->total_q * (double)p->h * keys_of_row(p) * (has_odd ? ODD : 1) >= least * rows;
}
