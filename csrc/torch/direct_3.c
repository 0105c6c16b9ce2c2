/* The ops of flash_attn_3 as functions of the module flash_attn_3._C. */
#include "direct.h"

#define FORWARD  "_flash_attn_forward"
#define BACKWARD "_flash_attn_backward"
#define KVCACHE  "_fwd_kvcache"

#define OF_FORWARD                                                                                               \
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, qv, q_descale, "     \
    "k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa, " \
    "sm_margin"
#define OF_KVCACHE "the arguments of _fwd_kvcache but out"
#define WITH_LSE   "out, with gradients to record (out, softmax_lse)"

#define FUNCTIONS(X)                                                                                      \
    X(attention, OF_FORWARD, WITH_LSE, "_forward", FORWARD, true, FA_GRADIENTS_NEED_LSE)                  \
    X(forward, OF_FORWARD, "(out, softmax_lse)", "_forward", FORWARD, false, FA_GRADIENTS_IGNORED)        \
    X(kvcache_attention, OF_KVCACHE, "out", KVCACHE, KVCACHE, true, FA_GRADIENTS_OF_THE_OP)               \
    X(kvcache_forward, OF_KVCACHE, "(out, softmax_lse)", KVCACHE, KVCACHE, false, FA_GRADIENTS_OF_THE_OP) \
    X(backward, "the op's arguments", "softmax_d", BACKWARD, BACKWARD, false, FA_GRADIENTS_IGNORED)

/* clang-format off */
FUNCTIONS(FA_DIRECT_FUNCTION)
PyMethodDef fa_direct_functions[] = {FUNCTIONS(FA_DIRECT_METHOD) {NULL, NULL, 0, NULL}};
/* clang-format on */
