/* Finds the C shim in the libtorch that `import torch` has loaded. */
#include "torch_abi.h"

#include <string.h>

#if defined(_WIN32)
#include <windows.h>
static void *open_loaded(const char *name) { return (void *)GetModuleHandleA(name); }
static void *find_symbol(void *library, const char *symbol) { return (void *)GetProcAddress((HMODULE)library, symbol); }
#define TORCH_CPU_LIBRARY "torch_cpu.dll"
#define OPERATOR_DELETE   "??3@YAXPEAX@Z"
#else
#include <dlfcn.h>
static void *open_loaded(const char *name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }
static void *find_symbol(void *library, const char *symbol) { return dlsym(library, symbol); }
#if defined(__APPLE__)
#define TORCH_CPU_LIBRARY "libtorch_cpu.dylib"
#else
#define TORCH_CPU_LIBRARY "libtorch_cpu.so"
#endif
#define OPERATOR_DELETE "_ZdlPv"
#endif

fa_torch_abi fa_torch;

typedef enum { required, optional } need;

fa_status fa_torch_load(fa_error *err) {
    void *library = open_loaded(TORCH_CPU_LIBRARY);
    if (!library)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn needs PyTorch " FA_TORCH_OLDEST
                       " or newer, imported before flash_attn_2_cuda: " TORCH_CPU_LIBRARY " is not loaded");
    fa_torch_abi found = {0};
#define FIND(symbol, since, need_, result, parameters)                                                     \
    {                                                                                                      \
        void *address = find_symbol(library, #symbol);                                                     \
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
        void *address = find_symbol(library, OPERATOR_DELETE); /* looked up through libtorch's own dependencies */
        if (!address)
            return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: the C++ runtime of PyTorch has no %s", OPERATOR_DELETE);
        memcpy(&found.operator_delete, &address, sizeof address);
    }
    found.cpu = found.aoti_torch_device_type_cpu();
    found.cuda = found.aoti_torch_device_type_cuda();
    found.f16 = found.aoti_torch_dtype_float16();
    found.bf16 = found.aoti_torch_dtype_bfloat16();
    found.f32 = found.aoti_torch_dtype_float32();
    found.f64 = found.aoti_torch_dtype_float64();
    found.i32 = found.aoti_torch_dtype_int32();
    found.i64 = found.aoti_torch_dtype_int64();
    found.u8 = found.aoti_torch_dtype_uint8();
    fa_torch = found;
    return FA_OK;
}
