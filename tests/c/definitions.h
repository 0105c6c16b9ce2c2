/* Tests of the definitions that all kernels are compared with. The reference is compared with finite differences of
 * itself. Dropout, conversion and cache append are compared with plain loops. */
#ifndef FA_TEST_DEFINITIONS_H
#define FA_TEST_DEFINITIONS_H

#include "run.h"
#include "cpu/vec_scalar.h"
#include "cpu/elementwise.h"

/* ---- masks --------------------------------------------------------------------------------------------------- */

static int64_t floor_of(int64_t x, int64_t c) { return (int64_t)floor((double)x / (double)c); }

/* The keys that fa_visible_keys names are those of the definition in flash_attn.h, pair by pair. */
static void test_visible_keys(void **state) {
    (void)state;
    random_source r = {41};
    for (int n = 0; n < 3000; n++) {
        const fa_problem p = {.window_left = random_below(&r, 20) - 8 < 0 ? -1 : random_below(&r, 12),
                              .window_right = random_below(&r, 20) - 8 < 0 ? -1 : random_below(&r, 12),
                              .attention_chunk = random_chance(&r, 10)   ? INT64_MAX
                                                 : random_chance(&r, 25) ? 0
                                                                         : 1 + random_below(&r, 20)};
        const fa_sequence s = {.len_q = 1 + random_below(&r, 40), .len_kv = random_below(&r, 40)};
        for (int64_t i = 0; i < s.len_q; i++) {
            const int64_t at = i + s.len_kv - s.len_q, c = p.attention_chunk;
            int64_t first, end;
            fa_visible_keys(&p, &s, i, &first, &end);
            for (int64_t j = -5; j < s.len_kv + 5; j++) {
                bool visible = 0 <= j && j < s.len_kv;
                if (p.window_left >= 0) visible = visible && at - p.window_left <= j;
                if (p.window_right >= 0) visible = visible && j <= at + p.window_right;
                if (c > 0) visible = visible && floor_of(j, c) == floor_of(at, c);
                assert_true(visible == (first <= j && j < end));
            }
        }
    }
}

/* ---- the reference itself ------------------------------------------------------------------------------------ */

static double weighted_output(const fa_problem *p, const tensor *o, const tensor *dout) {
    double sum = 0;
    run_forward_reference(p);
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t i = 0; i < s.len_q; i++)
            for (int64_t head = 0; head < p->h; head++)
                for (int64_t t = 0; t < p->d_v; t++) {
                    double weight = ((double *)dout->view.data)[fa_query_offset(&dout->view, &s, i, head) + t];
                    if (!isnan(weight)) /* a row that sees no key */
                        sum += weight * ((double *)o->view.data)[fa_query_offset(&o->view, &s, i, head) + t];
                }
    }
    return sum;
}

/* The derivative of sum(dout o) along a random direction in q, k and v. It is computed by the backward pass and by two
 * forwards. */
static void test_reference_gradients(void **state) {
    (void)state;
    for (uint64_t seed = 3000; seed < 3060; seed++) {
        random_source r = {seed};
        test_case c = case_make(seed, FA_BWD, FA_F64);
        fa_problem *p = &c.p;
        if (p->len_q > 140 || p->len_kv > 140 || p->d > 64 || p->d_v > 128) {
            guarded_free_all();
            continue;
        }
        double step = 1e-6, slope = 0;
        weighted_output(p, &c.o, &c.dout);
        run_reference(p);
        tensor *inputs[] = {&c.q, &c.k, &c.v}, *gradients[] = {&c.dq, &c.dk, &c.dv};
        double *directions[3];
        for (int n = 0; n < 3; n++) {
            directions[n] = calloc((size_t)inputs[n]->num_elements + 1, sizeof(double));
            for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
                fa_sequence s = fa_sequence_at(p, b_idx);
                for (int64_t row = 0; row < (n ? s.len_kv : s.len_q); row++)
                    for (int64_t head = 0; head < (n ? p->h_kv : p->h); head++)
                        for (int64_t t = 0; t < inputs[n]->columns; t++) {
                            const fa_view *x = &inputs[n]->view, *g = &gradients[n]->view;
                            int64_t at =
                                t + (n ? fa_key_offset(p, x, &s, row, head) : fa_query_offset(x, &s, row, head));
                            int64_t from =
                                t + (n ? fa_key_offset(p, g, &s, row, head) : fa_query_offset(g, &s, row, head));
                            directions[n][at] = random_normal(&r);
                            slope += directions[n][at] * ((double *)g->data)[from];
                        }
            }
        }
        double ends[2];
        for (int side = 0; side < 2; side++) {
            for (int n = 0; n < 3; n++)
                for (int64_t i = 0; i < inputs[n]->num_elements; i++)
                    ((double *)inputs[n]->view.data)[i] += (side ? -2 : 1) * step * directions[n][i];
            ends[side] = weighted_output(p, &c.o, &c.dout);
        }
        double numeric = (ends[0] - ends[1]) / (2 * step);
        if (!(fabs(numeric - slope) <= 2e-5 * (1 + fabs(slope)) * c.amplitude)) {
            case_print(&c);
            fail_msg("backward says %.12g, two forwards say %.12g", slope, numeric);
        }
        for (int n = 0; n < 3; n++) free(directions[n]);
        guarded_free_all();
    }
}

/* Signs follow the generator, and magnitudes are exp(s - row max). Values outside the mask are zero. */
static void test_reference_s_dmask(void **state) {
    (void)state;
    enum { LEN_Q = 19, LEN_KV = 37, ROWS = 128, COLS = 128, D = 8 };
    float q[LEN_Q * D], k[LEN_KV * D];
    static float s_dmask[ROWS * COLS];
    random_source r = {5};
    for (int i = 0; i < LEN_Q * D; i++) q[i] = (float)random_normal(&r);
    for (int i = 0; i < LEN_KV * D; i++) k[i] = (float)random_normal(&r);
    fa_problem p = {
        .dtype = FA_F32, .b = 1, .h = 1, .h_kv = 1, .d = D, .d_v = D, .len_q = LEN_Q, .len_kv = LEN_KV, .scale = 0.3};
    p.q = (fa_view){q, 0, D, D}, p.k = (fa_view){k, 0, D, D};
    p.window_left = -1, p.window_right = 0;
    p.dropout_p = 0.3, p.keep_max = 178, p.seed = 99, p.offset = 7;
    p.s_dmask = s_dmask, p.s_dmask_rows = ROWS, p.s_dmask_cols = COLS;
    memset(s_dmask, 0xff, sizeof s_dmask);
    fa_reference_s_dmask(&p, &test_pool);
    int num_dropped = 0;
    for (int i = 0; i < ROWS; i++) {
        float largest = 0;
        for (int j = 0; j < COLS; j++) {
            float x = s_dmask[i * COLS + j];
            bool visible = i < LEN_Q && j < LEN_KV && j <= i + LEN_KV - LEN_Q;
            bool dropped = visible && fa_dropout_byte(99, 7, i, j) > 178;
            assert_true(visible ? fabsf(x) > 0 && fabsf(x) <= 1 : x == 0);
            assert_int_equal(!!signbit(x), dropped);
            largest = fmaxf(largest, fabsf(x));
            num_dropped += dropped;
        }
        assert_true(largest == (i < LEN_Q ? 1.0f : 0.0f));
    }
    assert_in_range(num_dropped, 100, 250);
}

/* ---- dropout and conversion ---------------------------------------------------------------------------------- */

static void test_philox_known_answers(void **state) {
    (void)state;
    static const struct {
        uint64_t seed, low;
        uint32_t row_patch, col_patch, out[4];
    } known[] = {
        {0, 0, 0, 0, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
        {UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
        {0x299f31d0a4093822,
         0x85a308d3243f6a88,
         0x13198a2e,
         0x03707344,
         {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t out[4];
        fa_philox(known[i].seed, known[i].low, known[i].row_patch, known[i].col_patch, out);
        assert_memory_equal(out, known[i].out, sizeof out);
    }
}

static void test_dropout_patch(void **state) {
    (void)state;
    random_source r = {11};
    for (int n = 0; n < 200; n++) {
        uint64_t seed = random_bits(&r),
                 stream = n % 2 ? random_bits(&r) : 0xffffffffu - (uint64_t)random_below(&r, 40);
        int64_t row_patch = random_below(&r, 1000), col_patch = random_below(&r, 1000);
        uint8_t bytes[FA_PATCH_COLS][FA_PATCH_ROWS];
        dropout_patch(seed, stream, row_patch, col_patch, bytes);
        for (int col = 0; col < FA_PATCH_COLS; col++)
            for (int row = 0; row < FA_PATCH_ROWS; row++)
                assert_int_equal(bytes[col][row], fa_dropout_byte(seed, stream, row_patch * FA_PATCH_ROWS + row,
                                                                  col_patch * FA_PATCH_COLS + col));
    }
}

static void test_conversion(void **state) {
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) { /* widening is exact, and narrowing restores the value */
        uint16_t x = (uint16_t)bits;
        bool is_nan_f16 = (x & 0x7fff) > 0x7c00, is_nan_bf16 = (x & 0x7fff) > 0x7f80;
        assert_int_equal(fa_f16_from_f32(fa_f32_from_f16(x)), is_nan_f16 ? x | 0x200 : x);
        assert_int_equal(fa_bf16_from_f32(fa_f32_from_bf16(x)), is_nan_bf16 ? x | 0x40 : x);
        if (is_nan_f16 || (x & 0x7fff) == 0x7c00) continue;
        int exponent = x >> 10 & 31; /* the value by definition */
        double value = ldexp((exponent ? 1024 : 0) + (x & 1023), (exponent ? exponent : 1) - 25);
        assert_true(fa_f32_from_f16(x) == (float)(x & 0x8000 ? -value : value));
    }
    for (uint32_t x = 0; x < 0x7bff; x++) { /* between neighbours: rounds to nearest, ties to even */
        double low = fa_f32_from_f16((uint16_t)x), high = fa_f32_from_f16((uint16_t)(x + 1)), middle = (low + high) / 2;
        assert_int_equal(fa_f16_from_f32((float)middle), x & 1 ? x + 1 : x);
        assert_int_equal(fa_f16_from_f32(nextafterf((float)middle, 0)), x);
        assert_int_equal(fa_f16_from_f32(nextafterf((float)middle, INFINITY)), x + 1);
    }
    for (uint32_t x = 0; x < 0x7f7f; x++) {
        float middle = fa_f32_of_bits(x << 16 | 0x8000);
        assert_int_equal(fa_bf16_from_f32(middle), x & 1 ? x + 1 : x);
        assert_int_equal(fa_bf16_from_f32(fa_f32_of_bits(x << 16 | 0x7fff)), x);
        assert_int_equal(fa_bf16_from_f32(fa_f32_of_bits(x << 16 | 0x8001)), x + 1);
    }
    for (int x = 0; x < 0x7f; x++) { /* e4m3 by its definition, and what rounds to it */
        const double unit = ldexp(1, (x >> 3 ? x >> 3 : 1) - 10), low = ((x >> 3 ? 8 : 0) + (x & 7)) * unit;
        const float middle = (float)(low + unit / 2);
        assert_true(fa_f32_from_e4m3((uint8_t)x) == (float)low && fa_f32_from_e4m3((uint8_t)(x | 0x80)) == -(float)low);
        assert_int_equal(fa_e4m3_from_f32((float)low), x);
        assert_int_equal(fa_e4m3_from_f32(-(float)low), x | 0x80);
        if (x == 0x7e) continue;
        assert_int_equal(fa_e4m3_from_f32(middle), x & 1 ? x + 1 : x);
        assert_int_equal(fa_e4m3_from_f32(nextafterf(middle, 0)), x);
        assert_int_equal(fa_e4m3_from_f32(nextafterf(middle, INFINITY)), x + 1);
    }
    assert_int_equal(fa_e4m3_from_f32(INFINITY), 0x7e);
    assert_int_equal(fa_e4m3_from_f32(-1e9f), 0xfe);
    assert_true(isnan(fa_f32_from_e4m3(0x7f)) && isnan(fa_f32_from_e4m3(fa_e4m3_from_f32(NAN))));
    assert_int_equal(fa_f16_from_f32(65519.996f), 0x7bff);
    assert_int_equal(fa_f16_from_f32(65520), 0x7c00);
    assert_int_equal(fa_f16_from_f32(-INFINITY), 0xfc00);
    assert_int_equal(fa_bf16_from_f32(3.4e38f), 0x7f80);
    assert_true(isnan(fa_f32_from_bf16(fa_bf16_from_f32(fa_f32_of_bits(0x7f800001)))));
}

/* ---- append -------------------------------------------------------------------------------------------------- */

enum { CACHE_LEN = 40, LEN_NEW = 5, APPEND_B = 2, APPEND_H = 4, APPEND_H_KV = 2, APPEND_D = 24, ROTARY_DIM = 16 };

static double turned(const fa_problem *p, const tensor *x, int64_t offset, int64_t t, int64_t position) {
    const fa_dtype table = p->rotary_dtype;
    int64_t pairs = p->rotary_dim / 2;
    double self = fa_load_element(x->view.data, offset + t, p->dtype);
    if (t >= p->rotary_dim || position >= p->rotary_rows) return self;
    int64_t pair = p->rotary_interleaved ? t / 2 : t % pairs;
    bool is_second = p->rotary_interleaved ? t % 2 : t >= pairs;
    int64_t step = p->rotary_interleaved ? 1 : pairs;
    double other = fa_load_element(x->view.data, offset + t + (is_second ? -step : step), p->dtype);
    double cos = fa_load_element(p->rotary_cos, position * pairs + pair, table);
    double sin = fa_load_element(p->rotary_sin, position * pairs + pair, table);
    return is_second ? other * sin + self * cos : self * cos - other * sin;
}

/* With `is_packed` new keys and queries are packed, rotary positions have their own tensor, and v is narrower. */
static void check_append(fa_dtype dtype, bool paged, bool rotary, bool interleaved, bool q_by_row, bool is_packed) {
    random_source r = {17};
    const int64_t d_v = is_packed ? APPEND_D - 10 : APPEND_D;
    fa_problem p = {.dtype = dtype, .b = APPEND_B, .h = APPEND_H, .h_kv = APPEND_H_KV, .d = APPEND_D, .d_v = d_v};
    const fa_dtype table_dtype = dtype == FA_E4M3 && interleaved ? FA_E4M3 : fa_output_dtype(dtype);
    const int32_t num_new[] = {is_packed ? 3 : LEN_NEW, LEN_NEW}, num_rows[] = {3, is_packed ? 1 : 3};
    const int32_t cu_new[] = {0, num_new[0], num_new[0] + num_new[1]}, cu_q[] = {0, 3, 3 + num_rows[1]};
    const int32_t positions[] = {11, 2};
    p.len_q = is_packed && IS_CUDA ? 2 : 3; /* on a GPU max_seqlen_q is not checked against the lengths */
    p.len_kv = CACHE_LEN, p.len_new = LEN_NEW;
    int32_t used[] = {29, 0}, leftpad[] = {4, 0}, rows[] = {2, 0}, table[3 * 8];
    p.seqused_k = used, p.leftpad_k = leftpad, p.cache_batch_idx = rows, p.cache_rows = 3;
    if (is_packed)
        p.cu_seqlens_q = cu_q, p.cu_seqlens_k_new = cu_new, p.seqlens_rotary = positions, p.total_q = cu_q[2],
        p.total_new = cu_new[2];
    const int64_t b = is_packed ? 1 : p.b, rows_q = is_packed ? p.total_q : p.len_q;
    const int64_t rows_new = is_packed ? cu_new[2] : LEN_NEW;
    tensor q = tensor_make(&p, b, rows_q, p.h, PADDED_ROWS, true), q_rotated = tensor_make(&p, b, rows_q, p.h, 0, true);
    tensor k_new = tensor_make(&p, b, rows_new, p.h_kv, HEADS_THEN_ROWS, true);
    tensor v_new = tensor_of(dtype, d_v, b, rows_new, p.h_kv, PADDED_ROWS, true);
    if (is_packed) q.view.stride_b = k_new.view.stride_b = v_new.view.stride_b = 0;
    if (paged) {
        p.page_size = 7, p.block_table_stride = 8, p.block_table_cols = 8, p.num_pages = 24;
        random_shuffle(&r, table, 24);
        p.paged = true, p.block_table = table;
    }
    tensor k = tensor_make(&p, paged ? 24 : 3, paged ? 7 : CACHE_LEN, p.h_kv, ROWS_THEN_HEADS, true);
    tensor v = tensor_of(dtype, d_v, paged ? 24 : 3, paged ? 7 : CACHE_LEN, p.h_kv, HEADS_THEN_ROWS, true);
    p.q = q.view, p.k = k.view, p.v = v.view, p.k_new = k_new.view, p.v_new = v_new.view;
    tensor *inputs[] = {&q, &k_new, &v_new};
    for (int n = 0; n < 3; n++)
        for (int64_t i = 0; i < inputs[n]->num_elements; i++)
            fa_store_element(inputs[n]->view.data, i, random_normal(&r), dtype);
    if (rotary) {
        p.rotary_dim = ROTARY_DIM, p.rotary_rows = 32, p.rotary_interleaved = interleaved, p.rotary_q_by_row = q_by_row;
        p.rotary_dtype = table_dtype;
        const size_t element = fa_dtype_bytes(table_dtype);
        void *cos_sin = guarded_alloc(2 * 32 * 8 * element, element, true);
        for (int i = 0; i < 2 * 32 * 8; i++) fa_store_element(cos_sin, i, random_normal(&r), table_dtype);
        p.rotary_cos = cos_sin, p.rotary_sin = (char *)cos_sin + 32 * 8 * element;
    }
    pool_threads = 3;
    fa_cpu_append(&p, rotary ? q_rotated.view.data : NULL, &test_pool);

    double eps = 4 * tolerance_of_dtype(dtype);
    int64_t num_written = 0;
    for (int64_t b = 0; b < APPEND_B; b++) {
        const int64_t first_angle = is_packed ? positions[b] : used[b];
        const int64_t first_new = is_packed ? cu_new[b] : 0, first_q = is_packed ? cu_q[b] : 0;
        for (int64_t t = 0; t < num_new[b]; t++)
            for (int64_t head = 0; head < APPEND_H_KV; head++)
                for (int64_t i = 0; i < APPEND_D; i++) {
                    int64_t position = used[b] + t, page = position, row = rows[b];
                    if (paged) row = table[rows[b] * 8 + position / 7], page = position % 7;
                    int64_t k_at = row * k.view.stride_b + page * k.view.stride_row + head * k.view.stride_h + i;
                    int64_t v_at = row * v.view.stride_b + page * v.view.stride_row + head * v.view.stride_h + i;
                    int64_t row_new = first_new + t;
                    int64_t k_from = b * p.k_new.stride_b + row_new * p.k_new.stride_row + head * p.k_new.stride_h;
                    int64_t v_from = b * p.v_new.stride_b + row_new * p.v_new.stride_row + head * p.v_new.stride_h + i;
                    if (i < d_v)
                        assert_true(fa_load_element(v.view.data, v_at, dtype) ==
                                    fa_load_element(v_new.view.data, v_from, dtype));
                    double is = fa_load_element(k.view.data, k_at, dtype),
                           should = turned(&p, &k_new, k_from, i, first_angle + t);
                    assert_true(rotary ? fabs(is - should) <= eps * (1 + fabs(should)) : is == should);
                    num_written++;
                }
        for (int64_t t = 0; t < num_rows[b] && rotary; t++)
            for (int64_t head = 0; head < APPEND_H; head++)
                for (int64_t i = 0; i < APPEND_D; i++) {
                    int64_t from = b * p.q.stride_b + (first_q + t) * p.q.stride_row + head * p.q.stride_h;
                    int64_t at = (((is_packed ? first_q : b * p.len_q) + t) * APPEND_H + head) * APPEND_D + i;
                    double should = turned(&p, &q, from, i, first_angle + (q_by_row ? t : 0));
                    assert_true(fabs(fa_load_element(q_rotated.view.data, at, dtype) - should) <=
                                eps * (1 + fabs(should)));
                }
    }
    int64_t num_touched = 0;
    for (int64_t i = 0; i < k.num_elements; i++) num_touched += !isnan(fa_load_element(k.view.data, i, dtype));
    assert_int_equal(num_touched, num_written);
    guarded_free_all();
}

static void test_append(void **state) {
    (void)state;
    for (int dtype = FA_F16; dtype <= FA_E4M3; dtype++)
        for (int bits = 0; bits < 32 && !(IS_CUDA && dtype == FA_F64); bits++)
            check_append((fa_dtype)dtype, bits & 1, bits & 2, bits & 4, bits & 8, bits & 16);
}

#endif
