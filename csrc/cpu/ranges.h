// Which pairs of rows and keys the kernels visit: sequences and padding, the band of causal and window, segments; and
// with intervals.h interval masks.
//
// Rows t and keys s count from the start of their sequence, and all comparisons are made in 64 bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

constexpr int64_t round_down(int64_t value, int64_t multiple) { return value - value % multiple; }

// A sequence, whose rows attend to its keys: a batch entry, or one sequence of a packed one.
struct Sequence {
  int64_t first_row, rows, all_rows;  // rows from `rows` to `all_rows` are padding
  int64_t first_key, keys, all_keys;
  int64_t offset;  // position of row 0
};

inline bool is_packed(const Problem& p) { return p.cu_q_lengths; }

// Sequences of a batch entry. If packed, plus one of all rows and keys that are in no sequence, which is all padding.
inline int64_t sequence_count(const Problem& p) { return is_packed(p) ? int64_t{p.options.sequences} + 1 : 1; }

inline Sequence sequence(const Problem& p, int64_t batch, int64_t index) {
  auto length = [&](const int* lengths, int all) -> int64_t {
    return lengths ? std::clamp(lengths[batch], 0, all) : all;
  };
  if (!is_packed(p)) {
    return {0,           length(p.q_lengths, p.q_length),   p.q_length, 0, length(p.kv_lengths, p.kv_length),
            p.kv_length, p.q_offset ? p.q_offset[batch] : 0};
  }
  int64_t sequences = p.options.sequences;
  // Clamped so that no content of these arrays leads to an index outside the tensors.
  auto at = [&](const int* starts, int64_t i, int64_t all) -> int64_t {
    return i > sequences ? all : std::clamp<int64_t>(starts[batch * (sequences + 1) + i], 0, all);
  };
  int64_t row = at(p.cu_q_lengths, index, p.q_length), key = at(p.cu_kv_lengths, index, p.kv_length);
  int64_t rows = std::max<int64_t>(at(p.cu_q_lengths, index + 1, p.q_length) - row, 0);
  int64_t keys = std::max<int64_t>(at(p.cu_kv_lengths, index + 1, p.kv_length) - key, 0);
  if (index == sequences) return {row, 0, rows, key, 0, keys, 0};
  return {row, rows, rows, key, keys, keys, p.q_offset ? p.q_offset[batch * sequences + index] : 0};
}

// The number of a sequence's first block, where blocks of `size` rows are counted over all sequences of a batch entry.
// The count is an upper bound that includes every sequence's ragged last block: b - a rows fit in floor(b / size) -
// floor(a / size) + 1 blocks. `scale` is how many folded rows one row of the array has.
inline int64_t first_block(const Problem& p, int64_t batch, int64_t index, int64_t scale, int64_t size) {
  if (index == 0) return 0;
  int64_t start = p.cu_q_lengths[batch * (p.options.sequences + int64_t{1}) + index];
  return scale * std::clamp<int64_t>(start, 0, p.q_length) / size + index;
}

// The sequence to which the block belongs.
inline int64_t sequence_of_block(const Problem& p, int64_t batch, int64_t block, int64_t scale, int64_t size) {
  int64_t low = 0, high = sequence_count(p);
  while (high - low > 1) {
    int64_t middle = low + (high - low) / 2;
    (first_block(p, batch, middle, scale, size) <= block ? low : high) = middle;
  }
  return low;
}

constexpr int64_t kUnlimited = int64_t{1} << 40;  // more than any distance

// Position p of a batch entry keeps key s when p - left <= s <= p + right.
struct Band {
  Band() = default;
  Band(const Problem& p, int64_t batch) {
    constexpr int kAbsent = 2147483647;
    const int* bounds = p.window_bounds ? p.window_bounds + 2 * batch : nullptr;
    int first = bounds ? bounds[0] : p.options.window_left, last = bounds ? bounds[1] : p.options.window_right;
    if (first != kAbsent) left = first;
    if (last != kAbsent) right = last;
    if (p.options.causal) right = std::min<int64_t>(right, 0);
    // Sides that cross keep nothing. That is expressed as a right side before every key, so that begin() <= end()
    // holds.
    if (left + right < 0) left = kUnlimited, right = -kUnlimited;
  }

  bool limited() const { return left != kUnlimited || right != kUnlimited; }
  bool limited_on_both_sides() const { return left != kUnlimited && right != kUnlimited; }
  // Keys [begin, end) of row t.
  int64_t begin(const Sequence& d, int64_t t) const { return std::clamp<int64_t>(t + d.offset - left, 0, d.keys); }
  int64_t end(const Sequence& d, int64_t t) const { return std::clamp<int64_t>(t + d.offset + right + 1, 0, d.keys); }
  // Rows [begin, end) that keep some of the keys [first, last].
  int64_t row_begin(const Sequence& d, int64_t first) const {
    return std::clamp<int64_t>(first - d.offset - right, 0, d.rows);
  }
  int64_t row_end(const Sequence& d, int64_t last) const {
    return std::clamp<int64_t>(last - d.offset + left + 1, 0, d.rows);
  }

  int64_t left = kUnlimited, right = kUnlimited;
};

// The segment ids that occur in a range of rows, or of keys.
struct SegmentRange {
  int low, high;

  bool meets(const SegmentRange& other) const { return low <= other.high && other.low <= high; }
  bool is_only(const SegmentRange& other) const { return low == high && other.low == low && other.high == low; }
};

inline SegmentRange segment_range(const int* ranges, int64_t batch, int64_t length, int64_t begin, int64_t end) {
  const int* range = ranges + batch * ((length + kSegmentBlock - 1) / kSegmentBlock) * 2;
  SegmentRange all{2147483647, -2147483647 - 1};
  for (int64_t block = begin / kSegmentBlock; block * kSegmentBlock < end; ++block) {
    all.low = std::min(all.low, range[2 * block]);
    all.high = std::max(all.high, range[2 * block + 1]);
  }
  return all;
}

inline SegmentRange row_segments(const Problem& p, int64_t batch, int64_t begin, int64_t end) {
  return segment_range(p.q_segment_ranges, batch, p.q_length, begin, end);
}
inline SegmentRange key_segments(const Problem& p, int64_t batch, int64_t begin, int64_t end) {
  return segment_range(p.kv_segment_ranges, batch, p.kv_length, begin, end);
}

// Keys [begin, end), `begin` a multiple of kSegmentBlock.
struct KeyRange {
  int64_t begin, end;
};

// The range without the blocks at both ends of which meets(begin, end) is false.
template <typename Meets>
KeyRange trim(KeyRange keys, Meets meets) {
  while (keys.begin < keys.end && !meets(keys.begin, std::min(keys.end, keys.begin + kSegmentBlock))) {
    keys.begin += kSegmentBlock;
  }
  while (keys.begin < keys.end && !meets(round_down(keys.end - 1, kSegmentBlock), keys.end)) {
    keys.end = round_down(keys.end - 1, kSegmentBlock);
  }
  return {keys.begin, std::max(keys.begin, keys.end)};
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
