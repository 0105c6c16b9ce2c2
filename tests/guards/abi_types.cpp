// Compiles only if each function of our table has the type that torch's own headers give it.
#include <type_traits>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "torch_abi.h"

#define SAME_TYPE(symbol, since, need, result, parameters)                                  \
    static_assert(std::is_same<decltype(fa_torch_abi::symbol), decltype(&::symbol)>::value, \
                  #symbol ": csrc/torch_abi.h and the installed torch disagree");
FA_TORCH_SYMBOLS(SAME_TYPE)

static_assert(sizeof(StableIValue) == 8, "a slot of a boxed call has 64 bits");
