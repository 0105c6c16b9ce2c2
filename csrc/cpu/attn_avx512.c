/* Attention on AVX-512. The kernels compute in fp32 and convert fp16 and bf16 while they pack. */
#include "kernels.h"

#if FA_X86
#include "vec_avx512.h"

#include "attn_bwd.h"
#include "attn_bwd_rows.h"
#include "attn_decode.h"
#include "attn_fwd.h"

const fa_cpu_kernels fa_kernels_avx512 = {.fwd = attn_fwd,
                                          .bwd = attn_bwd,
                                          .decode = attn_decode,
                                          .bwd_rows = attn_bwd_rows,
                                          .block_q = BLOCK_Q,
                                          .score_buffers = SCORE_BUFFERS};

#include "vec_target_end.h"
#endif
