/* Products of wgmma on a CPU, a warp at a time. hopper_emulation.h says when they run. */
#ifndef EMULATE_PRODUCTS_H
#define EMULATE_PRODUCTS_H

enum { EMULATED_BF16, EMULATED_F16, EMULATED_E4M3 };

/* A matrix in shared memory. Rows of 128, 64 or 32 bytes are swizzled by 16 bytes. */
typedef struct {
    unsigned descriptor, row_bytes;
    unsigned group_bytes; /* from 8 rows to the next 8 */
    unsigned step;        /* from one product's descriptor to the next one's */
} emulated_matrix;

/* D = A B, or D += A B. Several products run one after the other. Each contracts 32 bytes of a row of A. */
typedef struct {
    int format, num_columns, num_products;
    int adds, sign; /* adds: the first product, too */
    int a_is_shared, b_is_across;
    emulated_matrix a, b;
} emulated_product;

/* What a lane brings: its elements of D, which are `num_columns / 2`, and registers of A. */
typedef struct {
    float *d;
    unsigned a[16];
} emulated_lane;

/* Of one warp, whose rows of A begin at first_row in shared memory. */
void emulated_multiply(const emulated_product *x, const emulated_lane lanes[32], const char *memory,
                       unsigned first_row);

#endif
