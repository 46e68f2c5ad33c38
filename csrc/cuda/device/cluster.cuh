// Clusters: blocks that write to each other's shared memory, from compute capability 9.0 on.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// Whether a kernel may be started before the one that it follows has ended, and blocks of a cluster at most; 1: there
// are none. Kernels for older GPUs are as they are there, and blocks of many rows do without clusters.
constexpr bool may_start_ahead = __CUDA_ARCH__ >= 900 && !loads_take_registers;
constexpr int most_cluster = may_start_ahead && block_q == 16 ? 8 : 1;

// Before a block writes to another one that has to have begun, and to have made its gate: one arrives early, and waits
// late. Without a release of all that was written before, for which the hardware would wait for all of it.
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
// A gate counts the bytes that blocks give to this one, and opens when all of them are there. One thread makes it.
JAX_FLASH_DEVICE void gate_make(u32 gate, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(gate),
      "r"(bytes)
      : "memory");
#endif
}
JAX_FLASH_DEVICE void gate_wait(u32 gate) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(gate)
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
// To an address of a block of the cluster, and counted by its gate.
JAX_FLASH_DEVICE void give_pair(u32 address, u32 gate, float2 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(x.x), "f"(x.y), "r"(gate)
               : "memory");
#endif
}
JAX_FLASH_DEVICE void give_four(u32 address, u32 gate, float4 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(gate)
      : "memory");
#endif
}

// A kernel may be started before the one that it follows has ended (cuda/driver.h). It lets the next one come likewise,
// as soon as all of its blocks have said so, and waits for the one before, here: no global memory may be touched until
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
