/* Copies tensors whose rows do not start at multiples of 16 bytes, and copies results back:
 *
 *   tensor [b, rows, h, d]  ->  copy [b, rows, h, d rounded up to a multiple of 8]      or back
 *
 * Rows of such copies are what TMA and cp.async read. Columns that only the copy has become zero: they add nothing to a
 * product. Each tensor has its own blockIdx.y, and a CTA takes some of its rows. A thread moves pieces of 16 bytes of
 * the copy. On the side of the tensor a piece consists of units. A unit is the largest power of 2 that divides all
 * addresses and the bytes of a row.
 *
 * Which limit binds: memory, for units of 8 bytes (3.7 TB/s on an H200). With units of 2 bytes it moves 2 TB/s. What
 * binds there was not profiled.
 *
 * Specification: check_align.c of the tests, element by element. */
#include "align_params.h"
#include "division.cuh"
#include "integers.cuh"

#ifndef KERNEL
#define KERNEL align
#endif

constexpr int PIECES = FA_ALIGN_PIECES, PIECE_BYTES = 16, ELEMENT_BYTES = 2;

template <class unit> union piece {
    uint4 whole;
    unit units[PIECE_BYTES / sizeof(unit)];
    DEVICE piece() : whole{0, 0, 0, 0} {}
};

/* The place of a row of the tensor. */
DEVICE char *row_at(const fa_align_tensor &t, int index) {
    long long element;
    if (t.h == t.num_rows) {
        element = index * t.own.stride_h;
    } else {
        const int row = divide(index, t.by_h), b_idx = divide(row, t.by_rows);
        element =
            b_idx * t.own.stride_b + (row - b_idx * t.rows) * t.own.stride_row + (index - row * t.h) * t.own.stride_h;
    }
    return (char *)t.own.data + ELEMENT_BYTES * element;
}

/* Piece i of the rows from `first` on. */
template <class unit> struct place {
    unit *units;
    int num_units; /* of the tensor, in this piece and behind it */

    DEVICE place(const fa_align_tensor &t, int first, int i) {
        const int row = divide(i, t.by_pieces), unit_idx = (i - row * t.pieces) * (PIECE_BYTES / (int)sizeof(unit));
        units = (unit *)row_at(t, first + row) + unit_idx;
        num_units = t.units - unit_idx;
    }
};

template <class unit> DEVICE void move(const fa_align_tensor &t, bool is_back) {
    constexpr int UNITS = PIECE_BYTES / sizeof(unit);
    const long long first = (long long)blockIdx.x * t.rows_of_cta;
    if (first >= t.num_rows) return;
    const int num = (int)min((long long)t.rows_of_cta, t.num_rows - first) * t.pieces;
    uint4 *const copies = (uint4 *)t.copy + first * t.pieces;
    piece<unit> x[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        const int i = min((int)threadIdx.x + j * FA_ALIGN_THREADS, num - 1);
        if (is_back) {
            x[j].whole = copies[i];
        } else {
            const place<unit> from(t, (int)first, i);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (u < from.num_units) x[j].units[u] = from.units[u];
        }
    }
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        const int i = threadIdx.x + j * FA_ALIGN_THREADS;
        if (i >= num) break;
        if (is_back) {
            const place<unit> to(t, (int)first, i);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (u < to.num_units) to.units[u] = x[j].units[u];
        } else {
            copies[i] = x[j].whole;
        }
    }
}

extern "C" __global__ void __launch_bounds__(FA_ALIGN_THREADS) KERNEL(const __grid_constant__ fa_align_params p) {
    const fa_align_tensor &t = p.tensors[blockIdx.y];
    if (t.unit_bytes == 16)
        move<uint4>(t, p.is_back);
    else if (t.unit_bytes == 8)
        move<uint2>(t, p.is_back);
    else if (t.unit_bytes == 4)
        move<unsigned>(t, p.is_back);
    else
        move<unsigned short>(t, p.is_back);
}
