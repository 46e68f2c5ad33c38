// FlashAttention-1 (Dao, Fu, Ermon, Rudra and Re 2022, https://arxiv.org/abs/2205.14135): a block has a whole head.
// Keys are outermost, so that the results of all rows lie in global memory between tiles of keys.
#include "cuda/study/study.cuh"

namespace jax_flash {

struct Shared {
  Tile<head_dim> q, k;
  Tile<value_head_dim> v, dout;
  Tile<tile> p, ds;
  Tile<head_dim> dk;
  Tile<value_head_dim> dv;
  float maximum[tile], total[tile], old[tile], fresh[tile], d[tile];
};
extern "C" __constant__ int shared_bytes = sizeof(Shared);

// Algorithm 1. query, key, value -> out in float, maximum and sum of exponentials of every row
extern "C" __global__ void forward(const __grid_constant__ Study p) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Head head(p, blockIdx.x);
  float* const out = static_cast<float*>(p.arrays[3]);
  float* const maximum = static_cast<float*>(p.arrays[4]) + head.of_row(0);
  float* const total = static_cast<float*>(p.arrays[5]) + head.of_row(0);
  for (int i = threadIdx.x; i < p.rows * value_head_dim; i += threads) {
    out[head.of_query(i / value_head_dim, value_head_dim) + i % value_head_dim] = 0.f;
  }
  for (int row = threadIdx.x; row < p.rows; row += threads) maximum[row] = lowest, total[row] = 0.f;
  for (int first_key = 0; first_key < p.keys; first_key += tile) {
    __syncthreads();  // all are done with the last tiles
    s.k.read(p.arrays[1], first_key, p.keys, [&](int key) { return head.of_key(key, head_dim); });
    s.v.read(p.arrays[2], first_key, p.keys, [&](int key) { return head.of_key(key, value_head_dim); });
    for (int first_row = causal ? first_key : 0; first_row < p.rows; first_row += tile) {
      __syncthreads();  // all are done with the last rows
      s.q.read(p.arrays[0], first_row, p.rows, [&](int row) { return head.of_query(row, head_dim); });
      __syncthreads();  // the tiles are there
      for_tile<tile>([&](int i, int j) {
        s.p.x[i][j] = head.keeps(first_row + i, first_key + j) ? dot(s.q, i, s.k, j) * p.scale : lowest;
      });
      __syncthreads();  // the scores are there
      const int i = threadIdx.x, row = first_row + i;
      if (i < tile && row < p.rows) {  // a thread for each row: its maximum and sum so far, and those with this tile
        float largest = lowest, sum = 0.f;
        for (int j = 0; j < tile; ++j) largest = fmaxf(largest, s.p.x[i][j]);
        for (int j = 0; j < tile; ++j) {
          const bool kept = head.keeps(row, first_key + j);
          sum += s.p.x[i][j] = kept ? natural_exp(s.p.x[i][j] - largest) : 0.f;
        }
        const float both = fmaxf(maximum[row], largest);
        const float old = total[row] * natural_exp(maximum[row] - both);
        const float fresh = natural_exp(largest - both), all = old + fresh * sum;
        s.old[i] = all ? old / all : 0.f;
        s.fresh[i] = all ? fresh / all : 0.f;
        maximum[row] = both;
        total[row] = all;
      }
      __syncthreads();  // the weights are there
      for_tile<value_head_dim>([&](int i, int d) {
        if (first_row + i >= p.rows) return;
        float sum = 0.f;
        for (int j = 0; j < tile; ++j) sum += s.p.x[i][j] * s.v.x[j][d];
        float& to = out[head.of_query(first_row + i, value_head_dim) + d];
        to = s.old[i] * to + s.fresh[i] * sum;
      });
    }
  }
}

// Algorithm 4, without dropout. query, key, value, dout, maximum, sum, d = rowsum(dout out) -> dq, dk, dv
extern "C" __global__ void backward(const __grid_constant__ Study p) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Head head(p, blockIdx.x);
  float* const dq = static_cast<float*>(p.arrays[7]);
  for (int i = threadIdx.x; i < p.rows * head_dim; i += threads) {
    dq[head.of_query(i / head_dim, head_dim) + i % head_dim] = 0.f;
  }
  for (int first_key = 0; first_key < p.keys; first_key += tile) {
    __syncthreads();  // all are done with the last tiles
    s.k.read(p.arrays[1], first_key, p.keys, [&](int key) { return head.of_key(key, head_dim); });
    s.v.read(p.arrays[2], first_key, p.keys, [&](int key) { return head.of_key(key, value_head_dim); });
    for_tile<head_dim>([&](int j, int d) { s.dk.x[j][d] = 0.f; });
    for_tile<value_head_dim>([&](int j, int d) { s.dv.x[j][d] = 0.f; });
    for (int first_row = causal ? first_key : 0; first_row < p.rows; first_row += tile) {
      __syncthreads();  // all are done with the last rows
      s.q.read(p.arrays[0], first_row, p.rows, [&](int row) { return head.of_query(row, head_dim); });
      s.dout.read(p.arrays[3], first_row, p.rows, [&](int row) { return head.of_query(row, value_head_dim); });
      const int row = first_row + static_cast<int>(threadIdx.x);
      if (threadIdx.x < tile) {
        const bool there = row < p.rows;
        s.maximum[threadIdx.x] = there ? static_cast<const float*>(p.arrays[4])[head.of_row(row)] : 0.f;
        s.total[threadIdx.x] = there ? static_cast<const float*>(p.arrays[5])[head.of_row(row)] : 1.f;
        s.d[threadIdx.x] = there ? static_cast<const float*>(p.arrays[6])[head.of_row(row)] : 0.f;
      }
      __syncthreads();  // the tiles are there
      for_tile<tile>([&](int i, int j) {
        const bool kept = head.keeps(first_row + i, first_key + j);
        const float score = dot(s.q, i, s.k, j) * p.scale;
        const float weight = kept ? natural_exp(score - s.maximum[i]) / s.total[i] : 0.f;
        s.p.x[i][j] = weight;
        s.ds.x[i][j] = weight * (dot(s.dout, i, s.v, j) - s.d[i]) * p.scale;
      });
      __syncthreads();                        // P and dS are there
      for_tile<head_dim>([&](int i, int d) {  // of dq row i, of dk key i
        float to_dq = 0.f, to_dk = 0.f;
        for (int j = 0; j < tile; ++j) to_dq += s.ds.x[i][j] * s.k.x[j][d];
        for (int j = 0; j < tile; ++j) to_dk += s.ds.x[j][i] * s.q.x[j][d];
        if (first_row + i < p.rows) dq[head.of_query(first_row + i, head_dim) + d] += to_dq;
        s.dk.x[i][d] += to_dk;
      });
      for_tile<value_head_dim>([&](int j, int d) {
        for (int i = 0; i < tile; ++i) s.dv.x[j][d] += s.p.x[i][j] * s.dout.x[i][d];
      });
    }
    for_tile<head_dim>([&](int j, int d) {
      const int key = first_key + j;
      if (key < p.keys) static_cast<float*>(p.arrays[8])[head.of_key_gradient(key, head_dim) + d] = s.dk.x[j][d];
    });
    for_tile<value_head_dim>([&](int j, int d) {
      const int key = first_key + j;
      if (key < p.keys) static_cast<float*>(p.arrays[9])[head.of_key_gradient(key, value_head_dim) + d] = s.dv.x[j][d];
    });
  }
}

}  // namespace jax_flash
