/* One call of any op, unpacked but not yet checked. */
#ifndef FA_TORCH_CALL_H
#define FA_TORCH_CALL_H

#include "flash_attn.h"
#include "torch_abi.h"

/* A tensor argument with its properties, which torch is asked for once. Sizes and strides are borrowed from the
 * tensor. */
typedef struct {
    AtenTensorHandle handle; /* borrowed from the caller; NULL: absent */
    const char *name;        /* name in the op's schema, for messages */
    void *data;
    int64_t ndim;
    const int64_t *size, *stride;
    int32_t dtype, device_type, device_idx;
} fa_tensor;

/* FA_OP_3: an op of flash-attn 3. Its arguments say where sequences lie, and its rules are those of flash-attn 3. */
typedef enum { FA_OP_DENSE, FA_OP_VARLEN, FA_OP_KVCACHE, FA_OP_3 } fa_layout;

/* The value of an optional integer that was not given. -1 is a value that callers give. */
#define FA_NOT_GIVEN INT64_MIN

/* All arguments of all ops. An argument that an op's schema lacks keeps the value of an absent argument. */
typedef struct {
    fa_layout layout;
    fa_pass pass;

    fa_tensor q, k, v, out;
    fa_tensor alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table;
    fa_tensor k_new, v_new, rotary_cos, rotary_sin, cache_batch_idx;
    fa_tensor dout, softmax_lse, dq, dk, dv, rng_state;

    /* Of the options of flash_attn_func (options.c). */
    bool has_options; /* a row without keys has the lse -inf */
    fa_sink_values sinks;
    bool wants_sink_probability; /* on the CPU it is a result behind lse */
    fa_tensor sinks_tensor;      /* of sinks, for checks; or absent */

    /* Of torch's own ops (sdpa.c). */
    fa_tensor attn_bias;                /* [b, h, len_q, len_kv], where 1 may stand for a size */
    fa_tensor unread[3];                /* arguments that no kernel needs, and that may be undefined */
    const int32_t *first_key, *end_key; /* [b] the keys that attn_bias leaves over, which came without it; or NULL */
    bool is_aten;                       /* rng_state has the dtype of torch's ops */
    bool is_for_cpu; /* lse has the strides of torch's op for the CPU, and a row without keys the lse of this op, 0 */
    bool return_debug_mask;

    /* Of flash-attn 3. */
    fa_tensor qv, seqused_q, cu_seqlens_k_new, seqlens_rotary, q_descale, k_descale, v_descale, scheduler_metadata;
    fa_tensor out_partial, lse_partial;                      /* of fwd_combine */
    bool per_tensor, hadamard;                               /* of quantize */
    int64_t batch_size, num_heads, num_heads_k, dtype;       /* of get_scheduler_metadata; dtype: also of out */
    int64_t headdim, headdim_v, page_size, max_seqlen_k_new; /* of get_scheduler_metadata */
    int64_t attention_chunk, sm_margin;

    double dropout_p, softmax_scale, softcap;
    int64_t window_left, window_right, max_seqlen_q, max_seqlen_k, num_splits;
    int num_results;
    bool ignored_bool; /* ignored: hints that no kernel needs */
    bool causal, return_softmax, deterministic, zero_tensors, rotary_interleaved;
    bool default_scale; /* no softmax_scale was given, and the op has a default */
    bool only_out;      /* the op returns out alone */
    bool fresh_out;     /* out was made for this call; in a backward the gradients were */
    bool has_dropout;   /* the op supports dropout, so a forward returns s_dmask and rng_state */
} fa_call;

/* Asks torch for all members of a tensor except its name and its data. */
void fa_tensor_read(AtenTensorHandle handle, fa_tensor *t);

#endif
