/* What threads, TMA, the CTAs of a cluster and kernels tell each other on Hopper: mbarriers; clusters, whose CTAs run at the
 * same time and reach each other's shared memory; dependent launches. One wrapper for each instruction; addresses are 32-bit (`smem_address`). */
#ifndef FA_PTX_CLUSTER_CUH
#define FA_PTX_CLUSTER_CUH

#include "ptx_sm80.cuh"

/* ---- mbarrier [Parallel Synchronization and Communication: mbarrier] ------------------------------------------
 * 64 bits in shared memory. A phase ends when `count` arrivals and all announced bytes have come. A wait names the
 * parity of the phase it waits for; a fresh barrier is in phase 0, so waiting for parity 1 returns at once. */

/* One thread; then mbarrier_init_fence and a barrier of the CTA before anyone else touches it. */
DEVICE void mbarrier_init(u64 *barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/* One thread: one arrival. */
DEVICE void mbarrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

/* Of a warp that has met, how many lanes arrive: its leader does, for all. racecheck orders only what a lane has done that
 * itself arrives, so it is shown a text in which 32 do: tests/test_cuda_racecheck.py. */
constexpr u32 ARRIVING_LANES = 1;
DEVICE bool arrives_for_warp(u32 lane) { return ARRIVING_LANES == 32 || lane == 0; }

/* What a barrier counts where so many warps arrive. */
DEVICE constexpr u32 of_warps(u32 warps) { return warps * ARRIVING_LANES; }

/* One thread, beside its own arrival, where the barrier counts a warp. */
DEVICE void mbarrier_arrive_for_others(u64 *barrier) {
    for (u32 i = 1; i < ARRIVING_LANES; i++) mbarrier_arrive(barrier);
}

/* One thread: one arrival, and `bytes` that TMA will deliver before the phase can end. */
DEVICE void mbarrier_arrive_expect_tx(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

/* Any threads. What happened before the phase ended, TMA's writes included, is visible afterwards. */
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

/* The same where another CTA of the cluster has written, or tells what it has read. */
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

/* An address in this CTA's shared memory, as it is in the cluster's CTA `rank`. */
DEVICE u32 mapa(u32 shared, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

/* All threads of all CTAs. What they wrote is visible afterwards. [barrier.cluster] */
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The same in two steps. Relaxed: it says that something has been read; a barrier of the CTA stands between. A release
 * would cost 1000 clocks. */
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* One thread: one arrival in another CTA. It says that something has been read, and releases nothing that this thread
 * has written: that would wait until all its additions have reached the L2. */
DEVICE void mbarrier_arrive_remote(u64 *barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(smem_address(barrier), rank)) : "memory");
}

/* One thread: the same, after all that this thread has read and written. An ordinary load from shared memory need not have
 * been made when a later arrival reaches the other CTA, unless something waits for its value. */
DEVICE void mbarrier_arrive_remote_release(u64 *barrier, u32 rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(smem_address(barrier), rank))
                 : "memory");
}

/* One thread: to a place of the cluster's CTA `rank`, and its bytes to a barrier there. [st.async] */
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

/* ---- dependent launches [griddepcontrol] ----------------------------------------------------------------------
 * Nothing happens where the launch did not ask for it. */

/* Any thread of every CTA: the next kernel may begin where there is room for it. */
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/* Until the kernel before has ended and what it wrote is visible. */
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#endif
