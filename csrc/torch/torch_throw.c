/* Throws c10::OutOfMemoryError out of an op, which becomes torch.OutOfMemoryError.
 *
 * The C shim throws only c10::Error, which becomes RuntimeError. So this file calls functions of the C++ libraries that
 * torch has loaded, and finds these functions and their tables by their mangled names. The mangled names contain the
 * types. If the names are found, the layouts below are those of the Itanium C++ ABI and of libstdc++.
 * tests/guards/abi_types.cpp compares the layouts with torch's. If a name is missing, nothing is thrown. */
#include "torch_throw.h"

#include <stdbool.h>
#include <string.h>

#include "torch_abi.h"

typedef struct {
    void *(*operator_new)(size_t bytes);
    void *(*allocate_exception)(size_t bytes);
    void (*throw_exception)(void *exception, void *type, void *destructor);
    /* c10::Error's constructor gets the location in memory and the message as the address of a temporary. */
    void (*construct)(void *error, fa_cpp_location location, fa_cpp_string *message);
    void *type;       /* std::type_info of c10::OutOfMemoryError */
    void **functions; /* virtual functions of c10::OutOfMemoryError: two words, then the destructor */
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
    /* The string keeps its text on C++'s heap, as for a text that is longer than the string's own buffer. The error's
     * destructor frees the text. */
    fa_cpp_string text = {.length = strlen(message)};
    text.room = text.length > sizeof text.small ? text.length : sizeof text.small;
    text.data = c.operator_new(text.room + 1);
    memcpy(text.data, message, text.length + 1);
    void **error = c.allocate_exception(FA_CPP_ERROR_BYTES);
    /* c10::OutOfMemoryError is a c10::Error with another table of virtual functions. */
    c.construct(error, (fa_cpp_location){function, file, line}, &text);
    *error = c.functions + 2;
    c.throw_exception(error, c.type, c.functions[2]);
}
