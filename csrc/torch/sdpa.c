/* Kernels for the attention ops of torch itself, which replace torch's own while flash_attn is active.
 *
 *   scaled_dot_product_attention -> aten::_scaled_dot_product_flash_attention_for_cpu     q [b, h, len_q, d]
 *                                   aten::_scaled_dot_product_flash_attention (CUDA)
 *   varlen_attn                  -> aten::_flash_attention_forward                        q [b, len_q, h, d] or packed
 *
 * and their backwards. Autograd, autocast, fakes and torch.compile stand before these kernels and stay torch's. An op
 * is a row of arguments as in ops_2.c. Its function makes the results with the strides that torch promises, and a call
 * of our own form: a tensor [b, h, len, d] is read as [b, len, h, d] with its strides exchanged.
 *
 * A call that does not fit goes to torch's own kernel. The C shim has a function for this kernel, which does not ask
 * the dispatcher, so it cannot come back here.
 *
 * The dispatcher must not lose a kernel while another thread calls it: the thread would run freed memory. So kernels of
 * scaled_dot_product_attention stay in the dispatcher once they are there, and hand on all calls while flash_attn is
 * not active. */
#include "sdpa.h"

#include <stdatomic.h>
#include <string.h>

#include "check.h"
#include "execute.h"
#include "machine.h"
#include "ops.h"
#include "plans.h"
#include "sdpa_keys.h"
#include "sdpa_tensors.h"
#include "system/lock.h"

static atomic_bool is_active; /* otherwise kernels that stayed hand their calls on */

/* What torch.empty_like and torch's own kernels promise about strides. fakes tell (flash_attn/_sdpa.py). */
static bool cpu_out_is_like_q, cpu_grads_are_like_inputs, cuda_grads_are_like_inputs;

/* ---- torch's own kernels ----------------------------------------------------------------------------------------- */

typedef AtenTensorHandle tensor;
typedef AOTITorchError cpu_forward_fn(tensor q, tensor k, tensor v, double dropout_p, int32_t is_causal, tensor *mask,
                                      double *scale, tensor *out, tensor *lse);
typedef AOTITorchError cpu_backward_fn(tensor dout, tensor q, tensor k, tensor v, tensor out, tensor lse,
                                       double dropout_p, int32_t is_causal, tensor *mask, double *scale, tensor *dq,
                                       tensor *dk, tensor *dv);
typedef AOTITorchError cuda_forward_fn(tensor q, tensor k, tensor v, double dropout_p, int32_t is_causal,
                                       int32_t return_debug_mask, double *scale, tensor *out, tensor *lse,
                                       tensor *cum_seq_q, tensor *cum_seq_k, int64_t *max_q, int64_t *max_k,
                                       tensor *rng_state, tensor *unused, tensor *debug_mask);
typedef AOTITorchError cuda_backward_fn(tensor dout, tensor q, tensor k, tensor v, tensor out, tensor lse,
                                        tensor cum_seq_q, tensor cum_seq_k, int64_t max_q, int64_t max_k,
                                        double dropout_p, int32_t is_causal, tensor rng_state, tensor unused,
                                        double *scale, tensor *dq, tensor *dk, tensor *dv);

static struct {
    cpu_forward_fn *cpu_forward;
    cpu_backward_fn *cpu_backward;
    cuda_forward_fn *cuda_forward;
    cuda_backward_fn *cuda_backward;
    void *(*context)(void); /* at::globalContext() */
    bool (*is_deterministic)(const void *context);
    const char *(*what)(void); /* the words of the last exception in the shim; NULL before 2.13, which prints them */
} torchs;

static void find_torchs_kernels(void) {
    const struct {
        void *place;
        const char *name;
        bool on_gpu;
    } wanted[] = {
        {&torchs.cpu_forward, "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu", false},
        {&torchs.cpu_backward, "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward", false},
        {&torchs.cuda_forward, "aoti_torch_cuda__scaled_dot_product_flash_attention", true},
        {&torchs.cuda_backward, "aoti_torch_cuda__scaled_dot_product_flash_attention_backward", true},
        {&torchs.context, "_ZN2at13globalContextEv", false},
        {&torchs.is_deterministic, "_ZNK2at7Context23deterministicAlgorithmsEv", false},
        {&torchs.what, "torch_exception_get_what_without_backtrace", false},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *address = wanted[i].on_gpu ? fa_torch_cuda_symbol(wanted[i].name) : fa_torch_symbol(wanted[i].name);
        memcpy(wanted[i].place, &address, sizeof address);
    }
}

static double *scale_of(const fa_call *c, double *room) {
    *room = c->softmax_scale;
    return c->default_scale ? NULL : room;
}

static tensor *optional(const fa_tensor *t, tensor *room) {
    *room = t->handle;
    return t->handle ? room : NULL;
}

/* The result of a shim's function. Its results follow in `outputs`. */
static fa_status torch_said(AOTITorchError code, int num, fa_outputs *outputs, fa_error *err) {
    outputs->num = code == 0 ? num : 0;
    if (code == 0) return FA_OK;
    const char *what = torchs.what ? torchs.what() : NULL;
    const bool no_memory = what && strncmp(what, "CUDA out of memory", strlen("CUDA out of memory")) == 0;
    if (what && *what) return fa_fail(err, no_memory ? FA_ENOMEM_GPU : FA_EINVAL, "%s", what);
    return fa_fail(err, FA_EINVAL, "PyTorch's own kernel refused the call, and printed why");
}

static bool is_deterministic(void) {
    return !torchs.context || !torchs.is_deterministic || torchs.is_deterministic(torchs.context());
}

/* ---- which kernel ------------------------------------------------------------------------------------------------ */

#if defined(__aarch64__) || defined(_M_ARM64)
#define WHY_TORCH_IS_TAKEN \
    "on ARM PyTorch's own kernel computes fp32 up to 32 queries and keys, because the two were not compared there"
#else
#define WHY_TORCH_IS_TAKEN "without AVX-512, PyTorch's own kernel is faster for fp32 and up to 32 queries and keys"
#endif

/* Short fp32 calls without AVX-512: one thread of a Zen 3 computes forwards of 16 to 32 queries and keys 0.75 to 1.06
 * times as fast as torch's kernel, which calls MKL. From 48 on, and in the backward, our kernels are as fast or faster.
 * Calls that consist of their host work stay here. On ARM nothing was measured, so torch keeps these calls, too. */
static bool is_better_in_torch(const fa_call *c) {
    const int64_t len_q = c->q.size[2], len_kv = c->k.size[2];
    return c->q.dtype == fa_torch.f32 && fa_this_machine.isa <= FA_ISA_AVX2 && len_q > 4 && len_q <= 32 &&
           len_kv <= 32 && c->q.size[0] * c->q.size[1] * len_q * len_kv * c->q.size[3] > 100000;
}

/* A call that flash_attn does not take for this reason goes to torch's own kernel. */
static bool is_for_torch(fa_status status) { return status == FA_EINVAL || status == FA_EUNSUPPORTED; }

/* Says why torch's own kernel computes a call. No reason is needed while flash_attn is not active. */
static void note_torch(fa_pass pass, fa_device device, const fa_error *err) {
    if (err->text[0]) fa_note_torch(pass, device, err->text);
}

/* The status of a call that is not computed here, because flash_attn is not active. It has no words. */
static fa_status hand_on(fa_error *err) {
    err->text[0] = 0;
    return FA_EUNSUPPORTED;
}

/* ---- scaled_dot_product_attention, forward ----------------------------------------------------------------------- */

static bool has_four_dims(const fa_call *c) { return c->q.ndim == 4 && c->k.ndim == 4 && c->v.ndim == 4; }

/* Makes out in torch's form and computes. outputs: lse, and with dropout what our forward returns of it. */
static fa_status forward(const fa_call *given, bool is_for_cpu, fa_tensor *out, fa_outputs *outputs, fa_error *err) {
    fa_call c = *given;
    fa_exchanged q, k, v, o;
    int64_t bias_size[4];
    fa_key_mask seen = {.first = NULL};
    *out = (fa_tensor){.name = "out"};
    outputs->num = 0;
    REQUIRE(has_four_dims(given), "query, key and value must have 4 dimensions");
    REQUIRE(!is_for_cpu || given->q.dtype != fa_torch.f64,
            "fp64 needs an fp64 lse, and the kernels here make an fp32 lse");
    REQUIRE(!is_for_cpu || given->dropout_p == 0, "on the CPU dropout_p must be 0; it is %g", given->dropout_p);
    REQUIRE(!given->return_debug_mask, "return_debug_mask must be false");
    REQUIRE(!is_for_cpu || !is_better_in_torch(given), WHY_TORCH_IS_TAKEN);
    TRY(fa_make_like(&given->q, !is_for_cpu || cpu_out_is_like_q, out, err));
    c.out = *out;
    c.fresh_out = c.is_aten = true;
    c.is_for_cpu = is_for_cpu;
    c.window_left = c.window_right = -1;
    c.num_splits = 0;
    c.has_dropout = c.dropout_p > 0;
    fa_exchange(&c.q, &q), fa_exchange(&c.k, &k), fa_exchange(&c.v, &v), fa_exchange(&c.out, &o);
    if (is_for_cpu) fa_align_top_left(&c, bias_size);
    fa_status status = is_for_cpu ? fa_read_key_mask(&c, &seen, err) : FA_OK;
    if (status == FA_OK) status = fa_execute(&c, outputs, err);
    fa_forget_keys(&seen);
    if (status != FA_OK) fa_drop_tensor(out);
    return status;
}

static fa_status execute_cpu_forward(const fa_call *c, fa_outputs *outputs, fa_error *err) {
    fa_tensor out;
    fa_status status = is_active ? forward(c, true, &out, outputs, err) : hand_on(err);
    if (status == FA_OK) {
        outputs->tensor[1] = outputs->tensor[0], outputs->tensor[0] = out.handle;
        outputs->num = 2;
        return FA_OK;
    }
    if (!is_for_torch(status) || !torchs.cpu_forward) return status;
    double scale;
    tensor mask;
    note_torch(c->pass, FA_CPU, err);
    return torch_said(torchs.cpu_forward(c->q.handle, c->k.handle, c->v.handle, c->dropout_p, c->causal,
                                         optional(&c->attn_bias, &mask), scale_of(c, &scale), &outputs->tensor[0],
                                         &outputs->tensor[1]),
                      2, outputs, err);
}

static fa_status make_plain(fa_outputs *outputs, const fa_tensor *like, int64_t ndim, int64_t size, int32_t dtype,
                            fa_error *err) {
    void *unused;
    return fa_make_output(outputs, like, ndim, &size, (int64_t[]){1}, dtype, &unused, err);
}

static fa_status make_undefined(fa_outputs *outputs, fa_error *err) {
    if (fa_torch.aoti_torch_new_uninitialized_tensor(&outputs->tensor[outputs->num]) != 0)
        return fa_fail(err, FA_ENOMEM, "torch could not make an undefined tensor");
    outputs->num++;
    return FA_OK;
}

/* The results behind out and lse: the state of the generator, a number that nobody reads, and no probabilities. `made`
 * holds lse, and with dropout an empty tensor and the state. */
static fa_status add_aux(const fa_call *c, fa_outputs *made, fa_outputs *outputs, fa_error *err) {
    if (c->dropout_p > 0)
        outputs->tensor[outputs->num++] = made->tensor[2];
    else
        TRY(make_plain(outputs, &c->q, 1, 2, fa_torch.u64, err));
    TRY(make_plain(outputs, &c->q, 0, 0, fa_torch.u64, err));
    if (c->dropout_p > 0) {
        outputs->tensor[outputs->num++] = made->tensor[1];
        return FA_OK;
    }
    return make_plain(outputs, &c->q, 1, 0, c->q.dtype, err);
}

static fa_status execute_cuda_forward(const fa_call *c, fa_outputs *outputs, fa_error *err) {
    enum { MAX_Q = 4, MAX_K = 5, NUM = 9 };
    fa_tensor out;
    fa_outputs made, rest = {.num = 0};
    fa_status status = is_active ? forward(c, false, &out, &made, err) : hand_on(err);
    if (status == FA_OK) {
        status = make_undefined(&rest, err);
        if (status == FA_OK) status = make_undefined(&rest, err);
        if (status == FA_OK) status = add_aux(c, &made, &rest, err);
        if (status != FA_OK) return status; /* the GPU's memory is full: what was made is lost with it */
        const tensor results[NUM] = {out.handle, made.tensor[0], rest.tensor[0], rest.tensor[1], NULL,
                                     NULL,       rest.tensor[2], rest.tensor[3], rest.tensor[4]};
        memcpy(outputs->tensor, results, sizeof results);
        outputs->tensor[MAX_Q] = (tensor)(uintptr_t)c->q.size[2];
        outputs->tensor[MAX_K] = (tensor)(uintptr_t)c->k.size[2];
        outputs->num = NUM;
        return FA_OK;
    }
    if (!is_for_torch(status) || !torchs.cuda_forward || c->q.device_type != fa_torch.cuda) return status;
    double scale;
    int64_t max_q = 0, max_k = 0;
    tensor *t = outputs->tensor;
    memset(outputs, 0, sizeof *outputs);
    note_torch(c->pass, FA_CUDA, err);
    status = torch_said(torchs.cuda_forward(c->q.handle, c->k.handle, c->v.handle, c->dropout_p, c->causal,
                                            c->return_debug_mask, scale_of(c, &scale), &t[0], &t[1], &t[2], &t[3],
                                            &max_q, &max_k, &t[6], &t[7], &t[8]),
                        NUM, outputs, err);
    if (status != FA_OK) return status;
    for (int i = 2; i < 4; i++)
        if (!t[i]) fa_torch.aoti_torch_new_uninitialized_tensor(&t[i]);
    t[MAX_Q] = (tensor)(uintptr_t)max_q, t[MAX_K] = (tensor)(uintptr_t)max_k;
    return FA_OK;
}

/* ---- scaled_dot_product_attention, backward ---------------------------------------------------------------------- */

/* The call left out the keys that no query sees: those behind `end`, and those that a mask of keys hides. Their
 * gradients are zero. */
static void clear_unseen_keys(const fa_tensor *t, int64_t end, const fa_key_mask *seen) {
    const int64_t bytes = bytes_of_dtype(t->dtype);
    for (int64_t b = 0; b < t->size[0]; b++) {
        const int64_t first_seen = seen->first ? seen->first[b] : 0, end_seen = seen->first ? seen->end[b] : end;
        for (int64_t h = 0; h < t->size[1]; h++)
            for (int64_t row = 0; row < t->size[2]; row++) {
                if (row == first_seen) row = end_seen;
                if (row >= t->size[2]) break;
                memset((char *)t->data + (b * t->stride[0] + h * t->stride[1] + row * t->stride[2]) * bytes, 0,
                       (size_t)(t->size[3] * bytes));
            }
    }
}

static fa_status backward(const fa_call *given, bool is_for_cpu, fa_tensor grads[3], fa_error *err) {
    static const char *const names[] = {"dq", "dk", "dv"};
    const fa_tensor *inputs[] = {&given->q, &given->k, &given->v};
    fa_call c = *given;
    fa_exchanged rooms[8];
    fa_outputs outputs = {.num = 0};
    int64_t bias_size[4];
    fa_key_mask seen = {.first = NULL};
    tensor dout = NULL;
    const bool keeps_strides = is_for_cpu ? cpu_grads_are_like_inputs : cuda_grads_are_like_inputs;
    fa_status status = FA_OK;
    for (int i = 0; i < 3; i++) grads[i] = (fa_tensor){.name = names[i]};
    REQUIRE(has_four_dims(given) && given->out.ndim == 4 && given->dout.ndim == 4,
            "query, key, value, out and its gradient must have 4 dimensions");
    REQUIRE(!is_for_cpu || given->q.dtype != fa_torch.f64,
            "fp64 has an fp64 lse, and the kernels here read an fp32 lse");
    REQUIRE(!is_for_cpu || given->dropout_p == 0, "on the CPU dropout_p must be 0; it is %g", given->dropout_p);
    for (int i = 0; i < 3 && status == FA_OK; i++) status = fa_make_like(inputs[i], keeps_strides, &grads[i], err);
    if (status == FA_OK) status = fa_close_gaps(&c.dout, &dout, err);
    if (status == FA_OK) {
        c.dq = grads[0], c.dk = grads[1], c.dv = grads[2];
        c.fresh_out = c.is_aten = true;
        c.is_for_cpu = is_for_cpu;
        c.window_left = c.window_right = -1;
        c.rng_state.dtype = fa_torch.i64;
        c.deterministic = !is_for_cpu && is_deterministic();
        fa_tensor *const all[] = {&c.q, &c.k, &c.v, &c.out, &c.dout, &c.dq, &c.dk, &c.dv};
        for (int i = 0; i < 8; i++) fa_exchange(all[i], &rooms[i]);
        if (is_for_cpu) fa_align_top_left(&c, bias_size);
        if (is_for_cpu) status = fa_read_key_mask(&c, &seen, err);
        if (status == FA_OK) status = fa_execute(&c, &outputs, err);
        if (is_for_cpu && status == FA_OK && !fa_plan_only())
            for (int i = 1; i < 3; i++) clear_unseen_keys(&grads[i], c.k.size[1], &seen);
        fa_forget_keys(&seen);
    }
    fa_drop_outputs(&outputs);
    if (dout) fa_torch.aoti_torch_delete_tensor_object(dout);
    for (int i = 0; i < 3 && status != FA_OK; i++) fa_drop_tensor(&grads[i]);
    return status;
}

static void take_gradients(const fa_tensor grads[3], fa_outputs *outputs) {
    for (int i = 0; i < 3; i++) outputs->tensor[i] = grads[i].handle;
    outputs->num = 3;
}

static fa_status execute_cpu_backward(const fa_call *c, fa_outputs *outputs, fa_error *err) {
    fa_tensor grads[3];
    fa_status status = is_active ? backward(c, true, grads, err) : hand_on(err);
    if (status == FA_OK) {
        take_gradients(grads, outputs);
        return FA_OK;
    }
    if (!is_for_torch(status) || !torchs.cpu_backward) return status;
    double scale;
    tensor mask, *t = outputs->tensor;
    note_torch(c->pass, FA_CPU, err);
    return torch_said(torchs.cpu_backward(c->dout.handle, c->q.handle, c->k.handle, c->v.handle, c->out.handle,
                                          c->softmax_lse.handle, c->dropout_p, c->causal,
                                          optional(&c->attn_bias, &mask), scale_of(c, &scale), &t[0], &t[1], &t[2]),
                      3, outputs, err);
}

static fa_status execute_cuda_backward(const fa_call *c, fa_outputs *outputs, fa_error *err) {
    fa_tensor grads[3];
    fa_status status = is_active ? backward(c, false, grads, err) : hand_on(err);
    if (status == FA_OK) {
        take_gradients(grads, outputs);
        return FA_OK;
    }
    if (!is_for_torch(status) || !torchs.cuda_backward || c->q.device_type != fa_torch.cuda) return status;
    double scale;
    tensor *t = outputs->tensor;
    fa_outputs undefined = {.num = 0}; /* an undefined state has no handle here, and torch's function wants one */
    if (!c->rng_state.handle) TRY(make_undefined(&undefined, err));
    note_torch(c->pass, FA_CUDA, err);
    status = torch_said(torchs.cuda_backward(c->dout.handle, c->q.handle, c->k.handle, c->v.handle, c->out.handle,
                                             c->softmax_lse.handle, c->unread[0].handle, c->unread[1].handle,
                                             c->max_seqlen_q, c->max_seqlen_k, c->dropout_p, c->causal,
                                             undefined.num ? undefined.tensor[0] : c->rng_state.handle,
                                             c->unread[2].handle, scale_of(c, &scale), &t[0], &t[1], &t[2]),
                        3, outputs, err);
    fa_drop_outputs(&undefined);
    return status;
}

/* ---- varlen_attn: tensors [b, len, h, d], or packed [tokens, h, d] ----------------------------------------------- */

static fa_call plain_call(const fa_call *given) {
    fa_call c = *given;
    c.is_aten = true;
    if (present(&c.cu_seqlens_q)) {
        c.layout = FA_OP_VARLEN;
        c.zero_tensors = c.q.device_type == fa_torch.cpu;
    }
    if (c.window_left == FA_NOT_GIVEN) c.window_left = -1;
    if (c.window_right == FA_NOT_GIVEN) c.window_right = -1;
    if (c.num_splits == FA_NOT_GIVEN) c.num_splits = 0;
    c.has_dropout = c.dropout_p > 0;
    return c;
}

static fa_status execute_flash_forward(const fa_call *given, fa_outputs *outputs, fa_error *err) {
    fa_call c = plain_call(given);
    fa_outputs made, rest = {.num = 0};
    REQUIRE(!given->return_debug_mask, "return_debug_mask must be false");
    TRY(fa_execute(&c, &made, err));
    const int first = made.num - (c.has_dropout ? 2 : 0); /* out and lse come first */
    fa_outputs aux = {.tensor = {NULL, made.tensor[first], made.tensor[first + 1]}};
    TRY(add_aux(&c, &aux, &rest, err));
    const tensor results[] = {made.tensor[0], made.tensor[1], rest.tensor[0], rest.tensor[1], rest.tensor[2]};
    memcpy(outputs->tensor, results, sizeof results);
    outputs->num = 5;
    return FA_OK;
}

static fa_status execute_flash_forward_inplace(const fa_call *given, fa_outputs *outputs, fa_error *err) {
    fa_call c = plain_call(given);
    REQUIRE(given->dropout_p == 0 && !given->return_debug_mask, "dropout_p must be 0 and return_debug_mask false");
    return fa_execute(&c, outputs, err);
}

static fa_status execute_flash_backward(const fa_call *given, fa_outputs *outputs, fa_error *err) {
    static const char *const names[] = {"dq", "dk", "dv"};
    fa_call c = plain_call(given);
    const fa_tensor *inputs[] = {&c.q, &c.k, &c.v};
    fa_tensor *const grads[] = {&c.dq, &c.dk, &c.dv};
    tensor dout = NULL;
    fa_outputs results = {.num = 0}, unused = {.num = 0};
    fa_status status = fa_close_gaps(&c.dout, &dout, err);
    for (int i = 0; i < 3 && status == FA_OK; i++) {
        int64_t stride[4];
        void *data = NULL;
        REQUIRE(inputs[i]->ndim <= 4, "%s must have at most 4 dimensions", inputs[i]->name);
        fa_empty_like_strides(inputs[i], stride);
        status =
            fa_make_output(&results, inputs[i], inputs[i]->ndim, inputs[i]->size, stride, inputs[i]->dtype, &data, err);
        if (status != FA_OK) break;
        fa_tensor_read(results.tensor[i], grads[i]);
        grads[i]->data = data, grads[i]->name = names[i];
    }
    c.fresh_out = true;
    c.rng_state.dtype = fa_torch.i64;
    c.deterministic = is_deterministic();
    if (status == FA_OK) status = fa_execute(&c, &unused, err);
    fa_drop_outputs(&unused);
    if (dout) fa_torch.aoti_torch_delete_tensor_object(dout);
    if (status != FA_OK) fa_drop_outputs(&results);
    *outputs = results;
    return status;
}

/* ---- the ops ----------------------------------------------------------------------------------------------------- */

#define QKV    FA_ARG("Tensor query", q), FA_ARG("Tensor key", k), FA_ARG("Tensor value", v)
#define SAVED  FA_ARG("Tensor grad_out", dout), QKV, FA_ARG("Tensor out", out), FA_ARG("Tensor logsumexp", softmax_lse)
#define MASK   FA_ARG("float dropout_p", dropout_p), FA_ARG("bool is_causal", causal)
#define SCALE  FA_ARG("float? scale", softmax_scale)
#define DEBUG  FA_ARG("bool return_debug_mask", return_debug_mask)
#define BIAS   FA_ARG("Tensor?~ attn_mask", attn_bias)
#define MAX    FA_ARG("SymInt max_q", max_seqlen_q), FA_ARG("SymInt max_k", max_seqlen_k)
#define WINDOW FA_ARG("SymInt? window_size_left", window_left), FA_ARG("SymInt? window_size_right", window_right)
#define FLASH                                                                                                        \
    FA_ARG("Tensor?~ cum_seq_q", cu_seqlens_q), FA_ARG("Tensor?~ cum_seq_k", cu_seqlens_k), MAX, MASK, DEBUG, SCALE, \
        WINDOW, FA_ARG("Tensor?~ seqused_k", seqused_k), FA_ARG("Tensor?~ alibi_slopes", alibi_slopes)
#define PAGES FA_ARG("Tensor?~ block_table", block_table), FA_ARG("int? num_splits", num_splits)

enum { NUM_OPS = 7 };

/* Torch adds arguments at the end. A release that lacks the last ones fills fewer slots. */
static fa_op ops[NUM_OPS] = {
    {"_scaled_dot_product_flash_attention_for_cpu",
     "",
     FA_OP_DENSE,
     FA_FWD,
     execute_cpu_forward,
     {QKV, MASK, BIAS, SCALE}},
    {"_scaled_dot_product_flash_attention_for_cpu_backward",
     "",
     FA_OP_DENSE,
     FA_BWD,
     execute_cpu_backward,
     {SAVED, MASK, BIAS, SCALE}},
    {"_scaled_dot_product_flash_attention", "", FA_OP_DENSE, FA_FWD, execute_cuda_forward, {QKV, MASK, DEBUG, SCALE}},
    {"_scaled_dot_product_flash_attention_backward",
     "",
     FA_OP_DENSE,
     FA_BWD,
     execute_cuda_backward,
     {SAVED, FA_ARG("Tensor~ cum_seq_q", unread[0]), FA_ARG("Tensor~ cum_seq_k", unread[1]), MAX, MASK,
      FA_ARG("Tensor~ rng_state", rng_state), FA_ARG("Tensor~ unused", unread[2]), SCALE}},
    {"_flash_attention_forward", "", FA_OP_DENSE, FA_FWD, execute_flash_forward, {QKV, FLASH, PAGES}},
    {"_flash_attention_forward_no_dropout_inplace",
     "",
     FA_OP_DENSE,
     FA_FWD,
     execute_flash_forward_inplace,
     {FA_ARG("Tensor(a!) out", out), QKV, FLASH, PAGES}},
    {"_flash_attention_backward",
     "",
     FA_OP_DENSE,
     FA_BWD,
     execute_flash_backward,
     {SAVED, FA_ARG("Tensor~ cum_seq_q", cu_seqlens_q), FA_ARG("Tensor~ cum_seq_k", cu_seqlens_k), MAX, MASK,
      FA_ARG("Tensor~ rng_state", rng_state), FA_ARG("Tensor~ unused", unread[2]), SCALE, WINDOW}},
};
static fa_signature signatures[NUM_OPS];

#define ENTRIES(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6)
#define ENTRY(i)                                                                            \
    static void entry_##i(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) { \
        (void)num_inputs;                                                                   \
        fa_boxed_call(&ops[i], &signatures[i], stack, num_outputs);                         \
    }
ENTRIES(ENTRY)
#define ENTRY_OF(i) entry_##i,
static fa_boxed_op *const entries[NUM_OPS] = {ENTRIES(ENTRY_OF)};

/* A library for each key. Kernels of `staying` are never given back. */
enum { CPU, CUDA, NUM_KEYS };
static TorchLibraryHandle staying[NUM_KEYS], leaving[NUM_KEYS];

static void restore(void) {
    is_active = false;
    for (int k = 0; k < NUM_KEYS; k++) {
        if (leaving[k]) fa_torch.aoti_torch_delete_library_object(leaving[k]);
        leaving[k] = NULL;
    }
}

/* Torch has no kernels for CPU tensors of the ops that are CUDA's. Here they have one. */
static bool serves(int op, int key) { return op >= 2 || key == CPU; }

/* Can a kernel hand on calls as if it were not there? Before 2.13 the shim does not tell what torch's kernel said. */
static bool can_stay(int op, int key) {
    const bool known = key == CPU ? torchs.cpu_forward && torchs.cpu_backward && op < 2
                                  : torchs.cuda_forward && torchs.cuda_backward && (op == 2 || op == 3);
    return known && torchs.what;
}

/* Replaces the kernels that may stay, or the others. */
static bool replace(TorchLibraryHandle libraries[NUM_KEYS], const int num_arguments[NUM_OPS], bool stay, bool others) {
    static const char *const keys[NUM_KEYS] = {"CPU", "CUDA"};
    for (int k = 0; k < NUM_KEYS; k++)
        for (int i = 0; i < NUM_OPS; i++) {
            if (num_arguments[i] == 0 || !serves(i, k) || !(can_stay(i, k) ? stay : others)) continue;
            if (!libraries[k] &&
                fa_torch.aoti_torch_library_init_impl("aten", keys[k], __FILE__, __LINE__, &libraries[k]) != 0)
                return false;
            if (fa_torch.torch_library_impl(libraries[k], ops[i].name, entries[i], FA_TORCH_ABI_VERSION) != 0)
                return false;
        }
    return true;
}

/* Reads the ops once, because kernels that stayed read them in other threads. */
static bool read_ops(const int num_arguments[NUM_OPS]) {
    static bool is_done, fit = true;
    if (is_done) return fit;
    find_torchs_kernels();
    for (int i = 0; i < NUM_OPS; i++)
        if (num_arguments[i] > 0) {
            fa_read_op(&ops[i], &signatures[i]);
            fit &= num_arguments[i] <= signatures[i].num_slots;
            signatures[i].num_slots = num_arguments[i];
        }
    is_done = true;
    return fit;
}

/* may_stay: nobody else has replaced a kernel that would stay. It would be hidden after flash_attn is given back. */
static bool override(const int num_arguments[NUM_OPS], bool may_stay) {
    if (!read_ops(num_arguments)) return false;
    const bool stayed = staying[CPU] || staying[CUDA];
    bool done = stayed || !may_stay || replace(staying, num_arguments, true, false);
    done = done && replace(leaving, num_arguments, !may_stay, true);
    if (!done) restore();
    return done;
}

/* sdpa_override(numbers of arguments, promises about strides, may kernels stay). Returns whether kernels stay. */
static PyObject *sdpa_override(PyObject *self, PyObject *args) {
    (void)self;
    int n[NUM_OPS], cpu_out, cpu_grads, cuda_grads, may_stay;
    if (!PyArg_ParseTuple(args, "(iiiiiii)(ppp)p", &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6], &cpu_out,
                          &cpu_grads, &cuda_grads, &may_stay))
        return NULL;
    if (!fa_torch.aoti_torch_delete_library_object || !fa_torch.aoti_torch_new_uninitialized_tensor) {
        PyErr_SetString(PyExc_NotImplementedError, "this PyTorch cannot give back a kernel that was replaced");
        return NULL;
    }
    restore();
    cpu_out_is_like_q = cpu_out, cpu_grads_are_like_inputs = cpu_grads, cuda_grads_are_like_inputs = cuda_grads;
    if (!override(n, may_stay)) {
        PyErr_SetString(PyExc_RuntimeError, "PyTorch's attention ops have arguments that flash_attn does not know");
        return NULL;
    }
    is_active = true;
    return PyBool_FromLong(staying[CPU] || staying[CUDA]);
}

static PyObject *sdpa_restore(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    restore();
    Py_RETURN_NONE;
}

PyMethodDef fa_sdpa_functions[] = {
    {"sdpa_override", sdpa_override, METH_VARARGS,
     "sdpa_override(numbers of arguments of the ops, (out of the CPU is like q, its gradients are like the inputs, "
     "those of CUDA are), may kernels stay) -> bool: replaces the kernels of torch's attention ops, and tells whether "
     "some stay where they are"},
    {"sdpa_restore", sdpa_restore, METH_NOARGS, "sdpa_restore(): torch's kernels compute again"},
    {NULL, NULL, 0, NULL},
};
