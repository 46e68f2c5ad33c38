// Positions of rows and keys, as functions take them.
#pragma once

namespace jax_flash {

// A row's or a key's number, or the difference of two: what a lane has of a tile is one number and constants beyond it.
// Kept apart, elements of arrays lie at constant distances from one address, and comparisons are with constants, where
// the compiler does not know that sums do not overflow.
struct Position {
  int first, more;

  __device__ __forceinline__ Position(int first, int more = 0) : first(first), more(more) {}
  __device__ __forceinline__ operator int() const { return first + more; }
};

}  // namespace jax_flash
