// Single-tile forward, for problems so small that a call takes as long as one block from its first line to its last: a
// few hundred instructions, none of them twice, since each comes from afar, and as few trips to memory as can be.
//
// A warp has 16 keys and 16 columns of values. It takes its fragments of query, key and value straight from global
// memory, gives the weights of its keys to the others, and adds up what all have for its columns. All in one order, so
// that the results are the same in every run.
#include "cuda/sm80/mma.cuh"
//
#include "cuda/device/cluster.cuh"
#include "cuda/device/partial_softmax.cuh"
#include "cuda/device/softmax.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
static_assert(block_q == 16 && head_dim % 16 == 0 && value_head_dim % 16 == 0 && value_head_dim <= 16 * warps);

// What the warps pass to each other.
struct SharedStorage {
  uint4 weights[warps][32];  // as the lanes of every warp want them
  float2 statistics[warps][16];
};

extern "C" __constant__ KernelTraits jax_flash_forward_single_tile_traits = {
    .threads = threads,
    .block_rows = block_q,
    .shared_bytes = sizeof(SharedStorage),
    .starts_ahead = may_start_ahead,
};

// A row of query or key as operands of products. Which of its columns are multiplied in which step is all the same, if
// it is for both: those of a lane lie side by side in memory.
struct RowOperand {
  static constexpr int steps = head_dim / 16, together = head_dim % 32 == 0 ? 2 : 1;  // steps of a load
  u32 x[steps / together][together][2] = {};                                          // zeros where there is no row

  static __device__ __forceinline__ int first_column(int lane) { return lane % 4 * 4 * together; }
  __device__ __forceinline__ void load(const Element* from, bool valid) {
#pragma unroll
    for (int i = 0; i < steps / together; ++i) load_global(x[i], from + i * together * 16, valid);
  }
  __device__ __forceinline__ u32 operator()(int step, int i) const { return x[step / together][step % together][i]; }
};

// Elements of a row from the first of the array on: launch.cc sees to it that an int holds them.
JAX_FLASH_DEVICE int offset_of(const Tensor& t, int batch, int head, int row) {
  return batch * static_cast<int>(t.batch_stride) + head * static_cast<int>(t.head_stride) +
         row * static_cast<int>(t.row_stride);
}

// Of numbers below 2^20: an integer division is a long way to go before the first load.
JAX_FLASH_DEVICE int quotient(int x, int by) {
  return static_cast<int>((static_cast<float>(x) + 0.5f) * reciprocal_approx(static_cast<float>(by)));
}

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_forward_single_tile(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own = threadIdx.x / 32;  // group of keys, and of columns
  const int groups = static_cast<int>((static_cast<u32>(problem.kv_length) + 15) / 16);
  int item = blockIdx.x, batch = 0, head = 0, kv_head = 0;
  const int sets = problem.batch * problem.q_heads;
  if (sets != 1) {
    const int block = quotient(item, sets), set = item - block * sets;
    item = block;
    batch = quotient(set, problem.q_heads);
    head = set - batch * problem.q_heads;
    kv_head = quotient(head * problem.kv_heads, problem.q_heads);
  }
  const int first = item * 16, row[2] = {first + g, first + g + 8};
  const int own_key = own * 16 + g, own_column = own * 16 + 2 * g;
  const bool has_columns = own_column < value_head_dim;

  const Element *q[2], *k[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    q[i] = static_cast<const Element*>(problem.q.data) +
           offset_of(problem.q, batch, head, at_most(row[i], problem.q_length - 1)) + RowOperand::first_column(lane);
    k[i] = static_cast<const Element*>(problem.k.data) + offset_of(problem.k, batch, kv_head, own_key + 8 * i) +
           RowOperand::first_column(lane);
  }
  // Two columns of four keys of every group: pairs of neighbours, as the weights' columns are.
  const int v_stride = static_cast<int>(problem.v.row_stride);
  const Element* v[4];
  v[0] = static_cast<const Element*>(problem.v.data) + offset_of(problem.v, batch, kv_head, 2 * t) + own_column;
  v[1] = v[0] + v_stride;
  v[2] = v[0] + 8 * v_stride;
  v[3] = v[0] + 9 * v_stride;
  const int keys_left = has_columns ? problem.kv_length - 2 * t : 0;
  asm volatile("" : "+l"(q[0]), "+l"(q[1]), "+l"(k[0]), "+l"(k[1]), "+l"(v[0]));  // or these were behind the barrier

  wait_for_the_kernel_before();
  RowOperand queries[2], keys[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    keys[i].load(k[i], own_key + 8 * i < problem.kv_length);
    queries[i].load(q[i], true);
  }
  u32 values[warps][4] = {};
#pragma unroll
  for (int i = 0; i < warps; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_global(values[i][j], v[j], i * 16 + j / 2 * 8 + j % 2 < keys_left);
      v[j] += 16 * v_stride;
    }
  }
  let_the_next_kernel_begin();
  const float scale_log2 = static_cast<float>(problem.options.scale) * kLog2e;

  if (own < groups) {
    FragmentC scores[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = own * 16 + n * 8 + 2 * t + e % 2;
        const bool kept = key < problem.kv_length && (!option_causal || key <= row[e / 2]);
        scores[n].x[e] = kept ? 0.f : -JAX_FLASH_INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < RowOperand::steps; ++i) {
      const Matrix4 a{{queries[0](i, 0), queries[1](i, 0), queries[0](i, 1), queries[1](i, 1)}};
#pragma unroll
      for (int n = 0; n < 2; ++n) multiply_16bit(scores[n], a, keys[n](i, 0), keys[n](i, 1));
    }
    float2 mine[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowStatistics statistics;
      statistics.maximum = quad_max(maximum_of(scores, half));
      statistics.weigh(scores, half, scale_log2);
      mine[half] = {statistics.maximum == -JAX_FLASH_INFINITY ? statistics.maximum : statistics.scaled_max(scale_log2),
                    quad_sum(statistics.total)};
    }
    const Matrix4 weights = Mma::fragment(scores[0], scores[1]);
    shared.weights[own][lane] = {weights.x[0], weights.x[1], weights.x[2], weights.x[3]};
    if (t == 0) {
      shared.statistics[own][g] = mine[0];
      shared.statistics[own][g + 8] = mine[1];
    }
  }
  __syncthreads();  // the weights of all warps are there
  if (!has_columns) return;

  const auto merge_of = [&](int r) {
    return SoftmaxMerge<warps>(-JAX_FLASH_INFINITY, [&](int i) {
      return i < groups ? shared.statistics[i][r] : float2{-JAX_FLASH_INFINITY, 0.f};
    });
  };
  const SoftmaxMerge<warps> merges[2] = {merge_of(g), merge_of(g + 8)};
  FragmentC sums[2] = {};
#pragma unroll
  for (int i = 0; i < warps; ++i) {
    if (i >= groups) break;
    const uint4 x = shared.weights[i][lane];
    FragmentC next[2] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {  // every other column: a lane's four lie side by side
      const u32 halves = n == 0 ? 0x5410 : 0x7632;
      multiply_16bit(next[n], Matrix4{{x.x, x.y, x.z, x.w}}, __byte_perm(values[i][0], values[i][1], halves),
                     __byte_perm(values[i][2], values[i][3], halves));
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n].x[e] += merges[e / 2].weights[i] * next[n].x[e];
    }
  }
  Element* out = static_cast<Element*>(problem.out.data) + own * 16 + 4 * t;
  float* lse = static_cast<float*>(problem.lse) + (batch * problem.q_heads + head) * problem.q_length;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row[half] >= problem.q_length) continue;
    const SoftmaxMerge<warps>& merge = merges[half];
    const float factor = reciprocal_approx(merge.total);
    const FragmentC &even = sums[0], &odd = sums[1];
    store_four(out + offset_of(problem.out, batch, head, row[half]),
               {even.x[2 * half] * factor, odd.x[2 * half] * factor, even.x[2 * half + 1] * factor,
                odd.x[2 * half + 1] * factor});
    if (own == 0 && t == 0) lse[row[half]] = lse_of(merge.scaled_max, merge.total);
  }
}

}  // namespace jax_flash
