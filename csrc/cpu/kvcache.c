/* The update of a cache before attention reads the cache. New keys and values are written in place. Rotary embedding
 * rotates the new keys and the queries.
 *
 *   k_new, v_new [b, len_new, h_kv, d]  ->  cache positions seqused_k[b] ... seqused_k[b] + len_new - 1
 *   q [b, len_q, h, d]                  ->  q_rotated, contiguous
 *
 * New keys and queries may be packed, independently of each other. Packed queries stay packed.
 *
 * Rotary embedding rotates pairs (x0, x1) of the first rotary_dim elements to (x0 cos - x1 sin, x0 sin + x1 cos). cos
 * and sin are row "position" of their tables. The first new key and query have position seqlens_rotary[b], or else
 * seqused_k[b]. The result is rounded once. All other elements are copied bit for bit. If two entries of the batch
 * append to one row, each element of the row comes from either of them. */
#include "convert.h"
#include "kvcache.h"
#include "sequence.h"

typedef struct {
    const fa_problem *p;
    void *q_rotated;
} append_job;

static void copy_row(const fa_problem *p, void *dst, int64_t dst_offset, const void *src, int64_t src_offset,
                     int64_t columns) {
    size_t bytes = fa_dtype_bytes(p->dtype);
    memcpy((char *)dst + dst_offset * (int64_t)bytes, (const char *)src + src_offset * (int64_t)bytes,
           (size_t)columns * bytes);
}

/* Copies one row of d elements, and rotates it on its way. The copy is never read, because another entry of the batch
 * may write the same row of a cache at the same time. */
static void copy_rotated(const fa_problem *p, void *dst, int64_t dst_offset, const void *src, int64_t src_offset,
                         int64_t position) {
    copy_row(p, dst, dst_offset, src, src_offset, p->d);
    if (!p->rotary_cos || position >= p->rotary_rows) return;
    const int64_t pairs = p->rotary_dim / 2;
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t idx_0 = p->rotary_interleaved ? 2 * i : i, idx_1 = idx_0 + (p->rotary_interleaved ? 1 : pairs);
        double cos = fa_load_element(p->rotary_cos, position * pairs + i, p->rotary_dtype);
        double sin = fa_load_element(p->rotary_sin, position * pairs + i, p->rotary_dtype);
        double x_0 = fa_load_element(src, src_offset + idx_0, p->dtype);
        double x_1 = fa_load_element(src, src_offset + idx_1, p->dtype);
        fa_store_element(dst, dst_offset + idx_0, x_0 * cos - x_1 * sin, p->dtype);
        fa_store_element(dst, dst_offset + idx_1, x_0 * sin + x_1 * cos, p->dtype);
    }
}

/* The absolute position of the first appended key. Left padding does not change the position. */
static int64_t append_position(const fa_problem *p, int64_t b_idx) { return p->seqused_k ? p->seqused_k[b_idx] : 0; }

static int64_t rotary_position(const fa_problem *p, int64_t b_idx) {
    return p->seqlens_rotary ? p->seqlens_rotary[b_idx] : append_position(p, b_idx);
}

static void append_token(const fa_problem *p, int64_t b_idx, int64_t t) {
    if (t >= fa_num_new_keys(p, b_idx)) return;
    fa_sequence s = fa_sequence_at(p, b_idx);
    int64_t position = append_position(p, b_idx) + t;
    int64_t j = position - (p->leftpad_k ? p->leftpad_k[b_idx] : 0); /* keys count from the end of the padding */
    for (int64_t head = 0; head < p->h_kv; head++) {
        int64_t k_offset = fa_key_offset(p, &p->k, &s, j, head), v_offset = fa_key_offset(p, &p->v, &s, j, head);
        copy_rotated(p, p->k.data, k_offset, p->k_new.data, fa_new_key_offset(p, &p->k_new, b_idx, t, head),
                     rotary_position(p, b_idx) + t);
        copy_row(p, p->v.data, v_offset, p->v_new.data, fa_new_key_offset(p, &p->v_new, b_idx, t, head), p->d_v);
    }
}

static void rotate_query(const fa_problem *p, void *q_rotated, int64_t b_idx, int64_t t) {
    fa_sequence s = fa_sequence_at(p, b_idx);
    if (t >= s.len_q) return;
    const int64_t position = rotary_position(p, b_idx) + (p->rotary_q_by_row ? t : 0);
    const int64_t row = p->cu_seqlens_q ? s.q_row + t : b_idx * p->len_q + t;
    for (int64_t head = 0; head < p->h; head++) {
        const int64_t offset = (row * p->h + head) * p->d;
        copy_rotated(p, q_rotated, offset, p->q.data, fa_query_offset(&p->q, &s, t, head), position);
    }
}

/* The tasks are the new tokens of every sequence, then the queries of every sequence. Every sequence counts as the
 * longest one. */
static void append_tokens(int64_t begin, int64_t end, void *ctx) {
    const append_job *job = ctx;
    const fa_problem *p = job->p;
    int64_t num_appends = p->b * p->len_new;
    for (int64_t task = begin; task < end; task++) {
        if (task < num_appends)
            append_token(p, task / p->len_new, task % p->len_new);
        else
            rotate_query(p, job->q_rotated, (task - num_appends) / p->len_q, (task - num_appends) % p->len_q);
    }
}

bool fa_cpu_append(const fa_problem *problem, void *q_rotated, const fa_pool *pool) {
    append_job job = {.p = problem, .q_rotated = q_rotated};
    bool has_rotary = problem->rotary_cos && q_rotated;
    int64_t num_tasks = problem->b * (problem->len_new + (has_rotary ? problem->len_q : 0));
    return num_tasks == 0 || pool->parallel_for(num_tasks, append_tokens, &job);
}
