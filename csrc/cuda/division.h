/* Divisions by a number that the host knows. C code fills fa_division, and CUDA code reads it (division.cuh). */
#ifndef FA_DIVISION_H
#define FA_DIVISION_H

/* Divides numbers below 2^31. The quotient is x magic >> shift, in 64 bits. */
typedef struct {
    unsigned magic, shift;
} fa_division;

#endif
