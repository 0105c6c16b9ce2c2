/* Programs of mods, for Python. */
#ifndef FA_TORCH_FLEX_H
#define FA_TORCH_FLEX_H

#include "python_api.h"

/* The table holds flex_tables, flex_check and flex_evaluate. */
extern PyMethodDef fa_flex_functions[];

#endif
