/* Runs kernels that were compiled with cuda_emulation.h. The CTAs of a launch run one after the other, with threads as
 * coroutines on their own stacks. The CTAs of a cluster run one after the other up to each barrier of the cluster.
 * Threads that can run take turns. A thread that waits for others has no turns until they wake it. */
#define _GNU_SOURCE
#include "emulate_cuda.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { MOST_THREADS = 1024, MOST_CTAS = 16, STACK_BYTES = 256 << 10, SHARED_BYTES = 228 << 10, MOST_COPIES = 2048 };

typedef struct {
    unsigned x, y, z;
} triple;
triple emulated_thread, emulated_block, emulated_block_size, emulated_grid_size;
_Alignas(1024) char memory[SHARED_BYTES + 4096];

typedef struct {
    void *dst;
    const void *src;
    unsigned bytes;
    bool is_present;
    int group;
} copy;

/* Where a coroutine or the scheduler goes on. gcc's own functions take half as long as setjmp and longjmp. They forbid
 * a jump in the function that the jump returns to. */
typedef void *place[5];
__attribute__((noinline, noclone, noreturn)) static void go_on(place where) { __builtin_longjmp(where, 1); }

typedef struct {
    place state;
    bool has_started, has_finished, waits_for_cluster;
    copy *copies;
    int num_copies, num_groups;
} thread;
/* Threads of the cluster, and of the running CTA. */
static thread all_threads[MOST_CTAS][MOST_THREADS], *threads;
static char *kept_memory[MOST_CTAS]; /* shared memory of the other CTAs */
static unsigned cluster_size, cluster_rank;
static place scheduler;
static emulated_kernel *kernel;
static const void *parameters;

/* Threads of the CTA that can run, and threads in emulated_wait. */
static emulated_threads ready, waiting;
bool (*emulated_background)(unsigned turns);

typedef struct {
    int num_arrived;
    unsigned generation;
    emulated_threads absent; /* threads that have arrived and wait */
} meeting;
static meeting block_meeting, named_meetings[16];
static int block_or[2], named_or[16][2];
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

static void add_thread(emulated_threads *set, unsigned t) { set->words[t / 64] |= 1ull << t % 64; }
static void remove_thread(emulated_threads *set, unsigned t) { set->words[t / 64] &= ~(1ull << t % 64); }

/* The first thread from t on that can run, or MOST_THREADS. Adds the number of threads before it that are in
 * emulated_wait. */
static unsigned find_ready(unsigned t, unsigned *num_waiting) {
    unsigned long long mask = ~0ull << t % 64;
    for (unsigned i = t / 64; i < EMULATED_SET_WORDS; i++, mask = ~0ull) {
        const unsigned long long found = ready.words[i] & mask, lowest = found & -found;
        const unsigned long long passed = waiting.words[i] & mask & (lowest - 1);
        if (passed) *num_waiting += (unsigned)__builtin_popcountll(passed);
        if (found) return 64 * i + (unsigned)__builtin_ctzll(found);
    }
    return MOST_THREADS;
}

/* The next thread after t that can run. The turns of threads in emulated_wait pass in the background, which may wake
 * them. */
static unsigned next_thread(unsigned t) {
    for (;;) {
        unsigned num_waiting = 0, next = t + 1 < MOST_THREADS ? find_ready(t + 1, &num_waiting) : MOST_THREADS;
        if (next == MOST_THREADS) next = find_ready(0, &num_waiting);
        const bool goes_on = num_waiting && emulated_background && emulated_background(num_waiting);
        if (next != MOST_THREADS) return next;
        if (!goes_on) die("not everyone reaches a barrier");
    }
}

/* Back to the scheduler, which counts the threads that can run. */
static void stop(void) {
    if (!__builtin_setjmp(threads[emulated_thread.x].state)) go_on(scheduler);
}

/* The scheduler starts a thread. Then one thread jumps to the next. */
static void pass_on(void) {
    thread *self = &threads[emulated_thread.x];
    const unsigned next = next_thread(emulated_thread.x);
    if (!threads[next].has_started) {
        stop();
    } else if (&threads[next] != self && !__builtin_setjmp(self->state)) {
        emulated_thread.x = next;
        go_on(threads[next].state);
    }
}

static void yield(void) {
    if (++num_idle_turns > 100000) die("not everyone reaches a barrier");
    pass_on();
}

/* Other threads go on while this one waits. `something_happened`: this is no sign that nobody reaches a barrier. */
void emulated_yield(bool something_happened) {
    if (something_happened) num_idle_turns = 0;
    yield();
}

static void wait_in(emulated_threads *set) {
    add_thread(set, emulated_thread.x);
    remove_thread(&ready, emulated_thread.x);
    pass_on();
}

void emulated_wait(emulated_threads *waiters) {
    add_thread(&waiting, emulated_thread.x);
    wait_in(waiters);
}

void emulated_wake(emulated_threads *waiters) {
    for (unsigned i = 0; i < EMULATED_SET_WORDS; i++) {
        ready.words[i] |= waiters->words[i], waiting.words[i] &= ~waiters->words[i];
        waiters->words[i] = 0;
    }
    num_idle_turns = 0;
}

/* Returns the meeting's generation. */
static unsigned join(meeting *m, int num) {
    const unsigned generation = m->generation;
    if (++m->num_arrived == num) {
        m->num_arrived = 0, m->generation++;
        emulated_wake(&m->absent);
    }
    return generation;
}

static unsigned arrive(meeting *m, int num) {
    const unsigned generation = join(m, num);
    while (m->generation == generation) wait_in(&m->absent);
    return generation;
}

void emulated_syncthreads(void) { arrive(&block_meeting, (int)emulated_block_size.x); }

static int arrive_or(meeting *m, int (*any)[2], int num, int x) {
    const unsigned which = m->generation / 2 % 2; /* a call has two meetings; the next has another place */
    (*any)[which] |= x;
    arrive(m, num);
    const int result = (*any)[which];
    arrive(m, num);
    (*any)[which] = 0;
    return result;
}

int emulated_syncthreads_or(int x) { return arrive_or(&block_meeting, &block_or, (int)emulated_block_size.x, x); }

void emulated_bar_sync(unsigned id, unsigned num_threads) { arrive(&named_meetings[id], (int)num_threads); }

int emulated_bar_red_or(unsigned id, unsigned num_threads, int x) {
    return arrive_or(&named_meetings[id], &named_or[id], (int)num_threads, x);
}

void emulated_bar_arrive(unsigned id, unsigned num_threads) { join(&named_meetings[id], (int)num_threads); }

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
    if (!threads[t].copies) threads[t].copies = malloc(MOST_COPIES * sizeof(copy));
    if (threads[t].num_copies == MOST_COPIES) die("too many copies without a wait");
    memset(dst, 0xff, bytes); /* a read before the wait finds NaN */
    threads[t].copies[threads[t].num_copies++] = (copy){dst, src, bytes, is_present, threads[t].num_groups};
}

void emulated_cp_async_commit_group(void) { threads[emulated_thread.x].num_groups++; }

/* Copies arrive only when a thread waits for them. */
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

void emulated_cluster_sync(void) {
    threads[emulated_thread.x].waits_for_cluster = true;
    remove_thread(&ready, emulated_thread.x);
    stop();
}

char *emulated_memory_of(unsigned rank) {
    if (rank >= cluster_size) die("there is no such CTA in the cluster");
    return rank == cluster_rank ? memory : kept_memory[rank];
}

/* A coroutine serves one CTA after the other. */
static void thread_main(void) {
    for (;;) {
        kernel(parameters);
        thread *self = &threads[emulated_thread.x];
        if (self->num_copies) die("cp.async was not waited for");
        self->has_finished = true;
        remove_thread(&ready, emulated_thread.x);
        num_idle_turns = 0;
        stop();
    }
}

/* Starts the thread, or goes on with it. */
__attribute__((noinline, noclone, noreturn)) static void run_thread(void) {
    const unsigned t = emulated_thread.x;
    if (threads[t].has_started) go_on(threads[t].state);
    threads[t].has_started = true;
    static ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = malloc(STACK_BYTES);
    start.uc_stack.ss_size = STACK_BYTES - t % 128 * 576; /* stacks begin in different lines of the cache */
    makecontext(&start, thread_main, 0);
    setcontext(&start);
    abort();
}

/* Nobody may write shared memory behind the bytes of the launch. */
static void check_end(const char *bytes, unsigned shared_bytes) {
    const char *end = bytes + shared_bytes;
    if (end[0] != (char)0xff || memcmp(end, end + 1, sizeof memory - shared_bytes - 1))
        die("more shared memory used than the table says");
}

/* Runs a CTA until each of its threads has finished or waits for the cluster. Returns the number of finished
 * threads. */
static unsigned run_block(unsigned num_threads, unsigned shared_bytes) {
    volatile unsigned num_left = 0, num_finished = 0;
    for (unsigned t = 0; t < num_threads; t++) {
        num_left += !threads[t].has_finished, num_finished += threads[t].has_finished;
        if (!threads[t].has_finished) add_thread(&ready, t);
    }
    /* The order varies with the CTA. */
    emulated_thread.x = ((emulated_block.x + emulated_block.y) * 37 + num_threads - 1) % num_threads;
    while (num_left > 0) {
        emulated_thread.x = next_thread(emulated_thread.x);
        if (!__builtin_setjmp(scheduler)) run_thread();
        const thread *ran = &threads[emulated_thread.x];
        if (ran->has_finished || ran->waits_for_cluster) num_left--, num_finished += ran->has_finished;
    }
    check_end(memory, shared_bytes);
    return num_finished;
}

/* CTAs [first, first + cluster_size) of a row of the grid. */
static void run_cluster(unsigned first, unsigned num_threads, unsigned shared_bytes, bool backwards) {
    memset(named_meetings, 0, sizeof named_meetings); /* A CTA may leave arrivals that no thread waits for. */
    for (unsigned rank = 0; rank < cluster_size; rank++) {
        memset(kept_memory[rank], 0xff, shared_bytes);
        for (unsigned t = 0; t < num_threads; t++) all_threads[rank][t].has_finished = false;
    }
    for (unsigned num_finished = 0; num_finished < cluster_size * num_threads;) {
        num_finished = 0;
        for (unsigned i = 0; i < cluster_size; i++) {
            cluster_rank = backwards ? cluster_size - 1 - i : i;
            emulated_block.x = first + cluster_rank, threads = all_threads[cluster_rank];
            memcpy(memory, kept_memory[cluster_rank], shared_bytes);
            num_finished += run_block(num_threads, shared_bytes);
            memcpy(kept_memory[cluster_rank], memory, shared_bytes);
        }
        if (num_finished % (cluster_size * num_threads)) die("not everyone reaches a barrier of the cluster");
        for (unsigned rank = 0; rank < cluster_size; rank++)
            for (unsigned t = 0; t < num_threads; t++) all_threads[rank][t].waits_for_cluster = false;
    }
    for (unsigned rank = 0; rank < cluster_size && cluster_size > 1; rank++) check_end(kept_memory[rank], shared_bytes);
}

void emulate_launch(emulated_kernel *function, const void *parameter, const emulated_shape *shape) {
    if (shape->block > MOST_THREADS || shape->shared_bytes > SHARED_BYTES || shape->cluster > MOST_CTAS)
        die("more threads, shared memory or CTAs than there may be");
    kernel = function;
    parameters = parameter;
    cluster_size = shape->cluster;
    emulated_grid_size = (triple){shape->grid_x, shape->grid_y, shape->grid_z};
    emulated_block_size = (triple){shape->block, 1, 1};
    memset(memory, 0xff, sizeof memory);
    for (unsigned rank = 0; rank < cluster_size; rank++) {
        if (!kept_memory[rank]) kept_memory[rank] = malloc(sizeof memory);
        memset(kept_memory[rank], 0xff, sizeof memory);
    }
    static bool backwards;
    backwards = !backwards; /* kernels must not rely on an order of CTAs */
    const unsigned row = shape->grid_x / cluster_size, num = row * shape->grid_y * shape->grid_z;
    for (unsigned i = 0; i < num; i++) {
        const unsigned idx = backwards ? num - 1 - i : i;
        emulated_block = (triple){0, idx / row % shape->grid_y, idx / row / shape->grid_y};
        run_cluster(idx % row * cluster_size, shape->block, shape->shared_bytes, backwards);
    }
}
