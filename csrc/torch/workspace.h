/* Keeps the working memory of CPU calls between calls. The first touch of a page costs more than a microsecond, and a
 * backward touches thousands of pages. */
#ifndef FA_TORCH_WORKSPACE_H
#define FA_TORCH_WORKSPACE_H

#include <stddef.h>

/* Returns uninitialised memory, aligned to 64 bytes. NULL: there is no memory. Any thread may call this function at any
 * time. */
void *fa_workspace_take(size_t bytes);

/* Gives back memory of fa_workspace_take. NULL is ignored. */
void fa_workspace_return(void *workspace);

#endif
