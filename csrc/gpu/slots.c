/* Counters that outlive a launch: kernels that count across their CTAs do it in memory of their own, in a slot that no
 * other launch uses at the same time, and leave it at zero. */
#include "slots.h"

#include <stdatomic.h>

#include "system/lock.h"

enum { STREAM_SLOTS = 1024, CAPTURE_SLOTS = FA_MOST_SLOTS - STREAM_SLOTS };
static atomic_uintptr_t slot_owner[STREAM_SLOTS]; /* stream + 1, or 0 */

/* The launches that a stream adds to one CUDA graph follow each other, and so do replays of the graph. A graph keeps its
 * slots, through an object that the driver gives back when nobody holds the graph any more. */
typedef struct {
    atomic_bool is_taken;
    uint64_t capture; /* the driver's number, of no other capture of the process */
    CUstream stream;
} capture_slot;
static capture_slot captures[CAPTURE_SLOTS];
static fa_lock lock = FA_LOCK_INIT;

/* The driver calls it on a thread of its own, in which it may not be called back. */
static void give_slot_back(void *slot) { atomic_store(&((capture_slot *)slot)->is_taken, false); }

/* A slot that lives as long as the graph; -1: the driver does not take it. */
static int keep_with_graph(const fa_cuda_call *call, CUgraph graph, capture_slot *slot) {
    CUuserObject object;
    atomic_store(&slot->is_taken, true);
    if (call->driver->cuUserObjectCreate(&object, slot, give_slot_back, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) != 0) {
        give_slot_back(slot);
        return -1;
    }
    if (call->driver->cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) != 0) {
        call->driver->cuUserObjectRelease(object, 1); /* which gives the slot back */
        return -1;
    }
    return (int)(slot - captures);
}

static int slot_of_capture(const fa_cuda_call *call, int num_slots) {
    uint64_t capture = 0;
    CUgraph graph = NULL;
    int status = 0, slot = -1, free_slot = -1;
    if (call->driver->cuStreamGetCaptureInfo_v3(call->stream, &status, &capture, &graph, NULL, NULL, NULL) != 0 ||
        status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return -1;
    const int room = num_slots - STREAM_SLOTS < CAPTURE_SLOTS ? num_slots - STREAM_SLOTS : CAPTURE_SLOTS;
    fa_lock_acquire(&lock);
    for (int i = 0; i < room && slot < 0; i++) {
        if (!atomic_load(&captures[i].is_taken))
            free_slot = free_slot < 0 ? i : free_slot;
        else if (captures[i].capture == capture && captures[i].stream == call->stream)
            slot = i;
    }
    if (slot < 0 && free_slot >= 0) {
        captures[free_slot].capture = capture, captures[free_slot].stream = call->stream;
        slot = keep_with_graph(call, graph, &captures[free_slot]);
    }
    fa_lock_release(&lock);
    return slot < 0 ? -1 : STREAM_SLOTS + slot;
}

int fa_cuda_slot(const fa_cuda_call *call, int num_slots) {
    int capturing = 0;
    if (call->driver->cuStreamIsCapturing(call->stream, &capturing) != 0) return -1;
    if (capturing) return slot_of_capture(call, num_slots);
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
