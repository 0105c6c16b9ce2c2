/* The types of a tensor's elements, with what kernels and wrappers of instructions ask of a type. Kernels use
 * `element`. The constants F32 and BF16 choose it, here alone. A wrapper takes the type as its template parameter and
 * has a specialisation for each type that its instruction knows. A new type is a new struct here, and its
 * specialisations. */
#ifndef FA_ELEMENT_CUH
#define FA_ELEMENT_CUH

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

/* BYTES             of an element
 * output            the type of O, dQ, dK and dV
 * factor            the type that the generic kernels multiply and keep in shared memory; it holds the type exactly
 * product           a float type that holds the product of two elements exactly
 * ON_TENSOR_CORES   mma and wgmma multiply the type; FMAs multiply other types
 * EXPONENTS, EXPONENT_ONES, SIGNS
 *                   of the elements of a 32-bit word: all bits of the exponent, the smallest normal number, the sign
 *
 * For the types of mma and wgmma, the range of P in the online softmax:
 *
 * HEADROOM          The largest P of a row is 2^-HEADROOM. So sums over 2^HEADROOM values of V as large as bf16's stay
 *                   floats.
 * MAX_P_LOG2        Where a P would exceed 2^MAX_P_LOG2, the lagging maximum rises. So the type can hold P, and floats
 *                   its sums.
 * HAS_RANGE_OF_FP32 The type can hold every P that is a float. */

struct bf16 {
    unsigned short bits;

    typedef bf16 output, factor;
    typedef float product;
    static constexpr int BYTES = 2;
    static constexpr bool ON_TENSOR_CORES = true;
    static constexpr unsigned EXPONENTS = 0x7f807f80, EXPONENT_ONES = 0x00800080, SIGNS = 0x80008000;
    static constexpr float HEADROOM = 24;
    static constexpr int MAX_P_LOG2 = 64;
    static constexpr bool HAS_RANGE_OF_FP32 = true;
};

struct fp16 {
    unsigned short bits;

    typedef fp16 output, factor;
    typedef float product;
    static constexpr int BYTES = 2;
    static constexpr bool ON_TENSOR_CORES = true;
    static constexpr unsigned EXPONENTS = 0x7c007c00, EXPONENT_ONES = 0x04000400, SIGNS = 0x80008000;
    static constexpr float HEADROOM = 0;
    static constexpr int MAX_P_LOG2 = 8;
    static constexpr bool HAS_RANGE_OF_FP32 = false;
};

/* float8_e4m3fn: no inf, and NaN is 0x7f or 0xff. A row's largest P is near 2^7, so that P has three digits down to
 * 2^-13 of it. P_LIMIT is the largest number. */
struct e4m3 {
    unsigned char bits;

    typedef bf16 output;
    typedef fp16 factor;
    typedef float product;
    static constexpr int BYTES = 1;
    static constexpr bool ON_TENSOR_CORES = true;
    static constexpr float HEADROOM = -7;
    static constexpr int MAX_P_LOG2 = 64;
    static constexpr bool HAS_RANGE_OF_FP32 = false;
    static constexpr float P_LIMIT = 448;
};

/* Of the generic kernels. */
struct fp32 {
    float value;

    typedef fp32 output, factor;
    typedef double product;
    static constexpr int BYTES = 4;
    static constexpr bool ON_TENSOR_CORES = false;
    static constexpr float HEADROOM = 0; /* lse has the digits of sums near 1 */
    static constexpr unsigned EXPONENTS = 0x7f800000, EXPONENT_ONES = 0x00800000, SIGNS = 0x80000000;
};

#if !defined(BF16) && !defined(E4M3)
#error "dtype: BF16, or fp16 without: 0 or 1; F32 or E4M3 instead in the generic kernels; E4M3 in the kernels of 8 bits"
#endif

#if defined(E4M3) && E4M3
using element = e4m3;
#elif defined(F32) && F32
using element = fp32;
#elif BF16
using element = bf16;
#else
using element = fp16;
#endif

/* Has bits of T::SIGNS where the word holds a NaN or an infinite element of type T. In those elements all bits of the
 * exponent are set, and adding its lowest bit carries into the sign. */
template <class T> DEVICE unsigned nan_or_inf_signs(unsigned word) { return (word & T::EXPONENTS) + T::EXPONENT_ONES; }
template <class T> DEVICE unsigned nan_or_inf_signs(uint4 x) {
    return nan_or_inf_signs<T>(x.x) | nan_or_inf_signs<T>(x.y) | nan_or_inf_signs<T>(x.z) | nan_or_inf_signs<T>(x.w);
}

static_assert(sizeof(element) == element::BYTES, "an array of elements lies as the tensor does");

#endif
