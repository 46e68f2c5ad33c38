// The backward pass of one item: a block of keys of a key head, or a chunk of the blocks, against all queries of its
// group.
// Keys are in the SIMD lanes of S, P, dP and dS; a block's dK and dV stay in the cache until all queries have been
// seen. dQ is summed in a fixed order, so no result depends on the threads. If there are enough rows, all blocks of a
// head add to one sum, tile by tile in their order, and the last block writes dQ: a block of keys is then an item,
// which waits only where it would overtake the block before it. Otherwise each chunk of blocks has a sum of its own,
// and these sums are added up at the end. Either way the pass has 5 matrix products and runs at 83 to 88% of the
// processor's peak (AVX-512, head_dim 64, 128), the sums of dQ included. Separate passes for dQ and for dK, dV would
// need no scratch, but 7 products, and would be slower even at the peak.
//
// Every block of keys reads all of q and dout, whose rows lie as far apart as a head's do in memory. If there are many
// blocks, a preparing pass copies both into the scratch first, head by head, and converts them there once. The same
// pass computes delta (XLA's own sums over the last axis took 0.3 to 0.5 ms of 15 for (1, 1024, 16, 64), causal) and
// lse in units of log2, so that no block of keys has to.
//
// Heads, batch entries and chunks that share elements of dbias are one item, so its sums need no scratch.
//
// A weight is exp2(score - lse), in which the rounding of a large lse would count. Rows with an lse beyond kLargeLse
// are restated: the preparing pass runs their tiles up to the scores, and puts the maximum of these, bit for bit one of
// them, in the place of lse, with the logarithm of the sum apart.
//
// bfloat16 is multiplied in pairs where the processor has instructions for that, as in the forward: weights and the
// scores' gradients are rounded to bfloat16, sums and all else stay in float. That is 1.7 times as fast as converting
// to float (AVX512-BF16, Zen 4).
#pragma once

#include <algorithm>

#include "forward.h"
#include "isa.h"
#include "scores.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

constexpr int kQueries = kReduceRows;     // of a tile
constexpr int kKeys = kMostBackwardKeys;  // of a block at most: the length of a tile's row
constexpr int kTileKeys = 96;             // that a product of pairs takes in one go: they fit in the L1 cache
static_assert(kKeys % kTileKeys == 0);
template <typename E>
constexpr bool kPairedBackward = kPaired<Factor<E>>;
// AMX computes dk and dv transposed, with keys in the lanes: it reads columns of q and dout, and leaves columns.
template <typename E>
constexpr bool kColumns = kTiled<Factor<E>>;
// Queries and keys are padded to this multiple: products sum over pairs of both, and AMX's tiles have 32.
template <typename E>
constexpr int kTilePadding = kPairedBackward<E> ? kPairedRows : kRowPadding;
static_assert(kPairedRows == 2 * kTilePairs);
// lse is rounded twice, as the caller's array and in units of log2: up to here that changes no weight by more than
// 2^-14 of it.
template <typename T>
constexpr double kLargeLse = 0x1p-13 / std::numeric_limits<T>::epsilon();
// With plan.in_turn, so many heads take turns: one block of keys of each head, then the next block of each. With one
// head the cache lines of its sums bounce between two threads: 0.97 times the rate of 2, 4 or 8 heads.
constexpr int kHeadsTogether = 4;
static_assert(kBackwardKeys % kPanel<float> == 0 && kBackwardKeys % kPanel<double> == 0 && kKeys % kBackwardKeys == 0);
static_assert(kBackwardKeys % kDropoutKeys == 0 && kBackwardKeys % kSegmentBlock == 0);

// What becomes of the sums of a tile's first two products.
enum class Finish {
  full,    // weights and dscores
  ended,   // the same, weights cleared from the end of the band on: half the comparisons of `masked`
  masked,  // the same, weights cleared on both sides of the band
  later,   // scores and dweights: apply_options() computes weights and dscores from them
};

template <typename E>
class BackwardItem {
  using T = Compute<E>;

 public:
  BackwardItem(const Problem& p, const BackwardPlan& plan, void* workspace)
      : p_(p),
        plan_(plan),
        options_(p),
        functions_(p),
        dropout_(p.options.dropout_rate),
        k_stride_(padded_head_dim<T>(p.head_dim)),
        v_stride_(padded_head_dim<T>(p.value_head_dim)),
        gathers_(hides_keys_alone(p, options_, functions_, dropout_) &&
                 (p.q_intervals_strides.head == 0 || group() == 1)) {
    Arena arena(workspace);
    int64_t k_rows = int64_t{plan.keys} * k_stride_, v_rows = int64_t{plan.keys} * v_stride_;
    int64_t tile = int64_t{kQueries} * kKeys;
    if constexpr (!kPairedBackward<E>) {
      k_panels_ = arena.take<T>(k_rows);
      v_panels_ = arena.take<T>(v_rows);
    }
    k_ = arena.take<T>(k_rows);
    dk_ = arena.take<T>(k_rows);
    dv_ = arena.take<T>(v_rows);
    q_ = arena.take<T>(int64_t{kQueries} * k_stride_);
    dout_ = arena.take<T>(int64_t{kQueries} * v_stride_);
    if constexpr (kPairedBackward<E>) {
      k_depth_ = tile_depth(p.head_dim);
      v_depth_ = tile_depth(p.value_head_dim);
      k_tiles_ = arena.take<Pair>(int64_t{k_depth_} * kKeys);
      v_tiles_ = arena.take<Pair>(int64_t{v_depth_} * kKeys);
      k_pairs_ = arena.take<Pair>(int64_t{kKeys} / 2 * k_stride_);
      pairs_ = arena.take<Pair>(int64_t{kKeys} * std::max(k_depth_, v_depth_));
      record_ = arena.take<Pair>(record_size(p));
      weight_pairs_ = arena.take<Pair>(kQueries / 2 * kTileKeys);
      dscore_pairs_ = arena.take<Pair>(kQueries / 2 * kTileKeys);
      dscore_rows_ = arena.take<Pair>(tile / 2);
    }
    if constexpr (kColumns<E>) {
      dk_columns_ = arena.take<T>(k_rows);
      dv_columns_ = arena.take<T>(v_rows);
    }
    weights_ = arena.take<T>(tile);
    dscores_ = arena.take<T>(tile);
    lse_ = arena.take<T>(kQueries);
    rest_ = arena.take<T>(kQueries);
    delta_ = arena.take<T>(kQueries);
    kept_begin_ = arena.take<T>(kQueries);
    kept_end_ = arena.take<T>(kQueries);
    if (options_.has_segments) segments_ = arena.take<Int<T>>(kKeys);
    if (p.q_intervals) interval_begin_ = arena.take<Int<T>>(kKeys), interval_end_ = arena.take<Int<T>>(kKeys);
    if (gathers_) {
      gathered_k_ = arena.take<E>(int64_t{kKeys} * p.head_dim);
      gathered_v_ = arena.take<E>(int64_t{kKeys} * p.value_head_dim);
      kept_ = arena.take<int>(kKeys);
    }
    functions_.take(arena, kKeys, kQueries);
    if (functions_) {
      row_indices_ = arena.take<int32_t>(kQueries);
      positions_ = arena.take<int32_t>(kQueries);
      heads_ = arena.take<int32_t>(kQueries);
      if (functions_.has_masks()) keep_ = arena.take<int32_t>(tile);
      derivatives_ = arena.take<T>(tile);
      if (options_.has_cap) cap_derivatives_ = arena.take<T>(tile);
      if (functions_.has_gradient()) {
        scores_before_ = arena.take<T>(tile);
        dscores_after_ = arena.take<T>(tile);
      }
    }
    if (dropout_.active()) key_bits_ = arena.take<uint32_t>((kQueries + 2 * kDropoutRows) * (kKeys / kDropoutKeys));
    if (p.options.has_dbias) dbias_ = arena.take<T>(kKeys);
    workspace_ = arena.used();
  }

  size_t workspace() const { return workspace_; }

  // Elements of a Record; 0 if there are none. largest_record() in cpu.cc, a bound for every machine, relies on these.
  static_assert(kTilePairs == 16 && kRowPadding <= 16 && kWidth<float> <= 16 && sizeof(Pair) == sizeof(float));
  static int64_t record_size(const Problem& p) {
    if constexpr (!kPairedBackward<E>) return 0;
    int64_t columns = padded_head_dim<T>(p.head_dim) + padded_head_dim<T>(p.value_head_dim);
    int64_t depths = tile_depth(p.head_dim) + tile_depth(p.value_head_dim);
    return kQueries * depths + kQueries / 2 * columns;
  }

  void run(int64_t item, const Turns* turns) {
    turns_ = turns;
    if (functions_.has_gradient()) {
      captured_sums_ = static_cast<double*>(p_.scratch) + item * functions_.gradient_elements();
      std::memset(captured_sums_, 0, sizeof(double) * functions_.gradient_elements());
    }
    if (plan_.in_turn) return take_turns(item);
    auto [chunk_begin, chunk_end] = share(item, plan_.chunk_items, plan_.chunks);
    auto [head_begin, head_end] = share(item / plan_.chunk_items, plan_.head_items, p_.kv_heads);
    auto [batch_begin, batch_end] = share(item / plan_.chunk_items / plan_.head_items, plan_.batch_items, p_.batch);
    for (batch_ = batch_begin; batch_ < batch_end; ++batch_) {
      for (kv_head_ = head_begin; kv_head_ < head_end; ++kv_head_) {
        for (chunk_ = chunk_begin; chunk_ < chunk_end; ++chunk_) attend_chunk();
      }
    }
  }

  // Copies rows of q and dout, and makes delta and lse of all rows, in the order of memory: all heads of a row.
  void prepare(int64_t item);

  // Adds up the chunks' sums of a block of rows.
  void reduce(int64_t item);

 private:
  static int tile_depth(int head_dim) { return round_up((head_dim + 1) / 2, kTilePairs); }

  // kQueries rows of q and dout, with zeros after the last one: pairs along head_dim [row][depth], and along the
  // queries [kQueries / 2][head_dim], or transposed.
  struct Record {
    Pair *q_rows, *q_columns, *dout_rows, *dout_columns;
    Record() = default;
    Record(const BackwardItem& item, Pair* at)
        : q_rows(at),
          q_columns(q_rows + kQueries * item.k_depth_),
          dout_rows(q_columns + kQueries / 2 * item.k_stride_),
          dout_columns(dout_rows + kQueries * item.v_depth_) {}
  };

  int group() const { return p_.q_heads / p_.kv_heads; }

  struct Share {
    int64_t begin, end;
  };
  // One of `all`, or all of them if they are one item.
  static Share share(int64_t item, int64_t items, int64_t all) {
    return items == all ? Share{item % items, item % items + 1} : Share{0, all};
  }

  void go_to_sequence(int64_t index) {
    sequence_index_ = index;
    sequence_ = sequence(p_, batch_, index);
    band_ = Band(p_, batch_);
    kv_intervals_ = kv_intervals(p_, batch_);
    q_intervals_ = q_intervals(p_, batch_);
    functions_.go_to(batch_, index, sequence_.offset);
    scale_ = scale_of<T>(p_, batch_);
    first_block_ = is_packed(p_) ? first_block(p_, batch_, index, 1, kReduceRows) : 0;
    // Sums are padded to whole groups of rows: a tile may end in rows of zeros after those of the sequence.
    first_sum_ = round_up(sequence_.first_row, int64_t{kTilePadding<E>}) + kTilePadding<E> * index;
  }

  // The element of `array`, [batch][q_heads][q_length], for row t of the batch entry and the current head.
  T* statistic(void* array, int64_t t) const {
    return static_cast<T*>(array) + (batch_ * p_.q_heads + head_) * p_.q_length + t;
  }

  // Where the scratch has what: dq() the current chunk's sums of dq of a head from row t of the sequence on, touched()
  // for each block of rows whether the chunk has sums of it, dslope() the gradient of a head's slope.
  T* dq(int64_t head, int64_t t) const {
    int64_t row = ((chunk_ * p_.batch + batch_) * p_.q_heads + head) * plan_.padded_q_length + first_sum_ + t;
    return static_cast<T*>(p_.scratch) + plan_.dq + row * plan_.padded_head_dim;
  }
  T* delta(int64_t t) const { return statistic(static_cast<T*>(p_.scratch) + plan_.delta, t); }
  // In units of log2, and +inf where the row keeps no key. While a row is restated, its running maximum and sum.
  T* row_lse(int64_t t) const { return statistic(static_cast<T*>(p_.scratch) + plan_.row_lse, t); }
  T* row_rest(int64_t t) const { return statistic(static_cast<T*>(p_.scratch) + plan_.row_rest, t); }
  bool is_restated(int64_t t) const { return *row_rest(t) != 0 || *row_lse(t) == -kInfinity<T>; }
  // Whether any row of the key head's group in [begin, end) is.
  bool has_restated(int64_t begin, int64_t end);

  // Restates rows [first, end) of the batch entry, in all heads.
  __attribute__((noinline)) void restate(int64_t first, int64_t end);
  // Row t of the batch entry in the copies of the current head.
  T* q_copy(int64_t t) const { return row_of_copy(plan_.q_copy, head_, t, k_stride_); }
  T* dout_copy(int64_t t) const { return row_of_copy(plan_.dout_copy, head_, t, v_stride_); }
  // If products are of pairs: the copies of the kQueries rows that contain row t of the batch entry.
  Pair* record(int64_t head, int64_t t) const {
    int64_t records = (p_.q_length + kQueries - 1) / kQueries;
    int64_t at = plan_.q_copy + ((batch_ * p_.q_heads + head) * records + t / kQueries) * plan_.record;
    return reinterpret_cast<Pair*>(static_cast<T*>(p_.scratch) + at);
  }
  T* row_of_copy(int64_t at, int64_t head, int64_t t, int stride) const {
    return static_cast<T*>(p_.scratch) + at + ((batch_ * p_.q_heads + head) * p_.q_length + t) * stride;
  }
  T* touched() const {
    int64_t at = ((chunk_ * p_.batch + batch_) * p_.kv_heads + kv_head_) * plan_.row_blocks;
    return static_cast<T*>(p_.scratch) + plan_.touched + at;
  }
  T& dslope(int64_t chunk, int64_t head, int64_t sequence) const {
    int64_t at = ((chunk * p_.batch + batch_) * p_.q_heads + head) * p_.options.sequences + sequence;
    return static_cast<T*>(p_.scratch)[plan_.dslopes + at];
  }
  // For row t of the batch entry: the sum of its dscores, and that of its weights times their distances.
  struct SlopeSums {
    T dscores, distances;
  };
  SlopeSums* slope_sums(int64_t chunk, int64_t head, int64_t t) const {
    int64_t at = ((chunk * p_.batch + batch_) * p_.q_heads + head) * p_.q_length + t;
    return reinterpret_cast<SlopeSums*>(static_cast<T*>(p_.scratch) + plan_.slope_sums) + at;
  }

  // Corrects the gradient of slopes for the error of delta, which is that of out: rounded, and perhaps computed from
  // rounded weights. Distances multiply this error while the exact terms cancel, so that relative errors reached 0.1.
  // The exact sum of a row's dscores is known, so the computed one tells how wrong its delta was.
  void reduce_slopes(int64_t head);

  void attend_chunk() {
    std::memset(touched(), 0, sizeof(T) * plan_.row_blocks);
    if (p_.dalibi_slopes) {
      for (int member = 0; member < group(); ++member) {
        int64_t head = kv_head_ * group() + member;
        std::memset(&dslope(chunk_, head, 0), 0, sizeof(T) * p_.options.sequences);
        std::memset(slope_sums(chunk_, head, 0), 0, sizeof(SlopeSums) * p_.q_length);
      }
    }
    // Padding counts too: batch entries that share dbias must give the same keys to the same chunk.
    int64_t sequences = sequence_count(p_), blocks = 0;
    for (int64_t index = 0; index < sequences; ++index) {
      blocks += (sequence(p_, batch_, index).all_keys + plan_.keys - 1) / plan_.keys;
    }
    int64_t run = (blocks + plan_.chunks - 1) / plan_.chunks;
    // If a key block meets some rows only, each chunk takes consecutive blocks: then chunks share few rows, and few
    // sums of dq. Otherwise each chunk takes every chunks-th block, which divides a causal triangle evenly. If batch
    // entries have bands of their own the first entry decides, for they may share dbias.
    bool in_a_row = is_packed(p_) || options_.has_segments || options_.has_intervals || p_.mask_blocks;
    in_a_row = in_a_row || Band(p_, 0).limited_on_both_sides();
    int64_t block = 0;
    for (int64_t index = 0; index < sequences; ++index) {
      go_to_sequence(index);
      for (int64_t first = 0; first < sequence_.keys; first += plan_.keys, ++block) {
        if ((in_a_row ? block / run : block % plan_.chunks) == chunk_) attend_block(first);
      }
      if (chunk_ == 0) clear_padding();
    }
  }

  void take_turns(int64_t item) {
    int64_t heads = int64_t{p_.batch} * p_.kv_heads, blocks = plan_.blocks;
    int64_t first = item / (blocks * kHeadsTogether) * kHeadsTogether;
    int64_t together = std::min<int64_t>(kHeadsTogether, heads - first), at = item - first * blocks;
    int64_t head = first + at % together, block = at / together;
    batch_ = head / p_.kv_heads;
    kv_head_ = head % p_.kv_heads;
    chunk_ = 0;
    go_to_sequence(0);
    if (block == 0) {
      std::memset(touched(), 0, sizeof(T) * plan_.row_blocks);
      clear_padding();
      if (plan_.reduce_items == 0) clear_rows();
    }
    if (block * plan_.keys >= sequence_.keys) return;
    turn_ = head * blocks + block;
    attend_block(block * plan_.keys);
    // Later blocks wait for this one alone, so it passes only after all blocks before it have.
    if (block > 0) turns_->wait(turn_ - 1, kAllTiles - 1);
    turns_->pass(turn_, kAllTiles);
  }

  // Zeros the rows that keep no key, which no block writes.
  void clear_rows() const {
    for (int member = 0; member < group(); ++member) {
      for (int64_t t = 0; t < sequence_.all_rows; ++t) {
        if (t < sequence_.rows && band_.begin(sequence_, t) < band_.end(sequence_, t)) continue;
        std::memset(row_of<E>(p_.dq, batch_, t, kv_head_ * group() + member), 0, sizeof(E) * p_.head_dim);
      }
    }
  }

  // Writes dq of the rows for which this is the last block of keys.
  void finish_rows(int64_t t, int rows) const {
    for (int i = 0; i < rows; ++i) {
      int64_t end = band_.end(sequence_, t + i);
      if (end <= first_ || end > first_ + count_) continue;
      store_row(dq(head_, t + i), p_.head_dim, static_cast<T>(scale_), row_of<E>(p_.dq, batch_, t + i, head_));
    }
  }

  void clear_padding() const { clear_keys(sequence_.keys, sequence_.all_keys); }
  // Zeros dk and dv of these keys of the sequence.
  void clear_keys(int64_t begin, int64_t end) const {
    for (int64_t s = sequence_.first_key + begin; s < sequence_.first_key + end; ++s) {
      std::memset(row_of<E>(p_.dk, batch_, s, kv_head_), 0, sizeof(E) * p_.head_dim);
      std::memset(row_of<E>(p_.dv, batch_, s, kv_head_), 0, sizeof(E) * p_.value_head_dim);
    }
  }

  void attend_block(int64_t first) {
    first_ = first;
    count_ = static_cast<int>(std::min<int64_t>(plan_.keys, sequence_.keys - first));
    decodes_ = may_decode() && !restates_;
    if (decodes_) decodes_ = decode();
    if (decodes_) return;
    gathered_ = gathers_ && !band_.limited() && gather();
    if (count_ == 0) return;
    load_keys();
    int64_t first_of_band = round_down(band_.row_begin(sequence_, first), kTilePadding<E>);
    int64_t end_of_band = band_.row_end(sequence_, first + count_ - 1);
    SegmentRange segments{};
    if (options_.has_segments) segments = key_segments(p_, batch_, first, first + count_);
    for (int member = 0; member < group(); ++member) {
      head_ = kv_head_ * group() + member;
      int64_t begin = first_of_band, end = end_of_band;
      if (q_intervals_ && !gathered_) {
        keys_intervals_ = load_intervals();
        begin = std::max(begin, round_down(std::min(keys_intervals_.begin, sequence_.rows), kTilePadding<E>));
        end = std::min(end, keys_intervals_.end);
      }
      if (restates_) begin = std::max(begin, restated_begin_), end = std::min(end, restated_end_);
      if (options_.has_slope) slope_ = options_.slope(batch_, sequence_index_, head_);
      if (dropout_.active() && sequence_.rows > 0) dropout_.seed(options_.seed(batch_, sequence_index_, head_));
      for (int64_t t = begin, next; t < end; t = next) {
        // Tiles end where blocks of backward_reduce do.
        next = std::min(end, round_down(t, kQueries) + kQueries);
        compare_segments_ = false;
        if (options_.has_segments) {
          SegmentRange rows = row_segments(p_, batch_, t, next);
          if (!segments.meets(rows)) continue;
          compare_segments_ = !segments.is_only(rows);
        }
        rows_intervals_ = kv_intervals_.range(head_, 1, sequence_.first_row + t, sequence_.first_row + next);
        if (!rows_intervals_.meets(first, first + count_)) continue;
        if (!meets_blocks(t, next)) continue;
        test_intervals_ = q_intervals_ && !gathered_ && !keys_intervals_.covers(t, next);
        int rows = static_cast<int>(next - t);
        load_queries(t, rows);
        if (most_ == 0) continue;
        if constexpr (kPairedBackward<E>) {
          tile_of_pairs(t, rows, next < end ? next : begin);
        } else {
          tile(t, rows, next < end ? next : begin);
        }
      }
    }
    if (restates_) return;
    if constexpr (kColumns<E>) {
      for (int j = 0; j < count_; j += kTileKeys) {
        int keys = std::min(round_up(count_ - j, kWidth<T>), kTileKeys);
        transpose_rows(dk_columns_ + j * k_stride_, kTileKeys, k_stride_, keys, k_stride_, dk_ + j * k_stride_);
        transpose_rows(dv_columns_ + j * v_stride_, kTileKeys, v_stride_, keys, v_stride_, dv_ + j * v_stride_);
      }
    }
    for (int j = 0; j < count_; ++j) {
      int64_t s = sequence_.first_key + first + (gathered_ ? kept_[j] : j);
      store_row(dk_ + j * k_stride_, p_.head_dim, static_cast<T>(scale_), row_of<E>(p_.dk, batch_, s, kv_head_));
      store_row(dv_ + j * v_stride_, p_.value_head_dim, static_cast<T>(dropout_.factor()),
                row_of<E>(p_.dv, batch_, s, kv_head_));
    }
  }

  // Zeros the chunk's sums of a block of rows before their first tile.
  void touch(int64_t t) {
    T& flag = touched()[first_block_ + t / kQueries];
    if (flag != 0) return;
    flag = 1;
    int64_t begin = round_down(t, kQueries);
    int64_t rows = std::min<int64_t>(kQueries, round_up(sequence_.rows, int64_t{kTilePadding<E>}) - begin);
    for (int member = 0; member < group(); ++member) {
      std::memset(dq(kv_head_ * group() + member, begin), 0, sizeof(T) * rows * plan_.padded_head_dim);
    }
  }

  // Where each of the block's keys keeps all rows or none, those that keep them become the block's keys; unless all of
  // them do. The gradients of the others are zeros.
  bool gather();
  RowsOfKeys<E> rows_of_keys(const Tensor& array, int columns, E* gathered) const {
    const E* rows = row_of<const E>(array, batch_, sequence_.first_key + first_, kv_head_);
    if (!gathered_) return {rows, array.row_stride};
    gather_rows(rows, array.row_stride, columns, kept_, count_, gathered);
    return {gathered, columns};
  }

  void load_keys() {
    int lanes = round_up(count_, std::max(kWidth<T>, kRowPadding));
    auto [k, k_row_stride] = rows_of_keys(p_.k, p_.head_dim, gathered_k_);
    auto [v, v_row_stride] = rows_of_keys(p_.v, p_.value_head_dim, gathered_v_);
    if constexpr (kPairedBackward<E>) {
      load_columns(k, k_row_stride, p_.head_dim, k_depth_, k_tiles_);
      load_columns(v, v_row_stride, p_.value_head_dim, v_depth_, v_tiles_);
      copy_pairs_of_rows(k, k_row_stride, count_, p_.head_dim, round_up(count_, kTilePadding<E>), k_stride_, k_pairs_);
      std::memset(kColumns<E> ? dk_columns_ : dk_, 0, sizeof(T) * plan_.keys * k_stride_);
      std::memset(kColumns<E> ? dv_columns_ : dv_, 0, sizeof(T) * plan_.keys * v_stride_);
    } else {
      // dv_ is unused until the block's first product.
      copy_rows(v, v_row_stride, count_, p_.value_head_dim, lanes, v_stride_, dv_);
      transpose_to_panels(dv_, v_stride_, lanes, p_.value_head_dim, v_panels_);
      copy_rows(k, k_row_stride, count_, p_.head_dim, lanes, k_stride_, k_);
      transpose_to_panels(k_, k_stride_, lanes, p_.head_dim, k_panels_);
      std::memset(dk_, 0, sizeof(T) * lanes * k_stride_);
      std::memset(dv_, 0, sizeof(T) * lanes * v_stride_);
    }
    if (options_.has_segments) {
      const int* segments = p_.kv_segment_ids + batch_ * p_.kv_length + first_;
      for (int j = 0; j < plan_.keys; ++j) segments_[j] = segments[std::min(j, count_ - 1)];
    }
  }

  // Whether the block mask keeps any of the block's keys for rows [begin, end).
  bool meets_blocks(int64_t begin, int64_t end) const {
    const Blocks& blocks = functions_.blocks();
    return !blocks || blocks.meets(head_, 1, begin, end, first_, first_ + count_);
  }
  // For the functions, the tile of `rows` rows from t on. Decides which pairs they keep.
  void decide_functions(int64_t t, int rows);

  // Those of the block's keys for the current head, of which it returns the range.
  IntervalRange load_intervals();

  // The block's rows of K or V as the right operand of the first products.
  void load_columns(const E* from, ptrdiff_t stride, int columns, int depth, Pair* to);

  // Rows t, t + 1, ... of the batch entry and head_.
  void fill(const Record& to, int64_t t, int rows);

  // Rows t, t + 1, ... of head_: in place in the copies if they fill the tile, else rows `at`, ... of our buffers.
  void load_queries(int64_t t, int rows, int at = 0);

  bool finishes_later() const {
    return options_.any() || functions_ || dropout_.active() || compare_segments_ || test_intervals_ || large_;
  }
  // body(std::integral_constant<Finish, finish>) for the current tile.
  template <typename Body>
  JAX_FLASH_INLINE void with_finish(Body body) const {
    if (finishes_later()) return body(std::integral_constant<Finish, Finish::later>{});
    if (!masked_) return body(std::integral_constant<Finish, Finish::full>{});
    if (band_.left == kUnlimited && !kv_intervals_) return body(std::integral_constant<Finish, Finish::ended>{});
    body(std::integral_constant<Finish, Finish::masked>{});
  }

  // The weights of row i of the tile and the keys from `lane` on, from scores in units of log2.
  template <Finish finish>
  JAX_FLASH_INLINE Vec<T> weight_of(const Vec<T>& score, int i, int lane) const {
    Vec<T> weight = exp2(score - tile_lse_[i]);
    Vec<T> key = iota<T>() + static_cast<T>(lane);
    if constexpr (finish != Finish::full) clear_where(key >= kept_end_[i], weight);
    if constexpr (finish == Finish::masked) clear_where(key < kept_begin_[i], weight);
    return weight;
  }

  // Records in the copies begin at multiples of kQueries rows, tiles at multiples of kTilePadding<E>.
  void load_record(int64_t t, int rows);

  // tile() by products of pairs, kTileKeys keys at a time.
  void tile_of_pairs(int64_t t, int rows, int64_t next);

  // The first products of the rows with NV vectors of keys from `lane` on; zeros if the rows keep none of these.
  template <int NV>
  void multiply_rows(int rows, int lane, int columns, const Pair* a, int depth, const Pair* b, T* to);

  // Computes weights and dscores from scores and dweights, unless that is done, and packs them as pairs: both along the
  // queries, dscores along the keys too. For `lanes` keys from `first` on.
  template <Finish finish>
  void pair_tile(int rows, int first, int lanes);

  // One tile of `rows` queries and the first `most_` keys of the block.
  void tile(int64_t t, int rows, int64_t next);

  // Sums go by pieces of so many keys, so that they are the same bit for bit in blocks of any length.
  template <typename Factors>
  void add_to_dq(int rows, int columns, const Factors* dscores, ptrdiff_t stride, const Factors* k, T* to);

  // Prefetches what the next tile reads in the copies, and the rows of results that are written after this tile: those
  // of dq that it finishes, and dk and dv after the block's last tile. These rows lie far apart in memory, and storing
  // them without a prefetch took 1.5% of a causal call's time.
  void start_prefetch(int64_t t, int rows, int64_t next, int64_t steps, int64_t later_steps);
  JAX_FLASH_INLINE void ask_for_rows() {
    if (!prefetches_rows_) return;
    dq_rows_.step();
    dk_rows_.step();
    dv_rows_.step();
  }

  // What the band keeps of a tile, 8 rows with 8 keys at a time: the rest, half of a tile on the diagonal, is left out
  // of all five products.
  void find_kept(int rows, int keys);

  // Decoding: at most kDecodingRows queries, in calls without options. As in the forward (decoding.h), head_dim is in
  // the lanes, and K and V are read in place. All rows that a key's gradients depend on are in one item, so these are
  // written once. Against the tiles this is twice as fast for 8 rows of several heads, a tile each, but 0.8 times as
  // fast in float32 for 8 rows of one head.
  bool may_decode() const;

  // Returns false if it leaves the rows to tiles, because some are restated.
  bool decode();

  // R rows, of which the first `rows` are not padding.
  template <int R>
  void decode_rows(int rows);

  // body(h, std::integral_constant<int, vectors>) for as many vectors of R rows at a time as registers hold.
  template <int R, typename Body>
  JAX_FLASH_INLINE void for_columns(int columns, Body body);

  // to[j] = scale * sum of factors[r][j] * rows[r], NV vectors of the rows of dv or dk.
  template <int R, int NV>
  JAX_FLASH_INLINE void put_decoding(const T* factors, const T* rows, ptrdiff_t stride, T scale, E* to,
                                     ptrdiff_t to_stride);

  template <int NV, Finish finish>
  void scores(int rows, int lane);

  template <int NV, Finish finish>
  __attribute__((noinline)) void scores_of_part(int i, int lane);

  // kRows rows from i on with NV vectors of keys from `lane` on.
  template <int NV, Finish finish>
  JAX_FLASH_INLINE void scores_of_rows(int i, int lane);

  // Computes weights and dscores from scores and dweights, and adds to the gradients of bias and slopes; or while rows
  // are restated, adds the scores to their statistics. Both are one function, so that the scores are the same bits; it
  // is another one for ordinary tiles, so that these lose nothing.
  template <bool large>
  __attribute__((noinline)) void apply_options(int64_t t, int rows, int lanes);
  // The scores of one vector, without and with cap, bias, mask and slope; `capped` gets the derivative of the cap.
  struct Capped {
    Vec<T> score, derivative;
  };
  JAX_FLASH_INLINE Capped changed(const Vec<T>& score, const typename Scores<E>::Row& row, const Vec<T>& distance,
                                  int lane) const;
  // For calls with functions: the scores of a tile with all of these options, and their derivatives.
  void apply_functions(int64_t t, int rows, int lanes);
  void add_captured_gradients(int rows, int lanes);
  PairFunctions::Tile tile_of_functions(int rows, int lanes) const {
    return {row_indices_, positions_, heads_, false, head_, first_, lanes, rows};
  }
  void apply_options(int64_t t, int rows, int lanes) {
    large_ ? apply_options<true>(t, rows, lanes) : apply_options<false>(t, rows, lanes);
  }

  T* dbias_at(int64_t t, int64_t s) const {
    const Strides& strides = p_.bias_strides;
    return static_cast<T*>(p_.dbias) + batch_ * strides.batch + head_ * strides.head + t * strides.row +
           s * strides.column;
  }

  // Adds the scores of row t of the batch entry to its maximum and sum; they become weights.
  void add_to_statistics(int64_t t, int lanes, T* scores) const;

  void add_to_bias(int64_t t, int lane, const Vec<T>& sum) const;

  // Returns the bits of row t: [row][kKeys / kDropoutKeys].
  const uint32_t* fill_key_bits(int64_t t, int rows) {
    constexpr int kStride = kKeys / kDropoutKeys;
    int64_t begin = round_down(t, kDropoutRows);
    for (int64_t first = begin; first < t + rows; first += kDropoutRows) {
      for (int j = 0; j < most_; j += kDropoutKeys) {
        uint32_t* bits = key_bits_ + (first - begin) * kStride + j / kDropoutKeys;
        for (int i = 0; i < 8; ++i) dropout_.bits_of_keys(first, first_ + j, i, bits, kStride);
      }
    }
    return key_bits_ + (t - begin) * kStride;
  }

  const Problem& p_;
  const BackwardPlan& plan_;
  const Scores<E> options_;
  PairFunctions functions_;
  Dropout dropout_;
  int k_stride_;  // of a row of head_dim elements in all tiles
  int v_stride_;  // of value_head_dim
  T* k_panels_;   // [keys / kPanel][head_dim][kPanel]
  T* v_panels_;   // [keys / kPanel][value_head_dim][kPanel]
  T* k_;          // [keys][k_stride_], and so dk_
  T* dk_;
  T* dv_;               // [keys][v_stride_]
  T* q_;                // [kQueries][k_stride_]
  T* dout_;             // [kQueries][v_stride_]
  const T* tile_q_;     // [rows][k_stride_] of the current tile: q_, or in the copies
  const T* tile_dout_;  // [rows][v_stride_]
  const T* tile_lse_;   // [rows] likewise
  const T* tile_rest_;
  const T* tile_delta_;
  T* weights_;     // [kQueries][kKeys]
  T* dscores_;     // [kQueries][kKeys]
  T* lse_;         // [kQueries] in units of log2; +inf where a row keeps no key
  T* rest_;        // [kQueries]
  T* delta_;       // [kQueries]
  T* kept_begin_;  // [kQueries] the part of the block's keys of the band and of the rows' intervals
  T* kept_end_;
  int k_depth_, v_depth_;  // with tiles, pairs of head_dim and value_head_dim
  Pair* k_tiles_;          // [kKeys / kTileKeys][k_depth_][kTileKeys]
  Pair* v_tiles_;          // [kKeys / kTileKeys][v_depth_][kTileKeys]
  Pair* k_pairs_;          // [kKeys / 2][k_stride_]
  Pair* pairs_;            // temporary of a transposition
  Pair* record_;
  Record tile_;
  LinesAhead next_record_;
  Pair* weight_pairs_;  // [kQueries / 2][kTileKeys]
  Pair* dscore_pairs_;  // likewise
  Pair* dscore_rows_;   // [kQueries][kKeys / 2]
  T* dk_columns_;       // [kKeys / kTileKeys][k_stride_][kTileKeys]
  T* dv_columns_;       // [kKeys / kTileKeys][v_stride_][kTileKeys]
  Int<T>* segments_;    // [keys]
  Int<T>* interval_begin_;
  Int<T>* interval_end_;
  int32_t *row_indices_, *positions_, *heads_;  // [kQueries] for the functions
  int32_t* keep_;                               // [kQueries][kKeys] which pairs these keep
  T* derivatives_;                              // [kQueries][kKeys] of the functions, and so on
  T* cap_derivatives_;                          // of softcap
  T* scores_before_;
  T* dscores_after_;
  double* captured_sums_;  // of the item, in the scratch
  uint32_t* key_bits_;     // [rows][kKeys / kDropoutKeys]
  T* dbias_;               // [kKeys] sums over the rows of a tile
  size_t workspace_;

  const Turns* turns_;
  int64_t turn_;  // the current block, counted over all heads
  LinesAhead next_dq_, next_q_, next_dout_;
  RowsAhead dq_rows_, dk_rows_, dv_rows_;  // to be written
  bool prefetches_rows_;
  int64_t batch_, kv_head_, head_, chunk_, sequence_index_;
  Sequence sequence_;
  Band band_;
  Intervals kv_intervals_, q_intervals_;         // of the batch entry
  IntervalRange keys_intervals_;                 // of the block's keys
  IntervalRange rows_intervals_;                 // of the tile's rows
  bool drops_ = false;                           // whether the functions drop any of the tile's pairs
  double scale_;                                 // of the batch entry
  int64_t first_block_;                          // of backward_reduce
  int64_t first_sum_;                            // row of the sums of dq
  int64_t first_;                                // key of the block
  int count_;                                    // keys of the block
  Depths keys_of_rows_[kQueries / kRowPadding];  // what the band keeps, by 8 rows and 8 keys
  Depths rows_of_keys_[kKeys / kRowPadding];
  int most_;     // the rows of the tile keep none of the block's keys from this one on
  bool masked_;  // whether the band clears some weight of the tile
  bool compare_segments_, test_intervals_;
  const bool gathers_;                               // keys, where all rows keep them or none does
  bool gathered_ = false;                            // the block's
  E *gathered_k_ = nullptr, *gathered_v_ = nullptr;  // [kKeys][head_dim], [kKeys][value_head_dim]
  int* kept_;                                        // [kKeys] which keys they are of, counted from the block's first
  bool decodes_;
  bool restates_ = false;  // whether tiles end with their scores, of rows [restated_begin_, restated_end_)
  bool large_;             // whether it does, or rows of the tile have been restated
  int64_t restated_begin_, restated_end_;
  T slope_;
};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
