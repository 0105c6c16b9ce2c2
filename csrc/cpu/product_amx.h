/* The product of product.h on AMX tiles: C[row][lane] = sum_k A[row][k] . B[k][lane], over words of two bf16.
 *
 *   tile of A   [16 rows][16 words]    A needs no reordering: words run along k
 *   tile of B   [16 words][16 lanes]   B needs no reordering: a row of B is word k of all lanes
 *   tile of C   [16 rows][16 lanes]    fp32
 *
 *            B: tile 6  tile 7
 *   A: tile 4   C: 0      1         a step of 16 words: four products of 16 cycles, four loads of 8
 *      tile 5      2      3
 *
 * Tiles multiply sixteen times as fast as the vectors, so every pass of vectors over C counts. Therefore scores are
 * stored without their scale, and the softmax multiplies in an fma. Sums are added to C inside the tiles. C alpha is
 * computed only where alpha is not 1, which the softmax makes rare (elementwise.h).
 *
 * Remaining rows and words are copied and padded with zeros. So the product reads nothing outside A and B, and
 * multiplies no NaN that lies behind their ends. */
#ifndef FA_CPU_PRODUCT_AMX_H
#define FA_CPU_PRODUCT_AMX_H

#ifndef LANES
#define VEC_BF16_WORDS
#define VEC_TILES
#include "vec_avx512.h"
#endif
#include "product_args.h"
#include "vec_target.h"

#define PRODUCT_OVERLAPS 1
#define PRODUCT_FETCHES  0 /* products are too short to hide prefetches */
#define PRODUCT_ROWS     16
#define PRODUCT_STRIP_A  32
#define PRODUCT_CACHED   32
#define PRODUCT_STRIP_K  16

enum { TILE = 16 }; /* rows, words and lanes of a tile */

_Static_assert(LANES == TILE && WORD_ELEMS == 2, "a vector of words is a row of a tile");

/* Tiles belong to the thread. A worker configures the tiles when it enters and releases them when it leaves, so other
 * code never runs with configured tiles. NOTE: the configuration is static, because gcc's intrinsic declares a read of
 * only 8 bytes. */
INLINE void product_enter(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } eight_full_tiles = {
        .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _Static_assert(sizeof eight_full_tiles == 64, "the layout of LDTILECFG");
    _tile_loadconfig(&eight_full_tiles);
}
INLINE void product_leave(void) { _tile_release(); }

/* Forces earlier stores to memory, because gcc's intrinsics do not declare that tile loads read memory. */
INLINE void tiles_read(const float *p) { __asm__ volatile("" ::"r"(p) : "memory"); }

/* The bytes from one row of a tile to the next row. */
INLINE long tile_stride(int64_t floats) { return (long)floats * (long)sizeof(float); }

INLINE void sums_zero(int ROW_TILES, int VECS) {
    _tile_zero(0);
    if (VECS > 1) _tile_zero(1);
    if (ROW_TILES > 1) _tile_zero(2);
    if (ROW_TILES > 1 && VECS > 1) _tile_zero(3);
}

INLINE void sums_load(int ROW_TILES, int VECS, const float *c, int64_t stride) {
    _tile_loadd(0, c, tile_stride(stride));
    if (VECS > 1) _tile_loadd(1, c + TILE, tile_stride(stride));
    if (ROW_TILES > 1) _tile_loadd(2, c + TILE * stride, tile_stride(stride));
    if (ROW_TILES > 1 && VECS > 1) _tile_loadd(3, c + TILE * stride + TILE, tile_stride(stride));
}

INLINE void sums_store(int ROW_TILES, int VECS, float *c, int64_t stride) {
    _tile_stored(0, c, tile_stride(stride));
    if (VECS > 1) _tile_stored(1, c + TILE, tile_stride(stride));
    if (ROW_TILES > 1) _tile_stored(2, c + TILE * stride, tile_stride(stride));
    if (ROW_TILES > 1 && VECS > 1) _tile_stored(3, c + TILE * stride + TILE, tile_stride(stride));
}

/* Loads the operands of one step of 16 words. */
INLINE void operands_load(int ROW_TILES, int VECS, const float *a, int64_t a_stride, const float *b, int64_t b_stride) {
    _tile_loadd(6, b, tile_stride(b_stride));
    _tile_loadd(4, a, tile_stride(a_stride));
    if (VECS > 1) _tile_loadd(7, b + TILE, tile_stride(b_stride));
    if (ROW_TILES > 1) _tile_loadd(5, a + TILE * a_stride, tile_stride(a_stride));
}

INLINE void sums_add(int ROW_TILES, int VECS) {
    _tile_dpbf16ps(0, 4, 6);
    if (VECS > 1) _tile_dpbf16ps(1, 4, 7);
    if (ROW_TILES > 1) _tile_dpbf16ps(2, 5, 6);
    if (ROW_TILES > 1 && VECS > 1) _tile_dpbf16ps(3, 5, 7);
}

/* A copy [rows][width TILE] of src, padded with zeros. `valid` rows exist, and `elems` elements of each vector
 * exist. */
INLINE void copy_padded(float *dst, int rows, int width, const float *src, int64_t stride, int64_t valid,
                        int64_t elems) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++) {
            vec row = r < valid ? vec_load_first(src + r * stride + i * TILE, elems) : vec_set(0.0f);
            vec_store(dst + (r * width + i) * TILE, row);
        }
    tiles_read(dst);
}

/* A step in which words are missing. With a single tile of A, rows may also be missing. */
INLINE void sums_add_padded(int ROW_TILES, int VECS, const float *a, int64_t a_stride, int64_t rows, const float *b,
                            int64_t b_stride, int64_t words) {
    _Alignas(64) float a_copy[2 * TILE * TILE], b_copy[TILE * 2 * TILE];
    copy_padded(a_copy, ROW_TILES * TILE, 1, a, a_stride, rows, words);
    copy_padded(b_copy, TILE, VECS, b, b_stride, words, TILE);
    operands_load(ROW_TILES, VECS, a_copy, TILE, b_copy, VECS * TILE);
    sums_add(ROW_TILES, VECS);
}

/* Computes register blocks of ROW_TILES TILE rows from `row` on, for lanes [lane, lane + VECS TILE). Returns the first
 * remaining row. The operands of the next step are loaded before the sums are stored, so the tile unit need not wait
 * for the stores. */
INLINE int64_t product_patches(product_epilogue EPILOGUE, int ROW_TILES, int VECS, const product_args *p, int64_t row,
                               int lane) {
    const int64_t rows = ROW_TILES * TILE, full = p->num_words / TILE * TILE, words = p->num_words - full;
    const int64_t a_stride = p->a_stride, b_stride = p->b_stride;
    const float *b = p->b + lane, *a = p->a + row * a_stride;
    float *c = p->c + row * p->c_stride + lane;
    if (row + rows <= p->rows && full) operands_load(ROW_TILES, VECS, a, a_stride, b, b_stride);
    for (; row + rows <= p->rows; row += rows, a += rows * a_stride, c += rows * p->c_stride) {
        if (EPILOGUE == PRODUCT_ADD)
            sums_load(ROW_TILES, VECS, c, p->c_stride);
        else
            sums_zero(ROW_TILES, VECS);
        for (int64_t k = TILE; k <= full; k += TILE) {
            sums_add(ROW_TILES, VECS);
            if (k < full) operands_load(ROW_TILES, VECS, a + k, a_stride, b + k * b_stride, b_stride);
        }
        if (words) sums_add_padded(ROW_TILES, VECS, a + full, a_stride, rows, b + full * b_stride, b_stride, words);
        if (row + 2 * rows <= p->rows && full)
            operands_load(ROW_TILES, VECS, a + rows * a_stride, a_stride, b, b_stride);
        sums_store(ROW_TILES, VECS, c, p->c_stride);
    }
    return row;
}

/* Computes the last rows, which are fewer than a tile has. */
INLINE void product_last_rows(product_epilogue EPILOGUE, int VECS, const product_args *p, int64_t row, int lane) {
    _Alignas(64) float sums[TILE * 2 * TILE];
    const int64_t rows = p->rows - row;
    sums_zero(1, VECS);
    for (int64_t k = 0; k < p->num_words; k += TILE)
        sums_add_padded(1, VECS, p->a + row * p->a_stride + k, p->a_stride, rows, p->b + k * p->b_stride + lane,
                        p->b_stride, p->num_words - k < TILE ? p->num_words - k : TILE);
    sums_store(1, VECS, sums, 2 * TILE);
    for (int64_t r = 0; r < rows; r++)
        for (int u = 0; u < VECS; u++) {
            float *c = p->c + (row + r) * p->c_stride + lane + u * TILE;
            vec sum = vec_load(sums + (2 * r + u) * TILE);
            vec_store(c, EPILOGUE == PRODUCT_ADD ? vec_add(vec_load(c), sum) : sum);
        }
}

/* C *= alpha */
INLINE void rescale(const product_args *p) {
    for (int lane = 0; lane < p->num_vecs * TILE; lane += TILE) {
        const vec alpha = vec_load(p->alpha + lane);
        if (!mask_any(vec_lt(alpha, vec_set(1.0f)))) continue;
        for (int64_t row = 0; row < p->rows; row++) {
            float *c = p->c + row * p->c_stride + lane;
            vec_store(c, vec_mul(vec_load(c), alpha));
        }
    }
}

INLINE void product(product_epilogue epilogue, const product_args *p) {
    const product_epilogue EPILOGUE = epilogue == PRODUCT_RESCALE ? PRODUCT_ADD : epilogue;
    if (epilogue == PRODUCT_RESCALE) rescale(p);
    tiles_read(p->a);
    tiles_read(p->b);
    tiles_read(p->c);
    int lane = 0;
    for (; lane + 2 * TILE <= p->num_vecs * TILE; lane += 2 * TILE) {
        int64_t row = product_patches(EPILOGUE, 2, 2, p, 0, lane);
        row = product_patches(EPILOGUE, 1, 2, p, row, lane);
        if (row < p->rows) product_last_rows(EPILOGUE, 2, p, row, lane);
    }
    if (lane < p->num_vecs * TILE) {
        int64_t row = product_patches(EPILOGUE, 2, 1, p, 0, lane);
        row = product_patches(EPILOGUE, 1, 1, p, row, lane);
        if (row < p->rows) product_last_rows(EPILOGUE, 1, p, row, lane);
    }
}

/* ---- products beside vectors ---- */

/* Products that were requested and are not finished, in order of request. The first product stands at word k of a
 * register block of 2 x 2 tiles. The sums of a register block are stored when the next register block begins, so that
 * no store waits for the tile unit. */
enum { QUEUED_PRODUCTS = 8 };
typedef struct {
    product_args jobs[QUEUED_PRODUCTS];
    product_epilogue epilogues[QUEUED_PRODUCTS];
    int first, count;
    int64_t row, k;
    int lane;
    float *sums; /* C of the last register block; NULL: its sums are stored */
    int64_t sums_stride;
    int64_t steps, share; /* remaining steps of all products; steps of each product_advance */
} product_queue;

INLINE void product_store_sums(product_queue *q) {
    if (!q->sums) return;
    sums_store(2, 2, q->sums, q->sums_stride);
    tiles_read(q->sums);
    q->sums = NULL;
}

/* One step takes sixteen words of a register block: four loads, four products. */
INLINE void product_step(product_queue *q) {
    const product_args *p = &q->jobs[q->first];
    const float *a = p->a + q->row * p->a_stride + q->k, *b = p->b + q->k * p->b_stride + q->lane;
    tiles_read(a);
    if (q->k == 0) {
        float *c = p->c + q->row * p->c_stride + q->lane;
        product_store_sums(q);
        if (q->epilogues[q->first] == PRODUCT_STORE)
            sums_zero(2, 2);
        else
            sums_load(2, 2, c, p->c_stride);
        q->sums = c;
        q->sums_stride = p->c_stride;
    }
    operands_load(2, 2, a, p->a_stride, b, p->b_stride);
    sums_add(2, 2);
    q->k += TILE;
    if (q->k < p->num_words) return;
    q->k = 0;
    q->row += 2 * TILE;
    if (q->row < p->rows) return;
    q->row = 0;
    q->lane += 2 * TILE;
    if (q->lane < p->num_vecs * TILE) return;
    q->lane = 0;
    q->first++;
}

OUTLINE void product_take(product_queue *q) {
    int64_t steps = q->share < q->steps ? q->share : q->steps;
    q->steps -= steps;
    for (; steps > 0; steps--) product_step(q);
}

INLINE void product_advance(product_queue *q) {
    if (q && q->steps) product_take(q);
}

/* Announces that the vector work that follows calls product_advance `parts` times. */
INLINE void product_spread(product_queue *q, int64_t parts) { q->share = (q->steps + parts - 1) / parts; }

OUTLINE void product_finish(product_queue *q) {
    for (; q->steps > 0; q->steps--) product_step(q);
    product_store_sums(q);
    q->first = q->count = 0;
}

/* Requests a product that may be computed at any time until product_finish. A, B and C must not change until then. The
 * queue takes products of whole register blocks. Other products are computed now. */
OUTLINE void product_later(product_queue *q, product_epilogue epilogue, const product_args *p) {
    const bool whole = p->rows % (2 * TILE) == 0 && p->num_words % TILE == 0 && p->num_vecs % 2 == 0;
    if (!whole || q->count == QUEUED_PRODUCTS) {
        product_finish(q); /* the product below needs the tiles */
        product(epilogue, p);
        return;
    }
    if (epilogue == PRODUCT_RESCALE) rescale(p), epilogue = PRODUCT_ADD;
    tiles_read(p->a);
    q->epilogues[q->count] = epilogue;
    q->jobs[q->count++] = *p;
    q->steps += p->rows / (2 * TILE) * (p->num_vecs / 2) * (p->num_words / TILE);
}

#endif
