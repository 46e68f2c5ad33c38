// Few queries against many keys, as in decoding: head_dim stands in the lanes and K and V are read once, as they lie in
// memory. With queries in the lanes most lanes would be idle, and a copy of K and V would serve few products.
#pragma once

#include "softmax.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

// One row of head_dim 64 takes 0.42 of the time of queries in the lanes, 4 rows of head_dim 128 0.6, 8 rows 1.07.
constexpr int kFewRows = 4;

// Rows of head_dim elements, in the caller's array or in ours. `columns` is a multiple of kWidth.
template <typename E>
struct Rows {
  E* data;
  ptrdiff_t stride;
  int columns;
};

// Adds `keys` keys to the running softmax and output of R rows; scores[R][score_stride] is scratch. `finish(row,
// scores)` gives the scores of a row their last form, -inf up to the next multiple of kWidth included, and
// `drop(row, weights)` clears weights that have been counted in the sum but are not used.
template <int R, typename E, typename Finish, typename Drop>
void attend_few(int keys, Rows<const E> k, Rows<const E> v, Rows<Compute<E>> q, Rows<Compute<E>> out, Compute<E> scale,
                Compute<E>* scores, ptrdiff_t score_stride, Compute<E>* maximum, Compute<E>* sum, Finish finish,
                Drop drop) {
  using T = Compute<E>;
  constexpr int W = kWidth<T>;
  for (int j = 0; j < keys; ++j) {
    const E* row = k.data + j * k.stride;
    Vec<T> products[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) products[r] = T(0);
    for (int h = 0; h < k.columns; h += W) {
      Vec<T> key = load_as(row + h);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) products[r] = key * load(q.data + r * q.stride + h) + products[r];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) scores[r * score_stride + j] = stdx::reduce(products[r]) * scale;
  }

  T decay[R];
  for (int r = 0; r < R; ++r) {
    T* s = scores + r * score_stride;
    finish(r, s);
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
    drop(r, s);
  }

  // Several vectors of a row of V at once: whole cache lines, and enough independent sums when R = 1.
  constexpr int kTogether = R == 1 ? 4 : 2;
  auto add = [&](int h, auto vectors) __attribute__((always_inline)) {
    constexpr int NV = vectors.value;
    Vec<T> sums[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sums[r][i] = load(out.data + r * out.stride + h + i * W) * decay[r];
    }
    for (int j = 0; j < keys; ++j) {
      Vec<T> value[NV];
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) value[i] = load_as(v.data + j * v.stride + h + i * W);
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
      for (int i = 0; i < NV; ++i) store(out.data + r * out.stride + h + i * W, sums[r][i]);
    }
  };
  int h = 0;
  for (; h + kTogether * W <= v.columns; h += kTogether * W) add(h, std::integral_constant<int, kTogether>{});
  for (; h < v.columns; h += W) add(h, std::integral_constant<int, 1>{});
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
