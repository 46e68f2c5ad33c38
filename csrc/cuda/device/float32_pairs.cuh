// From the scores of two tiles to weights and their gradients, for the passes of a backward in float32 arithmetic: see
// float32.cuh.
#pragma once

#include "cuda/device/float32.cuh"

namespace jax_flash {

// One query head.
struct Float32Pairs {
  const Problem& problem;
  Float32Storage& shared;
  const Float32Place& place;  // of the own tile
  Float32Scores scores;
  Float32Rows q, k, dout, v;
  const float* lse;
  const float* delta;

  __device__ __forceinline__ Float32Pairs(const Problem& problem, Float32Storage& shared, const Float32Place& place,
                                          int head)
      : Float32Pairs(problem, shared, place, place.extent, place.extent.batch, head,
                     head / (problem.q_heads / problem.kv_heads),
                     has_kv_rows ? listed_rows(problem, place.extent.batch) : nullptr) {}

  // Of this thread's pair i, j, where the other side's tile begins at `other`.
  __device__ __forceinline__ int row_of(int i, int j, int other) const {
    return place.of_keys ? other + float32_tx() + 16 * j : place.first + float32_ty() + 16 * i;
  }
  __device__ __forceinline__ int key_of(int i, int j, int other) const {
    return place.of_keys ? place.first + float32_ty() + 16 * i : other + float32_tx() + 16 * j;
  }

  // Puts P without the weights that are dropped into shared memory; or with `derives` dS, times the derivative of the
  // score, and calls `use` before with i, j, dS, this times the derivative by bias and slopes, and the product.
  template <typename Use>
  __device__ __forceinline__ void weigh(int other, bool derives, const Use& use) const {
    const bool of_keys = place.of_keys;
    float s[4][4], dp[4][4];
    float32_products(s, shared, {of_keys, k, q}, place.first, {of_keys, q, k}, other);
    if (derives) float32_products(dp, shared, {of_keys, v, dout}, place.first, {of_keys, dout, v}, other);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = row_of(i, j, other), key = key_of(i, j, other);
        float derivative, weight = 0.f;
        const float score = scores(s[i][j], row, key, derivative);
        // Where there is no pair rows may be so large that dP is infinite, and 0 * inf is NaN.
        if (score != -JAX_FLASH_INFINITY) {
          // P is not beyond 1, by as much as a large lse is rounded.
          const float exponent = score - lse[row], factor = scores.dropout_factor(row, key);
          const float p = natural_exp(exponent > 0.f ? 0.f : exponent);
          weight = p * factor;
          if (derives) {
            const float ds = p * ((factor == 0.f ? 0.f : dp[i][j] * factor) - delta[row]);
            float of_bias = 1.f;
            if constexpr (derives_scores && (has_dbias || has_dalibi_slopes)) {
              scores.template of<true>(s[i][j], row, key, of_bias);
            }
            use(i, j, ds, ds * of_bias, s[i][j]);
            weight = ds * derivative;
          }
        }
        shared.weights[float32_ty() + 16 * i][float32_tx() + 16 * j] = weight;
      }
    }
    __syncthreads();  // the weights of all pairs are there
  }

 private:
  __device__ __forceinline__ Float32Pairs(const Problem& problem, Float32Storage& shared, const Float32Place& place,
                                          const Extent& extent, int batch, int head, int kv_head, const int* list)
      : problem(problem),
        shared(shared),
        place(place),
        scores(problem, extent, head),
        q(problem.original_query, problem.q, head_dim, batch, head, extent.q),
        k(problem.original_key, problem.k, head_dim, batch, kv_head, extent.kv, list),
        dout(problem.original_dout, problem.dout, value_head_dim, batch, head, extent.q),
        v(problem.original_value, problem.v, value_head_dim, batch, kv_head, extent.kv, list) {
    const i64 statistics = (static_cast<i64>(batch) * problem.q_heads + head) * problem.q_length + extent.q.first;
    lse = static_cast<const float*>(problem.lse) + statistics;
    delta = static_cast<const float*>(problem.delta) + statistics;
  }
};

}  // namespace jax_flash
