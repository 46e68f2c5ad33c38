// The backward pass of backward.cuh for head dims above 128, where dK and dV of 64 keys take half of the registers of
// two warpgroups each. So these two share the products instead of the keys:
//   the first   S^T = K Q^T,   P^T = exp(scale S^T - lse),    dV += P^T dO
//   the second  dP^T = V dO^T, dS^T = P^T * (dP^T - delta),   dK += dS^T Q
// P^T goes from the first to the second through shared memory in float32, a thread to the one that holds the same keys
// and rows. dQ has a pass of its own (backward_dq.cuh): added for 64 keys at a time it took 40% of the time.
#pragma once

#include "cuda/sm90a/backward_rows.cuh"

namespace jax_flash {

static_assert(block_kv == 64 && computing == 2, "64 keys, and a warpgroup for each half of the products");
static_assert(!adds_dq, "dQ has a pass of its own");

// Buffers of rows: one where derivatives that are kept take the memory of the others.
constexpr int buffers = keeps_derivatives ? 1 : stages;

constexpr int loading_warp = loading_registers(true);  // registers

struct SharedStorage {
  char k[KSlabs::bytes];
  char v[VSlabs::bytes];
  char q[buffers][QSlabs::bytes];
  char dout[buffers][OutSlabs::bytes];
  float4 p[block_q / 8][warpgroup];  // P^T, as its threads hold it
  float4 derivatives[keeps_derivatives ? block_q / 8 : 1][warpgroup];
  float lse_log2[buffers][block_q];
  float deltas[buffers][block_q];
  Told told[skips_tiles ? buffers : 1];
  DiagonalStorage diagonals[4 * computing];
  TableStorage tables;
  u64 k_full, v_full, q_full[buffers], q_empty[buffers], dout_full[buffers], dout_empty[buffers];
  u64 p_full[4], p_empty[4];  // of a warp each
};

extern "C" __constant__ KernelTraits jax_flash_backward_traits = {
    .threads = threads,
    .block_rows = block_kv,
    .shared_bytes = sizeof(SharedStorage),
    .q_box_rows = block_q,
    .k_box_rows = block_kv,
    .v_box_rows = block_kv,
    .dout_box_rows = block_q,
    .splits_groups = splits_groups,
};

// By key_loaders warps, where keys are listed.
JAX_FLASH_DEVICE void load_listed_keys(const Block& block, SharedStorage& shared, const TensorMaps& maps, int warp,
                                       int lane) {
  const Place& place = block.place;
  using Rows = ListedRows<block_kv>;
  const Rows rows(Rows::Read(block.problem, place.extent, place.first_key, warp, lane));
  rows.load<KSlabs>(shared.k, block.problem.k, &maps.k, shared.k_full, place.batch, place.kv_head, warp, lane);
  rows.load<VSlabs>(shared.v, block.problem.v, &maps.v, shared.v_full, place.batch, place.kv_head, warp, lane);
}

// By one warp.
JAX_FLASH_DEVICE void load(const Block& block, SharedStorage& shared, const TensorMaps& maps, int lane) {
  const Place& place = block.place;
  const Descale descale = descale_of(block.problem, place.batch, place.kv_head);
  const float ds_factor = descale.ds * probability_unit;
  const int key = place.extent.kv.first + place.first_key;
  Ring<buffers> ring{0, 1};
  bool first = !loads_by_list;
  const Search search(block);
  Walk at = search.first();
  if (skips_tiles && at.head > block.last_head) {
    if (lane == 0) shared.told[0] = Told::nothing();
    arrive_without_rows(shared.q_full[0], lane);
    arrive_without_rows(shared.dout_full[0], lane);
  }
  for (Walk next; at.head <= block.last_head; at = next) {
    next = search.after(at);
    const int stage = ring.stage, row = place.extent.q.first + at.tile * block_q;
    const Statistics statistics(block, at, ds_factor, lane);
    if (first && lane == 0) load_slabs<KSlabs>(shared.k, &maps.k, shared.k_full, key, place.kv_head, place.batch);
    barrier_wait(shared_address(&shared.q_empty[stage]), ring.parity);
    if (lane == 0) {
      load_slabs<QSlabs>(shared.q[stage], &maps.q, shared.q_full[stage], row, at.head, place.batch);
      if constexpr (skips_tiles) shared.told[stage] = Told::of(at);
    }
    Statistics::put(shared.lse_log2[stage], statistics.lse_log2, lane);
    barrier_arrive(shared_address(&shared.q_full[stage]));
    if (first && lane == 0) load_slabs<VSlabs>(shared.v, &maps.v, shared.v_full, key, place.kv_head, place.batch);
    barrier_wait(shared_address(&shared.dout_empty[stage]), ring.parity);
    if (lane == 0) {
      load_slabs<OutSlabs>(shared.dout[stage], &maps.dout, shared.dout_full[stage], row, at.head, place.batch);
    }
    Statistics::put(shared.deltas[stage], statistics.deltas, lane);
    barrier_arrive(shared_address(&shared.dout_full[stage]));
    ring.advance();
    first = false;
  }
}

// One of the two warpgroups.
struct Half {
  const Block& block;
  SharedStorage& shared;
  int group;  // which of the two
  int warp;   // in the warpgroup
  int lane;
  Weights weights;

  __device__ __forceinline__ int thread() const { return warp * 32 + lane; }
  // For its warp, whose lanes are done with what the barrier is about.
  __device__ __forceinline__ void arrive(const u64& barrier) const {
    __syncwarp();
    if (arrives(lane)) barrier_arrive(shared_address(&barrier));
  }

  // What is beyond the end of keys or rows may be anything, and no weight of 0 would take it away.
  __device__ __forceinline__ void wait_for_keys() const {
    jax_flash::wait_for_keys(shared.k_full, 0);
    jax_flash::wait_for_keys(shared.v_full, 0);
    const int valid = block.place.extent.kv.length - block.place.first_key;
    if (ragged_keys && valid < block_kv) {
      // Each warpgroup what it alone multiplies.
      if (group == 0) KSlabs::zero_rows(shared_address(shared.k), valid, thread());
      if (group == 1) VSlabs::zero_rows(shared_address(shared.v), valid, thread());
      stores_ready();
      named_sync(one_computing + group, warpgroup);
    }
  }
  // The first tile of rows; what is full when that is told is `full`.
  __device__ __forceinline__ Walk first(const u64& full) const {
    if constexpr (skips_tiles) barrier_wait(shared_address(&full), 0);
    return block.first(shared.told[0]);
  }
  // A tile's first wait also learns which it is; at the second the loading warp may be telling of the next one already.
  template <typename T, bool first>
  __device__ __forceinline__ void wait_for_rows(const u64* full, const char* tile, Walk& at,
                                                const Ring<buffers>& ring) const {
    barrier_wait(shared_address(&full[ring.stage]), ring.parity);
    if constexpr (skips_tiles && first) at = shared.told[ring.stage].walk(at.head);
    const int valid = block.place.extent.q.length - at.tile * block_q;
    if (ragged_rows && valid < block_q) {
      // Each warpgroup for itself: none waits for the other here.
      T::zero_rows(shared_address(tile), valid, thread());
      stores_ready();
      named_sync(one_computing + group, warpgroup);
    }
  }

  // c = X Y^T.
  template <typename X, typename Y>
  __device__ __forceinline__ void score_product(Scores64& c, const char* x, const char* y) const {
    const u64 a = by_rows(shared_address(x)), b = by_rows(shared_address(y));
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < X::steps; ++kk) {
      wgmma<false, false>(c, moved(a, X::step_offset(kk)), moved(b, Y::step_offset(kk)), kk > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void run_values(FragmentC (&dv)[VSlabs::columns / 8]) {
    Walk at = first(shared.q_full[0]);
    if (at.head > block.last_head) return;
    wait_for_keys();
    Ring<buffers> ring{0, 0};
    u32 parity = 0;
    for (; at.head <= block.last_head; parity ^= 1, ring.advance()) {
      const int stage = ring.stage;
      Scores64 s;  // S^T, and then P^T
      Derivatives derivatives;
      Operand64 operand;
      wait_for_rows<QSlabs, true>(shared.q_full, shared.q[stage], at, ring);
      score_product<KSlabs, QSlabs>(s, shared.k, shared.q[stage]);
      const OfRowsEarly lse_of(shared.lse_log2[stage], lane);
      const Diagonals diagonals = weights.of_diagonals(at);
      wgmma_wait<0>();
      hold(s);
      weights.weigh(s, derivatives, at, block.is_full(at), lse_of, diagonals);
      arrive(shared.q_empty[stage]);
      barrier_wait(shared_address(&shared.p_empty[warp]), parity ^ 1);
#pragma unroll
      for (int n = 0; n < block_q / 8; ++n) {
        shared.p[n][thread()] = float4{s[n].x[0], s[n].x[1], s[n].x[2], s[n].x[3]};
        if constexpr (keeps_derivatives) {
          const FragmentC& d = derivatives[0][n];
          shared.derivatives[n][thread()] = float4{d.x[0], d.x[1], d.x[2], d.x[3]};
        }
      }
      arrive(shared.p_full[warp]);
      round_kept(operand, s);
      wait_for_rows<OutSlabs, false>(shared.dout_full, shared.dout[stage], at, ring);
      wgmma_fence();
      multiply_rows<OutSlabs>(dv, operand, shared_address(shared.dout[stage]));
      wgmma_commit();
      wgmma_wait<0>();
      arrive(shared.dout_empty[stage]);
      at = weights.move<false>(at, block);
    }
    hold(dv);
  }

  __device__ __forceinline__ void run_keys(FragmentC (&dk)[KSlabs::columns / 8]) {
    Walk at = first(shared.dout_full[0]);
    if (at.head > block.last_head) return;
    wait_for_keys();
    Ring<buffers> ring{0, 0};
    u32 parity = 0;
    for (; at.head <= block.last_head; parity ^= 1, ring.advance()) {
      const int stage = ring.stage;
      Scores64 p, dp;  // dP^T, and then dS^T
      Derivatives derivatives;
      Operand64 operand;
      wait_for_rows<OutSlabs, true>(shared.dout_full, shared.dout[stage], at, ring);
      score_product<VSlabs, OutSlabs>(dp, shared.v, shared.dout[stage]);
      const OfRowsEarly delta_of(shared.deltas[stage], lane);
      wgmma_wait<0>();
      hold(dp);
      barrier_wait(shared_address(&shared.p_full[warp]), parity);
#pragma unroll
      for (int n = 0; n < block_q / 8; ++n) {
        const float4 x = shared.p[n][thread()];
        p[n] = {x.x, x.y, x.z, x.w};
        if constexpr (keeps_derivatives) {
          const float4 d = shared.derivatives[n][thread()];
          derivatives[0][n] = {d.x, d.y, d.z, d.w};
        }
      }
      arrive(shared.p_empty[warp]);
      weights.derive(dp, p, derivatives, at, delta_of);
      arrive(shared.dout_empty[stage]);
      round_to(operand, dp);
      wait_for_rows<QSlabs, false>(shared.q_full, shared.q[stage], at, ring);
      wgmma_fence();
      multiply_rows<QSlabs>(dk, operand, shared_address(shared.q[stage]));
      wgmma_commit();
      wgmma_wait<0>();
      arrive(shared.q_empty[stage]);
      at = weights.move<true>(at, block);
    }
    hold(dk);
  }
};

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_backward(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const Block block(problem, blockIdx.x);
  if (!block.here) return;
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.k_full), arrivals_of_keys);
    barrier_init(shared_address(&shared.v_full), arrivals_of_keys);
    for (int i = 0; i < buffers; ++i) {
      barrier_init(shared_address(&shared.q_full[i]), 1 + 32);
      barrier_init(shared_address(&shared.q_empty[i]), 4 * computing * arrivals_of_a_warp);
      barrier_init(shared_address(&shared.dout_full[i]), 1 + 32);
      barrier_init(shared_address(&shared.dout_empty[i]), 4 * computing * arrivals_of_a_warp);
    }
    for (int i = 0; i < 4; ++i) {
      barrier_init(shared_address(&shared.p_full[i]), arrivals_of_a_warp);
      barrier_init(shared_address(&shared.p_empty[i]), arrivals_of_a_warp);
    }
    barriers_ready();
  }
  __syncthreads();

  const int first_key = block.place.first_key + warp % 4 * 16;
  if (warp < 4) {
    warpgroup_reg_dealloc<loading_warp>();
    if (loads_by_list && !block.idle()) load_listed_keys(block, shared, maps, warp, lane);
    if (warp == 0 && !block.idle()) load(block, shared, maps, lane);
  } else {
    warpgroup_reg_alloc<computing_registers(loading_warp)>();
    const Descale descale = descale_of(problem, block.place.batch, block.place.kv_head);
    LocalTables local;
    const SumsOfTables of_tables = shared.tables.tables(local, threadIdx.x - warpgroup);
    Half half{block,    shared, warp / 4 - 1,
              warp % 4, lane,   {block, descale, of_tables, shared.diagonals[warp - 4], first_key, lane}};
    if (half.group == 0) {
      FragmentC dv[VSlabs::columns / 8];
#pragma unroll
      for (FragmentC& c : dv) c = {};
      if (!block.idle()) half.run_values(dv);
      store_dv(block, dv, half.weights.scores.dropout.factor, first_key, lane);
    } else {
      FragmentC dk[KSlabs::columns / 8];
#pragma unroll
      for (FragmentC& c : dk) c = {};
      if (!block.idle()) half.run_keys(dk);
      store_dk(block, dk, first_key, lane);
    }
  }
}

}  // namespace jax_flash
