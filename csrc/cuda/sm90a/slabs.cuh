// A tile in shared memory as TMA writes it and wgmma reads it: slabs of 64 columns, 128 bytes a row, with the swizzle
// of 128 bytes (chunk c of 16 bytes of row r lies at c ^ (r % 8)), one slab behind the other.
#pragma once

#include "cuda/device/shared_memory.cuh"
#include "cuda/device/tile.cuh"
#include "cuda/sm90a/mma.cuh"

namespace jax_flash {

template <int rows_, int array_columns>
struct Slabs {
  static constexpr int rows = rows_;
  static constexpr int slabs = ceil_div(array_columns, kBoxColumns);
  static constexpr int columns = slabs * kBoxColumns;        // beyond those of the array are zeros
  static constexpr int steps = ceil_div(array_columns, 16);  // of MMAs that sum over the columns
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

  // By a warp: `count` rows from `row` on, a multiple of 4, which lie anywhere in a head; zeros where their numbers are
  // negative. Eight lanes copy a row, 16 bytes each, and go on to the fourth behind it; of the numbers of their rows
  // each has every eighth, beginning at its own place. So a copy takes few instructions: with 17, the warps that load
  // were what all others waited for.
  template <int count, int n>
  static __device__ __forceinline__ void gather(u32 to, int row, const Element* head, int row_stride,
                                                const int (&numbers)[n], int lane) {
    static_assert(count % 4 == 0 && n == ceil_div(count, 32), "all rows");
    const int chunk = lane % 8, first = row + lane / 8;
    const u32 even = to + first * 128 + ((chunk ^ first % 8) << 4), odd = even ^ 64;
    const char* from = reinterpret_cast<const char*>(head + chunk * 8);
    const u32 stride = row_stride * sizeof(Element);
#pragma unroll
    for (int i = 0; i < count / 4; ++i) {
      const int number = __shfl_sync(0xffffffffu, numbers[i / 8], i % 8, 8);
      const char* row_of = from + static_cast<u64>(static_cast<u32>(number)) * stride;
#pragma unroll
      for (int slab = 0; slab < slabs; ++slab) {
        copy_async((i % 2 ? odd : even) + i * 512 + slab * slab_bytes, row_of + slab * 128,
                   number >= 0 && slab * kBoxColumns + chunk * 8 < array_columns);
      }
    }
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
  // And the way back.
  template <int n>
  static __device__ __forceinline__ void put(u32 tile, int row, const u32 (&a)[n][4], int lane) {
    static_assert(n == 4 * slabs, "all columns");
#pragma unroll
    for (int i = 0; i < slabs; ++i) {
      const LaneReader<Tile<rows, kBoxColumns>> to(tile + i * slab_bytes, row + (lane & 15), lane >> 4);
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) store_matrices(to.address(0, kk), a[4 * i + kk]);
    }
  }
  // And transposed: columns `column` to column + 15 of all rows, which are the rows of `a`.
  template <int n>
  static __device__ __forceinline__ void put_transposed(u32 tile, int column, const u32 (&a)[n][4], int lane) {
    static_assert(16 * n == rows, "all rows");
    const int row = lane / 16 * 8 + lane % 8, chunk = column % kBoxColumns / 8 + lane / 8 % 2;
    const u32 to = tile + column / kBoxColumns * slab_bytes + row * 128 + ((chunk ^ row % 8) << 4);
#pragma unroll
    for (int i = 0; i < n; ++i) store_transposed(to + i * 16 * 128, a[i]);
  }
};

// By one thread: loads the rows of a tile, of which a barrier is told.
template <typename S>
JAX_FLASH_DEVICE void load_slabs(char* to, const TensorMap* map, u64& full, int row, int head, int batch) {
  const u32 barrier = shared_address(&full);
  barrier_expect(barrier, S::bytes);
  S::copy(shared_address(to), map, barrier, row, head, batch);
}

}  // namespace jax_flash
