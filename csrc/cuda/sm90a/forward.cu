// FlashAttention-3 forward (Shah et al. 2024): one warp loads tiles by TMA, warpgroups of 64 rows each multiply and
// take the softmax. Where arrays say which tiles there are, another warp looks for the next item of work meanwhile.
//
// Two things run side by side: in a warpgroup, the softmax of one tile of keys and the product of the weights of the
// tile before with V; and the softmax of one warpgroup and the products of another, by turns. Blocks stay on their
// multiprocessor and walk over the items of work, so that an item's first tiles are there when it begins. Keys are
// walked from the last to the first: the tiles to mask come first, and the loop over full tiles has no test in it.
#include "cuda/sm90a/mma.cuh"
//
#include "cuda/device/float32_forward.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/sm90a/forward_producer.cuh"
#include "cuda/sm90a/stores.cuh"

namespace jax_flash {

// Of so many keys, weights are rounded up about as much as down.
constexpr int few_keys = 32;
// Whether the ends of rows' ranges alone say which keys they keep.
constexpr bool kept_by_band = !(in_segments || in_intervals || has_functions || has_mask || has_mask_blocks);
// Whether rows may be known to keep many keys. What rounding adds is counted behind a branch then, where the walk has
// one.
constexpr bool may_know_many = kept_by_band || decides_keys;
// Whether it is counted where weights are rounded for their product, and not once more before: dropout drops some of
// them, and beside segments and lengths ptxas moves float16 weights from register to register then.
constexpr bool counts_kept_weights = has_functions && !with_dropout_rate;

// What a consumer has to know of an item while it walks over the keys.
struct Scope {
  const Item& item;
  int row;  // this lane's first
  ScoreRows rows;
  float sink;
  bool has_few_keys;  // whether a row of the warpgroup may keep fewer than few_keys

  __device__ __forceinline__ Scope(const Problem& problem, const Item& item, int own_row, int first_row)
      : item(item),
        row(item.place.first_row + own_row),
        rows(problem, item.place.extent, item.place.head, score_scale_of(problem, item)),
        sink(item.place.sink(problem)),
        has_few_keys(!kept_by_band || fewest_keys(first_row) < few_keys) {}

  // That a row of 64 keeps by the band. The rows between two of them keep no fewer than one of the two.
  __device__ __forceinline__ int fewest_keys(int first_row) const {
    const int last_row = at_most(first_row + 64, item.place.extent.q.length) - 1;
    const auto keys = [&](int row) { return rows.keep.last(row) - at_least(rows.keep.first(row), 0) + 1; };
    return at_most(keys(first_row), keys(last_row));
  }

  static __device__ __forceinline__ float score_scale_of(const Problem& problem, const Item& item) {
    const Descale descale = descale_of(problem, item.place.batch, item.place.kv_head);
    return scale_of(problem, item.place.batch) * descale.query * descale.key;
  }
};

// One warpgroup, with 64 rows.
struct Consumer {
  template <bool masked>
  using Keys = KeysOfRows<block_kv / 8, 16, masked && decides_keys>;  // of the 16 rows of a warp

  const Problem& problem;
  SharedStorage& shared;
  int number;   // of this warpgroup, from 0
  int own_row;  // this lane's first, in the item
  int lane;
  Ring<stages> ring;  // of the tile that waits for its product with V, or of the next when none does

  FragmentC out[tile_value_head_dim / 8];
  u32 weights[block_kv / 16][4];  // of the tile that waits, as A
  RowStatistics statistics[2];    // of this lane's rows, 8 apart
  float rounding[2];              // see softmax()
  int2 interval = {0, 0};         // of the key that this lane decides of the next tile
  int keys_slot = 0;              // of the last tile that was masked
  Told following;                 // the tile after the last one whose scores were computed, where tiles are skipped

  __device__ __forceinline__ void release(const u64& empty) const {
    if (arrives(lane)) barrier_arrive(shared_address(&empty));
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (in_turns) named_arrive(turn_barrier + (number + 1) % consumers, 2 * warpgroup);
  }

  __device__ __forceinline__ void learn() {
    following = shared.following[ring.stage];
    __syncwarp();  // before lane 0 says that the warp is done with it
  }
  __device__ __forceinline__ void learn(const Scope& scope) {
    learn();
    read_interval(scope, following);
  }

  // Each warp of a warpgroup decides 32 keys of a tile for all, if it is masked: by their intervals, read while the
  // tile before is computed.
  __device__ __forceinline__ void read_interval(const Scope& scope, const Told& next) {
    if constexpr (decides_keys) {
      if (next.tile() < 0 || next.is_uniform()) return;
      interval = scope.rows.keep.rows_of(next.tile() * block_kv + own_key());
    }
  }
  template <bool masked>
  __device__ __forceinline__ void decide_keys(const Scope& scope, int tile, bool uniform) {
    if constexpr (masked && decides_keys) {
      keys_slot ^= 1;
      const Place& place = scope.item.place;
      const int2 held = uniform ? int2{0, 0x7fffffff} : interval;
      const KeyBits bits =
          KeyBits::of<block_kv>(place.extent, held, tile * block_kv, own_key(), place.first_row + number * 64, 64);
      if (lane == 0) shared.keys[keys_slot][number][threadIdx.x / 32 % 4] = bits;
    }
  }
  // Behind the barrier of start_scores().
  template <bool masked>
  __device__ __forceinline__ Keys<masked> keys_of(const Scope& scope, int tile, int own_lane) const {
    if constexpr (masked && decides_keys) {
      const Keys<masked> keys(shared.keys[keys_slot][number], own_lane);
      if (keys.decides) return keys;
    }
    return {scope.rows.keep, scope.row, tile * block_kv, own_lane};
  }
  __device__ __forceinline__ int own_key() const { return threadIdx.x / 32 % 4 * 32 + KeyBits::key_of(lane); }

  // Starts Q K^T, once K is there.
  __device__ __forceinline__ void start_scores(FragmentC (&scores)[block_kv / 8]) {
    wait_for_keys(shared.k_full[ring.stage], ring.parity);
    const u64 q = by_rows(shared_address(shared.q) + number * 64 * 128);
    const u64 k = by_rows(shared_address(shared.k[ring.stage]));
    if constexpr (in_turns) named_sync(turn_barrier + number, 2 * warpgroup);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < QSlabs::steps; ++kk) {
      wgmma<false, false>(scores, moved(q, QSlabs::step_offset(kk)), moved(k, KSlabs::step_offset(kk)), kk > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void end_scores(FragmentC (&scores)[block_kv / 8]) {
    hold(scores);
    release(shared.k_empty[ring.stage]);
  }

  // Starts out += P V, once V is there.
  __device__ __forceinline__ void start_out(const Ring<stages>& at, const Extent& extent, int tile) {
    wait_for_keys(shared.v_full[at.stage], at.parity);
    char* v = shared.v[at.stage];
    if (ragged_keys && (tile + 1) * block_kv > extent.kv.length) {
      // Each warpgroup for itself: all of them write the same.
      VSlabs::zero_rows(shared_address(v), extent.kv.length - tile * block_kv, threadIdx.x % warpgroup);
      stores_ready();
      named_sync(own_barrier + number, warpgroup);
    }
    const u64 columns = by_columns(shared_address(v), VSlabs::slab_bytes);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) wgmma<true>(out, weights[kk], moved(columns, kk * 2048), true);
    wgmma_commit();
  }
  __device__ __forceinline__ void end_out(const Ring<stages>& at) {
    wgmma_wait<0>();
    hold(out);
    hold(weights);
    release(shared.v_empty[at.stage]);
  }

  // Scores become weights, and out is to shrink by the factors of its rows.
  //
  // out is a sum of rounded weights, so it is divided by their sum rather than by the total of what they were rounded
  // from, which lse is made of. The two differ in rows of few keys, whose weights' errors don't cancel. What rounding
  // added is counted in tiles that are masked, unless each row is known to keep many keys, there or in all.
  template <bool masked>
  __device__ __forceinline__ void softmax(FragmentC (&scores)[block_kv / 8], float (&shrink)[2], const Scope& scope,
                                          int tile, bool uniform, const Keys<masked>& keys, const Diagonals& diagonals,
                                          int own_lane) {
    const int kind = !tells_kind ? unread_block : uniform ? full_block : partial_block;
    constexpr bool apart = masked && functions_apart && (tells_kind || !has_mask_blocks);
    if constexpr (apart) scope.rows.hide(scores, scope.row, tile * block_kv, own_lane, kind);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (!apart && (masked || modifies_scores || has_mask)) {
        scope.rows.logits<masked, false>(scores, nullptr, scope.row + 8 * half, half, tile * block_kv, own_lane, keys,
                                         diagonals, kind);
      }
      shrink[half] = statistics[half].update(quad_max(maximum_of(scores, half)), scope.rows.scale_log2);
      rounding[half] *= shrink[half];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = statistics[half].total;
      statistics[half].weigh(scores, half, scope.rows.scale_log2);
      if constexpr (masked && !may_know_many) {
        // What the weights add to the total is to come back rounded.
        rounding[half] += before - statistics[half].total;
        if constexpr (!counts_kept_weights) {
#pragma unroll
          for (int n = 0; n < block_kv / 8; ++n)
            count_rounded(half, pack(scores[n].x[2 * half], scores[n].x[2 * half + 1]));
        }
      }
    }
    if constexpr (with_dropout_rate) scope.rows.drop<false>(scores, scope.row, tile * block_kv, lane);
  }

  template <bool masked>
  __device__ __forceinline__ void keep_weights(const FragmentC (&scores)[block_kv / 8], bool counts_rounding) {
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const FragmentC& from = scores[2 * kk + i / 2];
        weights[kk][i] = pack(from.x[i % 2 * 2], from.x[i % 2 * 2 + 1]);
      }
    }
    if constexpr (masked && !may_know_many && counts_kept_weights) {
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) count_rounded(half, weights[n / 2][n % 2 * 2 + half]);
      }
    }
    if (!may_know_many || !counts_rounding) return;
#pragma unroll
    for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        count_rounding(half, scores[n].x[2 * half], scores[n].x[2 * half + 1], weights[n / 2][n % 2 * 2 + half]);
      }
    }
  }
  __device__ __forceinline__ void count_rounded(int half, u32 rounded) {
    rounding[half] += as_float(static_cast<u16>(rounded));
    rounding[half] += as_float(static_cast<u16>(rounded >> 16));
  }
  __device__ __forceinline__ void count_rounding(int half, float low, float high, u32 rounded) {
    rounding[half] += as_float(static_cast<u16>(rounded)) - low;
    rounding[half] += as_float(static_cast<u16>(rounded >> 16)) - high;
  }

  __device__ __forceinline__ void clear(const Scope& scope) {
#pragma unroll
    for (int n = 0; n < tile_value_head_dim / 8; ++n) out[n] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      statistics[half] = RowStatistics();
      rounding[half] = 0.f;
      if constexpr (has_sinks) statistics[half].begin_with(scope.sink * kLog2e, scope.rows.scale_log2, lane % 4 == 0);
    }
  }

  // The lane, for functions: is_last, which is 0, is read behind the products that have been started, so that what
  // depends on it comes behind them too. Else the assembler puts parts of a function before a product, and the other
  // warpgroups wait for their turn meanwhile. But what functions load for every pair is loaded as early as possible.
  template <bool masked>
  __device__ __forceinline__ int lane_behind_products(const Item& item) const {
    if constexpr (!has_functions || loads_pairs || !(masked || has_score_function)) return lane;
    return lane + *static_cast<const volatile bool*>(&item.is_last);
  }

  __device__ __forceinline__ Diagonals of_diagonals(const Scope& scope, int tile, int own_lane) const {
    const int lane_row = own_lane / 4;
    return {shared.diagonals[own_row / 16],
            problem,
            scope.rows.keep.functions(),
            scope.row - lane_row,
            tile * block_kv,
            lane_row,
            own_lane % 4 * 2,
            own_lane};
  }

  // The first tile of an item.
  template <bool masked>
  __device__ __forceinline__ void begin(const Scope& scope, int tile, bool uniform) {
    FragmentC scores[block_kv / 8];
    float shrink[2];
    if (masked) read_interval(scope, {tile * 2 + uniform});
    decide_keys<masked>(scope, tile, uniform);
    start_scores(scores);
    pass_turn();
    if constexpr (skips_tiles) learn(scope);
    const int own_lane = lane_behind_products<masked>(scope.item);
    clear(scope);
    const Keys<masked> keys = keys_of<masked>(scope, tile, own_lane);
    const Diagonals diagonals = of_diagonals(scope, tile, own_lane);
    wgmma_wait<0>();
    end_scores(scores);
    softmax<masked>(scores, shrink, scope, tile, uniform, keys, diagonals, own_lane);
    keep_weights<masked>(scores, masked && scope.has_few_keys && keys.count < few_keys);
  }

  // Any other tile, while tile `before` waits.
  template <bool masked>
  __device__ __forceinline__ void step(const Scope& scope, int tile, int before, bool uniform) {
    FragmentC scores[block_kv / 8];
    float shrink[2];
    const Ring v_ring = ring;
    ring.advance();
    decide_keys<masked>(scope, tile, uniform);
    start_scores(scores);
    start_out(v_ring, scope.item.place.extent, before);
    pass_turn();
    if constexpr (skips_tiles) learn(scope);
    const int own_lane = lane_behind_products<masked>(scope.item);
    const Keys<masked> keys = keys_of<masked>(scope, tile, own_lane);
    const Diagonals diagonals = of_diagonals(scope, tile, own_lane);
    wgmma_wait<1>();
    end_scores(scores);
    softmax<masked>(scores, shrink, scope, tile, uniform, keys, diagonals, own_lane);
    end_out(v_ring);
    if (!lazy || __any_sync(0xffffffffu, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < tile_value_head_dim / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n].x[e] *= shrink[e / 2];
      }
    }
    keep_weights<masked>(scores, masked && scope.has_few_keys && keys.count < few_keys);
  }

  // A tile that none of this warpgroup's rows keeps.
  __device__ __forceinline__ void skip() {
    barrier_wait(shared_address(&shared.k_full[ring.stage]), ring.parity);
    if constexpr (in_turns) named_sync(turn_barrier + number, 2 * warpgroup);
    pass_turn();
    if constexpr (skips_tiles) learn();
    release(shared.k_empty[ring.stage]);
    barrier_wait(shared_address(&shared.v_full[ring.stage]), ring.parity);
    release(shared.v_empty[ring.stage]);
    ring.advance();
  }

  // Writes the results of an item.
  __device__ __forceinline__ void finish(const Scope& scope) {
    const Place& place = scope.item.place;
    const Extent& extent = place.extent;
    const float descale = descale_of(problem, place.batch, place.kv_head).value;
    Result* out_head = result_of(problem.out, place.batch, place.head, extent.q.first);
    float* lse = static_cast<float*>(problem.lse) +
                 (static_cast<i64>(place.batch) * problem.q_heads + place.head) * problem.q_length + extent.q.first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowStatistics& of = statistics[half];
      of.total = quad_sum(of.total);
      const float divisor = of.total + quad_sum(rounding[half]);
      float inverse = of.total == 0.f ? 0.f : scope.rows.dropout.factor * descale / divisor;
      float row_lse = of.lse(scope.rows.scale_log2);
      const int t = scope.row + 8 * half;
      if (has_q_lengths && t >= extent.q.length) {
        row_lse = scope.sink;
        inverse = 0.f;
        // What was read there may have been anything.
#pragma unroll
        for (int n = 0; n < tile_value_head_dim / 8; ++n) out[n].x[2 * half] = out[n].x[2 * half + 1] = 0.f;
      }
      const bool stored = t < extent.q.stored;
      if (lane % 4 == 0 && stored) lse[t] = row_lse;
      store_row<value_head_dim>(out, half, inverse, out_head + t * problem.out.row_stride, stored, lane);
    }
  }

  __device__ __forceinline__ void item(const Scope& scope) {
    const Place& place = scope.item.place;
    const int first = scope.item.range.begin;
    // What this warpgroup's rows keep of them.
    const TileRange own = kept_key_tiles<block_kv, 64>(problem, place.extent, scope.rows.keep.band, {place.head, 1},
                                                       place.first_row + number * 64, 64);
    // Of the tile that comes next: a step on it learns of the one behind.
    const auto is_uniform = [&] { return !skips_tiles || following.is_uniform(); };
    const auto is_full = [&](int i) { return one_loop ? own.is_full(i) && is_uniform() : i < own.full_end; };
    const auto before = [&](int tile) { return skips_tiles ? following.tile() : tile - 1; };
    int tile = scope.item.range.end - 1, next;
    if constexpr (skips_tiles) following.word = tile * 2 + scope.item.begins_uniform;
    while (tile >= at_least(own.end, first)) {
      skip();
      tile = before(tile);
    }
    if (tile < first) {
      if (scope.item.has_keys()) release(shared.q_empty);
      return clear(scope);
    }
    if (is_full(tile)) {
      begin<false>(scope, tile, true);
    } else {
      begin<true>(scope, tile, is_uniform());
    }
    if constexpr (one_loop) {
      for (; (next = before(tile)) >= first; tile = next) {
        if (is_full(next)) {
          step<false>(scope, next, tile, true);
        } else {
          step<true>(scope, next, tile, is_uniform());
        }
      }
    } else {
      for (; tile > own.full_end; --tile) step<true>(scope, tile - 1, tile, true);
      for (; tile > 0; --tile) step<false>(scope, tile - 1, tile, true);
    }
    release(shared.q_empty);
    start_out(ring, place.extent, tile);
    end_out(ring);
    ring.advance();
  }

  __device__ __forceinline__ void run() {
    for (Ring<2> at;; at.advance()) {
      const Item& next = shared.items[at.stage];
      barrier_wait(shared_address(&shared.item_full[at.stage]), at.parity);
      if (next.is_last) return;
      const Scope scope(problem, next, own_row, next.place.first_row + number * 64);
      item(scope);
      finish(scope);
      __syncwarp();
      release(shared.item_empty[at.stage]);
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
    constexpr int readers = 4 * consumers * arrivals_of_a_warp;
    barrier_init(shared_address(&shared.q_empty), readers);
    barrier_init(shared_address(&shared.item_wanted), 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&shared.item_found[i]), 1);
      barrier_init(shared_address(&shared.item_full[i]), 1);
      barrier_init(shared_address(&shared.item_empty[i]), readers + (key_loaders - 1) * arrivals_of_a_warp);
    }
#pragma unroll
    for (int i = 0; i < stages; ++i) {
      barrier_init(shared_address(&shared.k_full[i]), arrivals_of_keys);
      barrier_init(shared_address(&shared.v_full[i]), arrivals_of_keys);
      barrier_init(shared_address(&shared.k_empty[i]), readers);
      barrier_init(shared_address(&shared.v_empty[i]), readers);
    }
    barriers_ready();
  }
  __syncthreads();

  if (warp < 4) {
    warpgroup_reg_dealloc<producer_registers>();
    if (warp < key_loaders) Producer{problem, maps, shared, warp, lane}.run();
    if (searches && warp == 1) Publisher{problem, shared, lane}.run();
  } else {
    warpgroup_reg_alloc<consumer_registers>();
    const int number = warp / 4 - 1;
    if (in_turns && number == consumers - 1) named_arrive(turn_barrier, 2 * warpgroup);
    Consumer{problem, shared, number, number * 64 + warp % 4 * 16 + lane / 4, lane}.run();
  }
}

}  // namespace jax_flash
