// What a thread knows of itself, once more. A build for the host has another file of this name (tests/bank_conflicts).
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// Asked of the hardware, where the compiler would rather keep what it has computed of blockIdx and threadIdx before: in
// registers that a loop needs.
JAX_FLASH_DEVICE int block_again() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
JAX_FLASH_DEVICE int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// A shared address that the compiler takes for new each time: what follows from it is computed where it is used, and
// does not wait in registers outside the loop.
JAX_FLASH_DEVICE u32 fresh(u32 address) {
  asm volatile("" : "+r"(address));
  return address;
}

}  // namespace jax_flash
