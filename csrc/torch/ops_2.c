/* The ops of namespace flash_attn, with the arguments of flash-attn 2. */
#include "combine.h"
#include "execute.h"
#include "ops.h"

#define ARGS_MASK_BUT_SCALE                                                        \
    FA_ARG("bool causal", causal), FA_ARG("SymInt window_size_left", window_left), \
        FA_ARG("SymInt window_size_right", window_right), FA_ARG("float softcap", softcap)
#define ARGS_MASK               FA_ARG("float softmax_scale", softmax_scale), ARGS_MASK_BUT_SCALE
#define ARGS_DEFAULT_SCALE_MASK FA_ARG("float? softmax_scale", softmax_scale), ARGS_MASK_BUT_SCALE
#define ARGS_DENSE_OPTIONS                                                                         \
    FA_ARG("float dropout_p", dropout_p), ARGS_MASK, FA_ARG("Tensor? alibi_slopes", alibi_slopes), \
        FA_ARG("bool return_softmax", return_softmax)
#define ARGS_CU_SEQLENS                                                                       \
    FA_ARG("Tensor cu_seqlens_q", cu_seqlens_q), FA_ARG("Tensor cu_seqlens_k", cu_seqlens_k), \
        FA_ARG("SymInt max_seqlen_q", max_seqlen_q), FA_ARG("SymInt max_seqlen_k", max_seqlen_k)
#define ARGS_VARLEN_OPTIONS                                                                                            \
    FA_ARG("float dropout_p", dropout_p), FA_ARG("float softmax_scale", softmax_scale), FA_ARG("bool causal", causal), \
        FA_ARG("SymInt window_size_left=-1", window_left), FA_ARG("SymInt window_size_right=-1", window_right),        \
        FA_ARG("float softcap=0.0", softcap), FA_ARG("Tensor? alibi_slopes=None", alibi_slopes),                       \
        FA_ARG("bool return_softmax=False", return_softmax), FA_ARG("Tensor? block_table=None", block_table),          \
        FA_ARG("Tensor? leftpad_k=None", leftpad_k), FA_ARG("Tensor? seqused_k=None", seqused_k),                      \
        FA_ARG("bool zero_tensors=False", zero_tensors), FA_ARG("SymInt num_splits=0", num_splits)
#define ARGS_SAVED                                                                                          \
    FA_ARG("Tensor dout", dout), FA_ARG("Tensor q", q), FA_ARG("Tensor k", k), FA_ARG("Tensor v", v),       \
        FA_ARG("Tensor out", out), FA_ARG("Tensor softmax_lse", softmax_lse), FA_ARG("Tensor(a!)? dq", dq), \
        FA_ARG("Tensor(b!)? dk", dk), FA_ARG("Tensor(c!)? dv", dv)
#define ARGS_BWD_OPTIONS                                                                           \
    FA_ARG("float dropout_p", dropout_p), ARGS_MASK, FA_ARG("Tensor? alibi_slopes", alibi_slopes), \
        FA_ARG("bool deterministic", deterministic), FA_ARG("Tensor? rng_state=None", rng_state)

#define ARGS_PLAIN_OPTIONS                                                                                       \
    FA_ARG("float dropout_p", dropout_p), ARGS_DEFAULT_SCALE_MASK, FA_ARG("Tensor? alibi_slopes", alibi_slopes), \
        FA_ARG("bool deterministic", deterministic), FA_ARG("bool return_softmax", return_softmax)
#define ARGS_PLAIN FA_ARG("Tensor q", q), FA_ARG("Tensor k", k), FA_ARG("Tensor v", v), ARGS_PLAIN_OPTIONS
#define ARGS_PLAIN_VARLEN                                                                                     \
    FA_ARG("Tensor q", q), FA_ARG("Tensor k", k), FA_ARG("Tensor v", v), ARGS_CU_SEQLENS, ARGS_PLAIN_OPTIONS, \
        FA_ARG("Tensor? block_table", block_table)

static const fa_op ops[] = {
    {"_flash_attn_forward",
     "(Tensor, Tensor, Tensor, Tensor)",
     FA_OP_DENSE,
     FA_FWD,
     fa_execute,
     {FA_ARG("Tensor q", q), FA_ARG("Tensor k", k), FA_ARG("Tensor v", v), ARGS_DENSE_OPTIONS}},
    {"_flash_attn_varlen_forward",
     "(Tensor, Tensor, Tensor, Tensor)",
     FA_OP_VARLEN,
     FA_FWD,
     fa_execute,
     {FA_ARG("Tensor q", q), FA_ARG("Tensor k", k), FA_ARG("Tensor v", v), ARGS_CU_SEQLENS, ARGS_VARLEN_OPTIONS}},
    {"_flash_attn_backward", "Tensor", FA_OP_DENSE, FA_BWD, fa_execute, {ARGS_SAVED, ARGS_BWD_OPTIONS}},
    {"_flash_attn_varlen_backward",
     "Tensor",
     FA_OP_VARLEN,
     FA_BWD,
     fa_execute,
     {ARGS_SAVED, ARGS_CU_SEQLENS, ARGS_BWD_OPTIONS, FA_ARG("bool zero_tensors=False", zero_tensors)}},
    /* These two forwards write to a tensor of the caller, for the module flash_attn_2_cuda. */
    {"fwd",
     "(Tensor, Tensor, Tensor)",
     FA_OP_DENSE,
     FA_FWD,
     fa_execute,
     {FA_ARG("Tensor q", q), FA_ARG("Tensor k", k), FA_ARG("Tensor v", v), FA_ARG("Tensor(a!) out", out),
      ARGS_DENSE_OPTIONS}},
    {"varlen_fwd",
     "(Tensor, Tensor, Tensor)",
     FA_OP_VARLEN,
     FA_FWD,
     fa_execute,
     {FA_ARG("Tensor q", q), FA_ARG("Tensor k", k), FA_ARG("Tensor v", v), FA_ARG("Tensor(a!) out", out),
      ARGS_CU_SEQLENS, ARGS_VARLEN_OPTIONS}},
    {"fwd_kvcache",
     "Tensor",
     FA_OP_KVCACHE,
     FA_FWD,
     fa_execute,
     {FA_ARG("Tensor q", q), FA_ARG("Tensor(a!) k_cache", k), FA_ARG("Tensor(b!) v_cache", v),
      FA_ARG("Tensor? k", k_new), FA_ARG("Tensor? v", v_new), FA_ARG("Tensor? cache_seqlens", seqused_k),
      FA_ARG("Tensor? rotary_cos", rotary_cos), FA_ARG("Tensor? rotary_sin", rotary_sin),
      FA_ARG("Tensor? cache_batch_idx", cache_batch_idx), FA_ARG("Tensor? cache_leftpad", leftpad_k),
      FA_ARG("Tensor? block_table", block_table), FA_ARG("Tensor? alibi_slopes", alibi_slopes),
      FA_ARG("Tensor(c!) out", out), ARGS_DEFAULT_SCALE_MASK, FA_ARG("bool rotary_interleaved", rotary_interleaved),
      FA_ARG("SymInt num_splits", num_splits)}},
    {"_combine",
     "(Tensor, Tensor)",
     FA_OP_3,
     FA_FWD,
     fa_execute_combine,
     {FA_ARG("Tensor out_partial", out_partial), FA_ARG("Tensor lse_partial", lse_partial),
      FA_ARG("ScalarType? out_dtype=None", dtype)}},
    /* These two forwards take the options of the public functions. Only direct.c calls them, without dropout. */
    {"_forward", NULL, FA_OP_DENSE, FA_FWD, fa_execute, {ARGS_PLAIN}},
    {"_varlen_forward", NULL, FA_OP_VARLEN, FA_FWD, fa_execute, {ARGS_PLAIN_VARLEN}},
};

static fa_signature signatures[sizeof ops / sizeof *ops];

const fa_op_table fa_ops = {"flash_attn", sizeof ops / sizeof *ops, ops, signatures};
