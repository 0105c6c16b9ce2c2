/* The end of a piece of attn_decode_sm90.cu: teams become one, parts of an item become one, rows are written. */
#ifndef FA_ATTN_DECODE_MERGE_CUH
#define FA_ATTN_DECODE_MERGE_CUH

#include "attn_decode_schedule.cuh"

/* What the warps leave in shared memory at the end of a piece. */
struct warp_results {
    float o[WARPS][16][HEAD_DIM + 8]; /* padded: 8 rows of 4 columns are stored at once */
    float stats[WARPS][16][2];        /* m in exponents of 2, l */
};

/* What row `row` of the tile is: its query and head. */
struct row_place {
    int i, h_idx;
};
DEVICE row_place place_of(const params &p, const item &t, int head, int row) {
    const int at = t.q_tile * BLOCK_Q + row, i = at / p.heads_per_kv;
    return {i, head * p.heads_per_kv + at - i * p.heads_per_kv};
}

/* Four columns of a row that is finished: o = sum of the parts / l. */
DEVICE void write_output(const params &p, const item &t, int head, int row, int column, const float (&o)[4], float max,
                         float sum) {
    const row_place at = place_of(p, t, head, row);
    const float factor = sum == 0 ? 0 : 1 / sum;
    if (column < p.d) {
        u16 *dst = (u16 *)p.o + t.b_idx * p.o_stride_b + (t.s.q_row + at.i) * p.o_stride_row + at.h_idx * p.o_stride_h;
        *(uint2 *)(dst + column) =
            make_uint2(cvt_x2<BF16>(o[0] * factor, o[1] * factor), cvt_x2<BF16>(o[2] * factor, o[3] * factor));
    }
    if (column == 0)
        p.lse[t.b_idx * p.lse_stride_b + at.h_idx * p.lse_stride_h + t.s.q_row + at.i] =
            sum == 0 ? INF : ((max == -INF ? 0 : max) + lg2(sum)) * LN_2;
}

/* The weight of a part whose maximum is `part` in a sum measured from `max`. */
DEVICE float weight(float part, float max) { return part == -INF ? 0 : ex2(part - max); }

/* Where part number idx of an item lies in partial_o: a share cuts at most two items, the one it begins in and the one
 * it ends in. */
DEVICE int part_place(const params &p, const item &t, const piece &x, int head, int idx) {
    if (p.num_splits == 0) return 2 * ((x.first_group + idx) * p.lanes + blockIdx.x % p.lanes) + (idx == 0);
    return ((t.b_idx * p.h_kv + head) * p.max_q_tiles + t.q_tile) * p.num_splits + idx;
}

/* Merges the teams. A whole item is written out, a part goes to partial_o. Whole CTA. */
DEVICE void finish_piece(const params &p, const warp_results &s, const item &t, const piece &x, int head) {
    const int num_rows = min(BLOCK_Q, t.s.len_q * p.heads_per_kv - t.q_tile * BLOCK_Q);
    const int place = x.parts == 1 ? 0 : part_place(p, t, x, head, x.idx);
    for (int idx = threadIdx.x; idx < num_rows * (HEAD_DIM / 4); idx += THREADS) {
        const int row = idx / (HEAD_DIM / 4), column = idx % (HEAD_DIM / 4) * 4;
        float max = -INF, sum = 0, o[4] = {0, 0, 0, 0};
#pragma unroll
        for (int team = 0; team < TEAMS; team++) max = fmaxf(max, s.stats[team * WARPS_Q + row / 16][row % 16][0]);
#pragma unroll
        for (int team = 0; team < TEAMS; team++) {
            const int warp = team * WARPS_Q + row / 16;
            const float w = weight(s.stats[warp][row % 16][0], max);
            const float4 y = *(const float4 *)&s.o[warp][row % 16][column];
            sum += w * s.stats[warp][row % 16][1];
            o[0] += w * y.x, o[1] += w * y.y, o[2] += w * y.z, o[3] += w * y.w;
        }
        if (x.parts == 1) {
            write_output(p, t, head, row, column, o, max, sum);
        } else {
            const long long at = (long long)place * p.partial_rows + row;
            *(float4 *)(p.partial_o + at * HEAD_DIM + column) = make_float4(o[0], o[1], o[2], o[3]);
            if (column == 0) *(float2 *)(p.partial_stats + at * 2) = make_float2(max, sum);
        }
    }
}

__device__ u32 own_counters[FA_DECODE_COUNTER_SLOTS][FA_DECODE_MAX_CTAS];

/* After a part has been written: is it the last of its item? The counter comes back to zero with it. Whole CTA. */
DEVICE bool is_last_part(const params &p, int &is_last, const item &t, const piece &x, int head) {
    __syncthreads();
    if (threadIdx.x == 0) {
        fence_acq_rel(); /* of the whole CTA's writes, which the barrier has handed to this thread */
        /* With equal shares at most one item begins in a share and goes on beyond it. */
        const int idx = p.num_splits == 0 ? x.first_group * p.lanes + blockIdx.x % p.lanes
                                          : (t.b_idx * p.h_kv + head) * p.max_q_tiles + t.q_tile;
        u32 *counter = (p.counters ? p.counters : own_counters[p.counter_slot]) + idx;
        is_last = atomicInc(counter, x.parts - 1) == (u32)x.parts - 1;
        fence_acq_rel();
    }
    __syncthreads();
    return is_last;
}

/* Four columns of VECTORS rows out of all parts, PARTS of them asked for at once, m and l with o: they join the sum as a
 * softmax over parts. idx: of the first vector, the next ones lie THREADS further; beyond `num` nothing is written. */
template <int VECTORS, int PARTS>
DEVICE void merge_vectors(const params &p, const item &t, const piece &x, int head, int idx, int num) {
    const int place_0 = part_place(p, t, x, head, 0), place_1 = part_place(p, t, x, head, 1);
    const int place_step = p.num_splits == 0 ? 2 * p.lanes : 1;
    int row[VECTORS], column[VECTORS];
    float o[VECTORS][4] = {}, max[VECTORS], sum[VECTORS] = {};
#pragma unroll
    for (int n = 0; n < VECTORS; n++) {
        const int at = min(idx + n * THREADS, num - 1);
        row[n] = at / (HEAD_DIM / 4), column[n] = at % (HEAD_DIM / 4) * 4, max[n] = -INF;
    }
    for (int first = 0; first < x.parts; first += PARTS) {
        float4 part[VECTORS][PARTS];
        float2 stats[VECTORS][PARTS];
#pragma unroll
        for (int k = 0; k < PARTS; k++) {
            const int i = min(first + k, x.parts - 1);
            const int place = i == 0 ? place_0 : place_1 + (i - 1) * place_step;
#pragma unroll
            for (int n = 0; n < VECTORS; n++) {
                const long long at = (long long)place * p.partial_rows + row[n];
                stats[n][k] = __ldcg((const float2 *)p.partial_stats + at);
                part[n][k] = __ldcg((const float4 *)(p.partial_o + at * HEAD_DIM + column[n]));
            }
        }
#pragma unroll
        for (int n = 0; n < VECTORS; n++) {
            float next = max[n];
#pragma unroll
            for (int k = 0; k < PARTS; k++) next = fmaxf(next, stats[n][k].x);
            const float keep = weight(max[n], next);
            max[n] = next, sum[n] *= keep;
            o[n][0] *= keep, o[n][1] *= keep, o[n][2] *= keep, o[n][3] *= keep;
#pragma unroll
            for (int k = 0; k < PARTS; k++)
                if (first + k < x.parts) {
                    const float w = weight(stats[n][k].x, next);
                    const float4 y = part[n][k];
                    sum[n] += w * stats[n][k].y;
                    o[n][0] += w * y.x, o[n][1] += w * y.y, o[n][2] += w * y.z, o[n][3] += w * y.w;
                }
        }
    }
#pragma unroll
    for (int n = 0; n < VECTORS; n++)
        if (idx + n * THREADS < num) write_output(p, t, head, row[n], column[n], o[n], max[n], sum[n]);
}

/* The parts of an item, in their order, whoever came last. Whole CTA. Latency is all that counts here, and the memory is
 * busy: what fits into the registers is asked for at once. The order of the sum does not depend on the way taken. */
DEVICE void merge_parts(const params &p, const item &t, const piece &x, int head) {
    const int num = min(BLOCK_Q, t.s.len_q * p.heads_per_kv - t.q_tile * BLOCK_Q) * (HEAD_DIM / 4);
    for (int idx = threadIdx.x; idx < num; idx += 2 * THREADS)
        if (num <= THREADS)
            merge_vectors<1, 8>(p, t, x, head, idx, num);
        else
            merge_vectors<2, 4>(p, t, x, head, idx, num);
}

/* Packed rows behind the last sequence belong to nobody: lse -inf, and o zero where that was asked for. */
DEVICE void fill_unowned_rows(const params &p) {
    const int begin = clamp(p.cu_seqlens_q[p.b], 0, p.total_q);
#pragma unroll 1
    for (int row = begin + blockIdx.x; row < p.total_q; row += gridDim.x)
        for (int h_idx = 0; h_idx < p.h; h_idx++) {
            u16 *o = (u16 *)p.o + row * p.o_stride_row + h_idx * p.o_stride_h;
            for (int i = threadIdx.x; i < p.d && p.zero_tensors; i += THREADS) o[i] = 0;
            if (threadIdx.x == 0) p.lse[h_idx * p.lse_stride_h + row] = -INF;
        }
}

#endif
