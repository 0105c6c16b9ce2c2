/* The schemas and boxed functions of the ops. ops_2.c or ops_3.c lists the ops of one namespace.
 *
 * An op is a list of arguments. An argument is a piece of schema text and the place of its value in fa_call. The texts
 * joined are the schema, and unpacking walks the same list. Every op takes the same steps:
 *
 *   unpack -> refuse tangents -> fa_execute (execute.c): check, plan, allocate, run -> pack */
#include "ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "autograd.h"
#include "execute.h"
#include "failures.h"
#include "older_torch.h"
#include "torch_throw.h"

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

static bool is_defined(AtenTensorHandle handle) {
    bool truth = true;
    if (fa_torch.aoti_torch_is_defined) fa_torch.aoti_torch_is_defined(handle, &truth);
    return truth;
}

/* Says why a tensor has no address. None in place of a tensor arrives as a tensor that is not defined. */
static fa_status why_unreadable(const fa_tensor *t, fa_error *err) {
    return fa_fail(err, FA_EINVAL,
                   is_defined(t->handle) ? "%s has no memory to read" : "%s must be a tensor; it is None", t->name);
}

fa_status fa_take_tensor(const fa_slot *s, AtenTensorHandle handle, fa_tensor *t, fa_error *err) {
    fa_tensor_read(handle, t);
    const int failed = s->is_mutable ? fa_torch.torch_get_mutable_data_ptr(handle, &t->data)
                                     : fa_torch.torch_get_const_data_ptr(handle, (const void **)&t->data);
    return failed ? why_unreadable(t, err) : FA_OK;
}

void fa_open_caches(fa_call *call) {
    if (call->layout != FA_OP_3 || !call->k_new.handle) return;
    fa_tensor *caches[] = {&call->k, &call->v};
    for (int i = 0; i < 2; i++) fa_torch.torch_get_mutable_data_ptr(caches[i]->handle, &caches[i]->data);
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
                if (s->kind == FA_SLOT_FLOAT) call->default_scale = true; /* the only optional float */
                continue;
            }
            value = take_optional(value);
        }
        switch (s->kind) {
        case FA_SLOT_TENSOR: {
            AtenTensorHandle handle = (AtenTensorHandle)(uintptr_t)value;
            fa_error ignored;
            if (!handle) continue;
            if (s->is_unread) {
                ((fa_tensor *)place)->handle = handle;
                break;
            }
            if (s->may_be_undefined && !is_defined(handle)) {
                fa_torch.aoti_torch_delete_tensor_object(handle);
                continue;
            }
            const fa_status taken = fa_take_tensor(s, handle, (fa_tensor *)place, status == FA_OK ? err : &ignored);
            if (status == FA_OK) status = taken;
            break;
        }
        case FA_SLOT_BOOL: *(bool *)place = (value & 0xff) != 0; break;
        case FA_SLOT_FLOAT:
        case FA_SLOT_INT: memcpy(place, &value, sizeof value); break;
        }
    }
    if (status == FA_OK) fa_open_caches(call);
    return status;
}

fa_status fa_refuse_tangents(const fa_signature *signature, const fa_call *call, fa_error *err) {
    if (!fa_forward_ad_is_on()) return FA_OK;
    for (int i = 0; i < signature->num_slots; i++) {
        const fa_slot *s = &signature->slots[i];
        const fa_tensor *t = (const fa_tensor *)((const char *)call + s->place);
        if (s->kind == FA_SLOT_TENSOR && t->handle && fa_has_tangent(t->handle))
            return fa_fail(err, FA_EUNSUPPORTED,
                           "%s has no jvp: there is no forward-mode derivative of attention; %s has a tangent",
                           fa_ops.name_space, t->name);
    }
    return FA_OK;
}

static void release(const fa_signature *signature, const fa_call *call) {
    for (int i = 0; i < signature->num_slots; i++) {
        const fa_slot *s = &signature->slots[i];
        const fa_tensor *t = (const fa_tensor *)((const char *)call + s->place);
        if (s->kind == FA_SLOT_TENSOR && t->handle) fa_torch.aoti_torch_delete_tensor_object(t->handle);
    }
}

/* ---- entries ----------------------------------------------------------------------------------------------------- */

/* aoti_torch_check throws after a failure, so all handles are released before. */
void fa_boxed_call(const fa_op *op, const fa_signature *signature, StableIValue *stack, uint64_t num_outputs) {
    fa_call call;
    fa_outputs outputs;
    fa_error err;
    outputs.num = 0;
    err.text[0] = '\0';
    fa_note_failure(FA_OK, &err);
    fa_status status = unpack(signature, stack, &call, &err);
    if (status == FA_OK) status = fa_refuse_tangents(signature, &call, &err);
    if (status == FA_OK) status = op->execute(&call, &outputs, &err);
    release(signature, &call);
    if (status == FA_OK && (uint64_t)outputs.num != num_outputs)
        status = fa_fail(&err, FA_EINVAL, "%s made %d results where its schema has %d", op->name, outputs.num,
                         (int)num_outputs);
    if (status != FA_OK) fa_note_failure(status, &err);
    if (status == FA_ENOMEM_GPU) fa_torch_throw_out_of_memory(__func__, __FILE__, __LINE__, err.text);
    if (status != FA_OK) fa_torch.aoti_torch_check(false, __func__, __FILE__, __LINE__, err.text);
    for (int i = 0; i < outputs.num; i++) stack[i] = (StableIValue)(uintptr_t)outputs.tensor[i];
}

/* A boxed function gets its arguments but not its name. So each row of the table has its own function. */
#define ENTRIES(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define ENTRY(op_idx)                                                                            \
    static void entry_##op_idx(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) { \
        (void)num_inputs;                                                                        \
        fa_boxed_call(&fa_ops.ops[op_idx], &fa_ops.signatures[op_idx], stack, num_outputs);      \
    }
ENTRIES(ENTRY)

#define ENTRY_OF(op_idx) entry_##op_idx,
static fa_boxed_op *const entries[FA_MAX_OPS] = {ENTRIES(ENTRY_OF)};

/* ---- registration ----------------------------------------------------------------------------------------------- */

static bool starts_with(const char *text, const char *word) { return strncmp(text, word, strlen(word)) == 0; }

static int count_words(const char *text, const char *word) {
    int num = 0;
    while (text && (text = strstr(text, word))) num++, text += strlen(word);
    return num;
}

/* A call without the argument gets the default of the schema, such as "=-1". Torch's own calls give every argument. */
static void read_default(fa_slot_kind kind, const char *text, void *place) {
    if (!text) return;
    if (kind == FA_SLOT_BOOL) *(bool *)place = strcmp(text, "=True") == 0;
    if (kind == FA_SLOT_FLOAT) *(double *)place = strtod(text + 1, NULL);
    if (kind == FA_SLOT_INT) *(int64_t *)place = strtoll(text + 1, NULL, 10);
}

static void read_schema(const fa_op *op, fa_signature *signature) {
    const fa_argument *a = op->arguments;
    const int64_t not_given = FA_NOT_GIVEN;
    signature->pass = op->pass;
    signature->nothing.layout = op->layout;
    signature->nothing.pass = op->pass;
    signature->nothing.num_results = count_words(op->results, "Tensor");
    int n = 0;
    for (; n < FA_MAX_ARGUMENTS && a[n].schema; n++) {
        fa_slot *s = &signature->slots[n];
        char *place = (char *)signature + offsetof(fa_signature, nothing) + a[n].place;
        const char *name = strrchr(a[n].schema, ' ') + 1;
        s->kind = starts_with(a[n].schema, "Tensor")  ? FA_SLOT_TENSOR
                  : starts_with(a[n].schema, "float") ? FA_SLOT_FLOAT
                  : starts_with(a[n].schema, "bool")  ? FA_SLOT_BOOL
                                                      : FA_SLOT_INT; /* int, SymInt, ScalarType */
        s->is_optional = strchr(a[n].schema, '?') != NULL;
        s->is_mutable = strchr(a[n].schema, '!') != NULL;
        s->may_be_undefined = strchr(a[n].schema, '~') != NULL;
        s->is_unread = a[n].place >= offsetof(fa_call, unread) && a[n].place < offsetof(fa_call, first_key);
        s->place = a[n].place;
        snprintf(s->name, sizeof s->name, "%.*s", (int)strcspn(name, "="), name);
        if (op->results && strcmp(s->name, "dropout_p") == 0) signature->nothing.has_dropout = true;
        if (s->kind == FA_SLOT_TENSOR) ((fa_tensor *)place)->name = s->name;
        if (s->kind == FA_SLOT_INT && s->is_optional) memcpy(place, &not_given, sizeof not_given);
        if (!s->is_optional) read_default(s->kind, strchr(a[n].schema, '='), place);
    }
    signature->num_slots = n;
}

void fa_read_op(const fa_op *op, fa_signature *signature) { read_schema(op, signature); }

const fa_signature *fa_find_op(const char *name) {
    for (int i = 0; i < fa_ops.num; i++)
        if (strcmp(fa_ops.ops[i].name, name) == 0) return &fa_ops.signatures[i];
    return NULL;
}

void fa_write_schema(const fa_op *op, char *text, size_t room) {
    int at = snprintf(text, room, "%s(", op->name);
    for (int i = 0; i < FA_MAX_ARGUMENTS && op->arguments[i].schema; i++)
        at += snprintf(text + at, room - (size_t)at, "%s%s", i ? ", " : "", op->arguments[i].schema);
    snprintf(text + at, room - (size_t)at, ") -> %s", op->results);
}

/* Registers the boxed functions through the C shim. */
static bool register_boxed(void) {
    /* The libraries live as long as the process, because Python may call the ops at any time. */
    TorchLibraryHandle def = NULL, impl[2] = {NULL, NULL};
    const char *const keys[2] = {"CPU", "CUDA"};
    int failed = fa_torch.aoti_torch_library_init_def(fa_ops.name_space, __FILE__, __LINE__, &def);
    for (int k = 0; k < 2 && !failed; k++)
        failed = fa_torch.aoti_torch_library_init_impl(fa_ops.name_space, keys[k], __FILE__, __LINE__, &impl[k]);
    for (int i = 0; i < fa_ops.num && !failed; i++) {
        const fa_op *op = &fa_ops.ops[i];
        char schema[FA_MAX_SCHEMA];
        if (!op->results) continue;
        fa_write_schema(op, schema, sizeof schema);
        failed = fa_torch.aoti_torch_library_def(def, schema);
        for (int k = 0; k < 2 && !failed; k++)
            failed = fa_torch.torch_library_impl(impl[k], op->name, entries[i], FA_TORCH_ABI_VERSION);
    }
    return !failed;
}

fa_status fa_register_ops(bool (*in_python)(void), fa_error *err) {
    for (int i = 0; i < fa_ops.num; i++) {
        read_schema(&fa_ops.ops[i], &fa_ops.signatures[i]);
        if (fa_ops.ops[i].results && i >= FA_MAX_OPS)
            return fa_fail(err, FA_EFAILED, "%s has more ops than FA_MAX_OPS", fa_ops.name_space);
    }
    if (fa_torch_registers_ops() ? register_boxed() : in_python()) return FA_OK;
    return fa_fail(err, FA_EUNSUPPORTED,
                   "%s could not register its ops with this PyTorch: is another package named %s loaded?",
                   fa_ops.name_space, fa_ops.name_space);
}
