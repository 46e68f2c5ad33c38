// Gradients of captured arrays by elements that many pairs read: a thread sums up its pairs of a head, of a key, of a
// row and of an element of a small table, and a warp's sums are added to the gradient in one go.
#pragma once

#include "cuda/device/diagonals.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/device/pair_functions.cuh"

namespace jax_flash {

// From row to row.
constexpr bool sums_captured = captured_of_heads > 0 || captured_of_keys > 0 || captured_of_tables > 0;

struct LocalTables {
  float sums[at_least(captured_of_tables, 1)];

  __device__ __forceinline__ SumsOfTables tables() { return {sums, 1}; }
};
template <int threads, bool present>
struct SharedTables {
  float sums[at_least(captured_of_tables, 1)][threads];

  __device__ __forceinline__ SumsOfTables tables(LocalTables&, int thread) { return {sums[0] + thread, threads}; }
};
template <int threads>
struct SharedTables<threads, false> {
  __device__ __forceinline__ SumsOfTables tables(LocalTables& local, int) { return local.tables(); }
};

// Of a warp's 16 keys and one query head; of these keys a lane has lane / 4 and lane / 4 + 8.
template <bool present>
struct CapturedSums {
  float of_head[at_least(captured_of_heads, 1)];
  float of_keys[2][at_least(captured_of_keys, 1)];
  SumsOfTables of_tables;

  __device__ __forceinline__ float* sums_of_head() { return of_head; }
  __device__ __forceinline__ float* sums_of_key(int half) { return of_keys[half]; }
  __device__ __forceinline__ const SumsOfTables& sums_of_tables() const { return of_tables; }
  __device__ __forceinline__ void enter_captured(const SumsOfTables& tables) {
    of_tables = tables;
    of_tables.clear();
  }
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
    if constexpr (captured_of_tables > 0) {
#pragma unroll 1
      for (int i = 0; i < captured_of_tables; ++i) {
        const float sum = quad_sum(column_sum(of_tables[i]));
        of_tables[i] = 0.f;
        if (lane == 0 && sum != 0.f) functions.add_of_table(problem, i, sum);
      }
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
  __device__ __forceinline__ SumsOfTables sums_of_tables() const { return {}; }
  __device__ __forceinline__ void enter_captured(const SumsOfTables&) {}
  __device__ __forceinline__ void clear_captured() {}
  __device__ __forceinline__ void flush_captured(const Problem&, const Extent&, const PairFunctions<has_functions>&,
                                                 int, int) {}
};

// Of a row and the keys of a warp, which lanes hold that share a column.
template <bool present>
struct SumsOfRow {
  float sums[at_least(captured_of_rows, 1)] = {};

  __device__ __forceinline__ void flush(const Problem& problem, const Extent& extent,
                                        const PairFunctions<has_functions>& functions, const SumsOfTables& of_tables,
                                        int row, int lane) {
#pragma unroll
    for (float& x : sums) x = column_sum(x);
    if (lane < 4 && row < extent.q.length) functions.add_of_row(problem, row, sums, of_tables);
  }
};
template <>
struct SumsOfRow<false> {
  float* const sums = nullptr;
  __device__ __forceinline__ void flush(const Problem&, const Extent&, const PairFunctions<has_functions>&,
                                        const SumsOfTables&, int, int) {}
};

// Of a warp's 16 keys, a head and the tile of rows, 8 rows after the other: of the pairs with one row - key. A lane has
// two keys, 8 apart, and two rows of every 8, side by side: a sum for each row, of its pairs with the first key here
// and with the second one 8 rows on; and a diagonal crosses up to four lanes.
template <bool present>
struct SumsOfDiagonals {
  float sums[2][2][at_least(captured_of_diagonals, 1)] = {};  // by key and row; of the first key and the next 8 rows

  __device__ __forceinline__ float* of(int half, int odd) { return sums[half][odd]; }
  // Behind 8 rows, of which the lane has `row` and the next: adds the sums that are complete. `key` is the second.
  template <typename Sums>
  __device__ __forceinline__ void flush(const Problem& problem, const PairFunctions<has_functions>& functions,
                                        const Sums& to, const SumsOfTables& of_tables, int row, int key, int lane) {
    add(sums[1], problem, functions, to, of_tables, row, key, lane);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int i = 0; i < captured_of_diagonals; ++i) {
        sums[1][odd][i] = sums[0][odd][i];
        sums[0][odd][i] = 0.f;
      }
    }
  }
  // Behind the last rows: those of the first key, 8 before the second.
  template <typename Sums>
  __device__ __forceinline__ void end(const Problem& problem, const PairFunctions<has_functions>& functions,
                                      const Sums& to, const SumsOfTables& of_tables, int row, int key, int lane) {
    add(sums[1], problem, functions, to, of_tables, row, key - 8, lane);
    to.end(problem, functions, of_tables, lane);
  }

 private:
  template <typename Sums>
  static __device__ __forceinline__ void add(float (&some)[2][at_least(captured_of_diagonals, 1)],
                                             const Problem& problem, const PairFunctions<has_functions>& functions,
                                             const Sums& to, const SumsOfTables& of_tables, int row, int key,
                                             int lane) {
    const int column = lane % 4, line = lane / 4;  // the diagonal goes on at the next column, two lines below
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (float& x : some[odd]) {
        const float next = Lanes::from_further(x, lane, 9);
        if (column < 3 && line < 6) x += next;
        const float two = Lanes::from_further(x, lane, 18);
        if (column < 2 && line < 4) x += two;
      }
      if (column == 0 || line < 2) {
        to.add(problem, functions, of_tables, row + odd, key, odd, 2 * column + odd >= line, some[odd]);
      }
    }
  }
};
template <>
struct SumsOfDiagonals<false> {
  __device__ __forceinline__ float* of(int, int) { return nullptr; }
  template <typename Sums>
  __device__ __forceinline__ void flush(const Problem&, const PairFunctions<has_functions>&, const Sums&,
                                        const SumsOfTables&, int, int, int) {}
  template <typename Sums>
  __device__ __forceinline__ void end(const Problem&, const PairFunctions<has_functions>&, const Sums&,
                                      const SumsOfTables&, int, int, int) {}
};

// Of a single pair, without sums.
JAX_FLASH_DEVICE void add_directly(const Problem& problem, const PairFunctions<has_functions>& functions, float x,
                                   int row, int key, float ds) {
  CapturedSums<true> sums;
  LocalTables local;
  SumsOfRow<true> of_row;
  float of_diagonal[at_least(captured_of_diagonals, 1)] = {};
  sums.enter_captured(local.tables());
  sums.clear_captured();
  functions.add(problem, x, {row, key}, ds, sums.of_head, sums.of_keys[0], of_row.sums, of_diagonal, local.tables());
  functions.add_of_head(problem, sums.of_head);
  functions.add_of_key(problem, key, sums.of_keys[0]);
  functions.add_of_row(problem, row, of_row.sums, local.tables());
  functions.add_of_diagonal(problem, row, key, of_diagonal, local.tables());
  for (int i = 0; i < captured_of_tables; ++i) {
    if (local.sums[i] != 0.f) functions.add_of_table(problem, i, local.sums[i]);
  }
}

}  // namespace jax_flash
