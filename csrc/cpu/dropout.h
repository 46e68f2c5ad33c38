// Which weights dropout keeps: bits of a counter-based generator, Philox 4x32 with 7 rounds.
//
// A call of the generator serves rows t and t + 8 and keys s, s + 8, s + 16, s + 24. Counters are in 64-bit lanes,
// where one multiplication gives both halves of the product. The result is one bit for each pair, which kernels of any
// shape read: 64 calls make the bits of 16 rows and 32 keys.
#pragma once

#include <algorithm>

#include "simd.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

constexpr int kDropoutRows = 16;
constexpr int kDropoutKeys = 32;

constexpr int kPhiloxLanes = kWidth<double>;
constexpr uint32_t kPhiloxRounds = 7;

class Dropout {
  using U64 = Native<uint64_t, kPhiloxLanes>;

 public:
  explicit Dropout(double rate)
      : threshold_(rate > 0 ? static_cast<uint64_t>(std::min(65535.0, __builtin_floor(65536 * rate + 0.5))) : 0),
        factor_(65536.0 / static_cast<double>(65536 - threshold_)) {}

  bool active() const { return threshold_ != 0; }
  // What kept weights are multiplied by.
  double factor() const { return factor_; }

  // `seed` is the head's pair.
  void seed(const unsigned* seed) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      keys_[round][0] = seed[0] + round * 0x9E3779B9u;
      keys_[round][1] = seed[1] + round * 0xBB67AE85u;
    }
  }

  // Writes bit t of bits[s] for rows first_row + t and keys first_key + s, where 0 <= s < kDropoutKeys and bits[s] is
  // at bits + s * stride. first_row is a multiple of kDropoutRows, first_key one of kDropoutKeys.
  void bits_of_rows(int64_t first_row, int64_t first_key, uint16_t* bits, int64_t stride) const {
    for (int j = 0; j < 8; ++j) {
      uint8_t kept[4][2];
      eight<true>(static_cast<uint32_t>(first_row / 2), static_cast<uint32_t>(first_key / 4) + j, kept);
      for (int word = 0; word < 4; ++word) {
        bits[(word * 8 + j) * stride] = static_cast<uint16_t>(kept[word][0] | kept[word][1] << 8);
      }
    }
  }

  // Writes bit s of bits[t] for the rows t and t + 8, where bits[t] is at bits + t * stride; first_row, which is t
  // rounded down to a multiple of kDropoutRows, and first_key as above.
  void bits_of_keys(int64_t first_row, int64_t first_key, int t, uint32_t* bits, int64_t stride) const {
    uint8_t kept[4][2];
    eight<false>(static_cast<uint32_t>(first_row / 2) + t, static_cast<uint32_t>(first_key / 4), kept);
    for (int half = 0; half < 2; ++half) {
      uint32_t all = 0;
      for (int word = 0; word < 4; ++word) all |= uint32_t{kept[word][half]} << (8 * word);
      bits[(t + 8 * half) * stride] = all;
    }
  }

 private:
  // The products of the low halves of the lanes.
  static JAX_FLASH_INLINE U64 multiply(const U64& a, uint32_t b) {
#if defined(__AVX512F__)
    return bits_as<U64>(_mm512_maskz_mul_epu32(0xff, bits_as<__m512i>(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
    return bits_as<U64>(_mm256_mul_epu32(bits_as<__m256i>(a), _mm256_set1_epi64x(b)));
#elif defined(__SSE2__)
    return bits_as<U64>(_mm_mul_epu32(bits_as<__m128i>(a), _mm_set1_epi64x(b)));
#elif defined(__ARM_NEON)
    return bits_as<U64>(vmull_n_u32(vmovn_u64(bits_as<uint64x2_t>(a)), b));
#else
    return (a & 0xffffffff) * b;
#endif
  }

  // Bit i is the sign of lane i.
  static JAX_FLASH_INLINE uint32_t signs(const U64& a) {
#if defined(__AVX512DQ__)
    return _mm512_movepi64_mask(bits_as<__m512i>(a));
#elif defined(__AVX2__)
    return _mm256_movemask_pd(bits_as<__m256d>(a));
#elif defined(__SSE2__)
    return _mm_movemask_pd(bits_as<__m128d>(a));
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < kPhiloxLanes; ++lane) bits |= static_cast<uint32_t>(a[lane] >> 63) << lane;
    return bits;
#endif
  }

  // kept[word][half]: bit l of 8 is for the counter (i + l, j), or (i, j + l).
  template <bool along_rows>
  JAX_FLASH_INLINE void eight(uint32_t i, uint32_t j, uint8_t (&kept)[4][2]) const {
    for (int word = 0; word < 4; ++word) kept[word][0] = kept[word][1] = 0;
    for (int first = 0; first < 8; first += kPhiloxLanes) {
      U64 lanes;
      for (int lane = 0; lane < kPhiloxLanes; ++lane) lanes[lane] = first + lane;
      // The upper halves of the lanes are not used, so a carry into them does no harm.
      U64 c[4] = {along_rows ? lanes + i : U64{} + i, along_rows ? U64{} + j : lanes + j, U64{}, U64{}};
#pragma GCC unroll 7
      for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
        U64 product0 = multiply(c[0], 0xD2511F53), product2 = multiply(c[2], 0xCD9E8D57);
        U64 next0 = (product2 >> 32) ^ c[1] ^ keys_[round][0];
        U64 next2 = (product0 >> 32) ^ c[3] ^ keys_[round][1];
        c[0] = next0;
        c[1] = product2;
        c[2] = next2;
        c[3] = product0;
      }
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word) {
        // Kept where 16 bits >= threshold: where threshold - 1 - bits is negative.
        U64 low = threshold_ - 1 - (c[word] & 0xffff), high = threshold_ - 1 - ((c[word] >> 16) & 0xffff);
        kept[word][0] |= static_cast<uint8_t>(signs(low) << first);
        kept[word][1] |= static_cast<uint8_t>(signs(high) << first);
      }
    }
  }

  uint64_t threshold_;
  double factor_;
  uint64_t keys_[kPhiloxRounds][2];
};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
