// Compiles only if each function of our table has the type that torch's own headers give it, and DLPack's structs agree.
#include <cstddef>
#include <type_traits>

#include <ATen/dlpack.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "dlpack.h"
#include "torch_abi.h"

#define SAME_TYPE(symbol, since, need, result, parameters)                                  \
    static_assert(std::is_same<decltype(fa_torch_abi::symbol), decltype(&::symbol)>::value, \
                  #symbol ": csrc/torch_abi.h and the installed torch disagree");
FA_TORCH_SYMBOLS(SAME_TYPE)

static_assert(sizeof(StableIValue) == 8, "a slot of a boxed call has 64 bits");

#define SAME_PLACE(ours, member, theirs, their_member)                                    \
    static_assert(offsetof(ours, member) == offsetof(theirs, their_member) &&             \
                      sizeof(((ours *)0)->member) == sizeof(((theirs *)0)->their_member), \
                  #member ": csrc/dlpack.h and the installed torch disagree")
SAME_PLACE(fa_dl_tensor, data, DLTensor, data);
SAME_PLACE(fa_dl_tensor, device_type, DLTensor, device.device_type);
SAME_PLACE(fa_dl_tensor, device_idx, DLTensor, device.device_id);
SAME_PLACE(fa_dl_tensor, ndim, DLTensor, ndim);
SAME_PLACE(fa_dl_tensor, dtype_code, DLTensor, dtype.code);
SAME_PLACE(fa_dl_tensor, dtype_bits, DLTensor, dtype.bits);
SAME_PLACE(fa_dl_tensor, dtype_lanes, DLTensor, dtype.lanes);
SAME_PLACE(fa_dl_tensor, shape, DLTensor, shape);
SAME_PLACE(fa_dl_tensor, strides, DLTensor, strides);
SAME_PLACE(fa_dl_tensor, byte_offset, DLTensor, byte_offset);
SAME_PLACE(fa_dl_exchange, major, DLPackExchangeAPI, header.version.major);
SAME_PLACE(fa_dl_exchange, from_object, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
static_assert(sizeof(fa_dl_tensor) == sizeof(DLTensor), "we let torch fill in ours");
static_assert(FA_DL_CPU == kDLCPU && FA_DL_CUDA == kDLCUDA, "devices");
static_assert(FA_DL_INT == kDLInt && FA_DL_FLOAT == kDLFloat && FA_DL_BFLOAT == kDLBfloat, "dtypes");
