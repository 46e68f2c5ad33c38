// What the pairs of a diagonal, those with one q - kv, have in common, by warps: a value that the score function takes
// of them, computed once for all, and sums of gradients. Both in shared memory of the warp's own.
#pragma once

#include "cuda/device/pair_functions.cuh"

namespace jax_flash {

// Shared memory that the blocks of a multiprocessor have together; from compute capability 8.0 on the system takes 1 KB
// of it for each.
#if __CUDA_ARCH__ == 700
constexpr int multiprocessor_shared = 96 * 1024;
#elif __CUDA_ARCH__ == 750
constexpr int multiprocessor_shared = 64 * 1024;
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
constexpr int multiprocessor_shared = 164 * 1024;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int multiprocessor_shared = 100 * 1024;
#else
constexpr int multiprocessor_shared = 228 * 1024;
#endif
// Whether blocks of so many bytes find as much company there as the tile row counts on.
template <int bytes>
constexpr bool fits_in_multiprocessor = min_blocks * (bytes + 1024) <= multiprocessor_shared;

// The diagonals of `rows` rows and `keys` keys, from the first row and the last key on.
template <int rows, int keys>
constexpr int diagonals_of = rows + keys - 1;

// What a score function takes of h and q - kv alone. (`present` is has_diagonal_value; absent it takes no place.)
template <int rows, int keys, bool present>
struct DiagonalValues {
  struct Storage {
    DiagonalValue values[diagonals_of<rows, keys>];
  };
  const DiagonalValue* of_lane;  // of its first row and key

  // `row` and `key` are the warp's first; the lane's first are so much beyond them.
  __device__ __forceinline__ DiagonalValues(Storage& storage, const Problem& problem,
                                            const PairFunctions<has_functions>& functions, int row, int key,
                                            int lane_row, int lane_key, int lane)
      : of_lane(storage.values + keys - 1 + lane_row - lane_key) {
    __syncwarp();  // all lanes are done with those of the tile before
#pragma unroll
    for (int first = 0; first < diagonals_of<rows, keys>; first += 32) {
      const int i = first + lane;
      if (i < diagonals_of<rows, keys>) {
        storage.values[i] = functions.of_diagonal(problem, row - key - (keys - 1) + i);
      }
    }
    __syncwarp();
  }

  // Of what lies so many rows further.
  __device__ __forceinline__ DiagonalValues beyond(int rows_before) const {
    DiagonalValues found = *this;
    found.of_lane += rows_before;
    return found;
  }
  // Tells a pair that lies so many rows and keys, constants, beyond the lane's first.
  __device__ __forceinline__ void tell(Pair& pair, int row, int key) const {
    pair.has_value = true;
    pair.value = of_lane[row - key];
  }
};
template <int rows, int keys>
struct DiagonalValues<rows, keys, false> {
  struct Storage {};

  __device__ __forceinline__ DiagonalValues() {}
  __device__ __forceinline__ DiagonalValues(Storage&, const Problem&, const PairFunctions<has_functions>&, int, int,
                                            int, int, int) {}
  __device__ __forceinline__ DiagonalValues beyond(int) const { return {}; }
  __device__ __forceinline__ void tell(Pair&, int, int) const {}
};

// Where SumsOfDiagonals leaves its sums: in the gradients, or the thread's sums of tables, at once.
struct DirectSums {
  __device__ __forceinline__ void add(const Problem& problem, const PairFunctions<has_functions>& functions,
                                      const SumsOfTables& of_tables, int row, int key, int, int,
                                      const float* sums) const {
    functions.add_of_diagonal(problem, row, key, sums, of_tables);
  }
  __device__ __forceinline__ void end(const Problem&, const PairFunctions<has_functions>&, const SumsOfTables&,
                                      int) const {}
};

// Or, of `rows` rows and 16 keys, in shared memory until the tile has ended: then a diagonal's are added there in
// one go, and what it takes to find its element is computed once.
template <int rows, bool present>
struct DiagonalSums {
  static constexpr int count = at_least(captured_of_diagonals, 1);
  // SumsOfDiagonals has a diagonal four times at most: in one of two rows side by side, and once at each end of 8 rows.
  struct Storage {
    float sums[2][2][count][diagonals_of<rows, 16>];

    // Which of the four a diagonal has is the same for all tiles; the others stay 0.
    __device__ __forceinline__ void clear(int lane) {
      for (int i = lane; i < 4 * count * diagonals_of<rows, 16>; i += 32) sums[0][0][0][i] = 0.f;
      __syncwarp();
    }
  };
  Storage& storage;
  int row, key;  // the warp's first

  __device__ __forceinline__ void add(const Problem&, const PairFunctions<has_functions>&, const SumsOfTables&,
                                      int at_row, int at_key, int odd, int end, const float* sums) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      storage.sums[odd][end][i][15 + (at_row - row) - (at_key - key)] = sums[i];
    }
  }
  __device__ __forceinline__ void end(const Problem& problem, const PairFunctions<has_functions>& functions,
                                      const SumsOfTables& of_tables, int lane) const {
    __syncwarp();
    for (int at = lane; at < diagonals_of<rows, 16>; at += 32) {
      float sums[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        sums[i] = storage.sums[0][0][i][at] + storage.sums[0][1][i][at] + storage.sums[1][0][i][at] +
                  storage.sums[1][1][i][at];
      }
      functions.add_of_diagonal(problem, row + at_least(at - 15, 0), key + at_least(15 - at, 0), sums, of_tables);
    }
    __syncwarp();  // before the next tile's
  }
};
template <int rows>
struct DiagonalSums<rows, false> : DirectSums {
  struct Storage {
    __device__ __forceinline__ void clear(int) {}
  };

  __device__ __forceinline__ DiagonalSums(Storage&, int, int) {}
};

// Both of a warp, whose keys lie in `key_tiles` tiles of 16.
template <typename Values, typename Sums, int key_tiles>
struct DiagonalStorageOf {
  typename Values::Storage values;
  typename Sums::Storage sums[key_tiles];

  __device__ __forceinline__ void clear(int lane) {
#pragma unroll
    for (auto& x : sums) x.clear(lane);
  }
};

}  // namespace jax_flash
