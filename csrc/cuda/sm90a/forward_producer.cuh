// The forward's blocks: their shared memory, and the warps that find items of work, load their tiles and tell those
// that compute (forward.cu).
#pragma once

#include "cuda/device/place.cuh"
#include "cuda/device/score_rows.cuh"
#include "cuda/device/tile_walk.cuh"
#include "cuda/sm90a/listed_rows.cuh"
#include "cuda/sm90a/pipeline.cuh"
#include "cuda/sm90a/slabs.cuh"

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

}  // namespace jax_flash
