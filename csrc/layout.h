// Counts of blocks and offsets in scratch, which the host and the kernels must compute alike. Compiled by the host
// compiler and by NVRTC, so it includes nothing.
#pragma once

#ifdef __CUDACC__
#define JAX_FLASH_BOTH __host__ __device__ constexpr
#else
#define JAX_FLASH_BOTH constexpr
#endif

namespace jax_flash {

template <typename X, typename Y>
JAX_FLASH_BOTH auto ceil_div(X x, Y y) {
  return (x + y - 1) / y;
}
template <typename X, typename Y>
JAX_FLASH_BOTH auto round_up(X x, Y multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// Blocks of `size` rows in a batch entry of `length` rows. Each packed sequence begins with a block of its own: then
// this is an upper bound, and some of the blocks are empty. The parameters are references, so that a kernel loads them
// where it needs them: values it would load early and keep in registers.
template <typename Length>
JAX_FLASH_BOTH Length blocks_of(bool packed, const int& sequences, const Length& length, int size) {
  return packed ? length / size + sequences + 1 : ceil_div(length, size);
}

// The float accumulator of dQ, for `heads` of all batch entries, in whole tiles of kDqRows rows and 32 columns; and
// with two counters for each head behind it, and one for each tile where additions are `ordered`
// (cuda/sm90a/dq_sums.cuh).
constexpr int kDqRows = 16;
template <typename Heads, typename Tiles>
JAX_FLASH_BOTH auto dq_sums(Heads heads, Tiles tiles, int head_dim) {
  return heads * tiles * kDqRows * round_up(head_dim, 32);
}
// `turns`: the counters of blocks that add in order.
template <typename Heads, typename Tiles>
JAX_FLASH_BOTH auto dq_elements(Heads heads, Tiles tiles, int head_dim, Heads turns) {
  return dq_sums(heads, tiles, head_dim) + 2 * heads + turns;
}
// Blocks that add in order have counters for each 16 rows of a query head and each kTurnKeys keys of a sum of dK and
// dV, of which there are no more than query heads.
constexpr int kTurnKeys = 64;

// Of how many heads the blocks are interleaved in the order of a grid (device/schedule.cuh): so many that `length` rows
// of each, of `row_bytes`, take at most group_bytes.
constexpr int kGroupBytes = 32 << 20;
constexpr int kLastBlocks = 2 * 132;  // of the last group, two a multiprocessor
constexpr int kLastHeads = 8;         // of the last group under causal, unless all groups have more
// What a backward of Hopper's that adds dQ under causal takes for its groups (device/backward_block.cuh), and what a
// row takes with its sums, of those that do so on any GPU.
constexpr int kGroupBytesOfSums = kGroupBytes / 4;
JAX_FLASH_BOTH int row_bytes_with_sums(int row_bytes, int head_dim) { return row_bytes + 4 * head_dim; }
JAX_FLASH_BOTH int heads_of_group(bool causal, int group_bytes, int row_bytes, int heads, int blocks, int length) {
  int group = group_bytes / row_bytes / length;
  if (!causal && group > ceil_div(kLastBlocks, blocks)) group = ceil_div(kLastBlocks, blocks);
  return group > heads ? heads : group < 1 ? 1 : group;
}
// Under causal, the first head of the last group, whose longest block must not begin when all others end.
JAX_FLASH_BOTH int last_group(int group, int heads, int blocks) {
  const int wanted = ceil_div(kLastBlocks, blocks), more = wanted < kLastHeads ? wanted : kLastHeads;
  return more < heads ? (heads - more) / group * group : 0;
}

// Where blocks add in the order of their index, one can add to a tile of 64 rows some 1.5 tiles after the block before.
// So many heads are interleaved that with a block a multiprocessor those of a head start so far apart. More would leave
// L2: 528 tiles were 9% slower than 160 at S 1024, head_dim 128, and 240 as fast (H100).
constexpr int kOrderedTiles = 200;
JAX_FLASH_BOTH int ordered_group(int heads, int length) {
  const int group = ceil_div(kOrderedTiles, ceil_div(length, 64));
  return group > heads ? heads : group;
}

// After it, one sum of the slopes' gradient for so many keys of a batch entry and a query head.
constexpr int kSlopeKeys = 16;

// A gradient of a captured array with exact_sums: of every element so many 64-bit digits of 24 bits, digit i in units
// of 2^(24 i - 149), and a word of flags (device/captured.cuh). Integers add up to the same in any order.
constexpr int kSumDigits = 12;

// The scratch of a forward whose keys are split: the sums of each slice, [B, N, T, V], then maximum and total of each
// slice, [B, N, T, 2]. These are the elements of one slice; `rows` is B * N * T.
template <typename Rows>
JAX_FLASH_BOTH Rows slice_elements(Rows rows, int value_head_dim) {
  return rows * (value_head_dim + 2);
}

// The grid of jax_flash_combine. If there are no more slices than a block has warps, each warp takes a row of out; else
// each block takes a row, whose slices go round its warps.
JAX_FLASH_BOTH bool combines_by_warp(const int& slices, int warps) { return slices <= warps; }

// The split-KV forward: whether the query heads of a key head share the rows of a block. Those of packed rows don't.
JAX_FLASH_BOTH bool heads_share_rows(bool packed) { return !packed; }

}  // namespace jax_flash
