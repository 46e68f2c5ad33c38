// Values that the compiler must not keep in registers: re-read special registers and opaque addresses. The builds for
// the host have files of this name of their own (tests/emulator, tests/bank_conflicts).
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// These re-read %ctaid and %tid: keeping the values derived from blockIdx and threadIdx alive across a main loop takes
// registers that the loop needs.
JAX_FLASH_DEVICE int reread_block_index() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
JAX_FLASH_DEVICE int reread_thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Makes a shared address opaque to the compiler, which therefore computes what follows from it where it is used, and
// does not hoist that out of the loop into registers.
JAX_FLASH_DEVICE u32 opaque(u32 address) {
  asm volatile("" : "+r"(address));
  return address;
}
// A number of which the compiler knows nothing; twice of the same one it is the same.
JAX_FLASH_DEVICE int opaque_number(int x) {
  asm("" : "+r"(x));
  return x;
}

}  // namespace jax_flash
