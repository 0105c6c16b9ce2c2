/* Compares the verbs of one vector vocabulary (cpu/vec_scalar.h describes them) with plain C, lane by lane. NaN,
 * infinities, denormals and the ends of pages are among the operands. VERBS names the header of the vocabulary, and ISA
 * the instruction set that it needs. */
#define _DEFAULT_SOURCE /* for MAP_ANONYMOUS */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "cpu/dispatch.h"
#include "guarded.h"

static int check_all(void);

/* NOTE: behind the vocabulary's header everything is compiled for its instruction set. */
int main(void) {
    fa_machine machine;
    fa_cpu_detect(&machine);
    if (machine.isa_legal[ISA]) return check_all();
    printf("this processor does not offer %s\n", fa_isa_name(ISA));
    return 0;
}

#include VERBS
#include "cpu/vec_load_first.h"

#define NUM_HOSTILE 14
static const uint32_t hostile[NUM_HOSTILE] = {
    0x00000000, 0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000, 0x7fc00000,
    0xffc12345, 0x7f7fffff, 0xff7fffff, 0x00800000, 0x477fe000, 0x42c80000, 0xc2c80001,
};

static bool is_same(float a, float b) { return (a != a && b != b) || fa_bits_of(a) == fa_bits_of(b); }
/* Products of words of two bf16 may round the last bit either way. */
static bool is_near(float a, float b) {
    const float unit = 0x1p-23f * fabsf(b);
    return is_same(a, b) || (isfinite(a) && isfinite(b) && fabsf(a - b) <= unit);
}
static uint32_t random_bits(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 32);
}

/* Places n bytes at the end of a page, before memory that nobody may read. */
static void *at_end(size_t n) { return guarded_alloc(n, 1, true); }

static void test_arithmetic(void **state) {
    (void)state;
    for (int i = 0; i < NUM_HOSTILE; i++)
        for (int j = 0; j < NUM_HOSTILE; j++) {
            const float a = fa_f32_of_bits(hostile[i]), b = fa_f32_of_bits(hostile[j]);
            const vec x = vec_set(a), y = vec_set(b), one = vec_set(1.0f), zero = vec_set(0.0f);
            const struct {
                vec found;
                float expected;
            } cases[] = {
                {vec_max(x, y), b < a ? a : b},
                {vec_min(x, y), a < b ? a : b},
                {vec_select(vec_lt(x, y), one, zero), a < b},
                {vec_select(vec_le(x, y), one, zero), a <= b},
                {vec_select(mask_and(vec_le(x, y), vec_le(y, x)), one, zero), a == b},
                {vec_add(x, y), a + b},
                {vec_sub(x, y), a - b},
                {vec_mul(x, y), a * b},
                {vec_div(x, y), a / b},
                {vec_xor(x, y), fa_f32_of_bits(hostile[i] ^ hostile[j])},
            };
            for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
                float lane[LANES];
                vec_store(lane, cases[n].found);
                for (int l = 0; l < LANES; l++)
                    if (!is_same(lane[l], cases[n].expected))
                        fail_msg("verb %d of %g, %g: %g instead of %g", (int)n, a, b, lane[l], cases[n].expected);
            }
            assert_true(mask_any(vec_lt(x, y)) == (a < b));
        }
}

/* A lane that differs from the others shows whether a verb exchanges lanes. */
static void test_order_of_lanes(void **state) {
    (void)state;
    float *p = at_end(LANES * sizeof *p), lane[LANES], rows[LANES][LANES];
    vec row[LANES];
    for (int i = 0; i < LANES; i++) p[i] = (float)(i + 1);
    for (int n = 0; n < LANES; n++) {
        vec_store(lane, vec_load_first(p + LANES - n, n));
        for (int i = 0; i < LANES; i++) assert_true(lane[i] == (i < n ? (float)(LANES - n + i + 1) : 0));
        vec_store(lane, vec_broadcast(p + n));
        for (int i = 0; i < LANES; i++) assert_true(lane[i] == p[n]);
        assert_true(mask_any(vec_lt(vec_set((float)n + 0.5f), vec_load(p))));
    }
    assert_false(mask_any(vec_lt(vec_set((float)LANES), vec_load(p))));
    for (int i = 0; i < LANES; i++) {
        for (int j = 0; j < LANES; j++) lane[j] = (float)(LANES * i + j);
        row[i] = vec_load(lane);
    }
    vec_store(lane, vec_sums(row));
    for (int i = 0; i < LANES; i++) assert_true(lane[i] == (float)(LANES * LANES * i + LANES * (LANES - 1) / 2));
    vec_transpose(row);
    memcpy(rows, row, sizeof rows);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) assert_true(rows[i][j] == (float)(LANES * j + i));
    guarded_free_all();
}

static void test_bits(void **state) {
    (void)state;
    uint8_t *bytes = at_end(LANES), *out = at_end(LANES);
    uint64_t random = 1;
    for (int n = 0; n < 1000; n++) {
        uint32_t x[LANES], high[LANES], low[LANES];
        const uint32_t factor = random_bits(&random);
        vec a, low_vec, high_vec;
        for (int i = 0; i < LANES; i++) x[i] = random_bits(&random), bytes[i] = (uint8_t)x[i];
        memcpy(&a, x, sizeof a);
        high_vec = vec_multiply_bits(a, factor, &low_vec);
        memcpy(high, &high_vec, sizeof high);
        memcpy(low, &low_vec, sizeof low);
        float number[LANES], is_low[LANES];
        vec_store(number, vec_load_bytes(bytes));
        vec_store(is_low, vec_select(mask_bytes_le(bytes, (uint8_t)factor), vec_set(1.0f), vec_set(0.0f)));
        for (int i = 0; i < LANES; i++) {
            assert_true(((uint64_t)high[i] << 32 | low[i]) == (uint64_t)x[i] * factor);
            assert_true(number[i] == (float)bytes[i] && is_low[i] == (bytes[i] <= (uint8_t)factor));
        }
        for (int shift = 0; shift < 32; shift += 8) {
            vec_store_bytes(out, a, shift);
            for (int i = 0; i < LANES; i++) assert_true(out[i] == (uint8_t)(x[i] >> shift));
        }
    }
    guarded_free_all();
}

static void test_exp2(void **state) {
    (void)state;
    const double tolerance = WORD_ELEMS == 2 ? 5e-6 : 3e-7;
    const vec_mode mode = vec_enter();
    for (float x = -200.0f; x <= 126.0f; x += 0.0137f) {
        float lane[LANES];
        vec_store(lane, vec_exp2(vec_set(x)));
        const double expected = exp2((double)x), error = fabs((double)lane[LANES - 1] - expected);
        if (!(x < -125 ? lane[0] <= 0x1.2p-125f : error <= tolerance * expected)) fail_msg("2^%g is %g", x, lane[0]);
    }
    const float ends[4] = {0.0f, -INFINITY, NAN, -128.0f};
    volatile float at[4]; /* Otherwise gcc computes them behind vec_leave, where -128 gives a denormal. */
    for (int i = 0; i < 4; i++) {
        float lane[LANES];
        vec_store(lane, vec_exp2(vec_set(ends[i])));
        at[i] = lane[0];
    }
    vec_leave(mode);
    assert_true(at[0] == 1.0f && at[1] == 0.0f && at[2] != at[2] && at[3] == 0.0f);
}

/* Every code of the narrow types, and the roundings of many floats. */
static void test_narrow_types(void **state) {
    (void)state;
    uint16_t *half = at_end(LANES * sizeof *half);
    float lane[LANES];
    const vec_mode mode = vec_enter(); /* conversions of fp16 do not flush denormals */
    for (uint32_t code = 0; code < 0x10000; code += LANES) {
        for (int i = 0; i < LANES; i++) half[i] = (uint16_t)(code + (uint32_t)i);
        vec_store(lane, vec_load_f16(half));
        for (int i = 0; i < LANES; i++) assert_true(is_same(lane[i], fa_f32_from_f16(half[i])));
        vec_store(lane, vec_load_bf16(half));
        for (int i = 0; i < LANES; i++) assert_true(is_same(lane[i], fa_f32_from_bf16(half[i])));
        const int n = (int)(code / LANES % LANES);
        vec_store(lane, vec_load_f16_first(half + LANES - n, n));
        for (int i = 0; i < LANES; i++)
            assert_true(is_same(lane[i], i < n ? fa_f32_from_f16(half[LANES - n + i]) : 0.0f));
        vec_store(lane, vec_load_bf16_first(half + LANES - n, n));
        for (int i = 0; i < LANES; i++)
            assert_true(is_same(lane[i], i < n ? fa_f32_from_bf16(half[LANES - n + i]) : 0.0f));
    }
#if WORD_ELEMS == 1
    for (int code = 0; code < 256; code++) {
        uint8_t *byte = (uint8_t *)half + LANES; /* LANES bytes before the end of the page */
        memset(byte, code, LANES);
        vec_store(lane, vec_load_e4m3(byte));
        for (int i = 0; i < LANES; i++) assert_true(is_same(lane[i], fa_f32_from_e4m3((uint8_t)code)));
        vec_store(lane, vec_load_e4m3_first(byte + LANES - 1, 1));
        for (int i = 0; i < LANES; i++) assert_true(is_same(lane[i], i ? 0.0f : fa_f32_from_e4m3((uint8_t)code)));
    }
#endif
    uint64_t random = 2;
    for (int n = 0; n < 200000; n++) {
        uint32_t bits = n < NUM_HOSTILE ? hostile[n] : random_bits(&random);
        if (n % 3 == 1) bits = (bits & 0x80000fffu) | (0x38000000u + (bits >> 2 & 0x0ffff000u)); /* sizes of fp16 */
        if (n % 3 == 2) bits &= 0xffff8000u;                                                     /* ties of bf16 */
        if (n % 3 == 2) bits |= bits >> 3 & 0x1000u;
        const float x = fa_f32_of_bits(bits);
        if (fabsf(x) < 0x1p-126f) continue; /* flushed or not */
        vec_store_f16(half, vec_set(x));
        for (int i = 0; i < LANES; i++)
            assert_true(is_same(fa_f32_from_f16(half[i]), fa_f32_from_f16(fa_f16_from_f32(x))));
        vec_store_bf16(half, vec_set(x));
        for (int i = 0; i < LANES; i++)
            assert_true(is_same(fa_f32_from_bf16(half[i]), fa_f32_from_bf16(fa_bf16_from_f32(x))));
    }
    vec_leave(mode);
    guarded_free_all();
}

#if WORD_ELEMS == 2
/* Verbs that move words keep all of their bits. As a float, a word of two bf16 may be a signaling NaN. */
static void check_moves(uint32_t bits) {
    float *word = at_end(sizeof *word), lane[LANES];
    memcpy(word, &bits, sizeof *word);
    const vec x = vec_broadcast(word), zero = vec_set(0.0f);
    vec rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = x;
    vec_transpose(rows);
    const vec moved[] = {x, vec_load_first(word, 1), vec_select(vec_le(zero, zero), x, zero), rows[LANES - 1]};
    for (int n = 0; n < 4; n++) {
        vec_store(lane, moved[n]);
        for (int i = 0; i < LANES; i++) {
            const uint32_t expected = n == 1 && i > 0 ? 0 : bits;
            if (memcmp(&lane[i], &expected, sizeof expected))
                fail_msg("move %d of word %08x gives %08x", n, bits, fa_bits_of(lane[i]));
        }
    }
}

static void test_words(void **state) {
    (void)state;
    static const uint32_t moved[] = {0x7f803f80, 0xff80bf80, 0x7f80ff80, 0x7fc01234, 0x00013f80, 0x80008000};
    for (size_t n = 0; n < sizeof moved / sizeof *moved; n++) check_moves(moved[n]);
    uint16_t *row[2], back[2][LANES], words[2 * LANES];
    for (int i = 0; i < 2; i++) row[i] = at_end(2 * LANES * sizeof **row);
    for (int i = 0; i < 2 * LANES; i++) row[0][i] = fa_bf16_from_f32((float)i), row[1][i] = fa_bf16_from_f32(-(float)i);
    const vec even = vec_load_bf16(row[0] + LANES), odd = vec_load_bf16(row[1] + LANES);
    vec found = vec_pack_words(even, odd);
    for (int kind = 0; kind < 3; kind++) {
        if (kind == 1) found = vec_store_rows(back[0], back[1], even, odd);
        if (kind == 2) found = vec_join_rows(row[0] + LANES, row[1] + LANES);
        memcpy(words, &found, sizeof words);
        for (int i = 0; i < LANES; i++) {
            assert_true(words[2 * i] == row[0][LANES + i] && words[2 * i + 1] == row[1][LANES + i]);
            if (kind == 1) assert_true(back[0][i] == row[0][LANES + i] && back[1][i] == row[1][LANES + i]);
        }
    }
    for (int n = 0; n < 2 * LANES; n++) {
        found = vec_load_words_first(row[0] + 2 * LANES - n, n);
        memcpy(words, &found, sizeof words);
        for (int i = 0; i < 2 * LANES; i++) assert_true(words[i] == (i < n ? row[0][2 * LANES - n + i] : 0));
    }
    /* Interleaved words times (1, 0) are the elements of the first row, times (0, 1) those of the second one. */
    for (int side = 0; side < 2; side++) {
        vec a = vec_load((const float *)(const void *)row[0]), b = vec_load((const float *)(const void *)row[1]);
        vec_interleave(&a, &b);
        const vec take = vec_set_bits(side ? 0x3f800000u : 0x3f80u);
        a = vec_dot(vec_set(0.0f), take, a), b = vec_dot(vec_set(0.0f), take, b);
        vec_in_order(&a, &b);
        float lane[2 * LANES];
        vec_store(lane, a), vec_store(lane + LANES, b);
        for (int i = 0; i < 2 * LANES; i++) assert_true(lane[i] == (side ? -(float)i : (float)i));
    }
    guarded_free_all();
}
#else
static void test_words(void **state) { (void)state; }
#endif

/* acc + a b over the elements of a word, and with a word of a lane */
static void test_products(void **state) {
    (void)state;
    for (int i = 0; i < NUM_HOSTILE; i++)
        for (int j = 0; j < NUM_HOSTILE; j++) {
            float a = fa_f32_of_bits(hostile[i] & 0xffff0000u), b = fa_f32_of_bits(hostile[j] & 0xffff0000u);
            uint32_t word_of_a = fa_bits_of(a), word_of_b = fa_bits_of(b), others[LANES];
            if (WORD_ELEMS == 2) word_of_a |= 0x4000, word_of_b |= 0x4040; /* 2 times 3 */
            const float expected = a * b + (WORD_ELEMS == 2 ? 7.0f : 1.0f);
            const vec x = vec_set_bits(word_of_a), y = vec_set_bits(word_of_b);
            float lane[LANES];
            vec_store(lane, vec_dot(vec_set(1.0f), x, y));
            for (int l = 0; l < LANES; l++)
                if (!is_near(lane[l], expected)) fail_msg("1 + %g %g: %g instead of %g", a, b, lane[l], expected);
#ifdef VEC_BY_LANE
            for (int at = 0; at < LANES; at++) {
                vec words;
                for (int l = 0; l < LANES; l++) others[l] = l == at ? word_of_a : 0x7fc07fc0u;
                memcpy(&words, others, sizeof words);
                vec_store(lane, vec_dot_lane(vec_set(1.0f), words, at, y));
                for (int l = 0; l < LANES; l++) assert_true(is_near(lane[l], expected));
            }
#else
            (void)others;
#endif
        }
}

/* Not inlined, so that the product is neither computed by the compiler nor moved. */
OUTLINE float product_of(float a, float b) {
    float lane[LANES];
    vec_store(lane, vec_mul(vec_set(a), vec_set(b)));
    return lane[LANES - 1];
}

static void test_denormals(void **state) {
    (void)state;
    volatile float tiny = 0x1p-130f, small = 0x1p-100f, of_tiny, of_small;
    const vec_mode mode = vec_enter();
    of_tiny = product_of(tiny, 0x1p20f);
    of_small = product_of(small, 0x1p-40f);
    vec_leave(mode);
    assert_true(ISA == FA_ISA_SCALAR || (of_tiny == 0.0f && of_small == 0.0f));
    assert_true(product_of(tiny, 1.0f) == 0x1p-130f);
}

static int check_all(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arithmetic), cmocka_unit_test(test_order_of_lanes), cmocka_unit_test(test_bits),
        cmocka_unit_test(test_exp2),       cmocka_unit_test(test_narrow_types),   cmocka_unit_test(test_words),
        cmocka_unit_test(test_products),   cmocka_unit_test(test_denormals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include "cpu/vec_target_end.h"
