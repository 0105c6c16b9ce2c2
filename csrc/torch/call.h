/* One call of any op, unpacked but not yet checked. */
#ifndef FA_TORCH_CALL_H
#define FA_TORCH_CALL_H

#include "flash_attn.h"
#include "torch_abi.h"

/* A tensor argument: its handle and what we asked of it once. Sizes and strides are borrowed from the tensor. */
typedef struct {
    AtenTensorHandle handle; /* borrowed from whoever calls; NULL: absent */
    const char *name;        /* as in the op's schema, for messages */
    void *data;
    int64_t ndim;
    const int64_t *size, *stride;
    int32_t dtype, device_type, device_idx;
} fa_tensor;

typedef enum { FA_OP_DENSE, FA_OP_VARLEN, FA_OP_KVCACHE } fa_layout;

/* Everything an op can be given; what its schema lacks keeps the value of no such argument. */
typedef struct {
    fa_layout layout;
    fa_pass pass;

    fa_tensor q, k, v, out;
    fa_tensor alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table;
    fa_tensor k_new, v_new, rotary_cos, rotary_sin, cache_batch_idx;
    fa_tensor dout, softmax_lse, dq, dk, dv, rng_state;

    double dropout_p, softmax_scale, softcap;
    int64_t window_left, window_right, max_seqlen_q, max_seqlen_k, num_splits;
    bool causal, return_softmax, deterministic, zero_tensors, rotary_interleaved;
    bool default_scale; /* no softmax_scale was given, and the op has a default */
    bool only_out;      /* the op returns out alone */
    bool fresh_out;     /* out was made for this call */
    bool has_dropout;   /* the op can drop, so a forward returns s_dmask and rng_state */
} fa_call;

/* Asks torch for all members of a tensor but its name and its data. */
void fa_tensor_read(AtenTensorHandle handle, fa_tensor *t);

#endif
