// A tile of elements in shared memory, in chunks of 16 bytes, laid out so that the eight rows that one phase of
// ldmatrix reads at the same chunk fall into different banks.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

template <int rows_, int columns_>
struct Tile {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int chunks = columns / chunk_elements;
  // Rows of whole 128-byte lines are swizzled: chunk c of row r lies at c ^ (r % 8). Others get an odd number of
  // chunks a row, which spreads eight rows over all banks by itself.
  static constexpr bool swizzled = chunks % 8 == 0;
  static constexpr int row_bytes = 16 * (swizzled ? chunks : chunks | 1);
  static constexpr int bytes = rows * row_bytes;
  static_assert(columns % 16 == 0 && rows % 8 == 0, "a tile is made of whole 8 x 16 pieces");

  static __device__ __forceinline__ u32 offset(int row, int chunk) {
    return row * row_bytes + 16 * (swizzled ? chunk ^ (row & 7) : chunk);
  }
};

// One lane's part in reading a tile by ldmatrix. The row that a lane addresses moves in steps of 8 or 16 only, so
// its swizzle never changes: from the address of its first chunk, the others are an exclusive or away within a line of
// 128 bytes, and an immediate offset beyond it and for other rows. Tiles start on such lines.
template <typename T>
struct LaneReader {
  u32 first;  // address of this lane's first chunk

  // `chunk`, below 8, is this lane's own part of the chunk number; its bits may not meet those of the pairs asked for.
  __device__ __forceinline__ LaneReader(u32 tile, int row, int chunk)
      : first(tile + row * T::row_bytes + 16 * (T::swizzled ? chunk ^ (row & 7) : chunk)) {}

  // `row` counts from the lane's first row, in steps of 8; `pair` counts pairs of chunks. Both are constants.
  __device__ __forceinline__ u32 address(int row, int pair) const {
    const u32 column = T::swizzled ? (first ^ (pair % 4 * 32)) + pair / 4 * 128 : first + pair * 32;
    return column + row * T::row_bytes;
  }
};

}  // namespace jax_flash
