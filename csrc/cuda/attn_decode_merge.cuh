/* This file does the work at the end of a piece of attn_decode.cu. The results of the teams are merged into one
 * result. The parts of an item are merged too. The rows are then written. */
#ifndef FA_ATTN_DECODE_MERGE_CUH
#define FA_ATTN_DECODE_MERGE_CUH

#include "attn_decode_schedule.cuh"
#include "score.cuh"
#include "sinks.cuh"

/* The warps leave their results in shared memory at the end of a piece. */
struct warp_results {
    float o[WARPS][16][HEAD_DIM + 8]; /* padded, because 8 rows of 4 columns are stored at once */
    float stats[WARPS][16][2];        /* m in exponents of 2, l */
};

constexpr int PART_ROW = FA_DECODE_PART_ROW(HEAD_DIM);
constexpr int STAGED_ROWS =
    TEAMS * SLOTS * TEAM_KEYS * HEAD_DIM * element::BYTES / (4 * PART_ROW); /* as many rows as fit into the rings */

/* Rows of an item's parts wait here for the merge. Row r of part k has the number k rows + r. */
struct staged_parts {
    alignas(16) float row[STAGED_ROWS][PART_ROW];
};

/* The CTAs of a cluster send each other slices. CTA `from` sends its sums of the columns in this CTA's slice. */
struct slices {
    alignas(16) float o[HAS_CLUSTERS ? 16 * HEAD_DIM : 4];        /* [from][16][HEAD_DIM / CTAs] */
    float stats[HAS_CLUSTERS ? FA_DECODE_MAX_CLUSTER : 1][16][2]; /* [from][row]: m in exponents of 2, l */
};

/* A row_place is the query and the head of row `row` of the tile. */
struct row_place {
    int i, h_idx;
};
DEVICE row_place place_of(const params &p, const item &t, int head, int row) {
    const int at = t.q_tile * BLOCK_Q + row, i = divide(at, p.by_heads_per_kv);
    return {i, head * p.heads_per_kv + at - i * p.heads_per_kv};
}

/* Writes four columns of a finished row: o = sum of the parts / l. */
DEVICE void write_output(const params &p, const item &t, int head, int row, int column, const float (&o)[4], float max,
                         float sum) {
    const row_place at = place_of(p, t, head, row);
    float lse = sum == 0 ? p.empty_lse : ((max == -INF ? 0 : max) + lg2(sum)) * LN_2, factor = 1 / sum;
    if (p.sinks.values.data) {
        const float sink = sink_of_row(p.sinks.values, p.sinks.shift, t.b_idx, at.h_idx, t.s.q_row + at.i);
        const row_with_sink y = add_sink(sum == 0 ? -INF : lse, sink);
        lse = y.lse, factor *= y.share;
    }
    float x[4]; /* 0 where the row sees no key, whatever V holds */
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = sum == 0 ? 0 : o[i] * factor;
    if (column < p.d) {
        element::output *dst = (element::output *)p.o + t.b_idx * p.o_stride_b + (t.s.q_row + at.i) * p.o_stride_row +
                               at.h_idx * p.o_stride_h;
        *(uint2 *)(dst + column) = make_uint2(cvt_x2<element::output>(x[0], x[1]), cvt_x2<element::output>(x[2], x[3]));
    }
    if (column == 0) p.lse[t.b_idx * p.lse_stride_b + at.h_idx * p.lse_stride_h + t.s.q_row + at.i] = lse;
}

/* Returns the weight of a part with maximum `part` in a sum measured from `max`. */
DEVICE float weight(float part, float max) { return part == -INF ? 0 : ex2(part - max); }

/* Returns the place of part `idx` of an item in partial_o. A share cuts at most two items, one at its beginning and
 * one at its end. */
DEVICE int part_place(const params &p, const item &t, const piece &x, int head, int idx) {
    if (p.num_splits == 0) return 2 * ((x.first_group + idx) * p.lanes + blockIdx.x) + (idx == 0);
    return ((t.b_idx * p.h_kv + head) * p.max_q_tiles + t.q_tile) * p.num_splits + idx;
}

/* A row_sums holds sums of some columns of a row, with exponents measured from max. */
struct row_sums {
    float max, sum, o[4];
};

/* Adds further sums to x. The weight w converts these sums to the maximum of x. */
DEVICE void add(row_sums &x, float w, float sum, float4 o) {
    x.sum += w * sum;
    x.o[0] += w * o.x, x.o[1] += w * o.y, x.o[2] += w * o.z, x.o[3] += w * o.w;
}

/* Merges the results of all teams. */
DEVICE row_sums merge_teams(const warp_results &s, int row, int column) {
    row_sums x = {-INF, 0, {0, 0, 0, 0}};
#pragma unroll
    for (int team = 0; team < TEAMS; team++) x.max = fmaxf(x.max, s.stats[team * WARPS_Q + row / 16][row % 16][0]);
#pragma unroll
    for (int team = 0; team < TEAMS; team++) {
        const int warp = team * WARPS_Q + row / 16;
        add(x, weight(s.stats[warp][row % 16][0], x.max), s.stats[warp][row % 16][1],
            *(const float4 *)&s.o[warp][row % 16][column]);
    }
    return x;
}

/* Merges the results of the teams. A whole item is written to o and lse, and a part is written to partial_o. The
 * whole CTA calls this function. */
DEVICE void finish_piece(const params &p, const warp_results &s, const item &t, const piece &x, int head) {
    const int num_rows = min(BLOCK_Q, t.s.len_q * p.heads_per_kv - t.q_tile * BLOCK_Q);
    const int place = x.parts == 1 ? 0 : part_place(p, t, x, head, x.idx);
    for (int idx = threadIdx.x; idx < num_rows * (HEAD_DIM / 4); idx += THREADS) {
        const int row = idx / (HEAD_DIM / 4), column = idx % (HEAD_DIM / 4) * 4;
        const row_sums y = merge_teams(s, row, column);
        if (x.parts == 1) {
            write_output(p, t, head, row, column, y.o, y.max, y.sum);
        } else {
            float *dst = p.partial_o + ((long long)place * p.partial_rows + row) * PART_ROW;
            *(float4 *)(dst + column) = make_float4(y.o[0], y.o[1], y.o[2], y.o[3]);
            if (column == 0) *(float4 *)(dst + HEAD_DIM) = make_float4(y.max, y.sum, 0, 0);
        }
    }
}

__device__ u32 own_counters[FA_DECODE_COUNTER_SLOTS][FA_DECODE_MAX_CTAS];

/* Returns the counter of an item's parts. With equal shares, at most one item begins in a share and goes on beyond
 * the share. */
DEVICE int counter_of(const params &p, const item &t, const piece &x, int head) {
    return p.num_splits == 0 ? x.first_group * p.lanes + blockIdx.x
                             : (t.b_idx * p.h_kv + head) * p.max_q_tiles + t.q_tile;
}

/* Returns whether this part of an item is the last part to come. The part has been written before the call. The
 * counter returns to zero with the last part. The whole CTA calls this function. */
DEVICE bool is_last_part(const params &p, int &is_last, const piece &x, int idx) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 *counter = (p.counters ? p.counters : own_counters[p.counter_slot]) + idx;
        /* The increment is ordered behind the writes of the whole CTA, which the barrier has passed to this thread. */
        is_last = atom_inc_acq_rel(counter, x.parts - 1) == (u32)x.parts - 1;
    }
    __syncthreads();
    return is_last;
}

/* Merges the parts of an item, in their order, whichever part came last. All parts come into shared memory together,
 * as far as there is room. Only latency counts here, and the memory is busy. The parts are merged like a softmax
 * over parts. The whole CTA calls this function. */
DEVICE void merge_parts(const params &p, staged_parts &s, const item &t, const piece &x, int head) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_rows = min(BLOCK_Q, t.s.len_q * p.heads_per_kv - t.q_tile * BLOCK_Q);
    constexpr int ROWS_OF_THREADS = 4 * THREADS / HEAD_DIM; /* rows of which a thread has one vector */
    const int rows_at_once = num_rows * x.parts <= STAGED_ROWS ? num_rows : min(num_rows, ROWS_OF_THREADS);
    const int parts_at_once = min(x.parts, STAGED_ROWS / rows_at_once);
    const int place_0 = part_place(p, t, x, head, 0), place_1 = part_place(p, t, x, head, 1);
    const int place_step = p.num_splits == 0 ? 2 * p.lanes : 1;
#pragma unroll 1
    for (int first_row = 0; first_row < num_rows; first_row += rows_at_once) {
        const int rows = min(rows_at_once, num_rows - first_row);
        /* o, max and sum keep their values between rounds of parts, if not all parts come at once. */
        float o[4], max = -INF, sum;
#pragma unroll 1
        for (int first = 0; first < x.parts; first += parts_at_once) {
            const int parts = min(parts_at_once, x.parts - first);
            __syncthreads();
#pragma unroll 1
            for (int k = warp; k < parts; k += WARPS) {
                const int place = first + k == 0 ? place_0 : place_1 + (first + k - 1) * place_step;
                const float *src = p.partial_o + ((long long)place * p.partial_rows + first_row) * PART_ROW;
                const u32 dst = smem_address(s.row[k * rows]);
                for (int n = lane; n < rows * (PART_ROW / 4); n += 32) cp_async_16(dst + 16 * n, src + 4 * n, true);
            }
            cp_async_wait_all();
            __syncthreads();
#pragma unroll 1
            for (int n = threadIdx.x; n < rows * (HEAD_DIM / 4); n += THREADS) {
                const int row = n / (HEAD_DIM / 4), column = n % (HEAD_DIM / 4) * 4;
                if (first == 0) max = -INF, sum = o[0] = o[1] = o[2] = o[3] = 0;
                float next = max;
#pragma unroll 4
                for (int k = 0; k < parts; k++) next = fmaxf(next, s.row[k * rows + row][HEAD_DIM]);
                const float keep = weight(max, next);
                max = next, sum *= keep, o[0] *= keep, o[1] *= keep, o[2] *= keep, o[3] *= keep;
#pragma unroll 4
                for (int k = 0; k < parts; k++) {
                    const float *part = s.row[k * rows + row];
                    const float w = weight(part[HEAD_DIM], next);
                    const float4 y = *(const float4 *)(part + column);
                    sum += w * part[HEAD_DIM + 1];
                    o[0] += w * y.x, o[1] += w * y.y, o[2] += w * y.z, o[3] += w * y.w;
                }
                if (first + parts == x.parts) write_output(p, t, head, first_row + row, column, o, max, sum);
            }
        }
    }
}

/* ---- clusters -------------------------------------------------------------------------------------------------- */

/* Takes the place of finish_piece and merge_parts where a cluster has read a part. Each CTA gets a slice of the
 * columns from all CTAs of the cluster and merges the slices. If there are more parts, each CTA counts and merges
 * the parts of its own slice. No CTA waits for the other slices. The whole cluster calls this function. The cluster
 * is number blockIdx.z of its head, and the CTA is blockIdx.x. */
DEVICE void finish_in_cluster(const params &p, const warp_results &s, slices &from, u64 *slices_came, int &is_last,
                              const item &t, const piece &x, int head) {
    const int size = 1 << p.cluster_bits, width = HEAD_DIM >> p.cluster_bits, num_rows = t.s.len_q * p.heads_per_kv;
    const int rank = blockIdx.x, number = blockIdx.z;
    cluster_wait(); /* all rings are free, and all barriers are initialised */
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(slices_came, num_rows * (HEAD_DIM * 4 + size * 8));
#pragma unroll 1
    for (int idx = threadIdx.x; idx < num_rows * (HEAD_DIM / 4); idx += THREADS) {
        const int row = idx / (HEAD_DIM / 4), column = idx % (HEAD_DIM / 4) * 4;
        const int to = (column << p.cluster_bits) / HEAD_DIM, in_slice = column - to * width;
        const row_sums y = merge_teams(s, row, column);
        st_async(from.o + (rank * 16 + row) * width + in_slice, slices_came,
                 make_float4(y.o[0], y.o[1], y.o[2], y.o[3]), to);
        if (in_slice == 0) st_async(from.stats[rank][row], slices_came, make_float2(y.max, y.sum), to);
    }
    mbarrier_wait(slices_came, 0);

    /* [number][h_kv][size][partial_rows][width + 4]; the last 4 floats: max, sum, 2 unused */
    const int part_row = width + 4, part_step = p.h_kv * size * p.partial_rows * part_row;
    float *const parts = p.partial_o + (((number - x.idx) * p.h_kv + head) * size + rank) * p.partial_rows * part_row;
    for (int idx = threadIdx.x; idx < 16 * (width / 4); idx += THREADS) {
        const int row = idx % 16, column = idx / 16 * 4;
        if (row >= num_rows) continue;
        row_sums y = {-INF, 0, {0, 0, 0, 0}};
#pragma unroll
        for (int i = 0; i < FA_DECODE_MAX_CLUSTER; i++)
            if (i < size) y.max = fmaxf(y.max, from.stats[i][row][0]);
#pragma unroll
        for (int i = 0; i < FA_DECODE_MAX_CLUSTER; i++)
            if (i < size)
                add(y, weight(from.stats[i][row][0], y.max), from.stats[i][row][1],
                    *(const float4 *)(from.o + (i * 16 + row) * width + column));
        if (x.parts == 1) {
            write_output(p, t, head, row, rank * width + column, y.o, y.max, y.sum);
        } else {
            float *dst = parts + x.idx * part_step + row * part_row;
            *(float4 *)(dst + column) = make_float4(y.o[0], y.o[1], y.o[2], y.o[3]);
            if (column == 0) *(float4 *)(dst + width) = make_float4(y.max, y.sum, 0, 0);
        }
    }
    if (x.parts == 1 || !is_last_part(p, is_last, x, ((number - x.idx) * p.h_kv + head) * size + rank)) return;

    constexpr int AT_ONCE = 8; /* only latency counts here */
    for (int idx = threadIdx.x; idx < 16 * (width / 4); idx += THREADS) {
        const int row = idx % 16, column = idx / 16 * 4;
        if (row >= num_rows) continue;
        row_sums y = {-INF, 0, {0, 0, 0, 0}};
#pragma unroll 1
        for (int first = 0; first < x.parts; first += AT_ONCE) {
            float4 o[AT_ONCE], stats[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float *part = parts + min(first + i, x.parts - 1) * part_step + row * part_row;
                o[i] = *(const float4 *)(part + column), stats[i] = *(const float4 *)(part + width);
            }
            float max = y.max;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) max = fmaxf(max, stats[i].x);
            row_sums before = y;
            y = {max, 0, {0, 0, 0, 0}};
            add(y, weight(before.max, max), before.sum,
                make_float4(before.o[0], before.o[1], before.o[2], before.o[3]));
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (first + i < x.parts) add(y, weight(stats[i].x, max), stats[i].y, o[i]);
        }
        write_output(p, t, head, row, rank * width + column, y.o, y.max, y.sum);
    }
}

/* Packed rows behind the last sequence belong to no sequence. The LSE of such a row becomes -inf, and its o becomes
 * zero if zero_tensors is set. */
DEVICE void fill_unowned_rows(const params &p) {
    const int begin = clamp(p.cu_seqlens_q[p.b], 0, p.total_q);
#pragma unroll 1
    for (int row = begin + blockIdx.y * gridDim.x + blockIdx.x; row < p.total_q; row += gridDim.x * gridDim.y)
        for (int h_idx = 0; h_idx < p.h; h_idx++) {
            element::output *o = (element::output *)p.o + row * p.o_stride_row + h_idx * p.o_stride_h;
            for (int i = threadIdx.x; i < p.d && p.zero_tensors; i += THREADS) o[i] = element::output{};
            if (threadIdx.x == 0) p.lse[h_idx * p.lse_stride_h + row] = -INF;
        }
}

#endif
