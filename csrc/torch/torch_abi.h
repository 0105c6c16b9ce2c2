/* The functions of libtorch's C shim that we call, as one table.
 *
 * Nothing is linked. After `import torch` the symbols are looked up in the libtorch that is already loaded. Every row
 * names the first release with the symbol. `optional` marks symbols that may be missing, most of which older_torch.c
 * replaces. Ownership follows the shim: we
 * delete the tensor handles that a function returns, and sizes and strides are borrowed from the tensor.
 *
 * A test compiles this header as C++ together with torch's own headers, which checks every signature. */
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
 * An absent optional is 0. A present optional is a pointer to a slot on the heap. The callee frees this slot. */
typedef uint64_t StableIValue;
typedef void fa_boxed_op(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs);
typedef void fa_range_fn(int64_t begin, int64_t end, void *ctx);

#define FA_TORCH_ABI_VERSION 0x020a000000000000ULL /* 2.10: the oldest release with torch_library_impl */
#define FA_TORCH_OLDEST      "2.4"

/* X(symbol, first release, required or optional, result, parameters) */
#define FA_TORCH_SYMBOLS(X)                                                                                          \
    X(aoti_torch_library_init_def, "2.7", optional, AOTITorchError,                                                  \
      (const char *ns, const char *file, uint32_t line, TorchLibraryHandle *lib))                                    \
    X(aoti_torch_library_init_impl, "2.7", optional, AOTITorchError,                                                 \
      (const char *ns, const char *key, const char *file, uint32_t line, TorchLibraryHandle *lib))                   \
    X(aoti_torch_library_def, "2.7", optional, AOTITorchError, (TorchLibraryHandle lib, const char *schema))         \
    X(torch_library_impl, "2.10", optional, AOTITorchError,                                                          \
      (TorchLibraryHandle lib, const char *name, fa_boxed_op *op, uint64_t abi_version))                             \
    X(aoti_torch_get_dim, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t *ndim))                      \
    X(aoti_torch_get_sizes, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t **sizes))                  \
    X(aoti_torch_get_strides, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t **strides))              \
    X(aoti_torch_get_dtype, "2.4", required, AOTITorchError, (AtenTensorHandle t, int32_t *dtype))                   \
    X(aoti_torch_get_device_type, "2.4", required, AOTITorchError, (AtenTensorHandle t, int32_t *type))              \
    X(aoti_torch_get_device_index, "2.4", required, AOTITorchError, (AtenTensorHandle t, int32_t *idx))              \
    X(torch_get_mutable_data_ptr, "2.10", optional, AOTITorchError, (AtenTensorHandle t, void **data))               \
    X(torch_get_const_data_ptr, "2.10", optional, AOTITorchError, (AtenTensorHandle t, const void **data))           \
    X(aoti_torch_get_data_ptr, "2.4", required, AOTITorchError, (AtenTensorHandle t, void **data))                   \
    X(aoti_torch_get_storage_size, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t *bytes))            \
    X(aoti_torch_get_storage_offset, "2.4", required, AOTITorchError, (AtenTensorHandle t, int64_t *offset))         \
    X(aoti_torch_empty_strided, "2.4", required, AOTITorchError,                                                     \
      (int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,               \
       int32_t device_idx, AtenTensorHandle *t))                                                                     \
    X(aoti_torch_new_tensor_handle, "2.7", optional, AOTITorchError, (AtenTensorHandle t, AtenTensorHandle * same))  \
    X(aoti_torch_assign_tensors_out, "2.4", required, AOTITorchError, (AtenTensorHandle t, AtenTensorHandle * same)) \
    X(aoti_torch_delete_tensor_object, "2.4", required, AOTITorchError, (AtenTensorHandle t))                        \
    X(aoti_torch_check, "2.4", required, void,                                                                       \
      (bool condition, const char *func, const char *file, uint32_t line, const char *message))                      \
    X(aoti_torch_grad_mode_is_enabled, "2.4", required, bool, (void))                                                \
    X(torch_parallel_for, "2.10", optional, AOTITorchError,                                                          \
      (int64_t begin, int64_t end, int64_t grain_size, fa_range_fn *fn, void *ctx))                                  \
    X(torch_get_num_threads, "2.10", optional, AOTITorchError, (uint32_t *num_threads))                              \
    X(aoti_torch_device_type_cpu, "2.4", required, int32_t, (void))                                                  \
    X(aoti_torch_device_type_cuda, "2.4", required, int32_t, (void))                                                 \
    X(aoti_torch_dtype_float16, "2.4", required, int32_t, (void))                                                    \
    X(aoti_torch_dtype_bfloat16, "2.4", required, int32_t, (void))                                                   \
    X(aoti_torch_dtype_float32, "2.4", required, int32_t, (void))                                                    \
    X(aoti_torch_dtype_float64, "2.4", required, int32_t, (void))                                                    \
    X(aoti_torch_dtype_float8_e4m3fn, "2.4", required, int32_t, (void))                                              \
    X(aoti_torch_dtype_int32, "2.4", required, int32_t, (void))                                                      \
    X(aoti_torch_dtype_int64, "2.4", required, int32_t, (void))                                                      \
    X(aoti_torch_dtype_uint8, "2.4", required, int32_t, (void))                                                      \
    X(aoti_torch_dtype_uint64, "2.5", optional, int32_t, (void))                                                     \
    X(aoti_torch_delete_library_object, "2.7", optional, AOTITorchError, (TorchLibraryHandle lib))                   \
    X(aoti_torch_new_uninitialized_tensor, "2.9", optional, AOTITorchError, (AtenTensorHandle * t))                  \
    X(aoti_torch_copy_, "2.4", optional, AOTITorchError,                                                             \
      (AtenTensorHandle to, AtenTensorHandle from, int32_t non_blocking))                                            \
    X(aoti_torch_is_defined, "2.10", optional, AOTITorchError, (AtenTensorHandle t, bool *is_defined))               \
    X(torch_delete_stable_ivalue, "2.13", optional, AOTITorchError, (StableIValue * slot))

/* States of the calling thread that only C++ functions tell. The functions are found by their mangled names. X(member,
 * result, name). A C++ reference is a pointer here. The first two words of a vector are its begin and end. The first
 * word of a shared_ptr points to the shared object. */
#define FA_TORCH_STATES(X)                                                               \
    X(num_dispatch_modes, int64_t, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv")     \
    X(num_function_modes, int64_t, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv")    \
    X(functorch_layers, const void *const *, "_ZN2at9functorch20getDynamicLayerStackEv") \
    X(tracing_state, const void *const *, "_ZN5torch3jit6tracer15getTracingStateEv")

/* C++ functions of a tensor that the C shim lacks. X(member, result, parameter, name). */
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
    void (*operator_delete)(void *); /* frees a slot before 2.13, as torch's headers did with `delete` */
    /* THPVariable_Wrap(const at::TensorBase &) returns a new reference to a PyObject that shares the tensor with the
     * handle. Without memory it throws a C++ exception, so only fa_wrap calls it. This C++ function is found by its
     * mangled name. The pointer is NULL if this torch has no such function. */
    void *(*wrap)(AtenTensorHandle t);
#define FA_TORCH_STATE(member, result, name) result (*member)(void);
    FA_TORCH_STATES(FA_TORCH_STATE)
#undef FA_TORCH_STATE
    bool tells_states; /* all functions of FA_TORCH_STATES were found */
    /* Does a profiler or an observer watch this thread's operators? NULL: this torch does not tell. */
    bool (*has_record_callbacks)(void);
    /* Is autocast on for a device type, and to which dtype? C++'s types are enums of one byte. NULL: as above. */
    bool (*is_autocast_enabled)(int8_t device_type);
    int8_t (*autocast_dtype)(int8_t device_type);
#define FA_TORCH_TENSOR_FUNCTION(member, result, parameter, name) result (*member)(parameter);
    FA_TORCH_TENSOR_FUNCTIONS(FA_TORCH_TENSOR_FUNCTION)
#undef FA_TORCH_TENSOR_FUNCTION
    bool knows_tensors; /* all functions of FA_TORCH_TENSOR_FUNCTIONS were found */
    /* torch's numbers, which cannot change. */
    int32_t cpu, cuda;                                    /* device types */
    int32_t f16, bf16, f32, f64, e4m3, i32, i64, u8, u64; /* dtypes */
} fa_torch_abi;

extern fa_torch_abi fa_torch;

/* Fills fa_torch. FA_EUNSUPPORTED means that torch is not loaded or too old. */
fa_status fa_torch_load(fa_error *err);

/* Does the tensor require grad? This function needs fa_torch.knows_tensors. */
static inline bool fa_torch_requires_grad(AtenTensorHandle t) {
    return fa_torch.requires_grad(*(const void *const *)t); /* a tensor is a pointer to its TensorImpl */
}

/* Returns a symbol of libtorch or of the libraries that libtorch needs, or NULL. */
void *fa_torch_symbol(const char *name);

/* The same, of the part of libtorch that only CUDA builds have. */
void *fa_torch_cuda_symbol(const char *name);

/* Returns PyTorch's current cudaStream_t. The function is in the part of libtorch that only CUDA builds have. */
fa_status fa_torch_current_stream(int device_idx, void **stream, fa_error *err);

#endif
