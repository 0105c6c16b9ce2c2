/* Runs kernels that were compiled with cuda_emulation.h: the CTAs of a launch one after the other, their threads as
 * coroutines on stacks of their own. */
#define _GNU_SOURCE
#include "emulate_cuda.h"

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { MOST_THREADS = 128, STACK_BYTES = 256 << 10, SHARED_BYTES = 113 << 10, MOST_COPIES = 2048 };

typedef struct {
    unsigned x, y, z;
} triple;
triple emulated_thread, emulated_block, emulated_block_size, emulated_grid_size;
_Alignas(128) char memory[SHARED_BYTES + 4096];

typedef struct {
    void *dst;
    const void *src;
    unsigned bytes;
    bool is_present;
    int group;
} copy;

static struct {
    jmp_buf state;
    ucontext_t start;
    char *stack;
    bool has_started, has_finished;
    copy copies[MOST_COPIES];
    int num_copies, num_groups;
} threads[MOST_THREADS];
static jmp_buf scheduler;
static emulated_kernel *kernel;
static const void *parameters;

typedef struct {
    int num_arrived;
    unsigned generation;
} meeting;
static meeting block_meeting, named_meetings[16];
static int block_or[2];
static struct {
    meeting meeting;
    char places[2][32][64];
} warps[MOST_THREADS / 32];
static long num_idle_turns;

static void die(const char *why) {
    fprintf(stderr, "emulated kernel, block %u %u, thread %u: %s\n", emulated_block.x, emulated_block.y,
            emulated_thread.x, why);
    abort();
}

static void yield(void) {
    if (++num_idle_turns > 100000) die("not everyone reaches a barrier");
    if (!_setjmp(threads[emulated_thread.x].state)) _longjmp(scheduler, 1);
}

static unsigned arrive(meeting *m, int num) {
    const unsigned generation = m->generation;
    if (++m->num_arrived == num) {
        m->num_arrived = 0, m->generation++;
        num_idle_turns = 0;
    } else
        while (m->generation == generation) yield();
    return generation;
}

void emulated_syncthreads(void) { arrive(&block_meeting, (int)emulated_block_size.x); }

int emulated_syncthreads_or(int x) {
    const unsigned which = block_meeting.generation % 2;
    block_or[which] |= x;
    arrive(&block_meeting, (int)emulated_block_size.x);
    const int result = block_or[which];
    arrive(&block_meeting, (int)emulated_block_size.x);
    block_or[which] = 0;
    return result;
}

void emulated_bar_sync(unsigned id, unsigned num_threads) { arrive(&named_meetings[id], (int)num_threads); }

const char *emulated_exchange(const void *mine, size_t bytes) {
    const unsigned warp = emulated_thread.x / 32, which = warps[warp].meeting.generation % 2;
    if (bytes > 64) die("too much to exchange");
    memcpy(warps[warp].places[which][emulated_thread.x % 32], mine, bytes);
    arrive(&warps[warp].meeting, 32);
    return warps[warp].places[which][0];
}

void emulated_cp_async(void *dst, const void *src, unsigned bytes, bool is_present) {
    const unsigned t = emulated_thread.x;
    if ((uintptr_t)dst % bytes || (is_present && (uintptr_t)src % bytes)) die("cp.async of something not aligned");
    if (threads[t].num_copies == MOST_COPIES) die("too many copies without a wait");
    memset(dst, 0xff, bytes); /* nobody may look before it has come */
    threads[t].copies[threads[t].num_copies++] = (copy){dst, src, bytes, is_present, threads[t].num_groups};
}

void emulated_cp_async_commit_group(void) { threads[emulated_thread.x].num_groups++; }

/* What has been waited for arrives now and not before. */
void emulated_cp_async_wait_group(int pending) {
    const unsigned t = emulated_thread.x;
    int num_left = 0;
    for (int i = 0; i < threads[t].num_copies; i++) {
        const copy c = threads[t].copies[i];
        if (c.group >= threads[t].num_groups - pending)
            threads[t].copies[num_left++] = c;
        else if (c.is_present)
            memcpy(c.dst, c.src, c.bytes);
        else
            memset(c.dst, 0, c.bytes);
    }
    threads[t].num_copies = num_left;
}

static void thread_main(void) {
    kernel(parameters);
    if (threads[emulated_thread.x].num_copies) die("cp.async was not waited for");
    threads[emulated_thread.x].has_finished = true;
    num_idle_turns = 0;
    _longjmp(scheduler, 1);
}

static void run_block(unsigned num_threads, unsigned shared_bytes) {
    memset(memory, 0xff, sizeof memory);
    for (volatile unsigned t = 0; t < num_threads; t++) threads[t].has_started = threads[t].has_finished = false;
    volatile unsigned num_left = num_threads;
    const unsigned first = (emulated_block.x + emulated_block.y) * 37 % num_threads; /* another order in every block */
    for (volatile unsigned turn = 0; num_left > 0; turn++) {
        const unsigned t = (first + turn) % num_threads;
        if (threads[t].has_finished) continue;
        emulated_thread.x = t;
        if (!_setjmp(scheduler)) {
            if (threads[t].has_started) _longjmp(threads[t].state, 1);
            threads[t].has_started = true;
            if (!threads[t].stack) threads[t].stack = malloc(STACK_BYTES);
            getcontext(&threads[t].start);
            threads[t].start.uc_stack.ss_sp = threads[t].stack;
            threads[t].start.uc_stack.ss_size = STACK_BYTES;
            makecontext(&threads[t].start, thread_main, 0);
            setcontext(&threads[t].start);
        }
        if (threads[emulated_thread.x].has_finished) num_left--;
    }
    for (unsigned i = shared_bytes; i < sizeof memory; i++)
        if (memory[i] != (char)0xff) die("more shared memory used than the table says");
}

void emulate_launch(emulated_kernel *function, const void *parameter, unsigned grid_x, unsigned grid_y, unsigned block,
                    unsigned shared_bytes) {
    if (block > MOST_THREADS || shared_bytes > SHARED_BYTES) die("more threads or shared memory than a CTA may have");
    kernel = function;
    parameters = parameter;
    emulated_grid_size = (triple){grid_x, grid_y, 1};
    emulated_block_size = (triple){block, 1, 1};
    static bool backwards;
    backwards = !backwards; /* nobody may count on an order of CTAs */
    for (unsigned i = 0; i < grid_x * grid_y; i++) {
        const unsigned block_idx = backwards ? grid_x * grid_y - 1 - i : i;
        emulated_block = (triple){block_idx % grid_x, block_idx / grid_x, 0};
        run_block(block, shared_bytes);
    }
}
