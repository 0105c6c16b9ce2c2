/* The part of libtorch's C shim that we call, as one table of functions.
 *
 * Nothing is linked: after `import torch` the symbols are looked up in the libtorch that is already loaded. Every row
 * says since which release the symbol exists; a row without which we can do says so by `optional`. Ownership as in the
 * shim: tensor handles that a function returns are ours to delete, sizes and strides are borrowed from the tensor.
 *
 * This header is also compiled as C++ together with torch's own headers, which checks every signature. */
#ifndef FA_TORCH_TORCH_ABI_H
#define FA_TORCH_TORCH_ABI_H

#include <stdbool.h>
#include <stdint.h>

#include "flash_attn.h"

typedef struct AtenTensorOpaque *AtenTensorHandle;
#ifdef __cplusplus
class TorchLibraryOpaque;
typedef TorchLibraryOpaque *TorchLibraryHandle;
#else
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
#endif
typedef int32_t AOTITorchError; /* 0: success */

/* One slot of a boxed call. Tensor: owned handle. float: the bits of a double. int, SymInt: int64. bool: low byte.
 * Absent optional: 0; present optional: pointer to a slot on the heap that the callee frees. */
typedef uint64_t StableIValue;
typedef void fa_boxed_op(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs);
typedef void fa_range_fn(int64_t begin, int64_t end, void *ctx);

#define FA_TORCH_ABI_VERSION 0x020a000000000000ULL /* 2.10: the oldest release with torch_parallel_for */
#define FA_TORCH_OLDEST      "2.10"

/* X(symbol, first release, required or optional, result, parameters) */
#define FA_TORCH_SYMBOLS(X)                                                                                  \
    X(aoti_torch_library_init_def, "2.7", required, AOTITorchError,                                          \
      (const char *ns, const char *file, uint32_t line, TorchLibraryHandle *lib))                            \
    X(aoti_torch_library_init_impl, "2.7", required, AOTITorchError,                                         \
      (const char *ns, const char *key, const char *file, uint32_t line, TorchLibraryHandle *lib))           \
    X(aoti_torch_library_def, "2.7", required, AOTITorchError, (TorchLibraryHandle lib, const char *schema)) \
    X(torch_library_impl, "2.10", required, AOTITorchError,                                                  \
      (TorchLibraryHandle lib, const char *name, fa_boxed_op *op, uint64_t abi_version))                     \
    X(aoti_torch_get_dim, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t *ndim))              \
    X(aoti_torch_get_sizes, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t **sizes))          \
    X(aoti_torch_get_strides, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t **strides))      \
    X(aoti_torch_get_dtype, "2.4", required, AOTITorchError, (AtenTensorHandle t, int32_t *dtype))           \
    X(aoti_torch_get_device_type, "2.4", required, AOTITorchError, (AtenTensorHandle t, int32_t *type))      \
    X(aoti_torch_get_device_index, "2.4", required, AOTITorchError, (AtenTensorHandle t, int32_t *idx))      \
    X(torch_get_mutable_data_ptr, "2.10", required, AOTITorchError, (AtenTensorHandle t, void **data))       \
    X(torch_get_const_data_ptr, "2.10", required, AOTITorchError, (AtenTensorHandle t, const void **data))   \
    X(aoti_torch_get_storage_size, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t *bytes))    \
    X(aoti_torch_get_storage_offset, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t *offset)) \
    X(aoti_torch_empty_strided, "2.4", required, AOTITorchError,                                             \
      (int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,       \
       int32_t device_idx, AtenTensorHandle *t))                                                             \
    X(aoti_torch_delete_tensor_object, "2.4", required, AOTITorchError, (AtenTensorHandle t))                \
    X(aoti_torch_check, "2.4", required, void,                                                               \
      (bool condition, const char *func, const char *file, uint32_t line, const char *message))              \
    X(aoti_torch_grad_mode_is_enabled, "2.4", required, bool, (void))                                        \
    X(torch_parallel_for, "2.10", required, AOTITorchError,                                                  \
      (int64_t begin, int64_t end, int64_t grain_size, fa_range_fn *fn, void *ctx))                          \
    X(torch_get_num_threads, "2.10", required, AOTITorchError, (uint32_t *num_threads))                      \
    X(aoti_torch_device_type_cpu, "2.4", required, int32_t, (void))                                          \
    X(aoti_torch_device_type_cuda, "2.4", required, int32_t, (void))                                         \
    X(aoti_torch_dtype_float16, "2.4", required, int32_t, (void))                                            \
    X(aoti_torch_dtype_bfloat16, "2.4", required, int32_t, (void))                                           \
    X(aoti_torch_dtype_float32, "2.4", required, int32_t, (void))                                            \
    X(aoti_torch_dtype_float64, "2.4", required, int32_t, (void))                                            \
    X(aoti_torch_dtype_int32, "2.4", required, int32_t, (void))                                              \
    X(aoti_torch_dtype_int64, "2.4", required, int32_t, (void))                                              \
    X(aoti_torch_dtype_uint8, "2.4", required, int32_t, (void))                                              \
    X(aoti_torch_is_defined, "2.10", optional, AOTITorchError, (AtenTensorHandle t, bool *is_defined))       \
    X(torch_delete_stable_ivalue, "2.13", optional, AOTITorchError, (StableIValue * slot))

/* States of the calling thread that only C++ functions tell, found by their mangled names. X(member, result, name).
 * A reference is a pointer: of the vector's words the first two are its begin and end, of the shared_ptr's the first
 * points to what it shares. */
#define FA_TORCH_STATES(X)                                                               \
    X(num_dispatch_modes, int64_t, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv")     \
    X(num_function_modes, int64_t, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv")    \
    X(functorch_layers, const void *const *, "_ZN2at9functorch20getDynamicLayerStackEv") \
    X(tracing_state, const void *const *, "_ZN5torch3jit6tracer15getTracingStateEv")

/* What only C++ functions tell of a tensor or do with it. X(member, result, parameter, name). */
#define FA_TORCH_TENSOR_FUNCTIONS(X)                                                                    \
    X(requires_grad, bool, const void *impl, "_ZNK3c1010TensorImpl13requires_gradEv")                   \
    X(is_leaf, bool, AtenTensorHandle t, "_ZNK2at10TensorBase7is_leafEv")                               \
    X(is_view, bool, AtenTensorHandle t, "_ZNK2at10TensorBase7is_viewEv")                               \
    X(base_of_view, AtenTensorHandle, AtenTensorHandle t, "_ZNK2at10TensorBase5_baseEv") /* borrowed */ \
    X(is_inference, bool, AtenTensorHandle t, "_ZN2at6native12is_inferenceERKNS_6TensorE")              \
    X(is_negative, bool, AtenTensorHandle t, "_ZN2at6native6is_negERKNS_6TensorE")                      \
    X(bump_version, void, AtenTensorHandle t, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE")

typedef struct {
#define FA_TORCH_MEMBER(symbol, since, need, result, parameters) result(*symbol) parameters;
    FA_TORCH_SYMBOLS(FA_TORCH_MEMBER)
#undef FA_TORCH_MEMBER
    void (*operator_delete)(void *); /* frees a slot before 2.13, when torch's headers did it with `delete` */
    /* THPVariable_Wrap(const at::TensorBase &): a new reference to the tensor as a PyObject, which shares it with the
     * handle; NULL with an exception. The function itself is NULL where this torch has none: it is C++, found by its
     * mangled name. */
    void *(*wrap)(AtenTensorHandle t);
#define FA_TORCH_STATE(member, result, name) result (*member)(void);
    FA_TORCH_STATES(FA_TORCH_STATE)
#undef FA_TORCH_STATE
    bool tells_states; /* all of them were found */
    /* Does anybody want to see this thread's operators: a profiler, an observer of all threads? NULL: this torch does not
     * tell. */
    bool (*has_record_callbacks)(void);
#define FA_TORCH_TENSOR_FUNCTION(member, result, parameter, name) result (*member)(parameter);
    FA_TORCH_TENSOR_FUNCTIONS(FA_TORCH_TENSOR_FUNCTION)
#undef FA_TORCH_TENSOR_FUNCTION
    bool knows_tensors; /* all of these were found */
    /* Answers that cannot change. */
    int32_t cpu, cuda;                         /* device types */
    int32_t f16, bf16, f32, f64, i32, i64, u8; /* dtypes */
} fa_torch_abi;

extern fa_torch_abi fa_torch;

/* Fills fa_torch. FA_EUNSUPPORTED, with one sentence, if torch is not loaded or too old. */
fa_status fa_torch_load(fa_error *err);

/* The tensor's gradient is asked for; where C++ functions tell of tensors. */
static inline bool fa_torch_requires_grad(AtenTensorHandle t) {
    return fa_torch.requires_grad(*(const void *const *)t); /* a tensor is a pointer to its TensorImpl */
}
/* A symbol of libtorch or of what it is linked with; NULL: there is none. */
void *fa_torch_symbol(const char *name);

/* The cudaStream_t that PyTorch queues work on, from the part of libtorch that only CUDA builds have. */
fa_status fa_torch_current_stream(int device_idx, void **stream, fa_error *err);

#endif
