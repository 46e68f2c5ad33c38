// Decoding, at most kDecodingRows queries against many keys: head_dim is in the SIMD lanes, and K and V are read once,
// in place. With queries in the lanes most lanes would be idle, and a copy of K and V would serve few products.
#pragma once

#include <algorithm>

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

// Two vectors of elements, the even ones and the odd ones.
JAX_FLASH_INLINE void load_apart(const BFloat16* p, Vec<float>& even, Vec<float>& odd) {
  U32 x;
  std::memcpy(&x, p, sizeof(x));
  even = bits_as<Vec<float>>(x << 16);
  odd = bits_as<Vec<float>>(x & 0xffff0000);
}

// Lane i of the result is the sum of x[i]. Sums first within groups of 16 bytes, whose shuffles cost half of what
// others do, then across them. Recursive templates, because compilers put the arrays of a loop into memory.
template <typename T, int count = kWidth<T>>
JAX_FLASH_INLINE Vec<T> sums(Vec<T> (&x)[kWidth<T>]) {
  constexpr int W = kWidth<T>, kPart = 16 / sizeof(T);
  constexpr bool kWithin = count * kPart > W;
#pragma GCC unroll 8
  for (int i = 0; i < count / 2; ++i) {
    constexpr int part = kWithin ? kPart : W, run = kWithin ? 1 : kPart;
    x[i] = every_second<T, false, part, run>(x[2 * i], x[2 * i + 1]) +
           every_second<T, true, part, run>(x[2 * i], x[2 * i + 1]);
  }
  if constexpr (count > 2) return sums<T, count / 2>(x);
  return x[0];
}

// Prefetches memory in its order, as many bytes as are read meanwhile; nothing if null.
struct Ahead {
  const char* next;

  JAX_FLASH_INLINE void ask(int64_t bytes) {
    if (!next) return;
#pragma GCC unroll 16
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line);
    next += bytes;
  }
};

// Sums are made a vector at a time, for up to kSide rows and kFewStep keys: then a sum across lanes costs two shuffles,
// alone it would cost four; and 4 x 4 sums need half a load for each product.
template <typename T>
constexpr int kSide = kWidth<T> >= 16  ? 4
                      : kWidth<T> >= 4 ? 2
                                       : 1;
template <int R, typename T>
constexpr int kFewStep = kWidth<T> / std::min(R, kSide<T>);

// scores[r][j] = scale * (row r of q, row j of k), for R rows and `keys` keys.
template <int R, typename K, typename F, typename T>
void score_decoding(int keys, Rows<const K> k, Rows<const F> q, T scale, T* scores, ptrdiff_t score_stride,
                    Ahead ahead) {
  constexpr int W = kWidth<T>;
  constexpr int kStep = W * kElements<F>;
  constexpr int kKeys = kFewStep<R, T>, kTogether = W / kKeys;
  int j = 0;
  for (; j + kKeys <= keys; j += kKeys) {
    for (int r = 0; r < R; r += kTogether) {
      Vec<T> products[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) products[i] = T(0);
      const F* factors = q.data + r * q.stride;
      for (int h = 0; h < k.columns; h += kStep, factors += W) {
        decltype(load(q.data)) query[kTogether];
#pragma GCC unroll 4
        for (int row = 0; row < kTogether; ++row) query[row] = load(factors + row * q.stride);
        const K* key = k.data + j * k.stride + h;
        if (r == 0) ahead.ask(kKeys * kStep * sizeof(K));
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i) {
          auto x = load_factors(key);
#pragma GCC unroll 4
          for (int row = 0; row < kTogether; ++row) {
            products[row * kKeys + i] = multiply_add(x, query[row], products[row * kKeys + i]);
          }
          key += k.stride;
          asm("" : "+r"(key));  // else g++ keeps kKeys addresses, most of them spilled
        }
      }
      Vec<T> sum = sums<T>(products) * scale;
#pragma GCC unroll 4
      for (int row = 0; row < kTogether; ++row) {
        std::memcpy(scores + (r + row) * score_stride + j, reinterpret_cast<const T*>(&sum) + row * kKeys,
                    kKeys * sizeof(T));
      }
    }
  }
  for (; j < keys; ++j) {
    const K* row = k.data + j * k.stride;
    for (int r = 0; r < R; ++r) {
      Vec<T> products = T(0);
      for (int h = 0; h < k.columns; h += kStep) {
        products = multiply_add(load_factors(row + h), load(q.data + r * q.stride + h / kStep * W), products);
      }
      scores[r * score_stride + j] = sum_of_lanes(products) * scale;
    }
  }
}

// Whether weights are stored as pairs of keys, to match pairs of V's rows.
template <typename V>
constexpr bool kPairsKeys = kPaired<Factor<V>>;

#if defined(JAX_FLASH_PAIRS)
// Turns the weights of a row into pairs in place, with zeros after the last one.
inline void pair_row(int keys, float* s) {
  constexpr int W = kWidth<float>;
  for (int j = 0; j < keys; j += 2 * W) {
    Vec<float> second = j + W < keys ? load(s + j + W) : Vec<float>(0.0f);
    store(reinterpret_cast<Pair*>(s) + j / 2, round_row(load(s + j), second));
  }
}

// A row of bfloat16 V and the next one, or zeros, as pairs of keys: every second 4 of two vectors of columns.
template <bool both>
JAX_FLASH_INLINE void load_pairs(const BFloat16* row, ptrdiff_t stride, U32& first, U32& second) {
  U32 a, b = {};
  std::memcpy(&a, row, sizeof(a));
  if constexpr (both) std::memcpy(&b, row + stride, sizeof(b));
  first = interleave_quarters<false>(a, b);
  second = interleave_quarters<true>(a, b);
}
// One vector of columns.
template <bool both>
JAX_FLASH_INLINE U32 load_pairs(const BFloat16* row, ptrdiff_t stride) {
  U16 a, b = {};
  std::memcpy(&a, row, sizeof(a));
  if constexpr (both) std::memcpy(&b, row + stride, sizeof(b));
  return widen_bits(a) | widen_bits(b) << 16;
}
#endif

// Updates the running softmax of R rows with scores[R][score_stride] of `keys` keys, which become weights, and scales
// their output. `finish(row, scores)` gives the scores of a row their last form, -inf up to the next multiple of kWidth
// included, and `drop(row, weights)` clears weights that have been counted in the sum but are not used.
template <int R, typename V, typename T, typename Finish, typename Drop>
void softmax_decoding(int keys, T* scores, ptrdiff_t score_stride, T* maximum, T* sum, Rows<T> out, Finish finish,
                      Drop drop) {
  constexpr int W = kWidth<T>;
  for (int r = 0; r < R; ++r) {
    T* s = scores + r * score_stride;
    finish(r, s);
    Vec<T> highest = maximum[r];
    for (int j = 0; j < keys; j += W) highest = max(highest, load(s + j));
    T before = maximum[r];
    T after = maximum[r] = largest_lane(highest);
    T shift = after == -kInfinity<T> ? 0 : after;  // as in online_softmax
    T decay = exp2(Vec<T>(before - shift))[0];
    Vec<T> total = T(0);
    for (int j = 0; j < keys; j += W) {
      Vec<T> weight = exp2(load(s + j) - shift);
      store(s + j, weight);
      total += weight;
    }
    sum[r] = sum[r] * decay + sum_of_lanes(total);
    drop(r, s);
    if constexpr (kPairsKeys<V>) pair_row(keys, s);
    for (int h = 0; h < out.columns; h += W) {
      T* o = out.data + r * out.stride + h;
      store<T>(o, load(o) * decay);
    }
  }
}

// Adds weights[r][j] * (row j of v) to row r of out, for R rows and `keys` keys from key `first` of the weights on, an
// even number.
template <int R, typename V, typename T>
void add_values_decoding(int first, int keys, Rows<const V> v, const T* weights, ptrdiff_t weight_stride, Rows<T> out,
                         Ahead ahead) {
  constexpr int W = kWidth<T>;
  // Takes several vectors of a row of V at once: whole cache lines, and enough independent sums if R = 1. Elements of
  // 16 bits are widened into two vectors by the cheapest instructions: the even and the odd columns, or for pairs of
  // keys every second 4 columns.
  constexpr int kTogether = R * 4 <= kRows * kVecs ? 4 : R * 2 <= kRows * kVecs ? 2 : 1;
  auto add = [&](int h, auto vectors) __attribute__((always_inline)) {
    constexpr int NV = vectors.value;
    constexpr bool kPairs = kPairsKeys<V>;
    constexpr bool kApart = std::is_same_v<V, BFloat16> && NV > 1;
    constexpr int kRun = kPairs ? 4 : 1;
    Vec<T> sums[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sums[r][i] = load(out.data + r * out.stride + h + i * W);
      if constexpr (kApart) {
#pragma GCC unroll 8
        for (int i = 0; i < NV; i += 2) {
          Vec<T> even = every_second<T, false, W, kRun>(sums[r][i], sums[r][i + 1]);
          sums[r][i + 1] = every_second<T, true, W, kRun>(sums[r][i], sums[r][i + 1]);
          sums[r][i] = even;
        }
      }
    }
    if constexpr (kPairs) {
#if defined(JAX_FLASH_PAIRS)
      const V* row = v.data + h;
      const Pair* pairs = reinterpret_cast<const Pair*>(weights) + first / 2;
      auto step = [&](auto both) __attribute__((always_inline)) {
        U32 value[NV];
        if constexpr (NV == 1) {
          value[0] = load_pairs<both.value>(row, v.stride);
        } else {
#pragma GCC unroll 8
          for (int i = 0; i < NV; i += 2) load_pairs<both.value>(row + i * W, v.stride, value[i], value[i + 1]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          Pair weight = pairs[r * weight_stride];
#pragma GCC unroll 8
          for (int i = 0; i < NV; ++i) sums[r][i] = multiply_add(value[i], weight, sums[r][i]);
        }
        row += 2 * v.stride;
        ++pairs;
      };
      for (int j = keys; j > 1; j -= 2) {
        ahead.ask(2 * NV * W * sizeof(V));
        step(std::true_type{});
      }
      if (keys % 2 != 0) step(std::false_type{});
#endif
    } else {
      for (int j = 0; j < keys; ++j) {
        Vec<T> value[NV];
        ahead.ask(NV * W * sizeof(V));
        if constexpr (kApart) {
#pragma GCC unroll 8
          for (int i = 0; i < NV; i += 2) load_apart(v.data + j * v.stride + h + i * W, value[i], value[i + 1]);
        } else {
#pragma GCC unroll 8
          for (int i = 0; i < NV; ++i) value[i] = load_as(v.data + j * v.stride + h + i * W);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          T weight = weights[r * weight_stride + first + j];
#pragma GCC unroll 8
          for (int i = 0; i < NV; ++i) sums[r][i] = multiply_add(value[i], weight, sums[r][i]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if constexpr (kApart) {
#pragma GCC unroll 8
        for (int i = 0; i < NV; i += 2) {
          Vec<T> low = interleave<T, false, kRun>(sums[r][i], sums[r][i + 1]);
          sums[r][i + 1] = interleave<T, true, kRun>(sums[r][i], sums[r][i + 1]);
          sums[r][i] = low;
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
