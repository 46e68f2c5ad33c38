// FlashAttention-2 backward (Dao 2023, algorithm 2) by mma.sync, for every family whose mma.cuh is included before.
//
// A block owns block_kv keys of one key head and walks over the rows of every query head of its group. With
//   S^T = K Q^T,  P^T = exp(scale S^T - lse),  dP^T = V dO^T,  dS^T = P^T * (dP^T - delta)
// it accumulates dV += P^T dO and dK += dS^T Q in registers. Unless option_separate_dq leaves dQ to a pass of its own
// (backward_dq.cuh), it adds dQ += dS K to a float accumulator in global memory, which jax_flash_convert_dq turns into
// the result afterwards. Keys run along the rows of the accumulators, so that P^T and dS^T are operands of the next
// product as they are.
//
// A group of `key_warps` warps covers the keys, 16 * key_tiles each. With split = 1 every warp sees all rows of a tile
// and feeds P^T and dS^T from registers. Else `split` warps share their keys, and each computes its part of the rows of
// S^T. Then either (passes_p) each computes its part of the columns of dK and dV, and P^T and dS^T pass through shared
// memory, which serves head dims whose dK and dV would not fit; or (sums_rows), where a pair of warps has registers for
// all columns, each sums up its own rows from registers, and the pair adds its sums at the end. Two tiles of keys a
// warp read less of the rows. Where a tile has no more than 16 rows each warp computes all of them, which is half as
// many products more, but in 64 KB head_dim 256 fits no others. For dQ, whose products sum over all keys of the
// block, dS always passes through shared memory.
#pragma once

#include "cuda/device/listed_tile.cuh"
#include "cuda/device/opaque.cuh"
#include "cuda/device/score_columns.cuh"
#include "cuda/device/tile_walk.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int key_warps = block_kv / (16 * key_tiles);
constexpr int split = warps / key_warps;
static_assert(split * key_warps == warps && (split & (split - 1)) == 0, "warps share the keys evenly");

using KTile = Tile<block_kv, limbs * tile_head_dim>;
using VTile = Tile<block_kv, limbs * tile_value_head_dim>;
using QTile = Tile<block_q, limbs * tile_head_dim>;
using OutTile = Tile<block_q, limbs * tile_value_head_dim>;
using ScoreTile = Mma::Scores<block_kv, block_q>;

static_assert(stages <= 2);
constexpr bool adds_dq = !option_separate_dq;
constexpr bool shares_rows = split > 1 && block_q >= 16 * split;  // of S^T, between warps
// Accumulators of at most 128 registers a lane, of which one half fits where the rows were.
constexpr bool sums_rows = shares_rows && split == 2 && key_tiles > 1 &&
                           key_tiles*(tile_head_dim + tile_value_head_dim) <= 256 &&
                           2 * block_kv* at_least(tile_head_dim, tile_value_head_dim) <= stages * block_q *
                                                                                             (tile_head_dim +
                                                                                              tile_value_head_dim);
constexpr bool passes_p = shares_rows && !sums_rows;
static_assert(!(has_dbias || has_dalibi_slopes) || !shares_rows || split == 2,
              "a sum has two addends, whose order is not felt");
constexpr int column_split = sums_rows ? 1 : split;                     // of dK and dV, between warps
constexpr int score_columns = shares_rows ? block_q / split : block_q;  // rows of query in one warp's S^T
// Groups of columns of dK, dV and dQ, and how many of them a warp has: warps that share columns take groups in turn.
constexpr int dk_group = Mma::group(tile_head_dim, column_split);
constexpr int dv_group = Mma::group(tile_value_head_dim, column_split);
constexpr int dk_groups = ceil_div(tile_head_dim / dk_group, column_split);
constexpr int dv_groups = ceil_div(tile_value_head_dim / dv_group, column_split);
// Steps of S^T and dP^T: unrolled whole, the assembler reads so far ahead that it spills (head_dim 128, 120 bytes).
constexpr int score_unrolled = key_tiles > 1 && passes_p&& tile_head_dim <= 128 ? 2 : 16;
constexpr int convert_warps = 4;  // of jax_flash_convert_dq, a block
constexpr int dq_most_row_warps = warps == 8 && tile_head_dim % 64 == 0 ? warps / 4 : warps / 2;
constexpr int dq_column_warps = warps / (dq_most_row_warps < block_q / 16 ? dq_most_row_warps : block_q / 16);
constexpr int dq_row_warps = warps / dq_column_warps;
constexpr int dq_row_tiles = block_q / 16 / dq_row_warps;
constexpr int dq_group = Mma::group(tile_head_dim, dq_column_warps);
constexpr int dq_groups = ceil_div(tile_head_dim / dq_group, dq_column_warps);
static_assert(dq_row_tiles * dq_row_warps * 16 == block_q, "the warps share the rows of dQ evenly");
// Groups that are multiplied, then added, while others wait: the first are on their way to memory under the products of
// the next, and dS stays in the registers that P and dP leave. All at once 289 TFLOP/s at head_dim 128 (321 by twos)
// and 244 at 256 (260 by ones), but 321 at head_dim 64 (310 by ones), where registers are full of dK and dV.
constexpr int dq_together = key_tiles > 1 && passes_p ? (warps == 4 ? 2 : 1) : dq_groups;

// The next rows are on their way from the beginning of a step, or where they wait in registers that it lacks, while dK
// is computed; with split = 2 those of dO while dV is, and those of Q while dK is.
constexpr int step_registers = (tile_head_dim + tile_value_head_dim) / (2 * split) + score_columns +
                               block_q * limbs * (tile_head_dim + tile_value_head_dim) / (2 * threads);
constexpr bool late_rows = loads_take_registers && stages == 1 && step_registers > 160;
constexpr bool early_rows = stages == 2 || (loads_take_registers && !late_rows);
// Without dQ a step has no barrier but its first, and ptxas spills least so (sm_80, head_dim 64: 32 and 76 bytes for 32
// and 100). None at all, with a product unrolled by 2, takes 2% longer.
constexpr bool rows_behind_scores = sums_rows && !adds_dq && stages == 2;

struct QueryRows {
  char q[QTile::bytes];
  char dout[OutTile::bytes];
  float lse[block_q];
  float delta[block_q];
};

struct NoTile {
  static constexpr int bytes = 16;
};

struct SharedStorage {
  char k[KTile::bytes];  // and dK, at the end, unless it is stored from registers
  char v[VTile::bytes];  // and dV, likewise
  QueryRows rows[stages];
  char ds[Select < adds_dq || passes_p, ScoreTile, NoTile > ::type::bytes];
  char p[Select<passes_p, ScoreTile, NoTile>::type::bytes];
};
// What warps and threads have of diagonals and of tables, behind it, as far as it fits: as members they would take a
// byte each where there are none.
template <bool values, bool sums, bool of_tables>
struct Behind {
  DiagonalStorageOf<DiagonalValues<score_columns, 16 * key_tiles, values>, DiagonalSums<score_columns, sums>, key_tiles>
      diagonals[warps];
  SharedTables<threads, of_tables> tables;
};
template <typename T>
constexpr bool fits_behind = fits_in_multiprocessor<sizeof(SharedStorage) + sizeof(T)>;
constexpr bool keeps_diagonal_values = has_diagonal_value && fits_behind<Behind<true, false, false>>;
constexpr bool keeps_diagonal_sums =
    captured_of_diagonals > 0 && fits_behind<Behind<keeps_diagonal_values, true, false>>;
constexpr bool tables_in_shared =
    captured_of_tables > 0 && fits_behind<Behind<keeps_diagonal_values, keeps_diagonal_sums, true>>;
using Diagonals = DiagonalValues<score_columns, 16 * key_tiles, keeps_diagonal_values>;
using OfDiagonals = DiagonalSums<score_columns, keeps_diagonal_sums>;
using OwnBehind = Behind<keeps_diagonal_values, keeps_diagonal_sums, tables_in_shared>;
constexpr int bytes_behind = keeps_diagonal_values || keeps_diagonal_sums || tables_in_shared ? sizeof(OwnBehind) : 0;

// The next rows of query on their way to shared memory.
struct RowsLoad {
  TileLoad<QTile, head_dim, threads> q;
  TileLoad<OutTile, value_head_dim, threads> dout;
  FloatLoad lse, delta;
};

extern "C" __constant__ KernelTraits jax_flash_backward_traits = {
    .threads = threads,
    .block_rows = block_kv,
    .shared_bytes = sizeof(SharedStorage) + bytes_behind,
    .convert_warps = adds_dq ? convert_warps : 0,
    .splits_groups = splits_groups,
};

// Where dQ is summed up: for every 16 rows, for every 8 columns, the accumulator fragment as the lanes hold it, so that
// one atomic instruction of a warp covers 128 contiguous bytes. `row_tile` counts in the batch entry.
JAX_FLASH_DEVICE float* dq_fragment(const Problem& problem, int batch, int head, int row_tile, int column_tile) {
  const i64 tile = (static_cast<i64>(batch) * problem.q_heads + head) * dq_tiles(problem) + row_tile;
  return static_cast<float*>(problem.scratch) + (tile * (tile_head_dim / 8) + column_tile) * 128;
}

// From compute capability 9.0 on one instruction adds all four of a lane, which lie together there; before, each of
// four adds one, and those of 32 lanes lie together.
#if __CUDA_ARCH__ >= 900
constexpr int dq_lane_step = 4;
JAX_FLASH_DEVICE void add_fragment(float* to, const FragmentC& c) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(c.x[0]), "f"(c.x[1]), "f"(c.x[2]),
               "f"(c.x[3])
               : "memory");
}
JAX_FLASH_DEVICE FragmentC read_fragment(const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  return {{x.x, x.y, x.z, x.w}};
}
#else
constexpr int dq_lane_step = 1;
JAX_FLASH_DEVICE void add_fragment(float* to, const FragmentC& c) {
#pragma unroll
  for (int e = 0; e < 4; ++e) atomicAdd(to + e * 32, c.x[e]);
}
JAX_FLASH_DEVICE FragmentC read_fragment(const float* from) { return {{from[0], from[32], from[64], from[96]}}; }
#endif

// The first key of a warp, in the block, and which of the warps that share its keys it is.
JAX_FLASH_DEVICE int key_row_of(int warp) { return (split == 1 ? warp : warp % key_warps) * 16 * key_tiles; }
JAX_FLASH_DEVICE int member_of(int warp) { return split == 1 ? 0 : warp / key_warps; }

struct Backward {
  const Problem& problem;
  SharedStorage& shared;
  const Extent& extent;
  int batch, sequence;
  int first_dq;  // tile of the extent
  ScoreColumns scores;
  int first_key;  // of the block
  int warp, lane;
  int key_row;  // of the warp, in the block
  int member;   // which of the warps that share keys; 0 when split is 1
  __device__ __forceinline__ int score_row() const { return shares_rows ? member * score_columns : 0; }
  // The first of this lane's two keys in tile `m` of the warp's.
  __device__ __forceinline__ int key_of(int m) const { return first_key + key_row + 16 * m + lane / 4; }
  __device__ __forceinline__ int column_member() const { return sums_rows ? 0 : member; }
  // Whether what a warp computes of S^T is not another's to report.
  __device__ __forceinline__ bool counts() const { return split == 1 || shares_rows || member == 0; }
  float dp_factor, ds_factor;  // dS is their common multiple of what it stands for
  FragmentC dk[key_tiles][dk_groups * dk_group / 8], dv[key_tiles][dv_groups * dv_group / 8];
  OperandGradients gradients[key_tiles];
  RowsLoad load;

  __device__ __forceinline__ OwnBehind& behind() const { return *reinterpret_cast<OwnBehind*>(&shared + 1); }
  __device__ __forceinline__ Diagonals of_diagonals(int first_row) const {
    return {behind().diagonals[warp].values,
            problem,
            scores.keep.functions(),
            first_row,
            first_key + key_row,
            lane % 4 * 2,
            lane / 4,
            lane};
  }

  __device__ __forceinline__ void find_lane() {
    warp = reread_thread_index() / 32;
    lane = Lanes::of(reread_thread_index());
    key_row = key_row_of(warp);
    member = member_of(warp);
  }

  // Starts to load one tile of rows of one query head.
  __device__ __forceinline__ void start_rows(QueryRows& rows, int head, int tile) {
    start_q(rows, head, tile);
    start_dout(rows, head, tile);
    copies_commit();
  }
  __device__ __forceinline__ void finish_rows(QueryRows& rows) const {
    finish_q(rows);
    finish_dout(rows);
  }
  __device__ __forceinline__ void start_q(QueryRows& rows, int head, int tile) {
    const int first = tile * block_q;
    const Element* q = head_of(problem.q, batch, head, extent.q.first);
    load.q.start(shared_address(rows.q), load.q.base(q, problem.q.row_stride, threadIdx.x), problem.q.row_stride, first,
                 extent.q.length, threadIdx.x);
    // Rows beyond the end become zeros, lse included: with dO and delta they add nothing to any sum.
    if (threadIdx.x < block_q) {
      const i64 first_statistic =
          (static_cast<i64>(batch) * problem.q_heads + head) * problem.q_length + extent.q.first;
      const int row = first + threadIdx.x;
      const bool valid = row < extent.q.length;
      const i64 at = first_statistic + (valid ? row : 0);
      load.lse.start(&rows.lse[threadIdx.x], static_cast<const float*>(problem.lse) + at, valid);
      load.delta.start(&rows.delta[threadIdx.x], static_cast<const float*>(problem.delta) + at, valid);
    }
  }
  __device__ __forceinline__ void finish_q(QueryRows& rows) const {
    load.q.finish(shared_address(rows.q), threadIdx.x);
    if (threadIdx.x < block_q) {
      load.lse.finish(&rows.lse[threadIdx.x]);
      load.delta.finish(&rows.delta[threadIdx.x]);
    }
  }
  __device__ __forceinline__ void start_dout(QueryRows& rows, int head, int tile) {
    const Element* dout = head_of(problem.dout, batch, head, extent.q.first);
    load.dout.start(shared_address(rows.dout), load.dout.base(dout, problem.dout.row_stride, threadIdx.x),
                    problem.dout.row_stride, tile * block_q, extent.q.length, threadIdx.x);
  }
  __device__ __forceinline__ void finish_dout(QueryRows& rows) const {
    load.dout.finish(shared_address(rows.dout), threadIdx.x);
  }

  // c = X Y^T, for the warp's keys in X and its rows in Y.
  template <int k, typename X, typename Y>
  __device__ __forceinline__ void score_product(FragmentC (&c)[key_tiles][score_columns / 8], const char* x,
                                                const char* y) const {
    Mma::multiply_rows<k, score_unrolled>(c, Mma::reader_a<X>(shared_address(x), key_row, lane),
                                          Mma::reader_b<Y>(shared_address(y), score_row(), lane));
  }

  // c += A Y, where A [keys of the warp, rows] is P^T or dS^T: the warp's own fragments, or rows of a score tile.
  template <typename Y, int group, int n>
  __device__ __forceinline__ void grad_product(FragmentC (&c)[key_tiles][n],
                                               const FragmentC (&own)[key_tiles][score_columns / 8],
                                               const char* score_tile, const char* y) const {
    const int first_row = sums_rows ? score_row() : 0;
    const Mma::ColumnReader<Y, group> reader(shared_address(y) + first_row * Y::row_bytes, lane, column_member());
    if constexpr (!passes_p) {
      Mma::multiply_columns<score_columns, column_split>(
          c, [&](int m, int kk) { return Mma::operand(own[m], kk); }, reader);
    } else {
      Mma::multiply_columns<block_q, column_split>(c, ScoreTile::ByKey(score_tile, key_row, lane), reader);
    }
  }

  // dQ += dS K, all keys of the block. Families that leave dQ to its own pass have no ByRow.
  template <typename T = ScoreTile>
  __device__ __forceinline__ void add_dq(int head, int tile) const {
    using Operand = Mma::OperandA;
    constexpr int wide = dq_group / 8, all = tile_head_dim / dq_group;
    const int row_warp = warp % dq_row_warps, column_warp = warp / dq_row_warps;
    const typename T::template ByRow<dq_row_warps> ds(shared.ds, row_warp, lane);
    const Mma::ColumnReader<KTile, dq_group> keys(shared_address(shared.k), lane, column_warp);
    constexpr int steps = block_kv / Mma::depth;
    constexpr bool holds_ds = dq_together < dq_groups;
    Operand held[holds_ds ? steps : 1][dq_row_tiles];
    if constexpr (holds_ds) {
#pragma unroll
      for (int kk = 0; kk < steps; ++kk) {
#pragma unroll
        for (int m = 0; m < dq_row_tiles; ++m) held[kk][m] = ds(m, kk);
      }
    }
#pragma unroll
    for (int first = 0; first < dq_groups; first += dq_together) {
      auto exists = [&](int i) {  // group `first` + i of the warp's
        return first + i < dq_groups &&
               (dq_groups * dq_column_warps == all || (first + i) * dq_column_warps + column_warp < all);
      };
      FragmentC dq[dq_row_tiles][dq_together * wide] = {};
#pragma unroll
      for (int kk = 0; kk < steps; ++kk) {
        Operand own[dq_row_tiles];
#pragma unroll
        for (int m = 0; m < dq_row_tiles; ++m) {
          if constexpr (holds_ds) {
            own[m] = held[kk][m];
          } else {
            own[m] = ds(m, kk);
          }
        }
#pragma unroll
        for (int i = 0; i < dq_together; ++i) {
          if (!exists(i)) continue;
          Mma::template multiply_group<dq_row_tiles>([&](int m) { return &dq[m][i * wide]; }, own, keys, kk,
                                                     (first + i) * dq_column_warps, 0, 0);
        }
      }
#pragma unroll
      for (int m = 0; m < dq_row_tiles; ++m) {
        const int row_tile = tile * (block_q / 16) + m * dq_row_warps + row_warp;
        if (row_tile * 16 >= extent.q.length) continue;
        float* to = dq_fragment(problem, batch, head, first_dq + row_tile, wide * column_warp) + lane * dq_lane_step;
#pragma unroll
        for (int n = 0; n < dq_together * wide; ++n) {
          if (!exists(n / wide)) continue;
          add_fragment(to + ((first + n / wide) * dq_column_warps * wide + n % wide) * 128, dq[m][n]);
        }
      }
    }
  }

  // One tile of rows of one query head. With two stages the next tile is loaded meanwhile; `next_tile` is negative
  // when there is none.
  template <bool masked>
  __device__ __forceinline__ void step(int head, int tile, int stage, int next_head, int next_tile) {
    QueryRows& rows = shared.rows[stage];
    if constexpr (late_rows) find_lane();  // so that no address waits in registers for the next step
    copies_wait<0>();
    __syncthreads();  // the rows have landed; everybody is done with the previous dS and with the other stage
    QueryRows& next_rows = shared.rows[stages == 2 ? stage ^ 1 : 0];
    // Through registers rows that nobody needs at the end, rather than a branch, at which the assembler spills.
    const bool last = next_tile < 0, more = loads_take_registers || !last;
    const int load_head = last ? head : next_head, load_tile = last ? tile : next_tile;
    if (early_rows && !rows_behind_scores && more) start_rows(next_rows, load_head, load_tile);

    FragmentC p[key_tiles][score_columns / 8] = {};
    FragmentC derivative[key_tiles][keeps_derivatives ? score_columns / 8 : 1];
    score_product<head_dim, KTile, QTile>(p, shared.k, rows.q);
    if (rows_behind_scores && more) start_rows(next_rows, load_head, load_tile);
    const int first_row = tile * block_q + score_row();
    const auto lse_of = [&](int column) {
      float2 lse = *reinterpret_cast<const float2*>(&rows.lse[score_row() + column]);
      if constexpr (modifies_scores) {
        lse.x = backward_lse(lse.x, first_row + column < extent.q.length);
        lse.y = backward_lse(lse.y, first_row + column + 1 < extent.q.length);
        return lse;
      }
      return float2{probability_lse(lse.x), probability_lse(lse.y)};
    };
    scores.weigh<masked>(
        p, derivative, first_row, key_of(0), lane, lse_of,
        [&](int i) { return scores.keep.rows_of(key_of(0) + 8 * i); }, unread_block, of_diagonals(first_row));
    if constexpr (with_dropout_rate) scores.drop(p, first_row, key_of(0), lane);
    if constexpr (passes_p) {
      put_weights(p);
    } else {
      weights_product(p, rows.dout);
    }

    FragmentC ds[key_tiles][score_columns / 8] = {};
    score_product<value_head_dim, VTile, OutTile>(ds, shared.v, rows.dout);
    const auto delta_of = [&](int column) {
      const float2 delta = *reinterpret_cast<const float2*>(&rows.delta[score_row() + column]);
      return has_descale ? float2{delta.x * ds_factor, delta.y * ds_factor} : delta;
    };
    scores.derive(
        ds, p, derivative, gradients, counts(), head, first_row, key_of(0), lane, dp_factor, delta_of,
        [&](int m) { return OfDiagonals{behind().diagonals[warp].sums[m], first_row, first_key + key_row + 16 * m}; });
    if constexpr (adds_dq || passes_p) {
      if (counts()) put_scores(shared.ds, ds);
    }
    if constexpr (!passes_p) {
      if constexpr (late_rows) start_rows(next_rows, load_head, load_tile);
      grad_product<QTile, dk_group>(dk, ds, shared.ds, rows.q);
    }

    if constexpr (adds_dq || passes_p) __syncthreads();  // dS, and where warps share its rows P, are complete
    if constexpr (passes_p) {
      if constexpr (late_rows) start_dout(next_rows, load_head, load_tile);
      grad_product<OutTile, dv_group>(dv, p, shared.p, rows.dout);
      if constexpr (late_rows) {
        __syncthreads();  // everybody is done with dO
        finish_dout(next_rows);
        start_q(next_rows, load_head, load_tile);
      }
      grad_product<QTile, dk_group>(dk, ds, shared.ds, rows.q);
    }
    if (more) {
      if constexpr (stages == 1) {
        __syncthreads();  // everybody is done with the rows
        if constexpr (!early_rows && !late_rows) start_rows(next_rows, load_head, load_tile);
      }
      if constexpr (loads_take_registers && !(late_rows && shares_rows)) finish_dout(next_rows);
      if constexpr (loads_take_registers) finish_q(next_rows);
    }
    if constexpr (adds_dq) add_dq(head, tile);
    if constexpr (sums_gradients) {
      if (counts() && (next_tile < 0 || next_head != head)) {
#pragma unroll
        for (int m = 0; m < key_tiles; ++m)
          gradients[m].flush(problem, extent, scores.keep.functions(), sequence, head, first_key + key_row + 16 * m,
                             lane);
      }
    }
    if (next_tile >= 0 && next_head != head) scores.enter(next_head);
  }

  // The first of a pair of warps takes what the second has summed up of their keys, through the rows' place.
  template <int n>
  __device__ __forceinline__ void sum_pairs(FragmentC (&c)[key_tiles][n]) {
    static_assert(sizeof(shared.rows) >= key_warps * key_tiles * n * 32 * sizeof(uint4), "a half fits");
    const u32 sums = shared_address(shared.rows) + (warp % key_warps * key_tiles * n * 32 + lane) * sizeof(uint4);
#pragma unroll
    for (int i = 0; i < key_tiles * n; ++i) {
      const float (&x)[4] = c[i / n][i % n].x;
      const uint4 bits = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
      if (member == 1) store_shared(sums + i * 32 * sizeof(uint4), bits);
    }
    __syncthreads();
    if (member == 0) {
#pragma unroll
      for (int i = 0; i < key_tiles * n; ++i) {
        u32 other[4];
        load_shared(other, sums + i * 32 * sizeof(uint4));
#pragma unroll
        for (int e = 0; e < 4; ++e) c[i / n][i % n].x[e] += __uint_as_float(other[e]);
      }
    }
    __syncthreads();
  }

  // From registers, key s to row `row_of(s)`.
  template <typename To, typename RowOf = SameRow>
  __device__ __forceinline__ void store_directly(To* dk_head, To* dv_head, i64 dk_stride, i64 dv_stride,
                                                 float dk_factor, float dv_factor, const RowOf& row_of = {}) const {
    if (sums_rows && member != 0) return;
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
      Mma::template store_fragments<head_dim, dk_group, column_split>(
          dk[m], dk_factor, dk_factor, dk_head, dk_stride, key_of(m), extent.kv.stored, column_member(), lane, row_of);
      Mma::template store_fragments<value_head_dim, dv_group, column_split>(
          dv[m], dv_factor, dv_factor, dv_head, dv_stride, key_of(m), extent.kv.stored, column_member(), lane, row_of);
    }
  }

  // A template, so that families that store from registers need none of the way through shared memory.
  template <typename M = Mma>
  __device__ __forceinline__ void finish(Result* dk_head, Result* dv_head, float dk_factor, float dv_factor) {
    const auto row_of = [&](int key) { return row_of_key(problem, extent.batch, key); };
    if constexpr (M::direct_stores) {
      store_directly(dk_head, dv_head, problem.dk.row_stride, problem.dv.row_stride, dk_factor, dv_factor, row_of);
    } else {
      if (!sums_rows || member == 0) {
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
          const int row = key_row + 16 * m;
          M::template put_accumulators<KTile, column_split>(shared.k, row, column_member(), dk[m], dk_factor, dk_factor,
                                                            lane);
          M::template put_accumulators<VTile, column_split>(shared.v, row, column_member(), dv[m], dv_factor, dv_factor,
                                                            lane);
        }
      }
      __syncthreads();
      constexpr int rows_of_warp = block_kv / warps;
      const int first = first_key + warp * rows_of_warp;
      M::template store_rows<KTile, head_dim, rows_of_warp>(
          shared.k, warp * rows_of_warp, dk_head, problem.dk.row_stride, first, extent.kv.stored, lane, row_of);
      M::template store_rows<VTile, value_head_dim, rows_of_warp>(
          shared.v, warp * rows_of_warp, dv_head, problem.dv.row_stride, first, extent.kv.stored, lane, row_of);
    }
  }

  // The weights without those that are dropped.
  static __device__ __forceinline__ void remove_dropped(FragmentC (&p)[key_tiles][score_columns / 8]) {
    if constexpr (with_dropout_rate) {
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < score_columns / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) p[m][n].x[e] = fmaxf(p[m][n].x[e], 0.f);
        }
      }
    }
  }
  static __device__ __forceinline__ void copy(FragmentC (&to)[key_tiles][score_columns / 8],
                                              const FragmentC (&from)[key_tiles][score_columns / 8]) {
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < score_columns / 8; ++n) to[m][n] = from[m][n];
    }
  }

  __device__ __forceinline__ void weights_product(const FragmentC (&p)[key_tiles][score_columns / 8],
                                                  const char* dout) {
    FragmentC kept[key_tiles][score_columns / 8];
    copy(kept, p);
    remove_dropped(kept);
    grad_product<OutTile, dv_group>(dv, kept, nullptr, dout);
  }

  template <typename T = ScoreTile>
  __device__ __forceinline__ void put_weights(const FragmentC (&p)[key_tiles][score_columns / 8]) {
    FragmentC kept[key_tiles][score_columns / 8];
    copy(kept, p);
    remove_dropped(kept);
    put_scores<T>(shared.p, kept);
  }

  // P^T or dS^T of the warp into a tile of the block's.
  template <typename T = ScoreTile>
  __device__ __forceinline__ void put_scores(char* tile, const FragmentC (&c)[key_tiles][score_columns / 8]) const {
#pragma unroll
    for (int m = 0; m < key_tiles; ++m) T::put(tile, key_row + 16 * m, score_row(), c[m], lane);
  }
};

// Starts the copy of a block's keys.
template <typename T, int columns>
JAX_FLASH_DEVICE void load_keys(char* tile, const Tensor& array, const Problem& problem, const Extent& extent,
                                int kv_head, int first_key) {
  const Element* head = head_of(array, extent.batch, kv_head, extent.kv.first);
  if constexpr (loads_by_list) {
    ListedTile<T, threads> rows;
    rows.read(listed_rows(problem, extent.batch), first_key, extent.kv.length, threadIdx.x);
    TileLoad<T, columns, threads> load;
    load.start_listed(shared_address(tile), rows, head, array.row_stride, threadIdx.x);
    load.finish(shared_address(tile), threadIdx.x);
  } else {
    load_tile<T, columns, threads>(shared_address(tile), head, array.row_stride, first_key, extent.kv.length,
                                   threadIdx.x);
  }
}

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_backward(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);

  Place place = place_of(problem, blockIdx.x);
  if (packed && place.first_key >= place.extent.kv.stored) return;
  if (computed_in_float32(problem, place.batch, place.kv_head)) return;
  const Extent& extent = place.extent;
  const int batch = place.batch, kv_head = place.kv_head, first_key = place.first_key;
  const int group = heads_of_share(problem);
  // Not split, both are the same number, but with the share the registers of sm_70 are other ones.
  const int first_head = (splits_groups ? place.share : kv_head) * group, last_head = first_head + group - 1;
  const int warp = threadIdx.x / 32, lane = Lanes::of(threadIdx.x);
  const Descale descale = descale_of(problem, batch, kv_head);
  const float scale = scale_of(problem, batch);
  const float score_scale = scale * descale.query * descale.key;
  const float ds_factor = descale.ds * probability_unit;

  Backward backward{
      problem,
      shared,
      extent,
      batch,
      place.sequence,
      first_dq_tile(problem, batch, place.sequence),
      {problem, extent, band_of(problem, extent), first_head, score_scale},
      first_key,
      warp,
      lane,
      key_row_of(warp),
      member_of(warp),
      descale.dout * descale.value * ds_factor,
      ds_factor,
  };
  if constexpr (keeps_diagonal_sums) backward.behind().diagonals[warp].clear(lane);
  LocalTables local;
  const SumsOfTables of_tables = backward.behind().tables.tables(local, threadIdx.x);
#pragma unroll
  for (int m = 0; m < key_tiles; ++m) backward.gradients[m].enter(descale.ds, of_tables);
  const Heads heads{first_head, group};
  TileWalk<block_q> tiles =
      walk_of_rows<block_q, block_kv>(problem, extent, backward.scores.keep.band, heads, first_key);
  tiles.trim(threadIdx.x % 32);
  if (!tiles.empty()) {
    load_keys<KTile, head_dim>(shared.k, problem.k, problem, extent, kv_head, first_key);
    load_keys<VTile, value_head_dim>(shared.v, problem.v, problem, extent, kv_head, first_key);
    backward.start_rows(shared.rows[0], first_head, tiles.range.begin);
    if constexpr (loads_take_registers) backward.finish_rows(shared.rows[0]);
    int stage = 0;
    for (int head = first_head; head <= last_head; ++head) {
      for (int tile = tiles.range.begin; tile < tiles.range.end;) {
        const int following = tiles.after(tile);
        const bool last_tile = following >= tiles.range.end;
        const int next_head = head + last_tile;
        const int next_tile = !last_tile ? following : head < last_head ? tiles.range.begin : -1;
        if (tiles.is_full(tile)) {
          backward.step<false>(head, tile, stage, next_head, next_tile);
        } else {
          backward.step<true>(head, tile, stage, next_head, next_tile);
        }
        if (stages == 2) stage ^= 1;
        tile = following;
      }
    }
    __syncthreads();  // everybody is done with K and V
  }

  // Where the loop takes all registers, the place is re-read here rather than kept across it.
  if constexpr (loads_take_registers) {
    place = place_of(problem, reread_block_index());
    backward.first_key = place.first_key;
    backward.find_lane();
  }
  const Descale reread_descale = descale_of(problem, place.batch, place.kv_head);
  const float dk_factor = scale * reread_descale.query / reread_descale.ds;
  const float factor = backward.scores.dropout.factor * reread_descale.dout * probability_unit;
  if constexpr (sums_rows) {
    backward.sum_pairs(backward.dk);
    backward.sum_pairs(backward.dv);
  }
  if constexpr (splits_groups) {
    if (problem.group_splits > 1) {
      constexpr int columns = head_dim + value_head_dim;
      ShareSum* sums = share_sums(problem, place.batch, place.share, extent.kv.first);
      backward.store_directly(sums, sums + head_dim, columns, columns, dk_factor, factor);
      return;
    }
  }
  Result* dk = result_of(problem.dk, place.batch, place.kv_head, extent.kv.first);
  Result* dv = result_of(problem.dv, place.batch, place.kv_head, extent.kv.first);
  backward.finish(dk, dv, dk_factor, factor);
}

}  // namespace jax_flash
