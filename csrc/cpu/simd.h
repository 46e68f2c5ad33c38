// Vectors: width, loads and stores that convert, exp2. Included by isa.cc only, once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <experimental/simd>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define JAX_FLASH_INLINE inline __attribute__((always_inline))

namespace jax_flash::cpu::JAX_FLASH_ISA {

namespace stdx = std::experimental;

template <typename T>
using Vec = stdx::native_simd<T>;
template <typename T>
using Int = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
template <typename T>
constexpr int kWidth = static_cast<int>(Vec<T>::size());

// How elements lie in the caller's arrays; Compute<E> is what they are computed in.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
template <typename E>
using Compute = std::conditional_t<std::is_same_v<E, double>, double, float>;

template <typename T>
JAX_FLASH_INLINE Vec<T> load(const T* p) {
  return Vec<T>(p, stdx::element_aligned);
}

template <typename T>
JAX_FLASH_INLINE void store(T* p, const Vec<T>& v) {
  v.copy_to(p, stdx::element_aligned);
}

template <typename To, typename From>
JAX_FLASH_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// 0, 1, 2, ... to compare with the index where a row's kept lanes begin or end.
template <typename T>
JAX_FLASH_INLINE Vec<T> iota() {
  return Vec<T>([](auto i) { return static_cast<T>(static_cast<int>(i)); });
}

// Conversions of 16-bit elements, kWidth<float> at a time. std::experimental::simd makes poor code of them, so they
// are written on the compiler's vectors.
typedef uint16_t U16 __attribute__((vector_size(2 * kWidth<float>)));
typedef uint32_t U32 __attribute__((vector_size(4 * kWidth<float>)));
typedef float F32 __attribute__((vector_size(4 * kWidth<float>)));

JAX_FLASH_INLINE F32 widen(U16 x, BFloat16) { return bits_as<F32>(__builtin_convertvector(x, U32) << 16); }

JAX_FLASH_INLINE U16 narrow(F32 x, BFloat16) {
  U32 u = bits_as<U32>(x);
  U32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  U32 quiet = (u >> 16) | 0x40;
  U32 is_nan = bits_as<U32>((u & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), U16);
}

#if defined(__F16C__)
JAX_FLASH_INLINE F32 widen(U16 x, Half) {
  if constexpr (kWidth<float> == 16) {
#if defined(__AVX512F__)
    // Masked by ones, because g++ 12 warns of an uninitialised value inside the plain intrinsic.
    return bits_as<F32>(_mm512_maskz_cvtph_ps(0xffff, bits_as<__m256i>(x)));
#endif
  } else {
    return bits_as<F32>(_mm256_cvtph_ps(bits_as<__m128i>(x)));
  }
}
JAX_FLASH_INLINE U16 narrow(F32 x, Half) {
  if constexpr (kWidth<float> == 16) {
#if defined(__AVX512F__)
    return bits_as<U16>(_mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#endif
  } else {
    return bits_as<U16>(_mm256_cvtps_ph(bits_as<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
  }
}
#elif defined(__ARM_NEON)
JAX_FLASH_INLINE F32 widen(U16 x, Half) { return bits_as<F32>(vcvt_f32_f16(bits_as<float16x4_t>(x))); }
JAX_FLASH_INLINE U16 narrow(F32 x, Half) { return bits_as<U16>(vcvt_f16_f32(bits_as<float32x4_t>(x))); }
#else
JAX_FLASH_INLINE F32 widen(U16 x, Half) {
  U32 u = __builtin_convertvector(x, U32);
  // Exponent and mantissa in place, then 2^112 corrects the bias; that serves subnormals too.
  F32 magnitude = bits_as<F32>((u & 0x7fff) << 13) * 0x1p112f;
  U32 is_special = bits_as<U32>((u & 0x7c00) == 0x7c00);
  return bits_as<F32>(bits_as<U32>(magnitude) | (is_special & 0x7f800000) | ((u & 0x8000) << 16));
}
JAX_FLASH_INLINE U16 narrow(F32 x, Half) {
  U32 u = bits_as<U32>(x);
  U32 a = u & 0x7fffffff;
  U32 is_nan = bits_as<U32>(a > 0x7f800000);
  U32 is_large = bits_as<U32>(a >= 0x47800000);  // 65536 and more, infinity, NaN
  U32 is_small = bits_as<U32>(a < 0x38800000);   // below 2^-14: subnormal
  U32 special = 0x7c00 | (is_nan & 0x0200);
  // Adding 0.5 leaves the subnormal's digits, rounded, in the low bits.
  U32 small = bits_as<U32>(bits_as<F32>(a) + 0.5f) - 0x3f000000;
  U32 normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  U32 magnitude = (is_large & special) | (~is_large & ((is_small & small) | (~is_small & normal)));
  return __builtin_convertvector(magnitude | ((u >> 16) & 0x8000), U16);
}
#endif

// kWidth elements at p, converted.
template <typename E>
JAX_FLASH_INLINE Vec<Compute<E>> load_as(const E* p) {
  if constexpr (std::is_floating_point_v<E>) {
    return load(p);
  } else {
    U16 x;
    std::memcpy(&x, p, sizeof(x));
    return bits_as<Vec<float>>(widen(x, E{}));
  }
}

template <typename E>
JAX_FLASH_INLINE void store_as(E* p, const Vec<Compute<E>>& v) {
  if constexpr (std::is_floating_point_v<E>) {
    store(p, v);
  } else {
    U16 x = narrow(bits_as<F32>(v), E{});
    std::memcpy(p, &x, sizeof(x));
  }
}

// The first `count` < kWidth elements, the others zero, without touching what lies behind them.
template <typename E>
JAX_FLASH_INLINE Vec<Compute<E>> load_some(const E* p, int count) {
  alignas(64) E buffer[kWidth<Compute<E>>] = {};
  std::memcpy(buffer, p, count * sizeof(E));
  return load_as(buffer);
}

template <typename E>
JAX_FLASH_INLINE void store_some(E* p, const Vec<Compute<E>>& v, int count) {
  alignas(64) E buffer[kWidth<Compute<E>>];
  store_as(buffer, v);
  std::memcpy(p, buffer, count * sizeof(E));
}

// 2^x for x in [-inf, 128) (float) or [-inf, 1024) (double); NaN gives NaN. Below -126 (-1022) the result is 0: there
// are no subnormal results. Above the range the result is meaningless.
//
// x = n + f, n the nearest integer, which adding 1.5 * 2^23 leaves in the low bits; 2^f by a polynomial on
// [-0.5, 0.5] (minimax in the relative error); n is added to the exponent. The error, with fused multiply-adds, is at
// most 1.015 units in the last place over all floats of [-126, 128), and 1.04 over 7e7 doubles of [-1022, 1023).
JAX_FLASH_INLINE Vec<float> exp2(const Vec<float>& x) {
  using I = stdx::rebind_simd_t<int32_t, Vec<float>>;
  Vec<float> shifted = x + 0x1.8p23f;
  Vec<float> f = x - (shifted - 0x1.8p23f);
  Vec<float> y = 0x1.470b48p-13f;
  y = y * f + 0x1.5f7276p-10f;
  y = y * f + 0x1.3b270ep-7f;
  y = y * f + 0x1.c6ae72p-5f;
  y = y * f + 0x1.ebfbe2p-3f;
  y = y * f + 0x1.62e432p-1f;
  y = y * f + 1.0f;
  y = bits_as<Vec<float>>(bits_as<I>(y) + (bits_as<I>(shifted) << 23));
  stdx::where(x < -126.0f, y) = 0.0f;
  return y;
}

JAX_FLASH_INLINE Vec<double> exp2(const Vec<double>& x) {
  using I = stdx::rebind_simd_t<int64_t, Vec<double>>;
  Vec<double> shifted = x + 0x1.8p52;
  Vec<double> f = x - (shifted - 0x1.8p52);
  Vec<double> y = 0x1.c063841f3a21dp-32;
  y = y * f + 0x1.e605f964b639dp-28;
  y = y * f + 0x1.b54167a1b0034p-24;
  y = y * f + 0x1.62bfd49ededd3p-20;
  y = y * f + 0x1.ffcbee3b0a61cp-17;
  y = y * f + 0x1.43091309610fcp-13;
  y = y * f + 0x1.5d87fe7bbbe09p-10;
  y = y * f + 0x1.3b2ab6fba1e1cp-7;
  y = y * f + 0x1.c6b08d7048f31p-5;
  y = y * f + 0x1.ebfbdff82c598p-3;
  y = y * f + 0x1.62e42fefa39f3p-1;
  y = y * f + 1.0;
  y = bits_as<Vec<double>>(bits_as<I>(y) + (bits_as<I>(shifted) << 52));
  stdx::where(x < -1022.0, y) = 0.0;
  return y;
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
