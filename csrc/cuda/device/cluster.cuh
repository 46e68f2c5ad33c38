// Clusters: blocks that write to each other's shared memory, from compute capability 9.0 on.
#pragma once

#include "cuda/device/programmatic_launch.cuh"

namespace jax_flash {

// Whether a kernel may be started before the one that it follows has ended, and blocks of a cluster at most; 1: there
// are none. Kernels for older GPUs are as they are there, and blocks of many rows do without clusters.
constexpr bool may_start_ahead = __CUDA_ARCH__ >= 900 && !loads_take_registers;
constexpr int most_cluster = may_start_ahead && block_q == 16 ? 8 : 1;

// Before a block writes to another one that has to have begun, and to have made its mbarrier: a block arrives early,
// and waits late. Relaxed: a release would make the hardware wait for all that was written before.
JAX_FLASH_DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
JAX_FLASH_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}
// An mbarrier whose only phase expects the bytes that blocks send to this one. One thread makes it.
JAX_FLASH_DEVICE void mbarrier_init_expect(u32 mbarrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier),
      "r"(bytes)
      : "memory");
#endif
}
JAX_FLASH_DEVICE void mbarrier_wait(u32 mbarrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(mbarrier)
      : "memory");
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
// st.async to an address of a block of the cluster, which counts the bytes at its mbarrier.
JAX_FLASH_DEVICE void send_pair(u32 address, u32 mbarrier, float2 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(x.x), "f"(x.y), "r"(mbarrier)
               : "memory");
#endif
}
JAX_FLASH_DEVICE void send_four(u32 address, u32 mbarrier, float4 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mbarrier)
      : "memory");
#endif
}

}  // namespace jax_flash
