// Lanes of accumulators by the hardware's own numbers, as from compute capability 7.5 on: see lanes.cuh.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

struct Lanes {
  static __device__ __forceinline__ int of(int thread) { return thread % 32; }
  static __device__ __forceinline__ constexpr int in_row(int i) { return 1 << i; }
  static __device__ __forceinline__ constexpr int in_column(int i) { return 4 << i; }
};

}  // namespace jax_flash
