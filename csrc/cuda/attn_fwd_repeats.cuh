/* Tiles of attn_fwd_sm90.cu that are done again: whose scores rose further above their anchor than floats reach, or to
 * which NaN or inf in V came through a P of zero. A warp finds out when the tile ends, the finder gives it out again,
 * and then partly seen keys are added up by FMAs that skip what is masked. */
#ifndef FA_ATTN_FWD_REPEATS_CUH
#define FA_ATTN_FWD_REPEATS_CUH

#include "attn_fwd_memory.cuh"
#include "attn_fwd_softmax.cuh"

/* Did P, its sum or O leave the range of floats, or V hold NaN or inf? Then O or the sum stayed inf or NaN, or the sum is
 * huge. Or are scores so large that c S - c m says little? An m that is the maximum of some keys is never too large.
 * Whole warp. */
DEVICE bool has_failed(const float (&o)[O_REGS], const softmax_rows &rows) {
    float zeros[4] = {0, 0, 0, 0}; /* chains of additions that do not wait for each other */
#pragma unroll
    for (int i = 0; i < O_REGS; i++) zeros[i % 4] = fmaf(o[i], 0, zeros[i % 4]);
    const float zero = (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]);
    const float limit = __int_as_float((127 + 96) << 23); /* 2^96 */
    const float most = 1 << 20;
    return __any_sync(0xffffffffu, !(zero == 0 && rows.sum[0] < limit && rows.sum[1] < limit &&
                                     fabsf(rows.max_log2[0]) < most && fabsf(rows.max_log2[1]) < most));
}

/* A tile that consumer warps have found to fail, or -1, and a bit for each 16 of its rows that did. NOTE: others of its
 * rows may be found later. They are done again then; every row is stored once. Whole warp: lane l looks at consumer warp
 * l. */
DEVICE int failed_tile(shared_memory &s, u32 &rows) {
    const int lane = threadIdx.x % 32;
    const bool is_new = lane < 4 * WGS && *(volatile int *)&s.num_failed[lane] != s.num_seen[lane];
    const u32 found = __ballot_sync(0xffffffffu, is_new);
    if (!found) return -1;
    int mine = -1, my_rows = 0;
    if (is_new) {
        const volatile auto &failed = s.failed[lane][s.num_seen[lane] % FAILED];
        mine = failed.tile, my_rows = failed.rows;
    }
    const int idx = __shfl_sync(0xffffffffu, mine, __ffs(found) - 1);
    if (mine == idx) s.num_seen[lane]++;
    rows = __reduce_or_sync(0xffffffffu, mine == idx ? 1u << my_rows : 0);
    return idx;
}

/* O += P V of one key tile by FMAs, for the pairs that see each other: V may hold anything elsewhere. first_key: the
 * tile's first key; diagonal as in mask_scores. P travels from the lane that holds it to the other three of its rows, and
 * moves up by 16 keys a turn. Whole warp. */
DEVICE void accumulate_seen(float (&o)[O_REGS], u32 (&probs)[P_REGS], const u16 *v_smem, const params &p, int len_kv,
                            int first_key, int diagonal) {
    const int lane = threadIdx.x % 32;
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        begin[r] = keys_begin(p, diagonal + 8 * r) - first_key;
        end[r] = keys_end(p, diagonal + 8 * r, len_kv) - first_key;
    }
#pragma unroll 1
    for (int key = 0; key < BLOCK_KV; key++) {
        const int in_step = key % 16, owner = lane / 4 * 4 + in_step % 8 / 2;
        const int swizzle = (ROW_BYTES == 128 ? key : key / 2) % (ROW_BYTES / 16);
        float weight[2];
        bool sees[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float low, high;
            unpack_x2<BF16>(__shfl_sync(0xffffffffu, in_step < 8 ? probs[r] : probs[2 + r], owner), low, high);
            weight[r] = key % 2 ? high : low;
            sees[r] = begin[r] <= key && key < end[r];
        }
#pragma unroll
        for (int g = 0; g < HEAD_DIM / 8; g++) {
            const int chunk = g * 8 / CHUNK, piece = g % (CHUNK / 8) ^ swizzle;
            float v[2];
            unpack_x2<BF16>(*(const u32 *)(v_smem + (chunk * BLOCK_KV + key) * CHUNK + piece * 8 + 2 * (lane % 4)),
                            v[0], v[1]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                o[4 * g + i] = fmaf(weight[row_of(i)], sees[row_of(i)] ? v[i % 2] : 0, o[4 * g + i]);
        }
        if (in_step == 15)
#pragma unroll
            for (int i = 4; i < P_REGS; i++) probs[i - 4] = probs[i];
    }
    __syncwarp(); /* all lanes have read V */
}

#endif
