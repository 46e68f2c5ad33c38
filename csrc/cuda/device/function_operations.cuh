// The operations of score and mask functions, as JAX defines them: integers wrap around, a division by 0 gives -1 and
// its remainder the dividend, a maximum with NaN is NaN, and conversions to integers saturate.
#pragma once

#include "cuda/device/position.cuh"
#include "cuda/device/transcendental.cuh"
#include "cuda/device/trigonometry.cuh"
#include "cuda/kernel_traits.h"
#include "layout.h"
#include "problem.h"

#define JAX_FLASH_FUNCTION static __device__ __forceinline__

namespace jax_flash {

// An element of a captured array. What no kernel writes is read by way of the read-only cache, so that the compiler may
// move loads and share them between pairs.
struct Float16 {
  unsigned short bits;
};
struct BrainFloat16 {
  unsigned short bits;
};
template <typename Stored>
JAX_FLASH_FUNCTION Stored number_of(Stored x) {
  return x;
}
JAX_FLASH_FUNCTION float number_of(Float16 x) { return half_to_float(x.bits); }
JAX_FLASH_FUNCTION float number_of(BrainFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
template <int bytes>
struct Word;
template <>
struct Word<1> {
  using Type = unsigned char;
};
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<8> {
  using Type = unsigned long long;
};
template <typename Stored>
JAX_FLASH_FUNCTION Stored read_only(const void* array, long long bytes) {
  using Bits = typename Word<sizeof(Stored)>::Type;
  const Bits bits = __ldg(reinterpret_cast<const Bits*>(static_cast<const char*>(array) + bytes));
  Stored x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
template <typename T, typename Stored>
JAX_FLASH_FUNCTION T load(const void* array, long long i) {
  return static_cast<T>(number_of(read_only<Stored>(array, i * static_cast<int>(sizeof(Stored)))));
}

// How many rows or keys tiles of `size` visit where there are `length` of them.
template <int length, int size>
constexpr long long visited = round_up<long long>(round_up<long long>(length, size), has_descale ? kFloat32Tile : 1);

// Element `at` of a row of n elements that begins at `row`, or the last one. Positions are below `end`: if that is no
// more than n, nothing is tested, and what a lane reads lies at constant distances from one address.
template <typename T, typename Stored, int n, long long end, typename Row>
JAX_FLASH_FUNCTION T load_of_position(const void* array, Row row, const Position& at) {
  constexpr int bytes = sizeof(Stored);
  const int i = at;
  if constexpr (end > n) return load<T, Stored>(array, row + (i < n ? i : n - 1));
  const char* const first = static_cast<const char*>(array) + (static_cast<long long>(row) + at.first) * bytes;
  return static_cast<T>(number_of(read_only<Stored>(first, static_cast<long long>(at.more) * bytes)));
}
// The same of keys, where n is even.
template <typename T, typename Stored, int n, long long end, typename Row>
JAX_FLASH_FUNCTION T load_of_key(const void* array, Row row, const Position& kv) {
  if constexpr (!pairs_of_keys) return load_of_position<T, Stored, n, end>(array, row, kv);
  struct alignas(2 * sizeof(Stored)) Two {
    Stored even, odd;
  };
  constexpr int bytes = sizeof(Stored);
  if constexpr (end <= n) {
    const int parity = kv.first & 1, more = parity + kv.more;  // constants: a lane's first key is even
    const long long even = static_cast<long long>(row) + kv.first - parity;
    const char* const first = static_cast<const char*>(array) + even * bytes;
    const Two two = read_only<Two>(first, static_cast<long long>(more & ~1) * bytes);
    return static_cast<T>(number_of(more & 1 ? two.odd : two.even));
  }
  const int own = kv & ~1, even = own < n - 2 ? own : n - 2;
  const Two two = read_only<Two>(array, static_cast<long long>(row + even) * bytes);
  return static_cast<T>(number_of((kv & 1) != 0 || kv > even ? two.odd : two.even));
}

template <typename T>
struct Rounded;
template <>
struct Rounded<Float16> {
  static __device__ __forceinline__ float of(float x) { return half_to_float(float_to_half(x)); }
};
template <>
struct Rounded<BrainFloat16> {
  static __device__ __forceinline__ float of(float x) {
    const unsigned bits = __float_as_uint(x);
    return x != x ? x : __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
  }
};
template <typename T>
JAX_FLASH_FUNCTION float rounded(float x) {
  return Rounded<T>::of(x);
}

JAX_FLASH_FUNCTION float add(float x, float y) { return x + y; }
JAX_FLASH_FUNCTION float sub(float x, float y) { return x - y; }
JAX_FLASH_FUNCTION float mul(float x, float y) { return x * y; }
JAX_FLASH_FUNCTION float div(float x, float y) { return x / y; }
JAX_FLASH_FUNCTION float rem(float x, float y) { return fmodf(x, y); }
JAX_FLASH_FUNCTION float neg(float x) { return -x; }
JAX_FLASH_FUNCTION float absolute(float x) { return fabsf(x); }
JAX_FLASH_FUNCTION float sign(float x) { return x > 0.f ? 1.f : x < 0.f ? -1.f : x; }
JAX_FLASH_FUNCTION float maximum(float x, float y) { return x > y || x != x ? x : y; }
JAX_FLASH_FUNCTION float minimum(float x, float y) { return x < y || x != x ? x : y; }
JAX_FLASH_FUNCTION bool is_finite(float x) { return x - x == 0.f; }
JAX_FLASH_FUNCTION float logistic(float x) { return reciprocal_approx(1.f + exp2_approx(-1.4426950408889634f * x)); }

// Of integers: T, and the unsigned type U in which it wraps around.
#define JAX_FLASH_INTEGER(T, U)                                                                            \
  JAX_FLASH_FUNCTION T add(T x, T y) { return static_cast<T>(static_cast<U>(x) + static_cast<U>(y)); }     \
  JAX_FLASH_FUNCTION T sub(T x, T y) { return static_cast<T>(static_cast<U>(x) - static_cast<U>(y)); }     \
  JAX_FLASH_FUNCTION T mul(T x, T y) { return static_cast<T>(static_cast<U>(x) * static_cast<U>(y)); }     \
  JAX_FLASH_FUNCTION T neg(T x) { return sub(static_cast<T>(0), x); }                                      \
  JAX_FLASH_FUNCTION T maximum(T x, T y) { return x > y ? x : y; }                                         \
  JAX_FLASH_FUNCTION T minimum(T x, T y) { return x < y ? x : y; }                                         \
  JAX_FLASH_FUNCTION T shift_left(T x, T n) {                                                              \
    return static_cast<U>(n) < 8 * sizeof(T) ? static_cast<T>(static_cast<U>(x) << static_cast<U>(n))      \
                                             : static_cast<T>(0);                                          \
  }                                                                                                        \
  JAX_FLASH_FUNCTION T shift_right_logical(T x, T n) {                                                     \
    return static_cast<U>(n) < 8 * sizeof(T) ? static_cast<T>(static_cast<U>(x) >> static_cast<U>(n))      \
                                             : static_cast<T>(0);                                          \
  }                                                                                                        \
  JAX_FLASH_FUNCTION T shift_right_arithmetic(T x, T n) {                                                  \
    return x >> static_cast<T>(static_cast<U>(n) < 8 * sizeof(T) ? static_cast<U>(n) : 8 * sizeof(T) - 1); \
  }
#define JAX_FLASH_SIGNED(T, U)                                                                          \
  JAX_FLASH_INTEGER(T, U)                                                                               \
  JAX_FLASH_FUNCTION T absolute(T x) { return x < 0 ? neg(x) : x; }                                     \
  JAX_FLASH_FUNCTION T sign(T x) { return static_cast<T>((x > 0) - (x < 0)); }                          \
  JAX_FLASH_FUNCTION T div(T x, T y) { return y == 0 ? static_cast<T>(-1) : y == -1 ? neg(x) : x / y; } \
  JAX_FLASH_FUNCTION T rem(T x, T y) { return y == 0 ? x : y == -1 ? static_cast<T>(0) : x % y; }
#define JAX_FLASH_UNSIGNED(T)                                                        \
  JAX_FLASH_INTEGER(T, T)                                                            \
  JAX_FLASH_FUNCTION T absolute(T x) { return x; }                                   \
  JAX_FLASH_FUNCTION T sign(T x) { return x != 0; }                                  \
  JAX_FLASH_FUNCTION T div(T x, T y) { return y == 0 ? ~static_cast<T>(0) : x / y; } \
  JAX_FLASH_FUNCTION T rem(T x, T y) { return y == 0 ? x : x % y; }
JAX_FLASH_SIGNED(int, unsigned)
JAX_FLASH_SIGNED(long long, unsigned long long)
JAX_FLASH_UNSIGNED(unsigned)
JAX_FLASH_UNSIGNED(unsigned long long)
#undef JAX_FLASH_UNSIGNED
#undef JAX_FLASH_SIGNED
#undef JAX_FLASH_INTEGER

JAX_FLASH_FUNCTION int population_count(int x) { return __popc(static_cast<unsigned>(x)); }
JAX_FLASH_FUNCTION unsigned population_count(unsigned x) { return __popc(x); }
JAX_FLASH_FUNCTION int leading_zeros(int x) { return __clz(x); }
JAX_FLASH_FUNCTION unsigned leading_zeros(unsigned x) { return __clz(static_cast<int>(x)); }

// Adds to element i of the gradient of a captured array. With exact_sums as integers: the mantissa, shifted to where it
// stands, in the two digits that it meets.
JAX_FLASH_FUNCTION void add_to(void* gradient, long long i, float x) {
  if constexpr (!option_exact_sums) {
    atomicAdd(static_cast<float*>(gradient) + i, x);
  } else {
    using Digit = unsigned long long;
    Digit* const digits = static_cast<Digit*>(gradient) + i * (kSumDigits + 1);
    const unsigned bits = __float_as_uint(x), exponent = bits >> 23 & 255u;
    if (exponent == 255u) {
      atomicOr(reinterpret_cast<unsigned*>(digits + kSumDigits), x != x ? 4u : x > 0.f ? 1u : 2u);
      return;
    }
    const unsigned shift = exponent ? exponent - 1 : 0u;
    const unsigned mantissa = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
    const Digit whole = static_cast<Digit>(mantissa) << shift % 24, low = whole & 0xffffffu, high = whole >> 24;
    if (low) atomicAdd(digits + shift / 24, x < 0.f ? 0 - low : low);
    if (high) atomicAdd(digits + shift / 24 + 1, x < 0.f ? 0 - high : high);
  }
}

JAX_FLASH_FUNCTION int to_int(float x) {
  return x != x ? 0 : x >= 0x1p31f ? 2147483647 : x <= -0x1p31f ? -2147483647 - 1 : static_cast<int>(x);
}
JAX_FLASH_FUNCTION unsigned to_unsigned(float x) {
  return x >= 0x1p32f ? 4294967295u : x > 0.f ? static_cast<unsigned>(x) : 0u;
}

}  // namespace jax_flash
