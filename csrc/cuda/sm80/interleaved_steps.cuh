// A step of the forward whose softmax and loads are interleaved with its MMAs, without branches but the one for a
// maximum that is outgrown: the assembler schedules no instruction across a branch. Only two warps share a partition of
// a multiprocessor here, so other warps do not hide the latency of one.
#pragma once

#include "cuda/device/forward_steps.cuh"

namespace jax_flash {

constexpr bool interleaved = late_weights && limbs == 1;

// So many steps of Q's fragments stay in registers: what the accumulators of 16 rows a warp leave, and options do not
// take. At head_dim 256 shared memory is read nearly all of the time, and Q is a ninth of what is read.
constexpr int accumulators = row_tiles * (tile_value_head_dim + block_kv) / 2;
constexpr bool keeps_q = interleaved && row_tiles == 1 && !modifies_scores && !has_mask && !irregular && !has_descale;
constexpr int kept_steps = keeps_q ? at_most(ceil_div(head_dim, Mma::depth), at_least(0, (192 - accumulators) / 4)) : 0;

struct InterleavedForward : Forward {
  Mma::FragmentA q_kept[at_least(1, kept_steps)][row_tiles];

  __device__ __forceinline__ void begin_rows() {
    // Finite, so that its multiple can be subtracted from -inf: the weight of a key that is not kept is 0 by itself.
    const float lowest = -3e38f / fmaxf(1.f, rows.scale_log2);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      statistics[m][0].maximum = lowest;
      statistics[m][1].maximum = lowest;
    }
  }

  __device__ __forceinline__ void begin_tiles() {
    if constexpr (kept_steps == 0) return;
    copies_wait<0>();
    __syncthreads();  // Q has landed
#pragma unroll
    for (int kk = 0; kk < kept_steps; ++kk) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) q_kept[kk][m] = Mma::load_a(q_reader, 16 * m, kk);
    }
  }

  template <bool whole>
  __device__ __forceinline__ void start_v(int tile) {
    if constexpr (whole && !loads_by_list) {
      v_load.start_whole(shared_address(shared.v), v, problem.v.row_stride, tile * block_kv, extent.kv.length,
                         threadIdx.x, true);
      copies_commit();
    } else {
      Forward::start_v(tile);
    }
  }

  template <bool whole>
  __device__ __forceinline__ void change_tiles(int next) {
    if constexpr (whole && !loads_by_list) {
      copies_wait<0>();
      __syncthreads();  // V has landed; everybody is done with K
      k_load.start_whole(shared_address(shared.k), k, problem.k.row_stride, at_least(next, 0) * block_kv,
                         extent.kv.length, threadIdx.x, next >= 0);
      copies_commit();
    } else {
      Forward::change_tiles<false>(next);
    }
  }

  // Q K^T, each fragment loaded a step before it is multiplied. V is sent for behind the first loads, whose latency
  // that fills, and the next K as soon as the last have come.
  template <bool masked>
  __device__ __forceinline__ void multiply(FragmentC (&scores)[row_tiles][block_kv / 8], int tile, int next) {
    constexpr int steps = ceil_div(head_dim, Mma::depth), pairs = block_kv / 16;
    Mma::FragmentA q_ahead[2][row_tiles];
    Mma::FragmentB k_ahead[2][pairs];
    auto load = [&](int kk) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        q_ahead[kk % 2][m] = kk < kept_steps ? q_kept[kk][m] : Mma::load_a(q_reader, 16 * m, kk);
      }
#pragma unroll
      for (int i = 0; i < pairs; ++i) k_ahead[kk % 2][i] = Mma::load_b(k_reader, 16 * i, kk);
    };
    load(0);
    start_v<!masked>(tile);
#pragma unroll
    for (int kk = 0; kk < steps; ++kk) {
      if (kk + 1 < steps) {
        load(kk + 1);
      } else {
        change_tiles<!masked>(next);
      }
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        multiply_in_turn([&](int m) { return &scores[m][2 * i]; }, q_ahead[kk % 2], k_ahead[kk % 2][i]);
      }
    }
  }

  // Updates the maxima of a warp's rows if one of them has been outgrown, and then calls `reweigh`. That is rare after
  // the first tile; until then each lane looks at its own scores only.
  template <typename Reweigh>
  __device__ __forceinline__ void update_maxima(const FragmentC (&scores)[row_tiles][block_kv / 8],
                                                const Reweigh& reweigh) {
    float maxima[row_tiles][2];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maxima[m][half] = maximum_of(scores[m], half);
        outgrown |= statistics[m][half].outgrown(maxima[m][half], rows.scale_log2);
      }
    }
    if (!__any_sync(0xffffffffu, outgrown)) return;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowStatistics& row = statistics[m][half];
        // What a row gives does not depend on the others of its warp.
        const float maximum = quad_max(maxima[m][half]);
        const float taken = row.outgrown(maximum, rows.scale_log2) ? maximum : row.maximum;
        multiply_half(out[m], half, row.update(taken, rows.scale_log2));
      }
    }
    reweigh();
  }

  // The i-th of 8 scores that a lane has of 16 rows and 16 keys: four of each half of the rows.
  static __device__ __forceinline__ float& score_of(FragmentC (&scores)[block_kv / 8], int kk, int i) {
    return scores[2 * kk + i / 2 % 2].x[i / 4 * 2 + i % 2];
  }
  __device__ __forceinline__ float weigh(float score, int m, int half) const {
    return exp2_approx(score * rows.scale_log2 -
                       RowStatistics::scaled_max_of(statistics[m][half].maximum, rows.scale_log2));
  }

  // Softmax and P V. The first weights are computed beside the search for new maxima, and once more where there are
  // any; those of the next 16 keys among the products of these.
  __device__ __forceinline__ void add_values(FragmentC (&scores)[row_tiles][block_kv / 8]) {
    constexpr int groups = tile_value_head_dim / group, steps = block_kv / 16, weights = 8 * row_tiles;
    const VReader v_reader(shared_address(shared.v), lane);
    Mma::FragmentB v_ahead[2];
    v_ahead[0] = Mma::load_columns(v_reader, 0, 0);
    float first[weights];
    auto weigh_first = [&] {
#pragma unroll
      for (int i = 0; i < weights; ++i) first[i] = weigh(score_of(scores[i / 8], 0, i % 8), i / 8, i / 4 % 2);
    };
    weigh_first();
    update_maxima(scores, weigh_first);
#pragma unroll
    for (int i = 0; i < weights; ++i) {
      score_of(scores[i / 8], 0, i % 8) = first[i];
      statistics[i / 8][i / 4 % 2].total += first[i];
    }

#pragma unroll
    for (int kk = 0; kk < steps; ++kk) {
      Mma::FragmentA p[row_tiles];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) p[m] = Mma::operand(scores[m], kk).limb[0];
#pragma unroll
      for (int n = 0; n < groups; ++n) {
        const int here = kk * groups + n, ahead = here + 1;
        if (ahead < steps * groups) {
          v_ahead[ahead % 2] = Mma::load_columns(v_reader, ahead / groups, ahead % groups);
        }
        multiply_in_turn([&](int m) { return &out[m][2 * n]; }, p, v_ahead[here % 2]);
        if (kk + 1 == steps) continue;
#pragma unroll
        for (int i = n * weights / groups; i < (n + 1) * weights / groups; ++i) {
          float& score = score_of(scores[i / 8], kk + 1, i % 8);
          score = weigh(score, i / 8, i / 4 % 2);
          statistics[i / 8][i / 4 % 2].total += score;
        }
      }
    }
  }

  template <bool masked>
  __device__ __forceinline__ void step(int tile, int next) {
    FragmentC scores[row_tiles][block_kv / 8] = {};

    copies_wait<0>();
    __syncthreads();  // K has landed; everybody is done with the previous V
    multiply<masked>(scores, tile, next);

    logits<masked>(scores, tile);
    add_values(scores);
  }
};

using Steps = Select<interleaved, InterleavedForward, Forward>::type;

}  // namespace jax_flash
