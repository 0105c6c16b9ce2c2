/* Attention on Advanced SIMD with BFDOT. A word holds two bf16, so a multiply-add takes twice as many elements. */
#include "kernels.h"

#if FA_NEON_BF16
#define VEC_BF16_WORDS
#include "vec_neon.h"

#include "attn_bwd.h"
#include "attn_bwd_rows.h"
#include "attn_decode.h"
#include "attn_fwd.h"

const fa_cpu_kernels fa_kernels_neonbf16 = {.fwd = attn_fwd,
                                            .bwd = attn_bwd,
                                            .decode = attn_decode,
                                            .bwd_rows = attn_bwd_rows,
                                            .block_q = BLOCK_Q,
                                            .score_buffers = SCORE_BUFFERS};

#include "vec_target_end.h"
#endif
