// What the backward kernels of this family share: how they walk over the rows of query, what is done to the scores and
// their derivatives in registers, and where dQ is summed up.
#pragma once

#include "cuda/device/score_columns.cuh"
#include "cuda/device/tile_walk.cuh"
#include "cuda/sm90a/dq_sums.cuh"
#include "cuda/sm90a/listed_rows.cuh"
#include "cuda/sm90a/pipeline.cuh"
#include "cuda/sm90a/slabs.cuh"
#include "cuda/sm90a/stores.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int computing = warps / 4 - 1;  // warpgroups; one more loads the rows
constexpr int computing_threads = warpgroup * computing;
static_assert(warps % 4 == 0 && (block_q == 64 || (computing == 2 && (block_q == 128 || transposes_dq))),
              "64 rows or columns of dQ each");

using KSlabs = Slabs<block_kv, head_dim>;
using VSlabs = Slabs<block_kv, value_head_dim>;
using QSlabs = Slabs<block_q, head_dim>;
using OutSlabs = Slabs<block_q, value_head_dim>;
using DsSlabs = Select<transposes_dq, Slabs<block_q, block_kv>, Slabs<block_kv, block_q>>::type;  // dS, or dS^T
using Scores64 = FragmentC[block_q / 8];  // of a warpgroup: 64 keys and a tile of rows
using Operand64 = u32[block_q / 16][4];   // the same, rounded, as A of a product over the rows

// Whether the rows of a tile past the end stand in the same array as those before it, and may hold anything there.
constexpr bool ragged_rows = has_q_lengths || packed;

// Named barriers.
constexpr int all_computing = 1;
constexpr int one_computing = 2;  // and on, one of each warpgroup

// Whether what is told of a tile has the kind of the one block of the mask in which it lies.
constexpr bool tells_kind = in_one_block<block_q, block_kv> && !in_segments && !in_intervals;

// The tiles of rows that a block walks over: those of one query head of its group after the other.
struct Walk {
  int head;
  int tile;
  bool full = false;       // where tiles are skipped: whether all pairs of the tile are kept,
  int kind = full_block;   // of which kind its block is, with tells_kind,
  bool ends_head = false;  // and whether it is the last of its head

  // With the next tile of a range, beyond its end where there is none.
  __device__ __forceinline__ Walk to(int next, const TileRange& range) const {
    return next < range.end ? Walk{head, next} : Walk{head + 1, range.begin};
  }
};

// Where tiles are skipped, only the warp that loads walks; what it tells the others of a tile is one word.
struct Told {
  int word;

  static __device__ __forceinline__ Told of(const Walk& at) {
    return {at.tile << 4 | at.kind << 2 | at.full << 1 | at.ends_head};
  }
  static __device__ __forceinline__ Told nothing() { return {-1}; }  // of the first tile, where there is none
  __device__ __forceinline__ bool is_nothing() const { return word < 0; }
  __device__ __forceinline__ Walk walk(int head) const {
    return {head, word >> 4, (word & 2) != 0, word >> 2 & 3, (word & 1) != 0};
  }
};

// Whether two blocks may share the rows of one where there are few blocks: if rows have no other sums than dQ, all in
// the range are visited, and no function takes the registers for where they begin and end. With tiles of 128 rows
// blocks stay instead (backward_loads.cuh).
constexpr bool halves_rows = block_q < 128 && adds_dq && !packed && !skips_tiles && !sums_gradients && !loads_by_list &&
                             !has_functions && !(bounded_left && KSlabs::slabs == 1);
JAX_FLASH_DEVICE bool is_half(const Problem& problem) { return halves_rows && problem.halved != 0; }
// The item of work (schedule.cuh) that comes `index`-th, of which each may come twice, once for each half of its rows.
JAX_FLASH_DEVICE int item_of(const Problem& problem, int index) {
  return halves_rows ? index >> problem.halved : index;
}

// Whether the blocks of some heads walk over their rows downwards (Problem::downwards_from).
constexpr bool walks_downwards = option_ordered_dq && option_causal && !bounded_left;

// An item of work, as the warp that finds it publishes it to the others.
struct Item {
  int index;
  Place place;
  Band band;
  TileRange range;  // of rows, as far as the band goes
  int first_head, last_head;
  bool here;  // whether its rows are computed by this kernel
};

// What the warps of a block all know.
struct Block : Item {
  const Problem& problem;

  __device__ __forceinline__ Block(const Problem& problem, const Item& item) : Item(item), problem(problem) {}
  __device__ __forceinline__ Block(const Problem& problem, int index) : problem(problem) {
    this->index = index;
    place = place_of(problem, item_of(problem, index));
    band = band_of(problem, place.extent);
    range = row_tiles_of<block_q>(band, place.extent, place.first_key, block_kv);
    if (is_half(problem) && range.begin < range.end) {
      (index % 2 == 0 ? range.end : range.begin) = (range.begin + range.end) / 2;
    }
    const int group = heads_of_share(problem);
    first_head = place.share * group;
    last_head = first_head + group - 1;
    here = !(packed && place.first_key >= place.extent.kv.stored) &&
           !computed_in_float32(problem, place.batch, place.kv_head);
  }
  __device__ __forceinline__ bool idle() const { return range.begin >= range.end; }
  __device__ __forceinline__ bool downwards() const { return walks_downwards && place.order >= problem.downwards_from; }
  __device__ __forceinline__ int first_tile() const { return downwards() ? range.end - 1 : range.begin; }
  __device__ __forceinline__ bool is_full(const Walk& at) const {
    return skips_tiles ? at.full : range.is_full(at.tile);
  }

  // The walk of a warp that computes. Where tiles are skipped it is told. If it searched as well, the compiler would no
  // longer know that what it found is the same in all lanes, and would move the operands of every wgmma to uniform
  // registers anew.
  __device__ __forceinline__ Walk first(const Told& told) const {
    if constexpr (skips_tiles) return {told.is_nothing() ? last_head + 1 : first_head, 0};
    return {first_head, range.begin};
  }
  __device__ __forceinline__ Walk after(const Walk& at) const {
    if constexpr (skips_tiles) return {at.head + at.ends_head, 0};
    if constexpr (walks_downwards) {
      // All heads of a tile first: so blocks that have fewer tiles are no further in a head than the others.
      if (at.head < last_head) return {at.head + 1, at.tile};
      const int next = at.tile + (downwards() ? -1 : 1);
      return {next >= range.begin && next < range.end ? first_head : last_head + 1, next};
    }
    return at.to(at.tile + 1, range);
  }
};

// The walk of the warp that loads.
struct Search {
  const Block& block;
  TileWalk<block_q> tiles;

  __device__ __forceinline__ explicit Search(const Block& block)
      : block(block),
        tiles(walk_of_rows<block_q, block_kv>(block.problem, block.place.extent, block.band,
                                              {block.first_head, heads_of_share(block.problem)},
                                              block.place.first_key)) {
    if constexpr (halves_rows) tiles.range = block.range;
    tiles.trim_begin();
  }
  __device__ __forceinline__ Walk first() const {
    return {tiles.empty() ? block.last_head + 1 : block.first_head, tiles.range.begin};
  }
  // What comes after `at`, which is to be told to the warps that compute.
  __device__ __forceinline__ Walk after(Walk& at) const {
    const bool uniform = skips_tiles && tiles.is_uniform(at.tile);  // known as long as no other 32 tiles are looked at
    const Walk next = at.to(tiles.after<true>(at.tile), tiles.range);
    if constexpr (skips_tiles) {
      at.full = uniform && tiles.range.is_full(at.tile);
      if constexpr (tells_kind) at.kind = uniform ? full_block : tiles.kind_if_not_full(at.head, at.tile);
      at.ends_head = next.head != at.head;
    }
    return next;
  }
};

// By the warp that loads, where it finds no tile: as many arrivals as a load has, lane 0's and that of every lane.
JAX_FLASH_DEVICE void arrive_without_rows(const u64& full, int lane) {
  if (lane == 0) barrier_arrive(shared_address(&full));
  barrier_arrive(shared_address(&full));
}

// lse and delta of a tile of rows, which a warp takes from global to shared memory.
struct Statistics {
  static constexpr int of_lane = ceil_div(block_q, 32);
  float lse_log2[of_lane], deltas[of_lane];

  __device__ __forceinline__ Statistics(const Block& block, const Walk& at, float ds_factor, int lane) {
    const Problem& problem = block.problem;
    const Rows& rows = block.place.extent.q;
    const i64 first = (static_cast<i64>(block.place.batch) * problem.q_heads + at.head) * problem.q_length + rows.first;
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      const int row = at.tile * block_q + i * 32 + lane;
      const bool valid = row < rows.length;
      const i64 from = first + (valid ? row : 0);
      lse_log2[i] = backward_lse(static_cast<const float*>(problem.lse)[from], valid);
      deltas[i] = valid ? static_cast<const float*>(problem.delta)[from] * ds_factor : 0.f;
    }
  }
  static __device__ __forceinline__ void put(float* to, const float (&from)[of_lane], int lane) {
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      if (block_q % 32 == 0 || i * 32 + lane < block_q) to[i * 32 + lane] = from[i];
    }
  }
};

// lse or delta of a tile of rows, in shared memory: of the row `column` of the tile and the next.
struct OfRows {
  const float* from;

  __device__ __forceinline__ explicit OfRows(const float* from, int lane = 0) : from(from) {}
  __device__ __forceinline__ float2 operator()(int column) const {
    return *reinterpret_cast<const float2*>(&from[column]);
  }
};
// The same, read where this stands: under a product that is waited for next.
struct OfRowsEarly {
  float2 of_lane[block_q / 8];

  __device__ __forceinline__ OfRowsEarly(const float* from, int lane) {
#pragma unroll
    for (int n = 0; n < block_q / 8; ++n) load_shared(of_lane[n], shared_address(from + 8 * n + lane % 4 * 2));
  }
  __device__ __forceinline__ float2 operator()(int column) const { return of_lane[column / 8]; }
};

// Adds dS K times `factor` for 16 rows, from `row` of a tile on, and for columns `column` and on.
template <int n>
JAX_FLASH_DEVICE void add_dq(const Block& block, FragmentC (&dq)[n], float factor, const Walk& at, int row, int column,
                             int lane) {
  const Place& place = block.place;
  row += at.tile * block_q;
  const bool valid = row < place.extent.q.length;
  const int row_tile = first_dq_tile(block.problem, place.batch, place.sequence) + row / 16;
  float* to = dq_fragment(block.problem, place.batch, at.head, row_tile, column / 8) + lane * 4;
#pragma unroll
  for (int i = 0; i < n; ++i) {
#pragma unroll
    for (float& x : dq[i].x) x *= factor;
    add_four(to + i * 128, dq[i], valid && (head_dim == KSlabs::columns || column + i * 8 < head_dim));
  }
}

// `count` fragments of dQ, as the accumulator has them, into shared memory.
template <int count, int n>
JAX_FLASH_DEVICE void put_dq(const FragmentC (&dq)[n], float factor, float* sums, int lane) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    u32 words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) words[e] = __float_as_uint(dq[i].x[e] * factor);
    store_shared(shared_address(sums) + (i * 32 + lane) * 16, uint4{words[0], words[1], words[2], words[3]});
  }
  stores_ready();
  __syncwarp();
}

// The same for all columns, by way of `sums` in shared memory, from where TMA adds them. It reads there until it is
// waited for: before the next ones are put there, and at the end of the block.
template <int n>
JAX_FLASH_DEVICE void add_dq_in_bulk(const Block& block, FragmentC (&dq)[n], float factor, const Walk& at, int row,
                                     float* sums, int lane) {
  const Place& place = block.place;
  row += at.tile * block_q;
  if (lane == 0) bulk_wait_read<0>();
  __syncwarp();
  put_dq<head_dim / 8>(dq, factor, sums, lane);
  if (lane == 0 && row < place.extent.q.length) {
    const int row_tile = first_dq_tile(block.problem, place.batch, place.sequence) + row / kDqRows;
    float* const to = dq_fragment(block.problem, place.batch, at.head, row_tile, 0);
    add_bulk(to, shared_address(sums), kDqRows * head_dim * sizeof(float));
    bulk_commit();
  }
}

// The same for dQ^T, of columns 16 * `columns` and on. Nothing is added unless it is `there`.
JAX_FLASH_DEVICE void add_transposed_dq(const Block& block, const FragmentC (&dq)[block_q / 8], float factor,
                                        const Walk& at, int columns, float* sums, int lane, bool there) {
  if (lane == 0) bulk_wait_read<0>();
  __syncwarp();
  put_dq<block_q / 8>(dq, factor, sums, lane);
  if (lane == 0 && there && columns * 16 < head_dim) {
    const i64 tile = dq_tile(block.problem, block.place.batch, at.head, at.tile * (block_q / kDqRows));
    add_bulk(dq_sums_of(block.problem, tile) + columns * dq_sums_of_columns, shared_address(sums),
             dq_sums_of_columns * sizeof(float));
    bulk_commit();
  }
}

// Where blocks add dQ in order: what is added of a tile of rows, and how many blocks come before. These are, of the
// batch entry or sequence, those between this one and the last or first one whose keys the tile may keep. Rows of the
// tile beyond the end count: row_tiles_of() has them too. Of blocks that walk downwards these are all of earlier keys.
struct Turn {
  int tile;  // of dq_tile()
  int bytes;
  int before;

  // Of 64 rows, from `own` of the tile on.
  static __device__ __forceinline__ Turn of(const Block& block, const Walk& at, int own) {
    const Place& place = block.place;
    const int row = at.tile * block_q, rows = at_least(0, at_most(kTurnRows, place.extent.q.length - row - own));
    const int first = first_dq_tile(block.problem, place.batch, place.sequence) + (row + own) / kDqRows;
    const int mine = place.first_key / block_kv;
    int before = bounded_left ? mine - at_least(0, row + block.band.low) / block_kv : mine;
    if (bounded_right && !block.downwards()) {
      before = at_most(row + block_q - 1 + block.band.high, place.extent.kv.length - 1) / block_kv - mine;
    }
    return {static_cast<int>(dq_tile(block.problem, place.batch, at.head, first)),
            ceil_div(rows, kDqRows) * kDqRows * head_dim * static_cast<int>(sizeof(float)), before};
  }
};

// By a thread: adds this from shared memory when it is the block's turn, lets that be filled again when it is read, and
// the next block add when it is added.
JAX_FLASH_DEVICE void add_dq_in_turn(const Problem& problem, const Turn& turn, const float* from, u32 empty) {
  if (turn.bytes == 0) {  // these rows are beyond the end
    barrier_arrive(empty);
    return;
  }
  int* const counter = DqSums{problem}.turn(turn.tile);
  while (load_acquire(counter) < turn.before) continue;
  JAX_FLASH_ASSERT(load_acquire(counter) == turn.before, "a block that adds dQ out of turn");
  global_stores_ready();
  float* const to = dq_sums_of(problem, turn.tile);
  if (turn.before == 0) {
    store_bulk(to, shared_address(from), turn.bytes);
  } else {
    add_bulk(to, shared_address(from), turn.bytes);
  }
  bulk_commit();
  bulk_wait_read<0>();
  barrier_arrive(empty);
  bulk_wait<0>();
  __threadfence();
  atomicAdd(counter, 1);
}

// Results of 16 keys of a warp, from `first_key` on; `column` in the sums of a share, to which it `adds` or else stores
// them.
template <int columns, bool adds, int n>
JAX_FLASH_DEVICE void store_keys(const Block& block, const Tensor& tensor, const FragmentC (&c)[n], float factor,
                                 int first_key, int column, int lane) {
  const Place& place = block.place;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + lane / 4 + 8 * half;
    const bool stored = key < place.extent.kv.stored;
    if (adds || block.problem.group_splits > 1) {
      // Of the last head, which the loop keeps in a register.
      const int share = block.last_head / heads_of_share(block.problem);
      ShareSum* const to = share_sums(block.problem, place.batch, share, place.extent.kv.first + key) + column;
      store_row<columns>(c, half, factor, reinterpret_cast<Select<adds, CommonSum, ShareSum>::type*>(to), stored, lane);
    } else {
      const int row = row_of_key(block.problem, place.batch, place.extent.kv.first + key);
      store_row<columns>(c, half, factor, result_of(tensor, place.batch, place.kv_head, row), stored, lane);
    }
  }
}
JAX_FLASH_DEVICE float dk_factor(const Block& block) {
  const Descale descale = descale_of(block.problem, block.place.batch, block.place.kv_head);
  return scale_of(block.problem, block.place.batch) * descale.query / descale.ds;
}
JAX_FLASH_DEVICE float dv_factor(const Block& block, float dropout_factor) {
  const Descale descale = descale_of(block.problem, block.place.batch, block.place.kv_head);
  return dropout_factor * descale.dout * probability_unit;
}
template <bool adds = false, int n>
JAX_FLASH_DEVICE void store_dk(const Block& block, const FragmentC (&dk)[n], int first_key, int lane) {
  store_keys<head_dim, adds>(block, block.problem.dk, dk, dk_factor(block), first_key, 0, lane);
}
template <bool adds = false, int n>
JAX_FLASH_DEVICE void store_dv(const Block& block, const FragmentC (&dv)[n], float dropout_factor, int first_key,
                               int lane) {
  store_keys<value_head_dim, adds>(block, block.problem.dv, dv, dv_factor(block, dropout_factor), first_key, head_dim,
                                   lane);
}

// Results of 16 keys of a warp by way of shared memory, from where TMA stores them; to be committed.
template <int array_columns, int n>
JAX_FLASH_DEVICE void store_box_of_keys(const Block& block, const TensorMap* map, const FragmentC (&c)[n], float factor,
                                        int first_key, u32 sums, int lane) {
  const Place& place = block.place;
#pragma unroll
  for (int slab = 0; slab < Slabs<16, array_columns>::slabs; ++slab) {
    u32 rounded[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float* x = &c[slab * 8 + i / 2].x[i % 2 * 2];
      rounded[i / 4][i % 4] = pack(x[0] * factor, x[1] * factor);
    }
    Slabs<16, kBoxColumns>::put(sums + slab * 2048, 0, rounded, lane);
  }
  stores_ready();
  __syncwarp();
  if (lane != 0) return;
#pragma unroll
  for (int slab = 0; slab < Slabs<16, array_columns>::slabs; ++slab) {
    store_box(map, sums + slab * 2048, slab * kBoxColumns, place.extent.kv.first + first_key, place.kv_head,
              place.batch);
  }
}
// c += A Y, of 64 keys in A and a tile of rows Y.
template <typename Y, int n>
JAX_FLASH_DEVICE void multiply_rows(FragmentC (&c)[n], const Operand64& a, u32 y) {
  const u64 b = by_columns(y, Y::slab_bytes);
#pragma unroll
  for (int kk = 0; kk < block_q / 16; ++kk) wgmma<true>(c, a[kk], moved(b, 2048 * kk), true);
}

// d logit / d (scale * score) of a tile of rows, where these are kept.
using Derivatives = FragmentC[1][keeps_derivatives ? block_q / 8 : 1];

// Of the 16 keys of a warp and a tile of rows.
using Diagonals = DiagonalValues<block_q, 16, has_diagonal_value>;
// At head_dim 256 there is no memory for them.
using OfDiagonals = DiagonalSums<block_q, (captured_of_diagonals > 0 && KSlabs::columns <= 128)>;
using DiagonalStorage = DiagonalStorageOf<Diagonals, OfDiagonals, 1>;

// At head_dim 256 there is none for a thread's sums of tables either.
using TableStorage = SharedTables<computing_threads, (captured_of_tables > 0 && KSlabs::columns <= 128)>;

// What is done to the 16 keys of a warp and a tile of rows.
struct Weights {
  ScoreColumns scores;
  int first_key;  // of the warp
  int lane;
  float dp_factor;                          // dS is a multiple of what it stands for
  float dq_factor;                          // what makes dQ of dS K
  int2 intervals[has_q_intervals ? 2 : 1];  // of the lane's keys: read for every tile they would be waited for
  OperandGradients gradients[1];
  DiagonalStorage& storage;  // of the warp

  __device__ __forceinline__ Weights(const Block& block, const Descale& descale, const SumsOfTables& of_tables,
                                     DiagonalStorage& storage, int first_key, int lane)
      : scores(block.problem, block.place.extent, block.band, block.first_head,
               kept_scale(block) * descale.query * descale.key),
        first_key(first_key),
        lane(lane),
        dp_factor(descale.dout * descale.value * descale.ds * probability_unit),
        dq_factor(kept_scale(block) * descale.key / descale.ds),
        storage(storage) {
    read_intervals();
    storage.clear(lane);
    gradients[0].enter(descale.ds, of_tables);
  }
  // As scale_of(), without a conversion from double, which the compiler would repeat for every tile.
  static __device__ __forceinline__ float kept_scale(const Block& block) {
    return has_traced_scale ? scale_of(block.problem, block.place.batch) : block.problem.scale;
  }
  __device__ __forceinline__ int key() const { return first_key + lane / 4; }
  __device__ __forceinline__ void read_intervals() {
    if constexpr (!has_q_intervals) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) intervals[i] = scores.keep.rows_of(key() + 8 * i);
  }

  // What the tile after `at` wants to know; and, of a warp that derives, the gradients of a query head behind its last
  // tile.
  template <bool derives>
  __device__ __forceinline__ Walk move(const Walk& at, const Block& block) {
    const Walk next = block.after(at);
    if (next.head != at.head) {
      if constexpr (derives && sums_gradients) {
        gradients[0].flush(scores.problem, scores.extent, scores.keep.functions(), block.place.sequence, at.head,
                           first_key, lane);
      }
      if (next.head <= block.last_head) {
        scores.enter(next.head);
        read_intervals();
      }
    }
    return next;
  }

  // To be found while the scores are under way.
  __device__ __forceinline__ Diagonals of_diagonals(const Walk& at) const {
    return {storage.values,
            scores.problem,
            scores.keep.functions(),
            at.tile * block_q,
            first_key,
            lane % 4 * 2,
            lane / 4,
            lane};
  }

  // Scores become weights; lse_of as that of ScoreColumns. With keeps_derivatives, these are to be multiplied with
  // dS^T.
  template <typename LseOf>
  __device__ __forceinline__ void weigh(Scores64& s, Derivatives& derivatives, const Walk& at, bool full,
                                        const LseOf& lse_of, const Diagonals& diagonals) const {
    const int kind = tells_kind ? at.kind : unread_block;
    auto& tile = reinterpret_cast<FragmentC(&)[1][block_q / 8]>(s);
    const auto rows_of = [&](int i) { return intervals[has_q_intervals ? i : 0]; };
    if (full) {
      scores.weigh<false>(tile, derivatives, at.tile * block_q, key(), lane, lse_of, rows_of, kind, diagonals);
    } else {
      scores.weigh<true>(tile, derivatives, at.tile * block_q, key(), lane, lse_of, rows_of, kind, diagonals);
    }
    if constexpr (with_dropout_rate) scores.drop(tile, at.tile * block_q, key(), lane);
  }

  // dP^T becomes dS^T, of weights.
  template <typename DeltaOf>
  __device__ __forceinline__ void derive(Scores64& dp, const Scores64& s, const Derivatives& derivatives,
                                         const Walk& at, const DeltaOf& delta_of) {
    scores.derive(reinterpret_cast<FragmentC(&)[1][block_q / 8]>(dp),
                  reinterpret_cast<const FragmentC(&)[1][block_q / 8]>(s), derivatives, gradients, true, at.head,
                  at.tile * block_q, key(), lane, dp_factor, delta_of,
                  [&](int) { return OfDiagonals{storage.sums[0], at.tile * block_q, first_key}; });
  }
};

// P^T and dS^T to operands.
JAX_FLASH_DEVICE void round_to(Operand64& operand, const Scores64& c) {
#pragma unroll
  for (int kk = 0; kk < block_q / 16; ++kk) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* x = &c[2 * kk + j / 2].x[j % 2 * 2];
      operand[kk][j] = pack(x[0], x[1]);
    }
  }
}
// Without the weights that are dropped.
JAX_FLASH_DEVICE void round_kept(Operand64& operand, const Scores64& p) {
  if constexpr (with_dropout_rate) {
    FragmentC kept[block_q / 8];
#pragma unroll
    for (int n = 0; n < block_q / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[n].x[e] = fmaxf(p[n].x[e], 0.f);
    }
    round_to(operand, kept);
  } else {
    round_to(operand, p);
  }
}

}  // namespace jax_flash
