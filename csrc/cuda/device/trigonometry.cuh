// sin, cos and tan of any float without a branch. CUDA's own have one with a loop, for large arguments, which is
// compiled anew for each of the 64 pairs of a lane: 15 s a kernel.
#pragma once

#include "cuda/device/arithmetic.cuh"

namespace jax_flash {

// By biased exponent, from that of 1/2 on: how many quarter turns the last bit of such a float is, modulo 4, in 2^-62.
// The idea of Payne and Hanek (1983), with 64 digits at once: no digit of 2 / pi that makes whole turns, nor one of
// less than 2^-38 quarter turns in the product.
constexpr unsigned first_exponent = 126, exponents = 129;
struct QuarterTurns {
  unsigned long long of[exponents];

  __host__ __device__ constexpr QuarterTurns() : of{} {
    constexpr unsigned two_over_pi[] = {0u,          0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                        0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
    for (unsigned i = 0; i < exponents; ++i) {
      const unsigned first = first_exponent + i - 120, word = first / 32, shift = first % 32;
      of[i] = static_cast<unsigned long long>(two_over_pi[word]) << 32 | two_over_pi[word + 1];
      if (shift != 0) of[i] = of[i] << shift | two_over_pi[word + 2] >> (32 - shift);
    }
  }
};
static __constant__ QuarterTurns quarter_turns = QuarterTurns();

// x is number * pi / 2 + rest, the number modulo 4, and rest in [-pi / 4, pi / 4] to 2^-31.
struct Turns {
  unsigned number;
  float rest;
};
static __device__ __forceinline__ Turns turns_of(float x) {
  const unsigned bits = __float_as_uint(x), exponent = bits >> 23 & 255u;
  const bool small = exponent < first_exponent;
  const unsigned at = small ? 0u : exponent - first_exponent;
  const unsigned long long mantissa = (bits & 0x7fffffu) | 0x800000u;
  const unsigned long long product = mantissa * quarter_turns.of[at < exponents ? at : 0u];
  // The nearest whole number, and 2^32 times what is above or below it.
  const unsigned number = static_cast<unsigned>((product >> 61) + 1) >> 1;
  const float rest = static_cast<float>(static_cast<int>(product >> 30)) * 3.6572951e-10f;  // pi / 2 * 2^-32
  const float turned = (x < 0.f ? -rest : rest) + 0.f * x;                                  // of an infinity NaN
  return {small ? 0u : x < 0.f ? 0u - number : number, small ? x : turned};
}

// The polynomials with the least relative error, 4e-9 and 2e-10.
static __device__ __forceinline__ float sine_of_rest(float x) {
  const float square = x * x;
  const float y = fmaf(fmaf(-1.9514975e-4f, square, 8.3321584e-3f), square, -0.16666655f);
  return fmaf(x * square, y, x);
}
static __device__ __forceinline__ float cosine_of_rest(float x) {
  const float square = x * x;
  const float y = fmaf(fmaf(2.4432786e-5f, square, -1.3887313e-3f), square, 4.1666646e-2f);
  return fmaf(square * square, y, fmaf(-0.5f, square, 1.f));
}

static __device__ __forceinline__ float sine(float x) {
  const Turns turns = turns_of(x);
  const float y = turns.number & 1u ? cosine_of_rest(turns.rest) : sine_of_rest(turns.rest);
  return turns.number & 2u ? -y : y;
}
static __device__ __forceinline__ float cosine(float x) {
  const Turns turns = turns_of(x);
  const float y = turns.number & 1u ? sine_of_rest(turns.rest) : cosine_of_rest(turns.rest);
  return (turns.number + 1u) & 2u ? -y : y;
}
static __device__ __forceinline__ float tangent(float x) {
  const Turns turns = turns_of(x);
  const float s = sine_of_rest(turns.rest), c = cosine_of_rest(turns.rest);
  return turns.number & 1u ? -c / s : s / c;
}

}  // namespace jax_flash
