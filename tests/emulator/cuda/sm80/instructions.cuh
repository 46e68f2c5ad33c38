// In place of csrc/cuda/sm80/instructions.cuh.
#pragma once

#include "cuda/device/matrices.cuh"

namespace jax_flash {

inline void copies_commit() { emulator::chunks_commit(); }
template <int pending>
inline void copies_wait(EMULATOR_SITE) {
  emulator::chunks_wait(pending, site);
}

inline float element_of(u32 word, int half) {
  const u16 x = static_cast<u16>(word >> 16 * half);
  return dtype == DType::bf16 ? __builtin_bit_cast(float, static_cast<u32>(x) << 16) : emulator::half_to_float(x);
}
// Lane l has of A, in register i, the elements 2 (l % 4) + 8 (i / 2) and the next of row l / 4 + 8 (i % 2); of B, in
// register i, those of column l / 4; of C, in register i, element 2 (l % 4) + i % 2 of row l / 4 + 8 (i / 2).
static inline void multiply_16bit(FragmentC& c, const Matrix4& a, u32 b0, u32 b1) {
  constexpr emulator::Site site{"multiply_16bit", "csrc/cuda/sm80/instructions.cuh", 0};
  const u32 mine[6] = {a.x[0], a.x[1], a.x[2], a.x[3], b0, b1};
  const char* all = emulator::exchange(mine, sizeof(mine), site);
  const u32 lane = emulator::thread() % 32;
  auto word = [&](u32 of, int i) {
    u32 x;
    __builtin_memcpy(&x, all + 64 * of + 4 * i, 4);
    return x;
  };
  for (u32 i = 0; i < 4; ++i) {
    const u32 column = lane % 4 * 2 + i % 2;
    float sum = c.x[i];
    for (u32 k = 0; k < 16; ++k) {
      const u32 of = k % 8 / 2;
      sum += element_of(word(lane / 4 * 4 + of, i / 2 + 2 * (k / 8)), k % 2) *
             element_of(word(4 * column + of, 4 + k / 8), k % 2);
    }
    c.x[i] = sum;
  }
}

template <typename Words>
inline void load_global(Words& x, const Element* from, bool valid) {
  if (valid) __builtin_memcpy(&x, from, sizeof(x));
}

}  // namespace jax_flash
