#include "flex_seen.h"

#include <stdlib.h>
#include <string.h>

#include "macros.h"

enum { ROWS = FA_FLEX_VIEW_ROWS, WORDS = FA_FLEX_VIEW_WORDS };

int64_t fa_flex_most_table_bytes = 64 << 20;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- one view ---------------------------------------------------------------------------------------------------- */

/* Bits of 64 bytes of 0 and 1: eight rows at a time. */
static uint64_t bits_of(const uint8_t *bytes) {
    uint64_t bits = 0;
    UNROLL for (int k = 0; k < 8; k++) {
        uint64_t eight = 0;
        UNROLL for (int j = 0; j < 8; j++) eight |= (uint64_t)bytes[8 * k + j] << 8 * j; /* one load */
        bits |= eight << k;
    }
    return bits;
}

/* Bits of the rows [0, num) of 64. */
static uint64_t first_bits(int64_t num) {
    uint64_t x = num >= 64 ? UINT64_MAX : num > 0 ? ((uint64_t)1 << num) - 1 : 0, t;
    t = (x ^ x >> 7) & 0x00aa00aa00aa00aa, x ^= t ^ t << 7; /* transposes 8 x 8 bits */
    t = (x ^ x >> 14) & 0x0000cccc0000cccc, x ^= t ^ t << 14;
    t = (x ^ x >> 28) & 0x00000000f0f0f0f0, x ^= t ^ t << 28;
    return x;
}

/* Bits of the rows [begin, end) of 64. */
static uint64_t bits_between(int64_t begin, int64_t end) { return first_bits(end) & ~first_bits(begin); }

static void write_rows(uint8_t *of_row, uint64_t rows, int64_t value) {
    for (; rows; rows &= rows - 1) {
        const int bit = TRAILING_ZEROS(rows);
        of_row[bit % 8 * 8 + bit / 8] = (uint8_t)value;
    }
}

/* What is known of 64 rows of a view after some keys. */
typedef struct {
    uint64_t now, ever, ended, gaps, always;
} row_history;

/* The rows whose first row is that of first and end see keys from `key` on if their bits are set in `now`. */
static void note(uint8_t *first, uint8_t *end, row_history *h, int64_t key, uint64_t now) {
    const uint64_t ends = h->now & ~now;
    write_rows(first, now & ~h->ever, key);
    write_rows(end, ends, key);
    h->ended |= ends;
    h->gaps |= h->ended & now;
    h->ever |= now;
    h->always &= now;
    h->now = now;
}

/* 64 rows in one column of blocks of the mask. */
typedef struct {
    uint64_t partial, full;
} column_rows;

static column_rows read_column(const fa_flex_block_map *m, const uint8_t *kinds, int64_t mask_row, int num_rows,
                               int64_t column) {
    column_rows c = {0};
    for (int64_t row = 0, stop; row < num_rows; row = stop) {
        const int64_t r = (mask_row + row) / m->block_q;
        const uint8_t kind = kinds[r * m->columns + column];
        const bool is_full = kind == FA_FLEX_FULL || !m->has_mask_mod;
        stop = least((r + 1) * m->block_q - mask_row, num_rows);
        if (kind != FA_FLEX_EMPTY) *(is_full ? &c.full : &c.partial) |= bits_between(row, stop);
    }
    return c;
}

enum { STRIP = 16, STRIPS = FA_FLEX_TILE / STRIP }; /* keys for which one answer may serve 64 rows */

/* What the bounds of the mask_mod tell of 64 rows and the strips of keys of a block: a bit for each strip. */
typedef struct {
    uint8_t told, allowed; /* all pairs are allowed, or none */
    uint8_t same;          /* a row sees all keys, or none */
} strip_bits;

static void look_at_strips(const fa_flex_programs *programs, int64_t b_idx, int64_t head, int64_t query, int num_rows,
                           int64_t block, int num_keys, strip_bits strips[WORDS]) {
    fa_flex_intervals *bounds = programs->mask_bounds;
    memset(strips, 0, WORDS * sizeof *strips);
    if (!bounds) return;
    fa_flex_bound_head(bounds, b_idx, head);
    for (int row = 0; row < num_rows; row += 64)
        fa_flex_bound_rows(bounds, row / 64, query + row, query + least(row + 64, num_rows) - 1);
    for (int key = 0; key < num_keys; key += STRIP) {
        fa_flex_bound_keys(bounds, block + key, block + least(key + STRIP, num_keys) - 1);
        for (int w = 0; 64 * w < num_rows; w++) {
            const fa_flex_interval x = fa_flex_bound_block(bounds, w);
            const bool told = x.hi == 0 || x.lo != 0;
            strips[w].told |= (uint8_t)(told << key / STRIP);
            strips[w].allowed |= (uint8_t)((x.lo != 0) << key / STRIP);
            strips[w].same |= (uint8_t)((!told && fa_flex_bound_is_same(bounds, w)) << key / STRIP);
        }
    }
}

static void start(const fa_flex_programs *programs, int64_t b_idx, int64_t head, int64_t query, int num_rows,
                  int64_t block, int num_keys) {
    fa_flex_start_head(programs->mask, b_idx, head);
    fa_flex_start_lines(programs->mask, block, num_keys);
    fa_flex_start_lanes(programs->mask, query, num_rows);
}

/* Bounds of the keys of all rows of each vector. */
static void bound_vectors(fa_flex_view *view, int vec_rows) {
    memset(view->vectors, 0, sizeof view->vectors);
    for (int row = 0; row < ROWS; row += vec_rows) {
        fa_flex_row_bounds x = {255, 0, 0, 255};
        for (int i = row; i < row + vec_rows; i++) {
            const uint8_t from = view->first[i], to = view->end[i];
            x.low = from < x.low ? from : x.low, x.most = from > x.most ? from : x.most;
            x.high = to > x.high ? to : x.high, x.least = to < x.least ? to : x.least;
        }
        view->vectors[row / vec_rows] = x;
    }
}

int32_t fa_flex_see(const fa_flex_seen *seen, const fa_flex_programs *programs, int64_t b_idx, int64_t head,
                    int64_t row, int num_rows, int64_t block, fa_flex_view *view, uint64_t *bits) {
    const fa_flex_block_map *m = &seen->map;
    const uint8_t *kinds = fa_flex_kinds_of(m, b_idx, head);
    const int64_t len_kv = fa_sequence_at(seen->p, b_idx).len_kv, mask_row = fa_flex_mask_row(m, b_idx, row);
    const int64_t query = row + fa_flex_first_query(seen->p->flex, b_idx);
    const int num_keys = (int)least(len_kv - block, seen->block_kv);
    strip_bits strips[WORDS];
    bool has_looked = false, any = false, is_all = num_keys > 0;
    memset(view->first, 255, sizeof view->first);
    memset(view->end, 0, sizeof view->end);
    memset(bits, 0, sizeof *bits * WORDS * (size_t)(num_keys > 0 ? num_keys : 0));
    view->has_gaps = false;
    for (int w = 0; 64 * w < num_rows; w++) {
        const int rows = (int)least(num_rows - 64 * w, 64);
        uint8_t *first = view->first + 64 * w, *end = view->end + 64 * w;
        row_history history = {.always = first_bits(rows)};
        bool has_started = false;
        for (int64_t key = 0, column_end; key < num_keys;) {
            const int64_t column = (block + key) / m->block_kv;
            const column_rows c = read_column(m, kinds, mask_row + 64 * w, rows, column);
            column_end = least((column + 1) * m->block_kv - block, num_keys);
            if (c.partial && !has_looked) {
                look_at_strips(programs, b_idx, head, query, num_rows, block, num_keys, strips);
                has_looked = true;
            }
            while (key < column_end) {
                const int64_t strip = key / STRIP,
                              stop = c.partial ? least(column_end, (strip + 1) * STRIP) : column_end;
                if (!c.partial || strips[w].told >> strip & 1) {
                    const bool allowed = c.partial && strips[w].allowed >> strip & 1;
                    note(first, end, &history, key, c.full | (allowed ? c.partial : 0));
                    for (; key < stop; key++) bits[key * WORDS + w] = history.now;
                    continue;
                }
                if (!has_started) start(programs, b_idx, head, query + 64 * w, rows, block, num_keys);
                has_started = true;
                while (key < stop) {
                    const uint8_t *allowed = fa_flex_line(programs->mask, (int)key, NULL, NULL);
                    note(first, end, &history, key, c.full | (c.partial & bits_of(allowed)));
                    const int64_t next = strips[w].same >> strip & 1 ? stop : key + 1;
                    for (; key < next; key++) bits[key * WORDS + w] = history.now;
                }
            }
        }
        write_rows(end, history.now, num_keys);
        any |= history.ever != 0;
        is_all &= history.always == first_bits(rows);
        view->has_gaps |= history.gaps != 0;
    }
    bound_vectors(view, seen->vec_rows);
    return is_all ? FA_FLEX_SEES_ALL : any ? FA_FLEX_SEES_SOME : FA_FLEX_SEES_NOTHING;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

/* The kind of a band on a block, as far as the blocks of the mask tell. */
static int32_t kind_of_blocks(const fa_flex_seen *seen, int64_t b_idx, int64_t head, int64_t row, int64_t row_end,
                              int64_t block, int64_t block_end) {
    const fa_flex_block_map *m = &seen->map;
    const uint8_t *kinds = fa_flex_kinds_of(m, b_idx, head);
    const int64_t first = fa_flex_mask_row(m, b_idx, row) / m->block_q;
    const int64_t last = fa_flex_mask_row(m, b_idx, row_end - 1) / m->block_q;
    bool any = false, all = true;
    if (block >= block_end) return FA_FLEX_SEES_NOTHING;
    for (int64_t r = first; r <= last; r++)
        for (int64_t c = block / m->block_kv; c <= (block_end - 1) / m->block_kv; c++) {
            const uint8_t kind = kinds[r * m->columns + c];
            any |= kind != FA_FLEX_EMPTY;
            all &= kind == FA_FLEX_FULL || (kind == FA_FLEX_PARTIAL && !m->has_mask_mod);
        }
    return all ? FA_FLEX_SEES_ALL : any ? FA_FLEX_SEES_SOME : FA_FLEX_SEES_NOTHING;
}

/* Batches and heads that have views of their own. */
static void count_heads(fa_flex_seen *seen) {
    const fa_problem *p = seen->p;
    const fa_flex_program *mask = p->flex->mask ? p->flex->mask->program : NULL;
    const uint8_t depends = mask ? mask->instructions[mask->num_instructions - 1].depends : 0;
    const bool lengths_differ = p->seqused_k || p->flex->q_offset;
    seen->num_b = lengths_differ || depends & FA_FLEX_ON_B ? p->b : least(p->b, seen->map.mask_b);
    seen->num_h = depends & FA_FLEX_ON_H ? p->h : least(p->h, seen->map.mask_h);
}

/* Counts the views, and writes their numbers to the kinds. */
static int64_t number_views(const fa_flex_seen *seen) {
    const fa_problem *p = seen->p;
    int64_t count = 0;
    _Atomic int32_t *to = seen->kinds;
    for (int64_t i = 0; i < seen->num_b * seen->num_h; i++) {
        const int64_t b_idx = i / seen->num_h, len_kv = fa_sequence_at(p, b_idx).len_kv;
        for (int64_t band = 0; band < seen->bands; band++)
            for (int64_t block = 0; block < seen->blocks; block++, to++) {
                const int64_t row = band * seen->band_rows, key = block * seen->block_kv;
                int32_t kind = kind_of_blocks(seen, b_idx, i % seen->num_h, row, least(row + seen->band_rows, p->len_q),
                                              key, least(key + seen->block_kv, len_kv));
                if (kind == FA_FLEX_SEES_SOME) kind = FA_FLEX_NOT_FOUND - (int32_t)count++;
                atomic_init(to, kind);
            }
    }
    return count;
}

fa_flex_seen fa_flex_new_seen(const fa_problem *p, const fa_flex_block_map *map, int block_q, int block_kv,
                              int vec_rows) {
    fa_flex_seen seen = {.p = p,
                         .map = *map,
                         .block_kv = block_kv,
                         .vec_rows = vec_rows,
                         .band_rows = ROWS / block_q * block_q,
                         .blocks = (p->len_kv + block_kv - 1) / block_kv};
    seen.bands = (p->len_q + seen.band_rows - 1) / seen.band_rows;
    count_heads(&seen);
    const int64_t num_kinds = seen.num_b * seen.num_h * seen.bands * seen.blocks;
    if (num_kinds <= 0 || num_kinds > fa_flex_most_table_bytes / 16) return seen;
    seen.kinds = malloc((size_t)num_kinds * sizeof *seen.kinds);
    if (!seen.kinds) return seen;
    const int64_t num_views = number_views(&seen), bits_bytes = (int64_t)sizeof(uint64_t) * WORDS * block_kv;
    if (num_views == 0) return seen;
    if (num_views < fa_flex_most_table_bytes / (bits_bytes + (int64_t)sizeof(fa_flex_view))) {
        seen.views = malloc((size_t)num_views * sizeof *seen.views);
        seen.bits = malloc((size_t)(num_views * bits_bytes));
    }
    if (!seen.views || !seen.bits) fa_flex_free_seen(&seen);
    return seen;
}

void fa_flex_free_seen(fa_flex_seen *seen) {
    free(seen->kinds);
    free(seen->views);
    free(seen->bits);
    seen->kinds = NULL, seen->views = NULL, seen->bits = NULL;
}

/* Finds a view of the table, unless a worker has found it or is about to. Bits are written only if they are read. */
static void see_once(const fa_flex_seen *seen, const fa_flex_programs *programs, int64_t b_idx, int64_t head,
                     int64_t row, int64_t block) {
    _Atomic int32_t *kind = fa_flex_kind_seen(seen, b_idx, head, row, block);
    int32_t found = atomic_load_explicit(kind, memory_order_relaxed);
    if (found > FA_FLEX_NOT_FOUND || found == FA_FLEX_IS_BUSY) return;
    const int32_t number = FA_FLEX_NOT_FOUND - found;
    if (!atomic_compare_exchange_strong_explicit(kind, &found, FA_FLEX_IS_BUSY, memory_order_relaxed,
                                                 memory_order_relaxed))
        return;
    const size_t words = (size_t)seen->block_kv * WORDS;
    uint64_t bits[FA_FLEX_TILE * WORDS];
    found = fa_flex_see(seen, programs, b_idx, head, row, (int)least(seen->band_rows, seen->p->len_q - row), block,
                        &seen->views[number], bits);
    if (seen->views[number].has_gaps) memcpy(seen->bits + (size_t)number * words, bits, words * sizeof *bits);
    atomic_store_explicit(kind, found == FA_FLEX_SEES_SOME ? number : found, memory_order_release);
}

void fa_flex_see_task(const fa_flex_seen *seen, const fa_flex_programs *programs, int64_t b_idx, int64_t head,
                      int64_t row, int64_t row_end, int64_t key, int64_t key_end) {
    if (!seen->kinds) return;
    for (int64_t r = row / seen->band_rows * seen->band_rows; r < row_end; r += seen->band_rows)
        for (int64_t block = key / seen->block_kv * seen->block_kv; block < key_end; block += seen->block_kv)
            see_once(seen, programs, b_idx, head, r, block);
}
