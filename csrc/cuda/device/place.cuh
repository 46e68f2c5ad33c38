// Where an item of work stands in a pass whose blocks own rows of query: the forward, and dQ alone.
#pragma once

#include "cuda/device/schedule.cuh"

namespace jax_flash {

// Rows of query that are worked on together, of one head.
struct Place {
  Extent extent;
  int batch, head, kv_head;
  int first_row;

  __device__ __forceinline__ float sink(const Problem& problem) const { return sink_of(problem, batch, head); }
};
template <Grid grid = Grid::block_an_item>
JAX_FLASH_DEVICE Place place_of(const Problem& problem, int item) {
  // Under causal the last rows have the most keys, and go first; so they often do by a block mask.
  const int row_blocks = blocks_of(problem, problem.q_length, block_q);
  const Work work = work_of<grid>(item, row_blocks, problem.q_heads, problem.batch, problem.kv_length);
  int row_block = option_causal || has_mask_blocks ? row_blocks - 1 - work.block : work.block;
  const int sequence = sequence_of(problem, problem.cu_q_lengths, work.batch, block_q, row_block);
  const int kv_head = work.head / (problem.q_heads / problem.kv_heads);
  return {extent_of(problem, work.batch, sequence), work.batch, work.head, kv_head, row_block * block_q};
}

}  // namespace jax_flash
