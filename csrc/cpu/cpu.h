/* The CPU engine as the rest of the C code sees it: what the machine offers, and one entry point that runs a plan. */
#ifndef FA_CPU_H
#define FA_CPU_H

#include "../flash_attn.h"

/* Somebody else's threads: torch's pool in the extension, pthreads or none in the C tests. fn gets every index of
 * [0, n) exactly once, in ranges of any size, and must neither throw nor call torch. false: the threads could not be had,
 * and nobody knows which indices ran. */
typedef struct {
    bool (*parallel_for)(int64_t n, void (*fn)(int64_t begin, int64_t end, void *ctx), void *ctx);
} fa_pool;

/* cpuid (or its like) and cache sizes. Does not look at the environment. */
void fa_cpu_detect(fa_machine *machine);

/* Runs a checked CPU problem with its plan. workspace: plan->workspace_bytes, aligned to 64 bytes, uninitialised.
 * false: the pool failed, and what is written is worth nothing. */
bool fa_cpu_run(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);

/* The kernels of one instruction set. A NULL entry does not exist there. Filled in dispatch.c, indexed by fa_isa. */
typedef bool fa_cpu_kernel(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);
typedef struct {
    fa_cpu_kernel *fwd, *bwd, *decode; /* decode: the sequences of a forward that fa_decodes (partition.h) */
    int block_q;                       /* query lanes of one tile */
    int block_q_bwd;                   /* of the backward; 0: the same */
    int score_buffers;                 /* of the forward: fwd_layout.h */
} fa_cpu_kernels;
const fa_cpu_kernels *fa_cpu_kernels_of(fa_isa isa, fa_dtype dtype);

/* plan_fwd.c, plan_bwd.c, plan_decode.c: tiles, workers and workspace of plan->isa, which is not the reference. */
void fa_cpu_plan_fwd(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);
void fa_cpu_plan_bwd(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);
void fa_cpu_plan_decode(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);

/* The first bytes of a forward's workspace: the rotated queries, if there is rotary. */
static inline size_t fa_rotated_q_bytes(const fa_problem *p) {
    size_t bytes = p->rotary_cos ? (size_t)(p->b * p->len_q * p->h * p->d) * fa_dtype_bytes(p->dtype) : 0;
    return (bytes + 63) / 64 * 64;
}

/* reference.c: the specification. Every option, double accumulators, no workspace but the row of scores. */
bool fa_reference_fwd(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);
bool fa_reference_bwd(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);
bool fa_reference_s_dmask(const fa_problem *problem, const fa_pool *pool);

/* kvcache.c: writes k_new (rotated) and v_new into the cache, and q rotated into q_rotated [b, len_q, h, d]
 * contiguous (used instead of q by the attention that follows) if there is rotary. */
bool fa_cpu_append(const fa_problem *problem, void *q_rotated, const fa_pool *pool);

#endif
