/* Tests the distribution of work in attn_fwd_sm90 and both backward kernels, and the boxes that TMA reads, over random
 * problems. The tiles of a launch must cover all tiles exactly once. The properties of a tile must agree with the mask,
 * which is evaluated pair by pair. Each box must begin inside its map (csrc/cuda/tensor_map.h explains why) and in the
 * rows of its own sequence.
 *
 * The kernel's own code chooses the tiles on the emulated warp of cuda_emulation.h. In the backward it also loads them.
 * For the forward this file computes the boxes of a tile as produce() in attn_fwd_producer.cuh does. In a KV cache the
 * kernel's lanes find them, and each must bring the keys of one page.
 *
 * tests/guards/test_check_kernels.py compiles this file for each row of tiles.def, with BACKWARD or without. */
#define FA_PTX_SM90_CUH
#if defined(BACKWARD) || E4M3
#define D_QK HEAD_DIM
#endif
#if E4M3
#define D_V  HEAD_DIM
#define FLEX 0
#endif
#include "cuda/tensor_map.h"
#include "expect.h"

/* ---- in place of ptx_sm90.cuh ------------------------------------------------------------------------------------ */

/* The meaning of the words of a test map. Tensors are [row, head, column]. */
enum { COLUMNS_OF, ROWS_OF, HEADS_OF, OFFSETS, USED, BATCHES_OF, BOX_BYTES };
static long num_boxes;

static void check_box(const fa_tensor_map *map, int column, int row, int head, int end) {
    const unsigned long long *w = map->words;
    const int *offsets = (const int *)w[OFFSETS], *used = (const int *)w[USED], rows = (int)w[ROWS_OF];
    bool is_there = !VARLEN && row >= 0 && row < rows && end >= 0 && (unsigned long long)end < w[BATCHES_OF];
    for (int i = 0; VARLEN && offsets[i] < rows;
         i++) { /* row i of the sequence that ends before row e: (rows - len + i, e) */
        const int len = used ? min(used[i], offsets[i + 1] - offsets[i]) : offsets[i + 1] - offsets[i];
        if (offsets[i] + len == end && row >= rows - len && row < rows) is_there = true;
    }
    num_boxes++;
    if (is_there && column >= 0 && (unsigned long long)column < w[COLUMNS_OF] && head >= 0 &&
        (unsigned long long)head < w[HEADS_OF])
        return;
    fprintf(stderr, "a box begins outside: column %d, row %d of %d, head %d, %s %d\n", column, row, rows, head,
            VARLEN ? "sequence that ends at" : "sequence", end);
    abort();
}

/* Bytes that the barriers expect, bytes that arrive, and bytes that should arrive. */
static long announced, delivered, wanted;

enum : u64 { L2_EVICT_FIRST, L2_EVICT_LAST };
static void cp_async_bulk_tensor_load(void *, const fa_tensor_map *map, u64 *, int column, int row, int head, int end,
                                      u64) {
    check_box(map, column, row, head, end);
    delivered += (long)map->words[BOX_BYTES];
}
static void cp_async_bulk_tensor_multicast(void *, const fa_tensor_map *map, u64 *, int column, int row, int head,
                                           int end, int, u64) {
    check_box(map, column, row, head, end);
    delivered += 2 * (long)map->words[BOX_BYTES];
}
static void cp_async_bulk_prefetch_tensor(const fa_tensor_map *map, int column, int row, int head, int end) {
    check_box(map, column, row, head, end);
}

/* The emulated producer never blocks. But its waits for one barrier must alternate between two parities. The first wait
 * has parity 1, that of a phase which is already complete. CTA 1's waits for the number of a tile begin with parity
 * 0. */
static struct {
    u64 *barrier;
    u32 parity;
} waits[16];
static void wait_in_turn(u64 *barrier, u32 parity) {
    if (threadIdx.x > 0) return;
    int i = 0;
    while (waits[i].barrier && waits[i].barrier != barrier) i++;
    EXPECT(i < 15 && (waits[i].barrier ? parity == (waits[i].parity ^ 1) : parity == 1 || D_QK > 128));
    waits[i] = {barrier, parity};
}
#define mbarrier_wait                             wait_in_turn
#define mbarrier_wait_cluster                     wait_in_turn
#define mbarrier_arrive(...)                      ((void)0)
#define mbarrier_arrive_expect_tx(barrier, bytes) ((void)(announced += (long)(bytes)))
#define arrives_for_warp(lane)                    ((lane) == 0)
#define elect_one()                               (threadIdx.x % 32 == 0)
#define st_async(...)                             ((void)(delivered += 4))
#define mbarrier_arrive_remote_release(...)       ((void)s.idx++) /* take_tile in CTA 1: CTA 0 has sent the next tile */
#define fence_proxy_async_global()                ((void)0)

#ifndef CACHE
#define CACHE 0 /* the backward */
#endif
#ifndef WHOLE_KEYS
#define WHOLE_KEYS 0 /* the backward, and the forward in 8 bits */
#endif
#ifndef BACKWARD
constexpr bool FILL_32 = D_QK % 32 == 0 && D_V % 32 == 0, FILL_64 = D_QK % 64 == 0 && D_V % 64 == 0;
constexpr int BLOCK_Q = 64 * WGS, BOX = FILL_32 && !FILL_64 && !(WGS > 2 && D_QK > 64) ? 32 : 64;
constexpr bool IS_BACKWARD = false;
#else
constexpr int BOX = 64;
constexpr bool IS_BACKWARD = true;
#endif
/* In how many widths of 8 columns each, from `columns` down, do all boxes begin inside a tensor? At most 4 of many. */
static unsigned num_widths(int columns) {
    const int in_last = (columns - 1) % BOX + 1;
    return (unsigned)(columns <= 64 ? columns / 8 : in_last < 32 ? in_last / 8 : 4);
}

/* ---- what should be ---------------------------------------------------------------------------------------------- */

enum { MAX_SEQUENCES = 80, MAX_TILES = 64, MAX_HEADS = 24 };
static int tile_rows = BLOCK_Q; /* queries of one head in a work tile */
static struct {                 /* one sequence; arrays are [query tiles][key tiles] */
    int q_begin, kv_begin, len_q, len_kv, q_tiles, kv_tiles;
    /* sees: some pair of the two tiles is visible. full: every row sees all BLOCK_KV keys. */
    bool sees[MAX_TILES][MAX_TILES], full[MAX_TILES][MAX_TILES];
    int found[MAX_HEADS][MAX_TILES];
    u64 walked[MAX_HEADS][MAX_TILES]; /* forward: a bit for each key tile that a part of the work tile has */
} truth[MAX_SEQUENCES];

/* The keys [begin, end) that a row sees, by the definition of each mask. chunk: of attention_chunk; 0: off. */
struct key_range {
    int begin, end;
};
static key_range range_of_row(int diagonal, int len_kv, int left, int right, int chunk) {
    key_range x = {left < 0 ? 0 : max(diagonal - left, 0), right < 0 ? len_kv : min(diagonal + right + 1, len_kv)};
    if (chunk > 0) {
        const int first = (int)floor((double)diagonal / chunk) * chunk; /* of the row's own chunk */
        x.begin = max(x.begin, first), x.end = min(x.end, first + chunk);
    }
    return x;
}

static void find_truth(int b_idx, int q_begin, int kv_begin, int len_q, int len_kv, int left, int right, int chunk) {
    auto &x = truth[b_idx];
    x = {q_begin, kv_begin, len_q, len_kv, (len_q + tile_rows - 1) / tile_rows, (len_kv + BLOCK_KV - 1) / BLOCK_KV};
    for (int i = 0; i < MAX_TILES; i++)
        for (bool &full : x.full[i])
            full = !IS_BACKWARD || (i + 1) * tile_rows <= len_q; /* rows past the end are masked there */
    for (int i = 0; i < len_q; i++) {
        const key_range seen = range_of_row(i + len_kv - len_q, len_kv, left, right, chunk);
        for (int j = 0; j < x.kv_tiles; j++) {
            const int first = j * BLOCK_KV, behind = first + BLOCK_KV;
            x.sees[i / tile_rows][j] |= max(seen.begin, first) < min(seen.end, behind);
            x.full[i / tile_rows][j] &= seen.begin <= first && behind <= seen.end;
        }
    }
}

/* ---- the kernels' tiles ------------------------------------------------------------------------------------------ */

#ifdef BACKWARD

static const float *first_stat, *last_stat;
static void cp_async_bulk_load(void *, const void *src, u32 bytes, u64 *) {
    const char *begin = (const char *)src;
    if (begin >= (const char *)first_stat && begin + bytes <= (const char *)last_stat) {
        delivered += bytes;
        return;
    }
    fprintf(stderr, "statistics from outside\n");
    abort();
}
static int atomicAdd(unsigned *counter, int x) { return (int)(*counter += (unsigned)x) - x; }

#include "cuda/attn_bwd_tiles.cuh"

struct shared_memory {
    element k[KEYS * COLUMNS], k_other[2 * KEYS * CHUNK], v[KEYS * V_CHUNKS * CHUNK];
    element q[2][BLOCK_Q * COLUMNS], dout[2][BLOCK_Q * V_CHUNKS * CHUNK];
    float lse[2][BLOCK_Q], d[2][BLOCK_Q];
    u64 k_full, k_empty, v_full, v_empty, q_full[2], q_empty[2], do_full[2], do_empty[2], tile_full[2], tile_empty[2];
    u64 idx_full, idx_empty;
    int idx;
    tile tiles[2];
    step_words words;
};
static shared_memory s;

/* Does attn_bwd_short take the sequence? */
static bool is_short(const params &p, int b_idx) {
    return truth[b_idx].len_q <= p.short_rows && truth[b_idx].len_kv <= p.short_rows && p.short_rows > 0;
}

static void check_tile(const params &p, const tile &t, int idx) {
    EXPECT(0 <= t.b_idx && t.b_idx < p.b && 0 <= t.head_kv && t.head_kv < p.h_kv && !is_short(p, t.b_idx));
    auto &x = truth[t.b_idx];
    EXPECT(t.len_q == x.len_q && t.len_kv == x.len_kv && t.kv_begin == x.kv_begin);
    EXPECT(0 <= t.kv_tile && t.kv_tile < x.kv_tiles && 0 <= t.piece && t.piece < t.pieces && t.pieces <= 16);
    EXPECT(t.q_row_0 == (VARLEN ? p.len_q - x.len_q : 0) && t.q_batch == (VARLEN ? x.q_begin + x.len_q : t.b_idx));
    EXPECT(t.kv_row_0 == (VARLEN ? p.len_kv - x.len_kv : 0) &&
           t.kv_batch == (VARLEN ? x.kv_begin + x.len_kv : t.b_idx));
    int &found = x.found[t.head_kv][t.kv_tile]; /* one bit for each piece */
    EXPECT(!(found & 1 << t.piece));
    found |= 1 << t.piece;
    /* Earlier key tiles add first, so an earlier key tile must have been taken already. */
    EXPECT(t.kv_tile == 0 || CUTS_QUERIES || x.found[t.head_kv][t.kv_tile - 1] & 1 << t.piece);

    const int pieces = CUTS_HEADS ? p.pieces : 1, piece = CUTS_HEADS ? t.piece : 0;
    EXPECT(t.first_head == (t.head_kv * pieces + piece) * p.heads_per_tile);
    EXPECT(t.slab_head == t.first_head + (VARLEN ? 0 : t.b_idx * p.h));
    if (CUTS_HEADS) EXPECT(t.pieces == p.pieces);
    if (CUTS_QUERIES) EXPECT(t.pieces == (idx < p.num_whole ? 1 : p.pieces));
    static int owners[1 << 20][3]; /* owners of the sums of cut tiles */
    if (t.pieces > 1) {
        EXPECT(0 <= t.idx && t.idx < (CUTS_QUERIES ? p.num_cut : 1 << 20));
        int *owner = owners[t.idx], mine[] = {1 + t.b_idx, t.head_kv, t.kv_tile};
        if (t.piece == 0) memcpy(owner, mine, sizeof mine);
        EXPECT(!memcmp(owner, mine, sizeof mine));
    }

    /* The pieces of a tile that is cut along the queries share all query tiles. No piece is empty without need. */
    const int begin = CUTS_QUERIES ? x.q_tiles * t.piece / t.pieces : 0;
    const int end = CUTS_QUERIES ? x.q_tiles * (t.piece + 1) / t.pieces : x.q_tiles;
    const long other_keys = CTAS > 1 ? sizeof s.k_other : 0, stat_bytes = BLOCK_Q * 4;
    if (t.queries.begin < t.queries.end) wanted += CTAS * ((long)sizeof s.k + (long)sizeof s.v + other_keys);
    for (int i = 0; i < x.q_tiles; i++) {
        const bool is_step = t.queries.begin <= i && i < t.queries.end, sees = x.sees[i][t.kv_tile];
        EXPECT(is_step == (sees && begin <= i && i < end));
        int before = 0, behind = 0, first = -1;
        for (int j = 0; j < x.kv_tiles; j++) {
            if (x.sees[i][j] && first < 0) first = j;
            (j < t.kv_tile ? before : behind) += x.sees[i][j] && j != t.kv_tile;
        }
        const interval seen = key_tiles_of(p, x.len_q, x.len_kv, i);
        EXPECT(first < 0 ? seen.begin >= seen.end : seen.begin == first && seen.end == first + before + behind + sees);
        if (!is_step) continue;
        wanted += CTAS * p.heads_per_tile * ((long)(sizeof s.q[0] + sizeof s.dout[0]) + 2 * stat_bytes);
        EXPECT((t.queries.full_begin <= i && i < t.queries.full_end) == x.full[i][t.kv_tile]);
        EXPECT((i >= t.first_begin) == (before == 0) && (i < t.last_end) == (behind == 0));
        EXPECT(turn_of(p, t, t.share_at(i), i) == (u32)before);
    }
}

/* The slabs of a head: each sequence has its own slabs. */
static void check_slabs(const params &p) {
    for (int head = 0; head < (VARLEN ? 1 : p.b) * p.h; head++) {
        int rows = 0, want = 0;
        for (int i = 0; i < p.num_slabs; i++) {
            const slab_rows t = slab_at(p, head * p.num_slabs + i);
            if (t.rows <= 0) continue;
            EXPECT(0 <= t.b_idx && t.b_idx < p.b && t.head == (VARLEN ? head : head % p.h));
            EXPECT(VARLEN || t.b_idx == head / p.h);
            const auto &x = truth[t.b_idx];
            EXPECT(t.begin == x.q_begin && t.row % BLOCK_Q == 0 && t.row < x.len_q);
            EXPECT(t.rows == min(x.len_q - t.row, BLOCK_Q));
            EXPECT(i == (VARLEN ? slab_begin(p, t.b_idx) : 0) + t.row / BLOCK_Q);
            rows += t.rows;
        }
        for (int b_idx = 0; b_idx < p.b; b_idx++)
            if ((VARLEN || b_idx == head / p.h) && !is_short(p, b_idx)) want += truth[b_idx].len_q;
        EXPECT(rows == want);
    }
}

static void kernel(const params &p) {
    s.idx = 0;
    memset(waits, 0, sizeof waits);
    __syncwarp();
    if (cluster_rank() == 0) {
        const int num_kv_tiles = VARLEN ? count_packed_tiles(p) : p.num_kv_tiles;
        const int num_tiles = VARLEN ? num_kv_tiles * p.h_kv * (CUTS_HEADS ? p.pieces : 1) : p.num_tiles;
        tile before = {}; /* the search for a packed sequence goes on from here, or begins again */
        for (int idx = 0; idx < num_tiles; idx++) {
            const tile t = tile_at(p, idx, num_kv_tiles, before);
            if (threadIdx.x == 0) check_tile(p, t, idx);
            if (idx % 3) before = t;
        }
        if (threadIdx.x == 0 && CTAS > 1)
            wanted += 4 * (num_tiles + 1); /* the numbers of the tiles, and the end mark */
    }
    produce(p, s);
}
constexpr int NUM_CTAS = CTAS;

static void check_all_found(const params &p) {
    const int all = (1 << (CUTS_HEADS ? p.pieces : 1)) - 1, cut = (1 << p.pieces) - 1;
    for (int b_idx = 0; b_idx < p.b; b_idx++)
        for (int head = 0; head < p.h_kv; head++)
            for (int i = 0; i < truth[b_idx].kv_tiles; i++) {
                const int found = truth[b_idx].found[head][i];
                EXPECT(is_short(p, b_idx) ? found == 0 : found == all || (CUTS_QUERIES && found == cut));
            }
}

/* Number n of a ring of two uses place n % 2, for the (n / 2)-th time. */
static void check_rings() {
    ring r;
    for (u32 n = 0; n < 9; n++, r.next()) EXPECT(r.stage == (int)(n % 2) && r.parity == n / 2 % 2);
}

/* The place of a step equals the result of a division. */
static void check_places(unsigned (*below)(unsigned)) {
    for (int heads = 1; heads <= 256; heads++) {
        params p = {};
        p.heads_per_tile = heads, p.heads_inverse = FA_HEADS_INVERSE(heads);
        for (int n = 0; n < 2000; n++) {
            const int step = n < 3 * heads ? n : (int)below(0x7fffffffu / (unsigned)heads),
                      q_end = step / heads + 1 + n;
            const step_place at = place_of_step(p, q_end, step);
            if (at.q_tile != q_end - 1 - step / heads || at.head_in_group != step % heads) abort();
        }
    }
}

#else

#include "cuda/attn_fwd_params.h"
typedef fa_attn_fwd_params params;
constexpr int NUM_CTAS = 1;
constexpr bool LONGEST_FIRST = CAUSAL || LOCAL;
static int uniform_alone(int x) { return x; }
#define uniform uniform_alone
#include "cuda/attn_fwd_tiles.cuh"

static sequence_set set;
static tile t;

static interval seen_keys(const params &p, int row, int len_q, int len_kv) {
    const int right = CAUSAL ? 0 : LOCAL ? p.window_right : -1;
    const key_range seen =
        range_of_row(row + len_kv - len_q, len_kv, LOCAL ? p.window_left : -1, right, LOCAL ? p.attention_chunk : 0);
    return {seen.begin, max(seen.end, 0)};
}

/* Producer and consumers walk over the same key tiles, each once. A key tile that needs no mask is seen whole by all 16
 * rows of a warp, and a key tile that is masked is not. Before the exact key tiles every row has seen a key. */
static void check_walk(const params &p, const tile &t) {
    key_walk walk = key_walk_of(t.kv_begin, t.kv_end);
    int rounds = 0;
    for (; walk.has_next(); rounds++) {
        EXPECT(walk.is_first() == (rounds == 0) && walk.next == t.kv_end - 1 - rounds);
        EXPECT(walk.has_left(3) == (t.kv_end - t.kv_begin - rounds == min(3, t.kv_end - t.kv_begin)));
        const int j = walk.take();
        EXPECT(walk.previous() == j && walk.is_last(j) == !walk.has_next());
    }
    EXPECT(rounds == t.kv_end - t.kv_begin);
    for (int strip = t.row; strip < min(t.row + tile_rows, t.len_q); strip += 16) {
        const int shift = t.len_kv - t.len_q, block_end = min(strip / 64 * 64 + 64, t.len_q);
        row_key_walk rows;
        const int begin_of_block = max(seen_keys(p, strip / 64 * 64, t.len_q, t.len_kv).begin, t.kv_begin * BLOCK_KV);
        const int end_of_block = min(seen_keys(p, block_end - 1, t.len_q, t.len_kv).end, t.kv_end * BLOCK_KV);
        if (begin_of_block >= end_of_block) continue;
        rows.seen_top = ceil_div(end_of_block, BLOCK_KV) - 1;
        rows.begin_rows(p, strip + shift, t.len_kv);
        for (int j = t.kv_begin; j <= rows.seen_top; j++) {
            bool is_whole = true, has_seen = true;
            for (int i = strip; i < strip + 16; i++) {
                const interval seen = seen_keys(p, i, t.len_q, t.len_kv);
                is_whole &= seen.begin <= j * BLOCK_KV && (j + 1) * BLOCK_KV <= seen.end;
                has_seen &= seen.end > max(seen.begin, (j + 1) * BLOCK_KV);
            }
            EXPECT(rows.is_partial(j) == !is_whole);
            if (!rows.needs_max(j)) EXPECT(has_seen || is_whole);
        }
    }
}

/* Each lane finds its keys of each key tile. Beyond the used keys the block table holds numbers of no page. */
static void check_keys_in_cache(const params &p, const tile &t) {
    const int in_tile = (int)threadIdx.x * p.cache.box, rows = p.cache.page_size;
    cached_keys keys;
    keys.begin(p, t, t.kv_begin - 1); /* a walk without a step */
    const auto is_outside = [&](key_box box) {
        return WHOLE_KEYS ? box.page == p.cache.num_pages && box.row == 0 : box.page == 0 && box.row == rows;
    };
    EXPECT(t.kv_begin > 0 || is_outside(keys.box));
    for (int j = t.kv_begin; j < t.kv_end && in_tile < BLOCK_KV; j++) {
        keys.find_box(p, j);
        const int key = j * BLOCK_KV + in_tile, row = t.kv_origin + key;
        EXPECT(keys.head == t.kv_head);
        if (key >= t.len_kv) {
            EXPECT(is_outside(keys.box));
            continue;
        }
        EXPECT(0 <= keys.box.page && keys.box.page < p.cache.num_pages);
        if (p.cache.block_table) {
            EXPECT(keys.box.page == p.cache.block_table[t.kv_batch * p.cache.table_stride + row / rows]);
            EXPECT(keys.box.row == row % rows && keys.box.row + p.cache.box <= rows);
        } else {
            EXPECT(keys.box.page == t.kv_batch && keys.box.row == row && row < rows);
        }
    }
}

/* Row strips hold all queries of the tile's heads, each once, and a row block counts as no fewer rows than it has. */
static void check_strips(const params &p, const tile &t) {
    for (int i = 0; i < BLOCK_Q / 16; i++) {
        const int block = i / 4, warp = i % 4, row = row_of_strip(p, t, block, warp);
        EXPECT(head_of_strip(p, t, block, warp) == t.head + 16 * i / tile_rows && row == t.row + 16 * i % tile_rows);
        EXPECT(row_of_block(p, t, block) <= row && row + 16 <= row_of_block(p, t, block) + rows_of_block(p, block));
        EXPECT(row_of_block(p, t, block) + rows_of_block(p, block) <= t.row + tile_rows);
    }
}

static int parts_of(const params &p) { return CACHE ? p.cache.num_parts : 1; }

static void check_tile(const params &p, const tile &t, int idx, bool is_again) {
    check_strips(p, t);
    EXPECT(t.idx == idx && 0 <= t.b_idx && t.b_idx < p.b && 0 <= t.head && t.head < p.h);
    auto &x = truth[t.b_idx];
    EXPECT(t.len_q == x.len_q && t.len_kv == x.len_kv && t.kv_head == t.head / p.heads_per_kv);
    EXPECT(t.q_origin == (VARLEN ? p.len_q - x.len_q : 0) && t.q_batch == (VARLEN ? x.q_begin + x.len_q : t.b_idx));
    if (CACHE)
        EXPECT(t.kv_origin == (p.cache.leftpad_k ? min(p.cache.leftpad_k[t.b_idx], p.seqused_k[t.b_idx]) : 0) &&
               t.kv_batch == (p.cache.cache_batch_idx ? p.cache.cache_batch_idx[t.b_idx] : t.b_idx));
    else
        EXPECT(t.kv_origin == (VARLEN ? p.len_kv - x.len_kv : 0) &&
               t.kv_batch == (VARLEN ? x.kv_begin + x.len_kv : t.b_idx));
    const int parts = parts_of(p), part = parts > 1 ? t.lse_origin / p.cache.part_rows : 0;
    EXPECT(t.lse_origin == (VARLEN ? x.q_begin : 0) + (parts > 1 ? part * p.cache.part_rows : 0) && part < parts);
    const int i = t.row / tile_rows;
    EXPECT(t.row % tile_rows == 0 && 0 <= t.row && t.row < x.len_q);
    for (int head = t.head; head < t.head + BLOCK_Q / tile_rows; head++)
        EXPECT(head / p.heads_per_kv == t.kv_head && (x.found[head][i]++ == part || is_again));
    EXPECT(t.kv_begin >= 0 && t.kv_end <= x.kv_tiles);
    for (int head = t.head; head < t.head + BLOCK_Q / tile_rows; head++)
        for (int j = t.kv_begin; j < t.kv_end; j++) {
            EXPECT(x.sees[i][j] && (x.walked[head][i] >> j & 1) == is_again);
            x.walked[head][i] |= (u64)1 << j;
        }
    check_walk(p, t);
    if (is_again) return;
    /* Longest tiles come first: a head's last rows, and of 32 packed sequences the sequence with the most keys. */
    EXPECT(i == x.q_tiles - 1 || x.found[t.head][i + 1] > part || !LONGEST_FIRST);
    EXPECT(i == 0 || x.found[t.head][i - 1] > part || LONGEST_FIRST);
    for (int other = t.b_idx / 32 * 32; VARLEN && other < p.b && other < t.b_idx / 32 * 32 + 32; other++)
        if (truth[other].len_kv > x.len_kv && truth[other].q_tiles > 0)
            EXPECT(truth[other].found[p.h - 1][LONGEST_FIRST ? 0 : truth[other].q_tiles - 1] == parts);
}

static void kernel(const params &p) {
    const int num_tiles = VARLEN ? count_packed_tiles(p) * h_in_tiles(p) : p.num_tiles;
    set.first = -32, set.begin = set.end = 0;
    __syncwarp();
    for (int n = 0; n < num_tiles + 5; n++) {
        const int idx = n < num_tiles ? n : n * 7 % (num_tiles ? num_tiles : 1); /* some tiles come once more */
        if (num_tiles == 0) break;
        find_tile(p, set, idx, t);
        __syncwarp();
        if (CACHE) check_keys_in_cache(p, t);
        if (threadIdx.x == 0) {
            check_tile(p, t, idx, n >= num_tiles);
            for (int column = 0; column < D_QK; column += BOX) {
                check_box(&p.q, column, t.q_origin + t.row, t.head, t.q_batch);
                for (int j = t.kv_begin; j < t.kv_end && !CACHE; j++)
                    check_box(&p.k, column, t.kv_origin + j * BLOCK_KV, t.kv_head, t.kv_batch);
            }
            for (int column = 0; column < D_V && !CACHE; column += BOX)
                for (int j = t.kv_begin; j < t.kv_end; j++)
                    check_box(&p.v, column, t.kv_origin + j * BLOCK_KV, t.kv_head, t.kv_batch);
        }
        __syncwarp();
    }
}

static void check_all_found(const params &p) {
    for (int b_idx = 0; b_idx < p.b; b_idx++)
        for (int head = 0; head < p.h; head++)
            for (int i = 0; i < truth[b_idx].q_tiles; i++) {
                u64 seen = 0;
                for (int j = 0; j < truth[b_idx].kv_tiles; j++) seen |= (u64)truth[b_idx].sees[i][j] << j;
                EXPECT(truth[b_idx].found[head][i] >= parts_of(p) && truth[b_idx].walked[head][i] == seen);
            }
}

#endif

/* ---- problems ---------------------------------------------------------------------------------------------------- */

extern "C" {
typedef struct {
    unsigned grid_x, grid_y, grid_z, cluster, block, shared_bytes;
} emulated_shape;
void emulate_launch(void (*kernel)(const void *), const void *parameter, const emulated_shape *shape);
}

static unsigned below(unsigned n) {
    static u64 state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % n;
}

/* Lengths of all kinds, including 0, 1 and lengths near multiples of a tile. */
static int make_offsets(int *offsets, int b) {
    const int tiles[] = {64, 128, BLOCK_Q, BLOCK_KV};
    offsets[0] = 0;
    for (int i = 0; i < b; i++) {
        const int around = (int)(below(3) + 1) * tiles[below(4)] + (int)below(5) - 2;
        offsets[i + 1] = offsets[i] + (below(2) ? around : below(2) ? (int)below(3) : (int)below(700));
    }
    offsets[b + 1] = 0x7fffffff;
    return offsets[b];
}

static fa_tensor_map map_of(int d, int rows, int heads, const int *offsets, int b) {
    fa_tensor_map map = {};
    map.words[BATCHES_OF] = (u64)b;
    map.words[COLUMNS_OF] = (u64)d, map.words[ROWS_OF] = (u64)rows, map.words[HEADS_OF] = (u64)heads;
    map.words[OFFSETS] = (u64)offsets;
    return map;
}

#ifndef BACKWARD
/* A cache whose lengths are `used`: in pages of the block table, or in rows, with left padding. */
static void make_cache(params &p, int *used, int *pads) {
    static int table[100 * 200], rows[100];
    const int sizes[] = {8, 16, 24, 64, 128, 160, 256}, is_paged = WHOLE_KEYS || below(3),
              columns = 1 + (int)below(100);
    auto &c = p.cache;
    c.rows = p.b + (int)below(9), c.table_stride = columns + (int)below(9);
    c.page_size = is_paged ? sizes[below(7)] : 1 + (int)below(800);
    c.num_pages = is_paged ? 1 + (int)below(300) : c.rows;
    c.capacity = is_paged ? min(columns * c.page_size, 800) : c.page_size;
    c.box = BLOCK_KV;
    while (is_paged && (c.page_size % c.box || BLOCK_KV % c.box)) c.box--;
    for (int i = 0; i < p.b; i++)
        used[i] = (int)below((unsigned)c.capacity + 1), rows[i] = (int)below((unsigned)c.rows);
    for (int i = 0; i < p.b; i++) pads[i] = (int)below(20);
    if (below(2)) c.cache_batch_idx = rows;
    if (!is_paged && below(2)) c.leftpad_k = pads;
    p.seqused_k = used;
    if (!is_paged) return;
    c.block_table = table;
    for (int i = 0; i < 100 * 200; i++) table[i] = -1 - (int)below(9);
    for (int i = 0; i < p.b; i++) {
        const int row = c.cache_batch_idx ? rows[i] : i;
        for (int at = 0; at * c.page_size < used[i]; at++)
            table[row * c.table_stride + at] = (int)below((unsigned)c.num_pages);
    }
}
#endif

#ifndef BACKWARD
/* Some heads of a key head share work tiles, whose keys may be cut into parts. */
static void share_tiles(params &p) {
    auto &c = p.cache;
    c.tile_heads = 1 + (int)below((unsigned)p.heads_per_kv);
    while (p.heads_per_kv % c.tile_heads || BLOCK_Q % (16 * c.tile_heads)) c.tile_heads--;
    c.rows_of_head = tile_rows = BLOCK_Q / c.tile_heads, c.rows_inverse = FA_ROWS_INVERSE(tile_rows);
    c.h_in_tiles = p.h / c.tile_heads, p.group_heads = min(p.group_heads, c.h_in_tiles);
    c.num_parts = VARLEN || below(2) ? 1 : 1 + (int)below(9), c.part_rows = p.h * p.len_q * p.b;
}
#endif

static void run(const void *p) { kernel(*(const params *)p); }

/* Invalid offsets are clamped to the tensor. */
static void check_spans() {
    for (int n = 0; n < 1000; n++) {
        const int total = (int)below(50), cu[] = {(int)below(100) - 25, (int)below(100) - 25};
        const span x = span_at(cu, 0, total);
        EXPECT(0 <= x.begin && x.begin <= total && 0 <= x.len && x.len <= total - x.begin);
        if (0 <= cu[0] && cu[0] <= cu[1] && cu[1] <= total) EXPECT(x.begin == cu[0] && x.len == cu[1] - cu[0]);
    }
}

int main() {
    static int offsets_q[100], offsets_kv[100], used[100], used_q[100];
    const emulated_shape shape = {NUM_CTAS, 1, 1, 1, 32, 0};
    check_spans();
#ifdef BACKWARD
    check_places(below);
    check_rings();
#endif
    for (int n = 0; n < 60; n++) {
        params p = {};
        unsigned counter = 0;
        const int heads = 1 + (int)below(CACHE ? 8 : 3);
        p.b = 1 + (int)below(n % 2 && VARLEN ? 70 : 6);
        const int h_kv = 1 + (int)below(3), total_q = make_offsets(offsets_q, VARLEN ? p.b : 1);
        const int total_kv = make_offsets(offsets_kv, VARLEN ? p.b : 1);
        p.h = h_kv * heads;
        const int d = D_QK - 8 * (int)below(num_widths(D_QK)), d_v = D_V - 8 * (int)below(num_widths(D_V));
        p.d_v = d_v;
        p.len_q = total_q, p.len_kv = total_kv; /* dense: the length of each sequence */
        if (VARLEN) p.cu_seqlens_q = offsets_q, p.cu_seqlens_k = offsets_kv;
        p.window_left = LOCAL && below(3) ? (int)below(below(3) ? 300 : 2) : -1;
        p.window_right = CAUSAL ? 0 : LOCAL && below(3) ? (int)below(below(3) ? 300 : 2) : -1;
        p.group_heads = 1 + (int)below(4);
        p.q = map_of(d, total_q, p.h, offsets_q, p.b);
        p.k = map_of(d, total_kv, h_kv, offsets_kv, p.b), p.v = map_of(d_v, total_kv, h_kv, offsets_kv, p.b);
        if (!VARLEN && p.group_heads > p.b * h_kv) p.group_heads = p.b * h_kv;
#ifdef BACKWARD
        p.heads_per_tile = heads, p.h_kv = h_kv, p.pieces = CUTS_HEADS ? 1 + (int)below(3) : 1;
        p.h *= CUTS_HEADS ? p.pieces : 1, p.d = d;
        p.q = map_of(d, total_q, p.h, offsets_q, p.b), p.dout = map_of(d_v, total_q, p.h, offsets_q, p.b);
        p.q.words[BOX_BYTES] = p.dout.words[BOX_BYTES] = BLOCK_Q * CHUNK * 2;
        p.k.words[BOX_BYTES] = p.v.words[BOX_BYTES] = KEYS * CHUNK * 2;
        if (VARLEN) p.group_heads = min(p.group_heads, h_kv * p.pieces);
        p.num_kv_tiles = ceil_div(total_kv, BLOCK_KV), p.num_whole = p.num_kv_tiles * p.b * h_kv;
        if (CUTS_QUERIES && total_q > 2 * BLOCK_Q)
            p.pieces = 1 + (int)below(3), p.num_cut = p.pieces > 1 ? (int)below(p.num_whole + 1) : 0,
            p.num_whole -= p.num_cut;
        p.num_tiles = p.num_whole * (CUTS_HEADS ? p.pieces : 1) + p.num_cut * p.pieces;
        p.num_slabs = VARLEN ? total_q / BLOCK_Q + p.b : ceil_div(total_q, BLOCK_Q);
        p.short_rows = VARLEN && n % 4 > 1 ? 64 : 0;
        static float stats[1]; /* only the address matters */
        first_stat = p.stats = stats;
        last_stat = stats + (long)p.num_slabs * p.h * (VARLEN ? 1 : p.b) * 2 * BLOCK_Q;
        p.tile_counter = &counter;
#else
        p.heads_per_kv = heads;
        p.group_heads = min(p.group_heads, p.h);
        if (CACHE) share_tiles(p);
        p.num_q_tiles = ceil_div(total_q, tile_rows), p.num_tiles = p.num_q_tiles * p.b * h_in_tiles(p) * parts_of(p);
        for (int i = 0; i < p.b; i++) used[i] = (int)below(800);
        if (VARLEN && below(2)) p.seqused_k = used, p.k.words[USED] = p.v.words[USED] = (u64)used;
        for (int i = 0; i < p.b; i++) used_q[i] = (int)below(800);
        if (VARLEN && below(2)) p.seqused_q = used_q, p.q.words[USED] = (u64)used_q;
        if (LOCAL && below(2)) p.attention_chunk = 1 + (int)below(below(2) ? 500 : 50);
        static int pads[100];
        if (CACHE) make_cache(p, used, pads);
#endif
        for (int i = 0; i < p.b; i++) {
            const int *q = offsets_q + (VARLEN ? i : 0), *kv = offsets_kv + (VARLEN ? i : 0);
            int len_q = q[1] - q[0], len_kv = kv[1] - kv[0], chunk = 0;
#ifndef BACKWARD
            if (p.seqused_q) len_q = min(len_q, used_q[i]);
            if (p.seqused_k) len_kv = CACHE ? used[i] : min(len_kv, used[i]);
            if (CACHE && p.cache.leftpad_k) len_kv -= min(len_kv, p.cache.leftpad_k[i]);
            chunk = p.attention_chunk;
#endif
            find_truth(i, q[0], kv[0], len_q, len_kv, p.window_left, p.window_right, chunk);
        }
        emulate_launch(run, &p, &shape);
        check_all_found(p);
#ifdef BACKWARD
        check_slabs(p);
        EXPECT(announced == wanted && delivered == wanted);
#endif
    }
    printf("%ld boxes begin inside their maps\n", num_boxes);
    return num_boxes < 1000;
}
