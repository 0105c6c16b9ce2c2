/* Calls of ops without torch's dispatcher, if the effects are the same. */
#ifndef FA_TORCH_DIRECT_H
#define FA_TORCH_DIRECT_H

#include "python_api.h" /* CPython wants to be the first */

#include "ops.h"
#include "outputs.h"

/* Tensors may want gradients. IGNORED: the caller needs none. NEED_LSE: the caller records the gradients and needs lse.
 * OF_THE_OP: the op is called. The op records gradients. If the op has none, flash_attn_with_kvcache warns. */
typedef enum { FA_GRADIENTS_IGNORED, FA_GRADIENTS_NEED_LSE, FA_GRADIENTS_OF_THE_OP } fa_gradients;

typedef struct {
    const char *op, *instead_of; /* the row with the arguments; torch's op that the function replaces */
    bool only_out;               /* out alone is returned */
    fa_gradients gradients;
    /* Filled at the first calls. */
    const fa_signature *signature;
    PyObject *keys[2]; /* the op's keys in torch.library's set, for the CPU and for CUDA */
} fa_direct_function;

#define FA_DIRECT(op, instead_of, only_out, gradients)            \
    {                                                             \
        op, instead_of, only_out, gradients, NULL, { NULL, NULL } \
    }

/* Executes an unpacked call with further arguments, as fa_execute does. The interpreter's lock is held. */
typedef fa_status fa_direct_execute(const fa_call *call, PyObject *const *further, fa_outputs *outputs, fa_error *err);

/* Does nothing watch ops, and does autocast cast no tensor? A call may then go without torch's dispatcher. */
bool fa_is_unseen(void);

#define FA_MOST_FURTHER 13

/* Returns the results of a call, or None if the op must be called. NULL: there is an exception. The last num_further
 * arguments are no arguments of the op. execute reads them in place of fa_execute. */
PyObject *fa_call_directly(fa_direct_function *function, PyObject *args);
PyObject *fa_call_directly_with(fa_direct_function *function, PyObject *args, int num_further,
                                fa_direct_execute *execute);

/* The extension's direct functions: direct_2.c or direct_3.c. Each file lists its functions as X(name, arguments for
 * Python, results, op with these arguments, torch's op that the function replaces, whether out alone is returned,
 * gradients). The list makes the functions, and the table of them. */
extern PyMethodDef fa_direct_functions[];

/* clang-format off */
#define FA_DIRECT_FUNCTION(name, arguments, results, op, instead_of, only_out, gradients)     \
    static PyObject *call_##name(PyObject *self, PyObject *args) {                            \
        static fa_direct_function function = FA_DIRECT(op, instead_of, only_out, gradients);  \
        (void)self;                                                                           \
        return fa_call_directly(&function, args);                                             \
    }

#define FA_DIRECT_METHOD(name, arguments, results, op, instead_of, only_out, gradients) \
    {"direct_" #name, call_##name, METH_VARARGS, "direct_" #name "(" arguments ") -> " results "; None: call the op"},
/* clang-format on */

#endif
