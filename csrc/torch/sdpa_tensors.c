#include "sdpa_tensors.h"

#include <string.h>

#include "check.h"

void fa_exchange(fa_tensor *t, fa_exchanged *room) {
    static const int from[4] = {0, 2, 1, 3};
    if (!present(t) || t->ndim != 4) return;
    for (int i = 0; i < 4; i++) room->size[i] = t->size[from[i]], room->stride[i] = t->stride[from[i]];
    t->size = room->size, t->stride = room->stride;
}

fa_status fa_make_like(const fa_tensor *like, bool keeps_strides, fa_tensor *t, fa_error *err) {
    int64_t stride[4];
    fa_outputs made = {.num = 0};
    void *data;
    if (keeps_strides) {
        fa_empty_like_strides(like, stride);
    } else {
        static const int inner_first[4] = {3, 1, 2, 0};
        int64_t step = 1;
        for (int i = 0; i < 4; i++) {
            stride[inner_first[i]] = step;
            step *= like->size[inner_first[i]] > 1 ? like->size[inner_first[i]] : 1;
        }
    }
    fa_status status = fa_make_output(&made, like, 4, like->size, stride, like->dtype, &data, err);
    if (status != FA_OK) {
        fa_drop_outputs(&made);
        return status;
    }
    fa_tensor_read(made.tensor[0], t);
    t->data = data;
    return FA_OK;
}

void fa_drop_tensor(fa_tensor *t) {
    if (t->handle) fa_torch.aoti_torch_delete_tensor_object(t->handle);
    t->handle = NULL;
}

fa_status fa_close_gaps(fa_tensor *t, AtenTensorHandle *copy, fa_error *err) {
    fa_tensor made = {.name = t->name};
    int64_t stride[4], step = 1;
    fa_outputs outputs = {.num = 0};
    void *data;
    *copy = NULL;
    if (last_dim_contiguous(t) || t->ndim > 4 || !fa_torch.aoti_torch_copy_) return FA_OK;
    for (int64_t i = t->ndim - 1; i >= 0; i--) stride[i] = step, step *= t->size[i] > 1 ? t->size[i] : 1;
    TRY(fa_make_output(&outputs, t, t->ndim, t->size, stride, t->dtype, &data, err));
    if (fa_torch.aoti_torch_copy_(outputs.tensor[0], t->handle, 0) != 0) {
        fa_drop_outputs(&outputs);
        return fa_fail(err, FA_ENOMEM, "torch could not copy %s", t->name);
    }
    *copy = outputs.tensor[0];
    fa_tensor_read(*copy, &made);
    made.data = data;
    *t = made;
    return FA_OK;
}

void fa_align_top_left(fa_call *c, int64_t *bias_size) {
    int64_t len_q = c->q.size[1], len_kv = c->k.size[1];
    if (!c->causal) return;
    c->causal = false;
    c->window_left = -1, c->window_right = 0;
    if (len_q >= len_kv) {
        c->window_right = len_q - len_kv;
        return;
    }
    fa_tensor *const keys[] = {&c->k, &c->v, &c->dk, &c->dv}, *bias = &c->attn_bias;
    for (int i = 0; i < 4; i++)
        if (present(keys[i])) ((int64_t *)keys[i]->size)[1] = len_q; /* the sizes are those of `fa_exchanged` */
    if (!present(bias) || bias->ndim > 4 || bias->size[bias->ndim - 1] != len_kv) return;
    memcpy(bias_size, bias->size, (size_t)bias->ndim * sizeof *bias_size);
    bias_size[bias->ndim - 1] = len_q;
    bias->size = bias_size;
}
