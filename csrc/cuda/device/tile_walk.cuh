// Which tiles a block visits, and which of them need no test of single pairs: the same for all kernels.
#pragma once

#include "cuda/device/mask.cuh"

namespace jax_flash {

// Whether tiles in the middle of a range may be left out, and trim() may leave none.
constexpr bool skips_tiles = in_segments || in_intervals || has_mask_blocks;
// Whether 32 tiles are looked at at once. Where all warps walk this takes registers of theirs, and only a block mask,
// whose kinds are read for every tile, repays them.
constexpr bool looks_ahead = has_mask_blocks || (skips_tiles && one_warp_loads);

// What is known of 32 tiles, a bit each, the first one's number being a multiple of 32. A base rather than a member:
// absent it takes no place.
template <bool present>
struct KnownTiles {
  mutable int group = -1;
  mutable u32 with_pairs, uniform;
};
template <>
struct KnownTiles<false> {};

// Tiles of `size` keys or rows: a range, less those whose segments the block's do not meet, and those whose intervals
// hold none of the block's positions, and those in empty blocks. What the block's own intervals leave out is not in the
// range.
template <int size>
struct TileWalk : IntervalTiles<size, in_intervals>, BlockTiles<size, has_mask_blocks>, KnownTiles<looks_ahead> {
  TileRange range;
  SegmentTiles<size> segments;

  // Leaves off what need not be visited at both ends. By a whole warp, every lane of which looks at its own share of
  // the tiles, so that their loads fly together.
  __device__ __forceinline__ void trim(int lane) {
    if constexpr (!skips_tiles) return;
    if (!in_segments && !has_mask_blocks && !this->filters()) return;
    const TileRange all = range;
    int begin = range.end, end = range.begin;
#pragma unroll 4
    for (int i = range.begin + lane; i < range.end; i += 32) {
      if (!has_pairs(i)) continue;
      begin = at_most(begin, i);
      end = at_least(end, i + 1);
    }
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
      begin = at_most(begin, __shfl_xor_sync(0xffffffffu, begin, other));
      end = at_least(end, __shfl_xor_sync(0xffffffffu, end, other));
    }
    range.begin = begin;
    range.end = at_least(begin, end);
    JAX_FLASH_ASSERT(all.begin <= range.begin && range.begin <= range.end && range.end <= all.end,
                     "a range of tiles that grows where it is trimmed");
  }

  // The same where a walk upwards or downwards begins, for a warp that only loads: where it ends is found when it comes
  // there, while other warps compute what it has loaded.
  __device__ __forceinline__ void trim_begin() {
    if constexpr (skips_tiles) range.begin = at_most(after<true>(range.begin - 1), range.end);
  }
  __device__ __forceinline__ void trim_end() {
    if constexpr (skips_tiles) range.end = at_least(before<true>(range.end) + 1, range.begin);
  }

  __device__ __forceinline__ bool empty() const { return range.begin >= range.end; }
  __device__ __forceinline__ bool visits(int tile) const {
    return tile >= range.begin && tile < range.end && has_pairs(tile);
  }
  // Whether every pair of the tile is kept, as far as `mask` lets it; and as far as the range lets it too.
  __device__ __forceinline__ bool is_full(int tile) const { return range.is_full(tile) && is_uniform(tile); }
  __device__ __forceinline__ bool is_uniform(int tile) const {
    if constexpr (looks_ahead) {
      look_at(tile);
      return this->uniform >> tile % 32 & 1;
    } else {
      return may_have_all_pairs(tile);
    }
  }

  // Upwards from range.begin: the next tile, `end` or beyond it where there is none before it. It may be `far` away
  // where the range has not been trimmed at both ends.
  template <bool far = false>
  __device__ __forceinline__ int after(int tile, int end) const {
    ++tile;
    if constexpr (looks_ahead) {
      while (tile < end) {
        look_at(tile);
        const u32 left = this->with_pairs >> tile % 32;
        if (left != 0) return at_most(tile + __ffs(left) - 1, end);
        tile = (tile | 31) + 1;
        while (far && tile < end && !any_pairs(tile, 1)) tile += 32 * groups_at_once;
      }
    } else {
      while (skips_tiles && tile < end && !has_pairs(tile)) ++tile;
    }
    return tile;
  }
  template <bool far = false>
  __device__ __forceinline__ int after(int tile) const {
    return after<far>(tile, range.end);
  }

  // Downwards from the last tile: the next one, below range.begin where there is none.
  __device__ __forceinline__ int last() const { return range.end - 1; }
  template <bool far = false>
  __device__ __forceinline__ int before(int tile) const {
    --tile;
    if constexpr (looks_ahead) {
      while (tile >= range.begin) {
        look_at(tile);
        const u32 left = this->with_pairs << (31 - tile % 32);
        if (left != 0) return tile - __clz(left);
        tile = (tile & ~31) - 1;
        while (far && tile >= range.begin && !any_pairs(tile, -1)) tile -= 32 * groups_at_once;
      }
    } else {
      while (skips_tiles && tile >= range.begin && !has_pairs(tile)) --tile;
    }
    return tile;
  }

 private:
  // Of a tile in the range.
  __device__ __forceinline__ bool has_pairs(int tile) const {
    return may_have_pairs(tile) && this->kinds(tile).any_pairs;
  }
  // But for the block mask.
  __device__ __forceinline__ bool may_have_pairs(int tile) const { return segments.visits(tile) && this->meets(tile); }
  __device__ __forceinline__ bool may_have_all_pairs(int tile) const {
    return segments.uniform(tile) && this->covers(tile);
  }
  // Whether a tile has pairs in the group of 32 of `tile`, or in the groups behind it that are looked at at once,
  // upwards (1) or downwards (-1). A warp that loads has registers for what is read of the intervals of one group.
  static constexpr int groups_at_once = in_intervals ? 1 : 4;
  __device__ __forceinline__ bool any_pairs(int tile, int direction) const {
    const int own = (tile & ~31) + static_cast<int>(threadIdx.x) % 32;
    bool any = false;
#pragma unroll
    for (int i = 0; i < groups_at_once; ++i) {
      // Without a branch: the loads would wait for each other.
      any |= has_pairs(at_most(at_least(own + 32 * i * direction, range.begin), range.end - 1));
    }
    return __any_sync(0xffffffffu, any);
  }
  // Makes a tile one of the 32 that are known. By a whole warp, every lane of which asks of one of them, so that their
  // loads fly together: each waits as long as a good part of a tile's products takes.
  __device__ __forceinline__ void look_at(int tile) const {
    if (tile / 32 == this->group) return;
    this->group = tile / 32;
    const int own = this->group * 32 + static_cast<int>(threadIdx.x) % 32;
    const bool in_range = own >= range.begin && own < range.end;
    BlockKinds kinds{false, false};
    if (in_range && may_have_pairs(own)) kinds = this->kinds(own);
    this->with_pairs = __ballot_sync(0xffffffffu, kinds.any_pairs);
    this->uniform = __ballot_sync(0xffffffffu, kinds.all_pairs && may_have_all_pairs(own));
  }
};

// With these the tiles to visit, or the full tiles among them, are not one range up to the last.
constexpr bool irregular = bounded_left || skips_tiles;
// Whether one loop takes the steps of all tiles, rather than a loop over the partial ones and then one over the full.
constexpr bool one_loop = irregular || all_partial;

// The tiles of `range` in which the block's intervals hold something; the full ones are those that all of them hold.
template <int size>
JAX_FLASH_DEVICE TileRange within(const TileRange& range, const IntervalRange& own, int length) {
  const int begin = at_least(range.begin, own.first / size), end = at_most(range.end, ceil_div(own.end, size));
  TileRange found{at_most(begin, range.end), at_least(end, range.begin), range.full_begin, range.full_end};
  found.end = at_least(found.begin, found.end);
  if (begin >= end) found.end = found.begin;
  found.full_begin = at_least(range.full_begin, ceil_div(at_most(own.full_first, length), size));
  if (own.full_end < length) found.full_end = at_most(range.full_end, own.full_end / size);
  JAX_FLASH_ASSERT(found.canonical(ceil_div(length, size)), "a range of tiles that is not canonical");
  return found;
}

// The range of tiles of keys that rows [row, row + rows) keep, at most `most` of them, 0 for any number.
template <int size, int most>
JAX_FLASH_DEVICE TileRange kept_key_tiles(const Problem& problem, const Extent& extent, const Band& band,
                                          const Heads& heads, int row, int rows) {
  const TileRange range = key_tiles_of<size>(band, extent, row, rows);
  if constexpr (!has_kv_intervals) return range;
  const int end = at_most(row + rows, extent.q.length);
  return within<size>(range, row_intervals(problem, extent, heads).of<most>(row, end), extent.kv.length);
}

// The tiles of keys that rows [row, end) of the segments `own` attend to, which lie in `range`.
template <int size>
JAX_FLASH_DEVICE TileWalk<size> walk_of_keys(const Problem& problem, const Extent& extent, const TileRange& range,
                                             const SegmentRange& own, const Heads& heads, int row, int end) {
  return {{key_intervals(problem, extent, heads), row, at_most(end, extent.q.length)},
          {problem, extent, heads, true, row, end},
          {},
          range,
          {problem.kv_segment_ranges, extent.batch, problem.kv_length, own}};
}
// Those of the rows [row, row + rows).
template <int size, int rows>
JAX_FLASH_DEVICE TileWalk<size> walk_of_keys(const Problem& problem, const Extent& extent, const Band& band,
                                             const Heads& heads, int row) {
  return walk_of_keys<size>(problem, extent, kept_key_tiles<size, rows>(problem, extent, band, heads, row, rows),
                            in_segments
                                ? segment_range<rows>(problem.q_segment_ranges, extent.batch, problem.q_length, row)
                                : SegmentRange{0, 0},
                            heads, row, row + rows);
}

// The tiles of rows that attend to the keys [key, key + keys).
template <int size, int keys>
JAX_FLASH_DEVICE TileWalk<size> walk_of_rows(const Problem& problem, const Extent& extent, const Band& band,
                                             const Heads& heads, int key) {
  TileRange range = row_tiles_of<size>(band, extent, key, keys);
  const int end = at_most(key + keys, extent.kv.length);
  if constexpr (has_q_intervals) {
    range = within<size>(range, key_intervals(problem, extent, heads).of<keys>(key, end), extent.q.length);
  }
  return {{row_intervals(problem, extent, heads), key, end},
          {problem, extent, heads, false, key, end},
          {},
          range,
          {problem.q_segment_ranges, extent.batch, problem.q_length,
           in_segments ? segment_range<keys>(problem.kv_segment_ranges, extent.batch, problem.kv_length, key)
                       : SegmentRange{0, 0}}};
}

}  // namespace jax_flash
