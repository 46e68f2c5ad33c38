// What score and mask functions and the blocks of a block mask do to the scores of a tile.
#pragma once

#include "evaluate.h"
#include "pack.h"
#include "ranges.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

// From natural units to those of log2. A finite number stays finite: the lowest float, which is often used as a mask,
// must not become -inf.
template <typename T>
JAX_FLASH_INLINE Vec<T> in_log2(const Vec<T>& x) {
  constexpr T kLargest = std::numeric_limits<T>::max();
  Vec<T> y = x * static_cast<T>(kLog2E);
  stdx::where(y > kLargest && x <= kLargest, y) = kLargest;
  stdx::where(y < -kLargest && x >= -kLargest, y) = -kLargest;
  return y;
}

// Kinds of blocks in mask_blocks: no pair is kept; the partial mask decides; all pairs are kept.
constexpr int kEmptyBlock = 0, kPartialBlock = 1, kFullBlock = 2;

// The blocks of the block mask of one sequence. Rows and keys count from its first.
class Blocks {
 public:
  Blocks() = default;
  Blocks(const Problem& p, int64_t batch, int64_t sequence)
      : strides_(p.mask_blocks_strides), rows_(p.options.mask_block_rows), keys_(p.options.mask_block_keys) {
    if (p.mask_blocks) kinds_ = p.mask_blocks + batch * strides_.batch + sequence * strides_.sequence;
  }

  explicit operator bool() const { return kinds_; }
  int64_t row_block(int64_t t) const { return t / rows_; }
  int64_t key_block(int64_t s) const { return s / keys_; }
  int kind(int64_t head, int64_t row_block, int64_t key_block) const {
    return kinds_[head * strides_.head + row_block * strides_.row + key_block * strides_.column];
  }

  // Whether any, or all, of the blocks that rows [begin, end) and keys [first, last) of some heads meet have a kind
  // that `matches`.
  template <typename Matches>
  bool any(int64_t head, int64_t heads, int64_t begin, int64_t end, int64_t first, int64_t last,
           Matches matches) const {
    if (strides_.head == 0) heads = 1;
    for (int64_t h = head; h < head + heads; ++h) {
      for (int64_t row = row_block(begin); row <= row_block(end - 1); ++row) {
        for (int64_t key = key_block(first); key <= key_block(last - 1); ++key) {
          if (matches(kind(h, row, key))) return true;
        }
      }
    }
    return false;
  }
  // Whether a pair is kept, as far as blocks tell.
  bool meets(int64_t head, int64_t heads, int64_t begin, int64_t end, int64_t first, int64_t last) const {
    return any(head, heads, begin, end, first, last, [](int kind) { return kind != kEmptyBlock; });
  }

 private:
  const Int8* kinds_ = nullptr;
  BlockStrides strides_{};
  int rows_ = 1, keys_ = 1;
};

class PairFunctions {
 public:
  explicit PairFunctions(const Problem& p) : p_(p) {
    if (!p.options.functions) return;
    functions_ = &functions_of(p.options.functions);
    for (int i = 0; i < p.options.dcaptured; ++i) gradients_[i + 1] = gradients_[i] + p.dcaptured_elements[i];
  }

  explicit operator bool() const { return functions_; }
  // Whether the derivative of the score differs from 1, in a backward pass.
  bool has_derivative() const { return functions_ && functions_->score.of_rows.results.size() > 1; }
  bool has_gradient() const { return functions_ && functions_->gradient; }
  // Of the gradients of captured arrays together.
  int64_t gradient_elements() const { return gradients_[p_.options.dcaptured]; }
  const Blocks& blocks() const { return blocks_; }

  void take(Arena& arena, int most_lanes, int most_lines) {
    if (!functions_) return;
    evaluator_ = Evaluator(*functions_, most_lanes, most_lines, p_.captured);
    evaluator_.take(arena);
    kinds_ = arena.take<int32_t>(most_lanes);
  }

  void go_to(int64_t batch, int64_t sequence, int64_t q_offset) {
    if (!functions_) return;
    blocks_ = Blocks(p_, batch, sequence);
    q_offset_ = q_offset;
    batch_ = static_cast<int32_t>(batch * p_.options.sequences + sequence);
    if (p_.index_offsets) batch_ += p_.index_offsets[0];
    call_ = 0;
    if (functions_->batch > 0) {
      const int entries = functions_->batch * p_.options.sequences;
      call_ = batch_ / entries;
      batch_ %= entries;
    }
  }
  // What functions take for a row and a query head. Positions beyond int32 have the largest one.
  int32_t position(int64_t t) const { return static_cast<int32_t>(std::min<int64_t>(t + q_offset_, 2147483647)); }
  int32_t head(int64_t head) const { return static_cast<int32_t>(head + (p_.index_offsets ? p_.index_offsets[1] : 0)); }

  // A tile of the sequence: `rows` are indices of rows in the lanes or lines.
  struct Tile {
    const int32_t *rows, *positions, *heads;
    bool rows_in_lanes;
    int64_t head;  // whose blocks are those of all rows
    int64_t first_key;
    int lanes, lines;
  };

  // Changes scores in units of log2, and writes what the gradients of earlier scores are to be multiplied by to
  // `derivatives`, which may be null, of the same stride. A pair that is dropped has the score -inf and the factor 0.
  void apply(const Tile& tile, float* scores, ptrdiff_t stride, float* derivatives) const {
    const TileOfPairs pairs = pairs_of(tile);
    constexpr int W = kWidth<float>;
    const auto put = [&](int line, int lane, const I32& keep) __attribute__((always_inline)) {
      const ptrdiff_t at = line * stride + lane;
      const F32 lowest = F32{} - static_cast<float>(__builtin_inf());
      store(scores + at, bits_as<Vec<float>>(pick(keep, bits_as<F32>(load(scores + at)), lowest)));
      if (derivatives) {
        store(derivatives + at, bits_as<Vec<float>>(bits_as<U32>(keep) & bits_as<U32>(load(derivatives + at))));
      }
    };
    if (functions_->score) {
      const Steps& steps = functions_->score.lanes_are_rows(tile.rows_in_lanes);
      evaluator_.run(steps, pairs, scores, stride, [&](int first, int lines) {
        for (int i = 0; i < lines; ++i) {
          const float* values = evaluator_.result<float>(steps.results[0], pairs, i);
          for (int lane = 0; lane < tile.lanes; lane += W) {
            store(scores + (first + i) * stride + lane, in_log2<float>(load(values + lane)));
          }
          if (!derivatives || steps.results.size() < 2) continue;
          std::copy_n(evaluator_.result<float>(steps.results[1], pairs, i), tile.lanes,
                      derivatives + (first + i) * stride);
        }
      });
    }
    if (derivatives && !has_derivative()) {
      for (int i = 0; i < tile.lines; ++i) std::fill_n(derivatives + i * stride, tile.lanes, 1.f);
    }
    if (functions_->mask) {
      const Steps& steps = functions_->mask.lanes_are_rows(tile.rows_in_lanes);
      evaluator_.run(steps, pairs, scores, stride, [&](int first, int lines) {
        for (int i = 0; i < lines; ++i) {
          const int32_t* keep = evaluator_.result<int32_t>(steps.results[0], pairs, i);
          for (int lane = 0; lane < tile.lanes; lane += W) put(first + i, lane, vector(keep + lane));
        }
      });
    }
    if (blocks_) apply_blocks(tile, pairs, scores, stride, put);
  }

  // Adds to the gradients of captured arrays, one after the other in `sums`. `scores` are those before apply(),
  // `dscores` the gradients of those after it.
  void add_gradients(const Tile& tile, const float* scores, const float* dscores, ptrdiff_t stride,
                     double* sums) const {
    const TileOfPairs pairs = pairs_of(tile);
    const Steps& steps = functions_->gradient.lanes_are_rows(tile.rows_in_lanes);
    evaluator_.run(steps, pairs, scores, stride, [&](int first, int lines) {
      for (const Addition& addition : steps.additions) {
        double* to = sums + gradients_[addition.gradient] + call_ * addition.of_call;
        for (int i = 0; i < lines; ++i) {
          const float* ds = dscores + (first + i) * stride;
          const float* derivative = evaluator_.result<float>(addition.derivative, pairs, i);
          const int32_t* index = evaluator_.result<int32_t>(addition.index, pairs, i);
          const int32_t* valid = addition.always ? nullptr : evaluator_.result<int32_t>(addition.valid, pairs, i);
          for (int lane = 0; lane < tile.lanes; ++lane) {
            // What is dropped adds nothing, whatever the derivative is.
            if (ds[lane] == 0 || (valid && !valid[lane])) continue;
            to[index[lane]] += static_cast<double>(ds[lane]) * derivative[lane];
          }
        }
      }
    });
  }

 private:
  static JAX_FLASH_INLINE I32 vector(const int32_t* from) {
    I32 found;
    std::memcpy(&found, from, sizeof(found));
    return found;
  }

  TileOfPairs pairs_of(const Tile& tile) const {
    return {
        tile.positions, tile.heads, tile.rows_in_lanes, static_cast<int32_t>(tile.first_key), tile.lanes, tile.lines,
        batch_,         call_};
  }

  // As far as kinds differ within the tile, each line has the kinds of its lanes.
  template <typename Put>
  void apply_blocks(const Tile& tile, const TileOfPairs& pairs, float* scores, ptrdiff_t stride, Put put) const {
    const int rows = tile.rows_in_lanes ? tile.lanes : tile.lines, keys = tile.rows_in_lanes ? tile.lines : tile.lanes;
    const auto [least, most] = std::minmax_element(tile.rows, tile.rows + rows);
    const int64_t end = std::min<int64_t>(tile.first_key + keys, p_.kv_length);
    auto any = [&](auto matches) { return blocks_.any(tile.head, 1, *least, *most + 1, tile.first_key, end, matches); };
    if (!any([](int kind) { return kind != kFullBlock; })) return;
    const bool decides = functions_->partial_mask && any([](int kind) { return kind == kPartialBlock; });
    auto block_of_line = [&](int line) {
      return tile.rows_in_lanes ? blocks_.key_block(std::min(tile.first_key + line, end - 1))
                                : blocks_.row_block(tile.rows[line]);
    };
    int64_t of_kinds = -1;
    auto apply = [&](int line, const int32_t* keep) {
      const int64_t block = block_of_line(line);
      for (int lane = 0; block != of_kinds && lane < tile.lanes; ++lane) {
        kinds_[lane] = tile.rows_in_lanes ? blocks_.kind(tile.head, blocks_.row_block(tile.rows[lane]), block)
                                          : blocks_.kind(tile.head, block,
                                                         blocks_.key_block(std::min(tile.first_key + lane, end - 1)));
      }
      of_kinds = block;
      for (int lane = 0; lane < tile.lanes; lane += kWidth<float>) {
        I32 kind = vector(kinds_ + lane), kept = kind != kEmptyBlock;
        if (keep) kept &= (kind == kFullBlock) | vector(keep + lane);
        put(line, lane, kept);
      }
    };
    if (!decides) {
      for (int line = 0; line < tile.lines; ++line) apply(line, nullptr);
      return;
    }
    const Steps& steps = functions_->partial_mask.lanes_are_rows(tile.rows_in_lanes);
    evaluator_.run(steps, pairs, scores, stride, [&](int first, int lines) {
      for (int i = 0; i < lines; ++i) apply(first + i, evaluator_.result<int32_t>(steps.results[0], pairs, i));
    });
  }

  const Problem& p_;
  const Functions* functions_ = nullptr;
  int64_t gradients_[kMostCaptured + 1]{};  // where those of captured arrays begin
  Evaluator evaluator_;
  Blocks blocks_;
  int64_t q_offset_ = 0;
  int32_t batch_ = 0, call_ = 0;
  int32_t* kinds_ = nullptr;  // of the lanes
};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
