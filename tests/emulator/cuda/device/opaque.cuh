// In place of csrc/cuda/device/opaque.cuh.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

inline int reread_block_index() { return blockIdx.x; }
inline int reread_thread_index() { return threadIdx.x; }
inline u32 opaque(u32 address) { return address; }
inline int opaque_number(int x) { return x; }

}  // namespace jax_flash
