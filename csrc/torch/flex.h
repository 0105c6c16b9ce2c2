/* Programs of mods, for Python. */
#ifndef FA_TORCH_FLEX_H
#define FA_TORCH_FLEX_H

#include "python_api.h"

/* The table holds flex_tables, flex_check, flex_evaluate and flex_classify. */
extern PyMethodDef fa_flex_functions[];

#endif
