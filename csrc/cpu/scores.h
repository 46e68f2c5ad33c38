// What the options do to the scores of a tile. Scores are in units of log2, so that exp2 makes weights, but for score
// functions.
#pragma once

#include <limits>

#include "dropout.h"
#include "intervals.h"
#include "pack.h"
#include "pair_functions.h"
#include "ranges.h"
#include "softmax.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

template <typename E>
JAX_FLASH_INLINE E* row_of(const Tensor& x, int64_t batch, int64_t row, int64_t head) {
  return static_cast<E*>(x.data) + batch * x.batch_stride + row * x.row_stride + head * x.head_stride;
}

// The factor of the scores of a batch entry.
template <typename T>
double scale_of(const Problem& p, int64_t batch) {
  return p.traced_scale ? static_cast<const T*>(p.traced_scale)[batch] : p.options.scale;
}

// The options of one call that change scores, for either orientation of the tile.
template <typename E>
class Scores {
  using T = Compute<E>;

 public:
  explicit Scores(const Problem& p)
      : p_(p),
        has_cap(p.options.softcap != 0),
        has_arrays(p.bias || p.mask),
        masks_functions(p.mask && p.options.functions),
        has_addend(p.bias || (p.mask && !masks_functions)),
        has_slope(p.alibi_slopes),
        has_segments(p.q_segment_ids),
        has_intervals(p.kv_intervals || p.q_intervals),
        cap_(static_cast<T>(p.options.softcap * kLog2E)),
        cap_rate_(static_cast<T>(has_cap ? 2 / p.options.softcap : 0)) {}

  // Whether any option but the band, segments, intervals and functions changes scores.
  bool any() const { return has_cap || has_addend || has_slope; }

  // The capped score, and the derivative there.
  JAX_FLASH_INLINE Tanh<T> cap(const Vec<T>& x) const {
    Tanh<T> tanh = tanh_of_log2<T>(abs(x) * cap_rate_);
    IntVec<T> sign = std::numeric_limits<Int<T>>::min();
    Vec<T> value = tanh.value * cap_;
    return {bits_as<Vec<T>>(bits_as<IntVec<T>>(value) | (bits_as<IntVec<T>>(x) & sign)), tanh.derivative};
  }

  // Of one row; row 0 is the first of the array.
  struct Row {
    const char* bias;  // of key 0; null without bias
    const bool* mask;
  };
  Row row(int64_t batch, int64_t head, int64_t t) const {
    Row row{};
    if (p_.bias) {
      const Strides& s = p_.bias_strides;
      int64_t element = p_.options.wide_bias ? sizeof(T) : sizeof(E);
      row.bias = static_cast<const char*>(p_.bias) + (batch * s.batch + head * s.head + t * s.row) * element;
    }
    if (p_.mask) {
      const Strides& s = p_.mask_strides;
      row.mask = p_.mask + batch * s.batch + head * s.head + t * s.row;
    }
    return row;
  }

  // What bias and mask add to the scores of a row's keys s, s + 1, ...: -inf where the mask drops the pair, unless that
  // is done after score functions. Nothing
  // past the row's last key is read; the lanes there are undefined.
  JAX_FLASH_INLINE Vec<T> addend(const Row& row, int64_t s) const {
    Vec<T> sum = T(0);
    int64_t count = p_.kv_length - s;
    if (count <= 0) return sum;
    if (row.bias) {
      Vec<T> bias = p_.options.wide_bias ? elements(reinterpret_cast<const T*>(row.bias), s, count)
                                         : elements(reinterpret_cast<const E*>(row.bias), s, count);
      sum = in_log2<T>(bias);
    }
    return row.mask && !masks_functions ? without_masked(sum, row, s) : sum;
  }
  // `x` of the same keys, and -inf where the mask drops the pair.
  JAX_FLASH_INLINE Vec<T> without_masked(Vec<T> x, const Row& row, int64_t s) const {
    int64_t count = p_.kv_length - s;
    if (count <= 0) return x;
    bool whole = p_.mask_strides.column == 0;
    put_where(whole ? IntVec<T>(Int<T>{*row.mask}) == 0 : load_false<T>(row.mask + s, count), x, -kInfinity<T>);
    return x;
  }
  // The mask is a select, not a sum, so that it removes NaN too.
  static JAX_FLASH_INLINE Vec<T> add(const Vec<T>& x, const Vec<T>& addend) {
    Vec<T> sum = x + addend;
    put_where(addend == -kInfinity<T>, sum, -kInfinity<T>);
    return sum;
  }

  T slope(int64_t batch, int64_t sequence, int64_t head) const {
    if (!has_slope || sequence >= p_.options.sequences) return 0;
    int64_t at = (batch * p_.options.sequences + sequence) * p_.q_heads + head;
    return static_cast<T>(static_cast<const T*>(p_.alibi_slopes)[at] * kLog2E);
  }

  T sink(int64_t batch, int64_t head) const {
    return p_.sinks ? static_cast<const T*>(p_.sinks)[batch * p_.q_heads + head] : -kInfinity<T>;
  }

  const unsigned* seed(int64_t batch, int64_t sequence, int64_t head) const {
    return p_.dropout_seeds + ((batch * p_.options.sequences + sequence) * p_.q_heads + head) * 2;
  }

 private:
  template <typename B>
  JAX_FLASH_INLINE Vec<T> elements(const B* bias, int64_t s, int64_t count) const {
    if (p_.bias_strides.column == 0) return Vec<T>(load_some(bias, 1)[0]);
    return count >= kWidth<T> ? load_as(bias + s) : load_some(bias + s, static_cast<int>(count));
  }

  const Problem& p_;

 public:
  // has_arrays: a bias or a mask. masks_functions: the mask drops pairs after functions, which may make a finite score
  // of -inf. has_addend: something is added before.
  const bool has_cap, has_arrays, masks_functions, has_addend, has_slope, has_segments, has_intervals;

 private:
  T cap_, cap_rate_;
};

// What the products of queries and keys are multiplied by. Score functions take natural units.
template <typename E>
Compute<E> scale_of_products(double scale, const Scores<E>& scores, const PairFunctions& functions) {
  return static_cast<Compute<E>>(functions.takes_scores() && !scores.any() ? scale : scale * kLog2E);
}

// Whether pairs are kept by the intervals of keys, and nothing asks which key one is: so that keys which all rows keep
// may stand side by side.
template <typename E>
bool hides_keys_alone(const Problem& p, const Scores<E>& scores, const PairFunctions& functions,
                      const Dropout& dropout) {
  return p.q_intervals && !p.kv_intervals && !scores.any() && !scores.has_segments && !functions && !dropout.active();
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
