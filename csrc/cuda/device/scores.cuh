// What is done to the scores between the product and the softmax: softcap, bias, ALiBi and the score function, in this
// order.
#pragma once

#include "cuda/device/pair_functions.cuh"
#include "cuda/device/transcendental.cuh"

namespace jax_flash {

// Whether something happens to the scores between product and softmax.
constexpr bool modifies_scores = with_softcap || has_bias || has_alibi_slopes || has_score_function;
// Whether the derivative of a score by its product differs from pair to pair: then it is kept from the score to its
// gradient.
constexpr bool keeps_derivatives = with_softcap || derives_scores;
// Whether a backward with keys along its rows keeps the products instead, and evaluates the score function again: where
// gradients of captured arrays depend on the score, and where those of bias and slopes, which come behind softcap, are
// of one factor of the derivative alone.
constexpr bool keeps_products =
    captured_take_score || (derives_scores && with_softcap && (has_dbias || has_dalibi_slopes));

JAX_FLASH_DEVICE float as_float(float x) { return x; }
JAX_FLASH_DEVICE float as_float(u16 x) {
  if constexpr (dtype == DType::bf16) return __uint_as_float(static_cast<u32>(x) << 16);
  return half_to_float(x);
}

template <bool wide>
struct BiasElement {
  using type = float;
};
template <>
struct BiasElement<false> {
  using type = u16;
};
using Bias = BiasElement<option_wide_bias>::type;

// One head's [rows, columns] of an array that may be broadcast along either.
template <typename Element>
struct Plane {
  const Element* data;
  i64 row_stride;
  int column_stride;  // 0 or 1

  __device__ __forceinline__ Plane(const Element* all, const Strides& s, int batch, int head)
      : data(all + batch * s.batch + head * s.head), row_stride(s.row), column_stride(static_cast<int>(s.column)) {}

  // Rows and columns beyond the ends give what stands at the ends.
  __device__ __forceinline__ const Element* row(int row, const Extent& extent) const {
    const Element* from = data + at_most(row, extent.q.length - 1) * row_stride;
    // Opaque, or each element's address would be summed up anew from row and column, in 64 bits.
    asm("" : "+l"(from));
    return from;
  }
  __device__ __forceinline__ Element at(const Element* row, int column, const Extent& extent) const {
    return row[static_cast<u32>(at_most(column, (extent.kv.length - 1) * column_stride))];
  }

  // The values of row `r`, columns first + 8 * i and first + 8 * i + 1, `first` even. When not `masked` all columns are
  // there, and two are read at a time where they lie so.
  template <bool masked, int n>
  __device__ __forceinline__ void read(Element (&values)[n][2], int r, int first, const Extent& extent) const {
    struct alignas(2 * sizeof(Element)) Pair {
      Element x, y;
    };
    const Element* from = row(r, extent);
    if constexpr (masked) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        values[i][0] = at(from, first + 8 * i, extent);
        values[i][1] = at(from, first + 8 * i + 1, extent);
      }
    } else if (column_stride == 0) {
      const Element all = from[0];
#pragma unroll
      for (int i = 0; i < n; ++i) values[i][0] = values[i][1] = all;
    } else if (reinterpret_cast<u64>(from) % sizeof(Pair) == 0) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const Pair pair = *reinterpret_cast<const Pair*>(from + first + 8 * i);
        values[i][0] = pair.x;
        values[i][1] = pair.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        values[i][0] = from[first + 8 * i];
        values[i][1] = from[first + 8 * i + 1];
      }
    }
  }
};

// The modifications for one head of an extent.
struct Scores {
  const Problem& problem;
  const Extent& extent;
  float scale;
  float softcap, inverse_softcap;
  float slope;
  float offset;  // of row 0

  __device__ __forceinline__ Scores(const Problem& problem, const Extent& extent, int head, float scale)
      : problem(problem), extent(extent), scale(scale) {
    if constexpr (with_softcap) {
      softcap = static_cast<float>(problem.options.softcap);
      inverse_softcap = 1.f / softcap;
    }
    enter(head);
  }

  __device__ __forceinline__ void enter(int head) {
    if constexpr (has_alibi_slopes) {
      slope = static_cast<const float*>(problem.alibi_slopes)[extent.index * problem.q_heads + head];
      offset = has_q_offset ? static_cast<float>(problem.q_offset[extent.index]) : 0.f;
    }
  }

  __device__ __forceinline__ float distance(int row, int column) const {
    return fabsf(static_cast<float>(row - column) + offset);
  }

  // A score before the score function, of a raw one, and d x / d (scale * score), where that is not 1.
  __device__ __forceinline__ float before_function(float score, float bias, int row, int column,
                                                   float& derivative) const {
    float x = score * scale;
    if constexpr (with_softcap) {
      const float t = hyperbolic_tangent(x * inverse_softcap);
      x = softcap * t;
      derivative = 1.f - t * t;
    }
    if constexpr (has_bias) x += bias;
    if constexpr (has_alibi_slopes) x -= slope * distance(row, column);
    return x;
  }
  // A modified score of a raw one, and d modified / d (scale * score), where derivatives are kept; with `of_bias`,
  // d modified / d bias instead.
  template <bool of_bias = false>
  __device__ __forceinline__ float modify(const PairFunctions<has_functions>& functions, float score, float bias,
                                          const Pair& pair, float& derivative) const {
    float x = before_function(score, bias, pair.row, pair.column, derivative);
    if constexpr (has_score_function) {
      float outer = 1.f;
      const bool hidden = has_bias && bias == -JAX_FLASH_INFINITY;
      x = functions.score(problem, x, pair, outer);
      if (hidden) x = -JAX_FLASH_INFINITY;
      if constexpr (derives_scores) derivative = hidden ? 0.f : with_softcap && !of_bias ? outer * derivative : outer;
    }
    return x;
  }
  // The same in units of log2, ready for exp2.
  template <bool of_bias = false>
  __device__ __forceinline__ float logit(const PairFunctions<has_functions>& functions, float score, float bias,
                                         const Pair& pair, float& derivative) const {
    return modify<of_bias>(functions, score, bias, pair, derivative) * kLog2e;
  }
};

}  // namespace jax_flash
