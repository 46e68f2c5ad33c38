// The forward's panels: scores of a panel of queries, which are in the lanes, with a block of keys, and the weights'
// products with V.
#pragma once

#include "forward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
template <int NV>
inline void ForwardItem<E>::attend(int panel, int64_t block, int begin, int keys) {
  int row = panel_[panel].row;
  const Kept& kept = panel_[panel].kept;
  const int32_t* keep = nullptr;
  if (functions_.has_masks()) {
    auto decided =
        functions_.decide(tile_of_functions(row, NV * kWidth<T>, block + begin, keys, true), keep_, kPanel<T>);
    if (decided.begin >= decided.end) return;
    const int skipped = decided.begin / kKeyPadding<F> * kKeyPadding<F>;
    if (!decided.whole) keep = keep_ + skipped * kPanel<T>;
    begin += skipped;
    keys = decided.end - skipped;
  }
  const F* queries = queries_ + int64_t{panel} * kPanel<T> * depth_;
  const F* k = k_ + static_cast<int64_t>(begin) * k_stride_;
  const F* v = v_ + static_cast<int64_t>(begin / kElements<F>) * (kTiled<F> ? 1 : v_stride_);
  T* out = out_ + int64_t{panel} * kPanel<T> * v_stride_;
  T* scores = scores_;
  // The scale is not multiplied into the queries: products of 16-bit numbers are exact in float, those of scaled ones
  // are not.
  Vec<T> scale = scale_of_products(scale_, options_, functions_);
  if constexpr (kTiled<F>) {
    next_k_.step();
    multiply_tiles<NV>(round_up(keys, kTileRows), depth_, k, k_stride_, queries, kPanel<T>, scores, kPanel<T>, false);
    change_scores<NV>(0, keys, [&](int, int, Vec<T>& score) __attribute__((always_inline)) { score *= scale; });
  } else {
    for (int j = 0; j < keys; j += kRows) {
      next_k_.step();
      make_scores<NV>(k + j * k_stride_, queries, scale, scores + j * kPanel<T>);
    }
  }
  if (options_.any()) apply_options<NV>(row, block + begin, keys);
  if constexpr (std::is_same_v<T, float>) {  // cpu.cc has refused functions of others
    if (functions_) {
      if (options_.any() && functions_.takes_scores()) {
        change_scores<NV>(0, keys, [&](int, int, Vec<T>& score) __attribute__((always_inline)) { score *= T(kLn2); });
      }
      functions_.apply<Unit::natural>(tile_of_functions(row, NV * kWidth<T>, block + begin, keys, true), scores,
                                      kPanel<T>, nullptr, keep, kPanel<T>);
      if (options_.masks_functions) drop_masked<NV>(row, block + begin, keys);
    }
  }
  if (options_.has_segments) compare_segments<NV>(row, kept, block + begin, keys);
  if (options_.has_intervals && !gathered_) test_intervals<NV>(row, kept, block + begin, keys);
  if (band_.limited()) mask<NV>(row, kept, block + begin, keys);
  auto weigh = [&](auto unit) __attribute__((always_inline)) {
    if (dropout_.active()) {
      online_softmax<NV, T, unit.value>(keys, scores, maximum_ + row, sum_ + row, decay_);
      drop<NV>(row, begin, keys);
      pair_weights<NV, F>(keys, scores);
    } else {
      online_softmax<NV, F, unit.value>(keys, scores, maximum_ + row, sum_ + row, decay_);
    }
  };
  if (functions_.takes_scores()) {
    weigh(std::integral_constant<Unit, Unit::natural>{});
  } else {
    weigh(std::integral_constant<Unit, Unit::log2>{});
  }
  const T* decay = decay_;
  F* weights = reinterpret_cast<F*>(scores);
  if constexpr (kTiled<F>) {
    for (int h = 0; h < v_stride_; ++h) {
      for (int v = 0; v < NV; ++v) {
        T* o = out + h * kPanel<T> + v * kWidth<T>;
        store<T>(o, load(o) * load(decay + v * kWidth<T>));
      }
    }
    int pairs = factors<F>(keys), padded = round_up(pairs, kTilePairs);
    std::memset(weights + pairs * kPanel<T>, 0, sizeof(F) * (padded - pairs) * kPanel<T>);
    next_v_.step();
    multiply_tiles<NV>(v_stride_, padded, v, keys_ / kElements<F>, weights, kPanel<T>, out, kPanel<T>, true);
    return;
  }
  for (int h = 0; h < p_.value_head_dim; h += kRows) {
    next_v_.step();
    micro_kernel<NV, Layout::column_major>(factors<F>(keys), v + h, v_stride_, weights, kPanel<T>,
                                           [&](int i, int v, const Vec<T>& sum) __attribute__((always_inline)) {
                                             T* o = out + (h + i) * kPanel<T> + v * kWidth<T>;
                                             store<T>(o, load(o) * load(decay + v * kWidth<T>) + sum);
                                           });
  }
}

template <typename E>
template <int NV>
JAX_FLASH_INLINE void ForwardItem<E>::make_scores(const F* k, const F* queries, const Vec<T>& scale, T* scores) {
  dot_kernel<NV>(depth_, k, k_stride_, queries, kPanel<T>,
                 [&](int i, int v, const Vec<T>& sum)
                     __attribute__((always_inline)) { store<T>(scores + i * kPanel<T> + v * kWidth<T>, sum * scale); });
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
