// Accumulators of matrix instructions, and who holds which: the same for all families but for the numbers of lanes.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// The accumulators of 16 rows and 8 columns, as a lane holds them. Lane 4 * g + t has x0 x1: row g, columns 2t and
// 2t + 1; x2 x3: row g + 8, the same columns. A family whose hardware numbers its lanes otherwise has its own `Lanes`:
// the number of a lane by this scheme, the bits of the hardware's number by which lanes differ that share a row, or a
// column, and what a lane further on by this scheme has.
struct FragmentC {
  float x[4];
};

// Sum and maximum over the four lanes that share a row, and the sum over the eight that share a column.
JAX_FLASH_DEVICE float quad_sum(float x) {
#pragma unroll
  for (int i = 0; i < 2; ++i) x += __shfl_xor_sync(0xffffffffu, x, Lanes::in_row(i));
  return x;
}
JAX_FLASH_DEVICE float quad_max(float x) {
#pragma unroll
  for (int i = 0; i < 2; ++i) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, Lanes::in_row(i)));
  return x;
}
JAX_FLASH_DEVICE float column_sum(float x) {
#pragma unroll
  for (int i = 0; i < 3; ++i) x += __shfl_xor_sync(0xffffffffu, x, Lanes::in_column(i));
  return x;
}

}  // namespace jax_flash
