/* The loops of an evaluator in portable C. */
#define VERBS      "cpu/vec_scalar.h"
#define OPERATIONS fa_flex_operations_scalar
#include "operate.h"
