// THE table of operations that score and mask functions are made of on CPUs.
//
//   UNARY(name, R, X, expression), BINARY(name, R, X, Y, expression), TERNARY(name, R, X, Y, Z, expression)
//
// Vectors of results R for vectors x, y, z of arguments: F float, I int32, U uint32. Booleans are I, 0 or -1. The
// expressions are read by evaluate.h alone, and the names by functions.cc and, through the Python module, by
// jax_flash/_functions/cpu.py. Operations are JAX's: integers wrap around, a division by 0 gives -1 and its remainder
// the dividend, a maximum with NaN is NaN, and conversions to integers saturate.
#pragma once

// Those of <cmath>, element by element.
#define JAX_FLASH_CPU_LIBRARY(UNARY) \
  UNARY(expm1_f, expm1f)             \
  UNARY(sin_f, sinf)                 \
  UNARY(cos_f, cosf)                 \
  UNARY(tan_f, tanf)                 \
  UNARY(cbrt_f, cbrtf)               \
  UNARY(erf_f, erff)                 \
  UNARY(erfc_f, erfcf)               \
  UNARY(sinh_f, sinhf)               \
  UNARY(cosh_f, coshf)               \
  UNARY(asin_f, asinf)               \
  UNARY(acos_f, acosf)               \
  UNARY(atan_f, atanf)               \
  UNARY(asinh_f, asinhf)             \
  UNARY(acosh_f, acoshf)             \
  UNARY(atanh_f, atanhf)             \
  UNARY(sqrt_f, sqrtf) UNARY(floor_f, floorf) UNARY(ceil_f, ceilf) UNARY(round_f, roundf) UNARY(rint_f, rintf)

#define JAX_FLASH_CPU_OPERATIONS(UNARY, BINARY, TERNARY)                                                        \
  UNARY(copy, U, U, x)                                                                                          \
  TERNARY(select, U, U, U, U, (x & z) | (~x & y))                                                               \
  UNARY(not, U, U, ~x)                                                                                          \
  BINARY(and, U, U, U, x& y)                                                                                    \
  BINARY(or, U, U, U, x | y)                                                                                    \
  BINARY(xor, U, U, U, x ^ y)                                                                                   \
  BINARY(add_i, U, U, U, x + y)                                                                                 \
  BINARY(sub_i, U, U, U, x - y)                                                                                 \
  BINARY(mul_i, U, U, U, x* y)                                                                                  \
  UNARY(neg_i, U, U, -x)                                                                                        \
  UNARY(abs_i, I, I, pick(x < 0, bits_as<I>(-bits_as<U>(x)), x))                                                \
  UNARY(sign_i, I, I, (x < 0) - (x > 0))                                                                        \
  BINARY(max_i, I, I, I, pick(x > y, x, y))                                                                     \
  BINARY(min_i, I, I, I, pick(x < y, x, y))                                                                     \
  BINARY(index, I, I, I, clamped_index(x, y))                                                                   \
  BINARY(div_i, I, I, I, quotient(x, y))                                                                        \
  BINARY(rem_i, I, I, I, remainder(x, y))                                                                       \
  BINARY(max_u, U, U, U, pick(x > y, x, y))                                                                     \
  BINARY(min_u, U, U, U, pick(x < y, x, y))                                                                     \
  BINARY(div_u, U, U, U, quotient(x, y))                                                                        \
  BINARY(rem_u, U, U, U, remainder(x, y))                                                                       \
  BINARY(shift_left, U, U, U, pick(y < 32, x << (y & 31), U{}))                                                 \
  BINARY(shift_right_logical, U, U, U, pick(y < 32, x >> (y & 31), U{}))                                        \
  BINARY(shift_right_arithmetic, I, I, U, x >> bits_as<I>(pick(y < 32, y, 31 + U{})))                           \
  UNARY(population_count, U, U, each<U>(x, [](uint32_t a) { return static_cast<uint32_t>(std::popcount(a)); })) \
  UNARY(clz, U, U, each<U>(x, [](uint32_t a) { return static_cast<uint32_t>(std::countl_zero(a)); }))           \
  BINARY(eq_i, I, I, I, x == y)                                                                                 \
  BINARY(ne_i, I, I, I, x != y)                                                                                 \
  BINARY(lt_i, I, I, I, x < y)                                                                                  \
  BINARY(le_i, I, I, I, x <= y)                                                                                 \
  BINARY(gt_i, I, I, I, x > y)                                                                                  \
  BINARY(ge_i, I, I, I, x >= y)                                                                                 \
  BINARY(lt_u, I, U, U, x < y)                                                                                  \
  BINARY(le_u, I, U, U, x <= y)                                                                                 \
  BINARY(gt_u, I, U, U, x > y)                                                                                  \
  BINARY(ge_u, I, U, U, x >= y)                                                                                 \
  BINARY(eq_f, I, F, F, x == y)                                                                                 \
  BINARY(ne_f, I, F, F, x != y)                                                                                 \
  BINARY(lt_f, I, F, F, x < y)                                                                                  \
  BINARY(le_f, I, F, F, x <= y)                                                                                 \
  BINARY(gt_f, I, F, F, x > y)                                                                                  \
  BINARY(ge_f, I, F, F, x >= y)                                                                                 \
  UNARY(is_finite, I, F, x - x == F{})                                                                          \
  BINARY(add_f, F, F, F, x + y)                                                                                 \
  BINARY(sub_f, F, F, F, x - y)                                                                                 \
  BINARY(mul_f, F, F, F, x* y)                                                                                  \
  BINARY(div_f, F, F, F, x / y)                                                                                 \
  BINARY(rem_f, F, F, F, each<F>(x, y, [](float a, float b) { return fmodf(a, b); }))                           \
  BINARY(pow_f, F, F, F, each<F>(x, y, [](float a, float b) { return powf(a, b); }))                            \
  BINARY(atan2_f, F, F, F, each<F>(x, y, [](float a, float b) { return atan2f(a, b); }))                        \
  UNARY(neg_f, F, F, -x)                                                                                        \
  UNARY(abs_f, U, U, x & 0x7fffffffu)                                                                           \
  UNARY(sign_f, F, F, pick(x > 0, 1 + F{}, pick(x < 0, F{} - 1, x)))                                            \
  BINARY(max_f, F, F, F, pick((x > y) | (x != x), x, y))                                                        \
  BINARY(min_f, F, F, F, pick((x < y) | (x != x), x, y))                                                        \
  UNARY(rsqrt_f, F, F, each<F>(x, [](float a) { return 1 / sqrtf(a); }))                                        \
  UNARY(exp_f, F, F, exponential(x))                                                                            \
  UNARY(exp2_f, F, F, each<F>(x, [](float a) { return exp2f(a); }))                                             \
  UNARY(log_f, F, F, logarithm(x))                                                                              \
  UNARY(log1p_f, F, F, logarithm_of_1_plus(x))                                                                  \
  UNARY(logistic_f, F, F, 1 / (1 + exponential(-x)))                                                            \
  UNARY(tanh_f, F, F, hyperbolic_tangent(x))                                                                    \
  UNARY(number_of_bool, U, U, x & 1u)                                                                           \
  UNARY(f_of_i, F, I, __builtin_convertvector(x, F))                                                            \
  UNARY(f_of_u, F, U, __builtin_convertvector(x, F))                                                            \
  UNARY(i_of_f, I, F, integer_of(x))                                                                            \
  UNARY(u_of_f, U, F, unsigned_of(x))                                                                           \
  UNARY(wrap_int8, I, U, bits_as<I>(x << 24) >> 24)                                                             \
  UNARY(wrap_int16, I, U, bits_as<I>(x << 16) >> 16)                                                            \
  UNARY(wrap_uint8, U, U, x & 0xffu)                                                                            \
  UNARY(wrap_uint16, U, U, x & 0xffffu)                                                                         \
  UNARY(round_float16, F, F, widen(narrow(x, Half{}), Half{}))                                                  \
  UNARY(round_bfloat16, F, F, widen(narrow(x, BFloat16{}), BFloat16{}))

// Elements of a captured array as they are in memory; the argument is an index in range.
#define JAX_FLASH_CPU_LOADS(LOAD) \
  LOAD(load_bool, uint8_t)        \
  LOAD(load_int8, int8_t)         \
  LOAD(load_uint8, uint8_t)       \
  LOAD(load_int16, int16_t)       \
  LOAD(load_uint16, uint16_t)     \
  LOAD(load_int32, int32_t)       \
  LOAD(load_uint32, uint32_t)     \
  LOAD(load_float16, Half)        \
  LOAD(load_bfloat16, BFloat16)   \
  LOAD(load_float32, float)
