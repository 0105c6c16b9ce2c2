/* torch.OutOfMemoryError out of an op: c10::OutOfMemoryError, thrown.
 *
 * The C shim throws nothing but c10::Error, which becomes RuntimeError. All that is missing are functions and tables of C++
 * libraries that torch has loaded, found by their mangled names. Those names say the types: where they are found, the
 * layouts below are those of the Itanium C++ ABI and of libstdc++, and tests/guards/abi_types.cpp compares them with
 * torch's. Elsewhere nothing is thrown here. */
#include "torch_throw.h"

#include <stdbool.h>
#include <string.h>

#include "torch_abi.h"

typedef struct {
    void *(*operator_new)(size_t bytes);
    void *(*allocate_exception)(size_t bytes);
    void (*throw_exception)(void *exception, void *type, void *destructor);
    /* c10::Error's constructor: the location comes in memory, the message as the address of a temporary */
    void (*construct)(void *error, fa_cpp_location location, fa_cpp_string *message);
    void *type;       /* std::type_info of c10::OutOfMemoryError */
    void **functions; /* its table of virtual functions: two words, then the destructor */
} cpp;

static bool find_all(cpp *found) {
    const struct {
        const char *name;
        void *place;
    } symbols[] = {
        {"_Znwm", &found->operator_new},
        {"__cxa_allocate_exception", &found->allocate_exception},
        {"__cxa_throw", &found->throw_exception},
        {"_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE", &found->construct},
        {"_ZTIN3c1016OutOfMemoryErrorE", &found->type},
        {"_ZTVN3c1016OutOfMemoryErrorE", &found->functions},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = fa_torch_symbol(symbols[i].name);
        if (!address) return false;
        memcpy(symbols[i].place, &address, sizeof address);
    }
    return true;
}

void fa_torch_throw_out_of_memory(const char *function, const char *file, uint32_t line, const char *message) {
    cpp c;
    if (!find_all(&c)) return;
    /* a message longer than a string holds itself: on C++'s heap, where the error's destructor frees it */
    fa_cpp_string text = {.length = strlen(message)};
    text.room = text.length > sizeof text.small ? text.length : sizeof text.small;
    text.data = c.operator_new(text.room + 1);
    memcpy(text.data, message, text.length + 1);
    void **error = c.allocate_exception(FA_CPP_ERROR_BYTES);
    /* c10::OutOfMemoryError is a c10::Error with another table of virtual functions */
    c.construct(error, (fa_cpp_location){function, file, line}, &text);
    *error = c.functions + 2;
    c.throw_exception(error, c.type, c.functions[2]);
}
