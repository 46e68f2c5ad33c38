// How many blocks there are and where scratch lies: what the host and the kernels have to count alike. Compiled by the
// host compiler and by NVRTC, so it includes nothing.
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

// Blocks of `size` rows in a batch entry of `length` rows. Packed sequences each begin with a block of their own: then
// this is an upper bound, and some of the blocks are empty. By reference, so that a kernel reads what it needs where it
// needs it: by value the compiler reads parameters early.
template <typename Length>
JAX_FLASH_BOTH Length blocks_of(bool packed, const int& sequences, const Length& length, int size) {
  return packed ? length / size + sequences + 1 : ceil_div(length, size);
}

// The float accumulator of dQ, for `heads` of all batch entries, in whole tiles of kDqRows rows and 32 columns.
constexpr int kDqRows = 16;
template <typename Heads, typename Tiles>
JAX_FLASH_BOTH auto dq_elements(Heads heads, Tiles tiles, int head_dim) {
  return heads * tiles * kDqRows * round_up(head_dim, 32);
}

// Behind it, one sum for the gradient of a slope for so many keys of a batch entry and a query head.
constexpr int kSlopeKeys = 16;

// The scratch of a forward whose keys are split: of every slice sums [B, N, T, V], and then of every slice maximum and
// total [B, N, T, 2]. `rows` is B * N * T; what a slice has of both.
template <typename Rows>
JAX_FLASH_BOTH Rows slice_elements(Rows rows, int value_head_dim) {
  return rows * (value_head_dim + 2);
}

// jax_flash_combine: up to so many slices as a block has warps a warp takes a row of out, and a block as many rows as
// it has warps; of more, a row is a block's, whose warps take the slices by turns.
JAX_FLASH_BOTH bool combines_by_warp(const int& slices, int warps) { return slices <= warps; }

// The split-KV forward: whether the query heads of a key head share the rows of a block, as those of packed rows don't.
JAX_FLASH_BOTH bool heads_share_rows(bool packed) { return !packed; }

}  // namespace jax_flash
