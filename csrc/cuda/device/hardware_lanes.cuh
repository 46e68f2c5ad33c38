// Lanes of accumulators by the hardware's own numbers, as from compute capability 7.5 on: see lanes.cuh.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

struct Lanes {
  static __device__ __forceinline__ int of(int thread) { return thread % 32; }
  static __device__ __forceinline__ constexpr int in_row(int i) { return 1 << i; }
  static __device__ __forceinline__ constexpr int in_column(int i) { return 4 << i; }
  static __device__ __forceinline__ constexpr int thread_of(int lane) { return lane; }
  // x of the lane so many further, where there is one.
  static __device__ __forceinline__ float from_further(float x, int, int further) {
    return __shfl_down_sync(0xffffffffu, x, further);
  }
};

}  // namespace jax_flash
