// The steps of dQ alone over tiles of keys, for every family whose mma.cuh is included before; sm80 has its own way for
// most calls, interleaved_dq.cuh.
//
// A block owns block_q rows of one query head, as forward does, and walks over the keys. With
//   dP = dO V^T,  S = Q K^T,  P = exp(scale S - lse),  dS = P * (dP - delta)
// it accumulates dQ += dS K in registers. K and V tiles have one buffer each: K is on its way while dO V^T is computed,
// the next V while the rest is.
#pragma once

#include "cuda/device/key_walk.cuh"
#include "cuda/device/place.cuh"

namespace jax_flash {

using OutTile = Tile<block_q, limbs * tile_value_head_dim>;
constexpr int group = Mma::group(tile_head_dim, 1);  // of columns of dQ

// The next V is on its way from Q K^T on, or where it waits in registers that are short then, while dS K is computed.
constexpr int step_registers =
    row_tiles * (tile_head_dim + 2 * block_kv) / 2 + block_kv * limbs * tile_value_head_dim / (2 * threads);
constexpr bool early_v = !loads_take_registers || step_registers <= 160;

// Weights include the factor of those that are not dropped, and the loop needs no register for it: at head_dim 256
// Turing has none. With two limbs the exponent has no place for another summand.
constexpr bool weights_have_factor = with_dropout_rate && limbs == 1;

// Where copies need no registers and two tiles of K fit: see sm80/interleaved_dq.cuh.
constexpr bool interleaved =
    !loads_take_registers && stages == 2 && limbs == 1 && !with_dropout_rate && !keeps_derivatives;

struct SharedStorage {
  char q[QTile::bytes];  // and dQ, at the end, unless it is stored from registers
  char dout[OutTile::bytes];
  char k[(interleaved ? 2 : 1) * KTile::bytes];
  char v[VTile::bytes];
};

extern "C" __constant__ KernelTraits jax_flash_backward_dq_traits = {
    .threads = threads,
    .block_rows = block_q,
    .shared_bytes = sizeof(SharedStorage),
};

struct BackwardDq : KeyWalk<SharedStorage> {
  float dp_factor, ds_factor;  // dS is their common multiple of what it stands for
  FragmentC dq[row_tiles][tile_head_dim / 8];
  float lse_log2[row_tiles][2];  // what is subtracted before exp2
  float deltas[row_tiles][2];

  __device__ __forceinline__ void find_lane() {
    warp = reread_thread_index() / 32;
    lane = Lanes::of(reread_thread_index());
  }

  __device__ __forceinline__ void load_statistics(const float* lse, const float* delta) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        const bool valid = row < extent.q.length;
        lse_log2[m][half] = backward_lse(valid ? lse[row] : 0.f, valid);
        deltas[m][half] = valid ? delta[row] * ds_factor : 0.f;
        if constexpr (weights_have_factor) {
          lse_log2[m][half] -= log2f(rows.dropout.factor);
          deltas[m][half] /= rows.dropout.factor;
        }
      }
    }
  }

  // Sends for the first tile of keys.
  __device__ __forceinline__ void begin(int tile) { start_v(tile); }

  // One tile of keys. The next one is loaded meanwhile; `next` is negative when there is none.
  template <bool masked>
  __device__ __forceinline__ void step(int tile, int next) {
    FragmentC ds[row_tiles][block_kv / 8] = {};
    if constexpr (!early_v) find_lane();  // so that no address waits in registers for the next step
    // Through registers a tile that nobody needs at the end, rather than a branch, at which the assembler spills.
    const bool more = loads_take_registers || next >= 0;
    copies_wait<0>();
    v_load.finish(shared_address(shared.v), threadIdx.x);
    __syncthreads();  // V has landed; everybody is done with the previous K
    start_k<!masked>(tile);
    Mma::multiply_rows<value_head_dim>(ds,
                                       Mma::reader_a<OutTile>(shared_address(shared.dout), warp * row_tiles * 16, lane),
                                       Mma::reader_b<VTile>(shared_address(shared.v), 0, lane));

    FragmentC p[row_tiles][block_kv / 8] = {};
    copies_wait<0>();
    k_load.finish(shared_address(shared.k), threadIdx.x);
    __syncthreads();  // K has landed; everybody is done with V
    if (early_v && more) start_v<!masked>(at_least(next, 0));
    Mma::multiply_rows<head_dim>(p, Mma::reader_a<QTile>(shared_address(shared.q), warp * row_tiles * 16, lane),
                                 Mma::reader_b<KTile>(shared_address(shared.k), 0, lane));

#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      FragmentC derivatives[keeps_derivatives ? block_kv / 8 : 1];
      if constexpr (masked || modifies_scores || has_mask) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows.logits<masked>(p[m], derivatives, row_of(m, half), half, tile * block_kv, lane);
        }
      }
      rows.weigh(p[m], lse_log2[m]);
      if constexpr (with_dropout_rate) rows.drop<true>(p[m], row_of(m, 0), tile * block_kv, lane);
      rows.derive(ds[m], p[m], derivatives, deltas[m], dp_factor, weights_have_factor ? 1.f : rows.dropout.factor);
    }
    if (!early_v) start_v<!masked>(at_least(next, 0));
    Mma::multiply_columns<block_kv>(
        dq, [&](int m, int kk) { return Mma::operand(ds[m], kk); },
        Mma::ColumnReader<KTile, group>(shared_address(shared.k), lane));
  }

  // A template, so that families that store from registers need none of the way through shared memory.
  template <typename M = Mma>
  __device__ __forceinline__ void finish(Result* to, float factor) {
    const int warp_row = warp * row_tiles * 16;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (M::direct_stores) {
        M::template store_fragments<head_dim, group, 1>(dq[m], factor, factor, to, problem.dq.row_stride, row_of(m, 0),
                                                        extent.q.stored, 0, lane);
      } else {
        // A warp's rows of Q are read by that warp alone, so they can take its rows of dQ.
        M::template put_accumulators<QTile, 1>(shared.q, warp_row + m * 16, 0, dq[m], factor, factor, lane);
      }
    }
    if constexpr (!M::direct_stores) {
      __syncwarp();
      M::template store_rows<QTile, head_dim, 16 * row_tiles>(shared.q, warp_row, to, problem.dq.row_stride,
                                                              first_row + warp_row, extent.q.stored, lane);
    }
  }
};

}  // namespace jax_flash
