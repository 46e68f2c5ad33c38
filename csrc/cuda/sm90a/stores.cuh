// Results from accumulators to global memory.
#pragma once

#include "cuda/sm90a/mma.cuh"

namespace jax_flash {

// Four lanes hold four words each; afterwards lane i of them holds word i of all four, in their order.
JAX_FLASH_DEVICE uint4 turned(const u32 (&x)[4], int lane) {
  const bool upper = lane & 2, odd = lane & 1;
  const u32 far0 = __shfl_xor_sync(0xffffffffu, upper ? x[0] : x[2], 2);
  const u32 far1 = __shfl_xor_sync(0xffffffffu, upper ? x[1] : x[3], 2);
  const u32 near0 = upper ? x[2] : x[0], near1 = upper ? x[3] : x[1];
  // Words 2 * upper + 0, 1 of this lane's pair: those of the lower lane and of the upper one.
  const u32 low0 = upper ? far0 : near0, low1 = upper ? far1 : near1;
  const u32 high0 = upper ? near0 : far0, high1 = upper ? near1 : far1;
  const u32 low = __shfl_xor_sync(0xffffffffu, odd ? low0 : low1, 1);
  const u32 high = __shfl_xor_sync(0xffffffffu, odd ? high0 : high1, 1);
  return {odd ? low : low0, odd ? low1 : low, odd ? high : high0, odd ? high1 : high};
}

// Writes accumulators of row `row` (half 0) or `row` + 8 (half 1) of this lane, times `scale`: 16 bytes a lane, 64 in a
// row, or of float32 32 in a row. Needs no shared memory, and stops at the end of a sequence as at any other.
template <int columns, int n>
JAX_FLASH_DEVICE void store_row(const FragmentC (&c)[n], int half, float scale, float* to, bool stored, int lane) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int column = i * 8 + lane % 4 * 2;
    if (stored && column < columns) {
      *reinterpret_cast<float2*>(to + column) = {c[i].x[2 * half] * scale, c[i].x[2 * half + 1] * scale};
    }
  }
}
template <int columns, int n>
JAX_FLASH_DEVICE void store_row(const FragmentC (&c)[n], int half, float scale, CommonSum* to, bool stored, int lane) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int column = i * 8 + lane % 4 * 2;
    if (stored && column < columns) {
      add_pair(&to[column].sum, c[i].x[2 * half] * scale, c[i].x[2 * half + 1] * scale);
    }
  }
}
template <int columns, int n>
JAX_FLASH_DEVICE void store_row(const FragmentC (&c)[n], int half, float scale, Element* to, bool stored, int lane) {
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = i + j < n ? pack(c[i + j].x[2 * half] * scale, c[i + j].x[2 * half + 1] * scale) : 0;
    }
    const uint4 row = turned(words, lane);
    const int column = (i + lane % 4) * 8;
    if (stored && column < columns) *reinterpret_cast<uint4*>(to + column) = row;
  }
}

}  // namespace jax_flash
