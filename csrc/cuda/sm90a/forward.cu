// FlashAttention-3 forward (Shah et al. 2024): one warp brings tiles by the copy engine, warpgroups of 64 rows each
// multiply and take the softmax.
//
// Two things run side by side: in a warpgroup, the softmax of one tile of keys and the product of the weights of the
// tile before with V; and the softmax of one warpgroup and the products of another, by turns. Blocks stay on their
// multiprocessor and walk over the items of work, so that an item's first tiles are there when it begins. Keys are
// walked from the last to the first: the tiles to mask come first, and the bare loop has no test in it.
#include "cuda/sm90a/mma.cuh"
//
#include "cuda/shared/place.cuh"
#include "cuda/shared/score_rows.cuh"
#include "cuda/shared/shared_memory.cuh"
#include "cuda/shared/softmax.cuh"
#include "cuda/sm90a/slabs.cuh"
#include "cuda/sm90a/stores.cuh"

namespace jax_flash {

constexpr int consumers = block_q / 64;  // warpgroups
constexpr int threads = warpgroup * (1 + consumers);
static_assert(block_q % 64 == 0 && warps == threads / 32 && min_blocks == 1, "a producer, and 64 rows a consumer");
// A multiprocessor has 512 registers for a thread of each of its four parts; the producer needs few.
constexpr int producer_registers = consumers == 3 ? 32 : 24;
constexpr int consumer_registers = consumers == 3 ? 160 : 240;

using QSlabs = Slabs<block_q, tile_head_dim>;
using KSlabs = Slabs<block_kv, tile_head_dim>;
using VSlabs = Slabs<block_kv, tile_value_head_dim>;
// With these the tiles to visit, or the bare ones among them, are not one range up to the end.
constexpr bool irregular = bounded_left || in_segments;
// Where keys past the end stand in the same array as those before it, V may hold anything there.
constexpr bool ragged = has_kv_lengths || packed;
// Products of the warpgroups by turns. At head_dim 256 those of one warpgroup are long enough.
constexpr bool in_turns = consumers > 1 && tile_head_dim <= 128;

struct SharedStorage {
  alignas(1024) char q[QSlabs::bytes];
  char k[stages][KSlabs::bytes];
  char v[stages][VSlabs::bytes];
  // Tiles have landed; warps have done with them.
  u64 q_full, q_empty;
  u64 k_full[stages], k_empty[stages];
  u64 v_full[stages], v_empty[stages];
};

extern "C" __constant__ LaunchFacts jax_flash_forward_facts = {
    threads, block_q, sizeof(SharedStorage), 0, 1, block_q, block_kv, block_kv, 0};

// Numbers of the hardware's barriers, from these on one for each consumer.
constexpr int turn_barrier = 1, own_barrier = 1 + consumers;

// Where in a ring of `stages` tiles, and how often around.
struct RingPlace {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The tiles of keys that an item visits, from the last to the first.
struct KeyTiles {
  TileRange range;
  SegmentTiles<block_kv> segments;

  __device__ __forceinline__ KeyTiles(const Problem& problem, const Place& place, const Band& band, int lane)
      : range(key_tiles_of<block_kv>(band, place.part, place.first_row, block_q)),
        segments{problem.kv_segment_ranges, place.batch, problem.kv_length,
                 in_segments
                     ? segment_range<block_q>(problem.q_segment_ranges, place.batch, problem.q_length, place.first_row)
                     : SegmentRange{0, 0}} {
    segments.trim(range, lane);
  }

  __device__ __forceinline__ bool none() const { return range.end <= range.begin; }
  __device__ __forceinline__ int last() const { return range.end - 1; }
  // Below range.begin when there are no more.
  __device__ __forceinline__ int before(int tile) const {
    --tile;
    while (in_segments && tile >= range.begin && !segments.visits(tile)) --tile;
    return tile;
  }
  __device__ __forceinline__ bool bare(int tile) const {
    return irregular ? range.bare(tile) && segments.uniform(tile) : tile < range.bare_end;
  }
};

// Calls `body(place)` for each item of this block.
template <typename Body>
JAX_FLASH_DEVICE void for_items(const Problem& problem, const Body& body) {
  const int items = blocks_of(problem, problem.q_length, block_q) * problem.q_heads * problem.batch;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Place place = place_of<Grid::persistent>(problem, item);
    if (packed && place.first_row >= place.part.q.stored) continue;
    body(place);
  }
}

// Of one warp, whose lane 0 starts the copies.
struct Producer {
  const TensorMaps& maps;
  SharedStorage& shared;
  int lane;
  RingPlace ring;
  u32 q_parity = 0;

  template <typename S>
  __device__ __forceinline__ void bring(char* to, const TensorMap* map, u64* full, int row, int head, int batch) {
    if (lane == 0) {
      barrier_expect(shared_address(full), S::bytes);
#pragma unroll
      for (int slab = 0; slab < S::slabs; ++slab) {
        copy_box(shared_address(to) + slab * S::slab_bytes, map, shared_address(full), slab * kBoxColumns, row, head,
                 batch);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void bring_k(const Place& place, const RingPlace& at, int tile) {
    barrier_wait(shared_address(&shared.k_empty[at.stage]), at.parity ^ 1);
    bring<KSlabs>(shared.k[at.stage], &maps.k, &shared.k_full[at.stage], place.part.kv.first + tile * block_kv,
                  place.kv_head, place.batch);
  }
  __device__ __forceinline__ void bring_v(const Place& place, const RingPlace& at, int tile) {
    barrier_wait(shared_address(&shared.v_empty[at.stage]), at.parity ^ 1);
    bring<VSlabs>(shared.v[at.stage], &maps.v, &shared.v_full[at.stage], place.part.kv.first + tile * block_kv,
                  place.kv_head, place.batch);
  }

  __device__ __forceinline__ void item(const Problem& problem, const Place& place) {
    const KeyTiles keys(problem, place, band_of(problem, place.part), lane);
    if (keys.none()) return;
    int tile = keys.last();
    bring_k(place, ring, tile);
    barrier_wait(shared_address(&shared.q_empty), q_parity ^ 1);
    bring<QSlabs>(shared.q, &maps.q, &shared.q_full, place.part.q.first + place.first_row, place.head, place.batch);
    q_parity ^= 1;
    // In the order in which they are asked for: K a tile ahead of V.
    for (int next; (next = keys.before(tile)) >= keys.range.begin; tile = next) {
      const RingPlace v_ring = ring;
      ring.advance();
      bring_k(place, ring, next);
      bring_v(place, v_ring, tile);
    }
    bring_v(place, ring, tile);
    ring.advance();
  }
};

// One warpgroup, with 64 rows.
struct Consumer {
  SharedStorage& shared;
  int number;  // of this warpgroup, from 0
  int warp;    // in it
  int lane;
  RingPlace ring;  // of K; V of the tile before stands one place back
  u32 q_parity = 0;

  FragmentC out[tile_value_head_dim / 8];
  u32 weights[block_kv / 16][4];  // of a tile, as A of the product with V
  RowStatistics statistics[2];

  __device__ __forceinline__ void release(const u64& empty) const {
    if (lane == 0) barrier_arrive(shared_address(&empty));
  }

  // Starts Q K^T, once K is there.
  __device__ __forceinline__ void start_scores(FragmentC (&scores)[block_kv / 8]) {
    barrier_wait(shared_address(&shared.k_full[ring.stage]), ring.parity);
    const u64 q = by_rows(shared_address(shared.q) + number * 64 * 128),
              k = by_rows(shared_address(shared.k[ring.stage]));
    if constexpr (in_turns) named_sync(turn_barrier + number, 2 * warpgroup);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < tile_head_dim / 16; ++kk) {
      const int within = kk % 4 * 32;
      wgmma<false, false>(scores, moved(q, kk / 4 * QSlabs::slab_bytes + within),
                          moved(k, kk / 4 * KSlabs::slab_bytes + within), kk > 0);
    }
    wgmma_commit();
  }

  // Starts out += P V, once V is there.
  __device__ __forceinline__ void start_out(const RingPlace& at, int tile, const Part& part) {
    barrier_wait(shared_address(&shared.v_full[at.stage]), at.parity);
    char* v = shared.v[at.stage];
    if (ragged && (tile + 1) * block_kv > part.kv.length) {
      // Each warpgroup for itself: all of them write the same.
      VSlabs::zero_rows(shared_address(v), part.kv.length - tile * block_kv, threadIdx.x % warpgroup);
      stores_ready();
      named_sync(own_barrier + number, warpgroup);
    }
    const u64 columns = by_columns(shared_address(v), VSlabs::slab_bytes);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) wgmma<true>(out, weights[kk], moved(columns, kk * 2048), true);
    wgmma_commit();
  }

  // Scores become weights, and out is to shrink by the factors of its rows.
  template <bool masked>
  __device__ __forceinline__ void softmax(FragmentC (&scores)[block_kv / 8], float (&shrink)[2], const ScoreRows& rows,
                                          float scale_log2, int row, int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (masked || modifies_scores || has_mask) {
        rows.modify<masked>(scores, nullptr, row + 8 * half, half, tile * block_kv, lane);
      }
      float maximum = -JAX_FLASH_INFINITY;
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
        maximum = fmaxf(maximum, fmaxf(scores[n].x[2 * half], scores[n].x[2 * half + 1]));
      }
      RowStatistics& of = statistics[half];
      shrink[half] = of.update(quad_max(maximum), scale_log2);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowStatistics& of = statistics[half];
      const float anchor = of.anchor(scale_log2);
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[n].x[e] = exp2_approx(scores[n].x[e] * scale_log2 - anchor);
          of.total += scores[n].x[e];
        }
      }
    }
    if constexpr (with_dropout_rate) rows.drop<false>(scores, row, tile * block_kv, lane);
  }

  __device__ __forceinline__ void keep_weights(const FragmentC (&scores)[block_kv / 8]) {
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const FragmentC& from = scores[2 * kk + i / 2];
        weights[kk][i] = pack(from.x[i % 2 * 2], from.x[i % 2 * 2 + 1]);
      }
    }
  }

  // The first tile of an item.
  template <bool masked>
  __device__ __forceinline__ void begin(const ScoreRows& rows, float scale_log2, int row, int tile) {
    FragmentC scores[block_kv / 8];
    float shrink[2];
    start_scores(scores);
    if constexpr (in_turns) named_arrive(turn_barrier + (number + 1) % consumers, 2 * warpgroup);
    wgmma_wait<0>();
    hold(scores);
    release(shared.k_empty[ring.stage]);
    softmax<masked>(scores, shrink, rows, scale_log2, row, tile);
    keep_weights(scores);
  }

  // Any other: its scores, and the product of the tile `before` with V meanwhile.
  template <bool masked>
  __device__ __forceinline__ void step(const ScoreRows& rows, float scale_log2, int row, int tile, int before) {
    FragmentC scores[block_kv / 8];
    float shrink[2];
    const RingPlace v_ring = ring;
    ring.advance();
    start_scores(scores);
    start_out(v_ring, before, rows.part);
    if constexpr (in_turns) named_arrive(turn_barrier + (number + 1) % consumers, 2 * warpgroup);
    wgmma_wait<1>();
    hold(scores);
    release(shared.k_empty[ring.stage]);
    softmax<masked>(scores, shrink, rows, scale_log2, row, tile);
    wgmma_wait<0>();
    hold(out);
    hold(weights);
    release(shared.v_empty[v_ring.stage]);
#pragma unroll
    for (int n = 0; n < tile_value_head_dim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n].x[e] *= shrink[e / 2];
    }
    keep_weights(scores);
  }

  __device__ __forceinline__ void item(const Problem& problem, const Place& place) {
    const Part& part = place.part;
    const Unscales unscales = unscales_of(problem, place.batch, place.kv_head);
    const float scale = static_cast<float>(problem.options.scale) * unscales.query * unscales.key;
    const float scale_log2 = modifies_scores ? 1.f : scale * kLog2e;
    const int row = place.first_row + number * 64 + warp * 16 + lane / 4;
    const ScoreRows rows(problem, part, place.batch, place.head, scale);
    const KeyTiles keys(problem, place, rows.keep.band, lane);
    const float sink = place.sink(problem);

#pragma unroll
    for (int n = 0; n < tile_value_head_dim / 8; ++n) out[n] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      statistics[half] = RowStatistics();
      if constexpr (has_sinks) statistics[half].begin_with(sink * kLog2e, scale_log2, lane % 4 == 0);
    }
    if (!keys.none()) {
      int tile = keys.last(), next;
      barrier_wait(shared_address(&shared.q_full), q_parity);
      q_parity ^= 1;
      if (keys.bare(tile)) {
        begin<false>(rows, scale_log2, row, tile);
      } else {
        begin<true>(rows, scale_log2, row, tile);
      }
      if constexpr (irregular) {
        for (; (next = keys.before(tile)) >= keys.range.begin; tile = next) {
          if (keys.bare(next)) {
            step<false>(rows, scale_log2, row, next, tile);
          } else {
            step<true>(rows, scale_log2, row, next, tile);
          }
        }
      } else {
        for (; tile > keys.range.bare_end; --tile) step<true>(rows, scale_log2, row, tile - 1, tile);
        for (; tile > 0; --tile) step<false>(rows, scale_log2, row, tile - 1, tile);
      }
      release(shared.q_empty);
      start_out(ring, tile, part);
      wgmma_wait<0>();
      hold(out);
      release(shared.v_empty[ring.stage]);
      ring.advance();
    }

    Result* out_head = result_of(problem.out, place.batch, place.head, part.q.first);
    float* lse = static_cast<float*>(problem.lse) +
                 (static_cast<i64>(place.batch) * problem.q_heads + place.head) * problem.q_length + part.q.first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowStatistics& of = statistics[half];
      of.total = quad_sum(of.total);
      float inverse = of.total == 0.f ? 0.f : rows.dropout.factor * unscales.value / of.total;
      float row_lse = of.lse(scale_log2);
      const int t = row + 8 * half;
      if (has_q_lengths && t >= part.q.length) {
        row_lse = sink;
        inverse = 0.f;
        // What was read there may have been anything.
#pragma unroll
        for (int n = 0; n < tile_value_head_dim / 8; ++n) out[n].x[2 * half] = out[n].x[2 * half + 1] = 0.f;
      }
      const bool stored = t < part.q.stored;
      if (lane % 4 == 0 && stored) lse[t] = row_lse;
      store_row<value_head_dim>(out, half, inverse, out_head + t * problem.out.row_stride, stored, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(threads, 1)
    jax_flash_forward(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  // The same in all lanes, and the compiler is to know it.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_map(&maps.q);
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
    constexpr int readers = 4 * consumers;  // warps
    barrier_init(shared_address(&shared.q_full), 1);
    barrier_init(shared_address(&shared.q_empty), readers);
#pragma unroll
    for (int i = 0; i < stages; ++i) {
      barrier_init(shared_address(&shared.k_full[i]), 1);
      barrier_init(shared_address(&shared.v_full[i]), 1);
      barrier_init(shared_address(&shared.k_empty[i]), readers);
      barrier_init(shared_address(&shared.v_empty[i]), readers);
    }
    barriers_ready();
  }
  __syncthreads();

  if (warp < 4) {
    give_registers<producer_registers>();
    if (warp == 0) {
      Producer producer{maps, shared, lane};
      for_items(problem, [&](const Place& place) { producer.item(problem, place); });
    }
  } else {
    take_registers<consumer_registers>();
    Consumer consumer{shared, warp / 4 - 1, warp % 4, lane};
    if (in_turns && consumer.number == consumers - 1) named_arrive(turn_barrier, 2 * warpgroup);
    for_items(problem, [&](const Place& place) { consumer.item(problem, place); });
  }
}

}  // namespace jax_flash
