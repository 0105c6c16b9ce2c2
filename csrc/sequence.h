/* Where sequence i of a problem lies: the only reader of cu_seqlens, seqused_k, leftpad_k, cache_batch_idx and of the
 * block table. Keys are numbered from 0 at the first key that is not left padding, so masks, ALiBi and dropout see
 * len_kv keys and nothing else. */
#ifndef FA_SEQUENCE_H
#define FA_SEQUENCE_H

#include "flash_attn.h"

typedef struct {
    int64_t b_idx;
    int64_t q_row;         /* first row of the sequence in q, o, lse (packed), else 0 */
    int64_t len_q, len_kv; /* visible lengths: after seqused_k, append and left padding */
    int64_t kv_batch;      /* index times stride_b of k and v; unused when paged */
    int64_t kv_row;        /* row of key 0 counted from kv_batch's start (paged: from the start of page 0) */
    const int32_t *pages;  /* paged: the sequence's row of the block table */
} fa_sequence;

static inline fa_sequence fa_sequence_at(const fa_problem *p, int64_t b_idx) {
    fa_sequence s = {.b_idx = b_idx, .len_q = p->len_q, .len_kv = p->len_kv};
    int64_t cache_row = p->cache_batch_idx ? p->cache_batch_idx[b_idx] : b_idx;
    if (p->cu_seqlens_q) {
        s.q_row = p->cu_seqlens_q[b_idx];
        s.len_q = p->cu_seqlens_q[b_idx + 1] - s.q_row;
    }
    if (p->cu_seqlens_k) {
        s.kv_row = p->paged ? 0 : p->cu_seqlens_k[b_idx];
        s.len_kv = p->cu_seqlens_k[b_idx + 1] - p->cu_seqlens_k[b_idx];
    } else {
        s.kv_batch = cache_row;
    }
    if (p->seqused_k) s.len_kv = p->seqused_k[b_idx];
    s.len_kv += p->len_new;
    if (p->leftpad_k) {
        s.kv_row += p->leftpad_k[b_idx];
        s.len_kv -= p->leftpad_k[b_idx];
        if (s.len_kv < 0) s.len_kv = 0;
    }
    if (p->block_table) s.pages = p->block_table + cache_row * p->block_table_stride;
    return s;
}

/* No row of q, no new key, and no gradient of a key: nothing to compute and nothing to write, however many sequences. Packed ones
 * have an element of cu_seqlens each. */
static inline bool fa_is_idle(const fa_problem *p) {
    return p->total_q * p->h == 0 && p->len_new == 0 && !p->cu_seqlens_q && (p->pass == FA_FWD || p->total_kv == 0);
}

/* The first bytes of a forward's workspace: the rotated queries, if there is rotary. */
static inline size_t fa_rotated_q_bytes(const fa_problem *p) {
    size_t bytes = p->rotary_cos ? (size_t)(p->b * p->len_q * p->h * p->d) * fa_dtype_bytes(p->dtype) : 0;
    return (bytes + 63) / 64 * 64;
}

/* Element offset of key j (or, with a negative j, of left padding) of one key/value head in a view of k or v. */
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

static inline float *fa_row_stat(const fa_row_stats *t, const fa_sequence *s, int64_t i, int64_t head) {
    return t->data + s->b_idx * t->stride_b + head * t->stride_h + s->q_row + i;
}

/* Visible keys of row i: [first, end), empty when end <= first. */
static inline void fa_visible_keys(const fa_problem *p, const fa_sequence *s, int64_t i, int64_t *first, int64_t *end) {
    int64_t diagonal = i + s->len_kv - s->len_q;
    *first = p->window_left >= 0 && diagonal - p->window_left > 0 ? diagonal - p->window_left : 0;
    *end =
        p->window_right >= 0 && diagonal + p->window_right + 1 < s->len_kv ? diagonal + p->window_right + 1 : s->len_kv;
}

#endif
