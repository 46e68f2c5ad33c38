// Plain attention: all weights, and all gradients of scores, are arrays [batch, heads, rows, keys] in global memory.
#include "cuda/study/study.cuh"

namespace jax_flash {

extern "C" __constant__ int shared_bytes = threads * sizeof(float);

// The sum, or with `largest` the maximum, of what the threads of a block have.
template <bool largest>
static __device__ float of_block(float x, float* shared) {
  __syncthreads();  // all are done with the last one
  shared[threadIdx.x] = x;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();  // the numbers of the last step are there
    if (threadIdx.x < half) {
      const float other = shared[threadIdx.x + half];
      shared[threadIdx.x] = largest ? fmaxf(shared[threadIdx.x], other) : shared[threadIdx.x] + other;
    }
  }
  __syncthreads();  // the result is there
  return shared[0];
}

static __device__ long long of_weights(const Head& head, int row) { return head.of_row(row) * head.p.keys; }

// Row `row` of a times row `other` of b, in global memory.
template <int columns>
static __device__ float global_dot(const void* a, long long row, const void* b, long long other) {
  float sum = 0.f;
  for (int d = 0; d < columns; ++d) sum += load(a, row + d) * load(b, other + d);
  return sum;
}

// A block has a row. query, key, value -> out, weights
extern "C" __global__ void forward(const __grid_constant__ Study p) {
  extern __shared__ __align__(128) char memory[];
  float* const shared = reinterpret_cast<float*>(memory);
  const Head head(p, blockIdx.x / p.rows);
  const int row = blockIdx.x % p.rows;
  float* const weights = static_cast<float*>(p.arrays[4]) + of_weights(head, row);
  float maximum = lowest, total = 0.f;
  for (int key = threadIdx.x; key < p.keys; key += threads) {
    const float product =
        global_dot<head_dim>(p.arrays[0], head.of_query(row, head_dim), p.arrays[1], head.of_key(key, head_dim));
    weights[key] = head.keeps(row, key) ? product * p.scale : lowest;
    maximum = fmaxf(maximum, weights[key]);
  }
  maximum = of_block<true>(maximum, shared);
  for (int key = threadIdx.x; key < p.keys; key += threads) {
    weights[key] = head.keeps(row, key) ? natural_exp(weights[key] - maximum) : 0.f;
    total += weights[key];
  }
  total = of_block<false>(total, shared);
  for (int key = threadIdx.x; key < p.keys; key += threads) weights[key] /= total;
  __syncthreads();  // the weights are there
  for (int d = threadIdx.x; d < value_head_dim; d += threads) {
    float sum = 0.f;
    for (int key = 0; key < p.keys; ++key)
      sum += weights[key] * load(p.arrays[2], head.of_key(key, value_head_dim) + d);
    store(p.arrays[3], head.of_query(row, value_head_dim) + d, sum);
  }
}

// A block has a row. query, key, value, dout, weights -> dq, gradients of scores
extern "C" __global__ void backward_dq(const __grid_constant__ Study p) {
  extern __shared__ __align__(128) char memory[];
  float* const shared = reinterpret_cast<float*>(memory);
  const Head head(p, blockIdx.x / p.rows);
  const int row = blockIdx.x % p.rows;
  const float* const weights = static_cast<const float*>(p.arrays[4]) + of_weights(head, row);
  float* const dscores = static_cast<float*>(p.arrays[6]) + of_weights(head, row);
  float sum = 0.f;  // of P dP
  for (int key = threadIdx.x; key < p.keys; key += threads) {
    dscores[key] = global_dot<value_head_dim>(p.arrays[3], head.of_query(row, value_head_dim), p.arrays[2],
                                              head.of_key(key, value_head_dim));
    sum += weights[key] * dscores[key];
  }
  sum = of_block<false>(sum, shared);
  for (int key = threadIdx.x; key < p.keys; key += threads) {
    dscores[key] = weights[key] * (dscores[key] - sum) * p.scale;
  }
  __syncthreads();  // dS is there
  for (int d = threadIdx.x; d < head_dim; d += threads) {
    float dq = 0.f;
    for (int key = 0; key < p.keys; ++key) dq += dscores[key] * load(p.arrays[1], head.of_key(key, head_dim) + d);
    static_cast<float*>(p.arrays[5])[head.of_query(row, head_dim) + d] = dq;
  }
}

// A block has a key. query, dout, weights, gradients of scores -> dk, dv
extern "C" __global__ void backward_dkv(const __grid_constant__ Study p) {
  const Head head(p, blockIdx.x / p.keys);
  const int key = blockIdx.x % p.keys;
  const float* const weights = static_cast<const float*>(p.arrays[2]) + of_weights(head, 0) + key;
  const float* const dscores = static_cast<const float*>(p.arrays[3]) + of_weights(head, 0) + key;
  for (int d = threadIdx.x; d < head_dim; d += threads) {
    float dk = 0.f;
    for (int row = 0; row < p.rows; ++row) {
      dk += dscores[static_cast<long long>(row) * p.keys] * load(p.arrays[0], head.of_query(row, head_dim) + d);
    }
    static_cast<float*>(p.arrays[4])[head.of_key_gradient(key, head_dim) + d] = dk;
  }
  for (int d = threadIdx.x; d < value_head_dim; d += threads) {
    float dv = 0.f;
    for (int row = 0; row < p.rows; ++row) {
      dv += weights[static_cast<long long>(row) * p.keys] * load(p.arrays[1], head.of_query(row, value_head_dim) + d);
    }
    static_cast<float*>(p.arrays[5])[head.of_key_gradient(key, value_head_dim) + d] = dv;
  }
}

}  // namespace jax_flash
