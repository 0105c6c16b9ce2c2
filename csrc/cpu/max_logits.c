#include "max_logits.h"

#include <math.h>

static float at_row(const fa_sink_rows *x, int64_t b, int64_t h, int64_t row) {
    return x->data ? x->data[b * x->stride_b + h * x->stride_h + row * x->stride_row] : 0;
}

void fa_cpu_max_logits(const fa_max_logits *of) {
    for (int64_t h = 0; h < of->h; h++) {
        float largest = -INFINITY;
        for (int64_t b = 0; b < of->b; b++)
            for (int64_t row = 0; row < of->rows; row++) {
                const float score = at_row(&of->scores, b, h, row) + at_row(&of->shift, b, h, row);
                if (!isnan(largest) && !(score <= largest)) largest = score; /* NaN stays */
            }
        of->largest[h] = largest;
    }
}
