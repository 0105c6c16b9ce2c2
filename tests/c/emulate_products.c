/* Products of wgmma on a CPU (emulate_products.h). Sums are added in fp32, in the order of the contraction. */
#include "emulate_products.h"

#include "cpu/convert.h"

/* gcc chooses between these when the program starts. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_MORE_PROCESSORS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_MORE_PROCESSORS
#endif

enum { CHUNK_BYTES = 16, STEP_BYTES = 32, MOST_K = 64, MOST_COLUMNS = 256, ROWS = 16 };
typedef float vector __attribute__((vector_size(32)));

static int elements_of_chunk(int format) { return format == EMULATED_E4M3 ? 16 : 8; }

/* The elements of a chunk, times `sign`. */
static inline void read_chunk(int format, const char *chunk, float sign, float *to) {
    if (format == EMULATED_E4M3) {
        static float table[256];
        for (int i = 0; i < 256 && table[1] == 0; i++) table[255 - i] = fa_f32_from_e4m3((uint8_t)(255 - i));
        for (int i = 0; i < 16; i++) to[i] = sign * table[(unsigned char)chunk[i]];
        return;
    }
    uint16_t bits[8];
    uint32_t wide[8];
    memcpy(bits, chunk, sizeof bits);
    for (int i = 0; i < 8; i++) {
        wide[i] = (uint32_t)bits[i] << 16;
        if (format == EMULATED_F16) {
            /* Scaling makes subnormal numbers normal. Infinity and NaN keep the largest exponent. */
            const uint32_t small = (uint32_t)(bits[i] & 0x7fff) << 13;
            const uint32_t number = fa_bits_of(fa_f32_of_bits(small) * 0x1p112f);
            wide[i] = (wide[i] & 0x80000000) | number | (small >= 0x0f800000 ? 0x7f800000 : 0);
        }
    }
    for (int i = 0; i < 8; i++) to[i] = sign * fa_f32_of_bits(wide[i]);
}

static const char *swizzled_place(const char *memory, unsigned at, unsigned row_bytes) {
    return memory + (at ^ (at >> 7 & (row_bytes / 16 - 1)) << 4);
}

static unsigned offset_of_row(const emulated_matrix *x, unsigned row) {
    return row / 8 * x->group_bytes + row % 8 * x->row_bytes;
}

static inline void read_a(const emulated_product *x, const emulated_lane *lanes, const char *memory, unsigned first_row,
                          int i, float *a) {
    const int num = elements_of_chunk(x->format), stride = 2 * num * x->num_products;
    const unsigned start = ((x->a.descriptor + (unsigned)i * x->a.step) & 0xffff) << 4;
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) {
            unsigned words[4]; /* lie in the four lanes of a quad */
            for (int lane = 0; lane < 4 && !x->a_is_shared; lane++)
                words[lane] = lanes[row % 8 * 4 + lane].a[4 * i + row / 8 + 2 * half];
            const unsigned at = start + offset_of_row(&x->a, first_row + (unsigned)row) + (unsigned)half * CHUNK_BYTES;
            const char *chunk = x->a_is_shared ? swizzled_place(memory, at, x->a.row_bytes) : (const char *)words;
            read_chunk(x->format, chunk, (float)x->sign, a + row * stride + (2 * i + half) * num);
        }
}

/* Rows of b are rows of the contraction. */
static inline void read_b(const emulated_product *x, const char *memory, int i, float *b) {
    const unsigned descriptor = x->b.descriptor + (unsigned)i * x->b.step, row_bytes = x->b.row_bytes;
    const unsigned start = (descriptor & 0xffff) << 4, leading_bytes = descriptor >> 16 << 4;
    const int num = elements_of_chunk(x->format), columns = x->num_columns;
    b += i * 2 * num * columns;
    if (x->b_is_across) { /* of 16 bits */
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < columns; j += 8) {
                const unsigned of_row = (unsigned)j * 2, at = start + of_row / row_bytes * leading_bytes +
                                                              offset_of_row(&x->b, (unsigned)k) + of_row % row_bytes;
                read_chunk(x->format, swizzled_place(memory, at, row_bytes), 1, b + k * columns + j);
            }
        return;
    }
    for (int j = 0; j < columns; j++)
        for (int half = 0; half < 2; half++) {
            float column[CHUNK_BYTES];
            const unsigned at = start + offset_of_row(&x->b, (unsigned)j) + (unsigned)half * CHUNK_BYTES;
            read_chunk(x->format, swizzled_place(memory, at, row_bytes), 1, column);
            for (int k = 0; k < num; k++) b[(half * num + k) * columns + j] = column[k];
        }
}

FOR_MORE_PROCESSORS
void emulated_multiply(const emulated_product *x, const emulated_lane lanes[32], const char *memory,
                       unsigned first_row) {
    static float a[ROWS * MOST_K];
    static _Alignas(64) float b[MOST_K * MOST_COLUMNS];
    const int num_k = 2 * elements_of_chunk(x->format) * x->num_products, columns = x->num_columns;
    for (int i = 0; i < x->num_products; i++) read_a(x, lanes, memory, first_row, i, a), read_b(x, memory, i, b);
    for (int j = 0; j < columns; j += 8)
        for (int half = 0; half < 2; half++) { /* eight rows of eight columns */
            vector sums[8] = {0};
            for (int lane = 0; lane < 32 && x->adds; lane++)
                memcpy((float *)&sums[lane / 4] + lane % 4 * 2, lanes[lane].d + j / 2 + 2 * half, 2 * sizeof(float));
            for (int k = 0; k < num_k; k++) {
                vector y;
                memcpy(&y, b + k * columns + j, sizeof y);
                for (int row = 0; row < 8; row++) sums[row] += a[(8 * half + row) * num_k + k] * y;
            }
            for (int lane = 0; lane < 32; lane++)
                memcpy(lanes[lane].d + j / 2 + 2 * half, (float *)&sums[lane / 4] + lane % 4 * 2, 2 * sizeof(float));
        }
}
