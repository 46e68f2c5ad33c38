// What every kernel of every architecture needs before its first line. NVRTC has no headers, so neither do we.
//
// In front of this file the runtime puts the variant as named constants, in namespace jax_flash:
//   dtype                              the element type
//   head_dim, value_head_dim           H and V (multiples of 8)
//   option_, with_, has_, has_d<name>  the options of csrc/options.h
//   and the tile row of this pass, by the field names of csrc/cuda/tiles.h
// and a family states, before it includes this file,
//   column_step                        what the columns of its tiles are a multiple of
#pragma once

#include "cuda/device/arithmetic.cuh"
#include "cuda/kernel_traits.h"
#include "layout.h"
#include "problem.h"
#include "scaling.h"

namespace jax_flash {

#define JAX_FLASH_DEVICE static __device__ __forceinline__

// What kernels rely on, checked where they run in the emulator (tests/emulator/device.h) and nowhere else.
#ifndef JAX_FLASH_ASSERT
#define JAX_FLASH_ASSERT(condition, otherwise)
#endif

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define JAX_FLASH_INFINITY __int_as_float(0x7f800000)

// A float32 array comes as the sum of so many float16 limbs: two where its accuracy is kept (products.cuh).
constexpr int limbs = option_highest_precision ? 2 : 1;

// head_dim as the tiles hold it: the columns beyond head_dim are zeros. A second limb begins on a line of 128 bytes:
// where warps share columns, its addresses are an exclusive or away too.
__host__ __device__ constexpr int tile_columns(int columns) { return round_up(columns, limbs == 2 ? 64 : column_step); }
constexpr int tile_head_dim = tile_columns(head_dim);
constexpr int tile_value_head_dim = tile_columns(value_head_dim);

template <bool condition, typename A, typename B>
struct Select {
  using type = A;
};
template <typename A, typename B>
struct Select<false, A, B> {
  using type = B;
};

// What arrays and tiles are made of; f16 and bf16 are told apart only where they are computed with.
static_assert(dtype == DType::f16 || dtype == DType::bf16, "float32 comes as float16 with descale");
using Element = u16;
constexpr int chunk_elements = 16 / sizeof(Element);  // in 16 bytes
using Result = Select<has_descale, float, Element>::type;
// A float in global memory that blocks add to, in any order or by turns.
struct CommonSum {
  float sum;
};

JAX_FLASH_DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

template <typename T>
__host__ __device__ constexpr T at_most(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
__host__ __device__ constexpr T at_least(T a, T b) {
  return a > b ? a : b;
}

// Address of row `row` of one head of a [batch, length, heads, head_dim] array.
JAX_FLASH_DEVICE Element* head_of(const Tensor& t, int batch, int head, int row) {
  return static_cast<Element*>(t.data) + batch * t.batch_stride + row * t.row_stride + head * t.head_stride;
}

JAX_FLASH_DEVICE Result* result_of(const Tensor& t, int batch, int head, int row) {
  return static_cast<Result*>(t.data) + batch * t.batch_stride + row * t.row_stride + head * t.head_stride;
}

// What multiplies the scores of a batch entry.
JAX_FLASH_DEVICE float scale_of(const Problem& problem, int batch) {
  if constexpr (has_traced_scale) return static_cast<const float*>(problem.traced_scale)[batch];
  return static_cast<float>(problem.options.scale);
}

// The logit that joins the softmax of a query head's rows; -inf where there is none.
JAX_FLASH_DEVICE float sink_of(const Problem& problem, int batch, int head) {
  if constexpr (!has_sinks) return -JAX_FLASH_INFINITY;
  return static_cast<const float*>(problem.sinks)[batch * problem.q_heads + head];
}

// What undoes the scales of arrays that stand for float32 ones, and the scale of dS; powers of two, of a key head.
struct Descale {
  float query, key, value, dout, ds;
};
JAX_FLASH_DEVICE const ScaleRecord& scale_record(const Problem& problem, int batch, int kv_head) {
  return reinterpret_cast<const ScaleRecord*>(problem.descale)[static_cast<i64>(batch) * problem.kv_heads + kv_head];
}
JAX_FLASH_DEVICE Descale descale_of(const Problem& problem, int batch, int kv_head) {
  if constexpr (!has_descale) return {1.f, 1.f, 1.f, 1.f, 1.f};
  const ScaleRecord& x = scale_record(problem, batch, kv_head);
  return {x.query, x.key, x.value, x.dout, x.ds};
}
// Whether a key head and its query heads are left to the kernels of float32.cuh.
JAX_FLASH_DEVICE bool computed_in_float32(const Problem& problem, int batch, int kv_head) {
  if constexpr (!has_descale) return false;
  const ScaleRecord& x = scale_record(problem, batch, kv_head);
  return fminf(fminf(x.query, x.key), fminf(x.value, x.dout)) == 0.f;
}

// Forward, weights are at most 2^weight_bits, against the row's maximum so far: in float16 those of many keys would
// else be too small to be noticed. More bits would cost lse digits, whose exponents they join: with 15 that of a row
// with one key was wrong by 5e-7.
constexpr float weight_bits = has_descale ? 7.f : 0.f;
constexpr float weight_unit = has_descale ? 0x1p-7f : 1.f;

// Backward, where they are against the whole sum, they are 2^15 of themselves.
constexpr float probability_unit = has_descale ? 0x1p-15f : 1.f;
// lse as it is subtracted from logits before exp2: in units of log2, and less what probability_unit undoes. With two
// limbs the exponent has no place for another summand, so probability() multiplies instead.
JAX_FLASH_DEVICE float probability_lse(float lse) {
  return has_descale && limbs == 1 ? lse * kLog2e - 15.f : lse * kLog2e;
}
JAX_FLASH_DEVICE float probability(float logit, float lse_log2) {
  const float x = exp2_approx(logit - lse_log2);
  return limbs == 1 ? x : x * 0x1p15f;
}

// A row that is stored where it is asked for.
struct SameRow {
  __device__ __forceinline__ int operator()(int row) const { return row; }
};

}  // namespace jax_flash
