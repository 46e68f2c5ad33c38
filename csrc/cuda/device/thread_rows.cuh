// Which rows and chunks of a tile a thread loads.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// Up to eight neighbouring threads share a row, chunk by chunk, and have its other chunks at constant distances: what
// they read at once are whole lines of 128 bytes, or the largest part that divides a row. All threads together pass
// over the rows, so that one pointer moves on, and the addresses in shared memory are the same for every tile.
template <typename T, int threads>
struct ThreadRows {
  static __host__ __device__ constexpr int threads_of_row() {
    int n = 1;
    while (T::chunks % (2 * n) == 0 && (n < 8 || threads / n > T::rows)) n *= 2;
    return n;
  }
  static constexpr int row_threads = threads_of_row();
  static constexpr int row_chunks = T::chunks / row_threads;  // of one thread
  static constexpr int pass_rows = threads / row_threads;
  static constexpr int passes = ceil_div(T::rows, pass_rows);
  // The eight threads that store at once have one row, or parts of a few. These miss each other's banks where they are
  // `row_threads` apart, or neighbours that end in the middle of a line.
  static constexpr bool apart = row_threads < 8 && T::row_bytes % 128 != 64;

  // A thread's row in the first pass, and its first chunk.
  static __device__ __forceinline__ int row_of(int thread) {
    const int i = thread / row_threads;
    return apart ? i / 8 * 8 + i % (8 / row_threads) * row_threads + i % 8 / (8 / row_threads) : i;
  }
  static __device__ __forceinline__ int chunk_of(int thread) { return thread % row_threads; }
  static __device__ __forceinline__ bool in_tile(int row) { return T::rows % pass_rows == 0 || row < T::rows; }
};

}  // namespace jax_flash
