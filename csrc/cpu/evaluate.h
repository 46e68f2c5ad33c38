// Evaluates score and mask functions (functions.h) for the pairs of a tile.
#pragma once

#include <math.h>

#include <algorithm>
#include <bit>

#include "functions.h"
#include "gemm.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

// Operations, on a vector of each argument

using I32 = Native<int32_t, kWidth<float>>;

template <typename Condition, typename V>
JAX_FLASH_INLINE V pick(Condition condition, V x, V y) {
  return condition ? x : y;
}

template <typename V, typename Of>
JAX_FLASH_INLINE V each(V x, Of of) {
  for (int i = 0; i < kWidth<float>; ++i) x[i] = of(x[i]);
  return x;
}
template <typename V, typename Of>
JAX_FLASH_INLINE V each(V x, V y, Of of) {
  for (int i = 0; i < kWidth<float>; ++i) x[i] = of(x[i], y[i]);
  return x;
}

// Divisions of 32-bit integers are exact in double, whose quotients are rounded far below the distance of an inexact
// one from the next integer.
JAX_FLASH_INLINE int32_t quotient_of(int32_t x, int32_t y) {
  return y == 0 ? -1 : y == -1 ? static_cast<int32_t>(-static_cast<uint32_t>(x)) : x / y;
}
JAX_FLASH_INLINE I32 quotient(I32 x, I32 y) {
  using Double = Native<double, kWidth<float>>;
  I32 unusual = (y == 0) | (y == -1), by = pick(unusual, I32{} + 1, y);
  I32 found = __builtin_convertvector(__builtin_convertvector(x, Double) / __builtin_convertvector(by, Double), I32);
  found = pick(y == -1, bits_as<I32>(-bits_as<U32>(x)), found);
  return pick(y == 0, I32{} - 1, found);
}
JAX_FLASH_INLINE I32 remainder(I32 x, I32 y) {
  I32 found = bits_as<I32>(bits_as<U32>(x) - bits_as<U32>(quotient(x, y)) * bits_as<U32>(y));
  return pick(y == 0, x, found);
}
JAX_FLASH_INLINE U32 quotient(U32 x, U32 y) {
  return each(x, y, [](uint32_t a, uint32_t b) { return b == 0 ? ~0u : a / b; });
}
JAX_FLASH_INLINE U32 remainder(U32 x, U32 y) {
  return each(x, y, [](uint32_t a, uint32_t b) { return b == 0 ? a : a % b; });
}

// An index of one of `count` elements, as Python counts: negative ones from the end.
JAX_FLASH_INLINE I32 clamped_index(I32 x, I32 count) {
  x += pick(x < 0, count, I32{});
  return pick(x < 0, I32{}, pick(x < count, x, count - 1));
}

JAX_FLASH_INLINE I32 integer_of(F32 x) {
  I32 fits = (x < 0x1p31f) & (x >= -0x1p31f);
  I32 found = __builtin_convertvector(pick(fits, x, F32{}), I32);
  found = pick(x >= 0x1p31f, I32{} + 2147483647, found);
  return pick(x < -0x1p31f, I32{} - 2147483647 - 1, found);
}
JAX_FLASH_INLINE U32 unsigned_of(F32 x) {
  return each(bits_as<U32>(x), [](uint32_t bits) {
    float value = __builtin_bit_cast(float, bits);
    return value >= 0x1p32f ? ~0u : value > 0 ? static_cast<uint32_t>(value) : 0u;
  });
}

// e^x: x = n ln 2 + f, n an integer, with ln 2 in two parts, so that the difference is exact.
JAX_FLASH_INLINE F32 exponential(F32 x) {
  F32 y = pick(x > 170, F32{} + 170, pick(x < -170, F32{} - 170, x));
  constexpr float kShift = 0x1.8p23f;
  F32 n = (y * 0x1.715476p0f + kShift) - kShift;
  F32 f = (y - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  F32 half = ((n * 0.5f) + kShift) - kShift;  // 2^n in two steps, which may overflow or vanish
  auto power = [](F32 n) { return bits_as<F32>(bits_as<U32>(n + (0x1.8p23f + 127)) << 23); };
  return bits_as<F32>(exp2(bits_as<Vec<float>>(f * 0x1.715476p0f))) * power(half) * power(n - half);
}

// log x, of -1/3 <= f < 1/3 with x = 2^n (1 + f): f - f^2 / 2 + f^3 p(f), p by minimax of the relative error, and ln 2
// in two parts. Less than one unit in the last place away.
JAX_FLASH_INLINE F32 logarithm(F32 x) {
  const I32 subnormal = x < 0x1p-126f;
  const I32 bits = bits_as<I32>(pick(subnormal, x * 0x1p24f, x));
  const I32 n = (bits - 0x3f2aaaab) >> 23;
  const F32 f = bits_as<F32>(bits - (n << 23)) - 1;
  const F32 power = __builtin_convertvector(n, F32) - pick(subnormal, F32{} + 24, F32{});
  F32 p = F32{} - 0x1.080594p-3f;
  for (float c : {0x1.1e66bcp-3f, -0x1.f3113cp-4f, 0x1.1ed716p-3f, -0x1.559dccp-3f, 0x1.99d028p-3f, -0x1.fffefp-3f,
                  0x1.555506p-2f, -0.5f}) {
    p = p * f + c;
  }
  const F32 found = power * 0x1.62e4p-1f + (f + (f * f * p + power * 0x1.7f7d1cp-20f));
  const F32 infinity = F32{} + static_cast<float>(__builtin_inf());
  const F32 unusual = pick(x == 0, -infinity, pick(x < 0, infinity - infinity, x));
  return pick((x > 0) & (x < infinity), found, unusual);
}
// log(1 + x), with what rounding leaves of x.
JAX_FLASH_INLINE F32 logarithm_of_1_plus(F32 x) {
  const F32 sum = 1 + x, found = logarithm(sum);
  return pick((sum > 0) & (sum < static_cast<float>(__builtin_inf())), found + (x - (sum - 1)) / sum, found);
}

JAX_FLASH_INLINE F32 hyperbolic_tangent(F32 x) {
  U32 bits = bits_as<U32>(x);
  Tanh<float> found =
      tanh_of_log2<float>(bits_as<Vec<float>>(bits & 0x7fffffffu) * static_cast<float>(2 * 1.4426950408889634));
  return bits_as<F32>(bits_as<U32>(found.value) | (bits & 0x80000000u));
}

// An argument of a step: lanes, the next line `stride` after.
struct Operand {
  const uint32_t* at;
  ptrdiff_t stride;
};

template <typename X>
JAX_FLASH_INLINE X read(const Operand& from, int line, int lane) {
  X found;
  std::memcpy(&found, from.at + line * from.stride + lane, sizeof(found));
  return found;
}

template <typename Vector>
JAX_FLASH_INLINE void for_vectors(uint32_t* to, int lanes, int lines, Vector vector) {
  for (int line = 0; line < lines; ++line) {
    for (int lane = 0; lane < lanes; lane += kWidth<float>) {
      auto result = vector(line, lane);
      std::memcpy(to + line * lanes + lane, &result, sizeof(result));
    }
  }
}

// Elements in memory, as a vector of what they are computed in; bytes in two steps, as g++ 12 takes them apart in one.
template <typename Stored>
JAX_FLASH_INLINE auto converted(const Native<Stored, kWidth<float>>& x) {
  if constexpr (sizeof(Stored) == 1) {
    using Wider = std::conditional_t<std::is_signed_v<Stored>, int16_t, uint16_t>;
    return bits_as<U32>(__builtin_convertvector(__builtin_convertvector(x, Native<Wider, kWidth<float>>), I32));
  } else {
    return bits_as<U32>(__builtin_convertvector(x, I32));
  }
}
template <>
JAX_FLASH_INLINE auto converted<float>(const Native<float, kWidth<float>>& x) {
  return bits_as<U32>(x);
}

// How 16-bit floats are read; other elements are read as they are.
template <typename Stored>
struct Bits {
  using type = Stored;
};
template <>
struct Bits<Half> {
  using type = uint16_t;
};
template <>
struct Bits<BFloat16> {
  using type = uint16_t;
};

template <typename V>
JAX_FLASH_INLINE V reversed(const V& x) {
  return shuffle(x, x, [](int i) { return kWidth<float> - 1 - i; });
}

// Lines of a block whose lanes read rows of a table: half a vector of a row is read at once.
constexpr int kLinesOfRows = kWidth<float> / 2;

// Whether each lane is `step` more than the one before. Not by the difference of two lanes alone: where indices are
// random, that branch would be, too.
template <int step>
JAX_FLASH_INLINE bool ascend_by(const I32& x) {
  I32 wanted;
  for (int i = 0; i < kWidth<float>; ++i) wanted[i] = i * step;
  return all_of(IntVec<float>(x) == IntVec<float>(wanted + x[0]));
}

// The lanes of a, then those of b.
template <typename V>
JAX_FLASH_INLINE auto joined(const V& a, const V& b) {
  constexpr int kLanes = sizeof(V) / sizeof(a[0]);
  using Both = Native<std::remove_cvref_t<decltype(a[0])>, 2 * kLanes>;
#if __has_builtin(__builtin_shufflevector)
  return [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) -> Both {
    return __builtin_shufflevector(a, b, i...);
  }(std::make_integer_sequence<int, 2 * kLanes>{});
#else  // g++ 11
  Both both;
  std::memcpy(&both, &a, sizeof(a));
  std::memcpy(reinterpret_cast<char*>(&both) + sizeof(a), &b, sizeof(b));
  return both;
#endif
}

// Columns of each half become lanes: one interleaving of vectors i and i + kLinesOfRows / 2 for each bit of the index.
JAX_FLASH_INLINE void transpose_halves(U32 (&x)[kLinesOfRows]) {
  constexpr int H = kLinesOfRows;
#pragma GCC unroll 4
  for (int stage = 1; stage < H; stage *= 2) {
    U32 y[H];
#pragma GCC unroll 8
    for (int i = 0; i < H / 2; ++i) {
      y[2 * i] = shuffle(x[i], x[i + H / 2], [](int l) { return l % 2 * 2 * H + l / H * H + l % H / 2; });
      y[2 * i + 1] = shuffle(x[i], x[i + H / 2], [](int l) { return l % 2 * 2 * H + l / H * H + H / 2 + l % H / 2; });
    }
#pragma GCC unroll 8
    for (int i = 0; i < H; ++i) x[i] = y[i];
  }
}

#if defined(__AVX2__)
// Lanes of a table of two vectors.
JAX_FLASH_INLINE U32 look_up(const U32& index, const U32 (&table)[2]) {
#if defined(__AVX512F__)
  return bits_as<U32>(_mm512_maskz_permutex2var_epi32(0xffff, bits_as<__m512i>(table[0]), bits_as<__m512i>(index),
                                                      bits_as<__m512i>(table[1])));
#else
  auto of = [&](const U32& x) {
    return bits_as<U32>(_mm256_permutevar8x32_epi32(bits_as<__m256i>(x), bits_as<__m256i>(index)));
  };
  return pick(index < 8, of(table[0]), of(table[1]));
#endif
}
#endif

// From the least to the greatest of what vectors hold.
class Extent {
 public:
  explicit JAX_FLASH_INLINE Extent(const I32& x) : low_(x), high_(x) {}
  JAX_FLASH_INLINE void include(const I32& x) {
    low_ = pick(x < low_, x, low_);
    high_ = pick(x > high_, x, high_);
  }
  int32_t first() const {
    int32_t found = low_[0];
    for (int i = 1; i < kWidth<float>; ++i) found = std::min(found, low_[i]);
    return found;
  }
  int64_t count() const {
    int32_t last = high_[0];
    for (int i = 1; i < kWidth<float>; ++i) last = std::max(last, high_[i]);
    return int64_t{last} - first() + 1;
  }

 private:
  I32 low_, high_;
};

// Neighbouring lanes mostly read neighbouring elements, in either order, or where lanes are rows and lines keys, a row
// of a table each, of which the lines read neighbouring elements. Where they do neither, elements are read one by one:
// vpgatherdd took up to 2.7 times as long on an EPYC with AVX-512.
template <typename Stored>
struct Loads {
  using Element = typename Bits<Stored>::type;
  using Elements = Native<Element, kWidth<float>>;

  const Operand index;
  const int32_t* of_lines;  // what is added to the indices of each line; null: nothing
  const Element* elements;

  static JAX_FLASH_INLINE U32 bits_of(const Elements& found) {
    if constexpr (std::is_same_v<Stored, Element>) {
      return converted<Element>(found);
    } else {
      return bits_as<U32>(widen(found, Stored{}));
    }
  }

  JAX_FLASH_INLINE I32 indices(int line, int lane) const {
    const I32 found = read<I32>(index, line, lane);
    return of_lines ? found + of_lines[line] : found;
  }
  // Whether kLinesOfRows lines from this one on read neighbouring elements.
  JAX_FLASH_INLINE bool of_rows(int line, int lane) const {
    constexpr int H = kLinesOfRows;
    if (of_lines) return ascend(of_lines + line, H);
    const I32 first = read<I32>(index, line, lane);
    for (int i = 1; i < H; ++i) {
      if (!all_of(IntVec<float>(read<I32>(index, line + i, lane)) == IntVec<float>(first + i))) return false;
    }
    return true;
  }
  JAX_FLASH_INLINE void load_rows(uint32_t* to, int lanes, int line, int lane) const {
    constexpr int H = kLinesOfRows;
    int32_t at[kWidth<float>];
    put(at, indices(line, lane));
    U32 x[H];
#pragma GCC unroll 8
    for (int i = 0; i < H; ++i) {
      Native<Element, H> a, b;
      std::memcpy(&a, elements + at[i], sizeof(a));
      std::memcpy(&b, elements + at[i + H], sizeof(b));
      x[i] = bits_of(joined(a, b));
    }
    transpose_halves(x);
#pragma GCC unroll 8
    for (int i = 0; i < H; ++i) put(to + i * lanes, x[i]);
  }
  JAX_FLASH_INLINE void load_lanes(uint32_t* to, int line, int lane) const {
    constexpr int W = kWidth<float>;
    const I32 wanted = indices(line, lane);
    int32_t at[W];
    put(at, wanted);
    const bool ascends = ascend_by<1>(wanted);
    if (ascends || ascend_by<-1>(wanted)) {
      Elements found;
      std::memcpy(&found, elements + at[ascends ? 0 : W - 1], sizeof(found));
      put(to, bits_of(ascends ? found : reversed(found)));
    } else if constexpr (std::is_same_v<Stored, Element>) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        if constexpr (std::is_same_v<Stored, float>) {
          to[i] = __builtin_bit_cast(uint32_t, elements[at[i]]);
        } else {
          to[i] = static_cast<uint32_t>(elements[at[i]]);
        }
      }
    } else {
      Elements found;
      for (int i = 0; i < W; ++i) found[i] = elements[at[i]];
      put(to, bits_of(found));
    }
  }
  static JAX_FLASH_INLINE bool ascend(const int32_t* x, int count) {
    for (int i = 1; i < count; ++i) {
      if (x[i] != x[0] + i) return false;
    }
    return true;
  }
  template <typename To, typename V>
  static JAX_FLASH_INLINE void put(To* to, const V& x) {
    std::memcpy(to, &x, sizeof(x));
  }

#if defined(__AVX2__)
  // Reads all where they are few neighbouring elements, which two vectors hold.
  bool look_up_all(uint32_t* to, int lanes, int lines) const {
    constexpr int W = kWidth<float>, kMost = 2 * W;
    Extent extent(indices(0, 0));
    for (int line = 0; line < lines; ++line) {
      for (int lane = 0; lane < lanes; lane += W) {
        extent.include(indices(line, lane));
      }
      if ((line == 0 || line == lines - 1) && extent.count() > kMost) return false;
    }
    const int32_t first = extent.first();
    Element few[kMost]{};
    std::copy_n(elements + first, extent.count(), few);
    U32 table[2];
    for (int i = 0; i < 2; ++i) {
      Elements found;
      std::memcpy(&found, few + i * W, sizeof(found));
      table[i] = bits_of(found);
    }
    for (int line = 0; line < lines; ++line) {
      for (int lane = 0; lane < lanes; lane += W) {
        put(to + line * lanes + lane, look_up(bits_as<U32>(indices(line, lane) - first), table));
      }
    }
    return true;
  }
#endif

  void load(uint32_t* to, int lanes, int lines) const {
    constexpr int W = kWidth<float>, H = kLinesOfRows;
#if defined(__AVX2__)
    if (look_up_all(to, lanes, lines)) return;
#endif
    for (int line = 0; line < lines; line += H) {
      for (int lane = 0; lane < lanes; lane += W) {
        uint32_t* block = to + line * lanes + lane;
        if (line + H <= lines && of_rows(line, lane)) {
          load_rows(block, lanes, line, lane);
        } else {
          for (int i = 0; i < H && line + i < lines; ++i) load_lanes(block + i * lanes, line + i, lane);
        }
      }
    }
  }

  // All elements of a small array, then zeros.
  void load_all(uint32_t* to, int64_t count) const {
    constexpr int W = kWidth<float>;
    for (int i = 0; i < kMostElements; i += W) {
      Elements found{};
      if (i < count) std::memcpy(&found, elements + i, std::min<int64_t>(W, count - i) * sizeof(Element));
      put(to + i, bits_of(found));
    }
  }
};

// Of kMostElements numbers in memory, of which `count` have a meaning, those of some indices.
inline void look_up_elements(uint32_t* to, int lanes, int lines, const Operand& index, const uint32_t* numbers,
                             [[maybe_unused]] int64_t count) {
#if defined(__AVX2__)
  constexpr int W = kWidth<float>;
  if (count <= 4 * W) {
    U32 low[2], high[2];
    std::memcpy(&low, numbers, sizeof(low));
    std::memcpy(&high, numbers + 2 * W, sizeof(high));
    auto of_low = [&](int line, int lane)
                      __attribute__((always_inline)) { return look_up(read<U32>(index, line, lane), low); };
    auto of_both = [&](int line, int lane) __attribute__((always_inline)) {
      const U32 x = read<U32>(index, line, lane);
      return pick(x < 2 * W, look_up(x, low), look_up(x - 2 * W, high));
    };
    return count <= 2 * W ? for_vectors(to, lanes, lines, of_low) : for_vectors(to, lanes, lines, of_both);
  }
#endif
  Loads<uint32_t>{index, nullptr, numbers}.load(to, lanes, lines);
}

// What a step's arguments are for the pairs of a tile.
struct TileOfPairs {
  const int32_t *positions, *heads;  // of the rows
  bool rows_in_lanes;
  int32_t first_key, last_key;  // keys past the last repeat it, so that what they load is in range
  int lanes, lines;  // lanes: whole vectors, of which those past the end repeat a row or are keys past the last
  int32_t batch, call;
  bool has_diagonals;  // rows of one head, from position 0 on at the least, that follow one another

  int rows() const { return rows_in_lanes ? lanes : lines; }
  int keys() const { return rows_in_lanes ? lines : lanes; }
  int diagonals() const { return round_up(lanes + lines - 1, kWidth<float>); }
  // Lanes past the end repeat a row.
  bool rows_follow() const {
    if (positions[0] < 0) return false;
    int count = 1;
    while (count < rows() && positions[count] == positions[count - 1] + 1) ++count;
    for (int i = count; i < rows(); ++i) {
      if (!rows_in_lanes || positions[i] < positions[0] || positions[i] > positions[count - 1]) return false;
    }
    return std::all_of(heads, heads + rows(), [&](int32_t head) { return head == heads[0]; });
  }
};

constexpr int kPairsTogether = 1024;  // that are evaluated together, in whole lines: one at least

// Runs steps in memory of the caller.
class Evaluator {
 public:
  Evaluator() = default;
  Evaluator(const Functions& functions, int most_lanes, int most_lines, const void* const* captured)
      : captured_(captured) {
    const int lines = round_up(most_lines, kWidth<float>);
    at(most_, Side::lane) = most_lanes;
    at(most_, Side::line) = lines;
    at(most_, Side::pair) = std::max(kPairsTogether, most_lanes);
    at(most_, Side::diagonal) = most_lanes + lines;
    at(most_, Side::element) = kMostElements;
    for (int i = 0; i < kSides; ++i) slots_[i] = functions.most_slots(static_cast<Side>(i));
  }
  template <typename Arena>
  void take(Arena& arena) {
    for (int i = 0; i < kSides; ++i) memory_[i] = arena.template take<uint32_t>(int64_t{slots_[i]} * most_[i]);
  }

  // The values of some lines of pairs.
  class Lines {
   public:
    Lines(const Evaluator& evaluator, int lanes, const float* scores, ptrdiff_t stride)
        : evaluator_(evaluator), lanes_(lanes), scores_(scores), stride_(stride) {}
    // Of line i, counted from the first of these.
    template <typename V>
    const V* result(const Value& value, int i) const {
      if (value.slot == kSlotOfScores) return reinterpret_cast<const V*>(scores_ + i * stride_);
      return reinterpret_cast<const V*>(evaluator_.slot(Side::pair, value.slot) + i * lanes_);
    }

   private:
    const Evaluator& evaluator_;
    int lanes_;
    const float* scores_;
    ptrdiff_t stride_;
  };

  // body(line, lines, values) once the results of these lines are there. Scores are in natural units, as functions see
  // them, and have lines `stride` apart.
  template <typename Body>
  void run(const Steps& steps, const TileOfPairs& tile, const float* scores, ptrdiff_t stride, Body body) const {
    int together = std::max(1, kPairsTogether / tile.lanes);
    if (together > kLinesOfRows) together -= together % kLinesOfRows;
    for (Side side : {Side::lane, Side::line, Side::diagonal, Side::element}) {
      for (const Step& step : steps.of[static_cast<int>(side)]) run_step(step, tile, side, 0, 1, nullptr, 0);
    }
    for (int line = 0; line < tile.lines; line += together) {
      const int lines = std::min(together, tile.lines - line);
      for (const Step& step : steps.of[static_cast<int>(Side::pair)]) {
        run_step(step, tile, Side::pair, line, lines, scores + line * stride, stride);
      }
      body(line, lines, Lines(*this, tile.lanes, scores + line * stride, stride));
    }
  }

  // Of lanes, lines, or diagonals from that of the last line and the first lane on.
  template <typename V>
  const V* result(const Value& value) const {
    return reinterpret_cast<const V*>(slot(value.side, value.slot));
  }
  int most_diagonals() const { return at(most_, Side::diagonal); }

 private:
  template <typename T>
  static T& at(T (&of_sides)[kSides], Side side) {
    return of_sides[static_cast<int>(side)];
  }
  uint32_t* slot(Side side, int slot) const { return at(memory_, side) + int64_t{slot} * at(most_, side); }

  __attribute__((noinline)) void run_step(const Step& step, const TileOfPairs& tile, Side side, int line, int lines,
                                          const float* scores, ptrdiff_t score_stride) const {
    int lanes = side == Side::line       ? round_up(tile.lines, kWidth<float>)
                : side == Side::diagonal ? tile.diagonals()
                : side == Side::element  ? kMostElements
                                         : tile.lanes;
    uint32_t* to = slot(side, step.to);
    auto fill = [&](uint32_t bits) { std::fill_n(to, lanes * lines, bits); };
    auto of_rows = [&](const int32_t* rows) {
      std::memcpy(to, rows, sizeof(*rows) * (side == Side::line ? tile.lines : lanes));
      // Lines past the last repeat it, so that what they load is in range.
      if (side == Side::line) std::fill(to + tile.lines, to + lanes, to[tile.lines - 1]);
    };
    Operand args[3];
    for (int i = 0; i < 3; ++i) {
      const Side of = step.args[i].side;
      if (step.args[i].slot == kSlotOfScores) {
        args[i] = {reinterpret_cast<const uint32_t*>(scores), score_stride};
        continue;
      }
      args[i] = {slot(of, step.args[i].slot), of == Side::pair ? tile.lanes : 0};
      // The diagonal of a pair is one further for the next lane, and one back for the next line.
      if (of == Side::diagonal && side == Side::pair) args[i] = {args[i].at + tile.lines - 1 - line, -1};
    }
    // Lines that follow one another are one.
    const bool loads = step.operation >= Operation::load_bool_;
    if (!loads && args[0].stride == lanes && args[1].stride == lanes && args[2].stride == lanes)
      lanes *= lines, lines = 1;
    switch (step.operation) {
      case Operation::score: return;  // no step: see kSlotOfScores
      case Operation::b: return fill(static_cast<uint32_t>(tile.batch));
      case Operation::call: return fill(static_cast<uint32_t>(tile.call));
      case Operation::constant: return fill(static_cast<uint32_t>(step.number));
      case Operation::element: {
        const uint32_t* numbers = slot(Side::element, step.args[1].slot);
        return look_up_elements(to, lanes, lines, args[0], numbers, step.elements);
      }
      case Operation::distance: return distances(reinterpret_cast<int32_t*>(to), tile);
      case Operation::h:
        if (side == Side::diagonal) return fill(static_cast<uint32_t>(tile.heads[0]));
        return of_rows(tile.heads);
      case Operation::q: return of_rows(tile.positions);
      case Operation::kv:
        for (int i = 0; i < lanes; ++i) to[i] = static_cast<uint32_t>(std::min(tile.first_key + i, tile.last_key));
        return;
      case Operation::spread:
        for (int i = 0; i < lines; ++i) std::fill_n(to + i * lanes, lanes, args[0].at[line + i]);
        return;
#define JAX_FLASH_UNARY(name, R, X, ...)                                                            \
  case Operation::name##_:                                                                          \
    return for_vectors(to, lanes, lines, [&](int i, int lane) __attribute__((always_inline)) -> R { \
      const X x = read<X>(args[0], i, lane);                                                        \
      return bits_as<R>(__VA_ARGS__);                                                               \
    });
#define JAX_FLASH_BINARY(name, R, X, Y, ...)                                                        \
  case Operation::name##_:                                                                          \
    return for_vectors(to, lanes, lines, [&](int i, int lane) __attribute__((always_inline)) -> R { \
      const X x = read<X>(args[0], i, lane);                                                        \
      const Y y = read<Y>(args[1], i, lane);                                                        \
      return bits_as<R>(__VA_ARGS__);                                                               \
    });
#define JAX_FLASH_TERNARY(name, R, X, Y, Z, ...)                                                    \
  case Operation::name##_:                                                                          \
    return for_vectors(to, lanes, lines, [&](int i, int lane) __attribute__((always_inline)) -> R { \
      const X x = read<X>(args[0], i, lane);                                                        \
      const Y y = read<Y>(args[1], i, lane);                                                        \
      const Z z = read<Z>(args[2], i, lane);                                                        \
      return bits_as<R>(__VA_ARGS__);                                                               \
    });
#define JAX_FLASH_LIBRARY(name, function) JAX_FLASH_UNARY(name, F, F, each(x, [](float a) { return ::function(a); }))
#define JAX_FLASH_LOAD(name, Stored) \
  case Operation::name##_: return load<Stored>(step, tile, side, args[0], to, lanes, line, lines);
        JAX_FLASH_CPU_LIBRARY(JAX_FLASH_LIBRARY)
        JAX_FLASH_CPU_OPERATIONS(JAX_FLASH_UNARY, JAX_FLASH_BINARY, JAX_FLASH_TERNARY)
        JAX_FLASH_CPU_LOADS(JAX_FLASH_LOAD)
#undef JAX_FLASH_LOAD
#undef JAX_FLASH_LIBRARY
#undef JAX_FLASH_TERNARY
#undef JAX_FLASH_BINARY
#undef JAX_FLASH_UNARY
    }
  }

  // Of pairs past the ends that of one before them, so that what these load is in range.
  static void distances(int32_t* to, const TileOfPairs& tile) {
    const int64_t first = tile.positions[0], first_key = tile.first_key;
    const int64_t last = *std::max_element(tile.positions, tile.positions + tile.rows());
    const int64_t last_key = std::min<int64_t>(tile.last_key, first_key + tile.keys() - 1);
    for (int i = 0; i < tile.diagonals(); ++i) {
      const int64_t beyond = tile.rows_in_lanes ? i - (tile.lines - 1) : tile.lines - 1 - i;
      to[i] = static_cast<int32_t>(std::clamp(first - first_key + beyond, first - last_key, last - first_key));
    }
  }

  template <typename Stored>
  void load(const Step& step, const TileOfPairs& tile, Side side, const Operand& index, uint32_t* to, int lanes,
            int line, int lines) const {
    using Element = typename Bits<Stored>::type;
    const bool has_lines = side == Side::pair && step.args[1].side == Side::line;
    const uint32_t* of_lines = has_lines ? slot(Side::line, step.args[1].slot) + line : nullptr;
    const Loads<Stored> loads{index, reinterpret_cast<const int32_t*>(of_lines),
                              static_cast<const Element*>(captured_[step.number]) + tile.call * step.of_call};
    if (side == Side::element) return loads.load_all(to, step.elements);
    loads.load(to, lanes, lines);
  }

  using F = F32;
  using I = I32;
  using U = U32;

  const void* const* captured_ = nullptr;
  int most_[kSides]{}, slots_[kSides]{};  // by side: numbers in a slot, and slots
  uint32_t* memory_[kSides]{};
};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
