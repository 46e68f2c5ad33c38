// The hardware's 16 numbered barriers, 0 being that of __syncthreads(). On the host tests/emulator has what takes their
// place.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// `threads` counts those that arrive and those that wait. All lanes of a warp come together.
JAX_FLASH_DEVICE void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
JAX_FLASH_DEVICE void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Lanes may come one after the other.
JAX_FLASH_DEVICE void named_sync_unaligned(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace jax_flash
