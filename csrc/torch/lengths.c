/* The part of the checks that concerns where sequences lie: lengths, block tables, the KV cache and what is appended to
 * it. Afterwards every row that sequence.h can name lies within its tensor. */
#include "lengths.h"

#include "check.h"

#define K_NEW "(batch_size, seqlen_new, num_heads_k, head_size)"

static fa_status check_block_table(const fa_call *c, fa_problem *p, fa_error *err) {
    const fa_tensor *t = &c->block_table;
    if (!present(t)) return FA_OK;
    TRY(check_device(t, &c->q, err));
    REQUIRE(t->dtype == fa_torch.i32, "block_table must have dtype torch.int32; it is %s", dtype_words(t->dtype));
    TRY(check_rank(t, 2, "(batch_size, max_num_blocks_per_seq)", err));
    REQUIRE(last_dim_contiguous(t), "block_table must have contiguous last dimension; it has stride %" PRId64,
            t->stride[1]);
    words w;
    REQUIRE(present(&c->cache_batch_idx) || t->size[0] == p->b,
            "block_table must have shape (batch_size, max_num_blocks_per_seq) with batch_size %" PRId64 "; it has %s",
            p->b, shape_words(t, &w));
    REQUIRE(t->size[1] == 0 || p->page_size <= INT64_MAX / t->size[1],
            "block_table has %" PRId64 " columns of pages of %" PRId64 " keys, more keys than can be counted",
            t->size[1], p->page_size);
    p->block_table = (const int32_t *)t->data;
    p->block_table_stride = t->size[0] > 1 && t->size[1] > 0 ? t->stride[0] : 0;
    p->block_table_cols = t->size[1];
    return FA_OK;
}

fa_status check_lengths(const fa_call *c, fa_problem *p, fa_error *err) {
    if (c->layout == FA_OP_VARLEN) {
        const fa_tensor *cu_q = &c->cu_seqlens_q, *cu_k = &c->cu_seqlens_k;
        TRY(check_index(cu_q, &c->q, err));
        TRY(check_index(cu_k, &c->q, err));
        TRY(check_rank(cu_q, 1, "(batch_size + 1)", err));
        REQUIRE(cu_q->size[0] >= 1, "cu_seqlens_q must have shape (batch_size + 1), at least one element; it is empty");
        p->b = cu_q->size[0] - 1;
        TRY(SHAPE(cu_k, "(batch_size + 1)", p->b + 1));
        REQUIRE(contiguous(cu_q), "cu_seqlens_q must be contiguous; it has stride %" PRId64, cu_q->stride[0]);
        REQUIRE(contiguous(cu_k), "cu_seqlens_k must be contiguous; it has stride %" PRId64, cu_k->stride[0]);
        REQUIRE(c->max_seqlen_q >= 0, "max_seqlen_q must be at least 0; it is %" PRId64, c->max_seqlen_q);
        REQUIRE(c->max_seqlen_k >= 0, "max_seqlen_k must be at least 0; it is %" PRId64, c->max_seqlen_k);
        p->cu_seqlens_q = (const int32_t *)cu_q->data;
        p->cu_seqlens_k = (const int32_t *)cu_k->data;
        p->len_q = c->max_seqlen_q;
        p->len_kv = c->max_seqlen_k;
    }
    TRY(check_index_per_batch(&c->seqused_k, &c->q, p->b, err));
    TRY(check_index_per_batch(&c->leftpad_k, &c->q, p->b, err));
    TRY(check_index_per_batch(&c->cache_batch_idx, &c->q, p->b, err));
    p->seqused_k = (const int32_t *)c->seqused_k.data;
    p->leftpad_k = (const int32_t *)c->leftpad_k.data;
    p->cache_batch_idx = (const int32_t *)c->cache_batch_idx.data;
    TRY(check_block_table(c, p, err));
    p->cache_rows = p->paged ? c->block_table.size[0] : c->k.size[0];
    const int64_t room = p->paged ? p->block_table_cols * p->page_size : p->total_kv;
    if (c->layout == FA_OP_KVCACHE && p->paged) p->len_kv = room;
    if (c->layout == FA_OP_VARLEN) { /* plans count with what there can be, whatever max_seqlen promises */
        if (p->len_q > p->total_q) p->len_q = p->total_q;
        if (p->len_kv > room) p->len_kv = room;
    }
    return FA_OK;
}

/* The values of cu_seqlens: from 0, never falling, within the tensor (total < 0: no bound) and under max_seqlen. */
static fa_status check_cu_seqlens(const fa_tensor *t, const int32_t *cu, int64_t b, int64_t total, int64_t max_len,
                                  const char *max_name, fa_error *err) {
    REQUIRE(cu[0] == 0, "%s must start at 0; it starts at %d", t->name, cu[0]);
    for (int64_t i = 0; i < b; i++) {
        REQUIRE(cu[i + 1] >= cu[i], "%s must not decrease; element %" PRId64 " is %d after %d", t->name, i + 1,
                cu[i + 1], cu[i]);
        REQUIRE(max_len < 0 || cu[i + 1] - cu[i] <= max_len,
                "%s is %" PRId64 ", less than the %d rows of sequence %" PRId64 " in %s", max_name, max_len,
                cu[i + 1] - cu[i], i, t->name);
    }
    REQUIRE(total < 0 || cu[b] <= total, "%s must end at or before the %" PRId64 " rows of its tensor; it ends at %d",
            t->name, total, cu[b]);
    return FA_OK;
}

/* Values inside index tensors, in the host's memory: afterwards every row that sequence.h can name lies within its tensor. */
fa_status check_values(const fa_call *c, const fa_problem *p, fa_error *err) {
    const bool kvcache = c->layout == FA_OP_KVCACHE;
    const char *used_name = kvcache ? "cache_seqlens" : "seqused_k";
    if (p->cu_seqlens_q) {
        TRY(check_cu_seqlens(&c->cu_seqlens_q, p->cu_seqlens_q, p->b, p->total_q, c->max_seqlen_q, "max_seqlen_q",
                             err));
        TRY(check_cu_seqlens(&c->cu_seqlens_k, p->cu_seqlens_k, p->b, p->paged ? -1 : p->total_kv,
                             p->seqused_k ? -1 : c->max_seqlen_k, "max_seqlen_k", err));
    }
    const char *cache_name = p->paged ? "block_table" : c->k.name;
    const bool has_values = p->cu_seqlens_q || p->seqused_k || p->leftpad_k || p->cache_batch_idx || p->paged;
    for (int64_t i = 0; i < p->b && (has_values || p->len_new > 0); i++) {
        int64_t row = i;
        if (p->cache_batch_idx) {
            row = p->cache_batch_idx[i];
            REQUIRE(row >= 0 && row < p->cache_rows,
                    "cache_batch_idx must be within the %" PRId64 " rows of %s; element %" PRId64 " is %" PRId64,
                    p->cache_rows, cache_name, i, row);
        }
        /* keys before the append, and how many there may be */
        int64_t room = p->cu_seqlens_k && !p->paged ? p->cu_seqlens_k[i + 1] - p->cu_seqlens_k[i]
                       : p->paged                   ? p->block_table_cols * p->page_size
                                                    : p->len_kv;
        int64_t len = p->cu_seqlens_k ? p->cu_seqlens_k[i + 1] - p->cu_seqlens_k[i] : p->len_kv;
        if (p->seqused_k) {
            len = p->seqused_k[i];
            REQUIRE(len >= 0, "%s must be at least 0; element %" PRId64 " is %" PRId64, used_name, i, len);
            REQUIRE(p->paged || len <= room,
                    "%s must be at most the %" PRId64 " keys there are; element %" PRId64 " is %" PRId64, used_name,
                    room, i, len);
            REQUIRE(kvcache || len <= c->max_seqlen_k,
                    "max_seqlen_k is %" PRId64 ", less than the %" PRId64 " keys of sequence %" PRId64 " in seqused_k",
                    c->max_seqlen_k, len, i);
        }
        const int64_t end = len + p->len_new;
        if (p->paged) {
            const int64_t pages = end / p->page_size + (end % p->page_size > 0);
            REQUIRE(end <= room,
                    "block_table has %" PRId64 " columns of pages of %" PRId64 " keys, room for %" PRId64
                    "; sequence %" PRId64 " needs %" PRId64 " (%s %" PRId64 " and %" PRId64 " new)",
                    p->block_table_cols, p->page_size, room, i, end, kvcache ? "cache_seqlens" : "length", len,
                    p->len_new);
            for (int64_t page = 0; page < pages; page++) {
                int32_t number = p->block_table[row * p->block_table_stride + page];
                REQUIRE(number >= 0 && number < p->num_pages,
                        "block_table must name pages below %" PRId64 "; entry (%" PRId64 ", %" PRId64 ") is %d",
                        p->num_pages, row, page, number);
            }
        } else {
            REQUIRE(end <= room,
                    "cache_seqlens leaves no room to append: sequence %" PRId64 " holds %" PRId64
                    " keys and gets %" PRId64 " new ones, the KV cache has room for %" PRId64,
                    i, len, p->len_new, room);
        }
        if (p->leftpad_k)
            REQUIRE(p->leftpad_k[i] >= 0 && p->leftpad_k[i] <= end,
                    "%s must be within the %" PRId64 " keys of its sequence; element %" PRId64 " is %d",
                    c->leftpad_k.name, end, i, p->leftpad_k[i]);
    }
    return FA_OK;
}

/* ---- KV cache: append and rotary ------------------------------------------------------------------------------ */

static fa_status check_rotary(const fa_call *c, fa_problem *p, fa_error *err) {
    const fa_tensor *cos = &c->rotary_cos, *sin = &c->rotary_sin;
    if (!present(cos) && !present(sin)) return FA_OK;
    REQUIRE(present(cos), "If rotary sin is provided, rotary cos must also be provided; rotary_cos is None");
    REQUIRE(present(sin), "If rotary cos is provided, rotary sin must also be provided; rotary_sin is None");
    REQUIRE(present(&c->k_new),
            "If rotary cos/sin are provided, new key / value to be appended to KV cache must also be "
            "provided; k is None");
    TRY(check_rank(cos, 2, "(seqlen_ro, rotary_dim / 2)", err));
    p->rotary_rows = cos->size[0];
    p->rotary_dim = 2 * cos->size[1];
    REQUIRE(p->rotary_dim <= p->d, "rotary_dim must be <= headdim; rotary_cos gives %" PRId64 ", q has %" PRId64,
            p->rotary_dim, p->d);
    REQUIRE(p->rotary_dim % 16 == 0,
            "Only rotary dimensions divisible by 16 are currently supported; rotary_cos gives %" PRId64, p->rotary_dim);
    REQUIRE(p->rotary_rows >= p->len_kv,
            "cos/sin seqlen must be at least the seqlen of KV cache; rotary_cos has %" PRId64
            " rows, the cache %" PRId64,
            p->rotary_rows, p->len_kv);
    TRY(SHAPE(sin, "(seqlen_ro, rotary_dim / 2)", cos->size[0], cos->size[1]));
    REQUIRE(contiguous(cos), "rotary_cos must be contiguous; its rows are %" PRId64 " apart", cos->stride[0]);
    REQUIRE(contiguous(sin), "rotary_sin must be contiguous; its rows are %" PRId64 " apart", sin->stride[0]);
    p->rotary_cos = cos->data;
    p->rotary_sin = sin->data;
    p->rotary_interleaved = c->rotary_interleaved;
    /* Upstream decides after it has simplified the mask: one query is never causal, a window that the cache cannot
     * exceed is no window. */
    p->rotary_q_by_row = (c->causal && p->len_q > 1) || (c->window_left >= 0 && c->window_left < p->len_kv) ||
                         (!c->causal && c->window_right >= 0 && c->window_right < p->len_kv);
    return FA_OK;
}

fa_status check_append(const fa_call *c, fa_problem *p, fa_error *err) {
    if (c->layout != FA_OP_KVCACHE) return FA_OK;
    words w;
    REQUIRE(present(&c->block_table) || present(&c->cache_batch_idx) || c->k.size[0] >= p->b,
            "%s must have shape " K_CACHE " with at least the %" PRId64 " rows of q's batch; it has %s", c->k.name,
            p->b, shape_words(&c->k, &w));
    REQUIRE(present(&c->v_new) || !present(&c->k_new), "If key is supplied, value must also be passed in; v is None");
    REQUIRE(present(&c->k_new) || !present(&c->v_new), "If value is supplied, key must also be passed in; k is None");
    if (present(&c->k_new)) {
        REQUIRE(present(&c->seqused_k), "If key is supplied, seqlens_k must also be passed in; cache_seqlens is None");
        TRY(check_rank(&c->k_new, 4, K_NEW, err));
        p->len_new = c->k_new.size[1];
        REQUIRE(p->len_new <= p->len_kv,
                "If key is supplied, it must have seqlen <= the seqlen of the KV cache; k has %" PRId64
                ", the cache %" PRId64,
                p->len_new, p->len_kv);
        TRY(SHAPE(&c->k_new, K_NEW, p->b, p->len_new, p->h_kv, p->d));
        TRY(SHAPE(&c->v_new, K_NEW, p->b, p->len_new, p->h_kv, p->d));
        p->k_new = view_of(&c->k_new);
        p->v_new = view_of(&c->v_new);
    }
    return check_rotary(c, p, err);
}
