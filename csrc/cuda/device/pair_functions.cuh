// What a pair of query and key is to the call's score and mask functions, and the blocks of its block mask.
#pragma once

#include "cuda/device/extent.cuh"

namespace jax_flash {

// Kinds of blocks in `mask_blocks`: no pair is kept; the partial mask decides; all pairs are kept.
constexpr int empty_block = 0, full_block = 2;

// Whether single pairs have to be tested in tiles that ranges and segments keep whole.
constexpr bool tests_pairs = has_mask_function || has_mask_blocks;

// The kinds of blocks of one head.
struct BlockKinds {
  const signed char* kinds;  // null without a block mask
  i64 row_stride;
  int column_stride;

  __device__ __forceinline__ BlockKinds(const Problem& problem, const Extent& extent, int head) {
    if constexpr (has_mask_blocks) {
      const BlockStrides& s = problem.mask_blocks_strides;
      const int sequence = packed ? extent.index - extent.batch * problem.options.sequences : 0;
      kinds = problem.mask_blocks + extent.batch * s.batch + sequence * s.sequence + head * s.head;
      row_stride = s.row;
      column_stride = static_cast<int>(s.column);
    }
  }
  // Of a pair; rows and keys beyond the ends have the kind of those at the ends.
  __device__ __forceinline__ int of_pair(const Extent& extent, int row, int column) const {
    const int r = at_least(0, at_most(row, extent.q.length - 1)), c = at_least(0, at_most(column, extent.kv.length - 1));
    return of_block(r / mask_block_rows, c / mask_block_keys);
  }
  __device__ __forceinline__ int of_block(int row, int column) const {
    return __ldg(kinds + row * row_stride + column * column_stride);
  }
};

// What the functions take for the pairs of a head of an extent: a packed sequence is a batch entry of its own.
struct PairFunctions {
  const Problem& problem;
  int call, b, h;
  int offset;  // of row 0
  BlockKinds blocks;

  __device__ __forceinline__ PairFunctions(const Problem& problem, const Extent& extent, int head)
      : problem(problem), blocks(problem, extent, head) {
    if constexpr (has_functions) {
      call = 0;
      b = extent.index + (has_index_offsets ? problem.index_offsets[0] : 0);
      if constexpr (function_batch > 0) {
        const int entries = function_batch * problem.options.sequences;
        call = b / entries;
        b -= call * entries;
      }
      h = head + (has_index_offsets ? problem.index_offsets[1] : 0);
      offset = has_q_offset ? problem.q_offset[extent.index] : 0;
    }
  }
  __device__ __forceinline__ void enter(const Extent& extent, int head) {
    if constexpr (has_functions) h = head + (has_index_offsets ? problem.index_offsets[1] : 0);
    if constexpr (has_mask_blocks) blocks = BlockKinds(problem, extent, head);
  }

  // Positions beyond int32 have the largest one.
  __device__ __forceinline__ int position(int row) const {
    if constexpr (!has_q_offset) return row;
    return offset > 0 && row > 0x7fffffff - offset ? 0x7fffffff : row + offset;
  }

  // Whether the mask functions and the block mask keep a pair; never one whose row or key is beyond the end.
  __device__ __forceinline__ bool keep(const Extent& extent, int row, int column) const {
    bool kept = true;
    if constexpr (has_mask_function) kept &= mask_function(problem, call, b, h, position(row), column);
    if constexpr (has_mask_blocks) {
      const int kind = blocks.of_pair(extent, row, column);
      bool here = kind != empty_block;
      if constexpr (has_partial_mask) {
        here &= kind == full_block || partial_mask(problem, call, b, h, position(row), column);
      }
      kept &= here;
    }
    return kept;
  }

  __device__ __forceinline__ float score(float x, int row, int column, float& derivative) const {
    return score_function(problem, call, x, b, h, position(row), column, derivative);
  }
  // Adds ds, the gradient of a pair's score, times the derivatives of the score by captured arrays to their gradients.
  __device__ __forceinline__ void add(int row, int column, float ds) const {
    if constexpr (adds_captured) {
      if (ds != 0.f) add_to_captured(problem, call, b, h, position(row), column, ds);
    }
  }
};

}  // namespace jax_flash
