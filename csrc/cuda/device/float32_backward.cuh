// dQ, dK and dV in float32 arithmetic: see float32.cuh. Each has blocks of its own, which compute the scores anew: no
// sum has addends of several blocks, so their order is always one. With dK come the gradient of slopes, and of a bias
// that all rows share; that of any other bias is float32_bias.cuh.
#pragma once

#include "cuda/device/backward_block.cuh"
#include "cuda/device/float32_pairs.cuh"

namespace jax_flash {

// The sum over all pairs of 64 keys and of a query head goes to the first of their sums for a slope; the others stay 0.
JAX_FLASH_DEVICE void float32_store_slope(const Problem& problem, Float32Storage& shared, const Float32Place& place,
                                          int head, float sum) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = sum;
  __syncthreads();  // the sums of all warps are there
  if (threadIdx.x == 0 && place.first < place.extent.kv.length) {
    float all = 0.f;
    for (float of_warp : shared.sums) all += of_warp;
    const int at = first_slope_sum(problem, place.extent.batch, place.sequence) + place.first / kSlopeKeys;
    slope_sums(problem, place.extent.batch, head)[at] = all;
  }
  __syncthreads();  // they have been read
}

JAX_FLASH_DEVICE void float32_store_keys(const Problem& problem, const Float32Place& place, int head,
                                         const float (&keys)[4]) {
  const Strides& s = problem.dbias_strides;
  if (s.row != 0) return;
  float* to = static_cast<float*>(problem.dbias) + place.extent.batch * s.batch + head * s.head;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = float32_row_sum(keys[i]);
    const int key = place.first + float32_ty() + 16 * i;
    if (float32_tx() == 0 && key < place.extent.kv.length) to[key] = sum;
  }
}

// dQ of 64 rows of a query head, or dK or dV of 64 keys.
enum class Float32Gradient { dq, dk, dv };

// `heads` query heads from `first_head` on, whose gradient is one sum.
JAX_FLASH_DEVICE void float32_backward_item(const Problem& problem, Float32Storage& shared, Float32Gradient of,
                                            int batch, int first_head, int heads, int tile) {
  const bool of_keys = of != Float32Gradient::dq;
  const Float32Place place(problem, of_keys, batch, tile);
  if (place.is_empty()) return;
  Float32Sums<at_least(head_dim, value_head_dim)> sums;
  for (int head = first_head; head < first_head + heads; ++head) {
    const Float32Pairs pairs(problem, shared, place, head);
    const Float32Rows of_scores{of_keys, pairs.q, pairs.k};
    const Float32Rows others{of == Float32Gradient::dv, pairs.dout, of_scores};
    float slope = 0.f, keys[4] = {};
    place.walk(problem, head, [&](int other) {
      pairs.weigh(other, of != Float32Gradient::dv, [&](int i, int j, float ds, float of_bias, float product) {
        if constexpr (has_dalibi_slopes) {
          slope -= of_bias * pairs.scores.modified.distance(pairs.row_of(i, j, other), pairs.key_of(i, j, other));
        }
        if constexpr (has_dbias) keys[i] += of_bias;
        if constexpr (adds_captured) {
          if (of == Float32Gradient::dk) {
            const int row = pairs.row_of(i, j, other), key = pairs.key_of(i, j, other);
            const float x = captured_take_score ? pairs.scores.before_function(product, row, key) : 0.f;
            add_directly(problem, pairs.scores.keep.functions(), x, row, key, ds);
          }
        }
      });
      sums.add(shared, others, other);
    });
    if (of != Float32Gradient::dk) continue;
    if constexpr (has_dalibi_slopes) float32_store_slope(problem, shared, place, head, slope);
    if constexpr (has_dbias) float32_store_keys(problem, place, head, keys);
  }
  const Tensor& result = of == Float32Gradient::dq ? problem.dq : of == Float32Gradient::dk ? problem.dk : problem.dv;
  const int result_head = of_keys ? first_head / heads : first_head;
  const int columns = of == Float32Gradient::dv ? value_head_dim : head_dim;
  const float factor = of == Float32Gradient::dv ? 1.f : scale_of(problem, batch);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = place.first + float32_ty() + 16 * i;
    if (row >= place.rows().stored) continue;
    const int to = of_keys ? row_of_key(problem, batch, place.rows().first + row) : place.rows().first + row;
    sums.store(result_of(result, batch, result_head, to), columns, i, factor);
  }
}

extern "C" __global__ void __launch_bounds__(kFloat32Threads)
    jax_flash_float32_backward(const __grid_constant__ Problem problem) {
  if constexpr (has_descale) {
    extern __shared__ __align__(128) char memory[];
    wait_for_the_kernel_before();
    const int group = problem.q_heads / problem.kv_heads;
    const int q_tiles = float32_tiles(problem, problem.q_length), kv_tiles = float32_tiles(problem, problem.kv_length);
    for_float32_items(problem, 2 * kv_tiles + group * q_tiles, [&](int batch, int kv_head, int item) {
      // Those of keys take longest, and go first.
      const bool of_keys = item < 2 * kv_tiles;
      const Float32Gradient of = item < kv_tiles ? Float32Gradient::dk
                                 : of_keys       ? Float32Gradient::dv
                                                 : Float32Gradient::dq;
      const int rest = of_keys ? item : item - 2 * kv_tiles, tiles = of_keys ? kv_tiles : q_tiles;
      const int first_head = kv_head * group + (of_keys ? 0 : rest / tiles);
      float32_backward_item(problem, *reinterpret_cast<Float32Storage*>(memory), of, batch, first_head,
                            of_keys ? group : 1, rest % tiles);
    });
  }
}

}  // namespace jax_flash
