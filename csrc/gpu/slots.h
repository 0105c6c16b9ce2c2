/* Counters that outlive a launch. */
#ifndef FA_GPU_SLOTS_H
#define FA_GPU_SLOTS_H

#include "gpu_call.h"

/* Returns a slot of the kernel's own counters for this launch, or -1 if no slot is left. Then the launch must do
 * without. Two launches that may run at the same time must not share a slot. Launches of one stream follow each other,
 * so a stream keeps its slot. A CUDA graph may be replayed beside any other work, but not beside itself. So the
 * launches that a stream adds to a graph have their own slot as long as the graph lives. num_slots is at most
 * FA_MOST_SLOTS. */
enum { FA_MOST_SLOTS = 4096 };
int fa_cuda_slot(const fa_cuda_call *call, int num_slots);

#endif
