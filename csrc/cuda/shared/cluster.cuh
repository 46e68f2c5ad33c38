// Clusters: blocks that read each other's shared memory, from compute capability 9.0 on.
#pragma once

#include "cuda/shared/prelude.cuh"

namespace jax_flash {

// Blocks of a cluster; 1: there are none. Of eight blocks that fill a multiprocessor each, an H200 does not find room
// for 16 clusters at once (17.2 us for what four take 8.5 for). Kernels for older GPUs are as they are there.
constexpr int most_cluster = __CUDA_ARCH__ >= 900 && !loads_take_registers ? 4 : 1;

// For all threads of a cluster: shared memory that was written before is there for the others. Of a block's own threads
// the cluster's barrier says so too, but racecheck does not know that.
JAX_FLASH_DEVICE void cluster_sync() {
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
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
JAX_FLASH_DEVICE float2 load_pair(u32 address) {
  float2 x{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
#endif
  return x;
}
JAX_FLASH_DEVICE float4 load_four(u32 address) {
  float4 x{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
#endif
  return x;
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
