// The backward's weights and gradients of scores for calls with more than a scale and a band: modified scores
// (scores.h), mask, segments and dropout, and the gradients of bias and slopes.
#pragma once

#include "backward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
JAX_FLASH_INLINE auto BackwardItem<E>::changed(const Vec<T>& score, const typename Scores<E>::Row& row,
                                               const Vec<T>& distance, int lane) const -> Capped {
  Capped found{score, T(1)};
  if (options_.has_cap) {
    Tanh<T> capped = options_.cap(score);
    found = {capped.value, capped.derivative};
  }
  if (options_.has_addend) found.score = options_.add(found.score, options_.addend(row, first_ + lane));
  if (options_.has_slope) found.score -= slope_ * distance;
  return found;
}

template <typename E>
__attribute__((noinline)) void BackwardItem<E>::apply_functions(int64_t t, int rows, int lanes) {
  if constexpr (std::is_same_v<T, float>) {  // cpu.cc has refused others
    for (int i = 0; i < rows; ++i) {
      typename Scores<E>::Row row{};
      if (options_.has_addend) row = options_.row(batch_, head_, t + i);
      T position = static_cast<T>(t + i + sequence_.offset - first_);
      for (int lane = 0; lane < lanes && options_.any(); lane += kWidth<T>) {
        T* score = weights_ + i * kKeys + lane;
        Vec<T> distance = abs(position - (iota<T>() + static_cast<T>(lane)));
        Capped found = changed(load(score), row, distance, lane);
        store(score, functions_.takes_scores() ? found.score * static_cast<T>(kLn2) : found.score);
        if (options_.has_cap) store(cap_derivatives_ + i * kKeys + lane, found.derivative);
      }
      if (functions_.has_gradient()) std::copy_n(weights_ + i * kKeys, lanes, scores_before_ + i * kKeys);
    }
    functions_.apply<Unit::log2>(tile_of_functions(rows, lanes), weights_, kKeys, derivatives_,
                                 drops_ ? keep_ : nullptr, kKeys);
    for (int i = 0; options_.masks_functions && i < rows; ++i) {
      typename Scores<E>::Row row = options_.row(batch_, head_, t + i);
      for (int lane = 0; lane < lanes; lane += kWidth<T>) {
        T* score = weights_ + i * kKeys + lane;
        store(score, options_.without_masked(load(score), row, first_ + lane));
      }
    }
  }
}

template <typename E>
__attribute__((noinline)) void BackwardItem<E>::add_captured_gradients(int rows, int lanes) {
  if constexpr (std::is_same_v<T, float>) {
    functions_.add_gradients(tile_of_functions(rows, lanes), scores_before_, dscores_after_, kKeys, captured_sums_);
  }
}

template <typename E>
__attribute__((noinline)) void BackwardItem<E>::decide_functions(int64_t t, int rows) {
  for (int i = 0; i < rows; ++i) {
    row_indices_[i] = static_cast<int32_t>(t + i);
    positions_[i] = functions_.position(t + i);
    heads_[i] = functions_.head(head_);
  }
  const auto tile = tile_of_functions(rows, round_up(count_, kWidth<float>));
  drops_ = functions_.has_masks() && !functions_.decide(tile, keep_, kKeys).whole;
}

template <typename E>
template <bool large>
__attribute__((noinline)) void BackwardItem<E>::apply_options(int64_t t, int rows, int lanes) {
  constexpr int W = kWidth<T>;
  if (functions_) apply_functions(t, rows, lanes);
  T keep_factor = static_cast<T>(dropout_.factor());
  const bool restates = large && restates_;
  const uint32_t* bits = dropout_.active() && !restates ? fill_key_bits(t, rows) : nullptr;
  bool sums_bias = p_.dbias && !restates, sums_rows_of_bias = sums_bias && p_.bias_strides.row == 0 && rows > 1;
  if (sums_rows_of_bias) std::memset(dbias_, 0, sizeof(T) * kKeys);
  double dslope_sum = 0;
  for (int i = 0; i < rows; ++i) {
    typename Scores<E>::Row row{};
    if (options_.has_addend) row = options_.row(batch_, head_, t + i);
    T position = static_cast<T>(t + i + sequence_.offset - first_);
    Int<T> segment = compare_segments_ ? p_.q_segment_ids[batch_ * p_.q_length + t + i] : 0;
    T lse = restates ? T(0) : tile_lse_[i];
    Vec<T> dslope_row = T(0), dscore_row = T(0), distance_row = T(0), dbias_row = T(0);
    for (int lane = 0; lane < lanes; lane += W) {
      T* weights = weights_ + i * kKeys + lane;
      T* dscores = dscores_ + i * kKeys + lane;
      Vec<T> key = iota<T>() + static_cast<T>(lane);
      Vec<T> distance = abs(position - key);
      Vec<T> score = load(weights), derivative = T(1), of_functions = T(1);
      if (functions_) {
        of_functions = load(derivatives_ + i * kKeys + lane);
        if (options_.has_cap) derivative = load(cap_derivatives_ + i * kKeys + lane);
      } else {
        Capped found = changed(score, row, distance, lane);
        score = found.score;
        derivative = found.derivative;
      }
      score -= lse;
      if (compare_segments_) {
        put_where(load(segments_ + lane) != segment, score, -kInfinity<T>);
      }
      if (test_intervals_) {
        IntVec<T> begin = load(interval_begin_ + lane), end = load(interval_end_ + lane);
        put_where(begin > static_cast<Int<T>>(t + i) || end <= static_cast<Int<T>>(t + i), score, -kInfinity<T>);
      }
      put_where(key < kept_begin_[i] || key >= kept_end_[i], score, -kInfinity<T>);
      if (restates) {
        store(weights, score);
        continue;
      }
      // Rounding may lift a score above lse.
      clear_where(score > T(0), score);
      if (large) score -= tile_rest_[i];
      Vec<T> weight = exp2(score), used = weight, dweight = load(dscores);
      if (bits) {
        IntVec<T> kept = spread_bits<T>(bits[i * (kKeys / kDropoutKeys) + lane / kDropoutKeys] >> lane % kDropoutKeys);
        dweight *= keep_factor;
        clear_where(kept == 0, dweight);
        clear_where(kept == 0, used);
      }
      Vec<T> dscore = weight * (dweight - tile_delta_[i]), dscore_after = dscore;
      if (functions_) dscore *= of_functions;
      clear_where(weight == T(0), dscore);
      clear_where(weight == T(0), dscore_after);
      if (functions_.has_gradient()) store(dscores_after_ + i * kKeys + lane, dscore_after);
      store(weights, used);
      store<T>(dscores, dscore * derivative);
      if (p_.dalibi_slopes) {
        dslope_row += dscore * distance;
        dscore_row += dscore_after;
        if (functions_) {
          distance *= of_functions;
          clear_where(weight == T(0), distance);
        }
        distance_row += weight * distance;
      }
      if (!sums_bias) continue;
      if (p_.bias_strides.column == 0) {
        dbias_row += dscore;
      } else if (sums_rows_of_bias) {
        store<T>(dbias_ + lane, load(dbias_ + lane) + dscore);
      } else {
        add_to_bias(t + i, lane, dscore);
      }
    }
    if (restates) {
      add_to_statistics(sequence_.first_row + t + i, lanes, weights_ + i * kKeys);
      continue;
    }
    if (p_.dalibi_slopes) {
      dslope_sum += sum_of_lanes(dslope_row);
      SlopeSums& sums = *slope_sums(chunk_, head_, sequence_.first_row + t + i);
      sums.dscores += sum_of_lanes(dscore_row);
      sums.distances += sum_of_lanes(distance_row);
    }
    if (sums_bias && p_.bias_strides.column == 0) *dbias_at(t + i, 0) += sum_of_lanes(dbias_row);
  }
  if (restates) return;
  std::memset(weights_ + rows * kKeys, 0, sizeof(T) * (round_up(rows, kTilePadding<E>) - rows) * kKeys);
  std::memset(dscores_ + rows * kKeys, 0, sizeof(T) * (round_up(rows, kTilePadding<E>) - rows) * kKeys);
  if (functions_.has_gradient()) add_captured_gradients(rows, lanes);
  if (p_.dalibi_slopes) dslope(chunk_, head_, sequence_index_) += static_cast<T>(dslope_sum);
  if (sums_rows_of_bias && p_.bias_strides.column != 0) {
    for (int lane = 0; lane < lanes; lane += W) add_to_bias(t, lane, load(dbias_ + lane));
  }
}

template <typename E>
bool BackwardItem<E>::gather() {
  const int64_t first = sequence_.first_key + first_, head = kv_head_ * group();
  if (q_intervals_.range(head, 1, first, first + count_).covers(0, sequence_.rows)) return false;
  const int kept = q_intervals_.keeping_all(head, first, count_, 0, sequence_.rows, kept_);
  if (kept < 0) return false;
  if (!restates_) clear_keys(first_, first_ + count_);
  count_ = kept;
  return true;
}

template <typename E>
IntervalRange BackwardItem<E>::load_intervals() {
  int64_t first = sequence_.first_key + first_;
  for (int j = 0; j < plan_.keys; ++j) {
    Interval rows = q_intervals_.of(head_, first + std::min(j, count_ - 1));
    interval_begin_[j] = static_cast<Int<T>>(rows.begin);
    interval_end_[j] = static_cast<Int<T>>(rows.end);
  }
  return q_intervals_.range(head_, 1, first, first + count_);
}

template <typename E>
inline void BackwardItem<E>::add_to_bias(int64_t t, int lane, const Vec<T>& sum) const {
  T* to = dbias_at(t, first_ + lane);
  int count = count_ - lane;
  if (count >= kWidth<T>) {
    store<T>(to, load(to) + sum);
  } else if (count > 0) {
    store_some<T>(to, load_some(to, count) + sum, count);
  }
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
