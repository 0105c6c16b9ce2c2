/* Working memory of calls on the CPU, kept between them: the first touch of a page costs more than a microsecond, and a
 * backward touches thousands. */
#ifndef FA_TORCH_WORKSPACE_H
#define FA_TORCH_WORKSPACE_H

#include <stddef.h>

/* bytes bytes, aligned to 64, uninitialised; NULL: there is no memory. Any thread may ask at any time. */
void *fa_workspace_take(size_t bytes);

/* Gives back what fa_workspace_take returned; NULL is nothing. */
void fa_workspace_return(void *workspace);

#endif
