// FlashAttention-2 forward (Dao 2023, algorithm 1) by mma.sync, for every family that says before which `Steps` it takes.
#pragma once

#include "cuda/shared/forward_steps.cuh"

namespace jax_flash {

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_forward(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);

  Place place = place_of(problem, blockIdx.x);
  if (packed && place.first_row >= place.part.q.stored) return;
  const Part& part = place.part;
  const int head = place.head, batch = place.batch, kv_head = place.kv_head, first_row = place.first_row;
  const int warp = threadIdx.x / 32, lane = Lanes::of(threadIdx.x);
  const Unscales unscales = unscales_of(problem, batch, kv_head);
  const float scale = static_cast<float>(problem.options.scale) * unscales.query * unscales.key;

  Steps forward{
      problem,
      shared,
      part,
      TileLoad<KTile, head_dim, threads>::base(head_of(problem.k, batch, kv_head, part.kv.first), problem.k.row_stride,
                                               threadIdx.x),
      TileLoad<VTile, value_head_dim, threads>::base(head_of(problem.v, batch, kv_head, part.kv.first),
                                                     problem.v.row_stride, threadIdx.x),
      {problem, part, batch, head, scale},
      first_row,
      warp,
      lane,
      modifies_scores ? 1.f : scale * kLog2e,
      Mma::reader_a<QTile>(shared_address(shared.q), warp * row_tiles * 16, lane),
      Mma::reader_b<KTile>(shared_address(shared.k), 0, lane),
  };
  forward.begin_rows();
  if constexpr (has_sinks) {
    const float sink = place.sink(problem);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      forward.statistics[m][0].begin_with(sink * kLog2e, forward.scale_log2, lane % 4 == 0);
      forward.statistics[m][1].begin_with(sink * kLog2e, forward.scale_log2, lane % 4 == 0);
    }
  }

  TileRange tiles = key_tiles_of<block_kv>(forward.rows.keep.band, part, first_row, block_q);
  if (tiles.begin < tiles.end) {
    load_tile<QTile, head_dim, threads>(shared_address(shared.q), head_of(problem.q, batch, head, part.q.first),
                                        problem.q.row_stride, first_row, part.q.length, threadIdx.x);
  }
  const SegmentTiles<block_kv> segments{
      problem.kv_segment_ranges, batch, problem.kv_length,
      in_segments ? segment_range<block_q>(problem.q_segment_ranges, batch, problem.q_length, first_row)
                  : SegmentRange{0, 0}};
  segments.trim(tiles, threadIdx.x % 32);
  int tile = tiles.end - 1;
  if (tile >= tiles.begin) forward.start_k(tile);
  copies_commit();
  if (in_segments && tile < tiles.begin) {
    copies_wait<0>();
    __syncthreads();  // Q has landed before out takes its place
  }
  if (tile >= tiles.begin) forward.begin_tiles();
  if constexpr (irregular) {
    while (tile >= tiles.begin) {
      int next = tile - 1;
      while (next >= tiles.begin && !segments.visits(next)) --next;
      const bool bare = tiles.bare(tile) && segments.uniform(tile);
      const int wanted = next >= tiles.begin ? next : -1;
      if (bare) {
        forward.step<false>(tile, wanted);
      } else {
        forward.step<true>(tile, wanted);
      }
      tile = next;
    }
  } else {
    for (; tile >= tiles.bare_end; --tile) forward.step<true>(tile, tile - 1);
    for (; tile >= 0; --tile) forward.step<false>(tile, tile - 1);
  }

  // Where the loop takes all registers there are, nothing else is kept in them.
  if constexpr (loads_take_registers) {
    place = place_of(problem, block_again());
    forward.first_row = place.first_row;
    forward.warp = thread_again() / 32;
    forward.lane = Lanes::of(thread_again());
  }
  forward.finish(place);
}

}  // namespace jax_flash
