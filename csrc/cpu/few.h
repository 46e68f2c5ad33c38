// Few queries against many keys, as in decoding: head_dim stands in the lanes and K and V are read once, as they lie in
// memory. With queries in the lanes most lanes would be idle, and a copy of K and V would serve few products.
#pragma once

#include "isa.h"
#include "pack.h"
#include "softmax.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

// Rows in the caller's array or in ours. `columns` counts elements of K and V, factors of queries, up to a multiple of
// the lanes.
template <typename E>
struct Rows {
  E* data;
  ptrdiff_t stride;
  int columns;
};

// A vector of factors: kWidth * kElements elements.
template <typename E>
JAX_FLASH_INLINE auto load_factors(const E* p) {
  if constexpr (kPaired<Factor<E>>) {
    return load(reinterpret_cast<const Factor<E>*>(p));
  } else {
    return load_as(p);
  }
}
#if defined(__AVX512BF16__)
JAX_FLASH_INLINE U32 load_factors(const Pair* p) { return load(p); }
#endif

// Two vectors of elements, the even ones and the odd ones.
JAX_FLASH_INLINE void load_apart(const BFloat16* p, Vec<float>& even, Vec<float>& odd) {
  U32 x;
  std::memcpy(&x, p, sizeof(x));
  even = bits_as<Vec<float>>(x << 16);
  odd = bits_as<Vec<float>>(x & 0xffff0000);
}

// Lane i of the result is the sum of x[i]. A recursion of templates, because arrays in a loop of halves go to memory.
template <typename T, int half = kWidth<T> / 2>
JAX_FLASH_INLINE Vec<T> sums(Vec<T> (&x)[kWidth<T>]) {
#pragma GCC unroll 16
  for (int i = 0; i < half; ++i) {
    x[i] = interleave<T, false>(x[i], x[i + half]) + interleave<T, true>(x[i], x[i + half]);
  }
  if constexpr (half > 1) return sums<T, half / 2>(x);
  return x[0];
}

// Where memory lies that will be read next, as many bytes as are read now; null for none. Heads far apart in a row of
// the array are beyond what processors foresee where a head's row has few cache lines: in bfloat16 decoding is 1.1 to
// 1.3 times as fast so (8 and 16 heads, S 1024 to 8192). In float32 it is 0.91 to 1.0 times as fast on two threads and
// 1.02 to 1.04 on one, so it goes without.
template <typename E>
constexpr bool kAsksAhead = sizeof(E) == 2;
struct Next {
  const char *k, *v;

  static JAX_FLASH_INLINE void ask(const char* p, int64_t bytes) {
    // Into the first-level cache: into the second alone is 0.8 to 0.95 times as fast.
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + line);
  }
};

// Adds `keys` keys to the running softmax and output of R rows; scores[R][score_stride] is scratch. `finish(row,
// scores)` gives the scores of a row their last form, -inf up to the next multiple of kWidth included, and
// `drop(row, weights)` clears weights that have been counted in the sum but are not used.
template <int R, typename K, typename V, typename F, typename T, typename Finish, typename Drop>
void attend_few(int keys, Rows<const K> k, Rows<const V> v, Rows<const F> q, Rows<T> out, T scale, T* scores,
                ptrdiff_t score_stride, T* maximum, T* sum, Next next, Finish finish, Drop drop) {
  constexpr int W = kWidth<T>;
  constexpr int kStep = sizeof(K) == sizeof(F) ? W : W * kElements<F>;
  int j = 0;
  // A vector of keys at a time: its sums across lanes cost two shuffles each, a lone one four.
  for (; j + W <= keys; j += W) {
    const K* rows = k.data + j * k.stride;
    for (int r = 0; r < R; ++r) {
      Vec<T> products[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) products[i] = T(0);
      for (int h = 0; h < k.columns; h += kStep) {
        if (r == 0 && next.k) next.ask(next.k + (j * k.columns + h * W) * sizeof(K), W * kStep * sizeof(K));
        auto query = load(q.data + r * q.stride + h / kStep * W);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
          products[i] = multiply_add(load_factors(rows + i * k.stride + h), query, products[i]);
        }
      }
      store<T>(scores + r * score_stride + j, sums<T>(products) * scale);
    }
  }
  for (; j < keys; ++j) {
    const K* row = k.data + j * k.stride;
    for (int r = 0; r < R; ++r) {
      Vec<T> products = T(0);
      for (int h = 0; h < k.columns; h += kStep) {
        products = multiply_add(load_factors(row + h), load(q.data + r * q.stride + h / kStep * W), products);
      }
      scores[r * score_stride + j] = stdx::reduce(products) * scale;
    }
  }

  T decay[R];
  for (int r = 0; r < R; ++r) {
    T* s = scores + r * score_stride;
    finish(r, s);
    Vec<T> highest = maximum[r];
    for (j = 0; j < keys; j += W) highest = stdx::max(highest, load(s + j));
    T before = maximum[r];
    T after = maximum[r] = stdx::hmax(highest);
    T shift = after == -kInfinity<T> ? 0 : after;  // as in online_softmax
    decay[r] = exp2(Vec<T>(before - shift))[0];
    Vec<T> total = T(0);
    for (j = 0; j < keys; j += W) {
      Vec<T> weight = exp2(load(s + j) - shift);
      store(s + j, weight);
      total += weight;
    }
    sum[r] = sum[r] * decay[r] + stdx::reduce(total);
    drop(r, s);
  }

  // Several vectors of a row of V at once: whole cache lines, and enough independent sums when R = 1. Of bfloat16 the
  // sums of even and of odd columns stand apart, for so two instructions widen two vectors.
  constexpr int kTogether = R * 4 <= kRows * kVecs ? 4 : R * 2 <= kRows * kVecs ? 2 : 1;
  auto add = [&](int h, auto vectors) __attribute__((always_inline)) {
    constexpr int NV = vectors.value;
    constexpr bool kApart = std::is_same_v<V, BFloat16> && NV > 1;
    Vec<T> sums[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sums[r][i] = load(out.data + r * out.stride + h + i * W) * decay[r];
      if constexpr (kApart) {
#pragma GCC unroll 8
        for (int i = 0; i < NV; i += 2) {
          Vec<T> even = every_second<T, false>(sums[r][i], sums[r][i + 1]);
          sums[r][i + 1] = every_second<T, true>(sums[r][i], sums[r][i + 1]);
          sums[r][i] = even;
        }
      }
    }
    for (j = 0; j < keys; ++j) {
      if (next.v) next.ask(next.v + (j * v.columns + h) * sizeof(V), NV * W * sizeof(V));
      Vec<T> value[NV];
      if constexpr (kApart) {
#pragma GCC unroll 8
        for (int i = 0; i < NV; i += 2) load_apart(v.data + j * v.stride + h + i * W, value[i], value[i + 1]);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) value[i] = load_as(v.data + j * v.stride + h + i * W);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        T weight = scores[r * score_stride + j];
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) sums[r][i] = multiply_add(value[i], weight, sums[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if constexpr (kApart) {
#pragma GCC unroll 8
        for (int i = 0; i < NV; i += 2) {
          Vec<T> first = interleave<T, false>(sums[r][i], sums[r][i + 1]);
          sums[r][i + 1] = interleave<T, true>(sums[r][i], sums[r][i + 1]);
          sums[r][i] = first;
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) store(out.data + r * out.stride + h + i * W, sums[r][i]);
    }
  };
  int h = 0;
  for (; h + kTogether * W <= v.columns; h += kTogether * W) add(h, std::integral_constant<int, kTogether>{});
  for (; h < v.columns; h += W) add(h, std::integral_constant<int, 1>{});
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
