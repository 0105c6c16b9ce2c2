/* Finds the C shim in the libtorch that `import torch` has loaded. */
#include "torch_abi.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "system/library.h"

#if defined(_WIN32)
#define TORCH_CPU_LIBRARY    "torch_cpu.dll"
#define TORCH_CUDA_LIBRARY   "torch_cuda.dll"
#define TORCH_PYTHON_LIBRARY "torch_python.dll"
#define OPERATOR_DELETE      "??3@YAXPEAX@Z"
#define THPVARIABLE_WRAP     "?THPVariable_Wrap@@YAPEAU_object@@AEBVTensorBase@at@@@Z"
#define HAS_CALLBACKS        "?hasCallbacks@at@@YA_NXZ"
#define HAS_AUTOCAST         "?is_autocast_enabled@autocast@at@@YA_NW4DeviceType@c10@@@Z"
#define AUTOCAST_DTYPE       "?get_autocast_dtype@autocast@at@@YA?AW4ScalarType@c10@@W4DeviceType@4@@Z"
#else
#define TORCH_CUDA_LIBRARY "libtorch_cuda.so"
#if defined(__APPLE__)
#define TORCH_CPU_LIBRARY    "libtorch_cpu.dylib"
#define TORCH_PYTHON_LIBRARY "libtorch_python.dylib"
#else
#define TORCH_CPU_LIBRARY    "libtorch_cpu.so"
#define TORCH_PYTHON_LIBRARY "libtorch_python.so"
#endif
#define OPERATOR_DELETE  "_ZdlPv"
#define THPVARIABLE_WRAP "_Z16THPVariable_WrapRKN2at10TensorBaseE"
#define HAS_CALLBACKS    "_ZN2at12hasCallbacksEv"
#define HAS_AUTOCAST     "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE"
#define AUTOCAST_DTYPE   "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE"
#endif

fa_torch_abi fa_torch;

typedef enum { required, optional } need;

/* Returns 2013 for "2.13". */
static long release_of(const char *text) {
    char *rest;
    const long major = strtol(text, &rest, 10);
    return 1000 * major + (*rest == '.' ? strtol(rest + 1, NULL, 10) : 0);
}

/* Returns a function of the C shim, or NULL. FLASH_ATTN_TORCH_SHIM=2.4 hides the functions that came after 2.4, so that
 * tests with a new torch reach the code for an old torch. */
static void *shim_symbol(void *library, const char *name, const char *since) {
    const char *newest = getenv("FLASH_ATTN_TORCH_SHIM");
    return newest && *newest && release_of(since) > release_of(newest) ? NULL : fa_library_symbol(library, name);
}

fa_status fa_torch_load(fa_error *err) {
    void *library = fa_library_loaded(TORCH_CPU_LIBRARY);
    if (!library)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn needs PyTorch " FA_TORCH_OLDEST
                       " or newer, imported before flash_attn_2_cuda: " TORCH_CPU_LIBRARY " is not loaded");
    fa_torch_abi found = {0};
#define FIND(symbol, since, need_, result, parameters)                                                     \
    {                                                                                                      \
        void *address = shim_symbol(library, #symbol, since);                                              \
        if (!address && need_ == required)                                                                 \
            return fa_fail(err, FA_EUNSUPPORTED,                                                           \
                           "flash_attn needs PyTorch " FA_TORCH_OLDEST                                     \
                           " or newer: the PyTorch that is loaded lacks %s (there since " since ")",       \
                           #symbol);                                                                       \
        memcpy(&found.symbol, &address, sizeof address); /* ISO C has no cast from void * to a function */ \
    }
    FA_TORCH_SYMBOLS(FIND)
#undef FIND
    if (!found.torch_delete_stable_ivalue) {
        void *address = fa_library_symbol(library, OPERATOR_DELETE); /* found among libtorch's dependencies */
        if (!address)
            return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: the C++ runtime of PyTorch has no %s", OPERATOR_DELETE);
        memcpy(&found.operator_delete, &address, sizeof address);
    }
    void *python = fa_library_loaded(TORCH_PYTHON_LIBRARY),
         *wrap = python ? fa_library_symbol(python, THPVARIABLE_WRAP) : NULL;
    memcpy(&found.wrap, &wrap, sizeof wrap);
    found.tells_states = true;
#define FIND_STATE(member, result, name)                  \
    {                                                     \
        void *address = fa_library_symbol(library, name); \
        memcpy(&found.member, &address, sizeof address);  \
        found.tells_states &= address != NULL;            \
    }
    FA_TORCH_STATES(FIND_STATE)
#undef FIND_STATE
    void *has_callbacks = fa_library_symbol(library, HAS_CALLBACKS);
    memcpy(&found.has_record_callbacks, &has_callbacks, sizeof has_callbacks);
    void *has_autocast = fa_library_symbol(library, HAS_AUTOCAST),
         *autocast_dtype = fa_library_symbol(library, AUTOCAST_DTYPE);
    memcpy(&found.is_autocast_enabled, &has_autocast, sizeof has_autocast);
    memcpy(&found.autocast_dtype, &autocast_dtype, sizeof autocast_dtype);
    found.knows_tensors = true;
#define FIND_TENSOR_FUNCTION(member, result, parameter, name) \
    {                                                         \
        void *address = fa_library_symbol(library, name);     \
        memcpy(&found.member, &address, sizeof address);      \
        found.knows_tensors &= address != NULL;               \
    }
    FA_TORCH_TENSOR_FUNCTIONS(FIND_TENSOR_FUNCTION)
#undef FIND_TENSOR_FUNCTION
    found.cpu = found.aoti_torch_device_type_cpu();
    found.cuda = found.aoti_torch_device_type_cuda();
    found.f16 = found.aoti_torch_dtype_float16();
    found.bf16 = found.aoti_torch_dtype_bfloat16();
    found.f32 = found.aoti_torch_dtype_float32();
    found.f64 = found.aoti_torch_dtype_float64();
    found.e4m3 = found.aoti_torch_dtype_float8_e4m3fn();
    found.i32 = found.aoti_torch_dtype_int32();
    found.i64 = found.aoti_torch_dtype_int64();
    found.u8 = found.aoti_torch_dtype_uint8();
    found.u64 = found.aoti_torch_dtype_uint64 ? found.aoti_torch_dtype_uint64() : found.i64;
    fa_torch = found;
    return FA_OK;
}

void *fa_torch_symbol(const char *name) {
    void *library = fa_library_loaded(TORCH_CPU_LIBRARY);
    return library ? fa_library_symbol(library, name) : NULL;
}

void *fa_torch_cuda_symbol(const char *name) {
    void *library = fa_library_loaded(TORCH_CUDA_LIBRARY);
    return library ? fa_library_symbol(library, name) : NULL;
}

fa_status fa_torch_current_stream(int device_idx, void **stream, fa_error *err) {
    typedef AOTITorchError stream_fn(int32_t device_idx, void **stream);
    static stream_fn *_Atomic found;
    stream_fn *current_stream = atomic_load_explicit(&found, memory_order_relaxed);
    if (!current_stream) {
        void *address = fa_torch_cuda_symbol("aoti_torch_get_current_cuda_stream");
        if (!address)
            return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: this PyTorch is built without CUDA: it has no streams");
        memcpy(&current_stream, &address, sizeof address);
        atomic_store_explicit(&found, current_stream, memory_order_relaxed);
    }
    return current_stream(device_idx, stream) == 0
               ? FA_OK
               : fa_fail(err, FA_EFAILED, "flash_attn: PyTorch has no current stream on cuda:%d", device_idx);
}
