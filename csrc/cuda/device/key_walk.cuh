// What passes share whose blocks own block_q rows of one query head and walk over the keys, block_kv at a time, for
// every family whose mma.cuh is included before. K and V tiles have one buffer each. Keys are walked from the last to
// the first, so that the tiles to mask come first and the loop over full tiles has no test in it.
#pragma once

#include "cuda/device/listed_tile.cuh"
#include "cuda/device/opaque.cuh"
#include "cuda/device/schedule.cuh"
#include "cuda/device/score_rows.cuh"
#include "cuda/device/tile_walk.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int row_tiles = block_q / (16 * warps);  // m16 tiles of a warp
using QTile = Tile<block_q, limbs * tile_head_dim>;
using KTile = Tile<block_kv, limbs * tile_head_dim>;
using VTile = Tile<block_kv, limbs * tile_value_head_dim>;
using KLoad = TileLoad<KTile, head_dim, threads>;
using VLoad = TileLoad<VTile, value_head_dim, threads>;

// Where keys are listed: the rows of the tile of K that is loaded next. They are read a tile ahead.
template <bool present>
struct NextRows : ListedTile<KTile, threads> {};
template <>
struct NextRows<false> {
  __device__ __forceinline__ void read(const int*, int, int, int) const {}
};

// The state of a walk; `Shared` holds what is in shared memory, k and v among it.
template <typename Shared>
struct KeyWalk {
  const Problem& problem;
  Shared& shared;
  const Extent& extent;
  const Element* k;
  const Element* v;
  ScoreRows rows;
  int first_row;  // of the block
  int warp, lane;
  KLoad k_load;
  VLoad v_load;
  NextRows<loads_by_list> next_rows;

  // Where keys are listed.
  template <typename Tile>
  __device__ __forceinline__ void read_list(Tile& rows, int tile) const {
    rows.read(listed_rows(problem, extent.batch), at_least(tile, 0) * block_kv, extent.kv.length, threadIdx.x);
  }
  __device__ __forceinline__ void start_listed_k(u32 to, int tile) {
    k_load.start_listed(to, next_rows, k, problem.k.row_stride, threadIdx.x);
    read_list(next_rows, tile - 1);
  }
  // Before the first tile.
  __device__ __forceinline__ void read_first(int tile) {
    if constexpr (loads_by_list) read_list(next_rows, tile);
  }

  // `whole` when all keys of the tile are there.
  template <bool whole = false>
  __device__ __forceinline__ void start_k(int tile) {
    if constexpr (loads_by_list) {
      start_listed_k(shared_address(shared.k), tile);
    } else {
      k_load.template start<whole>(shared_address(shared.k), k, problem.k.row_stride, tile * block_kv, extent.kv.length,
                                   threadIdx.x);
    }
    copies_commit();
  }
  template <bool whole = false>
  __device__ __forceinline__ void start_v(int tile) {
    if constexpr (loads_by_list) {
      ListedTile<VTile, threads> rows;
      read_list(rows, tile);
      v_load.start_listed(shared_address(shared.v), rows, v, problem.v.row_stride, threadIdx.x);
    } else {
      v_load.template start<whole>(shared_address(shared.v), v, problem.v.row_stride, tile * block_kv, extent.kv.length,
                                   threadIdx.x);
    }
    copies_commit();
  }

  __device__ __forceinline__ int row_of(int m, int half) const {
    return first_row + (warp * row_tiles + m) * 16 + lane / 4 + half * 8;
  }
};

JAX_FLASH_DEVICE const Element* keys_of(const Problem& problem, const Extent& extent, int batch, int kv_head) {
  const Element* head = head_of(problem.k, batch, kv_head, extent.kv.first);
  return loads_by_list ? head : KLoad::base(head, problem.k.row_stride, threadIdx.x);
}
JAX_FLASH_DEVICE const Element* values_of(const Problem& problem, const Extent& extent, int batch, int kv_head) {
  const Element* head = head_of(problem.v, batch, kv_head, extent.kv.first);
  return loads_by_list ? head : VLoad::base(head, problem.v.row_stride, threadIdx.x);
}

// Every step from the last tile on.
template <typename Steps>
JAX_FLASH_DEVICE void take_steps(Steps& steps, const TileWalk<block_kv>& tiles) {
  int tile = tiles.last();
  if constexpr (one_loop) {
    while (tile >= tiles.range.begin) {
      const int next = tiles.before(tile);
      const bool full = tiles.is_full(tile);
      const int wanted = next >= tiles.range.begin ? next : -1;
      if (full) {
        steps.template step<false>(tile, wanted);
      } else {
        steps.template step<true>(tile, wanted);
      }
      tile = next;
    }
  } else {
    for (; tile >= tiles.range.full_end; --tile) steps.template step<true>(tile, tile - 1);
    for (; tile >= 0; --tile) steps.template step<false>(tile, tile - 1);
  }
}

}  // namespace jax_flash
