/* The contract of flash-attn's C code: tensors -> problem -> plan -> run.
 *
 *   torch/args.c            turns tensors into an fa_problem: everything the maths needs, checked.
 *   plan/plan.c             turns an fa_problem into an fa_plan: everything the hardware needs. Pure, printable.
 *   cpu/run.c, gpu/run.c    execute the plan, in a workspace that the caller brings.
 *
 * Letters, the same everywhere:  b batch, h query heads, h_kv key/value heads, g = h / h_kv, d head dimension,
 * len_q, len_kv lengths of one sequence. Strides count elements. Every tensor's last dimension is contiguous.
 *
 * Ownership: a problem points into tensors that the caller keeps alive; it owns nothing. A plan is plain data. */
#ifndef FLASH_ATTN_H
#define FLASH_ATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FA_MAX_HEAD_DIM 256

/* ---- status, and the exception that torch/failures.c makes of it --------------------------------------------- */

typedef enum {
    FA_OK = 0,
    FA_EINVAL,       /* the caller's arguments do not fit; the message names the argument: RuntimeError */
    FA_ENOMEM,       /* an allocation failed: MemoryError */
    FA_ENOMEM_GPU,   /* the GPU's memory is full: torch.OutOfMemoryError */
    FA_EUNSUPPORTED, /* legal, but nothing here can run it; the message says what is missing: NotImplementedError */
    FA_EFAILED,      /* what should have worked did not, in the driver or the compiler: RuntimeError */
    FA_EPYTHON,      /* Python raised an exception, which torch/failures.c keeps: that one */
} fa_status;

#define FA_MESSAGE_BYTES 512
typedef struct {
    char text[FA_MESSAGE_BYTES]; /* "" while all is well */
} fa_error;

/* Writes the message and returns status, so that `return fa_fail(...)` reads as one step. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
fa_status fa_fail(fa_error *err, fa_status status, const char *format, ...);

/* ---- problem ----------------------------------------------------------------------------------------------- */

typedef enum { FA_CPU, FA_CUDA } fa_device;
typedef enum { FA_F16, FA_BF16, FA_F32, FA_F64 } fa_dtype;
typedef enum { FA_FWD, FA_BWD } fa_pass;

/* A tensor [b, row, h, d] in the caller's memory; data NULL means absent.
 * Packed (varlen) tensors have stride_b = 0 and rows counted over the whole batch; a paged cache [page, row, h, d]
 * has the stride from one page to the next in stride_b. */
typedef struct {
    void *data;
    int64_t stride_b, stride_row, stride_h;
} fa_view;

/* One float per (b, h, row), rows contiguous: lse and softmax_d. Packed: stride_b = 0, row counted over the batch. */
typedef struct {
    float *data;
    int64_t stride_b, stride_h;
} fa_row_stats;

typedef struct {
    fa_pass pass;
    fa_device device;
    int device_idx;
    fa_dtype dtype; /* of q, k, v, o, their gradients, the new keys and cos/sin */

    int64_t b, h, h_kv, d;
    int64_t len_q, len_kv;     /* dense: the lengths; varlen: max_seqlen; kvcache: capacity for len_kv */
    int64_t total_q, total_kv; /* rows of the packed tensors; dense: b * len */

    fa_view q, k, v, o;
    fa_row_stats lse; /* natural log of the row sums; +inf for a row that sees no key */

    /* Scores, in this order: s = scale q.k;  softcap > 0: s = softcap tanh(s / softcap);  s -= slope |i + shift - j|;
     * mask; shift = len_kv - len_q of the sequence. Key j is visible from row i iff
     * i + shift - window_left <= j <= i + shift + window_right, where -1 lifts a bound; causal is window_right = 0. */
    double scale, softcap; /* softcap 0: off */
    int64_t window_left, window_right;
    const float *alibi_slopes; /* [h], or [b, h] with alibi_stride_b; NULL: none */
    int64_t alibi_stride_b;

    /* Dropout of p, Philox mapping of cpu/dropout.h. */
    double dropout_p; /* 0: off */
    uint8_t keep_max; /* a byte of the generator keeps its element iff byte <= keep_max */
    uint64_t seed, offset;
    const uint64_t *rng_state; /* CUDA: seed and offset, in device memory only; NULL: no dropout */
    bool wants_s_dmask;
    void *s_dmask; /* [b, h, s_dmask_rows, s_dmask_cols] in dtype: +-exp(s - row max), minus where dropped; or NULL */
    int64_t s_dmask_rows, s_dmask_cols;

    /* Where sequences lie (see sequence.h). All arrays live on the problem's device. An array without elements is NULL, too:
     * that of an empty batch, or a block table without columns. So `paged` says whether there are pages. */
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* [b + 1]; NULL: dense */
    const int32_t *seqused_k;                   /* [b] keys in use (kvcache: before the append); NULL: all */
    const int32_t *leftpad_k;                   /* [b] leading keys to skip; NULL: 0 */
    const int32_t *cache_batch_idx;             /* [b] row of the cache (or of the block table); NULL: identity */
    bool paged;                                 /* k and v are pages, which block_table names */
    const int32_t *block_table;                 /* [rows, block_table_cols] page numbers */
    int64_t block_table_stride, block_table_cols;
    int64_t page_size, num_pages;
    int64_t cache_rows; /* that cache_batch_idx may name: of the cache, or of the block table */

    /* Append before attending (kvcache). */
    fa_view k_new, v_new; /* [b, len_new, h_kv, d]; absent: nothing to append */
    int64_t len_new;
    const void *rotary_cos, *rotary_sin; /* [rotary_rows, rotary_dim / 2] contiguous; NULL: none */
    int64_t rotary_rows, rotary_dim;     /* positions past the last row turn by nothing: cos 1, sin 0 */
    bool rotary_interleaved;             /* pairs (0,1),(2,3).. instead of (0,r/2),(1,r/2+1).. */
    bool rotary_q_by_row;                /* query t turns by offset + t; otherwise every query turns by offset */

    /* Backward. A gradient with data NULL is not needed and not computed. */
    fa_view dout, dq, dk, dv;
    fa_row_stats softmax_d; /* rowsum(dout * o), written by the backward pass */
    bool deterministic;

    bool
        zero_tensors; /* packed: rows that belong to no sequence become 0, -inf in lse, also where the caller brought them */
    int64_t num_splits; /* of the keys of one row; 0: the plan decides */
} fa_problem;

/* ---- plan -------------------------------------------------------------------------------------------------- */

/* Instruction sets, the weakest first: X(name in C, name for people).
 *   reference    cpu/reference.c: the specification
 *   scalar       the tiled algorithm in portable C
 *   avx2         AVX2 + FMA + F16C
 *   avx512       AVX-512 F, DQ, BW, VL
 *   avx512bf16   kernels for bf16 only
 *   amx          AMX-TILE, AMX-BF16: kernels for bf16 only */
#define FA_ISAS(X) \
    X(REFERENCE, reference), X(SCALAR, scalar), X(AVX2, avx2), X(AVX512, avx512), X(AVX512BF16, avx512bf16), X(AMX, amx)

#define FA_ISA_ENUM(id, name) FA_ISA_##id
typedef enum { FA_ISAS(FA_ISA_ENUM), FA_NUM_ISAS } fa_isa;

/* What plan.c knows of the machine; filled once by fa_cpu_detect and, per call, the thread count. */
typedef struct {
    fa_isa isa;                  /* the best instruction set here, or the one it was lowered to */
    bool isa_legal[FA_NUM_ISAS]; /* the processor and the operating system support it */
    size_t l2_bytes;             /* per core; a default if the processor does not say */
    int threads;
    int gpu_capability; /* of the GPU that holds the tensors, 90 for compute capability 9.0; 0: they are on the CPU */
    int gpu_sms;        /* its multiprocessors; 0: unknown */
    const char *gpu_kernels; /* only kernels with this in their names, as FLASH_ATTN_CUDA_KERNEL says; NULL: all */
} fa_machine;

#define FA_KERNEL_NAME_BYTES 96 /* of the longest name */
#define FA_MAX_RULED_OUT     16
typedef struct {
    const char *kernel, *reason; /* text that lives as long as the program */
} fa_ruled_out;

/* The part of a plan for the CPU. */
typedef struct {
    fa_isa isa;
    int tiles_per_task;  /* query tiles that share one packed block of keys */
    int threads;         /* workers used, at most the machine's */
    int64_t num_decodes; /* sequences of a forward with few queries, which go to cpu/attn_decode.h */
    int decode_threads;  /* of the decode kernel, where it has work */
} fa_cpu_plan;

/* A launch of the decode kernel on a GPU. Without clusters, groups of `lanes` CTAs read neighbouring heads side by side. */
typedef struct {
    int row;    /* of cuda/tiles.def; -1: there is no such launch */
    int lanes;  /* a divisor of the key heads */
    int groups; /* of lanes; with clusters: clusters of each key head */
} fa_decode_launch;

/* The part of a plan for a GPU. */
typedef struct {
    int family, row;   /* the kernel's text, its row of cuda/tiles.def, */
    unsigned features; /* and what it must be able to do (plan/kernel_table.h) */
    int num_ctas;      /* forward on Hopper: CTAs of the launch, each of which takes one work tile after the other */
    bool is_dynamic;   /* forward on Hopper: CTAs take their next work tile from a counter */
    int group_heads;   /* heads walked together: query heads of a forward, key heads of a backward; 0: not said */
    bool any_order;    /* Hopper's backward: key tiles add to dQ as they come, not in the order of the keys; */
    bool converts;     /* a warp of its own makes dQ of the sums */
    int cluster;      /* decode: CTAs that share the keys of a head and hand each other their sums; 0: through memory */
    int num_clusters; /* decode: at most, of one launch */
    /* Decode: a launch for all sequences. Where packed sequences have few rows beside others that have many, those of few
     * rows have a launch of their own, with the lowest tile, before it. */
    fa_decode_launch decode, decode_low;
} fa_gpu_plan;

typedef struct {
    fa_pass pass;
    fa_device device;
    char kernel[FA_KERNEL_NAME_BYTES]; /* operator, instruction set, row: attn_fwd_avx512_bf16_d64_q64kv128 */
    int block_q, block_kv;             /* rows and keys of one tile */
    int num_splits;                    /* key ranges of the backward (or of a decode) that are summed in order */
    size_t workspace_bytes;
    fa_cpu_plan cpu; /* of the two parts, the device's */
    fa_gpu_plan gpu;
    int num_ruled_out;
    fa_ruled_out ruled_out[FA_MAX_RULED_OUT];
} fa_plan;

const char *fa_isa_name(fa_isa isa);
const char *fa_dtype_name(fa_dtype dtype);
size_t fa_dtype_bytes(fa_dtype dtype);

#endif
