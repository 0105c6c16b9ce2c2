/* torch.OutOfMemoryError out of an op. */
#ifndef FA_TORCH_TORCH_THROW_H
#define FA_TORCH_TORCH_THROW_H

#include <stddef.h>
#include <stdint.h>

/* Throws c10::OutOfMemoryError, which becomes torch.OutOfMemoryError. Returns if this torch or this platform lacks what the
 * throw needs. The caller has released everything. */
void fa_torch_throw_out_of_memory(const char *function, const char *file, uint32_t line, const char *message);

/* Types of C++ that the throw hands over: c10::SourceLocation, std::string, and the room for a c10::Error. */
typedef struct {
    const char *function, *file;
    uint32_t line;
} fa_cpp_location;
typedef struct {
    char *data;
    size_t length;
    union {
        char small[16];
        size_t room;
    };
} fa_cpp_string;
#define FA_CPP_ERROR_BYTES 1024

#endif
