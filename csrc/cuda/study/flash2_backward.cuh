// FlashAttention-2: what both backwards have in common, and the pass whose blocks own keys.
#pragma once

#include "cuda/study/flash2.cuh"

namespace jax_flash {

// The backward's arguments are query, key, value, dout, lse and d = rowsum(dout out), in this order.
static __device__ void read_rows(Shared& s, const Head& head, int first_row) {
  const Study& p = head.p;
  s.q.read(p.arrays[0], first_row, p.rows, [&](int row) { return head.of_query(row, head_dim); });
  s.dout.read(p.arrays[3], first_row, p.rows, [&](int row) { return head.of_query(row, value_head_dim); });
  const int row = first_row + static_cast<int>(threadIdx.x);
  if (threadIdx.x < tile) {
    s.lse[threadIdx.x] = row < p.rows ? static_cast<const float*>(p.arrays[4])[head.of_row(row)] : 0.f;
    s.d[threadIdx.x] = row < p.rows ? static_cast<const float*>(p.arrays[5])[head.of_row(row)] : 0.f;
  }
}
static __device__ void read_keys(Shared& s, const Head& head, int first_key) {
  const Study& p = head.p;
  s.k.read(p.arrays[1], first_key, p.keys, [&](int key) { return head.of_key(key, head_dim); });
  s.v.read(p.arrays[2], first_key, p.keys, [&](int key) { return head.of_key(key, value_head_dim); });
}
// P_ij and dS_ij of the rows and keys that are in shared memory.
static __device__ void make_gradients(Shared& s, const Head& head, int first_row, int first_key) {
  for_tile<tile>([&](int i, int j) {
    const bool kept = head.keeps(first_row + i, first_key + j);
    const float score = dot(s.q, i, s.k, j) * head.p.scale;
    const float weight = kept ? natural_exp(score - s.lse[i]) : 0.f;
    s.p.x[i][j] = weight;
    s.ds.x[i][j] = weight * (dot(s.dout, i, s.v, j) - s.d[i]) * head.p.scale;
  });
}

// A block has a tile of keys, and walks over tiles of rows. It writes dk to array `first`, dv to the next; with
// `adds_dq` it adds its part of dq, atomically, to the array before.
template <bool adds_dq>
static __device__ void backward_of_keys(const Study& p, int first) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Head head(p, blockIdx.x / tiles(p.keys));
  const int first_key = blockIdx.x % tiles(p.keys) * tile;
  Sums<head_dim> dk;
  Sums<value_head_dim> dv;
  read_keys(s, head, first_key);
  for (int first_row = causal ? first_key : 0; first_row < p.rows; first_row += tile) {
    __syncthreads();  // all are done with the last tiles
    read_rows(s, head, first_row);
    __syncthreads();  // the tiles are there
    make_gradients(s, head, first_row, first_key);
    __syncthreads();  // P and dS are there
    for_sums(dk, [&](float& sum, int j, int d) {
      for (int i = 0; i < tile; ++i) sum += s.ds.x[i][j] * s.q.x[i][d];
    });
    for_sums(dv, [&](float& sum, int j, int d) {
      for (int i = 0; i < tile; ++i) sum += s.p.x[i][j] * s.dout.x[i][d];
    });
    if constexpr (adds_dq) {
      for_tile<head_dim>([&](int i, int d) {
        float sum = 0.f;
        for (int j = 0; j < tile; ++j) sum += s.ds.x[i][j] * s.k.x[j][d];
        const int row = first_row + i;
        if (row < p.rows) atomicAdd(static_cast<float*>(p.arrays[first - 1]) + head.of_query(row, head_dim) + d, sum);
      });
    }
  }
  for_sums(dk, [&](float sum, int j, int d) {
    const int key = first_key + j;
    if (key < p.keys) static_cast<float*>(p.arrays[first])[head.of_key_gradient(key, head_dim) + d] = sum;
  });
  for_sums(dv, [&](float sum, int j, int d) {
    const int key = first_key + j;
    if (key < p.keys) static_cast<float*>(p.arrays[first + 1])[head.of_key_gradient(key, value_head_dim) + d] = sum;
  });
}

}  // namespace jax_flash
