/* One block is kept for the next call; calls that meet bring their own. */
#define _DEFAULT_SOURCE /* madvise */
#include "workspace.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

/* The head of a block, in front of what the caller gets. */
typedef struct {
    void *allocation;
    size_t bytes; /* that the caller may use */
} block;

enum { HEAD_BYTES = 64 };
_Static_assert(sizeof(block) <= HEAD_BYTES, "the caller's part stays aligned");

static const size_t most_kept = (size_t)128 << 20;
static _Atomic(block *) kept;

/* Large blocks start at a huge page and ask for more of them: one fault for 2 MiB, one entry of the TLB. */
static block *allocate(size_t bytes) {
    const size_t huge = (size_t)2 << 20, alignment = bytes >= huge ? huge : HEAD_BYTES;
    if (bytes > SIZE_MAX - 2 * huge) return NULL;
    bytes = (bytes + HEAD_BYTES + alignment - 1) / alignment * alignment;
    void *allocation = malloc(bytes + alignment);
    if (!allocation) return NULL;
    block *b = (block *)(((uintptr_t)allocation + alignment - 1) / alignment * alignment);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (alignment == huge) madvise(b, bytes, MADV_HUGEPAGE); /* a wish: whether it is granted does not matter */
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
