/* Attention forward on Hopper:  O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row.
 *
 *   q [b, len_q, h, d]    k, v [b, len_kv, h_kv, d]    o like q    lse [b, h, len_q] float
 *
 * One CTA per SM stays for the whole launch. It takes tiles of BLOCK_Q rows of one head, one after the other, and walks
 * over their keys from the last tile to the first. One warp feeds, WGS warpgroups of 64 rows each compute:
 *
 *   producer warp --q_full[s]--> warpgroups: every S of the tile   --q_empty[s]--> producer warp
 *                 --k_full[s]--> warpgroups: S = Q K^T             --k_empty[s]-->
 *                 --v_full[s]--> warpgroups: O += P V              --v_empty[s]-->
 *
 * The rings run on across tiles: while one tile ends, the next one's Q and keys arrive. Tensor cores work while exp2
 * runs, in two ways: a warpgroup issues S of the next keys together with P V of the last ones before its softmax, and
 * the warpgroups take turns in issuing, so that their softmaxes fall into different halves of the period:
 *
 *   warpgroup 0   | S1 P0V | softmax 1      | S2 P1V | softmax 2      |
 *   warpgroup 1            | S1 P0V | softmax 1      | S2 P1V | softmax 2
 *
 * The row maximum is lazy: P = 2^(c S - c m) is exact for any m that does not overflow, so m is raised only when a
 * score exceeds it by more than a factor 2^8 in P. Asking costs one integer maximum and one vote; raising is rare.
 *
 * Specification: cpu/reference.c. Limits and measurements: README.md. */
#include "attn_fwd_params.h"
#include "ptx_sm90.cuh"

/* ---- parameters: one row of tiles.def -------------------------------------------------------------------------- */

#if !defined(HEAD_DIM) || !defined(BLOCK_KV) || !defined(WGS) || !defined(STAGES) || !defined(Q_STAGES)
#error "tiles: HEAD_DIM columns, BLOCK_KV keys, WGS warpgroups of 64 rows, STAGES of K and V, Q_STAGES of Q"
#endif
#if !defined(EARLY) || !defined(TURN) || !defined(SPLIT_WAIT)
#error "schedule: EARLY scores exponentiated before the vote, TURN 0 none 1 issue 2 until S is there, SPLIT_WAIT 0 1"
#endif
#if !defined(BF16) || !defined(CAUSAL) || !defined(LOCAL) || !defined(VARLEN) || !defined(SCORE) || !defined(DROPOUT)
#error "variant: BF16 or fp16; CAUSAL, LOCAL window, VARLEN packed sequences, SCORE softcap and ALiBi, DROPOUT: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_sm90
#endif

typedef fa_attn_fwd_params params;

constexpr int BLOCK_Q = 64 * WGS;
constexpr int THREADS = 128 * (WGS + 1);
constexpr int PRODUCER_REGS = WGS == 3 ? 32 : 24, CONSUMER_REGS = WGS == 3 ? 160 : 240;
constexpr int ROW_BYTES = HEAD_DIM % 64 == 0 ? 128 : 64; /* one row of a swizzled chunk */
constexpr int CHUNK = ROW_BYTES / 2, CHUNKS = HEAD_DIM / CHUNK;
constexpr bool O_BY_TMA = HEAD_DIM <= 128;
constexpr bool LONGEST_FIRST = CAUSAL || LOCAL || VARLEN;
#define INF __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;

static_assert(HEAD_DIM % CHUNK == 0 && BLOCK_KV % 16 == 0, "wgmma contracts 16 at a time, TMA brings whole chunks");
static_assert(BLOCK_KV <= 256, "a TMA box has at most 256 rows");
static_assert(WGS <= 3, "64 K registers: 3 warpgroups of 160 and a producer of 32 take them all");
static_assert(EARLY % 4 == 0 && EARLY <= BLOCK_KV / 2, "early scores come in whole groups of columns");
static_assert(!DROPOUT || (BLOCK_KV % 32 == 0 && EARLY == 0), "dropout: patches of 32 keys, all of them in S");

/* ---- shared memory --------------------------------------------------------------------------------------------- */

/* What the consumers must know of a tile. It lies beside Q and becomes visible with it. */
struct tile {
    int row; /* first row in its sequence; -1: there are no more tiles */
    int b_idx, head;
    int len_q, len_kv;
    int kv_begin, kv_end;     /* key tiles that some row sees ... */
    int full_begin, full_end; /* ... and those of them that every row sees whole */
    int row_0, batch;         /* coordinates of the sequence's row 0 in the map of o */
    int lse_row;              /* where the sequence starts in lse */
};

/* Operands are stored as TMA writes them and wgmma reads them: chunks of CHUNK columns, rows of ROW_BYTES, the 16-byte
 * pieces of a row swizzled by the row's number. Each chunk starts at a multiple of 1024 bytes, the swizzle's period. */
struct shared_memory {
    alignas(1024) u16 q[Q_STAGES][BLOCK_Q * HEAD_DIM];
    alignas(1024) u16 k[STAGES][BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 v[STAGES][BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 o[O_BY_TMA ? BLOCK_Q * HEAD_DIM : 8]; /* per warp: chunks of 16 rows */
    /* Arrivals. full: one, with TMA's bytes. q_empty: every consumer thread, when it has read tiles[] too. k_empty and
     * v_empty: one for each consumer warp. */
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES];
    u64 v_full[STAGES], v_empty[STAGES];
    tile tiles[Q_STAGES];
};
static_assert(sizeof(shared_memory) <= FA_SHARED_BYTES, "an SM has 227 KiB for one CTA");

/* Position in a ring: the parity flips each time round. */
template <int SIZE> struct ring {
    int stage = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++stage == SIZE) stage = 0, parity ^= 1;
    }
};

enum { BAR_TURN = 1 }; /* named barriers 1 .. WGS: the turn of each warpgroup to issue products */

/* Next tiles of launches in a dynamic order: each launch counts in a slot of its own and leaves it at zero. */
__device__ u32 tile_counters[FA_TILE_COUNTERS];

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

DEVICE int ceil_div(int x, int y) { return (x + y - 1) / y; }
DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

/* One packed sequence. Offsets are clamped: whatever the arrays hold, nothing outside the tensors is touched. */
struct span {
    int begin, len;
};
DEVICE span span_at(const int *cu_seqlens, int b_idx, int total) {
    int begin = clamp(cu_seqlens[b_idx], 0, total);
    return {begin, clamp(cu_seqlens[b_idx + 1], begin, total) - begin};
}

/* Packed: tiles of one head, over all sequences. Whole warp. */
DEVICE int count_packed_tiles(const params &p) {
    int tiles = 0;
    for (int b_idx = threadIdx.x % 32; b_idx < p.b; b_idx += 32)
        tiles += ceil_div(span_at(p.cu_seqlens_q, b_idx, p.len_q).len, BLOCK_Q);
    return __reduce_add_sync(0xffffffffu, tiles);
}

/* Packed: the sequence that tile number `idx` of a head falls into; idx becomes the tile's number there. Whole warp:
 * lane l looks at sequence 32 window + l. */
DEVICE int find_sequence(const params &p, int &idx) {
    const int lane = threadIdx.x % 32;
    for (int first = 0;; first += 32) {
        int tiles = first + lane < p.b ? ceil_div(span_at(p.cu_seqlens_q, first + lane, p.len_q).len, BLOCK_Q) : 0;
        int end = tiles; /* of this lane's tiles, counted from the window's start: an inclusive scan */
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(0xffffffffu, end, step);
            if (lane >= step) end += before;
        }
        u32 reached = __ballot_sync(0xffffffffu, idx < end);
        if (reached) {
            int owner = __ffs(reached) - 1;
            idx -= __shfl_sync(0xffffffffu, end - tiles, owner);
            return first + owner;
        }
        idx -= __shfl_sync(0xffffffffu, end, 31);
    }
}

/* The coordinates of a sequence's keys, for the producer alone. */
struct key_position {
    int row_0, batch;
};

/* Tile number idx of the launch. Whole warp. */
DEVICE tile tile_at(const params &p, int idx, int num_q_tiles, key_position &keys) {
    tile t;
    if (VARLEN) {
        t.head = idx / num_q_tiles;
        int q_tile = idx % num_q_tiles;
        t.b_idx = find_sequence(p, q_tile);
        span q = span_at(p.cu_seqlens_q, t.b_idx, p.len_q), kv = span_at(p.cu_seqlens_k, t.b_idx, p.len_kv);
        int len_kv = p.seqused_k ? clamp(p.seqused_k[t.b_idx], 0, kv.len) : kv.len;
        t.len_q = q.len, t.len_kv = len_kv;
        t.row_0 = p.len_q - q.len, t.batch = q.begin + q.len, t.lse_row = q.begin;
        keys = {p.len_kv - len_kv, kv.begin + len_kv};
        t.row = (ceil_div(q.len, BLOCK_Q) - 1 - q_tile) * BLOCK_Q;
    } else {
        int q_tile, head; /* head counts over the whole batch */
        if (LONGEST_FIRST) {
            int group = idx / (p.group_heads * num_q_tiles), in_group = idx - group * p.group_heads * num_q_tiles;
            int heads = min(p.group_heads, p.b * p.h - group * p.group_heads);
            q_tile = num_q_tiles - 1 - in_group / heads;
            head = group * p.group_heads + in_group % heads;
        } else {
            head = idx / num_q_tiles;
            q_tile = idx - head * num_q_tiles;
        }
        t.b_idx = head / p.h, t.head = head - t.b_idx * p.h;
        t.len_q = p.len_q, t.len_kv = p.len_kv;
        t.row_0 = 0, t.batch = t.b_idx, t.lse_row = 0;
        keys = {0, t.b_idx};
        t.row = q_tile * BLOCK_Q;
    }

    /* Row i sees keys [i + shift - window_left, i + shift + window_right]. */
    const int shift = t.len_kv - t.len_q, last_row = min(t.row + BLOCK_Q, t.len_q) - 1;
    int begin = 0, end = t.len_kv, full_begin = 0, full_end = t.len_kv; /* keys; full_end exclusive */
    if (CAUSAL || (LOCAL && p.window_right >= 0)) {
        int right = CAUSAL ? 0 : p.window_right;
        end = clamp(last_row + shift + right + 1, 0, end);
        full_end = clamp(t.row + shift + right + 1, 0, full_end);
    }
    if (LOCAL && p.window_left >= 0) {
        begin = max(t.row + shift - p.window_left, 0);
        full_begin = max(last_row + shift - p.window_left, 0);
    }
    t.kv_begin = begin / BLOCK_KV;
    t.kv_end = begin < end ? ceil_div(end, BLOCK_KV) : t.kv_begin;
    t.full_begin = ceil_div(full_begin, BLOCK_KV);
    t.full_end = full_end / BLOCK_KV;
    return t;
}

/* ---- producer -------------------------------------------------------------------------------------------------- */

template <int ROWS>
DEVICE void load(u16 *dst, const fa_tensor_map *map, u64 *full, int row, int head, int batch, u64 l2_policy) {
    mbarrier_arrive_expect_tx(full, ROWS * HEAD_DIM * 2);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        cp_async_bulk_tensor_load(dst + c * ROWS * CHUNK, map, full, c * CHUNK, row, head, batch, l2_policy);
}

/* One warp; lane 0 does what one thread must do. */
DEVICE void produce(const params &p, shared_memory &s) {
    const bool is_leader = threadIdx.x % 32 == 0;
    const int num_q_tiles = VARLEN ? count_packed_tiles(p) : p.num_q_tiles;
    const int num_tiles = VARLEN ? num_q_tiles * p.h : p.num_tiles;
    ring<Q_STAGES> qr;
    ring<STAGES> kr, vr;
    int idx = blockIdx.x;
    for (; idx < num_tiles; qr.next()) {
        key_position keys;
        const tile t = tile_at(p, idx, num_q_tiles, keys);
        int next = idx + gridDim.x;
        if (LONGEST_FIRST && p.counter_slot >= 0) {
            /* Every CTA is refused once and all tiles beyond the first of each CTA are given out once: that many
             * fetches are made in all, and the last one brings the counter back to zero. */
            const u32 fetches = max(num_tiles, (int)gridDim.x);
            if (is_leader) next = gridDim.x + atomicInc(&tile_counters[p.counter_slot], fetches - 1);
            next = __shfl_sync(0xffffffffu, next, 0);
        }
        if (is_leader) {
            mbarrier_wait(&s.q_empty[qr.stage], qr.parity ^ 1);
            s.tiles[qr.stage] = t;
            load<BLOCK_Q>(s.q[qr.stage], &p.q, &s.q_full[qr.stage], t.row_0 + t.row, t.head, t.batch, L2_EVICT_FIRST);
            /* K is needed one step before V of the same keys. */
            const int head = t.head / p.heads_per_kv;
            for (int j = t.kv_end - 1; j >= t.kv_begin - 1; j--) {
                if (j >= t.kv_begin) {
                    mbarrier_wait(&s.k_empty[kr.stage], kr.parity ^ 1);
                    load<BLOCK_KV>(s.k[kr.stage], &p.k, &s.k_full[kr.stage], keys.row_0 + j * BLOCK_KV, head,
                                   keys.batch, L2_EVICT_LAST);
                    kr.next();
                }
                if (j + 1 < t.kv_end) {
                    mbarrier_wait(&s.v_empty[vr.stage], vr.parity ^ 1);
                    load<BLOCK_KV>(s.v[vr.stage], &p.v, &s.v_full[vr.stage], keys.row_0 + (j + 1) * BLOCK_KV, head,
                                   keys.batch, L2_EVICT_LAST);
                    vr.next();
                }
            }
        }
        __syncwarp();
        idx = next;
    }
    if (VARLEN && LONGEST_FIRST && p.counter_slot >= 0 && (int)blockIdx.x >= num_tiles && is_leader)
        atomicInc(&tile_counters[p.counter_slot], max(num_tiles, (int)gridDim.x) - 1); /* the refusal of an idle CTA */
    if (is_leader) {
        mbarrier_wait(&s.q_empty[qr.stage], qr.parity ^ 1);
        s.tiles[qr.stage].row = -1;
        mbarrier_arrive(&s.q_full[qr.stage]);
    }
}

/* ---- consumers ------------------------------------------------------------------------------------------------- */

/* Registers of a thread: it holds two rows, l / 4 and l / 4 + 8 of its warp's 16, and in each group of 8 columns the
 * columns 2 (l % 4) + {0, 1}. Register i of S belongs to row i / 2 % 2 of the two and to column column_of(i). */
constexpr int S_REGS = BLOCK_KV / 2, O_REGS = HEAD_DIM / 2, P_REGS = BLOCK_KV / 4;
DEVICE constexpr int row_of(int i) { return i / 2 % 2; }
DEVICE constexpr int column_of(int i) { return 8 * (i / 4) + i % 2; }

/* The running softmax of two rows. */
struct softmax_rows {
    float max[2];      /* m: at most lazy_margin below the largest score so far; -inf: no key yet */
    float max_log2[2]; /* c m, what exponents are measured from; 0 while m is -inf */
    float sum[2];      /* of this thread's columns */
    int threshold[2];  /* the bits of m + lazy_margin as an integer: a score at or above it raises m */
};

/* S = Q K^T for the 64 rows of this warpgroup. */
DEVICE void issue_scores(float (&s)[S_REGS], u32 q_desc, u32 k_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        const int chunk = k * 16 / CHUNK, in_chunk = k * 16 % CHUNK * 2;
        wgmma<BLOCK_KV, BF16>::ss<high, high>(
            s, q_desc + matrix_descriptor_bytes(chunk * BLOCK_Q * ROW_BYTES + in_chunk),
            k_desc + matrix_descriptor_bytes(chunk * BLOCK_KV * ROW_BYTES + in_chunk), k > 0);
    }
    wgmma_commit_group();
}

/* O += P V. */
DEVICE void issue_output(float (&o)[O_REGS], const u32 (&p)[P_REGS], u32 v_desc) {
    constexpr u32 high = matrix_descriptor_high(ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; k++)
        wgmma<HEAD_DIM, BF16>::rs<high>(o, p + 4 * k, v_desc + matrix_descriptor_bytes(k * 16 * ROW_BYTES));
    wgmma_commit_group();
}

/* Softcap and ALiBi, in natural units; first_key and diagonal as in mask_scores.
 * softcap tanh(x / softcap) = softcap - 2 softcap / (1 + exp(2 x / softcap)): the hardware's tanh is right to 2^-11 only,
 * which shows in lse. */
DEVICE void change_scores(float (&s)[S_REGS], const params &p, float slope, int first_key, int diagonal) {
    const float exponent = p.softcap > 0 ? p.score_scale * 2 * LOG2_E / p.softcap : 0;
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        float x = p.softcap > 0 ? p.softcap - 2 * p.softcap * rcp(1 + ex2(s[i] * exponent)) : s[i] * p.score_scale;
        s[i] = x - slope * fabsf((float)(diagonal + 8 * row_of(i) - first_key - column_of(i)));
    }
}

/* Keys that a row does not see get -inf. first_key: this thread's first column; diagonal: this thread's first row plus
 * len_kv - len_q, the last key that causal attention would let it see. */
DEVICE void mask_scores(float (&s)[S_REGS], const params &p, int len_kv, int first_key, int diagonal) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int end = len_kv, begin = 0;
        if (CAUSAL) end = min(end, diagonal + 8 * r + 1);
        if (LOCAL && p.window_right >= 0) end = min(end, diagonal + 8 * r + p.window_right + 1);
        if (LOCAL && p.window_left >= 0) begin = diagonal + 8 * r - p.window_left;
        end -= first_key, begin -= first_key;
#pragma unroll
        for (int i = 0; i < S_REGS; i++)
            if (row_of(i) == r && (column_of(i) >= end || (LOCAL && column_of(i) < begin))) s[i] = -INF;
    }
}

/* Does some score of this warp exceed what m allows? Floats compare as integers wherever the larger is positive. */
DEVICE bool exceeds_max(const float (&s)[S_REGS], const softmax_rows &rows) {
    int largest[2][2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int &x = largest[row_of(i)][i / 4];
        x = i % 2 ? max(x, __float_as_int(s[i])) : __float_as_int(s[i]);
    }
#pragma unroll
    for (int i = 8; i < S_REGS; i += 2) {
        int &x = largest[row_of(i)][i / 4 % 2];
        x = max(max(x, __float_as_int(s[i])), __float_as_int(s[i + 1]));
    }
    return __any_sync(0xffffffffu, max(largest[0][0], largest[0][1]) >= rows.threshold[0] ||
                                       max(largest[1][0], largest[1][1]) >= rows.threshold[1]);
}

/* Raises m to the largest score. What was summed under the old m is to be multiplied by alpha. */
DEVICE void raise_max(const float (&s)[S_REGS], softmax_rows &rows, float (&alpha)[2], float scale_log2, float margin) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float old = rows.max[r], old_log2 = rows.max_log2[r];
        float even = old, odd = old;
#pragma unroll
        for (int i = 2 * r; i < S_REGS; i += 4) even = fmaxf(even, s[i]), odd = fmaxf(odd, s[i + 1]);
        float x = fmaxf(even, odd);
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        rows.max[r] = x;
        rows.max_log2[r] = x == -INF ? 0 : x * scale_log2;
        alpha[r] = old == -INF ? 0 : ex2(old_log2 - rows.max_log2[r]);
        rows.sum[r] *= alpha[r];
        rows.threshold[r] = x + margin >= 0 ? __float_as_int(x + margin) : (int)0x80000000;
    }
}

/* P of register i. */
DEVICE float exponentiate(float s, const softmax_rows &rows, int i, float scale_log2) {
    return ex2(fmaf(s, scale_log2, -rows.max_log2[row_of(i)]));
}

/* S becomes P from register `from` on, for the rows asked for. */
DEVICE void exponentiate_rows(float (&s)[S_REGS], const softmax_rows &rows, float scale_log2, int from, bool first_row,
                              bool second_row) {
#pragma unroll
    for (int i = from; i < S_REGS; i++)
        if (row_of(i) == 0 ? first_row : second_row) s[i] = exponentiate(s[i], rows, i, scale_log2);
}

/* The kept elements of P, by the generator of cpu/dropout.h: one call serves the 16 registers of a patch of 16 rows and
 * 32 keys, byte i for register i, because that mapping was drawn for these lanes. */
DEVICE void drop(float (&s)[S_REGS], u64 seed, u64 stream, u32 row_patch, u32 key_patch, int keep_max) {
    const u64 low = stream + threadIdx.x % 32;
#pragma unroll
    for (int patch = 0; patch < S_REGS / 16; patch++) {
        u32 x = (u32)low, y = (u32)(low >> 32), z = row_patch, w = key_patch + patch;
        u32 key_0 = (u32)seed, key_1 = (u32)(seed >> 32);
#pragma unroll
        for (int round = 0; round < 7; round++) {
            const u64 xx = 0xD2511F53ull * x, zz = 0xCD9E8D57ull * z;
            x = (u32)(zz >> 32) ^ y ^ key_0, y = (u32)zz;
            z = (u32)(xx >> 32) ^ w ^ key_1, w = (u32)xx;
            key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
        }
        const u32 words[4] = {x, y, z, w};
#pragma unroll
        for (int i = 0; i < 16; i++)
            if ((int)(words[i / 4] >> 8 * (i % 4) & 0xff) > keep_max) s[16 * patch + i] = 0;
    }
}

/* lse of both rows, and what O is multiplied by; a row that saw no key gets +inf and 0. */
DEVICE void finish_rows(const softmax_rows &rows, const params &p, const tile &t, int row, float (&factor)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        factor[r] = sum == 0 ? 0 : __fdividef(p.keep_scale, sum);
        const int i = row + lane / 4 + 8 * r;
        if (lane % 4 == 0 && i < t.len_q)
            p.lse[t.b_idx * p.lse_stride_b + t.head * p.lse_stride_h + t.lse_row + i] =
                sum == 0 ? INF : (rows.max_log2[r] + __log2f(sum)) * LN_2;
    }
}

/* o times factor in 16 bits, through shared memory: each warp stores its own 16 rows, chunk by chunk, by TMA. */
DEVICE void store_by_tma(const float (&o)[O_REGS], const float (&factor)[2], const params &p, const tile &t,
                         u16 *o_smem, int row) {
    const int lane = threadIdx.x % 32;
    const u32 matrix_row = lane % 16, swizzle = (ROW_BYTES == 128 ? matrix_row : matrix_row / 2) % (ROW_BYTES / 16);
    if (lane == 0) cp_async_bulk_wait_all_read(); /* the last tile's store has left o_smem */
    __syncwarp();
#pragma unroll
    for (int g = 0; g < HEAD_DIM / 16; g++) {
        const int chunk = g * 16 / CHUNK;
        const u32 piece = (g * 32 % ROW_BYTES / 16 + lane / 16) ^ swizzle;
        const float *x = o + 8 * g;
        stmatrix_x4(smem_address(o_smem) + chunk * 16 * ROW_BYTES + matrix_row * ROW_BYTES + piece * 16,
                    cvt_x2<BF16>(x[0] * factor[0], x[1] * factor[0]), cvt_x2<BF16>(x[2] * factor[1], x[3] * factor[1]),
                    cvt_x2<BF16>(x[4] * factor[0], x[5] * factor[0]), cvt_x2<BF16>(x[6] * factor[1], x[7] * factor[1]));
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            cp_async_bulk_tensor_store(&p.o, o_smem + c * 16 * CHUNK, c * CHUNK, t.row_0 + row, t.head, t.batch);
        cp_async_bulk_commit_group();
    }
}

/* The 4 x 4 matrix whose rows are the four lanes of a quad, transposed. */
DEVICE void transpose_in_quad(u32 (&x)[4]) {
    const int lane = threadIdx.x;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((i & step) == 0) {
                const bool upper = lane & step;
                u32 other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + step], step);
                if (upper)
                    x[i] = other;
                else
                    x[i + step] = other;
            }
}

/* The same without shared memory, where none is left: a quad exchanges its columns so that every lane stores 16 bytes
 * of one row. */
DEVICE void store_directly(const float (&o)[O_REGS], const float (&factor)[2], const params &p, const tile &t,
                           int row) {
    const int lane = threadIdx.x % 32;
    u16 *base = (u16 *)p.o_data + t.b_idx * p.o_stride_b + t.head * p.o_stride_h + t.lse_row * p.o_stride_row;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row + lane / 4 + 8 * r;
        u16 *dst = base + i * p.o_stride_row;
#pragma unroll
        for (int g = 0; g < HEAD_DIM / 32; g++) {
            const float *x = o + 16 * g + 2 * r;
            const float f = factor[r];
            u32 packed[4];
#pragma unroll
            for (int k = 0; k < 4; k++) packed[k] = cvt_x2<BF16>(x[4 * k] * f, x[4 * k + 1] * f);
            transpose_in_quad(packed);
            const int column = 32 * g + 8 * (lane % 4);
            if (i < t.len_q && column < p.d)
                *(uint4 *)(dst + column) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
}

/* One warpgroup. */
DEVICE void consume(const params &p, shared_memory &s, const int wg) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, next_wg = wg + 1 == WGS ? 0 : wg + 1;
    const bool is_leader = lane == 0;
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q) + wg * 64 * ROW_BYTES, 0);
    const u32 k_desc_0 = matrix_descriptor(smem_address(s.k), 0);
    const u32 v_desc_0 = matrix_descriptor(smem_address(s.v), BLOCK_KV * ROW_BYTES);
    constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * HEAD_DIM * 2);
    constexpr u32 KV_STAGE = matrix_descriptor_bytes(BLOCK_KV * HEAD_DIM * 2);
    const float scale_log2 = p.scale_log2, margin = p.lazy_margin;
    u64 seed = 0, offset = 0;
    if (DROPOUT) seed = p.rng_state[0], offset = p.rng_state[1];

    float O[O_REGS];
    u32 P[P_REGS];
    ring<Q_STAGES> qr;
    ring<STAGES> kr, vr;
    if (TURN && wg == WGS - 1) bar_arrive(BAR_TURN, 256); /* warpgroup 0 begins */

    for (;; qr.next()) {
        mbarrier_wait(&s.q_full[qr.stage], qr.parity);
        const tile t = s.tiles[qr.stage];
        if (uniform(t.row) < 0) break;
        const int kv_begin = uniform(t.kv_begin), kv_end = uniform(t.kv_end);
        const int full_begin = uniform(t.full_begin), full_end = uniform(t.full_end);
        const int row = t.row + 64 * wg + 16 * warp; /* the warp's first */
        const int diagonal = row + lane / 4 + t.len_kv - t.len_q, column = 2 * (lane % 4);
        const u32 q_desc = q_desc_0 + qr.stage * Q_STAGE;
        float slope = 0;
        if (SCORE && p.alibi_slopes) slope = p.alibi_slopes[t.b_idx * p.alibi_stride_b + t.head];
        u64 stream = 0;
        if (DROPOUT) stream = offset + (u64)(t.b_idx * p.h + t.head) * 32;

        softmax_rows rows = {{-INF, -INF}, {0, 0}, {0, 0}, {(int)0x80000000, (int)0x80000000}};
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;

        /* The last keys first: they hold the diagonal and the end of the sequence, where masks apply. */
        if (kv_begin < kv_end) {
            int j = kv_end - 1;
            float S[S_REGS], alpha[2];
            mbarrier_wait(&s.k_full[kr.stage], kr.parity);
            issue_scores(S, q_desc, k_desc_0 + kr.stage * KV_STAGE);
            wgmma_wait_group<0>(S);
            if (is_leader) mbarrier_arrive(&s.k_empty[kr.stage]);
            kr.next();
            if (SCORE) change_scores(S, p, slope, j * BLOCK_KV + column, diagonal);
            if (j >= full_end || (LOCAL && j < full_begin))
                mask_scores(S, p, t.len_kv, j * BLOCK_KV + column, diagonal);
            raise_max(S, rows, alpha, scale_log2, margin);
#pragma unroll
            for (int i = 0; i < S_REGS; i++) {
                S[i] = exponentiate(S[i], rows, i, scale_log2);
                rows.sum[row_of(i)] += S[i];
            }
            if (DROPOUT) drop(S, seed, stream, row / 16, j * (BLOCK_KV / 32), p.keep_max);
#pragma unroll
            for (int i = 0; i < P_REGS; i++) P[i] = cvt_x2<BF16>(S[2 * i], S[2 * i + 1]);

#pragma unroll 1
            for (j--; j >= kv_begin; j--) {
                /* wait K, turn: S = Q K^T.  NOTE: S is a new array in every step. Carried from one to the next, its old
                 * values stay alive beside `early`, and ptxas runs the products one by one (C7511). */
                float S[S_REGS];
                mbarrier_wait(&s.k_full[kr.stage], kr.parity);
                if (TURN) bar_sync(BAR_TURN + wg, 256);
                pin(O), pin(P); /* all writes to them come before the products */
                issue_scores(S, q_desc, k_desc_0 + kr.stage * KV_STAGE);
                /* wait V: O += P V of the keys before */
                mbarrier_wait(&s.v_full[vr.stage], vr.parity);
                issue_output(O, P, v_desc_0 + vr.stage * KV_STAGE);
                if (TURN == 1) bar_arrive(BAR_TURN + next_wg, 256);
                /* S is there: release K */
                wgmma_wait_group<1>(S);
                if (TURN == 2) bar_arrive(BAR_TURN + next_wg, 256);
                if (is_leader) mbarrier_arrive(&s.k_empty[kr.stage]);
                kr.next();

                if (SCORE) change_scores(S, p, slope, j * BLOCK_KV + column, diagonal);
                /* The first exponentials start under the old maximum, while the vote is on its way. */
                float early[EARLY ? EARLY : 1];
#pragma unroll
                for (int i = 0; i < EARLY; i++) early[i] = exponentiate(S[i], rows, i, scale_log2);
                const bool is_masked = j >= full_end || (LOCAL && j < full_begin);
                const bool is_raised = exceeds_max(S, rows) || is_masked;
                if (is_raised) {
                    if (is_masked) mask_scores(S, p, t.len_kv, j * BLOCK_KV + column, diagonal);
                    raise_max(S, rows, alpha, scale_log2, margin);
#pragma unroll
                    for (int i = 0; i < EARLY; i++) early[i] = exponentiate(S[i], rows, i, scale_log2);
                }
                exponentiate_rows(S, rows, scale_log2, EARLY, true, !SPLIT_WAIT);
                /* O is there: release V, raise O to the new maximum */
                wgmma_wait_group<0>(O);
                if (is_leader) mbarrier_arrive(&s.v_empty[vr.stage]);
                vr.next();
                if (is_raised)
#pragma unroll
                    for (int i = 0; i < O_REGS; i++) O[i] *= alpha[row_of(i)];
                /* The second row's exponentials, while the first row's P is summed and packed */
                exponentiate_rows(S, rows, scale_log2, EARLY, false, SPLIT_WAIT);
#pragma unroll
                for (int i = 0; i < S_REGS; i += 2)
                    rows.sum[row_of(i)] += i < EARLY ? early[i] + early[i + 1] : S[i] + S[i + 1];
                if (DROPOUT) drop(S, seed, stream, row / 16, j * (BLOCK_KV / 32), p.keep_max);
#pragma unroll
                for (int i = 0; i < S_REGS; i += 2)
                    P[i / 2] = i < EARLY ? cvt_x2<BF16>(early[i], early[i + 1]) : cvt_x2<BF16>(S[i], S[i + 1]);
            }

            /* The last P V: Q and the tile are no longer read. */
            mbarrier_arrive(&s.q_empty[qr.stage]);
            mbarrier_wait(&s.v_full[vr.stage], vr.parity);
            pin(O), pin(P);
            issue_output(O, P, v_desc_0 + vr.stage * KV_STAGE);
            wgmma_wait_group<0>(O);
            if (is_leader) mbarrier_arrive(&s.v_empty[vr.stage]);
            vr.next();
        } else {
            mbarrier_arrive(&s.q_empty[qr.stage]);
        }

        float factor[2];
        finish_rows(rows, p, t, row, factor);
        if constexpr (O_BY_TMA)
            store_by_tma(O, factor, p, t, s.o + (4 * wg + warp) * 16 * HEAD_DIM, row);
        else
            store_directly(O, factor, p, t, row);
    }
    if (O_BY_TMA && is_leader) cp_async_bulk_wait_all_read(); /* shared memory outlives its readers */
}

/* ---- entry ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const __grid_constant__ params p) {
    /* There is no static shared memory, so the dynamic one starts at 1024, as its alignment asks. */
    extern __shared__ __align__(1024) unsigned char smem[];
    shared_memory &s = *reinterpret_cast<shared_memory *>(smem);
    const int warp = uniform(threadIdx.x / 32), wg = warp / 4;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.q), prefetch_tensormap(&p.k), prefetch_tensormap(&p.v);
        if (O_BY_TMA) prefetch_tensormap(&p.o);
        for (int i = 0; i < Q_STAGES; i++) mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 128 * WGS);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], 4 * WGS);
            mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], 4 * WGS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<PRODUCER_REGS>();
        if (warp == 0) produce(p, s);
    } else {
        setmaxnreg_inc<CONSUMER_REGS>();
        consume(p, s, wg - 1);
    }
}
