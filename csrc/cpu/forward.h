// The forward pass of one item: a block of queries against a part of the keys.
// Queries are in the SIMD lanes. So the softmax needs no reduction across lanes, K and V are read as they lie in
// memory, one factor at a time, and only the block of queries is transposed, once. At most kDecodingRows queries are
// served otherwise: see decoding.h.
#pragma once

#include <algorithm>
#include <bit>

#include "decoding.h"
#include "isa.h"
#include "scores.h"
#include "tiles.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

// Elements of a row in our buffers: whole vectors, and whole row groups if head_dim is along the rows of A.
template <typename T>
int padded_head_dim(int head_dim) {
  return round_up(head_dim, std::max(kWidth<T>, kRowPadding));
}

template <typename F>
int factors(int elements) {
  return (elements + kElements<F> - 1) / kElements<F>;
}

// Keys of a block are padded to this multiple: tiles have rows of keys, and sums over pairs of keys.
template <typename F>
constexpr int kKeyPadding = kTiled<F> ? kElements<F> * kTilePairs : kRowPadding;

// K, V and the panels' own tiles have to stay in the L2 cache together, a panel's weights and the columns of V that
// they multiply in L1: 256 keys at head_dim 64 run at 0.98 to 1.00 times the rate, causal 0.96 to 0.99, 192 keys at
// head_dim 128 at 0.98. All are multiples of kSegmentBlock and of kDropoutKeys.
constexpr int key_block(int head_dim) { return head_dim <= 64 ? 192 : head_dim <= 256 ? 128 : 64; }

// Decoding: keys of a block. 64 keys take 1.0 to 1.07 times as long, for each block of a head costs a softmax.
constexpr int kFewKeys = 128;
// Decoding: bytes of K or V that all heads read before the next ones. Together with what is prefetched meanwhile they
// have to stay in L1; twice as many take up to 1.1 times as long. And the largest prefetch distance: 8 KB take 1.16 to
// 1.5 times as long out of memory, 32 KB 1.03 times out of L3.
constexpr int64_t kFewBytes = 16 << 10, kFewAhead = 24 << 10;
// Decoding with one row a head: up to so many bytes of K and V nothing is prefetched. They may be in L3, where the
// prefetches cost 5% (Zen 5) to 17% (Zen 4); if they are in memory, so few bytes take 0.95 to 1.06 times as long.
constexpr int64_t kFewCached = 4 << 20;

constexpr int kQueriesAhead = 8;  // rows of the prefetch distance

template <typename E>
class ForwardItem {
  using T = Compute<E>;
  using F = Factor<E>;

 public:
  // With a null workspace only workspace() may be called.
  ForwardItem(const Problem& p, const ForwardPlan& plan, void* workspace)
      : p_(p),
        plan_(plan),
        options_(p),
        functions_(p),
        dropout_(p.options.dropout_rate),
        depth_(round_up(factors<F>(p.head_dim), kTiled<F> ? kTilePairs : 1)),
        k_stride_(padded_head_dim<T>(depth_)),
        v_stride_(padded_head_dim<T>(p.value_head_dim)),
        keys_(key_block(std::max(p.head_dim, p.value_head_dim))),
        panels_((plan.block_rows + kPanel<T> - 1) / kPanel<T>),
        bit_rows_((plan.block_rows + kDropoutRows - 1) / kDropoutRows),
        gathers_(hides_keys_alone(p, options_, functions_, dropout_)) {
    Arena arena(workspace);
    int64_t lanes = std::max(static_cast<int64_t>(panels_) * kPanel<T>, int64_t{kDecodingRows}), keys = keys_;
    int64_t decoding_rows = (plan.together ? p.q_heads / plan.fold : 1) * kDecodingRows;
    queries_ = arena.take<F>(std::max(lanes, decoding_rows) * k_stride_);
    out_ = arena.take<T>(lanes * std::max(k_stride_, v_stride_));
    k_ = arena.take<F>(keys * k_stride_);
    v_ = arena.take<F>(keys * v_stride_);
    if (kTiled<F>) pairs_ = arena.take<F>(keys * v_stride_);
    scores_ = arena.take<T>(keys * std::max<int64_t>(kPanel<T>, decoding_rows));
    maximum_ = arena.take<T>(lanes);
    sum_ = arena.take<T>(lanes);
    position_ = arena.take<T>(lanes);
    decay_ = arena.take<T>(kPanel<T>);
    panel_ = arena.take<Panel>(panels_);
    if (options_.has_arrays) {
      addends_ = arena.take<T>((keys + kWidth<T>)*kPanel<T>);
      rows_of_options_ = arena.take<typename Scores<E>::Row>(lanes);
    }
    if (options_.has_slope) slopes_ = arena.take<T>(lanes);
    if (options_.has_segments) segments_ = arena.take<Int<T>>(lanes);
    if (gathers_) {
      gathered_k_ = arena.take<E>(keys * p.head_dim);
      gathered_v_ = arena.take<E>(keys * p.value_head_dim);
      kept_ = arena.take<int>(keys);
    }
    if (options_.has_intervals) {
      rows_in_lanes_ = arena.take<Int<T>>(lanes);
      interval_begin_ = arena.take<Int<T>>(lanes);
      interval_end_ = arena.take<Int<T>>(lanes);
    }
    functions_.take(arena, std::max(kPanel<float>, round_up(keys_, kWidth<float>)), keys_);
    if (functions_) {
      row_indices_ = arena.take<int32_t>(lanes);
      positions_ = arena.take<int32_t>(lanes);
      heads_ = arena.take<int32_t>(lanes);
      if (functions_.has_masks()) keep_ = arena.take<int32_t>(keys * kPanel<float>);
    }
    if (dropout_.active()) {
      lane_bits_ = arena.take<uint16_t>(keys * bit_rows_);
      key_bits_ = arena.take<uint32_t>(kDropoutRows * keys / kDropoutKeys);
    }
    workspace_ = arena.used();
  }

  size_t workspace() const { return workspace_; }

  void run(int64_t item, void* partials) {
    if (plan_.together) return run_together(item, partials);
    int64_t split = item % plan_.splits, block_item = item / plan_.splits;
    go_to(block_item);
    if (rows_ > 0) {
      load_queries();
      clear();
      for_each_block(split, keys_, [&](int64_t first, int count) { attend_block(first, count); });
      if (functions_.takes_scores() && !decodes()) {  // panels have maxima in natural units
        for (int i = 0; i < rows_; i += kWidth<T>) store(maximum_ + i, in_log2<T>(load(maximum_ + i)));
      }
      if (plan_.splits == 1) {
        store_rows();
      } else {
        store_partial(record(partials, block_item, split));
      }
    }
    if (plan_.splits == 1) store_padding();
  }

  // Merges the partial softmax states of a block's splits.
  void combine(int64_t block_item, const void* partials) {
    go_to(block_item);
    auto part = [&](int split) { return record(const_cast<void*>(partials), block_item, split); };
    T* sums = reinterpret_cast<T*>(v_);
    for (int row = 0; row < rows_; ++row) {
      double highest = -kInfinity<double>;
      for (int split = 0; split < plan_.splits; ++split) highest = std::max<double>(highest, part(split).maximum[row]);
      double total = 0;
      std::memset(sums, 0, sizeof(T) * v_stride_);
      for (int split = 0; split < plan_.splits; ++split) {
        Record from = part(split);
        if (from.maximum[row] == -kInfinity<T>) continue;  // kept no key
        T weight = exp2(Vec<T>(from.maximum[row] - static_cast<T>(highest)))[0];
        if (weight == 0) continue;
        total += static_cast<double>(weight) * from.sum[row];
        const T* out = from.out + static_cast<int64_t>(row) * v_stride_;
        for (int h = 0; h < v_stride_; h += kWidth<T>) {
          store<T>(sums + h, multiply_add(load(out + h), weight, load(sums + h)));
        }
      }
      store_result(row, sums, highest, total);
    }
    store_padding();
  }

  // Elements of the partial softmax state that a split of a block leaves to combine().
  int64_t record_size() const { return record_rows() + static_cast<int64_t>(plan_.block_rows) * v_stride_; }

 private:
  // The keys that a range of rows keeps: some row keeps those in [begin, end), every row those in [full_begin,
  // full_end), as far as the band lets them.
  struct Kept {
    int64_t begin, end, full_begin, full_end;
    int64_t first_row, end_row;
    SegmentRange segments;
    IntervalRange intervals;
  };
  struct Panel {
    int row, vectors;
    Kept kept;
  };

  // The partial softmax state of a block's rows after a split of the keys.
  struct Record {
    T *maximum, *sum;  // [block_rows]
    T* out;            // [block_rows][v_stride_] not normalised
  };
  Record record(void* partials, int64_t block_item, int64_t split) const {
    // An item's records are adjacent: were other threads' records between them, cache lines would bounce.
    int64_t side_by_side = plan_.together ? heads() : 1;
    int64_t index = (block_item / side_by_side * plan_.splits + split) * side_by_side + block_item % side_by_side;
    T* p = static_cast<T*>(partials) + index * record_size();
    return {p, p + plan_.block_rows, p + record_rows()};
  }
  // Whole cache lines, so that no vector of `out` lies in two.
  int64_t record_rows() const { return round_up(2 * plan_.block_rows, static_cast<int>(kCacheLine / sizeof(T))); }

  // All heads go through the keys in step, so that memory is read in its order, once.
  void run_together(int64_t item, void* partials) {
    int64_t split = item % plan_.splits, first_item = item / plan_.splits * heads();
    go_to(first_item);
    if (rows_ > 0) {
      F* queries = queries_;
      for (int head = 0; head < heads(); ++head, queries_ += decoding_rows() * k_stride_) {
        go_to(first_item + head);
        load_queries();
        bind(record(partials, first_item + head, split));
        clear();
      }
      queries_ = queries;
      go_to(first_item);
      bind(record(partials, first_item, split));
      for_each_block(split, std::min(keys_, kFewKeys), [&](int64_t first, int count) { attend_block(first, count); });
    }
    if (plan_.splits > 1) return;
    for (int head = 0; head < heads(); ++head) combine(first_item + head, partials);
  }

  // Rows of a head, including padding.
  int decoding_rows() const { return static_cast<int>(std::bit_ceil(static_cast<unsigned>(rows_))); }

  // Folded heads of a batch entry.
  int heads() const { return p_.q_heads / plan_.fold; }

  // Decoding has no buffers of its own for the state of its rows: it updates the record in place.
  void bind(const Record& record) {
    maximum_ = record.maximum;
    sum_ = record.sum;
    out_ = record.out;
  }

  // Blocks of a head follow each other, for they read the same K and V. The last ones keep the most keys when causal:
  // they go first, so that the threads end together.
  void go_to(int64_t block_item) {
    block_item_ = block_item;
    int64_t head = block_item / plan_.blocks;
    int64_t block = plan_.blocks - 1 - block_item % plan_.blocks;
    batch_ = head / heads();
    first_head_ = head % heads() * plan_.fold;
    sequence_index_ = is_packed(p_) ? sequence_of_block(p_, batch_, block, plan_.fold, plan_.block_rows) : 0;
    sequence_ = sequence(p_, batch_, sequence_index_);
    band_ = Band(p_, batch_);
    if (options_.has_intervals) {
      kv_intervals_ = kv_intervals(p_, batch_);
      q_intervals_ = q_intervals(p_, batch_);
    }
    functions_.go_to(batch_, sequence_index_, sequence_.offset);
    scale_ = scale_of<T>(p_, batch_);
    if (is_packed(p_)) block -= first_block(p_, batch_, sequence_index_, plan_.fold, plan_.block_rows);
    first_row_ = block * plan_.block_rows;
    int64_t rows = plan_.fold * sequence_.rows, all_rows = plan_.fold * sequence_.all_rows;
    rows_ = static_cast<int>(std::clamp<int64_t>(rows - first_row_, 0, plan_.block_rows));
    int64_t end = std::min(all_rows, first_row_ + plan_.block_rows);
    padding_begin_ = std::max<int64_t>(first_row_ - rows, 0);
    padding_end_ = end - rows;
    // Positions are relative to this one, so that they are small and exact in T.
    first_position_ = plan_.fold == 1 ? first_row_ : 0;
  }

  bool decodes() const { return rows_ <= kDecodingRows; }

  struct Place {
    int64_t t, head;
  };
  Place place(int row) const {
    int64_t r = first_row_ + row;
    if (plan_.fold == 1) return {r, first_head_};
    return {r % sequence_.rows, first_head_ + r / sequence_.rows};
  }

  void load_queries() {
    int lanes = round_up(rows_, decodes() ? kDecodingRows : kWidth<T>);
    F* rows = decodes() ? queries_ : reinterpret_cast<F*>(out_);
    // Queries are transposed into lanes through out_, which is unused until the first product.
    RowsAhead ahead;
    if (!decodes() && plan_.fold == 1 && rows_ > kQueriesAhead) {
      const E* next = row_of<const E>(p_.q, batch_, sequence_.first_row + first_row_ + kQueriesAhead, first_head_);
      ahead = RowsAhead(next, p_.q.row_stride, rows_ - kQueriesAhead, p_.head_dim, rows_ - kQueriesAhead);
    }
    for (int row = 0; row < rows_; ++row) {
      ahead.step();
      Place at = place(row);
      position_[row] = static_cast<T>(at.t - first_position_);
      copy_row(row_of<const E>(p_.q, batch_, sequence_.first_row + at.t, at.head), p_.head_dim, k_stride_,
               rows + row * k_stride_);
    }
    // Lanes without a row repeat the last row.
    std::fill(position_ + rows_, position_ + lanes, position_[rows_ - 1]);
    std::memset(rows + rows_ * k_stride_, 0, sizeof(F) * (lanes - rows_) * k_stride_);
    if (!decodes()) {
      share_lanes();
      for (int i = 0; i < panel_count_; ++i) {
        transpose_to_panels(rows + panel_[i].row * k_stride_, k_stride_, panel_[i].vectors * kWidth<T>, depth_,
                            queries_ + int64_t{i} * kPanel<T> * depth_);
      }
    }
    load_options(lanes);
  }

  // Vectors are shared evenly, 4 as 2 + 2, because a panel of one vector runs at 0.86 times the micro-kernel's rate.
  void share_lanes() {
    int vectors = (rows_ + kWidth<T> - 1) / kWidth<T>;
    panel_count_ = (vectors + kVecs - 1) / kVecs;
    for (int i = 0, first = 0; i < panel_count_; first += panel_[i++].vectors) {
      panel_[i].row = first * kWidth<T>;
      panel_[i].vectors = (vectors - first + panel_count_ - i - 1) / (panel_count_ - i);
    }
  }

  // Loads what the options have for each row: slope, segment, interval.
  void load_options(int lanes);

  void clear() {
    int lanes = decodes() ? decoding_rows() : round_up(rows_, kPanel<T>);
    std::memset(out_, 0, sizeof(T) * lanes * v_stride_);
    std::fill(maximum_, maximum_ + lanes, -kInfinity<T>);
    std::memset(sum_, 0, sizeof(T) * lanes);
  }

  // The keys that `rows` rows from `row` on keep.
  Kept kept_by(int row, int rows) const {
    int64_t first = first_row_ + row, last = first + rows - 1;
    if (plan_.fold > 1) {
      const T* position = position_ + row;
      first = static_cast<int64_t>(*std::min_element(position, position + rows));
      last = static_cast<int64_t>(*std::max_element(position, position + rows));
    }
    Kept kept{band_.begin(sequence_, first),
              band_.end(sequence_, last),
              band_.begin(sequence_, last),
              band_.end(sequence_, first),
              first,
              last + 1,
              {},
              {}};
    kept.end = std::max(kept.begin, kept.end);
    if (kv_intervals_) {
      auto [head, heads] = visited_heads();
      kept.intervals = kv_intervals_.range(head, heads, sequence_.first_row + first, sequence_.first_row + last + 1);
      kept.begin = std::max(kept.begin, kept.intervals.begin);
      kept.end = std::min(kept.end, kept.intervals.end);
      if (kept.begin >= kept.end) kept.begin = kept.end = 0;
    }
    if (skips_keys()) {
      if (options_.has_segments) kept.segments = row_segments(p_, batch_, first, last + 1);
      KeyRange keys = trim_to({round_down(kept.begin, kSegmentBlock), kept.end}, kept);
      kept.begin = keys.begin;
      kept.end = keys.end;
    }
    return kept;
  }

  struct Heads {
    int64_t first, count;
  };
  // Those that visit keys together.
  Heads visited_heads() const { return plan_.together ? Heads{0, p_.q_heads} : Heads{first_head_, plan_.fold}; }

  // Whether blocks may be left out in the middle of a range of keys.
  bool skips_keys() const { return options_.has_segments || q_intervals_ || functions_.blocks(); }
  KeyRange trim_to(KeyRange keys, const Kept& kept) const {
    return trim(keys, [&](int64_t begin, int64_t end) {
      if (options_.has_segments && !kept.segments.meets(key_segments(p_, batch_, begin, end))) return false;
      if (q_intervals_ && !intervals_of_keys(begin, end).meets(kept.first_row, kept.end_row)) return false;
      return visits(kept, begin, end);
    });
  }
  // Where the first of a range's blocks begins that none of the rows keeps.
  int64_t first_skipped(KeyRange keys, const Kept& kept) const {
    int64_t end = keys.begin;
    auto meets = [&](KeyRange block) { return trim_to(block, kept).begin < block.end; };
    while (end < keys.end && meets({end, std::min<int64_t>(keys.end, end + kSegmentBlock)})) end += kSegmentBlock;
    return std::min(keys.end, end);
  }
  IntervalRange intervals_of_keys(int64_t begin, int64_t end) const {
    auto [head, heads] = visited_heads();
    return q_intervals_.range(head, heads, sequence_.first_key + begin, sequence_.first_key + end);
  }

  // body(first, count) for the blocks of at most `size` keys that the split has to visit.
  template <typename Body>
  void for_each_block(int64_t split, int size, Body body) {
    if (!decodes()) {
      for (int i = 0; i < panel_count_; ++i) panel_[i].kept = kept_by(panel_[i].row, lanes_of(panel_[i]));
    }
    Kept all = kept_by(0, rows_);
    int64_t begin = round_down(all.begin, kSegmentBlock), end = all.end;
    int64_t share = round_up((end - begin + plan_.splits - 1) / plan_.splits, int64_t{kSegmentBlock});
    begin = std::min(end, begin + split * share);
    end = std::min(end, begin + share);
    keys_end_ = end;
    while (begin < end) {
      KeyRange block{begin, std::min<int64_t>(end, begin + size)};
      if (skips_keys()) {
        // Blocks in the middle of the range that hold no kept pair are skipped here, one by one.
        block = trim_to({begin, end}, all);
        end = block.end;
        block.end = std::min(end, block.begin + size);
        if (functions_.blocks()) block.end = first_skipped(block, all);
      }
      if (block.begin >= block.end) break;
      body(block.begin, static_cast<int>(block.end - block.begin));
      begin = block.end;
    }
  }

  // The lanes that have a row.
  int lanes_of(const Panel& panel) const { return std::min(panel.vectors * kWidth<T>, rows_ - panel.row); }

  // `first` is a multiple of kSegmentBlock.
  void attend_block(int64_t first, int count) {
    if (decodes()) {
      if (decoding_rows() == 1) return decode<1>(first, count);
      if (decoding_rows() == 2) return decode<2>(first, count);
      if (decoding_rows() == 4) return decode<4>(first, count);
      return decode<kDecodingRows>(first, count);
    }
    int64_t kv_head = first_head_ / (p_.q_heads / p_.kv_heads);
    RowsOfKeys<E> k{row_of<const E>(p_.k, batch_, sequence_.first_key + first, kv_head), p_.k.row_stride};
    RowsOfKeys<E> v{row_of<const E>(p_.v, batch_, sequence_.first_key + first, kv_head), p_.v.row_stride};
    const E *next_k = k.first + count * k.stride, *next_v = v.first + count * v.stride;
    const int next = static_cast<int>(std::min<int64_t>(keys_end_ - (first + count), keys_));
    gathered_ = gathers_ && !band_.limited() && gather(first, count, k, v);
    if (count == 0) return;
    int padded = round_up(count, kKeyPadding<F>);
    copy_rows(k.first, k.stride, count, p_.head_dim, padded, k_stride_, k_);
    if constexpr (kTiled<F>) {
      copy_pairs_of_rows(v.first, v.stride, count, p_.value_head_dim, padded, v_stride_, pairs_);
      transpose_rows(pairs_, v_stride_, padded / kElements<F>, v_stride_, keys_ / kElements<F>, v_);
    } else if constexpr (kPaired<F>) {
      copy_pairs_of_rows(v.first, v.stride, count, p_.value_head_dim, padded, v_stride_, v_);
    } else {
      copy_rows(v.first, v.stride, count, p_.value_head_dim, padded, v_stride_, v_);
    }
    if (dropout_.active()) fill_lane_bits(first, count);
    start_prefetch(next_k, next_v, next, count_steps(first, count));
#if defined(__AMX_BF16__)
    Tiles tiles;
#endif
    for (int i = 0; i < panel_count_; ++i) {
      const KeyRange keys = keys_of_panel(i, first, count);
      if (keys.begin == keys.end || !visits(panel_[i].kept, first + keys.begin, first + keys.end)) continue;
      with_vectors(panel_[i].vectors, [&](auto nv) __attribute__((always_inline)) {
        attend<nv.value>(i, first, static_cast<int>(keys.begin), static_cast<int>(keys.end - keys.begin));
      });
    }
  }

  // Where each of a block's keys keeps all rows or none, those that keep them become the block's keys, side by side in
  // copies; unless all of them do. Only where nothing asks for a key's place.
  bool gather(int64_t first, int& count, RowsOfKeys<E>& k, RowsOfKeys<E>& v);

  // Which of a block's `count` keys a panel visits, counted from the first.
  KeyRange keys_of_panel(int panel, int64_t first, int count) const {
    if (gathered_) return {0, count};
    const Kept& kept = panel_[panel].kept;
    int64_t begin = round_down(std::clamp<int64_t>(kept.begin - first, 0, count), kKeyPadding<F>);
    return {begin, std::clamp<int64_t>(kept.end - first, begin, count)};
  }

  // Whether the block mask keeps any of the keys.
  bool visits(const Kept& kept, int64_t begin, int64_t end) const {
    auto [head, heads] = visited_heads();
    const Blocks& blocks = functions_.blocks();
    return !blocks || blocks.meets(head, heads, kept.first_row, kept.end_row, begin, end);
  }

  // Steps of a block's products: one for each tile of registers, or with AMX one for all products of a panel.
  struct Steps {
    int64_t k, v;
  };
  Steps count_steps(int64_t first, int count) const {
    Steps steps{0, 0};
    for (int i = 0; i < panel_count_; ++i) {
      auto [begin, end] = keys_of_panel(i, first, count);
      if (begin == end) continue;
      steps.k += kTiled<F> ? 1 : (end - begin + kRows - 1) / kRows;
      steps.v += kTiled<F> ? 1 : (p_.value_head_dim + kRows - 1) / kRows;
    }
    return steps;
  }

  // Prefetches K and V of the next `count` keys during the steps of the current block, and after the last keys the rows
  // of out.
  void start_prefetch(const E* k, const E* v, int64_t count, const Steps& steps) {
    next_k_ = next_v_ = {};
    if (steps.k == 0) return;
    if (count <= 0) {
      if (plan_.fold > 1 || plan_.splits > 1) return;
      const E* out = row_of<const E>(p_.out, batch_, sequence_.first_row + first_row_, first_head_);
      next_v_ = RowsAhead(out, p_.out.row_stride, rows_, p_.value_head_dim, steps.v, Access::write);
      return;
    }
    next_k_ = RowsAhead(k, p_.k.row_stride, count, p_.head_dim, steps.k);
    next_v_ = RowsAhead(v, p_.v.row_stride, count, p_.value_head_dim, steps.v);
  }

  // A panel against `keys` keys, the first of which is the block's key `begin`, a multiple of kKeyPadding.
  template <int NV>
  void attend(int panel, int64_t block, int begin, int keys);

  // Scores of kRows keys with NV vectors of queries.
  template <int NV>
  JAX_FLASH_INLINE void make_scores(const F* k, const F* queries, const Vec<T>& scale, T* scores);

  // Changes the scores of the panel's tile: change(j, vector, score) for key j.
  template <int NV, typename Change>
  JAX_FLASH_INLINE void change_scores(int begin, int end, Change change) {
    for (int j = begin; j < end; ++j) {
#pragma GCC unroll 3
      for (int v = 0; v < NV; ++v) {
        T* s = scores_ + j * kPanel<T> + v * kWidth<T>;
        Vec<T> score = load(s);
        change(j, v, score);
        store(s, score);
      }
    }
  }

  // Key `first` in the units of position_, which counts from first_position_.
  int64_t relative(int64_t first) const { return first - sequence_.offset - first_position_; }

  template <int NV>
  void mask(int row, const Kept& kept, int64_t first, int keys);

  template <int NV>
  void compare_segments(int row, const Kept& kept, int64_t first, int keys);

  template <int NV>
  void test_intervals(int row, const Kept& kept, int64_t first, int keys);

  // For the functions: `lanes` lanes from `row` on and `keys` keys, or one row with keys in the lanes.
  PairFunctions::Tile tile_of_functions(int row, int lanes, int64_t first, int keys, bool rows_in_lanes) const {
    return {row_indices_ + row, positions_ + row, heads_ + row, rows_in_lanes, first_head_, first, lanes, keys};
  }

  // Softcap, then bias and mask, then ALiBi.
  template <int NV>
  void apply_options(int row, int64_t first, int keys);

  // Drops the pairs that the mask drops, after a score function.
  template <int NV>
  void drop_masked(int row, int64_t first, int keys);

  // Transposes what `of` has for rows and keys: bias and mask have keys in the lanes, scores have queries there.
  template <int NV, typename Of>
  void fill_addends(int row, int64_t first, int keys, Of of);

  // Fills lane_bits_[j][row / 16] for the keys that the rows may keep.
  void fill_lane_bits(int64_t first, int count);

  template <int NV>
  __attribute__((noinline)) void drop(int row, int begin, int keys) {
    change_scores<NV>(0, keys, [&](int j, int v, Vec<T>& weight) __attribute__((always_inline)) {
      int lane = row + v * kWidth<T>;
      uint32_t bits = lane_bits_[(begin + j) * bit_rows_ + lane / kDropoutRows] >> (lane % kDropoutRows);
      clear_where(spread_bits<T>(bits) == 0, weight);
    });
  }

  // A block for R rows a head, of one head or with plan_.together of all: the products with K of all heads, their
  // softmax, and the products with V.
  template <int R>
  void decode(int64_t first, int count);

  // body(head, j, keys, rows, ahead) for all heads and the rows of K or V of `keys` keys from key first + j on: in
  // place if a row is whole vectors, else from a copy.
  // Several heads read a piece of the rows one after another, so that memory is read nearly in its order: the lines
  // that hardware prefetches with those of one head serve the next heads.
  template <int R, typename Body>
  JAX_FLASH_INLINE void with_rows(const Tensor& x, int columns, int padded, E* copy, int64_t first, int count,
                                  int heads, Body body);

  // The scores of a row with keys in the lanes.
  void finish_decoding(int row, int64_t first, int count, T* scores);

  void drop_decoding(int row, int count, T* weights);

  // body(row, sums) for the rows of out, which are not normalised yet.
  template <typename Body>
  void for_each_row(Body body) {
    if (decodes()) {
      for (int row = 0; row < rows_; ++row) body(row, out_ + static_cast<int64_t>(row) * v_stride_);
      return;
    }
    constexpr int W = kWidth<T>;
    T* rows = reinterpret_cast<T*>(v_);  // unused by then
    for (int i = 0; i < panel_count_; ++i) {
      for (int lane = 0; lane < lanes_of(panel_[i]); lane += W) {
        transpose_from_panel(out_ + int64_t{i} * kPanel<T> * v_stride_ + lane, v_stride_, v_stride_, rows);
        int row = panel_[i].row + lane;
        for (int r = 0; r < std::min(W, rows_ - row); ++r) body(row + r, rows + static_cast<int64_t>(r) * v_stride_);
      }
    }
  }

  void store_rows() {
    for_each_row([&](int row, const T* sums) { store_result(row, sums, maximum_[row], sum_[row]); });
  }

  void store_partial(const Record& to) {
    for_each_row([&](int row, const T* sums) {
      to.maximum[row] = maximum_[row];
      to.sum[row] = sum_[row];
      std::memcpy(to.out + static_cast<int64_t>(row) * v_stride_, sums, sizeof(T) * v_stride_);
    });
  }

  // `sums` is the product of the weights exp2(score - highest) with V, `total` the sum of the weights: 0 in a row that
  // keeps no key.
  void store_result(int row, const T* sums, double highest, double total) {
    Place at = place(row);
    double share = 1;  // what the weights are multiplied by if a sink raises `highest`
    if (p_.sinks) {
      double sink = options_.sink(batch_, at.head) * kLog2E;
      if (total == 0) highest = -kInfinity<double>;
      double raised = sink > highest ? sink : highest;
      if (raised != -kInfinity<double>) {
        share = __builtin_exp2(highest - raised);
        total = total * share + __builtin_exp2(sink - raised);
        highest = raised;
      }
    }
    double factor = total == 0 ? 0 : share / total * dropout_.factor();
    int64_t t = sequence_.first_row + at.t;
    store_row(sums, p_.value_head_dim, static_cast<T>(factor), row_of<E>(p_.out, batch_, t, at.head));
    double lse = total == 0 ? -kInfinity<double> : (highest + __builtin_log2(total)) * kLn2;
    // If all biases of a row are the lowest number, they stayed that in units of log2: see Scores::addend().
    if (highest == -std::numeric_limits<T>::max()) lse = highest;
    lse_of(t, at.head) = static_cast<T>(lse);
  }

  // Padding rows are numbered as other rows are: head by head where heads are folded.
  void store_padding() {
    int64_t padding = sequence_.all_rows - sequence_.rows;
    for (int64_t r = padding_begin_; r < padding_end_; ++r) {
      int64_t t = sequence_.first_row + sequence_.rows + r % padding, head = first_head_ + r / padding;
      std::memset(row_of<E>(p_.out, batch_, t, head), 0, sizeof(E) * p_.value_head_dim);
      lse_of(t, head) = options_.sink(batch_, head);
    }
  }

  T& lse_of(int64_t t, int64_t head) { return static_cast<T*>(p_.lse)[(batch_ * p_.q_heads + head) * p_.q_length + t]; }

  const Problem& p_;
  const ForwardPlan& plan_;
  const Scores<E> options_;
  PairFunctions functions_;
  Dropout dropout_;
  int depth_;        // of a product over head_dim
  int k_stride_;     // of a row of k_
  int v_stride_;     // of a row of v_; rows of a panel of out_
  int keys_;         // of a block
  int panels_;       // at most
  int panel_count_;  // of the current rows
  int bit_rows_;     // groups of kDropoutRows rows
  F* queries_;       // [panel][depth_][kPanel]; [head][row][k_stride_] if decoding
  T* out_;           // [panel][v_stride_][kPanel], not normalised; [row][v_stride_] if decoding
  F* k_;             // [keys_][k_stride_]
  F* v_;             // [keys_ / kElements][v_stride_]
  F* pairs_;         // [keys_ / kElements][v_stride_] with tiles
  T* scores_;        // [keys_][kPanel], then the weights as factors; [head][row][key] if decoding
  T* maximum_;       // of the rows, and so on
  T* sum_;
  T* position_;  // of the lanes' queries, less first_position_
  T* decay_;     // [kPanel]
  Panel* panel_;
  T* addends_;                                // [keys_][kPanel] what bias and mask add
  typename Scores<E>::Row* rows_of_options_;  // of the rows, and so on
  T* slopes_;
  Int<T>* segments_;
  Int<T>* rows_in_lanes_;
  Int<T>* interval_begin_;
  Int<T>* interval_end_;
  int32_t *row_indices_, *positions_, *heads_;  // of the lanes' queries, for the functions
  int32_t* keep_;                               // [keys_][kPanel] which pairs these keep; [keys_] if decoding
  uint16_t* lane_bits_;                         // [keys_][bit_rows_]
  uint32_t* key_bits_;                          // [kDropoutRows][keys_ / kDropoutKeys]
  size_t workspace_;

  RowsAhead next_k_, next_v_;  // of the next block of keys
  int64_t keys_end_;           // of the split
  int64_t block_item_, batch_, first_head_, sequence_index_, first_row_, first_position_, padding_begin_, padding_end_;
  Sequence sequence_;
  Band band_;
  Intervals kv_intervals_, q_intervals_;  // of the batch entry
  double scale_;                          // likewise
  int rows_;
  const bool gathers_;           // keys, where all rows keep them or none does
  bool gathered_ = false;        // the block's
  E *gathered_k_, *gathered_v_;  // [keys_][head_dim], [keys_][value_head_dim]
  int* kept_;                    // [keys_] which keys they are of, counted from the block's first
};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
