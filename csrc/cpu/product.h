/* The one product of the whole engine, over 32-bit words:
 *
 *   C[row][lane] = sum_k A[row][k] . B[k][lane]        A: k contiguous, one word at a time broadcast to all lanes
 *                                                      B: vectors of lanes, streamed
 *
 *   product                          A                   B            words k      epilogue
 *   S^T = K Q^T,   dP^T = V dO^T     K, V rows           Q^T, dO^T    d            STORE (maxima folded)
 *   O^T += V^T P^T                   V^T                 P            keys         RESCALE: O alpha + acc
 *   dQ^T += K^T dS^T                 K^T                 dS           keys         ADD
 *   dV += P^T dO,  dK += dS^T Q      P, dS rows          dO, Q rows   queries      ADD
 *
 * UNROLL_ROWS x UNROLL_VECS accumulators, a register block of C called patch, stay in registers over all of k. Each
 * step takes UNROLL_VECS loads and UNROLL_ROWS broadcasts for UNROLL_VECS x UNROLL_ROWS multiply-adds. So the
 * multiply-add pipes bind, and not the load ports.
 *
 * With VEC_BY_LANE a step takes LANES words of each row of A in one load, and a multiply-add reads its word from a
 * lane.
 *
 * The sum starts from zero, and one multiply-add joins the old value of C. The sum thus has two levels, which halves
 * its rounding error, and the rescaling of C costs nothing. Measurements: README.md. */
#ifndef FA_CPU_PRODUCT_H
#define FA_CPU_PRODUCT_H

#ifndef LANES
#include "vec_scalar.h"
#endif
#include "product_args.h"

#ifdef VEC_TILES
#include "product_amx.h" /* the same product on the same buffers */
#else

#define PRODUCT_OVERLAPS 0  /* 1: product_later may run a product beside the vectors that follow */
#define PRODUCT_FETCHES  1  /* 1: products prefetch from product_args.soon */
#define PRODUCT_ROWS     8  /* C has a multiple of so many rows if the padding rows of A are zero */
#define PRODUCT_STRIP_A  16 /* a masked product skips strips of so many rows of A */
#define PRODUCT_CACHED   0  /* rows of C that stay in the first-level cache until the softmax; 0: no limit */
#define PRODUCT_STRIP_K  1  /* a masked product skips strips of so many words of k */

/* A worker calls product_enter before its first product and product_leave after its last product. */
INLINE void product_enter(void) {}
INLINE void product_leave(void) {}

/* A register block of C: rows [row, row + ROWS) and lanes [lane, lane + VECS LANES). */
INLINE void product_patch(product_epilogue EPILOGUE, int ROWS, int VECS, const product_args *p, int64_t row, int lane) {
    vec acc[16][4], alpha[4], high[4];
    const float *a = p->a + row * p->a_stride, *b = p->b + lane;
    float *c = p->c + row * p->c_stride + lane;
    if (p->soon) fetch_some(p->soon);
    const int64_t a_stride = p->a_stride, b_stride = p->b_stride, c_stride = p->c_stride, num_words = p->num_words;

    UNROLL for (int r = 0; r < ROWS; r++) { UNROLL for (int u = 0; u < VECS; u++) acc[r][u] = vec_set(0.0f); }
    int64_t k = 0;
#ifdef VEC_BY_LANE
    for (; k + LANES <= num_words; k += LANES, a += LANES) {
        vec a_words[8];
        UNROLL for (int r = 0; r < ROWS; r++) a_words[r] = vec_load(a + r * a_stride);
        UNROLL for (int i = 0; i < LANES; i++, b += b_stride) {
            vec b_vec[4];
            vec_hold_loads();
            UNROLL for (int u = 0; u < VECS; u++) b_vec[u] = vec_load(b + u * LANES);
            UNROLL for (int r = 0; r < ROWS; r++) {
                UNROLL for (int u = 0; u < VECS; u++) acc[r][u] = vec_dot_lane(acc[r][u], a_words[r], i, b_vec[u]);
            }
        }
    }
#endif
    for (; k < num_words; k++, a++, b += b_stride) {
        vec b_vec[4];
        UNROLL for (int u = 0; u < VECS; u++) {
            b_vec[u] = vec_load(b + u * LANES);
            vec_pin(&b_vec[u]);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            vec a_word = vec_broadcast(a + r * a_stride);
            if (VECS > 1) vec_pin(&a_word);
            UNROLL for (int u = 0; u < VECS; u++) acc[r][u] = vec_dot(acc[r][u], a_word, b_vec[u]);
        }
    }
    UNROLL for (int u = 0; u < VECS; u++) {
        if (EPILOGUE == PRODUCT_RESCALE) alpha[u] = vec_load(p->alpha + lane + u * LANES);
        if (EPILOGUE == PRODUCT_STORE_MAX) high[u] = vec_set(-INFINITY);
    }
    UNROLL for (int r = 0; r < ROWS; r++, c += c_stride) {
        UNROLL for (int u = 0; u < VECS; u++) {
            float *out = c + u * LANES;
            vec sum = acc[r][u];
            if (EPILOGUE == PRODUCT_ADD) sum = vec_add(vec_load(out), sum);
            if (EPILOGUE == PRODUCT_RESCALE) sum = vec_fma(vec_load(out), alpha[u], sum);
            if (EPILOGUE == PRODUCT_STORE_MAX) high[u] = vec_max(sum, high[u]);
            vec_store(out, sum);
        }
    }
    UNROLL for (int u = 0; u < VECS && EPILOGUE == PRODUCT_STORE_MAX; u++) {
        float *lane_max = p->lane_max + lane + u * LANES;
        vec_store(lane_max, vec_max(vec_mul(high[u], vec_set(p->scale)), vec_load(lane_max)));
    }
}

/* A patch of fewer rows has too few independent sums, so it takes as long as one of four or eight rows. Where a rest of
 * rows would take two such patches, one whole patch stores them, and some rows before them again. */
INLINE void product_lanes(product_epilogue EPILOGUE, int ROWS, int VECS, const product_args *p, int lane) {
    const bool STORES = EPILOGUE == PRODUCT_STORE || EPILOGUE == PRODUCT_STORE_MAX;
    int64_t row = 0;
    for (; row + ROWS <= p->rows; row += ROWS) product_patch(EPILOGUE, ROWS, VECS, p, row, lane);
    const int64_t rest = p->rows - row;
    if (rest == 0) return;
    if (STORES && row > 0 && (rest & (rest - 1)) != 0) {
        product_patch(EPILOGUE, ROWS, VECS, p, p->rows - ROWS, lane);
        return;
    }
    for (; ROWS > 8 && row + 8 <= p->rows; row += 8) product_patch(EPILOGUE, 8, VECS, p, row, lane);
    for (; ROWS > 4 && row + 4 <= p->rows; row += 4) product_patch(EPILOGUE, 4, VECS, p, row, lane);
    for (; ROWS > 2 && row + 2 <= p->rows; row += 2) product_patch(EPILOGUE, 2, VECS, p, row, lane);
    for (; row < p->rows; row++) product_patch(EPILOGUE, 1, VECS, p, row, lane);
}

/* With few lanes a register block has more rows, so that enough independent sums hide the latency of a multiply-add.
 * That of vdpbf16ps is longer. With VEC_BY_LANE each row also needs a register for its words of A. */
#ifdef VEC_BY_LANE
#define PRODUCT_VECTOR_ROWS 8
#else
#define PRODUCT_VECTOR_ROWS (WORD_ELEMS > 1 ? 16 : 8)
#endif
INLINE void product(product_epilogue EPILOGUE, const product_args *p) {
    int u = 0;
    for (; u + UNROLL_VECS <= p->num_vecs; u += UNROLL_VECS)
        product_lanes(EPILOGUE, UNROLL_ROWS, UNROLL_VECS, p, u * LANES);
    if (UNROLL_VECS > 3 && p->num_vecs - u == 3) product_lanes(EPILOGUE, UNROLL_ROWS, 3, p, u * LANES);
    if (UNROLL_VECS > 2 && p->num_vecs - u == 2)
        product_lanes(EPILOGUE, UNROLL_VECS > 3 ? 8 : UNROLL_ROWS, 2, p, u * LANES);
    if (UNROLL_VECS > 1 && p->num_vecs - u == 1) product_lanes(EPILOGUE, PRODUCT_VECTOR_ROWS, 1, p, u * LANES);
}

#endif

OUTLINE void product_scores(const product_args *p) { product(PRODUCT_STORE, p); }
OUTLINE void product_scores_max(const product_args *p) { product(PRODUCT_STORE_MAX, p); }
OUTLINE void product_add(const product_args *p) { product(PRODUCT_ADD, p); }
OUTLINE void product_rescale(const product_args *p) { product(PRODUCT_RESCALE, p); }

#ifndef VEC_TILES
/* Vectors compute all products. So product_later computes at once, and the queue stays empty. */
typedef struct {
    int unused;
} product_queue;
INLINE void product_later(product_queue *q, product_epilogue EPILOGUE, const product_args *p) {
    (void)q;
    if (EPILOGUE == PRODUCT_STORE) product_scores(p);
    if (EPILOGUE == PRODUCT_STORE_MAX) product_scores_max(p);
    if (EPILOGUE == PRODUCT_ADD) product_add(p);
    if (EPILOGUE == PRODUCT_RESCALE) product_rescale(p);
}
INLINE void product_spread(product_queue *q, int64_t parts) { (void)q, (void)parts; }
INLINE void product_advance(product_queue *q) { (void)q; }
INLINE void product_finish(product_queue *q) { (void)q; }
#endif

#endif
