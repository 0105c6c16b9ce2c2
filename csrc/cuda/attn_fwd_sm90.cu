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
 * The rings run on across tiles: while one tile ends, the next one's Q and keys arrive, and it is stored while the next
 * one's first scores are computed. Tensor cores work while exp2 runs, in two ways: a warpgroup issues S of the next keys
 * together with P V of the last ones before its softmax, and the warpgroups take turns in issuing, so that their
 * softmaxes fall into different parts of the period:
 *
 *   warpgroup 0   | S1 P0V | softmax 1      | S2 P1V | softmax 2      |
 *   warpgroup 1            | S1 P0V | softmax 1      | S2 P1V | softmax 2
 *
 * The row maximum is anchored: P = 2^(c S - c m) gives the same quotient for every m that does not overflow. In bf16,
 * which has the range of float, m is the maximum of the first keys that a row sees and then stays. What overflows remains
 * inf or NaN: a tile is checked when it ends, and one that failed is done again with the maximum of every step. In fp16
 * m may lag by a factor 2^8 in P: asking costs one integer maximum and one vote, raising is rare.
 *
 * The same check finds rows that NaN or inf in V has reached through a P of zero, where they do not see the key. Done
 * again, a tile takes of V only what each row sees.
 *
 * Specification: cpu/reference.c. Limits and measurements: README.md. */
#include "attn_fwd_params.h"
#include "ptx_sm90.cuh"

/* ---- parameters: one row of tiles.def -------------------------------------------------------------------------- */

#if !defined(HEAD_DIM) || !defined(BLOCK_KV) || !defined(WGS) || !defined(STAGES) || !defined(Q_STAGES)
#error "tiles: HEAD_DIM columns, BLOCK_KV keys, WGS warpgroups of 64 rows, STAGES of K and V, Q_STAGES of Q"
#endif
#if !defined(TURN) || !defined(O_WAIT)
#error "schedule: TURN 0 never, 1 while issuing, 2 until S is there, O_WAIT 0 after, 1 amid, 2 before the exponentials"
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
constexpr int PRODUCER_REGS = WGS >= 3 ? 32 : 40, CONSUMER_REGS = WGS == 4 ? 112 : WGS == 3 ? 160 : 232;
constexpr int ROW_BYTES = HEAD_DIM % 64 == 0 ? 128 : 64; /* one row of a swizzled chunk */
constexpr int CHUNK = ROW_BYTES / 2, CHUNKS = HEAD_DIM / CHUNK;
constexpr bool O_BY_TMA = HEAD_DIM <= 128;
constexpr bool LONGEST_FIRST = CAUSAL || LOCAL || VARLEN;
constexpr bool IS_ANCHORED = BF16; /* fp16 has no room for P beyond 2^16 */
constexpr bool PV_FIRST = O_WAIT == 2;
constexpr bool ANNOUNCES_EARLY = LONGEST_FIRST && Q_STAGES > 1;
constexpr int TILES = Q_STAGES + 2; /* known to consumers: a tile is stored while the next but one may be announced */
constexpr int FAILED = 8;           /* of each warp, not yet repeated: more than the tiles that can be on their way */
#define INF __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;

static_assert(HEAD_DIM % CHUNK == 0 && BLOCK_KV % 16 == 0, "wgmma contracts 16 at a time, TMA brings whole chunks");
static_assert(BLOCK_KV <= 256, "a TMA box has at most 256 rows");
static_assert(WGS <= 4, "64 K registers: 3 warpgroups of 160, or 4 of 112, and a producer of 32 take them all");
static_assert(!DROPOUT || BLOCK_KV % 32 == 0, "dropout: patches of 32 keys");

/* ---- shared memory --------------------------------------------------------------------------------------------- */

/* In place of a tile: say when all before it is done, for some may have to be repeated; or leave. */
enum { REPORT = -1, END = -2 };

/* What the consumers must know of a tile. It lies beside Q and becomes visible with it. */
struct tile {
    int idx; /* its number in the launch */
    int row; /* first row in its sequence, or REPORT, or END */
    int b_idx, head;
    int len_q, len_kv;
    int kv_begin, kv_end;   /* key tiles that some row sees */
    int row_0, batch;       /* coordinates of the sequence's row 0 in the maps of q and o ... */
    int kv_row_0, kv_batch; /* ... and in those of k and v */
    int lse_row;            /* where the sequence starts in lse */
    int is_repeat;          /* it failed before: carefully now */
};

/* Packed sequences are looked at 32 at a time. Among them the longest comes first, so that a launch ends with short
 * tiles. */
struct window {
    int num_tiles;                      /* of all sequences and heads */
    int first, begin, end;              /* first sequence; tiles of the launch, of all heads: [begin, end) */
    int lane_begin[32], lane_tiles[32]; /* tiles of sequence first + lane */
};

/* Operands are stored as TMA writes them and wgmma reads them: chunks of CHUNK columns, rows of ROW_BYTES, the 16-byte
 * pieces of a row swizzled by the row's number. Each chunk starts at a multiple of 1024 bytes, the swizzle's period. */
struct shared_memory {
    alignas(1024) u16 q[Q_STAGES][BLOCK_Q * HEAD_DIM];
    alignas(1024) u16 k[STAGES][BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 v[STAGES][BLOCK_KV * HEAD_DIM];
    alignas(1024) u16 o[O_BY_TMA ? BLOCK_Q * HEAD_DIM : 8]; /* per warp: chunks of 16 rows */
    /* Arrivals. full: one, with TMA's bytes. empty: one for each consumer warp. all_done: one for each consumer warp,
     * when it is told to REPORT. */
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES];
    u64 v_full[STAGES], v_empty[STAGES];
    u64 all_done;
    tile tiles[TILES];
    window packed; /* the producer's */
    /* Tiles that failed, as each consumer warp found them; how many of them the producer has seen. */
    int failed[4 * WGS][FAILED], num_failed[4 * WGS], num_seen[4 * WGS];
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

/* A row sees keys [keys_begin, keys_end). diagonal: the row plus len_kv - len_q, its last key if it is causal. */
DEVICE int keys_begin(const params &p, int diagonal) {
    return LOCAL && p.window_left >= 0 ? max(diagonal - p.window_left, 0) : 0;
}
DEVICE int keys_end(const params &p, int diagonal, int len_kv) {
    if (CAUSAL) return clamp(diagonal + 1, 0, len_kv);
    return LOCAL && p.window_right >= 0 ? clamp(diagonal + p.window_right + 1, 0, len_kv) : len_kv;
}

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

/* Packed: moves the window of 32 sequences to the one that tile idx falls into. Whole warp. */
DEVICE void move_window(const params &p, window &w, int idx) {
    const int lane = threadIdx.x % 32;
    int first = w.first, begin = w.begin, end = w.end;
    if (begin <= idx && idx < end) return;
    if (idx < begin) first = -32, end = 0;
    while (idx >= end) {
        first += 32, begin = end;
        const int b_idx = first + lane;
        int len = -1, my_begin = begin, my_tiles = 0;
        if (b_idx < p.b) {
            len = span_at(p.cu_seqlens_k, b_idx, p.len_kv).len;
            my_tiles = p.h * ceil_div(span_at(p.cu_seqlens_q, b_idx, p.len_q).len, BLOCK_Q);
        }
#pragma unroll 1
        for (int i = 0; i < 32; i++) {
            const int other = __shfl_sync(0xffffffffu, len, i), tiles = __shfl_sync(0xffffffffu, my_tiles, i);
            if (other > len || (other == len && i < lane)) my_begin += tiles;
            end += tiles;
        }
        w.lane_begin[lane] = my_begin, w.lane_tiles[lane] = my_tiles;
    }
    __syncwarp();
    if (lane == 0) w.first = first, w.begin = begin, w.end = end;
    __syncwarp();
}

/* Tile number idx of the launch. Whole warp; one lane writes. */
DEVICE void find_tile(const params &p, window &w, int idx, tile &t) {
    const bool is_leader = threadIdx.x % 32 == 0;
    int in_order = idx, q_tiles = p.num_q_tiles, heads = p.b * p.h; /* of one order of row tiles and heads */
    int b_idx = 0, len_q = p.len_q, len_kv = p.len_kv;
    if (VARLEN) {
        move_window(p, w, idx);
        const int begin = w.lane_begin[threadIdx.x % 32], tiles = w.lane_tiles[threadIdx.x % 32];
        const int owner = __ffs(__ballot_sync(0xffffffffu, (u32)(idx - begin) < (u32)tiles)) - 1;
        b_idx = w.first + owner;
        in_order -= __shfl_sync(0xffffffffu, begin, owner);
        const span q = span_at(p.cu_seqlens_q, b_idx, p.len_q), kv = span_at(p.cu_seqlens_k, b_idx, p.len_kv);
        len_q = q.len, len_kv = p.seqused_k ? clamp(p.seqused_k[b_idx], 0, kv.len) : kv.len;
        q_tiles = ceil_div(len_q, BLOCK_Q), heads = p.h;
        if (is_leader) {
            t.row_0 = p.len_q - len_q, t.batch = q.begin + len_q, t.lse_row = q.begin;
            t.kv_row_0 = p.len_kv - len_kv, t.kv_batch = kv.begin + len_kv;
        }
    }
    int q_tile, head;
    if (LONGEST_FIRST) {
        const int group = in_order / (p.group_heads * q_tiles), in_group = in_order - group * p.group_heads * q_tiles;
        const int group_heads = min(p.group_heads, heads - group * p.group_heads);
        q_tile = q_tiles - 1 - in_group / group_heads;
        head = group * p.group_heads + in_group % group_heads;
    } else {
        head = in_order / q_tiles;
        q_tile = in_order - head * q_tiles;
    }
    if (!VARLEN) { /* head counts over the whole batch */
        b_idx = head / p.h, head -= b_idx * p.h;
        if (is_leader) t.row_0 = t.lse_row = t.kv_row_0 = 0, t.batch = t.kv_batch = b_idx;
    }
    if (is_leader) {
        const int row = q_tile * BLOCK_Q, shift = len_kv - len_q, last_row = min(row + BLOCK_Q, len_q) - 1;
        const int begin = keys_begin(p, row + shift), end = keys_end(p, last_row + shift, len_kv);
        t.idx = idx, t.row = row, t.b_idx = b_idx, t.head = head, t.len_q = len_q, t.len_kv = len_kv;
        t.kv_begin = begin / BLOCK_KV;
        t.kv_end = begin < end ? ceil_div(end, BLOCK_KV) : begin / BLOCK_KV;
    }
}

/* ---- producer -------------------------------------------------------------------------------------------------- */

template <int ROWS>
DEVICE void load(u16 *dst, const fa_tensor_map *map, u64 *full, int row, int head, int batch, u64 l2_policy) {
    mbarrier_arrive_expect_tx(full, ROWS * HEAD_DIM * 2);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        cp_async_bulk_tensor_load(dst + c * ROWS * CHUNK, map, full, c * CHUNK, row, head, batch, l2_policy);
}

/* Of the launch. Packed, the producer has counted them. */
DEVICE int num_tiles_of(const params &p, const shared_memory &s) { return VARLEN ? s.packed.num_tiles : p.num_tiles; }

/* The next tile of a dynamic order. Every CTA is refused once and all tiles beyond the first of each CTA are given out
 * once: that many fetches are made in all, and the last one brings the counter back to zero. */
DEVICE int fetch_tile(const params &p, const shared_memory &s) {
    return gridDim.x + atomicInc(&tile_counters[p.counter_slot], max(num_tiles_of(p, s), (int)gridDim.x) - 1);
}

/* A tile that a consumer warp has found to fail, or -1. Whole warp: lane l looks at consumer warp l. */
DEVICE int failed_tile(shared_memory &s) {
    const int lane = threadIdx.x % 32;
    const bool is_new = lane < 4 * WGS && *(volatile int *)&s.num_failed[lane] != s.num_seen[lane];
    const u32 found = __ballot_sync(0xffffffffu, is_new);
    if (!found) return -1;
    const int mine = is_new ? *(volatile int *)&s.failed[lane][s.num_seen[lane] % FAILED] : -1;
    const int idx = __shfl_sync(0xffffffffu, mine, __ffs(found) - 1);
    if (mine == idx) s.num_seen[lane]++;
    return idx;
}

/* One warp; lane 0 does what one thread must do. */
DEVICE void produce(const params &p, shared_memory &s) {
    const bool is_leader = threadIdx.x % 32 == 0, is_dynamic = p.counter_slot >= 0;
    if (VARLEN) {
        const int num_tiles = count_packed_tiles(p) * p.h;
        if (is_leader) s.packed.num_tiles = num_tiles;
        __syncwarp();
    }
    ring<Q_STAGES> q;
    ring<STAGES> k, v;
    ring<TILES> tiles;
    int next = blockIdx.x;
    if (VARLEN && is_dynamic && next >= s.packed.num_tiles && is_leader) fetch_tile(p, s);

    /* The next tile and its Q, one that failed before a new one; or that there is none. */
    const auto announce = [&] {
        const int failed = failed_tile(s), idx = failed >= 0 ? failed : next;
        if (idx >= num_tiles_of(p, s)) return false;
        tile &t = s.tiles[tiles.stage]; /* nobody reads what was there: all have left the tile after it */
        find_tile(p, s.packed, idx, t);
        if (is_leader) {
            t.is_repeat = failed >= 0;
            mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
            load<BLOCK_Q>(s.q[q.stage], &p.q, &s.q_full[q.stage], t.row_0 + t.row, t.head, t.batch, L2_EVICT_FIRST);
        }
        __syncwarp();
        q.next(), tiles.next();
        return true;
    };
    bool is_announced = false, has_reported = false;
    for (;;) {
        if (!is_announced && !announce()) {
            if (is_leader) {
                mbarrier_wait(&s.q_empty[q.stage], q.parity ^ 1);
                s.tiles[tiles.stage].row = has_reported ? END : REPORT;
                mbarrier_arrive(&s.q_full[q.stage]);
            }
            if (has_reported) break;
            q.next(), tiles.next();
            mbarrier_wait(&s.all_done, 0);
            has_reported = true;
            continue;
        }
        const tile &t = s.tiles[tiles.stage == 0 ? TILES - 1 : tiles.stage - 1];
        const int head = t.head / p.heads_per_kv, kv_begin = t.kv_begin;
        is_announced = false;
        /* K is needed one step before V of the same keys. The next tile is taken two key tiles before the last: about four
         * steps before the consumers end this one. Taken when this one begins, while others are still to choose, it spoils
         * the order (10% at head_dim 256, causal); taken two steps before the end, its keys may come late. Its Q goes
         * before this one's last keys where it gains (causal, head_dim 128, 1k: -4% of the cycles; not causal: +3%). */
#pragma unroll 1
        for (int j = t.kv_end - 1; j >= kv_begin - 1; j--) {
            if (is_leader && is_dynamic && !t.is_repeat && j == min(kv_begin + 1, t.kv_end - 1))
                next = fetch_tile(p, s);
            if (j >= kv_begin && is_leader) {
                mbarrier_wait(&s.k_empty[k.stage], k.parity ^ 1);
                load<BLOCK_KV>(s.k[k.stage], &p.k, &s.k_full[k.stage], t.kv_row_0 + j * BLOCK_KV, head, t.kv_batch,
                               L2_EVICT_LAST);
                k.next();
            }
            if (j + 1 < t.kv_end && is_leader) {
                mbarrier_wait(&s.v_empty[v.stage], v.parity ^ 1);
                load<BLOCK_KV>(s.v[v.stage], &p.v, &s.v_full[v.stage], t.kv_row_0 + (j + 1) * BLOCK_KV, head,
                               t.kv_batch, L2_EVICT_LAST);
                v.next();
            }
            if (j == (ANNOUNCES_EARLY ? min(kv_begin + 1, t.kv_end - 1) : kv_begin - 1)) {
                __syncwarp();
                if (is_dynamic)
                    next = __shfl_sync(0xffffffffu, next, 0);
                else if (!t.is_repeat)
                    next += gridDim.x;
                if (ANNOUNCES_EARLY) is_announced = announce();
            }
        }
        __syncwarp();
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
    float max[2];      /* m: at most the largest score so far, in fp16 at most lazy_margin below it; -inf: no key yet */
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
        const int begin = keys_begin(p, diagonal + 8 * r) - first_key;
        const int end = keys_end(p, diagonal + 8 * r, len_kv) - first_key;
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

/* S becomes P, for the rows asked for. */
DEVICE void exponentiate_rows(float (&s)[S_REGS], const softmax_rows &rows, float scale_log2, bool first_row,
                              bool second_row) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++)
        if (row_of(i) == 0 ? first_row : second_row) s[i] = ex2(fmaf(s[i], scale_log2, -rows.max_log2[row_of(i)]));
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

/* Rows that see no key. Whole warp: 16 rows from `row` on. */
DEVICE void store_zeros(const params &p, const tile &t, int row) {
    const int lane = threadIdx.x % 32, pieces = p.d / 8, rows = min(t.len_q - row, 16);
    u16 *o = (u16 *)p.o_data + t.b_idx * p.o_stride_b + t.head * p.o_stride_h + (t.lse_row + row) * p.o_stride_row;
    for (int i = lane; i < rows * pieces; i += 32)
        *(uint4 *)(o + i / pieces * p.o_stride_row + i % pieces * 8) = make_uint4(0, 0, 0, 0);
    if (lane < rows) p.lse[t.b_idx * p.lse_stride_b + t.head * p.lse_stride_h + t.lse_row + row + lane] = INF;
}

/* Did P, its sum or O leave the range of floats, or V hold NaN or inf? Then O or the sum stayed inf or NaN, or the sum is
 * huge. An m that is the maximum of some keys is never too large: the sum is at least 1. Whole warp. */
DEVICE bool has_failed(const float (&o)[O_REGS], const softmax_rows &rows) {
    float zeros[4] = {0, 0, 0, 0}; /* chains of additions that do not wait for each other */
#pragma unroll
    for (int i = 0; i < O_REGS; i++) zeros[i % 4] = fmaf(o[i], 0, zeros[i % 4]);
    const float zero = (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]);
    const float limit = __int_as_float((127 + 96) << 23); /* 2^96 */
    return __any_sync(0xffffffffu, !(zero == 0 && rows.sum[0] < limit && rows.sum[1] < limit));
}

/* One warpgroup: 64 rows of each tile. It passes over keys that only other rows of the tile see. */
DEVICE void consume(const params &p, shared_memory &s, const int wg) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, next_wg = wg + 1 == WGS ? 0 : wg + 1;
    const bool is_leader = lane == 0;
    const u32 q_desc_0 = matrix_descriptor(smem_address(s.q), 0);
    const u32 k_desc_0 = matrix_descriptor(smem_address(s.k), 0);
    const u32 v_desc_0 = matrix_descriptor(smem_address(s.v), BLOCK_KV * ROW_BYTES);
    constexpr u32 Q_STAGE = matrix_descriptor_bytes(BLOCK_Q * HEAD_DIM * 2);
    constexpr u32 Q_BLOCK = matrix_descriptor_bytes(64 * ROW_BYTES);
    constexpr u32 KV_STAGE = matrix_descriptor_bytes(BLOCK_KV * HEAD_DIM * 2);
    const float scale_log2 = p.scale_log2, margin = p.lazy_margin;
    u16 *o_smem = s.o + (O_BY_TMA ? (4 * wg + warp) * 16 * HEAD_DIM : 0);
    u64 seed = 0, offset = 0, stream = 0;
    u32 patch_row = 0;
    if (DROPOUT) seed = p.rng_state[0], offset = p.rng_state[1];
    float slope = 0;

    float O[O_REGS];
    u32 P[P_REGS];
    softmax_rows rows;
    ring<Q_STAGES> qr;
    ring<STAGES> kr, vr;
    ring<TILES> tr;
    int block = wg;           /* which 64 rows of the tile */
    int diagonal = 0;         /* the last key that this thread's first row would see, if causal */
    int j = -1, kv_begin = 0; /* this step's key tile; the last one to visit */
    int exact_end = 0, full_begin = 0, full_end = 0;
    u32 q_desc = 0;
    bool has_o = false; /* a tile has begun and is not stored yet */
    const int column = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < O_REGS; i++) O[i] = 0;
#pragma unroll
    for (int i = 0; i < P_REGS; i++) P[i] = 0;
    if (TURN && wg == WGS - 1) bar_arrive(BAR_TURN, 256); /* warpgroup 0 begins */

    /* The tile taken last, or the one before it. */
    const auto tile_taken = [&](int before) -> const tile & {
        const int i = tr.stage - 1 - before;
        return s.tiles[i < 0 ? i + TILES : i];
    };
    const auto release_v = [&] {
        if (is_leader) mbarrier_arrive(&s.v_empty[vr.stage]);
        vr.next();
    };
    const auto release_k = [&] {
        if (is_leader) mbarrier_arrive(&s.k_empty[kr.stage]);
        kr.next();
    };
    const auto release_q = [&] {
        __syncwarp(); /* other lanes have read the tile before this one, whose place may be taken now */
        if (is_leader) mbarrier_arrive(&s.q_empty[qr.stage]);
        qr.next();
    };
    /* Passes over key tiles from j down to end, which other warpgroups see. */
    const auto pass_until = [&](int end) {
#pragma unroll 1
        for (; j > end; j--) {
            mbarrier_wait(&s.k_full[kr.stage], kr.parity);
            if (TURN) bar_sync(BAR_TURN + wg, 256), bar_arrive(BAR_TURN + next_wg, 256);
            release_k();
            mbarrier_wait(&s.v_full[vr.stage], vr.parity);
            release_v();
        }
    };
    /* O of a tile that was taken, of which these are rows 64 block_then .. */
    const auto finish = [&](int before) {
        const tile &t = tile_taken(before);
        const int block_then = block >= before ? block - before : block - before + WGS;
        const int first_row = t.row + 64 * block_then + 16 * warp;
        if (!uniform(t.is_repeat) && uniform(has_failed(O, rows))) {
            if (is_leader) {
                const int num_failed = s.num_failed[4 * wg + warp];
                s.failed[4 * wg + warp][num_failed % FAILED] = t.idx;
                __threadfence_block();
                *(volatile int *)&s.num_failed[4 * wg + warp] = num_failed + 1;
            }
        } else {
            float factor[2];
            finish_rows(rows, p, t, first_row, factor);
            if constexpr (O_BY_TMA)
                store_by_tma(O, factor, p, t, o_smem, first_row);
            else
                store_directly(O, factor, p, t, first_row);
        }
    };

    const auto wait_v = [&] { mbarrier_wait(&s.v_full[vr.stage], vr.parity); };
    const auto issue_pv = [&] { issue_output(O, P, v_desc_0 + vr.stage * KV_STAGE); };
    const auto raise_o = [&](const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] *= alpha[row_of(i)];
    };
    const auto begin_rows = [&] {
#pragma unroll
        for (int i = 0; i < O_REGS; i++) O[i] = 0;
        rows = {{-INF, -INF}, {0, 0}, {0, 0}, {(int)0x80000000, (int)0x80000000}};
    };
    /* S, by now P, is summed and packed. */
    const auto sum_and_pack = [&](float (&S)[S_REGS]) {
#pragma unroll
        for (int i = 0; i < S_REGS; i += 2) rows.sum[row_of(i)] += S[i] + S[i + 1];
        if (DROPOUT) drop(S, seed, stream, patch_row, j * (BLOCK_KV / 32), p.keep_max);
#pragma unroll
        for (int i = 0; i < P_REGS; i++) P[i] = cvt_x2<BF16>(S[2 * i], S[2 * i + 1]);
    };
    /* One step. The first of a tile has no P V; it stores the tile before instead. */
    const auto step = [&](const bool starts) __attribute__((always_inline)) {
        /* wait K, V, turn: S = Q K^T, O += P V of the keys before.  NOTE: S is a new array in every step. Carried
         * from one to the next, its old values stay alive, and ptxas runs the products one by one (C7511). */
        float S[S_REGS], alpha[2];
        if (!starts && PV_FIRST) wait_v();
        mbarrier_wait(&s.k_full[kr.stage], kr.parity);
        if (TURN) bar_sync(BAR_TURN + wg, 256);
        if (!starts) pin(O), pin(P); /* all writes to them come before the products */
        if (!starts && PV_FIRST) issue_pv();
        issue_scores(S, q_desc, k_desc_0 + kr.stage * KV_STAGE);
        if (!starts && !PV_FIRST) wait_v(), issue_pv();
        if (TURN == 1 || (TURN && starts)) bar_arrive(BAR_TURN + next_wg, 256);
        if (starts) {
            if (has_o) finish(1);
            has_o = true;
            begin_rows();
        }
        /* S is there: release K, and Q if it was the last */
        if (starts || PV_FIRST)
            wgmma_wait_group<0>(S);
        else
            wgmma_wait_group<1>(S);
        if (TURN == 2 && !starts) bar_arrive(BAR_TURN + next_wg, 256);
        release_k();
        if (!starts && PV_FIRST) pin(O), release_v();
        if (j == kv_begin) release_q();

        if (SCORE) change_scores(S, p, slope, j * BLOCK_KV + column, diagonal);
        const bool is_exact = starts || j >= exact_end || (LOCAL && j < full_begin);
        const bool is_raised = starts || (IS_ANCHORED ? is_exact : exceeds_max(S, rows) || is_exact);
        if (is_raised) {
            if (j >= full_end || (LOCAL && j < full_begin))
                mask_scores(S, p, tile_taken(0).len_kv, j * BLOCK_KV + column, diagonal);
            raise_max(S, rows, alpha, scale_log2, margin);
            if (!starts && PV_FIRST) raise_o(alpha);
        }
        exponentiate_rows(S, rows, scale_log2, true, O_WAIT != 1 || starts);
        if (!starts && !PV_FIRST) {
            /* O is there: release V, raise O to the new maximum */
            wgmma_wait_group<0>(O);
            release_v();
            if (is_raised) raise_o(alpha);
        }
        /* The second row's exponentials, while the first row's P is summed and packed */
        if (!starts) exponentiate_rows(S, rows, scale_log2, false, O_WAIT == 1);
        sum_and_pack(S);
    };
    /* The same for a tile that failed: one after the other. */
    const auto repeat_step = [&] __attribute__((always_inline)) {
        const tile &t = tile_taken(0);
        float S[S_REGS], alpha[2];
        mbarrier_wait(&s.k_full[kr.stage], kr.parity);
        if (TURN) bar_sync(BAR_TURN + wg, 256);
        issue_scores(S, q_desc, k_desc_0 + kr.stage * KV_STAGE);
        if (TURN) bar_arrive(BAR_TURN + next_wg, 256);
        wgmma_wait_group<0>(S);
        release_k();
        if (j == kv_begin) release_q();

        if (SCORE) change_scores(S, p, slope, j * BLOCK_KV + column, diagonal);
        mask_scores(S, p, t.len_kv, j * BLOCK_KV + column, diagonal);
        raise_max(S, rows, alpha, scale_log2, margin);
        raise_o(alpha);
        exponentiate_rows(S, rows, scale_log2, true, true);
        sum_and_pack(S);

        wait_v();
        const int keys = j * BLOCK_KV, first_diagonal = t.row + 64 * block + t.len_kv - t.len_q;
        const bool all_seen =
            keys_begin(p, first_diagonal + 63) <= keys && keys + BLOCK_KV <= keys_end(p, first_diagonal, t.len_kv);
        if (uniform(all_seen)) {
            pin(O), pin(P);
            issue_pv();
            wgmma_wait_group<0>(O);
        } else {
            accumulate_seen(O, P, s.v[vr.stage], p, t.len_kv, keys, diagonal);
        }
        release_v();
    };

    for (;;) {
        /* The last P V of the tile before, while the next tile comes. Without one, of garbage that nobody looks at. */
        if (has_o) wait_v();
        pin(O), pin(P);
        issue_pv();
        mbarrier_wait(&s.q_full[qr.stage], qr.parity);
        tr.next();
        block = block + 1 == WGS ? 0 : block + 1; /* later rows may see more keys, or none be left: take turns */
        const tile &t = tile_taken(0);
        const int shift = t.len_kv - t.len_q, first_row = t.row + 64 * block;
        const int last_row = min(first_row + 64, t.len_q) - 1;
        const int end = keys_end(p, last_row + shift, t.len_kv);
        const int order = uniform(min(t.row, 0));
        const bool is_idle = first_row > last_row || keys_begin(p, first_row + shift) >= end;
        const int last = uniform(is_idle ? -1 : ceil_div(end, BLOCK_KV) - 1);
        const bool is_repeat = uniform(!is_idle && order == 0 && t.is_repeat);
        j = uniform(t.kv_end) - 1, kv_begin = uniform(t.kv_begin);
        const int row = first_row + 16 * warp; /* the warp's first */
        wgmma_wait_group<0>(O);
        if (has_o) release_v();
        diagonal = row + lane / 4 + shift;
        q_desc = q_desc_0 + qr.stage * Q_STAGE + block * Q_BLOCK;
        if (SCORE && p.alibi_slopes && order == 0) slope = p.alibi_slopes[t.b_idx * p.alibi_stride_b + t.head];
        if (DROPOUT) patch_row = row / 16;
        if (DROPOUT) stream = offset + (u64)(t.b_idx * p.h + t.head) * 32;
        if (order < 0 || last < 0 || is_repeat) {
            /* The tile before; then, alone, one that failed */
            for (int before = 1; before >= 0 && (before || is_repeat); before--) {
                if (before == 0) {
                    pass_until(last);
                    begin_rows();
                    has_o = true;
#pragma unroll 1
                    for (; j >= kv_begin; j--) repeat_step();
                }
                if (has_o) finish(before);
                has_o = false;
            }
            if (order == END) break;
            if (is_repeat) continue;
            if (order == REPORT) {
                if (is_leader) mbarrier_arrive(&s.all_done);
            } else {
                pass_until(kv_begin - 1);
                if (row < t.len_q) store_zeros(p, t, row);
            }
            release_q();
            continue;
        }
        /* Every row of the warp has seen a key before exact_end - 1, and sees all of full_begin .. full_end - 1. */
        const int row_end = keys_end(p, row + shift, t.len_kv);
        exact_end = uniform(min(last, max(row_end - 1, 0) / BLOCK_KV));
        full_end = uniform(row_end / BLOCK_KV);
        if (LOCAL) full_begin = uniform(ceil_div(keys_begin(p, row + 15 + shift), BLOCK_KV));

        /* The last keys first: they hold the diagonal and the end of the sequence, where masks apply. */
        pass_until(last);
        step(true);
#pragma unroll 1
        for (j--; j >= kv_begin; j--) step(false);
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
        for (int i = 0; i < Q_STAGES; i++) mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 4 * WGS);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], 4 * WGS);
            mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], 4 * WGS);
        }
        mbarrier_init(&s.all_done, 4 * WGS);
        for (int i = 0; i < 4 * WGS; i++) s.num_failed[i] = s.num_seen[i] = 0;
        s.packed.first = -32, s.packed.begin = s.packed.end = 0;
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
