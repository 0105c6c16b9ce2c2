/* One call of any op, unpacked but not yet checked: what ops.c hands to args.c and outputs.c. */
#ifndef FA_CALL_H
#define FA_CALL_H

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

/* args.c: checks everything a caller can get wrong and fills the problem's inputs. Nothing is written anywhere. On CPU
 * tensors the values inside length and index tensors are checked too; on CUDA nothing is read from the device. */
fa_status fa_check_call(const fa_call *call, fa_problem *problem, fa_error *err);

/* outputs.c: the tensors that an op returns, in order, allocated as the fakes in flash_attn/ promise them. Points the
 * problem at them and, if draw_seed, draws the dropout seed. On failure nothing stays allocated. */
#define FA_MAX_OUTPUTS 4
typedef struct {
    AtenTensorHandle tensor[FA_MAX_OUTPUTS];
    int num;
} fa_outputs;
fa_status fa_make_outputs(const fa_call *call, bool draw_seed, fa_problem *problem, fa_outputs *outputs, fa_error *err);

/* module.c: does the tensor require grad, and is it a leaf ("") or a view of one ("a view of ")? Otherwise NULL. */
const char *fa_leaf_in(AtenTensorHandle t);

/* module.c: autograd shall know that the tensor is written in place. */
void fa_bump_version(AtenTensorHandle t);

/* module.c: a seed from torch's default CPU generator, as an op in Python would draw it. */
fa_status fa_draw_seed(uint64_t *seed, fa_error *err);

/* module.c: seed and offset of torch's default generator of a GPU, which then moves on by steps. Not while a CUDA graph
 * records: then two numbers are drawn on the GPU, anew in each replay, and lie at address until owner is released. */
fa_status fa_advance_gpu_generator(int device_idx, uint64_t steps, uint64_t state[2], fa_error *err);
fa_status fa_draw_on_gpu(int device_idx, uint64_t *address, void **owner, fa_error *err);
void fa_release_drawn(void *owner);

#endif
