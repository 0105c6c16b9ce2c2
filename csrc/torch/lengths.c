/* Checks the lengths, block tables, the KV cache and the keys to append. After these checks, every row that sequence.h
 * can name lies within its tensor. */
#include "lengths.h"

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "overlap.h"

#define K_NEW        "(batch_size, seqlen_new, num_heads_k, head_size)"
#define K_NEW_PACKED "(total_k_new, num_heads_k, head_size)"

static fa_status check_block_table(const fa_call *c, fa_problem *p, fa_error *err) {
    const fa_tensor *t = &c->block_table;
    if (!present(t)) return FA_OK;
    TRY(check_device(t, &c->q, err));
    REQUIRE(t->dtype == fa_torch.i32, "%s must have dtype torch.int32; it is %s", t->name, dtype_words(t->dtype));
    TRY(check_rank(t, 2, "(batch_size, max_num_blocks_per_seq)", err));
    REQUIRE(last_dim_contiguous(t), "%s must have contiguous last dimension; it has stride %" PRId64, t->name,
            t->stride[1]);
    words w;
    REQUIRE(present(&c->cache_batch_idx) || t->size[0] == p->b,
            "%s must have shape (batch_size, max_num_blocks_per_seq) with batch_size %" PRId64 "; it has %s", t->name,
            p->b, shape_words(t, &w));
    REQUIRE(t->size[1] == 0 || p->page_size <= INT64_MAX / t->size[1],
            "%s has %" PRId64 " columns of pages of %" PRId64 " keys, more keys than can be counted", t->name,
            t->size[1], p->page_size);
    p->block_table = (const int32_t *)t->data;
    p->block_table_stride = t->size[0] > 1 && t->size[1] > 0 ? t->stride[0] : 0;
    p->block_table_cols = t->size[1];
    return FA_OK;
}

/* Checks a tensor of running sums. *b is the number of sequences, or -1 if this tensor says it. */
static fa_status check_sums(const fa_tensor *t, const fa_tensor *q, int64_t *b, const int32_t **sums, fa_error *err) {
    TRY(check_index(t, q, err));
    TRY(check_rank(t, 1, "(batch_size + 1)", err));
    REQUIRE(t->size[0] >= 1, "%s must have shape (batch_size + 1), at least one element; it is empty", t->name);
    if (*b < 0) *b = t->size[0] - 1;
    TRY(SHAPE(t, "(batch_size + 1)", *b + 1));
    REQUIRE(contiguous(t), "%s must be contiguous; it has stride %" PRId64, t->name, t->stride[0]);
    *sums = (const int32_t *)t->data;
    return FA_OK;
}

fa_status check_lengths(const fa_call *c, fa_problem *p, fa_error *err) {
    const bool packed_q = packs_q(c), packed_k = present(&c->cu_seqlens_k), is_3 = c->layout == FA_OP_3;
    int64_t b = packed_q ? -1 : p->b;
    if (packed_q) TRY(check_sums(&c->cu_seqlens_q, &c->q, &b, &p->cu_seqlens_q, err));
    p->b = b;
    if (packed_k) TRY(check_sums(&c->cu_seqlens_k, &c->q, &b, &p->cu_seqlens_k, err));
    if (packed_q) {
        REQUIRE(c->max_seqlen_q >= 0, "max_seqlen_q must be at least 0; it is %" PRId64, c->max_seqlen_q);
        p->len_q = c->max_seqlen_q;
    }
    if (packed_k) {
        REQUIRE(c->max_seqlen_k >= 0, "max_seqlen_k must be at least 0; it is %" PRId64, c->max_seqlen_k);
        p->len_kv = c->max_seqlen_k;
    }
    const fa_tensor *batch = p->paged ? &c->block_table : &c->k;
    REQUIRE(!is_3 || packed_k || present(&c->cache_batch_idx) || batch->ndim == 0 || batch->size[0] == p->b,
            "batch_size must be equal to batch_size_k; q has %" PRId64 ", %s has %" PRId64, p->b, batch->name,
            batch->size[0]);
    TRY(check_index_per_batch(&c->seqused_q, &c->q, p->b, err));
    TRY(check_index_per_batch(&c->seqused_k, &c->q, p->b, err));
    TRY(check_index_per_batch(&c->leftpad_k, &c->q, p->b, err));
    TRY(check_index_per_batch(&c->cache_batch_idx, &c->q, p->b, err));
    p->seqused_q = (const int32_t *)c->seqused_q.data;
    p->seqused_k = (const int32_t *)c->seqused_k.data;
    p->leftpad_k = (const int32_t *)c->leftpad_k.data;
    p->cache_batch_idx = (const int32_t *)c->cache_batch_idx.data;
    TRY(check_block_table(c, p, err));
    p->cache_rows = p->paged ? c->block_table.size[0] : c->k.size[0];
    const int64_t room = p->paged ? p->block_table_cols * p->page_size : p->total_kv;
    if (p->paged && !packed_k) p->len_kv = room;
    /* max_seqlen may be larger than the tensor, and plans need the real bound. */
    if (packed_q && p->len_q > p->total_q) p->len_q = p->total_q;
    if (packed_k && p->len_kv > room) p->len_kv = room;
    if (is_3) {
        REQUIRE((double)p->b * (double)p->len_kv < 0x1p62, "%s must have fewer than 2^62 keys over the batch",
                c->k.name);
        if (!packed_k) p->total_kv = p->b * c->k.size[1];
        if (c->k.size[0] == 0 || (!packed_k && c->k.size[1] == 0)) p->empty_lse = INFINITY;
    }
    return FA_OK;
}

/* The values of cu_seqlens must start at 0 and never fall. They must lie within the tensor (total < 0: no bound) and
 * obey max_seqlen. */
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

/* Returns an entry of the block table for a sequence that check_values has checked. */
static int32_t page_at(const fa_problem *p, int64_t b_idx, int64_t page) {
    const int64_t row = p->cache_batch_idx ? p->cache_batch_idx[b_idx] : b_idx;
    return p->block_table[row * p->block_table_stride + page];
}

static int64_t num_pages_of(const fa_problem *p, int64_t b_idx) {
    int64_t len = p->seqused_k      ? p->seqused_k[b_idx]
                  : p->cu_seqlens_k ? p->cu_seqlens_k[b_idx + 1] - p->cu_seqlens_k[b_idx]
                                    : p->len_kv;
    len += p->cu_seqlens_k_new ? p->cu_seqlens_k_new[b_idx + 1] - p->cu_seqlens_k_new[b_idx] : p->len_new;
    return len / p->page_size + (len % p->page_size > 0);
}

/* Checks that no page of a pool holds keys and values at once. */
static fa_status check_pool(const fa_call *c, const fa_problem *p, fa_error *err) {
    const int64_t apart = pages_apart(&c->k, &c->v);
    if (!p->paged || p->len_new == 0 || apart == 0) return FA_OK;
    bool *holds_keys = calloc((size_t)p->num_pages, sizeof *holds_keys);
    if (!holds_keys) return fa_fail(err, FA_ENOMEM, "no memory to check %s", c->block_table.name);
    for (int64_t i = 0; i < p->b; i++)
        for (int64_t page = num_pages_of(p, i) - 1; page >= 0; page--) holds_keys[page_at(p, i, page)] = true;
    fa_status status = FA_OK;
    for (int64_t i = 0; i < p->b && status == FA_OK; i++)
        for (int64_t page = num_pages_of(p, i) - 1; page >= 0 && status == FA_OK; page--) {
            const int64_t place = page_at(p, i, page) + apart; /* counted from page 0 of the keys */
            if (place >= 0 && place < p->num_pages && holds_keys[place])
                status = fa_fail(err, FA_EINVAL,
                                 "%s gives the memory of page %" PRId64 " of %s to values, too: %s lies %" PRId64
                                 " pages behind %s in one pool",
                                 c->block_table.name, place, c->k.name, c->v.name, apart, c->k.name);
        }
    free(holds_keys);
    return status;
}

/* Checks the values inside index tensors in the host's memory. After this check, every row that sequence.h can name
 * lies within its tensor. */
fa_status check_values(const fa_call *c, const fa_problem *p, fa_error *err) {
    const bool kvcache = c->layout == FA_OP_KVCACHE || (c->layout == FA_OP_3 && !p->cu_seqlens_k);
    const char *used_name = c->layout == FA_OP_KVCACHE ? "cache_seqlens" : c->seqused_k.name;
    const char *table_name = c->block_table.name;
    if (p->cu_seqlens_q)
        TRY(check_cu_seqlens(&c->cu_seqlens_q, p->cu_seqlens_q, p->b, p->total_q, c->max_seqlen_q, "max_seqlen_q",
                             err));
    if (p->cu_seqlens_k)
        TRY(check_cu_seqlens(&c->cu_seqlens_k, p->cu_seqlens_k, p->b, p->paged ? -1 : p->total_kv,
                             p->seqused_k ? -1 : c->max_seqlen_k, "max_seqlen_k", err));
    if (p->cu_seqlens_k_new && p->device == FA_CUDA) /* on the CPU check_append has checked these sums */
        TRY(check_cu_seqlens(&c->cu_seqlens_k_new, p->cu_seqlens_k_new, p->b, p->total_new, -1, "", err));
    const char *cache_name = p->paged ? table_name : c->k.name;
    const bool has_values = p->cu_seqlens_q || p->seqused_k || p->leftpad_k || p->cache_batch_idx || p->paged ||
                            p->cu_seqlens_k || p->seqused_q || p->seqlens_rotary;
    for (int64_t i = 0; i < p->b && (has_values || p->len_new > 0); i++) {
        int64_t row = i;
        if (p->cache_batch_idx) {
            row = p->cache_batch_idx[i];
            REQUIRE(row >= 0 && row < p->cache_rows,
                    "%s must be within the %" PRId64 " rows of %s; element %" PRId64 " is %" PRId64,
                    c->cache_batch_idx.name, p->cache_rows, cache_name, i, row);
        }
        if (p->seqused_q) {
            const int64_t len_q = p->cu_seqlens_q ? p->cu_seqlens_q[i + 1] - p->cu_seqlens_q[i] : p->len_q;
            REQUIRE(p->seqused_q[i] >= 0 && p->seqused_q[i] <= len_q,
                    "%s must be within the %" PRId64 " queries of its sequence; element %" PRId64 " is %d",
                    c->seqused_q.name, len_q, i, p->seqused_q[i]);
        }
        if (p->seqlens_rotary)
            REQUIRE(p->seqlens_rotary[i] >= 0, "%s must be at least 0; element %" PRId64 " is %d",
                    c->seqlens_rotary.name, i, p->seqlens_rotary[i]);
        /* `len` counts the keys before the append. `room` counts the keys that fit. */
        int64_t room = p->cu_seqlens_k && !p->paged ? p->cu_seqlens_k[i + 1] - p->cu_seqlens_k[i]
                       : p->paged                   ? p->block_table_cols * p->page_size
                                                    : p->len_kv;
        int64_t len = p->cu_seqlens_k ? p->cu_seqlens_k[i + 1] - p->cu_seqlens_k[i] : p->len_kv;
        const int64_t len_new = p->cu_seqlens_k_new ? p->cu_seqlens_k_new[i + 1] - p->cu_seqlens_k_new[i] : p->len_new;
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
        const int64_t end = len + len_new;
        if (p->paged) {
            const int64_t pages = end / p->page_size + (end % p->page_size > 0);
            REQUIRE(end <= room,
                    "%s has %" PRId64 " columns of pages of %" PRId64 " keys, room for %" PRId64 "; sequence %" PRId64
                    " needs %" PRId64 " (%s %" PRId64 " and %" PRId64 " new)",
                    table_name, p->block_table_cols, p->page_size, room, i, end, kvcache ? "cache_seqlens" : "length",
                    len, len_new);
            for (int64_t page = 0; page < pages; page++) {
                int32_t number = p->block_table[row * p->block_table_stride + page];
                REQUIRE(number >= 0 && number < p->num_pages,
                        "%s must name pages below %" PRId64 "; entry (%" PRId64 ", %" PRId64 ") is %d", table_name,
                        p->num_pages, row, page, number);
            }
        } else {
            REQUIRE(end <= room,
                    "cache_seqlens leaves no room to append: sequence %" PRId64 " holds %" PRId64
                    " keys and gets %" PRId64 " new ones, the KV cache has room for %" PRId64,
                    i, len, len_new, room);
        }
        if (p->leftpad_k)
            REQUIRE(p->leftpad_k[i] >= 0 && p->leftpad_k[i] <= end,
                    "%s must be within the %" PRId64 " keys of its sequence; element %" PRId64 " is %d",
                    c->leftpad_k.name, end, i, p->leftpad_k[i]);
    }
    return check_pool(c, p, err);
}

/* ---- KV cache: append and rotary ------------------------------------------------------------------------------ */

/* Upstream decides after simplifying the mask. One query is never causal. A window that the cache cannot exceed counts
 * as no window. In flash-attn 3 such a window is smaller by one, and a chunk counts as a window. */
static bool rotates_q_by_row(const fa_call *c, const fa_problem *p) {
    const bool is_3 = c->layout == FA_OP_3;
    const int64_t most_left = is_3 ? p->len_kv - 1 : p->len_kv, most_right = is_3 ? p->len_q - 1 : p->len_kv;
    return (c->causal && p->len_q > 1) || (c->window_left >= 0 && c->window_left < most_left) ||
           (!c->causal && c->window_right >= 0 && c->window_right < most_right) || (is_3 && c->attention_chunk > 0);
}

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
    REQUIRE(p->rotary_rows >= p->len_kv || (c->layout == FA_OP_3 && !p->paged),
            "cos/sin seqlen must be at least the seqlen of KV cache; rotary_cos has %" PRId64
            " rows, the cache %" PRId64,
            p->rotary_rows, p->len_kv);
    TRY(SHAPE(sin, "(seqlen_ro, rotary_dim / 2)", cos->size[0], cos->size[1]));
    REQUIRE(contiguous(cos), "rotary_cos must be contiguous; its rows are %" PRId64 " apart", cos->stride[0]);
    REQUIRE(contiguous(sin), "rotary_sin must be contiguous; its rows are %" PRId64 " apart", sin->stride[0]);
    p->rotary_cos = cos->data;
    p->rotary_sin = sin->data;
    p->rotary_dtype = cos->dtype == fa_torch.e4m3 ? FA_E4M3 : fa_output_dtype(p->dtype);
    p->rotary_interleaved = c->rotary_interleaved;
    p->rotary_q_by_row = rotates_q_by_row(c, p);
    if (!present(&c->seqlens_rotary)) return FA_OK;
    TRY(check_index_per_batch(&c->seqlens_rotary, &c->q, p->b, err));
    p->seqlens_rotary = (const int32_t *)c->seqlens_rotary.data;
    return FA_OK;
}

/* Checks keys and values to append that are packed. On the CPU len_new is the longest length. On a GPU the lengths lie
 * on the device, and len_new is a bound. */
static fa_status check_packed_append(const fa_call *c, fa_problem *p, fa_error *err) {
    int64_t b = p->b;
    TRY(check_sums(&c->cu_seqlens_k_new, &c->q, &b, &p->cu_seqlens_k_new, err));
    TRY(check_rank(&c->k_new, 3, K_NEW_PACKED, err));
    TRY(SHAPE(&c->k_new, K_NEW_PACKED, c->k_new.size[0], p->h_kv, p->d));
    TRY(SHAPE(&c->v_new, K_NEW_PACKED, c->k_new.size[0], p->h_kv, p->d_v));
    p->total_new = p->len_new = c->k_new.size[0];
    if (p->device == FA_CPU) {
        TRY(check_cu_seqlens(&c->cu_seqlens_k_new, p->cu_seqlens_k_new, b, p->total_new, -1, "", err));
        p->len_new = 0;
        for (int64_t i = 0; i < p->b; i++) {
            const int64_t len = (int64_t)p->cu_seqlens_k_new[i + 1] - p->cu_seqlens_k_new[i];
            if (len > p->len_new) p->len_new = len;
        }
    }
    return FA_OK;
}

fa_status check_append(const fa_call *c, fa_problem *p, fa_error *err) {
    const bool is_3 = c->layout == FA_OP_3;
    if ((c->layout != FA_OP_KVCACHE && !is_3) || c->pass == FA_BWD) return FA_OK;
    const char *key = is_3 ? "k_new" : "key", *value = is_3 ? "v_new" : "value";
    words w;
    REQUIRE(is_3 || present(&c->block_table) || present(&c->cache_batch_idx) || c->k.size[0] >= p->b,
            "%s must have shape " K_CACHE " with at least the %" PRId64 " rows of q's batch; it has %s", c->k.name,
            p->b, shape_words(&c->k, &w));
    REQUIRE(present(&c->v_new) || !present(&c->k_new), "If %s is supplied, %s must also be passed in; %s is None", key,
            value, c->v_new.name);
    REQUIRE(present(&c->k_new) || !present(&c->v_new), "If %s is supplied, %s must also be passed in; %s is None",
            value, key, c->k_new.name);
    if (present(&c->k_new)) {
        REQUIRE(present(&c->seqused_k), "If %s is supplied, seqlens_k must also be passed in; %s is None", key,
                is_3 ? c->seqused_k.name : "cache_seqlens");
        if (present(&c->cu_seqlens_k_new)) {
            TRY(check_packed_append(c, p, err));
        } else {
            TRY(check_rank(&c->k_new, 4, K_NEW, err));
            p->len_new = c->k_new.size[1];
        }
        const bool is_bound = p->cu_seqlens_k_new && p->device == FA_CUDA;
        if (is_bound && p->len_new > p->len_kv) p->len_new = p->len_kv;
        REQUIRE(p->len_new <= p->len_kv,
                "If %s is supplied, it must have seqlen <= the seqlen of the KV cache; %s has %s%" PRId64
                ", the cache %" PRId64,
                key, c->k_new.name, p->cu_seqlens_k_new ? "a sequence of " : "", p->len_new, p->len_kv);
        if (!p->cu_seqlens_k_new) {
            TRY(SHAPE(&c->k_new, K_NEW, p->b, p->len_new, p->h_kv, p->d));
            TRY(SHAPE(&c->v_new, K_NEW, p->b, p->len_new, p->h_kv, p->d_v));
        }
        p->k_new = view_of(&c->k_new);
        p->v_new = view_of(&c->v_new);
    }
    return check_rotary(c, p, err);
}
