// Tiles of keys whose rows in K and V are listed (kv_rows of options.h), so that keys which a mask hides from all rows
// of query are in no tile: by TMA where the rows of a tile are neighbours, else row by row.
#pragma once

#include "cuda/device/extent.cuh"
#include "cuda/sm90a/slabs.cuh"

namespace jax_flash {

// Whether the keys of a tile past the end stand in the same array as those before it, and may hold anything there.
constexpr bool ragged_keys = (has_kv_lengths && !loads_by_list) || packed;

// Warps that load a tile of keys, and their arrivals at its barrier.
constexpr int key_loaders = loads_by_list ? 4 : 1;
constexpr int arrivals_of_keys = loads_by_list ? 32 * key_loaders : 1;

// Of one of these: which rows a tile of `size` keys has, from first_key on, which is kept.
template <int size>
struct ListedRows {
  static constexpr int own = size / key_loaders;  // rows of a warp
  using Numbers = int[ceil_div(own, 32)];         // of rows that a warp loads, see gather(); negative: none

  int first;  // the row of the first key where those of all others follow it; else negative
  Numbers numbers;

  // What is read of the list, so that it is asked for before it is wanted.
  struct Read {
    int first, last;
    Numbers numbers;

    __device__ __forceinline__ Read(const Problem& problem, const Extent& extent, int first_key, int warp, int lane) {
      const int* list = listed_rows(problem, extent.batch) + first_key;
      const int kept = extent.kv.length - first_key;
      first = list[0];
      last = kept >= size ? list[size - 1] : -1;
#pragma unroll
      for (int i = 0; i < ceil_div(own, 32); ++i) {
        const int key = warp * own + 32 * i + lane % 8 * 4 + lane / 8;
        numbers[i] = key < kept ? list[key] : -1;
      }
    }
  };

  __device__ __forceinline__ ListedRows(const Read& read)
      : first(read.last - read.first == size - 1 ? read.first : -1) {
#pragma unroll
    for (int i = 0; i < ceil_div(own, 32); ++i) numbers[i] = read.numbers[i];
  }

  // Loads the tile of an array of keys into S, zeros for those that are not kept; of which a barrier is told.
  template <typename S>
  __device__ __forceinline__ void load(char* to, const Tensor& array, const TensorMap* map, u64& full, int batch,
                                       int head, int warp, int lane) const {
    const u32 barrier = shared_address(&full);
    if (first < 0) {
      S::template gather<own>(shared_address(to), warp * own, head_of(array, batch, head, 0),
                              static_cast<int>(array.row_stride), numbers, lane);
      barrier_arrive_behind_copies(barrier);
    } else if (lane == 0 && warp == 0) {
      load_slabs<S>(to, map, full, first, head, batch);
      barrier_arrive(barrier, 31);
    } else if (lane == 0) {
      barrier_arrive(barrier, 32);
    }
    __syncwarp();
  }
};

// Waits, of those that compute with them, for keys.
JAX_FLASH_DEVICE void wait_for_keys(const u64& full, u32 parity) {
  barrier_wait(shared_address(&full), parity);
  if constexpr (loads_by_list) stores_ready();
}

}  // namespace jax_flash
