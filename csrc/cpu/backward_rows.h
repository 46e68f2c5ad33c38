// The backward's passes over rows, before and after the blocks of keys: copies, delta and lse, rows that are restated,
// and what chunks of keys have left.
#pragma once

#include "backward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
inline void BackwardItem<E>::prepare(int64_t item) {
  int64_t size = plan_.prepared_rows, parts = (p_.q_length + size - 1) / size, first = item % parts * size;
  batch_ = item / parts;
  if constexpr (kPairedBackward<E>) {
    if (plan_.copies) {
      int rows = static_cast<int>(std::min(size, p_.q_length - first));
      for (head_ = 0; head_ < p_.q_heads; ++head_) fill(Record(*this, record(head_, first)), first, rows);
    }
  }
  int64_t end = std::min<int64_t>(first + size, p_.q_length);
  bool large = false;
  for (int64_t t = first; t < end; ++t) {
    for (head_ = 0; head_ < p_.q_heads; ++head_) {
      const E* dout = row_of<const E>(p_.dout, batch_, t, head_);
      if (!kPairedBackward<E> && plan_.copies) {
        copy_row(row_of<const E>(p_.q, batch_, t, head_), p_.head_dim, k_stride_, q_copy(t));
        copy_row(dout, p_.value_head_dim, v_stride_, dout_copy(t));
      }
      T sum = dot(dout, row_of<const E>(p_.out, batch_, t, head_), p_.value_head_dim);
      // A row that keeps no key gets lse = +inf, hence weights exp2(-inf) = 0 whatever its gradients are; a finite
      // lse stays finite.
      double lse = *statistic(p_.lse, t);
      bool none = lse == -kInfinity<double>;
      constexpr double kLargest = std::numeric_limits<T>::max();
      *row_lse(t) = none ? kInfinity<T> : static_cast<T>(std::max(lse * kLog2E, -kLargest));
      *row_rest(t) = 0;
      // Restated is what these keys sum up to.
      if (!p_.options.partial_keys && std::abs(lse) > kLargeLse<T> && std::abs(lse) <= kLargest) {
        large = true;
        // The online softmax begins with the sink.
        *row_lse(t) = static_cast<T>(options_.sink(batch_, head_) * kLog2E);
        *row_rest(t) = *row_lse(t) == -kInfinity<T> ? 0 : 1;
      }
      *delta(t) = none ? 0 : sum - *statistic(p_.dlse, t);
    }
  }
  if (large) restate(first, end);
}

template <typename E>
inline void BackwardItem<E>::reduce(int64_t item) {
  int64_t block = item % plan_.row_blocks, head = item / plan_.row_blocks % p_.q_heads;
  batch_ = item / plan_.row_blocks / p_.q_heads;
  kv_head_ = head / group();
  if (block == 0 && p_.dalibi_slopes) reduce_slopes(head);
  int64_t index = is_packed(p_) ? sequence_of_block(p_, batch_, block, 1, kReduceRows) : 0;
  go_to_sequence(index);
  // The sums of the chunks that touched these rows, in the order of the chunks.
  const T* parts[kMaxChunks];
  int count = 0;
  int64_t t = (block - first_block_) * kReduceRows, stride = plan_.padded_head_dim;
  for (chunk_ = 0; chunk_ < plan_.chunks; ++chunk_) {
    if (touched()[block] != 0) parts[count++] = dq(head, t);
  }
  T* zeros = q_ + k_stride_;
  std::memset(zeros, 0, sizeof(T) * k_stride_);
  int64_t rows = std::min<int64_t>(kReduceRows, sequence_.all_rows - t);
  for (int64_t row = 0; row < rows; ++row) {
    bool summed = count > 0 && t + row < sequence_.rows;
    const T* sum = summed ? parts[0] + row * stride : zeros;
    if (summed && count > 1) {
      for (int h = 0; h < p_.head_dim; h += kWidth<T>) {
        Vec<T> total = load(parts[0] + row * stride + h);
        for (int part = 1; part < count; ++part) total += load(parts[part] + row * stride + h);
        store(q_ + h, total);
      }
      sum = q_;
    }
    store_row(sum, p_.head_dim, static_cast<T>(scale_), row_of<E>(p_.dq, batch_, sequence_.first_row + t + row, head));
  }
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
