/* Looks for a byte that two strided tensors share, and for two elements of a tensor in one place.
 *
 * Byte c of element i of x lies at x.data + sum_n i_n s_n + c, and y likewise. Both tensors reach one address if
 *
 *   sum_n i_n s_n - sum_n j_n t_n = y.data - x.data            0 <= i_n < size of x, 0 <= j_n < size of y
 *
 * Each stride becomes one term: a multiple m of the stride within [least, most]. Dimensions of x and y with equal
 * strides share a term, because i - j takes every integer of an interval. So views of one tensor have few terms. The
 * terms are solved from the largest stride to the smallest. A multiple is tried only if the terms behind it can reach
 * the rest. In a nested layout a row is longer than all that lies inside it, and at most two multiples are tried.
 *
 * Elements i and k of one tensor share their place if sum_n (i_n - k_n) s_n = 0. The difference is not 0 in some term.
 * In the first such term it is positive, for i or for k, and the terms behind that term reach the rest. In a nested
 * layout they reach too little. */
#include "overlap.h"

#include "check.h"

#define MAX_TERMS 16
#define MAX_TRIES 10000 /* more tries mean that the strides do not fit together */

typedef struct {
    int64_t stride, least, most; /* in bytes; the multiples of the stride */
    int64_t low, high;           /* the sums that this term and those behind it can reach */
} term;

typedef struct {
    term terms[MAX_TERMS];
    int num, tries;
} equation;

/* Adds multiples [least, most] of a stride. The terms stay sorted, with the largest stride first. */
static void add_term(equation *e, int64_t stride, int64_t least, int64_t most) {
    int at = 0;
    if (least == most || stride == 0) return;
    while (at < e->num && e->terms[at].stride > stride) at++;
    if (at == e->num || e->terms[at].stride != stride) {
        for (int i = e->num++; i > at; i--) e->terms[i] = e->terms[i - 1];
        e->terms[at] = (term){.stride = stride};
    }
    e->terms[at].least += least;
    e->terms[at].most += most;
}

static void add_tensor(equation *e, const fa_tensor *t, int64_t sign) {
    const int64_t bytes = bytes_of_dtype(t->dtype);
    for (int64_t i = 0; i <= t->ndim; i++) { /* behind the last dimension come the bytes of an element */
        const int64_t last = (i < t->ndim ? t->size[i] : bytes) - 1, stride = i < t->ndim ? t->stride[i] * bytes : 1;
        add_term(e, stride, sign < 0 ? -last : 0, sign < 0 ? 0 : last);
    }
}

static int64_t divide_down(int64_t x, int64_t y) { return x / y - (x % y < 0); }

/* Can the terms from `at` on reach `rest`? */
static bool reaches(equation *e, int at, int64_t rest) {
    if (at == e->num) return rest == 0;
    const term *t = &e->terms[at];
    if (rest < t->low || rest > t->high) return false;
    if (t->stride == 1) return true; /* the last term takes every integer of its interval */
    const int64_t low = at + 1 < e->num ? t[1].low : 0, high = at + 1 < e->num ? t[1].high : 0;
    const int64_t first = -divide_down(high - rest, t->stride), last = divide_down(rest - low, t->stride);
    for (int64_t m = first > t->least ? first : t->least; m <= last && m <= t->most; m++)
        if (++e->tries > MAX_TRIES || reaches(e, at + 1, rest - m * t->stride)) return true;
    return false;
}

/* Finds the sums that the terms can reach. */
static void find_reach(equation *e) {
    int64_t low = 0, high = 0;
    for (int i = e->num - 1; i >= 0; i--) {
        e->terms[i].low = low += e->terms[i].stride * e->terms[i].least;
        e->terms[i].high = high += e->terms[i].stride * e->terms[i].most;
    }
}

static bool overlaps_itself(const fa_tensor *t) {
    equation e = {.num = 0};
    int num = 0;
    if (is_empty(t)) return false;
    for (int64_t i = 0; i < t->ndim; i++) {
        const int64_t last = t->size[i] - 1;
        if (last > 0 && t->stride[i] == 0) return true;
        add_term(&e, t->stride[i], -last, last);
        num += last > 0;
    }
    if (e.num < num) return true; /* two dimensions have one stride */
    find_reach(&e);
    for (int i = 0; i + 1 < e.num; i++)
        for (int64_t m = 1; m <= e.terms[i].most && m * e.terms[i].stride <= e.terms[i + 1].high; m++)
            if (++e.tries > MAX_TRIES || reaches(&e, i + 1, m * e.terms[i].stride)) return true;
    return false;
}

fa_status check_distinct_elements(const fa_tensor *t, fa_error *err) {
    words size, stride;
    REQUIRE(!overlaps_itself(t), "%s is written and must not overlap itself; it has shape %s and strides %s", t->name,
            shape_words(t, &size), stride_words(t, &stride));
    return FA_OK;
}

static uintptr_t end_of(const fa_tensor *t) {
    int64_t elements = 1;
    for (int64_t i = 0; i < t->ndim; i++) elements += (t->size[i] - 1) * t->stride[i];
    return (uintptr_t)t->data + (uintptr_t)(elements * bytes_of_dtype(t->dtype));
}

bool share_memory(const fa_tensor *x, const fa_tensor *y) {
    equation e = {.num = 0};
    if (!present(x) || !present(y) || is_empty(x) || is_empty(y)) return false;
    if ((uintptr_t)x->data >= end_of(y) || (uintptr_t)y->data >= end_of(x)) return false; /* nearly every pair */
    add_tensor(&e, x, 1);
    add_tensor(&e, y, -1);
    find_reach(&e);
    return reaches(&e, 0, (int64_t)((uintptr_t)y->data - (uintptr_t)x->data));
}

int64_t pages_apart(const fa_tensor *x, const fa_tensor *y) {
    if (x->dtype != y->dtype || x->ndim != y->ndim || is_empty(x) || is_empty(y) || x->stride[0] <= 0) return 0;
    int64_t elements = 1; /* of a page, with what lies between its rows */
    for (int64_t i = 1; i < x->ndim; i++) {
        if (x->size[i] != y->size[i] || (x->size[i] > 1 && x->stride[i] != y->stride[i])) return 0;
        elements += (x->size[i] - 1) * x->stride[i];
    }
    const int64_t bytes = x->stride[0] * bytes_of_dtype(x->dtype), apart = (char *)y->data - (char *)x->data;
    if (x->stride[0] != y->stride[0] || elements > x->stride[0] || apart % bytes != 0) return 0;
    const int64_t pages = apart / bytes;
    return pages < x->size[0] && -pages < y->size[0] ? pages : 0;
}
