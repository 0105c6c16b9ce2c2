/* Tensors in the form of torch's own attention ops: [b, h, len, d]. */
#ifndef FA_TORCH_SDPA_TENSORS_H
#define FA_TORCH_SDPA_TENSORS_H

#include "call.h"
#include "outputs.h"

/* A tensor with dimensions 1 and 2 exchanged. The struct holds the sizes, so it must not move. */
typedef struct {
    int64_t size[4], stride[4];
} fa_exchanged;

void fa_exchange(fa_tensor *t, fa_exchanged *room);

/* Makes a tensor of the sizes of `like`, with its strides or, in the order [b, len, h, d], without gaps. */
fa_status fa_make_like(const fa_tensor *like, bool keeps_strides, fa_tensor *t, fa_error *err);
void fa_drop_tensor(fa_tensor *t);

/* Makes a copy without gaps if the last dimension has any, as the gradient of a sum has. *copy owns it, or is NULL. */
fa_status fa_close_gaps(fa_tensor *t, AtenTensorHandle *copy, fa_error *err);

/* torch's causal mask on the CPU begins at the top left: query i sees keys up to i. With as many keys as queries, or
 * fewer, this is a window. Keys behind the last query's are not seen at all, so the call does without them. The tensors
 * of the call are exchanged. bias_size: room for the sizes of its bias. */
void fa_align_top_left(fa_call *c, int64_t *bias_size);

#endif
