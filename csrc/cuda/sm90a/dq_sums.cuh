// The accumulator of dQ, in float: where it lies, and who zeroes it and makes dQ of it.
//
// As a kernel of its own, zeroing waits for memory, a twelfth of a short backward. So block i of the backward zeroes,
// beside its products, part i + dq_ahead of the accumulator; jax_flash_zero_dq, before it, those up to dq_ahead. Each
// head has as many parts as blocks, all of one before those of the next, whether or not the blocks of heads are
// interleaved (schedule.cuh). Blocks start in the order of their index, so those that a block waits for have started
// before it, and so long before it that it seldom has to wait. A counter for each head tells how many of its parts are
// zero. Of short calls all is zeroed before.
//
// With option_ordered_dq the blocks that add to a tile of rows do so by turns, the one that started first before the
// others, and a counter for each tile tells how many have. (FlashAttention-3 and -4 do the same.) Of them the first one
// stores what it has, so that nothing is zeroed.
//
// Another counter tells how many blocks have added all that they had to a head. jax_flash_convert_dq waits for these,
// rather than for the end of the backward, and so begins on multiprocessors that the last blocks leave idle.
#pragma once

#include "cuda/device/backward_block.cuh"
#include "cuda/device/programmatic_launch.cuh"
#include "cuda/sm90a/stores.cuh"

namespace jax_flash {

constexpr bool adds_dq = !option_separate_dq;  // else it is computed by a pass of its own
// Of blocks that add in order the first one stores.
constexpr bool zeroes_dq = adds_dq && !option_ordered_dq;
constexpr int zero_bytes = 1024;   // in a block of the backward, that zeroes with them
constexpr int zero_threads = 256;  // of jax_flash_zero_dq, a block for each part
constexpr int convert_warps = 4;   // of jax_flash_convert_dq, a block
static_assert(!option_ordered_dq || block_kv % kTurnKeys == 0, "blocks have counters of their own");
constexpr int kTurnRows = 64;    // that blocks which add in order add to at once,
constexpr int adding_warps = 2;  // and the warps of a block that do

// Where dQ is summed up: for every 16 rows, for every 8 columns, the accumulators as the lanes hold them, four a lane,
// so that one instruction of a warp adds 512 contiguous bytes. `row_tile` counts in the batch entry.
// Transposed: for every block_q rows, for every 16 columns, for every 8 rows, likewise.
constexpr int dq_sums_of_tile = transposes_dq ? ceil_div(head_dim, 16) * 256 : head_dim / 8 * 128;
constexpr int dq_sums_of_columns = block_q / 8 * 128;
JAX_FLASH_DEVICE i64 dq_tile(const Problem& problem, int batch, int head, int row_tile) {
  return (static_cast<i64>(batch) * problem.q_heads + head) * dq_tiles(problem) + row_tile;
}
JAX_FLASH_DEVICE float* dq_sums_of(const Problem& problem, i64 tile) {
  return static_cast<float*>(problem.scratch) + tile * dq_sums_of_tile;
}
JAX_FLASH_DEVICE float* dq_fragment(const Problem& problem, int batch, int head, int row_tile, int column_tile) {
  return dq_sums_of(problem, dq_tile(problem, batch, head, row_tile)) + column_tile * 128;
}

struct DqSums {
  const Problem& problem;

  __device__ __forceinline__ int blocks() const { return blocks_of(problem, problem.kv_length, block_kv); }
  __device__ __forceinline__ int shares() const { return problem.kv_heads * group_splits(problem); }
  __device__ __forceinline__ i64 heads() const { return static_cast<i64>(problem.batch) * problem.q_heads; }
  __device__ __forceinline__ i64 parts() const { return static_cast<i64>(blocks()) * shares() * problem.batch; }
  // How many parts of a head are zero; `order` is that of the grid.
  __device__ __forceinline__ int* zeroed(int order) const {
    float* const sums = static_cast<float*>(problem.scratch);
    return reinterpret_cast<int*>(sums + dq_sums(heads(), dq_tiles(problem), head_dim)) + order;
  }
  // How many blocks have added to the heads of a share.
  __device__ __forceinline__ int* added(int batch, int share) const {
    return zeroed(static_cast<int>(heads()) + batch * shares() + share);
  }

  // A part of the sums, in floats.
  struct Part {
    float* first;
    i64 floats;
  };
  __device__ __forceinline__ Part part_of(int part) const {
    const Work work = work_at(part % blocks(), part / blocks(), shares(), problem.batch);
    const int heads = heads_of_share(problem), tiles = heads * dq_tiles(problem);
    const int each = tiles / blocks(), more = tiles % blocks();  // the first blocks take one more
    const int first = each * work.block + at_most(work.block, more);
    return {dq_fragment(problem, work.batch, work.head * heads, first, 0),
            static_cast<i64>(each + (work.block < more)) * dq_sums_of_tile};
  }

  // By a thread, with the part that comes dq_ahead after this one; from zero_bytes zeros in shared memory.
  __device__ __forceinline__ void zero_ahead(int index, u32 zeros) const {
    const int ahead = index + problem.dq_ahead;
    if (problem.dq_ahead == 0 || ahead >= parts()) return;
    const Part part = part_of(ahead);
    constexpr int at_once = zero_bytes / sizeof(float);
#pragma unroll 1
    for (i64 i = 0; i < part.floats; i += at_once) {
      store_bulk(part.first + i, zeros, at_most<i64>(at_once, part.floats - i) * sizeof(float));
    }
    bulk_commit();
    bulk_wait<0>();
    __threadfence();
    atomicAdd(zeroed(ahead / blocks()), 1);
  }
  // By a warp, before the first addition of the block.
  __device__ __forceinline__ void wait_for_zeros(const Place& place, int lane) const {
    const int parts = at_most((place.order + 1) * blocks() - problem.dq_ahead, blocks());
    if (parts > 0 && problem.dq_ahead > 0 && lane == 0) {
      while (load_acquire(zeroed(place.order)) < parts) __nanosleep(20);
      global_stores_ready();
    }
    __syncwarp();
  }

  // How many items blocks that stay have taken; where no zeros are waited for, beside the first of each. No block
  // zeroes parts of the first head, whose counter is free: those are zero before.
  __device__ __forceinline__ int* taken() const { return zeroed(0); }

  // How many blocks have added to the kTurnRows rows that begin with this tile of kDqRows.
  __device__ __forceinline__ int* turn(i64 tile) const { return zeroed(0) + 2 * heads() + tile; }
  // Where the two blocks that share rows count how far they are with meeting (backward.cuh).
  __device__ __forceinline__ int* met(int item) const { return turn(turns_of(problem)) + item; }
  // How many shares have added to the block's sums of keys.
  __device__ __forceinline__ int* turn_of_keys(const Place& place) const {
    const int blocks = blocks_of(problem, problem.kv_length, kTurnKeys);
    const int first = packed ? place.extent.kv.first / kTurnKeys + place.sequence : 0;
    const i64 sum = sum_of_share(problem, place.batch, place.share);
    return turn(heads() * dq_tiles(problem) + sum * blocks + first + place.first_key / kTurnKeys);
  }

  // By a warp, in the place of one that adds, which would wait for its sums to be visible: behind this phase of a
  // barrier the block adds no more.
  __device__ __forceinline__ void end_additions(const Place& place, u64& all_added, u32 parity, int lane) const {
    barrier_wait(shared_address(&all_added), parity);
    if (lane == 0) count_added(place);
  }
  __device__ __forceinline__ void count_added(const Place& place) const {
    __threadfence();
    atomicAdd(added(place.batch, place.share), 1);
  }
  // By a warp, for the sums of a head.
  __device__ __forceinline__ void wait_for_additions(int batch, int head, int lane) const {
    const int* const counter = added(batch, head / heads_of_share(problem));
    constexpr int counted_by = option_ordered_dq ? adding_warps : 1;  // in a block
    if (lane == 0) {
      while (load_acquire(counter) < counted_by * blocks() << problem.halved) __nanosleep(1000);
    }
    __syncwarp();
  }
};

// The first parts, the counters, and what is behind them.
extern "C" __global__ void __launch_bounds__(zero_threads) jax_flash_zero_dq(const __grid_constant__ Problem problem) {
  if constexpr (!zeroes_dq) return;
  const DqSums sums{problem};
  const DqSums::Part part = sums.part_of(blockIdx.x);
  for (i64 i = threadIdx.x * 4; i < part.floats; i += zero_threads * 4) {
    *reinterpret_cast<float4*>(part.first + i) = {0.f, 0.f, 0.f, 0.f};
  }
  const i64 slopes = has_dalibi_slopes ? sums.heads() * blocks_of(problem, problem.kv_length, kSlopeKeys) : 0;
  const i64 end = 2 * sums.heads() + slopes + problem.halved * sums.parts();
  int* behind = sums.zeroed(0);
  for (i64 i = static_cast<i64>(blockIdx.x) * zero_threads + threadIdx.x; i < end; i += gridDim.x * zero_threads) {
    behind[i] = 0;
  }
}

// Of a tile of 16 rows, the lane's part of columns 8 * n and on.
JAX_FLASH_DEVICE FragmentC read_dq_sums(const Problem& problem, i64 tile, int n, int lane) {
  if constexpr (transposes_dq) {
    constexpr int tiles = block_q / kDqRows;
    const float* const columns = dq_sums_of(problem, tile / tiles * tiles) + n / 2 * dq_sums_of_columns;
    const int row = lane / 4, column = lane % 4 * 2;
    const float* const from = columns + tile % tiles * 256 + (column * 4 + row / 2) * 4 + n % 2 * 2 + row % 2;
    return {from[0], from[16], from[128], from[144]};
  }
  const float4 x = *reinterpret_cast<const float4*>(dq_sums_of(problem, tile) + n * 128 + lane * 4);
  return {x.x, x.y, x.z, x.w};
}

// dq = the sum in scratch, of 16 rows of one head, by a warp.
JAX_FLASH_DEVICE void convert_dq(const Problem& problem, const DqTile& of, int lane) {
  const auto [batch, head, tile] = of;
  int row_tile = tile;
  const Extent extent = extent_of(problem, batch, sequence_of(problem, problem.cu_q_lengths, batch, 16, row_tile));
  FragmentC dq[head_dim / 8]{};
  bool has_sums = true;
  if constexpr (option_ordered_dq) {
    const i64 first = dq_tile(problem, batch, head, tile - row_tile % (kTurnRows / kDqRows));
    has_sums = row_tile * kDqRows < extent.q.length && *DqSums{problem}.turn(first) > 0;
  }
#pragma unroll
  for (int n = 0; has_sums && n < head_dim / 8; ++n) {
    dq[n] = read_dq_sums(problem, dq_tile(problem, batch, head, tile), n, lane);
  }
  Result* to = result_of(problem.dq, batch, head, extent.q.first);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_tile * 16 + lane / 4 + 8 * half;
    store_row<head_dim>(dq, half, 1.f, to + row * problem.dq.row_stride, row < extent.q.stored, lane);
  }
}

extern "C" __global__ void __launch_bounds__(32 * convert_warps)
    jax_flash_convert_dq(const __grid_constant__ Problem problem) {
  const int lane = threadIdx.x % 32;
  DqTile of;
  if (find_dq_tile(problem, static_cast<i64>(blockIdx.x) * convert_warps + threadIdx.x / 32, of)) {
    DqSums{problem}.wait_for_additions(of.batch, of.head, lane);
    convert_dq(problem, of, lane);
  }
  // Nor does the grid end before the backward has written dK and dV. (A block that waits takes the place of others.)
  if (blockIdx.x == gridDim.x - 1) wait_for_the_kernel_before();
}

}  // namespace jax_flash
