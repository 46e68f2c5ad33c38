// A step of the pass for dQ, interleaved and without branches as interleaved_steps.cuh is for the forward. Here S comes
// first, so that its exponentials are computed among the MMAs of dP, and dS = P * (dP - delta) among those of dS K. K
// is wanted at both ends of a step, so there are two tiles of it: the next is on its way from dP on, V during S.
#pragma once

#include "cuda/device/backward_dq_steps.cuh"

namespace jax_flash {

struct InterleavedDq : BackwardDq {
  u32 k_tile;  // of this step, in shared memory

  __device__ __forceinline__ void begin(int tile) {
    k_tile = shared_address(shared.k);
    start_k<false>(tile, k_tile);
  }

  template <bool whole>
  __device__ __forceinline__ void start_k(int tile, u32 to, bool wanted = true) {
    if constexpr (loads_by_list) {
      if (wanted) start_listed_k(to, tile);
    } else if constexpr (whole) {
      k_load.start_whole(to, k, problem.k.row_stride, at_least(tile, 0) * block_kv, extent.kv.length, threadIdx.x,
                         wanted);
    } else if (wanted) {
      k_load.start(to, k, problem.k.row_stride, tile * block_kv, extent.kv.length, threadIdx.x);
    }
    copies_commit();
  }
  template <bool whole>
  __device__ __forceinline__ void start_v(int tile) {
    if constexpr (whole && !loads_by_list) {
      v_load.start_whole(shared_address(shared.v), v, problem.v.row_stride, tile * block_kv, extent.kv.length,
                         threadIdx.x, true);
      copies_commit();
    } else {
      BackwardDq::start_v(tile);
    }
  }

  // c = A B^T, each fragment of B loaded `ahead` pieces of 16 columns before it is multiplied, and those of A a step.
  // `begun` is called behind the first loads, and `beside(piece)` behind each piece.
  template <int k, typename A, typename B, typename Begun, typename Beside>
  static __device__ __forceinline__ void multiply_ahead(FragmentC (&c)[row_tiles][block_kv / 8],
                                                        const LaneReader<A>& a_reader, const LaneReader<B>& b_reader,
                                                        const Begun& begun, const Beside& beside) {
    constexpr int steps = ceil_div(k, Mma::depth), pairs = block_kv / 16, pieces = steps * pairs;
    constexpr int ahead = at_most(3, pieces);
    Mma::FragmentA a[2][row_tiles];
    Mma::FragmentB b[ahead + 1];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) a[0][m] = Mma::load_a(a_reader, 16 * m, 0);
#pragma unroll
    for (int piece = 0; piece < ahead; ++piece) b[piece] = Mma::load_b(b_reader, piece % pairs * 16, piece / pairs);
    begun();
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      const int step = piece / pairs, i = piece % pairs, next = piece + ahead;
      if (next < pieces) b[next % (ahead + 1)] = Mma::load_b(b_reader, next % pairs * 16, next / pairs);
      if (i == 0 && step + 1 < steps) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) a[(step + 1) % 2][m] = Mma::load_a(a_reader, 16 * m, step + 1);
      }
      multiply_in_turn([&](int m) { return &c[m][2 * i]; }, a[step % 2], b[piece % (ahead + 1)]);
      beside(piece);
    }
  }

  // The i-th of a lane's scores, eight for 16 rows and 16 keys, becomes P, and dP then dS.
  static constexpr int scores_of_lane = 4 * row_tiles * block_kv / 8;
  struct Spot {
    int m, n, e;
    __device__ __forceinline__ constexpr Spot(int i)
        : m(i / 8 % row_tiles), n(i / (8 * row_tiles) * 2 + i / 2 % 2), e(i / 4 % 2 * 2 + i % 2) {}
  };
  __device__ __forceinline__ void weigh(FragmentC (&p)[row_tiles][block_kv / 8], int i) const {
    const Spot s(i);
    float& x = p[s.m][s.n].x[s.e];
    x = rows.weight(x, lse_log2[s.m][s.e / 2]);
  }
  __device__ __forceinline__ void differentiate(FragmentC (&dp)[row_tiles][block_kv / 8],
                                                const FragmentC (&p)[row_tiles][block_kv / 8], int i) const {
    const Spot s(i);
    float& x = dp[s.m][s.n].x[s.e];
    x = derived(p[s.m][s.n].x[s.e], x, deltas[s.m][s.e / 2], dp_factor, 1.f);
  }

  template <bool masked>
  __device__ __forceinline__ void step(int tile, int next) {
    FragmentC p[row_tiles][block_kv / 8] = {}, ds[row_tiles][block_kv / 8] = {};
    const int row = warp * row_tiles * 16;

    copies_wait<0>();
    __syncthreads();  // K has landed; everybody is done with the previous one, and with V
    multiply_ahead<head_dim>(
        p, Mma::reader_a<QTile>(shared_address(shared.q), row, lane), Mma::reader_b<KTile>(k_tile, 0, lane),
        [&] { start_v<!masked>(tile); }, [](int) {});
    if constexpr (masked || modifies_scores || has_mask) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows.logits<masked>(p[m], nullptr, row_of(m, half), half, tile * block_kv, lane);
        }
      }
    }

    copies_wait<0>();
    __syncthreads();  // V has landed
    const u32 next_k = shared_address(shared.k) + KTile::bytes - (k_tile - shared_address(shared.k));
    constexpr int dp_pieces = ceil_div(value_head_dim, Mma::depth) * (block_kv / 16);
    constexpr int beside_a_piece = ceil_div(scores_of_lane, dp_pieces);
    multiply_ahead<value_head_dim>(
        ds, Mma::reader_a<OutTile>(shared_address(shared.dout), row, lane),
        Mma::reader_b<VTile>(shared_address(shared.v), 0, lane), [&] { start_k<!masked>(next, next_k, next >= 0); },
        [&](int piece) {
#pragma unroll
          for (int i = 0; i < beside_a_piece; ++i) {
            if (piece * beside_a_piece + i < scores_of_lane) weigh(p, piece * beside_a_piece + i);
          }
        });

    constexpr int groups = tile_head_dim / group, steps = block_kv / 16, pieces = 8 * row_tiles;
    constexpr int beside_a_group = ceil_div(pieces, groups);  // of the next 16 keys
    const Mma::ColumnReader<KTile, group> k_reader(k_tile, lane);
    Mma::FragmentB k_ahead[2];
    k_ahead[0] = Mma::load_columns(k_reader, 0, 0);
#pragma unroll
    for (int i = 0; i < pieces; ++i) differentiate(ds, p, i);
#pragma unroll
    for (int kk = 0; kk < steps; ++kk) {
      Mma::FragmentA operand[row_tiles];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) operand[m] = Mma::operand(ds[m], kk).limb[0];
#pragma unroll
      for (int n = 0; n < groups; ++n) {
        const int here = kk * groups + n, ahead = here + 1;
        if (ahead < steps * groups) {
          k_ahead[ahead % 2] = Mma::load_columns(k_reader, ahead / groups, ahead % groups);
        }
        multiply_in_turn([&](int m) { return &dq[m][2 * n]; }, operand, k_ahead[here % 2]);
        if (kk + 1 == steps) continue;
#pragma unroll
        for (int i = 0; i < beside_a_group; ++i) {
          const int at = n * beside_a_group + i;
          if (at < pieces) differentiate(ds, p, (kk + 1) * pieces + at);
        }
      }
    }
    k_tile = next_k;
  }
};

using Steps = Select<interleaved, InterleavedDq, BackwardDq>::type;

}  // namespace jax_flash
