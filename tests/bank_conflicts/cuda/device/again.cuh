// In place of csrc/cuda/device/again.cuh.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

inline int block_again() { return blockIdx.x; }
inline int thread_again() { return threadIdx.x; }
inline u32 fresh(u32 address) { return address; }

}  // namespace jax_flash
