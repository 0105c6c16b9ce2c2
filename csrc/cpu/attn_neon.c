/* Attention on Advanced SIMD of 64-bit ARM. The kernels compute in fp32 and convert fp16 and bf16 while they pack. */
#include "kernels.h"

#if FA_NEON
#include "vec_neon.h"

#include "attn_bwd.h"
#include "attn_bwd_rows.h"
#include "attn_decode.h"
#include "attn_fwd.h"

const fa_cpu_kernels fa_kernels_neon = {.fwd = attn_fwd,
                                        .bwd = attn_bwd,
                                        .decode = attn_decode,
                                        .bwd_rows = attn_bwd_rows,
                                        .block_q = BLOCK_Q,
                                        .score_buffers = SCORE_BUFFERS};

#include "vec_target_end.h"
#endif
