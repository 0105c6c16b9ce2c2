/* This header says where sequence i of a problem lies. The CPU engine reads cu_seqlens, seqused, leftpad_k,
 * cache_batch_idx and the block table only here. Queries and keys are packed or dense independently of each other.
 * Key 0 is the first key that is not left padding. So masks, ALiBi and dropout see len_kv keys and nothing else. */
#ifndef FA_SEQUENCE_H
#define FA_SEQUENCE_H

#include <math.h>

#include "flash_attn.h"

typedef struct {
    int64_t b_idx;
    int64_t q_row;         /* packed: first row of the sequence in q, o and lse; otherwise 0 */
    int64_t len_q, len_kv; /* visible lengths, after seqused_k, append and left padding */
    int64_t kv_batch;      /* index that multiplies stride_b of k and v; unused when paged */
    int64_t kv_row;        /* row of key 0, counted from kv_batch's start (paged: from the sequence's first page) */
    const int32_t *pages;  /* paged: the sequence's row of the block table */
} fa_sequence;

/* The number of new keys that are appended to sequence b_idx. */
static inline int64_t fa_num_new_keys(const fa_problem *p, int64_t b_idx) {
    return p->cu_seqlens_k_new ? p->cu_seqlens_k_new[b_idx + 1] - p->cu_seqlens_k_new[b_idx] : p->len_new;
}

static inline fa_sequence fa_sequence_at(const fa_problem *p, int64_t b_idx) {
    fa_sequence s = {.b_idx = b_idx, .len_q = p->len_q, .len_kv = p->len_kv};
    int64_t cache_row = p->cache_batch_idx ? p->cache_batch_idx[b_idx] : b_idx;
    if (p->cu_seqlens_q) {
        s.q_row = p->cu_seqlens_q[b_idx];
        s.len_q = p->cu_seqlens_q[b_idx + 1] - s.q_row;
    }
    if (p->seqused_q) s.len_q = p->seqused_q[b_idx];
    if (p->cu_seqlens_k) {
        s.kv_row = p->paged ? 0 : p->cu_seqlens_k[b_idx];
        s.len_kv = p->cu_seqlens_k[b_idx + 1] - p->cu_seqlens_k[b_idx];
    } else {
        s.kv_batch = cache_row;
    }
    if (p->seqused_k) s.len_kv = p->seqused_k[b_idx];
    s.len_kv += fa_num_new_keys(p, b_idx);
    if (p->leftpad_k) {
        s.kv_row += p->leftpad_k[b_idx];
        s.len_kv -= p->leftpad_k[b_idx];
        if (s.len_kv < 0) s.len_kv = 0;
    }
    if (p->block_table) s.pages = p->block_table + cache_row * p->block_table_stride;
    return s;
}

/* Is there nothing to compute and nothing to write, however many sequences there are? Then q has no row, no key is
 * appended, and a backward has no key. A packed problem is never idle: its sequences are the elements of cu_seqlens. */
static inline bool fa_is_idle(const fa_problem *p) {
    return p->total_q * p->h == 0 && p->len_new == 0 && !p->cu_seqlens_q && (p->pass == FA_FWD || p->total_kv == 0);
}

/* Bytes of the rotated queries, which begin a forward's workspace if there is rotary. They are packed if the queries
 * are. */
static inline size_t fa_rotated_q_bytes(const fa_problem *p) {
    const int64_t rows = p->cu_seqlens_q ? p->total_q : p->b * p->len_q;
    size_t bytes = p->rotary_cos ? (size_t)(rows * p->h * p->d) * fa_dtype_bytes(p->dtype) : 0;
    return (bytes + 63) / 64 * 64;
}

/* Element offset of key j of one key/value head in a view of k or v. A negative j names left padding. */
static inline int64_t fa_key_offset(const fa_problem *p, const fa_view *kv, const fa_sequence *s, int64_t j,
                                    int64_t head_kv) {
    int64_t row = s->kv_row + j;
    if (p->paged)
        return (int64_t)s->pages[row / p->page_size] * kv->stride_b + (row % p->page_size) * kv->stride_row +
               head_kv * kv->stride_h;
    return s->kv_batch * kv->stride_b + row * kv->stride_row + head_kv * kv->stride_h;
}

static inline int64_t fa_query_offset(const fa_view *q, const fa_sequence *s, int64_t i, int64_t head) {
    return s->b_idx * q->stride_b + (s->q_row + i) * q->stride_row + head * q->stride_h;
}

/* Element offset of new key t of one key/value head in k_new or v_new. */
static inline int64_t fa_new_key_offset(const fa_problem *p, const fa_view *kv, int64_t b_idx, int64_t t,
                                        int64_t head_kv) {
    const int64_t first = p->cu_seqlens_k_new ? p->cu_seqlens_k_new[b_idx] : 0;
    return b_idx * kv->stride_b + (first + t) * kv->stride_row + head_kv * kv->stride_h;
}

/* The factor that FA_E4M3 values of one sequence and key/value head are multiplied by. */
static inline float fa_descale_of(const fa_descale *t, int64_t b_idx, int64_t head_kv) {
    return t->data ? t->data[b_idx * t->stride_b + head_kv * t->stride_h] : 1.0f;
}

static inline float *fa_row_stat(const fa_row_stats *t, const fa_sequence *s, int64_t i, int64_t head) {
    return t->data + s->b_idx * t->stride_b + head * t->stride_h + (s->q_row + i) * (t->stride_row ? t->stride_row : 1);
}

/* Says the lse of a row that the row sees no key? Numbers of a bias that stand for "masked" give an lse that has
 * absorbed the scores, so a row of such numbers counts as empty in the backward. */
static inline bool fa_is_empty_row(const fa_problem *p, float lse) {
    return isinf(lse) || (p->bias.data && fabsf(lse) > 1e37f);
}

/* The visible keys of row i are [first, end). There is none when end <= first. Both bounds grow with the row. */
static inline void fa_visible_keys(const fa_problem *p, const fa_sequence *s, int64_t i, int64_t *first, int64_t *end) {
    int64_t diagonal = i + s->len_kv - s->len_q;
    *first = p->window_left >= 0 && diagonal - p->window_left > 0 ? diagonal - p->window_left : 0;
    *end =
        p->window_right >= 0 && diagonal + p->window_right + 1 < s->len_kv ? diagonal + p->window_right + 1 : s->len_kv;
    if (p->attention_chunk > 0) {
        const int64_t c = p->attention_chunk, chunk = (diagonal >= 0 ? diagonal / c : (diagonal + 1) / c - 1) * c;
        if (*first < chunk) *first = chunk;
        if (*end > chunk + c) *end = chunk + c;
    }
}

#endif
