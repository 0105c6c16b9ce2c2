/* Checks of one tensor, and the words for messages about a tensor. */
#ifndef FA_TORCH_CHECK_H
#define FA_TORCH_CHECK_H

#include "call.h"
#include "gpu/driver.h"

#include <inttypes.h>

#define REQUIRE(condition, ...)                                        \
    do {                                                               \
        if (!(condition)) return fa_fail(err, FA_EINVAL, __VA_ARGS__); \
    } while (0)
#define TRY(step)                                   \
    do {                                            \
        fa_status try_status = (step);              \
        if (try_status != FA_OK) return try_status; \
    } while (0)

typedef struct {
    char text[160];
} words;

/* These functions return text for a message. w keeps the text. */
const char *shape_words(const fa_tensor *t, words *w);
const char *stride_words(const fa_tensor *t, words *w);
const char *device_words(int32_t device_type, int32_t device_idx, words *w);
const char *dtype_words(int32_t dtype);

static inline bool present(const fa_tensor *t) { return t->handle != NULL; }

/* Is a call with this tensor a GPU's call? On an imagined GPU (gpu/driver.h) every call is. */
static inline bool is_on_gpu(const fa_tensor *t) { return t->device_type == fa_torch.cuda || fa_gpu_imagined(); }

/* Is the tensor q packed: sequences one after the other, without a batch dimension? Is k? */
static inline bool packs_q(const fa_call *c) { return present(&c->cu_seqlens_q); }
static inline bool packs_k(const fa_call *c) { return present(&c->cu_seqlens_k) && !present(&c->block_table); }

/* A stride matters only if its dimension has more than one element and the tensor is not empty. */
bool last_dim_contiguous(const fa_tensor *t);
bool contiguous(const fa_tensor *t);
bool is_empty(const fa_tensor *t);
int64_t bytes_of_dtype(int32_t dtype);

/* Checks that the tensor's storage holds every element that its sizes and strides reach. */
fa_status check_memory(const fa_tensor *t, fa_error *err);

/* While gradients are recorded, refuses to write a leaf that requires grad, in the words of PyTorch's own operators. A
 * tensor that is no leaf is refused, too, unless may_be_computed: autograd would not see that its value is lost. */
fa_status check_no_gradient(const fa_tensor *t, bool may_be_computed, fa_error *err);

/* Lists the caller's tensors that the call writes, at most three, and returns their number. */
#define MAX_WRITTEN 3
int written_tensors(const fa_call *c, const fa_tensor *written[MAX_WRITTEN]);

/* Checks of device, rank and shape. dims is the symbolic shape that messages show. */
fa_status check_device(const fa_tensor *t, const fa_tensor *q, fa_error *err);
fa_status check_rank(const fa_tensor *t, int64_t ndim, const char *dims, fa_error *err);
fa_status check_shape(const fa_tensor *t, int64_t ndim, const int64_t *size, const char *dims, fa_error *err);
#define SHAPE(t, dims, ...) \
    check_shape(t, (int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]){__VA_ARGS__}, dims, err)

/* Checks a tensor of lengths or indices, which must be int32 and on q's device. */
fa_status check_index(const fa_tensor *t, const fa_tensor *q, fa_error *err);

fa_status check_index_if_given(const fa_tensor *t, const fa_tensor *q, fa_error *err);

/* Checks a tensor with one length or index per sequence, which must be contiguous. The tensor may be absent. */
fa_status check_index_per_batch(const fa_tensor *t, const fa_tensor *q, int64_t b, fa_error *err);

/* Checks what the mods add to the rows of queries. On the CPU the values are checked, too. */
fa_status check_q_offset(const fa_tensor *t, const fa_tensor *q, int64_t b, int64_t len_q, fa_error *err);

/* Returns the view of a tensor [.., row, h, d]. */
fa_view view_of(const fa_tensor *t);

#define K_CACHE "(batch_size_cache, seqlen_cache, num_heads_k, head_size)"

#endif
