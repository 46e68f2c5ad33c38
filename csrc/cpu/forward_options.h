// The forward's scores for calls with more than a scale and a band: modified scores (scores.h), mask, segments and
// dropout.
#pragma once

#include "forward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
template <int NV, typename Of>
inline void ForwardItem<E>::fill_addends(int row, int64_t first, int keys, Of of) {
  constexpr int W = kWidth<T>;
  for (int v = 0; v < NV; ++v) {
    const typename Scores<E>::Row* rows = rows_of_options_ + row + v * W;
    for (int j = 0; j < keys; j += W) {
      Vec<T> tile[W];
      for (int i = 0; i < W; ++i) tile[i] = of(rows[i], first + j);
      transpose<T>(tile);
      for (int i = 0; i < W; ++i) store(addends_ + (j + i) * kPanel<T> + v * W, tile[i]);
    }
  }
}

template <typename E>
inline void ForwardItem<E>::fill_lane_bits(int64_t first, int count) {
  for (int row = 0; row < rows_; row += kDropoutRows) {
    int64_t t = first_row_ + row;
    int64_t begin = std::clamp<int64_t>(band_.begin(sequence_, t) - first, 0, count);
    int64_t end = std::clamp<int64_t>(band_.end(sequence_, t + kDropoutRows - 1) - first, 0, count);
    for (int64_t j = round_down(begin, kDropoutKeys); j < end; j += kDropoutKeys) {
      dropout_.bits_of_rows(t, first + j, lane_bits_ + j * bit_rows_ + row / kDropoutRows, bit_rows_);
    }
  }
}

template <typename E>
template <int NV>
__attribute__((noinline)) void ForwardItem<E>::mask(int row, const Kept& kept, int64_t first, int keys) {
  // Key s is kept by positions from s - right to s + left.
  const T* position = position_ + row;
  int64_t key = relative(first);
  int full_begin = static_cast<int>(std::clamp<int64_t>(kept.full_begin - first, 0, keys));
  int full_end = static_cast<int>(std::clamp<int64_t>(kept.full_end - first, full_begin, keys));
  auto ends = [&](int j, int v, Vec<T>& score) __attribute__((always_inline)) {
    put_where(load(position + v * kWidth<T>) < static_cast<T>(key + j - band_.right), score, -kInfinity<T>);
  };
  change_scores<NV>(0, full_begin, [&](int j, int v, Vec<T>& score) __attribute__((always_inline)) {
    ends(j, v, score);
    put_where(load(position + v * kWidth<T>) > static_cast<T>(key + j + band_.left), score, -kInfinity<T>);
  });
  // From full_begin on no band has yet to begin.
  change_scores<NV>(full_end, keys, ends);
}

template <typename E>
template <int NV>
__attribute__((noinline)) void ForwardItem<E>::compare_segments(int row, const Kept& kept, int64_t first, int keys) {
  if (kept.segments.is_only(key_segments(p_, batch_, first, first + keys))) return;
  const int* segments = p_.kv_segment_ids + batch_ * p_.kv_length + first;
  IntVec<T> own[NV];
  for (int v = 0; v < NV; ++v) own[v] = load(segments_ + row + v * kWidth<T>);
  change_scores<NV>(0, keys, [&](int j, int v, Vec<T>& score) __attribute__((always_inline)) {
    put_where(own[v] != Int<T>{segments[j]}, score, -kInfinity<T>);
  });
}

template <typename E>
template <int NV>
__attribute__((noinline)) void ForwardItem<E>::apply_options(int row, int64_t first, int keys) {
  if (options_.has_cap) {
    change_scores<NV>(
        0, keys, [&](int, int, Vec<T>& score) __attribute__((always_inline)) { score = options_.cap(score).value; });
  }
  if (options_.has_addend) {
    fill_addends<NV>(row, first, keys, [&](const auto& of_row, int64_t s) { return options_.addend(of_row, s); });
    change_scores<NV>(0, keys, [&](int j, int v, Vec<T>& score) __attribute__((always_inline)) {
      score = options_.add(score, load(addends_ + j * kPanel<T> + v * kWidth<T>));
    });
  }
  if (options_.has_slope) {
    int64_t key = relative(first);
    change_scores<NV>(0, keys, [&](int j, int v, Vec<T>& score) __attribute__((always_inline)) {
      Vec<T> distance = abs(load(position_ + row + v * kWidth<T>) - static_cast<T>(key + j));
      score -= load(slopes_ + row + v * kWidth<T>) * distance;
    });
  }
}

template <typename E>
template <int NV>
__attribute__((noinline)) void ForwardItem<E>::drop_masked(int row, int64_t first, int keys) {
  fill_addends<NV>(row, first, keys,
                   [&](const auto& of_row, int64_t s) { return options_.without_masked(Vec<T>(T(0)), of_row, s); });
  change_scores<NV>(0, keys, [&](int j, int v, Vec<T>& score) __attribute__((always_inline)) {
    score = options_.add(score, load(addends_ + j * kPanel<T> + v * kWidth<T>));
  });
}

template <typename E>
template <int NV>
__attribute__((noinline)) void ForwardItem<E>::test_intervals(int row, const Kept& kept, int64_t first, int keys) {
  bool rows_keep_all = !kv_intervals_ || kept.intervals.covers(first, first + keys);
  if (rows_keep_all && (!q_intervals_ || intervals_of_keys(first, first + keys).covers(kept.first_row, kept.end_row))) {
    return;
  }
  IntVec<T> rows[NV], begin[NV], end[NV];
  for (int v = 0; v < NV; ++v) {
    const int lane = row + v * kWidth<T>;
    rows[v] = load(rows_in_lanes_ + lane);
    begin[v] = load(interval_begin_ + lane);
    end[v] = load(interval_end_ + lane);
  }
  for (int j = 0; j < keys; ++j) {
    // Heads are folded only where they share the intervals of keys.
    Interval of_key = q_intervals_.of(first_head_, sequence_.first_key + first + j);
    IntVec<T> key = static_cast<Int<T>>(first + j);
    IntVec<T> first_row = static_cast<Int<T>>(of_key.begin), end_row = static_cast<Int<T>>(of_key.end);
    change_scores<NV>(j, j + 1, [&](int, int v, Vec<T>& score) __attribute__((always_inline)) {
      put_where(key < begin[v] || key >= end[v] || rows[v] < first_row || rows[v] >= end_row, score, -kInfinity<T>);
    });
  }
}

template <typename E>
bool ForwardItem<E>::gather(int64_t first, int& count, RowsOfKeys<E>& k, RowsOfKeys<E>& v) {
  int64_t first_row = panel_[0].kept.first_row, end_row = panel_[0].kept.end_row;
  for (int i = 1; i < panel_count_; ++i) {
    first_row = std::min(first_row, panel_[i].kept.first_row);
    end_row = std::max(end_row, panel_[i].kept.end_row);
  }
  if (intervals_of_keys(first, first + count).covers(first_row, end_row)) return false;
  // Heads are folded only where they share the intervals of keys.
  const int kept = q_intervals_.keeping_all(first_head_, sequence_.first_key + first, count, first_row, end_row, kept_);
  if (kept < 0) return false;
  gather_rows(k.first, k.stride, p_.head_dim, kept_, kept, gathered_k_);
  gather_rows(v.first, v.stride, p_.value_head_dim, kept_, kept, gathered_v_);
  count = kept;
  k = {gathered_k_, p_.head_dim};
  v = {gathered_v_, p_.value_head_dim};
  return true;
}

template <typename E>
inline void ForwardItem<E>::load_options(int lanes) {
  if (options_.any() || options_.has_segments || options_.has_intervals || functions_) {
    for (int row = 0; row < lanes; ++row) {
      Place at = place(std::min(row, rows_ - 1));
      if (options_.has_arrays) rows_of_options_[row] = options_.row(batch_, at.head, at.t);
      if (options_.has_slope) slopes_[row] = options_.slope(batch_, sequence_index_, at.head);
      if (options_.has_segments) segments_[row] = p_.q_segment_ids[batch_ * p_.q_length + at.t];
      if (options_.has_intervals) {
        Interval keys = kv_intervals_.of(at.head, sequence_.first_row + at.t);
        rows_in_lanes_[row] = static_cast<Int<T>>(at.t);
        interval_begin_[row] = static_cast<Int<T>>(keys.begin);
        interval_end_[row] = static_cast<Int<T>>(keys.end);
      }
      if (functions_) {
        row_indices_[row] = static_cast<int32_t>(at.t);
        positions_[row] = functions_.position(at.t);
        heads_[row] = functions_.head(at.head);
      }
    }
  }
  // One seed for all rows: heads are folded only without dropout.
  if (dropout_.active()) dropout_.seed(options_.seed(batch_, sequence_index_, first_head_));
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
