// The backward pass of one item: a chunk of the key blocks of a key head against all queries of its group.
//
// Keys stand in the lanes of S, P, dP and dS; a block's dK and dV stay in the cache until all queries have been seen.
// dQ is summed in the chunk's own part of the scratch, chunk by chunk in a fixed order at the end, so no result
// depends on the threads. That is 5 products, and runs at 75% of the processor's peak (AVX-512, head_dim 64 to 256)
// with the sums of dQ included; passes apart for dQ and for dK, dV need no scratch but 7 products, and would be slower
// even at the peak.
#pragma once

#include <algorithm>

#include "forward.h"
#include "isa.h"
#include "pack.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

constexpr int kQueries = 64;  // of a tile

template <typename E>
class BackwardItem {
  using T = Compute<E>;

 public:
  BackwardItem(const Problem& p, void* workspace)
      : p_(p), stride_(padded_head_dim<T>(p.head_dim)), keys_(round_up(96, kPanel<T>)) {
    Arena arena(workspace);
    int64_t key_elements = static_cast<int64_t>(keys_) * stride_, query_elements = int64_t{kQueries} * stride_;
    int64_t tile = int64_t{kQueries} * keys_;
    k_panels_ = arena.take<T>(key_elements);
    v_panels_ = arena.take<T>(key_elements);
    k_ = arena.take<T>(key_elements);
    dk_ = arena.take<T>(key_elements);
    dv_ = arena.take<T>(key_elements);
    q_ = arena.take<T>(query_elements);
    dout_ = arena.take<T>(query_elements);
    weights_ = arena.take<T>(tile);
    dscores_ = arena.take<T>(tile);
    lse_ = arena.take<T>(kQueries);
    delta_ = arena.take<T>(kQueries);
    kept_ = arena.take<T>(kQueries);
    workspace_ = arena.used();
  }

  size_t workspace() const { return workspace_; }

  void run(const BackwardPlan& plan, int64_t item) {
    int64_t chunk = item % plan.chunks, kv_head = item / plan.chunks % p_.kv_heads;
    int64_t batch = item / plan.chunks / p_.kv_heads;
    int group = p_.q_heads / p_.kv_heads;
    int64_t offset = p_.q_offset ? p_.q_offset[batch] : 0;
    int64_t head_size = plan.padded_q_length * plan.padded_head_dim;
    T* dq = static_cast<T*>(p_.scratch) + ((chunk * p_.batch + batch) * p_.q_heads + kv_head * group) * head_size;
    std::memset(dq, 0, sizeof(T) * head_size * group);

    // Every chunk takes every chunks-th block: that shares a causal triangle out evenly.
    for (int64_t first = chunk * keys_; first < p_.kv_length; first += int64_t{plan.chunks} * keys_) {
      int keys = static_cast<int>(std::min<int64_t>(keys_, p_.kv_length - first));
      load_keys(batch, kv_head, first, keys);
      // The first query that keeps the first key, and so any of the block.
      int64_t begin = p_.options.causal ? std::clamp<int64_t>(first - offset, 0, p_.q_length) : 0;
      begin -= begin % kRowPadding;  // so that padded rows end inside the padded sum of dq
      for (int member = 0; member < group; ++member) {
        int64_t head = kv_head * group + member;
        for (int64_t t = begin; t < p_.q_length; t += kQueries) {
          int rows = static_cast<int>(std::min<int64_t>(kQueries, p_.q_length - t));
          int kept = load_queries(batch, head, t, rows, first, keys, offset);
          tile(round_up(rows, kRowPadding), kept, dq + member * head_size + t * plan.padded_head_dim,
               plan.padded_head_dim);
        }
      }
      for (int j = 0; j < keys; ++j) {
        store_row(dk_ + j * stride_, p_.head_dim, static_cast<T>(p_.options.scale),
                  row_of<E>(p_.dk, batch, first + j, kv_head));
        store_row(dv_ + j * stride_, p_.head_dim, T(1), row_of<E>(p_.dv, batch, first + j, kv_head));
      }
    }
  }

  void reduce(const BackwardPlan& plan, int64_t item) {
    int64_t block = item % plan.row_blocks, head = item / plan.row_blocks % p_.q_heads;
    int64_t batch = item / plan.row_blocks / p_.q_heads;
    int64_t head_size = plan.padded_q_length * plan.padded_head_dim;
    int64_t chunk_size = head_size * p_.q_heads * p_.batch;
    int64_t end = std::min<int64_t>(p_.q_length, (block + 1) * kReduceRows);
    const T* sums = static_cast<const T*>(p_.scratch) + (batch * p_.q_heads + head) * head_size;
    for (int64_t t = block * kReduceRows; t < end; ++t) {
      const T* row = sums + t * plan.padded_head_dim;
      for (int h = 0; h < p_.head_dim; h += kWidth<T>) {
        Vec<T> sum = load(row + h);
        for (int chunk = 1; chunk < plan.chunks; ++chunk) sum += load(row + chunk * chunk_size + h);
        store(q_ + h, sum);
      }
      store_row(q_, p_.head_dim, static_cast<T>(p_.options.scale), row_of<E>(p_.dq, batch, t, head));
    }
  }

 private:
  void load_keys(int64_t batch, int64_t kv_head, int64_t first, int keys) {
    int lanes = round_up(keys, kPanel<T>);
    // dk_ is free until the block's first product.
    copy_rows(row_of<const E>(p_.v, batch, first, kv_head), p_.v.row_stride, keys, p_.head_dim, lanes, stride_, dk_);
    transpose_to_panels(dk_, stride_, lanes, p_.head_dim, v_panels_);
    copy_rows(row_of<const E>(p_.k, batch, first, kv_head), p_.k.row_stride, keys, p_.head_dim, lanes, stride_, k_);
    transpose_to_panels(k_, stride_, lanes, p_.head_dim, k_panels_);
    std::memset(dk_, 0, sizeof(T) * lanes * stride_);
    std::memset(dv_, 0, sizeof(T) * lanes * stride_);
  }

  // Returns how many of the block's keys some row keeps.
  int load_queries(int64_t batch, int64_t head, int64_t t, int rows, int64_t first, int keys, int64_t offset) {
    int padded = round_up(rows, kRowPadding);
    copy_rows(row_of<const E>(p_.q, batch, t, head), p_.q.row_stride, rows, p_.head_dim, padded, stride_, q_);
    copy_rows(row_of<const E>(p_.dout, batch, t, head), p_.dout.row_stride, rows, p_.head_dim, padded, stride_, dout_);
    const T* lse = static_cast<const T*>(p_.lse) + (batch * p_.q_heads + head) * p_.q_length + t;
    const T* delta = static_cast<const T*>(p_.delta) + (batch * p_.q_heads + head) * p_.q_length + t;
    int most = 0;
    masked_ = false;
    for (int i = 0; i < padded; ++i) {
      // A row that keeps no key, or that is padding, has weights exp2(-inf) = 0 whatever its gradients are.
      bool none = i >= rows || lse[i] == -kInfinity<T>;
      lse_[i] = none ? kInfinity<T> : static_cast<T>(lse[i] * kLog2E);
      delta_[i] = none ? 0 : delta[i];
      int64_t kept = keys;
      if (p_.options.causal && i < rows) kept = std::clamp<int64_t>(t + i + offset + 1 - first, 0, keys);
      kept_[i] = static_cast<T>(kept);
      most = std::max(most, static_cast<int>(kept));
      masked_ |= kept < keys;
    }
    masked_ |= keys < keys_;
    return most;
  }

  // One tile of `rows` queries (a multiple of kRowPadding) and the first `keys` keys of the block.
  void tile(int rows, int keys, T* dq, int64_t dq_stride) {
    int key_rows = round_up(keys, kRowPadding);
    for (int lane = 0; lane < key_rows; lane += kPanel<T>) {
      int lanes = std::min(kPanel<T>, key_rows - lane);
      with_vectors((lanes + kWidth<T> - 1) / kWidth<T>, [&](auto nv) __attribute__((always_inline)) {
        if (masked_) {
          scores<nv.value, true>(rows, lane);
        } else {
          scores<nv.value, false>(rows, lane);
        }
      });
    }
    int columns = round_up(p_.head_dim, kWidth<T>);
    accumulate<Layout::column_major>(key_rows, columns, rows, weights_, keys_, dout_, stride_, dv_, stride_);
    accumulate<Layout::column_major>(key_rows, columns, rows, dscores_, keys_, q_, stride_, dk_, stride_);
    accumulate<Layout::row_major>(rows, columns, keys, dscores_, keys_, k_, stride_, dq, dq_stride);
  }

  template <int NV, bool masked>
  void scores(int rows, int lane) {
    const T* k = k_panels_ + static_cast<int64_t>(lane) * p_.head_dim;
    const T* v = v_panels_ + static_cast<int64_t>(lane) * p_.head_dim;
    Vec<T> scale = static_cast<T>(p_.options.scale * kLog2E);
    for (int i = 0; i < rows; i += kRows) {
      T* weights = weights_ + i * keys_ + lane;
      T* dscores = dscores_ + i * keys_ + lane;
      dot_kernel<NV>(p_.head_dim, q_ + i * stride_, stride_, k, kPanel<T>,
                     [&](int r, int vector, const Vec<T>& score) __attribute__((always_inline)) {
                       Vec<T> weight = exp2(score * scale - lse_[i + r]);
                       if constexpr (masked) {
                         stdx::where(iota<T>() + static_cast<T>(lane + vector * kWidth<T>) >= kept_[i + r], weight) =
                             T(0);
                       }
                       store(weights + r * keys_ + vector * kWidth<T>, weight);
                     });
      dot_kernel<NV>(p_.head_dim, dout_ + i * stride_, stride_, v, kPanel<T>,
                     [&](int r, int vector, const Vec<T>& sum) __attribute__((always_inline)) {
                       ptrdiff_t at = r * keys_ + vector * kWidth<T>;
                       store<T>(dscores + at, load(weights + at) * (sum - delta_[i + r]));
                     });
    }
  }

  const Problem& p_;
  int stride_;   // of a row of head_dim elements in all tiles
  int keys_;     // of a block, a multiple of kPanel<T>
  T* k_panels_;  // [keys_ / kPanel][head_dim][kPanel]
  T* v_panels_;  // [keys_ / kPanel][head_dim][kPanel]
  T* k_;         // [keys_][stride_], and so dk_, dv_
  T* dk_;
  T* dv_;
  T* q_;         // [kQueries][stride_]
  T* dout_;      // [kQueries][stride_]
  T* weights_;   // [kQueries][keys_]
  T* dscores_;   // [kQueries][keys_]
  T* lse_;       // [kQueries] in units of log2; +inf where a row keeps no key
  T* delta_;     // [kQueries]
  T* kept_;      // [kQueries] how many of the block's keys the row keeps
  bool masked_;  // whether some weight of the tile has to be cleared
  size_t workspace_;
};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
