// What a block of the backward pass works on, where dQ is summed up, and the gradients of the trainable options: the
// same for all kernels whose blocks own keys, with keys along the rows of the accumulators.
#pragma once

#include "cuda/shared/lanes.cuh"
#include "cuda/shared/schedule.cuh"
#include "cuda/shared/scores.cuh"

namespace jax_flash {

// Tiles of 16 rows in a batch entry, packed documents each beginning with a tile of its own (blocks_of).
JAX_FLASH_DEVICE int dq_tiles(const Problem& problem) { return blocks_of(problem, problem.q_length, 16); }
JAX_FLASH_DEVICE int first_dq_tile(const Problem& problem, int batch, int document) {
  if constexpr (!packed) return 0;
  const i64 first = static_cast<i64>(batch) * (problem.options.documents + 1);
  return problem.cu_q_lengths[first + document] / 16 + document;
}

// The gradients of bias and slopes, which a warp sums up for its 16 keys and one query head at a time, as far as no
// dimension of bias forbids it.
struct OperandGradients {
  float slope;
  float keys[2];  // of a bias that all rows share: keys lane / 4 and lane / 4 + 8
  float unscale;  // of dS

  __device__ __forceinline__ void clear() { slope = keys[0] = keys[1] = 0.f; }

  // ds of keys key, key + 8 and rows row, row + 1.
  __device__ __forceinline__ void add(const Problem& problem, const Part& part, const Scores& scores, int head, int row,
                                      int key, const FragmentC& ds, int lane) {
    if constexpr (has_dalibi_slopes) {
#pragma unroll
      for (int e = 0; e < 4; ++e) slope -= ds.x[e] * scores.distance(row + e % 2, key + e / 2 * 8);
    }
    if constexpr (has_dbias) {
      const Strides& s = problem.bias_strides;
      float* to = static_cast<float*>(problem.dbias) + part.batch * s.batch + head * s.head;
      if (s.row == 0) {
        keys[0] += ds.x[0] + ds.x[1];
        keys[1] += ds.x[2] + ds.x[3];
      } else if (s.column == 0) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float sum = column_sum(ds.x[e] + ds.x[e + 2]);
          if (lane < 4 && row + e < part.q.length) atomicAdd(to + (row + e) * s.row, sum * unscale);
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = row + e % 2, c = key + e / 2 * 8;
          if (r < part.q.length && c < part.kv.length) atomicAdd(to + r * s.row + c * s.column, ds.x[e] * unscale);
        }
      }
    }
  }

  // After the last row of a head.
  __device__ __forceinline__ void flush(const Problem& problem, const Part& part, int head, int key, int lane) {
    if constexpr (has_dalibi_slopes) {
#pragma unroll
      for (int other = 1; other < 32; other *= 2) slope += __shfl_xor_sync(0xffffffffu, slope, other);
      if (lane == 0)
        atomicAdd(static_cast<float*>(problem.dalibi_slopes) + part.index * problem.q_heads + head, slope * unscale);
    }
    if constexpr (has_dbias) {
      const Strides& s = problem.bias_strides;
      if (s.row == 0) {
        float* to = static_cast<float*>(problem.dbias) + part.batch * s.batch + head * s.head;
        keys[0] = quad_sum(keys[0]) * unscale;
        keys[1] = quad_sum(keys[1]) * unscale;
        if (s.column == 0) {
          const float sum = column_sum(keys[0] + keys[1]);
          if (lane == 0) atomicAdd(to, sum);
        } else if (lane % 4 == 0) {
          if (key < part.kv.length) atomicAdd(to + key * s.column, keys[0]);
          if (key + 8 < part.kv.length) atomicAdd(to + (key + 8) * s.column, keys[1]);
        }
      }
    }
    clear();
  }
};

// What a block works on.
struct Place {
  Part part;
  int batch, document, kv_head;
  int first_key;
};
JAX_FLASH_DEVICE Place place_of(const Problem& problem, int block) {
  // Under causal the first keys are kept by the most rows, and go first.
  const int key_blocks = blocks_of(problem, problem.kv_length, block_kv);
  const Work work = work_of(block, key_blocks, problem.kv_heads, problem.batch, problem.q_length);
  int key_block = work.block;
  const int document = document_of(problem, problem.cu_kv_lengths, work.batch, block_kv, key_block);
  return {part_of(problem, work.batch, document), work.batch, document, work.head, key_block * block_kv};
}

}  // namespace jax_flash
