// The backward's blocks for head dims up to 128: their shared memory, and the warps that find items of work and load
// their tiles (backward.cuh).
#pragma once

#include "cuda/sm90a/backward_rows.cuh"

namespace jax_flash {

static_assert(block_kv == 64 * computing, "a warpgroup has 64 keys");
static_assert(block_q == 64 || !(keeps_derivatives || skips_tiles || sums_gradients || adds_captured),
              "more options than there are registers for");
// Whether captured numbers of a head have a gradient and nothing else takes as many registers: without what this leads
// to, ptxas orders no product behind another one (its C7512) at head_dim 128.
constexpr bool sums_heads =
    captured_of_heads > 0 && captured_of_keys == 0 && captured_of_rows == 0 && !keeps_derivatives && KSlabs::slabs > 1;
// In how many pieces dQ is computed, a slab of columns each: these gradients take the registers of more.
constexpr int dq_pieces = has_dalibi_slopes || sums_heads ? KSlabs::slabs : 1;

// Whether each warpgroup computes dQ of 64 rows of a tile, or of 64 columns; otherwise one does of all, by turns.
constexpr bool shares_dq = block_q == 64 * computing || transposes_dq;

// K and V stay in registers as operands where these suffice: they need not be read again for each tile of rows then.
// Not without dQ: there ptxas (12.9 and 13) took them for dead behind their last use in the loop and gave their
// registers to P and dS, with wrong dK and dV (tests/test_kernels.py looks for it).
constexpr bool keys_in_registers = adds_dq && block_q == 64 && KSlabs::columns + VSlabs::columns <= 128;

// Whether dQ goes through shared memory, from where TMA adds it. Instructions that add registers stand in the way of
// all other accesses to shared memory, 1,000 cycles a tile at head_dim 128; of 64 rows at head_dim 64 there are half as
// many, and the detour takes as long. Sums of gradients leave no registers for it, values of diagonals no shared
// memory.
constexpr bool adds_in_bulk =
    adds_dq && (option_ordered_dq || shares_dq || KSlabs::slabs > 1) && !sums_gradients && !has_diagonal_value;
static_assert(!adds_in_bulk || dq_pieces == 1, "dQ is added in one piece");

// Whether warps that load nothing add dQ, one for each warpgroup: they wait for the block's turn.
constexpr bool adds_by_turns = option_ordered_dq;
static_assert(!adds_by_turns || (adds_in_bulk && !skips_tiles && adding_warps == computing),
              "each block knows who comes before");
// Whether the warps that compute start TMA's additions themselves, and wait for them.
constexpr bool starts_additions = adds_in_bulk && !adds_by_turns;
static_assert(!transposes_dq || (starts_additions && KSlabs::slabs == computing && !packed), "a slab of columns each");
constexpr int first_adding_warp = 2;
JAX_FLASH_DEVICE bool sums_dq_of(int i, int group) { return adds_dq && (shares_dq || i % computing == group); }
// Buffers of dQ of 64 rows: one of a warpgroup; where blocks add in order, two of each that sums up every tile of rows.
// So the phases of one that takes the i-th tile are those of dS.
constexpr int dq_buffers = adds_by_turns && shares_dq ? 2 * computing : computing;
JAX_FLASH_DEVICE int dq_buffer(int i, int group) { return group + (dq_buffers > computing ? i % 2 * computing : 0); }

// lse is read while the scores are under way where dQ's additions do not stand in the way, and registers suffice.
constexpr bool reads_lse_early = adds_in_bulk && KSlabs::slabs > 1 && !has_mask && !transposes_dq;
using LseOf = Select<reads_lse_early, OfRowsEarly, OfRows>::type;

// Whether the scores of one warpgroup are started behind dV of the other. Left alone the two fall into a better order
// in plain calls, but beside a block mask into a worse one.
constexpr bool in_turns = has_mask_blocks && computing == 2 && !adds_in_bulk;
constexpr int turn_barrier = one_computing + computing;

// Whether blocks stay and take items of work from a counter, so that the first tiles of one are loaded while another
// ends. A block has not the warps for it where keys are listed, and not the registers beside score functions, sums of
// gradients or descaling. At head_dim 64, where two blocks may share rows, ptxas takes the operands of wgmma for
// different ones in each lane.
constexpr bool stays = adds_dq && !loads_by_list && !has_score_function && !sums_gradients && !has_descale &&
                       (KSlabs::slabs > 1 || !halves_rows);
// Whether a warp of its own finds items, and their tiles where some are skipped.
constexpr bool hands_over = stays || skips_tiles;
static_assert(!hands_over || !loads_by_list, "a warp that finds does nothing else");
// Registers of the warps that load, find items and zero: they want more where those that compute can do without.
constexpr int loading_warp = KSlabs::columns + VSlabs::columns <= 128 && block_q == 64 ? 40 : 24;

// Whether results of keys go by way of the shared memory of dQ, so that nobody waits for global memory.
constexpr bool stores_in_bulk =
    stays && starts_additions && VSlabs::slabs <= KSlabs::slabs && sizeof(Result) == sizeof(Element);
constexpr int finding_warp = adds_by_turns ? 1 : 3, ending_warp = 2;

constexpr int tiles_ahead = 2;  // of those loaded, that are found
// A warp's, of 16 rows of dQ; or the results of its keys, which are half as long. Transposed, of 16 columns of a tile;
// or the results one after the other.
constexpr int sums_of_warp = transposes_dq ? dq_sums_of_columns : stores_in_bulk ? 16 * KSlabs::columns : 16 * head_dim;

struct SharedStorage {
  char k[KSlabs::bytes];
  char v[VSlabs::bytes];
  char q[stages][QSlabs::bytes];
  char dout[stages][OutSlabs::bytes];
  char ds[adds_dq ? 2 : 1][DsSlabs::bytes];
  float dq[adds_in_bulk ? dq_buffers : 1][adds_in_bulk ? 4 : 1][adds_in_bulk ? sums_of_warp : 4];  // of 16 rows each
  float lse_log2[stages][block_q];
  float deltas[stages][block_q];
  Told told[skips_tiles ? stages : 1];
  Told found[skips_tiles ? tiles_ahead : 1];
  alignas(16) char zeros[zeroes_dq ? zero_bytes : 16];
  Item items[2];
  DiagonalStorage diagonals[4 * computing];
  TableStorage tables;
  u64 keys_full, keys_empty, full[stages], empty[stages], ds_full[2], ds_empty[2], dq_added[2];
  // Between the warp that finds and the others: items, tiles, and that the next item is wanted.
  u64 item_full[2], item_empty[2], found_full[tiles_ahead], found_empty[tiles_ahead], item_wanted;
  u64 dq_full[adds_by_turns ? dq_buffers : 1], dq_empty[adds_by_turns ? dq_buffers : 1];
  int came_second;  // of two blocks that share rows
};

// By key_loaders warps: the keys of the block.
JAX_FLASH_DEVICE void load_keys(const Block& block, SharedStorage& shared, const TensorMaps& maps, int warp, int lane) {
  const Place& place = block.place;
  if constexpr (loads_by_list) {
    using Rows = ListedRows<block_kv>;
    const Rows rows(Rows::Read(block.problem, place.extent, place.first_key, warp, lane));
    rows.load<KSlabs>(shared.k, block.problem.k, &maps.k, shared.keys_full, place.batch, place.kv_head, warp, lane);
    rows.load<VSlabs>(shared.v, block.problem.v, &maps.v, shared.keys_full, place.batch, place.kv_head, warp, lane);
  } else if (lane == 0) {
    const u32 full = shared_address(&shared.keys_full);
    barrier_expect(full, KSlabs::bytes + VSlabs::bytes);
    const int key = place.extent.kv.first + place.first_key;
    KSlabs::copy(shared_address(shared.k), &maps.k, full, key, place.kv_head, place.batch);
    VSlabs::copy(shared_address(shared.v), &maps.v, full, key, place.kv_head, place.batch);
  }
}

// Where the n-th item of a block is published, and the phase of that slot's barriers. (A Ring would be a register
// more.)
JAX_FLASH_DEVICE int slot_of(int n) { return n % 2; }
JAX_FLASH_DEVICE u32 phase_of(int n) { return n / 2 % 2; }

// What barriers have gone through when an item begins. Its first tiles lie in the first buffers, whatever came before:
// a buffer that is carried over from one item to the next would not be known to be the same in all lanes, and the
// operands of every wgmma would be moved to uniform registers.
struct Phases {
  u32 word = 0;  // a bit for each of the buffers of tiles, for the two of dS, and for the keys

  __device__ __forceinline__ u32 full(const Ring<stages>& ring) const {
    return stays ? ring.parity ^ (word >> ring.stage & 1) : ring.parity;
  }
  __device__ __forceinline__ u32 ds(int i) const {
    const u32 parity = i / 2 % 2;
    return stays ? parity ^ (word >> (stages + i % 2) & 1) : parity;
  }
  // Whether no item has had tiles. (The last bit says so.)
  __device__ __forceinline__ bool none() const { return (word >> (stages + 3) & 1) == 0; }
  // How many items the warp has taken, modulo 4. (As a number of its own it is one register more than there are.)
  __device__ __forceinline__ int item() const { return word >> 30; }
  __device__ __forceinline__ void next_item() { word += 1u << 30; }
  __device__ __forceinline__ u32 keys() const { return stays ? word >> (stages + 2) & 1 : 0; }
  // Behind an item of `tiles` tiles.
  __device__ __forceinline__ void advance(const Ring<stages>& ring, int tiles) {
    const u32 of_stages = (ring.parity ? (1u << stages) - 1 : 0) ^ ((1u << ring.stage) - 1);
    const u32 of_ds = (tiles + 1) / 2 % 2 | tiles / 2 % 2 * 2;
    word ^= of_stages | of_ds << stages | 1u << (stages + 2);
    word |= 1u << (stages + 3);
  }
};

// Calls `work` with each item of the block, and with its number there modulo 4. It can't end the walk, though half an
// item is the only one: with a second way out of this loop ptxas took what is the same in all lanes for different in
// each, and dQ added in order moved the operands of every wgmma to uniform registers, 3 to 4% of a backward.
template <typename Work>
JAX_FLASH_DEVICE void for_each_item(const Block& own, SharedStorage& shared, int lane, Phases& phases,
                                    const Work& work) {
  if constexpr (!hands_over) {
    work(own, 0);
  } else {
    for (;; phases.next_item()) {
      const int n = phases.item();
      barrier_wait(shared_address(&shared.item_full[slot_of(n)]), phase_of(n));
      const Block block(own.problem, shared.items[slot_of(n)]);
      if (block.index < 0) return;
      work(block, n);
      __syncwarp();
      if (arrives(lane)) barrier_arrive(shared_address(&shared.item_empty[slot_of(n)]));
    }
  }
}

// The warp that finds items of work, and their tiles where some are skipped.
struct Finder {
  const Problem& problem;
  SharedStorage& shared;
  int lane;
  int found = 0;  // tiles; a Ring would be a register more

  __device__ __forceinline__ void tell_tiles(const Search& search, Walk at, int last_head) {
    for (Walk next; at.head <= last_head; at = next, ++found) {
      next = search.after(at);
      const int slot = found % tiles_ahead;
      barrier_wait(shared_address(&shared.found_empty[slot]), found / tiles_ahead % 2 ^ 1);
      if (lane == 0) {
        shared.found[slot] = Told::of(at);
        barrier_arrive(shared_address(&shared.found_full[slot]));
      }
    }
  }
  __device__ __forceinline__ void publish(const Item& item, int slot) const {
    if (lane == 0) {
      shared.items[slot] = item;
      barrier_arrive(shared_address(&shared.item_full[slot]));
    }
  }
  // An item is taken no earlier than the one before is nearly loaded, or the last ones would wait for blocks that are
  // still busy. Where blocks wait for others, to zero or to add, those that have items before theirs must have begun:
  // so the first one is taken as well.
  __device__ __forceinline__ int next_index(bool first) const {
    const bool deals_first = !stays || is_half(problem) || (zeroes_dq && problem.dq_ahead == 0);
    if (first && deals_first) return blockIdx.x;
    int taken = 0;
    if (lane == 0) taken = atomicAdd(DqSums{problem}.taken(), 1);
    return (deals_first ? static_cast<int>(gridDim.x) : 0) + __shfl_sync(0xffffffffu, taken, 0);
  }

  __device__ __forceinline__ void wait_until_wanted(int n) const {
    if (stays && !skips_tiles) barrier_wait(shared_address(&shared.item_wanted), n % 2);
  }
  __device__ __forceinline__ void run() {
    const int items = static_cast<int>(DqSums{problem}.parts()) << problem.halved;
    int index = next_index(true);
    // Where additions are ordered ptxas spills 24 bytes beside packed sequences if this is signed, else if it is not.
    for (Select<packed, u32, int>::type n = 0;; ++n) {
      const int slot = slot_of(n);
      barrier_wait(shared_address(&shared.item_empty[slot]), phase_of(n) ^ 1);
      if (index >= items) {
        Item none{};
        none.index = -1;
        publish(none, slot);
        return;
      }
      Block block(problem, index);
      if (skips_tiles && block.here && !block.idle()) {
        const Search search(block);
        const Walk first = search.first();
        if (first.head > block.last_head) block.range.end = block.range.begin;
        publish(block, slot);
        tell_tiles(search, first, block.last_head);
      } else {
        publish(block, slot);
      }
      wait_until_wanted(n);
      index = stays && !is_half(problem) ? next_index(false) : items;
    }
  }
};

// The warp that loads: keys, and the rows that it walks over.
struct Loader {
  SharedStorage& shared;
  const TensorMaps& maps;
  int lane;
  Phases phases;
  Ring<tiles_ahead> found;

  // A tile of a head, where the warp that finds tells which.
  __device__ __forceinline__ Walk told(int head) {
    barrier_wait(shared_address(&shared.found_full[found.stage]), found.parity);
    const Told told = shared.found[found.stage];
    __syncwarp();
    if (arrives(lane)) barrier_arrive(shared_address(&shared.found_empty[found.stage]));
    found.advance();
    return told.walk(head);
  }
  __device__ __forceinline__ void want_item() const {
    if (stays && !skips_tiles && lane == 0) barrier_arrive(shared_address(&shared.item_wanted));
  }

  __device__ __forceinline__ void load(const Block& block) {
    if (!block.here || block.idle()) return want_item();
    const Place& place = block.place;
    const Descale descale = descale_of(block.problem, place.batch, place.kv_head);
    const float ds_factor = descale.ds * probability_unit;
    Ring<stages> ring;
    int i = 0;
    for (Walk at{block.first_head, block.first_tile()}; at.head <= block.last_head; ++i) {
      if constexpr (skips_tiles) at = told(at.head);
      const Walk next = block.after(at);
      if (next.head > block.last_head) want_item();
      const int stage = ring.stage;
      const u32 full = shared_address(&shared.full[stage]);
      barrier_wait(shared_address(&shared.empty[stage]), phases.full(ring) ^ 1);
      if (lane == 0) {
        barrier_expect(full, QSlabs::bytes + OutSlabs::bytes);
        const int row = place.extent.q.first + at.tile * block_q;
        QSlabs::copy(shared_address(shared.q[stage]), &maps.q, full, row, at.head, place.batch);
        OutSlabs::copy(shared_address(shared.dout[stage]), &maps.dout, full, row, at.head, place.batch);
      }
      if (!loads_by_list && i == 0) {
        barrier_wait(shared_address(&shared.keys_empty), phases.keys() ^ 1);
        load_keys(block, shared, maps, 0, lane);
      }
      // Read behind the copies, which need not wait for them.
      const Statistics statistics(block, at, ds_factor, lane);
      Statistics::put(shared.lse_log2[stage], statistics.lse_log2, lane);
      Statistics::put(shared.deltas[stage], statistics.deltas, lane);
      if (skips_tiles && lane == 0) shared.told[stage] = Told::of(at);
      barrier_arrive(full);
      ring.advance();
      at = next;
    }
    phases.advance(ring, i);
  }
};

}  // namespace jax_flash
