/* Memory with an inaccessible page on both sides. Data starts right behind the lower page or ends right before the
 * upper page. So a vector load that crosses an edge fails at once. Sanitizers do not see inside intrinsics.
 *
 *   [no access] data ................ [no access]        at_end false
 *   [no access] ................ data [no access]        at_end true
 *
 * Every byte starts as 0xff, which is a NaN in fp16, bf16, fp32 and fp64. A freed block is inaccessible, too, and
 * serves later blocks of its size. Fresh pages would take a fifth of the time of some tests. */
#ifndef FA_TEST_GUARDED_H
#define FA_TEST_GUARDED_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    char *map;
    size_t bytes;
} guarded_block;

enum { MOST_GUARDED_BLOCKS = 256, MOST_FREED_BLOCKS = 512 };
static guarded_block guarded_blocks[MOST_GUARDED_BLOCKS], freed_blocks[MOST_FREED_BLOCKS];
static int num_guarded_blocks, num_freed_blocks;

static guarded_block guarded_map(size_t bytes) {
    for (int i = num_freed_blocks; i-- > 0;) {
        const guarded_block block = freed_blocks[i];
        if (block.bytes != bytes) continue;
        freed_blocks[i] = freed_blocks[--num_freed_blocks];
        return block;
    }
    char *map = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) abort();
    return (guarded_block){map, bytes};
}

static void *guarded_alloc(size_t bytes, size_t alignment, bool at_end) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t used = (bytes + alignment - 1) / alignment * alignment;
    size_t inner = (used + page) / page * page; /* at least one page, so that zero bytes also have an address */
    if (num_guarded_blocks == MOST_GUARDED_BLOCKS) abort();
    const guarded_block block = guarded_map(inner + 2 * page);
    char *data = block.map + page;
    if (mprotect(data, inner, PROT_READ | PROT_WRITE)) abort();
    memset(data, 0xff, inner);
    guarded_blocks[num_guarded_blocks++] = block;
    return at_end ? data + inner - used : data;
}

static void guarded_free_all(void) {
    while (num_guarded_blocks) {
        guarded_block *block = &guarded_blocks[--num_guarded_blocks];
        if (num_freed_blocks < MOST_FREED_BLOCKS && mprotect(block->map, block->bytes, PROT_NONE) == 0)
            freed_blocks[num_freed_blocks++] = *block;
        else
            munmap(block->map, block->bytes);
    }
}

#endif
