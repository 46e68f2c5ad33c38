// FlashAttention's backward pass (Dao 2023, algorithm 2) by wgmma, for head dims up to 128.
//
// A block owns block_kv keys of one key head, of which its warpgroups take tiles of 64, and walks over the rows of
// every query head of its group, block_q at a time. With
//   S^T = K Q^T,  P^T = exp(scale S^T - lse),  dP^T = V dO^T,  dS^T = P^T * (dP^T - delta)
// it accumulates dV += P^T dO and dK += dS^T Q in registers; dQ += dS K is added to a float accumulator in global
// memory (dq_sums.cuh), which jax_flash_convert_dq turns into the result afterwards. Keys run along the rows of the
// accumulators, so that P^T and dS^T are operands in registers of the next product; only dS passes through shared
// memory, for dQ.
//
// One warp of one more warpgroup loads the rows by TMA, a ring of `stages` tiles ahead. dQ of a tile of rows, which
// takes dS of both warpgroups, is computed behind the products of the tile after, so that neither waits for the other's
// dS. Of 64 rows it is the work of one warpgroup, by turns: one is at its exponentials while the tensor cores are the
// other's. Tiles of 128 rows, of which each has 64, fit light calls (tiles.h) up to head_dim 64. Of 80 rows, in long
// calls without options, dQ is computed transposed, 64 columns by each warpgroup (FlashAttention-3 and -4 have such
// tiles).
#pragma once

#include "cuda/sm90a/backward_loads.cuh"
#include "cuda/sm90a/stores.cuh"

namespace jax_flash {

extern "C" __constant__ KernelTraits jax_flash_backward_traits = {
    .threads = threads,
    .block_rows = block_kv,
    .shared_bytes = sizeof(SharedStorage),
    .convert_warps = adds_dq ? convert_warps : 0,
    .zero_threads = zeroes_dq ? zero_threads : 0,
    .converts_ahead = adds_dq,
    .persistent = stays,
    .q_box_rows = block_q,
    .k_box_rows = block_kv,
    .v_box_rows = block_kv,
    .dout_box_rows = block_q,
    .dk_dv_box_rows = stores_in_bulk ? 16 : 0,
    .splits_groups = splits_groups,
    .halves_rows = halves_rows,
};

// dK and dV of a thread.
struct KeySums {
  FragmentC dk[KSlabs::columns / 8], dv[VSlabs::columns / 8];
};

using TransposedDq = FragmentC[block_q / 8];  // of a warp: 16 columns and a tile of rows

struct Backward {
  const Block& block;
  SharedStorage& shared;
  int group;  // warpgroup, of those that compute
  int warp;   // in the warpgroup
  int lane;
  Weights weights;
  Phases phases;
  Walk before;  // the tile of rows before
  // With transposes_dq: the one before that, whose dQ^T waits to be added; and where dS of the tile before lies. Ahead
  // of the first tile that is K, of which nothing is added: no branch may come between products that are under way.
  Walk late_at;
  u32 ds_before;
  Select<stays, KeySums&, KeySums>::type sums;
  u32 k_operand[keys_in_registers ? KSlabs::columns / 16 : 1][4];
  u32 v_operand[keys_in_registers ? VSlabs::columns / 16 : 1][4];

  __device__ __forceinline__ int key_row() const { return group * 64 + warp * 16; }

  // What is beyond the end of keys or rows may be anything, and no weight of 0 would take it away.
  template <int k, int v>
  __device__ __forceinline__ void wait_for_keys(u32 (&k_operand)[k][4], u32 (&v_operand)[v][4], u32 parity) const {
    jax_flash::wait_for_keys(shared.keys_full, parity);
    const int valid = block.place.extent.kv.length - block.place.first_key;
    if (ragged_keys && valid < block_kv) {
      KSlabs::zero_rows(shared_address(shared.k), valid, warp * 32 + lane);
      VSlabs::zero_rows(shared_address(shared.v), valid, warp * 32 + lane);
      stores_ready();
      named_sync(all_computing, computing_threads);
    }
    if constexpr (keys_in_registers) {
      KSlabs::read(k_operand, shared_address(shared.k), key_row(), lane);
      VSlabs::read(v_operand, shared_address(shared.v), key_row(), lane);
    }
  }
  __device__ __forceinline__ void wait_for_rows(Walk& at, const Ring<stages>& ring) const {
    barrier_wait(shared_address(&shared.full[ring.stage]), phases.full(ring));
    if constexpr (skips_tiles) at = shared.told[ring.stage].walk(at.head);
    const int valid = block.place.extent.q.length - at.tile * block_q;
    if (ragged_rows && valid < block_q) {
      // Each warpgroup for itself: none waits for another here.
      QSlabs::zero_rows(shared_address(shared.q[ring.stage]), valid, warp * 32 + lane);
      OutSlabs::zero_rows(shared_address(shared.dout[ring.stage]), valid, warp * 32 + lane);
      stores_ready();
      named_sync(one_computing + group, warpgroup);
    }
  }

  // c = X Y^T, for the warpgroup's keys.
  template <typename X, typename Y, int n>
  __device__ __forceinline__ void start_scores(Scores64& c, const u32 (&operand)[n][4], const char* x,
                                               const char* y) const {
    const u64 a = by_rows(shared_address(x) + group * 64 * 128), b = by_rows(shared_address(y));
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < X::steps; ++kk) {
      if constexpr (keys_in_registers) {
        wgmma<false>(c, operand[kk], moved(b, Y::step_offset(kk)), kk > 0);
      } else {
        wgmma<false, false>(c, moved(a, X::step_offset(kk)), moved(b, Y::step_offset(kk)), kk > 0);
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_s(Scores64& s, int stage) const {
    start_scores<KSlabs, QSlabs>(s, k_operand, shared.k, shared.q[stage]);
  }
  __device__ __forceinline__ void start_dp(Scores64& dp, int stage) const {
    start_scores<VSlabs, OutSlabs>(dp, v_operand, shared.v, shared.dout[stage]);
  }
  __device__ __forceinline__ void start_dv(const Operand64& p, int stage) {
    wgmma_fence();
    multiply_rows<OutSlabs>(sums.dv, p, shared_address(shared.dout[stage]));
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dk(const Operand64& ds, int stage) {
    wgmma_fence();
    multiply_rows<QSlabs>(sums.dk, ds, shared_address(shared.q[stage]));
    wgmma_commit();
  }

  // dS of the tile of rows that comes `i`-th lies in one of two buffers; the warp's part.
  template <typename To = DsSlabs>
  __device__ __forceinline__ void put_ds(const Operand64& ds, int i) const {
    barrier_wait(shared_address(&shared.ds_empty[i % 2]), phases.ds(i) ^ 1);
    if constexpr (transposes_dq) {
      To::put_transposed(shared_address(shared.ds[i % 2]), key_row(), ds, lane);
    } else {
      To::put(shared_address(shared.ds[i % 2]), key_row(), ds, lane);
    }
    stores_ready();
  }
  __device__ __forceinline__ bool sums_dq(int i) const { return sums_dq_of(i, group); }
  // dQ^T of the tile of rows that came i-th, behind the products under way; with i = -1 of K.
  __device__ __forceinline__ void start_transposed_dq(TransposedDq& dq, int i) const {
    if (i >= 0) barrier_wait(shared_address(&shared.ds_full[i & 1]), phases.ds(i));
    const u64 k = by_columns(shared_address(shared.k) + group * KSlabs::slab_bytes, KSlabs::slab_bytes);
    const u64 ds = by_rows(ds_before);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) {
      wgmma<true, false>(dq, moved(k, 2048 * kk), moved(ds, DsSlabs::step_offset(kk)), kk > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void end_transposed_dq(TransposedDq& dq, int i) const {
    hold(dq);
    if (lane == 0 && i >= 0) barrier_arrive(shared_address(&shared.ds_empty[i & 1]));
  }
  __device__ __forceinline__ void add_late_dq(TransposedDq& dq, bool there) const {
    add_transposed_dq(block, dq, weights.dq_factor, late_at, group * 4 + warp, shared.dq[group][warp], lane, there);
  }
  // dQ of the tile of rows that came i-th. No other product may be under way, or the registers are wanting.
  __device__ __forceinline__ void sum_dq(const Walk& at, int i) const {
    if constexpr (transposes_dq) {
      TransposedDq dq;
      start_transposed_dq(dq, i);
      wgmma_wait<0>();
      hold(dq);
      if (lane == 0) barrier_arrive(shared_address(&shared.ds_empty[i % 2]));
      add_transposed_dq(block, dq, weights.dq_factor, at, group * 4 + warp, shared.dq[group][warp], lane, true);
      return;
    }
    const int slab = shares_dq ? group : 0, row = slab * 64;
    const u64 ds = by_columns(shared_address(shared.ds[i % 2]) + slab * DsSlabs::slab_bytes, 0);
    barrier_wait(shared_address(&shared.ds_full[i % 2]), phases.ds(i));
#pragma unroll
    for (int piece = 0; piece < dq_pieces; ++piece) {
      FragmentC dq[KSlabs::columns / 8 / dq_pieces];
      const u64 k = by_columns(shared_address(shared.k) + piece * KSlabs::slab_bytes, KSlabs::slab_bytes);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < block_kv / 16; ++kk) {
        wgmma<true, true>(dq, moved(ds, 2048 * kk), moved(k, 2048 * kk), kk > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      hold(dq);
      if (lane == 0 && piece + 1 == dq_pieces) barrier_arrive(shared_address(&shared.ds_empty[i % 2]));
      if constexpr (adds_by_turns) {
        const int buffer = dq_buffer(i, group);
        barrier_wait(shared_address(&shared.dq_empty[buffer]), phases.ds(i) ^ 1);
        put_dq<head_dim / 8>(dq, weights.dq_factor, shared.dq[buffer][warp], lane);
        if (lane == 0) barrier_arrive(shared_address(&shared.dq_full[buffer]));
      } else if constexpr (adds_in_bulk) {
        add_dq_in_bulk(block, dq, weights.dq_factor, at, row + warp * 16, shared.dq[group][warp], lane);
      } else {
        add_dq(block, dq, weights.dq_factor, at, row + warp * 16, piece * kBoxColumns, lane);
      }
    }
  }

  // One tile of rows, the i-th of all; and dQ of the tile of rows before, if this warpgroup `sums` it. Transposed, dQ
  // is computed behind dV, and added in the next step, while its scores are under way.
  template <bool sums>
  __device__ __forceinline__ void step(Walk& at, const Ring<stages>& ring, int i, TransposedDq& late) {
    const int stage = ring.stage;
    // As arrays of one tile: as tiles alone, ptxas orders no product behind another beside slopes at head_dim 128.
    Scores64 s[1], dp[1];  // S^T and then P^T, dP^T and then dS^T
    Derivatives derivatives;
    Operand64 p_operand[1], ds_operand[1];
    // dP^T is under way with S^T, but where derivatives are kept: the registers for both are wanting.
    constexpr bool dp_with_s = !keeps_derivatives;
    constexpr bool dv_last = keeps_derivatives || sums_heads || block_q > 64;
    wait_for_rows(at, ring);
    if constexpr (in_turns) named_sync(turn_barrier + group, computing_threads);
    start_s(s[0], stage);
    if constexpr (transposes_dq) add_late_dq(late, i > 1);
    if constexpr (dp_with_s) start_dp(dp[0], stage);
    const Diagonals diagonals = weights.of_diagonals(at);
    const LseOf lse(shared.lse_log2[stage], lane);
    wgmma_wait<dp_with_s ? 1 : 0>();  // S^T
    hold(s[0]);
    weights.weigh(s[0], derivatives, at, block.is_full(at), lse, diagonals);
    if constexpr (!dp_with_s) start_dp(dp[0], stage);
    if constexpr (block_q == 64) round_kept(p_operand[0], s[0]);
    wgmma_wait<0>();  // dP^T
    hold(dp[0]);
    if constexpr (!dv_last) start_dv(p_operand[0], stage);
    if constexpr (in_turns) named_arrive(turn_barrier + (group + 1) % computing, computing_threads);
    weights.derive(dp[0], s[0], derivatives, at, OfRows{shared.deltas[stage]});
    // Of 128 rows P^T is rounded when dP^T is dS^T: registers for P^T twice beside dP^T are wanting.
    if constexpr (block_q > 64) round_kept(p_operand[0], s[0]);
    round_to(ds_operand[0], dp[0]);
    if constexpr (adds_dq) put_ds(ds_operand[0], i);
    if constexpr (dv_last) start_dv(p_operand[0], stage);
    TransposedDq dq;
    if constexpr (transposes_dq) start_transposed_dq(dq, i - 1);
    start_dk(ds_operand[0], stage);
    if constexpr (adds_dq) {
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&shared.ds_full[i % 2]));
    }
    wgmma_wait<0>();
    hold(p_operand[0]);
    hold(ds_operand[0]);
    if constexpr (transposes_dq) {
      end_transposed_dq(dq, i - 1);
#pragma unroll
      for (int n = 0; n < block_q / 8; ++n) late[n] = dq[n];
      late_at = before;
      ds_before = shared_address(shared.ds[i & 1]);
    }
    __syncwarp();  // all lanes have read lse_log2 and deltas
    if (arrives(lane)) barrier_arrive(shared_address(&shared.empty[stage]));
    if constexpr (sums && !transposes_dq) sum_dq(before, i - 1);
    before = at;
  }

  // `next`: the phases behind this item.
  __device__ __forceinline__ void run(Phases& next) {
#pragma unroll
    for (FragmentC& c : sums.dk) c = {};
#pragma unroll
    for (FragmentC& c : sums.dv) c = {};
    if (block.idle()) return;
    if (in_turns && phases.none() && group == computing - 1) named_arrive(turn_barrier, computing_threads);
    wait_for_keys(k_operand, v_operand, phases.keys());
    Ring<stages> ring;
    TransposedDq late{};
    ds_before = shared_address(shared.k);
    int i = 0;
    for (Walk at{block.first_head, block.first_tile()}; at.head <= block.last_head; ++i, ring.advance()) {
      if (transposes_dq || (i > 0 && sums_dq(i - 1))) {
        step<adds_dq>(at, ring, i, late);
      } else {
        step<false>(at, ring, i, late);
      }
      at = weights.move<true>(at, block);
    }
    if (transposes_dq && i > 1) add_late_dq(late, i > 1);  // by a constant ptxas waits for products in the loop
    if (sums_dq(i - 1)) sum_dq(before, i - 1);
    if constexpr (stays) {
      __syncwarp();
      if (arrives(lane)) barrier_arrive(shared_address(&shared.keys_empty));
      next.advance(ring, i);
    }
    hold(sums.dk);
    hold(sums.dv);
  }
};

// Where two blocks that share rows meet: the first to come leaves its sums, the second adds them to its own (of two
// addends it is no matter which is first) and has results to store.
JAX_FLASH_DEVICE bool add_other_half(const Problem& problem, SharedStorage& shared, int index, KeySums& sums,
                                     int thread) {
  constexpr int sums_there = 2;
  constexpr int of_dk = ceil_div(head_dim, 8), of_dv = ceil_div(value_head_dim, 8);  // fragments that have results
  constexpr int fragments = of_dk + of_dv;
  const int item = item_of(problem, index);
  int* const met = DqSums{problem}.met(item);
  if (thread == 0) shared.came_second = atomicAdd(met, 1) % sums_there;
  named_sync(all_computing, computing_threads);
  const bool second = shared.came_second != 0;
  if (second && thread == 0) {
    while (load_acquire(met) < 2 + sums_there) continue;
  }
  if (second) named_sync(all_computing, computing_threads);
  float4* at = static_cast<float4*>(problem.group_sums) + item * (fragments * computing_threads) + thread;
  const auto meet = [&](FragmentC& c) {
    if (second) {
      const float4 other = *at;
      c = {c.x[0] + other.x, c.x[1] + other.y, c.x[2] + other.z, c.x[3] + other.w};
    } else {
      *at = {c.x[0], c.x[1], c.x[2], c.x[3]};
    }
    at += computing_threads;
  };
#pragma unroll
  for (int n = 0; n < of_dk; ++n) meet(sums.dk[n]);
#pragma unroll
  for (int n = 0; n < of_dv; ++n) meet(sums.dv[n]);
  if (!second) {
    __threadfence();
    named_sync(all_computing, computing_threads);
    if (thread == 0) atomicAdd(met, sums_there);
  }
  return second;
}

// Where the query heads of a key head are split and blocks add in order: those that come before have added to these
// sums of dK and dV, and then this one has. They start before this one (schedule.cuh).
JAX_FLASH_DEVICE void wait_for_shares_before(const Block& block, int turn, int thread) {
  if (thread == 0) {
    while (load_acquire(DqSums{block.problem}.turn_of_keys(block.place)) < turn) continue;
  }
  named_sync(all_computing, computing_threads);
}
JAX_FLASH_DEVICE void let_next_share_add(const Block& block, int thread) {
  __threadfence();
  named_sync(all_computing, computing_threads);
  if (thread == 0) atomicAdd(DqSums{block.problem}.turn_of_keys(block.place), 1);
}

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_backward(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  let_the_next_kernel_begin();
  // Where no warp finds items.
  const Block own(problem, blockIdx.x);
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.keys_full), (loads_by_list ? 2 * arrivals_of_keys : 1) + zeroes_dq);
    barrier_init(shared_address(&shared.keys_empty), 4 * computing * arrivals_of_a_warp);
    for (int i = 0; i < stages; ++i) {
      barrier_init(shared_address(&shared.full[i]), 1 + 32);
      barrier_init(shared_address(&shared.empty[i]), 4 * computing * arrivals_of_a_warp);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&shared.ds_full[i]), 4 * computing);
      barrier_init(shared_address(&shared.ds_empty[i]), shares_dq ? 4 * computing : 4);  // warps of those that summed
      barrier_init(shared_address(&shared.dq_added[i]), 4 * computing);
      barrier_init(shared_address(&shared.item_full[i]), 1);
      const int others = stays ? 3 : 1;  // that load, wait for zeros and end additions, or load and add
      barrier_init(shared_address(&shared.item_empty[i]), (4 * computing + others) * arrivals_of_a_warp);
    }
    for (int i = 0; i < tiles_ahead; ++i) {
      barrier_init(shared_address(&shared.found_full[i]), 1);
      barrier_init(shared_address(&shared.found_empty[i]), arrivals_of_a_warp);
    }
    barrier_init(shared_address(&shared.item_wanted), 1);
    for (int i = 0; adds_by_turns && i < dq_buffers; ++i) {
      barrier_init(shared_address(&shared.dq_full[i]), 4);
      barrier_init(shared_address(&shared.dq_empty[i]), 1);
    }
    barriers_ready();
  }
  for (int i = threadIdx.x * 16; zeroes_dq && i < zero_bytes; i += threads * 16) {
    store_shared(shared_address(shared.zeros) + i, uint4{0, 0, 0, 0});
  }
  stores_ready();
  __syncthreads();

  if (warp < 4) {
    warpgroup_reg_dealloc<loading_warp>();
    const DqSums sums{problem};
    if (loads_by_list) {
      if (own.here && !own.idle()) load_keys(own, shared, maps, warp, lane);
    }
    const auto zero_and_end_additions = [&](const Block& block, int n) {
      if (lane == 0) sums.zero_ahead(block.index, shared_address(shared.zeros));
      sums.end_additions(block.place, shared.dq_added[slot_of(n)], phase_of(n), lane);
    };
    if (warp == 0) {
      Loader loader{shared, maps, lane};
      for_each_item(own, shared, lane, loader.phases, [&](const Block& block, int) { loader.load(block); });
    } else if (hands_over && warp == finding_warp) {
      Finder{problem, shared, lane}.run();
    } else if (zeroes_dq && warp == 1) {
      Phases phases;
      u32 keys = 0;
      for_each_item(own, shared, lane, phases, [&](const Block& block, int n) {
        if (block.here && !block.idle()) {
          // With the keys, without which nothing is added.
          sums.wait_for_zeros(block.place, lane);
          if (lane == 0) barrier_arrive(shared_address(&shared.keys_full));
          // Zeros behind the first tiles, in whose way the stores would be.
          barrier_wait(shared_address(&shared.keys_full), keys);
          keys ^= 1;
        }
        if (!stays) zero_and_end_additions(block, n);
      });
    } else if (stays && zeroes_dq && warp == ending_warp) {
      Phases phases;
      for_each_item(own, shared, lane, phases, [&](const Block& block, int n) { zero_and_end_additions(block, n); });
    } else if (adds_by_turns && warp >= first_adding_warp) {
      const int group = warp - first_adding_warp;  // whose sums it adds
      Phases phases;
      u32 parities = 0;  // of buffers of dQ, as phases.ds(); by that ptxas spills 24 bytes
      for_each_item(own, shared, lane, phases, [&](const Block& block, int n) {
        if (lane > 0) return;
        // The block is read again for each tile, or there are too few registers.
        const auto again = [&] { return stays ? Block(problem, shared.items[slot_of(n)]) : own; };
        const bool adds = block.here && !block.idle();
        int i = 0;
        for (Walk at{adds ? block.first_head : block.last_head + 1, block.first_tile()}; at.head <= block.last_head;
             at = again().after(at), ++i) {
          if (!sums_dq_of(i, group)) continue;
          const int buffer = dq_buffer(i, group);
          barrier_wait(shared_address(&shared.dq_full[buffer]), parities >> i % 2 & 1);
          parities ^= 1 << i % 2;
          add_dq_in_turn(problem, Turn::of(again(), at, shares_dq ? group * kTurnRows : 0), shared.dq[buffer][0],
                         shared_address(&shared.dq_empty[buffer]));
        }
        sums.count_added(again().place);
      });
    }
  } else {
    warpgroup_reg_alloc<computing_registers(loading_warp)>();
    const int group = warp / 4 - 1;
    LocalTables local;
    const SumsOfTables of_tables = shared.tables.tables(local, threadIdx.x - warpgroup);
    const auto first_key_of = [&](const Block& block) { return block.place.first_key + group * 64 + warp % 4 * 16; };
    const auto store = [&](const Block& block, const KeySums& sums, float dropout_factor) {
      const bool in_order = adds_by_turns && problem.group_splits > problem.sums_of_group;
      const int turn = in_order ? turn_of_share(problem, block.place.share) : 0;
      if (turn > 0) {
        wait_for_shares_before(block, turn, threadIdx.x - warpgroup);
        store_dk<true>(block, sums.dk, first_key_of(block), lane);
        store_dv<true>(block, sums.dv, dropout_factor, first_key_of(block), lane);
      } else {
        store_dk(block, sums.dk, first_key_of(block), lane);
        store_dv(block, sums.dv, dropout_factor, first_key_of(block), lane);
      }
      if (in_order) let_next_share_add(block, threadIdx.x - warpgroup);
    };
    const auto arrive_added = [&](int slot) {
      if (!adds_dq || adds_by_turns) return;
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&shared.dq_added[slot]));
    };
    KeySums sums;
    // Both ways make their Backward in place: by one function for both ptxas spills 64 bytes more beside score
    // functions.
    if constexpr (!stays) {
      Block block = own;
      if (hands_over) {
        barrier_wait(shared_address(&shared.item_full[0]), 0);
        block.range.end = shared.items[0].range.end;  // the begin where there is no tile
      }
      if (!block.here) return arrive_added(0);
      Phases phases;
      const Descale descale = descale_of(problem, block.place.batch, block.place.kv_head);
      Backward backward{
          block,    shared, group,
          warp % 4, lane,   {block, descale, of_tables, shared.diagonals[warp - 4], first_key_of(block), lane},
          phases,   {},     {},
          {},       sums};
      backward.run(phases);
      if (starts_additions && lane == 0) bulk_wait<0>();
      arrive_added(0);
      if (is_half(problem) && !add_other_half(problem, shared, block.index, backward.sums, threadIdx.x - warpgroup)) {
        return;
      }
      store(block, backward.sums, backward.weights.scores.dropout.factor);
    } else {
      Phases phases;
      float dropout_factor = 1;
      int items = 0;
      // The additions of an item are waited for when the next one begins.
      const auto end_additions = [&] {
        if (items == 0) return;
        if (starts_additions && lane == 0) bulk_wait<1>();  // not for results
        arrive_added(slot_of(items - 1));
      };
      for_each_item(own, shared, lane, phases, [&](const Block& block, int n) {
        end_additions();
        items = n + 1;
        if (block.here) {
          const Descale descale = descale_of(problem, block.place.batch, block.place.kv_head);
          Backward backward{
              block,    shared, group,
              warp % 4, lane,   {block, descale, of_tables, shared.diagonals[warp - 4], first_key_of(block), lane},
              phases,   {},     {},
              {},       sums};
          backward.run(phases);
          dropout_factor = backward.weights.scores.dropout.factor;
          if (is_half(problem)) return;
          // TMA would write the rows of the next sequence too.
          const int first_key = first_key_of(block);
          if (stores_in_bulk && problem.group_splits == 1 &&
              !(packed && first_key + 16 > block.place.extent.kv.stored)) {
            const u32 results = shared_address(shared.dq[group][warp % 4]);
            if (lane == 0) bulk_wait_read<0>();
            __syncwarp();
            store_box_of_keys<head_dim>(block, &maps.dk, sums.dk, dk_factor(block), first_key, results, lane);
            if constexpr (transposes_dq) {  // there is room for one of both
              if (lane == 0) {
                bulk_commit();
                bulk_wait_read<0>();
              }
              __syncwarp();
            }
            store_box_of_keys<value_head_dim>(block, &maps.dv, sums.dv, dv_factor(block, dropout_factor), first_key,
                                              results + (transposes_dq ? 0 : Slabs<16, head_dim>::bytes), lane);
          } else {
            // Read again, rather than kept in registers until here.
            store(Block(problem, shared.items[slot_of(n)]), sums, dropout_factor);
          }
        }
        if (starts_additions && lane == 0) bulk_commit();
      });
      if (is_half(problem) && starts_additions && lane == 0) bulk_commit();
      end_additions();
      if (is_half(problem)) {
        const Block block(problem, shared.items[0]);
        if (add_other_half(problem, shared, block.index, sums, threadIdx.x - warpgroup)) {
          store(block, sums, dropout_factor);
        }
      }
      if (starts_additions && lane == 0) bulk_wait<0>();
    }
  }
}

}  // namespace jax_flash
