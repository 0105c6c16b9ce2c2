/* Attention on AMX. The operands are bf16 words as on AVX512-BF16, and the tile unit multiplies them. */
#include "kernels.h"

#if FA_AMX
#define VEC_BF16_WORDS
#define VEC_TILES
#include "vec_avx512.h"

#include "attn_bwd.h"
#include "attn_bwd_rows.h"
#include "attn_decode.h"
#include "attn_fwd.h"

/* The backward has more lanes in a tile, because the lanes are the words k that the products dV and dK sum over. */
const fa_cpu_kernels fa_kernels_amx = {.fwd = attn_fwd,
                                       .bwd = attn_bwd,
                                       .decode = attn_decode,
                                       .bwd_rows = attn_bwd_rows,
                                       .block_q = BLOCK_Q,
                                       .block_q_bwd = FA_MAX_BLOCK_Q_BWD,
                                       .score_buffers = SCORE_BUFFERS};

#include "vec_target_end.h"
#endif
