// The forward pass of one item: a block of queries against a part of the keys.
//
// Queries stand in the lanes. So the softmax needs no reduction across lanes, K and V are read as they lie in memory,
// one element at a time, and only the block of queries is transposed, once. Few queries take another way: few.h.
#pragma once

#include <algorithm>

#include "few.h"
#include "isa.h"
#include "pack.h"
#include "softmax.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

template <typename E>
JAX_FLASH_INLINE E* row_of(const Tensor& x, int64_t batch, int64_t row, int64_t head) {
  return static_cast<E*>(x.data) + batch * x.batch_stride + row * x.row_stride + head * x.head_stride;
}

// Elements of a row in our buffers: whole vectors, and whole row groups where head_dim stands in the rows of A.
template <typename T>
int padded_head_dim(int head_dim) {
  return round_up(head_dim, std::max(kWidth<T>, kRowPadding));
}

constexpr int key_block(int head_dim) { return head_dim <= 64 ? 256 : head_dim <= 128 ? 192 : 128; }

template <typename E>
class ForwardItem {
  using T = Compute<E>;

 public:
  // With a null workspace the object is good for workspace() only.
  ForwardItem(const Problem& p, const ForwardPlan& plan, void* workspace)
      : p_(p),
        plan_(plan),
        stride_(padded_head_dim<T>(p.head_dim)),
        // K, V and the panels' own tiles have to stay in the second-level cache together.
        keys_(key_block(p.head_dim)),
        panels_((plan.block_rows + kPanel<T> - 1) / kPanel<T>) {
    Arena arena(workspace);
    int64_t lanes = static_cast<int64_t>(panels_) * kPanel<T>;
    int64_t key_elements = static_cast<int64_t>(keys_) * stride_;
    queries_ = arena.take<T>(lanes * stride_);
    out_ = arena.take<T>(lanes * stride_);
    k_ = arena.take<T>(key_elements);
    v_ = arena.take<T>(key_elements);
    scores_ = arena.take<T>(static_cast<int64_t>(keys_) * std::max(kPanel<T>, kFewRows));
    maximum_ = arena.take<T>(lanes);
    sum_ = arena.take<T>(lanes);
    position_ = arena.take<T>(lanes);
    decay_ = arena.take<T>(kPanel<T>);
    workspace_ = arena.used();
  }

  size_t workspace() const { return workspace_; }

  void run(int64_t item, void* partials) {
    int64_t split = item % plan_.splits, block_item = item / plan_.splits;
    go_to(block_item);
    // Positions are relative to this one, so that they are small and exact in T.
    first_position_ = plan_.fold == 1 ? first_row_ : 0;
    offset_ = p_.q_offset ? p_.q_offset[batch_] : 0;
    load_queries();

    int64_t limit = key_limit(0, rows_);
    int64_t share = round_up((limit + plan_.splits - 1) / plan_.splits, int64_t{kRowPadding});
    int64_t begin = std::min(limit, split * share), end = std::min(limit, begin + share);
    for (int64_t first = begin; first < end; first += keys_) {
      int count = static_cast<int>(std::min<int64_t>(keys_, end - first));
      int64_t kv_head = first_head_ / (p_.q_heads / p_.kv_heads);
      int padded = round_up(count, kRowPadding);
      const E* k = row_of<const E>(p_.k, batch_, first, kv_head);
      const E* v = row_of<const E>(p_.v, batch_, first, kv_head);
      if (few() && p_.head_dim % kWidth<T> == 0) {
        attend_few_rows(first, count, k, p_.k.row_stride, v, p_.v.row_stride);
        continue;
      }
      copy_rows(k, p_.k.row_stride, count, p_.head_dim, padded, stride_, k_);
      copy_rows(v, p_.v.row_stride, count, p_.head_dim, padded, stride_, v_);
      if (few()) {
        attend_few_rows<T>(first, count, k_, stride_, v_, stride_);
        continue;
      }
      for (int row = 0; row < rows_; row += kPanel<T>) {
        int lanes = std::min(kPanel<T>, rows_ - row);
        int keys = static_cast<int>(std::clamp<int64_t>(key_limit(row, lanes) - first, 0, count));
        if (keys == 0) continue;
        with_vectors((lanes + kWidth<T> - 1) / kWidth<T>,
                     [&](auto nv) __attribute__((always_inline)) { attend<nv.value>(row, lanes, first, keys); });
      }
    }
    if (plan_.splits == 1) {
      store_rows();
    } else {
      store_partial(partials, block_item * plan_.splits + split);
    }
  }

  // Rows of the blocks' splits, weighted by their shares of the softmax's denominator.
  void combine(int64_t block_item, const void* partials) {
    go_to(block_item);
    const T* records = static_cast<const T*>(partials) + block_item * plan_.splits * record_size();
    for (int row = 0; row < rows_; ++row) {
      auto lse_of = [&](int split) { return double{records[split * record_size() + row]}; };
      double highest = -kInfinity<double>;
      for (int split = 0; split < plan_.splits; ++split) {
        // Not the maximum function, which may lose a NaN.
        if (!(lse_of(split) <= highest)) highest = lse_of(split);
      }
      double total = 0;
      for (int split = 0; split < plan_.splits && highest != -kInfinity<double>; ++split) {
        total += __builtin_exp2(lse_of(split) - highest);
      }
      T* sums = out_;
      std::memset(sums, 0, sizeof(T) * stride_);
      for (int split = 0; split < plan_.splits && total != 0; ++split) {
        double weight = __builtin_exp2(lse_of(split) - highest);
        if (weight == 0) continue;
        const T* part = records + split * record_size() + plan_.block_rows + static_cast<int64_t>(row) * stride_;
        for (int h = 0; h < stride_; h += kWidth<T>) {
          store<T>(sums + h, load(sums + h) + Vec<T>(static_cast<T>(weight)) * load(part + h));
        }
      }
      store_result(row, sums, total == 0 ? 0 : 1 / total, highest, total);
    }
  }

  // Elements of what a split leaves to combine(): the log2-sum-exp2 of its rows, and their outputs.
  int64_t record_size() const { return static_cast<int64_t>(plan_.block_rows) * (1 + stride_); }

 private:
  // The last blocks keep the most keys when causal: they go first, so that the threads end together.
  void go_to(int64_t block_item) {
    int heads = p_.q_heads / plan_.fold;
    int64_t head = block_item % (static_cast<int64_t>(p_.batch) * heads);
    int64_t block = plan_.blocks - 1 - block_item / (static_cast<int64_t>(p_.batch) * heads);
    batch_ = head / heads;
    first_head_ = head % heads * plan_.fold;
    first_row_ = block * plan_.block_rows;
    rows_ = static_cast<int>(std::min<int64_t>(plan_.block_rows, plan_.rows - first_row_));
  }

  bool few() const { return plan_.rows <= kFewRows; }

  struct Place {
    int64_t t, head;
  };
  Place place(int row) const {
    int64_t r = first_row_ + row;
    if (plan_.fold == 1) return {r, first_head_};
    return {r % p_.q_length, first_head_ + r / p_.q_length};
  }

  // Keys that some of the rows keep: those before the result.
  int64_t key_limit(int row, int rows) const {
    if (!p_.options.causal) return p_.kv_length;
    const T* position = position_ + row;
    int64_t last = static_cast<int64_t>(*std::max_element(position, position + rows));
    return std::clamp<int64_t>(first_position_ + last + offset_ + 1, 0, p_.kv_length);
  }

  void load_queries() {
    T* rows = few() ? queries_ : out_;
    // Queries that become lanes pass through out_, which is free until the first product.
    for (int row = 0; row < rows_; ++row) {
      Place at = place(row);
      position_[row] = static_cast<T>(at.t - first_position_);
      copy_row(row_of<const E>(p_.q, batch_, at.t, at.head), p_.head_dim, stride_, rows + row * stride_);
    }
    int lanes = round_up(rows_, few() ? kFewRows : kWidth<T>);
    std::memset(rows + rows_ * stride_, 0, sizeof(T) * (lanes - rows_) * stride_);
    std::fill(position_ + rows_, position_ + lanes, position_[rows_ - 1]);
    if (!few()) transpose_to_panels(out_, stride_, lanes, p_.head_dim, queries_);
    std::memset(out_, 0, sizeof(T) * panels_ * kPanel<T> * stride_);
    std::fill(maximum_, maximum_ + lanes, -kInfinity<T>);
    std::memset(sum_, 0, sizeof(T) * lanes);
  }

  template <typename Element>
  void attend_few_rows(int64_t first, int count, const Element* k, ptrdiff_t k_stride, const Element* v,
                       ptrdiff_t v_stride) {
    int kept[kFewRows] = {};
    for (int row = 0; row < rows_; ++row) {
      kept[row] = static_cast<int>(std::clamp<int64_t>(key_limit(row, 1) - first, 0, count));
    }
    T scale = static_cast<T>(p_.options.scale * kLog2E);
    auto attend = [&](auto rows) {
      attend_few<rows.value>(count, round_up(p_.head_dim, kWidth<T>), k, k_stride, v, v_stride, queries_, out_, stride_,
                             scale, kept, scores_, keys_, maximum_, sum_);
    };
    if (rows_ == 1) return attend(std::integral_constant<int, 1>{});
    if (rows_ == 2) return attend(std::integral_constant<int, 2>{});
    attend(std::integral_constant<int, kFewRows>{});
  }

  template <int NV>
  void attend(int row, int lanes, int64_t first, int keys) {
    const T* queries = queries_ + static_cast<int64_t>(row) * p_.head_dim;
    T* out = out_ + static_cast<int64_t>(row) * stride_;
    T* scores = scores_;
    // Not folded into the queries: products of 16-bit numbers are exact, those of scaled ones are not.
    Vec<T> scale = static_cast<T>(p_.options.scale * kLog2E);
    for (int j = 0; j < keys; j += kRows) {
      dot_kernel<NV>(p_.head_dim, k_ + j * stride_, stride_, queries, kPanel<T>,
                     [&](int i, int v, const Vec<T>& sum) __attribute__((always_inline)) {
                       store<T>(scores + (j + i) * kPanel<T> + v * kWidth<T>, sum * scale);
                     });
    }
    if (p_.options.causal) mask<NV>(row, lanes, first, keys);
    online_softmax<NV>(keys, scores, maximum_ + row, sum_ + row, decay_);
    const T* decay = decay_;
    for (int h = 0; h < p_.head_dim; h += kRows) {
      micro_kernel<NV, Layout::column_major>(keys, v_ + h, stride_, scores, kPanel<T>,
                                             [&](int i, int v, const Vec<T>& sum) __attribute__((always_inline)) {
                                               T* o = out + (h + i) * kPanel<T> + v * kWidth<T>;
                                               store<T>(o, load(o) * load(decay + v * kWidth<T>) + sum);
                                             });
    }
  }

  template <int NV>
  void mask(int row, int lanes, int64_t first, int keys) {
    // Key s is kept by positions >= s - q_offset.
    const T* position = position_ + row;
    int64_t lowest = static_cast<int64_t>(*std::min_element(position, position + lanes));
    int64_t needed = first - offset_ - first_position_;
    for (int64_t j = std::max<int64_t>(0, lowest + 1 - needed); j < keys; ++j) {
      T bound = static_cast<T>(needed + j);
      for (int v = 0; v < NV; ++v) {
        T* s = scores_ + j * kPanel<T> + v * kWidth<T>;
        Vec<T> score = load(s);
        stdx::where(load(position + v * kWidth<T>) < bound, score) = -kInfinity<T>;
        store(s, score);
      }
    }
  }

  // The row of out, apart from its normalisation.
  void gather(int row, T* to) const {
    if (few()) {
      std::memcpy(to, out_ + row * stride_, sizeof(T) * stride_);
      return;
    }
    const T* from = out_ + static_cast<int64_t>(row / kPanel<T> * kPanel<T>) * stride_ + row % kPanel<T>;
    for (int h = 0; h < p_.head_dim; ++h) to[h] = from[h * kPanel<T>];
  }

  void store_rows() {
    T* buffer = k_;
    for (int row = 0; row < rows_; ++row) {
      gather(row, buffer);
      T total = sum_[row];
      store_result(row, buffer, total == 0 ? 0 : 1 / static_cast<double>(total), maximum_[row], total);
    }
  }

  void store_partial(void* partials, int64_t record) {
    T* lse = static_cast<T*>(partials) + record * record_size();
    T* out = lse + plan_.block_rows;
    for (int row = 0; row < rows_; ++row, out += stride_) {
      gather(row, out);
      T total = sum_[row];
      lse[row] = total == 0 ? -kInfinity<T> : static_cast<T>(double{maximum_[row]} + __builtin_log2(total));
      Vec<T> factor = total == 0 ? 0 : 1 / total;
      for (int h = 0; h < stride_; h += kWidth<T>) store<T>(out + h, load(out + h) * factor);
    }
  }

  // `highest` and `total` as in log2-sum-exp2 = highest + log2(total). A row that keeps no key has total = 0.
  void store_result(int row, const T* sums, double factor, double highest, double total) {
    Place at = place(row);
    store_row(sums, p_.head_dim, static_cast<T>(factor), row_of<E>(p_.out, batch_, at.t, at.head));
    double lse = total == 0 ? -kInfinity<double> : (highest + __builtin_log2(total)) * kLn2;
    static_cast<T*>(p_.lse)[(batch_ * p_.q_heads + at.head) * p_.q_length + at.t] = static_cast<T>(lse);
  }

  const Problem& p_;
  const ForwardPlan& plan_;
  int stride_;  // of a row of k_ and v_; rows of a panel of out_
  int keys_;    // of a block, a multiple of kRowPadding
  int panels_;
  T* queries_;  // [panel][head_dim][kPanel]; [row][stride_] when few
  T* out_;      // [panel][stride_][kPanel], not normalised; [row][stride_] when few
  T* k_;        // [keys_][stride_]
  T* v_;        // [keys_][stride_]
  T* scores_;   // [keys_][kPanel]; [row][keys_] when few
  T* maximum_;  // [panel][kPanel], and so on
  T* sum_;
  T* position_;  // of the lanes' queries, less first_position_
  T* decay_;     // [kPanel]
  size_t workspace_;

  int64_t batch_, first_head_, first_row_, first_position_, offset_;
  int rows_;
};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
