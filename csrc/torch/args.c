/* Checks the arguments of a call and turns the tensors into a problem.
 *
 * The order of the checks is device, dtype, rank, shape, stride and options. On the CPU, the values inside length and
 * index tensors follow. A message names the argument, the value that came and the allowed values. A message keeps the
 * wording that callers of flash-attn 2 match on. Nothing is written before the last check has passed. */
#include "args.h"

#include <math.h>

#include "autograd.h"
#include "check.h"
#include "gpu_values.h"
#include "lengths.h"

/* ---- q, k, v, out and gradients ------------------------------------------------------------------------------ */

static fa_status check_dtypes(const fa_call *c, fa_dtype *dtype, fa_error *err) {
    int32_t came = c->q.dtype;
    if (came == fa_torch.f16)
        *dtype = FA_F16;
    else if (came == fa_torch.bf16)
        *dtype = FA_BF16;
    else if (came == fa_torch.f32)
        *dtype = FA_F32;
    else if (came == fa_torch.f64 && c->q.device_type == fa_torch.cpu)
        *dtype = FA_F64;
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
    const fa_tensor *written[MAX_WRITTEN];
    for (int i = written_tensors(c, written) - 1; i >= 0; i--)
        REQUIRE(!overlaps_itself(written[i]),
                "%s is written and must not overlap itself; it is an expanded tensor (stride 0)", written[i]->name);
    return FA_OK;
}

#define Q_DIMS   "(batch_size, seqlen_q, num_heads, head_size)"
#define K_DIMS   "(batch_size, seqlen_k, num_heads_k, head_size)"
#define Q_PACKED "(total_q, num_heads, head_size)"
#define K_PACKED "(total_k, num_heads_k, head_size)"
#define K_PAGED  "(num_blocks, page_block_size, num_heads_k, head_size)"

static fa_status check_shapes(const fa_call *c, fa_problem *p, fa_error *err) {
    const bool packed = c->layout == FA_OP_VARLEN, paged = present(&c->block_table);
    words w;
    const char *q_dims = packed ? Q_PACKED : Q_DIMS;
    const char *k_dims = paged ? K_PAGED : packed ? K_PACKED : c->layout == FA_OP_KVCACHE ? K_CACHE : K_DIMS;
    const int64_t q_ndim = packed ? 3 : 4, k_ndim = packed && !paged ? 3 : 4;

    TRY(check_rank(&c->q, q_ndim, q_dims, err));
    TRY(check_rank(&c->k, k_ndim, k_dims, err));
    const int64_t *q = c->q.size, *k = c->k.size;
    p->d = p->d_v = q[q_ndim - 1];
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

    /* An expanded tensor may have any size without using memory. So may a tensor in which another size is 0. */
    const double most = 0x1p62, heads = (double)p->h * (double)p->d, heads_kv = (double)p->h_kv * (double)p->d;
    REQUIRE(p->b <= INT32_MAX && p->h <= INT32_MAX && (double)p->b * (double)p->len_q * fmax(heads, 1) < most,
            "q must have at most 2147483647 sequences and heads, and 2^62 elements; it has %s", shape_words(&c->q, &w));
    REQUIRE((double)k[0] * (packed && !paged ? 1 : (double)p->len_kv) * heads_kv < most,
            "k must have fewer than 2^62 elements; it has %s", shape_words(&c->k, &w));

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
    p->paged = paged;
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
    REQUIRE(last_dim_contiguous(t),
            "ALiBi slopes tensor must have contiguous last dimension; alibi_slopes has stride "
            "%" PRId64 " there",
            t->stride[t->ndim - 1]);
    p->alibi_slopes = (const float *)t->data;
    p->alibi_stride_b = own ? t->stride[0] : 0;
    return FA_OK;
}

/* Returns a window, or -1 if the window is unlimited or longer than any tensor. */
static int64_t side_of_window(int64_t size) { return size < 0 || size > (int64_t)1 << 40 ? -1 : size; }

static fa_status check_options(const fa_call *c, fa_problem *p, fa_error *err) {
    TRY(check_alibi(c, p, err));
    /* With any dtype, scale and softcap must fit fp32. So must their products with log2(e), and their quotient. */
    REQUIRE(fabs(c->softmax_scale) <= 1e30, "softmax_scale must be between -1e30 and 1e30; it is %g", c->softmax_scale);
    REQUIRE(c->softcap <= 0 || (c->softcap >= 1e-30 && c->softcap <= 1e30),
            "softcap must be off (0 or less) or between 1e-30 and 1e30; it is %g", c->softcap);
    REQUIRE(c->softcap <= 0 || fabs(c->softmax_scale) <= 1e30 * c->softcap,
            "softmax_scale must be at most 1e30 times softcap; it is %g, softcap is %g", c->softmax_scale, c->softcap);
    p->scale = c->default_scale ? pow((double)p->d, -0.5) : c->softmax_scale;
    p->softcap = c->softcap > 0 ? c->softcap : 0;

    REQUIRE(c->dropout_p < 1, "Expected p_dropout < 1.f to be true; dropout_p is %g, allowed is 0 <= dropout_p < 1",
            c->dropout_p);
    REQUIRE(c->dropout_p >= 0, "dropout_p must be at least 0; it is %g", c->dropout_p);
    REQUIRE(!c->return_softmax || c->dropout_p > 0,
            "return_softmax is only supported when p_dropout > 0.0; dropout_p is %g", c->dropout_p);
    p->dropout_p = c->dropout_p;
    p->wants_s_dmask = c->return_softmax;
    p->keep_max = (uint8_t)floorf(255.0f * (1.0f - (float)c->dropout_p));

    p->window_left = side_of_window(c->window_left);
    p->window_right = c->causal ? 0 : side_of_window(c->window_right);

    REQUIRE(c->num_splits <= 128, "num_splits > 128 not supported; num_splits is %" PRId64, c->num_splits);
    REQUIRE(!(c->layout == FA_OP_VARLEN && present(&c->block_table) && c->num_splits > 1),
            "num_splits > 1 is not supported for varlen paged KV; num_splits is %" PRId64, c->num_splits);
    p->num_splits = c->num_splits < 0 ? 0 : c->num_splits;
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
    if (c->layout == FA_OP_VARLEN)
        TRY(SHAPE(lse, "(num_heads, total_q)", p->h, p->total_q));
    else
        TRY(SHAPE(lse, "(batch_size, num_heads, seqlen_q)", p->b, p->h, p->len_q));
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
    if (p->device == FA_CUDA) {
        p->rng_state = (const uint64_t *)rng->data;
    } else {
        const int64_t *state = (const int64_t *)rng->data;
        p->seed = (uint64_t)state[0];
        p->offset = (uint64_t)state[1];
    }
    return FA_OK;
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
                                &c->rng_state};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        if (present(given[i])) TRY(check_memory(given[i], err));
    return FA_OK;
}

static bool same_strides(const fa_tensor *x, const fa_tensor *y) {
    for (int64_t i = 0; i < x->ndim; i++)
        if (x->size[i] > 1 && x->stride[i] != y->stride[i]) return false;
    return true;
}

/* Checks that no part of the call overwrites memory that another part reads or writes. Keys and values may share one
 * cache if both get the same data. Each row of q is read before the same row of out is written, so out may be q. */
static fa_status check_apart(const fa_call *c, fa_error *err) {
    const fa_tensor *written[MAX_WRITTEN];
    const fa_tensor *read[] = {&c->k, &c->v, &c->q, &c->out, &c->dout};
    const bool backward = c->pass == FA_BWD;
    const bool same_cache = present(&c->k_new) && c->k_new.data == c->v_new.data && !present(&c->rotary_cos);
    for (int i = written_tensors(c, written) - 1; i >= 0; i--) {
        for (int j = 0; j < i; j++)
            REQUIRE(!share_memory(written[i], written[j]) || (written[j] == &c->k && same_cache),
                    "%s and %s are both written and must not share memory", written[j]->name, written[i]->name);
        for (int j = 0; j < (backward ? 5 : 2); j++)
            REQUIRE(!share_memory(written[i], read[j]) || written[i] == read[j] || written[i] == &c->k ||
                        written[i] == &c->v,
                    "%s is written and must not share memory with %s, which is read", written[i]->name, read[j]->name);
    }
    const fa_tensor *appended[] = {&c->k_new, &c->v_new, &c->q};
    for (int j = 0; j < 3 && !backward && present(&c->k_new); j++)
        REQUIRE(!share_memory(appended[j], &c->k) && !share_memory(appended[j], &c->v),
                "the caches are written and must not share memory with %s, which is read", appended[j]->name);
    REQUIRE(backward || !share_memory(&c->out, &c->q) || same_strides(&c->out, &c->q),
            "out is written and must not share memory with q, unless it has q's strides");
    return FA_OK;
}

/* Refuses to write a leaf that requires grad, in the words of PyTorch's own operators. */
static fa_status check_leaves(const fa_call *c, fa_error *err) {
    const fa_tensor *written[MAX_WRITTEN];
    if (!fa_torch.aoti_torch_grad_mode_is_enabled()) return FA_OK;
    for (int i = written_tensors(c, written) - 1; i >= 0; i--) {
        const char *what = fa_leaf_in(written[i]->handle);
        REQUIRE(!what, "%sa leaf Variable that requires grad is being used in an in-place operation: %s is written",
                what, written[i]->name);
    }
    return FA_OK;
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

fa_status fa_check_call(const fa_call *c, fa_problem *p, fa_error *err) {
    words w;
    *p = (fa_problem){.pass = c->pass, .empty_lse = INFINITY};
    REQUIRE(c->q.device_type == fa_torch.cpu || c->q.device_type == fa_torch.cuda,
            "q must be on the CPU or on CUDA; it "
            "is on %s",
            device_words(c->q.device_type, c->q.device_idx, &w));
    p->device = c->q.device_type == fa_torch.cuda ? FA_CUDA : FA_CPU;
    p->device_idx = c->q.device_idx;
    TRY(check_dtypes(c, &p->dtype, err));
    TRY(check_storages(c, err));
    TRY(check_shapes(c, p, err));
    TRY(check_last_dims(c, err));
    TRY(check_lengths(c, p, err));
    TRY(check_append(c, p, err));
    TRY(check_options(c, p, err));
    TRY(check_saved(c, p, err));
    TRY(check_apart(c, err));
    TRY(check_leaves(c, err));
    if (p->device == FA_CPU) return check_values(c, p, err);
    return fa_checks_values_on_gpu ? check_values_on_gpu(c, p, err) : FA_OK;
}
