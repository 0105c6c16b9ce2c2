/* Clusters on Hopper: CTAs that run at the same time and reach each other's shared memory. One wrapper for each
 * instruction; addresses are 32-bit (`smem_address`). [Cluster Dimension, mapa] */
#ifndef FA_PTX_CLUSTER_CUH
#define FA_PTX_CLUSTER_CUH

#include "ptx_sm80.cuh"

/* An address in this CTA's shared memory, as it is in the cluster's CTA `rank`. */
DEVICE u32 mapa(u32 shared, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

/* All threads of all CTAs arrive, then wait. Relaxed: it says that something has been read; a barrier of the CTA stands
 * between. A release would cost 1000 clocks. [barrier.cluster] */
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* An mbarrier that `bytes` come to, once. One thread, and the cluster arrives and waits before anyone sends. [mbarrier] */
DEVICE void mbarrier_init(u64 *barrier) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(smem_address(barrier))
        : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}
/* Any threads: what was sent is there. */
DEVICE void mbarrier_wait(u64 *barrier) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
                 "@done bra finished;\n"
                 "bra again;\n"
                 "finished:\n"
                 "}" ::"r"(smem_address(barrier))
                 : "memory");
}

/* To the same place of the cluster's CTA `rank`, and its bytes to the same barrier there. [st.async] */
DEVICE void st_async(float *dst, u64 *barrier, float2 x, u32 rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     mapa(smem_address(dst), rank)),
                 "f"(x.x), "f"(x.y), "r"(mapa(smem_address(barrier), rank))
                 : "memory");
}
DEVICE void st_async(float *dst, u64 *barrier, float4 x, u32 rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            mapa(smem_address(dst), rank)),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mapa(smem_address(barrier), rank))
        : "memory");
}

#endif
