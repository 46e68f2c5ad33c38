// Functions of a float that the softmax, softcap and score functions share.
#pragma once

#include "cuda/device/arithmetic.cuh"

namespace jax_flash {

// tanh to a few units of float32's rounding. Scores are mostly small against the cap, and then the series to x^11 is as
// good as the rounding of its result; beyond 1/4 the exponential is, whose cancellation would be felt below.
static __device__ __forceinline__ float hyperbolic_tangent(float x) {
  constexpr float log2e = 1.4426950408889634f;
  const float square = x * x;
  float y = -0.0088632355f;
  y = y * square + 0.021869488f;
  y = y * square - 0.053968254f;
  y = y * square + 0.13333333f;
  y = y * square - 0.33333333f;
  y = x + x * square * y;
  if (fabsf(x) >= 0.25f) y = 1.f - 2.f * reciprocal_approx(exp2_approx(2.f * log2e * x) + 1.f);
  return y;
}

}  // namespace jax_flash
