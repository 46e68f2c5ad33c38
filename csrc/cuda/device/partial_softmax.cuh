// Merges partial softmax states: those of teams, blocks or slices that have each seen some of a row's keys. To be
// included after a family's mma.cuh, which defines pack().
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// lse of a row whose exponentials are relative to `scaled_max` (RowStatistics) and add up to `total`.
JAX_FLASH_DEVICE float lse_of(float scaled_max, float total) {
  return total == 0.f ? -JAX_FLASH_INFINITY : (scaled_max + weight_bits + log2_approx(total * weight_unit)) * kLn2;
}
// The factor of sums that are relative to the scaled maximum `own`.
JAX_FLASH_DEVICE float rescale_factor(float own, float scaled_max) {
  return own == -JAX_FLASH_INFINITY ? 0.f : exp2_approx(own - scaled_max);
}
// Includes a sink, a logit without a value.
JAX_FLASH_DEVICE float scaled_max_with(float scaled_max, float sink) {
  return has_sinks ? fmaxf(scaled_max, sink * kLog2e - weight_bits) : scaled_max;
}

JAX_FLASH_DEVICE void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
JAX_FLASH_DEVICE void store_four(u16* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = {pack(x.x, x.y), pack(x.z, x.w)};
}

// The merge of n partial softmax states of a row: the common maximum, the total, and the factor of each state's sums.
template <int n>
struct SoftmaxMerge {
  float scaled_max, total, weights[n];

  // `statistics_of(i)` is the i-th state's scaled maximum and total; `sink` is -inf where there is none.
  template <typename StatisticsOf>
  __device__ __forceinline__ SoftmaxMerge(float sink, const StatisticsOf& statistics_of) : total(0.f) {
    float2 of[n];
    scaled_max = scaled_max_with(-JAX_FLASH_INFINITY, sink);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      of[i] = statistics_of(i);
      scaled_max = fmaxf(scaled_max, of[i].x);
    }
    if (has_sinks && sink != -JAX_FLASH_INFINITY) total = exp2_approx(sink * kLog2e - scaled_max);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      weights[i] = rescale_factor(of[i].x, scaled_max);
      total += weights[i] * of[i].y;
    }
  }
  // The merged sum of four columns. sum_of(i) is not read where the i-th state has no weight.
  template <typename SumOf>
  __device__ __forceinline__ float4 operator()(const SumOf& sum_of) const {
    float4 x{};
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (weights[i] == 0.f) continue;
      const float4 y = *reinterpret_cast<const float4*>(sum_of(i));
      x = {x.x + weights[i] * y.x, x.y + weights[i] * y.y, x.z + weights[i] * y.z, x.w + weights[i] * y.w};
    }
    return x;
  }
};

}  // namespace jax_flash
