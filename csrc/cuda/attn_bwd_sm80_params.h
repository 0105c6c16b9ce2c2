/* The parameters of attn_bwd_sm80 and of attn_bwd_dq_sm80. The host fills the struct in C, and the kernels read the
 * struct in CUDA. All types have the same layout on both sides. */
#ifndef FA_ATTN_BWD_SM80_PARAMS_H
#define FA_ATTN_BWD_SM80_PARAMS_H

#include "cuda_problem.h"

typedef struct {
    fa_cuda_problem problem; /* num_tiles: key tiles of the longest sequence */
    /* A slab is BLOCK_Q query rows of one head. Slab i of head n has number n num_slabs + i. Dense problems have b h
     * heads. Packed problems have h heads, and each sequence begins a new slab. */
    float *dq_sums;         /* [slab, fragment, register, lane] dQ / scale */
    unsigned *turns;        /* [slab] the number of key tiles that have added to the slab. NULL: in any order */
    unsigned *tile_counter; /* with turns: the number of the next key tile to take */
    int num_slabs;          /* of a head */
    int num_q_tiles;        /* of the longest sequence */
} fa_attn_bwd_sm80_params;

#endif
