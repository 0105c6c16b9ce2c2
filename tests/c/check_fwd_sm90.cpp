/* Tests attn_fwd_sm90 (csrc/cuda/attn_fwd_sm90.cu): O, lse and the largest scores against sums in double, with masks,
 * grouped heads, packed sequences, sinks, lists of key tiles, and work tiles that fail and are repeated. With a KV
 * cache also pages, copies of pages as gather.cu leaves them, heads that share work tiles, and parts of the keys.
 *
 * All threads of a CTA run the kernel's own code (cuda_emulation.h, hopper_emulation.h). CTAs run one after the other,
 * so nothing between CTAs is tested but the counter of work tiles. Each problem runs in three manners. In each manner
 * some warp or warpgroup may be slow, and so may be copies.
 *
 * tests/guards/test_check_kernels.py compiles this file for rows of tiles.def, and with mods.
 * Rows with options run, too, but without softcap and ALiBi. The linker places `smem_bytes`, the kernel's shared
 * memory, 1024 bytes behind `memory`. */
#include "hopper_emulation.h"

#include <algorithm>
#include <cfloat>

#include "cuda/attn_fwd_sm90.cu"

#include "cpu/dropout.h"
#include "hopper_problem.h"
#if CACHE
#include "gpu/division.h"
#endif

#if !FLEX
#define FLEX_SCORE 0
#endif
static void run_kernel(const void *p) { KERNEL(*(const params *)p); }

/* What the values are. */
enum values {
    NORMAL,        /* No work tile fails. */
    LARGE,         /* Scores rise above the row maximum of the first key tile, beyond the range of P. */
    HUGE_SCORES,   /* Exact scores, of which c S - c m says nothing. They fail. */
    NANS,          /* In V. Rows that do not see the key must not take the NaN. */
    INFINITIES,    /* in V */
    EMPTY_BLOCKS,  /* No query sees a key. */
    ADDED_MASKS,   /* The mod adds large negative numbers to most scores. No work tile fails. */
    STEEP_SLOPES,  /* The mod's scores fall steeply with the distance. No work tile fails. */
    RISING_SLOPES, /* They are positive, and rise steeply towards key 0. No work tile fails. */
};
struct problem {
    const char *name;
    std::vector<int> len_q, len_kv;
    int h, h_kv, d, d_v;
    int ctas;
    bool is_dynamic, has_sinks; /* is_dynamic: work tiles come from the counter */
    values kind;
    /* With a cache: keys of a page (0: a page for each sequence, as long as the cache), keys that fit beside those of
     * the longest sequence, heads of a work tile, and parts. */
    int page, more, tile_heads, parts;
};

extern unsigned char smem_bytes[];

static void draw_values(const problem &x, tensor &q, tensor &k, tensor &v) {
    for (tensor *t : {&q, &k}) {
        t->draw(x.kind == LARGE ? 30 : 1);
        /* Products of integers are exact, so that no score that is a small difference carries their rounding. */
        for (element &y : t->data) y = x.kind == LARGE ? cvt<element>(roundf(cvt_f32(y))) : y;
    }
    v.draw();
    if (x.kind == HUGE_SCORES) {
        /* Products of small integers are exact. But c m is rounded, so P becomes 0 or inf. Without a check of m nobody
         * would notice the zeros. A third of the rows stays below the limit. */
        for (int i = 0; i < q.rows * q.h; i++) {
            const int factor = 8 + (i / q.h / 16 + 3 * (i % q.h)) % 8;
            std::fill_n(&q.data[(size_t)(i * q.d)], q.d, cvt<element>(i % 3 ? 4096.f * (float)factor : 0.5f));
        }
        for (int i = 0; i < k.rows * k.h; i++)
            std::fill_n(&k.data[(size_t)(i * k.d)], k.d, cvt<element>(8192.f * (float)((int)(random_bits() % 9) - 4)));
    }
    const unsigned infinity = BF16 ? 0x7f80 : 0x7c00;
    for (int i = 0; i < v.rows; i++)
        if ((x.kind == NANS || x.kind == INFINITIES) && random_bits() % 40 == 0)
            for (int head = 0; head < v.h; head++)
                v.row(i, head)[random_bits() % (unsigned)v.d] = {(u16)(x.kind == NANS ? 0x7fff : infinity)};
}

#if FLEX && CACHE
/* What the mods call query 0 of each sequence, and the shifts of the scores. */
struct flex_tensors {
    std::vector<int> offsets;
    std::vector<float> shifts;

    flex_tensors(const problem &x, params &p) {
        const int behind[] = {0, -5, 1, 700}; /* A negative offset counts as 0. */
        for (int n = 0; n < p.b; n++) offsets.push_back(behind[random_bits() % 4]);
        for (int i = 0; i < p.b * x.h * p.len_q; i++) shifts.push_back((float)(random_bits() % 5) - 2);
        if (p.b > 1 || random_bits() % 2) p.flex.q_offset = offsets.data();
        if (x.has_sinks) p.sinks.shift = {shifts.data(), x.h * p.len_q, p.len_q, 1};
    }
    int first_query(const params &p, int n) const { return p.flex.q_offset ? max(offsets[(size_t)n], 0) : 0; }
    bool sees(const params &p, int n, int head, int i, int j) const {
        return !FLEX_MASK || flex_mask(p.values, n, head, i, j);
    }
};
#elif FLEX
/* Block masks of the heads, the lists of key tiles, and rows of the scores' maximum and shift. */
struct flex_tensors {
    int rows, columns; /* of blocks */
    std::vector<unsigned char> kinds;
    std::vector<int> walks, order;
    std::vector<float> largest, shifts;

    int kind_at(int head, int i, int j) const { return kinds[(size_t)((head * rows + i / 128) * columns + j / 128)]; }
    int kind_of_tiles(int head, int q_tile, int kv_tile, int len_q, int len_kv) const {
        unsigned seen = 0;
        for (int i = q_tile * BLOCK_Q; i < min((q_tile + 1) * BLOCK_Q, len_q); i++)
            for (int j = kv_tile * BLOCK_KV; j < min((kv_tile + 1) * BLOCK_KV, len_kv); j++)
                seen |= 1u << kind_at(head, i, j);
        return seen & (seen - 1) ? MIXED_BLOCKS : __ffs(seen) - 1;
    }
    /* As flex_walks.cu fills them. */
    void make_lists(int head, int len_q, int len_kv) {
        const int q_tiles = ceil_div(len_q, BLOCK_Q), kv_tiles = ceil_div(len_kv, BLOCK_KV);
        std::vector<std::pair<int, int>> tiles; /* long lists first */
        for (int i = 0; i < q_tiles; i++) {
            std::vector<int> walk((size_t)(1 + kv_tiles), -99);
            walk[0] = 0;
            for (int j = kv_tiles - 1; j >= 0; j--) {
                const int kind = kind_of_tiles(head, i, j, len_q, len_kv);
                if (kind != EMPTY_BLOCK) walk[(size_t)++walk[0]] = 4 * j + kind;
            }
            tiles.push_back({-walk[0], i});
            walks.insert(walks.end(), walk.begin(), walk.end());
        }
        std::sort(tiles.begin(), tiles.end());
        for (const auto &tile : tiles) order.push_back(tile.second);
    }
    flex_tensors(const problem &x, params &p) : rows(ceil_div(p.len_q, 128)), columns(ceil_div(p.len_kv, 128)) {
        const unsigned chance = x.kind == EMPTY_BLOCKS ? 0 : 1 + random_bits() % 4;
        for (int i = 0; i < x.h * rows; i++) {
            const bool is_empty = random_bits() % 4 == 0;
            for (int j = 0; j < columns; j++)
                kinds.push_back(!FLEX_BLOCKS                              ? KIND_WITHOUT_BLOCKS
                                : is_empty || random_bits() % 4 >= chance ? EMPTY_BLOCK
                                : random_bits() % 2                       ? PARTIAL_BLOCK
                                                                          : FULL_BLOCK);
        }
        for (int head = 0; head < x.h; head++) make_lists(head, p.len_q, p.len_kv);
        largest.assign((size_t)(p.b * x.h * p.len_q), 12345);
        for (size_t i = 0; i < largest.size(); i++) shifts.push_back((float)(random_bits() % 5) - 2);
        p.flex.kinds = kinds.data(), p.flex.mask_b = 1, p.flex.mask_h = x.h, p.flex.rows = rows;
        p.flex.columns = columns, p.flex.block_q = p.flex.block_kv = 128;
        if (FLEX_BLOCKS) p.flex.walks = walks.data(), p.flex.order = order.data();
        p.flex.max_scores = {largest.data(), x.h * p.len_q, p.len_q};
        if (x.has_sinks) p.sinks.shift = {shifts.data(), x.h * p.len_q, p.len_q, 1};
    }
    int first_query(const params &, int) const { return 0; }
    bool sees(const params &p, int n, int head, int i, int j) const {
        const int kind = kind_at(head, i, j);
        return kind == FULL_BLOCK || (kind == PARTIAL_BLOCK && flex_mask(p.values, n, head, i, j));
    }
};
#endif

#if CACHE
/* Kernels for single keys have pages that TMA cannot load, and those for whole keys have pages and all columns. */
static problem with_pages_of_kernel(problem x) {
    if (WHOLE_KEYS) x.page = x.page ? x.page : 24, x.d = D_QK, x.d_v = D_V;
    if (SINGLE_KEYS) x.page = x.page == 0 ? 1 : x.page == 16 ? 12 : x.page == 8 ? 3 : 67;
    return x;
}
static fa_attn_fwd_rows rows_of_pages(const tensor &t, int page) {
    const unsigned row = (unsigned)(t.h * t.d / 8);
    return {t.data.data(), t.d / 8, row * (unsigned)page, row, t.d};
}

/* Keys in a cache. Behind the keys of a sequence lie NaN, for TMA after zeros as gather.cu leaves them. */
struct cache_tensors {
    pages_apart apart[2];
    int page, cols, capacity, num_pages;
    std::vector<int> table, rows_of, len_kv;

    cache_tensors(const problem &x) : len_kv(x.len_kv) {
        const int b = (int)x.len_kv.size(), most = *std::max_element(x.len_kv.begin(), x.len_kv.end()) + x.more;
        page = x.page ? x.page : max(most, 1), cols = ceil_div(max(most, 1), page), capacity = cols * page;
        num_pages = (b + 1) * cols; /* one more row than sequences */
        for (int i = 0; i < num_pages; i++) table.push_back(i);
        if (x.page) std::shuffle(table.begin(), table.end(), random_bits);
        for (int i = 0; i < b; i++) rows_of.push_back((i + 1) % (b + 1));
    }
    int row_of_key(int n, int j) const {
        return table[(size_t)(rows_of[(size_t)n] * cols + j / page)] * page + j % page;
    }
    void hide_unused(tensor &t) const {
        std::vector<bool> is_used((size_t)t.rows);
        for (size_t n = 0; n < len_kv.size(); n++)
            for (int j = 0; j < min(len_kv[n] + (SINGLE_KEYS ? 0 : 128), capacity); j++) {
                const int row = row_of_key((int)n, j);
                is_used[(size_t)row] = true;
                if (j >= len_kv[n]) std::fill_n(t.row(row, 0), t.h * t.d, element{0});
            }
        for (int i = 0; i < t.rows; i++)
            if (!is_used[(size_t)i]) std::fill_n(t.row(i, 0), t.h * t.d, element{0x7fff});
    }
    void fill(const problem &x, params &p, tensor &k, tensor &v) {
        const int box = x.page ? std::__gcd(page, BLOCK_KV) : BLOCK_KV, rows = BLOCK_Q / x.tile_heads;
        hide_unused(k), hide_unused(v);
        if (!SINGLE_KEYS) k.fill_map_of_pages(p.k, page, box), v.fill_map_of_pages(p.v, page, box);
        for (size_t n = 0; n < len_kv.size(); n++) /* pages without a key are not looked up */
            for (int i = ceil_div(len_kv[n], page); x.page && i < cols; i++)
                table[(size_t)(rows_of[n] * cols + i)] = -1;
        const int no_pages[] = {-1, 0x7fffffff, (int)0x80000000, num_pages}; /* count as the last page */
        for (int &number : table)
            if (x.page && number == num_pages - 1) number = no_pages[random_bits() % 4];
        p.cu_seqlens_k = nullptr, p.seqused_k = len_kv.data(), p.len_kv = capacity;
        p.cache = {};
        p.cache.block_table = x.page ? table.data() : nullptr, p.cache.table_stride = cols;
        p.cache.rows = (int)len_kv.size() + 1, p.cache.num_pages = num_pages, p.cache.page_size = page;
        p.cache.capacity = capacity, p.cache.box = box, p.cache.cache_batch_idx = rows_of.data();
        p.cache.tile_heads = x.tile_heads, p.cache.rows_of_head = rows, p.cache.h_in_tiles = x.h / x.tile_heads;
        p.cache.rows_inverse = FA_ROWS_INVERSE(rows), p.cache.num_parts = x.parts;
        p.cache.k = rows_of_pages(k, page), p.cache.v = rows_of_pages(v, page),
        p.cache.by_page_size = fa_division_by((unsigned)page);
        if (WHOLE_KEYS) { /* K and V lie in pages that are not equally far apart. */
            apart[0].move(k, page, 8), apart[1].move(v, page, 24);
            p.cache.page_groups[0] = (page + 8) / 8, p.cache.page_groups[1] = (page + 24) / 8;
        }
    }
};
#endif

/* A row of O and its lse, as they should be. */
struct row_of_o {
    std::vector<double> o;
    double lse, largest;
};
/* scores, factors: of the keys that the row sees. sink: -inf if there is none. */
static row_of_o row_of(const std::vector<double> &scores, const std::vector<int> &keys,
                       const std::vector<double> &factors, const numbers &v, int head_kv, double sink,
                       double empty_lse) {
    row_of_o x = {std::vector<double>((size_t)v.d), sink, -INFINITY};
    for (double s : scores) x.largest = fmax(x.largest, s);
    double sum = 0;
    for (double s : scores) sum += exp(s - x.largest);
    const double own = x.largest + log(sum), most = fmax(own, sink);
    if (!scores.empty()) x.lse = most + log(exp(own - most) + exp(sink - most));
    if (scores.empty() && sink == -INFINITY) x.lse = empty_lse;
    for (size_t j = 0; j < scores.size(); j++) {
        add_multiple(x.o.data(), exp(scores[j] - x.lse) * factors[j], v.row(keys[j], head_kv), v.d);
    }
    return x;
}

/* The factor of dropout. */
static double dropout_at(const params &p, int n, int head, int i, int j) {
    const uint64_t stream = fa_dropout_stream(p.rng_state[1], n, p.h, head);
    return fa_dropout_byte(p.rng_state[0], stream, i, j) <= p.keep_max ? p.keep_scale : 0;
}

/* How far results are from what they should be. */
struct difference {
    double off = 0, all = 0, lse = 0;
    long num_wrong = 0; /* lse, largest scores, and numbers that are finite where they should not be or vice versa */

    void add(const row_of_o &right, tensor &o, int row, int head, double lse_of_row) {
        const double error = lse_of_row == right.lse ? 0 : fabs(lse_of_row - right.lse) / (1 + fabs(right.lse));
        lse = fmax(lse, error), num_wrong += !(error < 2e-5);
        for (int c = 0; c < o.d; c++) {
            const double y = right.o[(size_t)c], z = o.at(row, head, c);
            if (std::isfinite(y))
                num_wrong += !std::isfinite(z), off += (y - z) * (y - z), all += y * y;
            else
                num_wrong += std::isnan(y) ? !std::isnan(z) : y != z;
        }
    }
    void add_largest(double right, double mine) {
        num_wrong += !(mine == right || fabs(mine - right) < 1e-3 * (1 + fabs(right)));
    }
    double error() const { return all > 0 ? sqrt(off / all) : sqrt(off); }
};

#if CACHE
/* Adds up the parts of each row, as combine.cu does. lse and part_o are [part, b, h, row]. */
static void add_parts(int parts, int rows, float *lse, const std::vector<float> &part_o, int len_q, tensor &o) {
    for (int i = 0; i < rows; i++) {
        double most = -INFINITY, sum = 0;
        for (int part = 0; part < parts; part++) most = fmax(most, lse[part * rows + i]);
        std::vector<double> row((size_t)o.d);
        for (int part = 0; part < parts && most > -INFINITY; part++) {
            const double weight = exp(lse[part * rows + i] - most);
            sum += weight;
            for (int c = 0; c < o.d && weight > 0; c++)
                row[(size_t)c] += weight * part_o[((size_t)part * (size_t)rows + (size_t)i) * (size_t)o.d + (size_t)c];
        }
        const int head = i / len_q % o.h, row_of_o = i / len_q / o.h * len_q + i % len_q;
        for (int c = 0; c < o.d; c++)
            *(o.row(row_of_o, head) + c) = cvt<element>((float)(sum > 0 ? row[(size_t)c] / sum : 0));
        lse[i] = sum > 0 ? (float)(most + log(sum)) : FLEX ? -INFINITY : INFINITY;
    }
}
#endif

static void check(const problem &given) {
#if CACHE
    const problem x = with_pages_of_kernel(given);
#else
    const problem &x = given;
#endif
    const int b = (int)x.len_q.size(), group = x.h / x.h_kv, len_q = x.len_q[0], len_kv = x.len_kv[0];
    const std::vector<int> cu_q = offsets_of(x.len_q), cu_kv = offsets_of(x.len_kv);
#if CACHE
    cache_tensors cache(x);
    const int total_q = cu_q[b], total_kv = cache.num_pages * cache.page, rows_of_head = BLOCK_Q / x.tile_heads;
    const int tile_heads = x.tile_heads, parts = x.parts;
    const auto row_of_key = [&](int n, int j) { return cache.row_of_key(n, j); };
#else
    const int total_q = cu_q[b], total_kv = cu_kv[b], rows_of_head = BLOCK_Q, tile_heads = 1, parts = 1;
    const auto row_of_key = [&](int n, int j) { return cu_kv[n] + j; };
#endif
    tensor q(total_q, x.h, x.d), o(total_q, x.h, x.d_v), k(total_kv, x.h_kv, x.d), v(total_kv, x.h_kv, x.d_v);
    draw_values(x, q, k, v);
    std::vector<float> sinks;
    for (int i = 0; i < x.h; i++) sinks.push_back(x.has_sinks ? (float)(random_bits() % 9) : -INFINITY);
    constexpr int GUARD = 64; /* elements that nobody may write */
    constexpr float UNTOUCHED = 12345;
    std::vector<float> lse((size_t)(parts * total_q * x.h) + 2 * GUARD, UNTOUCHED);
    std::vector<float> part_o((size_t)(parts * total_q * x.h * x.d_v), NAN);
    o.data.resize(o.data.size() + GUARD, element{0x7fff});

    params p = {};
    q.fill_map(p.q, len_q, rows_of_head, tile_heads), o.fill_map(p.o, len_q, 16);
    if (!CACHE) k.fill_map(p.k, len_kv, BLOCK_KV), v.fill_map(p.v, len_kv, BLOCK_KV);
    const bool wants_lse = parts > 1 || random_bits() % 3 > 0;
    p.lse = wants_lse ? lse.data() + GUARD : nullptr;
    p.lse_stride_b = VARLEN ? 0 : (long long)x.h * len_q, p.lse_stride_h = VARLEN ? total_q : len_q;
    p.o_data = o.data.data();
    p.o_stride_b = VARLEN ? 0 : (long long)len_q * x.h * x.d_v, p.o_stride_row = x.h * x.d_v, p.o_stride_h = x.d_v;
    p.b = b, p.h = x.h, p.heads_per_kv = group, p.d_v = x.d_v;
    p.len_q = VARLEN ? total_q : len_q, p.len_kv = VARLEN ? total_kv : len_kv;
    p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_kv.data();
    p.num_q_tiles = ceil_div(len_q, rows_of_head), p.num_tiles = p.num_q_tiles * b * x.h / tile_heads * parts;
    p.group_heads = 1 + (int)(random_bits() % (unsigned)(x.h / tile_heads));
    p.counter_slot = x.is_dynamic ? 3 : -1;
    const float scale = 1 / sqrtf((float)x.d);
    p.score_scale = scale, p.scale_log2 = (SCORE || FLEX_SCORE ? 1 : scale) * (float)LOG2_E;
    p.window_left = WINDOW_LEFT, p.window_right = WINDOW_RIGHT, p.keep_max = DROPOUT ? 178 : 255,
    p.keep_scale = DROPOUT ? 1 / 0.7f : 1;
    p.empty_lse = FLEX ? -INFINITY : INFINITY;
    static unsigned long long rng_state[2] = {5, 7};
    p.rng_state = rng_state;
    if (x.has_sinks) p.sinks.values = {sinks.data(), 1, FA_SINKS_OF_F32};
#if FLEX
    const flex_tensors flex(x, p);
#endif
#if CACHE
    const cache_tensors places = cache; /* fill() takes numbers out of the table */
    cache.fill(x, p, k, v);
    if (parts > 1) p.cache.part_o = part_o.data(), p.cache.part_rows = total_q * x.h, p.empty_lse = -INFINITY;
#endif
    const emulated_shape shape = {(unsigned)x.ctas, 1, 1, 1, THREADS, 1024 + (unsigned)sizeof(shared_memory)};
#if FLEX
    added_scores = x.kind == ADDED_MASKS     ? OF_MASKS
                   : x.kind == STEEP_SLOPES  ? OF_SLOPES
                   : x.kind == RISING_SLOPES ? OF_KEYS
                                             : OF_PLACES;
#endif
    emulate_launch(run_kernel, &p, &shape);
    if (x.kind == NORMAL || x.kind >= ADDED_MASKS)
        for (int failures : ((shared_memory *)smem_bytes)->num_failed) EXPECT(failures == 0);
    EXPECT(copies.empty());
    EXPECT(tile_counters[3] == 0);
    for (size_t i = 0; i < lse.size(); i++)
        EXPECT(lse[i] == UNTOUCHED || (wants_lse && i >= GUARD && i < lse.size() - GUARD));
    for (int i = 0; i < GUARD; i++) EXPECT(o.data[o.data.size() - 1 - (size_t)i].bits == 0x7fff);

#if CACHE
    if (parts > 1) add_parts(parts, total_q * x.h, p.lse, part_o, len_q, o), p.empty_lse = FLEX ? -INFINITY : INFINITY;
    cache.table = places.table;
#endif
    const numbers all_q(q), all_k(k), all_v(v);
    difference all;
    for (int n = 0; n < b; n++)
        for (int head = 0; head < x.h; head++)
            for (int i = 0; i < x.len_q[n]; i++) {
                const key_range seen = keys_of_row(i, x.len_q[n], x.len_kv[n]);
                const int head_kv = head / group, row = cu_q[n] + i, place = (n * x.h + head) * len_q + i;
                std::vector<double> scores, factors;
                std::vector<int> keys;
                for (int j = seen.begin; j < seen.end; j++) {
#if FLEX
                    const int q_idx = i + flex.first_query(p, n);
                    if (!flex.sees(p, n, head, q_idx, j)) continue;
#endif
                    double s = scale * dot(all_q.row(row, head), all_k.row(row_of_key(n, j), head_kv), x.d);
#if FLEX_SCORE
                    s = flex_score(p.values, (float)s, n, head, q_idx, j);
                    if (s * LOG2_E < -FLT_MAX) continue; /* it counts as -inf */
#endif
                    scores.push_back(s), keys.push_back(row_of_key(n, j));
                    factors.push_back(dropout_at(p, n, head, i, j));
                }
                double sink = sinks[head];
#if FLEX
                if (x.has_sinks) sink -= flex.shifts[place];
#endif
                const row_of_o right = row_of(scores, keys, factors, all_v, head_kv, sink, p.empty_lse);
#if FLEX && !CACHE
                if (FLEX_MAX) all.add_largest(right.largest, flex.largest[(size_t)place]);
#endif
                const double lse_of_row = wants_lse ? p.lse[VARLEN ? head * total_q + row : place] : right.lse;
                all.add(right, o, row, head, lse_of_row);
            }
    if (all.num_wrong == 0 && all.error() < (BF16 ? 4e-3 : 6e-4)) return;
    fprintf(stderr, "%s: error of O %g, of lse %g, wrong numbers %ld", x.name, all.error(), all.lse, all.num_wrong);
    print_manner();
    exit(1);
}

/* Fewer columns, by `less` if all boxes then begin among the columns. Those of packed tensors must. */
static int narrower(int columns, int less) { return max(columns - less, (columns - 1) / CHUNK * CHUNK + 8); }

static const problem PROBLEMS[] = {
#if CACHE && VARLEN
    {"packed", {130, 0, 1, 300, 129}, {130, 7, 0, 257, 300}, 2, 1, D_QK, D_V, 1, true, false, NORMAL, 0, 0, 1, 1},
    {"packed, sinks", {1, 1, 0, 64}, {1, 129, 5, 200}, 2, 2, D_QK, D_V, 2, true, true, NORMAL, 0, 77, 1, 1},
    {"packed, pages", {65, 3, 70}, {131, 9, 200}, 4, 2, D_QK, D_V, 2, false, false, NORMAL, 16, 40, 2, 1},
    {"packed, NaN", {100, 1, 77}, {256, 9, 257}, 2, 1, D_QK, D_V, 2, true, false, NANS, 0, 300, 2, 1},
    {"packed, large scores", {70, 0, 60}, {140, 9, 33}, 2, 1, D_QK, D_V, 1, true, false, LARGE, 8, 0, 1, 1},
#elif CACHE
    {"300", {300}, {300}, 2, 2, D_QK, D_V, 1, false, false, NORMAL, 0, 0, 1, 1},
    {"lengths", {129, 129, 129}, {385, 0, 61}, 2, 1, D_QK, D_V, 2, true, true, NORMAL, 0, 0, 1, 1},
    {"room", {70, 70}, {200, 3}, 2, 1, narrower(D_QK, 16), narrower(D_V, 16), 1, true, false, NORMAL, 0, 333, 2, 1},
    {"pages", {70, 70}, {200, 131}, 4, 2, D_QK, D_V, 1, true, true, NORMAL, 16, 50, 2, 1},
    {"long pages", {40, 40}, {200, 131}, 4, 1, D_QK, D_V, 2, true, false, NORMAL, 72, 0, 4, 1},
    {"parts", {30, 30}, {400, 90}, 4, 1, D_QK, D_V, 2, true, false, NORMAL, 0, 9, 4, 3},
    {"parts of pages", {50, 50}, {300, 0}, 2, 1, D_QK, D_V, 1, true, false, NORMAL, 8, 9, 1, 2},
    {"NaN", {100, 100}, {310, 77}, 2, 1, D_QK, D_V, 1, true, true, NANS, 0, 5, 1, 1},
    {"large scores", {80, 80}, {200, 201}, 2, 1, D_QK, D_V, 1, true, true, LARGE, 0, 100, 2, 1},
    {"huge scores", {65, 65}, {200, 40}, 2, 1, D_QK, D_V, 2, true, true, HUGE_SCORES, 0, 0, 1, 1},
#elif VARLEN
    {"packed", {130, 0, 1, 300, 129}, {130, 7, 0, 257, 300}, 2, 1, D_QK, D_V, 1, true, false, NORMAL},
    {"packed, sinks", {1, 1, 0, 0, 64, 1}, {1, 129, 5, 0, 200, 0}, 2, 2, D_QK, D_V, 2, true, true, NORMAL},
    {"packed, NaN", {200, 1, 77}, {256, 9, 257}, 1, 1, D_QK, D_V, 2, false, false, NANS},
    {"packed, nothing seen", {3, 0, 70}, {0, 9, 0}, 2, 1, D_QK, D_V, 1, true, false, NORMAL},
    {"packed, more CTAs than tiles", {3, 0, 70}, {10, 9, 3}, 1, 1, D_QK, D_V, 5, true, true, NORMAL},
    {"packed, narrower V", {65, 20}, {70, 200}, 2, 1, D_QK, narrower(D_V, 40), 1, true, false, NORMAL},
    {"packed, narrower Q and K", {65, 20}, {70, 200}, 2, 1, narrower(D_QK, 40), D_V, 1, true, true, NORMAL},
    {"packed, large scores", {130, 0, 60}, {140, 9, 33}, 2, 1, D_QK, D_V, 1, true, false, LARGE},
#else
    {"300", {300}, {300}, 2, 2, D_QK, D_V, 1, false, false, NORMAL},
    {"129 x 385", {129, 129}, {385, 385}, 2, 1, narrower(D_QK, 16), narrower(D_V, 16), 2, true, true, NORMAL},
    {"385 x 129", {385}, {129}, 2, 2, narrower(D_QK, 24), narrower(D_V, 24), 1, true, false, NORMAL},
    {"narrow V", {150}, {200}, 2, 1, D_QK, 8, 1, true, true, NORMAL},
    {"narrow Q and K, NaN", {150}, {200}, 2, 2, narrower(D_QK, 40), D_V, 1, true, false, NANS},
    {"1 x 1", {1, 1, 1, 1}, {1, 1, 1, 1}, 2, 1, D_QK, D_V, 1, true, true, NORMAL},
    {"700 x 3", {700}, {3}, 2, 2, D_QK, D_V, 1, true, false, NORMAL},
    {"NaN", {300}, {310}, 2, 1, D_QK, D_V, 1, true, true, NANS},
    {"infinities", {300}, {310}, 2, 1, D_QK, D_V, 2, false, false, INFINITIES},
    {"large scores", {200}, {200}, 3, 1, D_QK, D_V, 1, true, true, LARGE},
    {"huge scores", {65, 65}, {200, 200}, 3, 1, D_QK, D_V, 2, true, true, HUGE_SCORES},
    {"more CTAs than tiles", {50}, {200}, 2, 1, D_QK, D_V, 4, false, true, NORMAL},
    {"one key tile", {65, 65, 65}, {40, 40, 40}, 3, 1, D_QK, D_V, 1, true, false, NORMAL},
#if FLEX
    {"empty blocks", {260}, {300}, 2, 2, D_QK, D_V, 1, true, true, EMPTY_BLOCKS},
    {"long lists", {520}, {700}, 4, 2, D_QK, D_V, 2, true, false, NORMAL},
    {"added masks", {520}, {700}, 4, 2, D_QK, D_V, 1, true, false, ADDED_MASKS},
    {"steep slopes", {700}, {700}, 4, 2, D_QK, D_V, 1, true, false, STEEP_SLOPES},
    {"rising slopes", {300}, {640}, 4, 2, D_QK, D_V, 1, true, false, RISING_SLOPES},
#else
    {"260 x 0", {260}, {0}, 2, 2, D_QK, D_V, 1, true, true, NORMAL},
#endif
#endif
};

int main(int argc, char **argv) {
    check_all(argc, argv, PROBLEMS, 8, 0, 1 + WGS, check); /* slow: a warp that loads or computes, or any warpgroup */
    puts("all rows are right");
    return 0;
}
