/* The functions of the CUDA driver that we call, as a table.
 *
 * Nothing is linked. The table is filled from libcuda.so.1 at first use. Without a driver or a GPU everything else
 * keeps working, and the error message names what is missing. Work runs in the primary context of a device. PyTorch
 * uses the same context. */
#ifndef FA_GPU_DRIVER_H
#define FA_GPU_DRIVER_H

#include "flash_attn.h"

/* ---- the driver --------------------------------------------------------------------------------------------- */

typedef int CUresult; /* 0: success */
enum { CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2 };
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUfunc_st *CUfunction;
typedef struct CUlib_st *CUlibrary;
typedef struct CUgraph_st *CUgraph;
/* An object that CUDA graphs keep. When no graph keeps the object any more, the driver calls the object's function. */
typedef struct CUuserObject_st *CUuserObject;
/* A kernel without a context. Launched as a CUfunction, the kernel runs in the current context. */
typedef struct CUkern_st *CUkernel;

enum {
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1, /* static shared memory */
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    CU_TENSOR_MAP_SWIZZLE_64B = 2,
    CU_TENSOR_MAP_SWIZZLE_128B = 3,
    CU_TENSOR_MAP_L2_PROMOTION_128B = 2,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1,
    CU_GRAPH_USER_OBJECT_MOVE = 1,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
};

typedef struct {
    int id;
    int padding;
    int value[16]; /* cluster dimension: x, y, z; programmatic stream serialization: 1 allows overlap */
} CUlaunchAttribute;

typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned num_attributes;
} CUlaunchConfig;

#define FA_OLDEST_DRIVER      12030 /* CUDA 12.3 */
#define FA_OLDEST_DRIVER_NAME "12.3"

/* X(symbol, parameters). Every function returns a CUresult. */
#define FA_DRIVER_SYMBOLS(X)                                                                                    \
    X(cuInit, (unsigned flags))                                                                                 \
    X(cuDriverGetVersion, (int *version))                                                                       \
    X(cuGetErrorName, (CUresult error, const char **name))                                                      \
    X(cuGetErrorString, (CUresult error, const char **text))                                                    \
    X(cuDeviceGet, (CUdevice * device, int ordinal))                                                            \
    X(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                                       \
    X(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                                         \
    X(cuCtxGetCurrent, (CUcontext * context))                                                                   \
    X(cuCtxPushCurrent_v2, (CUcontext context))                                                                 \
    X(cuCtxPopCurrent_v2, (CUcontext * context))                                                                \
    X(cuLibraryLoadData, (CUlibrary * library, const void *image, int *jit_options, void **jit_values,          \
                          unsigned num_jit, int *options, void **values, unsigned num))                         \
    X(cuLibraryUnload, (CUlibrary library))                                                                     \
    X(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name))                             \
    X(cuKernelSetAttribute, (int attribute, int value, CUkernel kernel, CUdevice device))                       \
    X(cuKernelGetFunction, (CUfunction * function, CUkernel kernel))                                            \
    X(cuKernelGetAttribute, (int *value, int attribute, CUkernel kernel, CUdevice device))                      \
    X(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra))   \
    X(cuStreamIsCapturing, (CUstream stream, int *status))                                                      \
    X(cuStreamGetCaptureInfo_v3, (CUstream stream, int *status, uint64_t *id, CUgraph *graph,                   \
                                  const void **dependencies, const void **edges, size_t *num_dependencies))     \
    X(cuUserObjectCreate,                                                                                       \
      (CUuserObject * object, void *value, void (*destroy)(void *), unsigned references, unsigned flags))       \
    X(cuUserObjectRelease, (CUuserObject object, unsigned references))                                          \
    X(cuGraphRetainUserObject, (CUgraph graph, CUuserObject object, unsigned references, unsigned flags))       \
    X(cuStreamSynchronize, (CUstream stream))                                                                   \
    X(cuThreadExchangeStreamCaptureMode, (int *mode))                                                           \
    X(cuMemGetInfo_v2, (size_t *free_bytes, size_t *bytes))                                                     \
    X(cuMemsetD32Async, (uint64_t to, uint32_t value, size_t num, CUstream stream))                             \
    X(cuMemsetD2D8Async,                                                                                        \
      (uint64_t to, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream))           \
    X(cuMemcpyDtoDAsync_v2, (uint64_t to, uint64_t from, size_t bytes, CUstream stream))                        \
    X(cuMemcpyDtoHAsync_v2, (void *to, uint64_t from, size_t bytes, CUstream stream))                           \
    X(cuTensorMapEncodeTiled,                                                                                   \
      (void *map, int data_type, unsigned rank, void *base, const uint64_t *size, const uint64_t *stride_bytes, \
       const uint32_t *box, const uint32_t *element_stride, int interleave, int swizzle, int l2_promotion, int fill))

typedef struct {
#define FA_DRIVER_MEMBER(symbol, parameters) CUresult(*symbol) parameters;
    FA_DRIVER_SYMBOLS(FA_DRIVER_MEMBER)
#undef FA_DRIVER_MEMBER
} fa_driver;

/* One GPU. The driver is asked once. */
typedef struct {
    CUdevice device;
    CUcontext context; /* the primary context, retained for the life of the process */
    int capability;    /* 90: compute capability 9.0 */
    int num_sms;
    bool is_imagined; /* no such GPU need be here; see fa_gpu_imagine */
} fa_gpu;

#define FA_MAX_GPUS 64

/* These functions return the initialised driver and a GPU by PyTorch's index. Neither changes once found. Any thread
 * may call the functions. */
fa_status fa_driver_get(const fa_driver **driver, fa_error *err);
fa_status fa_gpu_get(int device_idx, const fa_gpu **gpu, fa_error *err);

/* From now on this thread's calls are those of a GPU that need not be here, until the capability is 0. fa_gpu_get
 * returns this GPU for every index, and fa_driver_get a driver whose functions do nothing. A kernel that a call would
 * load is compiled instead (kernels.h). fa_gpu_imagined returns NULL if the thread's calls are real. */
void fa_gpu_imagine(int capability, int num_sms);
const fa_gpu *fa_gpu_imagined(void);

/* Turns the driver's result into a status. The message names the attempt, and repeats the driver's name and text of the
 * error. FA_ENOMEM_GPU means that the GPU's memory is full. */
fa_status fa_driver_check(CUresult result, const char *attempt, fa_error *err);

/* Between the two calls the GPU's primary context is current. */
typedef struct {
    bool pushed;
} fa_context_guard;
fa_status fa_context_enter(const fa_gpu *gpu, fa_context_guard *guard, fa_error *err);
void fa_context_leave(const fa_context_guard *guard);

#endif
