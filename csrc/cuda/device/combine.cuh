// Merges the partial softmax states that the slices of a head's keys have left in scratch (forward_split_kv.cuh).
#pragma once

#include "cuda/device/forward_split_kv.cuh"

namespace jax_flash {

extern "C" __global__ void __launch_bounds__(32 * combine_warps)
    jax_flash_combine(const __grid_constant__ Problem problem) {
  constexpr int most = kMostSlices / 32;  // slices whose statistics a lane holds
  constexpr int fours = value_head_dim / 4, own_fours = ceil_div(fours, 32);
  static __shared__ float4 sums[combine_warps][fours];

  const Scratch scratch(problem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool alone = combines_by_warp(scratch.slices, combine_warps);  // a warp with its row
  const i64 wanted = alone ? static_cast<i64>(blockIdx.x) * combine_warps + warp : blockIdx.x;
  const int index = static_cast<int>(at_most(wanted, scratch.rows - 1));
  const int t = index % problem.q_length, of = index / problem.q_length;
  const int head = of % problem.q_heads, batch = of / problem.q_heads;

  if (!loads_take_registers) wait_for_the_kernel_before();
  // Of such a head nothing has been left, and what is stored here is not the result yet.
  const bool skipped = computed_in_float32(problem, batch, head / (problem.q_heads / problem.kv_heads));
  float2 statistics[most];
  float scaled_max = -JAX_FLASH_INFINITY, total = 0.f, weight[most];
#pragma unroll
  for (int i = 0; i < most; ++i) {
    const int slice = i * 32 + lane;
    statistics[i] = {-JAX_FLASH_INFINITY, 0.f};
    if (slice < scratch.slices && !skipped) statistics[i] = *scratch.statistics(slice, index);
    scaled_max = fmaxf(scaled_max, statistics[i].x);
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) scaled_max = fmaxf(scaled_max, __shfl_xor_sync(0xffffffffu, scaled_max, i));
  const float sink = sink_of(problem, batch, head);
  scaled_max = scaled_max_with(scaled_max, sink);
#pragma unroll
  for (int i = 0; i < most; ++i) {
    weight[i] = rescale_factor(statistics[i].x, scaled_max);
    total += weight[i] * statistics[i].y;
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
  if (has_sinks && sink != -JAX_FLASH_INFINITY) total += exp2_approx(sink * kLog2e - scaled_max);

  float4 mine[own_fours] = {};
#pragma unroll
  for (int i = 0; i < kMostSlices / combine_warps; ++i) {
    const int slice = alone ? i : i * combine_warps + warp;
    const float w = __shfl_sync(0xffffffffu, alone ? weight[0] : weight[i * combine_warps / 32], slice % 32);
    if (w == 0.f) continue;  // nor is there a slice, or anything in it
#pragma unroll
    for (int j = 0; j < own_fours; ++j) {
      const int four = j * 32 + lane;
      if (four >= fours) continue;
      const float4 x = reinterpret_cast<const float4*>(scratch.sum(slice, index))[four];
      mine[j] = {mine[j].x + w * x.x, mine[j].y + w * x.y, mine[j].z + w * x.z, mine[j].w + w * x.w};
    }
  }
#pragma unroll
  for (int j = 0; j < own_fours; ++j) {
    if (j * 32 + lane < fours) sums[warp][j * 32 + lane] = mine[j];
  }
  __syncthreads();  // the sums of all warps are there

  if (wanted >= scratch.rows) return;
  const Extent extent = extent_of(problem, batch, 0);
  const bool padding = has_q_lengths && t >= extent.q.length;
  const int thread = alone ? lane : threadIdx.x, column = thread * 8;
  if (thread == 0) static_cast<float*>(problem.lse)[index] = padding ? sink : lse_of(scaled_max, total);
  if (column >= value_head_dim) return;
  const Dropout dropout(problem, extent, head);
  float factor = inverse_of(problem, dropout, batch, head / (problem.q_heads / problem.kv_heads), total);
  if (padding) factor = 0.f;
  float x[8] = {};
#pragma unroll
  for (int i = 0; i < combine_warps; ++i) {
    const float* sum = reinterpret_cast<const float*>(sums[alone ? warp : i]) + column;
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] += sum[e];
    if (alone) break;
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= factor;
  store_eight(result_of(problem.out, batch, head, t) + column, x);
}

}  // namespace jax_flash
