/* Turns a status and its message into a Python exception. */
#ifndef FA_TORCH_FAILURES_H
#define FA_TORCH_FAILURES_H

#include "flash_attn.h"
#include "python_api.h"

/* Raises the exception of a failure and returns NULL. */
PyObject *fa_raise(fa_status status, const fa_error *err);

/* Keeps the pending exception, so that C code and the dispatcher can go on. With FA_EPYTHON, fa_raise raises this
 * exception again. */
void fa_keep_exception(void);

/* Notes that an op of this thread failed, or that an op begins (FA_OK). The dispatcher passes only the text to
 * Python. */
void fa_note_failure(fa_status status, const fa_error *err);

/* Restores the type of the pending exception. The dispatcher turns every failure of an op into a RuntimeError. */
void fa_mend_exception(void);

/* The table holds mended_exception. */
extern PyMethodDef fa_failure_functions[];

#endif
