// Clusters: blocks that write to each other's shared memory, from compute capability 9.0 on.
#pragma once

#include "cuda/shared/prelude.cuh"

namespace jax_flash {

// Whether a kernel may be started before the one that it follows has ended, and blocks of a cluster at most; 1: there are
// none. Kernels for older GPUs are as they are there, and blocks of many rows do without clusters.
constexpr bool may_start_ahead = __CUDA_ARCH__ >= 900 && !loads_take_registers;
constexpr int most_cluster = may_start_ahead && block_q == 16 ? 8 : 1;

// A barrier for all threads of a cluster: shared memory that was written before one arrives is there for the others
// after they have waited. The first one says that all blocks have begun, and may be written to.
JAX_FLASH_DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
JAX_FLASH_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// Where block `rank` of the cluster has what this one has at an address of shared memory.
JAX_FLASH_DEVICE u32 cluster_address(u32 own, int rank) {
  u32 address = own;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
#endif
  return address;
}
JAX_FLASH_DEVICE void give_pair(u32 address, float2 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
#endif
}
JAX_FLASH_DEVICE void give_four(u32 address, float4 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
#endif
}

// A kernel may be started before the one that it follows has ended (cuda/driver.h). It lets the next one come likewise,
// as soon as all of its blocks are running, and waits for the one before, here: no global memory may be touched until
// then. Both do nothing where no launch allows it.
JAX_FLASH_DEVICE void let_the_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
JAX_FLASH_DEVICE void wait_for_the_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace jax_flash
