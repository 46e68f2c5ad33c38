// The gradient of a bias that batch entries or heads share, without atomic additions, for every family whose mma.cuh is
// included before.
//
// A block owns block_q rows and block_kv keys of one plane of dbias and walks over the batch entries and query heads
// that share it. With
//   dP = dO V^T,  S = Q K^T,  P = exp(scale S - lse),  dS = P * (dP - delta)
// it sums up dS in registers, in one order. So two products are computed that the other passes compute too; what these
// would have to store for it is [B, N, T, S]. With two stages the tiles of one product are on their way during the
// other; with one they take turns in the same place.
#pragma once

#include "cuda/device/opaque.cuh"
#include "cuda/device/score_rows.cuh"
#include "cuda/device/tile_walk.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int row_tiles = block_q / (16 * warps);  // m16 tiles of a warp
using QTile = Tile<block_q, limbs * tile_head_dim>;
using OutTile = Tile<block_q, limbs * tile_value_head_dim>;
using KTile = Tile<block_kv, limbs * tile_head_dim>;
using VTile = Tile<block_kv, limbs * tile_value_head_dim>;
static_assert(!packed, "packed sequences have no bias");

// The tiles of one product: dO and V, or Q and K.
struct Operands {
  char rows[at_least(OutTile::bytes, QTile::bytes)];
  char keys[at_least(VTile::bytes, KTile::bytes)];
};
struct SharedStorage {
  Operands stage[stages];

  __device__ __forceinline__ Operands& gradients() { return stage[0]; }
  __device__ __forceinline__ Operands& scores() { return stage[stages - 1]; }
};

extern "C" __constant__ KernelTraits jax_flash_backward_bias_traits = {
    .threads = threads,
    .block_rows = block_q,
    .shared_bytes = sizeof(SharedStorage),
    .block_keys = block_kv,
};

struct BackwardBias {
  const Problem& problem;
  SharedStorage& shared;
  int first_row, tile;       // of the block; the tile counts in block_kv keys
  int first_head, end_head;  // that share the plane, and batch entries
  int batch, end_batch;
  int head;
  bool full;  // in this batch entry all pairs of the tile are kept
  int warp, lane;
  FragmentC sum[row_tiles][block_kv / 8];

  __device__ __forceinline__ int kv_head() const { return head / (problem.q_heads / problem.kv_heads); }
  __device__ __forceinline__ int row_of(int m, int half) const {
    return first_row + (warp * row_tiles + m) * 16 + lane / 4 + half * 8;
  }

  __device__ __forceinline__ void find_lane() {
    warp = reread_thread_index() / 32;
    lane = Lanes::of(reread_thread_index());
  }

  // Goes on from `batch` to the next batch entry that keeps pairs of the tile; false when there is none.
  __device__ __forceinline__ bool find_batch() {
    for (; batch < end_batch; ++batch) {
      const Extent extent = extent_of(problem, batch, 0);
      const Heads heads{first_head, end_head - first_head};
      const auto tiles = walk_of_keys<block_kv, block_q>(problem, extent, band_of(problem, extent), heads, first_row);
      if (!tiles.visits(tile)) continue;
      full = tiles.is_full(tile);
      return true;
    }
    return false;
  }
  __device__ __forceinline__ bool advance() {
    if (++head < end_head) return true;
    head = first_head;
    ++batch;
    return find_batch();
  }
  // Passes over heads that float32_bias.cuh adds; `more` says whether there is one at all.
  __device__ __forceinline__ bool find_head(bool more) {
    while (more && computed_in_float32(problem, batch, kv_head())) more = advance();
    return more;
  }

  // Through registers in a loop that is one, or the assembler reads all of it early, and spills.
  template <typename T, int columns>
  __device__ __forceinline__ void load(char* to, const Tensor& from, int of_head, int first, int length) const {
    constexpr int pieces = loads_take_registers ? 2 : 1;
    using Piece = Tile<T::rows / pieces, T::columns>;
#pragma unroll 1
    for (int i = 0; i < pieces; ++i) {
      load_tile<Piece, columns, threads>(shared_address(to) + i * Piece::bytes, head_of(from, batch, of_head, 0),
                                         from.row_stride, first + i * Piece::rows, length, threadIdx.x);
    }
  }
  __device__ __forceinline__ void load_gradients() const {
    const Extent extent = extent_of(problem, batch, 0);
    load<OutTile, value_head_dim>(shared.gradients().rows, problem.dout, head, first_row, extent.q.length);
    load<VTile, value_head_dim>(shared.gradients().keys, problem.v, kv_head(), tile * block_kv, extent.kv.length);
    copies_commit();
  }
  __device__ __forceinline__ void load_scores() const {
    const Extent extent = extent_of(problem, batch, 0);
    load<QTile, head_dim>(shared.scores().rows, problem.q, head, first_row, extent.q.length);
    load<KTile, head_dim>(shared.scores().keys, problem.k, kv_head(), tile * block_kv, extent.kv.length);
    copies_commit();
  }

  // One head of one batch entry, whose dO and V are on their way; and the way of the next. False when it was the last.
  __device__ __forceinline__ bool step() {
    if constexpr (loads_take_registers) find_lane();  // so that no address waits in registers for the next step
    copies_wait<0>();
    __syncthreads();  // dO and V have landed; everybody is done with the previous Q and K
    if constexpr (stages == 2) load_scores();
    FragmentC ds[row_tiles][block_kv / 8] = {};
    Mma::multiply_rows<value_head_dim>(
        ds, Mma::reader_a<OutTile>(shared_address(shared.gradients().rows), warp * row_tiles * 16, lane),
        Mma::reader_b<VTile>(shared_address(shared.gradients().keys), 0, lane));
    if constexpr (stages == 1) {
      __syncthreads();  // everybody is done with dO and V, whose place Q and K take
      load_scores();
    }
    copies_wait<0>();
    __syncthreads();  // Q and K have landed; everybody is done with dO and V

    const Extent extent = extent_of(problem, batch, 0);
    const Descale descale = descale_of(problem, batch, kv_head());
    const float scale = scale_of(problem, batch) * descale.query * descale.key;
    const ScoreRows rows(problem, extent, head, scale);
    const float dp_factor = descale.dout * descale.value * probability_unit;
    const i64 first_statistic = (static_cast<i64>(batch) * problem.q_heads + head) * problem.q_length;
    float lse_log2[row_tiles][2], deltas[row_tiles][2];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        const bool valid = row < extent.q.length;
        const i64 from = first_statistic + row;
        lse_log2[m][half] = backward_lse(valid ? static_cast<const float*>(problem.lse)[from] : 0.f, valid);
        deltas[m][half] = valid ? static_cast<const float*>(problem.delta)[from] * probability_unit : 0.f;
      }
    }
    const bool all_kept = full;
    bool more;
    if constexpr (stages == 2) {
      more = find_head(advance());
      if (more) load_gradients();
    }
    FragmentC p[row_tiles][block_kv / 8] = {};
    Mma::multiply_rows<head_dim>(
        p, Mma::reader_a<QTile>(shared_address(shared.scores().rows), warp * row_tiles * 16, lane),
        Mma::reader_b<KTile>(shared_address(shared.scores().keys), 0, lane));
    if (all_kept) {
      add<false>(rows, ds, p, lse_log2, deltas, dp_factor);
    } else {
      add<true>(rows, ds, p, lse_log2, deltas, dp_factor);
    }
    if constexpr (stages == 1) {
      more = find_head(advance());
      __syncthreads();  // everybody is done with Q and K, whose place dO and V take
      if (more) load_gradients();
    }
    return more;
  }

  template <bool masked>
  __device__ __forceinline__ void add(const ScoreRows& rows, const FragmentC (&dp)[row_tiles][block_kv / 8],
                                      FragmentC (&p)[row_tiles][block_kv / 8], const float (&lse_log2)[row_tiles][2],
                                      const float (&deltas)[row_tiles][2], float dp_factor) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      FragmentC derivatives[derives_scores ? block_kv / 8 : 1];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.logits<masked, true>(p[m], derives_scores ? derivatives : nullptr, row_of(m, half), half, tile * block_kv,
                                  lane);
      }
      rows.weigh(p[m], lse_log2[m]);
      if constexpr (with_dropout_rate) rows.drop<true>(p[m], row_of(m, 0), tile * block_kv, lane);
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float ds = derived(p[m][n].x[e], dp[m][n].x[e], deltas[m][e / 2], dp_factor, rows.dropout.factor);
          if constexpr (derives_scores) ds *= derivatives[n].x[e];
          sum[m][n].x[e] += ds;
        }
      }
    }
  }

  // Two keys are stored at a time where they lie so.
  __device__ __forceinline__ void store(float* plane) const {
    const i64 row_stride = problem.dbias_strides.row;
    const int last = problem.kv_length;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        if (row >= problem.q_length) continue;
#pragma unroll
        for (int n = 0; n < block_kv / 8; ++n) {
          const int key = tile * block_kv + n * 8 + lane % 4 * 2;
          const FragmentC& c = sum[m][n];
          float* to = plane + row * row_stride + key;
          if (key + 1 < last && row_stride % 2 == 0) {
            *reinterpret_cast<float2*>(to) = {c.x[2 * half], c.x[2 * half + 1]};
          } else {
            if (key < last) to[0] = c.x[2 * half];
            if (key + 1 < last) to[1] = c.x[2 * half + 1];
          }
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_backward_bias(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const Strides& s = problem.dbias_strides;
  // The tiles of a row of tiles stand together, so that they share what they read of query in L2.
  const int key_blocks = ceil_div(problem.kv_length, block_kv), row_blocks = ceil_div(problem.q_length, block_q);
  const int index = blockIdx.x / key_blocks, plane = index / row_blocks;
  const int heads = s.head ? problem.q_heads : 1;  // that have a plane of their own
  const int head = plane % heads, batch = plane / heads;
  BackwardBias backward{problem,
                        shared,
                        index % row_blocks * block_q,
                        static_cast<int>(blockIdx.x % key_blocks),
                        head,
                        s.head ? head + 1 : problem.q_heads,
                        batch,
                        s.batch ? batch + 1 : problem.batch,
                        head,
                        false,
                        static_cast<int>(threadIdx.x / 32),
                        Lanes::of(threadIdx.x)};
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (FragmentC& c : backward.sum[m]) c = {};
  }
  bool more = backward.find_head(backward.find_batch());
  if (more) backward.load_gradients();
  while (more) more = backward.step();
  backward.store(static_cast<float*>(problem.dbias) + batch * s.batch + head * s.head);
}

}  // namespace jax_flash
