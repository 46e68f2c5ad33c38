// Vectors of one register, made of the vector types that g++ and clang have in common: a class, since that gives
// comparisons the masks of AVX-512, and converts from a number. Included by isa.cc only, once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define JAX_FLASH_INLINE inline __attribute__((always_inline))

namespace jax_flash::cpu::JAX_FLASH_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
template <typename T>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));
template <typename T>
using Int = std::conditional_t<
    sizeof(T) == 8, int64_t,
    std::conditional_t<sizeof(T) == 4, int32_t, std::conditional_t<sizeof(T) == 2, int16_t, int8_t>>>;

// The compiler's own vectors, of any width. Their comparisons are vectors of 0 and -1.
template <typename T, int lanes>
struct NativeVector {
  typedef T type __attribute__((vector_size(lanes * sizeof(T))));
};
template <typename T, int lanes>
using Native = typename NativeVector<T, lanes>::type;

template <typename To, typename From>
JAX_FLASH_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// Lane i is lane from(i) of a or, counted on, of b; `from` captures nothing.
template <typename V, typename From>
JAX_FLASH_INLINE V shuffle(const V& a, const V& b, From) {
  constexpr int kLanes = sizeof(a) / sizeof(a[0]);
  return [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, From{}(i)...);
#else  // g++ 11
    using Index = Native<Int<std::remove_cvref_t<decltype(a[0])>>, kLanes>;
    return __builtin_shuffle(a, b, Index{From{}(i)...});
#endif
  }(std::make_integer_sequence<int, kLanes>{});
}

// Which lanes fulfil a condition, for elements of the size of I: a bit each where instructions take such masks, else
// 0 and -1.
#if defined(__AVX512F__)
template <typename I>
using MaskLanes = std::conditional_t<sizeof(I) == 8, __mmask8, __mmask16>;
#else
template <typename I>
using MaskLanes = Native<I, kWidth<I>>;
#endif

template <typename I>
struct Mask {
  using Lanes = MaskLanes<I>;
  Lanes lanes;

  friend JAX_FLASH_INLINE Mask operator&&(const Mask& a, const Mask& b) {
    return {static_cast<Lanes>(a.lanes & b.lanes)};
  }
  friend JAX_FLASH_INLINE Mask operator||(const Mask& a, const Mask& b) {
    return {static_cast<Lanes>(a.lanes | b.lanes)};
  }
  friend JAX_FLASH_INLINE Mask operator!(const Mask& a) { return {static_cast<Lanes>(~a.lanes)}; }
};

template <typename I>
JAX_FLASH_INLINE bool any_of(const Mask<I>& mask) {
#if defined(__AVX512F__)
  return mask.lanes != 0;
#else
  uint64_t words[kVectorBytes / 8], any = 0;
  std::memcpy(words, &mask, sizeof(words));
  for (uint64_t word : words) any |= word;
  return any != 0;
#endif
}
template <typename I>
JAX_FLASH_INLINE bool all_of(const Mask<I>& mask) {
  return !any_of(!mask);
}

// As _mm512_cmp_ps_mask() and _mm512_cmp_epi32_mask() both number them. NaN is equal to nothing and not less.
enum Comparison { kEqual = 0, kLess = 1, kLessOrEqual = 2, kNotEqual = 4 };

template <Comparison how, typename T>
JAX_FLASH_INLINE Mask<Int<T>> compare(const Native<T, kWidth<T>>& a, const Native<T, kWidth<T>>& b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return {_mm512_cmp_ps_mask(bits_as<__m512>(a), bits_as<__m512>(b), how)};
  } else if constexpr (std::is_same_v<T, double>) {
    return {_mm512_cmp_pd_mask(bits_as<__m512d>(a), bits_as<__m512d>(b), how)};
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return {_mm512_cmp_epi32_mask(bits_as<__m512i>(a), bits_as<__m512i>(b), how)};
  } else {
    static_assert(std::is_same_v<T, int64_t>);
    return {_mm512_cmp_epi64_mask(bits_as<__m512i>(a), bits_as<__m512i>(b), how)};
  }
#else
  if constexpr (how == kEqual) return {a == b};
  if constexpr (how == kLess) return {a < b};
  if constexpr (how == kLessOrEqual) return {a <= b};
  if constexpr (how == kNotEqual) return {a != b};
#endif
}

template <typename T>
class Vec {
 public:
  using Lanes = Native<T, kWidth<T>>;
  Lanes lanes;

  Vec() = default;
  JAX_FLASH_INLINE Vec(T all) : lanes(all - Lanes{}) {}  // not a sum with 0, which would make +0 of -0
  JAX_FLASH_INLINE Vec(const Lanes& of) : lanes(of) {}

  JAX_FLASH_INLINE T operator[](int lane) const { return lanes[lane]; }

#define JAX_FLASH_OPERATOR(op)                                                                       \
  friend JAX_FLASH_INLINE Vec operator op(const Vec& a, const Vec& b) { return a.lanes op b.lanes; } \
  JAX_FLASH_INLINE Vec& operator op## = (const Vec& b) { return *this = *this op b; }
  JAX_FLASH_OPERATOR(+)
  JAX_FLASH_OPERATOR(-)
  JAX_FLASH_OPERATOR(*)
  JAX_FLASH_OPERATOR(/)
  JAX_FLASH_OPERATOR(&)
  JAX_FLASH_OPERATOR(|)
#undef JAX_FLASH_OPERATOR
  friend JAX_FLASH_INLINE Vec operator<<(const Vec& a, int bits) { return a.lanes << bits; }

  using Condition = Mask<Int<T>>;
  friend JAX_FLASH_INLINE Condition operator==(const Vec& a, const Vec& b) {
    return compare<kEqual, T>(a.lanes, b.lanes);
  }
  friend JAX_FLASH_INLINE Condition operator!=(const Vec& a, const Vec& b) {
    return compare<kNotEqual, T>(a.lanes, b.lanes);
  }
  friend JAX_FLASH_INLINE Condition operator<(const Vec& a, const Vec& b) {
    return compare<kLess, T>(a.lanes, b.lanes);
  }
  friend JAX_FLASH_INLINE Condition operator<=(const Vec& a, const Vec& b) {
    return compare<kLessOrEqual, T>(a.lanes, b.lanes);
  }
  friend JAX_FLASH_INLINE Condition operator>(const Vec& a, const Vec& b) { return b < a; }
  friend JAX_FLASH_INLINE Condition operator>=(const Vec& a, const Vec& b) { return b <= a; }
};
template <typename T>
using IntVec = Vec<Int<T>>;

// A vector anywhere in memory. Not by std::memcpy(), for which g++ 12 loads two halves, stores them next to each other
// and loads these: 1.28 times the time of a backward with segments.
template <typename T>
struct Unaligned {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
template <typename T>
JAX_FLASH_INLINE Vec<T> load(const T* p) {
  const typename Vec<T>::Lanes lanes = *reinterpret_cast<const typename Unaligned<T>::type*>(p);
  return lanes;
}
template <typename T>
JAX_FLASH_INLINE void store(T* p, const Vec<T>& v) {
  *reinterpret_cast<typename Unaligned<T>::type*>(p) = v.lanes;
}

// Puts `value` into the lanes of x where `condition` holds. By AVX-512 as integers: g++ 12 moves a constant there from
// a general register, and so keeps others in vector registers: 0.97 of the time of a backward with a mask.
template <typename T>
JAX_FLASH_INLINE void put_where(const Mask<Int<T>>& condition, Vec<T>& x, std::type_identity_t<T> value) {
  const Vec<T> values = value;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    x = bits_as<Vec<T>>(_mm512_mask_mov_epi32(bits_as<__m512i>(x), condition.lanes, bits_as<__m512i>(values)));
  } else {
    x = bits_as<Vec<T>>(_mm512_mask_mov_epi64(bits_as<__m512i>(x), condition.lanes, bits_as<__m512i>(values)));
  }
#else
  x = condition.lanes ? values.lanes : x.lanes;
#endif
}

// Puts 0 into the lanes of x where `condition` holds. AVX2's blends cost more than vandnps, which g++ has to be told.
template <typename T>
JAX_FLASH_INLINE void clear_where(const Mask<Int<T>>& condition, Vec<T>& x) {
#if defined(__AVX512F__)
  put_where(condition, x, T(0));
#elif defined(__AVX__)
  x = bits_as<Vec<T>>(_mm256_andnot_ps(bits_as<__m256>(condition.lanes), bits_as<__m256>(x)));
#else
  x = bits_as<Vec<T>>(~condition.lanes & bits_as<Native<Int<T>, kWidth<T>>>(x));
#endif
}

// `make(i)` in each lane i.
template <typename T, typename Make>
JAX_FLASH_INLINE Vec<T> generate(Make make) {
  return [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    return Vec<T>(typename Vec<T>::Lanes{make(i)...});
  }(std::make_integer_sequence<int, kWidth<T>>{});
}

// 0, 1, 2, ... to compare with the index where a row's kept lanes begin or end.
template <typename T>
JAX_FLASH_INLINE Vec<T> iota() {
  return generate<T>([](int i) __attribute__((always_inline)) { return static_cast<T>(i); });
}

// Lane i is not 0 where bit i of `bits` is set.
template <typename T>
JAX_FLASH_INLINE IntVec<T> spread_bits(uint32_t bits) {
  return IntVec<T>(static_cast<Int<T>>(bits)) &
         generate<Int<T>>([](int i) __attribute__((always_inline)) { return Int<T>{1} << i; });
}

template <typename T>
JAX_FLASH_INLINE Vec<T> abs(const Vec<T>& x) {
  return bits_as<Vec<T>>(bits_as<IntVec<T>>(x) & std::numeric_limits<Int<T>>::max());
}

// With NaN in either, b.
template <typename T>
JAX_FLASH_INLINE Vec<T> max(const Vec<T>& a, const Vec<T>& b) {
  return a.lanes > b.lanes ? a.lanes : b.lanes;
}

// Combines the lanes, first those half a vector apart, then a quarter, ...
template <typename V, typename Combine>
JAX_FLASH_INLINE auto combine_lanes(const V& x, Combine combine) {
  using T = std::remove_cvref_t<decltype(x[0])>;
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {  // masked as in widen_bits() of simd.h
    using Half = Native<T, 32 / sizeof(T)>;
    const __m512d all = bits_as<__m512d>(x);
    return combine_lanes(combine(bits_as<Half>(_mm512_maskz_extractf64x4_pd(0xff, all, 0)),
                                 bits_as<Half>(_mm512_maskz_extractf64x4_pd(0xff, all, 1))),
                         combine);
  }
#endif
#if defined(__AVX__)
  if constexpr (sizeof(V) == 32) {
    using Half = Native<T, 16 / sizeof(T)>;
    const __m256d all = bits_as<__m256d>(x);
    return combine_lanes(
        combine(bits_as<Half>(_mm256_castpd256_pd128(all)), bits_as<Half>(_mm256_extractf128_pd(all, 1))), combine);
  }
#endif
  if constexpr (sizeof(V) == 16) {
    constexpr int kLanes = 16 / sizeof(T);
    V combined = combine(x, shuffle(x, x, [](int i) { return (i + kLanes / 2) % kLanes; }));
    if constexpr (kLanes == 4) combined = combine(combined, shuffle(combined, combined, [](int i) { return i ^ 1; }));
    return combined[0];
  }
}
template <typename T>
JAX_FLASH_INLINE T sum_of_lanes(const Vec<T>& x) {
  return combine_lanes(x.lanes, [](const auto& a, const auto& b) __attribute__((always_inline)) { return a + b; });
}
template <typename T>
JAX_FLASH_INLINE T largest_lane(const Vec<T>& x) {
  return combine_lanes(x.lanes,
                       [](const auto& a, const auto& b) __attribute__((always_inline)) { return a > b ? a : b; });
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
