// Vectors: width, loads and stores that convert, exp2. Included by isa.cc only, once per instruction set.
#pragma once

#include "vectors.h"

// Instructions that multiply pairs of bfloat16: the processor's, or in tests functions that emulate them.
#if defined(__AVX512BF16__) || defined(JAX_FLASH_EMULATED_PAIRS)
#define JAX_FLASH_PAIRS
#endif

namespace jax_flash::cpu::JAX_FLASH_ISA {

// How elements lie in the caller's arrays; Compute<E> is what they are computed in.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
template <typename E>
using Compute = std::conditional_t<std::is_same_v<E, double>, double, float>;

// Conversions of 16-bit elements, kWidth<float> at a time.
using U16 = Native<uint16_t, kWidth<float>>;
using U32 = Native<uint32_t, kWidth<float>>;
using F32 = Native<float, kWidth<float>>;

// __builtin_convertvector(x, U32), for which g++ 12 splits and rejoins the halves.
JAX_FLASH_INLINE U32 widen_bits(U16 x) {
#if defined(__AVX512F__)
  // Masked by ones, because g++ 12 warns of an uninitialised value inside the plain intrinsic.
  return bits_as<U32>(_mm512_maskz_cvtepu16_epi32(0xffff, bits_as<__m256i>(x)));
#elif defined(__AVX2__)
  return bits_as<U32>(_mm256_cvtepu16_epi32(bits_as<__m128i>(x)));
#else
  return __builtin_convertvector(x, U32);
#endif
}

JAX_FLASH_INLINE F32 widen(U16 x, BFloat16) { return bits_as<F32>(widen_bits(x) << 16); }

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
#if defined(__AVX512F__)  // masked as above
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
  // Exponent and mantissa in place, the exponent's bias corrected. A subnormal is a normal number with its digits less
  // 2^-14; a product with a subnormal float would be 0 in XLA's threads.
  U32 normal = ((u & 0x7fff) << 13) + 0x38000000;
  U32 small = bits_as<U32>(bits_as<F32>(normal + 0x800000) - 0x1p-14f);
  U32 is_small = bits_as<U32>((u & 0x7c00) == 0);
  U32 is_special = bits_as<U32>((u & 0x7c00) == 0x7c00);
  U32 magnitude = (is_small & small) | (~is_small & normal);
  return bits_as<F32>(magnitude | (is_special & 0x7f800000) | ((u & 0x8000) << 16));
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

// The first `count` < kWidth elements, the others zero, without reading past them.
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

// Which of kWidth booleans are false; those after the first `count`, which are not read, count as false.
template <typename T>
JAX_FLASH_INLINE Mask<Int<T>> load_false(const bool* p, int64_t count) {
  constexpr int W = kWidth<T>;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  Native<uint8_t, 16> bytes = {};  // a mask of them, since g++ 12 widens bytes in many steps
#else
  Native<uint8_t, W> bytes = {};
#endif
  if (count >= W) {
    std::memcpy(&bytes, p, W);
  } else {
    std::memcpy(&bytes, p, count);
  }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return {static_cast<MaskLanes<Int<T>>>(_mm_testn_epi8_mask(bits_as<__m128i>(bytes), bits_as<__m128i>(bytes)))};
#else
  return IntVec<T>(__builtin_convertvector(bytes, Native<Int<T>, W>)) == 0;
#endif
}

// A factor of a matrix product: what one lane of one instruction reads of each operand. That is an element, or with
// instructions for pairs (twice as many products per cycle) two neighbours along the sum.
struct Pair {
  uint32_t bits;  // two BFloat16, the first one in the low half
};
JAX_FLASH_INLINE U32 load(const Pair* p) {
  U32 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
JAX_FLASH_INLINE void store(Pair* p, const U32& x) { std::memcpy(p, &x, sizeof(x)); }

#if defined(JAX_FLASH_PAIRS)
template <typename E>
using Factor = std::conditional_t<std::is_same_v<E, BFloat16>, Pair, Compute<E>>;
#else
template <typename E>
using Factor = Compute<E>;
#endif
template <typename F>
constexpr bool kPaired = !std::is_floating_point_v<F>;
template <typename F>
constexpr int kElements = kPaired<F> ? 2 : 1;  // of a factor
template <typename F>
using Sum = std::conditional_t<kPaired<F>, float, F>;

template <typename T>
JAX_FLASH_INLINE Vec<T> multiply_add(const Vec<T>& a, T b, const Vec<T>& c) {
  return b * a + c;
}
template <typename T>
JAX_FLASH_INLINE Vec<T> multiply_add(const Vec<T>& a, const Vec<T>& b, const Vec<T>& c) {
  return a * b + c;
}

#if defined(JAX_FLASH_EMULATED_PAIRS)
#include JAX_FLASH_EMULATED_PAIRS
#elif defined(__AVX512BF16__)
JAX_FLASH_INLINE Vec<float> multiply_add(const U32& a, const U32& b, const Vec<float>& c) {
  return bits_as<Vec<float>>(_mm512_dpbf16_ps(bits_as<__m512>(c), bits_as<__m512bh>(a), bits_as<__m512bh>(b)));
}

// The rounded lanes of a, then those of b: pairs along a row.
JAX_FLASH_INLINE U32 round_row(const Vec<float>& a, const Vec<float>& b) {
  return bits_as<U32>(_mm512_cvtne2ps_pbh(bits_as<__m512>(b), bits_as<__m512>(a)));
}
// The same interleaved: pairs of two rows.
JAX_FLASH_INLINE U32 pair_up(const Vec<float>& a, const Vec<float>& b) {
  auto rounded = bits_as<Native<uint16_t, 32>>(round_row(a, b));
  return bits_as<U32>(shuffle(rounded, rounded, [](int i) { return i % 2 * 16 + i / 2; }));
}

// In each 16 bytes interleaves the first 4 elements of 16 bits of both, or the last 4.
template <bool last>
JAX_FLASH_INLINE U32 interleave_quarters(const U32& a, const U32& b) {
  if constexpr (last) return bits_as<U32>(_mm512_unpackhi_epi16(bits_as<__m512i>(a), bits_as<__m512i>(b)));
  return bits_as<U32>(_mm512_unpacklo_epi16(bits_as<__m512i>(a), bits_as<__m512i>(b)));
}
#endif
#if defined(JAX_FLASH_PAIRS)
JAX_FLASH_INLINE Vec<float> multiply_add(const U32& a, Pair b, const Vec<float>& c) {
  U32 all = U32{} + b.bits;
#if defined(__clang__) && defined(__AVX512BF16__)
  asm("" : "+v"(all));  // else clang 16 makes this a shuffle of its type bfloat, whose cost it computes without end
#endif
  return multiply_add(a, all, c);
}
#endif

// 2^x for x in [-inf, 127.5) (float) or [-inf, 1023.5) (double); NaN gives NaN. Below -126 (-1022) the result is 0:
// there are no subnormal results. Above the range the result is undefined.
//
// x = n + f, n the nearest integer: adding 1.5 * 2^23 leaves it in the low bits, and another 127 there makes them the
// exponent of 2^n. 2^f by a polynomial on [-0.5, 0.5] (minimax in the relative error, except that the float's
// coefficient of f^2 is 6 units in its last place higher, which rounds better). 2^n is multiplied, because adding n to
// the exponent would turn NaNs of some payloads into numbers. The error, over every float of the range, is at most
// 0.870 units in the last place with fused multiply-adds, 1.132 without; over samples of doubles 1.04 and 1.31.
// With AVX-512 floats take x = n + j / 16 + f, and 2^(j / 16) is looked up in a register: 4 instructions on the
// multipliers, by which the surrounding products are bound, instead of 7. That gives 1.00 to 1.04 times the backward's
// rate. The error is at most 0.988 units in the last place. vreduceps for f and a masked instruction for zeros save two
// more: 1.01 to 1.02 times the forward's rate (docs/ledger/cpu-emerald-rapids.md).
#if defined(__AVX512F__)
JAX_FLASH_INLINE Vec<float> exp2(const Vec<float>& x) {
  // The bits of 2^(j / 16) less j at the place where the shift below leaves it.
  constexpr U32 kPowers = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                           0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                           0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
  constexpr float kShift = 0x1.8p19f;  // its last bit is 1/16
  U32 bits = bits_as<U32>(Vec<float>(x + kShift));
  U32 found = bits_as<U32>(_mm512_maskz_permutexvar_epi32(0xffff, bits_as<__m512i>(bits), bits_as<__m512i>(kPowers)));
  Vec<float> power = bits_as<Vec<float>>(found + (bits << 19));
  __m512 all = bits_as<__m512>(x);
  // x less the nearest multiple of 2^-4, ties to even as in the sum above. Masked as in widen_bits().
  Vec<float> f = bits_as<Vec<float>>(_mm512_maskz_reduce_ps(0xffff, all, 4 << 4 | _MM_FROUND_TO_NEAREST_INT));
  Vec<float> y = 0x1.c6b3f8p-5f;
  y = y * f + 0x1.ebfffap-3f;
  y = y * f + 0x1.62e43p-1f;
  y *= f;
  // NaN is not less either.
  __mmask16 keep = _mm512_cmp_ps_mask(all, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return bits_as<Vec<float>>(
      _mm512_maskz_fmadd_ps(keep, bits_as<__m512>(power), bits_as<__m512>(y), bits_as<__m512>(power)));
}
#else
JAX_FLASH_INLINE Vec<float> exp2(const Vec<float>& x) {
  constexpr float kShift = 0x1.8p23f + 127;
  Vec<float> shifted = x + kShift;
  Vec<float> f = x - (shifted - kShift);
  Vec<float> y = 0x1.470b48p-13f;
  y = y * f + 0x1.5f7276p-10f;
  y = y * f + 0x1.3b270ep-7f;
  y = y * f + 0x1.c6ae72p-5f;
  y = y * f + 0x1.ebfbe8p-3f;
  y = y * f + 0x1.62e432p-1f;
  y = y * f + 1.0f;
  y *= bits_as<Vec<float>>(bits_as<IntVec<float>>(shifted) << 23);
  clear_where(x < -126.0f, y);
  return y;
}
#endif

JAX_FLASH_INLINE Vec<double> exp2(const Vec<double>& x) {
  constexpr double kShift = 0x1.8p52 + 1023;
  Vec<double> shifted = x + kShift;
  Vec<double> f = x - (shifted - kShift);
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
  y *= bits_as<Vec<double>>(bits_as<IntVec<double>>(shifted) << 52);
  clear_where(x < -1022.0, y);
  return y;
}

// 2^f - 1 for |f| <= 0.5, with a small relative error near 0 too: f times a Taylor polynomial.
JAX_FLASH_INLINE Vec<float> exp2_minus_1(const Vec<float>& f) {
  Vec<float> y = 0x1.ffcbfcp-17f;
  y = y * f + 0x1.430912p-13f;
  y = y * f + 0x1.5d87fep-10f;
  y = y * f + 0x1.3b2ab6p-7f;
  y = y * f + 0x1.c6b08ep-5f;
  y = y * f + 0x1.ebfbe0p-3f;
  y = y * f + 0x1.62e430p-1f;
  return y * f;
}

JAX_FLASH_INLINE Vec<double> exp2_minus_1(const Vec<double>& f) {
  Vec<double> y = 0x1.314964d5878a9p-44;
  y = y * f + 0x1.816193166d0f9p-40;
  y = y * f + 0x1.c3bd650fc2986p-36;
  y = y * f + 0x1.e8cac7351bb25p-32;
  y = y * f + 0x1.e4cf5158b8ecap-28;
  y = y * f + 0x1.b5253d395e7c4p-24;
  y = y * f + 0x1.62c0223a5c824p-20;
  y = y * f + 0x1.ffcbfc588b0c7p-17;
  y = y * f + 0x1.430912f86c787p-13;
  y = y * f + 0x1.5d87fe78a6731p-10;
  y = y * f + 0x1.3b2ab6fba4e77p-7;
  y = y * f + 0x1.c6b08d704a0c0p-5;
  y = y * f + 0x1.ebfbdff82c58fp-3;
  y = y * f + 0x1.62e42fefa39efp-1;
  return y * f;
}

// tanh(u) and its derivative for y = 2 * u / ln2 >= 0, made of e = 2^y - 1 without cancellation.
template <typename T>
struct Tanh {
  Vec<T> value, derivative;
};
template <typename T>
JAX_FLASH_INLINE Tanh<T> tanh_of_log2(Vec<T> y) {
  // From here on the value is 1; NaN stays.
  put_where(y > T(64), y, T(64));
  constexpr T kShift = sizeof(T) == 4 ? T(0x1.8p23) : T(0x1.8p52);
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  Vec<T> shifted = y + kShift;
  Vec<T> part = exp2_minus_1(Vec<T>(y - (shifted - kShift)));
  Vec<T> power = bits_as<Vec<T>>(bits_as<IntVec<T>>(Vec<T>(T(1))) + (bits_as<IntVec<T>>(shifted) << kMantissa));
  Vec<T> e = part * power + (power - T(1));
  Vec<T> inverse = T(1) / (e + T(2));
  Vec<T> value = e * inverse;
  return {value, (T(1) + value) * (inverse + inverse)};
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
