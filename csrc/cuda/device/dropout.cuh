// Which weights are dropped: Philox 4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3"), keyed by the head's seeds, counted by row and column. One call serves rows r, r + 8 and columns c, c + 8,
// c + 16, c + 24, which lie in one lane of an accumulator whether rows or columns run along it.
#pragma once

#include "cuda/device/extent.cuh"

namespace jax_flash {

struct Dropout {
  u32 key0, key1;
  u32 threshold;
  float factor;  // of the weights that are kept

  __device__ __forceinline__ Dropout(const Problem& problem, const Extent& extent, int head) {
    if constexpr (with_dropout_rate) {
      threshold = at_most(65535, __double2int_rd(problem.options.dropout_rate * 65536 + 0.5));
      factor = 65536.f / (65536.f - threshold);
      enter(problem, extent, head);
    } else {
      factor = 1.f;
    }
  }

  __device__ __forceinline__ void enter(const Problem& problem, const Extent& extent, int head) {
    if constexpr (with_dropout_rate) {
      const uint2 key = reinterpret_cast<const uint2*>(
          problem.dropout_seeds)[static_cast<i64>(extent.index) * problem.q_heads + head];
      key0 = key.x;
      key1 = key.y;
    }
  }

  // The bits of rows r, r + 8 (low and high half) for columns c, c + 8, c + 16, c + 24, where r = row with
  // row / 8 % 2 == 0 and c = column with column / 8 % 4 == 0.
  __device__ __forceinline__ uint4 bits(int row, int column) const {
    uint4 x{static_cast<u32>(row / 16 * 8 + row % 8), static_cast<u32>(column / 32 * 8 + column % 8), 0, 0};
    u32 k0 = key0, k1 = key1;
    // Or what follows from them alone, round by round, would wait in registers outside the loop.
    asm volatile("" : "+r"(k0), "+r"(k1), "+r"(row), "+r"(column));
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      constexpr u32 m0 = 0xD2511F53u, m1 = 0xCD9E8D57u;
      x = {__umulhi(m1, x.z) ^ x.y ^ k0, m1 * x.z, __umulhi(m0, x.x) ^ x.w ^ k1, m0 * x.x};
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return x;
  }

  __device__ __forceinline__ bool keeps(u32 word, int high_half) const {
    return (high_half ? word >> 16 : word & 0xffffu) >= threshold;
  }
};

}  // namespace jax_flash
