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
 * This file walks over keys, ends a tile, and repeats it. attn_fwd_sm80_tiles.cuh holds shared memory and loads,
 * _products P V, _softmax S to P.
 *
 * Which limit binds: latencies. Two warps share a quarter of an SM, and wait for ldmatrix and barriers.
 *
 * Specification: ../cpu/reference.c. */
#define F32         0
#define OF_3        CACHE
#define READS_CACHE (CACHE || !SHORT_ENDS) /* never without CACHE: a row says whether the text knows that */
#define SWIZZLES    (SPLIT == 2 && STAGES == 2)

/* A row of tiles.def gives HEAD_DIM columns, BLOCK_KV keys, WARPS, BLOCKS times 16 query rows that SPLIT warps share,
 * and STAGES of K and V. The row says whether Q and the addresses of a lane are in registers (Q_REGS, LANE_REGS), and
 * when P V is added (LATE). It gives how many loads run AHEAD of products, and the CTAS of an SM. */
#if !defined(HEAD_DIM) || !defined(BLOCK_KV) || !defined(WARPS) || !defined(BLOCKS) || !defined(SPLIT) || \
    !defined(STAGES) || !defined(Q_REGS) || !defined(LANE_REGS) || !defined(LATE) || !defined(AHEAD) ||   \
    !defined(SHORT_ENDS) || !defined(CTAS) || !defined(SCORE) || !defined(DROPOUT) || !defined(CACHE)
#error "a row of tiles.def; SCORE: softcap, ALiBi or a scale that is not positive; DROPOUT, CACHE: 0 or 1"
#endif
#ifndef KERNEL
#define KERNEL attn_fwd_sm80
#endif

#include "rows_any.cuh"
#include "tile_sm80.cuh"
#include "quads.cuh"
#include "sinks.cuh"
#include "task_order.cuh"
#include "attn_fwd_sm80_softmax.cuh"
#include "attn_fwd_sm80_cache.cuh"

/* ---- kinds of steps -------------------------------------------------------------------------------------------- */

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
#if CACHE
    const auto loader_of = [&](const fa_cuda_view &kv) { return cached_key_loader(kv, head_kv, shared.places_of(0)); };
    const place_finder places = {p, s, first_of(0), shared};
    const auto ask_for_pages = [&](int tile) {
        if ((int)threadIdx.x < BLOCK_KV && walk.exists(tile)) places.ask(tile);
    };
    const auto put_places = [&](int tile) {
        if ((int)threadIdx.x < BLOCK_KV && walk.exists(tile)) places.put(tile);
    };
    ask_for_pages(0), ask_for_pages(1), ask_for_pages(2);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    put_places(0), put_places(1);
    __syncthreads();
#else
    const auto loader_of = [&](const fa_cuda_view &kv) {
        return key_loader((const factor *)kv.data + s.kv_batch * kv.stride_b +
                              (long long)(s.kv_row + first_of(0)) * kv.stride_row + head_kv * kv.stride_h,
                          kv.stride_row);
    };
    const auto ask_for_pages = [](int) {};
    const auto put_places = [](int) {};
#endif
    auto next_k = loader_of(p.k), next_v = loader_of(p.v);
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
        if (walk.exists(step)) next_k.load(own_piece + k_place(step), p.k.stride_row, num_own + step * BLOCK_KV, step);
    };
    const auto load_v = [&](int step) {
        if (step >= 0 && walk.exists(step))
            next_v.load(own_piece + v_place(step), p.v.stride_row, num_own + step * BLOCK_KV, step);
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
    /* In a plain step all rows of the CTA see all keys, and all tiles to load exist as a whole. With one stage a late
     * step loads V of the step before. */
    const bool has_all_rows = first_row + BLOCK_Q <= s.len_q;
    const int plain_begin = uniform(
        max((int)IS_LATE, ceil_div(first_of(0) + BLOCK_KV - keys.full_end, BLOCK_KV) + (IS_LATE && STAGES == 1)));
    const int plain_end = has_all_rows && !shared.is_careful()
                              ? uniform(min(walk.num, (first_of(0) + BLOCK_KV - keys.full_begin) / BLOCK_KV))
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
            if (IS_PLAIN) next_k.begin(step + 1), next_v.begin(STAGES == 1 ? v_step : v_step + 1);
            ask_for_pages(step + 3); /* together with the tiles that this step loads */
            if (SPLIT > 1 && !STORES_EARLY && (IS_PLAIN || has_probs)) store_weights(p_rows, probs, own_key);
            /* Plain steps load K and V piece by piece beside products. */
            constexpr int NUM = key_loader::NUM, S_PARTS = K_STEPS * N / 2, PV_PARTS = BLOCK_KV / 16 * OWN_COLUMNS / 2;
            const auto load_beside_s = [&](int i) {
                constexpr int ALL = STAGES == 2 ? 2 * NUM : NUM;
#pragma unroll
                for (int j = 0; j < ALL; j++)
                    if (IS_PLAIN && i == place_of_load(j, ALL, S_PARTS)) {
                        if (STAGES == 2 && j < NUM)
                            next_k.load_piece(j, own_piece + k_place(step + 1), p.k.stride_row, num_own, has_next,
                                              step + 1);
                        else
                            next_v.load_piece(j % NUM, own_piece + v_place(STAGES == 1 ? v_step : v_step + 1),
                                              p.v.stride_row, num_own, STAGES == 1 || IS_LATE || has_next,
                                              STAGES == 1 ? v_step : v_step + 1);
                    }
                if (IS_PLAIN && i == S_PARTS - 1) cp_async_commit_group();
            };
            const auto load_beside_pv = [&](int i) {
#pragma unroll
                for (int j = 0; j < NUM; j++)
                    if (IS_PLAIN && STAGES == 1 && i == place_of_load(j, NUM, PV_PARTS))
                        next_k.load_piece(j, own_piece + k_place(step + 1), p.k.stride_row, num_own, has_next,
                                          step + 1);
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
            put_places(step + 2);
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
