// Online softmax over the rows of an accumulator (FlashAttention-2, algorithm 1), in base 2.
#pragma once

#include "cuda/device/lanes.cuh"

namespace jax_flash {

// The running statistics of one row.
struct RowStatistics {
  float maximum;  // of the raw scores so far
  float total;    // this lane's share of the sum of exponentials, relative to the maximum, times 2^weight_bits

  __device__ __forceinline__ RowStatistics() : maximum(-JAX_FLASH_INFINITY), total(0.f) {}

  // Begins with a sink, a logit in units of log2 that has no value; one lane of a row's takes its share of the total.
  __device__ __forceinline__ void begin_with(float sink_log2, float scale_log2, bool has_share) {
    if (sink_log2 == -JAX_FLASH_INFINITY) return;
    maximum = sink_log2 / scale_log2;
    total = has_share ? exp2_approx(sink_log2 - scaled_max(scale_log2)) : 0.f;
  }

  // What is subtracted from scaled scores before exp2: the scaled maximum, less weight_bits. The scale is positive, so
  // it commutes with the maximum. It is rounded once and used for the exponentials and for lse alike, so its rounding
  // cancels however large the scores.
  __device__ __forceinline__ float scaled_max(float scale_log2) const {
    return maximum == -JAX_FLASH_INFINITY ? 0.f : scaled_max_of(maximum, scale_log2);
  }
  static __device__ __forceinline__ float scaled_max_of(float maximum, float scale_log2) {
    return weight_bits == 0.f ? __fmul_rn(maximum, scale_log2) : fmaf(maximum, scale_log2, -weight_bits);
  }

  // Whether new scores exceed the maximum by so much that it has to be replaced. Weights may grow to 2^8 (2^15 where
  // there are weight_bits), which changes no digit of a float, and no float16 overflows; and what has been accumulated
  // is multiplied seldom, where it would be for nearly every tile (forward at head_dim 128, H200: 364 to 391 TFLOP/s).
  __device__ __forceinline__ bool outgrown(float new_maximum, float scale_log2) const {
    return (new_maximum - maximum) * scale_log2 > 8.f;
  }

  // Takes in the maximum of new scores and returns the factor by which everything accumulated so far shrinks.
  __device__ __forceinline__ float update(float new_maximum, float scale_log2) {
    float before = maximum;
    maximum = fmaxf(maximum, new_maximum);
    // The scaled maximum before is rounded as the one after is, not fused with the subtraction: else a maximum that
    // stays would shrink by its rounding error in every tile, and lse would be off by 1e-7 for each.
    float shrink = exp2_approx(scaled_max_of(before, scale_log2) - scaled_max(scale_log2));
    total *= shrink;
    return shrink;
  }

  // Scores of one half of the accumulators' rows become weights, which join the total: n8 tiles [begin, end).
  template <int n>
  __device__ __forceinline__ void weigh(FragmentC (&scores)[n], int half, float scale_log2, int begin = 0,
                                        int end = n) {
    const float subtracted = scaled_max(scale_log2);
#pragma unroll
    for (int i = begin; i < end; ++i) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        scores[i].x[e] = exp2_approx(scores[i].x[e] * scale_log2 - subtracted);
        total += scores[i].x[e];
      }
    }
  }

  // The natural logarithm of the sum of exponentials of a row whose lanes' totals have been summed.
  __device__ __forceinline__ float lse(float scale_log2) const {
    return total == 0.f ? -JAX_FLASH_INFINITY
                        : (scaled_max(scale_log2) + weight_bits + log2_approx(total * weight_unit)) * kLn2;
  }
};

// The largest of a lane's elements in one half of the rows.
template <int n>
JAX_FLASH_DEVICE float maximum_of(const FragmentC (&c)[n], int half) {
  float maximum = -JAX_FLASH_INFINITY;
#pragma unroll
  for (int i = 0; i < n; ++i) maximum = fmaxf(maximum, fmaxf(c[i].x[2 * half], c[i].x[2 * half + 1]));
  return maximum;
}
template <int n>
JAX_FLASH_DEVICE void multiply_half(FragmentC (&c)[n], int half, float factor) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    c[i].x[2 * half] *= factor;
    c[i].x[2 * half + 1] *= factor;
  }
}

}  // namespace jax_flash
