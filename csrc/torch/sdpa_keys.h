/* Masks of keys among those of scaled_dot_product_attention. */
#ifndef FA_TORCH_SDPA_KEYS_H
#define FA_TORCH_SDPA_KEYS_H

#include "call.h"

/* A mask that is the same for all heads and rows, and hides keys at the beginning and the end: padding. Then the call
 * does without the hidden keys, and mostly without the mask. */
typedef struct {
    int32_t *first, *end; /* [b] */
    int32_t room[128];
} fa_key_mask;

/* Leaves hidden keys out of a call on the CPU. FA_OK also if the mask is of another kind, and stays. Beside a causal
 * mask it stays, too: the diagonal would follow the keys that are left. m must live as long as the call. */
fa_status fa_read_key_mask(fa_call *c, fa_key_mask *m, fa_error *err);
void fa_forget_keys(fa_key_mask *m);

#endif
