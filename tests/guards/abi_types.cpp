// Compiles only if each function of our table has the type of torch's own headers, and DLPack's structs agree.
// With TABLE_ALONE only the table is compared. torch's other headers take most of the time.
#include <cstddef>
#include <type_traits>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "torch/torch_abi.h"

#define SAME_TYPE(symbol, since, need, result, parameters)                                  \
    static_assert(std::is_same<decltype(fa_torch_abi::symbol), decltype(&::symbol)>::value, \
                  #symbol ": csrc/torch/torch_abi.h and the installed torch disagree");
FA_TORCH_SYMBOLS(SAME_TYPE)

#ifndef TABLE_ALONE
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/Tensor.h>
#include <ATen/dlpack.h>
#include <ATen/ops/is_inference_native.h>
#include <ATen/ops/is_neg_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "torch/dlpack.h"
#include "torch/torch_throw.h"

#define SAME_STATE(member, function, ...)                                                             \
    static_assert(std::is_same<decltype(&function), __VA_ARGS__ (*)()>::value,                        \
                  #member ": csrc/torch/torch_abi.h and the installed torch disagree");               \
    static_assert(std::is_reference<__VA_ARGS__>::value                                               \
                      ? std::is_same<decltype(fa_torch_abi::member), const void *const *(*)()>::value \
                      : std::is_same<decltype(fa_torch_abi::member), __VA_ARGS__ (*)()>::value,       \
                  #member ": a reference is a pointer to its words");
SAME_STATE(num_dispatch_modes, c10::impl::TorchDispatchModeTLS::stack_len, int64_t)
SAME_STATE(num_function_modes, at::impl::PythonTorchFunctionTLS::stack_len, int64_t)
SAME_STATE(tracing_state, torch::jit::tracer::getTracingState,
           const std::shared_ptr<torch::jit::tracer::TracingState> &)
SAME_STATE(has_record_callbacks, at::hasCallbacks, bool)

// A tensor is a pointer to its TensorImpl, and a reference to it, or `this`, is a handle.
static_assert(sizeof(at::Tensor) == sizeof(void *) && sizeof(at::TensorBase) == sizeof(void *),
              "a handle's first word");
#define SAME_FUNCTION(function, ...)                                     \
    static_assert(std::is_same<decltype(&function), __VA_ARGS__>::value, \
                  #function ": csrc/torch/torch_abi.h and the installed torch disagree");
SAME_FUNCTION(c10::TensorImpl::requires_grad, bool (c10::TensorImpl::*)() const)
SAME_FUNCTION(at::TensorBase::is_leaf, bool (at::TensorBase::*)() const)
SAME_FUNCTION(at::TensorBase::is_view, bool (at::TensorBase::*)() const)
SAME_FUNCTION(at::TensorBase::_base, const at::TensorBase &(at::TensorBase::*)() const)
SAME_FUNCTION(at::native::is_inference, bool (*)(const at::Tensor &))
SAME_FUNCTION(at::native::is_neg, bool (*)(const at::Tensor &))
SAME_FUNCTION(torch::autograd::impl::bump_version, void (*)(const at::Tensor &))

static_assert(sizeof(fa_cpp_location) == sizeof(c10::SourceLocation) && sizeof(fa_cpp_location) > 16 &&
                  std::is_trivially_copyable<c10::SourceLocation>::value,
              "a location is passed in memory");
static_assert(sizeof(fa_cpp_string) == sizeof(std::string), "csrc/torch/torch_throw.c makes a std::string");
static_assert(sizeof(c10::Error) <= FA_CPP_ERROR_BYTES && sizeof(c10::OutOfMemoryError) == sizeof(c10::Error) &&
                  std::is_base_of<c10::Error, c10::OutOfMemoryError>::value,
              "csrc/torch/torch_throw.c makes a c10::OutOfMemoryError of a c10::Error");

static_assert(sizeof(StableIValue) == 8, "a slot of a boxed call has 64 bits");

#define SAME_PLACE(ours, member, theirs, their_member)                                    \
    static_assert(offsetof(ours, member) == offsetof(theirs, their_member) &&             \
                      sizeof(((ours *)0)->member) == sizeof(((theirs *)0)->their_member), \
                  #member ": csrc/torch/dlpack.h and the installed torch disagree")
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
static_assert(FA_DL_INT == kDLInt && FA_DL_FLOAT == kDLFloat && FA_DL_BFLOAT == kDLBfloat &&
                  FA_DL_E4M3 == kDLFloat8_e4m3fn,
              "dtypes");
#endif
