/* The emulated GPU of check_cuda. cuda_emulation.h describes it. */
#ifndef EMULATE_CUDA_H
#define EMULATE_CUDA_H

#include <stdbool.h>

/* Threads of a CTA, which are none at first. Bit t % 64 of word t / 64 is thread t. */
enum { EMULATED_SET_WORDS = 1024 / 64 };
typedef struct {
    unsigned long long words[EMULATED_SET_WORDS];
} emulated_threads;

/* A kernel takes one parameter, by reference. */
typedef void emulated_kernel(const void *parameter);

typedef struct {
    unsigned grid_x, grid_y, grid_z; /* number of CTAs; `cluster` CTAs in the first direction run together */
    unsigned cluster, block, shared_bytes;
} emulated_shape;

void emulate_launch(emulated_kernel *kernel, const void *parameter, const emulated_shape *shape);

/* Adds the running thread to `waiters`. It has no turns until emulated_wake. */
void emulated_wait(emulated_threads *waiters);
/* Threads of the set have turns again. The set is empty then. */
void emulated_wake(emulated_threads *waiters);
/* If set, called when threads in emulated_wait have missed `turns` turns. Returns whether something has happened, or
 * may happen later, that wakes a thread. */
extern bool (*emulated_background)(unsigned turns);

#endif
