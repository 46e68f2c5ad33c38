// KernelTraits: what a kernel states to the host, which reads it from the cubin as the constant <entry point>_traits.
// The host compiler and NVRTC both compile this header, so it includes nothing.
#pragma once

namespace jax_flash {

constexpr int kSlopeWarps = 4;  // per block of jax_flash_sum_slopes
constexpr int kSplitWarps = 8;  // per block of jax_flash_sum_splits

// The kernels jax_flash_float32_*: threads, dynamic shared memory, and blocks of their grids per multiprocessor.
constexpr int kFloat32Threads = 256;
constexpr int kFloat32SharedBytes = 36 * 1024;
constexpr int kFloat32Blocks = 2;  // at most
constexpr int kFloat32Tile = 64;   // rows, and keys

constexpr int kSingleTileKeys = 64;  // at most, of jax_flash_forward_single_tile

struct KernelTraits {
  int threads = 0;         // per block; forward_single_tile: at most
  int block_rows = 0;      // rows of query or, in backward, of key of an item of work
  int shared_bytes = 0;    // dynamic shared memory
  int convert_warps = 0;   // per block of jax_flash_convert_dq; 0 if there is no such kernel
  int zero_threads = 0;    // per block of jax_flash_zero_dq; 0 if there is no such kernel
  int converts_ahead = 0;  // 1 if jax_flash_convert_dq waits itself for the backward (programmatic launch)

  // Persistent kernels: blocks per multiprocessor, which walk over the items of work; 0: a block for each item.
  int persistent = 0;
  // Persistent kernels: 1 if blocks take their items from a counter, Problem::scratch, where that is not null.
  int counts_items = 0;
  // Rows that a TMA load reads or a store writes, at most 256; 0: no such map. With any, TensorMaps is the second
  // parameter.
  int q_box_rows = 0;
  int k_box_rows = 0;
  int v_box_rows = 0;
  int dout_box_rows = 0;
  int dk_dv_box_rows = 0;
  int combine_warps = 0;  // per block of jax_flash_combine; 0 if there is no such kernel
  int block_keys = 0;     // backward_bias: keys of an item of work, which is a tile of the result there
  int starts_ahead =
      0;  // forward_split_kv, forward_single_tile: 1 if it waits itself for the kernel before it (programmatic launch)
  int most_cluster =
      1;  // forward_split_kv: the most blocks of a cluster, one for each slice of the keys; a power of two
  int cluster_bytes = 0;  // dynamic shared memory that a block of a cluster has in addition to shared_bytes
  int splits_groups = 0;  // backward: 1 if the cubin has jax_flash_sum_splits
  int halves_rows = 0;    // backward: 1 if two blocks may share the rows of one (Problem::halved)
};

}  // namespace jax_flash
