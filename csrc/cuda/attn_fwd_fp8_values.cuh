/* V of attn_fwd_fp8_sm90.cu. wgmma wants V of 8 bits K-major: the keys of one column lie side by side. TMA brings rows
 * of columns. Transposer warps, two warps beside the producer, make the operand V^T of each key tile.
 *
 * A unit of work is 32 keys and 16 columns. ldmatrix transposes pairs of bytes. Lane l has p = l / 4 and q = l % 4. It
 * holds columns 2 p and 2 p + 1 of keys 2 q and 2 q + 1. A second matrix holds the same of keys 8 + 2 q and 9 + 2 q.
 * prmt parts even columns from odd columns. stmatrix stores them as rows of V^T:
 *
 *   keys      Bytes 4 q .. 4 q + 3 of each 16 bytes belong to keys 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q. A lane of S = Q K^T
 *             holds the same keys. So the registers of S become P as an operand, without a shuffle.
 *   columns   Row 16 c + 8 (i % 2) + 2 (p % 4) + p / 4 of V^T is column 16 c + i, with p = i / 2. The eight rows of a
 *             stmatrix lie in different banks. `order_columns` renames the registers of O accordingly. */
#ifndef FA_ATTN_FWD_FP8_VALUES_CUH
#define FA_ATTN_FWD_FP8_VALUES_CUH

#include "attn_fwd_memory.cuh"
#include "attn_fwd_softmax.cuh"

/* A row of V^T consists of chunks of so many keys. Each chunk has all rows, D_V of them, swizzled like other operands.
 */
constexpr int KEY_CHUNK = BLOCK_KV % 128 == 0 ? 128 : BLOCK_KV % 64 == 0 ? 64 : 32;
static_assert(BLOCK_KV % KEY_CHUNK == 0 && D_V % 16 == 0, "V^T consists of whole chunks, and of units of 16 columns");

/* The 16-byte vector of a swizzled row. */
template <int BYTES> DEVICE constexpr int swizzled(int vector, int row) {
    return vector ^ row / (128 / BYTES) % (BYTES / 16);
}

/* The byte of V^T that holds `key` in row `row`. */
DEVICE int transposed_byte(int row, int key) {
    const int in_chunk = key % KEY_CHUNK, in_16 = key % 16;
    return (key / KEY_CHUNK * D_V + row) * KEY_CHUNK + swizzled<KEY_CHUNK>(in_chunk / 16, row) * 16 +
           4 * (in_16 % 8 / 2) + 2 * (in_16 / 8) + in_16 % 2;
}

/* ---- transposer warps ------------------------------------------------------------------------------------------ */

/* One transposer warp, number `idx` of TRANSPOSERS. It transposes every TRANSPOSERS-th group of 16 columns of each key
 * tile. */
struct transposer {
    shared_memory &smem;
    const bool arrives;        /* The lane arrives at mbarriers. */
    u32 lane_load, lane_store; /* where this lane's row of the warp's first unit lies in V and in V^T */

    static constexpr int COLUMN_UNITS = D_V / 16 / TRANSPOSERS, KEY_UNITS = BLOCK_KV / 32;
    static constexpr int UNITS = COLUMN_UNITS * KEY_UNITS;
    static constexpr int AHEAD = 2; /* So many units are loaded before one is stored. */
    static_assert(D_V % (16 * TRANSPOSERS) == 0 && UNITS >= AHEAD, "each warp takes the same number of units");

    DEVICE transposer(shared_memory &smem, int idx) : smem(smem), arrives(arrives_for_warp(threadIdx.x % 32)) {
        const int lane = threadIdx.x % 32, column = 16 * idx; /* the first unit's */
        lane_load = lane * ROW_BYTES + swizzled<ROW_BYTES>(column / 16, lane) * 16;
        /* Matrix m of stmatrix has even or odd columns by m % 2, and keys of 16 by m / 2. */
        const int m = lane / 8, p = lane % 8, row = 8 * (m % 2) + 2 * (p % 4) + p / 4;
        lane_store = (column + row) * KEY_CHUNK + swizzled<KEY_CHUNK>(m / 2, row) * 16;
    }

    /* Unit i has 16 columns and 32 keys, counted from the first unit's. NOTE: within a chunk, the first unit and these
     * distances have no bit in common. So the swizzle of the sum is the xor of both. */
    DEVICE u32 load_address(u32 raw, int i) const {
        const int column = i / KEY_UNITS * 16 * TRANSPOSERS, key = i % KEY_UNITS * 32;
        return (raw ^ column % CHUNK) + (column / CHUNK * BLOCK_KV + key) * ROW_BYTES;
    }
    DEVICE u32 store_address(u32 v, int i) const {
        const int column = i / KEY_UNITS * 16 * TRANSPOSERS, key = i % KEY_UNITS * 32;
        return (v ^ key % KEY_CHUNK) + (key / KEY_CHUNK * D_V + column) * KEY_CHUNK;
    }

    /* NOTE: addresses are computed where they are used. Kept in registers, they would leave too few for the loads. */
    DEVICE void load(u32 (&m)[4], u32 raw, int i) const {
        int address = raw;
        pin(address);
        ldmatrix_x4_trans(m, load_address(address, i));
    }
    DEVICE void store(const u32 (&m)[4], u32 v, int i) const {
        int address = v;
        pin(address);
        stmatrix_x4(store_address(address, i), prmt(m[0], m[1], 0x6420), prmt(m[0], m[1], 0x7531),
                    prmt(m[2], m[3], 0x6420), prmt(m[2], m[3], 0x7531));
    }
    DEVICE void transpose(u32 raw, u32 v) const {
        u32 m[AHEAD + 1][4];
        raw += lane_load, v += lane_store;
#pragma unroll
        for (int i = 0; i < UNITS + AHEAD; i++) {
            if (i < UNITS) load(m[i % (AHEAD + 1)], raw, i);
            if (i >= AHEAD) store(m[(i - AHEAD) % (AHEAD + 1)], v, i - AHEAD);
        }
    }

    DEVICE void run() {
        ring<V_LOAD_STAGES> from;
        ring<V_STAGES> to;
        for (;;) {
            /* Rings of the same size are one ring, which spares registers. */
            const int from_stage = from.stage, to_stage = V_LOAD_STAGES == V_STAGES ? from.stage : to.stage;
            const u32 from_parity = from.parity, to_parity = V_LOAD_STAGES == V_STAGES ? from.parity : to.parity;
            mbarrier_wait(&smem.raw_full[from_stage], from_parity);
            if (smem.is_end[from_stage]) break;
            mbarrier_wait(&smem.v_empty[to_stage], to_parity ^ 1);
            transpose(smem_address(smem.raw_v[from_stage]), smem_address(smem.v[to_stage]));
            fence_proxy_async();
            __syncwarp();
            if (arrives) mbarrier_arrive(&smem.raw_empty[from_stage]), mbarrier_arrive(&smem.v_full[to_stage]);
            from.next(), to.next();
        }
    }
};

/* One thread: the mbarriers of V before its transposition. */
DEVICE void init_value_barriers(shared_memory &smem) {
    for (int i = 0; i < V_LOAD_STAGES; i++)
        mbarrier_init(&smem.raw_full[i], 1), mbarrier_init(&smem.raw_empty[i], of_warps(TRANSPOSERS)),
            smem.is_end[i] = 0;
}

/* The producer's thread, after its last load: `next` is the stage that V would come to. */
DEVICE void end_values(shared_memory &smem, ring<V_LOAD_STAGES> next) {
    mbarrier_wait(&smem.raw_empty[next.stage], next.parity ^ 1);
    smem.is_end[next.stage] = 1;
    mbarrier_arrive(&smem.raw_full[next.stage]);
}

/* ---- P and O ---------------------------------------------------------------------------------------------------- */

/* P in 8 bits. Four registers are an operand of 64 rows and 32 keys. */
DEVICE void round_to_bytes(const float (&S)[S_REGS], u32 (&P)[P_REGS]) {
#pragma unroll
    for (int i = 0; i < P_REGS; i++) {
        const float *x = S + i / 2 * 8 + i % 2 * 2; /* register i has row i % 2 of the thread, and 16 keys' share */
        P[i] = cvt_e4m3_x4(x[0], x[1], x[4], x[5]);
    }
}

/* Puts the columns of O in the order of other kernels. */
DEVICE void order_columns(float (&O)[O_REGS]) {
#pragma unroll
    for (int i = 0; i < O_REGS; i += 8)
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
            const float x = O[i + r + 1];
            O[i + r + 1] = O[i + r + 4], O[i + r + 4] = x;
        }
}

/* O += P V of one key tile by FMAs, for the pairs that see each other. Elsewhere V may hold NaN. first_key is the key
 * tile's first key, and diagonal is that of mask_scores. Each P travels from the lane that holds it to the other three
 * lanes of its row. After 32 keys the registers of P move up. Whole warp. */
DEVICE void accumulate_seen_bytes(float (&O)[O_REGS], u32 (&P)[P_REGS], const element *v_smem, const params &p,
                                  int len_kv, int first_key, int diagonal) {
    const int lane = threadIdx.x % 32;
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const tile_walk keys = keys_of(p, diagonal + 8 * r, diagonal + 8 * r, len_kv);
        begin[r] = keys.begin - first_key, end[r] = keys.end - first_key;
    }
#pragma unroll 1
    for (int key = 0; key < BLOCK_KV; key++) {
        const int in_16 = key % 16, owner = lane / 4 * 4 + in_16 % 8 / 2, byte = 2 * (in_16 / 8) + in_16 % 2;
        float weight[2];
        bool sees[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 four = __shfl_sync(0xffffffffu, key % 32 < 16 ? P[r] : P[2 + r], owner);
            weight[r] = cvt_f32_e4m3(four >> 8 * byte);
            sees[r] = begin[r] <= key && key < end[r];
        }
#pragma unroll
        for (int i = 0; i < O_REGS; i++) {
            const int row = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
            const float v = cvt_f32_e4m3(v_smem[transposed_byte(row, key)].bits);
            if (sees[row_of(i)]) O[i] = fmaf(weight[row_of(i)], v, O[i]);
        }
        if (key % 32 == 31)
#pragma unroll
            for (int i = 4; i < P_REGS; i++) P[i - 4] = P[i];
    }
    __syncwarp(); /* All lanes have read V. */
}

#endif
