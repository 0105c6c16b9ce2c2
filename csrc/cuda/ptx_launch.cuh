/* Hopper's barriers among the CTAs of a cluster and among launches. These wrappers do without the element type that
 * ptx_sm80.cuh asks for. Headings in brackets are those of the PTX manual. */
#ifndef FA_PTX_LAUNCH_CUH
#define FA_PTX_LAUNCH_CUH

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

/* All threads of all CTAs of the cluster. Their writes are visible afterwards. [barrier.cluster] */
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* ---- dependent launches [griddepcontrol] ----------------------------------------------------------------------
 * Both do nothing if the launch did not ask for programmatic stream serialization. */

/* At least one thread of every CTA. The next kernel may then begin where there is room for it. */
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/* Every thread that uses memory of the kernel before. The wait ends when that kernel has ended and its writes are
 * visible. */
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#endif
