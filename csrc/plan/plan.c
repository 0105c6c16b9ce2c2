/* problem -> plan. */
#include "plan.h"

#include "cpu.h"
#include "gpu.h"

fa_status fa_plan_make(const fa_problem *problem, const fa_machine *machine, fa_plan *plan, fa_error *err) {
    if (problem->device == FA_CUDA) return fa_plan_cuda(problem, machine, plan, err);
    fa_plan_cpu(problem, machine, plan);
    return FA_OK;
}
