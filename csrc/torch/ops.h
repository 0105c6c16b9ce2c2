/* The arguments of the ops. They come from torch's dispatcher (ops.c) or from Python (direct.c, positional.c). */
#ifndef FA_TORCH_OPS_H
#define FA_TORCH_OPS_H

#include <stddef.h>

#include "call.h"
#include "outputs.h"

typedef enum { FA_SLOT_TENSOR, FA_SLOT_FLOAT, FA_SLOT_BOOL, FA_SLOT_INT } fa_slot_kind;

/* One argument, and the place of its value. */
typedef struct {
    fa_slot_kind kind;
    bool is_optional, is_mutable;
    bool may_be_undefined; /* an undefined tensor is an absent one */
    bool is_unread;
    size_t place;  /* offset in fa_call */
    char name[24]; /* name in messages */
} fa_slot;

#define FA_MAX_ARGUMENTS 40
typedef struct {
    fa_pass pass;
    fa_call nothing; /* a call without arguments */
    int num_slots;
    fa_slot slots[FA_MAX_ARGUMENTS];
} fa_signature;

/* An argument of an op is a piece of schema text and the place of its value in fa_call. */
typedef struct {
    /* "Tensor(a!)? dq", "SymInt window_size_left=-1": type, name, default. In an op that torch defines, "Tensor~ out"
     * may be undefined. */
    const char *schema;
    size_t place; /* offset in fa_call */
} fa_argument;

#define FA_ARG(schema, member) {schema, offsetof(fa_call, member)}

typedef struct {
    const char *name, *results; /* results NULL: torch does not know the op */
    fa_layout layout;
    fa_pass pass;
    fa_status (*execute)(const fa_call *call, fa_outputs *outputs, fa_error *err);
    fa_argument arguments[FA_MAX_ARGUMENTS]; /* ends with an argument without schema */
} fa_op;

/* The ops of one namespace. The ops that torch knows come first, and are at most FA_MAX_OPS. */
#define FA_MAX_OPS 9
typedef struct {
    const char *name_space;
    int num;
    const fa_op *ops;
    fa_signature *signatures; /* filled by fa_register_ops */
} fa_op_table;

/* An extension contains one table: ops_2.c for namespace flash_attn, ops_3.c for namespace flash_attn_3. */
extern const fa_op_table fa_ops;

/* Returns the signature of an op, or NULL if there is no such op. The ops must have been registered. */
const fa_signature *fa_find_op(const char *name);

/* Reads the arguments of an op that torch defines. */
void fa_read_op(const fa_op *op, fa_signature *signature);

/* Takes a boxed call: unpacks, executes, releases, and returns the results or throws. */
void fa_boxed_call(const fa_op *op, const fa_signature *signature, StableIValue *stack, uint64_t num_outputs);

/* Begins a call without arguments. The caller then fills in the slots. */
void fa_begin_call(const fa_signature *signature, fa_call *call);

/* Reads the tensor of a slot. The tensor must have memory. */
fa_status fa_take_tensor(const fa_slot *slot, AtenTensorHandle handle, fa_tensor *t, fa_error *err);

/* Refuses a call if a tensor of it has a tangent of forward-mode AD. */
fa_status fa_refuse_tangents(const fa_signature *signature, const fa_call *call, fa_error *err);

/* Ends the reading of arguments. The schema of flash_attn_3::fwd does not say that an append writes the caches. */
void fa_open_caches(fa_call *call);

/* Writes "name(arguments) -> results". */
#define FA_MAX_SCHEMA 2048
void fa_write_schema(const fa_op *op, char *text, size_t room);

/* Defines the ops of fa_ops and implements them for CPU and CUDA tensors. Called once per process. If torch's C shim
 * cannot register ops, in_python (python_ops.h) does. */
fa_status fa_register_ops(bool (*in_python)(void), fa_error *err);

#endif
