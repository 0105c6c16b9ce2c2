/* Which calls, and which sequences of a packed call, attn_fwd_short and attn_bwd_short take. */
#ifndef FA_PLAN_GPU_SHORT_H
#define FA_PLAN_GPU_SHORT_H

#include "flash_attn.h"
#include "kernel_table.h"

/* Returns the first row of cuda/tiles.def for up to so many queries and keys, and for which an SM has room. -1: there
 * is none. */
int fa_find_short_row(const fa_problem *problem, fa_family_id family, int64_t rows, int capability);

/* The features of the problem that these kernels have. */
unsigned fa_short_features(const fa_problem *problem);

/* Many packed sequences, most of them short: attn_bwd_short then takes those of up to so many queries and keys, and
 * attn_bwd_sm90 the others. 0: it takes none. */
int fa_short_rows_beside(const fa_problem *problem, const fa_machine *machine);

#endif
