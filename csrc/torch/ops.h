/* What a call of an op consists of, for whoever brings the arguments: torch's dispatcher (ops.c), Python (direct.c). */
#ifndef FA_TORCH_OPS_H
#define FA_TORCH_OPS_H

#include "call.h"

typedef enum { FA_SLOT_TENSOR, FA_SLOT_FLOAT, FA_SLOT_BOOL, FA_SLOT_INT } fa_slot_kind;

/* One argument: where its value goes. */
typedef struct {
    fa_slot_kind kind;
    bool is_optional, is_mutable;
    size_t place;  /* offset in fa_call */
    char name[24]; /* as messages show it */
} fa_slot;

#define FA_MAX_ARGUMENTS 24
typedef struct {
    fa_pass pass;
    fa_call nothing; /* a call without arguments */
    int num_slots;
    fa_slot slots[FA_MAX_ARGUMENTS];
} fa_signature;

/* NULL: there is no such op. They are known once the ops are registered. */
const fa_signature *fa_find_op(const char *name);

/* A call without arguments; then fill in its slots. */
void fa_begin_call(const fa_signature *signature, fa_call *call);

/* Defines the ops of namespace flash_attn and implements them for CPU and CUDA tensors. Once per process. */
fa_status fa_register_ops(fa_error *err);

#endif
