/* Planner of attn_fwd_fp8_sm90. The planner takes the first row of cuda/tiles.def that has room for the head
 * dimension. */
#include "cuda/attn_fwd_params.h"
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"

const char *fa_plan_fwd_fp8_sm90(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const unsigned features = fa_cuda_features(p);
    const bool packed = p->cu_seqlens_q != NULL;
    const int64_t batches = packed ? 1 : p->b;
    NEEDS(p->dtype == FA_E4M3, "it takes float8_e4m3fn");
    const char *why = fa_why_not_of_3(p, FA_E4M3_IN | FA_CHUNKS | FA_USED_Q);
    if (why) return why;
    NEEDS(machine->gpu_capability == 90, "it is for compute capability 9.0 (Hopper), and this GPU has another");
    NEEDS(p->h > 0, "it wants a query head");
    NEEDS(p->softcap <= FA_HOPPERS_SOFTCAP, FA_SOFTCAP_REASON);
    NEEDS(p->dropout_p == 0, "it has no dropout");
    NEEDS(!p->paged, "it reads no block_table");
    NEEDS(!p->leftpad_k && !p->cache_batch_idx && !p->k_new.data && !p->rotary_cos && (!p->seqused_k || packed),
          "it reads no KV cache");
    NEEDS(!p->wants_s_dmask, "it does not return the attention probabilities");
    NEEDS(!p->seqused_q || packed, "it reads seqused_q beside cu_seqlens_q only");
    NEEDS(p->d % 16 == 0, "it wants a head dimension that is a multiple of 16");
    NEEDS(fa_suits_tma(p, &p->q, batches, p->total_q, p->h) && fa_suits_tma(p, &p->k, batches, p->total_kv, p->h_kv) &&
              fa_suits_tma(p, &p->v, batches, p->total_kv, p->h_kv),
          "it wants q, k and v to start at multiples of 16 bytes, with strides that are multiples of 16 elements");
    NEEDS(!p->o.data || ((uintptr_t)p->o.data % 16 == 0 && p->o.stride_row % 8 == 0 && p->o.stride_h % 8 == 0 &&
                         p->o.stride_b % 8 == 0),
          "it wants out to start at a multiple of 16 bytes, with strides that are multiples of 8 elements");
    NEEDS(fa_counts_in_32_bits(p, packed) && p->b * p->h * (p->len_q / 64 + 1) < INT32_MAX,
          "the problem has more rows than 2^30, or more tiles than 2^31");

    const fa_family *family = &fa_families[FA_FWD_FP8_SM90];
    int row = 0;
    while (row < family->num_rows && fa_fwd_fp8_sm90_row(row)->d < p->d) {
        fa_rule_out(plan, family->rows[row].name, "its tiles have fewer columns than the heads");
        row++;
    }
    plan->gpu.family = FA_FWD_FP8_SM90;
    plan->gpu.row = row;
    plan->gpu.features = features;
    plan->block_q = FA_ROWS_OF_A_WARPGROUP * fa_fwd_fp8_sm90_row(row)->wgs;
    plan->block_kv = fa_fwd_fp8_sm90_row(row)->block_kv;
    fa_plan_fwd_order(p, machine->gpu_sms, plan);
    const int d = fa_fwd_fp8_sm90_row(row)->d;
    if (d > 128 && (packed ? p->total_kv : p->len_kv) > FA_FLUSH_KEYS(d))
        plan->workspace_bytes = (size_t)plan->gpu.num_ctas * (size_t)plan->block_q * (size_t)d * sizeof(float);
    return NULL;
}
