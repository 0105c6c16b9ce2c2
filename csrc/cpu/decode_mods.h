/* Programmable attention between the products of the decode kernel. There is no block mask. Lanes hold rows of several
 * heads, and programs run over one row of one head: its keys are their lanes, so a row is taken out of the scores and
 * put back.
 *
 *   decode_looks      does some row see a key of the block? Bounds of the mask_mod tell, where it does not ask for h
 *   decode_adjust     score_mod -> mask; the scores become scores in units of log2
 *
 * Bit k of a word stands for key k of the block. A hidden pair has P = 0, which a finite V multiplies like any other.
 * Other values of such keys are left out of the products, and added to the rows that see them. */
#ifndef FA_CPU_DECODE_MODS_H
#define FA_CPU_DECODE_MODS_H

#include "decode_task.h"
#include "elementwise.h"
#include "flex/evaluate.h"
#include "flex_bias.h"
#include "flex_programs.h"

/* The mods of a worker, and what the rows of its block see. */
typedef struct decode_mods {
    fa_flex_programs programs; /* a line is a query */
    bool mask_reads_h;
    bool adds_bias; /* the score_mod is `bias`, and there is no mask_mod */
    fa_flex_bias bias;
    bool sees_all; /* every row sees every key of the block, unless its score is -inf */
    uint64_t seen[DECODE_MAX_LANES];
    /* Of each key head of the task, so that no head depends on its neighbours: keys that the products take, and other
     * keys that some row sees. */
    uint64_t common[DECODE_MAX_LANES], of_some[DECODE_MAX_LANES];
} decode_mods;

static inline bool decode_make_mods(decode_mods *m, const fa_problem *p, fa_isa isa) {
    if (!fa_flex_make_programs(p, isa, true, &m->programs)) return false;
    const fa_flex_bound *mask = p->flex->mask;
    m->adds_bias = !mask && fa_flex_bias_of(p, isa, &m->bias);
    m->mask_reads_h = false;
    for (int32_t i = 0; mask && i < mask->program->num_instructions; i++)
        m->mask_reads_h |= mask->program->instructions[i].op == FA_FLEX_h;
    return true;
}

static inline int64_t decode_first_query(const decode_task *t) { return fa_flex_first_query(t->p->flex, t->s.b_idx); }

/* Looks at the n keys from `block` on. */
static bool decode_looks(decode_mods *m, const decode_task *t, int64_t block, int64_t n) {
    fa_flex_intervals *bounds = m->programs.mask_bounds;
    m->sees_all = !m->programs.mask;
    if (m->sees_all || !bounds || m->mask_reads_h) return true;
    const int64_t query = decode_first_query(t);
    fa_flex_bound_head(bounds, t->s.b_idx, 0);
    fa_flex_bound_rows(bounds, 0, query, query + t->s.len_q - 1);
    fa_flex_bound_keys(bounds, block, block + n - 1);
    const fa_flex_interval x = fa_flex_bound_block(bounds, 0);
    m->sees_all = x.lo != 0;
    return x.hi != 0;
}

static void decode_start(fa_flex_evaluator *e, const decode_task *t, int64_t head) {
    fa_flex_start_head(e, t->s.b_idx, head);
    fa_flex_start_lines(e, decode_first_query(t), (int)t->s.len_q);
    fa_flex_start_lanes(e, t->block, (int)t->num_keys);
}

/* The keys that a query sees, by the mask_mod. */
static uint64_t decode_bits(fa_flex_evaluator *mask, int query, int64_t num_keys) {
    const uint8_t *sees = fa_flex_line(mask, query, NULL, NULL);
    uint64_t bits = 0;
    for (int64_t key = 0; key < num_keys; key++) bits |= (uint64_t)(sees[key] != 0) << key;
    return bits;
}

/* Is some element of a row NaN or infinite? */
static bool decode_has_nonfinite(const void *row, int64_t d, fa_dtype dtype) {
    bool found = false;
    if (dtype == FA_F32) {
        for (int64_t c = 0; c < d; c++) found |= (((const uint32_t *)row)[c] & 0x7f800000u) == 0x7f800000u;
        return found;
    }
    const uint16_t exponent = dtype == FA_BF16 ? 0x7f80 : 0x7c00;
    for (int64_t c = 0; c < d; c++) found |= (((const uint16_t *)row)[c] & exponent) == exponent;
    return found;
}

/* Decides which keys the products of a key head take. */
static void decode_sort_keys(decode_mods *m, const decode_task *t, int64_t head, uint64_t of_all, uint64_t of_some) {
    uint64_t common = of_all;
    for (uint64_t rest = of_some & ~of_all; rest; rest &= rest - 1) {
        const int key = __builtin_ctzll(rest);
        const char *v = t->stream[t->num_keys + key] + head * t->v_head_bytes;
        if (!decode_has_nonfinite(v, t->p->d_v, t->p->dtype)) common |= (uint64_t)1 << key;
    }
    m->common[head] = common, m->of_some[head] = of_some & ~common;
}

/* The lane of a query of head `head` of the task's heads. */
static inline int64_t decode_lane(const decode_task *t, int64_t head, int64_t query) {
    const int64_t g = t->p->h / t->p->h_kv;
    return head / g * t->rows + query * g + head % g;
}

/* Adds the bias of all rows at once. Returns false, and leaves the scores as they are, if a pair is masked by -inf. */
OUTLINE bool decode_add_bias(decode_mods *m, decode_task *t, float new_max[DECODE_MAX_LANES]) {
    const int64_t n = t->num_keys, g = t->p->h / t->p->h_kv, lanes = t->lanes, first = t->head_kv * g;
    const fa_flex_places *places = &m->bias.of_value;
    _Alignas(64) float values[FA_DECODE_BLOCK * DECODE_MAX_LANES];
    int64_t at[DECODE_MAX_LANES];
    for (int64_t lane = 0; lane < lanes; lane++) at[lane] = fa_flex_place_of(places, t->s.b_idx, first, 0, t->block);
    for (int64_t head = 0; head < t->num_heads * g; head++)
        for (int64_t i = 0; i < t->s.len_q; i++)
            at[decode_lane(t, head, i)] = fa_flex_place_of(places, t->s.b_idx, first + head, i, t->block);
    m->bias.operations->load_bias(
        &(fa_flex_lines){.at = at, .along = places->kv, .stride = lanes, .num_lanes = (int)lanes, .num_lines = (int)n},
        m->bias.data, m->bias.dtype, values);
    const vec lowest = vec_set(-INFINITY), to_log2 = vec_set((float)LOG2_E);
    for (int64_t lane = 0; lane < lanes; lane += LANES) {
        vec least = vec_set(INFINITY);
        for (int64_t i = lane; i < n * lanes; i += lanes) {
            const vec x = vec_mul(vec_add(vec_load(t->scores + i), vec_load(values + i)), to_log2);
            vec_store(values + i, x);
            least = vec_min(x, least);
        }
        if (mask_any(vec_le(least, lowest))) return false;
    }
    for (int64_t lane = 0; lane < lanes; lane += LANES) {
        vec largest = vec_load(new_max + lane);
        for (int64_t i = lane; i < n * lanes; i += lanes) {
            const vec x = vec_load(values + i);
            vec_store(t->scores + i, x);
            largest = vec_max(x, largest);
        }
        vec_store(new_max + lane, largest);
    }
    for (int64_t lane = 0; lane < lanes; lane++) m->seen[lane] = ~(uint64_t)0 >> (FA_DECODE_BLOCK - n);
    for (int64_t head = 0; head < t->num_heads; head++)
        m->common[head] = ~(uint64_t)0 >> (FA_DECODE_BLOCK - n), m->of_some[head] = 0;
    return true;
}

/* The scores of the block come with their scale. new_max holds the maxima of the rows, and gets those of the block. */
static void decode_adjust(decode_mods *m, decode_task *t, float new_max[DECODE_MAX_LANES]) {
    const int64_t n = t->num_keys, g = t->p->h / t->p->h_kv, lanes = t->lanes;
    const uint64_t whole = ~(uint64_t)0 >> (FA_DECODE_BLOCK - n);
    fa_flex_evaluator *score = m->programs.score, *mask = m->sees_all ? NULL : m->programs.mask;
    const float to_log2 = score ? (float)LOG2_E : 1.0f;
    uint64_t of_all = whole, of_some = 0, of_query[FA_DECODE_MAX_ROWS_OF_MODS];
    _Alignas(64) float line[FA_DECODE_BLOCK] = {0};
    if (m->adds_bias && decode_add_bias(m, t, new_max)) return;
    for (int64_t head = 0; head < t->num_heads * g; head++) {
        if (head % g == 0) of_all = whole, of_some = 0;
        if (score) decode_start(score, t, t->head_kv * g + head);
        if (mask && (head == 0 || m->mask_reads_h)) {
            decode_start(mask, t, t->head_kv * g + head);
            for (int64_t i = 0; i < t->s.len_q; i++) of_query[i] = decode_bits(mask, (int)i, n);
        }
        for (int64_t i = 0; i < t->s.len_q; i++) {
            const int64_t lane = decode_lane(t, head, i);
            float *column = t->scores + lane, largest = new_max[lane];
            for (int64_t key = 0; key < n; key++) line[key] = column[key * lanes];
            const float *s = score ? fa_flex_line(score, (int)i, line, NULL) : line;
            uint64_t seen = mask ? of_query[i] : whole;
            for (int64_t key = 0; key < n; key++) {
                const float x = seen >> key & 1 ? s[key] * to_log2 : -INFINITY;
                if (x == -INFINITY) seen &= ~((uint64_t)1 << key);
                if (x > largest) largest = x;
                column[key * lanes] = x;
            }
            new_max[lane] = largest;
            m->seen[lane] = seen, of_all &= seen, of_some |= seen;
        }
        if (head % g == g - 1) decode_sort_keys(m, t, head / g, of_all, of_some);
    }
}

#endif
