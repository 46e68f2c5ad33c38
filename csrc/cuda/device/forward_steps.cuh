// The steps of the forward over tiles of keys, for every family whose mma.cuh is included before; sm80 has its own way
// for most calls, interleaved_steps.cuh.
//
// A block owns block_q rows of one query head; each warp owns 16 * row_tiles of them, with their accumulators in
// registers. K and V tiles have one buffer each: V is on its way while Q K^T is computed, the next K while softmax and
// P V are. Keys are walked from the last to the first, so that the tiles to mask come first and the loop over full
// tiles has no test in it.
#pragma once

#include "cuda/device/key_walk.cuh"
#include "cuda/device/place.cuh"
#include "cuda/device/softmax.cuh"

namespace jax_flash {

using OutTile = Tile<block_q, tile_value_head_dim>;
constexpr int group = Mma::group(tile_value_head_dim, 1);  // of columns of out
using QReader = decltype(Mma::reader_a<QTile>(0, 0, 0));
using KReader = decltype(Mma::reader_b<KTile>(0, 0, 0));
using VReader = Mma::ColumnReader<VTile, group>;

// V is on its way while Q K^T is computed, or where that would take the last registers, during the softmax: at head_dim
// 64 and 128 with 8 warps (sm75) 20% slower on an H200, at 128 with 32 rows a warp (sm70) without spills.
constexpr int registers_for_v = block_kv * limbs * tile_value_head_dim / (2 * threads);
constexpr bool early_v =
    !loads_take_registers || (limbs == 1 && row_tiles * (tile_value_head_dim + block_kv) / 2 + registers_for_v <= 150);

// A row's maximum is replaced only when it is outgrown, and weights are computed where the product needs them, 16 keys
// at a time: at head_dim 128 391 TFLOP/s in place of 364, and at 64 with 128 keys 353 in place of 337, for want of
// spills. Dropout wants more keys together; where loads take registers too, either spills.
constexpr bool lazy = !loads_take_registers;
constexpr bool late_weights = lazy && !with_dropout_rate;

struct SharedStorage {
  // And out, at the end, unless it is stored from registers.
  char q[QTile::bytes > OutTile::bytes || Mma::direct_stores ? QTile::bytes : OutTile::bytes];
  char k[KTile::bytes];
  char v[VTile::bytes];
};
// Values of the diagonals of a warp's rows and a tile of keys, of each warp, behind it: as a member they would take a
// byte where there are none, and sm_75 has none left at head_dim 128.
using AllDiagonals = DiagonalValues<16 * row_tiles, block_kv, true>;
constexpr bool keeps_diagonal_values =
    has_diagonal_value && fits_in_multiprocessor<sizeof(SharedStorage) + warps * sizeof(AllDiagonals::Storage)>;
using Diagonals = DiagonalValues<16 * row_tiles, block_kv, keeps_diagonal_values>;
constexpr int diagonal_bytes = keeps_diagonal_values ? warps * sizeof(Diagonals::Storage) : 0;

extern "C" __constant__ KernelTraits jax_flash_forward_traits = {
    .threads = threads,
    .block_rows = block_q,
    .shared_bytes = sizeof(SharedStorage) + diagonal_bytes,
};

struct Forward : KeyWalk<SharedStorage> {
  QReader q_reader;
  KReader k_reader;
  FragmentC out[row_tiles][tile_value_head_dim / 8];
  RowStatistics statistics[row_tiles][2];

  template <bool whole>
  __device__ __forceinline__ void change_tiles(int next) {
    copies_wait<0>();
    v_load.finish(shared_address(shared.v), threadIdx.x);
    __syncthreads();  // V has landed; everybody is done with K
    // Through registers a tile that nobody needs at the end, rather than a branch, at which the assembler spills.
    if (next >= 0 || loads_take_registers) start_k<whole>(at_least(next, 0));
  }

  // Before the first step: of the rows' statistics, and once Q and the first tile of keys are on their way.
  __device__ __forceinline__ void begin_rows() {}
  __device__ __forceinline__ void begin_tiles() {}

  // Scores of a tile of keys become logits.
  template <bool masked>
  __device__ __forceinline__ void logits(FragmentC (&scores)[row_tiles][block_kv / 8], int tile) const {
    if constexpr (!(masked || modifies_scores || has_mask)) return;
    const int lane_row = lane / 4;
    const Diagonals diagonals(reinterpret_cast<Diagonals::Storage*>(&shared + 1)[warp], problem, rows.keep.functions(),
                              row_of(0, 0) - lane_row, tile * block_kv, lane_row, lane % 4 * 2, lane);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.logits<masked>(scores[m], nullptr, row_of(m, half), half, tile * block_kv, lane, diagonals.beyond(16 * m));
      }
    }
  }

  // One tile of keys. The next one is loaded meanwhile; `next` is negative when there is none.
  template <bool masked>
  __device__ __forceinline__ void step(int tile, int next) {
    FragmentC scores[row_tiles][block_kv / 8] = {};

    copies_wait<0>();
    k_load.finish(shared_address(shared.k), threadIdx.x);
    __syncthreads();  // K has landed; everybody is done with the previous V
    if constexpr (early_v) start_v<!masked>(tile);

    if constexpr (!early_v) {
      q_reader.first = opaque(q_reader.first);
      k_reader.first = opaque(k_reader.first);
    }
    Mma::multiply_rows<head_dim>(scores, q_reader, k_reader);
    if constexpr (early_v) change_tiles<!masked>(next);

    logits<masked>(scores, tile);
    if constexpr (!early_v) start_v(tile);  // the test whether it is whole keeps the assembler from spilling
    auto row_maximum = [&](int m, int half) { return quad_max(maximum_of(scores[m], half)); };
    auto take_in = [&](int m, int half, float maximum) {
      multiply_half(out[m], half, statistics[m][half].update(maximum, rows.scale_log2));
    };
    // Of sixteen keys.
    auto weigh = [&](int m, int half, int kk) {
      statistics[m][half].weigh(scores[m], half, rows.scale_log2, 2 * kk, 2 * kk + 2);
    };
    if constexpr (lazy) {
      float maxima[row_tiles][2];
      bool outgrown = false;
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          maxima[m][half] = row_maximum(m, half);
          outgrown |= statistics[m][half].outgrown(maxima[m][half], rows.scale_log2);
        }
      }
      // Seldom but for the first tile; and what a row gives does not depend on the others of its warp.
      if (__any_sync(0xffffffffu, outgrown)) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const RowStatistics& row = statistics[m][half];
            take_in(m, half, row.outgrown(maxima[m][half], rows.scale_log2) ? maxima[m][half] : row.maximum);
          }
        }
      }
    }
    if constexpr (!late_weights) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (!lazy) take_in(m, half, row_maximum(m, half));
#pragma unroll
          for (int kk = 0; kk < block_kv / 16; ++kk) weigh(m, half, kk);
        }
        if constexpr (with_dropout_rate) rows.drop<false>(scores[m], row_of(m, 0), tile * block_kv, lane);
      }
    }

    if constexpr (!early_v) change_tiles<!masked>(next);
    const u32 v_tile = shared_address(shared.v);
    Mma::multiply_columns<block_kv>(
        out,
        [&](int m, int kk) {
          if constexpr (late_weights) {
            weigh(m, 0, kk);
            weigh(m, 1, kk);
          }
          return Mma::operand(scores[m], kk);
        },
        VReader(early_v ? v_tile : opaque(v_tile), lane));
  }

  // A template, so that families that store from registers need none of the way through shared memory.
  template <typename M = Mma>
  __device__ __forceinline__ void finish(const Place& place) {
    Result* out_head = result_of(problem.out, place.batch, place.head, extent.q.first);
    float* lse = static_cast<float*>(problem.lse) +
                 (static_cast<i64>(place.batch) * problem.q_heads + place.head) * problem.q_length + extent.q.first;
    const float sink = place.sink(problem), descale = descale_of(problem, place.batch, place.kv_head).value;
    const int warp_row = warp * row_tiles * 16;
    if constexpr (!M::direct_stores && tile_head_dim != tile_value_head_dim) {
      __syncthreads();  // rows of out lie elsewhere than those of Q
    }
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowStatistics& row = statistics[m][half];
        row.total = quad_sum(row.total);
        inverse[half] = row.total == 0.f ? 0.f : rows.dropout.factor * descale / row.total;
        const int t = row_of(m, half);
        float row_lse = row.lse(rows.scale_log2);
        if (has_q_lengths && t >= extent.q.length) {
          inverse[half] = 0.f;
          row_lse = sink;
        }
        if (lane % 4 == 0 && t < extent.q.stored) lse[t] = row_lse;
      }
      if constexpr (M::direct_stores) {
        M::template store_fragments<value_head_dim, group, 1>(
            out[m], inverse[0], inverse[1], out_head, problem.out.row_stride, row_of(m, 0), extent.q.stored, 0, lane);
      } else {
        // A warp's rows of Q are read by that warp alone, so they can take its rows of out.
        M::template put_accumulators<OutTile, 1>(shared.q, warp_row + m * 16, 0, out[m], inverse[0], inverse[1], lane);
      }
    }
    if constexpr (!M::direct_stores) {
      __syncwarp();
      M::template store_rows<OutTile, value_head_dim, 16 * row_tiles>(
          shared.q, warp_row, out_head, problem.out.row_stride, first_row + warp_row, extent.q.stored, lane);
    }
  }
};

}  // namespace jax_flash
