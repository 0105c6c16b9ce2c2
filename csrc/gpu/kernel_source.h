/* The text of a variant, and the compilation of this text. */
#ifndef FA_GPU_KERNEL_SOURCE_H
#define FA_GPU_KERNEL_SOURCE_H

#include "plan/kernel_table.h"

typedef struct {
    char *data; /* the owner calls free() */
    size_t bytes;
} fa_blob;

/* The compiler's options for a variant define the variant's columns and features as constants. The caller frees the
 * options, after a failure too. */
typedef struct {
    char **list;
    int num;
} fa_compile_options;
fa_status fa_variant_options(fa_variant variant, fa_compile_options *options, fa_error *err);
void fa_options_free(fa_compile_options *options);

/* Hashes the variant's texts and options. So a changed text never gets an old binary. */
fa_status fa_variant_key(fa_variant variant, uint64_t *key, fa_error *err);

/* Compiles the variant. The caller frees cubin->data. */
fa_status fa_variant_compile(fa_variant variant, fa_blob *cubin, fa_error *err);

/* A compilation that any thread may run later. It has texts and options of its own, so the variant's mods may be gone
 * by then. */
typedef struct fa_compilation fa_compilation;
fa_status fa_compilation_new(fa_variant variant, fa_compilation **compilation, fa_error *err);
fa_status fa_compilation_run(fa_compilation *compilation, fa_blob *cubin, fa_error *err);
void fa_compilation_free(fa_compilation *compilation);

/* Hands over what the compiler said if this thread's last compilation failed, and the text of the user's functions.
 * Each is NULL if there is none. The caller frees both. */
void fa_compile_failure(char **log, char **mods);

#endif
