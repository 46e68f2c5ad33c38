// In place of csrc/cuda/device/pack.cuh.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

inline u32 pack(float low, float high) {
  auto narrow = [](float x) { return dtype == DType::bf16 ? emulator::float_to_bf16(x) : emulator::float_to_half(x); };
  return narrow(low) | static_cast<u32>(narrow(high)) << 16;
}

}  // namespace jax_flash
