// Few queries against many keys, as in decoding: head_dim stands in the lanes and K and V are read once, as they lie in
// memory. With queries in the lanes most lanes would be idle, and a copy of K and V would serve few products.
#pragma once

#include "softmax.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

// One row of head_dim 64 takes 0.42 of the time of queries in the lanes, 4 rows of head_dim 128 0.6, 8 rows 1.07.
constexpr int kFewRows = 4;

// Adds `keys` keys to the running softmax and output of R rows. The rows of K and V have `columns`, a multiple of
// kWidth, elements; a row of q and out has `stride`; scores[R][score_stride] is scratch. Row r keeps kept[r] keys.
template <int R, typename E>
void attend_few(int keys, int columns, const E* k, ptrdiff_t k_stride, const E* v, ptrdiff_t v_stride,
                const Compute<E>* q, Compute<E>* out, ptrdiff_t stride, Compute<E> scale, const int* kept,
                Compute<E>* scores, ptrdiff_t score_stride, Compute<E>* maximum, Compute<E>* sum) {
  using T = Compute<E>;
  constexpr int W = kWidth<T>;
  for (int j = 0; j < keys; ++j) {
    const E* row = k + j * k_stride;
    Vec<T> products[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) products[r] = T(0);
    for (int h = 0; h < columns; h += W) {
      Vec<T> key = load_as(row + h);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) products[r] = key * load(q + r * stride + h) + products[r];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) scores[r * score_stride + j] = stdx::reduce(products[r]) * scale;
  }

  T decay[R];
  for (int r = 0; r < R; ++r) {
    T* s = scores + r * score_stride;
    for (int j = kept[r]; j < round_up(keys, W); ++j) s[j] = -kInfinity<T>;
    Vec<T> highest = maximum[r];
    for (int j = 0; j < keys; j += W) highest = stdx::max(highest, load(s + j));
    T before = maximum[r];
    T after = maximum[r] = stdx::hmax(highest);
    T shift = after == -kInfinity<T> ? 0 : after;  // as in online_softmax
    decay[r] = exp2(Vec<T>(before - shift))[0];
    Vec<T> total = T(0);
    for (int j = 0; j < keys; j += W) {
      Vec<T> weight = exp2(load(s + j) - shift);
      store(s + j, weight);
      total += weight;
    }
    sum[r] = sum[r] * decay[r] + stdx::reduce(total);
  }

  // Several vectors of a row of V at once: whole cache lines, and enough independent sums when R = 1.
  constexpr int kTogether = R == 1 ? 4 : 2;
  auto add = [&](int h, auto vectors) __attribute__((always_inline)) {
    constexpr int NV = vectors.value;
    Vec<T> sums[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sums[r][i] = load(out + r * stride + h + i * W) * decay[r];
    }
    for (int j = 0; j < keys; ++j) {
      Vec<T> value[NV];
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) value[i] = load_as(v + j * v_stride + h + i * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Vec<T> weight = scores[r * score_stride + j];
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) sums[r][i] = weight * value[i] + sums[r][i];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) store(out + r * stride + h + i * W, sums[r][i]);
    }
  };
  int h = 0;
  for (; h + kTogether * W <= columns; h += kTogether * W) add(h, std::integral_constant<int, kTogether>{});
  for (; h < columns; h += W) add(h, std::integral_constant<int, 1>{});
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
