// The backward's tiles with panels of K and V: fused multiply-adds, keys in the lanes.
#pragma once

#include "backward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
inline void BackwardItem<E>::load_queries(int64_t t, int rows, int at) {
  int padded = round_up(rows, kTilePadding<E>);
  int64_t row = sequence_.first_row + t;
  if constexpr (kPairedBackward<E>) {
    if (!decodes_) load_record(t, rows);
  }
  if (plan_.copies && rows == padded) {
    if constexpr (!kPairedBackward<E>) {
      tile_q_ = q_copy(row);
      tile_dout_ = dout_copy(row);
    }
    tile_lse_ = row_lse(row);
    tile_rest_ = row_rest(row);
    tile_delta_ = delta(row);
  } else {
    if (!kPairedBackward<E> || decodes_) {
      copy_rows(row_of<const E>(p_.q, batch_, row, head_), p_.q.row_stride, rows, p_.head_dim, padded, k_stride_,
                q_ + at * k_stride_);
      copy_rows(row_of<const E>(p_.dout, batch_, row, head_), p_.dout.row_stride, rows, p_.value_head_dim, padded,
                v_stride_, dout_ + at * v_stride_);
    }
    std::copy_n(row_lse(row), rows, lse_ + at);
    std::copy_n(row_rest(row), rows, rest_ + at);
    std::copy_n(delta(row), rows, delta_ + at);
    std::fill_n(lse_ + at + rows, padded - rows, kInfinity<T>);
    std::fill_n(rest_ + at + rows, padded - rows, T(0));
    std::fill_n(delta_ + at + rows, padded - rows, T(0));
    tile_q_ = q_;
    tile_dout_ = dout_;
    tile_lse_ = lse_;
    tile_rest_ = rest_;
    tile_delta_ = delta_;
  }
  bool large = restates_;
  for (int i = 0; i < rows; ++i) large |= tile_rest_[at + i] != 0;
  large_ = large;
  bool whole = band_.begin(sequence_, t + rows - 1) <= first_ && band_.end(sequence_, t) >= first_ + count_;
  whole = whole && (!kv_intervals_ || rows_intervals_.covers(first_, first_ + count_));
  if (functions_) decide_functions(t, rows);
  whole = whole && !drops_;
  masked_ = count_ < plan_.keys || !whole;
  if (whole) {
    std::fill_n(kept_begin_ + at, padded, T(0));
    std::fill_n(kept_end_ + at, padded, static_cast<T>(count_));
    most_ = count_;
    return;
  }
  most_ = 0;
  for (int i = 0; i < rows; ++i) {
    Interval keys = kv_intervals_.of(head_, row + i);
    keys = {std::max(keys.begin, band_.begin(sequence_, t + i)), std::min(keys.end, band_.end(sequence_, t + i))};
    KeyRange range{0, count_};
    if (drops_) range = PairFunctions::kept_lanes(keep_ + i * kKeys, round_up(count_, kWidth<float>));
    range = {std::min<int64_t>(range.begin, count_), std::min<int64_t>(range.end, count_)};
    int begin = static_cast<int>(std::clamp(keys.begin - first_, range.begin, range.end));
    int end = static_cast<int>(std::clamp<int64_t>(keys.end - first_, begin, std::max<int64_t>(begin, range.end)));
    kept_begin_[at + i] = static_cast<T>(begin);
    kept_end_[at + i] = static_cast<T>(end);
    most_ = std::max(most_, end);
  }
  // Padding rows repeat the last row.
  std::fill_n(kept_begin_ + at + rows, padded - rows, kept_begin_[at + rows - 1]);
  std::fill_n(kept_end_ + at + rows, padded - rows, kept_end_[at + rows - 1]);
}

template <typename E>
inline void BackwardItem<E>::find_kept(int rows, int keys) {
  constexpr int N = kRowPadding;
  for (int i = 0; i < rows / N; ++i) {
    Depths& kept = keys_of_rows_[i] = {0, most_};
    if (!masked_) continue;
    kept = {static_cast<int>(*std::min_element(kept_begin_ + i * N, kept_begin_ + (i + 1) * N)),
            static_cast<int>(*std::max_element(kept_end_ + i * N, kept_end_ + (i + 1) * N))};
  }
  for (int j = 0; j < keys / N; ++j) {
    Depths& kept = rows_of_keys_[j] = {0, rows};
    if (!masked_) continue;
    auto meets = [&](int i) { return keys_of_rows_[i].begin < (j + 1) * N && keys_of_rows_[i].end > j * N; };
    while (kept.begin < kept.end && !meets(kept.begin / N)) kept.begin += N;
    while (kept.begin < kept.end && !meets(kept.end / N - 1)) kept.end -= N;
  }
}

template <typename E>
inline void BackwardItem<E>::start_prefetch(int64_t t, int rows, int64_t next, int64_t steps, int64_t later_steps) {
  next_q_ = next_dout_ = next_record_ = {};
  dq_rows_ = dk_rows_ = dv_rows_ = {};
  bool last_of_head = next <= t, last = last_of_head && head_ % group() == group() - 1;
  bool finishes = plan_.reduce_items == 0 && band_.end(sequence_, t) <= first_ + count_ &&
                  band_.end(sequence_, t + rows - 1) > first_;
  prefetches_rows_ = last || finishes;
  if (finishes) {
    dq_rows_ =
        RowsAhead(row_of<E>(p_.dq, batch_, t, head_), p_.dq.row_stride, rows, p_.head_dim, later_steps, Access::write);
  }
  if (last) {
    int64_t s = sequence_.first_key + first_;
    dk_rows_ = RowsAhead(row_of<E>(p_.dk, batch_, s, kv_head_), p_.dk.row_stride, count_, p_.head_dim, later_steps,
                         Access::write);
    dv_rows_ = RowsAhead(row_of<E>(p_.dv, batch_, s, kv_head_), p_.dv.row_stride, count_, p_.value_head_dim,
                         later_steps, Access::write);
  }
  // With plan.in_turn the next item is one of another head.
  if (!plan_.copies || (last && plan_.in_turn)) return;
  int64_t head = !last_of_head ? head_ : last ? kv_head_ * group() : head_ + 1, row = sequence_.first_row + next;
  if constexpr (kPairedBackward<E>) {
    next_record_ = LinesAhead(record(head, row), record_size(p_) * sizeof(Pair), steps);
    return;
  }
  next_q_ =
      LinesAhead(row_of_copy(plan_.q_copy, head, row, k_stride_), int64_t{kQueries} * k_stride_ * sizeof(T), steps);
  next_dout_ =
      LinesAhead(row_of_copy(plan_.dout_copy, head, row, v_stride_), int64_t{kQueries} * v_stride_ * sizeof(T), steps);
}

template <typename E>
inline void BackwardItem<E>::tile(int64_t t, int rows, int64_t next) {
  int padded = round_up(rows, kRowPadding), key_rows = round_up(most_, kRowPadding);
  int k_columns = round_up(p_.head_dim, kWidth<T>), v_columns = round_up(p_.value_head_dim, kWidth<T>);
  // Prefetches the sums of the last product during the first ones.
  int steps = (key_rows + kPanel<T> - 1) / kPanel<T> * (padded / kRows);
  next_dq_ = LinesAhead(dq(head_, t), padded * plan_.padded_head_dim * sizeof(T), steps);
  int later_steps = register_tiles<T>(key_rows, k_columns) + register_tiles<T>(key_rows, v_columns);
  start_prefetch(t, rows, next, steps + later_steps, later_steps);
  find_kept(padded, key_rows);
  for (int lane = 0; lane < key_rows; lane += kPanel<T>) {
    int lanes = std::min(kPanel<T>, key_rows - lane);
    with_vectors((lanes + kWidth<T> - 1) / kWidth<T>, [&](auto nv) __attribute__((always_inline)) {
      with_finish([&](auto finish) __attribute__((always_inline)) { scores<nv.value, finish.value>(padded, lane); });
    });
  }
  if (finishes_later()) apply_options(t, rows, round_up(key_rows, kWidth<T>));
  if (restates_) return;
  auto ask = [&]() __attribute__((always_inline)) {
    next_q_.template step<Access::read>();
    next_dout_.template step<Access::read>();
    ask_for_rows();
  };
  accumulate<Layout::column_major>(key_rows, v_columns, rows_of_keys_, weights_, kKeys, tile_dout_, v_stride_, dv_,
                                   v_stride_, ask);
  accumulate<Layout::column_major>(key_rows, k_columns, rows_of_keys_, dscores_, kKeys, tile_q_, k_stride_, dk_,
                                   k_stride_, ask);
  int of_group = static_cast<int>((head_ - kv_head_ * group()) * plan_.row_blocks + t / kQueries);
  if (plan_.in_turn && first_ > 0) turns_->wait(turn_ - 1, of_group);
  touch(t);
  add_to_dq(padded, k_columns, dscores_, kKeys, k_, dq(head_, t));
  if (!plan_.in_turn) return;
  if (plan_.reduce_items == 0) finish_rows(t, rows);
  turns_->pass(turn_, of_group + 1);
}

template <typename E>
template <typename Factors>
inline void BackwardItem<E>::add_to_dq(int rows, int columns, const Factors* dscores, ptrdiff_t stride,
                                       const Factors* k, T* to) {
  constexpr int N = kElements<Factors>;
  for (int first = 0; first < most_; first += kBackwardKeys) {
    Depths part[kQueries / kRowPadding];
    for (int i = 0; i < rows / kRowPadding; ++i) {
      const Depths& kept = keys_of_rows_[i];
      part[i] = {std::max(kept.begin, first) / N, (std::min(kept.end, first + kBackwardKeys) + N - 1) / N};
    }
    accumulate<Layout::row_major>(rows, columns, part, dscores, stride, k, k_stride_, to, plan_.padded_head_dim, [] {});
  }
}

template <typename E>
template <int NV, Finish finish>
inline void BackwardItem<E>::scores(int rows, int lane) {
  static_assert(NV <= 3);
  constexpr int W = kWidth<T>;
  for (int i = 0; i < rows; i += kRows) {
    next_dq_.template step<Access::write>();
    next_q_.template step<Access::read>();
    next_dout_.template step<Access::read>();
    // The panel's vectors up to the last key that the rows keep.
    Depths kept = keys_of_rows_[i / kRowPadding];
    int vectors = kept.begin < lane + NV * W ? std::clamp((kept.end - lane + W - 1) / W, 0, NV) : 0;
    if (finish == Finish::full || vectors == NV) {
      scores_of_rows<NV, finish>(i, lane);
      continue;
    }
    for (int r = i; r < i + kRows; ++r) {
      int at = r * kKeys + lane + vectors * W;
      std::memset(weights_ + at, 0, sizeof(T) * (NV - vectors) * W);
      std::memset(dscores_ + at, 0, sizeof(T) * (NV - vectors) * W);
    }
    if (vectors == 2) {
      scores_of_part<std::min(NV, 2), finish>(i, lane);
    } else if (vectors == 1) {
      scores_of_part<1, finish>(i, lane);
    }
  }
}

template <typename E>
template <int NV, Finish finish>
__attribute__((noinline)) void BackwardItem<E>::scores_of_part(int i, int lane) {
  scores_of_rows<NV, finish>(i, lane);
}

template <typename E>
template <int NV, Finish finish>
JAX_FLASH_INLINE void BackwardItem<E>::scores_of_rows(int i, int lane) {
  const T* k = k_panels_ + static_cast<int64_t>(lane) * p_.head_dim;
  const T* v = v_panels_ + static_cast<int64_t>(lane) * p_.value_head_dim;
  Vec<T> scale = scale_of_products(scale_, options_, functions_);
  T* weights = weights_ + i * kKeys + lane;
  T* dscores = dscores_ + i * kKeys + lane;
  auto weight = [&](int r, int vector, const Vec<T>& score) __attribute__((always_inline)) {
    if constexpr (finish == Finish::later) return Vec<T>(score * scale);
    return weight_of<finish>(score * scale, i + r, lane + vector * kWidth<T>);
  };
  auto put_dscore = [&](int r, int vector, const Vec<T>& sum) __attribute__((always_inline)) {
    ptrdiff_t at = r * kKeys + vector * kWidth<T>;
    Vec<T> dscore = sum;
    if constexpr (finish != Finish::later) dscore = load(weights + at) * (sum - tile_delta_[i + r]);
    store<T>(dscores + at, dscore);
  };
  dot_kernel<NV>(p_.head_dim, tile_q_ + i * k_stride_, k_stride_, k, kPanel<T>,
                 [&](int r, int vector, const Vec<T>& score) __attribute__((always_inline)) {
                   store<T>(weights + r * kKeys + vector * kWidth<T>, weight(r, vector, score));
                 });
  dot_kernel<NV>(p_.value_head_dim, tile_dout_ + i * v_stride_, v_stride_, v, kPanel<T>, put_dscore);
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
