/* The ops of namespace flash_attn_3.
 *
 * The first four have the schemas of flash-attn 3. A result that no caller reads is empty: the partial sums of a split
 * forward, and the accumulators of a backward. The others serve the Python functions: they say truly what they
 * write, so that tracers may rely on their schemas. */
#include "combine.h"
#include "execute.h"
#include "ops.h"
#include "quantize.h"
#include "scheduler_metadata.h"

#define ARGS_QKV FA_ARG("Tensor q", q), FA_ARG("Tensor k", k), FA_ARG("Tensor v", v)
#define ARGS_CU_SEQLENS(INT)                                                                                    \
    FA_ARG("Tensor? cu_seqlens_q=None", cu_seqlens_q), FA_ARG("Tensor? cu_seqlens_k=None", cu_seqlens_k),       \
        FA_ARG("Tensor? cu_seqlens_k_new=None", cu_seqlens_k_new), FA_ARG("Tensor? seqused_q=None", seqused_q), \
        FA_ARG("Tensor? seqused_k=None", seqused_k), FA_ARG(INT "? max_seqlen_q=None", max_seqlen_q),           \
        FA_ARG(INT "? max_seqlen_k=None", max_seqlen_k), FA_ARG("Tensor? page_table=None", block_table),        \
        FA_ARG("Tensor? kv_batch_idx=None", cache_batch_idx), FA_ARG("Tensor? leftpad_k=None", leftpad_k)
#define ARGS_ROTARY(POSITIONS)                                                                    \
    FA_ARG("Tensor? rotary_cos=None", rotary_cos), FA_ARG("Tensor? rotary_sin=None", rotary_sin), \
        FA_ARG("Tensor? " POSITIONS "=None", seqlens_rotary)
#define ARGS_DESCALE                                                                          \
    FA_ARG("Tensor? q_descale=None", q_descale), FA_ARG("Tensor? k_descale=None", k_descale), \
        FA_ARG("Tensor? v_descale=None", v_descale)
#define ARGS_MASK(INT) \
    FA_ARG(INT " window_size_left=-1", window_left), FA_ARG(INT " window_size_right=-1", window_right)
#define ARGS_CHUNK(INT) FA_ARG(INT " attention_chunk=0", attention_chunk)
#define ARGS_HINTS(INT, default_splits)                                                                     \
    FA_ARG("Tensor? scheduler_metadata=None", scheduler_metadata),                                          \
        FA_ARG(INT " num_splits=" default_splits, num_splits), FA_ARG("bool? pack_gqa=None", ignored_bool), \
        FA_ARG(INT " sm_margin=0", sm_margin)
#define ARGS_SAVED \
    FA_ARG("Tensor dout", dout), ARGS_QKV, FA_ARG("Tensor out", out), FA_ARG("Tensor softmax_lse", softmax_lse)
#define ARGS_GRADIENTS \
    FA_ARG("Tensor(dq!)? dq=None", dq), FA_ARG("Tensor(dk!)? dk=None", dk), FA_ARG("Tensor(dv!)? dv=None", dv)
#define ARGS_BWD_OPTIONS(INT)                                                                                   \
    FA_ARG("float? softmax_scale=None", softmax_scale), FA_ARG("bool is_causal=False", causal), ARGS_MASK(INT), \
        FA_ARG("float softcap=0.0", softcap), FA_ARG("bool deterministic=False", deterministic),                \
        FA_ARG(INT " sm_margin=0", sm_margin)

static const fa_op ops[] = {
    {"fwd",
     "(Tensor(out!), Tensor, Tensor, Tensor)",
     FA_OP_3,
     FA_FWD,
     fa_execute,
     {ARGS_QKV, FA_ARG("Tensor(k_new!)? k_new=None", k_new), FA_ARG("Tensor(v_new!)? v_new=None", v_new),
      FA_ARG("Tensor? q_v=None", qv), FA_ARG("Tensor(out!)? out=None", out), ARGS_CU_SEQLENS("int"),
      ARGS_ROTARY("seqlens_rotary"), ARGS_DESCALE, FA_ARG("float? softmax_scale=None", softmax_scale),
      FA_ARG("bool is_causal=False", causal), ARGS_MASK("int"), ARGS_CHUNK("int"), FA_ARG("float softcap=0.0", softcap),
      FA_ARG("bool is_rotary_interleaved=False", rotary_interleaved), ARGS_HINTS("int", "0")}},
    {"bwd",
     "(Tensor, Tensor, Tensor, Tensor, Tensor)",
     FA_OP_3,
     FA_BWD,
     fa_execute,
     {ARGS_SAVED, ARGS_GRADIENTS, FA_ARG("Tensor? cu_seqlens_q=None", cu_seqlens_q),
      FA_ARG("Tensor? cu_seqlens_k=None", cu_seqlens_k), FA_ARG("Tensor? seqused_q=None", seqused_q),
      FA_ARG("Tensor? seqused_k=None", seqused_k), FA_ARG("int? max_seqlen_q=None", max_seqlen_q),
      FA_ARG("int? max_seqlen_k=None", max_seqlen_k), ARGS_BWD_OPTIONS("int")}},
    {"fwd_combine",
     "(Tensor(out!), Tensor)",
     FA_OP_3,
     FA_FWD,
     fa_execute_combine,
     {FA_ARG("Tensor out_partial", out_partial), FA_ARG("Tensor lse_partial", lse_partial),
      FA_ARG("Tensor(out!)? out=None", out), FA_ARG("ScalarType? out_dtype=None", dtype)}},
    {"_combine",
     "(Tensor, Tensor)",
     FA_OP_3,
     FA_FWD,
     fa_execute_combine,
     {FA_ARG("Tensor out_partial", out_partial), FA_ARG("Tensor lse_partial", lse_partial),
      FA_ARG("ScalarType? out_dtype=None", dtype)}},
    {"get_scheduler_metadata",
     "Tensor",
     FA_OP_3,
     FA_FWD,
     fa_execute_scheduler_metadata,
     {FA_ARG("int batch_size", batch_size),
      FA_ARG("int max_seqlen_q", max_seqlen_q),
      FA_ARG("int max_seqlen_k", max_seqlen_k),
      FA_ARG("int num_heads", num_heads),
      FA_ARG("int num_heads_k", num_heads_k),
      FA_ARG("int headdim", headdim),
      FA_ARG("int headdim_v", headdim_v),
      FA_ARG("ScalarType qkv_dtype", dtype),
      FA_ARG("Tensor seqused_k", seqused_k),
      FA_ARG("Tensor? cu_seqlens_q=None", cu_seqlens_q),
      FA_ARG("Tensor? cu_seqlens_k=None", cu_seqlens_k),
      FA_ARG("Tensor? cu_seqlens_k_new=None", cu_seqlens_k_new),
      FA_ARG("Tensor? seqused_q=None", seqused_q),
      FA_ARG("Tensor? leftpad_k=None", leftpad_k),
      FA_ARG("int? page_size=None", page_size),
      FA_ARG("int max_seqlen_k_new=0", max_seqlen_k_new),
      FA_ARG("bool is_causal=False", causal),
      ARGS_MASK("int"),
      ARGS_CHUNK("int"),
      FA_ARG("bool has_softcap=False", ignored_bool),
      FA_ARG("int num_splits=0", num_splits),
      FA_ARG("bool? pack_gqa=None", ignored_bool),
      FA_ARG("int sm_margin=0", sm_margin)}},
    {"_flash_attn_forward",
     "(Tensor, Tensor, Tensor, Tensor)",
     FA_OP_3,
     FA_FWD,
     fa_execute,
     {ARGS_QKV, FA_ARG("Tensor? k_new=None", k_new), FA_ARG("Tensor? v_new=None", v_new), FA_ARG("Tensor? qv=None", qv),
      FA_ARG("Tensor? out_=None", out), ARGS_CU_SEQLENS("SymInt"), ARGS_ROTARY("seqlens_rotary"), ARGS_DESCALE,
      FA_ARG("float? softmax_scale=None", softmax_scale), FA_ARG("bool causal=False", causal), ARGS_MASK("SymInt"),
      ARGS_CHUNK("SymInt"), FA_ARG("float softcap=0.0", softcap),
      FA_ARG("bool rotary_interleaved=True", rotary_interleaved), ARGS_HINTS("SymInt", "1")}},
    {"_flash_attn_backward",
     "Tensor",
     FA_OP_3,
     FA_BWD,
     fa_execute,
     {ARGS_SAVED, FA_ARG("Tensor? cu_seqlens_q=None", cu_seqlens_q), FA_ARG("Tensor? cu_seqlens_k=None", cu_seqlens_k),
      FA_ARG("Tensor? sequed_q=None", seqused_q), FA_ARG("Tensor? sequed_k=None", seqused_k),
      FA_ARG("SymInt? max_seqlen_q=None", max_seqlen_q), FA_ARG("SymInt? max_seqlen_k=None", max_seqlen_k),
      ARGS_GRADIENTS, ARGS_BWD_OPTIONS("SymInt")}},
    {"_fwd_kvcache",
     "Tensor",
     FA_OP_3,
     FA_FWD,
     fa_execute,
     {FA_ARG("Tensor q", q),
      FA_ARG("Tensor(a!) k_cache", k),
      FA_ARG("Tensor(b!) v_cache", v),
      FA_ARG("Tensor? k", k_new),
      FA_ARG("Tensor? v", v_new),
      FA_ARG("Tensor? qv", qv),
      FA_ARG("Tensor(c!) out", out),
      FA_ARG("Tensor? cu_seqlens_q", cu_seqlens_q),
      FA_ARG("Tensor? cu_seqlens_k_new", cu_seqlens_k_new),
      FA_ARG("Tensor? cache_seqlens", seqused_k),
      FA_ARG("SymInt? max_seqlen_q", max_seqlen_q),
      FA_ARG("Tensor? page_table", block_table),
      FA_ARG("Tensor? cache_batch_idx", cache_batch_idx),
      FA_ARG("Tensor? cache_leftpad", leftpad_k),
      ARGS_ROTARY("rotary_seqlens"),
      ARGS_DESCALE,
      FA_ARG("float? softmax_scale=None", softmax_scale),
      FA_ARG("bool causal=False", causal),
      ARGS_MASK("SymInt"),
      ARGS_CHUNK("SymInt"),
      FA_ARG("float softcap=0.0", softcap),
      FA_ARG("bool rotary_interleaved=True", rotary_interleaved),
      ARGS_HINTS("SymInt", "0")}},
    {"quantize",
     "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
     FA_OP_3,
     FA_FWD,
     fa_execute_quantize,
     {ARGS_QKV, FA_ARG("Tensor? cu_seqlens_q=None", cu_seqlens_q), FA_ARG("Tensor? cu_seqlens_k=None", cu_seqlens_k),
      FA_ARG("bool per_tensor=False", per_tensor), FA_ARG("bool hadamard=False", hadamard)}},
    /* Only direct_3.c calls this forward. */
    {"_forward",
     NULL,
     FA_OP_3,
     FA_FWD,
     fa_execute,
     {ARGS_QKV, FA_ARG("Tensor? cu_seqlens_q", cu_seqlens_q), FA_ARG("Tensor? cu_seqlens_k", cu_seqlens_k),
      FA_ARG("int? max_seqlen_q", max_seqlen_q), FA_ARG("int? max_seqlen_k", max_seqlen_k),
      FA_ARG("Tensor? seqused_q", seqused_q), FA_ARG("Tensor? seqused_k", seqused_k), FA_ARG("Tensor? qv", qv),
      ARGS_DESCALE, FA_ARG("float? softmax_scale", softmax_scale), FA_ARG("bool causal", causal), ARGS_MASK("int"),
      ARGS_CHUNK("int"), FA_ARG("float softcap", softcap), FA_ARG("int num_splits", num_splits),
      FA_ARG("bool? pack_gqa", ignored_bool), FA_ARG("int sm_margin", sm_margin)}},
};

static fa_signature signatures[sizeof ops / sizeof *ops];

const fa_op_table fa_ops = {"flash_attn_3", sizeof ops / sizeof *ops, ops, signatures};
