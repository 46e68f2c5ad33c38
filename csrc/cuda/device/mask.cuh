// Which pairs of query and key are kept: as ranges of tiles, so that tiles without a pair are skipped and tiles that
// keep every pair are not tested; and pair by pair for the tiles between.
#pragma once

#include "cuda/device/intervals.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/device/pair_functions.cuh"

namespace jax_flash {

constexpr bool bounded_right = option_causal || with_window_right || has_window_bounds;
constexpr bool bounded_left = with_window_left || has_window_bounds;
constexpr bool in_segments = has_q_segment_ids;
constexpr bool tests_keys = in_segments || has_q_intervals;  // of a tile one by one, with what is read of each

// Row t keeps keys s with t + low <= s <= t + high.
struct Band {
  int low;
  int high;
};

// Beyond [-q_length, kv_length] a bound changes nothing more, so they are clamped there, where sums with indices fit an
// int.
JAX_FLASH_DEVICE int clamped(i64 bound, const Problem& problem) {
  return static_cast<int>(at_most<i64>(at_least<i64>(bound, -problem.q_length), problem.kv_length));
}

JAX_FLASH_DEVICE Band band_of(const Problem& problem, const Extent& extent) {
  if constexpr (!bounded_left && !bounded_right) return {0, 0};
  const i64 offset = has_q_offset ? problem.q_offset[extent.index] : 0;
  if constexpr (has_window_bounds) {
    constexpr int unlimited = 0x7fffffff;
    const int2 sides = reinterpret_cast<const int2*>(problem.window_bounds)[extent.batch];
    const int low = sides.x == unlimited ? -problem.q_length : clamped(offset - sides.x, problem);
    const i64 right = option_causal ? at_most(sides.y, 0) : sides.y;
    const int high = right == unlimited ? problem.kv_length : clamped(offset + right, problem);
    // Sides that cross keep nothing: as above every row, so that ranges of tiles are empty ones.
    return low <= high ? Band{low, high} : Band{-problem.q_length, -problem.q_length};
  }
  i64 right = with_window_right ? problem.options.window_right : 0;
  if (option_causal) right = 0;
  return {bounded_left ? clamped(offset - problem.options.window_left, problem) : 0, clamped(offset + right, problem)};
}

JAX_FLASH_DEVICE bool in_band(const Band& band, int row, int column) {
  return (!bounded_left || column >= row + band.low) && (!bounded_right || column <= row + band.high);
}

// Whether no tile is taken for full: a mask function has to be asked for every pair, and a long score function is not
// to be compiled for full tiles and others apart. With sin that takes 3.6 s forward instead of 2.3, and log1p spills.
constexpr bool all_partial = has_mask_function || has_long_score;

// Tiles [begin, end) hold all pairs that are kept; those of [full_begin, full_end) keep all their pairs, as far as
// `mask` and the segments let them. Every range is canonical, 0 <= begin <= end <= tiles, the empty ones too, so that
// it may be walked from either end, trimmed, and its tiles counted. The full tiles are some of it, or none: then
// full_begin and full_end may be anything with full_begin >= full_end.
struct TileRange {
  int begin;
  int end;
  int full_begin;
  int full_end;

  __device__ __forceinline__ bool is_full(int tile) const {
    return !all_partial && tile >= full_begin && tile < full_end;
  }
  __device__ __forceinline__ bool canonical(int tiles) const {
    return 0 <= begin && begin <= end && end <= tiles &&
           (full_begin >= full_end || (begin <= full_begin && full_end <= end));
  }
};

// Tiles of the positions [first_any, last_any], the full tiles inside [first_all, last_all], all in [0, length). Unless
// it `starts_at_0`, as the compiler doesn't find out, the first position may lie beyond the last and beyond the length.
template <int tile, bool starts_at_0>
JAX_FLASH_DEVICE TileRange tile_range(int first_any, int last_any, int first_all, int last_all, int length) {
  const int begin = at_least(0, first_any) / tile;
  const int end = ceil_div(at_least(0, at_most(length, last_any + 1)), tile);
  const int full_begin = ceil_div(at_least(0, first_all), tile);
  const int full_end = at_least(0, at_most(length, last_all + 1)) / tile;
  const TileRange range{starts_at_0 ? 0 : at_most(begin, end), end, full_begin, full_end};
  JAX_FLASH_ASSERT(range.canonical(ceil_div(at_least(0, length), tile)), "a range of tiles that is not canonical");
  return range;
}

// For rows [row, row + rows).
template <int tile>
JAX_FLASH_DEVICE TileRange key_tiles_of(const Band& band, const Extent& extent, int row, int rows) {
  const int last_row = at_most(row + rows, extent.q.length) - 1;
  if (last_row < row) return {0, 0, 0, 0};
  const int length = extent.kv.length;
  return tile_range<tile, !bounded_left>(
      bounded_left ? row + band.low : 0, bounded_right ? last_row + band.high : length - 1,
      bounded_left ? last_row + band.low : 0, bounded_right ? row + band.high : length - 1, length);
}

// For keys [column, column + columns). Keys beyond the end are masked against every row.
template <int tile>
JAX_FLASH_DEVICE TileRange row_tiles_of(const Band& band, const Extent& extent, int column, int columns) {
  const int length = extent.q.length;
  const int last_column = at_most(column + columns, extent.kv.length) - 1;
  if (last_column < column) return {0, 0, 0, 0};
  const int end = column + columns - 1;
  TileRange range = tile_range<tile, !bounded_right>(
      bounded_right ? column - band.high : 0, bounded_left ? last_column - band.low : length - 1,
      bounded_right ? end - band.high : 0, bounded_left ? column - band.low : length - 1, length);
  // Rows beyond the end add nothing to any sum, unless a function makes NaN of their scores.
  if (!bounded_left && !has_functions) range.full_end = range.end;
  if (end >= extent.kv.length) range.full_begin = range.full_end = range.end;
  JAX_FLASH_ASSERT(range.canonical(ceil_div(length, tile)), "a range of tiles that is not canonical");
  return range;
}

// Smallest and largest segment of some rows or keys.
struct SegmentRange {
  int first;
  int last;

  __device__ __forceinline__ bool meets(const SegmentRange& other) const {
    return first <= other.last && other.first <= last;
  }
};

// Of the blocks of kSegmentBlock that hold the rows [first, first + rows), `first` being a multiple of `rows`.
template <int rows>
JAX_FLASH_DEVICE SegmentRange segment_range(const int* ranges, int batch, int length, int first) {
  const int blocks = ceil_div(length, kSegmentBlock);
  const int2* from = reinterpret_cast<const int2*>(ranges) + static_cast<i64>(batch) * blocks;
  constexpr bool aligned = rows % kSegmentBlock == 0 || kSegmentBlock % rows == 0;
  SegmentRange range{0x7fffffff, -0x7fffffff - 1};
#pragma unroll
  for (int i = 0; i < ceil_div(rows, kSegmentBlock) + (aligned ? 0 : 1); ++i) {
    const int block = first / kSegmentBlock + i;
    if (block < blocks && (aligned || block * kSegmentBlock < first + rows)) {
      const int2 next = from[block];
      range = {at_most(range.first, next.x), at_least(range.last, next.y)};
    }
  }
  return range;
}

// The tiles of `range` that a block whose segments are `own` has to visit, given the ranges of the other side.
template <int tile>
struct SegmentTiles {
  const int* ranges;
  int batch;
  int length;
  SegmentRange own;

  __device__ __forceinline__ SegmentRange of(int i) const {
    return segment_range<tile>(ranges, batch, length, i * tile);
  }
  __device__ __forceinline__ bool visits(int i) const { return !in_segments || own.meets(of(i)); }
  // Whether all pairs of the tile are in one segment.
  __device__ __forceinline__ bool uniform(int i) const {
    if (!in_segments) return true;
    const SegmentRange other = of(i);
    return own.first == own.last && other.first == other.last && own.first == other.first;
  }
};

// The test of single pairs but for `mask`; row and column count within the extent.
struct Keep : IntervalPlanes<in_intervals>, PairFunctions<has_functions> {
  const Problem& problem;
  const Extent& extent;
  Band band;

  // What depends on the head.
  __device__ __forceinline__ void enter(int head) {
    static_cast<IntervalPlanes<in_intervals>&>(*this) = {problem, extent, head};
    functions().enter(problem, head);
  }

  __device__ __forceinline__ PairFunctions<has_functions>& functions() { return *this; }
  __device__ __forceinline__ const PairFunctions<has_functions>& functions() const { return *this; }

  // The interval of the row is `keys`; with `knows_kind`, `kind` that of the pair's block of the block mask. Unless
  // `asks_keys`, the key's interval is known to hold the row.
  template <bool knows_kind = false, bool asks_keys = true>
  __device__ __forceinline__ bool operator()(const Pair& pair, const int2& keys, int kind = full_block) const {
    bool kept = pair.column < extent.kv.length;
    if constexpr (has_functions) kept &= pair.row < row_end<knows_kind>(kind);
    return kept & within<knows_kind, asks_keys>(pair, keys, kind);
  }
  // The same where it is known that the key is there, and the row before row_end.
  template <bool knows_kind, bool asks_keys>
  __device__ __forceinline__ bool within(const Pair& pair, const int2& keys, int kind) const {
    bool kept = in_band(band, pair.row, pair.column);
    if constexpr (has_kv_intervals) kept &= holds(keys, pair.column);
    // Read always: a branch costs registers.
    if constexpr (tests_keys) kept &= keeps_of_key<asks_keys>(pair.row, pair.column);
    if constexpr (has_functions) kept &= by_functions<knows_kind>(pair, kind);
    return kept;
  }
  // Rows from there on keep nothing of a block of this kind. Where a row is beyond the end a score function may give
  // anything.
  template <bool knows_kind>
  __device__ __forceinline__ int row_end(int kind) const {
    return knows_kind && kind == empty_block ? 0 : extent.q.length;
  }
  __device__ __forceinline__ bool operator()(int row, int column) const { return (*this)({row, column}, keys_of(row)); }
  // What mask functions and the block mask say of a row before row_end.
  template <bool knows_kind>
  __device__ __forceinline__ bool by_functions(const Pair& pair, int kind) const {
    return functions().keeps<knows_kind>(problem, extent, pair, kind);
  }
  // The keys that a row keeps as far as keeps_of_key and functions let it are one range, from `first` to `last`.
  __device__ __forceinline__ int first(int row) const {
    const int low = bounded_left ? row + band.low : 0;
    return has_kv_intervals ? at_least(low, keys_of(row).x) : low;
  }
  __device__ __forceinline__ int last(int row) const {
    const int high = bounded_right ? at_most(row + band.high, extent.kv.length - 1) : extent.kv.length - 1;
    return has_kv_intervals ? at_most(high, keys_of(row).y - 1) : high;
  }
  template <bool asks_keys = true>
  __device__ __forceinline__ bool keeps_of_key(int row, int column) const {
    if constexpr (!has_q_intervals || !asks_keys) return in_segment(row, column);
    return in_segment(row, column) & holds(rows_of(column), row);
  }
  __device__ __forceinline__ bool in_segment(int row, int column) const {
    if constexpr (!in_segments) return true;
    const int q_rows = at_most(row, problem.q_length - 1), keys = at_most(column, problem.kv_length - 1);
    return problem.q_segment_ids[static_cast<i64>(extent.batch) * problem.q_length + q_rows] ==
           problem.kv_segment_ids[static_cast<i64>(extent.batch) * problem.kv_length + keys];
  }
};

// Whether KeysOfRows pays: not beside other options that are read for every pair, where two loops over the pairs spill
// (with bias and segments 1.8 KB on sm_80, 2.9 on sm_90).
constexpr bool decides_keys = has_q_intervals && !(has_bias || has_mask || in_segments || has_functions);

// What some rows keep of 32 keys by the keys' intervals, a bit each: by a warp, whose lanes read the intervals side by
// side, where each lane would read those of all of its columns.
struct KeyBits {
  u32 kept;     // some of the rows
  u32 between;  // some, but not all

  // The key, of the 32, whose bit a ballot has at a lane.
  static __device__ __forceinline__ int key_of(int lane) { return Lanes::thread_of(lane); }
  // For `rows` rows from `first` on; `held` is the interval of the lane's key, number `key` of a tile of so many.
  template <int tile>
  static __device__ __forceinline__ KeyBits of(const Extent& extent, const int2& held, int first_key, int key,
                                               int first, int rows) {
    const int end = at_most(first + rows, extent.q.length);
    const bool there = (key < tile) & (first_key + key < extent.kv.length);
    const bool some = there & (at_least(held.x, first) < at_most(held.y, end));
    const bool all = there & (held.x <= first) & (end <= held.y);
    return {__ballot_sync(0xffffffffu, some), __ballot_sync(0xffffffffu, some != all)};
  }
};

// Which of the keys of a tile of 8 * `tiles` keys `rows` rows keep by the keys' intervals, for one lane.
template <int tiles, int rows, bool present>
struct KeysOfRows {
  static constexpr int words = ceil_div(tiles, 4);

  u32 kept[words];  // a bit each, from the first column of the lane on
  int count;        // of the keys that keep some of the rows
  bool decides;     // whether every key keeps all of the rows or none

  // From the first row of the warp on; `row` is the lane's first.
  __device__ __forceinline__ KeysOfRows(const Keep& keep, int row, int first_key, int lane) {
    const int first = row - lane / 4;
    KeyBits bits[words];
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const int key = 32 * i + KeyBits::key_of(lane);
      bits[i] = KeyBits::of<8 * tiles>(keep.extent, keep.rows_of(first_key + key), first_key, key, first, rows);
    }
    take(bits, lane);
  }
  // Of what warps have found of 32 keys each.
  __device__ __forceinline__ KeysOfRows(const KeyBits* found, int lane) { take(found, lane); }
  // Whether the key is kept that is 8 * n + odd beyond the first column of the lane.
  __device__ __forceinline__ bool holds(int n, int odd) const { return kept[n / 4] >> (n % 4 * 8 + odd) & 1; }
  // Hides the keys that are not kept from one half of a fragment's rows.
  __device__ __forceinline__ void hide(FragmentC (&scores)[tiles], int half) const {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        scores[n].x[e] = holds(n, e % 2) ? scores[n].x[e] : -JAX_FLASH_INFINITY;
      }
    }
  }

 private:
  __device__ __forceinline__ void take(const KeyBits* bits, int lane) {
    u32 between = 0;
    count = 0;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      kept[i] = bits[i].kept >> lane % 4 * 2;
      between |= bits[i].between;
      count += __popc(bits[i].kept);
    }
    decides = between == 0;
  }
};
template <int tiles, int rows>
struct KeysOfRows<tiles, rows, false> {
  static constexpr int count = 0;
  static constexpr bool decides = false;

  __device__ __forceinline__ KeysOfRows(const Keep&, int, int, int) {}
  __device__ __forceinline__ explicit KeysOfRows(const KeyBits*, int) {}
  __device__ __forceinline__ void hide(FragmentC (&)[tiles], int) const {}
};

}  // namespace jax_flash
