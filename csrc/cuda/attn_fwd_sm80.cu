/* Attention forward with the instructions of Ampere:
 *
 *   O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row
 *
 *   q, o [b, len_q, h, d]    k, v [b, len_kv, h_kv, d], dense or packed    lse [b, h, len_q] float
 *
 * A CTA owns BLOCK_Q rows of one head and walks over the keys that these rows see, BLOCK_KV at a time. A warp owns 16
 * BLOCKS rows, with their O in registers. P leaves registers as the first operand of O += P V. Tensor cores have work
 * while the special-function unit computes exponentials. LATE says how:
 *
 *   2   barrier | load K of i+1, V of i | S = Q K^T | O += P V of step i-1, meanwhile P of step i
 *   1   barrier | load V | S = Q K^T | barrier | load K of i+1 | O += P V of 16 keys, meanwhile P of the next 16 keys
 *   0   the same, but P V begins when P is complete
 *
 * SPLIT 2, above 128 columns, is LATE 2 with P in shared memory. Two warps share 32 rows there. With two stages they
 * meet at a barrier of their own before they store P. With one stage they store P at the beginning of the next step:
 *
 *   barrier | load K of i+1, V of i | S = Q K^T | O += P V of i-1, meanwhile P of i | both warps meet | store P of i
 *   barrier | load V of i-1, store P of i-1 | S = Q K^T | barrier | load K of i+1 | O += P V of i-1, meanwhile P of i
 *
 * With LATE 2 the new P of 16 keys takes the place of the old P of 16 keys that have just been multiplied.
 *
 * Most steps are plain: they need no mask and no check of lengths, and have a text of their own. There the loads are
 * issued piece by piece beside the products, and ptxas mixes the products of S with those of P V.
 *
 * The maximum of a row lags behind. O is rescaled only where a score exceeds the maximum by 2^LAG. With LATE 2 a step
 * does not even look for its maximum. If the sums of a step turn out to be too large, its scores are made again.
 *
 * A masked pair has P = 0. If its V holds NaN or inf, O becomes NaN. Then the tile of rows is computed again, and looks
 * for such tiles of V. They go through FMAs that skip masked pairs.
 *
 * Which limit binds: latencies. Two warps share a quarter of an SM, and wait for ldmatrix and barriers.
 *
 * Specification: ../cpu/reference.c. */
#define F32         0
#define OF_3        0
#define READS_CACHE (!SHORT_ENDS) /* never: a row says whether the text knows that */
#define SWIZZLES    (SPLIT == 2 && STAGES == 2)

/* A row of tiles.def gives HEAD_DIM columns, BLOCK_KV keys, WARPS, BLOCKS times 16 query rows that SPLIT warps share,
 * and STAGES of K and V. The row says whether Q and the addresses of a lane are in registers (Q_REGS, LANE_REGS), and
 * when P V is added (LATE). It gives how many loads run AHEAD of products, and the CTAS of an SM. */
#if !defined(HEAD_DIM) || !defined(BLOCK_KV) || !defined(WARPS) || !defined(BLOCKS) || !defined(SPLIT) || \
    !defined(STAGES) || !defined(Q_REGS) || !defined(LANE_REGS) || !defined(LATE) || !defined(AHEAD) ||   \
    !defined(SHORT_ENDS) || !defined(CTAS) || !defined(SCORE) || !defined(DROPOUT)
#error "a row of tiles.def; SCORE: softcap, ALiBi or a scale that is not positive; DROPOUT: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_sm80
#endif

#include "rows_any.cuh"
#include "tile_sm80.cuh"
#include "quads.cuh"
#include "sinks.cuh"
#include "task_order.cuh"

/* SPLIT warps share WARP_ROWS rows: they divide the keys of S and the columns of O. */
constexpr int WARP_ROWS = 16 * BLOCKS, BLOCK_Q = WARP_ROWS * WARPS / SPLIT;
constexpr int OWN_KEYS = BLOCK_KV / SPLIT, OWN_COLUMNS = COLUMNS / SPLIT, N = OWN_KEYS / 8;
constexpr int P_PITCH = BLOCK_KV + (SWIZZLES ? 0 : 8); /* like PITCH */
/* The maximum of a row has P = 2^-HEADROOM when it is found. It is raised before some P exceeds 2^MOST_LOG2. Numbers of
 * bf16 may be as large as floats. So P is at most 2^-16 there, and sums of P V stay floats. fp16 needs the range. */
constexpr int LAG = 8, HEADROOM = (int)element::HEADROOM, MOST_LOG2 = LAG - HEADROOM;
constexpr float RAISED = 1u << HEADROOM; /* 2^HEADROOM */
/* A step does not look for its maximum, and does its scores again if its sums turn out to be too large. K must still be
 * there. ALiBi raises the maximum in most steps, so scores that are not plain have the maximum first. */
constexpr bool IS_LATE = LATE == 2, TRIES_FIRST = IS_LATE && STAGES == 2 && !SCORE;
/* Do warps that share rows store P at the end of its step? Otherwise they store P at the beginning of the next step. */
constexpr bool STORES_EARLY = SPLIT > 1 && STAGES == 2;

static_assert(!SWIZZLES || BLOCK_KV == 64, "a row of P has eight pieces");
static_assert(8 * OWN_COLUMNS % 32 == 0, "a quad stores 32 columns");
static_assert(OWN_KEYS % 16 == 0, "mma.m16n8k16 contracts 16 at a time");
static_assert(SPLIT == 1 || (IS_LATE && !Q_REGS), "P goes through shared memory");
static_assert(SPLIT <= 2, "a row has 4 floats: a maximum, parts, and is_careful");
static_assert(N <= 8, "32 bits say which pairs of a thread count");
static_assert(STAGES == 1 || (STAGES == 2 && (IS_LATE || !Q_REGS)), "the first V may come while Q is read");

constexpr int STATE = 16 / BYTES; /* a row has four floats beside its Q */

struct shared_memory {
    factor k[STAGES][BLOCK_KV * PITCH];
    union {
        factor v[STAGES][BLOCK_KV * PITCH];
        factor q_once[Q_REGS ? BLOCK_Q * PITCH : 8]; /* on the way to registers, before the first V */
    };
    union {
        factor q[Q_REGS ? 8 : BLOCK_Q * (PITCH + (SWIZZLES ? STATE : 0))];
        float maxima[Q_REGS ? BLOCK_Q : 1]; /* the lagging maxima. If Q stays here, they lie in the state of a row */
    };

    /* Four floats of a row, behind the row of Q. Behind all rows, if they are not padded. */
    DEVICE float *state(int row) {
        return (float *)(SWIZZLES ? q + BLOCK_Q * PITCH + row * STATE : q + row * PITCH + HEAD_DIM);
    }
    /* Is V searched for NaN and inf? If rows are padded, the word lies behind a row of K. */
    DEVICE int &is_careful() { return *(int *)(SWIZZLES ? (factor *)(state(0) + 3) : k[0] + HEAD_DIM); }
    /* P of the step before lies behind this struct, if other warps read it. */
    DEVICE factor *p() { return (factor *)(this + 1); }
    DEVICE float &maximum(int row) { return Q_REGS ? maxima[row] : state(row)[0]; }
    /* What a warp tells the warps that share its rows: a maximum or a sum of its keys. */
    DEVICE float &part(int row, int idx) { return state(row)[1 + idx]; }
};

/* Loads key tiles one after the other, from the last one down. */
struct key_loader : tile_loader<BLOCK_KV> {
    using tile_loader::tile_loader;

    /* If all rows exist, num_own only says whether the thread's columns do. */
    DEVICE void load(u32 to, long long stride, int num_own) {
        load_rows(to, stride, num_own);
        from -= BLOCK_KV * stride;
    }
    /* Does the same for piece i of NUM, where all rows exist, or the whole tile does not. */
    DEVICE void load_piece(int i, u32 to, long long stride, int num_own, bool exists) {
        load_piece_if(exists, i, to, stride, num_own > NONE + (1 << 29));
        if (i == NUM - 1) from -= BLOCK_KV * stride;
    }
};

/* Fragment c of a warp's O begins so many columns behind the warp's first column. Warps that share swizzled rows take
 * turns of 32 columns. So the first column and these columns have no bit in common. */
DEVICE constexpr int own_column_of(int c) { return SWIZZLES ? c / 4 * 64 + c % 4 * 8 : 8 * c; }

/* P [16 BLOCKS, OWN_KEYS] of a warp, as first operands of 16 keys each. */
typedef u32 weights[BLOCKS][N / 2][4];

/* ---- products -------------------------------------------------------------------------------------------------- */

/* P of a step: in registers, or all keys of the warp's rows in shared memory, from the lane's address `row` on. */
struct weights_source {
    const weights &regs;
    u32 row;
};

/* Runs work(i) of O += P V of a tile, after the products of 16 keys and 16 columns number i. The columns begin at the
 * lane's address `v`. Without ADDS only the work is done. */
template <bool ADDS, class worker>
DEVICE void add_values(float (&o)[BLOCKS][OWN_COLUMNS][4], const weights_source &p, u32 v, const worker &work) {
    constexpr int PAIRS = OWN_COLUMNS / 2, NUM = BLOCK_KV / 16 * PAIRS, PLACES = AHEAD / PAIRS + 2;
    u32 a[PLACES][BLOCKS][4];
    const auto &shared = a;
    if (!ADDS) {
#pragma unroll
        for (int i = 0; i < NUM; i++) work(i);
        return;
    }
    pipelined<NUM>(
        [&](u32(&b)[4], int i) {
            if (SPLIT > 1 && i % PAIRS == 0)
#pragma unroll
                for (int m = 0; m < BLOCKS; m++)
                    ldmatrix_x4(a[i / PAIRS % PLACES][m], moved<P_PITCH>(p.row, 16 * m, 16 * (i / PAIRS)));
            ldmatrix_x4_trans(b, moved(v, 16 * (i / PAIRS), own_column_of(i % PAIRS * 2)));
        },
        [&](const u32(&b)[4], int i) {
            const int k = i / PAIRS, c = i % PAIRS * 2;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                const u32(&w)[4] = *(SPLIT > 1 ? &shared[k % PLACES][m] : &p.regs[m][k % (N / 2)]);
                mma_m16n8k16<factor>(o[m][c], w, b[0], b[1]);
                mma_m16n8k16<factor>(o[m][c + 1], w, b[2], b[3]);
            }
            work(i);
        });
}

/* O += P V by FMAs that skip pairs that do not count. Bit 4 n + e of `counts` belongs to element e of fragment n. The
 * lane that holds two weights of a row sends them to the other three lanes of its rows. */
DEVICE void add_seen_values(float (&o)[BLOCKS][OWN_COLUMNS][4], const weights &p, const factor *v,
                            const u32 (&counts)[BLOCKS]) {
#pragma unroll 1
    for (int owner = 0; owner < 4; owner++) {
        const int from = lane() / 4 * 4 + owner;
        u32 bits[BLOCKS];
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) bits[m] = __shfl_sync(WHOLE_WARP, counts[m], from);
#pragma unroll
        for (int n = 0; n < N; n++) {
            u32 pairs[2 * BLOCKS]; /* the weights of two keys, for each row */
#pragma unroll
            for (int r = 0; r < 2 * BLOCKS; r++)
                pairs[r] = __shfl_sync(WHOLE_WARP, p[r / 2][n / 2][n % 2 * 2 + r % 2], from);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const factor *row = v + (8 * n + 2 * owner + e) * PITCH;
#pragma unroll
                for (int c = 0; c < OWN_COLUMNS; c++) {
                    float x[2];
                    unpack_x2<factor>(*(const u32 *)(row + column_of(c)), x[0], x[1]);
#pragma unroll
                    for (int r = 0; r < 2 * BLOCKS; r++) {
                        float pair[2];
                        unpack_x2<factor>(pairs[r], pair[0], pair[1]);
                        if (bits[r / 2] >> (4 * n + r % 2 * 2 + e) & 1)
#pragma unroll
                            for (int i = 0; i < 2; i++) o[r / 2][c][r % 2 * 2 + i] += pair[e] * x[i];
                    }
                }
            }
        }
    }
}

/* The same with P in shared memory. The rows of P and of the sequence begin at `rows` and at `row`, and the warp's
 * columns at `column`. */
DEVICE void add_seen_shared(float (&o)[BLOCKS][OWN_COLUMNS][4], const factor *rows, const factor *v, int column,
                            const fa_cuda_problem &p, const sequence &s, int row, int first) {
#pragma unroll 1
    for (int j = 0; j < BLOCK_KV; j++)
#pragma unroll
        for (int r = 0; r < 2 * BLOCKS; r++) {
            const int own = 8 * r + lane() / 4, i = row + own, key = first + j;
            if (i >= s.len_q || key < first_key_of_window(p, s, i) || key >= end_key_of_window(p, s, i)) continue;
            const float weight = cvt_f32(rows[own * P_PITCH + swizzled(own, j)]);
#pragma unroll
            for (int c = 0; c < OWN_COLUMNS; c++) {
                float x[2];
                const int left = swizzled(j, column + own_column_of(c)) + 2 * (lane() % 4);
                unpack_x2<factor>(*(const u32 *)(v + j * PITCH + left), x[0], x[1]);
                o[r / 2][c][r % 2 * 2] += weight * x[0], o[r / 2][c][r % 2 * 2 + 1] += weight * x[1];
            }
        }
}

/* Stores P of a warp's keys, which begin at own_key, for the warps that share its rows. */
DEVICE void store_weights(factor *rows, const weights &p, int own_key) {
    const int row = lane() / 4, left = 2 * (lane() % 4);
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            factor *first = rows + row * P_PITCH + swizzled(row, own_key + 16 * k + 8 * (i / 2)) + left;
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) *(u32 *)(first + (16 * m + 8 * (i % 2)) * P_PITCH) = p[m][k][i];
        }
}

/* ---- softmax --------------------------------------------------------------------------------------------------- */

/* The state of one row of a thread: P = 2^(scale_log2 S - base), for the lagging maximum. base is rounded. All scores
 * of a row have the same base, so the rounding cancels in the quotient. base is -INF while no score has been found. A
 * large base does not contain HEADROOM, which might vanish in it. P = 2^(scale_log2 S - base - HEADROOM) there. */
struct lagging_row {
    float base, sum;
};

/* Beyond this base a fused product would differ from base by more than an exponent should see. */
DEVICE bool is_large(float base) { return fabsf(base) > 0x1p24f; }

DEVICE float base_of(float max, float scale_log2) {
    const float scaled = __fmul_rn(max, scale_log2), raised = scaled + HEADROOM;
    return HEADROOM != 0 && is_large(scaled) && is_large(raised) ? scaled : raised;
}
DEVICE float without_headroom(float base) { return HEADROOM == 0 || is_large(base) ? base : base - HEADROOM; }

/* Finds the largest of a thread's scores in its rows. fmaxf ignores NaN, but NaN reaches the output through the sum. */
DEVICE void find_own_largest(float (&largest)[BLOCKS][2], const float (&s)[BLOCKS][N][4]) {
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = -INF;
#pragma unroll
            for (int n = 0; n < N; n++) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            largest[m][half] = x;
        }
}

/* Finds the largest scores of the rows. */
DEVICE void find_largest(float (&largest)[BLOCKS][2], const float (&s)[BLOCKS][N][4]) {
    find_own_largest(largest, s);
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) largest[r / 2][r % 2] = quad_max(largest[r / 2][r % 2]);
}

/* The warps that share rows meet at a barrier of their own. Returns whether x is true in one of their threads. */
DEVICE bool meet(bool x) { return bar_red_or(1 + warp() / SPLIT, 32 * SPLIT, x); }

/* Makes the largest of a thread's scores the largest of the rows, whose keys other warps have, too. These warps call
 * this function together. */
DEVICE void share_largest(shared_memory &shared, int own_row, int part, float (&largest)[BLOCKS][2]) {
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) {
        const float own = quad_max(largest[r / 2][r % 2]);
        if (lane() % 4 == 0) shared.part(own_row + 8 * r + lane() / 4, part) = own;
    }
    meet(false);
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) {
        float &x = largest[r / 2][r % 2];
        x = -INF;
#pragma unroll
        for (int i = 0; i < SPLIT; i++) x = fmaxf(x, shared.part(own_row + 8 * r + lane() / 4, i));
    }
}

/* Does a score exceed its lagging maximum by too much, or is a score NaN, or has a row no maximum yet? */
DEVICE bool lags_behind(const float (&largest)[BLOCKS][2], const lagging_row (&rows)[BLOCKS][2], float scale_log2) {
    bool lags = false;
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++)
        lags |= !(fmaf(largest[r / 2][r % 2], scale_log2, -rows[r / 2][r % 2].base) <= MOST_LOG2);
    return lags;
}

/* Raises the maxima of the warp's rows, and rescales the sums and O. Returns whether a base of the thread is large. */
DEVICE bool raise(shared_memory &shared, int own_row, lagging_row (&rows)[BLOCKS][2],
                  float (&o)[BLOCKS][OWN_COLUMNS][4], const float (&largest)[BLOCKS][2], float scale_log2,
                  bool writes) {
    bool has_large = false;
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            lagging_row &row = rows[m][half];
            const float wanted = base_of(largest[m][half], scale_log2);
            if (without_headroom(wanted) > without_headroom(row.base)) {
                const float rescale = ex2(without_headroom(row.base) - without_headroom(wanted));
                row = {wanted, row.sum * rescale};
                if (writes && lane() % 4 == 0)
                    shared.maximum(own_row + 16 * m + 8 * half + lane() / 4) = largest[m][half];
#pragma unroll
                for (int c = 0; c < OWN_COLUMNS; c++) o[m][c][2 * half] *= rescale, o[m][c][2 * half + 1] *= rescale;
            }
            has_large |= row.base != -INF && is_large(row.base);
        }
    return has_large;
}

/* S becomes P in the order of operands. kept says which elements dropout keeps. sums are those of this step.
 * IS_USUAL: no row has a large base, and P V of the step before is added meanwhile. Then beside(i) runs after product i
 * of 16 keys and 16 columns. */
template <bool IS_USUAL, class worker>
DEVICE void softmax(float (&s)[BLOCKS][N][4], weights &p, float (&o)[BLOCKS][OWN_COLUMNS][4], float (&sums)[BLOCKS][2],
                    const lagging_row (&rows)[BLOCKS][2], float scale_log2, const weights_source &last, u32 v,
                    const u32 (&kept)[BLOCKS], const worker &beside) {
    constexpr int PARTS = SPLIT * OWN_COLUMNS / 2, ELEMENTS = 8 * BLOCKS; /* of 16 keys */
    float bases[BLOCKS][2];
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) {
        const float base = rows[r / 2][r % 2].base;
        bases[r / 2][r % 2] = !IS_USUAL && base == -INF ? 0 : base;
        sums[r / 2][r % 2] = 0;
    }
    /* Makes one of PARTS parts of P of keys [16 k, 16 k + 16). */
    const auto make = [&](int k, int part) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            if (i * PARTS / ELEMENTS != part) continue;
            const int m = i / 8, half = i % 4 / 2;
            float &x = s[m][2 * k + i % 8 / 4][i % 4];
            const float base = bases[m][half];
            x = ex2(IS_USUAL || !is_large(base) ? fmaf(x, scale_log2, -base)
                                                : __fmul_rn(x, scale_log2) - base - HEADROOM);
            sums[m][half] += x;
        }
        if (part < PARTS - 1) return;
#pragma unroll
        for (int m = 0; m < BLOCKS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = 2 * k + i / 2, e = i % 2 * 2;
                const u32 bits = DROPOUT ? kept[m] >> (4 * n + e) : 3;
                p[m][k][i] = cvt_x2<factor>(bits & 1 ? s[m][n][e] : 0, bits & 2 ? s[m][n][e + 1] : 0);
            }
    };
    if (IS_USUAL && LATE == 1) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) make(0, part);
        add_values<true>(o, last, v, [&](int i) {
            if (i / PARTS + 1 < N / 2) make(i / PARTS + 1, i % PARTS);
            beside(i);
        });
    } else {
        add_values<IS_USUAL && IS_LATE>(o, last, v, [&](int i) {
            make(i / PARTS, i % PARTS);
            beside(i);
        });
    }
}

/* Is a sum of the step so large that some P may exceed 2^MOST_LOG2? A sum is NaN if a score is NaN, or if a row has no
 * maximum yet. */
DEVICE bool is_too_large(const float (&sums)[BLOCKS][2]) {
    bool is = false;
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) is |= !(sums[r / 2][r % 2] <= __int_as_float((127 + MOST_LOG2) << 23));
    return is;
}

/* Plain steps load piece i of `num` beside product place_of_load of `parts`. With one stage a tile must come before the
 * barrier in the middle of the step. Where warps share rows and there are two stages, all loads lie beside the first
 * half of S = Q K^T: ptxas moves no ldmatrix above a cp.async, and would make all exponentials before O += P V. */
DEVICE constexpr int place_of_load(int i, int num, int parts) {
    return Q_REGS || (STAGES == 1 && SPLIT == 1) ? 0 : STAGES == 1 ? i : i * parts / (num * SPLIT);
}

/* Steps without a mask at the tensors' ends have a text of their own. With softcap, ALiBi or dropout the second text
 * would spill up to 370 bytes. */
constexpr bool HAS_PLAIN_STEPS = !SCORE && !DROPOUT;
struct plain_step {
    static constexpr bool value = true;
};
struct any_step {
    static constexpr bool value = false;
};

/* ---- a tile of rows -------------------------------------------------------------------------------------------- */

/* Writes o and lse of a block of 16 rows from `row` on. Of o the columns from `column` on are written. */
DEVICE void finish_block(const fa_cuda_problem &p, const sequence &s, int head, int row, int column,
                         float (&o)[OWN_COLUMNS][4], const lagging_row (&rows)[2], shared_memory &shared, int own_row,
                         float unit, float sink) {
    float weights[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int shared_row = own_row + 8 * half + lane() / 4;
        float sum = 0;
        if (SPLIT > 1)
#pragma unroll
            for (int i = 0; i < SPLIT; i++) sum += shared.part(shared_row, i);
        else
            sum = quad_sum(rows[half].sum);
        const float max = rows[half].base == -INF ? -INF : shared.maximum(shared_row);
        const float scaled = __fmul_rn(max, unit * LOG2_E), rest = fmaf(max, unit * LOG2_E, -scaled);
        const bool is_empty = sum == 0 && scaled == -INF; /* no key seen, or only scores of -inf */
        const float lag = HEADROOM != 0 ? without_headroom(rows[half].base) - scaled : 0; /* that base_of rounded */
        /* lg2 gets the sum of larger P, because its error grows with its result. */
        float lse = sum == 0 ? sum / sum : max * unit + (lg2(sum * RAISED) - rest + lag) * LN_2;
        const int i = row + lane() / 4 + 8 * half;
        weights[half] = is_empty ? 0 : p.keep_scale / sum;
        if (is_empty) lse = p.empty_lse;
        if (p.sinks.values.data) {
            const row_with_sink x = add_sink(is_empty ? -INF : lse, sink);
            lse = x.lse, weights[half] *= x.share;
        }
        if (lane() % 4 == 0 && column == 0 && i < s.len_q) *row_stat(p.lse, s, i, head) = lse;
        if (is_empty)
#pragma unroll
            for (int c = 0; c < OWN_COLUMNS; c++) o[c][2 * half] = o[c][2 * half + 1] = 0;
    }
    constexpr int AT_ONCE = SWIZZLES ? 4 : OWN_COLUMNS;
#pragma unroll
    for (int c = 0; c < OWN_COLUMNS; c += AT_ONCE) {
        const int left = column + own_column_of(c);
        store_rows<SHORT_ENDS>((const float (&)[4 * AT_ONCE]) o[c], weights,
                               (element::output *)p.o.data + query_offset(p.o, s, 0, head) + left, p.o.stride_row, row,
                               s.len_q, p.d - left);
    }
}

/* Does O hold NaN? Two infinities may count as NaN, too. */
DEVICE bool has_nan(const float (&o)[BLOCKS][OWN_COLUMNS][4]) {
    float sums[4] = {};
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int c = 0; c < OWN_COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[e] += o[m][c][e];
    const float sum = sums[0] + sums[1] + (sums[2] + sums[3]);
    return sum != sum;
}

/* Computes rows [first_row, first_row + BLOCK_Q) of one head of one sequence. A hidden NaN or inf of V makes NaN of the
 * thread's O. If there may be such a NaN, the function returns true. Then all rows must be computed again with
 * IS_CAREFUL. */
DEVICE bool attend(const fa_cuda_problem &p, shared_memory &shared, const sequence &s, int head, int first_row) {
    const int head_kv = quotient(head, quotient(p.h, p.h_kv));
    const int part = SPLIT > 1 ? uniform(warp() % SPLIT) : 0, own_key = part * OWN_KEYS;
    const int own_column = part * (SWIZZLES ? 32 : 8 * OWN_COLUMNS);
    const int own_row = WARP_ROWS * uniform(warp() / SPLIT), warp_row = first_row + own_row;
    const tile_walk keys = keys_of(p, s, first_row, min(first_row + BLOCK_Q, s.len_q) - 1);
    /* The keys that the warp's rows see. */
    tile_walk own = keys_of(p, s, warp_row, min(warp_row + WARP_ROWS, s.len_q) - 1);
    if (warp_row >= s.len_q) own.begin = own.end = 0;
    const interval_walk<BLOCK_KV> walk(keys);
    const float unit = SCORE ? 1 : p.scale, scale_log2 = unit * LOG2_E; /* the exponent scales plain scores */
    lagging_row rows[BLOCKS][2];
    float o[BLOCKS][OWN_COLUMNS][4];
    weights probs;
    factor *const p_rows = shared.p() + own_row * P_PITCH;
    u32 q_regs[BLOCKS][K_STEPS][4];
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) {
        rows[m][0] = rows[m][1] = {-INF, 0};
#pragma unroll
        for (int c = 0; c < OWN_COLUMNS; c++) o[m][c][0] = o[m][c][1] = o[m][c][2] = o[m][c][3] = 0;
    }

    /* The last keys come first. They have the mask of the diagonal, and often the largest scores. */
    const auto first_of = [&](int step) { return walk.first(walk.num - 1 - step); };
    /* No problem of this kernel has pages. */
    const auto loader_of = [&](const fa_cuda_view &kv) {
        return key_loader((const factor *)kv.data + s.kv_batch * kv.stride_b +
                              (long long)(s.kv_row + first_of(0)) * kv.stride_row + head_kv * kv.stride_h,
                          kv.stride_row);
    };
    key_loader next_k = loader_of(p.k), next_v = loader_of(p.v);
    const int num_own = key_loader::num_own(keys.end - first_of(0), p.d);
    /* Addresses in shared memory. Without pins ptxas would compute them anew in each step. */
    const u32 base = uniform(smem_address(&shared)), own_piece = pinned(key_loader::piece_of(base));
    const auto address = [&](const void *place) { return base + (u32)((const char *)place - (const char *)&shared); };
    /* The lane's rows of tiles that ldmatrix reads so: Q, P and V. */
    const auto in_rows = [&](u32 tile, int pitch) {
        const int l = laneid();
        return tile + (l % 16 * pitch + swizzled(l, l / 16 * 8)) * BYTES;
    };
    /* The lane's rows of K. */
    const auto in_keys = [&](u32 tile) {
        const int l = laneid();
        return tile + ((l / 16 * 8 + l % 8) * PITCH + swizzled(l, l / 8 % 2 * 8)) * BYTES;
    };
    const auto k_place = [&](int step) { return address(shared.k[step % STAGES]) - base; };
    const auto v_place = [&](int step) { return address(shared.v[step % STAGES]) - base; };
    const u32 rows_of_0 = LANE_REGS ? pinned(in_rows(base, PITCH)) : 0;
    const u32 keys_of_0 = LANE_REGS ? pinned(in_keys(base)) : 0;
    const auto rows_at = [&](const factor *tile) {
        return LANE_REGS ? rows_of_0 + (address(tile) - base) : in_rows(address(tile), PITCH);
    };
    const auto keys_at = [&](const factor *tile) {
        return LANE_REGS ? keys_of_0 + (address(tile) - base) : in_keys(address(tile));
    };
    const auto load_k = [&](int step) {
        if (walk.exists(step)) next_k.load(own_piece + k_place(step), p.k.stride_row, num_own + step * BLOCK_KV);
    };
    const auto load_v = [&](int step) {
        if (step >= 0 && walk.exists(step))
            next_v.load(own_piece + v_place(step), p.v.stride_row, num_own + step * BLOCK_KV);
    };
    if (walk.exists(0)) {
        load_rows<BLOCK_Q>(Q_REGS ? shared.q_once : shared.q,
                           (const factor *)p.q.data + query_offset(p.q, s, first_row, head), p.q.stride_row,
                           s.len_q - first_row, p.d);
        load_k(0);
        if (STAGES == 2 && !IS_LATE) load_v(0);
        cp_async_commit_group();
        if (Q_REGS) {
            wait_for_tiles<0>();
            load_operands(q_regs, shared.q_once + own_row * PITCH);
        }
    }
    /* In a plain step all rows of the CTA see all keys, and all tiles to load exist as a whole. */
    const bool has_all_rows = first_row + BLOCK_Q <= s.len_q;
    const int plain_begin = uniform(max((int)IS_LATE, ceil_div(first_of(0) + BLOCK_KV - keys.full_end, BLOCK_KV)));
    const int plain_end = has_all_rows && !shared.is_careful()
                              ? uniform(min(walk.num, (first_of(0) - keys.full_begin) / BLOCK_KV + 1))
                              : 0;

    bool has_probs = false, has_large = false;
#pragma unroll 1
    for (int step = 0; walk.exists(step - IS_LATE); step++) {
        const int v_step = step - IS_LATE; /* P V of this step is added */
        const factor *k = shared.k[step % STAGES], *v = shared.v[STAGES == 1 ? 0 : (v_step + 2) % 2];
        const u32 v_at = SWIZZLES ? rows_at(v) ^ own_column * BYTES : rows_at(v + own_column);
        const weights_source last = {probs, SPLIT > 1 ? in_rows(address(p_rows), P_PITCH) : 0};
        float scores[BLOCKS][N][4], sums[BLOCKS][2], largest[BLOCKS][2];
        u32 kept[BLOCKS] = {};
        bool sees = true, is_exact = false, is_usual = LATE > 0;
        bool lags = false; /* does a maximum lag behind, in the CTA if warps share rows? */
        const auto make_scores = [&](auto kind, const auto &beside) {
            const int key = first_of(step) + own_key;
            multiply_own<Q_REGS>(scores, q_regs, rows_at(shared.q + own_row * PITCH), keys_at(k + own_key * PITCH),
                                 beside);
            const bool is_whole = decltype(kind)::value || !is_partial<OWN_KEYS>(key, own.full_begin, own.full_end);
#pragma unroll
            for (int m = 0; m < BLOCKS; m++) {
                const int row = warp_row + 16 * m;
                if (SCORE) change_scores(p, s, head, scores[m], row, key);
                if (!is_whole) mask_scores(p, s, scores[m], row, key);
                if (DROPOUT) kept[m] = dropout(p, s.b_idx, head).kept_rows_are_queries<N>(row, key);
            }
        };
        const auto nothing = [](int) {};
        const auto add_sums = [&] {
#pragma unroll
            for (int r = 0; r < 2 * BLOCKS; r++) rows[r / 2][r % 2].sum += sums[r / 2][r % 2];
        };
        /* Does V of v_step hold NaN or inf, and does some row not see all its keys? */
        const auto hides_nan_or_inf = [&] {
            return shared.is_careful() && v_step >= 0 &&
                   is_partial<BLOCK_KV>(first_of(v_step), keys.full_begin, keys.full_end) &&
                   uniform(has_nan_or_inf<BLOCK_KV>(v));
        };
        /* The usual step. If is_usual is false afterwards, P is not made yet. */
        const auto take_step = [&](auto kind) {
            constexpr bool IS_PLAIN = decltype(kind)::value;
            const bool has_next = walk.exists(step + 1);
            wait_for_tiles<0>(); /* K has come, and V if there are two stages. All warps have finished the last step */
            if (SPLIT > 1 && !STORES_EARLY && (IS_PLAIN || has_probs)) store_weights(p_rows, probs, own_key);
            /* Plain steps load K and V piece by piece beside products. */
            constexpr int NUM = key_loader::NUM, S_PARTS = K_STEPS * N / 2, PV_PARTS = BLOCK_KV / 16 * OWN_COLUMNS / 2;
            const auto load_beside_s = [&](int i) {
                constexpr int ALL = STAGES == 2 ? 2 * NUM : NUM;
#pragma unroll
                for (int j = 0; j < ALL; j++)
                    if (IS_PLAIN && i == place_of_load(j, ALL, S_PARTS)) {
                        if (STAGES == 2 && j < NUM)
                            next_k.load_piece(j, own_piece + k_place(step + 1), p.k.stride_row, num_own, has_next);
                        else
                            next_v.load_piece(j % NUM, own_piece + v_place(STAGES == 1 ? v_step : v_step + 1),
                                              p.v.stride_row, num_own, STAGES == 1 || IS_LATE || has_next);
                    }
                if (IS_PLAIN && i == S_PARTS - 1) cp_async_commit_group();
            };
            const auto load_beside_pv = [&](int i) {
#pragma unroll
                for (int j = 0; j < NUM; j++)
                    if (IS_PLAIN && STAGES == 1 && i == place_of_load(j, NUM, PV_PARTS))
                        next_k.load_piece(j, own_piece + k_place(step + 1), p.k.stride_row, num_own, has_next);
                if (IS_PLAIN && STAGES == 1 && i == PV_PARTS - 1) cp_async_commit_group();
            };
            if (!IS_PLAIN) {
                if (STAGES == 2) load_k(step + 1);
                load_v(STAGES == 1 ? v_step : v_step + 1);
                cp_async_commit_group();
            }
            if (!IS_PLAIN) {
                const int first = first_of(step);
                sees = walk.exists(step) && first < own.end && first + BLOCK_KV > own.begin;
            }
            if (!IS_PLAIN) {
                if (STAGES == 2) is_exact = hides_nan_or_inf();
                is_usual = is_usual && sees && (!IS_LATE || has_probs) && !is_exact && !has_large;
            }
            if (TRIES_FIRST ? is_usual : sees) make_scores(kind, load_beside_s);
            if (STAGES == 1) {
                if (SPLIT > 1) {
                    if (sees) {
                        find_own_largest(largest, scores);
                        lags = lags_behind(largest, rows, scale_log2);
                    }
                    cp_async_wait_group<0>();
                    /* V and P have come, too, and all warps have read K */
                    if (__syncthreads_or(lags)) lags = meet(lags);
                } else {
                    wait_for_tiles<0>(); /* V has come, and all warps have read K */
                }
                if (!IS_PLAIN) {
                    load_k(step + 1);
                    cp_async_commit_group();
                }
            }
            if (!IS_PLAIN && STAGES == 1) {
                is_exact = hides_nan_or_inf();
                is_usual = is_usual && !is_exact;
            }
            if (STORES_EARLY && !TRIES_FIRST && sees) {
                find_own_largest(largest, scores);
                lags = meet(lags_behind(largest, rows, scale_log2));
            }
            if (SPLIT > 1) is_usual = is_usual && !lags;
            if (!TRIES_FIRST && SPLIT == 1) {
                if (sees) find_largest(largest, scores);
                if (is_usual) is_usual = !__any_sync(WHOLE_WARP, lags_behind(largest, rows, scale_log2));
            }
            if (is_usual) {
                softmax<true>(scores, probs, o, sums, rows, scale_log2, last, v_at, kept, load_beside_pv);
                bool is_too_late = TRIES_FIRST && is_too_large(sums);
                if (STORES_EARLY)
                    is_too_late = meet(is_too_late); /* and all warps of these rows have read P of the step before */
                else if (TRIES_FIRST)
                    is_too_late = __any_sync(WHOLE_WARP, is_too_late);
                if (is_too_late) {
                    is_usual = has_probs = false; /* P V has been added, and P is made again */
                } else {
                    add_sums();
                    if (STORES_EARLY) store_weights(p_rows, probs, own_key);
                }
            } else if (IS_PLAIN && STAGES == 1) {
                load_k(step + 1);
                cp_async_commit_group();
            }
        };
        if (HAS_PLAIN_STEPS && step >= plain_begin && step < plain_end && (!IS_LATE || has_probs) && !has_large)
            take_step(plain_step());
        else
            take_step(any_step());
        const auto add = [&] {
            if (is_exact && SPLIT > 1) {
                add_seen_shared(o, p_rows, v, own_column, p, s, warp_row, first_of(v_step));
            } else if (is_exact) {
                u32 counts[BLOCKS];
                float unused[N][4] = {};
#pragma unroll
                for (int m = 0; m < BLOCKS; m++)
                    counts[m] = mask_scores(p, s, unused, warp_row + 16 * m, first_of(v_step));
                add_seen_values(o, probs, v, counts);
            } else {
                add_values<true>(o, last, v_at, nothing);
            }
        };
        if (!is_usual) {
            if (IS_LATE && has_probs) add();
            if (sees) {
                if (TRIES_FIRST) {
                    make_scores(any_step(), nothing);
                    find_largest(largest, scores);
                }
                if (SPLIT > 1) share_largest(shared, own_row, part, largest);
                if (TRIES_FIRST || __any_sync(WHOLE_WARP, lags_behind(largest, rows, scale_log2)))
                    has_large = __any_sync(WHOLE_WARP, raise(shared, own_row, rows, o, largest, scale_log2, part == 0));
                softmax<false>(scores, probs, o, sums, rows, scale_log2, last, v_at, kept, nothing);
                add_sums();
                if (STORES_EARLY) store_weights(p_rows, probs, own_key);
                if (!IS_LATE) add();
            }
        }
        has_probs = sees;
    }

    /* Keys behind the last key are zeros in shared memory, so they are not hidden. */
    const bool is_doubtful =
        !shared.is_careful() && (walk.first(0) < keys.full_begin || keys.full_end < keys.end) && has_nan(o);
    if (SPLIT > 1) {
#pragma unroll
        for (int r = 0; r < 2 * BLOCKS; r++) {
            const float sum = quad_sum(rows[r / 2][r % 2].sum);
            if (lane() % 4 == 0) shared.part(own_row + 8 * r + lane() / 4, part) = sum;
        }
        __syncthreads();
    } else {
        __syncwarp(); /* the lanes know the maxima of their rows */
    }
    const float sink = p.sinks.values.data ? sink_of(p.sinks.values, head) : 0;
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
        finish_block(p, s, head, warp_row + 16 * m, own_column, o[m], rows[m], shared, own_row + 16 * m, unit, sink);
    return is_doubtful;
}

/* A task is one tile of one head of one sequence. The last tile comes first, because its rows are the longest rows of a
 * causal mask. Packed calls have further tasks for the rows that belong to no sequence. A task of a sequence that is
 * longer than max_seqlen does several tiles. */
extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) KERNEL(const fa_cuda_problem p) {
    extern __shared__ __align__(128) char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const bool is_packed = p.cu_seqlens_q != nullptr;
    const int num_heads = (p.b + is_packed) * p.h;
    const long long num_tasks = (long long)num_heads * p.num_tiles;
    for (long long task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const task_place place = place_of_task(task, p.num_tiles, num_heads, p.group_heads);
        const int tile = p.num_tiles - 1 - place.tile, b_idx = quotient(place.head, p.h),
                  head = place.head - b_idx * p.h;
        if (b_idx == p.b) {
            fill_unowned_rows(p, head, clamp(p.cu_seqlens_q[p.b], 0, p.total_q) + tile, p.num_tiles);
            continue;
        }
        const sequence s = sequence_at(p, b_idx);
        for (int row = tile * BLOCK_Q; row < s.len_q; row += p.num_tiles * BLOCK_Q) {
            bool is_doubtful = false;
            do {
                if (threadIdx.x == 0) shared.is_careful() = is_doubtful;
                __syncthreads();
                is_doubtful = attend(p, shared, s, head, row);
                is_doubtful = uniform(__syncthreads_or(is_doubtful)); /* all warps have read Q, K and V */
            } while (is_doubtful);
        }
    }
}
