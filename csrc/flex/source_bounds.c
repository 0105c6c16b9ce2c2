/* The text of a mask's bounds over ranges of queries and keys. */
#include "source_bounds.h"

#include "source_words.h"

/* Names for cuda/flex_bounds.h. */
static void put_names(fa_text *t) {
    fa_put(t, "enum {\n    FA_FLEX_BOOL = %d, FA_FLEX_I64 = %d, FA_FLEX_F32 = %d, FA_FLEX_F64 = %d,\n", FA_FLEX_BOOL,
           FA_FLEX_I64, FA_FLEX_F32, FA_FLEX_F64);
    for (int code = 0; code < FA_FLEX_NUM_CODES; code++)
        if (fa_flex_ops[code].name) fa_put(t, "    FA_FLEX_%s = %d,\n", fa_flex_ops[code].name, code);
#define FA_FLEX_DTYPE(enumerator, name, type, bytes) \
    fa_put(t, "    FA_FLEX_OF_%s = %d,\n", #enumerator, (int)FA_FLEX_OF_##enumerator);
    FA_FLEX_DTYPES(FA_FLEX_DTYPE)
#undef FA_FLEX_DTYPE
    fa_put(t, "};\n");
}

static void put_bounds_of_number(const fa_writer *w, const fa_flex_instruction *x) {
    const bool is_param = fa_is_op(x, FA_FLEX_param);
    fa_put(w->t, x->type == FA_FLEX_F64 ? "bounds_of_real(" : "bounds_of_int(");
    if (is_param)
        fa_put_param(w, x);
    else
        fa_put_constant(w->t, x, false);
    fa_put(w->t, ")");
}

static void put_bounds_of_gather(const fa_writer *w, const fa_flex_instruction *x) {
    const int rank = w->p->captures[x->source].rank;
    fa_put(w->t, "bounds_of_gather<%d, %d>(x.words + %d, {", w->p->captures[x->source].dtype, rank,
           w->words + fa_flex_words_before(w->p, x->source));
    for (int dim = 0; dim < rank; dim++) fa_put(w->t, "%sb%d", dim > 0 ? ", " : "", x->operand[dim]);
    fa_put(w->t, "})");
}

/* Writes a mask's bounds, for kernels that ask for them. */
void fa_put_bounds(const fa_writer *w) {
    fa_put(w->t, "#ifdef FLEX_BOUNDS\n");
    put_names(w->t);
    fa_put(w->t,
           "#include \"flex_bounds.cuh\"\n\n"
           "DEVICE interval flex_mask_bounds(const flex_values &x, int b, int h, int q_idx, int q_last, int kv_idx, "
           "int kv_last) {\n");
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) {
        const fa_flex_instruction *x = &w->p->instructions[idx];
        fa_put(w->t, "    const interval b%d = ", idx);
        switch ((fa_flex_op)x->op) {
        case FA_FLEX_b:
        case FA_FLEX_h: fa_put(w->t, "of_ints(%s, %s)", fa_flex_ops[x->op].name, fa_flex_ops[x->op].name); break;
        case FA_FLEX_q_idx: fa_put(w->t, "of_ints(q_idx, q_last)"); break;
        case FA_FLEX_kv_idx: fa_put(w->t, "of_ints(kv_idx, kv_last)"); break;
        case FA_FLEX_param:
        case FA_FLEX_constant: put_bounds_of_number(w, x); break;
        case FA_FLEX_gather: put_bounds_of_gather(w, x); break;
        default: {
            const int32_t first = x->operand[0];
            fa_put(w->t, "bound_op(%d, %d, %d, b%d, b%d, b%d)", x->op, x->type, w->p->instructions[first].result, first,
                   x->operand[x->num_operands > 1 ? 1 : 0], x->operand[x->num_operands > 2 ? 2 : 0]);
        }
        }
        fa_put(w->t, ";\n");
    }
    fa_put(w->t, "    return b%d;\n}\n#endif\n\n", w->p->num_instructions - 1);
}
