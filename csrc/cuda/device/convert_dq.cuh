// dQ in the dtype of the result, of the sums that the blocks of the backward have added up in scratch (backward.cuh).
#pragma once

#include "cuda/device/backward.cuh"

namespace jax_flash {

// dq = scale * (the sum in scratch). One warp turns 16 rows of one head.
extern "C" __global__ void __launch_bounds__(32 * convert_warps)
    jax_flash_convert_dq(const __grid_constant__ Problem problem) {
  DqTile of;
  if (!find_dq_tile(problem, static_cast<i64>(blockIdx.x) * convert_warps + threadIdx.x / 32, of)) return;
  const int lane = Lanes::of(threadIdx.x);
  const auto [batch, head, tile] = of;
  int row_tile = tile;
  const Extent extent = extent_of(problem, batch, sequence_of(problem, problem.cu_q_lengths, batch, 16, row_tile));
  const Descale descale = descale_of(problem, batch, head / (problem.q_heads / problem.kv_heads));
  const float scale = scale_of(problem, batch) * descale.key / descale.ds;
  const float* from = dq_fragment(problem, batch, head, tile, 0) + lane * dq_lane_step;
  Result* to = result_of(problem.dq, batch, head, extent.q.first);
#pragma unroll
  for (int i = 0; i < ceil_div(head_dim, dq_group); ++i) {
    FragmentC dq[dq_group / 8];
#pragma unroll
    for (int n = 0; n < dq_group / 8; ++n) {
      dq[n] = read_fragment(from + (i * dq_group / 8 + n) * 128);
    }
    Mma::store_fragments<head_dim, dq_group, 1>(dq, scale, scale, to, problem.dq.row_stride, row_tile * 16 + lane / 4,
                                                extent.q.stored, i, lane);
  }
}

}  // namespace jax_flash
