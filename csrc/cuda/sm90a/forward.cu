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
#include "cuda/device/place.cuh"
#include "cuda/device/score_rows.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/tile_walk.cuh"
#include "cuda/sm90a/listed_rows.cuh"
#include "cuda/sm90a/pipeline.cuh"
#include "cuda/sm90a/slabs.cuh"
#include "cuda/sm90a/stores.cuh"

namespace jax_flash {

constexpr int consumers = block_q / 64;  // warpgroups
constexpr int threads = warpgroup * (1 + consumers);
static_assert(block_q % 64 == 0 && warps == threads / 32 && min_blocks == 1, "a producer, and 64 rows a consumer");
// Where items differ in length by what is in arrays, no order gives all blocks as much work: a warp searches for the
// next item when one is nearly loaded. Under a mask by blocks that was causal, blocks had up to 1.9 times the mean.
constexpr bool searches = skips_tiles || has_cu_q_lengths;
constexpr Grid order = searches ? Grid::block_an_item : Grid::persistent;
// Whether blocks take items from a counter; in a short call they deal them out. The producer would spill where it
// passes over heads that are computed in float32.
constexpr bool counts = searches || !has_descale;
// The warpgroups share the registers that the block has at its launch: the producer needs few, unless it searches or
// loads keys row by row.
constexpr bool lean_producer = !searches && !loads_by_list;
constexpr int producer_registers = consumers == 3 ? (searches ? 56 : 32) : (lean_producer ? 24 : 40);
constexpr int consumer_registers = consumers == 3 ? (searches ? 152 : 160) : (lean_producer ? 240 : 232);

using QSlabs = Slabs<block_q, head_dim>;
using KSlabs = Slabs<block_kv, head_dim>;
using VSlabs = Slabs<block_kv, value_head_dim>;
// Where out is wide, it is multiplied by the factors of its rows only if one of the warp's is not 1: on an H200 2 to 3%
// faster at head_dim 256, where products are long, but 3 to 5% slower at 64 and 128.
constexpr bool lazy = tile_value_head_dim > 128;
// Products of the warpgroups by turns: on an H200 1 to 9% faster at head_dim 64, 0 to 2% at 128 and 256.
constexpr bool in_turns = consumers > 1;

// Whether what is told of a tile is the kind of the one block of the mask in which it lies.
constexpr bool tells_kind = in_one_block<block_q, block_kv> && !in_segments && !in_intervals;

// Where tiles are skipped, what the producer tells of one, so that consumers need not search: its number, and whether
// all its pairs are kept as far as ranges let them. The tile after the last one is below the range.
struct Told {
  int word;

  __device__ __forceinline__ int tile() const { return word >> 1; }
  __device__ __forceinline__ bool is_uniform() const { return word & 1; }
  static __device__ __forceinline__ Told of(const TileWalk<block_kv>& keys, int tile) {
    return {tile * 2 + (tile >= keys.range.begin && keys.is_uniform(tile))};
  }
};

// Rows of query with all their keys, as the producer publishes them to the consumers.
struct Item {
  Place place;
  TileRange range;        // of keys
  SegmentRange segments;  // of the rows
  bool is_last;           // and no item, but the end
  bool begins_uniform;    // see Told, of the last tile of keys

  __device__ __forceinline__ bool has_keys() const { return range.begin < range.end; }
};

// At head_dim 256 tiles leave no memory for them.
using AllDiagonals = DiagonalValues<16, block_kv, true>;
constexpr bool keeps_diagonal_values =
    has_diagonal_value && fits_in_multiprocessor<QSlabs::bytes + stages*(KSlabs::bytes + VSlabs::bytes) + 1024 +
                                                 4 * consumers* static_cast<int>(sizeof(AllDiagonals::Storage))>;
using Diagonals = DiagonalValues<16, block_kv, keeps_diagonal_values>;

struct SharedStorage {
  alignas(1024) char q[QSlabs::bytes];
  char k[stages][KSlabs::bytes];
  char v[stages][VSlabs::bytes];
  Item items[2];
  Told following[skips_tiles ? stages : 1];  // the tile after that of K
  // Of a tile, for the rows of a warpgroup; of two tiles, as its warps don't all read the one before another is told.
  KeyBits keys[2][consumers][decides_keys ? 4 : 1];
  Diagonals::Storage diagonals[4 * consumers];
  // mbarriers. Full: an item is published, and its Q has landed; a tile has landed. Empty: all warps are done with it.
  // Wanted and found: items, between the warp that loads and the one that searches.
  u64 item_full[2], item_empty[2], q_empty;
  u64 item_wanted, item_found[2];
  u64 k_full[stages], k_empty[stages];
  u64 v_full[stages], v_empty[stages];
};
extern "C" __constant__ KernelTraits jax_flash_forward_traits = {
    .threads = threads,
    .block_rows = block_q,
    .shared_bytes = sizeof(SharedStorage),
    .persistent = 1,
    .counts_items = counts,
    .q_box_rows = block_q,
    .k_box_rows = block_kv,
    .v_box_rows = block_kv,
};

// How many tiles before the end of an item the next one is taken or looked for, by an atomic addition and reads of
// global memory one after the other. With 1, short items at head_dim 64 still had to wait.
constexpr int search_ahead = 4;

// Numbers of the hardware's barriers, from these on one for each consumer.
constexpr int turn_barrier = 1, own_barrier = 1 + consumers;

// The tiles of keys that an item visits, from the last to the first.
JAX_FLASH_DEVICE TileWalk<block_kv> tiles_of(const Problem& problem, const Item& item) {
  const Place& place = item.place;
  return walk_of_keys<block_kv>(problem, place.extent, item.range, item.segments, {place.head, 1}, place.first_row,
                                place.first_row + block_q);
}

// One warp finds the items of work, and publishes them in turn in the two slots.
struct Publisher {
  const Problem& problem;
  SharedStorage& shared;
  int lane;
  int index = -1;  // of the last item
  int taken = 0;   // in lane 0

  // Takes an item, whose index next_index() then gives. Only there its result is waited for.
  __device__ __forceinline__ void take() {
    if (counts && problem.scratch && lane == 0) taken = atomicAdd(static_cast<int*>(problem.scratch), 1);
  }
  // Beyond the last where there is none.
  __device__ __forceinline__ int next_index() const {
    if (index < 0) return blockIdx.x;
    const int blocks = static_cast<int>(gridDim.x);
    return counts && problem.scratch ? blocks + __shfl_sync(0xffffffffu, taken, 0) : index + blocks;
  }

  // Whether an item has rows that are computed here.
  __device__ __forceinline__ bool find(Item& item) const {
    const Place& place = item.place = place_of<order>(problem, index);
    if (packed && place.first_row >= place.extent.q.stored) return false;
    if (computed_in_float32(problem, place.batch, place.kv_head)) return false;
    item.is_last = false;
    item.range = kept_key_tiles<block_kv, block_q>(problem, place.extent, band_of(problem, place.extent),
                                                   {place.head, 1}, place.first_row, block_q);
    if constexpr (in_segments) {
      item.segments = segment_range<block_q>(problem.q_segment_ranges, place.batch, problem.q_length, place.first_row);
    }
    if constexpr (skips_tiles) {
      TileWalk<block_kv> tiles = tiles_of(problem, item);
      tiles.trim(lane);
      item.range = tiles.range;
      item.begins_uniform = Told::of(tiles, tiles.last()).is_uniform();
    }
    return true;
  }

  // Publishes the next item, or the end.
  __device__ __forceinline__ void publish(const Ring<2>& at) {
    const int items = blocks_of(problem, problem.q_length, block_q) * problem.q_heads * problem.batch;
    Item item;
    index = next_index();
    while (index < items && !find(item)) {
      take();
      index = next_index();
    }
    if (index >= items) {
      item = {};
      item.is_last = true;
    }
    barrier_wait(shared_address(&shared.item_empty[at.stage]), at.parity ^ 1);
    if (lane == 0) shared.items[at.stage] = item;
    __syncwarp();
  }

  // All of them, for the warp that loads. An item is taken no earlier than the one before is nearly loaded, or the last
  // ones would wait for blocks that are still busy.
  __device__ __forceinline__ void run() {
    Ring<1> wanted;
    for (Ring<2> at;; at.advance(), wanted.advance()) {
      publish(at);
      if (lane == 0) barrier_arrive(shared_address(&shared.item_found[at.stage]));
      if (shared.items[at.stage].is_last) return;
      barrier_wait(shared_address(&shared.item_wanted), wanted.parity);
      take();
    }
  }
};

// One warp, whose lane 0 issues the TMA loads; and where keys are listed the warps beside it, which load keys alone.
struct Producer {
  const Problem& problem;
  const TensorMaps& maps;
  SharedStorage& shared;
  int warp;
  int lane;
  Publisher publisher{problem, shared, lane};
  Ring<stages> ring;
  Ring<2> item_ring;
  u32 q_parity = 0;

  template <typename S>
  __device__ __forceinline__ void load(char* to, const TensorMap* map, u64* full, int row, int head, int batch) {
    if (lane == 0) load_slabs<S>(to, map, *full, row, head, batch);
    __syncwarp();
  }
  __device__ __forceinline__ void load_k(const Place& place, const Ring<stages>& at, int tile, const Told& following) {
    barrier_wait(shared_address(&shared.k_empty[at.stage]), at.parity ^ 1);
    if (skips_tiles && lane == 0) shared.following[at.stage] = following;
    load<KSlabs>(shared.k[at.stage], &maps.k, &shared.k_full[at.stage], place.extent.kv.first + tile * block_kv,
                 place.kv_head, place.batch);
  }
  __device__ __forceinline__ void load_v(const Place& place, const Ring<stages>& at, int tile) {
    barrier_wait(shared_address(&shared.v_empty[at.stage]), at.parity ^ 1);
    load<VSlabs>(shared.v[at.stage], &maps.v, &shared.v_full[at.stage], place.extent.kv.first + tile * block_kv,
                 place.kv_head, place.batch);
  }

  // Loads the rows of the item in a slot.
  __device__ __forceinline__ void load_q(const Place& place) {
    if (warp > 0) return;
    barrier_wait(shared_address(&shared.q_empty), q_parity ^ 1);
    q_parity ^= 1;
    load<QSlabs>(shared.q, &maps.q, &shared.item_full[item_ring.stage], place.extent.q.first + place.first_row,
                 place.head, place.batch);
  }

  // Asks for the item after this one.
  __device__ __forceinline__ void want_next() {
    if constexpr (searches) {
      if (lane == 0) barrier_arrive(shared_address(&shared.item_wanted));
    } else if (warp == 0) {
      publisher.take();
    }
  }
  // Tells the consumers of an item that has no Q to wait for.
  __device__ __forceinline__ void arrive_without_q() const {
    if (warp == 0 && lane == 0) barrier_arrive(shared_address(&shared.item_full[item_ring.stage]));
  }

  // Loads the tiles of an item that has keys.
  __device__ __forceinline__ void load_tiles(const Item& item) {
    const TileWalk<block_kv> keys = tiles_of(problem, item);
    int tile = keys.last(), next = keys.before(tile);
    const int near_end = keys.range.begin + search_ahead;
    if (next < near_end) want_next();
    // In the order in which the consumers wait for them: K a tile ahead of V.
    load_k(item.place, ring, tile, Told::of(keys, next));
    load_q(item.place);
    while (next >= keys.range.begin) {
      const Ring v_ring = ring;
      ring.advance();
      const int following = keys.before(next);
      if (next >= near_end && following < near_end) want_next();
      load_k(item.place, ring, next, Told::of(keys, following));
      load_v(item.place, v_ring, tile);
      tile = next;
      next = following;
    }
    load_v(item.place, ring, tile);
    ring.advance();
  }

  // The same where keys are listed, by key_loaders warps. The list is read a tile ahead.
  using Rows = ListedRows<block_kv>;
  __device__ __forceinline__ void load_listed_tiles(const Place& place, const TileRange& range) {
    const auto read = [&](int tile) {
      return Rows::Read(problem, place.extent, at_least(tile, range.begin) * block_kv, warp, lane);
    };
    int tile = range.end - 1;
    Rows rows(read(tile));
    typename Rows::Read ahead = read(tile - 1);
    load_listed_k(rows, place, ring);
    load_q(place);
    const int near_end = range.begin + search_ahead;
    if (tile < near_end) want_next();
    for (; tile > range.begin; --tile) {
      if (tile == near_end) want_next();
      const Rows of_v = rows;
      rows = Rows(ahead);
      ahead = read(tile - 2);
      const Ring v_ring = ring;
      ring.advance();
      load_listed_k(rows, place, ring);
      load_listed_v(of_v, place, v_ring);
    }
    load_listed_v(rows, place, ring);
    ring.advance();
  }
  __device__ __forceinline__ void load_listed_k(const Rows& rows, const Place& place, const Ring<stages>& at) {
    barrier_wait(shared_address(&shared.k_empty[at.stage]), at.parity ^ 1);
    rows.template load<KSlabs>(shared.k[at.stage], problem.k, &maps.k, shared.k_full[at.stage], place.batch,
                               place.kv_head, warp, lane);
  }
  __device__ __forceinline__ void load_listed_v(const Rows& rows, const Place& place, const Ring<stages>& at) {
    barrier_wait(shared_address(&shared.v_empty[at.stage]), at.parity ^ 1);
    rows.template load<VSlabs>(shared.v[at.stage], problem.v, &maps.v, shared.v_full[at.stage], place.batch,
                               place.kv_head, warp, lane);
  }

  __device__ __forceinline__ void run() {
    for (;; item_ring.advance()) {
      const Item& item = shared.items[item_ring.stage];
      const u32 found = shared_address(&shared.item_found[item_ring.stage]);
      if constexpr (!searches) {
        if (warp == 0) publisher.publish(item_ring);
        if (loads_by_list && warp == 0 && lane == 0) barrier_arrive(found);
      }
      if (searches || warp > 0) barrier_wait(found, item_ring.parity);
      if (item.is_last) return arrive_without_q();
      if (item.has_keys() && loads_by_list) {
        load_listed_tiles(item.place, item.range);
      } else if (item.has_keys()) {
        load_tiles(item);
      } else {
        want_next();
        arrive_without_q();
      }
      if (warp > 0 && arrives(lane)) barrier_arrive(shared_address(&shared.item_empty[item_ring.stage]));
    }
  }
};

// Of so many keys, weights are rounded up about as much as down.
constexpr int few_keys = 32;
// Whether the ends of rows' ranges alone say which keys they keep.
constexpr bool kept_by_band = !(in_segments || in_intervals || has_functions || has_mask || has_mask_blocks);
// Whether rows may be known to keep many keys. What rounding adds is counted behind a branch then, where the walk has
// one.
constexpr bool may_know_many = kept_by_band || decides_keys;

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
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (masked || modifies_scores || has_mask) {
        scope.rows.logits<masked, false>(scores, nullptr, scope.row + 8 * half, half, tile * block_kv, own_lane, keys,
                                         diagonals, kind);
      }
      shrink[half] = statistics[half].update(quad_max(maximum_of(scores, half)), scope.rows.scale_log2);
      rounding[half] *= shrink[half];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      statistics[half].weigh(scores, half, scope.rows.scale_log2);
      if constexpr (masked && !may_know_many) {
#pragma unroll
        for (int n = 0; n < block_kv / 8; ++n) {
          const float low = scores[n].x[2 * half], high = scores[n].x[2 * half + 1];
          count_rounding(half, low, high, pack(low, high));
        }
      }
    }
    if constexpr (with_dropout_rate) scope.rows.drop<false>(scores, scope.row, tile * block_kv, lane);
  }

  __device__ __forceinline__ void keep_weights(const FragmentC (&scores)[block_kv / 8], bool counts_rounding) {
#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const FragmentC& from = scores[2 * kk + i / 2];
        weights[kk][i] = pack(from.x[i % 2 * 2], from.x[i % 2 * 2 + 1]);
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
    keep_weights(scores, masked && scope.has_few_keys && keys.count < few_keys);
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
    keep_weights(scores, masked && scope.has_few_keys && keys.count < few_keys);
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
