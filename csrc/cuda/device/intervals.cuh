// Interval masks: which keys a row keeps, and which rows keep a key (kv_intervals and q_intervals of options.h). As
// ranges of blocks, so that tiles are decided by their edges, and pair by pair.
#pragma once

#include "cuda/device/extent.cuh"

namespace jax_flash {

constexpr bool in_intervals = has_kv_intervals || has_q_intervals;

// Query heads whose rows are in one block.
struct Heads {
  int first;
  int count;
};

// Of some rows or keys: what some of them hold, and what all hold.
struct IntervalRange {
  int first;
  int end;
  int full_first;
  int full_end;

  __device__ __forceinline__ bool meets(int begin, int last) const {
    return at_least(first, begin) < at_most(end, last);
  }
  __device__ __forceinline__ bool covers(int begin, int last) const { return full_first <= begin && last <= full_end; }
};

// The ranges of the blocks of rows, or of keys, of an extent; null where these have no intervals.
struct IntervalRanges {
  const int* data;  // of the batch entry and the first head
  int head_stride, block_stride;
  int heads;
  int first;   // of the extent
  int length;  // of the array

  __device__ __forceinline__ IntervalRanges(const int* all, const Strides& s, int batch, const Heads& of,
                                            const Rows& rows, int length)
      : data(all ? all + batch * s.batch + of.first * s.head : nullptr),
        head_stride(static_cast<int>(s.head)),
        block_stride(static_cast<int>(s.row)),
        heads(s.head == 0 ? 1 : of.count),
        first(rows.first),
        length(length) {}

  // Of [begin, end), at most `most` positions, or any number of them where that is 0.
  template <int most>
  __device__ __forceinline__ IntervalRange of(int begin, int end) const {
    IntervalRange all{0x7fffffff, -1, -1, 0x7fffffff};
    const int first_block = (first + begin) / kSegmentBlock, last = at_most(first + end, length);
    for (int head = 0; head < heads; ++head) {
      const auto add = [&](int block) {
        const int4 x = *reinterpret_cast<const int4*>(data + head * head_stride + block * block_stride);
        all = {at_most(all.first, x.x), at_least(all.end, x.y), at_least(all.full_first, x.z),
               at_most(all.full_end, x.w)};
      };
      if constexpr (most == 0) {
        for (int block = first_block; block * kSegmentBlock < last; ++block) add(block);
      } else {
#pragma unroll
        for (int i = 0; i < ceil_div(most, kSegmentBlock) + 1; ++i) {
          if ((first_block + i) * kSegmentBlock < last) add(first_block + i);
        }
      }
    }
    return all;
  }
};
JAX_FLASH_DEVICE IntervalRanges row_intervals(const Problem& problem, const Extent& extent, const Heads& heads) {
  return {has_kv_intervals ? problem.kv_interval_ranges : nullptr,
          problem.kv_interval_ranges_strides,
          extent.batch,
          heads,
          extent.q,
          problem.q_length};
}
JAX_FLASH_DEVICE IntervalRanges key_intervals(const Problem& problem, const Extent& extent, const Heads& heads) {
  return {has_q_intervals ? problem.q_interval_ranges : nullptr,
          problem.q_interval_ranges_strides,
          extent.batch,
          heads,
          extent.kv,
          problem.kv_length};
}

// The tiles of the other side whose intervals hold some of the block's positions [begin, end), or all of them. A base
// rather than a member, like IntervalPlanes: absent it takes no place, and the machine code is as without it.
template <int tile, bool present>
struct IntervalTiles {
  IntervalRanges ranges;
  int begin;
  int end;

  __device__ __forceinline__ IntervalTiles(const IntervalRanges& ranges, int begin, int end)
      : ranges(ranges), begin(begin), end(end) {}
  __device__ __forceinline__ bool filters() const { return ranges.data; }
  __device__ __forceinline__ IntervalRange of(int i) const {
    return ranges.template of<tile>(i * tile, (i + 1) * tile);
  }
  __device__ __forceinline__ bool meets(int i) const { return !filters() || of(i).meets(begin, end); }
  __device__ __forceinline__ bool covers(int i) const { return !filters() || of(i).covers(begin, end); }
};
template <int tile>
struct IntervalTiles<tile, false> {
  __device__ __forceinline__ IntervalTiles(const IntervalRanges&, int, int) {}
  __device__ __forceinline__ bool filters() const { return false; }
  __device__ __forceinline__ bool meets(int) const { return true; }
  __device__ __forceinline__ bool covers(int) const { return true; }
};

// The intervals of a head, by index in the extent.
template <bool present>
struct IntervalPlane {
  const int* data;
  int stride;
  int last;

  __device__ __forceinline__ IntervalPlane(const int* all, const Strides& s, int batch, int head, const Rows& rows)
      : data(all + batch * s.batch + head * s.head + rows.first * s.row),
        stride(static_cast<int>(s.row)),
        last(rows.length - 1) {}
  // Beyond the ends what stands at the ends.
  __device__ __forceinline__ int2 at(int index) const {
    return *reinterpret_cast<const int2*>(data + static_cast<i64>(at_most(index, last)) * stride);
  }
};
template <>
struct IntervalPlane<false> {
  __device__ __forceinline__ IntervalPlane(const int*, const Strides&, int, int, const Rows&) {}
  __device__ __forceinline__ int2 at(int) const { return {0, 0x7fffffff}; }
};

// Both of a head.
template <bool present>
struct IntervalPlanes {
  IntervalPlane<has_kv_intervals> of_rows;
  IntervalPlane<has_q_intervals> of_keys;

  __device__ __forceinline__ IntervalPlanes(const Problem& problem, const Extent& extent, int head)
      : of_rows(problem.kv_intervals, problem.kv_intervals_strides, extent.batch, head, extent.q),
        of_keys(problem.q_intervals, problem.q_intervals_strides, extent.batch, head, extent.kv) {}
  __device__ __forceinline__ int2 keys_of(int row) const { return of_rows.at(row); }
  __device__ __forceinline__ int2 rows_of(int key) const { return of_keys.at(key); }
};
template <>
struct IntervalPlanes<false> {
  __device__ __forceinline__ IntervalPlanes(const Problem&, const Extent&, int) {}
  __device__ __forceinline__ int2 keys_of(int) const { return {0, 0x7fffffff}; }
  __device__ __forceinline__ int2 rows_of(int) const { return {0, 0x7fffffff}; }
};

JAX_FLASH_DEVICE bool holds(const int2& interval, int position) {
  return position >= interval.x && position < interval.y;
}

}  // namespace jax_flash
