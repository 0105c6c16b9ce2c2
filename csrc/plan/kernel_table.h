/* The table of all CUDA kernels. A variant is a row of cuda/tiles.def with a set of features, for one architecture.
 * Each variant has a name for people. */
#ifndef FA_PLAN_KERNEL_TABLE_H
#define FA_PLAN_KERNEL_TABLE_H

#include "flash_attn.h"
#include "flex/source.h"

/* The features of a variant, beyond plain attention. A kernel without a feature contains no code for this feature.
 * X(constant in the kernel's text, bit, part of a variant's name). */
#define FA_FEATURES(X)                                                                                             \
    X(CAUSAL, 1, "_causal"),             /* right window 0, no left window */                                      \
        X(LOCAL, 2, "_local"),           /* any other window */                                                    \
        X(VARLEN, 4, "_varlen"),         /* packed sequences */                                                    \
        X(SCORE, 8, "_score"),           /* softcap, ALiBi, or a scale that is not positive, or no normal float */ \
        X(CACHE, 128, "_cache"),         /* keys lie in a KV cache, in pages or in rows of their own */            \
        X(SINGLE_KEYS, 4096, "_single"), /* with CACHE: pages whose keys TMA cannot load together */               \
        X(WHOLE_KEYS, 8192, "_whole"),   /* with CACHE: pages whose keys TMA loads with all their columns */       \
        X(DROPOUT, 16, "_dropout"),      /* dropout of the probabilities */                                        \
        X(OF_3, 512, "_of3"),            /* generic kernels: what flash-attn 3 adds */                             \
        X(FLEX, 1024, "_flex"),          /* programmable attention (flex/flex.h) */                                \
        X(ALIBI, 2048, "_alibi")         /* ALiBi as the only option of the scores, in kernels that know it */

/* The bits of the dtype. fp16 has none of them. */
#define FA_DTYPE_FEATURES(X) X(BF16, 32), X(F32, 64), X(E4M3, 256)

#define FA_FEATURE_ENUM(constant, bit, word) FA_##constant = bit
#define FA_DTYPE_ENUM(constant, bit)         FA_IN_##constant = bit
enum {
    FA_FEATURES(FA_FEATURE_ENUM),
    FA_DTYPE_FEATURES(FA_DTYPE_ENUM),
    FA_DTYPES = FA_IN_BF16 | FA_IN_F32 | FA_IN_E4M3,
    FA_ALL_FEATURES = FA_CAUSAL | FA_LOCAL | FA_VARLEN | FA_SCORE | FA_DROPOUT
};

static inline unsigned fa_dtype_feature(fa_dtype dtype) {
    return dtype == FA_BF16 ? FA_IN_BF16 : dtype == FA_F32 ? FA_IN_F32 : dtype == FA_E4M3 ? FA_IN_E4M3 : 0u;
}

/* A family is one kernel text with its rows of cuda/tiles.def. cuda/tiles.def explains the columns. */
typedef enum {
    FA_FWD_SM90,
    FA_DECODE_SM90,
    FA_BWD_SM90,
    FA_BWD_WIDE_SM90,
    FA_BWD_PREP_SM90, /* runs before the two above; has the rows of FA_BWD_SM90, then those of FA_BWD_WIDE_SM90 */
    FA_FWD_ANY,
    FA_BWD_ANY,
    FA_DELTA_ANY,
    FA_PROBS_ANY,
    FA_KVCACHE,
    FA_GATHER, /* runs before FA_FWD_SM90 */
    FA_ALIGN,  /* runs before and after kernels that read aligned rows */
    FA_QUANTIZE,
    FA_COMBINE,
    FA_SINKS,
    FA_SINKS_GRAD,
    FA_BIAS_SHIFT,
    FA_MAX_LOGITS,
    FA_FWD_FP8_SM90,
    FA_FLEX_BLOCKS,
    FA_FLEX_CLASSIFY,
    FA_FLEX_LISTS,
    FA_FLEX_EXACT_SUMS,
    FA_FLEX_WALKS,
    FA_FLEX_HIDDEN,
    FA_FWD_SM80,
    FA_BWD_SM80,
    FA_BWD_DQ_SM80, /* runs after FA_BWD_SM80, with the same rows */
    FA_DECODE_SM80, /* the text of FA_DECODE_SM90 */
    FA_FWD_SHORT,
    FA_BWD_SHORT,
    FA_NUM_FAMILIES
} fa_family_id;

enum { FA_MAX_COLUMNS = 13, FA_SHARED_ALIGNMENT = 1024 };

typedef struct {
    const char *name; /* attn_fwd_sm90_d128_q128kv128: the family's name, then the shape */
    int columns[FA_MAX_COLUMNS];
    unsigned serves;  /* the features that the row serves */
    int shared_bytes; /* bytes of dynamic shared memory (fa_variant_shared_bytes) */
} fa_row;

typedef struct {
    const char *name;                    /* attn_fwd_sm90 */
    const char *const *files;            /* files of csrc/cuda: the kernel, then its includes; NULL at the end */
    int arch;                            /* 90: runs on sm_90a only; 0: compiled for the GPU at hand */
    const char *columns[FA_MAX_COLUMNS]; /* the constants that a row defines */
    unsigned knows;                      /* the features that are constants of this text */
    const fa_row *rows;
    int num_rows;
    bool (*chooses)(int row, unsigned features); /* does a plan ever take the row for these features? */
    bool aligns_shared;        /* relies on dynamic shared memory that begins at FA_SHARED_ALIGNMENT */
    bool takes_mods;           /* with FA_FLEX the text includes the text of a user's functions, FA_MODS_FILE */
    bool stores_lse_if_wanted; /* stores lse only if it has memory */
    bool has_89;               /* the text has instructions that came with compute capability 8.9 */
} fa_family;

extern const fa_family fa_families[FA_NUM_FAMILIES];

/* The columns of attn_fwd_sm90. */
typedef struct {
    int d, d_v, block_kv, wgs, stages, q_stages, turn, o_wait, ctas, cost, short_cost;
} fa_fwd_sm90_columns;
const fa_fwd_sm90_columns *fa_fwd_sm90_row(int row);
/* Columns of the boxes that TMA loads: 64, or 32 where these fill all columns of a tile and 64 do not. Tiles for heads
 * whose rows are loaded slowly have 64 (ROW_BYTES of cuda/attn_fwd_schedule.cuh). */
int fa_fwd_sm90_box(const fa_fwd_sm90_columns *tile);

/* The columns of attn_fwd_fp8_sm90. */
typedef struct {
    int d, block_kv, wgs, stages, raw_stages, q_stages, turn, o_wait;
} fa_fwd_fp8_sm90_columns;
const fa_fwd_fp8_sm90_columns *fa_fwd_fp8_sm90_row(int row);

/* The columns of attn_bwd_sm90, attn_bwd_wide_sm90 and attn_bwd_prep. */
typedef struct {
    int d, d_v, block_q, block_kv;
} fa_bwd_sm90_columns;
const fa_bwd_sm90_columns *fa_bwd_sm90_row(fa_family_id family, int row);
/* Does a row of attn_bwd_sm90 take calls? Where two rows have the same columns, the first has fewer query rows and
 * takes the calls with heavy scores (gpu_bwd.c), and the second takes the others. */
bool fa_bwd_sm90_takes(int row, bool is_heavy);

/* The columns of attn_fwd_sm80. */
typedef struct {
    int d, block_kv, warps, blocks, split, stages, q_regs, lane_regs, late, ahead, short_ends, ctas;
} fa_fwd_sm80_columns;
const fa_fwd_sm80_columns *fa_fwd_sm80_row(int row);

/* The columns of attn_bwd_sm80 and attn_bwd_dq_sm80. */
typedef struct {
    int d, block_q, block_kv, warps, groups, blocks, chunk, stages, k_regs, v_regs, kept, ahead, ctas;
} fa_bwd_sm80_columns;
const fa_bwd_sm80_columns *fa_bwd_sm80_row(int row);

/* The columns of attn_fwd_short and attn_bwd_short. */
typedef struct {
    int d, rows, ctas;
} fa_short_columns;
const fa_short_columns *fa_short_row(fa_family_id family, int row);

/* The columns of the generic kernels. Behind a row of dQ lie the rows of dK and dV, or one row for both. Tiles in
 * shared memory have elements of factor_bytes bytes. */
enum { GRAD_dq, GRAD_dk, GRAD_dv, GRAD_dkdv }; /* GRAD of attn_bwd_any.cu */
typedef struct {
    int d, block_kv, warps, blocks, stages, ctas, factor_bytes;
} fa_fwd_any_columns;
typedef struct {
    int d, walk, warps, blocks, stages, ctas, grad, factor_bytes;
} fa_bwd_any_columns;
const fa_fwd_any_columns *fa_fwd_any_row(int row);
const fa_bwd_any_columns *fa_bwd_any_row(int row);

/* The columns of attn_decode_sm90 and attn_decode_sm80. */
typedef struct {
    int d, warps_q, teams, slots, ctas, is_hopper;
} fa_gpu_decode_columns;
const fa_gpu_decode_columns *fa_gpu_decode_row(fa_family_id family, int row);

/* The columns of quantize. */
typedef struct {
    int rotates, slot_kb, ctas;
} fa_quantize_columns;
const fa_quantize_columns *fa_quantize_row(int row);

enum { FA_ROWS_OF_A_WARPGROUP = 64 };

/* The programs of a kernel (flex/program.h). NULL: there is no such function. */
typedef struct {
    const fa_flex_program *score, *mask, *derivative;
    fa_flex_text text;
} fa_mods;
#define FA_MODS_FILE "flex_mods.cuh"

typedef struct {
    fa_family_id family;
    int row;
    unsigned features;
    int arch; /* 90: compiled for compute capability 9.0 */
    /* The user's functions, and their hash, which tells variants apart. Only a compilation reads the functions. */
    uint64_t mods_hash;
    const fa_mods *mods;
} fa_variant;

#define FA_VARIANT_NAME_BYTES FA_KERNEL_NAME_BYTES
void fa_variant_name(fa_variant variant, char name[FA_VARIANT_NAME_BYTES]);

/* Bytes of dynamic shared memory. Beside a cache attn_fwd_sm80 needs more than its row says. */
int fa_variant_shared_bytes(fa_variant variant);

/* Does a plan ever choose this variant? The answer is false too if the row or the features make no sense, and for
 * variants with a user's functions. */
bool fa_variant_is_chosen(fa_variant variant);

/* Returns the variant of a plan for a GPU of this compute capability. */
fa_variant fa_plan_variant(const fa_plan *plan, int capability);

#endif
