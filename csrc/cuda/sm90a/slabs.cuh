// A tile as the copy engine brings it: in slabs of 64 columns, whose rows are lines of 128 bytes, swizzled.
#pragma once

#include "cuda/shared/shared_memory.cuh"
#include "cuda/sm90a/mma.cuh"

namespace jax_flash {

template <int rows_, int columns_>
struct Slabs {
  static constexpr int rows = rows_;
  static constexpr int count = ceil_div(columns_, kBoxColumns);
  static constexpr int slab_bytes = rows * 128;
  static constexpr int bytes = count * slab_bytes;
  static_assert(rows % 8 == 0 && rows <= 256, "the swizzle repeats after 8 rows; a box has at most 256");

  // By the threads of a warpgroup.
  static __device__ __forceinline__ void zero_rows(u32 address, int first, int thread) {
    for (int line = first + thread / 8; line < rows; line += warpgroup / 8) {
#pragma unroll
      for (int slab = 0; slab < count; ++slab) {
        store_shared(address + slab * slab_bytes + line * 128 + thread % 8 * 16, uint4{0, 0, 0, 0});
      }
    }
  }
};

}  // namespace jax_flash
