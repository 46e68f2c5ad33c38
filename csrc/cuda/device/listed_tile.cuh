// A tile of keys whose rows in K or V are listed (kv_rows of options.h).
#pragma once

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
};

}  // namespace jax_flash
