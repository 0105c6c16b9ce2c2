/* This file has the arithmetic of tiles. */
#ifndef FA_INTEGERS_CUH
#define FA_INTEGERS_CUH

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

DEVICE int ceil_div(int x, int y) { return (x + y - 1) / y; }
DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

#endif
