/* A check of an emulated kernel, whose threads cannot use cmocka: a false condition ends the program. */
#ifndef EXPECT
#include <stdio.h>
#include <stdlib.h>

#define EXPECT(...)                                                                   \
    do {                                                                              \
        if (__VA_ARGS__) break;                                                       \
        fprintf(stderr, "line %d: this does not hold: %s\n", __LINE__, #__VA_ARGS__); \
        abort();                                                                      \
    } while (0)

#endif
