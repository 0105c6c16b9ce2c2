/* The arguments of the ops. They come from torch's dispatcher (ops.c) or from Python (direct.c, positional.c). */
#ifndef FA_TORCH_OPS_H
#define FA_TORCH_OPS_H

#include "call.h"

typedef enum { FA_SLOT_TENSOR, FA_SLOT_FLOAT, FA_SLOT_BOOL, FA_SLOT_INT } fa_slot_kind;

/* One argument, and the place of its value. */
typedef struct {
    fa_slot_kind kind;
    bool is_optional, is_mutable;
    size_t place;  /* offset in fa_call */
    char name[24]; /* name in messages */
} fa_slot;

#define FA_MAX_ARGUMENTS 24
typedef struct {
    fa_pass pass;
    fa_call nothing; /* a call without arguments */
    int num_slots;
    fa_slot slots[FA_MAX_ARGUMENTS];
} fa_signature;

/* Returns the signature of an op, or NULL if there is no such op. The ops must have been registered. */
const fa_signature *fa_find_op(const char *name);

/* Begins a call without arguments. The caller then fills in the slots. */
void fa_begin_call(const fa_signature *signature, fa_call *call);

/* Defines the ops of namespace flash_attn and implements them for CPU and CUDA tensors. Called once per process. */
fa_status fa_register_ops(fa_error *err);

#endif
