// A kernel may be started before the one that it follows has ended (cuda/host/driver.h). It lets the next one come
// likewise, as soon as all of its blocks have said so, and waits for the one before: no global memory may be touched
// until then. Both do nothing where no launch allows it.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

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
