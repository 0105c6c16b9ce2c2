#include "bias_shift.h"

#include <math.h>

#include "element.h"

/* Is the largest bias of a row at least `least`, or -inf? With any_prefix: of all first keys of a row, however many
 * they are, because a causal mask may cut a bias of keys alone. A NaN may make it false. */
static bool is_high(const fa_bias_shift *of, int64_t place, bool any_prefix) {
    double largest = -INFINITY;
    for (int64_t j = 0; j < of->size[3] && !(largest >= of->least); j++) {
        const double x = fa_element(of->bias, of->dtype, place + j * of->stride[3]);
        if (isnan(x)) return false;
        if (x > largest) largest = x;
        if (any_prefix && largest < of->least && largest != -INFINITY) return false;
    }
    return largest >= of->least || largest == -INFINITY;
}

bool fa_cpu_biases_are_high(const fa_bias_shift *of) {
    for (int64_t b = 0; b < of->size[0]; b++)
        for (int64_t h = 0; h < of->size[1]; h++)
            for (int64_t row = 0; row < of->size[2]; row++)
                if (!is_high(of, b * of->stride[0] + h * of->stride[1] + row * of->stride[2], of->is_cut)) return false;
    return true;
}

static int64_t clamped(int64_t x, int64_t most) { return x > most ? most : x < 0 ? 0 : x; }

static double shift_of(const fa_bias_shift *of, int64_t place, int64_t keys) {
    double largest = -INFINITY;
    for (int64_t j = 0; j < keys; j++) {
        const double x = fa_element(of->bias, of->dtype, place + j * of->stride[3]);
        if (x >= of->least) return 0; /* a mask may hide a NaN */
        if (x > largest) largest = x;
    }
    return largest == -INFINITY ? 0 : largest;
}

void fa_cpu_bias_shift(const fa_bias_shift *of) {
    const int64_t num = of->of_shift[0] * of->of_shift[1] * of->of_shift[2];
    for (int64_t task = 0; task < num; task++) {
        const int64_t row = task % of->of_shift[2], h = task / of->of_shift[2] % of->of_shift[1];
        const int64_t b = of->sequence ? of->sequence[row] : task / of->of_shift[2] / of->of_shift[1];
        const int64_t at[] = {b, h, of->row ? clamped(of->row[row], of->size[2] - 1) : row};
        const int64_t keys = of->is_cut ? clamped(row + of->last, of->size[3] - 1) + 1 : of->size[3];
        int64_t place = 0;
        for (int i = 0; i < 3; i++) place += of->size[i] == 1 ? 0 : at[i] * of->stride[i];
        double shift = shift_of(of, place, keys);
        if (shift < 0 && of->sinks.data &&
            !(fa_element(of->sinks.data, of->sinks.dtype, h * of->sinks.stride) <= shift - of->least))
            shift = 0;
        if (of->sinks.data && isfinite((float)shift)) shift = (double)(float)shift; /* sinks get it in fp32 */
        fa_set_element(of->shift, of->dtype == FA_F64 ? FA_F64 : FA_F32, task, shift);
    }
}
