// FlashAttention-2 backward (Dao 2023, algorithm 2) for compute capability 8.0 and newer.
//
// A block owns block_kv keys of one key head and walks over the rows of every query head of its group. With
//   S^T = K Q^T,  P^T = exp(scale S^T - lse),  dP^T = V dO^T,  dS^T = P^T * (dP^T - delta)
// it accumulates dV += P^T dO and dK += dS^T Q in registers, and adds dQ += dS K to a float accumulator in global
// memory, which jax_flash_backward_dq turns into the result afterwards. Keys run along the rows of the accumulators,
// so that P^T and dS^T are operands of the next product as they are.
//
// A group of `key_warps` warps covers the keys, 16 each. With split = 1 every warp sees all rows of a tile and feeds
// P^T and dS^T from registers. With split = 2, for head dims whose dK and dV would not fit, two warps share their 16
// keys: each computes half of the rows of S^T, and half of the columns of dK and dV; P^T and dS^T pass through shared
// memory. dS always does, for dQ, whose products sum over all keys of the block.
#include "cuda/shared/mask.cuh"
#include "cuda/shared/schedule.cuh"
#include "cuda/sm80/mma.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int key_warps = block_kv / 16;
constexpr int split = warps / key_warps;
static_assert(split * key_warps == warps && (split == 1 || split == 2), "16 keys a warp, or a pair of warps");

using KTile = Tile<block_kv, tile_head_dim>;
using VTile = Tile<block_kv, tile_value_head_dim>;
using QTile = Tile<block_q, tile_head_dim>;
using DoutTile = Tile<block_q, tile_value_head_dim>;
using Scores = Mma::Scores<block_kv, block_q>;

constexpr int score_columns = block_q / split;  // rows of query in one warp's S^T
// Groups of columns of dK, dV and dQ, and how many of them a warp has: warps that share columns take groups in turn.
constexpr int dk_group = Mma::group(tile_head_dim, split);
constexpr int dv_group = Mma::group(tile_value_head_dim, split);
constexpr int dk_groups = ceil_div(tile_head_dim / dk_group, split);
constexpr int dv_groups = ceil_div(tile_value_head_dim / dv_group, split);
constexpr int dq_most_row_warps = warps == 8 && tile_head_dim % 64 == 0 ? warps / 4 : warps / 2;
constexpr int dq_column_warps = warps / (dq_most_row_warps < block_q / 16 ? dq_most_row_warps : block_q / 16);
constexpr int dq_row_warps = warps / dq_column_warps;
constexpr int dq_row_tiles = block_q / 16 / dq_row_warps;
constexpr int dq_group = Mma::group(tile_head_dim, dq_column_warps);
constexpr int dq_groups = ceil_div(tile_head_dim / dq_group, dq_column_warps);
constexpr int dq_groups_at_once = Mma::precise ? 1 : dq_groups;
static_assert(dq_row_tiles * dq_row_warps * 16 == block_q, "the warps share the rows of dQ evenly");

struct Rows {
  char q[QTile::bytes];
  char dout[DoutTile::bytes];
  float lse[block_q];
  float delta[block_q];
};

struct SharedStorage {
  char k[KTile::bytes];  // and dK, at the end, unless it is stored from registers
  char v[VTile::bytes];  // and dV, likewise
  Rows rows[stages];
  char ds[Scores::bytes];
  char p[split == 1 ? 16 : Scores::bytes];
};

extern "C" __constant__ LaunchFacts jax_flash_backward_facts = {threads, block_kv, sizeof(SharedStorage)};

// Where dQ is summed up: for every 16 rows, for every 8 columns, the accumulator fragment as the lanes hold it, so that
// one atomic instruction of a warp covers 128 contiguous bytes.
JAX_FLASH_DEVICE float* dq_fragment(const Problem& problem, int batch, int head, int row_tile, int column_tile) {
  const i64 row_tiles = ceil_div(problem.q_length, 16);
  const i64 tile = (static_cast<i64>(batch) * problem.q_heads + head) * row_tiles + row_tile;
  return static_cast<float*>(problem.scratch) + (tile * (tile_head_dim / 8) + column_tile) * 128;
}

template <int n>
JAX_FLASH_DEVICE FragmentC (&as_matrix(FragmentC (&c)[n]))[1][n] {
  return *reinterpret_cast<FragmentC(*)[1][n]>(&c);
}

struct Backward {
  const Problem& problem;
  SharedStorage& shared;
  int batch, kv_head;
  int offset;
  int first_key;  // of the block
  int warp, lane;
  int key_row;  // of the warp, in the block
  int half;     // which of a pair of warps; 0 when split is 1
  float scale_log2;
  FragmentC dk[dk_groups * dk_group / 8], dv[dv_groups * dv_group / 8];

  // Starts to bring one tile of rows of one query head.
  __device__ __forceinline__ void load_rows(Rows& rows, int head, int tile) {
    const int first = tile * block_q;
    load_tile<QTile, head_dim, threads>(shared_address(rows.q), head_of(problem.q, batch, head), problem.q.row_stride,
                                        first, problem.q_length, threadIdx.x);
    load_tile<DoutTile, value_head_dim, threads>(shared_address(rows.dout), head_of(problem.dout, batch, head),
                                                 problem.dout.row_stride, first, problem.q_length, threadIdx.x);
    // Rows beyond the end become zeros, lse included: with dO and delta they add nothing to any sum.
    if (threadIdx.x < block_q) {
      const i64 first_statistic = (static_cast<i64>(batch) * problem.q_heads + head) * problem.q_length;
      const int row = first + threadIdx.x;
      const bool valid = row < problem.q_length;
      const i64 at = first_statistic + (valid ? row : 0);
      copy_async_float(shared_address(&rows.lse[threadIdx.x]), static_cast<const float*>(problem.lse) + at, valid);
      copy_async_float(shared_address(&rows.delta[threadIdx.x]), static_cast<const float*>(problem.delta) + at, valid);
    }
    copies_commit();
  }

  // c += X Y^T, for the warp's 16 keys in X and its rows in Y.
  template <int k, typename X, typename Y>
  __device__ __forceinline__ void score_product(FragmentC (&c)[score_columns / 8], const char* x, const char* y) const {
    Mma::multiply_rows<k>(as_matrix(c), tall_reader<X>(shared_address(x), key_row, lane),
                          wide_reader<Y>(shared_address(y), half * score_columns, lane));
  }

  // c += A Y, where A [16 keys, block_q] is P^T or dS^T: the warp's own fragments, or rows of a score tile.
  template <typename Y, int group, int n>
  __device__ __forceinline__ void grad_product(FragmentC (&c)[n], const FragmentC (&own)[score_columns / 8],
                                               const char* score_tile, const char* y) const {
    const Mma::ColumnReader<Y, group> reader(shared_address(y), lane, half);
    if constexpr (split == 1) {
      Mma::multiply_columns<block_q>(as_matrix(c), [&](int m, int kk) { return Mma::operand(own, kk); }, reader);
    } else {
      Mma::multiply_columns<block_q, split>(as_matrix(c), Scores::ByKey(score_tile, key_row, lane), reader);
    }
  }

  // dQ += dS K, all keys of the block.
  __device__ __forceinline__ void add_dq(int head, int tile) const {
    constexpr int wide = dq_group / 8, all = tile_head_dim / dq_group;
    const int row_warp = warp % dq_row_warps, column_warp = warp / dq_row_warps;
    const Scores::ByRow<dq_row_warps> ds(shared.ds, row_warp, lane);
#pragma unroll
    for (int first = 0; first < dq_groups; first += dq_groups_at_once) {
      const int first_group = first * dq_column_warps + column_warp;
      FragmentC dq[dq_row_tiles][dq_groups_at_once * wide] = {};
      Mma::multiply_columns<block_kv, dq_column_warps>(
          dq, ds, Mma::ColumnReader<KTile, dq_group>(shared_address(shared.k), lane, first_group));
#pragma unroll
      for (int m = 0; m < dq_row_tiles; ++m) {
        const int row_tile = tile * (block_q / 16) + m * dq_row_warps + row_warp;
        if (row_tile * 16 >= problem.q_length) continue;
        float* to = dq_fragment(problem, batch, head, row_tile, wide * first_group) + lane;
#pragma unroll
        for (int n = 0; n < dq_groups_at_once * wide; ++n) {
          if (dq_groups * dq_column_warps != all && n / wide * dq_column_warps + first_group >= all) continue;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            atomicAdd(to + (n / wide * dq_column_warps * wide + n % wide) * 128 + e * 32, dq[m][n].x[e]);
          }
        }
      }
    }
  }

  // One tile of rows of one query head. With two stages the next tile is brought meanwhile; `next_tile` is negative
  // when there is none.
  template <bool masked>
  __device__ __forceinline__ void step(int head, int tile, int stage, int next_head, int next_tile) {
    Rows& rows = shared.rows[stage];
    copies_wait<0>();
    __syncthreads();  // the rows have landed; everybody is done with the previous dS and with the other stage
    if (stages == 2 && next_tile >= 0) load_rows(shared.rows[stage ^ 1], next_head, next_tile);

    FragmentC p[score_columns / 8] = {};
    score_product<head_dim, KTile, QTile>(p, shared.k, rows.q);
#pragma unroll
    for (int n = 0; n < score_columns / 8; ++n) {
      const int column = half * score_columns + 8 * n + lane % 4 * 2;
      const float2 lse = *reinterpret_cast<const float2*>(&rows.lse[column]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // An lse of -inf belongs to a row that keeps nothing, which only masked tiles have.
        p[n].x[e] = exp2_approx(p[n].x[e] * scale_log2 - (e % 2 ? lse.y : lse.x) * kLog2e);
        if constexpr (masked) {
          const int row = tile * block_q + column + e % 2, key = first_key + key_row + lane / 4 + e / 2 * 8;
          if (!kept(offset, row, key, problem.kv_length)) p[n].x[e] = 0.f;
        }
      }
    }
    if constexpr (split == 2) {
      Scores::put(shared.p, key_row, half * score_columns, p, lane);
    } else {
      grad_product<DoutTile, dv_group>(dv, p, shared.p, rows.dout);
    }

    FragmentC ds[score_columns / 8] = {};
    score_product<value_head_dim, VTile, DoutTile>(ds, shared.v, rows.dout);
#pragma unroll
    for (int n = 0; n < score_columns / 8; ++n) {
      const int column = half * score_columns + 8 * n + lane % 4 * 2;
      const float2 delta = *reinterpret_cast<const float2*>(&rows.delta[column]);
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[n].x[e] = p[n].x[e] * (ds[n].x[e] - (e % 2 ? delta.y : delta.x));
    }
    Scores::put(shared.ds, key_row, half * score_columns, ds, lane);
    if constexpr (split == 1) grad_product<QTile, dk_group>(dk, ds, shared.ds, rows.q);

    __syncthreads();  // dS, and with split = 2 P, are complete
    if constexpr (split == 2) {
      grad_product<DoutTile, dv_group>(dv, p, shared.p, rows.dout);
      grad_product<QTile, dk_group>(dk, ds, shared.ds, rows.q);
    }
    if constexpr (stages == 1) {
      if (next_tile >= 0) {
        __syncthreads();  // everybody is done with the rows
        load_rows(shared.rows[0], next_head, next_tile);
      }
    }
    add_dq(head, tile);
  }
};

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_backward(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);

  // Under causal the first keys are kept by the most rows, and go first.
  const Work work = work_of(ceil_div(problem.kv_length, block_kv), problem.kv_heads, problem.batch, problem.q_length);
  const int kv_head = work.head, batch = work.batch;
  const int group = problem.q_heads / problem.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  Backward backward{
      problem,
      shared,
      batch,
      kv_head,
      offset_of(problem, batch),
      work.block * block_kv,
      warp,
      lane,
      (split == 1 ? warp : warp % key_warps) * 16,
      split == 1 ? 0 : warp / key_warps,
      static_cast<float>(problem.options.scale) * kLog2e,
  };
  const RowTiles tiles =
      row_tiles_of<block_q>(backward.offset, backward.first_key, block_kv, problem.q_length, problem.kv_length);
  const int first_head = kv_head * group, last_head = first_head + group - 1;
  if (tiles.begin < tiles.end) {
    load_tile<KTile, head_dim, threads>(shared_address(shared.k), head_of(problem.k, batch, kv_head),
                                        problem.k.row_stride, backward.first_key, problem.kv_length, threadIdx.x);
    load_tile<VTile, value_head_dim, threads>(shared_address(shared.v), head_of(problem.v, batch, kv_head),
                                              problem.v.row_stride, backward.first_key, problem.kv_length,
                                              threadIdx.x);
    backward.load_rows(shared.rows[0], first_head, tiles.begin);
    int stage = 0;
    for (int head = first_head; head <= last_head; ++head) {
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const bool last_tile = tile + 1 == tiles.end;
        const int next_head = head + last_tile;
        const int next_tile = !last_tile ? tile + 1 : head < last_head ? tiles.begin : -1;
        if (tile < tiles.bare) {
          backward.step<true>(head, tile, stage, next_head, next_tile);
        } else {
          backward.step<false>(head, tile, stage, next_head, next_tile);
        }
        if (stages == 2) stage ^= 1;
      }
    }
    __syncthreads();  // everybody is done with K and V
  }

  const float scale = static_cast<float>(problem.options.scale);
  Element* dk = head_of(problem.dk, batch, kv_head);
  Element* dv = head_of(problem.dv, batch, kv_head);
  if constexpr (Mma::direct_stores) {
    const int key = backward.first_key + backward.key_row + lane / 4;
    Mma::store_fragments<head_dim, dk_group, split>(backward.dk, scale, scale, dk, problem.dk.row_stride, key,
                                                    problem.kv_length, backward.half, lane);
    Mma::store_fragments<value_head_dim, dv_group, split>(backward.dv, 1.f, 1.f, dv, problem.dv.row_stride, key,
                                                          problem.kv_length, backward.half, lane);
  } else {
    put_accumulators<KTile, split>(shared.k, backward.key_row, backward.half, backward.dk, scale, scale, lane);
    put_accumulators<VTile, split>(shared.v, backward.key_row, backward.half, backward.dv, 1.f, 1.f, lane);
    __syncthreads();
    constexpr int rows_of_warp = block_kv / warps;
    const int first = backward.first_key + warp * rows_of_warp;
    store_rows<KTile, head_dim, rows_of_warp>(shared.k, warp * rows_of_warp, dk, problem.dk.row_stride, first,
                                                   problem.kv_length, lane);
    store_rows<VTile, value_head_dim, rows_of_warp>(shared.v, warp * rows_of_warp, dv, problem.dv.row_stride,
                                                         first, problem.kv_length, lane);
  }
}

// dq = scale * (the sum in scratch). One warp turns 16 rows of one head.
extern "C" __global__ void __launch_bounds__(128) jax_flash_backward_dq(const __grid_constant__ Problem problem) {
  const int row_tiles = ceil_div(problem.q_length, 16);
  const i64 item = static_cast<i64>(blockIdx.x) * 4 + threadIdx.x / 32;
  if (item >= static_cast<i64>(problem.batch) * problem.q_heads * row_tiles) return;
  const int lane = threadIdx.x % 32;
  const int row_tile = static_cast<int>(item % row_tiles);
  const int head = static_cast<int>(item / row_tiles % problem.q_heads);
  const int batch = static_cast<int>(item / row_tiles / problem.q_heads);
  const float scale = static_cast<float>(problem.options.scale);
  const float* from = dq_fragment(problem, batch, head, row_tile, 0) + lane;
  Element* to = head_of(problem.dq, batch, head);
#pragma unroll
  for (int i = 0; i < ceil_div(head_dim, dq_group); ++i) {
    FragmentC dq[dq_group / 8];
#pragma unroll
    for (int n = 0; n < dq_group / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[n].x[e] = from[((i * dq_group / 8 + n) * 4 + e) * 32];
    }
    Mma::store_fragments<head_dim, dq_group, 1>(dq, scale, scale, to, problem.dq.row_stride, row_tile * 16 + lane / 4,
                                                problem.q_length, i, lane);
  }
}

}  // namespace jax_flash
