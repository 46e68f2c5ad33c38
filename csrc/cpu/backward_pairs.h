// The backward's tiles with products of pairs of bfloat16: AVX512-BF16 and AMX.
#pragma once

#include "backward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
inline void BackwardItem<E>::load_columns(const E* from, ptrdiff_t stride, int columns, int depth, Pair* to) {
  int keys = round_up(count_, kTilePadding<E>);
  copy_rows(from, stride, count_, columns, keys, depth, pairs_);
  for (int j = 0; j < keys; j += kTileKeys) {
    transpose_rows(pairs_ + j * depth, depth, std::min(keys - j, kTileKeys), depth, kTileKeys, to + j * depth);
  }
}

template <typename E>
inline void BackwardItem<E>::fill(const Record& to, int64_t t, int rows) {
  auto copy = [&](const Tensor& x, int columns, int stride, int depth, Pair* by_rows, Pair* by_columns) {
    const E* from = row_of<const E>(x, batch_, t, head_);
    copy_rows(from, x.row_stride, rows, columns, kQueries, depth, by_rows);
    copy_pairs_of_rows(from, x.row_stride, rows, columns, kQueries, stride, kColumns<E> ? pairs_ : by_columns);
    if (kColumns<E>) transpose_rows(pairs_, stride, kQueries / 2, stride, kQueries / 2, by_columns);
  };
  copy(p_.q, p_.head_dim, k_stride_, k_depth_, to.q_rows, to.q_columns);
  copy(p_.dout, p_.value_head_dim, v_stride_, v_depth_, to.dout_rows, to.dout_columns);
}

template <typename E>
inline void BackwardItem<E>::load_record(int64_t t, int rows) {
  if (plan_.copies) {
    int first = static_cast<int>(t % kQueries);
    tile_ = Record(*this, record(head_, t));
    tile_.q_rows += first * k_depth_;
    tile_.dout_rows += first * v_depth_;
    tile_.q_columns += first / 2 * (kColumns<E> ? 1 : k_stride_);
    tile_.dout_columns += first / 2 * (kColumns<E> ? 1 : v_stride_);
  } else {
    tile_ = Record(*this, record_);
    fill(tile_, sequence_.first_row + t, rows);
  }
}

template <typename E>
inline void BackwardItem<E>::tile_of_pairs(int64_t t, int rows, int64_t next) {
  int padded = round_up(rows, kTilePadding<E>), keys = round_up(most_, kTilePadding<E>);
  int steps = padded / 2 * ((keys + kTileKeys - 1) / kTileKeys);
  start_prefetch(t, rows, next, steps, steps);
  [[maybe_unused]] int k_columns = round_up(p_.head_dim, kWidth<T>);
  [[maybe_unused]] int v_columns = round_up(p_.value_head_dim, kWidth<T>);
  bool later = finishes_later();
  // Vectors are multiplied 3 at once, the last 4 as 2 + 2, or with AMX's registers as 4.
  auto for_vectors = [](int lanes, auto body) __attribute__((always_inline)) {
    constexpr int W = kWidth<T>, kFour = kColumns<E> ? 4 : 2;
    int lane = 0;
    for (; lanes - lane >= 3 * W && lanes - lane != 4 * W; lane += 3 * W) {
      body(lane, std::integral_constant<int, 3>{});
    }
    for (; lanes - lane >= kFour * W; lane += kFour * W) body(lane, std::integral_constant<int, kFour>{});
    if (lanes - lane == 2 * W) body(lane, std::integral_constant<int, 2>{});
    if (lanes - lane == W) body(lane, std::integral_constant<int, 1>{});
  };
  if constexpr (!kColumns<E>) {
    find_kept(padded, keys);
    for (int j = 0; j < keys / kRowPadding; ++j) {
      rows_of_keys_[j] = {rows_of_keys_[j].begin / 2, rows_of_keys_[j].end / 2};
    }
  }
  auto make_scores = [&](int first, int lanes) __attribute__((always_inline)) {
    for_vectors(lanes, [&](int lane, auto nv) __attribute__((always_inline)) {
#if defined(__AMX_BF16__)
      multiply_tiles<nv.value>(padded, k_depth_, tile_.q_rows, k_depth_, k_tiles_ + first * k_depth_ + lane, kTileKeys,
                               weights_ + first + lane, kKeys, false);
      multiply_tiles<nv.value>(padded, v_depth_, tile_.dout_rows, v_depth_, v_tiles_ + first * v_depth_ + lane,
                               kTileKeys, dscores_ + first + lane, kKeys, false);
#else
      multiply_rows<nv.value>(padded, first + lane, p_.head_dim, tile_.q_rows, k_depth_,
                              k_tiles_ + first * k_depth_ + lane, weights_);
      multiply_rows<nv.value>(padded, first + lane, p_.value_head_dim, tile_.dout_rows, v_depth_,
                              v_tiles_ + first * v_depth_ + lane, dscores_);
#endif
    });
  };
  auto sum = [&](int first, int lanes) __attribute__((always_inline)) {
#if defined(__AMX_BF16__)
    for_vectors(lanes, [&](int lane, auto nv) __attribute__((always_inline)) {
      multiply_tiles<nv.value>(v_stride_, padded / 2, tile_.dout_columns, kQueries / 2, weight_pairs_ + lane, kTileKeys,
                               dv_columns_ + first * v_stride_ + lane, kTileKeys, true);
      multiply_tiles<nv.value>(k_stride_, padded / 2, tile_.q_columns, kQueries / 2, dscore_pairs_ + lane, kTileKeys,
                               dk_columns_ + first * k_stride_ + lane, kTileKeys, true);
    });
#else
    const Depths* depths = rows_of_keys_ + first / kRowPadding;
    accumulate<Layout::column_major>(lanes, v_columns, depths, weight_pairs_, kTileKeys, tile_.dout_columns, v_stride_,
                                     dv_ + first * v_stride_, v_stride_, [] {});
    accumulate<Layout::column_major>(lanes, k_columns, depths, dscore_pairs_, kTileKeys, tile_.q_columns, k_stride_,
                                     dk_ + first * k_stride_, k_stride_, [] {});
#endif
  };
  auto for_panels = [&](auto body) __attribute__((always_inline)) {
    for (int first = 0; first < keys; first += kTileKeys) body(first, std::min(keys - first, kTileKeys));
  };
#if defined(__AMX_BF16__)
  Tiles tiles;
#endif
  if (later) {
    for_panels(make_scores);
    T scale = scale_of_products(scale_, options_, functions_);
    for (int i = 0; i < rows; ++i) {
      for (int lane = 0; lane < keys; lane += kWidth<T>) {
        T* score = weights_ + i * kKeys + lane;
        store<T>(score, load(score) * scale);
      }
    }
    apply_options(t, rows, keys);
  }
  if (restates_) return;
  for_panels([&](int first, int lanes) __attribute__((always_inline)) {
    if (!later) make_scores(first, lanes);
    with_finish([&](auto finish) __attribute__((always_inline)) { pair_tile<finish.value>(padded, first, lanes); });
    sum(first, lanes);
  });
  int of_group = static_cast<int>((head_ - kv_head_ * group()) * plan_.row_blocks + t / kQueries);
  if (plan_.in_turn && first_ > 0) turns_->wait(turn_ - 1, of_group);
  touch(t);
#if defined(__AMX_BF16__)
  for_vectors(k_stride_, [&](int lane, auto nv) __attribute__((always_inline)) {
    multiply_tiles<nv.value>(padded, keys / 2, dscore_rows_, kKeys / 2, k_pairs_ + lane, k_stride_, dq(head_, t) + lane,
                             plan_.padded_head_dim, true);
  });
#else
  add_to_dq(padded, k_columns, dscore_rows_, kKeys / 2, k_pairs_, dq(head_, t));
#endif
  if (!plan_.in_turn) return;
  if (plan_.reduce_items == 0) finish_rows(t, rows);
  turns_->pass(turn_, of_group + 1);
}

template <typename E>
template <int NV>
inline void BackwardItem<E>::multiply_rows(int rows, int lane, int columns, const Pair* a, int depth, const Pair* b,
                                           T* to) {
  constexpr int W = kWidth<T>;
  for (int i = 0; i < rows; i += kRows) {
    T* row = to + i * kKeys + lane;
    if (lane >= keys_of_rows_[i / kRowPadding].end) {
      for (int r = 0; r < kRows; ++r) std::memset(row + r * kKeys, 0, sizeof(T) * NV * W);
      continue;
    }
    micro_kernel<NV, Layout::row_major>((columns + 1) / 2, a + i * depth, depth, b, kTileKeys,
                                        [&](int r, int v, const Vec<T>& sum)
                                            __attribute__((always_inline)) { store<T>(row + r * kKeys + v * W, sum); });
  }
}

template <typename E>
template <Finish finish>
inline void BackwardItem<E>::pair_tile(int rows, int first, int lanes) {
  constexpr int W = kWidth<T>;
  Vec<T> scale = static_cast<T>(scale_ * kLog2E);
  for (int i = 0; i < rows; i += 2) {
    next_record_.template step<Access::read, 2>();
    ask_for_rows();
    for (int lane = first; lane < first + lanes; lane += 2 * W) {
      Vec<T> weight[2][2], dscore[2][2];
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          int at = (i + r) * kKeys + lane + v * W;
          weight[r][v] = load(weights_ + at);
          dscore[r][v] = load(dscores_ + at);
          if constexpr (finish != Finish::later) {
            weight[r][v] = weight_of<finish>(weight[r][v] * scale, i + r, lane + v * W);
            dscore[r][v] = weight[r][v] * (dscore[r][v] - tile_delta_[i + r]);
          }
        }
      }
      Pair* weights = weight_pairs_ + i / 2 * kTileKeys + lane - first;
      Pair* dscores = dscore_pairs_ + i / 2 * kTileKeys + lane - first;
      Pair* dscore_row = dscore_rows_ + (i * kKeys + lane) / 2;
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        store(weights + v * W, pair_up(weight[0][v], weight[1][v]));
        store(dscores + v * W, pair_up(dscore[0][v], dscore[1][v]));
        store(dscore_row + v * kKeys / 2, round_row(dscore[v][0], dscore[v][1]));
      }
    }
  }
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
