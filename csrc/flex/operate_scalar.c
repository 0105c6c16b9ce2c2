/* The loops of an evaluator in portable C. */
#define OPERATIONS fa_flex_operations_scalar
#include "operate.h"
