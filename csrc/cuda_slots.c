/* Counters that outlive a launch: kernels that count across their CTAs do it in memory of their own, in a slot that no
 * other launch uses at the same time, and leave it at zero. */
#include "cuda_run.h"

#include <stdatomic.h>

enum { STREAM_SLOTS = 1024 };
static atomic_uintptr_t slot_owner[STREAM_SLOTS]; /* stream + 1, or 0 */
static atomic_int num_captured_launches[FA_NUM_FAMILIES];

int fa_cuda_slot(const fa_cuda_call *call, int num_slots) {
    int capturing = 0;
    if (call->driver->cuStreamIsCapturing(call->stream, &capturing) != 0) return -1;
    if (capturing) {
        atomic_int *num_captured = &num_captured_launches[call->plan->cuda_family];
        int slot = STREAM_SLOTS + atomic_fetch_add(num_captured, 1);
        if (slot < num_slots) return slot;
        atomic_fetch_sub(num_captured, 1);
        return -1;
    }
    const uintptr_t owner = (uintptr_t)call->stream + 1;
    if (owner == 3) return -1; /* stream 2 is each thread's own: one name for many streams */
    for (unsigned i = 0, slot = (unsigned)(owner / 16 * 2654435761u % STREAM_SLOTS); i < STREAM_SLOTS; i++) {
        uintptr_t found = atomic_load(&slot_owner[slot]);
        if (found == 0 && atomic_compare_exchange_strong(&slot_owner[slot], &found, owner)) found = owner;
        if (found == owner) return (int)slot;
        slot = (slot + 1) % STREAM_SLOTS;
    }
    return -1;
}
