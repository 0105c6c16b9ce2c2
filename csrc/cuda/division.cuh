/* Divisions by a number that the host knows. */
#ifndef FA_DIVISION_CUH
#define FA_DIVISION_CUH

#include "division.h"

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

DEVICE int divide(int x, fa_division by) { return (int)((unsigned long long)(unsigned)x * by.magic >> by.shift); }

#endif
