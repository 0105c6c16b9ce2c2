/* Divisions by a number that the host knows. */
#ifndef FA_DIVISION_CUH
#define FA_DIVISION_CUH

#include "division.h"
#include "ptx_sm80.cuh"

DEVICE int divide(int x, fa_division by) { return (int)((u64)(u32)x * by.magic >> by.shift); }

#endif
