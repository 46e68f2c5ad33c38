// FlashAttention-2 with a backward in one pass (Algorithm 2): a block has a tile of keys, sums their dk and dv, and
// adds its part of dq to what the other blocks add, atomically and therefore in any order.
#include "cuda/study/flash2.cuh"

namespace jax_flash {

// query, key, value, dout, lse, d -> dq, dk, dv; dq has to be zeros before, and starts as the first result does
extern "C" __global__ void backward(const __grid_constant__ Study p) {
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
    for_tile<head_dim>([&](int i, int d) {
      float sum = 0.f;
      for (int j = 0; j < tile; ++j) sum += s.ds.x[i][j] * s.k.x[j][d];
      const int row = first_row + i;
      if (row < p.rows) atomicAdd(static_cast<float*>(p.arrays[7]) + head.of_query(row, head_dim) + d, sum);
    });
  }
  for_sums(dk, [&](float sum, int j, int d) {
    const int key = first_key + j;
    if (key < p.keys) static_cast<float*>(p.arrays[8])[head.of_key_gradient(key, head_dim) + d] = sum;
  });
  for_sums(dv, [&](float sum, int j, int d) {
    const int key = first_key + j;
    if (key < p.keys) static_cast<float*>(p.arrays[9])[head.of_key_gradient(key, value_head_dim) + d] = sum;
  });
}

}  // namespace jax_flash
