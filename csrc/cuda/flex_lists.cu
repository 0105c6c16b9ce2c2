/* Lists the blocks of a map that flex_classify.cu made, as ../flex/classify.c lists them: for each row of blocks the
 * places of all blocks of a kind in ascending order, and behind them the places of all other blocks in ascending order.
 * Of the columns the same, if they are wanted. One warp lists one row or column, for both kinds. */
#include "flex_blocks.cuh"

#ifndef KERNEL
#define KERNEL flex_lists
#endif

/* Lists `num` blocks that lie `step` apart. */
DEVICE void list(const unsigned char *kinds, int num, int step, int kind, int *count, int *places) {
    const int lane = (int)(threadIdx.x % 32);
    int listed = 0, rest = 0;
    for (long long first = 0; first < num; first += 32) {
        const long long i = first + lane;
        rest += __popc(__ballot_sync(0xffffffffu, i < num && kinds[i * step] == kind));
    }
    if (lane == 0) *count = rest;
    for (long long first = 0; first < num; first += 32) {
        const long long i = first + lane;
        const bool is_listed = i < num && kinds[i * step] == kind;
        const unsigned all = __ballot_sync(0xffffffffu, is_listed);
        const int before = __popc(all & ((1u << lane) - 1));
        if (i < num) places[is_listed ? listed + before : rest + lane - before] = (int)i;
        listed += __popc(all);
        rest += 32 - __popc(all);
    }
}

extern "C" __global__ void __launch_bounds__(FA_FLEX_CLASSIFY_THREADS) KERNEL(const fa_cuda_flex_lists p) {
    const int warps = (int)blockDim.x / 32;
    const long long lines = (long long)p.rows + (p.partial.num_q ? p.columns : 0);
    for (long long at = (long long)blockIdx.x * warps + threadIdx.x / 32; at < p.heads * lines;
         at += (long long)gridDim.x * warps) {
        const long long head = at / lines, line = at % lines;
        const unsigned char *kinds = p.kinds + head * p.rows * p.columns;
        for (int kind = PARTIAL_BLOCK; kind <= FULL_BLOCK; kind++) {
            const fa_cuda_block_places &l = kind == FULL_BLOCK ? p.full : p.partial;
            const long long row = head * p.rows + line, column = head * p.columns + line - p.rows;
            if (line < p.rows)
                list(kinds + line * p.columns, p.columns, 1, kind, &l.num_kv[row], l.kv + row * p.columns);
            else
                list(kinds + line - p.rows, p.rows, p.columns, kind, &l.num_q[column], l.q + column * p.rows);
        }
    }
}
