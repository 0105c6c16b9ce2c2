/* Work tiles of attn_fwd_sm90.cu that failed and are repeated. Their scores rose further above the row maximum m
 * than floats reach, or a NaN or inf of V came through a P of zero. A warp finds out when the tile ends. The
 * scheduler gives the tile out again. Then FMAs that skip masked keys add up the key tiles that some rows see in
 * part. */
#ifndef FA_ATTN_FWD_REPEATS_CUH
#define FA_ATTN_FWD_REPEATS_CUH

#include "attn_fwd_memory.cuh"
#include "attn_fwd_softmax.cuh"

/* Says whether P, its sum or O left the range of floats, or V held NaN or inf. Then O or the sum stayed inf or NaN,
 * or the sum is huge. Scores so large that c S - c m says little fail, too. An m that is the maximum of some keys
 * is never too large. Whole warp. */
DEVICE bool has_failed(const float (&O)[O_REGS], const online_softmax &softmax) {
    float zeros[4] = {0, 0, 0, 0}; /* These chains of additions do not wait for each other. */
#pragma unroll
    for (int i = 0; i < O_REGS; i++) zeros[i % 4] = fmaf(O[i], 0, zeros[i % 4]);
    const float zero = (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]);
    const float limit = __int_as_float((127 + 96) << 23); /* 2^96 */
    const float most = 1 << 20;
    return __any_sync(0xffffffffu, !(zero == 0 && softmax.sum[0] < limit && softmax.sum[1] < limit &&
                                     fabsf(softmax.max_log2[0]) < most && fabsf(softmax.max_log2[1]) < most));
}

/* The same of one row's sum and m, before O is there. */
DEVICE bool has_failed_row(const online_softmax &softmax, int r) {
    return !(softmax.sum[r] < __int_as_float((127 + 96) << 23) && fabsf(softmax.max_log2[r]) < (1 << 20));
}

/* Notes that a row strip of a work tile failed. One lane of a consumer warp, whose number in the CTA is
 * `consumer_warp`. */
DEVICE void note_failure(shared_memory &smem, int consumer_warp, int tile_idx, int strip) {
    const int num_failed = smem.num_failed[consumer_warp];
    smem.failed[consumer_warp][num_failed % FAILED] = {tile_idx, strip};
    __threadfence_block();
    *(volatile int *)&smem.num_failed[consumer_warp] = num_failed + 1;
}

/* Returns a work tile that consumer warps have noted, or -1. strips gets a bit for each of its row strips that
 * failed. NOTE: other row strips may be noted later. They are repeated then, and every row is stored once. Whole
 * warp: lane l looks at consumer warp l. */
DEVICE int failed_tile(shared_memory &smem, u32 &strips) {
    const int lane = threadIdx.x % 32;
    const bool is_new = lane < 4 * WGS && *(volatile int *)&smem.num_failed[lane] != smem.num_seen[lane];
    const u32 found = __ballot_sync(0xffffffffu, is_new);
    if (!found) return -1;
    int my_tile = -1, my_strip = 0;
    if (is_new) {
        const volatile auto &failed = smem.failed[lane][smem.num_seen[lane] % FAILED];
        my_tile = failed.tile_idx, my_strip = failed.strip;
    }
    const int idx = __shfl_sync(0xffffffffu, my_tile, __ffs(found) - 1);
    if (my_tile == idx) smem.num_seen[lane]++;
    strips = __reduce_or_sync(0xffffffffu, my_tile == idx ? 1u << my_strip : 0);
    return idx;
}

/* The keys of a key tile that a thread's two rows see. first_key is the key tile's first key, and diagonal is that of
 * mask_scores. */
struct seen_keys {
#if FLEX
    u64 scores; /* a bit for each of the thread's registers of S */
    DEVICE seen_keys(const params &p, int len_kv, int first_key, int diagonal, u64 scores) : scores(scores) {}
    /* Which rows see key `key`? Lane `owner` holds its scores. */
    DEVICE void ask(int key, int owner, bool (&sees)[2]) {
        const u32 bits = __shfl_sync(0xffffffffu, (u32)scores, owner) >> (key % 16 / 8 * 4 + key % 2);
        sees[0] = bits & 1, sees[1] = bits >> 2 & 1;
        if (key % 16 == 15) scores >>= 8;
    }
#else
    int begin[2], end[2];
    DEVICE seen_keys(const params &p, int len_kv, int first_key, int diagonal, u64) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const tile_walk keys = keys_of(p, diagonal + 8 * r, diagonal + 8 * r, len_kv);
            begin[r] = keys.begin - first_key, end[r] = keys.end - first_key;
        }
    }
    DEVICE void ask(int key, int owner, bool (&sees)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) sees[r] = begin[r] <= key && key < end[r];
    }
#endif
};

/* O += P V of one key tile by FMAs, for the pairs that see each other. Elsewhere V may hold anything. Each P travels
 * from the lane that holds it to the other three lanes of its row. After 16 keys the registers of P move up. Elements
 * have 16 bits. Whole warp. */
template <class element>
DEVICE void accumulate_seen(float (&O)[O_REGS], u32 (&P)[P_REGS], const element *v_smem, seen_keys seen) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int key = 0; key < BLOCK_KV; key++) {
        const int key_in_16 = key % 16, owner = lane / 4 * 4 + key_in_16 % 8 / 2;
        const int swizzle = (ROW_BYTES == 128 ? key : key / 2) % (ROW_BYTES / 16);
        float weight[2];
        bool sees[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float low, high;
            unpack_x2<element>(__shfl_sync(0xffffffffu, key_in_16 < 8 ? P[r] : P[2 + r], owner), low, high);
            weight[r] = key % 2 ? high : low;
        }
        seen.ask(key, owner, sees);
#pragma unroll
        for (int g = 0; g < D_V / 8; g++) {
            const int chunk = g * 8 / CHUNK, vector = g % (CHUNK / 8) ^ swizzle;
            float v[2];
            unpack_x2<element>(*(const u32 *)(v_smem + place_in_v(key, chunk) + vector * 8 + 2 * (lane % 4)), v[0],
                               v[1]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                O[4 * g + i] = fmaf(weight[row_of(i)], sees[row_of(i)] ? v[i % 2] : 0, O[4 * g + i]);
        }
        if (key_in_16 == 15)
#pragma unroll
            for (int i = 4; i < P_REGS; i++) P[i - 4] = P[i];
    }
    __syncwarp(); /* All lanes have read V. */
}

#endif
