/* Programs have two texts for GPUs (source.h). The wide text takes any indices, captures and parameters. The other text
 * computes with integers of 32 bits, which a GPU does several times faster, and serves all calls of usual size. */
#ifndef FA_FLEX_WIDE_H
#define FA_FLEX_WIDE_H

#include "program.h"

#define FA_FLEX_SMALL      ((int64_t)1 << 22) /* differences of smaller integers are exact in fp32 */
#define FA_FLEX_MOST_PARAM ((int64_t)1 << 28) /* an integer parameter of the text that is not wide */

/* Does the program need the wide text for these captures and parameters, or for indices up to most_index? */
static inline bool fa_flex_is_wide(const fa_flex_bound *bound, int64_t most_index) {
    const fa_flex_program *p = bound->program;
    if (most_index >= FA_FLEX_SMALL) return true;
    for (int32_t i = 0; i < p->num_captures; i++) {
        const fa_flex_capture *c = &bound->captures[i];
        double elements = 1, last = 0;
        if (!c->data) return true;
        for (int dim = 0; dim < p->captures[i].rank; dim++) {
            elements *= (double)c->size[dim];
            last += (double)c->size[dim] * (double)(c->stride[dim] < 0 ? -c->stride[dim] : c->stride[dim]);
            if (c->size[dim] > INT32_MAX || c->stride[dim] > INT32_MAX || c->stride[dim] < -INT32_MAX) return true;
        }
        if (elements > INT32_MAX || last > INT32_MAX) return true;
    }
    for (int32_t i = 0; i < p->num_params; i++)
        if (p->params[i] == FA_FLEX_I64 &&
            (bound->params[i].i > FA_FLEX_MOST_PARAM || bound->params[i].i < -FA_FLEX_MOST_PARAM))
            return true;
    return false;
}

#endif
