// The register-blocked micro-kernel: C[kRows][NV * kWidth] += A * B, B and C in vectors, A one element at a time.
// Every product of attention has this form, so that no operand is transposed in the inner loops:
//   forward   S^T[key][query] = K Q^T      A = K, B = Q^T packed once per block of queries
//             O^T[h][query]  += V^T P^T    A = V, B = P^T, the tile that the softmax wrote
//   backward  S[query][key] = Q K^T, dP = dO V^T      B = K^T, V^T packed once per block of keys
//             dV[key][h] += P^T dO, dK[key][h] += dS^T Q, dQ[query][h] += dS K      B as it lies in memory
#pragma once

#include "simd.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

// The tile that registers hold: accumulators, one row of B and one element of A must fit. With 32 registers, 24
// accumulators need 3 + 8 loads for 24 multiply-adds; with 16, 12 need 3 + 4 for 12.
#if defined(JAX_FLASH_TILE_ROWS)  // another one, to measure it: tests/cpu/ladder.cc
constexpr int kRows = JAX_FLASH_TILE_ROWS;
constexpr int kVecs = JAX_FLASH_TILE_VECTORS;
#elif defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 8;
constexpr int kVecs = 3;
#elif defined(__FMA__)
constexpr int kRows = 4;
constexpr int kVecs = 3;
#else
// Without fused multiply-add the product needs a register too.
constexpr int kRows = 4;
constexpr int kVecs = 2;
#endif
// Rows of A are padded to this multiple in all our buffers, so that no kernel for remaining rows is needed.
constexpr int kRowPadding = 8;
static_assert(kRowPadding % kRows == 0);

template <typename T>
constexpr int kPanel = kVecs * kWidth<T>;  // lanes of a panel of B

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// How A lies: row i, depth k at a[i * stride + k], or at a[k * stride + i].
enum class Layout { row_major, column_major };

// A tile of registers of C.
template <int NV, typename F>
struct RegisterTile {
  using T = Sum<F>;
  Vec<T> c[kRows][NV];

  JAX_FLASH_INLINE RegisterTile() {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) c[i][v] = T(0);
    }
  }

  // One step of the sum: row i's element of A is a[i * stride].
  JAX_FLASH_INLINE void step(const F* a, ptrdiff_t stride, const F* b) {
    decltype(load(b)) row[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) row[v] = load(b + v * kWidth<T>);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      F factor = a[i * stride];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) c[i][v] = multiply_add(row[v], factor, c[i][v]);
    }
  }

  // finish(row, vector, sum) for each vector.
  template <typename Finish>
  JAX_FLASH_INLINE void end(Finish finish) const {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) finish(i, v, c[i][v]);
    }
  }
};

// `finish(row, vector, value)` takes the sum of A * B; `depth`, counted in factors, may be 0.
template <int NV, Layout layout, typename F, typename Finish>
JAX_FLASH_INLINE void micro_kernel(int depth, const F* a, ptrdiff_t a_stride, const F* b, ptrdiff_t b_stride,
                                   Finish finish) {
  RegisterTile<NV, F> tile;
  for (int k = 0; k < depth; ++k) {
    tile.step(a, layout == Layout::row_major ? a_stride : 1, b);
    a += layout == Layout::row_major ? 1 : a_stride;
    b += b_stride;
  }
  tile.end(finish);
}

// Sums over head_dim are cut into even parts of at most this depth (in factors), which are added up: at 128 the root
// mean square of the rounding errors is that of XLA's own product, which is one running sum, at 192 and 256 0.72 of it.
// Parts of 64 made 0.72 of it at 128 too, but 0.99 of the rate.
constexpr int kSumDepth = 128;

// The micro-kernel for sums over head_dim.
template <int NV, typename F, typename Finish>
JAX_FLASH_INLINE void dot_kernel(int depth, const F* a, ptrdiff_t a_stride, const F* b, ptrdiff_t b_stride,
                                 Finish finish) {
  using T = Sum<F>;
  if (depth <= kSumDepth) return micro_kernel<NV, Layout::row_major>(depth, a, a_stride, b, b_stride, finish);
  alignas(64) T sums[kRows * kPanel<T>];
  auto put = [&](int i, int v, const Vec<T>& sum)
                 __attribute__((always_inline)) { store<T>(sums + i * kPanel<T> + v * kWidth<T>, sum); };
  auto add = [&](int i, int v, const Vec<T>& sum) __attribute__((always_inline)) {
    T* p = sums + i * kPanel<T> + v * kWidth<T>;
    store<T>(p, load(p) + sum);
  };
  int parts = (depth + kSumDepth - 1) / kSumDepth, part = depth / parts;
  micro_kernel<NV, Layout::row_major>(part, a, a_stride, b, b_stride, put);
  while (--parts > 0) {
    a += part;
    b += part * b_stride;
    depth -= part;
    part = depth / parts;
    micro_kernel<NV, Layout::row_major>(part, a, a_stride, b, b_stride, add);
  }
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) finish(i, v, load(sums + i * kPanel<T> + v * kWidth<T>));
  }
}

// Calls body(std::integral_constant<int, n>) for n vectors, 1 <= n <= kVecs.
template <typename Body>
JAX_FLASH_INLINE void with_vectors(int n, Body body) {
  if (n == kVecs) return body(std::integral_constant<int, kVecs>{});
  if constexpr (kVecs > 2) {
    if (n == 2) return body(std::integral_constant<int, 2>{});
  }
  body(std::integral_constant<int, 1>{});
}

// Depths of a sum.
struct Depths {
  int begin, end;
};

template <typename T>
int register_tiles(int rows, int columns) {
  return (columns / kWidth<T> + kVecs - 1) / kVecs * (rows / kRows);
}

// C[rows][columns] += A * B for `rows` a multiple of kRows and `columns` one of kWidth, all row-major but A. For row i
// of C the sum goes over depths[i / kRowPadding] only: outside it A has zeros. before() is called before each tile of
// registers, register_tiles() times.
template <Layout layout, typename F, typename Before>
JAX_FLASH_INLINE void accumulate(int rows, int columns, const Depths* depths, const F* a, ptrdiff_t a_stride,
                                 const F* b, ptrdiff_t b_stride, Sum<F>* c, ptrdiff_t c_stride, Before before) {
  using T = Sum<F>;
  constexpr int W = kWidth<T>;
  int vectors = columns / W;
  int panels = (vectors + kVecs - 1) / kVecs;
  for (int panel = 0, first = 0; panel < panels; ++panel) {
    // Vectors are shared evenly, 4 as 2 + 2, because one vector alone is bound by the latency of its few accumulators.
    int n = (vectors - first + panels - panel - 1) / (panels - panel);
    with_vectors(n, [&](auto nv) __attribute__((always_inline)) {
      for (int i = 0; i < rows; i += kRows) {
        before();
        auto [begin, end] = depths[i / kRowPadding];
        if (begin >= end) continue;
        T* tile = c + i * c_stride + first * W;
        const F* left = a + (layout == Layout::row_major ? i * a_stride + begin : begin * a_stride + i);
        micro_kernel<nv.value, layout>(end - begin, left, a_stride, b + begin * b_stride + first * W, b_stride,
                                       [&](int row, int v, const Vec<T>& sum) __attribute__((always_inline)) {
                                         T* p = tile + row * c_stride + v * W;
                                         store<T>(p, load(p) + sum);
                                       });
      }
    });
    first += n;
  }
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
