// FlashAttention's backward pass (Dao 2023, algorithm 2) by wgmma, for head dims up to 128.
//
// A block owns block_kv keys of one key head, 64 for each of its warpgroups that compute, and walks over the rows of
// every query head of its group, block_q at a time. With
//   S^T = K Q^T,  P^T = exp(scale S^T - lse),  dP^T = V dO^T,  dS^T = P^T * (dP^T - delta)
// it accumulates dV += P^T dO and dK += dS^T Q in registers; dQ += dS K is added to a float accumulator in global
// memory, which jax_flash_convert_dq turns into the result afterwards. Keys run along the rows of the accumulators, so
// that P^T and dS^T are operands in registers of the next product; only dS passes through shared memory, for dQ, of
// which a warpgroup computes its share of the columns over all keys of the block.
//
// One warp of one more warpgroup brings the rows, a ring of `stages` tiles ahead. Products run behind the backs of
// those that compute: of the tile before, dV and dK are under way while its S^T and dP^T are begun; dQ, whose dS other
// warpgroups write, is put off to the middle of the next tile, so that nobody waits there for the others and the
// tensor cores have something to do during the exponentials.
#pragma once

#include "cuda/shared/backward_block.cuh"
#include "cuda/shared/score_rows.cuh"
#include "cuda/shared/tile.cuh"
#include "cuda/sm90a/slabs.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int computing = warps / 4 - 1;  // warpgroups
static_assert(warps % 4 == 0 && block_kv == 64 * computing && block_q == 64, "64 keys and 64 rows a warpgroup");
constexpr int computing_threads = warpgroup * computing;

using KSlabs = Slabs<block_kv, head_dim>;
using VSlabs = Slabs<block_kv, value_head_dim>;
using QSlabs = Slabs<block_q, head_dim>;
using OutSlabs = Slabs<block_q, value_head_dim>;
constexpr int dq_columns = KSlabs::columns / computing;  // of one warpgroup
static_assert(kBoxColumns % dq_columns == 0 && dq_columns % 16 == 0, "dQ's columns of a warpgroup lie in one slab");

constexpr bool adds_dq = !option_deterministic;  // else it is computed by a pass of its own

// K and V as operands in registers, where there is room: they need not be read again for each tile of rows then.
constexpr bool keys_in_registers = KSlabs::columns + VSlabs::columns <= 128;

// Registers of a thread: of 65536, in portions of 8 a thread.
constexpr int loading_registers = 24;
constexpr int computing_registers = (65536 / warpgroup - loading_registers) / computing / 8 * 8 < 240
                                        ? (65536 / warpgroup - loading_registers) / computing / 8 * 8
                                        : 240;

// Named barriers.
constexpr int all_computing = 1;
constexpr int one_computing = 2;  // and on, one of each warpgroup

struct SharedStorage {
  char k[KSlabs::bytes];  // and dK, at the end
  char v[VSlabs::bytes];  // and dV
  char q[stages][QSlabs::bytes];
  char dout[stages][OutSlabs::bytes];
  char ds[adds_dq ? 2 : 1]
         [block_kv * block_q * sizeof(Element)];  // dS^T: a slab of rows of keys and columns of query rows
  float anchor[stages][block_q];
  float delta[stages][block_q];
  u64 keys_full, full[stages], empty[stages], ds_full[2], ds_empty[2];
};

constexpr int convert_warps = 4;  // of jax_flash_convert_dq, a block

extern "C" __constant__ LaunchFacts jax_flash_backward_facts = {
    threads, block_kv, sizeof(SharedStorage), adds_dq ? convert_warps : 0, 0, block_q, block_kv, block_kv, block_q};

// Where dQ is summed up: for every 16 rows, for every 8 columns, the accumulators as the lanes hold them, four a lane,
// so that one instruction of a warp adds 512 contiguous bytes. `row_tile` counts in the batch entry.
JAX_FLASH_DEVICE float* dq_fragment(const Problem& problem, int batch, int head, int row_tile, int column_tile) {
  const i64 tile = (static_cast<i64>(batch) * problem.q_heads + head) * dq_tiles(problem) + row_tile;
  return static_cast<float*>(problem.scratch) + (tile * (head_dim / 8) + column_tile) * 128;
}

// The tiles of rows that a block walks over: those of one query head of its group after the other.
struct Walk {
  int head;
  int tile;

  __device__ __forceinline__ Walk after(const TileRange& tiles, const SegmentTiles<block_q>& segments) const {
    int next = tile + 1;
    while (in_segments && next < tiles.end && !segments.visits(next)) ++next;
    return next < tiles.end ? Walk{head, next} : Walk{head + 1, tiles.begin};
  }
};

// Which buffer of the ring of rows is next, and the parity of the phase to wait for.
struct Ring {
  int stage;
  u32 parity;

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// What the warps of a block all know.
struct Block {
  const Problem& problem;
  const TensorMaps& maps;
  SharedStorage& shared;
  Place place;
  Band band;
  TileRange tiles;
  SegmentTiles<block_q> segments;
  int first_head, last_head;

  __device__ __forceinline__ Block(const Problem& problem, const TensorMaps& maps, SharedStorage& shared)
      : problem(problem),
        maps(maps),
        shared(shared),
        place(place_of(problem, blockIdx.x)),
        band(band_of(problem, place.part)),
        tiles(row_tiles_of<block_q>(band, place.part, place.first_key, block_kv)),
        segments{problem.q_segment_ranges, place.batch, problem.q_length,
                 in_segments ? segment_range<block_kv>(problem.kv_segment_ranges, place.batch, problem.kv_length,
                                                       place.first_key)
                             : SegmentRange{0, 0}} {
    const int group = problem.q_heads / problem.kv_heads;
    first_head = place.kv_head * group;
    last_head = first_head + group - 1;
    segments.trim(tiles, threadIdx.x % 32);
  }

  __device__ __forceinline__ u32 full(int stage) const { return shared_address(&shared.full[stage]); }
  __device__ __forceinline__ u32 empty(int stage) const { return shared_address(&shared.empty[stage]); }
  __device__ __forceinline__ u32 keys_full() const { return shared_address(&shared.keys_full); }

  // By one warp.
  __device__ __forceinline__ void bring(int lane) const {
    const Part& part = place.part;
    const Unscales unscales = unscales_of(problem, place.batch, place.kv_head);
    const float ds_factor = unscales.ds * probability_unit;
    const float* lse = static_cast<const float*>(problem.lse);
    const float* delta = static_cast<const float*>(problem.delta);
    if (lane == 0) {
      barrier_expect(keys_full(), KSlabs::bytes + VSlabs::bytes);
      const int key = part.kv.first + place.first_key;
      KSlabs::copy(shared_address(shared.k), &maps.k, keys_full(), key, place.kv_head, place.batch);
      VSlabs::copy(shared_address(shared.v), &maps.v, keys_full(), key, place.kv_head, place.batch);
    }
    Ring ring{0, 1};
    for (Walk at{first_head, tiles.begin}; at.head <= last_head; at = at.after(tiles, segments), ring.advance()) {
      const int stage = ring.stage;
      const int first = at.tile * block_q;
      const i64 first_statistic =
          (static_cast<i64>(place.batch) * problem.q_heads + at.head) * problem.q_length + part.q.first;
      float anchors[block_q / 32], deltas[block_q / 32];
#pragma unroll
      for (int i = 0; i < block_q / 32; ++i) {
        const int row = first + i * 32 + lane;
        const bool valid = row < part.q.length;
        const i64 from = first_statistic + (valid ? row : 0);
        // The weights are 0 of rows beyond the end, and of those that keep nothing.
        const float x = lse[from];
        anchors[i] = valid && x != -JAX_FLASH_INFINITY ? probability_anchor(x) : JAX_FLASH_INFINITY;
        deltas[i] = valid ? delta[from] * ds_factor : 0.f;
      }
      barrier_wait(empty(stage), ring.parity);
      if (lane == 0) {
        barrier_expect(full(stage), QSlabs::bytes + OutSlabs::bytes);
        const int row = part.q.first + first;
        QSlabs::copy(shared_address(shared.q[stage]), &maps.q, full(stage), row, at.head, place.batch);
        OutSlabs::copy(shared_address(shared.dout[stage]), &maps.dout, full(stage), row, at.head, place.batch);
      }
#pragma unroll
      for (int i = 0; i < block_q / 32; ++i) {
        shared.anchor[stage][i * 32 + lane] = anchors[i];
        shared.delta[stage][i * 32 + lane] = deltas[i];
      }
      barrier_arrive(full(stage));
    }
  }
};

struct Backward {
  const Block& block;
  const Problem& problem;
  SharedStorage& shared;
  const Part& part;
  int group;  // warpgroup, of those that compute
  int warp;   // in the warpgroup
  int lane;
  int key_row;  // of the warp, in the block
  Keep keep;
  Scores modified;
  Plane<Bias> biases;
  Plane<bool> masks;
  Dropout dropout;
  float scale_log2;
  float dp_factor;  // dS is a multiple of what it stands for
  OperandGradients gradients;
  FragmentC dk[KSlabs::columns / 8], dv[VSlabs::columns / 8];
  u32 k_operand[keys_in_registers ? KSlabs::columns / 16 : 1][4];
  u32 v_operand[keys_in_registers ? VSlabs::columns / 16 : 1][4];

  // What depends on the query head.
  __device__ __forceinline__ void enter(int head) {
    modified.enter(head);
    biases = {static_cast<const Bias*>(problem.bias), problem.bias_strides, block.place.batch, head};
    masks = {problem.mask, problem.mask_strides, block.place.batch, head};
    dropout.enter(problem, part, head);
  }

  // The rows of a tile that are beyond the end may be anything, and no weight of 0 would take it away.
  template <typename T>
  __device__ __forceinline__ void clear_rows(char* tile, int valid, int thread, int of) const {
    for (int i = thread; i < (T::rows - valid) * T::slabs * 8; i += of) {
      const int line = valid * 8 + i % ((T::rows - valid) * 8);
      *reinterpret_cast<uint4*>(tile + i / ((T::rows - valid) * 8) * T::slab_bytes + line * 16) = uint4{0, 0, 0, 0};
    }
  }

  template <int k, int v>
  __device__ __forceinline__ void wait_for_keys(u32 (&k_operand)[k][4], u32 (&v_operand)[v][4]) const {
    barrier_wait(block.keys_full(), 0);
    const int valid = part.kv.length - block.place.first_key;
    if (valid < block_kv) {
      clear_rows<KSlabs>(shared.k, valid, group * warpgroup + warp * 32 + lane, computing_threads);
      clear_rows<VSlabs>(shared.v, valid, group * warpgroup + warp * 32 + lane, computing_threads);
      stores_ready();
      named_sync(all_computing, computing_threads);
    }
    if constexpr (keys_in_registers) {
      KSlabs::read(k_operand, shared_address(shared.k), key_row, lane);
      VSlabs::read(v_operand, shared_address(shared.v), key_row, lane);
    }
  }

  __device__ __forceinline__ void wait_for_rows(const Walk& at, const Ring& ring) const {
    const int stage = ring.stage;
    barrier_wait(block.full(stage), ring.parity);
    const int valid = part.q.length - at.tile * block_q;
    if (valid < block_q) {
      // Each warpgroup for itself: none waits for another here.
      clear_rows<QSlabs>(shared.q[stage], valid, warp * 32 + lane, warpgroup);
      clear_rows<OutSlabs>(shared.dout[stage], valid, warp * 32 + lane, warpgroup);
      stores_ready();
      named_sync(one_computing + group, warpgroup);
    }
  }

  // c = X Y^T, for the warpgroup's 64 keys of X.
  template <typename X, typename Y, int n>
  __device__ __forceinline__ void score_product(FragmentC (&c)[block_q / 8], const u32 (&operand)[n][4], const char* x,
                                                const char* y) const {
    const u64 a = by_rows(shared_address(x) + group * 64 * 128), b = by_rows(shared_address(y));
#pragma unroll
    for (int kk = 0; kk < X::steps; ++kk) {
      if constexpr (keys_in_registers) {
        wgmma<false>(c, operand[kk], moved(b, Y::step_offset(kk)), kk > 0);
      } else {
        wgmma<false, false>(c, moved(a, X::step_offset(kk)), moved(b, Y::step_offset(kk)), kk > 0);
      }
    }
  }
  __device__ __forceinline__ void start_scores(FragmentC (&s)[block_q / 8], int stage) const {
    wgmma_fence();
    score_product<KSlabs, QSlabs>(s, k_operand, shared.k, shared.q[stage]);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dp(FragmentC (&dp)[block_q / 8], int stage) const {
    wgmma_fence();
    score_product<VSlabs, OutSlabs>(dp, v_operand, shared.v, shared.dout[stage]);
    wgmma_commit();
  }

  // c += A Y, for the warpgroup's 64 keys of A.
  template <typename Y, int n>
  __device__ __forceinline__ void gradient_product(FragmentC (&c)[n], const u32 (&a)[block_q / 16][4],
                                                   const char* y) const {
    const u64 b = by_columns(shared_address(y), Y::slab_bytes);
#pragma unroll
    for (int kk = 0; kk < block_q / 16; ++kk) wgmma<true>(c, a[kk], moved(b, 2048 * kk), true);
  }

  // dS of the tile that comes `i`-th lies in one of two buffers.
  __device__ __forceinline__ void start_dq(FragmentC (&dq)[dq_columns / 8], int i) const {
    const int column = group * dq_columns;
    const u64 a = by_columns(shared_address(shared.ds[i % 2]), 0);
    const u64 b = by_columns(shared_address(shared.k) + column / kBoxColumns * KSlabs::slab_bytes +
                                 column % kBoxColumns * static_cast<int>(sizeof(Element)),
                             KSlabs::slab_bytes);
    barrier_wait(shared_address(&shared.ds_full[i % 2]), i / 2 % 2);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) {
      wgmma<true, true>(dq, moved(a, 2048 * kk), moved(b, 2048 * kk), kk > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void add_dq(FragmentC (&dq)[dq_columns / 8], const Walk& at, int i) const {
    hold(dq);
    if (lane == 0) barrier_arrive(shared_address(&shared.ds_empty[i % 2]));
    const int row = at.tile * block_q + warp * 16;
    if (row >= part.q.length) return;
    const int column = group * dq_columns;
    float* to = dq_fragment(problem, block.place.batch, at.head,
                            first_dq_tile(problem, block.place.batch, block.place.document) + row / 16, column / 8) +
                lane * 4;
#pragma unroll
    for (int n = 0; n < dq_columns / 8; ++n) {
      if (head_dim == KSlabs::columns || column + n * 8 < head_dim) add_four(to + n * 128, dq[n]);
    }
  }

  // Scores become weights.
  template <bool masked>
  __device__ __forceinline__ void weigh(FragmentC (&s)[block_q / 8], FragmentC* derivatives, const Walk& at,
                                        int stage) const {
#pragma unroll
    for (int n = 0; n < block_q / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      const float2 anchor = *reinterpret_cast<const float2*>(&shared.anchor[stage][column]);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = at.tile * block_q + column + odd;
        const Bias* bias = nullptr;
        const bool* mask = nullptr;
        if constexpr (has_bias) bias = biases.row(row, part);
        if constexpr (has_mask) mask = masks.row(row, part);
#pragma unroll
        for (int e = odd; e < 4; e += 2) {
          const int key = block.place.first_key + key_row + lane / 4 + e / 2 * 8;
          float& x = s[n].x[e];
          float logit = x * scale_log2;
          if constexpr (modifies_scores) {
            float b = 0.f, unused;
            if constexpr (has_bias)
              b = as_float(masked ? biases.at(bias, key, part) : bias[key * biases.column_stride]);
            logit = modified.logit(x, b, row, key, with_softcap ? derivatives[n].x[e] : unused);
          }
          x = exp2_approx(logit - (odd ? anchor.y : anchor.x));
          bool kept = true;
          if constexpr (masked) kept = keep(row, key);
          if constexpr (has_mask) kept &= masked ? masks.at(mask, key, part) : mask[key * masks.column_stride];
          if constexpr (masked || has_mask) x = kept ? x : 0.f;
        }
      }
    }
  }

  // Weights that are dropped change their sign.
  __device__ __forceinline__ void drop(FragmentC (&s)[block_q / 8], const Walk& at) const {
    const int key = block.place.first_key + key_row;
#pragma unroll
    for (int n = 0; n < block_q / 8; n += 2) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint4 bits = dropout.bits(at.tile * block_q + 8 * n + lane % 4 * 2 + odd, key + lane / 4);
        const bool second = key / 16 % 2 != 0;  // of the 32 keys that a call serves
        const u32 words[2] = {second ? bits.z : bits.x, second ? bits.w : bits.y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& weight = s[n + i % 2].x[i / 2 * 2 + odd];
          if (!dropout.keeps(words[i / 2], i % 2)) weight = -weight;
        }
      }
    }
  }

  // dP^T becomes dS^T, of weights.
  __device__ __forceinline__ void derive(FragmentC (&dp)[block_q / 8], const FragmentC (&s)[block_q / 8],
                                         const FragmentC* derivatives, const Walk& at, int stage) {
#pragma unroll
    for (int n = 0; n < block_q / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[stage][column]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = has_unscales ? dp[n].x[e] * dp_factor : dp[n].x[e];
        if constexpr (with_dropout_rate) x = is_dropped(s[n].x[e]) ? 0.f : x * dropout.factor;
        dp[n].x[e] = weight_of(s[n].x[e]) * (x - (e % 2 ? delta.y : delta.x));
      }
      if constexpr (has_dbias || has_dalibi_slopes) {
        gradients.add(problem, part, modified, at.head, at.tile * block_q + column,
                      block.place.first_key + key_row + lane / 4, dp[n], lane);
      }
      if constexpr (with_softcap) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n].x[e] *= derivatives[n].x[e];
      }
    }
  }

  // Rounds both to operands, and shows dS^T to the others.
  __device__ __forceinline__ void round(u32 (&p_operand)[block_q / 16][4], u32 (&ds_operand)[block_q / 16][4],
                                        const FragmentC (&s)[block_q / 8], const FragmentC (&dp)[block_q / 8], int i) {
#pragma unroll
    for (int kk = 0; kk < block_q / 16; ++kk) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* p = &s[2 * kk + j / 2].x[j % 2 * 2];
        const float* ds = &dp[2 * kk + j / 2].x[j % 2 * 2];
        p_operand[kk][j] = with_dropout_rate ? pack(fmaxf(p[0], 0.f), fmaxf(p[1], 0.f)) : pack(p[0], p[1]);
        ds_operand[kk][j] = pack(ds[0], ds[1]);
      }
    }
    if constexpr (!adds_dq) return;
    barrier_wait(shared_address(&shared.ds_empty[i % 2]), (i / 2 + 1) % 2);
    const LaneReader<Tile<block_kv, block_q>> to(shared_address(shared.ds[i % 2]), key_row + (lane & 15), lane >> 4);
#pragma unroll
    for (int kk = 0; kk < block_q / 16; ++kk) store_matrices(to.address(0, kk), ds_operand[kk]);
    stores_ready();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.ds_full[i % 2]));
  }

  // One tile of rows, the i-th of all.
  __device__ __forceinline__ void step(const Walk& at, const Ring& ring, int i) {
    const int stage = ring.stage;
    FragmentC s[block_q / 8];   // S^T, and then P^T
    FragmentC dp[block_q / 8];  // dP^T, and then dS^T
    FragmentC derivatives[with_softcap ? block_q / 8 : 1];
    u32 p_operand[block_q / 16][4], ds_operand[block_q / 16][4];
    wait_for_rows(at, ring);
    start_scores(s, stage);
    if constexpr (!with_softcap) start_dp(dp, stage);
    wgmma_wait<with_softcap ? 0 : 1>();  // S^T
    hold(s);
    if (block.tiles.bare(at.tile) && block.segments.uniform(at.tile)) {
      weigh<false>(s, derivatives, at, stage);
    } else {
      weigh<true>(s, derivatives, at, stage);
    }
    if constexpr (with_dropout_rate) drop(s, at);
    if constexpr (with_softcap) start_dp(dp, stage);
    wgmma_wait<0>();  // dP^T
    hold(dp);
    derive(dp, s, derivatives, at, stage);
    round(p_operand, ds_operand, s, dp, i);
    wgmma_fence();
    gradient_product<OutSlabs>(dv, p_operand, shared.dout[stage]);
    gradient_product<QSlabs>(dk, ds_operand, shared.q[stage]);
    wgmma_commit();
    if constexpr (adds_dq) {
      FragmentC dq[dq_columns / 8];
      start_dq(dq, i);
      wgmma_wait<1>();  // dV and dK
      if (lane == 0) barrier_arrive(block.empty(stage));
      wgmma_wait<0>();  // dQ
      add_dq(dq, at, i);
    } else {
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(block.empty(stage));
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (FragmentC& c : dk) c = {};
#pragma unroll
    for (FragmentC& c : dv) c = {};
    if (block.tiles.begin >= block.tiles.end) return;
    wait_for_keys(k_operand, v_operand);
    Ring ring{0, 0};
    int i = 0;
    for (Walk at{block.first_head, block.tiles.begin}; at.head <= block.last_head; ++i, ring.advance()) {
      step(at, ring, i);
      const Walk next = at.after(block.tiles, block.segments);
      if (next.head != at.head) {
        if constexpr (has_dbias || has_dalibi_slopes) {
          gradients.flush(problem, part, at.head, block.place.first_key + key_row + lane / 4, lane);
        }
        if (next.head <= block.last_head) enter(next.head);
      }
      at = next;
    }
    hold(dk);
    hold(dv);
    named_sync(all_computing, computing_threads);  // everybody is done with K and V
  }

  __device__ __forceinline__ void store() {
    const Unscales unscales = unscales_of(problem, block.place.batch, block.place.kv_head);
    const float dk_factor = static_cast<float>(problem.options.scale) * unscales.query / unscales.ds;
    const float dv_factor = dropout.factor * unscales.dout * probability_unit;
    const int first_key = block.place.first_key + key_row;
    store_rows<Tile<block_kv, KSlabs::columns>, head_dim>(
        shared.k, key_row, dk, dk_factor, result_of(problem.dk, block.place.batch, block.place.kv_head, part.kv.first),
        problem.dk.row_stride, first_key, part.kv.stored, lane);
    store_rows<Tile<block_kv, VSlabs::columns>, value_head_dim>(
        shared.v, key_row, dv, dv_factor, result_of(problem.dv, block.place.batch, block.place.kv_head, part.kv.first),
        problem.dv.row_stride, first_key, part.kv.stored, lane);
  }
};

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_backward(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const Block block(problem, maps, shared);
  const Part& part = block.place.part;
  if (packed && block.place.first_key >= part.kv.stored) return;
  const int lane = threadIdx.x % 32;
  // The same in all lanes, and the compiler shall know it.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);

  if (threadIdx.x == 0) {
    barrier_init(block.keys_full(), 1);
    for (int i = 0; i < stages; ++i) {
      barrier_init(block.full(i), 1 + 32);
      barrier_init(block.empty(i), 4 * computing);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&shared.ds_full[i]), 4 * computing);
      barrier_init(shared_address(&shared.ds_empty[i]), 4 * computing);
    }
    barriers_ready();
  }
  __syncthreads();

  if (warp < 4) {
    give_registers<loading_registers>();
    if (warp == 0 && block.tiles.begin < block.tiles.end) block.bring(lane);
  } else {
    take_registers<computing_registers>();
    const int group = warp / 4 - 1;
    const int batch = block.place.batch, head = block.first_head;
    const Unscales unscales = unscales_of(problem, batch, block.place.kv_head);
    const float scale = static_cast<float>(problem.options.scale) * unscales.query * unscales.key;
    Backward backward{
        block,
        problem,
        shared,
        part,
        group,
        warp % 4,
        lane,
        group * 64 + warp % 4 * 16,
        {problem, part, block.band},
        {problem, part, head, scale},
        {static_cast<const Bias*>(problem.bias), problem.bias_strides, batch, head},
        {problem.mask, problem.mask_strides, batch, head},
        {problem, part, head},
        scale * kLog2e,
        unscales.dout * unscales.value * unscales.ds * probability_unit,
    };
    backward.gradients.unscale = 1.f / unscales.ds;
    if constexpr (has_dbias || has_dalibi_slopes) backward.gradients.clear();
    backward.run();
    backward.store();
  }
}

// dq = scale * (the sum in scratch). One warp turns 16 rows of one head: a lane puts together eight columns of two
// rows, which four lanes had held.
extern "C" __global__ void __launch_bounds__(32 * convert_warps)
    jax_flash_convert_dq(const __grid_constant__ Problem problem) {
  const int tiles = dq_tiles(problem);
  const i64 item = static_cast<i64>(blockIdx.x) * convert_warps + threadIdx.x / 32;
  if (item >= static_cast<i64>(problem.batch) * problem.q_heads * tiles) return;
  const int lane = threadIdx.x % 32;
  const int tile = static_cast<int>(item % tiles);
  const int head = static_cast<int>(item / tiles % problem.q_heads);
  const int batch = static_cast<int>(item / tiles / problem.q_heads);
  int row_tile = tile;
  const Part part = part_of(problem, batch, document_of(problem, problem.cu_q_lengths, batch, 16, row_tile));
  const Unscales unscales = unscales_of(problem, batch, head / (problem.q_heads / problem.kv_heads));
  const float scale = static_cast<float>(problem.options.scale) * unscales.key / unscales.ds;
  const float* from = dq_fragment(problem, batch, head, tile, 0);
  Result* to = result_of(problem.dq, batch, head, part.q.first);
  constexpr int column_tiles = head_dim / 8;
#pragma unroll
  for (int i = 0; i < ceil_div(column_tiles, 4); ++i) {
    const int piece = i * 32 + lane;
    const int column_tile = piece % column_tiles, row = piece / column_tiles;
    if (column_tiles % 4 != 0 && row >= 8) break;
    float4 quad[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      quad[t] = *reinterpret_cast<const float4*>(from + column_tile * 128 + (row * 4 + t) * 4);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row_tile * 16 + row + 8 * half;
      if (at >= part.q.stored) continue;
      Result* here = to + at * problem.dq.row_stride + column_tile * 8;
      float x[8];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        x[2 * t] = (half ? quad[t].z : quad[t].x) * scale;
        x[2 * t + 1] = (half ? quad[t].w : quad[t].y) * scale;
      }
      if constexpr (has_unscales) {
        *reinterpret_cast<float4*>(here) = {x[0], x[1], x[2], x[3]};
        *reinterpret_cast<float4*>(here + 4) = {x[4], x[5], x[6], x[7]};
      } else {
        *reinterpret_cast<uint4*>(here) = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
      }
    }
  }
}

}  // namespace jax_flash
