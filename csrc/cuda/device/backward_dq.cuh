// dQ alone, for a backward pass without atomic additions, for every family that says before which `Steps` it takes.
#pragma once

#include "cuda/device/backward_dq_steps.cuh"

namespace jax_flash {

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_backward_dq(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);

  Place place = place_of(problem, blockIdx.x);
  if (packed && place.first_row >= place.extent.q.stored) return;
  if (computed_in_float32(problem, place.batch, place.kv_head)) return;
  const Extent& extent = place.extent;
  const int head = place.head, batch = place.batch, kv_head = place.kv_head, first_row = place.first_row;
  const int warp = threadIdx.x / 32, lane = Lanes::of(threadIdx.x);
  const Descale descale = descale_of(problem, batch, kv_head);
  const float scale = scale_of(problem, batch);
  const float score_scale = scale * descale.query * descale.key;
  const float ds_factor = descale.ds * probability_unit;

  Steps backward{
      problem,
      shared,
      extent,
      keys_of(problem, extent, batch, kv_head),
      values_of(problem, extent, batch, kv_head),
      {problem, extent, head, score_scale},
      first_row,
      warp,
      lane,
      {},
      {},
      {},
      descale.dout * descale.value * ds_factor,
      ds_factor,
  };

  const Heads own_head{head, 1};
  TileWalk<block_kv> tiles =
      walk_of_keys<block_kv, block_q>(problem, extent, backward.rows.keep.band, own_head, first_row);
  if (!tiles.empty()) {
    load_tile<QTile, head_dim, threads>(shared_address(shared.q), head_of(problem.q, batch, head, extent.q.first),
                                        problem.q.row_stride, first_row, extent.q.length, threadIdx.x);
    load_tile<OutTile, value_head_dim, threads>(shared_address(shared.dout),
                                                head_of(problem.dout, batch, head, extent.q.first),
                                                problem.dout.row_stride, first_row, extent.q.length, threadIdx.x);
    const i64 first_statistic = (static_cast<i64>(batch) * problem.q_heads + head) * problem.q_length + extent.q.first;
    backward.load_statistics(static_cast<const float*>(problem.lse) + first_statistic,
                             static_cast<const float*>(problem.delta) + first_statistic);
  }
  tiles.trim(threadIdx.x % 32);
  if (!tiles.empty()) {
    backward.read_first(tiles.last());
    backward.begin(tiles.last());
  }
  copies_commit();
  if (skips_tiles && tiles.empty()) {
    copies_wait<0>();
    __syncthreads();  // Q has landed before dQ takes its place
  }
  take_steps(backward, tiles);
  // Where the loop takes all registers, the place is re-read here rather than kept across it. With two limbs re-reading
  // spills more (head_dim 256: 432 bytes in place of 184).
  if constexpr (loads_take_registers || limbs == 1) {
    place = place_of(problem, reread_block_index());
    backward.first_row = place.first_row;
    backward.find_lane();
  }
  const Descale reread_descale = descale_of(problem, place.batch, place.kv_head);
  backward.finish(result_of(problem.dq, place.batch, place.head, extent.q.first),
                  scale * reread_descale.key / reread_descale.ds);
}

}  // namespace jax_flash
