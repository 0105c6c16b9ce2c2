/* The contract of flash-attn's C code: tensors -> problem -> plan -> run.
 *
 *   torch/args.c            checks the tensors and turns them into an fa_problem, which holds all that the maths needs.
 *   plan/plan.c             turns an fa_problem into an fa_plan, which holds all that the hardware needs.
 *   cpu/run.c, gpu/run.c    execute the plan in a workspace that the caller brings.
 *
 * These letters mean the same everywhere:
 *   b batch, h query heads, h_kv key/value heads, g = h / h_kv, d head dimension, d_v head dimension of v and out,
 *   len_q, len_kv lengths of one sequence.
 * Strides count elements. Every tensor's last dimension is contiguous.
 *
 * A problem points into tensors that the caller keeps alive, and owns no memory. A plan is plain data.
 * Planning is a pure function, and a plan can be printed. */
#ifndef FLASH_ATTN_H
#define FLASH_ATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FA_MAX_HEAD_DIM   256 /* columns of q and k */
#define FA_MAX_HEAD_DIM_V 512 /* columns of v and out */

/* ---- status, and the exception that torch/failures.c makes of it --------------------------------------------- */

typedef enum {
    FA_OK = 0,
    FA_EINVAL,       /* RuntimeError: an argument does not fit, and the message names the argument */
    FA_ENOMEM,       /* MemoryError: an allocation failed */
    FA_ENOMEM_GPU,   /* torch.OutOfMemoryError: the GPU's memory is full */
    FA_EUNSUPPORTED, /* NotImplementedError: the call is legal, but this machine lacks what the message names */
    FA_EFAILED,      /* RuntimeError: the driver or the compiler failed unexpectedly */
    FA_EPYTHON,      /* Python raised an exception; torch/failures.c keeps this exception and raises it again */
} fa_status;

#define FA_MESSAGE_BYTES 512
typedef struct {
    char text[FA_MESSAGE_BYTES]; /* "" until a step fails */
} fa_error;

/* Writes the message and returns status, so that `return fa_fail(...)` reads as one step. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
fa_status fa_fail(fa_error *err, fa_status status, const char *format, ...);

/* ---- problem ----------------------------------------------------------------------------------------------- */

typedef enum { FA_CPU, FA_CUDA } fa_device;
typedef enum { FA_F16, FA_BF16, FA_F32, FA_F64, FA_E4M3 } fa_dtype; /* FA_E4M3: float8_e4m3fn, forward only */
typedef enum { FA_FWD, FA_BWD } fa_pass;

/* A tensor [b, row, h, d] in the caller's memory. data NULL means that the tensor is absent.
 * Packed (varlen) tensors have stride_b = 0, and their rows are counted over the whole batch.
 * A paged cache [page, row, h, d] keeps the stride from one page to the next in stride_b. */
typedef struct {
    void *data;
    int64_t stride_b, stride_row, stride_h;
} fa_view;

/* lse or softmax_d: one float per (b, h, row).
 * Packed tensors have stride_b = 0, and their rows are counted over the whole batch. */
typedef struct {
    float *data;
    int64_t stride_b, stride_h;
    int64_t stride_row; /* 0: rows are contiguous, as they always are on a GPU */
} fa_row_stats;

/* Numbers [b, h, len_q, len_kv] of the pairs; data NULL: none. A stride of 0 repeats a number. */
typedef struct {
    const void *data;
    fa_dtype dtype;
    int64_t stride_b, stride_h, stride_row, stride_key;
} fa_scores;

/* Learned sinks: a number for each head. */
typedef struct {
    const void *data; /* [h]; NULL: none */
    int64_t stride;
    fa_dtype dtype; /* fp16, bf16, fp32 or fp64 */
} fa_sink_values;

/* A float for each row. */
typedef struct {
    float *data; /* [b, h, rows]; NULL: 0 */
    int64_t stride_b, stride_h, stride_row;
} fa_sink_rows;

/* One factor per sequence and key head; data NULL: 1. */
typedef struct {
    const float *data;
    int64_t stride_b, stride_h;
} fa_descale;

typedef struct {
    fa_pass pass;
    fa_device device;
    int device_idx;
    /* The dtype of q, k, v, o, their gradients, the new keys and cos/sin. With FA_E4M3, o, cos and sin are bf16. */
    fa_dtype dtype;

    int64_t b, h, h_kv, d, d_v; /* v, o, qv, dout and dv have d_v columns; everything else has d */
    int64_t len_q, len_kv;      /* dense: the lengths; varlen: max_seqlen; kvcache: capacity for len_kv */
    int64_t total_q, total_kv;  /* rows of the packed tensors; dense: b * len */

    fa_view q, k, v, o;
    fa_view qv;       /* like q with d_v columns: qv.v joins q.k; absent: nothing joins */
    fa_row_stats lse; /* natural log of the row sums; empty_lse for a row that sees no key */
    float empty_lse;  /* +inf or -inf. The backward takes both. */
    bool of_3;        /* an op of flash-attn 3 */

    /* Of a forward: one more key for each row, of score sinks[h] and value 0 (row_options.h). A row that sees no other
     * key has lse sinks[h]. sink_shift was subtracted from the scores of a row, and is subtracted from the sink. */
    fa_sink_values sinks;
    fa_sink_rows sink_shift;
    /* CPU only. Rows from *sink_end on have no sink; NULL: all rows have one. A forward writes exp(sink - lse) to
     * sink_probability, with the rows of lse: 0 for a row without a sink, or of infinite lse; data NULL: not wanted. */
    const int32_t *sink_end;
    fa_row_stats sink_probability;

    /* FA_E4M3: q, k and v are multiplied by these factors. */
    fa_descale q_descale, k_descale, v_descale;

    /* A score is computed in this order, with shift = len_kv - len_q of the sequence:
     *   s = scale (q.k + qv.v);  if softcap > 0, s = softcap tanh(s / softcap);  s -= slope |i + shift - j|;
     *   s += bias;  mask.
     * Row i sees key j iff i + shift - window_left <= j <= i + shift + window_right.
     * A window of -1 lifts its bound. A causal mask is window_right = 0.
     * With an attention chunk of c > 0, row i also sees only keys of its own chunk:
     * floor(j / c) = floor((i + shift) / c). */
    double scale, softcap; /* softcap 0: off */
    int64_t window_left, window_right;
    int64_t attention_chunk;   /* 0: off */
    const float *alibi_slopes; /* [h], or [b, h] with alibi_stride_b; NULL: none */
    int64_t alibi_stride_b;
    /* CPU only, dense and without softcap and ALiBi; in fp64 of the dtype of q, else fp16, bf16 or fp32. */
    fa_scores bias;

    /* Dropout of the probabilities. cpu/dropout.h maps Philox numbers to elements. */
    double dropout_p; /* 0: off */
    uint8_t keep_max; /* an element is kept iff its byte of the generator is <= keep_max */
    uint64_t seed, offset;
    const uint64_t *rng_state; /* CUDA: seed and offset, in device memory only; NULL: no dropout */
    bool wants_s_dmask;
    void *s_dmask; /* [b, h, s_dmask_rows, s_dmask_cols] in dtype: exp(s - row max), negative where dropped; or NULL */
    int64_t s_dmask_rows, s_dmask_cols;

    /* These members say where sequences lie (see sequence.h). All arrays live on the problem's device.
     * An array without elements is NULL too: in an empty batch, or a block table without columns.
     * So `paged` says whether there are pages. */
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* [b + 1]; NULL: dense */
    const int32_t *seqused_q;                   /* [b] queries in use; NULL: all. Rows that are not in use stay. */
    const int32_t *seqused_k;                   /* [b] keys in use (kvcache: before the append); NULL: all */
    const int32_t *leftpad_k;                   /* [b] leading keys to skip; NULL: 0 */
    const int32_t *cache_batch_idx;             /* [b] row of the cache (or of the block table); NULL: identity */
    bool paged;                                 /* k and v consist of pages that block_table names */
    const int32_t *block_table;                 /* [rows, block_table_cols] page numbers */
    int64_t block_table_stride, block_table_cols;
    int64_t page_size, num_pages;
    int64_t cache_rows; /* rows of the cache, or of the block table if paged: the bound of cache_batch_idx */

    /* The keys and values to append before attention (kvcache). */
    fa_view k_new, v_new;                /* [b, len_new, h_kv, d]; absent: nothing to append */
    int64_t len_new;                     /* packed: the most new keys of a sequence */
    int64_t total_new;                   /* packed: rows of k_new; 0: no bound is known */
    const int32_t *cu_seqlens_k_new;     /* [b + 1]; NULL: dense */
    const int32_t *seqlens_rotary;       /* [b] position of the first new key and query; NULL: seqused_k */
    const void *rotary_cos, *rotary_sin; /* [rotary_rows, rotary_dim / 2] contiguous; NULL: none */
    fa_dtype rotary_dtype;               /* of cos and sin: the dtype of o; with FA_E4M3 also FA_E4M3 */
    int64_t rotary_rows, rotary_dim;     /* positions past the last row are not rotated: cos 1, sin 0 */
    bool rotary_interleaved;             /* pairs (0,1),(2,3).. instead of (0,r/2),(1,r/2+1).. */
    bool rotary_q_by_row;                /* query t rotates by position offset + t; otherwise every query by offset */

    /* Backward. A gradient with data NULL is not needed and not computed. */
    fa_view dout, dq, dk, dv;
    fa_row_stats softmax_d; /* rowsum(dout * o), written by the backward pass */
    bool deterministic;

    /* Packed problems: rows that belong to no sequence become 0, and -inf in lse, even in tensors of the caller. */
    bool zero_tensors;
    int64_t num_splits;  /* splits of the keys of one row; 0: the plan decides */
    bool is_whole_cache; /* set by a planner: k and v of dense queries count as a cache that is in use as a whole */
    int64_t sm_margin;   /* multiprocessors of the GPU that the call leaves to others */

    const struct fa_flex *flex; /* programmable attention (flex/flex.h); NULL: none */
} fa_problem;

/* ---- plan -------------------------------------------------------------------------------------------------- */

/* The instruction sets, weakest first: X(name in C, name for people). The first two are of any processor, and the
 * others of one architecture each (fa_cpu_knows).
 *   reference    cpu/reference.c: the specification
 *   scalar       the tiled algorithm in portable C
 *   neon         Advanced SIMD of 64-bit ARM
 *   neonbf16     Advanced SIMD with BFDOT: kernels for bf16 only
 *   avx2         AVX2 + FMA + F16C
 *   avx512       AVX-512 F, DQ, BW, VL
 *   avx512bf16   kernels for bf16 only
 *   amx          AMX-TILE, AMX-BF16: kernels for bf16 only */
#define FA_ISAS(X)                                                                                   \
    X(REFERENCE, reference), X(SCALAR, scalar), X(NEON, neon), X(NEONBF16, neonbf16), X(AVX2, avx2), \
        X(AVX512, avx512), X(AVX512BF16, avx512bf16), X(AMX, amx)

#define FA_ISA_ENUM(id, name) FA_ISA_##id
typedef enum { FA_ISAS(FA_ISA_ENUM), FA_NUM_ISAS } fa_isa;

/* The machine that plan.c plans for. fa_cpu_detect fills this struct once. Each call sets the thread count. */
typedef struct {
    fa_isa isa;                  /* the best instruction set here, or a weaker one that the user chose */
    bool isa_legal[FA_NUM_ISAS]; /* the processor and the operating system support this instruction set */
    size_t l2_bytes;             /* per core; a default if the processor does not tell */
    int threads;
    int gpu_capability; /* 90 for compute capability 9.0; 0: the tensors are on the CPU */
    int gpu_sms;        /* multiprocessors of the GPU that holds the tensors; 0: unknown */
    /* FLASH_ATTN_CUDA_KERNEL: only kernels whose names contain one of these words; NULL: all. */
    const char *gpu_kernels;
} fa_machine;

/* Bytes of the longest name, with room for the hash of a user's text: "_" and 16 digits. */
#define FA_KERNEL_NAME_BYTES 96
#define FA_MAX_RULED_OUT     40 /* every row of a family, and every kernel */
typedef struct {
    const char *kernel, *reason; /* texts that live as long as the program */
} fa_ruled_out;

/* The part of a plan for the CPU. */
typedef struct {
    fa_isa isa;
    int tiles_per_task;  /* query tiles that share one packed block of keys */
    int threads;         /* workers used, at most the machine's */
    int64_t num_decodes; /* sequences of few queries: cpu/attn_decode.h or cpu/attn_bwd_rows.h takes them */
    int decode_threads;  /* workers of that kernel, if there are such sequences */
} fa_cpu_plan;

/* A launch of the decode kernel on a GPU. Without thread block clusters, a group of `lanes` CTAs reads neighbouring
 * heads side by side. */
typedef struct {
    int row;    /* row of cuda/tiles.def; -1: there is no such launch */
    int lanes;  /* CTAs of a group: a divisor of the number of key heads */
    int groups; /* number of groups; with clusters: clusters of each key head */
} fa_decode_launch;

/* The part of a plan for a GPU. */
typedef struct {
    int family, row;   /* the kernel's text and its row of cuda/tiles.def */
    unsigned features; /* features that the kernel must have (plan/kernel_table.h) */
    uint64_t mods;     /* hash of the user's functions in the kernel's text; 0: none */
    bool has_hidden;   /* Hopper: a kernel before looks at the pairs of a block mask (cuda/flex_hidden.cu) */
    int num_sms;       /* multiprocessors for the call: those of the GPU but for sm_margin; 0: unknown */
    int num_ctas;      /* forward on Hopper: persistent CTAs of the launch */
    bool is_dynamic;   /* forward on Hopper: CTAs take their next work tile from a counter */
    int group_heads;   /* heads walked together: query heads of a forward, key heads of a backward; 0: no group */
    bool follows_rows; /* backward on Hopper with a block mask: key tiles begin in their order, as the L2 wants it */
    int tile_heads;    /* query heads that share work tiles of a forward; 0 counts as 1 */
    bool gathers;      /* forward on Hopper: reads copies of the pages, which cuda/gather.cu makes before it runs */
    unsigned aligns;   /* tensors whose rows the kernel does not read: it runs on copies (gpu_align.h); 0: none */
    bool any_order;    /* backward on Hopper: key tiles add to dQ in any order, instead of the order of the keys */
    bool converts;     /* backward on Hopper: a separate warp makes dQ of the sums */
    int short_rows;    /* backward on Hopper: attn_bwd_short takes sequences of up to so many rows and keys; 0: none */
    int cluster;       /* decode: CTAs of a cluster, which share a head's keys and sums; 0: sums go through memory */
    int num_clusters;  /* decode: the most clusters of one launch */
    /* `decode` is the launch for all sequences. Packed sequences of few rows beside longer ones have a launch of their
     * own. This launch is decode_low, takes the lowest tile and runs first. */
    fa_decode_launch decode, decode_low;
} fa_gpu_plan;

typedef struct {
    fa_pass pass;
    fa_device device;
    char kernel[FA_KERNEL_NAME_BYTES]; /* operator, instruction set, row: attn_fwd_avx512_bf16_d64_q64kv128 */
    int block_q, block_kv;             /* rows and keys of one tile */
    int num_splits;                    /* key ranges of the backward (or of a decode) that are summed in order */
    size_t workspace_bytes;
    fa_cpu_plan cpu; /* filled for the CPU only */
    fa_gpu_plan gpu; /* filled for a GPU only */
    int num_ruled_out;
    fa_ruled_out ruled_out[FA_MAX_RULED_OUT];
} fa_plan;

const char *fa_isa_name(fa_isa isa);
bool fa_isa_is_for_bf16(fa_isa isa); /* it has kernels for bf16 only, whose products multiply words of two bf16 */
const char *fa_dtype_name(fa_dtype dtype);
size_t fa_dtype_bytes(fa_dtype dtype);
fa_dtype fa_output_dtype(fa_dtype dtype); /* the dtype of o: bf16 for FA_E4M3, otherwise the same */

#endif
