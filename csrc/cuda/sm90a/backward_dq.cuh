// dQ alone, for a backward pass without atomic additions.
//
// A block owns block_q rows of one query head, 64 for each of its warpgroups that compute, and walks over the keys from
// the last to the first, as forward does. With
//   S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P * (dP - delta)
// it accumulates dQ += dS K in registers, dS being an operand in registers as it is. One warp of one more warpgroup
// loads the keys by TMA. Warpgroups never wait for each other: one is at its exponentials while the tensor cores are
// the other's.
#pragma once

#include "cuda/device/place.cuh"
#include "cuda/device/score_rows.cuh"
#include "cuda/device/tile_walk.cuh"
#include "cuda/sm90a/listed_rows.cuh"
#include "cuda/sm90a/pipeline.cuh"
#include "cuda/sm90a/slabs.cuh"
#include "cuda/sm90a/stores.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int computing = warps / 4 - 1;  // warpgroups
static_assert(warps % 4 == 0 && block_q == 64 * computing && block_kv % 32 == 0, "64 rows a warpgroup");
constexpr int one_computing = 1;  // named barrier, and on, one of each warpgroup

using QSlabs = Slabs<block_q, head_dim>;
using OutSlabs = Slabs<block_q, value_head_dim>;
using KSlabs = Slabs<block_kv, head_dim>;
using VSlabs = Slabs<block_kv, value_head_dim>;

// K is needed from the first to the last product of a tile, V for one: where shared memory does not hold as many of
// both, there are fewer buffers of V.
constexpr int most_bytes = 227 * 1024, small_bytes = 1024;
constexpr int all_bytes = QSlabs::bytes + OutSlabs::bytes + stages * (KSlabs::bytes + VSlabs::bytes) + small_bytes;
constexpr int v_stages = all_bytes <= most_bytes ? stages : stages - 1;
static_assert(stages >= 2, "dQ of a tile is under way while the scores of the next are computed");

// Where tiles are skipped, the warp that loads searches, and tells the others of each tile of keys.
struct Told {
  int tile;     // -1 where there is none
  int uniform;  // whether all its pairs are kept, as far as ranges let them
  int next;     // the tile after it, -1 where there is none
};

constexpr int loading_warp = loading_registers(KSlabs::columns <= 64);  // registers

struct SharedStorage {
  char q[QSlabs::bytes];
  char dout[OutSlabs::bytes];
  char k[stages][KSlabs::bytes];
  char v[v_stages][VSlabs::bytes];
  Told told[skips_tiles ? stages : 1];  // of the tiles of K
  u64 q_full, dout_full;
  u64 k_full[stages], k_empty[stages], v_full[v_stages], v_empty[v_stages];
};
static_assert(sizeof(SharedStorage) <= most_bytes, "the tiles are too large");

extern "C" __constant__ KernelTraits jax_flash_backward_dq_traits = {
    .threads = threads,
    .block_rows = block_q,
    .shared_bytes = sizeof(SharedStorage),
    .q_box_rows = block_q,
    .k_box_rows = block_kv,
    .v_box_rows = block_kv,
    .dout_box_rows = block_q,
};

// What the warps of a block all know.
struct Block {
  const Problem& problem;
  Place place;
  Band band;
  TileRange range;  // of keys, as far as the band goes

  __device__ __forceinline__ explicit Block(const Problem& problem)
      : problem(problem), place(place_of(problem, blockIdx.x)), band(band_of(problem, place.extent)) {
    range = key_tiles_of<block_kv>(band, place.extent, place.first_row, block_q);
  }
};

// By one warp, whose lane 0 issues the loads.
JAX_FLASH_DEVICE void load(const Block& block, SharedStorage& shared, const TensorMaps& maps, int lane) {
  const Place& place = block.place;
  const int row = place.extent.q.first + place.first_row;
  Ring<stages> k_ring{0, 1};
  Ring<v_stages> v_ring{0, 1};
  TileWalk<block_kv> tiles =
      walk_of_keys<block_kv, block_q>(block.problem, place.extent, block.band, {place.head, 1}, place.first_row);
  tiles.trim_end();
  if (skips_tiles && tiles.empty() && lane == 0) {
    shared.told[0] = {-1, 0, -1};
    barrier_arrive(shared_address(&shared.k_full[0]));
  }
#pragma unroll 1  // else, as of other loops without products, the compiler makes it several times as long
  for (int tile = tiles.last(), next; tile >= tiles.range.begin; tile = next) {
    const bool uniform = skips_tiles && tiles.is_uniform(tile);
    next = tiles.before<true>(tile);
    const Told told{tile, uniform, next >= tiles.range.begin ? next : -1};
    const int key = place.extent.kv.first + tile * block_kv;
    const bool first = tile == tiles.last();
    if (lane == 0) {
      if (first) load_slabs<QSlabs>(shared.q, &maps.q, shared.q_full, row, place.head, place.batch);
      barrier_wait(shared_address(&shared.k_empty[k_ring.stage]), k_ring.parity);
      if constexpr (skips_tiles) shared.told[k_ring.stage] = told;
      load_slabs<KSlabs>(shared.k[k_ring.stage], &maps.k, shared.k_full[k_ring.stage], key, place.kv_head, place.batch);
      if (first) load_slabs<OutSlabs>(shared.dout, &maps.dout, shared.dout_full, row, place.head, place.batch);
      barrier_wait(shared_address(&shared.v_empty[v_ring.stage]), v_ring.parity);
      load_slabs<VSlabs>(shared.v[v_ring.stage], &maps.v, shared.v_full[v_ring.stage], key, place.kv_head, place.batch);
    }
    __syncwarp();
    k_ring.advance();
    v_ring.advance();
  }
}

// The same where keys are listed, by key_loaders warps. The list is read a tile ahead.
JAX_FLASH_DEVICE void load_listed(const Block& block, SharedStorage& shared, const TensorMaps& maps, int warp,
                                  int lane) {
  using Rows = ListedRows<block_kv>;
  const Problem& problem = block.problem;
  const Place& place = block.place;
  const int begin = block.range.begin, row = place.extent.q.first + place.first_row;
  const auto read = [&](int tile) {
    return Rows::Read(problem, place.extent, at_least(tile, begin) * block_kv, warp, lane);
  };
  int tile = block.range.end - 1;
  if (tile < begin) return;
  if (warp == 0 && lane == 0) {
    load_slabs<QSlabs>(shared.q, &maps.q, shared.q_full, row, place.head, place.batch);
    load_slabs<OutSlabs>(shared.dout, &maps.dout, shared.dout_full, row, place.head, place.batch);
  }
  Ring<stages> k_ring{0, 1};
  Ring<v_stages> v_ring{0, 1};
  Rows::Read ahead = read(tile);
#pragma unroll 1
  for (; tile >= begin; --tile, k_ring.advance(), v_ring.advance()) {
    const Rows rows(ahead);
    ahead = read(tile - 1);
    barrier_wait(shared_address(&shared.k_empty[k_ring.stage]), k_ring.parity);
    rows.load<KSlabs>(shared.k[k_ring.stage], problem.k, &maps.k, shared.k_full[k_ring.stage], place.batch,
                      place.kv_head, warp, lane);
    barrier_wait(shared_address(&shared.v_empty[v_ring.stage]), v_ring.parity);
    rows.load<VSlabs>(shared.v[v_ring.stage], problem.v, &maps.v, shared.v_full[v_ring.stage], place.batch,
                      place.kv_head, warp, lane);
  }
}

// One warpgroup, with 64 rows.
struct BackwardDq {
  const Block& block;
  SharedStorage& shared;
  int group;  // of those that compute
  int lane;
  int row;  // this lane's first; the other is 8 on
  ScoreRows rows;
  float dp_factor;  // dS is a multiple of what it stands for
  float lse_log2[2], deltas[2];
  Ring<stages> k_ring;
  Ring<v_stages> v_ring;
  Told told;  // of the last tile whose K was waited for, where tiles are skipped
  FragmentC dq[KSlabs::columns / 8];
  u32 operand[block_kv / 16][4];  // dS

  __device__ __forceinline__ void arrive(const u64& barrier) const {
    if (arrives(lane)) barrier_arrive(shared_address(&barrier));
  }

  __device__ __forceinline__ void load_statistics(float ds_factor) {
    const Problem& problem = block.problem;
    const Rows& q = block.place.extent.q;
    const i64 first = (static_cast<i64>(block.place.batch) * problem.q_heads + block.place.head) * problem.q_length;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + 8 * half;
      const bool valid = at < q.length;
      const i64 from = first + q.first + (valid ? at : 0);
      lse_log2[half] = backward_lse(static_cast<const float*>(problem.lse)[from], valid);
      deltas[half] = valid ? static_cast<const float*>(problem.delta)[from] * ds_factor : 0.f;
    }
  }

  // What is beyond the end of the keys may be anything, and no weight of 0 would take it away. Each warpgroup for
  // itself: all of them write the same.
  template <typename T>
  __device__ __forceinline__ void wait_for(const u64& full, const char* keys, int tile, u32 parity) const {
    wait_for_keys(full, parity);
    const int valid = block.place.extent.kv.length - tile * block_kv;
    if (ragged_keys && valid < block_kv) {
      T::zero_rows(shared_address(keys), valid, threadIdx.x % warpgroup);
      stores_ready();
      named_sync(one_computing + group, warpgroup);
    }
  }

  // c = X Y^T, for the warpgroup's 64 rows of X.
  template <typename X, typename Y>
  __device__ __forceinline__ void start(FragmentC (&c)[block_kv / 8], const char* x, const char* y) const {
    const u64 a = by_rows(shared_address(x) + group * 64 * 128), b = by_rows(shared_address(y));
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < X::steps; ++kk) {
      wgmma<false, false>(c, moved(a, X::step_offset(kk)), moved(b, Y::step_offset(kk)), kk > 0);
    }
    wgmma_commit();
  }

  // Scores become weights, and with keeps_derivatives what dP is multiplied with beside them; 32 keys at a time, or
  // what is read and derived for all of them would crowd out the accumulators.
  template <bool masked>
  __device__ __forceinline__ void weigh(FragmentC (&s)[block_kv / 8], int tile) const {
#pragma unroll
    for (int first = 0; first < block_kv / 8; first += 4) {
      FragmentC(&some)[4] = *reinterpret_cast<FragmentC(*)[4]>(&s[first]);
      const int key = tile * block_kv + first * 8;
      FragmentC derivatives[keeps_derivatives ? 4 : 1];
      if constexpr (masked || modifies_scores || has_mask) {
#pragma unroll
        for (int half = 0; half < 2; ++half) rows.logits<masked>(some, derivatives, row + 8 * half, half, key, lane);
      }
      rows.weigh(some, lse_log2);
      if constexpr (keeps_derivatives) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) some[n].x[e] *= derivatives[n].x[e];
        }
      }
      if constexpr (with_dropout_rate) rows.drop<true>(some, row, key, lane);
    }
  }

  __device__ __forceinline__ void derive(FragmentC (&dp)[block_kv / 8], const FragmentC (&p)[block_kv / 8]) {
    rows.derive(dp, p, nullptr, deltas, dp_factor, rows.dropout.factor);
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &dp[2 * kk + i / 2].x[i % 2 * 2];
        operand[kk][i] = pack(x[0], x[1]);
      }
    }
  }

  // What is told of a tile, once its K is there.
  __device__ __forceinline__ void learn() {
    if constexpr (!skips_tiles) return;
    told = shared.told[k_ring.stage];
    __syncwarp();  // before lane 0 says that the warp is done with it
  }
  __device__ __forceinline__ int after(int tile) const { return skips_tiles ? told.next : tile - 1; }

  // One tile of keys, all of whose pairs the band keeps if it is `full`; dQ of the tile before is under way.
  __device__ __forceinline__ void step(int tile, bool first, bool full) {
    FragmentC s[block_kv / 8], dp[block_kv / 8];  // S and then P, dP and then dS
    const char* k = shared.k[k_ring.stage];
    const char* v = shared.v[v_ring.stage];
    wait_for<KSlabs>(shared.k_full[k_ring.stage], k, tile, k_ring.parity);
    learn();
    start<QSlabs, KSlabs>(s, shared.q, k);
    wgmma_wait<1>();  // dQ of the tile before
    hold(operand);
    if (!first) arrive(shared.k_empty[(k_ring.stage + stages - 1) % stages]);
    wait_for<VSlabs>(shared.v_full[v_ring.stage], v, tile, v_ring.parity);
    start<OutSlabs, VSlabs>(dp, shared.dout, v);
    wgmma_wait<1>();  // S
    hold(s);
    if (full && (!skips_tiles || told.uniform)) {
      weigh<false>(s, tile);
    } else {
      weigh<true>(s, tile);
    }
    wgmma_wait<0>();  // dP
    hold(dp);
    arrive(shared.v_empty[v_ring.stage]);
    derive(dp, s);
    const u64 columns = by_columns(shared_address(k), KSlabs::slab_bytes);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) wgmma<true>(dq, operand[kk], moved(columns, 2048 * kk), true);
    wgmma_commit();
    k_ring.advance();
    v_ring.advance();
  }

  // A tile that none of this warpgroup's rows keeps.
  __device__ __forceinline__ void skip() {
    barrier_wait(shared_address(&shared.k_full[k_ring.stage]), k_ring.parity);
    learn();
    arrive(shared.k_empty[k_ring.stage]);
    barrier_wait(shared_address(&shared.v_full[v_ring.stage]), v_ring.parity);
    arrive(shared.v_empty[v_ring.stage]);
    k_ring.advance();
    v_ring.advance();
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (FragmentC& c : dq) c = {};
    // What this warpgroup's rows keep of the tiles.
    const Place& place = block.place;
    const TileRange own = kept_key_tiles<block_kv, 64>(block.problem, place.extent, rows.keep.band, {place.head, 1},
                                                       place.first_row + group * 64, 64);
    const int begin = skips_tiles ? 0 : block.range.begin;
    int tile = block.range.end - 1;
    if constexpr (skips_tiles) {
      barrier_wait(shared_address(&shared.k_full[0]), 0);
      tile = shared.told[0].tile;
    }
#pragma unroll 1
    for (; tile >= at_least(own.end, begin); tile = after(tile)) skip();
    const int last = at_least(own.begin, begin);
    if (tile >= last) {
      barrier_wait(shared_address(&shared.q_full), 0);
      barrier_wait(shared_address(&shared.dout_full), 0);
#pragma unroll
      for (auto& a : operand) a[0] = a[1] = a[2] = a[3] = 0;
      for (const int first = tile; tile >= last; tile = after(tile)) step(tile, tile == first, own.is_full(tile));
      wgmma_wait<0>();
      hold(dq);
      arrive(shared.k_empty[(k_ring.stage + stages - 1) % stages]);
    }
#pragma unroll 1
    for (; tile >= begin; tile = after(tile)) skip();
  }

  __device__ __forceinline__ void store(float factor) {
    const Rows& q = block.place.extent.q;
    const Tensor& to = block.problem.dq;
    Result* head = result_of(to, block.place.batch, block.place.head, q.first);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + 8 * half;
      if (has_q_lengths && at >= q.length) {
        // What was read there may have been anything.
#pragma unroll
        for (FragmentC& c : dq) c.x[2 * half] = c.x[2 * half + 1] = 0.f;
      }
      store_row<head_dim>(dq, half, factor, head + at * to.row_stride, at < q.stored, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_backward_dq(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const Block block(problem);
  const Place& place = block.place;
  if (packed && place.first_row >= place.extent.q.stored) return;
  if (computed_in_float32(problem, place.batch, place.kv_head)) return;
  const int warp = uniform_warp();
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.q_full), 1);
    barrier_init(shared_address(&shared.dout_full), 1);
    for (int i = 0; i < stages; ++i) {
      barrier_init(shared_address(&shared.k_full[i]), arrivals_of_keys);
      barrier_init(shared_address(&shared.k_empty[i]), 4 * computing * arrivals_of_a_warp);
    }
    for (int i = 0; i < v_stages; ++i) {
      barrier_init(shared_address(&shared.v_full[i]), arrivals_of_keys);
      barrier_init(shared_address(&shared.v_empty[i]), 4 * computing * arrivals_of_a_warp);
    }
    barriers_ready();
  }
  __syncthreads();

  if (warp < 4) {
    warpgroup_reg_dealloc<loading_warp>();
    if constexpr (loads_by_list) {
      load_listed(block, shared, maps, warp, threadIdx.x % 32);
    } else if (warp == 0) {
      load(block, shared, maps, threadIdx.x % 32);
    }
  } else {
    warpgroup_reg_alloc<computing_registers(loading_warp)>();
    const int group = warp / 4 - 1, lane = threadIdx.x % 32;
    const Descale descale = descale_of(problem, place.batch, place.kv_head);
    const float scale = scale_of(problem, place.batch);
    const float score_scale = scale * descale.query * descale.key;
    const float ds_factor = descale.ds * probability_unit;
    BackwardDq backward{
        block,
        shared,
        group,
        lane,
        place.first_row + group * 64 + warp % 4 * 16 + lane / 4,
        {problem, place.extent, place.head, score_scale},
        descale.dout * descale.value * ds_factor,
    };
    backward.load_statistics(ds_factor);
    backward.run();
    backward.store(scale * descale.key / descale.ds);
  }
}

}  // namespace jax_flash
