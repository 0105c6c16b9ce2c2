/* Keeps one block for the next call. Concurrent calls allocate their own blocks. */
#define _DEFAULT_SOURCE /* declares madvise */
#include "workspace.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

/* The head of a block lies before the caller's memory. */
typedef struct {
    void *allocation;
    size_t bytes; /* bytes of the caller's memory */
} block;

enum { HEAD_BYTES = 64 };
_Static_assert(sizeof(block) <= HEAD_BYTES, "the caller's part stays aligned");

static const size_t most_kept = (size_t)128 << 20;
static _Atomic(block *) kept;

/* A large block starts at a huge page and asks for huge pages. A huge page of 2 MiB costs one page fault and one entry
 * of the TLB. */
static block *allocate(size_t bytes) {
    const size_t huge = (size_t)2 << 20, alignment = bytes >= huge ? huge : HEAD_BYTES;
    if (bytes > SIZE_MAX - 2 * huge) return NULL;
    bytes = (bytes + HEAD_BYTES + alignment - 1) / alignment * alignment;
    void *allocation = malloc(bytes + alignment);
    if (!allocation) return NULL;
    block *b = (block *)(((uintptr_t)allocation + alignment - 1) / alignment * alignment);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (alignment == huge) madvise(b, bytes, MADV_HUGEPAGE); /* the system may ignore this request */
#endif
    *b = (block){allocation, bytes - HEAD_BYTES};
    return b;
}

static void drop(block *b) {
    if (b) free(b->allocation);
}

void *fa_workspace_take(size_t bytes) {
    block *b = atomic_exchange(&kept, NULL);
    if (b && b->bytes < bytes) {
        drop(b);
        b = NULL;
    }
    if (!b) b = allocate(bytes);
    return b ? (char *)b + HEAD_BYTES : NULL;
}

void fa_workspace_return(void *workspace) {
    if (!workspace) return;
    block *b = (block *)((char *)workspace - HEAD_BYTES);
    drop(b->bytes > most_kept ? b : atomic_exchange(&kept, b));
}
