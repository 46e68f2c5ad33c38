// Rows of which several have seen a part of the keys each: what comes of all their parts together. After a family's
// mma.cuh, which brings pack().
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// The exponentials of a row that has been seen in several places: to what they are related, and their sum.
JAX_FLASH_DEVICE float lse_of(float anchor, float total) {
  return total == 0.f ? -JAX_FLASH_INFINITY : (anchor + weight_bits + log2_approx(total * weight_unit)) * kLn2;
}
JAX_FLASH_DEVICE float weight_against(float own, float anchor) {
  return own == -JAX_FLASH_INFINITY ? 0.f : exp2_approx(own - anchor);
}
// Takes in a sink, a logit without a value.
JAX_FLASH_DEVICE float anchor_with(float anchor, float sink) {
  return has_sinks ? fmaxf(anchor, sink * kLog2e - weight_bits) : anchor;
}

JAX_FLASH_DEVICE void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
JAX_FLASH_DEVICE void store_four(u16* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = {pack(x.x, x.y), pack(x.z, x.w)};
}

// Weights of sums of one row that are related to several anchors, which are related to `anchor` then.
template <int n>
struct Mixture {
  float anchor, total, weights[n];

  // Where there is no sink, that is -inf.
  template <typename StatisticsOf>
  __device__ __forceinline__ Mixture(float sink, const StatisticsOf& statistics_of) : total(0.f) {
    float2 of[n];
    anchor = anchor_with(-JAX_FLASH_INFINITY, sink);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      of[i] = statistics_of(i);
      anchor = fmaxf(anchor, of[i].x);
    }
    if (has_sinks && sink != -JAX_FLASH_INFINITY) total = exp2_approx(sink * kLog2e - anchor);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      weights[i] = weight_against(of[i].x, anchor);
      total += weights[i] * of[i].y;
    }
  }
  // What is of no weight need not be there.
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
