/* Executes every call in four steps: check, plan, allocate, run. */
#include "execute.h"

#include <string.h>

#include "args.h"
#include "autograd.h"
#include "check.h"
#include "cpu/run.h"
#include "flex/flex.h"
#include "gpu/kept_walks.h"
#include "gpu/memory.h"
#include "gpu/run.h"
#include "machine.h"
#include "plan/kernel_table.h"
#include "plan/plan.h"
#include "plans.h"
#include "workspace.h"

static bool torch_parallel_for(int64_t n, fa_range_fn *fn, void *ctx) {
    return fa_torch.torch_parallel_for(0, n, 1, fn, ctx) == 0;
}

static const fa_pool torch_pool = {torch_parallel_for};

/* Returns the bytes of workspace of a call. only_out: nobody asked for the LSE. A kernel that stores it all the same
 * gets memory for it behind the plan's workspace. */
static size_t workspace_bytes(const fa_problem *problem, const fa_plan *plan, bool only_out) {
    const size_t bytes = plan->workspace_bytes;
    const bool is_stored = problem->device == FA_CPU || !fa_families[plan->gpu.family].stores_lse_if_wanted;
    if (!only_out || !is_stored) return bytes;
    return (bytes + 255) / 256 * 256 + sizeof(float) * (size_t)(problem->h * problem->total_q);
}

static fa_status run(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                     fa_error *err) {
    if (problem->device == FA_CUDA) return fa_cuda_run(problem, plan, zero_tensors, workspace, err);
    return fa_cpu_run_call(problem, plan, zero_tensors, workspace, &torch_pool, err);
}

static fa_status make_memory(int device_idx, size_t bytes, AtenTensorHandle *tensor, void **data) {
    const int64_t size = (int64_t)bytes, one = 1;
    const bool done =
        fa_torch.aoti_torch_empty_strided(1, &size, &one, fa_torch.u8, fa_torch.cuda, device_idx, tensor) == 0 &&
        fa_torch.torch_get_mutable_data_ptr(*tensor, data) == 0;
    return done ? FA_OK : FA_ENOMEM_GPU;
}

/* Finds the walks of an earlier call, or makes memory that will keep those of this one. */
static fa_status find_kept_walks(const fa_problem *problem, const fa_plan *plan, fa_error *err) {
    fa_kept_walks *kept = problem->flex ? problem->flex->kept : NULL;
    AtenTensorHandle owner = NULL;
    if (!kept) return FA_OK;
    TRY(fa_cuda_find_kept_walks(problem, plan, kept, err));
    if (kept->bytes == 0 || !kept->is_wanted) return FA_OK;
    if (make_memory(problem->device_idx, kept->bytes, &owner, &kept->data) != FA_OK)
        return fa_fail(err, FA_ENOMEM_GPU, "CUDA out of memory: the blocks of a mask need %zu bytes", kept->bytes);
    kept->owner = owner;
    return FA_OK;
}

/* Runs a plan in `bytes` of memory. An LSE that nobody asked for lies behind the plan's workspace. */
static fa_status run_in(size_t bytes, fa_problem *problem, const fa_plan *plan, bool zero_tensors, fa_error *err) {
    AtenTensorHandle workspace = NULL;
    void *data = NULL;
    fa_status status = FA_OK;
    if (bytes > 0 && problem->device == FA_CPU) {
        data = fa_workspace_take(bytes);
        if (!data) status = fa_fail(err, FA_ENOMEM, "there are no %zu bytes of memory to work in", bytes);
    } else if (bytes > 0) {
        if (make_memory(problem->device_idx, bytes, &workspace, &data) != FA_OK)
            status =
                fa_fail(err, FA_ENOMEM_GPU, "CUDA out of memory: %s needs %zu bytes of workspace", plan->kernel, bytes);
    }
    if (status == FA_OK) {
        if (!problem->lse.data && bytes > plan->workspace_bytes)
            problem->lse.data = (float *)((char *)data + (plan->workspace_bytes + 255) / 256 * 256);
        status = run(problem, plan, zero_tensors, data, err);
    }
    if (problem->device == FA_CPU) fa_workspace_return(data);
    if (workspace) fa_torch.aoti_torch_delete_tensor_object(workspace);
    return status;
}

static fa_status run_with_workspace(const fa_call *call, fa_problem *problem, const fa_plan *plan, fa_error *err) {
    const bool fresh_out = call->pass == FA_FWD && (!call->out.handle || call->fresh_out);
    const size_t bytes = workspace_bytes(problem, plan, call->only_out);
    return run_in(bytes, problem, plan, call->zero_tensors || fresh_out, err);
}

/* Asks for the kernels of a plan on an imagined GPU (gpu/driver.h). Nothing runs, so addresses in the workspace are
 * computed and never used. */
static fa_status ask_for_kernels(const fa_problem *problem, const fa_plan *plan, fa_error *err) {
    static _Alignas(256) char workspace[256];
    return fa_cuda_run(problem, plan, false, workspace, err);
}

static fa_status ask_gpu(const fa_problem *problem, fa_machine *machine, fa_error *err) {
    const fa_gpu *gpu;
    fa_status status = fa_gpu_get(problem->device_idx, &gpu, err);
    if (status == FA_OK) machine->gpu_capability = gpu->capability, machine->gpu_sms = gpu->num_sms;
    return status;
}

/* Plans for the machine as it is now, and shows the plan to those who look at plans. */
static fa_status make_plan(const fa_problem *problem, fa_plan *plan, fa_error *err) {
    fa_machine machine = fa_this_machine;
    uint32_t threads = 1;
    fa_torch.torch_get_num_threads(&threads);
    machine.threads = (int)threads;
    fa_status status = problem->device == FA_CUDA ? ask_gpu(problem, &machine, err) : FA_OK;
    if (status == FA_OK) status = fa_plan_make(problem, &machine, plan, err);
    if (status == FA_OK && problem->h > 0) fa_note_plan(plan); /* without heads the call only checks arguments */
    return status;
}

fa_status fa_execute_problem(fa_problem *problem, bool only_out, fa_error *err) {
    fa_plan plan;
    fa_status status = make_plan(problem, &plan, err);
    if (status != FA_OK || fa_plan_only()) return status;
    if (fa_gpu_imagined()) return ask_for_kernels(problem, &plan, err);
    TRY(find_kept_walks(problem, &plan, err));
    size_t bytes = workspace_bytes(problem, &plan, only_out);
    if (problem->flex && problem->flex->kept && problem->flex->kept->bytes == bytes)
        bytes = 0; /* walks are all of it */
    return run_in(bytes, problem, &plan, false, err);
}

static fa_status write_and_run(const fa_call *call, fa_problem *problem, const fa_plan *plan, fa_error *err) {
    const fa_tensor *written[MAX_WRITTEN];
    for (int i = written_tensors(call, written) - 1; i >= 0; i--) fa_bump_version(written[i]->handle);
    return run_with_workspace(call, problem, plan, err);
}

fa_status fa_execute(const fa_call *call, fa_outputs *outputs, fa_error *err) {
    fa_problem problem;
    fa_plan plan;
    fa_status status = fa_check_call(call, &problem, err);
    if (status == FA_OK) status = make_plan(&problem, &plan, err);
    if (status == FA_OK) status = fa_make_outputs(call, !fa_plan_only() && !fa_gpu_imagined(), &problem, outputs, err);
    if (status != FA_OK || fa_plan_only()) return status;
    status = fa_gpu_imagined() ? ask_for_kernels(&problem, &plan, err) : write_and_run(call, &problem, &plan, err);
    if (status != FA_OK) fa_drop_outputs(outputs);
    return status;
}

/* ---- a length for every sequence --------------------------------------------------------------------------------- */

static fa_status fill_lengths(const fa_tensor *t, int32_t length, fa_error *err) {
    if (t->device_type == fa_torch.cpu) {
        for (int64_t i = 0; i < t->size[0]; i++) ((int32_t *)t->data)[i] = length;
        return FA_OK;
    }
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(t->device_idx, &place, err);
    if (status != FA_OK) return status;
    status = fa_cuda_fill(&place, t->data, (uint32_t)length, t->size[0], err);
    fa_cuda_leave(&place);
    return status;
}

fa_status fa_repeat_length(int32_t length, fa_call *call, fa_error *err) {
    const fa_tensor *q = &call->q;
    const fa_tensor *counted = present(&call->cu_seqlens_q) ? &call->cu_seqlens_q : q;
    const int64_t rows = counted->ndim > 0 ? counted->size[0] : 0, one = 1;
    const int64_t b = counted == q || rows == 0 ? rows : rows - 1;
    AtenTensorHandle handle = NULL;
    if (fa_torch.aoti_torch_empty_strided(1, &b, &one, fa_torch.i32, q->device_type, q->device_idx, &handle) != 0)
        return fa_fail(err, q->device_type == fa_torch.cpu ? FA_ENOMEM : FA_ENOMEM_GPU,
                       "out of memory: there is none for the lengths of the call");
    fa_tensor_read(handle, &call->seqused_k);
    if (fa_torch.torch_get_mutable_data_ptr(handle, &call->seqused_k.data) != 0)
        return fa_fail(err, FA_ENOMEM, "the lengths of the call have no memory");
    return fill_lengths(&call->seqused_k, length, err);
}
