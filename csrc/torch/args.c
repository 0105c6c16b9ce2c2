/* Checks the arguments of a call and turns the tensors into a problem.
 *
 * The order of the checks is device, dtype, rank, shape, stride and options. On the CPU, the values inside length and
 * index tensors follow. A message names the argument, the value that came and the allowed values. A message keeps the
 * wording that callers of flash-attn 2 match on. Nothing is written before the last check has passed. */
#include "args.h"

#include <math.h>

#include "check.h"
#include "gpu_values.h"
#include "lengths.h"
#include "overlap.h"

/* ---- q, k, v, out and gradients ------------------------------------------------------------------------------ */

static fa_status check_dtypes(const fa_call *c, fa_dtype *dtype, fa_error *err) {
    int32_t came = c->q.dtype;
    if (came == fa_torch.f16)
        *dtype = FA_F16;
    else if (came == fa_torch.bf16)
        *dtype = FA_BF16;
    else if (came == fa_torch.f32)
        *dtype = FA_F32;
    else if (came == fa_torch.f64 && !is_on_gpu(&c->q))
        *dtype = FA_F64;
    else if (came == fa_torch.e4m3 && c->layout == FA_OP_3 && c->pass == FA_FWD)
        *dtype = FA_E4M3;
    else if (c->layout == FA_OP_3 && c->pass == FA_FWD)
        return fa_fail(err, FA_EINVAL,
                       "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type, fp32, and on the CPU fp64; "
                       "q is %s",
                       dtype_words(came));
    else
        return fa_fail(err, FA_EINVAL,
                       "FlashAttention only support fp16 and bf16 data type, fp32, and on the CPU fp64; q is %s",
                       dtype_words(came));
    /* The dtypes of out, and of cos and sin. */
    const bool is_fp8 = *dtype == FA_E4M3;
    const int32_t wide = is_fp8 ? fa_torch.bf16 : came, table = is_fp8 && c->rotary_cos.dtype == came ? came : wide;
    const struct {
        const fa_tensor *t;
        int32_t wanted;
        const char *format;
    } same[] = {
        {&c->k, came, "query and key must have the same dtype; q is %s, %s is %s"},
        {&c->v, came, "query and value must have the same dtype; q is %s, %s is %s"},
        {&c->out, wide,
         c->pass == FA_BWD ? "query and out must have the same dtype; q is %s, %s is %s"
         : is_fp8          ? "For FP8 input, output must have dtype BF16; q is %s, %s is %s"
                           : "Output must have the same dtype as inputs; q is %s, %s is %s"},
        {&c->dout, came, "query and dout must have the same dtype; q is %s, %s is %s"},
        {&c->dq, came, "dq must have the same dtype as q; q is %s, %s is %s"},
        {&c->dk, came, "dk must have the same dtype as q; q is %s, %s is %s"},
        {&c->dv, came, "dv must have the same dtype as q; q is %s, %s is %s"},
        {&c->k_new, came, "query and key must have the same dtype; q is %s, %s is %s"},
        {&c->v_new, came, "query and value must have the same dtype; q is %s, %s is %s"},
        {&c->qv, came, "query and q_v must have the same dtype; q is %s, %s is %s"},
        {&c->rotary_cos, table,
         is_fp8 ? "rotary_cos must have dtype bf16 or FP8 if query is FP8; q is %s, %s is %s"
                : "rotary_cos must have the same dtype as query; q is %s, %s is %s"},
        {&c->rotary_sin, table,
         is_fp8 ? "rotary_sin must have the dtype of rotary_cos, bf16 or FP8, if query is FP8; q is %s, %s is %s"
                : "rotary_cos must have the same dtype as query, and so must rotary_sin; q is %s, %s is %s"},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        const fa_tensor *t = same[i].t;
        if (!present(t)) continue;
        TRY(check_device(t, &c->q, err));
        REQUIRE(t->dtype == same[i].wanted, same[i].format, dtype_words(came), t->name, dtype_words(t->dtype));
    }
    return FA_OK;
}

static fa_status check_last_dims(const fa_call *c, fa_error *err) {
    const fa_tensor *inputs[] = {&c->q, &c->k, &c->v, &c->k_new, &c->v_new, &c->qv};
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
    const fa_tensor *written[MAX_WRITTEN];
    for (int i = written_tensors(c, written) - 1; i >= 0; i--) TRY(check_distinct_elements(written[i], err));
    return FA_OK;
}

/* The shape of a tensor of q's kind or of k's kind, in words. The last dimension of v and of the results has a name of
 * its own in flash-attn 3, because its size may differ. */
#define DIMS(rows, heads, size) "(" rows ", " heads ", " size ")"
static const char *q_dims_of(const fa_call *c, bool as_out) {
    static const char *const dims[2][2] = {
        {DIMS("batch_size, seqlen_q", "num_heads", "head_size"),
         DIMS("batch_size, seqlen_q", "num_heads", "head_size_v")},
        {DIMS("total_q", "num_heads", "head_size"), DIMS("total_q", "num_heads", "head_size_v")}};
    return dims[packs_q(c)][as_out && c->layout == FA_OP_3];
}

static const char *k_dims_of(const fa_call *c, bool as_v) {
    static const char *const dims[4][2] = {
        {DIMS("batch_size, seqlen_k", "num_heads_k", "head_size"),
         DIMS("batch_size, seqlen_k", "num_heads_k", "head_size_v")},
        {K_CACHE, DIMS("batch_size_cache, seqlen_cache", "num_heads_k", "head_size_v")},
        {DIMS("total_k", "num_heads_k", "head_size"), DIMS("total_k", "num_heads_k", "head_size_v")},
        {DIMS("num_blocks, page_block_size", "num_heads_k", "head_size"),
         DIMS("num_blocks, page_block_size", "num_heads_k", "head_size_v")}};
    const int kind = present(&c->block_table) ? 3 : packs_k(c) ? 2 : c->layout == FA_OP_KVCACHE ? 1 : 0;
    return dims[kind][as_v && c->layout == FA_OP_3];
}

/* Checks which arguments of an op of flash-attn 3 may come together. */
static fa_status check_together(const fa_call *c, fa_error *err) {
    if (c->layout != FA_OP_3) return FA_OK;
    const bool packed_q = present(&c->cu_seqlens_q), packed_k = present(&c->cu_seqlens_k);
    REQUIRE(!packed_q || c->max_seqlen_q != FA_NOT_GIVEN,
            "max_seqlen_q must be provided if cu_seqlens_q is provided; it is None");
    REQUIRE(!packed_k || c->max_seqlen_k != FA_NOT_GIVEN,
            "max_seqlen_k must be provided if cu_seqlens_k is provided; it is None");
    REQUIRE(!packed_k || !present(&c->block_table),
            "If cu_seqlens_k is passed in, then page table is not supported; page_table is a tensor");
    REQUIRE(!packed_k || !present(&c->cache_batch_idx),
            "If cu_seqlens_k is passed in, then kv_batch_idx is not supported; kv_batch_idx is a tensor");
    REQUIRE(!packed_k || !present(&c->k_new),
            "If cu_seqlens_k is passed in, then k_new is not supported: packed keys have no room; k_new is a tensor");
    REQUIRE(!present(&c->cu_seqlens_k_new) || present(&c->k_new),
            "If cu_seqlens_k_new is passed in, k_new must also be passed in; k_new is None");
    return FA_OK;
}

/* Checks a tensor that has the sizes of another, but for the last size. */
static fa_status check_like(const fa_tensor *t, const fa_tensor *like, int64_t last, const char *dims, fa_error *err) {
    int64_t size[4];
    if (!present(t)) return FA_OK;
    for (int64_t i = 0; i < like->ndim; i++) size[i] = like->size[i];
    size[like->ndim - 1] = last;
    return check_shape(t, like->ndim, size, dims, err);
}

bool fa_head_dims_of_3_fit(int64_t d, int64_t d_v) {
    return d_v == d || (d > 128 && d <= 192 && d_v <= 128) || (d <= 64 && d_v <= FA_MAX_HEAD_DIM_V);
}

/* Checks the head dimensions of an op of flash-attn 3. */
static fa_status check_head_dims_of_3(const fa_call *c, fa_problem *p, fa_error *err) {
    const int64_t step = p->dtype == FA_E4M3 ? 16 : 8;
    REQUIRE(p->d % step == 0, "head_size should be a multiple of %" PRId64 "; q has %" PRId64, step, p->d);
    REQUIRE(p->d_v % step == 0 && p->d_v >= 1, "head_size_v should be a multiple of %" PRId64 "; v has %" PRId64, step,
            p->d_v);
    REQUIRE(
        fa_head_dims_of_3_fit(p->d, p->d_v),
        "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in (96, 128] "
        "or less, or Q/K headdim up to 64 and V headdim up to %d; q has %" PRId64 ", v has %" PRId64,
        FA_MAX_HEAD_DIM_V, p->d, p->d_v);
    REQUIRE(p->d_v <= FA_MAX_HEAD_DIM || p->dtype != FA_E4M3,
            "HeaddimV > 256 requires fp16 and bf16 data type; v has %" PRId64 ", q is %s", p->d_v,
            dtype_words(c->q.dtype));
    REQUIRE(p->d_v <= FA_MAX_HEAD_DIM || c->pass == FA_FWD,
            "FlashAttention backward only supports head dimension at most %d; v has %" PRId64, FA_MAX_HEAD_DIM, p->d_v);
    if (!present(&c->qv)) return FA_OK;
    const char *name = c->qv.name; /* upstream's words say q_v, and not every function calls the argument so */
    REQUIRE(p->d <= 64, "q_v is only supported for head_size <= 64; %s was passed, and q has %" PRId64, name, p->d);
    REQUIRE(p->d_v >= 256, "q_v is only supported for hdim_v >= 256. %s was passed, and v has %" PRId64, name, p->d_v);
    REQUIRE(p->dtype != FA_E4M3, "q_v is only supported for fp16 and bf16 data type; %s is %s", name,
            dtype_words(c->qv.dtype));
    return FA_OK;
}

static fa_status check_shapes(const fa_call *c, fa_problem *p, fa_error *err) {
    const bool packed_q = packs_q(c), packed_k = packs_k(c), paged = present(&c->block_table);
    const bool is_3 = c->layout == FA_OP_3;
    words w;
    const char *q_dims = q_dims_of(c, false), *k_dims = k_dims_of(c, false), *v_dims = k_dims_of(c, true);
    const int64_t q_ndim = packed_q ? 3 : 4, k_ndim = packed_k ? 3 : 4;

    TRY(check_rank(&c->q, q_ndim, q_dims, err));
    TRY(check_rank(&c->k, k_ndim, k_dims, err));
    if (is_3) TRY(check_rank(&c->v, k_ndim, v_dims, err));
    const int64_t *q = c->q.size, *k = c->k.size;
    p->d = q[q_ndim - 1];
    p->d_v = is_3 ? c->v.size[k_ndim - 1] : p->d;
    p->h = q[q_ndim - 2];
    p->h_kv = k[k_ndim - 2];
    p->len_q = q[q_ndim - 3];
    p->len_kv = k[k_ndim - 3];
    if (!packed_q) p->b = q[0];

    REQUIRE(p->d >= 1, "q must have a head_size of at least 1; it has shape ending in 0");
    REQUIRE(p->d <= FA_MAX_HEAD_DIM, "FlashAttention %s only supports head dimension at most %d; q has %" PRId64,
            c->pass == FA_BWD ? "backward" : "forward", FA_MAX_HEAD_DIM, p->d);
    if (is_3) TRY(check_head_dims_of_3(c, p, err));
    REQUIRE(p->h_kv >= 1, "%s must have at least one head; it has num_heads_k = 0", c->k.name);
    REQUIRE(p->h % p->h_kv == 0,
            "Number of heads in key/value must divide number of heads in query; k has %" PRId64 ", q has %" PRId64,
            p->h_kv, p->h);

    /* An expanded tensor may have any size without using memory. So may a tensor in which another size is 0. */
    const double d_max = (double)(p->d > p->d_v ? p->d : p->d_v);
    const double most = 0x1p62, heads = (double)p->h * d_max, heads_kv = (double)p->h_kv * d_max;
    REQUIRE(p->b <= INT32_MAX && p->h <= INT32_MAX && (double)p->b * (double)p->len_q * fmax(heads, 1) < most,
            "q must have at most 2147483647 sequences and heads, and 2^62 elements; it has %s", shape_words(&c->q, &w));
    REQUIRE((double)k[0] * (packed_k ? 1 : (double)p->len_kv) * heads_kv < most,
            "%s must have fewer than 2^62 elements; it has %s", c->k.name, shape_words(&c->k, &w));

    const int64_t k_batch = c->layout == FA_OP_DENSE ? p->b : k[0];
    const int64_t k_size[4] = {packed_k ? k[0] : k_batch, packed_k ? p->h_kv : p->len_kv, packed_k ? p->d : p->h_kv,
                               p->d};
    const fa_tensor like_k = {.ndim = k_ndim, .size = k_size};
    TRY(check_like(&c->k, &like_k, p->d, k_dims, err));
    TRY(check_like(&c->v, &like_k, p->d_v, v_dims, err));
    TRY(check_like(&c->dk, &like_k, p->d, k_dims, err));
    TRY(check_like(&c->dv, &like_k, p->d_v, v_dims, err));
    TRY(check_like(&c->out, &c->q, p->d_v, q_dims_of(c, true), err));
    TRY(check_like(&c->dout, &c->q, p->d_v, q_dims_of(c, true), err));
    TRY(check_like(&c->dq, &c->q, p->d, q_dims, err));
    TRY(check_like(&c->qv, &c->q, p->d_v, q_dims_of(c, true), err));

    p->q = view_of(&c->q);
    p->k = view_of(&c->k);
    p->v = view_of(&c->v);
    p->qv = view_of(&c->qv);
    p->o = view_of(&c->out);
    p->dout = view_of(&c->dout);
    p->dq = view_of(&c->dq);
    p->dk = view_of(&c->dk);
    p->dv = view_of(&c->dv);
    p->paged = paged;
    if (paged) {
        p->num_pages = k[0];
        p->page_size = k[1];
        REQUIRE(p->page_size >= 1, "%s must have a page size (dimension 1) of at least 1; it has 0", c->k.name);
    }
    p->total_q = packed_q ? p->len_q : p->b * p->len_q;
    p->total_kv = packed_k || (packed_q && !is_3) ? p->len_kv : p->b * p->len_kv;
    return FA_OK;
}

/* ---- dropout ----------------------------------------------------------------------------------------------- */

fa_status fa_read_dropout_p(double dropout_p, fa_problem *p, fa_error *err) {
    REQUIRE(dropout_p < 1, "Expected p_dropout < 1.f to be true; dropout_p is %g, allowed is 0 <= dropout_p < 1",
            dropout_p);
    REQUIRE(dropout_p >= 0, "dropout_p must be at least 0; it is %g", dropout_p);
    p->dropout_p = dropout_p;
    p->keep_max = (uint8_t)floorf(255.0f * (1.0f - (float)dropout_p));
    return FA_OK;
}

fa_status fa_read_rng_state(const fa_tensor *rng, const fa_tensor *q, fa_problem *p, fa_error *err) {
    TRY(check_device(rng, q, err));
    REQUIRE(rng->dtype == fa_torch.i64, "rng_state must have dtype int64; it is %s", dtype_words(rng->dtype));
    TRY(SHAPE(rng, "(2)", 2));
    REQUIRE(contiguous(rng), "rng_state must be contiguous; it has stride %" PRId64, rng->stride[0]);
    if (p->device == FA_CUDA) {
        p->rng_state = (const uint64_t *)rng->data;
    } else {
        const int64_t *state = (const int64_t *)rng->data;
        p->seed = (uint64_t)state[0];
        p->offset = (uint64_t)state[1];
    }
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
    REQUIRE(last_dim_contiguous(t),
            "ALiBi slopes tensor must have contiguous last dimension; alibi_slopes has stride "
            "%" PRId64 " there",
            t->stride[t->ndim - 1]);
    p->alibi_slopes = (const float *)t->data;
    p->alibi_stride_b = own ? t->stride[0] : 0;
    return FA_OK;
}

static fa_status check_bias(const fa_call *c, fa_problem *p, fa_error *err) {
    const fa_tensor *t = &c->attn_bias;
    if (c->end_key) p->leftpad_k = c->first_key, p->seqused_k = c->end_key;
    if (!present(t)) return FA_OK;
    const int64_t size[4] = {p->b, p->h, p->len_q, p->len_kv};
    int64_t stride[4] = {0};
    words came, want;
    const fa_tensor wanted = {.ndim = 4, .size = size};
    TRY(check_device(t, &c->q, err));
    REQUIRE(p->device == FA_CPU, "attn_mask needs tensors on the CPU");
    bool fits = t->ndim == 2 || t->ndim == 4;
    for (int64_t i = 0; fits && i < t->ndim; i++) {
        const int64_t at = 4 - t->ndim + i;
        fits = t->size[i] == 1 || t->size[i] == size[at];
        stride[at] = t->size[i] == 1 ? 0 : t->stride[i];
    }
    REQUIRE(fits, "attn_mask must have the shape %s, or 1 in place of a size; it has %s", shape_words(&wanted, &want),
            shape_words(t, &came));
    REQUIRE(t->dtype == fa_torch.f32 || (t->dtype == c->q.dtype && t->dtype != fa_torch.f64),
            "attn_mask must have the dtype of query, or fp32; query is %s, attn_mask is %s", dtype_words(c->q.dtype),
            dtype_words(t->dtype));
    p->bias = (fa_scores){t->data,   t->dtype == fa_torch.f32 ? FA_F32 : t->dtype == fa_torch.f16 ? FA_F16 : FA_BF16,
                          stride[0], stride[1],
                          stride[2], stride[3]};
    return FA_OK;
}

/* Returns a window, or -1 if the window is unlimited or longer than any tensor. */
static int64_t side_of_window(int64_t size) { return size < 0 || size > (int64_t)1 << 40 ? -1 : size; }

/* Returns the length of an attention chunk. No position is as far from 0 as the longest chunk. Chunks still part at 0,
 * and with more queries than keys the first queries have negative positions. */
static int64_t chunk_in_range(int64_t size) {
    return size <= 0 ? 0 : size < (int64_t)1 << 40 ? size : (int64_t)1 << 40;
}

static fa_status check_descale(const fa_call *c, const fa_tensor *t, const fa_problem *p, fa_descale *descale,
                               fa_error *err) {
    if (!present(t) || p->dtype != FA_E4M3) return FA_OK;
    TRY(check_device(t, &c->q, err));
    REQUIRE(t->dtype == fa_torch.f32, "%s must have dtype fp32; it is %s", t->name, dtype_words(t->dtype));
    TRY(SHAPE(t, "(batch_size, num_heads_k)", p->b, p->h_kv));
    *descale = (fa_descale){(const float *)t->data, t->stride[0], t->stride[1]};
    return FA_OK;
}

static fa_status check_options(const fa_call *c, fa_problem *p, fa_error *err) {
    TRY(check_alibi(c, p, err));
    TRY(check_bias(c, p, err));
    TRY(check_descale(c, &c->q_descale, p, &p->q_descale, err));
    TRY(check_descale(c, &c->k_descale, p, &p->k_descale, err));
    TRY(check_descale(c, &c->v_descale, p, &p->v_descale, err));
    TRY(check_index_if_given(&c->scheduler_metadata, &c->q, err));
    /* With any dtype, scale and softcap must fit fp32. So must their products with log2(e), and their quotient. */
    REQUIRE(fabs(c->softmax_scale) <= 1e30, "softmax_scale must be between -1e30 and 1e30; it is %g", c->softmax_scale);
    REQUIRE(c->softcap <= 0 || (c->softcap >= 1e-30 && c->softcap <= 1e30),
            "softcap must be off (0 or less) or between 1e-30 and 1e30; it is %g", c->softcap);
    REQUIRE(c->softcap <= 0 || fabs(c->softmax_scale) <= 1e30 * c->softcap,
            "softmax_scale must be at most 1e30 times softcap; it is %g, softcap is %g", c->softmax_scale, c->softcap);
    const int64_t terms = present(&c->qv) ? p->d + p->d_v : p->d; /* products that a score sums */
    p->scale = c->default_scale ? pow((double)terms, -0.5) : c->softmax_scale;
    p->softcap = c->softcap > 0 ? c->softcap : 0;

    TRY(fa_read_dropout_p(c->dropout_p, p, err));
    REQUIRE(!c->return_softmax || c->dropout_p > 0,
            "return_softmax is only supported when p_dropout > 0.0; dropout_p is %g", c->dropout_p);
    p->wants_s_dmask = c->return_softmax;

    p->window_left = side_of_window(c->window_left);
    p->window_right = c->causal ? 0 : side_of_window(c->window_right);

    const int max_splits = c->layout == FA_OP_3 ? 256 : 128;
    REQUIRE(c->num_splits <= max_splits, "num_splits > %d not supported; num_splits is %" PRId64, max_splits,
            c->num_splits);
    REQUIRE(!(c->layout == FA_OP_VARLEN && present(&c->block_table) && c->num_splits > 1),
            "num_splits > 1 is not supported for varlen paged KV; num_splits is %" PRId64, c->num_splits);
    p->num_splits = c->num_splits < 0 ? 0 : c->num_splits;
    p->attention_chunk = chunk_in_range(c->attention_chunk);
    p->sm_margin = c->sm_margin > 0 ? c->sm_margin : 0;
    p->deterministic = c->deterministic;
    p->zero_tensors = c->zero_tensors && c->layout == FA_OP_VARLEN;
    return FA_OK;
}

/* ---- backward -------------------------------------------------------------------------------------------------- */

static fa_status check_saved(const fa_call *c, fa_problem *p, fa_error *err) {
    if (c->pass != FA_BWD) return FA_OK;
    const fa_tensor *lse = &c->softmax_lse, *rng = &c->rng_state;
    TRY(check_device(lse, &c->q, err));
    REQUIRE(lse->dtype == fa_torch.f32, "softmax_lse must have dtype fp32; it is %s", dtype_words(lse->dtype));
    if (packs_q(c))
        TRY(SHAPE(lse, "(num_heads, total_q)", p->h, p->total_q));
    else
        TRY(SHAPE(lse, "(batch_size, num_heads, seqlen_q)", p->b, p->h, p->len_q));
    REQUIRE(c->is_for_cpu || last_dim_contiguous(lse),
            "softmax_lse must have contiguous last dimension; it has stride %" PRId64, lse->stride[lse->ndim - 1]);
    p->lse = (fa_row_stats){.data = (float *)lse->data,
                            .stride_b = packs_q(c) ? 0 : lse->stride[0],
                            .stride_h = lse->stride[lse->ndim - 2],
                            .stride_row = c->is_for_cpu ? lse->stride[lse->ndim - 1] : 0};
    if (c->dropout_p == 0) return FA_OK;
    REQUIRE(present(rng), "rng_state must be given when dropout_p > 0: the one that the forward returned; it is None");
    return fa_read_rng_state(rng, &c->q, p, err);
}

/* ---- the tensors themselves --------------------------------------------------------------------------------- */

static fa_status check_storages(const fa_call *c, fa_error *err) {
    const fa_tensor *given[] = {&c->q,
                                &c->k,
                                &c->v,
                                &c->out,
                                &c->alibi_slopes,
                                &c->cu_seqlens_q,
                                &c->cu_seqlens_k,
                                &c->seqused_k,
                                &c->leftpad_k,
                                &c->block_table,
                                &c->k_new,
                                &c->v_new,
                                &c->rotary_cos,
                                &c->rotary_sin,
                                &c->cache_batch_idx,
                                &c->dout,
                                &c->softmax_lse,
                                &c->dq,
                                &c->dk,
                                &c->dv,
                                &c->rng_state,
                                &c->attn_bias,
                                &c->qv,
                                &c->seqused_q,
                                &c->cu_seqlens_k_new,
                                &c->seqlens_rotary};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        if (present(given[i])) TRY(check_memory(given[i], err));
    const fa_tensor *descales[] = {&c->q_descale, &c->k_descale, &c->v_descale}; /* ignored unless q is FP8 */
    for (size_t i = 0; i < 3 && c->q.dtype == fa_torch.e4m3; i++)
        if (present(descales[i])) TRY(check_memory(descales[i], err));
    return FA_OK;
}

/* Do both tensors lie at one address, with the same sizes and strides? */
static bool same_elements(const fa_tensor *x, const fa_tensor *y) {
    for (int64_t i = 0; i < x->ndim; i++)
        if (x->size[i] != y->size[i] || (x->size[i] > 1 && x->stride[i] != y->stride[i])) return false;
    return x->data == y->data && x->dtype == y->dtype;
}

static bool same_rows(const fa_tensor *x, const fa_tensor *y) {
    for (int64_t i = 0; i < x->ndim - 1; i++)
        if (x->size[i] > 1 && x->stride[i] != y->stride[i]) return false;
    return true;
}

/* Are keys and values the same data, before and after the append? The narrower rows are columns of the wider rows. */
static bool appends_one_cache(const fa_call *c) {
    const int64_t bytes = bytes_of_dtype(c->k.dtype), d = c->k.size[c->k.ndim - 1], d_v = c->v.size[c->v.ndim - 1];
    const int64_t first = (char *)c->v.data - (char *)c->k.data, wider = (d - d_v) * bytes;
    return present(&c->k_new) && !present(&c->rotary_cos) && same_rows(&c->k, &c->v) &&
           same_rows(&c->k_new, &c->v_new) && first == (char *)c->v_new.data - (char *)c->k_new.data &&
           (wider >= 0 ? first >= 0 && first <= wider : first <= 0 && first >= wider);
}

/* Are keys and values pages of one pool? The block table says which page holds keys and which holds values. */
static bool appends_to_one_pool(const fa_call *c) {
    return present(&c->k_new) && present(&c->block_table) && pages_apart(&c->k, &c->v) != 0;
}

/* Checks that no part of the call overwrites memory that another part reads or writes. Each row of q is read before the
 * same row of out is written, so out may be q. The kernels read lengths and tables again while they write. */
static fa_status check_apart(const fa_call *c, fa_error *err) {
    const fa_tensor *written[MAX_WRITTEN];
    const bool backward = c->pass == FA_BWD, appends = !backward && present(&c->k_new),
               fp8 = c->q.dtype == fa_torch.e4m3;
    const fa_tensor *read[] = {appends ? NULL : &c->k,
                               appends ? NULL : &c->v,
                               &c->q,
                               &c->qv,
                               &c->k_new,
                               &c->v_new,
                               backward ? &c->out : NULL,
                               &c->dout,
                               &c->softmax_lse,
                               &c->alibi_slopes,
                               &c->rotary_cos,
                               &c->rotary_sin,
                               &c->cu_seqlens_q,
                               &c->cu_seqlens_k,
                               &c->cu_seqlens_k_new,
                               &c->seqused_q,
                               &c->seqused_k,
                               &c->seqlens_rotary,
                               &c->leftpad_k,
                               &c->cache_batch_idx,
                               &c->block_table,
                               fp8 ? &c->q_descale : NULL,
                               fp8 ? &c->k_descale : NULL,
                               fp8 ? &c->v_descale : NULL,
                               &c->sinks_tensor};
    for (int i = written_tensors(c, written) - 1; i >= 0; i--) {
        for (int j = 0; j < i; j++)
            REQUIRE(!share_memory(written[i], written[j]) ||
                        (written[j] == &c->k && (appends_one_cache(c) || appends_to_one_pool(c))),
                    "%s and %s are both written and must not share memory", written[j]->name, written[i]->name);
        for (size_t j = 0; j < sizeof read / sizeof *read; j++) {
            if (!read[j] || !share_memory(written[i], read[j])) continue;
            const bool is_out_with_q = written[i] == &c->out && read[j] == &c->q;
            REQUIRE(is_out_with_q, "%s is written and must not share memory with %s, which is read", written[i]->name,
                    read[j]->name);
            REQUIRE(same_elements(&c->out, &c->q),
                    "%s is written and must not share memory with q, unless it has q's address and strides",
                    c->out.name);
        }
    }
    return FA_OK;
}

/* Caches may be no leaf and require grad. flash_attn_with_kvcache then warns that gradients are dropped. */
static fa_status check_gradients(const fa_call *c, fa_error *err) {
    const fa_tensor *written[MAX_WRITTEN];
    for (int i = written_tensors(c, written) - 1; i >= 0; i--)
        TRY(check_no_gradient(written[i], written[i] == &c->k || written[i] == &c->v, err));
    return FA_OK;
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

fa_status fa_check_call(const fa_call *c, fa_problem *p, fa_error *err) {
    words w;
    const bool is_3 = c->layout == FA_OP_3;
    *p = (fa_problem){.pass = c->pass, .of_3 = is_3, .sinks = c->sinks};
    p->empty_lse = is_3 || c->has_options ? -INFINITY : INFINITY;
    if (c->is_for_cpu) p->empty_lse = 0;
    REQUIRE(c->q.device_type == fa_torch.cpu || c->q.device_type == fa_torch.cuda,
            "q must be on the CPU or on CUDA; it is on %s", device_words(c->q.device_type, c->q.device_idx, &w));
    p->device = is_on_gpu(&c->q) ? FA_CUDA : FA_CPU;
    p->device_idx = c->q.device_idx;
    TRY(check_dtypes(c, &p->dtype, err));
    TRY(check_storages(c, err));
    TRY(check_together(c, err));
    TRY(check_shapes(c, p, err));
    TRY(check_last_dims(c, err));
    TRY(check_lengths(c, p, err));
    TRY(check_append(c, p, err));
    TRY(check_options(c, p, err));
    TRY(check_saved(c, p, err));
    TRY(check_apart(c, err));
    TRY(check_gradients(c, err));
    if (p->device == FA_CPU) return check_values(c, p, err);
    return fa_checks_values_on_gpu && !fa_gpu_imagined() ? check_values_on_gpu(c, p, err) : FA_OK;
}
