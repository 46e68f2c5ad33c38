// What a score function takes of h and q - kv alone, computed once for each diagonal of a tile rather than for each pair.
#pragma once

#include "cuda/device/pair_functions.cuh"

namespace jax_flash {

// Of the 16 rows of a warp and a tile of `keys` keys, in shared memory of the warp's own. A lane has two rows, 8 apart,
// and of every 8 keys two, side by side.
template <int keys, bool present>
struct DiagonalValues {
  static constexpr int count = 16 + keys - 1;
  struct Storage {
    DiagonalValue of_diagonals[count];  // from the first row and the last key on
  };
  const DiagonalValue* of_lane;  // of its first row and key

  // `row` and `key` are the warp's first.
  __device__ __forceinline__ DiagonalValues(Storage& storage, const Problem& problem,
                                            const PairFunctions<has_functions>& functions, int row, int key, int lane) {
    __syncwarp();  // all lanes are done with those of the tile before
#pragma unroll
    for (int first = 0; first < count; first += 32) {
      const int i = first + lane;
      if (i < count) storage.of_diagonals[i] = functions.of_diagonal(problem, row - key - (keys - 1) + i);
    }
    __syncwarp();
    of_lane = storage.of_diagonals + keys - 1 + lane / 4 - lane % 4 * 2;
  }

  // Tells a pair that lies so many rows and keys, constants, beyond the lane's first.
  __device__ __forceinline__ void tell(Pair& pair, int row, int key) const {
    pair.has_value = true;
    pair.value = of_lane[row - key];
  }
};
template <int keys>
struct DiagonalValues<keys, false> {
  struct Storage {};

  __device__ __forceinline__ DiagonalValues() {}
  __device__ __forceinline__ DiagonalValues(Storage&, const Problem&, const PairFunctions<has_functions>&, int, int,
                                            int) {}
  __device__ __forceinline__ void tell(Pair&, int, int) const {}
};

}  // namespace jax_flash
