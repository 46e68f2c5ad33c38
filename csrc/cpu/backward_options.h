// The backward's weights and gradients of scores for calls with more than a scale and a band: modified scores
// (scores.h), mask, segments and dropout, and the gradients of bias and slopes.
#pragma once

#include "backward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
template <bool large>
__attribute__((noinline)) void BackwardItem<E>::apply_options(int64_t t, int rows, int lanes) {
  constexpr int W = kWidth<T>;
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
      Vec<T> distance = stdx::abs(position - key);
      Vec<T> score = load(weights), derivative = T(1);
      if (options_.has_cap) {
        Tanh<T> capped = options_.cap(score);
        score = capped.value;
        derivative = capped.derivative;
      }
      if (options_.has_addend) score = options_.add(score, options_.addend(row, first_ + lane));
      if (options_.has_slope) score -= slope_ * distance;
      score -= lse;
      if (compare_segments_) {
        put_where<T>(IntVec<T>(segments_ + lane, stdx::element_aligned) != segment, score, -kInfinity<T>);
      }
      if (test_intervals_) {
        IntVec<T> begin(interval_begin_ + lane, stdx::element_aligned),
            end(interval_end_ + lane, stdx::element_aligned);
        put_where<T>(begin > static_cast<Int<T>>(t + i) || end <= static_cast<Int<T>>(t + i), score, -kInfinity<T>);
      }
      stdx::where(key < kept_begin_[i] || key >= kept_end_[i], score) = -kInfinity<T>;
      if (restates) {
        store(weights, score);
        continue;
      }
      // Rounding may lift a score above lse.
      stdx::where(score > T(0), score) = T(0);
      if (large) score -= tile_rest_[i];
      Vec<T> weight = exp2(score), used = weight, dweight = load(dscores);
      if (bits) {
        IntVec<T> kept = spread_bits<T>(bits[i * (kKeys / kDropoutKeys) + lane / kDropoutKeys] >> lane % kDropoutKeys);
        dweight *= keep_factor;
        put_where<T>(kept == 0, dweight, T(0));
        put_where<T>(kept == 0, used, T(0));
      }
      Vec<T> dscore = weight * (dweight - tile_delta_[i]);
      stdx::where(weight == T(0), dscore) = T(0);
      store(weights, used);
      store<T>(dscores, dscore * derivative);
      if (p_.dalibi_slopes) {
        dslope_row += dscore * distance;
        dscore_row += dscore;
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
      dslope_sum += stdx::reduce(dslope_row);
      SlopeSums& sums = *slope_sums(chunk_, head_, sequence_.first_row + t + i);
      sums.dscores += stdx::reduce(dscore_row);
      sums.distances += stdx::reduce(distance_row);
    }
    if (sums_bias && p_.bias_strides.column == 0) *dbias_at(t + i, 0) += stdx::reduce(dbias_row);
  }
  if (restates) return;
  std::memset(weights_ + rows * kKeys, 0, sizeof(T) * (round_up(rows, kTilePadding<E>) - rows) * kKeys);
  std::memset(dscores_ + rows * kKeys, 0, sizeof(T) * (round_up(rows, kTilePadding<E>) - rows) * kKeys);
  if (p_.dalibi_slopes) dslope(chunk_, head_, sequence_index_) += static_cast<T>(dslope_sum);
  if (sums_rows_of_bias && p_.bias_strides.column != 0) {
    for (int lane = 0; lane < lanes; lane += W) add_to_bias(t, lane, load(dbias_ + lane));
  }
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
inline bool BackwardItem<E>::has_restated(int64_t begin, int64_t end) {
  for (int member = 0; member < group(); ++member) {
    head_ = kv_head_ * group() + member;
    for (int64_t t = begin; t < end; ++t) {
      if (is_restated(t)) return true;
    }
  }
  return false;
}

template <typename E>
void BackwardItem<E>::restate(int64_t first, int64_t end) {
  restates_ = true;
  chunk_ = 0;
  for (int64_t index = 0; index < sequence_count(p_); ++index) {
    go_to_sequence(index);
    restated_begin_ = std::max<int64_t>(first - sequence_.first_row, 0);
    restated_end_ = std::min<int64_t>(end - sequence_.first_row, sequence_.rows);
    for (kv_head_ = 0; kv_head_ < p_.kv_heads; ++kv_head_) {
      if (!has_restated(sequence_.first_row + restated_begin_, sequence_.first_row + restated_end_)) continue;
      for (int64_t key = 0; key < sequence_.keys; key += plan_.keys) attend_block(key);
    }
  }
  restates_ = false;
  for (head_ = 0; head_ < p_.q_heads; ++head_) {
    for (int64_t t = first; t < end; ++t) {
      if (!is_restated(t)) continue;
      T &sum = *row_rest(t), rest = static_cast<T>(__builtin_log2(sum));
      if (sum == 0) {
        *row_lse(t) = kInfinity<T>;
      } else {
        // A rest of 0 would say that the row is not restated.
        sum = std::max(rest, std::numeric_limits<T>::min());
      }
    }
  }
}

template <typename E>
inline void BackwardItem<E>::add_to_statistics(int64_t t, int lanes, T* scores) const {
  if (!is_restated(t)) return;
  auto nothing = [](int, T*) {};
  softmax_decoding<1, T>(lanes, scores, kKeys, row_lse(t), row_rest(t), Rows<T>{}, nothing, nothing);
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

template <typename E>
inline void BackwardItem<E>::reduce_slopes(int64_t head) {
  head_ = head;
  double sink = static_cast<double>(options_.sink(batch_, head)) * kLog2E;
  for (int64_t index = 0; index < p_.options.sequences; ++index) {
    go_to_sequence(index);
    double sum = 0;
    for (int chunk = 0; chunk < plan_.chunks; ++chunk) sum += dslope(chunk, head, index);
    for (int64_t t = sequence_.first_row; t < sequence_.first_row + sequence_.rows; ++t) {
      double dscores = 0, distances = 0;
      for (int chunk = 0; chunk < plan_.chunks; ++chunk) {
        SlopeSums sums = *slope_sums(chunk, head, t);
        dscores += sums.dscores;
        distances += sums.distances;
      }
      // Of some of the keys the exact sum is not known.
      if (distances == 0 || p_.options.partial_keys) continue;
      // With the sink's, the weights add up to 1, and the sum of weight * (dweight - delta) over keys and sink is dlse.
      double of_sink = __builtin_exp2(sink - *row_lse(t) - *row_rest(t)) * *delta(t);
      sum += (*statistic(p_.dlse, t) + of_sink - dscores) * distances;
    }
    static_cast<T*>(p_.dalibi_slopes)[(batch_ * p_.options.sequences + index) * p_.q_heads + head] =
        static_cast<T>(-sum);
  }
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
