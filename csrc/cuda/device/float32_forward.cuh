// The forward in float32 arithmetic: see float32.cuh.
#pragma once

#include "cuda/device/float32.cuh"

namespace jax_flash {

// 64 rows of a query head.
JAX_FLASH_DEVICE void float32_forward_item(const Problem& problem, Float32Storage& shared, int batch, int kv_head,
                                           int item) {
  const int tiles = float32_tiles(problem, problem.q_length), group = problem.q_heads / problem.kv_heads;
  const int head = kv_head * group + item / tiles;
  const Float32Place place(problem, false, batch, item % tiles);
  if (place.is_empty()) return;
  const Extent& extent = place.extent;
  const Float32Scores scores(problem, extent, head);
  const Float32Rows q(problem.original_query, problem.q, head_dim, batch, head, extent.q);
  const int* list = has_kv_rows ? listed_rows(problem, batch) : nullptr;
  const Float32Rows k(problem.original_key, problem.k, head_dim, batch, kv_head, extent.kv, list);
  const Float32Rows v(problem.original_value, problem.v, value_head_dim, batch, kv_head, extent.kv, list);
  const float sink = sink_of(problem, batch, head);
  const int tx = float32_tx();
  const auto row_of = [&](int i) { return place.first + float32_ty() + 16 * i; };

  // Of a row: the largest score, and this thread's share of the sum of exponentials, against it.
  float maximum[4], total[4];
  Float32Sums<value_head_dim> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    maximum[i] = sink;
    total[i] = sink != -JAX_FLASH_INFINITY && tx == 0 ? 1.f : 0.f;
  }
  place.walk(problem, head, [&](int first_key) {
    float p[4][4];
    float32_products(p, shared, q, place.first, k, first_key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float largest = maximum[i], derivative;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        p[i][j] = scores(p[i][j], row_of(i), first_key + tx + 16 * j, derivative);
        largest = fmaxf(largest, p[i][j]);
      }
      largest = float32_row_max(largest);
      const float against = largest == -JAX_FLASH_INFINITY ? 0.f : largest;
      const float shrink = natural_exp(maximum[i] - against);
      maximum[i] = largest;
      total[i] *= shrink;
      out.multiply(i, shrink);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = natural_exp(p[i][j] - against);
        total[i] += weight;
        shared.weights[float32_ty() + 16 * i][tx + 16 * j] =
            weight * scores.dropout_factor(row_of(i), first_key + tx + 16 * j);
      }
    }
    __syncthreads();  // all weights are there
    out.add(shared, v, first_key);
  });

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = float32_row_sum(total[i]);
    const int row = row_of(i);
    if (row >= extent.q.stored) continue;
    out.store(result_of(problem.out, batch, head, extent.q.first + row), value_head_dim, i,
              sum == 0.f ? 0.f : 1.f / sum);
    if (tx == 0) {
      const i64 at = (static_cast<i64>(batch) * problem.q_heads + head) * problem.q_length + extent.q.first + row;
      static_cast<float*>(problem.lse)[at] = sum == 0.f ? -JAX_FLASH_INFINITY : maximum[i] + log2_approx(sum) * kLn2;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kFloat32Threads)
    jax_flash_float32_forward(const __grid_constant__ Problem problem) {
  if constexpr (has_descale) {
    extern __shared__ __align__(128) char memory[];
    wait_for_the_kernel_before();
    const int items = problem.q_heads / problem.kv_heads * float32_tiles(problem, problem.q_length);
    for_float32_items(problem, items, [&](int batch, int kv_head, int item) {
      float32_forward_item(problem, *reinterpret_cast<Float32Storage*>(memory), batch, kv_head, item);
    });
  }
}

}  // namespace jax_flash
