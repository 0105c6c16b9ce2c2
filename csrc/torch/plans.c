/* Collects plans for explain(), and prints plans for FLASH_ATTN_LOG=plan. */
#include "plans.h"

#include <stdio.h>
#include <stdlib.h>

#include "gpu/driver.h"
#include "gpu/kernels.h"
#include "plan/print.h"
#include "system/lock.h"

enum { PLAN_TEXT_BYTES = 4096 }; /* room for the words of every kernel that can be ruled out */
/* Plans have texts that live as long as the program. So a reason of torch's kernel has a place of its own. */
typedef struct {
    fa_plan plan; /* without a kernel: torch's own kernel runs */
    char reason[FA_MESSAGE_BYTES];
} note;

static THREAD_LOCAL struct {
    bool only;
    int num, room;
    note *plans; /* since take_plans */
} collected;

bool fa_logs_plans;

bool fa_plan_only(void) { return collected.only; }

/* A plan for which there is no memory is left out. */
static bool has_room(void) {
    if (collected.num < collected.room) return true;
    const int room = collected.room ? 2 * collected.room : 8;
    note *plans = realloc(collected.plans, (size_t)room * sizeof *plans);
    if (!plans) return false;
    collected.plans = plans, collected.room = room;
    return true;
}

void fa_note_plan(const fa_plan *plan) {
    if (fa_gpu_imagined() && fa_call_is_rehearsal()) return; /* the call itself follows */
    if (fa_logs_plans && !collected.only) {
        char text[PLAN_TEXT_BYTES];
        fa_plan_print(plan, text, sizeof text);
        fprintf(stderr, "flash_attn: %s\n", text);
    }
    if (collected.only && has_room()) collected.plans[collected.num++].plan = *plan;
}

void fa_note_torch(fa_pass pass, fa_device device, const char *reason) {
    if (fa_logs_plans && !collected.only)
        fprintf(stderr, "flash_attn: PyTorch's own kernel runs a %s: %s\n", pass == FA_FWD ? "forward" : "backward",
                reason);
    if (!collected.only || !has_room()) return;
    note *n = &collected.plans[collected.num++];
    n->plan = (fa_plan){.pass = pass, .device = device};
    snprintf(n->reason, sizeof n->reason, "%s", reason);
}

static void forget_plans(void) {
    free(collected.plans);
    collected.plans = NULL;
    collected.num = collected.room = 0;
}

static PyObject *plan_only(PyObject *self, PyObject *on) {
    (void)self;
    int truth = PyObject_IsTrue(on);
    if (truth < 0) return NULL;
    collected.only = truth != 0;
    forget_plans();
    Py_RETURN_NONE;
}

static PyObject *plan_as_dict(const note *n) {
    const fa_plan *plan = &n->plan;
    char text[PLAN_TEXT_BYTES];
    PyObject *ruled_out = PyList_New(0);
    for (int i = 0; ruled_out && i < plan->num_ruled_out; i++) {
        PyObject *pair = Py_BuildValue("(ss)", plan->ruled_out[i].kernel, plan->ruled_out[i].reason);
        if (!pair || PyList_Append(ruled_out, pair) < 0) Py_CLEAR(ruled_out);
        Py_XDECREF(pair);
    }
    if (!ruled_out) return NULL;
    fa_plan_print(plan, text, sizeof text);
    const bool is_on_cpu = plan->device == FA_CPU;
    const fa_cpu_plan *cpu = &plan->cpu;
    const fa_gpu_plan *gpu = &plan->gpu;
    return Py_BuildValue(
        "{s:s,s:s,s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:n,s:i,s:i,s:O,s:O,s:O,s:i,s:i,s:i,s:O,s:i,s:O,s:N,s:s,s:s}", "pass",
        plan->pass == FA_FWD ? "fwd" : "bwd", "device", is_on_cpu ? "cpu" : "cuda", "kernel", plan->kernel, "isa",
        is_on_cpu ? fa_isa_name(cpu->isa) : "", "block_q", plan->block_q, "block_kv", plan->block_kv, "tiles_per_task",
        cpu->tiles_per_task, "threads", cpu->threads, "num_splits", plan->num_splits, "workspace_bytes",
        (Py_ssize_t)plan->workspace_bytes, "group_heads", gpu->group_heads, "tile_heads", gpu->tile_heads, "gathers",
        gpu->gathers ? Py_True : Py_False, "aligns", gpu->aligns ? Py_True : Py_False, "is_dynamic",
        gpu->is_dynamic ? Py_True : Py_False, "cluster", gpu->cluster, "lanes", gpu->decode.lanes, "groups",
        gpu->decode.groups, "has_low_launch", gpu->decode.lanes > 0 && gpu->decode_low.row >= 0 ? Py_True : Py_False,
        "short_rows", gpu->short_rows, "any_order", gpu->any_order ? Py_True : Py_False, "ruled_out", ruled_out, "text",
        text, "refusal", *plan->kernel ? "" : n->reason);
}

static PyObject *take_plans(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < collected.num; i++) {
        PyObject *dict = plan_as_dict(&collected.plans[i]);
        if (!dict || PyList_Append(list, dict) < 0) Py_CLEAR(list);
        Py_XDECREF(dict);
    }
    forget_plans();
    return list;
}

static PyObject *only_plans(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return PyBool_FromLong(collected.only);
}

PyMethodDef fa_plan_functions[] = {
    {"plan_only", plan_only, METH_O, "plan_only(on): while on, calls of this thread are planned but not run"},
    {"only_plans", only_plans, METH_NOARGS, "only_plans() -> whether plan_only is on for this thread"},
    {"take_plans", take_plans, METH_NOARGS,
     "take_plans() -> the plans collected on this thread since the last call, as dicts"},
    {NULL, NULL, 0, NULL},
};
