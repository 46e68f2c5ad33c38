// What a block of the backward pass works on, where dQ is summed up, and the gradients of the trainable options: the
// same for all kernels whose blocks own keys, with keys along the rows of the accumulators.
#pragma once

#include "cuda/device/captured.cuh"
#include "cuda/device/schedule.cuh"
#include "cuda/device/scores.cuh"

namespace jax_flash {

// Whether dQ is computed transposed, its columns along the rows of the accumulators: of tiles of rows that are not
// whole times the 64 of a wgmma (sm90a/backward.cuh).
constexpr bool transposes_dq = one_warp_loads && !option_separate_dq && block_q % 64 != 0;
// Tiles of 16 rows in a batch entry, packed sequences each beginning with a tile of its own (blocks_of).
JAX_FLASH_DEVICE int dq_tiles(const Problem& problem) {
  if constexpr (transposes_dq) return ceil_div(problem.q_length, block_q) * (block_q / kDqRows);
  return blocks_of(problem, problem.q_length, kDqRows);
}
JAX_FLASH_DEVICE int first_dq_tile(const Problem& problem, int batch, int sequence) {
  if constexpr (!packed) return 0;
  const i64 first = static_cast<i64>(batch) * (problem.options.sequences + 1);
  return problem.cu_q_lengths[first + sequence] / 16 + sequence;
}

// What a warp of jax_flash_convert_dq turns: a tile of 16 rows of a head. Whether it is one, and not computed in
// float32.
struct DqTile {
  int batch, head;
  int tile;  // in the batch entry
};
JAX_FLASH_DEVICE bool find_dq_tile(const Problem& problem, i64 item, DqTile& found) {
  const int tiles = dq_tiles(problem);
  if (item >= static_cast<i64>(problem.batch) * problem.q_heads * tiles) return false;
  found.tile = static_cast<int>(item % tiles);
  found.head = static_cast<int>(item / tiles % problem.q_heads);
  found.batch = static_cast<int>(item / tiles / problem.q_heads);
  return !computed_in_float32(problem, found.batch, found.head / (problem.q_heads / problem.kv_heads));
}

// How many counters blocks have that add in order.
JAX_FLASH_DEVICE i64 turns_of(const Problem& problem) {
  if (!option_ordered_dq) return 0;
  const i64 heads = static_cast<i64>(problem.batch) * problem.q_heads;
  return heads * (dq_tiles(problem) + blocks_of(problem, problem.kv_length, kTurnKeys));
}

// Where the gradients of slopes are summed up, behind what dQ takes of the scratch: a sum for every 16 keys of a batch
// entry and every query head, packed sequences each beginning with a sum of its own.
JAX_FLASH_DEVICE float* slope_sums(const Problem& problem, int batch, int head) {
  const i64 heads = static_cast<i64>(problem.batch) * problem.q_heads;
  const i64 dq = option_separate_dq ? 0 : dq_elements(heads, dq_tiles(problem), head_dim, turns_of(problem));
  const i64 sums = blocks_of(problem, problem.kv_length, kSlopeKeys);
  return static_cast<float*>(problem.scratch) + dq + (static_cast<i64>(batch) * problem.q_heads + head) * sums;
}
JAX_FLASH_DEVICE int first_slope_sum(const Problem& problem, int batch, int sequence) {
  if constexpr (!packed) return 0;
  const i64 first = static_cast<i64>(batch) * (problem.options.sequences + 1);
  return problem.cu_kv_lengths[first + sequence] / 16 + sequence;
}

// The gradients of bias and slopes, which a warp sums up for its 16 keys and one query head at a time. What is summed
// over rows has at most two addends, of a pair of warps, so that nobody's order is felt; what is summed over heads and
// batch entries besides, the host leaves to who launches the kernel. (A bias that all keys of a row share has a
// gradient that needs no kernel: jax_flash/_attention.py.)
constexpr bool sums_gradients = has_dbias || has_dalibi_slopes || sums_captured;  // over the rows of a head
struct OperandGradients : CapturedSums<sums_captured> {
  float slope;
  float keys[2];  // of a bias that all rows share: keys lane / 4 and lane / 4 + 8
  float descale;  // of dS

  // dS comes multiplied by `ds_factor`.
  __device__ __forceinline__ void enter(float ds_factor, const SumsOfTables& tables) {
    descale = 1.f / ds_factor;
    enter_captured(tables);
    if constexpr (sums_gradients) clear();
  }
  __device__ __forceinline__ void clear() {
    slope = keys[0] = keys[1] = 0.f;
    clear_captured();
  }

  // ds of keys key, key + 8 and rows row, row + 1.
  __device__ __forceinline__ void add(const Problem& problem, const Extent& extent, const Scores& scores, int head,
                                      int row, int key, const FragmentC& ds) {
    if constexpr (has_dalibi_slopes) {
#pragma unroll
      for (int e = 0; e < 4; ++e) slope -= ds.x[e] * scores.distance(row + e % 2, key + e / 2 * 8);
    }
    if constexpr (has_dbias) {
      const Strides& s = problem.dbias_strides;
      if (s.row == 0) {
        keys[0] += ds.x[0] + ds.x[1];
        keys[1] += ds.x[2] + ds.x[3];
      } else {
        float* to = static_cast<float*>(problem.dbias) + extent.batch * s.batch + head * s.head;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = row + e % 2, c = key + e / 2 * 8;
          if (r < extent.q.length && c < extent.kv.length) atomicAdd(to + r * s.row + c, ds.x[e] * descale);
        }
      }
    }
  }

  // After the last row of a head, for the keys of the extent from first_key on.
  __device__ __forceinline__ void flush(const Problem& problem, const Extent& extent,
                                        const PairFunctions<has_functions>& functions, int sequence, int head,
                                        int first_key, int lane) {
    flush_captured(problem, extent, functions, first_key, lane);
    if constexpr (has_dalibi_slopes) {
#pragma unroll
      for (int other = 1; other < 32; other *= 2) slope += __shfl_xor_sync(0xffffffffu, slope, other);
      float* to = slope_sums(problem, extent.batch, head) + first_slope_sum(problem, extent.batch, sequence);
      if (lane == 0 && first_key < extent.kv.length) atomicAdd(to + first_key / 16, slope * descale);
    }
    if constexpr (has_dbias) {
      const Strides& s = problem.dbias_strides;
      if (s.row == 0) {
        float* to = static_cast<float*>(problem.dbias) + extent.batch * s.batch + head * s.head;
        keys[0] = quad_sum(keys[0]) * descale;
        keys[1] = quad_sum(keys[1]) * descale;
        const int key = first_key + lane / 4;
        if (lane % 4 == 0) {
          if (key < extent.kv.length) atomicAdd(to + key, keys[0]);
          if (key + 8 < extent.kv.length) atomicAdd(to + key + 8, keys[1]);
        }
      }
    }
    clear();
  }
};

// Loads through registers leave none for a kernel that splits groups of query heads.
constexpr bool splits_groups = !loads_take_registers;
JAX_FLASH_DEVICE int group_splits(const Problem& problem) { return splits_groups ? problem.group_splits : 1; }

// What a block works on: keys of a key head, and a share of the query heads of its group.
struct Place {
  Extent extent;
  int batch, sequence, kv_head;
  int first_key;
  int share;  // kv_head * group_splits + the share of the group
  int order;  // of the share of the batch entry, in the order of the grid
};
JAX_FLASH_DEVICE int heads_of_share(const Problem& problem) {
  if (option_ordered_dq) return problem.heads_of_share;
  return problem.q_heads / (problem.kv_heads * group_splits(problem));
}
// Under causal the blocks of a group of heads add dQ at the same time, and L2 has to hold its sums beside the rows.
// What it did not hold made Hopper's backward of 1024 rows 1.2 times as long. There a fourth of the group did best.
constexpr RowsInL2 rows_in_l2 =
    option_separate_dq || !option_causal
        ? RowsInL2{}
        : RowsInL2{one_warp_loads ? kGroupBytesOfSums : kGroupBytes, row_bytes_with_sums(row_bytes, head_dim)};
JAX_FLASH_DEVICE Work work_of_keys(const Problem& problem, int item) {
  const int blocks = blocks_of(problem, problem.kv_length, block_kv), heads = problem.kv_heads * group_splits(problem);
  constexpr Grid grid = option_ordered_dq ? Grid::ordered : Grid::block_an_item;
  return work_of<grid>(item, blocks, heads, problem.batch, problem.q_length, rows_in_l2,
                       {problem.downwards_from, problem.downwards_group});
}
JAX_FLASH_DEVICE Place place_of(const Problem& problem, int block) {
  // Under causal the first keys are kept by the most rows, and go first.
  const int splits = group_splits(problem);
  const Work work = work_of_keys(problem, block);
  int key_block = work.block;
  const int sequence = sequence_of(problem, problem.cu_kv_lengths, work.batch, block_kv, key_block);
  return {extent_of(problem, work.batch, sequence),
          work.batch,
          sequence,
          work.head / splits,
          key_block * block_kv,
          work.head,
          work.order};
}

// Where the share of a group leaves its sums of dK for a key, and behind these of dV. Where dQ is added in any order,
// all shares of a group add to one sum; otherwise each has its own, and their order is always one. Where it is added in
// order there are fewer if all would take too much memory, and the shares of a sum take turns: the first one stores.
constexpr bool common_sums = !option_separate_dq && !option_ordered_dq;
using ShareSum = Select<common_sums, CommonSum, float>::type;
JAX_FLASH_DEVICE int sums_of_group(const Problem& problem) {
  return common_sums ? 1 : option_ordered_dq ? problem.sums_of_group : problem.group_splits;
}
JAX_FLASH_DEVICE int turn_of_share(const Problem& problem, int share) {
  const u32 splits = problem.group_splits, sums = problem.sums_of_group, of = share;
  return option_ordered_dq ? of % splits / sums : 0;
}
// Which of all sums is that of a share.
JAX_FLASH_DEVICE i64 sum_of_share(const Problem& problem, int batch, int share) {
  int sum = common_sums ? share / problem.group_splits : share;
  if (option_ordered_dq) {
    const u32 splits = problem.group_splits, sums = problem.sums_of_group, of = share;
    sum = of / splits * sums + of % splits % sums;
  }
  return static_cast<i64>(batch) * problem.kv_heads * sums_of_group(problem) + sum;
}
JAX_FLASH_DEVICE ShareSum* share_sums(const Problem& problem, int batch, int share, int key) {
  const i64 row = sum_of_share(problem, batch, share) * problem.kv_length + key;
  return static_cast<ShareSum*>(problem.group_sums) + row * (head_dim + value_head_dim);
}

// The gradient of a slope: the sums of its sequence's keys. One warp a slope.
extern "C" __global__ void __launch_bounds__(32 * kSlopeWarps)
    jax_flash_sum_slopes(const __grid_constant__ Problem problem) {
  if constexpr (!has_dalibi_slopes) return;
  const i64 item = static_cast<i64>(blockIdx.x) * kSlopeWarps + threadIdx.x / 32;
  const int sequences = problem.options.sequences;
  if (item >= static_cast<i64>(problem.batch) * sequences * problem.q_heads) return;
  const int lane = threadIdx.x % 32;
  const int head = static_cast<int>(item % problem.q_heads);
  const int sequence = static_cast<int>(item / problem.q_heads % sequences);
  const int batch = static_cast<int>(item / problem.q_heads / sequences);
  const float* from = slope_sums(problem, batch, head) + first_slope_sum(problem, batch, sequence);
  const int sums = ceil_div(extent_of(problem, batch, sequence).kv.length, 16);
  float sum = 0.f;
  for (int i = lane; i < sums; i += 32) sum += from[i];
#pragma unroll
  for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (lane == 0) static_cast<float*>(problem.dalibi_slopes)[item] = sum;
}

}  // namespace jax_flash
