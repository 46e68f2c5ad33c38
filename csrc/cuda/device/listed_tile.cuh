// A tile of keys whose rows in K or V are listed (kv_rows of options.h), by cp.async.
#pragma once

#include "cuda/device/shared_memory.cuh"
#include "cuda/device/thread_rows.cuh"

namespace jax_flash {

template <typename T, int threads>
struct ListedTile {
  using Rows = ThreadRows<T, threads>;

  int numbers[Rows::passes];  // of the thread's rows; negative: none

  // Of the keys from `first` on, which need not be waited for before the tile is copied. Keys from `length` on are
  // none.
  __device__ __forceinline__ void read(const int* list, int first, int length, int thread) {
#pragma unroll
    for (int i = 0; i < Rows::passes; ++i) {
      const int row = Rows::row_of(thread) + i * Rows::pass_rows;
      numbers[i] = Rows::in_tile(row) && first + row < length ? list[first + row] : -1;
    }
  }

  // Starts the copy of these rows of a head, of so many columns; zeros where there are none.
  template <int columns>
  __device__ __forceinline__ void copy(u32 tile, const Element* head, i64 row_stride, int thread) const {
    const int chunk = Rows::chunk_of(thread);
#pragma unroll
    for (int i = 0; i < Rows::passes; ++i) {
      const int row = Rows::row_of(thread) + i * Rows::pass_rows;
      if (!Rows::in_tile(row)) break;
      const Element* from = head + at_least(numbers[i], 0) * row_stride;
#pragma unroll
      for (int j = 0; j < Rows::row_chunks; ++j) {
        const int of_row = chunk + j * Rows::row_threads;
        const bool valid = numbers[i] >= 0 && of_row * chunk_elements < columns;
        copy_async(tile + T::offset(row, of_row), from + (valid ? of_row * chunk_elements : 0), valid);
      }
    }
  }
};

}  // namespace jax_flash
