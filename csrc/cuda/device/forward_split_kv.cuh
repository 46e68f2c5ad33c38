// Split-KV forward ("flash decoding", Dao et al. 2023) for decoding, short prompts and small problems, by mma.sync, for
// every family whose mma.cuh is included before: the keys are split over the teams of a block and over blocks.
//
// A block owns block_q rows, and a slice of the keys of one head. Query heads that share a key head share its tiles:
// the rows of a block are pairs of query and head, heads fastest. A team of a warp for each 16 rows owns all of them,
// and a part of the slice, with buffers of its own for K and V; teams wait for each other at the end alone, where their
// partial softmax states are merged in shared memory. Where a head's keys are split over blocks, these are a cluster,
// whose blocks send each other the states of the rows that the other one merges; or, where the plan is to split them
// further, they leave the states in scratch for jax_flash_combine. All in one order, so that the results are the same
// in every run.
#pragma once

#include "cuda/device/cluster.cuh"
#include "cuda/device/named_barriers.cuh"
#include "cuda/device/partial_softmax.cuh"
#include "cuda/device/score_rows.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/tile_walk.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int team_threads = 2 * block_q;
constexpr int teams = threads / team_threads;
static_assert(block_q % 16 == 0 && threads % team_threads == 0 && block_q <= threads);
constexpr int combine_warps = 8;
// Blocks of more rows have as much to do as their code is long, and no registers for the loop's.
constexpr bool short_code = block_q == 16;

using QTile = Tile<block_q, limbs * tile_head_dim>;
using KTile = Tile<block_kv, limbs * tile_head_dim>;
using VTile = Tile<block_kv, limbs * tile_value_head_dim>;
constexpr int group = Mma::group(tile_value_head_dim, 1);  // of columns of out
using QReader = decltype(Mma::reader_a<QTile>(0, 0, 0));
using KReader = decltype(Mma::reader_b<KTile>(0, 0, 0));
using VReader = Mma::ColumnReader<VTile, group>;
// Whether more is read than query, key and value, from the first lines on.
#define JAX_FLASH_NOTHING(...)
#define JAX_FLASH_IS_THERE(type, name, dims) || has_##name
constexpr bool reads_operands = has_functions JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_NOTHING,
                                                                JAX_FLASH_IS_THERE, JAX_FLASH_IS_THERE);
#undef JAX_FLASH_IS_THERE
#undef JAX_FLASH_NOTHING
// Packed sequences begin at any row, so a block's rows would belong to several: there query heads do not share blocks.
constexpr bool heads_share = heads_share_rows(packed);

// Rows of float, 8 words more than whole lines: the four rows that a half of a warp writes miss each other's banks.
constexpr int sum_stride = round_up(tile_value_head_dim, 32) + 8;

struct TeamStorage {
  static constexpr int tiles = KTile::bytes + VTile::bytes;
  static constexpr int sums = block_q * sum_stride * static_cast<int>(sizeof(float));
  alignas(128) char memory[tiles > sums ? tiles : sums];  // K, V; at the end the weighted sum of values

  __device__ __forceinline__ char* k() { return memory; }
  __device__ __forceinline__ char* v() { return memory + KTile::bytes; }
  __device__ __forceinline__ float* sum(int row) { return reinterpret_cast<float*>(memory) + row * sum_stride; }
};
struct SharedStorage {
  TeamStorage team[teams];
  alignas(128) char q[QTile::bytes];
  float2 statistics[teams][block_q];  // a team's scaled maximum and total of a row
};
// What the blocks of a cluster send to the one that merges a row: as many rows as a block has, by the rank of the
// sender and then by row.
struct ClusterStorage {
  alignas(128) float sums[block_q * sum_stride];
  float2 statistics[block_q];
  u64 mbarrier;
  static constexpr int received_bytes = block_q * (value_head_dim * static_cast<int>(sizeof(float)) + 8);
};

extern "C" __constant__ KernelTraits jax_flash_forward_split_kv_traits = {
    .threads = threads,
    .block_rows = block_q,
    .shared_bytes = sizeof(SharedStorage),
    .combine_warps = combine_warps,
    .starts_ahead = may_start_ahead,
    .most_cluster = most_cluster,
    .cluster_bytes = most_cluster > 1 ? static_cast<int>(sizeof(ClusterStorage)) : 0,
};

// Whether the slices of the keys of a head are the blocks of a cluster: those that nobody planned scratch for.
JAX_FLASH_DEVICE bool in_cluster(const Problem& problem) {
  return most_cluster > 1 && problem.kv_slices > 1 && !problem.scratch;
}

// What the threads of a team wait for each other with.
JAX_FLASH_DEVICE void team_sync(int team) {
  if constexpr (team_threads == 32) {
    __syncwarp();
  } else if constexpr (teams == 1) {
    __syncthreads();
  } else {
    named_sync_unaligned(team + 1, team_threads);
  }
}

// Of out's rows.
JAX_FLASH_DEVICE float inverse_of(const Problem& problem, const Dropout& dropout, int batch, int kv_head, float total) {
  // A division is code as long as all of the rest, which only float32 results are worth.
  if constexpr (!has_descale && !loads_take_registers) {
    return total == 0.f ? 0.f : dropout.factor * reciprocal_approx(total);
  }
  return total == 0.f ? 0.f : dropout.factor * descale_of(problem, batch, kv_head).value / total;
}

JAX_FLASH_DEVICE void store_eight(float* to, const float (&x)[8]) {
  reinterpret_cast<float4*>(to)[0] = {x[0], x[1], x[2], x[3]};
  reinterpret_cast<float4*>(to)[1] = {x[4], x[5], x[6], x[7]};
}
JAX_FLASH_DEVICE void store_eight(u16* to, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(to) = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
}

// The float32 scratch of a call whose keys are split over blocks: see layout.h.
struct Scratch {
  float* data;
  i64 rows;
  int slices;

  __device__ __forceinline__ explicit Scratch(const Problem& problem)
      : data(static_cast<float*>(problem.scratch)),
        rows(static_cast<i64>(problem.batch) * problem.q_heads * problem.q_length),
        slices(problem.kv_slices) {}
  __device__ __forceinline__ float* sum(int slice, i64 row) const {
    return data + (slice * rows + row) * value_head_dim;
  }
  __device__ __forceinline__ float2* statistics(int slice, i64 row) const {
    return reinterpret_cast<float2*>(data + slices * rows * value_head_dim) + slice * rows + row;
  }
};

// In small problems most divisors are 1, and a division is a long way to go before the first load.
JAX_FLASH_DEVICE int divide(int x, int by) { return by == 1 ? x : x / by; }

// The rows of a block.
struct Block {
  Extent extent;
  int batch, kv_head;
  int first_head;  // of query
  int heads;       // that share the rows
  int first;       // row, of the extent and these heads
  int slice;
  u32 inverse;  // of `heads`, in units of 2^-32, rounded up

  // Exact where x * heads is below 2^32, which plan_split_kv sees to by far.
  __device__ __forceinline__ int row_of(int r) const {
    return heads == 1 ? first + r : static_cast<int>(__umulhi(first + r, inverse));
  }
  __device__ __forceinline__ int head_of(int r) const { return first_head + first + r - row_of(r) * heads; }
  // In an array [B, N, T].
  __device__ __forceinline__ i64 index_of(const Problem& problem, int r) const {
    return (static_cast<i64>(batch) * problem.q_heads + head_of(r)) * problem.q_length + extent.q.first + row_of(r);
  }
};
JAX_FLASH_DEVICE Block block_of(const Problem& problem, int item) {
  const int q_group = divide(problem.q_heads, problem.kv_heads);
  const int heads = heads_share ? q_group : 1, blocks = blocks_of(problem, problem.q_length * heads, block_q);
  // Slices first: those of a head are the blocks of a cluster.
  int rest = divide(item, problem.kv_slices);
  const int slice = item - rest * problem.kv_slices, sets = heads_share ? problem.kv_heads : problem.q_heads;
  const int next = divide(rest, blocks), batch = divide(next, sets);
  int block = rest - next * blocks;
  const int set = next - batch * sets;
  const int sequence = sequence_of(problem, problem.cu_q_lengths, batch, block_q, block);
  return {extent_of(problem, batch, sequence),
          batch,
          heads_share ? set : divide(set, q_group),
          set * heads,
          heads,
          block * block_q,
          slice,
          heads == 1 ? 0u : 0xffffffffu / heads + 1};
}

using KLoad = TileLoad<KTile, head_dim, team_threads, short_code>;
using VLoad = TileLoad<VTile, value_head_dim, team_threads, short_code>;

struct SplitKvForward {
  const Problem& problem;
  TeamStorage& shared;
  const Extent& extent;
  const Element* k;
  const Element* v;
  ScoreRows rows[2];  // of a lane's two rows, which may be of two heads
  int row[2];
  int team, thread, lane;
  QReader q_reader;
  KReader k_reader;
  VReader v_reader;
  KLoad k_load;
  VLoad v_load;
  FragmentC out[1][tile_value_head_dim / 8];
  RowStatistics statistics[2];
  i64 k_stride, v_stride;
  int kv_length;

  __device__ __forceinline__ void start_k(int tile) {
    if (loads_take_registers) k_stride = problem.k.row_stride, kv_length = extent.kv.length;
    k_load.start(shared_address(shared.k()), k, k_stride, tile * block_kv, kv_length, thread);
  }
  __device__ __forceinline__ void start_v(int tile) {
    if (loads_take_registers) v_stride = problem.v.row_stride, kv_length = extent.kv.length;
    v_load.start(shared_address(shared.v()), v, v_stride, tile * block_kv, kv_length, thread);
  }

  // One tile of keys, whose K and V are on their way; then those of `next`, unless it is negative.
  template <bool masked>
  __device__ __forceinline__ void step(int tile, int next) {
    FragmentC scores[1][block_kv / 8] = {};

    copies_wait<1>();
    k_load.finish(shared_address(shared.k()), thread);
    team_sync(team);  // K has landed
    Mma::multiply_rows<head_dim>(scores, q_reader, k_reader);
    team_sync(team);  // the team is done with K
    if (next >= 0) start_k(next);
    copies_commit();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (masked || modifies_scores || has_mask) {
        rows[half].logits<masked, false, false>(scores[0], nullptr, row[half], half, tile * block_kv, lane);
      }
      const float scale_log2 = rows[0].scale_log2;
      const float maximum = quad_max(maximum_of(scores[0], half));
      multiply_half(out[0], half, statistics[half].update(maximum, scale_log2));
      statistics[half].weigh(scores[0], half, scale_log2);
      if constexpr (with_dropout_rate) rows[half].drop_half(scores[0], row[half], half, tile * block_kv, lane);
    }

    copies_wait<1>();
    v_load.finish(shared_address(shared.v()), thread);
    team_sync(team);  // V has landed
    Mma::multiply_columns<block_kv>(out, [&](int, int kk) { return Mma::operand(scores[0], kk); }, v_reader);
    team_sync(team);  // the team is done with V
    if (next >= 0) start_v(next);
    copies_commit();
  }
};

JAX_FLASH_DEVICE void load_rows(const Problem& problem, const Block& block, char* q) {
  constexpr int chunks = QTile::chunks, limb_chunks = chunks / limbs, filled = head_dim / chunk_elements;
#pragma unroll 4
  for (int i = threadIdx.x; i < block_q * chunks; i += threads) {
    const int r = i / chunks, chunk = i % chunks, limb = chunk / limb_chunks, of_limb = chunk % limb_chunks;
    uint4 x{0, 0, 0, 0};
    if (of_limb < filled && block.row_of(r) < block.extent.q.length) {
      const Element* from = head_of(problem.q, block.batch, block.head_of(r), block.extent.q.first + block.row_of(r));
      x = *reinterpret_cast<const uint4*>(from + (limb * filled + of_limb) * chunk_elements);
    }
    store_shared(shared_address(q) + QTile::offset(r, chunk), x);
  }
}

// The same by cp.async: where a thread's chunks are is known before there is anything to read.
struct QueryLoad {
  static constexpr int chunks = QTile::chunks, limb_chunks = chunks / limbs, filled = head_dim / chunk_elements;
  static constexpr int pieces = ceil_div(block_q * chunks, threads);
  const Element* from[pieces];
  bool valid[pieces];

  __device__ __forceinline__ QueryLoad(const Problem& problem, const Block& block) {
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
      const int j = i * threads + threadIdx.x, r = j / chunks, chunk = j % chunks;
      const int limb = chunk / limb_chunks, of_limb = chunk % limb_chunks, row = block.row_of(r);
      valid[i] = of_limb < filled && row < block.extent.q.length;
      from[i] =
          head_of(problem.q, block.batch, valid[i] ? block.head_of(r) : 0, valid[i] ? block.extent.q.first + row : 0);
      from[i] += valid[i] ? (limb * filled + of_limb) * chunk_elements : 0;
      asm volatile("" : "+l"(from[i]));
    }
  }
  __device__ __forceinline__ void start(u32 q) const {
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
      const int j = i * threads + threadIdx.x;
      if (block_q * chunks % threads != 0 && j >= block_q * chunks) break;
      copy_async(q + QTile::offset(j / chunks, j % chunks), from[i], valid[i]);
    }
  }
};

struct NoLoad {
  __device__ __forceinline__ NoLoad(const Problem&, const Block&) {}
  __device__ __forceinline__ void start(u32) const {}
};

// Where a row of a block goes.
struct ResultRow {
  Result* out;
  float* lse;
  float sink;
  bool stored, padding;

  __device__ __forceinline__ ResultRow(const Problem& problem, const Block& block, int r) {
    const Rows& rows = block.extent.q;
    const int row = block.row_of(r);
    stored = row < rows.stored;
    padding = has_q_lengths && row >= rows.length;
    const int here = stored ? row : 0, head = stored ? block.head_of(r) : 0;
    out = result_of(problem.out, block.batch, head, rows.first + here);
    lse = static_cast<float*>(problem.lse) +
          (static_cast<i64>(block.batch) * problem.q_heads + head) * problem.q_length + rows.first + here;
    sink = sink_of(problem, block.batch, head);
    if constexpr (!loads_take_registers) asm volatile("" : "+l"(out), "+l"(lse));
  }
};

// Segments of the rows [first, last], `last` inclusive.
JAX_FLASH_DEVICE SegmentRange segments_of_rows(const Problem& problem, int batch, int first, int last) {
  SegmentRange all{0x7fffffff, -0x7fffffff - 1};
  for (int row = first; row <= last; row = (row / kSegmentBlock + 1) * kSegmentBlock) {
    const SegmentRange next = segment_range<1>(problem.q_segment_ranges, batch, problem.q_length, row);
    all = {at_most(all.first, next.first), at_least(all.last, next.last)};
  }
  return all;
}

// Merges the teams' states, in eights of columns, where loads from global memory take registers.
JAX_FLASH_DEVICE void finish_eights(const Problem& problem, const Block& block, const SplitKvForward& forward,
                                    SharedStorage& shared) {
  const Extent& extent = block.extent;
  const bool whole = problem.kv_slices == 1;
  const auto store = [&](int r, int column, float scaled_max, float total, float (&x)[8]) {
    const int row = block.row_of(r);
    const float sink = sink_of(problem, block.batch, block.head_of(r));
    if (has_sinks && sink != -JAX_FLASH_INFINITY) total += exp2_approx(sink * kLog2e - scaled_max);
    float factor = inverse_of(problem, forward.rows[0].dropout, block.batch, block.kv_head, total);
    const bool padding = has_q_lengths && row >= extent.q.length;
    if (padding) factor = 0.f;
    if (column == 0) {
      static_cast<float*>(problem.lse)[block.index_of(problem, r)] = padding ? sink : lse_of(scaled_max, total);
    }
#pragma unroll
    for (float& e : x) e *= factor;
    store_eight(result_of(problem.out, block.batch, block.head_of(r), extent.q.first + row) + column, x);
  };
  constexpr int eights = value_head_dim / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < block_q * eights; i += threads) {
    const int r = i / eights, column = i % eights * 8;
    if (block.row_of(r) >= extent.q.stored) break;
    float scaled_max = -JAX_FLASH_INFINITY, total = 0.f, x[8] = {};
#pragma unroll
    for (int j = 0; j < teams; ++j) scaled_max = fmaxf(scaled_max, shared.statistics[j][r].x);
    if (whole) scaled_max = scaled_max_with(scaled_max, sink_of(problem, block.batch, block.head_of(r)));
#pragma unroll
    for (int j = 0; j < teams; ++j) {
      const float2 of_team = shared.statistics[j][r];
      const float weight = rescale_factor(of_team.x, scaled_max);
      total += weight * of_team.y;
      const float* sum = shared.team[j].sum(r) + column;
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] += weight * sum[e];
    }
    if (whole) {
      store(r, column, scaled_max, total, x);
    } else {
      const Scratch scratch(problem);
      const i64 index = block.index_of(problem, r);
      store_eight(scratch.sum(block.slice, index) + column, x);
      if (column == 0) *scratch.statistics(block.slice, index) = {scaled_max, total};
    }
  }
}

// Columns of a row in fours, of one of `row_threads` threads.
template <int row_threads, typename Do>
JAX_FLASH_DEVICE void for_fours(int first_column, const Do& doing) {
#pragma unroll
  for (int i = 0; i < ceil_div(value_head_dim, 4 * row_threads); ++i) {
    const int column = first_column + i * 4 * row_threads;
    if (value_head_dim % (4 * row_threads) != 0 && column >= value_head_dim) break;
    doing(column);
  }
}

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_forward_split_kv(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);

  if (loads_take_registers) let_the_next_kernel_begin();
  if (reads_operands) wait_for_the_kernel_before();
  const bool clustered = in_cluster(problem);
  ClusterStorage& received = *reinterpret_cast<ClusterStorage*>(memory + sizeof(SharedStorage));
  if (clustered) {
    if (threadIdx.x == 0) mbarrier_init_expect(shared_address(&received.mbarrier), ClusterStorage::received_bytes);
    cluster_arrive();  // this block has begun
  }
  const Block block = block_of(problem, blockIdx.x);
  const Extent& extent = block.extent;
  const int first_row = block.row_of(0), last_row = block.row_of(block_q - 1);
  if (packed && first_row >= extent.q.stored) return;                    // and so do the others of its cluster
  if (computed_in_float32(problem, block.batch, block.kv_head)) return;  // likewise
  const int team = threadIdx.x / team_threads, thread = threadIdx.x % team_threads;
  const int lane = Lanes::of(threadIdx.x), warp_row = thread / 32 * 16;
  const int own[2] = {warp_row + lane / 4, warp_row + lane / 4 + 8};
  const Descale descale = descale_of(problem, block.batch, block.kv_head);
  const float scale = scale_of(problem, block.batch) * descale.query * descale.key;

  TeamStorage& storage = shared.team[team];
  SplitKvForward forward{
      problem,
      storage,
      extent,
      KLoad::base(head_of(problem.k, block.batch, block.kv_head, extent.kv.first), problem.k.row_stride, thread),
      VLoad::base(head_of(problem.v, block.batch, block.kv_head, extent.kv.first), problem.v.row_stride, thread),
      {{problem, extent, block.head_of(own[0]), scale}, {problem, extent, block.head_of(own[1]), scale}},
      {block.row_of(own[0]), block.row_of(own[1])},
      team,
      thread,
      lane,
      Mma::reader_a<QTile>(shared_address(shared.q), warp_row, lane),
      Mma::reader_b<KTile>(shared_address(storage.k()), 0, lane),
      VReader(shared_address(storage.v()), lane),
  };

  const Heads heads{block.first_head, block.heads};
  TileWalk<block_kv> tiles = walk_of_keys<block_kv>(
      problem, extent,
      kept_key_tiles<block_kv, 0>(problem, extent, forward.rows[0].keep.band, heads, first_row,
                                  last_row - first_row + 1),
      in_segments ? segments_of_rows(problem, block.batch, first_row, at_most(last_row, problem.q_length - 1))
                  : SegmentRange{0, 0},
      heads, first_row, last_row + 1);
  tiles.trim(threadIdx.x % 32);
  const int first_tile = tiles.range.begin, all = tiles.range.end - first_tile;
  const int slice_tiles = ceil_div(all, problem.kv_slices), team_tiles = ceil_div(slice_tiles, teams);
  const int slice_begin = at_most(all, block.slice * slice_tiles), slice_end = at_most(all, slice_begin + slice_tiles);
  int tile = first_tile + at_most(slice_end, slice_begin + team * team_tiles);
  const int end = first_tile + at_most(slice_end, slice_begin + (team + 1) * team_tiles);
  auto next_after = [&](int before) {
    const int next = tiles.after(before, end);
    return next < end ? next : -1;
  };
  // Who stores which rows: of the only team with keys a lane its own two, otherwise a few threads each a row, all of
  // the block's or, of a cluster, those that are this block's to put together.
  const bool whole = problem.kv_slices == 1, alone = !loads_take_registers && whole && (teams == 1 || all <= 1);
  const int ranks_log2 = clustered ? 31 - __clz(problem.kv_slices) : 0;
  const int row_threads = threads / block_q << ranks_log2;
  const int rank_row = threadIdx.x / row_threads + (clustered ? block.slice * (block_q >> ranks_log2) : 0);
  const ResultRow results[2] = {{problem, block, alone ? own[0] : rank_row}, {problem, block, own[1]}};
  if constexpr (!loads_take_registers) {
    forward.k_stride = problem.k.row_stride;
    forward.v_stride = problem.v.row_stride;
    forward.kv_length = extent.kv.length;
    // Opaque, or it would be worked out behind the barrier.
    asm volatile("" : "+l"(forward.k), "+l"(forward.v), "+l"(forward.k_stride), "+l"(forward.v_stride));
    asm volatile("" : "+r"(forward.kv_length), "+r"(tile));
  }
  const Select<loads_take_registers, NoLoad, QueryLoad>::type q_load(problem, block);
  // What comes before takes its time too, mostly for instructions and arguments that are not at hand yet.
  if (!reads_operands) wait_for_the_kernel_before();
  if (problem.kv_slices > 1 && !clustered && slice_begin >= slice_end) {
    const int r = threadIdx.x;
    if (r < block_q && block.row_of(r) < extent.q.stored) {
      *Scratch(problem).statistics(block.slice, block.index_of(problem, r)) = {-JAX_FLASH_INFINITY, 0.f};
    }
    return;
  }
  tile = next_after(tile - 1);
  q_load.start(shared_address(shared.q));
  if (tile >= 0) forward.start_k(tile);
  copies_commit();
  if (tile >= 0) forward.start_v(tile);
  copies_commit();
  if constexpr (loads_take_registers) {
    load_rows(problem, block, shared.q);
  } else {
    // Allowed from the first line on, whole chains would begin, whose blocks take multiprocessors from those with work.
    let_the_next_kernel_begin();
    copies_wait<1>();
  }
  __syncthreads();  // Q has landed
  if (alone && team > 0) return;
  while (tile >= 0) {
    const int next = next_after(tile);
    if (tiles.is_full(tile)) {
      forward.step<false>(tile, next);
    } else {
      forward.step<true>(tile, next);
    }
    tile = next;
  }
  copies_wait<0>();  // none is on its way, nor counted as one

  const auto finish = [&](const ResultRow& to, float scaled_max, float total, bool first) {
    float factor = inverse_of(problem, forward.rows[0].dropout, block.batch, block.kv_head, total);
    if (to.padding) factor = 0.f;
    if (first) *to.lse = to.padding ? to.sink : lse_of(scaled_max, total);
    return factor;
  };
  if (alone) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ResultRow& to = results[half];
      RowStatistics& mine = forward.statistics[half];
      const float2 statistics{
          mine.maximum == -JAX_FLASH_INFINITY ? mine.maximum : mine.scaled_max(forward.rows[0].scale_log2),
          quad_sum(mine.total)};
      if (!to.stored) continue;
      const SoftmaxMerge<1> merge(to.sink, [&](int) { return statistics; });
      const float factor = merge.weights[0] * finish(to, merge.scaled_max, merge.total, lane % 4 == 0);
#pragma unroll
      for (int n = 0; n < tile_value_head_dim / 8; ++n) {
        const int column = Mma::out_column(n, lane);
        if (tile_value_head_dim != value_head_dim && column >= value_head_dim) continue;
        Mma::store_pair(to.out + column, forward.out[0][n].x[2 * half] * factor,
                        forward.out[0][n].x[2 * half + 1] * factor);
      }
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    RowStatistics& mine = forward.statistics[half];
    const float total = quad_sum(mine.total);
    if (lane % 4 == 0) {
      const float scaled_max =
          mine.maximum == -JAX_FLASH_INFINITY ? mine.maximum : mine.scaled_max(forward.rows[0].scale_log2);
      shared.statistics[team][own[half]] = {scaled_max, total};
    }
    float* sum = storage.sum(own[half]);
#pragma unroll
    for (int n = 0; n < tile_value_head_dim / 8; ++n) {
      *reinterpret_cast<float2*>(sum + Mma::out_column(n, lane)) = {forward.out[0][n].x[2 * half],
                                                                    forward.out[0][n].x[2 * half + 1]};
    }
  }
  // Where teams have had different numbers of tiles, racecheck reports what is read behind a single barrier, though it
  // stands in the machine code; behind two of them nothing.
  if constexpr (teams > 1 && team_threads > 32) __syncthreads();
  __syncthreads();  // all teams have left what they have
  if constexpr (loads_take_registers) {
    finish_eights(problem, block, forward, shared);
    return;
  }

  constexpr int fours = threads / block_q;  // of columns, in a step of the threads of a row
  const int r = threadIdx.x / fours, first_column = threadIdx.x % fours * 4;
  const SoftmaxMerge<teams> of_teams(whole ? results[0].sink : -JAX_FLASH_INFINITY,
                                     [&](int i) { return shared.statistics[i][r]; });
  const auto four_of = [&](int column) { return of_teams([&](int i) { return shared.team[i].sum(r) + column; }); };
  if (whole) {
    if (!results[0].stored) return;
    const float factor = finish(results[0], of_teams.scaled_max, of_teams.total, first_column == 0);
    for_fours<fours>(first_column, [&](int column) {
      const float4 x = four_of(column);
      store_four(results[0].out + column, {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
    });
  } else if (!clustered) {
    if (block.row_of(r) >= extent.q.stored) return;
    const Scratch scratch(problem);
    const i64 index = block.index_of(problem, r);
    float* sum = scratch.sum(block.slice, index);
    for_fours<fours>(first_column, [&](int column) { store_four(sum + column, four_of(column)); });
    if (first_column == 0) *scratch.statistics(block.slice, index) = {of_teams.scaled_max, of_teams.total};
  } else {
    // Sends every row to the block of the cluster that merges it.
    const int rows_log2 = __ffs(block_q) - 1 - ranks_log2;  // of a rank
    const int rank = r >> rows_log2, place = (block.slice << rows_log2) + (r & ((1 << rows_log2) - 1));
    const u32 sums = cluster_address(shared_address(received.sums + place * sum_stride), rank);
    const u32 mbarrier = cluster_address(shared_address(&received.mbarrier), rank);
    cluster_wait();  // all blocks have begun
    for_fours<fours>(first_column,
                     [&](int column) { send_four(sums + column * sizeof(float), mbarrier, four_of(column)); });
    if (first_column == 0) {
      const u32 statistics = cluster_address(shared_address(received.statistics + place), rank);
      send_pair(statistics, mbarrier, {of_teams.scaled_max, of_teams.total});
    }
    mbarrier_wait(shared_address(&received.mbarrier));  // all blocks have sent their states
    const ResultRow& to = results[0];
    if (!to.stored) return;
    const int own_row = threadIdx.x / row_threads, own_column = threadIdx.x % row_threads * 4;
    const auto place_of_rank = [&](int i) { return (i << rows_log2) + own_row; };
    const SoftmaxMerge<most_cluster> of_blocks(to.sink, [&](int i) {
      return i < problem.kv_slices ? received.statistics[place_of_rank(i)] : float2{-JAX_FLASH_INFINITY, 0.f};
    });
    const float factor = finish(to, of_blocks.scaled_max, of_blocks.total, own_column == 0);
#pragma unroll 1
    for (int column = own_column; column < value_head_dim; column += row_threads * 4) {
      const float4 x = of_blocks([&](int i) { return received.sums + place_of_rank(i) * sum_stride + column; });
      store_four(to.out + column, {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
    }
  }
}

}  // namespace jax_flash
