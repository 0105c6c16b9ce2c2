/* The order of tasks where a CTA takes one tile of one head. Without a mask the tiles of a head follow each other. With
 * a causal mask tiles have different lengths, and a launch should end with short ones. So some heads are walked
 * together: first their longest tiles, then the next. The next heads follow:
 *
 *   heads 0, 1, 2 | tile 0 of each | tile 1 of each | .. | heads 3, 4, 5, 6 | tile 0 of each | ..
 *
 * The last group takes the heads that fill no group. plan/gpu_task_order.h chooses the size of a group. */
#ifndef FA_TASK_ORDER_CUH
#define FA_TASK_ORDER_CUH

#include "integers.cuh"

/* A tile of a head. Heads are counted over all sequences. */
struct task_place {
    int head, tile;
};

/* x / by, which is smaller than 2^31, of numbers that are not negative. A division of 64 bits takes several hundred
 * clocks. */
DEVICE int quotient(int x, int by) { return (int)((unsigned)x / (unsigned)by); }
DEVICE int quotient(long long x, int by) { return x >> 32 ? (int)(x / by) : quotient((int)x, by); }

/* Returns the place of a task. num_tiles group_heads is smaller than 2^30. */
DEVICE task_place place_of_task(long long task, int num_tiles, int num_heads, int group_heads) {
    if (group_heads <= 1) {
        const int head = quotient(task, num_tiles);
        return {head, (int)(task - (long long)head * num_tiles)};
    }
    const int tasks = num_tiles * group_heads;
    int group = quotient(task, tasks);
    if ((group + 1) * group_heads > num_heads) group--; /* the heads that fill no group */
    const int first = group * group_heads,
              heads = first + 2 * group_heads > num_heads ? num_heads - first : group_heads;
    const int in_group = (int)(task - (long long)group * tasks), tile = quotient(in_group, heads);
    return {first + in_group - tile * heads, tile};
}

/* The same place as a number: head num_tiles + tile. */
DEVICE long long task_in_order(long long task, int num_tiles, int num_heads, int group_heads) {
    if (group_heads <= 1) return task;
    const task_place place = place_of_task(task, num_tiles, num_heads, group_heads);
    return (long long)place.head * num_tiles + place.tile;
}

#endif
