/* Tensors -> problem: every check, every message.
 *
 * Order: device, dtype, rank, shape, stride, options, and on the CPU the values inside length and index tensors. A
 * message names the argument, says what came and what is allowed, and keeps the wording that callers of flash-attn 2
 * match on. Nothing is written before the last check has passed. */
#include "call.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define REQUIRE(condition, ...)                                                                                        \
    do {                                                                                                               \
        if (!(condition)) return fa_fail(err, FA_EINVAL, __VA_ARGS__);                                                 \
    } while (0)
#define TRY(step)                                                                                                      \
    do {                                                                                                               \
        fa_status try_status = (step);                                                                                 \
        if (try_status != FA_OK) return try_status;                                                                    \
    } while (0)

fa_status fa_fail(fa_error *err, fa_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    return status;
}

/* ---- words for messages ------------------------------------------------------------------------------------ */

typedef struct {
    char text[160];
} words;

static const char *shape_words(const fa_tensor *t, words *w) {
    int at = snprintf(w->text, sizeof w->text, "(");
    for (int64_t i = 0; i < t->ndim && at < (int)sizeof w->text - 24; i++)
        at += snprintf(w->text + at, sizeof w->text - (size_t)at, i ? ", %" PRId64 : "%" PRId64, t->size[i]);
    snprintf(w->text + at, sizeof w->text - (size_t)at, ")");
    return w->text;
}

static const char *dtype_words(int32_t dtype) {
    if (dtype == fa_torch.f16) return "fp16";
    if (dtype == fa_torch.bf16) return "bf16";
    if (dtype == fa_torch.f32) return "fp32";
    if (dtype == fa_torch.f64) return "fp64";
    if (dtype == fa_torch.i32) return "int32";
    if (dtype == fa_torch.i64) return "int64";
    if (dtype == fa_torch.u8) return "uint8";
    return "another dtype";
}

static const char *device_words(int32_t device_type, int32_t device_idx, words *w) {
    if (device_type == fa_torch.cpu) return "the CPU";
    if (device_type != fa_torch.cuda) return "another kind of device";
    snprintf(w->text, sizeof w->text, "CUDA (cuda:%d)", device_idx);
    return w->text;
}

/* ---- checks of one tensor ---------------------------------------------------------------------------------- */

static bool present(const fa_tensor *t) { return t->handle != NULL; }

static int64_t num_elements(const fa_tensor *t) {
    int64_t n = 1;
    for (int64_t i = 0; i < t->ndim; i++) n *= t->size[i];
    return n;
}

/* A stride means something only if its dimension has more than one element and the tensor has any. */
static bool last_dim_contiguous(const fa_tensor *t) {
    return t->ndim == 0 || t->size[t->ndim - 1] <= 1 || t->stride[t->ndim - 1] == 1 || num_elements(t) == 0;
}

static bool contiguous(const fa_tensor *t) {
    int64_t stride = 1;
    for (int64_t i = t->ndim - 1; i >= 0; i--) {
        if (t->size[i] > 1 && t->stride[i] != stride) return num_elements(t) == 0;
        stride *= t->size[i];
    }
    return true;
}

static bool overlaps_itself(const fa_tensor *t) {
    for (int64_t i = 0; i < t->ndim; i++)
        if (t->size[i] > 1 && t->stride[i] == 0) return num_elements(t) > 0;
    return false;
}

static fa_status check_device(const fa_tensor *t, const fa_tensor *q, fa_error *err) {
    words here, there;
    REQUIRE(t->device_type == q->device_type && (t->device_type == fa_torch.cpu || t->device_idx == q->device_idx),
            "%s must be on %s, where q is; it is on %s", t->name, device_words(q->device_type, q->device_idx, &there),
            device_words(t->device_type, t->device_idx, &here));
    return FA_OK;
}

static fa_status check_rank(const fa_tensor *t, int64_t ndim, const char *dims, fa_error *err) {
    words w;
    REQUIRE(t->ndim == ndim, "%s must have %" PRId64 " dimensions %s; it has %" PRId64 ": shape %s", t->name, ndim, dims,
            t->ndim, shape_words(t, &w));
    return FA_OK;
}

/* size[i] < 0 leaves dimension i free. */
static fa_status check_shape(const fa_tensor *t, int64_t ndim, const int64_t *size, const char *dims, fa_error *err) {
    TRY(check_rank(t, ndim, dims, err));
    for (int64_t i = 0; i < ndim; i++) {
        words came, want;
        if (size[i] < 0 || t->size[i] == size[i]) continue;
        fa_tensor wanted = {.ndim = ndim, .size = size};
        return fa_fail(err, FA_EINVAL, "%s must have shape %s = %s%s; it has %s", t->name, dims,
                       shape_words(&wanted, &want), size[0] < 0 ? " (-1: free)" : "", shape_words(t, &came));
    }
    return FA_OK;
}
#define SHAPE(t, dims, ...)                                                                                            \
    check_shape(t, (int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]){__VA_ARGS__}, dims, err)

/* A tensor of lengths or indices: int32, contiguous, on q's device. */
static fa_status check_index(const fa_tensor *t, const fa_tensor *q, fa_error *err) {
    TRY(check_device(t, q, err));
    REQUIRE(t->dtype == fa_torch.i32, "%s must have dtype int32; it is %s", t->name, dtype_words(t->dtype));
    return FA_OK;
}

static fa_status check_index_per_batch(const fa_tensor *t, const fa_tensor *q, int64_t b, fa_error *err) {
    if (!present(t)) return FA_OK;
    TRY(check_index(t, q, err));
    TRY(SHAPE(t, "(batch_size)", b));
    REQUIRE(contiguous(t), "%s must be contiguous; it has stride %" PRId64, t->name, t->stride[0]);
    return FA_OK;
}

/* ---- q, k, v, out and gradients ------------------------------------------------------------------------------ */

static fa_status check_dtypes(const fa_call *c, fa_dtype *dtype, fa_error *err) {
    int32_t came = c->q.dtype;
    if (came == fa_torch.f16) *dtype = FA_F16;
    else if (came == fa_torch.bf16) *dtype = FA_BF16;
    else if (came == fa_torch.f32) *dtype = FA_F32;
    else if (came == fa_torch.f64 && c->q.device_type == fa_torch.cpu) *dtype = FA_F64;
    else
        return fa_fail(err, FA_EINVAL,
                       "FlashAttention only support fp16 and bf16 data type, fp32, and on the CPU fp64; q is %s",
                       dtype_words(came));
    const struct {
        const fa_tensor *t;
        const char *format;
    } same[] = {
        {&c->k, "query and key must have the same dtype; q is %s, %s is %s"},
        {&c->v, "query and value must have the same dtype; q is %s, %s is %s"},
        {&c->out, c->pass == FA_BWD ? "query and out must have the same dtype; q is %s, %s is %s"
                                    : "Output must have the same dtype as inputs; q is %s, %s is %s"},
        {&c->dout, "query and dout must have the same dtype; q is %s, %s is %s"},
        {&c->dq, "dq must have the same dtype as q; q is %s, %s is %s"},
        {&c->dk, "dk must have the same dtype as q; q is %s, %s is %s"},
        {&c->dv, "dv must have the same dtype as q; q is %s, %s is %s"},
        {&c->k_new, "query and key must have the same dtype; q is %s, %s is %s"},
        {&c->v_new, "query and value must have the same dtype; q is %s, %s is %s"},
        {&c->rotary_cos, "rotary_cos must have the same dtype as query; q is %s, %s is %s"},
        {&c->rotary_sin, "rotary_cos must have the same dtype as query; q is %s, %s is %s"},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        const fa_tensor *t = same[i].t;
        if (!present(t)) continue;
        TRY(check_device(t, &c->q, err));
        REQUIRE(t->dtype == came, same[i].format, dtype_words(came), t->name, dtype_words(t->dtype));
    }
    return FA_OK;
}

static fa_status check_last_dims(const fa_call *c, fa_error *err) {
    const fa_tensor *inputs[] = {&c->q, &c->k, &c->v, &c->k_new, &c->v_new};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        REQUIRE(!present(inputs[i]) || last_dim_contiguous(inputs[i]),
                "Input tensor must have contiguous last dimension; %s has stride %" PRId64 " there", inputs[i]->name,
                inputs[i]->stride[inputs[i]->ndim - 1]);
    const struct {
        const fa_tensor *t;
        const char *what;
    } others[] = {{&c->out, c->pass == FA_BWD ? "out tensor" : "Output tensor"},
                  {&c->dout, "dout tensor"},
                  {&c->dq, "dq"},
                  {&c->dk, "dk"},
                  {&c->dv, "dv"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        REQUIRE(!present(others[i].t) || last_dim_contiguous(others[i].t),
                "%s must have contiguous last dimension; %s has stride %" PRId64 " there", others[i].what,
                others[i].t->name, others[i].t->stride[others[i].t->ndim - 1]);
    const fa_tensor *written[] = {c->pass == FA_BWD ? &c->dq : &c->out, &c->dk, &c->dv,
                                  present(&c->k_new) ? &c->k : &c->dk, present(&c->k_new) ? &c->v : &c->dv};
    for (size_t i = 0; i < sizeof written / sizeof *written; i++)
        REQUIRE(!present(written[i]) || !overlaps_itself(written[i]),
                "%s is written and must not overlap itself; it is an expanded tensor (stride 0)", written[i]->name);
    return FA_OK;
}

/* The view of a tensor of which every dimension's stride is meaningful only where its size exceeds one. */
static fa_view view_of(const fa_tensor *t) {
    if (!present(t)) return (fa_view){0};
    int64_t at = t->ndim - 3;
    return (fa_view){.data = t->data,
                     .stride_b = t->ndim == 4 ? t->stride[0] : 0,
                     .stride_row = t->stride[at],
                     .stride_h = t->stride[at + 1]};
}

#define Q_DIMS       "(batch_size, seqlen_q, num_heads, head_size)"
#define K_DIMS       "(batch_size, seqlen_k, num_heads_k, head_size)"
#define Q_PACKED     "(total_q, num_heads, head_size)"
#define K_PACKED     "(total_k, num_heads_k, head_size)"
#define K_PAGED      "(num_blocks, page_block_size, num_heads_k, head_size)"
#define K_CACHE      "(batch_size_cache, seqlen_cache, num_heads_k, head_size)"
#define K_NEW        "(batch_size, seqlen_new, num_heads_k, head_size)"
#define FREE_SIZE    (-1)

static fa_status check_shapes(const fa_call *c, fa_problem *p, fa_error *err) {
    const bool packed = c->layout == FA_OP_VARLEN, paged = present(&c->block_table);
    const char *q_dims = packed ? Q_PACKED : Q_DIMS;
    const char *k_dims = paged ? K_PAGED : packed ? K_PACKED : c->layout == FA_OP_KVCACHE ? K_CACHE : K_DIMS;
    const int64_t q_ndim = packed ? 3 : 4, k_ndim = packed && !paged ? 3 : 4;

    TRY(check_rank(&c->q, q_ndim, q_dims, err));
    TRY(check_rank(&c->k, k_ndim, k_dims, err));
    const int64_t *q = c->q.size, *k = c->k.size;
    p->d = q[q_ndim - 1];
    p->h = q[q_ndim - 2];
    p->h_kv = k[k_ndim - 2];
    p->len_q = q[q_ndim - 3];
    p->len_kv = k[k_ndim - 3];
    if (!packed) p->b = q[0];

    REQUIRE(p->d >= 1, "q must have a head_size of at least 1; it has shape ending in 0");
    REQUIRE(p->d <= FA_MAX_HEAD_DIM, "FlashAttention %s only supports head dimension at most %d; q has %" PRId64,
            c->pass == FA_BWD ? "backward" : "forward", FA_MAX_HEAD_DIM, p->d);
    REQUIRE(p->h_kv >= 1, "k must have at least one head; it has num_heads_k = 0");
    REQUIRE(p->h % p->h_kv == 0,
            "Number of heads in key/value must divide number of heads in query; k has %" PRId64 ", q has %" PRId64,
            p->h_kv, p->h);

    const int64_t kv_rows = p->len_kv;
    if (packed && !paged) {
        TRY(SHAPE(&c->k, k_dims, kv_rows, p->h_kv, p->d));
        TRY(SHAPE(&c->v, k_dims, kv_rows, p->h_kv, p->d));
        if (present(&c->dk)) TRY(SHAPE(&c->dk, k_dims, kv_rows, p->h_kv, p->d));
        if (present(&c->dv)) TRY(SHAPE(&c->dv, k_dims, kv_rows, p->h_kv, p->d));
    } else {
        int64_t k_batch = c->layout == FA_OP_DENSE ? p->b : k[0];
        TRY(SHAPE(&c->k, k_dims, k_batch, kv_rows, p->h_kv, p->d));
        TRY(SHAPE(&c->v, k_dims, k_batch, kv_rows, p->h_kv, p->d));
        if (present(&c->dk)) TRY(SHAPE(&c->dk, k_dims, k_batch, kv_rows, p->h_kv, p->d));
        if (present(&c->dv)) TRY(SHAPE(&c->dv, k_dims, k_batch, kv_rows, p->h_kv, p->d));
    }
    const fa_tensor *like_q[] = {&c->out, &c->dout, &c->dq};
    for (size_t i = 0; i < sizeof like_q / sizeof *like_q; i++)
        if (present(like_q[i])) TRY(check_shape(like_q[i], q_ndim, q, q_dims, err));

    p->q = view_of(&c->q);
    p->k = view_of(&c->k);
    p->v = view_of(&c->v);
    p->o = view_of(&c->out);
    p->dout = view_of(&c->dout);
    p->dq = view_of(&c->dq);
    p->dk = view_of(&c->dk);
    p->dv = view_of(&c->dv);
    if (paged) {
        p->num_pages = k[0];
        p->page_size = k[1];
        REQUIRE(p->page_size >= 1, "k must have a page size (dimension 1) of at least 1; it has 0");
    }
    p->total_q = packed ? p->len_q : p->b * p->len_q;
    p->total_kv = packed ? p->len_kv : p->b * p->len_kv;
    return FA_OK;
}

/* ---- options ----------------------------------------------------------------------------------------------- */

static fa_status check_alibi(const fa_call *c, fa_problem *p, fa_error *err) {
    const fa_tensor *t = &c->alibi_slopes;
    if (!present(t)) return FA_OK;
    words w;
    TRY(check_device(t, &c->q, err));
    REQUIRE(t->dtype == fa_torch.f32, "ALiBi slopes must have dtype fp32; alibi_slopes is %s", dtype_words(t->dtype));
    bool shared = t->ndim == 1 && t->size[0] == p->h;
    bool own = t->ndim == 2 && t->size[0] == p->b && t->size[1] == p->h;
    REQUIRE(shared || own,
            "Expected alibi_slopes of shape (num_heads) = (%" PRId64 ") or (batch_size, num_heads) = (%" PRId64
            ", %" PRId64 ") to be true; it has %s",
            p->h, p->b, p->h, shape_words(t, &w));
    REQUIRE(last_dim_contiguous(t), "ALiBi slopes tensor must have contiguous last dimension; alibi_slopes has stride "
                                    "%" PRId64 " there", t->stride[t->ndim - 1]);
    p->alibi_slopes = (const float *)t->data;
    p->alibi_stride_b = own ? t->stride[0] : 0;
    return FA_OK;
}

static fa_status check_options(const fa_call *c, fa_problem *p, fa_error *err) {
    TRY(check_alibi(c, p, err));
    REQUIRE(isfinite(c->softmax_scale), "softmax_scale must be finite; it is %g", c->softmax_scale);
    REQUIRE(!isnan(c->softcap) && !isinf(c->softcap), "softcap must be finite; it is %g", c->softcap);
    p->scale = c->softmax_scale;
    p->softcap = c->softcap > 0 ? c->softcap : 0;

    REQUIRE(c->dropout_p < 1, "Expected p_dropout < 1.f to be true; dropout_p is %g, allowed is 0 <= dropout_p < 1",
            c->dropout_p);
    REQUIRE(c->dropout_p >= 0, "dropout_p must be at least 0; it is %g", c->dropout_p);
    REQUIRE(!c->return_softmax || c->dropout_p > 0,
            "return_softmax is only supported when p_dropout > 0.0; dropout_p is %g", c->dropout_p);
    p->dropout_p = c->dropout_p;
    p->keep_max = (uint8_t)floorf(255.0f * (1.0f - (float)c->dropout_p));

    p->window_left = c->window_left < 0 ? -1 : c->window_left;
    p->window_right = c->causal ? 0 : c->window_right < 0 ? -1 : c->window_right;

    REQUIRE(c->num_splits <= 128, "num_splits > 128 not supported; num_splits is %" PRId64, c->num_splits);
    REQUIRE(!(c->layout == FA_OP_VARLEN && present(&c->block_table) && c->num_splits > 1),
            "num_splits > 1 is not supported for varlen paged KV; num_splits is %" PRId64, c->num_splits);
    p->num_splits = c->num_splits < 0 ? 0 : c->num_splits;
    p->deterministic = c->deterministic;
    return FA_OK;
}

/* ---- lengths and indices ------------------------------------------------------------------------------------- */

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
    p->block_table = (const int32_t *)t->data;
    p->block_table_stride = t->size[0] > 1 ? t->stride[0] : 0;
    p->block_table_cols = t->size[1];
    return FA_OK;
}

static fa_status check_lengths(const fa_call *c, fa_problem *p, fa_error *err) {
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
    if (c->layout == FA_OP_KVCACHE && p->block_table) p->len_kv = p->block_table_cols * p->page_size;
    return FA_OK;
}

/* The values of cu_seqlens: from 0, never falling, within the tensor (total < 0: no bound) and under max_seqlen. */
static fa_status check_cu_seqlens(const fa_tensor *t, int64_t b, int64_t total, int64_t max_len, const char *max_name,
                                  fa_error *err) {
    const int32_t *cu = (const int32_t *)t->data;
    REQUIRE(cu[0] == 0, "%s must start at 0; it starts at %d", t->name, cu[0]);
    for (int64_t i = 0; i < b; i++) {
        REQUIRE(cu[i + 1] >= cu[i], "%s must not decrease; element %" PRId64 " is %d after %d", t->name, i + 1, cu[i + 1],
                cu[i]);
        REQUIRE(max_len < 0 || cu[i + 1] - cu[i] <= max_len,
                "%s is %" PRId64 ", less than the %d rows of sequence %" PRId64 " in %s", max_name, max_len,
                cu[i + 1] - cu[i], i, t->name);
    }
    REQUIRE(total < 0 || cu[b] <= total, "%s must end at or before the %" PRId64 " rows of its tensor; it ends at %d",
            t->name, total, cu[b]);
    return FA_OK;
}

/* Values inside index tensors, CPU only: afterwards every row that sequence.h can name lies within its tensor. */
static fa_status check_values(const fa_call *c, const fa_problem *p, fa_error *err) {
    const bool kvcache = c->layout == FA_OP_KVCACHE;
    const char *used_name = kvcache ? "cache_seqlens" : "seqused_k";
    if (p->cu_seqlens_q) {
        TRY(check_cu_seqlens(&c->cu_seqlens_q, p->b, p->total_q, p->len_q, "max_seqlen_q", err));
        TRY(check_cu_seqlens(&c->cu_seqlens_k, p->b, p->block_table ? -1 : p->total_kv, p->seqused_k ? -1 : p->len_kv,
                             "max_seqlen_k", err));
    }
    const int64_t cache_rows = p->block_table ? c->block_table.size[0] : c->k.size[0];
    const char *cache_name = p->block_table ? "block_table" : c->k.name;
    for (int64_t i = 0; i < p->b; i++) {
        int64_t row = i;
        if (p->cache_batch_idx) {
            row = p->cache_batch_idx[i];
            REQUIRE(row >= 0 && row < cache_rows,
                    "cache_batch_idx must be within the %" PRId64 " rows of %s; element %" PRId64 " is %" PRId64,
                    cache_rows, cache_name, i, row);
        }
        /* keys before the append, and how many there may be */
        int64_t room = p->cu_seqlens_k && !p->block_table ? p->cu_seqlens_k[i + 1] - p->cu_seqlens_k[i]
                       : p->block_table                   ? p->block_table_cols * p->page_size
                                                          : p->len_kv;
        int64_t len = p->cu_seqlens_k ? p->cu_seqlens_k[i + 1] - p->cu_seqlens_k[i] : p->len_kv;
        if (p->seqused_k) {
            len = p->seqused_k[i];
            REQUIRE(len >= 0, "%s must be at least 0; element %" PRId64 " is %" PRId64, used_name, i, len);
            REQUIRE(p->block_table || len <= room,
                    "%s must be at most the %" PRId64 " keys there are; element %" PRId64 " is %" PRId64, used_name, room,
                    i, len);
            REQUIRE(kvcache || len <= p->len_kv,
                    "max_seqlen_k is %" PRId64 ", less than the %" PRId64 " keys of sequence %" PRId64 " in seqused_k",
                    p->len_kv, len, i);
        }
        const int64_t end = len + p->len_new;
        if (p->block_table) {
            const int64_t pages = (end + p->page_size - 1) / p->page_size;
            REQUIRE(end <= room,
                    "block_table has %" PRId64 " columns of pages of %" PRId64 " keys, room for %" PRId64
                    "; sequence %" PRId64 " needs %" PRId64 " (%s %" PRId64 " and %" PRId64 " new)",
                    p->block_table_cols, p->page_size, room, i, end, kvcache ? "cache_seqlens" : "length", len, p->len_new);
            for (int64_t page = 0; page < pages; page++) {
                int32_t number = p->block_table[row * p->block_table_stride + page];
                REQUIRE(number >= 0 && number < p->num_pages,
                        "block_table must name pages below %" PRId64 "; entry (%" PRId64 ", %" PRId64 ") is %d",
                        p->num_pages, row, page, number);
            }
        } else {
            REQUIRE(end <= room,
                    "cache_seqlens leaves no room to append: sequence %" PRId64 " holds %" PRId64 " keys and gets %" PRId64
                    " new ones, the KV cache has room for %" PRId64,
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
    REQUIRE(present(&c->k_new), "If rotary cos/sin are provided, new key / value to be appended to KV cache must also be "
                                "provided; k is None");
    TRY(check_rank(cos, 2, "(seqlen_ro, rotary_dim / 2)", err));
    p->rotary_rows = cos->size[0];
    p->rotary_dim = 2 * cos->size[1];
    REQUIRE(p->rotary_dim <= p->d, "rotary_dim must be <= headdim; rotary_cos gives %" PRId64 ", q has %" PRId64,
            p->rotary_dim, p->d);
    REQUIRE(p->rotary_dim % 16 == 0,
            "Only rotary dimensions divisible by 16 are currently supported; rotary_cos gives %" PRId64, p->rotary_dim);
    REQUIRE(p->rotary_rows >= p->len_kv,
            "cos/sin seqlen must be at least the seqlen of KV cache; rotary_cos has %" PRId64 " rows, the cache %" PRId64,
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

static fa_status check_append(const fa_call *c, fa_problem *p, fa_error *err) {
    if (c->layout != FA_OP_KVCACHE) return FA_OK;
    words w;
    REQUIRE(present(&c->block_table) || present(&c->cache_batch_idx) || c->k.size[0] >= p->b,
            "%s must have shape " K_CACHE " with at least the %" PRId64 " rows of q's batch; it has %s", c->k.name, p->b,
            shape_words(&c->k, &w));
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

/* ---- backward -------------------------------------------------------------------------------------------------- */

static fa_status check_saved(const fa_call *c, fa_problem *p, fa_error *err) {
    if (c->pass != FA_BWD) return FA_OK;
    const fa_tensor *lse = &c->softmax_lse, *rng = &c->rng_state;
    TRY(check_device(lse, &c->q, err));
    REQUIRE(lse->dtype == fa_torch.f32, "softmax_lse must have dtype fp32; it is %s", dtype_words(lse->dtype));
    if (c->layout == FA_OP_VARLEN) TRY(SHAPE(lse, "(num_heads, total_q)", p->h, p->total_q));
    else TRY(SHAPE(lse, "(batch_size, num_heads, seqlen_q)", p->b, p->h, p->len_q));
    REQUIRE(last_dim_contiguous(lse), "softmax_lse must have contiguous last dimension; it has stride %" PRId64,
            lse->stride[lse->ndim - 1]);
    p->lse = (fa_row_stats){.data = (float *)lse->data,
                            .stride_b = c->layout == FA_OP_VARLEN ? 0 : lse->stride[0],
                            .stride_h = lse->stride[lse->ndim - 2]};
    if (c->dropout_p == 0) return FA_OK;
    REQUIRE(present(rng), "rng_state must be given when dropout_p > 0: the one that the forward returned; it is None");
    TRY(check_device(rng, &c->q, err));
    REQUIRE(rng->dtype == fa_torch.i64, "rng_state must have dtype int64; it is %s", dtype_words(rng->dtype));
    TRY(SHAPE(rng, "(2)", 2));
    REQUIRE(contiguous(rng), "rng_state must be contiguous; it has stride %" PRId64, rng->stride[0]);
    if (p->device == FA_CPU) {
        const int64_t *state = (const int64_t *)rng->data;
        p->seed = (uint64_t)state[0];
        p->offset = (uint64_t)state[1];
    }
    return FA_OK;
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

fa_status fa_check_call(const fa_call *c, fa_problem *p, fa_error *err) {
    words w;
    *p = (fa_problem){.pass = c->pass};
    REQUIRE(c->q.device_type == fa_torch.cpu || c->q.device_type == fa_torch.cuda, "q must be on the CPU or on CUDA; it "
            "is on %s", device_words(c->q.device_type, c->q.device_idx, &w));
    p->device = c->q.device_type == fa_torch.cuda ? FA_CUDA : FA_CPU;
    p->device_idx = c->q.device_idx;
    TRY(check_dtypes(c, &p->dtype, err));
    TRY(check_shapes(c, p, err));
    TRY(check_last_dims(c, err));
    TRY(check_lengths(c, p, err));
    TRY(check_append(c, p, err));
    TRY(check_options(c, p, err));
    TRY(check_saved(c, p, err));
    return p->device == FA_CPU ? check_values(c, p, err) : FA_OK;
}
