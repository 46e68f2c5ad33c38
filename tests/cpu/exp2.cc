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
  Vec<double> n = kernels::stdx::floor(x);
  kernels::IntVec<double> bits = kernels::bits_as<kernels::IntVec<double>>(Vec<double>((1023 + 23 - n) + 0x1.8p52));
  Vec<double> unit = kernels::bits_as<Vec<double>>(bits << 52);
  return kernels::stdx::abs(y - kernels::exp2(x)) * unit;
}

// The largest error over the floats whose bits are first, first + 1, ..., last - 1, all in [-126, 127.5).
double largest(uint32_t first, uint32_t last) {
  constexpr int W = kWidth<float>, D = kWidth<double>;
  Vec<double> most = 0;
  for (uint32_t bits = first; bits < last; bits += W) {
    float x[W], y[W];
    for (int i = 0; i < W; ++i) x[i] = kernels::bits_as<float>(std::min(bits + i, last - 1));
    kernels::store(y, kernels::exp2(kernels::load(x)));
    for (int i = 0; i < W; i += D) {
      Vec<double> wide_x(x + i, kernels::stdx::element_aligned), wide_y(y + i, kernels::stdx::element_aligned);
      most = kernels::stdx::max(most, error_of(wide_x, wide_y));
    }
  }
  return kernels::stdx::hmax(most);
}

float one(float x) { return kernels::exp2(Vec<float>(x))[0]; }

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  constexpr uint32_t kMinus126 = 0xc2fc0000, kMinusZero = 0x80000000, kEnd = 0x42ff0000, kInfinity = 0x7f800000;
  double error = std::max(largest(0, kEnd), largest(kMinusZero, kMinus126 + 1));
  if (!(error <= std::atof(arguments[1]))) fail("error of float too large", error, 0);

  // Below -126, minus infinity included, exactly 0; NaN gives NaN.
  for (uint32_t bits = kMinus126 + 1; bits <= (kInfinity | kMinusZero); ++bits) {
    float x = kernels::bits_as<float>(bits);
    if (one(x) != 0) return fail("below -126", x, one(x)), 1;
  }
  for (uint32_t sign : {0u, kMinusZero}) {
    for (uint32_t bits = kInfinity + 1; bits < kMinusZero; ++bits) {
      float x = kernels::bits_as<float>(bits | sign);
      if (one(x) == one(x)) return fail("of NaN", x, one(x)), 1;
    }
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
