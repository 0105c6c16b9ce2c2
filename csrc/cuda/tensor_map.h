/* How TMA sees a tensor, on both sides of a launch. */
#ifndef FA_TENSOR_MAP_H
#define FA_TENSOR_MAP_H

#ifdef __cplusplus
#define FA_ALIGN(bytes) alignas(bytes)
#else
#define FA_ALIGN(bytes) _Alignas(bytes)
#endif

/* A CUtensorMap: how TMA sees a tensor. Opaque, 128 bytes, in the kernel's parameters.
 *
 * All maps have rank 4: (column, row, head, sequence). Dense: row 0 .. len, sequence 0 .. b, as one would expect.
 * Packed: the tensor of T rows is viewed from T rows before its start, and both row and "sequence" step by one row:
 *
 *   row i of the sequence that ends before row e   lies at   (column, T - len + i, head, e)
 *
 * whose address is start - T + (T - len + i) + e = e - len + i. The row's bound is T, so every i >= len lies outside:
 * it reads as zero and is not written, although other sequences' rows are there.
 *
 * A box that is read must begin inside. For one that lies outside as a whole TMA may touch the map's first element, and
 * before a packed tensor there may be no memory: an illegal access, seen or not as memory happens to lie. */
typedef struct {
    FA_ALIGN(64) unsigned long long words[16];
} fa_tensor_map;

#endif
