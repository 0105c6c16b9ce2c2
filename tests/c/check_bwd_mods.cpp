/* Tests programmable attention in attn_bwd_sm90 and attn_bwd_wide_sm90 (csrc/cuda/attn_bwd_mods.cuh) over random
 * problems and block masks: the work tiles and their lists of query tiles, the turns in which key tiles add to dQ, the
 * pairs that a step hides, and P and the weights of a step. Masks and functions are evaluated pair by pair for
 * comparison.
 *
 * The kernel's own code does all this on the emulated threads of cuda_emulation.h. Products are not emulated.
 *
 * tests/guards/test_check_kernels.py compiles this file for rows of tiles.def that take mods, with flex_mods.cuh. */
#define FA_PTX_SM90_CUH
#include "cuda/tensor_map.h"
#include "expect.h"

/* ---- in place of ptx_sm90.cuh ------------------------------------------------------------------------------------ */

enum : u64 { L2_EVICT_FIRST, L2_EVICT_LAST };
constexpr u32 matrix_descriptor_high(int) { return 0; }
constexpr u32 matrix_descriptor_bytes(int bytes) { return (u32)bytes; }
template <int N, class T> struct wgmma {
    template <u32...> static void ss(...) {}
    template <u32...> static void ss_4(...) {}
    template <u32...> static void rs(...) {}
    template <u32...> static void rs_4(...) {}
};
static void wgmma_fence() {}
static void wgmma_commit_group() {}
static float __uint_as_float(u32 x) { return fa_f32_of_bits(x); }
static u32 cvt_e5m2_x2(float, float) { return 0; } /* of weights in fp16, which kernels with a derivative have not */
static void stmatrix_x4_trans(u32, u32, u32, u32, u32) {}
static float2 ld_shared_x2(const float *p) { return {p[0], p[1]}; }
static void cp_async_bulk_tensor_load(...) {}
static void cp_async_bulk_tensor_multicast(...) {}
static void cp_async_bulk_prefetch_tensor(...) {}
static void cp_async_bulk_load(...) {}
static int atomicAdd(unsigned *counter, int x) { return (int)(*counter += (unsigned)x) - x; }
#define mbarrier_wait_cluster(...)          ((void)0)
#define mbarrier_arrive(...)                ((void)0)
#define mbarrier_arrive_remote_release(...) ((void)0)
#define arrives_for_warp(lane)              ((lane) == 0)
#define elect_one()                         (threadIdx.x % 32 == 0)
#define fence_proxy_async_global()          ((void)0)

template <class T> static T __ldg(const T *place) { return *place; }
template <int N> static void pin(u32 (&)[N]) {}
/* A lane's float of a row is the row's number (flex_row), and lanes have rows that follow one another. */
static float float_of_lane(float x, int from) {
    return from < 0 || from > 31 ? NAN : x - (float)(emulated_thread.x % 32) + (float)from;
}
template <class T> static T float_of_lane(T x, int) { return x; }
#define __shfl_sync(mask, x, from) float_of_lane(x, from)
#include "cuda/attn_bwd_scores.cuh"

/* ---- problems ---------------------------------------------------------------------------------------------------- */

static unsigned below(unsigned n) {
    static u64 state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % n;
}
#define PICK(...) ((const int[]){__VA_ARGS__}[below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))])

enum { MOST_LEN = 700, MOST_TILES = 12, MOST_HEADS = 12, MOST_BATCHES = 2, MOST_MASKS = MOST_HEADS * MOST_BATCHES };
static params p;
static int heads_of_key; /* query heads of one key head */
static int q_tiles, kv_tiles, num_masks;
static unsigned char kinds[MOST_MASKS * (MOST_LEN + 1) * (MOST_LEN / 16 + 2)];
static int walks[MOST_MASKS * MOST_TILES * (1 + MOST_TILES)], order[MOST_MASKS * MOST_TILES];
static u32 ranks[MOST_MASKS * MOST_TILES * (MOST_TILES + 1)];

static int mask_at(int b_idx, int head) { return b_idx % p.flex.mask_b * p.flex.mask_h + head % p.flex.mask_h; }

/* The kind of the block of a pair. */
static int kind_at(int mask, int i, int j) {
    if (!p.flex.kinds) return KIND_WITHOUT_BLOCKS;
    return kinds[(mask * p.flex.rows + i / p.flex.block_q) * p.flex.columns + j / p.flex.block_kv];
}
static bool sees(int b_idx, int head, int i, int j) {
    if (i >= p.len_q || j >= p.len_kv) return false;
    const int kind = kind_at(mask_at(b_idx, head), i, j);
    return kind == FULL_BLOCK || (kind == PARTIAL_BLOCK && flex_mask(p.values, b_idx, head, i, j));
}

/* The kind of a pair of tiles, found pair by pair once a problem. */
static signed char tile_kinds[MOST_MASKS][MOST_TILES][MOST_TILES];
static int kind_of_tiles(int mask, int q_tile, int kv_tile) {
    signed char &known = tile_kinds[mask][q_tile][kv_tile];
    if (known >= 0) return known;
    unsigned seen = 0;
    for (int i = q_tile * BLOCK_Q; i < min((q_tile + 1) * BLOCK_Q, p.len_q); i++)
        for (int j = kv_tile * BLOCK_KV; j < min((kv_tile + 1) * BLOCK_KV, p.len_kv); j++)
            seen |= 1u << kind_at(mask, i, j);
    return known = (signed char)(seen & (seen - 1) ? MIXED_BLOCKS : __ffs(seen) - 1);
}

/* Fills walks, order and ranks, as flex_walks.cu says. */
static void make_lists(bool has_order) {
    for (int mask = 0; mask < num_masks; mask++) {
        int *walk = walks + mask * kv_tiles * (1 + q_tiles), *place = order + mask * kv_tiles;
        for (int j = 0; j < kv_tiles; j++) {
            int *list = walk + j * (1 + q_tiles);
            list[0] = 0;
            for (int i = q_tiles - 1; i >= 0; i--) {
                const int kind = kind_of_tiles(mask, i, j);
                if (kind != EMPTY_BLOCK) list[1 + list[0]++] = 4 * i + kind;
            }
        }
        int num = 0;
        for (int length = q_tiles; length >= 0; length--)
            for (int j = 0; j < kv_tiles; j++)
                if (walk[j * (1 + q_tiles)] == length) place[num++] = j;
        for (int j = 0; j < kv_tiles && !has_order; j++) place[j] = j;
        for (int i = 0; i < q_tiles; i++) {
            u32 *row = ranks + (mask * q_tiles + i) * (kv_tiles + 1), before = 0;
            int last = -1;
            for (int n = 0; n < kv_tiles; n++)
                if (kind_of_tiles(mask, i, place[n]) != EMPTY_BLOCK) row[last = place[n]] = 2 * before++;
            if (last >= 0) row[last]++;
            row[kv_tiles] = before;
        }
    }
}

static void make_problem() {
    memset(&p, 0, sizeof p);
    memset(tile_kinds, -1, sizeof tile_kinds);
    const int h_kv = 1 + (int)below(3);
    heads_of_key = PICK(1, 1, 2, 4);
    p.b = 1 + (int)below(MOST_BATCHES), p.h_kv = h_kv, p.h = h_kv * heads_of_key;
    const int around = PICK(64, 128, 256, 300, 384);
    p.len_q = PICK(1, 63, around - 1, around, around + 1, 650), p.len_kv = PICK(1, 127, around, around + 1, 129, 650);
    q_tiles = ceil_div(p.len_q, BLOCK_Q), kv_tiles = ceil_div(p.len_kv, BLOCK_KV);
    p.window_left = p.window_right = -1;
    p.flex.mask_b = PICK(1, p.b), p.flex.mask_h = WIDE && heads_of_key > 1 ? 1 : PICK(1, p.h);
    num_masks = p.flex.mask_b * p.flex.mask_h;
    const bool has_blocks = below(5), splits = has_blocks && heads_of_key > 1 && p.flex.mask_h > 1;
    if (has_blocks) {
        p.flex.block_q = PICK(16, 64, 100, 128, 256, 1 << 30), p.flex.block_kv = PICK(16, 40, 128, 256, 1 << 30);
        p.flex.rows = ceil_div(p.len_q, p.flex.block_q), p.flex.columns = ceil_div(p.len_kv, p.flex.block_kv);
        const unsigned density = (unsigned)PICK(0, 10, 50, 100), part = (unsigned)PICK(0, 50, 100);
        for (int n = 0; n < num_masks * p.flex.rows * p.flex.columns; n++)
            kinds[n] = below(100) >= density ? EMPTY_BLOCK : below(100) < part ? PARTIAL_BLOCK : FULL_BLOCK;
        p.flex.kinds = kinds, p.flex.walks = walks, p.flex.order = splits ? nullptr : order, p.ranks = ranks;
        make_lists(!splits);
    }
    p.mask_b = p.flex.mask_b, p.mask_h = p.flex.mask_h;
    /* plan/bwd_workspace.h; without masks of their own, heads may be split, too */
    p.pieces = splits ? heads_of_key : !WIDE && heads_of_key % 2 == 0 && below(2) ? 2 : 1;
    p.heads_per_tile = heads_of_key / p.pieces, p.heads_inverse = FA_HEADS_INVERSE(p.heads_per_tile);
    p.num_kv_tiles = kv_tiles, p.num_tiles = kv_tiles * p.b * h_kv * p.pieces;
    p.num_slabs = q_tiles;
    p.group_heads = 1 + (int)below((unsigned)(p.b * h_kv * p.pieces));
    p.score_scale = p.scale = 0.3f;
    p.scale_log2 = (FLEX_SCORE ? 1 : p.scale) * LOG2_E;
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static long num_pairs;

/* Compares a step of one thread. */
static void check_step(const tile &t, int entry, int head) {
    emulated_thread.x = 128 + below(256), emulated_block.x = below(CTAS);
    const mods mod(p.flex, p.values, t.b_idx, head);
    const first_pair at = pair_of(t, query_tile_of(entry));
    const int row = at.row;
    EXPECT(row / BLOCK_Q == query_tile_of(entry) && at.key / BLOCK_KV == t.kv_tile);
    hidden_pairs hidden;
    const bool hides = hidden.find(p, t, mod, entry);
    float s[S_REGS], products[S_REGS], lse[STAT_REGS];
    for (int i = 0; i < S_REGS; i++) {
        const int query = row + row_of(i), key = at.key + 8 * key_of(i);
        EXPECT(hidden.has(i) == !sees(t.b_idx, head, query, key) && (hides || !hidden.has(i)));
        s[i] = products[i] = hidden.has(i) ? (const float[]){INFINITY, NAN, 5}[below(3)] : (float)below(100) / 10 - 5;
    }
    for (int i = 0; i < STAT_REGS; i++) lse[i] = below(9) ? (float)below(100) / 20 + 5 : INFINITY;
    pairs_of_step pairs;
    pairs.load(mod, {}, at, query_tile_of(entry)), pairs.settle({});
    u32 P[P_REGS], W[P_REGS], rest[REST_REGS];
    const dropped_pairs<DROPOUT> drops(p, t, head, query_tile_of(entry),
                                       nullptr); /* check_bwd_sm90 has kernels with dropout */
    exponentiate_by_mods(s, lse, P, p, mod, values_of(p, t, mod), hidden, hides, drops, at, pairs);
    for (int i = 0; WEIGHTED && i < P_REGS; i++) W[i] = cvt_x2<weight_type>(s[2 * i], s[2 * i + 1]);
    split_weights(s, WEIGHTED ? W : P, rest);
    for (int i = 0; i < S_REGS; i++, num_pairs++) {
        const int query = row + row_of(i), key = at.key + 8 * key_of(i);
        float prob[2], weight = 0, want = 0;
        unpack_x2<element>(P[i / 2], prob[0], prob[1]);
        if (!hidden.has(i)) {
            const float x = p.score_scale * products[i];
            const float score = FLEX_SCORE ? flex_score(p.values, x, t.b_idx, head, query, key) : x;
            want = exp2f(score * LOG2_E - lse[stat_of(i)]);
            flex_sums none;
            weight = FLEX_FACTOR ? flex_derivative(p.values, none, x, want, t.b_idx, head, query, key) : want;
        }
        EXPECT(fabsf(prob[i % 2] - want) <= 0.01f * want && fabsf(s[i] - weight) <= 1e-4f * fabsf(weight));
        const float kept = i < FLOAT_WEIGHTS ? s[i] : weight_of(WEIGHTED ? W : P, rest, i);
        EXPECT(fabsf(kept - s[i]) <= (BF16 || FLEX_FACTOR ? 1e-4f : 1e-3f) * fabsf(s[i]));
    }
}

/* ---- the work tiles ---------------------------------------------------------------------------------------------- */

static int found[MOST_BATCHES][MOST_HEADS][MOST_TILES], turns[MOST_BATCHES][MOST_HEADS][MOST_TILES];

static void check_tile(int idx) {
    const tile t = tile_at(p, idx, p.num_kv_tiles, tile{});
    EXPECT(0 <= t.b_idx && t.b_idx < p.b && 0 <= t.head_kv && t.head_kv < p.h_kv);
    EXPECT(0 <= t.kv_tile && t.kv_tile < kv_tiles && 0 <= t.piece && t.piece < t.pieces && t.pieces == p.pieces);
    EXPECT(t.first_head == t.head_kv * heads_of_key + t.piece * p.heads_per_tile);
    EXPECT(t.slab_head == t.b_idx * p.h + t.first_head && t.slab == 0);
    /* The pieces of a tile begin in their order, and share the place of their sums. */
    EXPECT(found[t.b_idx][t.head_kv][t.kv_tile]++ == t.piece);
    static int owners[1 << 12];
    const int owner = (t.b_idx * MOST_HEADS + t.head_kv) * MOST_TILES + t.kv_tile;
    if (CUTS_HEADS) { /* otherwise a tile is one piece and needs no place */
        EXPECT(0 <= t.idx && t.idx < kv_tiles * p.b * p.h_kv && (t.piece == 0 || owners[t.idx] == owner));
        owners[t.idx] = owner;
    }

    const int num_steps = (t.queries.end - t.queries.begin) * p.heads_per_tile;
    bool is_step[MOST_HEADS][MOST_TILES] = {};
    const auto place_at = [&](int step) { return place_of_step(p, t.queries.end, step).q_tile; };
    list_reader reader;
    if (num_steps > 0) reader.begin(t, place_at(0), place_at(1));
    for (int step = 0; step < num_steps; step++, reader.advance()) {
        const step_place at = place_of_step(p, t.queries.end, step);
        const int entry = reader.entry_of(at.q_tile), i = query_tile_of(entry), head = t.first_head + at.head_in_group;
        reader.look_ahead(t, place_at(step + 2));
        EXPECT(0 <= i && i < q_tiles && head < p.h && !is_step[head][i]);
        is_step[head][i] = true;
        EXPECT(kind_of(entry) == kind_of_tiles(mask_at(t.b_idx, head), i, t.kv_tile));
        /* Key tiles add in the order in which they begin. So a key tile waits only for what has begun. */
        const u32 share = reader.share;
        int &turn = turns[t.b_idx][head][i], all = 0;
        for (int j = 0; j < kv_tiles; j++) all += kind_of_tiles(mask_at(t.b_idx, head), i, j) != EMPTY_BLOCK;
        EXPECT(turn_of(p, t, share, i) == (u32)turn);
        EXPECT(t.begins_sum(share, i) == (turn == 0));
        turn++;
        EXPECT(t.ends_sum(share, i) == (turn == all));
        check_step(t, entry, head);
    }
    for (int g = 0; g < p.heads_per_tile; g++)
        for (int i = 0; i < q_tiles; i++)
            EXPECT(is_step[t.first_head + g][i] ==
                   (kind_of_tiles(mask_at(t.b_idx, t.first_head + g), i, t.kv_tile) != EMPTY_BLOCK));
}

int main() {
    for (int n = 0; n < 120; n++) {
        make_problem();
        memset(found, 0, sizeof found), memset(turns, 0, sizeof turns);
        for (int idx = 0; idx < p.num_tiles; idx++) check_tile(idx);
        for (int b_idx = 0; b_idx < p.b; b_idx++)
            for (int head = 0; head < p.h_kv; head++)
                for (int j = 0; j < kv_tiles; j++) EXPECT(found[b_idx][head][j] == p.pieces);
    }
    printf("%ld pairs are as they should be\n", num_pairs);
    return num_pairs < 100000;
}
