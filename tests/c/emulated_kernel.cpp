/* One kernel for emulate_cuda.c: SOURCE names its text, PARAMETERS what it takes, -D its row of tiles.def. */
#define KERNEL kernel
#include SOURCE

extern "C" __attribute__((visibility("default"))) void emulated(const void *parameter) {
    kernel(*(const PARAMETERS *)parameter);
}
