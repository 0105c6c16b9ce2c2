#include "sdpa_keys.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cpu/convert.h"

enum { MOST_IN_ROOM = 64 };

void fa_forget_keys(fa_key_mask *m) {
    if (m->first && m->first != m->room) free(m->first);
}

/* Numbers below this hide a key as -inf does, if another key of the row has a number above -1e30. */
#define HIDES -1e37f

static float bias_at(const fa_tensor *t, int64_t at) {
    return fa_load_element(t->data, at,
                           t->dtype == fa_torch.f32   ? FA_F32
                           : t->dtype == fa_torch.f16 ? FA_F16
                                                      : FA_BF16);
}

static bool has_equal_rows(const fa_tensor *t, int64_t at, int64_t rows, int64_t keys) {
    const int64_t bytes = bytes_of_dtype(t->dtype), stride = t->stride[t->ndim - 2];
    const char *first = (const char *)t->data + at * bytes;
    for (int64_t i = 1; i < rows && stride != 0; i++)
        if (memcmp(first, first + i * stride * bytes, (size_t)(keys * bytes)) != 0) return false;
    return true;
}

/* Finds the keys [*first, *end) of one batch that are not hidden. Returns whether all their numbers are 0. */
static bool find_seen_keys(const fa_tensor *t, int64_t at, int64_t keys, int32_t *first, int32_t *end) {
    float most = -INFINITY;
    bool all_zero = true;
    for (int64_t j = 0; j < keys; j++) {
        const float bias = bias_at(t, at + j);
        if (bias > most || bias != bias) most = bias;
    }
    const float hides = most > -1e30f ? HIDES : -FLT_MAX; /* a NaN hides nothing */
    int64_t j = 0, stop = keys;
    while (j < stop && bias_at(t, at + j) < hides) j++;
    while (j < stop && bias_at(t, at + stop - 1) < hides) stop--;
    *first = (int32_t)j, *end = (int32_t)stop;
    for (; j < stop; j++) all_zero &= bias_at(t, at + j) == 0;
    return all_zero;
}

fa_status fa_read_key_mask(fa_call *c, fa_key_mask *m, fa_error *err) {
    const fa_tensor *t = &c->attn_bias;
    const int64_t b = c->q.size[0], len_q = c->q.size[1], len_kv = c->k.size[1], n = t->ndim;
    m->first = NULL;
    if (!present(t) || c->window_right >= 0 || (n != 2 && n != 4) || is_empty(t) || len_kv >= INT32_MAX) return FA_OK;
    if (t->dtype != fa_torch.f32 && t->dtype != fa_torch.f16 && t->dtype != fa_torch.bf16) return FA_OK;
    const int64_t rows = t->size[n - 2], of_b = n == 4 && t->size[0] > 1 ? t->stride[0] : 0;
    const bool is_shared = n == 2 || t->size[1] == 1 || t->stride[1] == 0;
    if (!is_shared || t->size[n - 1] != len_kv || (len_kv > 1 && t->stride[n - 1] != 1) || (rows != 1 && rows != len_q))
        return FA_OK;
    if (n == 4 && t->size[0] != 1 && t->size[0] != b) return FA_OK;
    const int64_t num = of_b == 0 ? 1 : b;
    for (int64_t i = 0; i < num; i++)
        if (!has_equal_rows(t, i * of_b, rows, len_kv)) return FA_OK;
    m->first = b <= MOST_IN_ROOM ? m->room : malloc(2 * (size_t)b * sizeof *m->first);
    if (!m->first) return fa_fail(err, FA_ENOMEM, "no memory for the lengths of %lld sequences", (long long)b);
    m->end = m->first + b;
    bool all_zero = true;
    for (int64_t i = 0; i < b; i++) {
        if (i < num)
            all_zero &= find_seen_keys(t, i * of_b, len_kv, &m->first[i], &m->end[i]);
        else
            m->first[i] = m->first[0], m->end[i] = m->end[0];
    }
    c->first_key = m->first, c->end_key = m->end;
    c->max_seqlen_k = len_kv;
    if (all_zero) c->attn_bias = (fa_tensor){.name = t->name};
    return FA_OK;
}
