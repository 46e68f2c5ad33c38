// Which tiles a block visits, and which of them need no test of single pairs: the same for all kernels.
#pragma once

#include "cuda/device/mask.cuh"

namespace jax_flash {

// The blocks of a block mask that tiles of `size` rows or keys meet, of the other side's rows [first, last] and of
// `heads` query heads.
template <int size, bool of_keys>
struct BlockTiles {
  const Problem& problem;
  const Extent& extent;
  int first_head, heads;
  int first, last;  // blocks

  // Own rows, or keys, [first, first + count) of the extent.
  __device__ __forceinline__ BlockTiles(const Problem& problem, const Extent& extent, int first_head, int heads,
                                        int first, int count)
      : problem(problem), extent(extent), first_head(first_head), heads(heads) {
    if constexpr (has_mask_blocks) {
      constexpr int own = of_keys ? mask_block_rows : mask_block_keys;
      const int length = of_keys ? extent.q.length : extent.kv.length;
      this->first = first / own;
      last = at_least(at_most(first + count, length) - 1, 0) / own;
    }
  }

  // Whether `matches` holds for the kind of any block.
  template <typename Matches>
  __device__ __forceinline__ bool any(int tile, const Matches& matches) const {
    constexpr int other = of_keys ? mask_block_keys : mask_block_rows;
    const int length = of_keys ? extent.kv.length : extent.q.length;
    const int begin = tile * size / other, end = at_least(at_most((tile + 1) * size, length) - 1, 0) / other;
    const int planes = problem.mask_blocks_strides.head ? heads : 1;
    for (int head = first_head; head < first_head + planes; ++head) {
      const BlockKinds blocks(problem, extent, head);
      for (int i = first; i <= last; ++i) {
        for (int j = begin; j <= end; ++j) {
          if (matches(of_keys ? blocks.of_block(i, j) : blocks.of_block(j, i))) return true;
        }
      }
    }
    return false;
  }
  __device__ __forceinline__ bool visits(int tile) const {
    return !has_mask_blocks || any(tile, [](int kind) { return kind != empty_block; });
  }
  __device__ __forceinline__ bool full(int tile) const {
    return !has_mask_blocks || !any(tile, [](int kind) { return kind != full_block; });
  }
};

// Tiles of `size` rows or keys: a range, less those whose segments the block's do not meet, and those of empty blocks.
template <int size, bool of_keys>
struct TileWalk {
  TileRange range;
  SegmentTiles<size> segments;
  BlockTiles<size, of_keys> blocks;

  // Whether a tile of the range is visited.
  __device__ __forceinline__ bool meets(int tile) const { return segments.visits(tile) && blocks.visits(tile); }
  // Whether segments and the block mask keep every pair of a tile.
  __device__ __forceinline__ bool uniform(int tile) const { return segments.uniform(tile) && blocks.full(tile); }

  // Leaves off what need not be visited at both ends. By a whole warp: every lane looks at its own share of the tiles,
  // so that their loads fly together.
  __device__ __forceinline__ void trim(int lane) {
    if constexpr (!skips_tiles) return;
    const TileRange all = range;
    int begin = range.end, end = range.begin;
#pragma unroll 4
    for (int i = range.begin + lane; i < range.end; i += 32) {
      if (!meets(i)) continue;
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

  __device__ __forceinline__ bool empty() const { return range.begin >= range.end; }
  __device__ __forceinline__ bool visits(int tile) const {
    return tile >= range.begin && tile < range.end && meets(tile);
  }
  // Whether every pair of the tile is kept, as far as `mask` lets it.
  __device__ __forceinline__ bool is_full(int tile) const { return range.is_full(tile) && uniform(tile); }

  // Upwards from range.begin: the next tile, or `end` where there is none before it.
  __device__ __forceinline__ int after(int tile, int end) const {
    ++tile;
    while (skips_tiles && tile < end && !meets(tile)) ++tile;
    return tile;
  }
  __device__ __forceinline__ int after(int tile) const { return after(tile, range.end); }

  // Downwards from the last tile: the next one, below range.begin where there is none.
  __device__ __forceinline__ int last() const { return range.end - 1; }
  __device__ __forceinline__ int before(int tile) const {
    --tile;
    while (skips_tiles && tile >= range.begin && !meets(tile)) --tile;
    return tile;
  }
};

template <int size>
using KeyTiles = TileWalk<size, true>;
template <int size>
using RowTiles = TileWalk<size, false>;

// With these the tiles to visit, or the full tiles among them, are not one range up to the last.
constexpr bool irregular = bounded_left || skips_tiles;

// The tiles of keys that the rows [first_row, first_row + rows) of query heads attend to, whose segments are `own`, and
// which lie in `range`.
template <int size>
JAX_FLASH_DEVICE KeyTiles<size> walk_of_keys(const Problem& problem, const Extent& extent, const TileRange& range,
                                             const SegmentRange& own, int first_head, int heads, int first_row,
                                             int rows) {
  return {range,
          {problem.kv_segment_ranges, extent.batch, problem.kv_length, own},
          {problem, extent, first_head, heads, first_row, rows}};
}
template <int size, int rows>
JAX_FLASH_DEVICE KeyTiles<size> walk_of_keys(const Problem& problem, const Extent& extent, const Band& band,
                                             int first_head, int heads, int first_row) {
  return walk_of_keys<size>(
      problem, extent, key_tiles_of<size>(band, extent, first_row, rows),
      in_segments ? segment_range<rows>(problem.q_segment_ranges, extent.batch, problem.q_length, first_row)
                  : SegmentRange{0, 0},
      first_head, heads, first_row, rows);
}

// The tiles of rows of query heads that attend to the keys [first_key, first_key + keys).
template <int size, int keys>
JAX_FLASH_DEVICE RowTiles<size> walk_of_rows(const Problem& problem, const Extent& extent, const Band& band,
                                             int first_head, int heads, int first_key) {
  return {row_tiles_of<size>(band, extent, first_key, keys),
          {problem.q_segment_ranges, extent.batch, problem.q_length,
           in_segments ? segment_range<keys>(problem.kv_segment_ranges, extent.batch, problem.kv_length, first_key)
                       : SegmentRange{0, 0}},
          {problem, extent, first_head, heads, first_key, keys}};
}

}  // namespace jax_flash
