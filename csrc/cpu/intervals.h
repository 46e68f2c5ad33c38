// Interval masks: which keys a row keeps, and which rows keep a key (kv_intervals and q_intervals of options.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

struct Interval {
  int64_t begin, end;
};

// Of a range of rows or keys: what some of them hold, and what all hold.
struct IntervalRange {
  int64_t begin, end, full_begin, full_end;

  bool meets(int64_t first, int64_t last) const { return std::max(begin, first) < std::min(end, last); }
  bool covers(int64_t first, int64_t last) const { return full_begin <= first && last <= full_end; }
};

// The intervals of the rows, or of the keys, of a batch entry, in the order of the array. Absent ones hold everything.
constexpr int64_t kNoEnd = 2147483647;
class Intervals {
 public:
  Intervals() = default;
  Intervals(const int* intervals, const Strides& strides, const int* ranges, const Strides& range_strides,
            int64_t batch)
      : intervals_(intervals ? intervals + batch * strides.batch : nullptr),
        ranges_(intervals ? ranges + batch * range_strides.batch : nullptr),
        strides_(strides),
        range_strides_(range_strides) {}

  explicit operator bool() const { return intervals_; }

  Interval of(int64_t head, int64_t index) const {
    if (!intervals_) return {0, kNoEnd};
    const int* interval = intervals_ + head * strides_.head + index * strides_.row;
    return {interval[0], interval[1]};
  }

  // Of keys: where each of [first, first + count) keeps all rows of [begin, end) or none, the number of those that keep
  // them, which go to `kept`, counted from the first; else -1.
  int keeping_all(int64_t head, int64_t first, int count, int64_t begin, int64_t end, int* kept) const {
    int found = 0;
    for (int j = 0; j < count; ++j) {
      const Interval rows = of(head, first + j);
      const bool all = rows.begin <= begin && end <= rows.end;
      if (!all && std::max(rows.begin, begin) < std::min(rows.end, end)) return -1;
      if (all) kept[found++] = j;
    }
    return found;
  }

  // Of [begin, end), in `heads` heads.
  IntervalRange range(int64_t first_head, int64_t heads, int64_t begin, int64_t end) const {
    if (!intervals_) return {0, kNoEnd, 0, kNoEnd};
    if (range_strides_.head == 0) heads = 1;
    IntervalRange all{kNoEnd, 0, 0, kNoEnd};
    for (int64_t head = first_head; head < first_head + heads; ++head) {
      for (int64_t block = begin / kSegmentBlock; block * kSegmentBlock < end; ++block) {
        const int* range = ranges_ + head * range_strides_.head + block * range_strides_.row;
        all = {std::min<int64_t>(all.begin, range[0]), std::max<int64_t>(all.end, range[1]),
               std::max<int64_t>(all.full_begin, range[2]), std::min<int64_t>(all.full_end, range[3])};
      }
    }
    return all;
  }

 private:
  const int* intervals_ = nullptr;
  const int* ranges_ = nullptr;
  Strides strides_{}, range_strides_{};
};

inline Intervals kv_intervals(const Problem& p, int64_t batch) {
  return {p.kv_intervals, p.kv_intervals_strides, p.kv_interval_ranges, p.kv_interval_ranges_strides, batch};
}
inline Intervals q_intervals(const Problem& p, int64_t batch) {
  return {p.q_intervals, p.q_intervals_strides, p.q_interval_ranges, p.q_interval_ranges_strides, batch};
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
