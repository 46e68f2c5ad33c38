// Two floats to two 16-bit elements, by the instruction that compute capability 8.0 introduced.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// The first in the low half.
JAX_FLASH_DEVICE u32 pack(float low, float high) {
  u32 packed;
  if constexpr (dtype == DType::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

}  // namespace jax_flash
