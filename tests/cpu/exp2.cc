// The largest error of exp2 over every float, in units in the last place, and over a sample of doubles.
//
//   exp2 FLOAT DOUBLE   exits with 1 when an error is larger, or when a special value comes out wrong
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../../csrc/cpu/simd.h"

namespace kernels = jax_flash::cpu::JAX_FLASH_ISA;
using kernels::kWidth;
using kernels::Vec;

namespace {

bool failed = false;

void fail(const char* what, double x, double got) {
  std::printf("%s: exp2(%a) = %a\n", what, x, got);
  failed = true;
}

// Units in the last place by which y is off 2^x, x in [-126, 127.5). The double version is right to 2^-52.
Vec<double> error_of(const Vec<double>& x, const Vec<double>& y) {
  constexpr double kShift = 0x1.8p52;
  Vec<double> nearest = (x + kShift) - kShift, above = 0;
  kernels::put_where(nearest > x, above, 1.0);
  Vec<double> n = nearest - above;  // floor(x)
  kernels::IntVec<double> bits = kernels::bits_as<kernels::IntVec<double>>(Vec<double>((1023 + 23 - n) + kShift));
  Vec<double> unit = kernels::bits_as<Vec<double>>(bits << 52);
  return kernels::abs(y - kernels::exp2(x)) * unit;
}

// Calls look(x, exp2(x)), vectors, for the floats whose bits are first, first + 1, ..., last - 1: a vector or more. The
// last vector holds what the one before it has, too.
template <typename Look>
void every(uint64_t first, uint64_t last, const Look& look) {
  constexpr uint64_t W = kWidth<float>;
  using Bits = Vec<uint32_t>;
  const Bits lanes = kernels::iota<uint32_t>();
  for (uint64_t bits = first; bits < last; bits += W) {
    auto x = kernels::bits_as<Vec<float>>(Bits(lanes + static_cast<uint32_t>(std::min(bits, last - W))));
    look(x, kernels::exp2(x));
  }
}

// The largest error over the floats whose bits are first, first + 1, ..., last - 1, all in [-126, 127.5).
double largest(uint32_t first, uint32_t last) {
  constexpr int W = kWidth<float>, D = kWidth<double>;
  Vec<double> most = 0;
  every(first, last, [&](const Vec<float>& vector, const Vec<float>& result) {
    float x[W], y[W];
    kernels::store(x, vector);
    kernels::store(y, result);
    for (int i = 0; i < W; i += D) {
      double wide_x[D], wide_y[D];
      std::copy_n(x + i, D, wide_x);
      std::copy_n(y + i, D, wide_y);
      most = kernels::max(most, error_of(kernels::load(wide_x), kernels::load(wide_y)));
    }
  });
  return kernels::largest_lane(most);
}

// Of the floats whose bits are first, first + 1, ..., last - 1, exp2 is what it has to be in every lane.
template <typename Right>
void all(const char* what, uint64_t first, uint64_t last, const Right& right) {
  every(first, last, [&](const Vec<float>& x, const Vec<float>& y) {
    if (kernels::all_of(right(y))) return;
    for (int i = 0; i < kWidth<float>; ++i) {
      if (!kernels::all_of(right(Vec<float>(y[i])))) fail(what, x[i], y[i]);
    }
    std::exit(1);
  });
}

float one(float x) { return kernels::exp2(Vec<float>(x))[0]; }

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  constexpr uint32_t kMinus126 = 0xc2fc0000, kMinusZero = 0x80000000, kEnd = 0x42ff0000, kInfinity = 0x7f800000;
  // Most floats are less than 2^-25, where 2^x is 1 but for 0.18 units in the last place: no reference is needed there.
  constexpr uint32_t kTiny = 0x33000000;
  for (uint64_t sign : {0u, kMinusZero}) {
    all("of next to nothing", sign, sign | kTiny, [](const Vec<float>& y) { return y == 1.0f; });
  }
  double error = std::max(largest(kTiny, kEnd), largest(kMinusZero | kTiny, kMinus126 + 1));
  if (!(error <= std::atof(arguments[1]))) fail("error of float too large", error, 0);

  // Below -126, minus infinity included, exactly 0; NaN gives NaN.
  all("below -126", kMinus126 + 1, (kInfinity | kMinusZero) + 1, [](const Vec<float>& y) { return y == 0.0f; });
  for (uint64_t sign : {0u, kMinusZero}) {
    all("of NaN", sign | (kInfinity + 1), (sign | (kMinusZero - 1)) + 1, [](const Vec<float>& y) { return y != y; });
  }

  std::mt19937_64 generator(0);
  std::uniform_real_distribution<double> draw(-1022, 1023);
  double error_of_double = 0;
  for (int i = 0; i < 2000000; ++i) {
    double x = i % 2 ? draw(generator) : draw(generator) / 1024, got = kernels::exp2(Vec<double>(x))[0];
    long double want = exp2l(x);
    double off = static_cast<double>(std::abs(got - want) * std::ldexp(1.0L, 52 - static_cast<int>(std::floor(x))));
    error_of_double = std::max(error_of_double, off);
  }
  if (!(error_of_double <= std::atof(arguments[2]))) fail("error of double too large", error_of_double, 0);
  if (one(-__builtin_inff()) != 0 || kernels::exp2(Vec<double>(-__builtin_inf()))[0] != 0) fail("minus infinity", 0, 1);
  std::printf("float %.4f double %.4f\n", error, error_of_double);
  return failed;
}
