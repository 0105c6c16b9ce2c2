/* The ops of namespace flash_attn: schemas, and one boxed entry for all of them.
 *
 * An op is a list of arguments, each a piece of schema text and the place in fa_call where its value goes. The schema is
 * the texts joined; unpacking walks the same list. Then every op takes the same road:
 *
 *   unpack -> fa_execute (execute.c): check, plan, allocate, run -> pack */
#include "ops.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "execute.h"
#include "failures.h"
#include "torch_throw.h"

typedef struct {
    const char *schema; /* "Tensor(a!)? dq", "SymInt window_size_left=-1": type, name, default */
    size_t place;       /* offset in fa_call */
} argument;

#define ARG(schema, member) {schema, offsetof(fa_call, member)}

typedef struct {
    const char *name, *results; /* results NULL: torch does not know of it */
    fa_layout layout;
    fa_pass pass;
    argument arguments[FA_MAX_ARGUMENTS]; /* up to the first without schema */
} op;

#define ARGS_MASK_BUT_SCALE                                                  \
    ARG("bool causal", causal), ARG("SymInt window_size_left", window_left), \
        ARG("SymInt window_size_right", window_right), ARG("float softcap", softcap)
#define ARGS_MASK               ARG("float softmax_scale", softmax_scale), ARGS_MASK_BUT_SCALE
#define ARGS_DEFAULT_SCALE_MASK ARG("float? softmax_scale", softmax_scale), ARGS_MASK_BUT_SCALE
#define ARGS_DENSE_OPTIONS                                                                   \
    ARG("float dropout_p", dropout_p), ARGS_MASK, ARG("Tensor? alibi_slopes", alibi_slopes), \
        ARG("bool return_softmax", return_softmax)
#define ARGS_CU_SEQLENS                                                                 \
    ARG("Tensor cu_seqlens_q", cu_seqlens_q), ARG("Tensor cu_seqlens_k", cu_seqlens_k), \
        ARG("SymInt max_seqlen_q", max_seqlen_q), ARG("SymInt max_seqlen_k", max_seqlen_k)
#define ARGS_VARLEN_OPTIONS                                                                                   \
    ARG("float dropout_p", dropout_p), ARG("float softmax_scale", softmax_scale), ARG("bool causal", causal), \
        ARG("SymInt window_size_left=-1", window_left), ARG("SymInt window_size_right=-1", window_right),     \
        ARG("float softcap=0.0", softcap), ARG("Tensor? alibi_slopes=None", alibi_slopes),                    \
        ARG("bool return_softmax=False", return_softmax), ARG("Tensor? block_table=None", block_table),       \
        ARG("Tensor? leftpad_k=None", leftpad_k), ARG("Tensor? seqused_k=None", seqused_k),                   \
        ARG("bool zero_tensors=False", zero_tensors), ARG("SymInt num_splits=0", num_splits)
#define ARGS_SAVED                                                                                                \
    ARG("Tensor dout", dout), ARG("Tensor q", q), ARG("Tensor k", k), ARG("Tensor v", v), ARG("Tensor out", out), \
        ARG("Tensor softmax_lse", softmax_lse), ARG("Tensor(a!)? dq", dq), ARG("Tensor(b!)? dk", dk),             \
        ARG("Tensor(c!)? dv", dv)
#define ARGS_BWD_OPTIONS                                                                     \
    ARG("float dropout_p", dropout_p), ARGS_MASK, ARG("Tensor? alibi_slopes", alibi_slopes), \
        ARG("bool deterministic", deterministic), ARG("Tensor? rng_state=None", rng_state)

#define ARGS_PLAIN_OPTIONS ARGS_DEFAULT_SCALE_MASK, ARG("Tensor? alibi_slopes", alibi_slopes)
#define ARGS_PLAIN         ARG("Tensor q", q), ARG("Tensor k", k), ARG("Tensor v", v), ARGS_PLAIN_OPTIONS
#define ARGS_PLAIN_VARLEN                                                                            \
    ARG("Tensor q", q), ARG("Tensor k", k), ARG("Tensor v", v), ARGS_CU_SEQLENS, ARGS_PLAIN_OPTIONS, \
        ARG("Tensor? block_table", block_table)

/* Those that torch knows of: X(name of the row). */
#define REGISTERED_OPS(X) \
    X(FORWARD)            \
    X(VARLEN_FORWARD)     \
    X(BACKWARD)           \
    X(VARLEN_BACKWARD)    \
    X(FWD_OUT)            \
    X(VARLEN_FWD_OUT)     \
    X(FWD_KVCACHE)

/* clang-format off */
#define OP_ENUM(name) name,
enum { REGISTERED_OPS(OP_ENUM) PLAIN_FORWARD, PLAIN_VARLEN_FORWARD, NUM_OPS };
/* clang-format on */

static const op ops[NUM_OPS] = {
    [FORWARD] = {"_flash_attn_forward",
                 "(Tensor, Tensor, Tensor, Tensor)",
                 FA_OP_DENSE,
                 FA_FWD,
                 {ARG("Tensor q", q), ARG("Tensor k", k), ARG("Tensor v", v), ARGS_DENSE_OPTIONS}},
    [VARLEN_FORWARD] = {"_flash_attn_varlen_forward",
                        "(Tensor, Tensor, Tensor, Tensor)",
                        FA_OP_VARLEN,
                        FA_FWD,
                        {ARG("Tensor q", q), ARG("Tensor k", k), ARG("Tensor v", v), ARGS_CU_SEQLENS,
                         ARGS_VARLEN_OPTIONS}},
    [BACKWARD] = {"_flash_attn_backward", "Tensor", FA_OP_DENSE, FA_BWD, {ARGS_SAVED, ARGS_BWD_OPTIONS}},
    [VARLEN_BACKWARD] = {"_flash_attn_varlen_backward",
                         "Tensor",
                         FA_OP_VARLEN,
                         FA_BWD,
                         {ARGS_SAVED, ARGS_CU_SEQLENS, ARGS_BWD_OPTIONS, ARG("bool zero_tensors=False", zero_tensors)}},
    /* The same two forwards into a tensor that the caller brings, for the module flash_attn_2_cuda. */
    [FWD_OUT] = {"fwd",
                 "(Tensor, Tensor, Tensor)",
                 FA_OP_DENSE,
                 FA_FWD,
                 {ARG("Tensor q", q), ARG("Tensor k", k), ARG("Tensor v", v), ARG("Tensor(a!) out", out),
                  ARGS_DENSE_OPTIONS}},
    [VARLEN_FWD_OUT] = {"varlen_fwd",
                        "(Tensor, Tensor, Tensor)",
                        FA_OP_VARLEN,
                        FA_FWD,
                        {ARG("Tensor q", q), ARG("Tensor k", k), ARG("Tensor v", v), ARG("Tensor(a!) out", out),
                         ARGS_CU_SEQLENS, ARGS_VARLEN_OPTIONS}},
    [FWD_KVCACHE] = {"fwd_kvcache",
                     "Tensor",
                     FA_OP_KVCACHE,
                     FA_FWD,
                     {ARG("Tensor q", q), ARG("Tensor(a!) k_cache", k), ARG("Tensor(b!) v_cache", v),
                      ARG("Tensor? k", k_new), ARG("Tensor? v", v_new), ARG("Tensor? seqlens_k", seqused_k),
                      ARG("Tensor? rotary_cos", rotary_cos), ARG("Tensor? rotary_sin", rotary_sin),
                      ARG("Tensor? cache_batch_idx", cache_batch_idx), ARG("Tensor? leftpad_k", leftpad_k),
                      ARG("Tensor? block_table", block_table), ARG("Tensor? alibi_slopes", alibi_slopes),
                      ARG("Tensor(c!) out", out), ARGS_DEFAULT_SCALE_MASK,
                      ARG("bool rotary_interleaved", rotary_interleaved), ARG("SymInt num_splits", num_splits)}},
    /* The two forwards without dropout and without what only dropout needs. Nobody but direct.c calls them. */
    [PLAIN_FORWARD] = {"_forward", NULL, FA_OP_DENSE, FA_FWD, {ARGS_PLAIN}},
    [PLAIN_VARLEN_FORWARD] = {"_varlen_forward", NULL, FA_OP_VARLEN, FA_FWD, {ARGS_PLAIN_VARLEN}},
};

static fa_signature signatures[NUM_OPS];

/* ---- slots of a boxed call ------------------------------------------------------------------------------------- */

static uint64_t take_optional(StableIValue present) {
    StableIValue *inner = (StableIValue *)(uintptr_t)present;
    const uint64_t value = *inner;
    if (fa_torch.torch_delete_stable_ivalue)
        fa_torch.torch_delete_stable_ivalue(inner);
    else
        fa_torch.operator_delete(inner);
    return value;
}

void fa_begin_call(const fa_signature *signature, fa_call *call) { *call = signature->nothing; }

/* Of a tensor that has no address: None where the schema wants a tensor comes as one that is not defined. */
static fa_status why_unreadable(const fa_tensor *t, fa_error *err) {
    bool is_defined = true;
    if (fa_torch.aoti_torch_is_defined) fa_torch.aoti_torch_is_defined(t->handle, &is_defined);
    return fa_fail(err, FA_EINVAL, is_defined ? "%s has no memory to read" : "%s must be a tensor; it is None",
                   t->name);
}

static fa_status unpack(const fa_signature *signature, const StableIValue *stack, fa_call *call, fa_error *err) {
    fa_status status = FA_OK;
    fa_begin_call(signature, call);
    for (int i = 0; i < signature->num_slots; i++) {
        const fa_slot *s = &signature->slots[i];
        char *place = (char *)call + s->place;
        uint64_t value = stack[i];
        if (s->is_optional) {
            if (value == 0) {
                if (s->kind == FA_SLOT_FLOAT) call->default_scale = true; /* the only optional number */
                continue;
            }
            value = take_optional(value);
        }
        switch (s->kind) {
        case FA_SLOT_TENSOR: {
            fa_tensor *t = (fa_tensor *)place;
            AtenTensorHandle handle = (AtenTensorHandle)(uintptr_t)value;
            if (!handle) continue;
            fa_tensor_read(handle, t);
            const int failed = s->is_mutable ? fa_torch.torch_get_mutable_data_ptr(handle, &t->data)
                                             : fa_torch.torch_get_const_data_ptr(handle, (const void **)&t->data);
            if (failed && status == FA_OK) status = why_unreadable(t, err);
            break;
        }
        case FA_SLOT_BOOL: *(bool *)place = (value & 0xff) != 0; break;
        case FA_SLOT_FLOAT:
        case FA_SLOT_INT: memcpy(place, &value, sizeof value); break;
        }
    }
    return status;
}

static void release(const fa_signature *signature, const fa_call *call) {
    for (int i = 0; i < signature->num_slots; i++) {
        const fa_slot *s = &signature->slots[i];
        const fa_tensor *t = (const fa_tensor *)((const char *)call + s->place);
        if (s->kind == FA_SLOT_TENSOR && t->handle) fa_torch.aoti_torch_delete_tensor_object(t->handle);
    }
}

/* ---- entries ------------------------------------------------------------------------------------------------------- */

/* All handles are released before a failure leaves through aoti_torch_check, which throws. */
static void boxed_call(int op_idx, StableIValue *stack, uint64_t num_outputs) {
    fa_call call;
    fa_outputs outputs;
    fa_error err;
    outputs.num = 0;
    err.text[0] = '\0';
    fa_note_failure(FA_OK, &err);
    fa_status status = unpack(&signatures[op_idx], stack, &call, &err);
    if (status == FA_OK) status = fa_execute(&call, &outputs, &err);
    release(&signatures[op_idx], &call);
    if (status == FA_OK && (uint64_t)outputs.num != num_outputs)
        status = fa_fail(&err, FA_EINVAL, "flash_attn::%s made %d results where its schema has %d", ops[op_idx].name,
                         outputs.num, (int)num_outputs);
    if (status != FA_OK) fa_note_failure(status, &err);
    if (status == FA_ENOMEM_GPU) fa_torch_throw_out_of_memory(__func__, __FILE__, __LINE__, err.text);
    if (status != FA_OK) fa_torch.aoti_torch_check(false, __func__, __FILE__, __LINE__, err.text);
    for (int i = 0; i < outputs.num; i++) stack[i] = (StableIValue)(uintptr_t)outputs.tensor[i];
}

/* A boxed function is told its arguments but not its name. */
#define ENTRY(op_idx)                                                                            \
    static void entry_##op_idx(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) { \
        (void)num_inputs;                                                                        \
        boxed_call(op_idx, stack, num_outputs);                                                  \
    }
REGISTERED_OPS(ENTRY)

#define ENTRY_OF(op_idx) [op_idx] = entry_##op_idx,
static fa_boxed_op *const entries[NUM_OPS] = {REGISTERED_OPS(ENTRY_OF)};

/* ---- registration ----------------------------------------------------------------------------------------------- */

static bool starts_with(const char *text, const char *word) { return strncmp(text, word, strlen(word)) == 0; }

static void read_schema(int op_idx) {
    const argument *a = ops[op_idx].arguments;
    fa_signature *signature = &signatures[op_idx];
    signature->pass = ops[op_idx].pass;
    signature->nothing.layout = ops[op_idx].layout;
    signature->nothing.pass = ops[op_idx].pass;
    int n = 0;
    for (; n < FA_MAX_ARGUMENTS && a[n].schema; n++) {
        fa_slot *s = &signature->slots[n];
        const char *name = strrchr(a[n].schema, ' ') + 1;
        s->kind = starts_with(a[n].schema, "Tensor")  ? FA_SLOT_TENSOR
                  : starts_with(a[n].schema, "float") ? FA_SLOT_FLOAT
                  : starts_with(a[n].schema, "bool")  ? FA_SLOT_BOOL
                                                      : FA_SLOT_INT;
        s->is_optional = strchr(a[n].schema, '?') != NULL;
        s->is_mutable = strchr(a[n].schema, '!') != NULL;
        s->place = a[n].place;
        snprintf(s->name, sizeof s->name, "%.*s", (int)strcspn(name, "="), name);
        if (strcmp(s->name, "dropout_p") == 0) signature->nothing.has_dropout = true;
        if (s->kind == FA_SLOT_TENSOR) ((fa_tensor *)((char *)&signature->nothing + s->place))->name = s->name;
    }
    signature->num_slots = n;
}

const fa_signature *fa_find_op(const char *name) {
    for (int i = 0; i < NUM_OPS; i++)
        if (strcmp(ops[i].name, name) == 0) return &signatures[i];
    return NULL;
}

static void write_schema(const op *o, char *text, size_t room) {
    int at = snprintf(text, room, "%s(", o->name);
    for (int i = 0; i < FA_MAX_ARGUMENTS && o->arguments[i].schema; i++)
        at += snprintf(text + at, room - (size_t)at, "%s%s", i ? ", " : "", o->arguments[i].schema);
    snprintf(text + at, room - (size_t)at, ") -> %s", o->results);
}

fa_status fa_register_ops(fa_error *err) {
    /* The libraries live as long as the process: ops cannot be unregistered safely while Python may call them. */
    TorchLibraryHandle def = NULL, impl[2] = {NULL, NULL};
    const char *const keys[2] = {"CPU", "CUDA"};
    int failed = fa_torch.aoti_torch_library_init_def("flash_attn", __FILE__, __LINE__, &def);
    for (int k = 0; k < 2 && !failed; k++)
        failed = fa_torch.aoti_torch_library_init_impl("flash_attn", keys[k], __FILE__, __LINE__, &impl[k]);
    for (int i = 0; i < NUM_OPS && !failed; i++) {
        char schema[1024];
        read_schema(i);
        if (!ops[i].results) continue;
        write_schema(&ops[i], schema, sizeof schema);
        failed = fa_torch.aoti_torch_library_def(def, schema);
        for (int k = 0; k < 2 && !failed; k++)
            failed = fa_torch.torch_library_impl(impl[k], ops[i].name, entries[i], FA_TORCH_ABI_VERSION);
    }
    if (failed)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn could not register its ops with this PyTorch: is another "
                       "package named flash_attn loaded?");
    return FA_OK;
}
