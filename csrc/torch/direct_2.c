/* The ops of flash_attn as functions of the module flash_attn_2_cuda. */
#include "direct.h"

#include "flex_attend.h"
#include "options.h"

#define DENSE        "_flash_attn_forward"
#define PACKED       "_flash_attn_varlen_forward"
#define DENSE_GRADS  "_flash_attn_backward"
#define PACKED_GRADS "_flash_attn_varlen_backward"

#define OPTIONS "dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs"
#define DENSE_ARGUMENTS "q, k, v, " OPTIONS
#define VARLEN          "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, " OPTIONS ", block_table"
#define KVCACHE         "the arguments of fwd_kvcache but out"
#define WITH_LSE        "out, with gradients to record (out, softmax_lse)"
#define OF_THE_OP       "the op's arguments"

#define FUNCTIONS(X)                                                                                               \
    X(attention, DENSE_ARGUMENTS, WITH_LSE, "_forward", DENSE, true, FA_GRADIENTS_NEED_LSE)                        \
    X(varlen_attention, VARLEN, WITH_LSE, "_varlen_forward", PACKED, true, FA_GRADIENTS_NEED_LSE)                  \
    X(forward, DENSE_ARGUMENTS, "(out, softmax_lse)", "_forward", DENSE, false, FA_GRADIENTS_IGNORED)              \
    X(varlen_forward, VARLEN, "(out, softmax_lse)", "_varlen_forward", PACKED, false, FA_GRADIENTS_IGNORED)        \
    X(kvcache_attention, KVCACHE, "out", "fwd_kvcache", "fwd_kvcache", true, FA_GRADIENTS_OF_THE_OP)               \
    X(kvcache_forward, KVCACHE, "(out, softmax_lse)", "fwd_kvcache", "fwd_kvcache", false, FA_GRADIENTS_OF_THE_OP) \
    X(flash_attn_forward, OF_THE_OP, "its results", DENSE, DENSE, false, FA_GRADIENTS_OF_THE_OP)                   \
    X(flash_attn_varlen_forward, OF_THE_OP, "its results", PACKED, PACKED, false, FA_GRADIENTS_OF_THE_OP)          \
    X(flash_attn_backward, OF_THE_OP, "softmax_d", DENSE_GRADS, DENSE_GRADS, false, FA_GRADIENTS_IGNORED)          \
    X(flash_attn_varlen_backward, OF_THE_OP, "softmax_d", PACKED_GRADS, PACKED_GRADS, false, FA_GRADIENTS_IGNORED)

/* The same calls with mods: arguments of the op, then those of fa_flex_execute. */
#define MODS                                                                                                  \
    ", kind_of, attn_bias, attn_mask, sinks, places, blocks, wants_max, on_cpu, least, given_shift, record, " \
    "wants_probability, dropout"
#define WITH_MAX "out, softmax_lse if there is a record, the probability of sinks and max_logits if wanted"
#define NUM_MODS 13

/* The same calls with options: arguments of the op, then those of fa_execute_with_options. */
#define OPTIONS_TOO ", sinks, wants_lse, wants_probability"
#define MAYBE_LSE   "out, or (out, softmax_lse) if wanted, with the probability of sinks if wanted"
#define ALL_RESULTS "the op's results, with the probability of sinks behind softmax_lse if wanted"
#define NUM_OPTIONS 3

#define WITH_MODS(X)                                                                        \
    X(mods, DENSE_ARGUMENTS MODS, WITH_MAX, "_forward", DENSE, false, FA_GRADIENTS_IGNORED) \
    X(varlen_mods, VARLEN MODS, WITH_MAX, "_varlen_forward", PACKED, false, FA_GRADIENTS_IGNORED)

#define WITH_OPTIONS(X)                                                                                             \
    X(options, DENSE_ARGUMENTS OPTIONS_TOO, MAYBE_LSE, "_forward", DENSE, false, FA_GRADIENTS_IGNORED)              \
    X(varlen_options, VARLEN OPTIONS_TOO, MAYBE_LSE, "_varlen_forward", PACKED, false, FA_GRADIENTS_IGNORED)        \
    X(kvcache_options, KVCACHE OPTIONS_TOO, MAYBE_LSE, "fwd_kvcache", "fwd_kvcache", false, FA_GRADIENTS_OF_THE_OP) \
    X(forward_options, OF_THE_OP OPTIONS_TOO, ALL_RESULTS, DENSE, DENSE, false, FA_GRADIENTS_IGNORED)               \
    X(varlen_forward_options, OF_THE_OP OPTIONS_TOO, ALL_RESULTS, PACKED, PACKED, false, FA_GRADIENTS_IGNORED)

/* clang-format off */
#define FUNCTION_WITH_MODS(name, arguments, results, op, instead_of, only_out, gradients)     \
    static PyObject *call_##name(PyObject *self, PyObject *args) {                            \
        static fa_direct_function function = FA_DIRECT(op, instead_of, only_out, gradients);  \
        (void)self;                                                                           \
        return fa_call_directly_with(&function, args, NUM_MODS, fa_flex_execute);             \
    }

#define FUNCTION_WITH_OPTIONS(name, arguments, results, op, instead_of, only_out, gradients)           \
    static PyObject *call_##name(PyObject *self, PyObject *args) {                                     \
        static fa_direct_function function = FA_DIRECT(op, instead_of, only_out, gradients);           \
        (void)self;                                                                                    \
        return fa_call_directly_with(&function, args, NUM_OPTIONS, fa_execute_with_options);           \
    }

FUNCTIONS(FA_DIRECT_FUNCTION)
WITH_MODS(FUNCTION_WITH_MODS)
WITH_OPTIONS(FUNCTION_WITH_OPTIONS)
PyMethodDef fa_direct_functions[] = {FUNCTIONS(FA_DIRECT_METHOD) WITH_MODS(FA_DIRECT_METHOD)
                                     WITH_OPTIONS(FA_DIRECT_METHOD) {NULL, NULL, 0, NULL}};
/* clang-format on */
