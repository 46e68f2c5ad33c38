// In place of csrc/cuda/device/shared_memory.cuh: what the kernels of sm80 and sm90a use of it.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// Lane l has of matrix i the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, whose address lane 8 i + l / 4 gives;
// `transposed`, of column l / 4.
inline void load_matrices_of(u32 (&x)[4], u32 address, bool transposed, const emulator::Site& site) {
  emulator::shared(address, 16, site);
  const char* all = emulator::exchange(&address, sizeof(address), site);
  const u32 lane = emulator::thread() % 32;
  for (int i = 0; i < 4; ++i) {
    x[i] = 0;
    for (u32 e = 0; e < 2; ++e) {
      const u32 row = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
      u32 from;
      __builtin_memcpy(&from, all + 64 * (8 * i + row), 4);
      u16 element;
      __builtin_memcpy(&element, emulator::shared(from, 16, site) + 2 * column, 2);
      x[i] |= static_cast<u32>(element) << 16 * e;
    }
  }
}
inline void load_matrices(u32 (&x)[4], u32 address, EMULATOR_SITE) { load_matrices_of(x, address, false, site); }
inline void load_transposed(u32 (&x)[4], u32 address, EMULATOR_SITE) { load_matrices_of(x, address, true, site); }

inline void load_shared(u32 (&x)[4], u32 address, EMULATOR_SITE) {
  __builtin_memcpy(x, emulator::shared(address, 16, site), 16);
}
inline void load_shared(float2& x, u32 address, EMULATOR_SITE) {
  __builtin_memcpy(&x, emulator::shared(address, 8, site), 8);
}
inline void store_shared(u32 address, const uint4& x, EMULATOR_SITE) {
  __builtin_memcpy(emulator::shared(address, 16, site), &x, 16);
  emulator::written(address, 16);
}
inline void store_shared(u32 address, u32 x, EMULATOR_SITE) {
  __builtin_memcpy(emulator::shared(address, 4, site), &x, 4);
  emulator::written(address, 4);
}

inline void copy_async(u32 to, const void* from, bool valid, EMULATOR_SITE) {
  emulator::copy_chunk(to, valid ? from : nullptr, 16, site);
}
inline void copy_async(u32 to, const void* from, EMULATOR_SITE) { emulator::copy_chunk(to, from, 16, site); }
inline void copy_async_if(bool wanted, u32 to, const void* from, EMULATOR_SITE) {
  if (wanted) emulator::copy_chunk(to, from, 16, site);
}
inline void copy_async_float(u32 to, const float* from, bool valid, EMULATOR_SITE) {
  emulator::copy_chunk(to, valid ? from : nullptr, 4, site);
}

}  // namespace jax_flash
