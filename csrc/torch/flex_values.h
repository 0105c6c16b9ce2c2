/* Tensors and programs of Python's objects, for flex.c and flex_attend.c. */
#ifndef FA_TORCH_FLEX_VALUES_H
#define FA_TORCH_FLEX_VALUES_H

#include "call.h"
#include "flex/program.h"
#include "python_api.h"

/* A tensor that Python keeps alive. t.handle points to impl, so the struct must not move. */
typedef struct {
    fa_tensor t;
    void *impl;
} fa_flex_tensor;

/* Reads a torch.Tensor; None leaves it absent. Its storage must hold all its elements. */
/* Is an object None, or a torch.Tensor whose memory holds all its elements? false: it may be. */
bool fa_flex_has_memory(PyObject *object);

fa_status fa_flex_read_tensor(PyObject *object, const char *name, fa_flex_tensor *to, fa_error *err);

/* Is the dtype of a tensor, which was read to t, torch's dtype of this name? */
bool fa_flex_has_dtype(PyObject *tensor, const fa_tensor *t, const char *dtype);

/* torch's names of dtypes, and of the types of results. */
extern const char *const fa_flex_dtype_names[FA_FLEX_NUM_DTYPES], *const fa_flex_result_names[FA_FLEX_NUM_TYPES];

/* A program with its values. Its tensors must outlive it. */
typedef struct {
    fa_flex_program program;
    fa_flex_capture captures[FA_FLEX_MAX_CAPTURES];
    uint8_t ndim[FA_FLEX_MAX_CAPTURES]; /* dimensions of the tensors, with those of size 1 that captures lack */
    fa_flex_number params[FA_FLEX_MAX_PARAMS];
    fa_flex_bound bound;
    PyObject *text;                  /* owned: the program's bytes */
    int32_t device_type, device_idx; /* of the captures */
} fa_flex_values;

/* The captures must lie on the device: torch's number of its type, and its index. NULL: there is an exception. */
fa_flex_values *fa_flex_bind(PyObject *text, PyObject *tensors, PyObject *numbers, int32_t device_type,
                             int32_t device_idx);
void fa_flex_unbind(fa_flex_values *values);

/* Finds the memory of the gradients of a derivative's captures. `tensors` is None, or a tuple of None or a tensor for
 * each of them. data [captures]. */
fa_status fa_flex_read_gradients(const fa_flex_values *derivative, PyObject *tensors, void **data, fa_error *err);

/* Returns the type of the scores that the program reads, or FA_FLEX_NUM_TYPES. */
fa_flex_type fa_flex_type_of_score(const fa_flex_program *program);

#endif
