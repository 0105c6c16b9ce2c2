/* Synchronisation on Hopper: mbarriers and thread block clusters. CTAs of a cluster run at the same time and reach each
 * other's shared memory.
 *
 * There is one wrapper per instruction, named after the instruction, with operands in PTX order. The comment above a
 * wrapper says which threads must call it. Addresses in shared memory are 32-bit (`smem_address`). Headings in brackets
 * are those of the PTX manual. */
#ifndef FA_PTX_CLUSTER_CUH
#define FA_PTX_CLUSTER_CUH

#include "ptx_launch.cuh"
#include "ptx_sm80.cuh"

/* ---- mbarrier [Parallel Synchronization and Communication: mbarrier] ------------------------------------------
 * An mbarrier is 64 bits in shared memory. A phase ends when `count` arrivals and all announced bytes have come. A wait
 * names the parity of the phase it waits for. A fresh mbarrier is in phase 0, so a wait for parity 1 returns at
 * once. */

/* One thread calls it. Then mbarrier_init_fence and a barrier of the CTA follow before any other thread uses the
 * mbarrier. [mbarrier.init] */
DEVICE void mbarrier_init(u64 *barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

/* The thread that has initialised mbarriers, once for all of them: TMA and the cluster see them initialised.
 * [fence.mbarrier_init] */
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/* One thread, for one arrival. [mbarrier.arrive] */
DEVICE void mbarrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

/* Lanes of a warp that arrive at an mbarrier. The lanes meet, and their leader arrives for all. racecheck orders only
 * the accesses of a lane that arrives itself. tests/test_cuda_racecheck.py therefore compiles a text with 32 here. */
constexpr u32 ARRIVING_LANES = 1;
DEVICE bool arrives_for_warp(u32 lane) { return ARRIVING_LANES == 32 || lane == 0; }

/* The count of an mbarrier at which this many warps arrive. */
DEVICE constexpr u32 of_warps(u32 warps) { return warps * ARRIVING_LANES; }

/* One thread, in addition to its own arrival, where the mbarrier counts a warp. */
DEVICE void mbarrier_arrive_for_others(u64 *barrier) {
    for (u32 i = 1; i < ARRIVING_LANES; i++) mbarrier_arrive(barrier);
}

/* One thread, for one arrival. TMA must deliver `bytes` before the phase can end. [mbarrier.arrive.expect_tx] */
DEVICE void mbarrier_arrive_expect_tx(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

/* Any threads. All writes before the end of the phase, those of TMA included, are visible afterwards.
 * [mbarrier.try_wait] */
DEVICE void mbarrier_wait(u64 *barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra finished;\n"
                 "bra again;\n"
                 "finished:\n"
                 "}" ::"r"(smem_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/* Any threads, where another CTA of the cluster has written, or has said what it has read. The wait acquires in the
 * cluster. [mbarrier.try_wait] */
DEVICE void mbarrier_wait_cluster(u64 *barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra finished;\n"
                 "bra again;\n"
                 "finished:\n"
                 "}" ::"r"(smem_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/* ---- clusters [Cluster Dimension, mapa] ----------------------------------------------------------------------- */

/* Any thread. Maps an address in this CTA's shared memory to the same place in the cluster's CTA `rank`. [mapa] */
DEVICE u32 mapa(u32 shared, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

/* All threads of all CTAs of the cluster: cluster_sync in two steps. The arrival is relaxed. It says that something has
 * been read, and a barrier of the CTA stands between the reads and the arrival. A release would cost 1000 clocks.
 * [barrier.cluster] */
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* One thread, for one arrival in another CTA. The arrival says that something has been read. It releases nothing that
 * this thread has written, because a release would wait until all additions of the thread have reached the L2.
 * [mbarrier.arrive] */
DEVICE void mbarrier_arrive_remote(u64 *barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(smem_address(barrier), rank)) : "memory");
}

/* One thread, for one arrival in another CTA after all reads and writes of this thread. NOTE: without the release, an
 * ordinary load from shared memory may still be on its way when a later arrival reaches the other CTA, unless something
 * waits for its value. [mbarrier.arrive] */
DEVICE void mbarrier_arrive_remote_release(u64 *barrier, u32 rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(smem_address(barrier), rank))
                 : "memory");
}

/* One thread. Stores a value at `dst` in the cluster's CTA `rank`, and counts its bytes at an mbarrier there. `dst` and
 * `barrier` are addresses of this CTA. [st.async] */
DEVICE void st_async(int *dst, u64 *barrier, int value, u32 rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     mapa(smem_address(dst), rank)),
                 "r"(value), "r"(mapa(smem_address(barrier), rank))
                 : "memory");
}
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
