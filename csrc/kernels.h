/* The CUDA kernels that exist, and how one of them is found: loaded before; among the cubins that ship; in the disk
 * cache; or compiled from its source, which then fills the cache.
 *
 * A variant is a row of cuda/tiles.def with a set of features, for one architecture. It has a name for people, and a key: a hash of its
 * sources and options, so that a changed source never meets an old binary. */
#ifndef FA_KERNELS_H
#define FA_KERNELS_H

#include "cuda_driver.h"

/* What a variant can do beyond plain attention; a kernel without a feature has no trace of it. */
enum {
    FA_CAUSAL = 1,   /* right window 0, no left window */
    FA_LOCAL = 2,    /* any other window */
    FA_VARLEN = 4,   /* packed sequences */
    FA_SCORE = 8,    /* softcap, ALiBi, or a scale that is not positive */
    FA_DROPOUT = 16, /* of p */
    FA_ALL_FEATURES = 31,
    FA_IN_BF16 = 32, /* the dtype; fp16 with neither bit */
    FA_IN_F32 = 64,
    FA_PAGED = 128, /* keys lie in pages of a block table */
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

enum { FA_MAX_COLUMNS = 10, FA_MAX_FILES = 24, FA_SHARED_ALIGNMENT = 1024 };

typedef struct {
    const char *name; /* attn_fwd_sm90_d128_q128kv128: the family's, then the shape's */
    int columns[FA_MAX_COLUMNS];
    unsigned serves;  /* features */
    int shared_bytes; /* of dynamic shared memory */
} fa_row;

typedef struct {
    const char *name;                    /* attn_fwd_sm90 */
    const char *files[FA_MAX_FILES];     /* in csrc/cuda: the kernel, then what it includes */
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

/* Puts a variant into the disk cache, if neither it nor the shipped cubins have it; *compiled says whether it had to be
 * compiled. Needs no GPU. */
fa_status fa_variant_build(fa_variant variant, bool *compiled, fa_error *err);

/* The variant of a plan. */
fa_variant fa_plan_variant(const fa_plan *plan, const fa_gpu *gpu);

/* The kernel, ready to launch on the GPU, whose context is current: if it is loaded; or loaded now, which may take seconds.
 * FA_ENOMEM_GPU, nothing of it stays, and the next call tries again. Any thread. */
bool fa_kernel_is_loaded(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel);
fa_status fa_kernel_load(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err);

/* After a launch that failed for want of memory: the driver may never launch this copy of the kernel. The next call loads
 * another, a few times at most. */
void fa_kernel_give_up(fa_variant variant, const fa_gpu *gpu, CUkernel kernel);

/* ---- between the files of this part --------------------------------------------------------------------------- */

typedef struct {
    char *data; /* free() it */
    size_t bytes;
} fa_blob;

/* kernel_source.c: the text of a variant and how to compile it. */
#define FA_MAX_OPTIONS 24
typedef struct {
    char text[FA_MAX_OPTIONS][40];
    const char *list[FA_MAX_OPTIONS];
    int num;
} fa_compile_options;
void fa_variant_options(fa_variant variant, fa_compile_options *options);
fa_status fa_variant_key(fa_variant variant, uint64_t *key, fa_error *err);
fa_status fa_variant_compile(fa_variant variant, fa_blob *cubin, fa_error *err);
/* The folder from which this module was loaded; false: unknown. */
bool fa_module_folder(char *path, size_t room);

/* kernel_cache.c: cubins on disk. A file that is absent, damaged or another variant's is not found. */
bool fa_cache_read(const char *name, uint64_t key, fa_blob *cubin);
bool fa_cache_write(const char *name, uint64_t key, const fa_blob *cubin); /* false, after one warning: not kept */
uint64_t fa_hash(uint64_t seed, const void *data, size_t bytes);

#endif
