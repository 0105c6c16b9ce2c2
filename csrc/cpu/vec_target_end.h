/* This header is the last line of a source file that set VEC_TARGET. */
#if defined(__clang__) && defined(VEC_TARGET)
#pragma clang attribute pop
#endif
