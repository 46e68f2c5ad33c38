// Gradients of captured arrays by elements that many pairs read: a thread sums up its pairs of a head, of a key and of
// a row, and a warp's sums are added to the gradient in one go.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/device/pair_functions.cuh"

namespace jax_flash {

constexpr bool sums_captured = captured_of_heads > 0 || captured_of_keys > 0;  // from row to row

// Of a warp's 16 keys and one query head; of these keys a lane has lane / 4 and lane / 4 + 8.
template <bool present>
struct CapturedSums {
  float of_head[at_least(captured_of_heads, 1)];
  float of_keys[2][at_least(captured_of_keys, 1)];

  __device__ __forceinline__ float* sums_of_head() { return of_head; }
  __device__ __forceinline__ float* sums_of_key(int half) { return of_keys[half]; }
  __device__ __forceinline__ void clear_captured() {
#pragma unroll
    for (float& x : of_head) x = 0.f;
#pragma unroll
    for (auto& of_key : of_keys) {
#pragma unroll
      for (float& x : of_key) x = 0.f;
    }
  }
  __device__ __forceinline__ void flush_captured(const Problem& problem, const Extent& extent,
                                                 const PairFunctions<has_functions>& functions, int first_key,
                                                 int lane) {
    if constexpr (captured_of_heads > 0) {
#pragma unroll
      for (float& x : of_head) x = quad_sum(column_sum(x));
      if (lane == 0) functions.add_of_head(problem, of_head);
    }
    if constexpr (captured_of_keys > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (float& x : of_keys[half]) x = quad_sum(x);
        const int key = first_key + lane / 4 + 8 * half;
        if (lane % 4 == 0 && key < extent.kv.length) functions.add_of_key(problem, key, of_keys[half]);
      }
    }
  }
};
template <>
struct CapturedSums<false> {
  __device__ __forceinline__ float* sums_of_head() { return nullptr; }
  __device__ __forceinline__ float* sums_of_key(int) { return nullptr; }
  __device__ __forceinline__ void clear_captured() {}
  __device__ __forceinline__ void flush_captured(const Problem&, const Extent&, const PairFunctions<has_functions>&,
                                                 int, int) {}
};

// Of a row and the keys of a warp, which lanes hold that share a column.
template <bool present>
struct SumsOfRow {
  float sums[at_least(captured_of_rows, 1)] = {};

  __device__ __forceinline__ void flush(const Problem& problem, const Extent& extent,
                                        const PairFunctions<has_functions>& functions, int row, int lane) {
#pragma unroll
    for (float& x : sums) x = column_sum(x);
    if (lane < 4 && row < extent.q.length) functions.add_of_row(problem, row, sums);
  }
};
template <>
struct SumsOfRow<false> {
  float* const sums = nullptr;
  __device__ __forceinline__ void flush(const Problem&, const Extent&, const PairFunctions<has_functions>&, int, int) {}
};

// Of a single pair, without sums.
JAX_FLASH_DEVICE void add_directly(const Problem& problem, const PairFunctions<has_functions>& functions, float x,
                                   int row, int key, float ds) {
  CapturedSums<true> sums;
  SumsOfRow<true> of_row;
  sums.clear_captured();
  functions.add(problem, x, row, key, ds, sums.of_head, sums.of_keys[0], of_row.sums);
  functions.add_of_head(problem, sums.of_head);
  functions.add_of_key(problem, key, sums.of_keys[0]);
  functions.add_of_row(problem, row, of_row.sums);
}

}  // namespace jax_flash
