// What the study kernels have in common. They are there to be read: one thread computes one number at a time, of tiles
// in shared memory, without tensor cores. In front of a file stand the constants
//   dtype                      of query, key, value and out
//   head_dim, value_head_dim   at most 128
//   causal                     whether a row attends to the keys up to its own position only
// and blocks have `threads` threads in a one-dimensional grid. All sums are in float. A file states in `shared_bytes`
// how much dynamic shared memory its kernels want.
#pragma once

#include "cuda/device/arithmetic.cuh"
#include "problem.h"
#include "study.h"

namespace jax_flash {

constexpr int threads = kStudyThreads;
constexpr int largest_head_dim = head_dim > value_head_dim ? head_dim : value_head_dim;
constexpr int tile = largest_head_dim > 64 ? 16 : 32;  // rows, and keys, of which few fit in shared memory

// Element `at` of an array of the inputs' dtype.
static __device__ float load(const void* array, long long at) {
  if constexpr (dtype == DType::f32) return static_cast<const float*>(array)[at];
  const unsigned short bits = static_cast<const unsigned short*>(array)[at];
  return dtype == DType::f16 ? half_to_float(bits) : __uint_as_float(static_cast<unsigned>(bits) << 16);
}
static __device__ void store(void* array, long long at, float x) {
  if constexpr (dtype == DType::f32) {
    static_cast<float*>(array)[at] = x;
  } else if constexpr (dtype == DType::f16) {
    static_cast<unsigned short*>(array)[at] = float_to_half(x);
  } else {  // bfloat16: rounded to nearest, ties to even
    const unsigned bits = __float_as_uint(x);
    static_cast<unsigned short*>(array)[at] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
}

// One query head, its key head, and where their rows are in arrays [batch, length, heads, columns].
struct Head {
  const Study& p;
  int batch, head;

  __device__ Head(const Study& p, int index) : p(p), batch(index / p.heads), head(index % p.heads) {}
  __device__ int kv_head() const { return head / (p.heads / p.kv_heads); }
  __device__ long long of_query(int row, int columns) const {
    return ((static_cast<long long>(batch) * p.rows + row) * p.heads + head) * columns;
  }
  __device__ long long of_key(int key, int columns) const {
    return ((static_cast<long long>(batch) * p.keys + key) * p.kv_heads + kv_head()) * columns;
  }
  // Gradients of keys are of query heads: those of a group are added up by JAX.
  __device__ long long of_key_gradient(int key, int columns) const {
    return ((static_cast<long long>(batch) * p.keys + key) * p.heads + head) * columns;
  }
  // In arrays [batch, heads, rows].
  __device__ long long of_row(int row) const { return (static_cast<long long>(batch) * p.heads + head) * p.rows + row; }
  __device__ bool keeps(int row, int key) const { return row < p.rows && key < p.keys && (!causal || key <= row); }
};

// A tile in shared memory. A column more than it has: then the rows of a column lie in different banks.
template <int columns>
struct Tile {
  float x[tile][columns + 1];

  // Rows [first, first + tile), of which those from `length` on are zeros; row r begins at element at(r).
  template <typename At>
  __device__ void read(const void* array, int first, int length, const At& at) {
    for (int i = threadIdx.x; i < tile * columns; i += threads) {
      const int row = first + i / columns;
      x[i / columns][i % columns] = row < length ? load(array, at(row) + i % columns) : 0.f;
    }
  }
};

// Row i of a times row j of b.
template <int columns>
static __device__ float dot(const Tile<columns>& a, int i, const Tile<columns>& b, int j) {
  float sum = 0.f;
  for (int d = 0; d < columns; ++d) sum += a.x[i][d] * b.x[j][d];
  return sum;
}

// Calls `body` with i and j of every number of a tile [tile, columns], one for every thread.
template <int columns, typename Body>
static __device__ void for_tile(const Body& body) {
  for (int x = threadIdx.x; x < tile * columns; x += threads) body(x / columns, x % columns);
}

static __device__ float natural_exp(float x) { return exp2_approx(x * 1.44269504f); }
static __device__ int tiles(int length) { return (length + tile - 1) / tile; }
constexpr float lowest = -3.4e38f;  // where a maximum begins: not -inf, whose difference with itself is NaN

}  // namespace jax_flash
