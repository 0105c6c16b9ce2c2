/* Counters that outlive a launch. */
#ifndef FA_GPU_SLOTS_H
#define FA_GPU_SLOTS_H

#include "gpu_call.h"

/* A slot of the kernel's own counters for this launch. Two launches that may run at the same time must not
 * share one. Launches of one stream follow each other, so a stream keeps its slot. A captured launch may be replayed
 * beside anything but its own graph: what a stream adds to a graph has a slot for as long as the graph lives. -1: none is
 * left, and the launch does without. num_slots: at most FA_MOST_SLOTS. */
enum { FA_MOST_SLOTS = 4096 };
int fa_cuda_slot(const fa_cuda_call *call, int num_slots);

#endif
