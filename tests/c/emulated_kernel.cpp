/* One kernel for emulate_cuda.c. SOURCE names its text, PARAMETERS names its parameter struct, and -D gives its row of
 * tiles.def. */
#define KERNEL kernel
#include SOURCE

extern "C" __attribute__((visibility("default"))) void emulated(const void *parameter) {
    kernel(*(const PARAMETERS *)parameter);
}
