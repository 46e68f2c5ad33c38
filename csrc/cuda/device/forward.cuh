// FlashAttention-2 forward (Dao 2023, algorithm 1) by mma.sync, for every family that says before which `Steps` it
// takes.
#pragma once

#include "cuda/device/forward_steps.cuh"

namespace jax_flash {

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_forward(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);

  Place place = place_of(problem, blockIdx.x);
  if (packed && place.first_row >= place.extent.q.stored) return;
  if (computed_in_float32(problem, place.batch, place.kv_head)) return;
  const Extent& extent = place.extent;
  const int head = place.head, batch = place.batch, kv_head = place.kv_head, first_row = place.first_row;
  const int warp = threadIdx.x / 32, lane = Lanes::of(threadIdx.x);
  const Descale descale = descale_of(problem, batch, kv_head);
  const float scale = scale_of(problem, batch) * descale.query * descale.key;

  Steps forward{
      problem,
      shared,
      extent,
      keys_of(problem, extent, batch, kv_head),
      values_of(problem, extent, batch, kv_head),
      {problem, extent, head, scale},
      first_row,
      warp,
      lane,
      {},
      {},
      {},
      Mma::reader_a<QTile>(shared_address(shared.q), warp * row_tiles * 16, lane),
      Mma::reader_b<KTile>(shared_address(shared.k), 0, lane),
  };
  forward.begin_rows();
  if constexpr (has_sinks) {
    const float sink = place.sink(problem);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      forward.statistics[m][0].begin_with(sink * kLog2e, forward.rows.scale_log2, lane % 4 == 0);
      forward.statistics[m][1].begin_with(sink * kLog2e, forward.rows.scale_log2, lane % 4 == 0);
    }
  }

  const Heads own_head{head, 1};
  TileWalk<block_kv> tiles =
      walk_of_keys<block_kv, block_q>(problem, extent, forward.rows.keep.band, own_head, first_row);
  if (!tiles.empty()) {
    load_tile<QTile, head_dim, threads>(shared_address(shared.q), head_of(problem.q, batch, head, extent.q.first),
                                        problem.q.row_stride, first_row, extent.q.length, threadIdx.x);
  }
  tiles.trim(threadIdx.x % 32);
  if (!tiles.empty()) {
    forward.read_first(tiles.last());
    forward.start_k(tiles.last());
  }
  copies_commit();
  if (skips_tiles && tiles.empty()) {
    copies_wait<0>();
    __syncthreads();  // Q has landed before out takes its place
  }
  if (!tiles.empty()) forward.begin_tiles();
  take_steps(forward, tiles);

  // Where the loop takes all registers, the place and lane are re-read here rather than kept across it.
  if constexpr (loads_take_registers) {
    place = place_of(problem, reread_block_index());
    forward.first_row = place.first_row;
    forward.warp = reread_thread_index() / 32;
    forward.lane = Lanes::of(reread_thread_index());
  }
  forward.finish(place);
}

}  // namespace jax_flash
