/* FLASH_ATTN_CHECK=1 checks the values inside length and index tensors on a GPU, like the values on the CPU.
 *
 * The call copies the values to the host and waits for the copy. So this check is a tool for finding bad input, and not
 * for production. */
#include "gpu_values.h"

#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "gpu/memory.h"
#include "lengths.h"

bool fa_checks_values_on_gpu;

/* An array's place in the problem, and its length. */
typedef struct {
    const int32_t **place;
    int64_t num;
} array;

static fa_status copy_arrays(const fa_cuda_place *place, const array *arrays, int num_arrays, int32_t *room,
                             fa_error *err) {
    fa_status status = FA_OK;
    for (int i = 0; i < num_arrays && status == FA_OK; i++) {
        if (!*arrays[i].place || arrays[i].num == 0) continue;
        status = fa_cuda_read(place, room, *arrays[i].place, (size_t)arrays[i].num * sizeof(int32_t), err);
        *arrays[i].place = room;
        room += arrays[i].num;
    }
    return status == FA_OK ? fa_cuda_wait(place, err) : status;
}

static fa_status check_copies(const fa_call *c, const fa_problem *p, const fa_cuda_place *place, fa_error *err) {
    fa_problem copy = *p;
    const int64_t table_rows = present(&c->block_table) ? c->block_table.size[0] : 0;
    const array arrays[] = {
        {&copy.cu_seqlens_q, p->b + 1},
        {&copy.cu_seqlens_k, p->b + 1},
        {&copy.cu_seqlens_k_new, p->b + 1},
        {&copy.seqused_q, p->b},
        {&copy.seqused_k, p->b},
        {&copy.seqlens_rotary, p->b},
        {&copy.leftpad_k, p->b},
        {&copy.cache_batch_idx, p->b},
        {&copy.block_table, table_rows > 0 && p->block_table_cols > 0
                                ? (table_rows - 1) * p->block_table_stride + p->block_table_cols
                                : 0},
    };
    enum { NUM_ARRAYS = sizeof arrays / sizeof *arrays };
    size_t num = 1;
    for (int i = 0; i < NUM_ARRAYS; i++) num += (size_t)arrays[i].num;
    int32_t *room = malloc(num * sizeof *room);
    if (!room) return fa_fail(err, FA_ENOMEM, "no memory to check the lengths and indices of the call");
    fa_status status = copy_arrays(place, arrays, NUM_ARRAYS, room, err);
    if (status == FA_OK) status = check_values(c, &copy, err);
    free(room);
    return status;
}

fa_status check_values_on_gpu(const fa_call *c, const fa_problem *p, fa_error *err) {
    static bool has_warned;
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(p->device_idx, &place, err);
    if (status != FA_OK) return status;
    if (!fa_cuda_is_capturing(&place)) {
        status = check_copies(c, p, &place, err);
    } else if (!has_warned) {
        has_warned = true;
        fprintf(stderr,
                "flash_attn: FLASH_ATTN_CHECK=1 does not check calls that a CUDA graph records: they would have "
                "to wait for the GPU\n");
    }
    fa_cuda_leave(&place);
    return status;
}
