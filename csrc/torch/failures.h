/* A status and its message become an exception of Python. */
#ifndef FA_TORCH_FAILURES_H
#define FA_TORCH_FAILURES_H

#include "flash_attn.h"
#include "python_api.h"

/* Raises the exception of a failure. NULL, to be returned. */
PyObject *fa_raise(fa_status status, const fa_error *err);

/* Takes the pending exception, so that C code and the dispatcher can go on. fa_raise raises it for FA_EPYTHON. */
void fa_keep_exception(void);

/* An op of this thread has failed, or (FA_OK) begins. The dispatcher will tell Python no more than the text. */
void fa_note_failure(fa_status status, const fa_error *err);

/* The dispatcher made a RuntimeError of every failure of an op. If the pending exception was something else before, it
 * becomes that again. */
void fa_mend_exception(void);

/* mended_exception */
extern PyMethodDef fa_failure_functions[];

#endif
