/* The compiler translates all code after this header, up to the end of the file, for VEC_TARGET. gcc and clang
 * spell the target differently, and clang needs "vec_target_end.h" as the last line. The build passes no -m flags, so
 * that one binary runs everywhere. */
#ifndef FA_CPU_VEC_TARGET_H
#define FA_CPU_VEC_TARGET_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "macros.h"

#if FA_NEON
#include <arm_neon.h>
#endif

#ifdef VEC_TARGET
#define VEC_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define VEC_PUSH(isa) VEC_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#if FA_X86
#include <immintrin.h>
#endif
VEC_PUSH(VEC_TARGET)
#else
#define VEC_PUSH(isa) VEC_PRAGMA(GCC target(isa))
VEC_PUSH(VEC_TARGET)
#if FA_X86
#include <immintrin.h>
#endif
#endif
#endif

#endif
