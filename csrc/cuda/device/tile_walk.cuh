// Which tiles a block visits, and which of them need no test of single pairs: the same for all kernels.
#pragma once

#include "cuda/device/mask.cuh"

namespace jax_flash {

// Tiles of `size` rows or keys: a range, less those whose segments the block's do not meet.
template <int size>
struct TileWalk {
  TileRange range;
  SegmentTiles<size> segments;

  // Leaves off what need not be visited at both ends. By a whole warp.
  __device__ __forceinline__ void trim(int lane) { segments.trim(range, lane); }

  __device__ __forceinline__ bool empty() const { return range.begin >= range.end; }
  __device__ __forceinline__ bool visits(int tile) const {
    return tile >= range.begin && tile < range.end && segments.visits(tile);
  }
  // Whether every pair of the tile is kept, as far as `mask` lets it.
  __device__ __forceinline__ bool is_full(int tile) const { return range.is_full(tile) && segments.uniform(tile); }

  // Upwards from range.begin: the next tile, or `end` where there is none before it.
  __device__ __forceinline__ int after(int tile, int end) const {
    ++tile;
    while (in_segments && tile < end && !segments.visits(tile)) ++tile;
    return tile;
  }
  __device__ __forceinline__ int after(int tile) const { return after(tile, range.end); }

  // Downwards from the last tile: the next one, below range.begin where there is none.
  __device__ __forceinline__ int last() const { return range.end - 1; }
  __device__ __forceinline__ int before(int tile) const {
    --tile;
    while (in_segments && tile >= range.begin && !segments.visits(tile)) --tile;
    return tile;
  }
};

// With these the tiles to visit, or the full tiles among them, are not one range up to the last.
constexpr bool irregular = bounded_left || in_segments;

// The tiles of keys that rows of the segments `own` attend to, which lie in `range`.
template <int size>
JAX_FLASH_DEVICE TileWalk<size> walk_of_keys(const Problem& problem, int batch, const TileRange& range,
                                             const SegmentRange& own) {
  return {range, {problem.kv_segment_ranges, batch, problem.kv_length, own}};
}
// Those of the rows [first_row, first_row + rows).
template <int size, int rows>
JAX_FLASH_DEVICE TileWalk<size> walk_of_keys(const Problem& problem, const Extent& extent, const Band& band,
                                             int first_row) {
  return walk_of_keys<size>(
      problem, extent.batch, key_tiles_of<size>(band, extent, first_row, rows),
      in_segments ? segment_range<rows>(problem.q_segment_ranges, extent.batch, problem.q_length, first_row)
                  : SegmentRange{0, 0});
}

// The tiles of rows that attend to the keys [first_key, first_key + keys).
template <int size, int keys>
JAX_FLASH_DEVICE TileWalk<size> walk_of_rows(const Problem& problem, const Extent& extent, const Band& band,
                                             int first_key) {
  return {row_tiles_of<size>(band, extent, first_key, keys),
          {problem.q_segment_ranges, extent.batch, problem.q_length,
           in_segments ? segment_range<keys>(problem.kv_segment_ranges, extent.batch, problem.kv_length, first_key)
                       : SegmentRange{0, 0}}};
}

}  // namespace jax_flash
