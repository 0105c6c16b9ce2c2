/* Memory with an inaccessible page on both sides. Data starts right behind the lower page or ends right before the
 * upper page. So a vector load that crosses an edge fails at once. Sanitizers do not see inside intrinsics.
 *
 *   [no access] data ................ [no access]        at_end false
 *   [no access] ................ data [no access]        at_end true
 *
 * Every byte starts as 0xff, which is a NaN in fp16, bf16, fp32 and fp64. */
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

static guarded_block guarded_blocks[256];
static int num_guarded_blocks;

static void *guarded_alloc(size_t bytes, size_t alignment, bool at_end) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t used = (bytes + alignment - 1) / alignment * alignment;
    size_t inner = (used + page) / page * page; /* at least one page, so that zero bytes also have an address */
    char *map = mmap(NULL, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED || num_guarded_blocks == 256) abort();
    if (mprotect(map + page, inner, PROT_READ | PROT_WRITE)) abort();
    memset(map + page, 0xff, inner);
    guarded_blocks[num_guarded_blocks++] = (guarded_block){map, inner + 2 * page};
    return at_end ? map + page + inner - used : map + page;
}

static void guarded_free_all(void) {
    while (num_guarded_blocks) {
        guarded_block *block = &guarded_blocks[--num_guarded_blocks];
        munmap(block->map, block->bytes);
    }
}

#endif
