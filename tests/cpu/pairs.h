// The instructions of AVX512-BF16 that csrc/cpu uses, for vectors of any width, so that the kernels that multiply pairs
// run on processors without it. Included by csrc/cpu/simd.h inside its namespace. Subnormals are kept here.

JAX_FLASH_INLINE U32 odd_elements(const U32& x) { return x & 0xffff0000; }
JAX_FLASH_INLINE U32 even_elements(const U32& x) { return x << 16; }

JAX_FLASH_INLINE Vec<float> multiply_add(const U32& a, const U32& b, const Vec<float>& c) {
  Vec<float> odd = bits_as<Vec<float>>(odd_elements(a)) * bits_as<Vec<float>>(odd_elements(b)) + c;
  return bits_as<Vec<float>>(even_elements(a)) * bits_as<Vec<float>>(even_elements(b)) + odd;
}

// Rounded to bfloat16, in the low half of each lane.
JAX_FLASH_INLINE U32 round_lanes(const Vec<float>& x) { return widen_bits(narrow(bits_as<F32>(x), BFloat16{})); }

JAX_FLASH_INLINE U32 round_row(const Vec<float>& a, const Vec<float>& b) {
  constexpr int W = kWidth<float>;
  uint16_t row[2 * W];
  for (int i = 0; i < W; ++i) {
    row[i] = static_cast<uint16_t>(round_lanes(a)[i]);
    row[W + i] = static_cast<uint16_t>(round_lanes(b)[i]);
  }
  U32 pairs;
  std::memcpy(&pairs, row, sizeof(pairs));
  return pairs;
}

JAX_FLASH_INLINE U32 pair_up(const Vec<float>& a, const Vec<float>& b) { return round_lanes(a) | round_lanes(b) << 16; }

template <bool last>
JAX_FLASH_INLINE U32 interleave_quarters(const U32& a, const U32& b) {
  constexpr int N = 2 * kWidth<float>;
  uint16_t from[2][N], to[N];
  std::memcpy(from[0], &a, sizeof(a));
  std::memcpy(from[1], &b, sizeof(b));
  for (int i = 0; i < N; ++i) to[i] = from[i % 2][i / 8 * 8 + (last ? 4 : 0) + i % 8 / 2];
  U32 pairs;
  std::memcpy(&pairs, to, sizeof(pairs));
  return pairs;
}
