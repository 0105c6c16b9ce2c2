/* What a score_mod reads of each pair of a query and a key, such as a bias, in shared memory: 16 bits that no other
 * pair reads (FLEX_OCTETS, ../flex/source.h). A warp copies the elements of its own rows and keys, in vectors of 8
 * keys, and reads them by ldmatrix. So no other warp waits for them.
 *
 * A lane that loaded the elements of its own scores would take 2 or 4 bytes from each of many places, and a warp's load
 * would touch 4 or 8 rows. */
#ifndef FA_PAIR_OCTETS_CUH
#define FA_PAIR_OCTETS_CUH

#include "flex.cuh"
#include "ptx_sm80.cuh"

/* The elements of ROWS query rows and 8 VECTORS keys of a warp. */
template <int ROWS, int VECTORS> struct pair_octets {
    static_assert(VECTORS == 2 || VECTORS % 4 == 0, "the swizzle");

    /* Returns the place of a vector, in bytes. The vectors of a row are swizzled: those of 8 rows at the same keys lie
     * in different banks. */
    static DEVICE constexpr u32 place_of(int row, int vector) {
        const int swizzle = VECTORS % 8 == 0 ? row % 8 : VECTORS % 4 == 0 ? row / 2 % 4 : row / 4 % 2;
        return 16 * (row * VECTORS + (vector ^ swizzle));
    }

    /* Asks for the elements of queries [row, row + ROWS) and of keys from `key` on, a multiple of 8, if `asks` is true.
     * They go to `to`. Keys from len_kv on get zeros. Whole warp. */
    static DEVICE void ask(u32 to, const mod_functions &mod, int row, int key, int len_kv, bool asks) {
        const int last = (len_kv - 1) / 8 * 8; /* so that the place of keys behind the end is aligned, too */
        __syncwarp();                          /* All lanes have read what lies there. */
#pragma unroll
        for (int i = threadIdx.x % 32; i < ROWS * VECTORS; i += 32) {
            const int r = i / VECTORS, vector = i % VECTORS, j = key + 8 * vector;
            cp_async_16_if(asks, to + place_of(r, vector), mod.pair_place(row + r, clamp(j, 0, last)), j < len_kv);
        }
        cp_async_commit_group();
    }

    /* Waits for what has been asked for. Whole warp. */
    static DEVICE void wait() {
        cp_async_wait_group<0>();
        __syncwarp();
    }
};

#endif
