/* Compares the kernels flex_blocks, flex_walks and flex_hidden with csrc/flex/block_map.c and
 * with plain loops over all pairs of queries and keys. The kernels are compiled for the CPU (cuda_emulation.h). Lists,
 * map, walks, order, ranks and bits lie in guarded memory. Blocks and tiles have any sizes, lists have any order and
 * strides, and some of their places are no blocks.
 *
 *   check_flex_walks              all cases
 *   check_flex_walks --seed N     one case */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#pragma GCC diagnostic ignored "-Wunused-function" /* the cases of attention are not used here */

#include "cases.h"
#include "cuda/cuda_flex.h"
#include "cuda_device.h"
#include "flex/block_map.h"
#include "gpu/launch.h"

static const fa_driver driver = {.cuLaunchKernelEx = launch};

static random_source source;
static int64_t below(int64_t n) { return random_below(&source, n); }
#define PICK(...) ((const int64_t[]){__VA_ARGS__}[below((int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))])

enum { EMPTY, PARTIAL, FULL, MIXED };

static void run_kernel(fa_family_id family, const void *parameters, unsigned threads, unsigned cluster) {
    const fa_cuda_call call = {.gpu = &gpu, .driver = &driver};
    const fa_mods none = {0};
    const fa_variant variant = {.family = family,
                                .arch = gpu.capability,
                                .features = fa_families[family].takes_mods ? FA_FLEX : 0,
                                .mods = &none};
    const fa_launch shape = {cluster > 0 ? cluster * (1 + (unsigned)below(2)) : 1 + (unsigned)below(3),
                             family == FA_FLEX_HIDDEN ? 1 + (unsigned)below(2) : 1, 1, .threads = threads,
                             .cluster = cluster};
    fa_error err = {""};
    if (fa_cuda_launch(&call, variant, shape, parameters, &err)) fail_msg("%s", err.text);
}

/* A list for each row of blocks: blocks in any order, some twice, and places that are no blocks. share: of 8 places how
 * many are blocks. */
static fa_flex_list make_list(const fa_flex *f, int64_t share) {
    const int64_t pitch = f->columns + below(3), pitch_num = 1 + below(2), lines = f->mask_b * f->mask_h * f->rows;
    int32_t *num = guarded_alloc((size_t)(lines * pitch_num) * sizeof *num, 4, below(2));
    int32_t *blocks = guarded_alloc((size_t)(lines * pitch) * sizeof *blocks, 4, below(2));
    for (int64_t line = 0; line < lines; line++) {
        num[line * pitch_num] =
            (int32_t)(below(9) == 0 ? PICK(f->columns + 3, INT32_MAX, -1, INT32_MIN) : below(f->columns + 1));
        for (int64_t i = 0; i < f->columns; i++)
            blocks[line * pitch + i] =
                below(8) < share ? (int32_t)below(f->columns) : (int32_t)PICK(-1, INT32_MIN, f->columns, INT32_MAX);
    }
    fa_flex_list list = {.num = num,
                         .blocks = blocks,
                         .num_stride = {f->mask_h * f->rows * pitch_num, f->rows * pitch_num, pitch_num},
                         .blocks_stride = {f->mask_h * f->rows * pitch, f->rows * pitch, pitch, 1}};
    for (int i = 0; i < 4; i++) /* expanded */
        if (below(8) == 0) {
            if (i < 3) list.num_stride[i] = 0;
            list.blocks_stride[i] = 0;
        }
    return list;
}

static fa_cuda_block_list list_of(const fa_flex_list *t) {
    fa_cuda_block_list list = {.num = t->num, .blocks = t->blocks};
    memcpy(list.num_stride, t->num_stride, sizeof t->num_stride);
    memcpy(list.blocks_stride, t->blocks_stride, sizeof t->blocks_stride);
    return list;
}

static fa_cuda_flex_blocks blocks_of(const fa_flex *f, bool has_mask_mod) {
    return (fa_cuda_flex_blocks){
        .partial = list_of(&f->partial),
        .full = list_of(&f->full),
        .kinds = guarded_alloc((size_t)(f->mask_b * f->mask_h * f->rows * f->columns), 1, true),
        .mask_b = (int)f->mask_b,
        .mask_h = (int)f->mask_h,
        .rows = (int)f->rows,
        .columns = (int)f->columns,
        .kind_of_partial = has_mask_mod ? PARTIAL : FULL,
    };
}

/* Compares a map with that of the CPU. */
static void check_map(int seed, const fa_flex *f, const fa_problem *p, const fa_cuda_flex_blocks *a) {
    fa_flex_block_map m = fa_flex_block_map_of(p);
    const size_t bytes = fa_flex_block_map_bytes(&m);
    m.kinds = guarded_alloc(bytes, 1, true);
    fa_flex_fill_block_map(&m, f);
    for (size_t i = 0; i < bytes; i++) {
        const int want = m.kinds[i] == PARTIAL && a->kind_of_partial == FULL ? FULL : m.kinds[i];
        if (a->kinds[i] != want) fail_msg("--seed %d: block %zu of the map is %d, not %d", seed, i, a->kinds[i], want);
    }
}

/* The kind of the pairs of rows [i, i_end) and keys [j, j_end): EMPTY, PARTIAL, FULL or MIXED. */
static int kind_of_pairs(const fa_flex *f, const unsigned char *kinds, int i, int i_end, int j, int j_end) {
    unsigned seen = 0;
    for (int row = i; row < i_end; row++)
        for (int key = j; key < j_end; key++) seen |= 1u << kinds[row / f->block_q * f->columns + key / f->block_kv];
    return seen & (seen - 1) ? MIXED : seen == 1u << EMPTY ? EMPTY : seen == 1u << FULL ? FULL : PARTIAL;
}

static int least(int x, int y) { return x < y ? x : y; }

/* Compares the walk of one tile with what `kinds`, of its mask, say. */
static void check_walk(int seed, const fa_flex *f, const fa_cuda_flex_walks *a, const unsigned char *kinds, int own,
                       const int *walk) {
    const int first = own * a->own_tile, end = least(first + a->own_tile, a->own_len);
    int num = 0;
    for (int other = a->other_tiles - 1; other >= 0; other--) {
        const int at = other * a->other_tile, stop = least(at + a->other_tile, a->other_len);
        const int kind =
            a->own_keys ? kind_of_pairs(f, kinds, at, stop, first, end) : kind_of_pairs(f, kinds, first, end, at, stop);
        if (kind == EMPTY) continue;
        const bool ends =
            (other + 1) * a->other_tile > a->other_len || (a->own_keys && (own + 1) * a->own_tile > a->own_len);
        const int want = kind == FULL && ends && a->pairs ? PARTIAL : kind;
        num++;
        if (num > walk[0] || walk[num] != 4 * other + want)
            fail_msg("--seed %d: tile %d does not walk over tile %d of kind %d", seed, own, other, want);
    }
    if (walk[0] != num) fail_msg("--seed %d: tile %d walks over %d tiles, not %d", seed, own, walk[0], num);
    for (int i = num + 1; i <= a->other_tiles; i++) /* behind the walk nothing is written */
        if (walk[i] != -1) fail_msg("--seed %d: the walk of tile %d has no end", seed, own);
}

/* Would the tiles end late in their order? They do if at some tile more than a fifth of all work would be missing, to
 * keep the CTAs busy until this tile ends. */
static bool ends_late(const fa_cuda_flex_walks *a, const int *walks) {
    int64_t behind = 0, latest = 0;
    for (int own = a->own_tiles - 1; own >= 0; own--) {
        const int64_t num = walks[own * (1 + a->other_tiles)];
        behind += num;
        const int64_t alone = num * a->ctas - behind * a->group_heads;
        if (alone > latest) latest = alone;
    }
    return 5 * latest > behind * a->num_heads;
}

static int64_t number_in(const fa_flex_list *t, const fa_flex *f, int64_t mask, int64_t row) {
    const int64_t b = mask / f->mask_h, h = mask % f->mask_h;
    const int num = t->num ? t->num[b * t->num_stride[0] + h * t->num_stride[1] + row * t->num_stride[2]] : 0;
    return num < 0 ? 0 : num < f->columns ? num : f->columns;
}

/* The length of a tile's walk, and without a map the number of blocks of its row. */
static int length_of(const fa_flex *f, const fa_cuda_flex_walks *a, int64_t mask, int own, const int *walks) {
    if (a->blocks.kinds) return walks[own * (1 + a->other_tiles)];
    const int64_t row = own * a->own_tile / f->block_q;
    return (int)(number_in(&f->partial, f, mask, row) + number_in(&f->full, f, mask, row));
}

/* The order has each tile once: all in their order, or long walks first. Of walks of one length the last query tile is
 * the first, but the first key tile. */
static int num_orders[2];   /* by length, and kept */
static int num_without_map; /* cases where flex_walks reads the lists in place of a map */
static void check_order(int seed, const fa_flex *f, const fa_cuda_flex_walks *a, int64_t mask, const int *walks,
                        const int *order) {
    const bool keeps = a->group_heads > 0 && !ends_late(a, walks);
    num_orders[keeps] += a->group_heads > 0 && a->own_tiles > 1;
    for (int i = 0; i < a->own_tiles; i++) {
        if (order[i] < 0 || order[i] >= a->own_tiles) fail_msg("--seed %d: there is no tile %d", seed, order[i]);
        if (keeps && order[i] != i) fail_msg("--seed %d: place %d has tile %d", seed, i, order[i]);
        if (i == 0 || keeps) continue;
        const int before = length_of(f, a, mask, order[i - 1], walks), num = length_of(f, a, mask, order[i], walks);
        const bool is_behind = a->own_keys ? order[i] > order[i - 1] : order[i] < order[i - 1];
        if (before < num || (before == num && !is_behind))
            fail_msg("--seed %d: tile %d of %d follows tile %d of %d", seed, order[i], num, order[i - 1], before);
    }
}

/* Each own tile adds to the other tiles of its walk, in this order. */
static void check_ranks(int seed, const fa_flex *f, const fa_cuda_flex_walks *a, const unsigned char *kinds,
                        const int *order, const unsigned *ranks) {
    for (int other = 0; other < a->other_tiles; other++, ranks += a->own_tiles + 1) {
        const int at = other * a->other_tile, stop = least(at + a->other_tile, a->other_len);
        unsigned num = 0;
        for (int place = 0; place < a->own_tiles; place++) {
            const int own = order ? order[place] : place, first = own * a->own_tile;
            const int end = least(first + a->own_tile, a->own_len);
            if (kind_of_pairs(f, kinds, at, stop, first, end) == EMPTY) continue;
            const unsigned want = 2 * num + (num + 1 == ranks[a->own_tiles]);
            if (ranks[own] != want) fail_msg("--seed %d: rank %u of tile %d, not %u", seed, ranks[own], own, want);
            num++;
        }
        if (ranks[a->own_tiles] != num) fail_msg("--seed %d: %u tiles add, not %u", seed, ranks[a->own_tiles], num);
    }
}

/* The bits of each thread, and of each of its registers. Words of full tiles inside the problem are not written. */
static void check_hidden(int seed, const fa_flex *f, const fa_cuda_flex_walks *a, const unsigned char *kinds, int own,
                         const int *walk, const unsigned *hidden) {
    const int words = FA_HIDDEN_WORDS(a->other_tile), threads = 2 * a->own_tile;
    for (int other = 0; other < a->other_tiles; other++, hidden += words * threads) {
        bool is_read = false;
        for (int i = 1; i <= walk[0]; i++)
            if (walk[i] / 4 == other) is_read = walk[i] % 4 != FULL;
        for (int thread = 0; thread < threads; thread++)
            for (int i = 0; i < 32 * words; i++) {
                const unsigned word = hidden[i / 32 * threads + thread];
                const int x = own * a->own_tile + thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
                const int y = other * a->other_tile + 2 * (thread % 4) + i / 4 * 8 + i % 2;
                const int q = a->own_keys ? y : x, key = a->own_keys ? x : y;
                const int len_q = a->own_keys ? a->other_len : a->own_len,
                          len_kv = a->own_keys ? a->own_len : a->other_len;
                if (!is_read && word != UINT32_MAX) fail_msg("--seed %d: nobody reads tile %d of %d", seed, other, own);
                if (!is_read || i >= a->other_tile / 2 || (q >= len_q && !a->own_keys)) continue;
                const bool sees =
                    q < len_q && key < len_kv && kinds[q / f->block_q * f->columns + key / f->block_kv] != EMPTY;
                if (sees == (word >> i % 32 & 1)) fail_msg("--seed %d: query %d and key %d", seed, q, key);
            }
    }
}

/* The list has room for its pairs. Each pair with bits stands in it once, and the rest is no pair. */
static int num_no_pairs; /* places without a pair */
static void check_pairs(int seed, const fa_cuda_flex_walks *a, const int *walks, const int *pairs) {
    const int most = a->own_tiles * a->other_tiles;
    if (pairs[0] < 0 || pairs[0] > most) fail_msg("--seed %d: %d pairs of %d", seed, pairs[0], most);
    unsigned char *seen = calloc((size_t)most, 1);
    assert_non_null(seen);
    for (int i = 1; i <= pairs[0]; i++) {
        num_no_pairs += pairs[i] == -1;
        if (pairs[i] == -1) continue;
        const int tile = pairs[i] >> 2;
        if (pairs[i] < 0 || tile >= most) fail_msg("--seed %d: place %d has no pair, but %d", seed, i, pairs[i]);
        if (seen[tile]++) fail_msg("--seed %d: pair %d stands twice", seed, tile);
    }
    for (int own = 0; own < a->own_tiles; own++) {
        const int *walk = walks + own * (1 + a->other_tiles);
        for (int i = 1; i <= walk[0]; i++)
            if (walk[i] % 4 != FULL && !seen[own * a->other_tiles + walk[i] / 4]--)
                fail_msg("--seed %d: tiles %d and %d are no pair", seed, own, walk[i] / 4);
    }
    for (int tile = 0; tile < most; tile++)
        if (seen[tile]) fail_msg("--seed %d: pair %d has no bits", seed, tile);
    free(seen);
}

static void run_case(int seed) {
    source = (random_source){(uint64_t)seed};
    int64_t len_q = PICK(1, 40, 129, 300), len_kv = PICK(1, 33, 128, 300);
    const bool holds_tiles = below(3) == 0;                                   /* each tile lies in one block */
    const int is_long = holds_tiles && below(8) == 0 ? 1 + (int)below(3) : 0; /* many rows, many columns, or both */
    fa_flex f = {.mask_b = PICK(1, 2), .mask_h = PICK(1, 3)};
    f.block_q = PICK(1, 16, 33, 128, INT32_MAX), f.block_kv = PICK(2, 16, 40, 128, INT32_MAX);
    if (holds_tiles) f.block_q = PICK(64, 128, 256), f.block_kv = PICK(64, 128);
    if (is_long == 1) len_q = PICK(2112, 4160, 8256), len_kv = PICK(1, 40, 72), f.block_q = PICK(64, 64, 256, 1024);
    if (is_long == 2) len_q = PICK(1, 70, 140), len_kv = PICK(1025, 2100, 16380), f.block_kv = PICK(8, 16, 64);
    if (is_long == 3) len_q = PICK(500, 2112), len_kv = 1030, f.block_kv = PICK(8, 16), f.block_q = PICK(64, 128);
    f.rows = (len_q + f.block_q - 1) / f.block_q + below(2),
    f.columns = (len_kv + f.block_kv - 1) / f.block_kv + below(2);
    f.partial = make_list(&f, PICK(0, 2, 8));
    if (below(4)) f.full = make_list(&f, PICK(0, 3, 8));
    const fa_problem p = {.len_q = len_q, .len_kv = len_kv, .flex = &f};
    const bool has_mask_mod = below(2);
    const fa_cuda_flex_blocks generic = blocks_of(&f, has_mask_mod), blocks = blocks_of(&f, has_mask_mod);
    run_kernel(FA_FLEX_BLOCKS, &generic, 128, 0);
    check_map(seed, &f, &p, &generic);

    const unsigned char *kinds = generic.kinds;
    const bool own_keys = holds_tiles ? below(4) == 0 : below(2);
    fa_cuda_flex_walks a = {
        .flex = {.kinds = blocks.kinds,
                 .mask_b = (int)f.mask_b,
                 .mask_h = (int)f.mask_h,
                 .rows = (int)f.rows,
                 .columns = (int)f.columns,
                 .block_q = (int)f.block_q,
                 .block_kv = (int)f.block_kv},
        .blocks = blocks,
        .own_len = (int)(own_keys ? len_kv : len_q),
        .other_len = (int)(own_keys ? len_q : len_kv),
        .own_tile = (int)(holds_tiles ? PICK(16, 64, 64, 64) : PICK(4, 7, 64, 128, 1000)),
        .other_tile = (int)(holds_tiles ? PICK(8, 32, 64) : PICK(4, 7, 64, 128, 1000)),
        .own_shift = -1,
        .other_shift = -1,
        .own_keys = own_keys,
        .group_heads = (int)(holds_tiles ? PICK(0, 0, 0, 2) : PICK(0, 1, 3)),
        .num_heads = (int)PICK(3, 12),
        .ctas = (int)PICK(1, 10, 132),
    };
    if (is_long) { /* the tiles of a block are 1, 2 or 4, but of large blocks more */
        const bool is_small = (own_keys ? f.block_q : f.block_kv) < 32;
        if (own_keys) a.own_tile = f.block_kv < 64 ? 8 : 64;
        a.other_tile = is_small ? 8 : (int)PICK(8, 32, 64);
    }
    for (int side = 0; side < 2 && holds_tiles; side++) {
        const int64_t block = (side == 0) == own_keys ? f.block_kv : f.block_q;
        int *shift = side ? &a.other_shift : &a.own_shift;
        for (*shift = 0; (side ? a.other_tile : a.own_tile) << *shift < block;) ++*shift;
    }
    a.own_tiles = (a.own_len + a.own_tile - 1) / a.own_tile;
    a.other_tiles = (a.other_len + a.other_tile - 1) / a.other_tile;
    const int64_t masks = f.mask_b * f.mask_h, pitch = 1 + a.other_tiles;
    a.walks = guarded_alloc((size_t)(masks * a.own_tiles * pitch) * sizeof(int), 4, true);
    a.nums = guarded_alloc((size_t)(masks * a.own_tiles) * sizeof(int), 4, true);
    if (!own_keys || below(2)) a.order = guarded_alloc((size_t)(masks * a.own_tiles) * sizeof(int), 4, true);
    const int64_t rank_pitch = (int64_t)a.other_tiles * (a.own_tiles + 1);
    if (own_keys) a.ranks = guarded_alloc((size_t)(masks * rank_pitch) * sizeof(unsigned), 4, true);
    const bool has_hidden = a.own_tile % 64 == 0 && a.other_tile % 8 == 0;
    const int64_t pairs = (int64_t)a.own_tiles * a.other_tiles;
    if (has_hidden) a.pairs = guarded_alloc((size_t)(masks * (1 + pairs)) * sizeof(int), 4, true);
    /* What an earlier call has left there. */
    if (has_hidden)
        for (int64_t i = 0; i < masks * (1 + pairs); i++) a.pairs[i] = (int)(i % 5 ? PICK(0, 1, 4 * pairs - 3) : -1);
    const unsigned threads = (unsigned)PICK(32, 96, 512);
    if (below(holds_tiles ? 4 : 2)) { /* clusters with all phases */
        a.last_phase = a.ranks ? FA_FLEX_RANKS_PHASE : FA_FLEX_ORDER_PHASE;
        a.ctas_of_mask = (int)PICK(1, 2, 8);
        if (!own_keys && holds_tiles && has_hidden && a.group_heads == 0 && f.columns <= FA_FLEX_WALKS_COLUMNS) {
            a.blocks.kinds = NULL;
            num_without_map++;
        }
        run_kernel(FA_FLEX_WALKS, &a, threads, (unsigned)a.ctas_of_mask);
    } else {
        for (int phase = FA_FLEX_MAP_PHASE; phase <= FA_FLEX_RANKS_PHASE; phase++) {
            a.first_phase = a.last_phase = phase;
            run_kernel(FA_FLEX_WALKS, &a, threads, 0);
        }
    }
    if (a.blocks.kinds) check_map(seed, &f, &p, &blocks);
    const int64_t pitch_hidden = (int64_t)a.other_tiles * FA_HIDDEN_WORDS(a.other_tile) * 2 * a.own_tile;
    struct {
        fa_cuda_flex_walks walks;
        int64_t values;
    } of_hidden = {a, 0};
    if (has_hidden) {
        const size_t bytes = (size_t)(masks * a.own_tiles * pitch_hidden) * sizeof(unsigned);
        of_hidden.walks.hidden = guarded_alloc(bytes, 4, true);
        memset(of_hidden.walks.hidden, 0xff, bytes);
        run_kernel(FA_FLEX_HIDDEN, &of_hidden, FA_FLEX_HIDDEN_THREADS, 0);
    }
    for (int64_t mask = 0; mask < masks; mask++) {
        const int *walks = a.walks + mask * a.own_tiles * pitch;
        for (int own = 0; own < a.own_tiles; own++)
            check_walk(seed, &f, &a, kinds + mask * f.rows * f.columns, own, walks + own * pitch);
        if (has_hidden) check_pairs(seed, &a, walks, a.pairs + mask * (1 + pairs));
        for (int own = 0; own < a.own_tiles && has_hidden; own++)
            check_hidden(seed, &f, &a, kinds + mask * f.rows * f.columns, own, walks + own * pitch,
                         of_hidden.walks.hidden + (mask * a.own_tiles + own) * pitch_hidden);
        if (a.order) check_order(seed, &f, &a, mask, walks, a.order + mask * a.own_tiles);
        if (own_keys)
            check_ranks(seed, &f, &a, kinds + mask * f.rows * f.columns, a.order ? a.order + mask * a.own_tiles : NULL,
                        a.ranks + mask * rank_pitch);
    }
    guarded_free_all();
}

static int first_seed, last_seed = 700;

static void test_cases(void **state) {
    (void)state;
    for (int seed = first_seed; seed <= last_seed; seed++) run_case(seed);
    if (first_seed < last_seed)
        assert_true(num_orders[0] >= 10 && num_orders[1] >= 10 && num_without_map >= 30 && num_no_pairs >= 1000);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--seed")) first_seed = last_seed = atoi(argv[2]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cases)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
