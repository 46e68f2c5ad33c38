// The online softmax of one panel of the forward tile, queries in the lanes.
#pragma once

#include <limits>

#include "gemm.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

// Of scores. Score functions take and make natural ones; exp2 makes weights of those of log2.
enum class Unit { natural, log2 };

// From natural units to those of log2. A finite number stays finite: the lowest float, which is often used as a mask,
// must not become -inf.
template <typename T>
JAX_FLASH_INLINE Vec<T> in_log2(const Vec<T>& x) {
  constexpr T kLargest = std::numeric_limits<T>::max();
  Vec<T> y = x * static_cast<T>(kLog2E);
  put_where(y > kLargest && x <= kLargest, y, kLargest);
  put_where(y < -kLargest && x >= -kLargest, y, -kLargest);
  return y;
}

template <typename T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

// Turns s[keys][kPanel] into weights, exp2(s - max) where they are in units of log2, and updates the running maximum
// and sum of the lanes. `decay` is the factor for earlier sums and outputs. The weights overwrite the scores as factors
// F of the next product: pairs are laid out as by pair_weights().
template <int NV, typename F, Unit unit, typename T>
void online_softmax(int keys, T* s, T* maximum, T* sum, T* decay) {
  constexpr int W = kWidth<T>;
  constexpr int N = kPanel<T>;
  auto power = [](const Vec<T>& x) __attribute__((always_inline)) {
    if constexpr (unit == Unit::log2) return exp2(x);
    return exp2(Vec<T>(x * static_cast<T>(kLog2E)));
  };
  Vec<T> highest[NV], total[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) highest[v] = load(maximum + v * W);
  for (int j = 0; j < keys; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) highest[v] = max(highest[v], load(s + j * N + v * W));
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    Vec<T> before = load(maximum + v * W);
    store(maximum + v * W, highest[v]);
    // A lane that has kept no key yet: -inf - -inf would be NaN, -inf - 0 gives the weight 0.
    clear_where(highest[v] == -kInfinity<T>, highest[v]);
    Vec<T> factor = power(before - highest[v]);
    store(decay + v * W, factor);
    total[v] = load(sum + v * W) * factor;
  }
  auto weigh = [&](int j, int v) __attribute__((always_inline)) {
    Vec<T> weight = power(load(s + j * N + v * W) - highest[v]);
    total[v] += weight;
    return weight;
  };
  if constexpr (kPaired<F>) {
    F* pairs = reinterpret_cast<F*>(s);
    int j = 0;
    for (; j + 1 < keys; j += 2) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        Vec<T> first = weigh(j, v);
        store(pairs + j / 2 * N + v * W, pair_up(first, weigh(j + 1, v)));
      }
    }
    if (j < keys) {
      for (int v = 0; v < NV; ++v) store(pairs + j / 2 * N + v * W, pair_up(weigh(j, v), Vec<T>(T(0))));
    }
  } else {
    for (int j = 0; j < keys; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) store(s + j * N + v * W, weigh(j, v));
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store(sum + v * W, total[v]);
}

// Turns weights[keys][kPanel] into pairs of keys [(keys + 1) / 2][kPanel] in place.
template <int NV, typename F, typename T>
void pair_weights(int keys, T* s) {
  if constexpr (kPaired<F>) {
    F* pairs = reinterpret_cast<F*>(s);
    for (int j = 0; j < keys; j += 2) {
      for (int v = 0; v < NV; ++v) {
        const T* first = s + j * kPanel<T> + v * kWidth<T>;
        Vec<T> second = j + 1 < keys ? load(first + kPanel<T>) : Vec<T>(T(0));
        store(pairs + j / 2 * kPanel<T> + v * kWidth<T>, pair_up(load(first), second));
      }
    }
  }
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
