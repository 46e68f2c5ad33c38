// dK and dV where the query heads of a key head are split: the sums of all shares, in their order, or what all added
// to.
#pragma once

#include "cuda/device/backward_block.cuh"

namespace jax_flash {

// Four columns of a key a thread. Sums that 32 bits do not count would take 64 GB, and their calls more than GPUs have.
extern "C" __global__ void __launch_bounds__(32 * kSplitWarps)
    jax_flash_sum_splits(const __grid_constant__ Problem problem) {
  constexpr int columns = head_dim + value_head_dim;
  const u32 item = blockIdx.x * (32 * kSplitWarps) + threadIdx.x, row = item / (columns / 4);
  const int column = static_cast<int>(item % (columns / 4)) * 4;
  const u32 keys = static_cast<u32>(problem.kv_length);
  const int key = static_cast<int>(row % keys), of = static_cast<int>(row / keys);
  const int head = of % problem.kv_heads, batch = of / problem.kv_heads;
  if (batch >= problem.batch || computed_in_float32(problem, batch, head)) return;
  const ShareSum* from = share_sums(problem, batch, head * problem.group_splits, key) + column;
  float4 sum = {};
#pragma unroll 4
  for (int i = 0; i < sums_of_group(problem); ++i) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    from += static_cast<i64>(problem.kv_length) * columns;
  }
  const int to_row = row_of_key(problem, batch, key);
  Result* to = column < head_dim ? result_of(problem.dk, batch, head, to_row) + column
                                 : result_of(problem.dv, batch, head, to_row) + column - head_dim;
  if constexpr (has_descale) {
    *reinterpret_cast<float4*>(to) = sum;
  } else {
    *reinterpret_cast<uint2*>(to) = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
  }
}

}  // namespace jax_flash
