/* TMA's view of a tensor, on both sides of a launch. */
#ifndef FA_TENSOR_MAP_H
#define FA_TENSOR_MAP_H

#ifdef __cplusplus
#define FA_ALIGN(bytes) alignas(bytes)
#else
#define FA_ALIGN(bytes) _Alignas(bytes)
#endif

/* A CUtensorMap, TMA's view of a tensor. The map is opaque, has 128 bytes, and is part of the kernel's parameters.
 *
 * Most maps have rank 4: (column, row, head, sequence). The map of a dense tensor has rows 0 .. len and sequences 0 ..
 * b. The map of a packed tensor of T rows begins T rows before the tensor. Both its row and its "sequence" step by one
 * row:
 *
 *   row i of the sequence that ends before row e   lies at   (column, T - len + i, head, e)
 *
 * The address of this element is start - T + (T - len + i) + e = e - len + i. The row's bound is T, so every i >= len
 * lies outside. Such a row reads as zero and is not written, although rows of other sequences are there.
 *
 * A box that is loaded must begin inside its map. If the whole box lies outside, TMA may touch the map's first element.
 * Before a packed tensor there may be no memory. The access is then illegal, and shows or not with the memory
 * around.
 *
 * The map of pages of a KV cache whose keys are loaded whole has rank 5: (column of a chunk, key of a group, chunk,
 * group, head). A chunk has 64 columns, and a group 8 keys. Groups count from the first page on, and also over the
 * memory between pages. */
typedef struct {
    FA_ALIGN(64) unsigned long long words[16];
} fa_tensor_map;

#endif
