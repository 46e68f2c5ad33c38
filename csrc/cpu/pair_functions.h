// What score and mask functions and the blocks of a block mask do to the scores of a tile.
#pragma once

#include "evaluate.h"
#include "pack.h"
#include "ranges.h"
#include "softmax.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

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
  int rows() const { return rows_; }  // of a block
  int keys() const { return keys_; }
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
    for (const Program* x : {&functions_->score, &functions_->mask, &functions_->partial_mask, &functions_->gradient}) {
      has_diagonals_ |= x->has_diagonals();
    }
    for (int i = 0; i < p.options.dcaptured; ++i) gradients_[i + 1] = gradients_[i] + p.dcaptured_elements[i];
  }

  explicit operator bool() const { return functions_; }
  // Whether the derivative of the score differs from 1, in a backward pass.
  bool has_derivative() const { return functions_ && functions_->score.results() > 1; }
  bool takes_scores() const { return functions_ && functions_->score; }
  bool has_gradient() const { return functions_ && functions_->gradient; }
  // Of the gradients of captured arrays together.
  int64_t gradient_elements() const { return gradients_[p_.options.dcaptured]; }
  bool has_masks() const { return functions_ && (functions_->mask || p_.mask_blocks); }
  const Blocks& blocks() const { return blocks_; }

  void take(Arena& arena, int most_lanes, int most_lines) {
    if (!functions_) return;
    evaluator_ = Evaluator(*functions_, most_lanes, most_lines, p_.captured);
    evaluator_.take(arena);
    kinds_ = arena.take<int32_t>(2 * int64_t{most_lanes});
    sums_ = arena.take<double>(int64_t{functions_->most_additions()} * evaluator_.most_diagonals());
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

  // Lines [begin, end) keep some pair; `whole`: all lines keep all, and nothing was written to `keep`.
  struct Kept {
    int begin, end;
    bool whole;
  };
  // Decides which pairs the mask functions and the block mask keep: `keep`, lines `stride` apart, is -1 where they do,
  // else 0. No score is needed, so that what nobody keeps is not computed.
  Kept decide(const Tile& tile, int32_t* keep, ptrdiff_t stride) const {
    const TileOfPairs pairs = pairs_of(tile);
    if (functions_->mask) {
      const Steps& steps = steps_of(functions_->mask, pairs);
      evaluator_.run(steps, pairs, nullptr, 0, [&](int first, int lines, const Evaluator::Lines& values) {
        for (int i = 0; i < lines; ++i) {
          std::copy_n(values.result<int32_t>(steps.results[0], i), tile.lanes, keep + (first + i) * stride);
        }
      });
    }
    const bool by_blocks = blocks_ && decide_blocks(tile, pairs, keep, stride);
    if (!functions_->mask && !by_blocks) return {0, tile.lines, true};
    Kept kept{tile.lines, 0, false};
    for (int line = 0; line < tile.lines; ++line) {
      if (!keeps_any(keep + line * stride, tile.lanes)) continue;
      kept.begin = std::min(kept.begin, line);
      kept.end = line + 1;
    }
    return kept;
  }
  static JAX_FLASH_INLINE bool keeps_any(const int32_t* keep, int lanes) {
    I32 any{};
    for (int lane = 0; lane < lanes; lane += kWidth<float>) any |= vector(keep + lane);
    return any_of(IntVec<float>(any) != 0);
  }
  // The lanes of a line from the first vector to the last that keep some pair.
  static KeyRange kept_lanes(const int32_t* keep, int lanes) {
    constexpr int W = kWidth<float>;
    KeyRange range{0, lanes};
    while (range.begin < range.end && !keeps_any(keep + range.begin, W)) range.begin += W;
    while (range.begin < range.end && !keeps_any(keep + range.end - W, W)) range.end -= W;
    return range;
  }

  // Changes scores, which are in natural units where takes_scores(), into those in units of `after`, and writes what
  // the gradients of earlier scores are to be multiplied by to `derivatives`, which may be null, of the same stride. A
  // pair that is dropped has the score -inf and the factor 0; `keep` has lines `keep_stride` apart, and is null where
  // all are kept.
  template <Unit after>
  void apply(const Tile& tile, float* scores, ptrdiff_t stride, float* derivatives, const int32_t* keep,
             ptrdiff_t keep_stride) const {
    constexpr int W = kWidth<float>;
    if (functions_->score) {
      const TileOfPairs pairs = pairs_of(tile);
      const Steps& steps = steps_of(functions_->score, pairs);
      evaluator_.run(steps, pairs, scores, stride, [&](int first, int lines, const Evaluator::Lines& values) {
        for (int i = 0; i < lines; ++i) {
          if (derivatives && steps.results.size() > 1) {
            std::copy_n(values.result<float>(steps.results[1], i), tile.lanes, derivatives + (first + i) * stride);
          }
          const float* changed = values.result<float>(steps.results[0], i);
          for (int lane = 0; lane < tile.lanes; lane += W) {
            store(scores + (first + i) * stride + lane,
                  after == Unit::log2 ? in_log2<float>(load(changed + lane)) : load(changed + lane));
          }
        }
      });
    }
    for (int i = 0; derivatives && !has_derivative() && i < tile.lines; ++i) {
      std::fill_n(derivatives + i * stride, tile.lanes, 1.f);
    }
    for (int i = 0; keep && i < tile.lines; ++i) {
      for (int lane = 0; lane < tile.lanes; lane += W) {
        const I32 kept = vector(keep + i * keep_stride + lane);
        const ptrdiff_t at = i * stride + lane;
        const F32 lowest = F32{} - static_cast<float>(__builtin_inf());
        store(scores + at, bits_as<Vec<float>>(pick(kept, bits_as<F32>(load(scores + at)), lowest)));
        if (!derivatives) continue;
        store(derivatives + at, bits_as<Vec<float>>(bits_as<U32>(kept) & bits_as<U32>(load(derivatives + at))));
      }
    }
  }

  // Adds to the gradients of captured arrays, one after the other in `sums`. `scores` are those before apply(),
  // `dscores` the gradients of those after it.
  void add_gradients(const Tile& tile, const float* scores, const float* dscores, ptrdiff_t stride,
                     double* sums) const {
    const TileOfPairs pairs = pairs_of(tile);
    const Steps& steps = steps_of(functions_->gradient, pairs);
    const int most = evaluator_.most_diagonals();  // as many as lanes at least
    std::fill_n(sums_, steps.additions.size() * most, 0.);
    auto elements_of = [&](const Addition& addition) {
      return sums + gradients_[addition.gradient] + call_ * addition.of_call;
    };
    evaluator_.run(steps, pairs, scores, stride, [&](int first, int lines, const Evaluator::Lines& values) {
      double* sums_of_addition = sums_;
      for (const Addition& addition : steps.additions) {
        double* to = elements_of(addition);
        if (addition.side == Side::pair) {
          add_pairs({dscores + first * stride, stride, tile.lanes, lines, values, addition}, to);
          sums_of_addition += most;
          continue;
        }
        for (int i = 0; i < lines; ++i) {
          const float* ds = dscores + (first + i) * stride;
          const float* derivative = values.result<float>(addition.derivative, i);
          switch (addition.side) {
            case Side::lane: add(ds, derivative, tile.lanes, sums_of_addition); break;
            case Side::diagonal:
              add(ds, derivative, tile.lanes, sums_of_addition + tile.lines - 1 - (first + i));
              break;
            default: to[evaluator_.result<int32_t>(addition.index)[first + i]] += sum_of(ds, derivative, tile.lanes);
          }
        }
        sums_of_addition += most;
      }
    });
    const double* sums_of_addition = sums_;
    for (const Addition& addition : steps.additions) {
      const int count = addition.side == Side::lane       ? tile.lanes
                        : addition.side == Side::diagonal ? pairs.diagonals()
                                                          : 0;
      const int32_t* index = evaluator_.result<int32_t>(addition.index);
      for (int i = 0; i < count; ++i) {
        if (sums_of_addition[i] != 0) elements_of(addition)[index[i]] += sums_of_addition[i];
      }
      sums_of_addition += most;
    }
  }

 private:
  static JAX_FLASH_INLINE I32 vector(const int32_t* from) {
    I32 found;
    std::memcpy(&found, from, sizeof(found));
    return found;
  }

  // What kWidth<double> pairs add; those that are dropped nothing, whatever the derivative is.
  static JAX_FLASH_INLINE Vec<double> product(const float* ds, const float* derivative) {
    using Doubles = Native<double, kWidth<double>>;
    Native<float, kWidth<double>> of_scores, factors;
    std::memcpy(&of_scores, ds, sizeof(of_scores));
    std::memcpy(&factors, derivative, sizeof(factors));
    const auto x = bits_as<Vec<double>>(__builtin_convertvector(of_scores, Doubles));
    auto factor = bits_as<Vec<double>>(__builtin_convertvector(factors, Doubles));
    put_where(x == 0., factor, 0.);
    return x * factor;
  }
  static void add(const float* ds, const float* derivative, int lanes, double* to) {
    for (int lane = 0; lane < lanes; lane += kWidth<double>) {
      store(to + lane, load(to + lane) + product(ds + lane, derivative + lane));
    }
  }
  static double sum_of(const float* ds, const float* derivative, int lanes) {
    Vec<double> sums = 0;
    for (int lane = 0; lane < lanes; lane += kWidth<double>) sums += product(ds + lane, derivative + lane);
    return sum_of_lanes<double>(sums);
  }

  // Lines of pairs of which each adds to an element of its own.
  struct PairsOfAddition {
    const float* first_ds;
    ptrdiff_t stride;
    int lanes, lines;
    const Evaluator::Lines& values;
    const Addition& addition;

    const float* ds(int line) const { return first_ds + line * stride; }
    const float* derivative(int line) const { return values.result<float>(addition.derivative, line); }
    const int32_t* index(int line) const { return values.result<int32_t>(addition.index, line); }
    const int32_t* valid(int line) const {
      return addition.always ? nullptr : values.result<int32_t>(addition.valid, line);
    }
  };
  __attribute__((noinline)) static void add_pairs(const PairsOfAddition& pairs, double* to) {
    constexpr int W = kWidth<float>;
    if (add_to_few(pairs, to)) return;
    for (int line = 0; line < pairs.lines; ++line) {
      const float *ds = pairs.ds(line), *derivative = pairs.derivative(line);
      const int32_t *index = pairs.index(line), *valid = pairs.valid(line);
      for (int first = 0; first < pairs.lanes; first += W) {
        if (!valid && ascend_by<1>(vector(index + first))) {
          add(ds + first, derivative + first, W, to + index[first]);
          continue;
        }
        for (int lane = first; lane < first + W; ++lane) {
          // What is dropped adds nothing, whatever the derivative is.
          if (ds[lane] == 0 || (valid && !valid[lane])) continue;
          to[index[lane]] += static_cast<double>(ds[lane]) * derivative[lane];
        }
      }
    }
  }
  // If the elements are few and neighbours: additions to them in memory wait for one another.
  static bool add_to_few(const PairsOfAddition& pairs, double* to) {
    constexpr int kMost = 16;
    Extent extent(vector(pairs.index(0)));
    for (int line = 0; line < pairs.lines; ++line) {
      for (int lane = 0; lane < pairs.lanes; lane += kWidth<float>) extent.include(vector(pairs.index(line) + lane));
      if ((line == 0 || line == pairs.lines - 1) && extent.count() > kMost) return false;
    }
    const int count = static_cast<int>(extent.count());
    count <= kMost / 2 ? add_to_elements<kMost / 2>(pairs, extent.first(), count, to)
                       : add_to_elements<kMost>(pairs, extent.first(), count, to);
    return true;
  }
  // In float, as terms are, within these lines.
  template <int most>
  static void add_to_elements(const PairsOfAddition& pairs, int32_t first, int count, double* to) {
    constexpr int W = kWidth<float>;
    F32 sums[most]{};
    for (int line = 0; line < pairs.lines; ++line) {
      const float *ds = pairs.ds(line), *derivative = pairs.derivative(line);
      const int32_t *index = pairs.index(line), *valid = pairs.valid(line);
      for (int lane = 0; lane < pairs.lanes; lane += W) {
        const F32 factor = bits_as<F32>(load(ds + lane));
        const F32 all = factor * pick(factor != 0, bits_as<F32>(load(derivative + lane)), F32{});
        I32 of = vector(index + lane) - first;
        if (valid) of |= ~vector(valid + lane);  // -1: none of these
#pragma GCC unroll 16
        for (int i = 0; i < most; ++i) sums[i] = pick(of == i, sums[i] + all, sums[i]);
      }
    }
    for (int i = 0; i < count; ++i) to[first + i] += sum_of_lanes<float>(bits_as<Vec<float>>(sums[i]));
  }

  TileOfPairs pairs_of(const Tile& tile) const {
    const int32_t first_key = static_cast<int32_t>(tile.first_key);
    TileOfPairs pairs{
        tile.positions, tile.heads, tile.rows_in_lanes, first_key, p_.kv_length - 1, tile.lanes, tile.lines, batch_,
        call_,          false};
    pairs.has_diagonals = has_diagonals_ && pairs.rows_follow();
    return pairs;
  }
  static const Steps& steps_of(const Program& program, const TileOfPairs& pairs) {
    return program.steps(pairs.rows_in_lanes, pairs.has_diagonals);
  }

  // Writes `keep`, or where the mask functions have written it, lowers it; false: all blocks are full. Each line has
  // the kinds of its lanes.
  bool decide_blocks(const Tile& tile, const TileOfPairs& pairs, int32_t* keep, ptrdiff_t stride) const {
    const int rows = tile.rows_in_lanes ? tile.lanes : tile.lines, keys = tile.rows_in_lanes ? tile.lines : tile.lanes;
    const auto found = std::minmax_element(tile.rows, tile.rows + rows);
    const int64_t end = std::min<int64_t>(tile.first_key + keys, p_.kv_length);
    const int64_t first_row = *found.first, end_row = *found.second + int64_t{1};
    auto any = [&](auto matches) {
      return blocks_.any(tile.head, 1, first_row, end_row, tile.first_key, end, matches);
    };
    if (!any([](int kind) { return kind != kFullBlock; })) return false;
    const bool decides = functions_->partial_mask && any([](int kind) { return kind == kPartialBlock; });
    auto place = [&](bool of_row, int i) { return of_row ? tile.rows[i] : std::min(tile.first_key + i, end - 1); };
    const int64_t of_lanes = tile.rows_in_lanes ? blocks_.rows() : blocks_.keys();
    const int64_t of_lines = tile.rows_in_lanes ? blocks_.keys() : blocks_.rows();
    // What the kinds of the lanes say, of lines of the block that begins at this line: whether a pair may be kept, and
    // whether it is whatever the partial mask says. Lines and lanes mostly share blocks: a division for each takes
    // long.
    int32_t *const may_keep = kinds_, *const keeps = kinds_ + tile.lanes;
    int64_t block_of_lines = -of_lines;
    auto read_kinds = [&](int64_t line) {
      const int64_t of_line = line / of_lines;
      block_of_lines = of_line * of_lines;
      int64_t block_of_lanes = -of_lanes;
      for (int lane = 0, kind = 0; lane < tile.lanes; ++lane) {
        const int64_t at = place(tile.rows_in_lanes, lane);
        if (at < block_of_lanes || at >= block_of_lanes + of_lanes) {
          const int64_t of_lane = at / of_lanes;
          block_of_lanes = of_lane * of_lanes;
          kind = tile.rows_in_lanes ? blocks_.kind(tile.head, of_lane, of_line)
                                    : blocks_.kind(tile.head, of_line, of_lane);
        }
        may_keep[lane] = kind == kEmptyBlock ? 0 : -1;
        keeps[lane] = kind == kFullBlock ? -1 : 0;
      }
    };
    const bool has_mask = static_cast<bool>(functions_->mask);
    auto decide_line = [&](int line, const int32_t* partial) {
      const int64_t at = place(!tile.rows_in_lanes, line);
      if (at < block_of_lines || at >= block_of_lines + of_lines) read_kinds(at);
      int32_t* const to = keep + line * stride;
      for (int lane = 0; lane < tile.lanes; lane += kWidth<float>) {
        I32 kept = vector(may_keep + lane);
        if (partial) kept &= vector(keeps + lane) | vector(partial + lane);
        if (has_mask) kept &= vector(to + lane);
        std::memcpy(to + lane, &kept, sizeof(kept));
      }
    };
    if (!decides) {
      for (int line = 0; line < tile.lines; ++line) decide_line(line, nullptr);
      return true;
    }
    const Steps& steps = steps_of(functions_->partial_mask, pairs);
    evaluator_.run(steps, pairs, nullptr, 0, [&](int first, int lines, const Evaluator::Lines& values) {
      for (int i = 0; i < lines; ++i) {
        decide_line(first + i, values.result<int32_t>(steps.results[0], i));
      }
    });
    return true;
  }

  const Problem& p_;
  const Functions* functions_ = nullptr;
  bool has_diagonals_ = false;
  int64_t gradients_[kMostCaptured + 1]{};  // where those of captured arrays begin
  Evaluator evaluator_;
  Blocks blocks_;
  int64_t q_offset_ = 0;
  int32_t batch_ = 0, call_ = 0;
  int32_t* kinds_ = nullptr;  // two numbers for each lane
  double* sums_ = nullptr;    // of the lanes or diagonals of each addition
};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
