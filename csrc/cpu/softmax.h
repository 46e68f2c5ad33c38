// The online softmax of one panel of the forward tile, queries in the lanes, scores in units of log2.
#pragma once

#include "gemm.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

// Turns s[keys][kPanel] into exp2(s - max), and brings the running maximum and sum of the lanes up to date. `decay`
// is what earlier sums and outputs have to be multiplied by.
template <int NV, typename T>
void online_softmax(int keys, T* s, T* maximum, T* sum, T* decay) {
  constexpr int W = kWidth<T>;
  constexpr int N = kPanel<T>;
  Vec<T> highest[NV], total[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) highest[v] = load(maximum + v * W);
  for (int j = 0; j < keys; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) highest[v] = stdx::max(highest[v], load(s + j * N + v * W));
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    Vec<T> before = load(maximum + v * W);
    store(maximum + v * W, highest[v]);
    // A lane that has kept no key yet: -inf - -inf would be NaN, -inf - 0 gives the weight 0.
    stdx::where(highest[v] == -kInfinity<T>, highest[v]) = T(0);
    Vec<T> factor = exp2(before - highest[v]);
    store(decay + v * W, factor);
    total[v] = load(sum + v * W) * factor;
  }
  for (int j = 0; j < keys; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      T* p = s + j * N + v * W;
      Vec<T> weight = exp2(load(p) - highest[v]);
      store(p, weight);
      total[v] += weight;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store(sum + v * W, total[v]);
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
