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
  const F* queries = queries_ + int64_t{panel} * kPanel<T> * depth_;
  const F* k = k_ + static_cast<int64_t>(begin) * k_stride_;
  const F* v = v_ + static_cast<int64_t>(begin / kElements<F>) * (kTiled<F> ? 1 : v_stride_);
  T* out = out_ + int64_t{panel} * kPanel<T> * v_stride_;
  T* scores = scores_;
  int kept_keys[NV];
  count_kept_keys(row, block + begin, keys, kept_keys);
  // The scale is not multiplied into the queries: products of 16-bit numbers are exact in float, those of scaled ones
  // are not.
  Vec<T> scale = static_cast<T>(scale_ * kLog2E);
  if constexpr (kTiled<F>) {
    next_k_.step();
    multiply_tiles<NV>(round_up(keys, kTileRows), depth_, k, k_stride_, queries, kPanel<T>, scores, kPanel<T>, false);
    change_scores<NV>(0, keys, [&](int, int, Vec<T>& score) __attribute__((always_inline)) { score *= scale; });
  } else {
    for (int j = 0, dropped = 0; j < keys; j += kRows) {
      next_k_.step();
      while (dropped < NV - 1 && kept_keys[dropped] <= j) ++dropped;
      // Scores that are left out here are masked below.
      int at = dropped * kWidth<T>;
      if (dropped == 0) {
        make_scores<NV>(k + j * k_stride_, queries, scale, scores + j * kPanel<T>);
      } else if (dropped == 1) {
        make_some_scores<std::max(NV - 1, 1)>(k + j * k_stride_, queries + at, scale, scores + j * kPanel<T> + at);
      } else {
        make_some_scores<1>(k + j * k_stride_, queries + at, scale, scores + j * kPanel<T> + at);
      }
    }
  }
  if (options_.any()) apply_options<NV>(row, block + begin, keys);
  if (options_.has_segments) compare_segments<NV>(row, kept, block + begin, keys);
  if (band_.limited()) mask<NV>(row, kept, block + begin, keys);
  if (dropout_.active()) {
    online_softmax<NV, T>(keys, scores, maximum_ + row, sum_ + row, decay_);
    drop<NV>(row, begin, keys);
    pair_weights<NV, F>(keys, scores);
  } else {
    online_softmax<NV, F>(keys, scores, maximum_ + row, sum_ + row, decay_);
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
  bool stairs = kept_keys[0] < keys;
  for (int v = 0; v < NV; ++v) kept_keys[v] = factors<F>(kept_keys[v]);
  for (int h = 0; h < p_.value_head_dim; h += kRows) {
    next_v_.step();
    auto add = [&](int i, int v, const Vec<T>& sum) __attribute__((always_inline)) {
      T* o = out + (h + i) * kPanel<T> + v * kWidth<T>;
      store<T>(o, load(o) * load(decay + v * kWidth<T>) + sum);
    };
    if (stairs) {
      stair_kernel<NV>(kept_keys, v + h, v_stride_, weights, kPanel<T>, add);
    } else {
      micro_kernel<NV, Layout::column_major>(factors<F>(keys), v + h, v_stride_, weights, kPanel<T>, add);
    }
  }
}

template <typename E>
template <int NV>
inline void ForwardItem<E>::count_kept_keys(int row, int64_t first, int keys, int (&kept)[NV]) const {
  for (int v = 0; v < NV; ++v) {
    int64_t last = first_row_ + row + (v + 1) * kWidth<T> - 1;
    // Folded rows are not in the order of their positions.
    int64_t end = plan_.fold == 1 ? band_.end(sequence_, last) - first : keys;
    kept[v] = static_cast<int>(std::clamp<int64_t>(end, 0, keys));
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
