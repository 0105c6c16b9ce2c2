/* Attention in portable C. The algorithm is the same, and serves processors that have no kernels of their own. */
#include "kernels.h"
#include "vec_scalar.h"

#include "attn_bwd.h"
#include "attn_bwd_rows.h"
#include "attn_decode.h"
#include "attn_fwd.h"

const fa_cpu_kernels fa_kernels_scalar = {.fwd = attn_fwd,
                                          .bwd = attn_bwd,
                                          .decode = attn_decode,
                                          .bwd_rows = attn_bwd_rows,
                                          .block_q = BLOCK_Q,
                                          .score_buffers = SCORE_BUFFERS};
