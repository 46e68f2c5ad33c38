// A tile in shared memory as the copy engine brings it and products read it: slabs of 64 columns, 128 bytes a row, with
// the swizzle of 128 bytes (chunk c of 16 bytes of row r lies at c ^ (r % 8)), one slab behind the other.
#pragma once

#include "cuda/shared/shared_memory.cuh"
#include "cuda/shared/tile.cuh"
#include "cuda/sm90a/mma.cuh"

namespace jax_flash {

template <int rows_, int array_columns>
struct Slabs {
  static constexpr int rows = rows_;
  static constexpr int slabs = ceil_div(array_columns, kBoxColumns);
  static constexpr int columns = slabs * kBoxColumns;        // beyond those of the array are zeros
  static constexpr int steps = ceil_div(array_columns, 16);  // of products that sum over the columns
  static constexpr int slab_bytes = rows * 128;
  static constexpr int bytes = slabs * slab_bytes;
  static_assert(rows % 8 == 0 && rows <= 256, "the swizzle repeats after 8 rows; a box has at most 256");

  // Of the 16 columns of step `kk`, for an operand by_rows.
  static __host__ __device__ constexpr int step_offset(int kk) { return kk / 4 * slab_bytes + kk % 4 * 32; }

  // By one thread. `row` counts in the batch entry.
  static __device__ __forceinline__ void copy(u32 to, const TensorMap* map, u32 barrier, int row, int head, int batch) {
#pragma unroll
    for (int i = 0; i < slabs; ++i) copy_box(to + i * slab_bytes, map, barrier, i * kBoxColumns, row, head, batch);
  }

  // Rows from `first` on, by the threads of a warpgroup.
  static __device__ __forceinline__ void zero_rows(u32 tile, int first, int thread) {
    for (int line = first + thread / 8; line < rows; line += warpgroup / 8) {
#pragma unroll
      for (int slab = 0; slab < slabs; ++slab) {
        store_shared(tile + slab * slab_bytes + line * 128 + thread % 8 * 16, uint4{0, 0, 0, 0});
      }
    }
  }

  // 16 rows, from `row` on, as operands A in registers.
  template <int n>
  static __device__ __forceinline__ void read(u32 (&a)[n][4], u32 tile, int row, int lane) {
    static_assert(n == 4 * slabs, "all columns");
#pragma unroll
    for (int i = 0; i < slabs; ++i) {
      const LaneReader<Tile<rows, kBoxColumns>> from(tile + i * slab_bytes, row + (lane & 15), lane >> 4);
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) load_matrices(a[4 * i + kk], from.address(0, kk));
    }
  }
};

// Writes accumulators of 16 rows, times `factor`, to global memory, through 16 rows of a tile in shared memory that
// this warp alone uses: rows first_row and on of a head, as far as they are below `length`.
template <typename T, int columns, int n>
JAX_FLASH_DEVICE void store_rows(char* tile, int tile_row, const FragmentC (&c)[n], float factor, Result* head,
                                 i64 row_stride, int first_row, int length, int lane) {
  if constexpr (has_unscales) {
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      Result* to = head + (first_row + lane / 4) * row_stride + i * 8 + lane % 4 * 2;
      if (first_row + lane / 4 < length) {
        *reinterpret_cast<float2*>(to) = {c[i].x[0] * factor, c[i].x[1] * factor};
      }
      if (first_row + lane / 4 + 8 < length) {
        *reinterpret_cast<float2*>(to + 8 * row_stride) = {c[i].x[2] * factor, c[i].x[3] * factor};
      }
    }
  } else {
    const LaneReader<T> at(shared_address(tile), tile_row + (lane & 15), lane >> 4);
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[j] = pack(c[i + j / 2].x[j % 2 * 2] * factor, c[i + j / 2].x[j % 2 * 2 + 1] * factor);
      store_matrices(at.address(0, i / 2), x);
    }
    __syncwarp();
    constexpr int filled = columns / 8;
#pragma unroll
    for (int i = 0; i < ceil_div(16 * filled, 32); ++i) {
      const int piece = i * 32 + lane;
      const int row = piece / filled, chunk = piece % filled;
      if (row < 16 && first_row + row < length) {
        *reinterpret_cast<uint4*>(head + (first_row + row) * row_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(tile + T::offset(tile_row + row, chunk));
      }
    }
  }
}

}  // namespace jax_flash
