// FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): the forward, and what blocks have.
//
// The numbers of a result that a thread adds up stay in its registers: `sums` of them, where for_sums() meets them in
// the same order every time.
#pragma once

#include "cuda/study/study.cuh"

namespace jax_flash {

template <int columns>
struct Sums {
  float x[(tile * columns + threads - 1) / threads] = {};
};
template <int columns, typename Body>
static __device__ void for_sums(Sums<columns>& sums, const Body& body) {
  int n = 0;
#pragma unroll
  for (float& sum : sums.x) {
    const int x = threadIdx.x + threads * n++;
    if (x < tile * columns) body(sum, x / columns, x % columns);
  }
}

// What a block has in shared memory, forward and backward.
struct Shared {
  Tile<head_dim> q, k;
  Tile<value_head_dim> v, dout;
  Tile<tile> p, ds;  // P_ij, and dS_ij
  float maximum[tile], total[tile], shrink[tile], lse[tile], d[tile];
};
extern "C" __constant__ int shared_bytes = sizeof(Shared);

// Algorithm 1. A block has `tile` rows of a head: q in shared memory, out in registers. It walks over tiles of keys.
// query, key, value -> out, lse
extern "C" __global__ void forward(const __grid_constant__ Study p) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Head head(p, blockIdx.x / tiles(p.rows));
  const int first_row = blockIdx.x % tiles(p.rows) * tile;
  auto of_query = [&](int row) { return head.of_query(row, head_dim); };
  auto of_key = [&](int key) { return head.of_key(key, head_dim); };
  auto of_value = [&](int key) { return head.of_key(key, value_head_dim); };
  Sums<value_head_dim> out;
  s.q.read(p.arrays[0], first_row, p.rows, of_query);
  if (threadIdx.x < tile) s.maximum[threadIdx.x] = lowest, s.total[threadIdx.x] = 0.f;
  const int end = causal && first_row + tile < p.keys ? first_row + tile : p.keys;
  for (int first_key = 0; first_key < end; first_key += tile) {
    __syncthreads();  // all are done with the last tiles
    s.k.read(p.arrays[1], first_key, p.keys, of_key);
    s.v.read(p.arrays[2], first_key, p.keys, of_value);
    __syncthreads();  // q, k and v are there
    for_tile<tile>([&](int i, int j) {
      s.p.x[i][j] = head.keeps(first_row + i, first_key + j) ? dot(s.q, i, s.k, j) * p.scale : lowest;
    });
    __syncthreads();           // the scores are there
    if (threadIdx.x < tile) {  // a thread for each row
      const int i = threadIdx.x;
      float largest = s.maximum[i], sum = 0.f;
      for (int j = 0; j < tile; ++j) largest = fmaxf(largest, s.p.x[i][j]);
      for (int j = 0; j < tile; ++j) {
        const bool kept = head.keeps(first_row + i, first_key + j);
        sum += s.p.x[i][j] = kept ? natural_exp(s.p.x[i][j] - largest) : 0.f;
      }
      s.shrink[i] = natural_exp(s.maximum[i] - largest);
      s.maximum[i] = largest;
      s.total[i] = s.total[i] * s.shrink[i] + sum;
    }
    __syncthreads();  // the weights are there
    for_sums(out, [&](float& sum, int i, int d) {
      sum *= s.shrink[i];
      for (int j = 0; j < tile; ++j) sum += s.p.x[i][j] * s.v.x[j][d];
    });
  }
  __syncthreads();  // the totals are there
  for_sums(out, [&](float& sum, int i, int d) {
    const int row = first_row + i;
    if (row < p.rows) store(p.arrays[3], head.of_query(row, value_head_dim) + d, s.total[i] ? sum / s.total[i] : 0.f);
  });
  const int row = first_row + static_cast<int>(threadIdx.x);
  if (threadIdx.x < tile && row < p.rows) {
    static_cast<float*>(p.arrays[4])[head.of_row(row)] =
        s.maximum[threadIdx.x] + log2_approx(s.total[threadIdx.x]) * 0.69314718f;
  }
}

}  // namespace jax_flash
