/* The CUDA kernels that exist. A variant is a row of cuda/tiles.def with a set of features, for one architecture. It has a
 * name for people. */
#ifndef FA_PLAN_KERNEL_TABLE_H
#define FA_PLAN_KERNEL_TABLE_H

#include "flash_attn.h"

/* What a variant can do beyond plain attention; a kernel without a feature has no trace of it. X(constant of the text,
 * bit, its part of a variant's name). */
#define FA_FEATURES(X)                                                                                       \
    X(CAUSAL, 1, "_causal"),       /* right window 0, no left window */                                      \
        X(LOCAL, 2, "_local"),     /* any other window */                                                    \
        X(VARLEN, 4, "_varlen"),   /* packed sequences */                                                    \
        X(SCORE, 8, "_score"),     /* softcap, ALiBi, or a scale that is not positive, or no normal float */ \
        X(PAGED, 128, "_paged"),   /* keys lie in pages of a block table */                                  \
        X(DROPOUT, 16, "_dropout") /* of p */

/* The dtype; fp16 with neither bit. */
#define FA_DTYPE_FEATURES(X) X(BF16, 32), X(F32, 64)

#define FA_FEATURE_ENUM(constant, bit, word) FA_##constant = bit
#define FA_DTYPE_ENUM(constant, bit)         FA_IN_##constant = bit
enum {
    FA_FEATURES(FA_FEATURE_ENUM),
    FA_DTYPE_FEATURES(FA_DTYPE_ENUM),
    FA_ALL_FEATURES = FA_CAUSAL | FA_LOCAL | FA_VARLEN | FA_SCORE | FA_DROPOUT
};

static inline unsigned fa_dtype_feature(fa_dtype dtype) {
    return dtype == FA_BF16 ? FA_IN_BF16 : dtype == FA_F32 ? FA_IN_F32 : 0u;
}

/* A family: one kernel text with its rows of cuda/tiles.def, which says what the columns mean. */
typedef enum {
    FA_FWD_SM90,
    FA_DECODE_SM90,
    FA_BWD_SM90,
    FA_BWD_WIDE_SM90,
    FA_BWD_PREP_SM90, /* before both: FA_BWD_SM90's rows, then FA_BWD_WIDE_SM90's */
    FA_FWD_ANY,
    FA_BWD_ANY,
    FA_DELTA_ANY,
    FA_PROBS_ANY,
    FA_KVCACHE,
    FA_NUM_FAMILIES
} fa_family_id;

enum { FA_MAX_COLUMNS = 10, FA_SHARED_ALIGNMENT = 1024 };

typedef struct {
    const char *name; /* attn_fwd_sm90_d128_q128kv128: the family's, then the shape's */
    int columns[FA_MAX_COLUMNS];
    unsigned serves;  /* features */
    int shared_bytes; /* of dynamic shared memory */
} fa_row;

typedef struct {
    const char *name;                    /* attn_fwd_sm90 */
    const char *const *files;            /* in csrc/cuda: the kernel, then what it includes; NULL behind the last */
    int arch;                            /* 90: of sm_90a only; 0: compiled for the GPU at hand */
    const char *columns[FA_MAX_COLUMNS]; /* the constants that a row defines */
    unsigned knows;                      /* the features that are constants of this text */
    const fa_row *rows;
    int num_rows;
    bool (*chooses)(int row, unsigned features); /* does a plan ever take the row for these? */
    bool aligns_shared; /* counts on dynamic shared memory that begins at FA_SHARED_ALIGNMENT */
} fa_family;

extern const fa_family fa_families[FA_NUM_FAMILIES];

/* attn_fwd_sm90's columns. */
typedef struct {
    int d, block_kv, wgs, stages, q_stages, turn, o_wait, ctas, cost;
} fa_fwd_sm90_columns;
const fa_fwd_sm90_columns *fa_fwd_sm90_row(int row);

/* Those of attn_bwd_sm90, attn_bwd_wide_sm90 and their helpers. */
typedef struct {
    int d, block_q, block_kv;
} fa_bwd_sm90_columns;
const fa_bwd_sm90_columns *fa_bwd_sm90_row(fa_family_id family, int row);
/* Those of the generic kernels. Behind the row of dQ (grad 0) are those of dK and dV (1, 2), or one for both (3). */
typedef struct {
    int d, block_kv, warps, blocks, stages, ctas, element_bytes;
} fa_fwd_any_columns;
typedef struct {
    int d, walk, warps, blocks, stages, ctas, grad, element_bytes;
} fa_bwd_any_columns;
const fa_fwd_any_columns *fa_fwd_any_row(int row);
const fa_bwd_any_columns *fa_bwd_any_row(int row);

/* attn_decode_sm90's columns. */
typedef struct {
    int d, warps_q, teams, slots, ctas;
} fa_decode_sm90_columns;
const fa_decode_sm90_columns *fa_decode_sm90_row(int row);

enum { FA_ROWS_OF_A_WARPGROUP = 64 };

typedef struct {
    fa_family_id family;
    int row;
    unsigned features;
    int arch; /* 90: compiled for compute capability 9.0 */
} fa_variant;

#define FA_VARIANT_NAME_BYTES FA_KERNEL_NAME_BYTES
void fa_variant_name(fa_variant variant, char name[FA_VARIANT_NAME_BYTES]);

/* Does a plan ever choose this variant? False also where the row or the features make no sense. */
bool fa_variant_is_chosen(fa_variant variant);

/* The variant of a plan, for a GPU of this compute capability. */
fa_variant fa_plan_variant(const fa_plan *plan, int capability);

#endif
