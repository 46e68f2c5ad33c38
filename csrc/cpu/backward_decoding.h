// The backward of at most kDecodingRows queries, as in decoding.
#pragma once

#include "backward.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
inline bool BackwardItem<E>::may_decode() const {
  int64_t rows = group() * sequence_.rows;
  return !plan_.in_turn && rows > 0 && rows <= (group() > 1 ? kDecodingRows : kDecodingRows / 2) && !is_packed(p_) &&
         !options_.any() && !options_.has_segments && !options_.has_intervals && !functions_ && !dropout_.active() &&
         p_.head_dim % kWidth<T> == 0 && p_.value_head_dim % kWidth<T> == 0;
}

template <typename E>
inline bool BackwardItem<E>::decode() {
  int rows = static_cast<int>(sequence_.rows), most = 0;
  for (int member = 0; member < group(); ++member) {
    head_ = kv_head_ * group() + member;
    load_queries(0, rows, member * rows);
    if (large_) return false;
    most = std::max(most, most_);
  }
  most_ = most;
  touch(0);
  rows *= group();
  if (rows == 1) {
    decode_rows<1>(rows);
  } else if (rows == 2) {
    decode_rows<2>(rows);
  } else if (rows <= 4) {
    decode_rows<4>(rows);
  } else {
    decode_rows<kDecodingRows>(rows);
  }
  return true;
}

template <typename E>
template <int R>
inline void BackwardItem<E>::decode_rows(int rows) {
  constexpr int W = kWidth<T>;
  Rows<const E> k{row_of<const E>(p_.k, batch_, first_, kv_head_), p_.k.row_stride, p_.head_dim};
  Rows<const E> v{row_of<const E>(p_.v, batch_, first_, kv_head_), p_.v.row_stride, p_.value_head_dim};
  // The products of a row with W keys. Past the last key they repeat it; those weights are cleared.
  auto dots = [&](const Rows<const E>& keys, int j, const T* row) __attribute__((always_inline)) {
    Vec<T> products[W];
    const E* from[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      products[i] = T(0);
      from[i] = keys.data + std::min(j + i, count_ - 1) * keys.stride;
    }
    for (int h = 0; h < keys.columns; h += W) {
      Vec<T> factor = load(row + h);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) products[i] = multiply_add(load_as(from[i] + h), factor, products[i]);
    }
    return sums<T>(products);
  };
  Vec<T> scale = static_cast<T>(scale_ * kLog2E);
  for (int j = 0; j < count_; j += W) {
    Vec<T> key = iota<T>() + static_cast<T>(j);
    for (int r = 0; r < R; ++r) {
      Vec<T> weight = T(0), dscore = T(0);
      if (j < most_) {
        weight = exp2(dots(k, j, q_ + r * k_stride_) * scale - lse_[r]);
        clear_where(key < kept_begin_[r] || key >= kept_end_[r], weight);
        dscore = weight * (dots(v, j, dout_ + r * v_stride_) - delta_[r]);
      }
      store(weights_ + r * kKeys + j, weight);
      store(dscores_ + r * kKeys + j, dscore);
    }
  }
  T* dq_rows[R];
  int rows_of_head = rows / group();
  for (int r = 0; r < R; ++r) {
    // Padding rows add zeros to a buffer that is unused here.
    dq_rows[r] = r < rows ? dq(kv_head_ * group() + r / rows_of_head, r % rows_of_head) : k_;
  }
  for_columns<R>(p_.value_head_dim, [&](int h, auto vectors) __attribute__((always_inline)) {
    put_decoding<R, vectors.value>(weights_, dout_ + h, v_stride_, T(1), row_of<E>(p_.dv, batch_, first_, kv_head_) + h,
                                   p_.dv.row_stride);
  });
  for_columns<R>(p_.head_dim, [&](int h, auto vectors) __attribute__((always_inline)) {
    constexpr int NV = vectors.value;
    put_decoding<R, NV>(dscores_, q_ + h, k_stride_, static_cast<T>(scale_),
                        row_of<E>(p_.dk, batch_, first_, kv_head_) + h, p_.dk.row_stride);
    Vec<T> sum[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sum[r][i] = load(dq_rows[r] + h + i * W);
    }
    for (int j = 0; j < most_; ++j) {
      Vec<T> key[NV];
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) key[i] = load_as(k.data + j * k.stride + h + i * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) sum[r][i] = multiply_add(key[i], dscores_[r * kKeys + j], sum[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) store(dq_rows[r] + h + i * W, sum[r][i]);
    }
  });
}

template <typename E>
template <int R, typename Body>
JAX_FLASH_INLINE void BackwardItem<E>::for_columns(int columns, Body body) {
  constexpr int W = kWidth<T>, kTogether = R * 4 <= kRows * kVecs ? 4 : R * 2 <= kRows * kVecs ? 2 : 1;
  int h = 0;
  for (; h + kTogether * W <= columns; h += kTogether * W) body(h, std::integral_constant<int, kTogether>{});
  for (; h < columns; h += W) body(h, std::integral_constant<int, 1>{});
}

template <typename E>
template <int R, int NV>
JAX_FLASH_INLINE void BackwardItem<E>::put_decoding(const T* factors, const T* rows, ptrdiff_t stride, T scale, E* to,
                                                    ptrdiff_t to_stride) {
  constexpr int W = kWidth<T>;
  Vec<T> row[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) row[r][i] = load(rows + r * stride + i * W);
  }
  for (int j = 0; j < count_; ++j) {
    Vec<T> sum[NV];
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) sum[i] = row[0][i] * factors[j];
#pragma GCC unroll 8
    for (int r = 1; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sum[i] = multiply_add(row[r][i], factors[r * kKeys + j], sum[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) store_as<E>(to + j * to_stride + i * W, sum[i] * scale);
  }
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
