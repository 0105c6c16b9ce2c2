/* The text of a variant and its compilation. */
#ifndef FA_GPU_KERNEL_SOURCE_H
#define FA_GPU_KERNEL_SOURCE_H

#include "plan/kernel_table.h"

typedef struct {
    char *data; /* free() it */
    size_t bytes;
} fa_blob;

/* The options of the compiler for a variant: its columns and features as constants. The caller frees them, after a failure too. */
typedef struct {
    char **list;
    int num;
} fa_compile_options;
fa_status fa_variant_options(fa_variant variant, fa_compile_options *options, fa_error *err);
void fa_options_free(fa_compile_options *options);

/* A hash of the variant's texts and options, so that a changed text never meets an old binary. */
fa_status fa_variant_key(fa_variant variant, uint64_t *key, fa_error *err);
fa_status fa_variant_compile(fa_variant variant, fa_blob *cubin, fa_error *err);

#endif
