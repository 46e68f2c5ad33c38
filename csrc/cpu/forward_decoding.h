// The forward of at most kDecodingRows queries, as in decoding.
#pragma once

#include "forward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
template <int R>
inline void ForwardItem<E>::decode(int64_t first, int count) {
  int all = plan_.together ? heads() : 1;
  int row = round_up(count, std::max(kWidth<T>, kDropoutKeys));  // of scores
  int64_t query_stride = int64_t{R} * k_stride_, score_stride = int64_t{R} * row;
  int64_t record_stride = record_size(), first_item = block_item_;
  T scale = scale_of_products(scale_, options_, functions_);
  with_rows<R>(p_.k, p_.head_dim, k_stride_ * kElements<F>, reinterpret_cast<E*>(k_), first, count, all,
               [&](int head, int j, int keys, const Rows<const E>& k, Ahead ahead) __attribute__((always_inline)) {
                 score_decoding<R>(keys, k, Rows<const F>{queries_ + head * query_stride, k_stride_, 0}, scale,
                                   scores_ + head * score_stride + j, row, ahead);
               });
  for (int head = 0; head < all; ++head) {
    T* scores = scores_ + head * score_stride;
    if (all > 1 && (options_.any() || options_.has_intervals || functions_ || dropout_.active())) {
      go_to(first_item + head);
      load_options(kDecodingRows);
    }
    if (dropout_.active()) {
      for (int i = 0; i < rows_; ++i) {
        for (int j = 0; j < count; j += kDropoutKeys) {
          dropout_.bits_of_keys(first_row_, first + j, i, key_bits_ + j / kDropoutKeys, keys_ / kDropoutKeys);
        }
      }
    }
    int64_t at = head * record_stride;
    softmax_decoding<R, E>(
        count, scores, row, maximum_ + at, sum_ + at, Rows<T>{out_ + at, v_stride_, v_stride_},
        [&](int i, T* scores) { finish_decoding(i, first, count, scores); },
        [&](int i, T* weights) {
          if (dropout_.active()) drop_decoding(i, count, weights);
        });
  }
  if (all > 1) go_to(first_item);
  with_rows<R>(p_.v, p_.value_head_dim, v_stride_, reinterpret_cast<E*>(v_), first, count, all,
               [&](int head, int j, int keys, const Rows<const E>& v, Ahead ahead) __attribute__((always_inline)) {
                 add_values_decoding<R>(j, keys, v, scores_ + head * score_stride, row,
                                        Rows<T>{out_ + head * record_stride, v_stride_, 0}, ahead);
               });
}

template <typename E>
template <int R, typename Body>
JAX_FLASH_INLINE void ForwardItem<E>::with_rows(const Tensor& x, int columns, int padded, E* copy, int64_t first,
                                                int count, int heads, Body body) {
  // With one row of elements of 32 bits the loop has so little work for each byte that hardware prefetching suffices:
  // software prefetches take 1.08 times as long out of memory.
  bool asks = R > 1 || (sizeof(E) == 2 && plan_.key_bytes > kFewCached);
  int group = p_.q_heads / p_.kv_heads, members = group / plan_.fold;
  bool in_place = columns == padded, in_order = in_place && heads > 1;
  int64_t row_bytes = x.row_stride * int64_t{sizeof(E)};
  int part = count;
  if (in_order) {
    constexpr int kStep = kFewStep<R, T>;
    part =
        static_cast<int>(std::clamp<int64_t>(round_down(kFewBytes / row_bytes, kStep), kStep, round_up(count, kStep)));
  }
  for (int j = 0; j < count; j += part) {
    int keys = std::min(part, count - j);
    const E* rows = row_of<const E>(x, batch_, sequence_.first_key + first + j, first_head_ / group);
    const char* next = nullptr;
    if (asks && in_order) next = reinterpret_cast<const char*>(rows) + std::min(part * row_bytes, kFewAhead);
    int64_t share = keys * columns * int64_t{sizeof(E)};
    for (int head = 0; head < heads;) {
      if (!in_place) {
        for (int i = 0; i < keys; ++i) {
          E* row = copy + static_cast<int64_t>(i) * padded;
          std::memcpy(row, rows + i * x.row_stride, sizeof(E) * columns);
          std::memset(row + columns, 0, sizeof(E) * (padded - columns));
        }
      }
      Rows<const E> of_head{in_place ? rows : copy, in_place ? ptrdiff_t{x.row_stride} : padded, padded};
      for (int member = 0; member < members && head < heads; ++member, ++head) {
        body(head, j, keys, of_head, Ahead{member == 0 ? next : nullptr});
      }
      if (next) next += share;
      rows += x.head_stride;
    }
  }
}

template <typename E>
inline void ForwardItem<E>::finish_decoding(int row, int64_t first, int count, T* scores) {
  int64_t t = first_position_ + static_cast<int64_t>(position_[row]);
  if (options_.any()) {
    for (int j = 0; j < count; j += kWidth<T>) {
      Vec<T> score = load(scores + j);
      if (options_.has_cap) score = options_.cap(score).value;
      if (options_.has_addend) score = options_.add(score, options_.addend(rows_of_options_[row], first + j));
      if (options_.has_slope) {
        score -= slopes_[row] * abs(static_cast<T>(t + sequence_.offset - first - j) - iota<T>());
      }
      if (functions_.takes_scores()) score *= static_cast<T>(kLn2);
      store(scores + j, score);
    }
  }
  if constexpr (std::is_same_v<T, float>) {  // as in forward_panels.h
    if (functions_) {
      const auto tile = tile_of_functions(row, round_up(count, kWidth<T>), first, 1, false);
      const bool drops = functions_.has_masks() && !functions_.decide(tile, keep_, 0).whole;
      functions_.apply<Unit::log2>(tile, scores, 0, nullptr, drops ? keep_ : nullptr, 0);
      for (int j = 0; options_.masks_functions && j < count; j += kWidth<T>) {
        store(scores + j, options_.without_masked(load(scores + j), rows_of_options_[row], first + j));
      }
    }
  }
  if (options_.has_segments) {
    const int* segments = p_.kv_segment_ids + batch_ * p_.kv_length + first;
    for (int j = 0; j < count; ++j) {
      if (segments[j] != segments_[row]) scores[j] = -kInfinity<T>;
    }
  }
  if (options_.has_intervals) {
    for (int j = 0; j < count; ++j) {
      Interval rows = q_intervals_.of(place(row).head, sequence_.first_key + first + j);
      bool kept =
          first + j >= interval_begin_[row] && first + j < interval_end_[row] && t >= rows.begin && t < rows.end;
      if (!kept) scores[j] = -kInfinity<T>;
    }
  }
  int begin = static_cast<int>(std::clamp<int64_t>(band_.begin(sequence_, t) - first, 0, count));
  int end = static_cast<int>(std::clamp<int64_t>(band_.end(sequence_, t) - first, begin, count));
  std::fill(scores, scores + begin, -kInfinity<T>);
  std::fill(scores + end, scores + round_up(count, kWidth<T>), -kInfinity<T>);
}

template <typename E>
inline void ForwardItem<E>::drop_decoding(int row, int count, T* weights) {
  for (int j = 0; j < count; j += kWidth<T>) {
    uint32_t bits = key_bits_[row * (keys_ / kDropoutKeys) + j / kDropoutKeys] >> (j % kDropoutKeys);
    Vec<T> weight = load(weights + j);
    clear_where(spread_bits<T>(bits) == 0, weight);
    store(weights + j, weight);
  }
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
