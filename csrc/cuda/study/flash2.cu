// FlashAttention-2 with a backward in two passes: dq with a block for every tile of rows, dk and dv with one for every
// tile of keys. Weights are computed twice, and no two blocks write to the same place.
#include "cuda/study/flash2_backward.cuh"

namespace jax_flash {

// query, key, value, dout, lse, d -> dq
extern "C" __global__ void backward_dq(const __grid_constant__ Study p) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Head head(p, blockIdx.x / tiles(p.rows));
  const int first_row = blockIdx.x % tiles(p.rows) * tile;
  Sums<head_dim> dq;
  read_rows(s, head, first_row);
  const int end = causal && first_row + tile < p.keys ? first_row + tile : p.keys;
  for (int first_key = 0; first_key < end; first_key += tile) {
    __syncthreads();  // all are done with the last tiles
    read_keys(s, head, first_key);
    __syncthreads();  // the tiles are there
    make_gradients(s, head, first_row, first_key);
    __syncthreads();  // dS is there
    for_sums(dq, [&](float& sum, int i, int d) {
      for (int j = 0; j < tile; ++j) sum += s.ds.x[i][j] * s.k.x[j][d];
    });
  }
  for_sums(dq, [&](float sum, int i, int d) {
    if (first_row + i < p.rows) static_cast<float*>(p.arrays[6])[head.of_query(first_row + i, head_dim) + d] = sum;
  });
}

// query, key, value, dout, lse, d -> dk, dv
extern "C" __global__ void backward_dkv(const __grid_constant__ Study p) { backward_of_keys<false>(p, 6); }

}  // namespace jax_flash
