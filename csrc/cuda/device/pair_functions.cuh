// What a pair of query and key is to the call's score and mask functions, and the blocks of its block mask.
#pragma once

#include "cuda/device/intervals.cuh"
#include "cuda/device/opaque.cuh"

namespace jax_flash {

// Kinds of blocks in `mask_blocks`: no pair is kept; the partial mask decides; all pairs are kept. And what stands for
// one that is still to be read.
constexpr int empty_block = 0, partial_block = 1, full_block = 2, unread_block = -1;

// Whether `rows` rows and `keys` keys, from a multiple of these on, lie in one block of the mask: then its kind is read
// once for all their pairs.
template <int rows, int keys>
constexpr bool in_one_block = has_mask_blocks && mask_block_rows % rows == 0 && mask_block_keys % keys == 0;

// A pair of query and key, by row and column.
struct Pair {
  Position row, column;
  Position distance;        // row - column
  bool has_value = false;   // whether what the score function takes of the distance is known, and
  DiagonalValue value = 0;  // what that is

  __device__ __forceinline__ Pair(int row, int column) : Pair(row, column, row - column) {}
  __device__ __forceinline__ Pair(const Position& row, const Position& column, const Position& distance)
      : row(row), column(column), distance(distance) {}
};

// A lane's pairs as sums of its first one and constants. Of rows less columns, which it knows to be bits side by side,
// the compiler does not see that most distances are the same, nor that comparisons with constants are tests of one
// number. Unless `present`, they are rows and columns and no more.
template <bool present>
struct Pairs {
  int row, column, distance;

  __device__ __forceinline__ Pairs(int row, int column)
      : row(row), column(column), distance(present ? opaque_number(row - column) : 0) {}
  // i rows and j columns, constants, beyond the first.
  __device__ __forceinline__ Pair at(int i, int j) const {
    if constexpr (!present) return {row + i, column + j};
    return {{row, i}, {column, j}, {distance, i - j}};
  }
};

// The kind of a block of the mask, for a query head.
JAX_FLASH_DEVICE int kind_of_block(const Problem& problem, const Extent& extent, int head, int row, int column) {
  const BlockStrides& s = problem.mask_blocks_strides;
  const int sequence = packed ? extent.index - extent.batch * problem.options.sequences : 0;
  return __ldg(problem.mask_blocks + extent.batch * s.batch + sequence * s.sequence + head * s.head + row * s.row +
               column * static_cast<int>(s.column));
}

// A thread's sums of elements of tables, for all keys of its warp. What is indexed by a number that only the pair tells
// lies in memory: in shared memory, the threads side by side, or else in an array of its own, as local memory takes
// with it whatever shares an object with that.
struct SumsOfTables {
  float* first;
  int stride;

  __device__ __forceinline__ float& operator[](int place) const { return first[place * stride]; }
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int i = 0; i < captured_of_tables; ++i) (*this)[i] = 0.f;
  }
};

// What the functions take for the pairs of a head of an extent: a packed sequence is a batch entry of its own. A base
// rather than a member: absent it takes no place, and the machine code is as without it.
template <bool present>
struct PairFunctions {
  int call, b, h;
  int offset;  // of row 0
  int head;    // of this call's arrays

  __device__ __forceinline__ PairFunctions(const Problem& problem, const Extent& extent, int head) : call(0) {
    b = extent.index + (has_index_offsets ? problem.index_offsets[0] : 0);
    if constexpr (function_batch > 0) {
      const int entries = function_batch * problem.options.sequences;
      call = b / entries;
      b -= call * entries;
    }
    enter(problem, head);
    offset = has_q_offset ? problem.q_offset[extent.index] : 0;
  }
  __device__ __forceinline__ void enter(const Problem& problem, int of) {
    head = of;
    h = head + (has_index_offsets ? problem.index_offsets[1] : 0);
  }

  // The kind of a pair's block; rows and keys beyond the ends have the kind of those at the ends.
  __device__ __forceinline__ int kind_of(const Problem& problem, const Extent& extent, int row, int column) const {
    if constexpr (!has_mask_blocks) return full_block;
    const int r = at_least(0, at_most(row, extent.q.length - 1)),
              c = at_least(0, at_most(column, extent.kv.length - 1));
    return kind_of_block(problem, extent, head, r / mask_block_rows, c / mask_block_keys);
  }

  // Positions beyond int32 have the largest one.
  __device__ __forceinline__ Position position(const Position& row) const {
    if constexpr (!has_q_offset) return row;
    return offset > 0 && row > 0x7fffffff - offset ? 0x7fffffff : row + offset;
  }
  // Position of the query less that of the key.
  __device__ __forceinline__ Position distance(const Pair& pair) const {
    if constexpr (!has_q_offset) return pair.distance;
    return position(pair.row) - pair.column;
  }

  // Whether the mask functions and the block mask keep a pair; with `knows_kind` this is the kind of its block, which
  // is not empty.
  template <bool knows_kind>
  __device__ __forceinline__ bool keeps(const Problem& problem, const Extent& extent, const Pair& pair,
                                        int known) const {
    bool kept = true;
    const Position q = position(pair.row), kv = pair.column;
    if constexpr (has_mask_function) kept = mask_function(problem, call, b, h, q, kv, distance(pair));
    if constexpr (has_mask_blocks) {
      const int kind = knows_kind ? known : kind_of(problem, extent, pair.row, kv);
      bool here = knows_kind || kind != empty_block;
      if constexpr (has_partial_mask) {
        // Decided always: behind a branch, what the function reads of a row or a key alone would be read for each pair.
        const bool decided = partial_mask(problem, call, b, h, q, kv, distance(pair));
        here = here && (kind == full_block || decided);
      }
      kept = kept && here;
    }
    return kept;
  }

  __device__ __forceinline__ float score(const Problem& problem, float x, const Pair& pair, float& derivative) const {
    if (pair.has_value) {
      return score_of_diagonal(problem, call, x, b, h, position(pair.row), pair.column, distance(pair), pair.value,
                               derivative);
    }
    return score_function(problem, call, x, b, h, position(pair.row), pair.column, distance(pair), derivative);
  }
  __device__ __forceinline__ DiagonalValue of_diagonal(const Problem& problem, int distance) const {
    return diagonal_value(problem, call, b, h, distance);
  }
  // Adds ds, the gradient of a pair's score, times the derivatives of the score by elements of captured arrays to their
  // gradients, or to the sums of those elements that all pairs of a head, a key, a row or a diagonal read, or of small
  // tables. `x` is the score before the function.
  __device__ __forceinline__ void add(const Problem& problem, float x, const Pair& pair, float ds, float* of_head,
                                      float* of_key, float* of_row, float* of_diagonal,
                                      const SumsOfTables& of_tables) const {
    if constexpr (adds_captured) {
      // Beside a score function that is evaluated again, one block of code for all pairs spills (sm_90, 112 bytes and
      // 1,824 without the branch).
      if (captured_take_score && ds == 0.f) return;
      add_to_captured(problem, call, x, b, h, position(pair.row), pair.column, distance(pair), ds, of_head, of_key,
                      of_row, of_diagonal, of_tables.first, of_tables.stride);
    }
  }
  // Sums of a head, a key, a row or a diagonal, to the gradients or, of small tables, to those of the thread.
  __device__ __forceinline__ void add_of_head(const Problem& problem, const float* sums) const {
    add_sums_of_head(problem, call, b, h, 0, 0, 0, sums, nullptr, 0);
  }
  __device__ __forceinline__ void add_of_key(const Problem& problem, int column, const float* sums) const {
    add_sums_of_key(problem, call, b, h, 0, column, 0, sums, nullptr, 0);
  }
  __device__ __forceinline__ void add_of_row(const Problem& problem, int row, const float* sums,
                                             const SumsOfTables& of_tables) const {
    add_sums_of_row(problem, call, b, h, position(row), 0, 0, sums, of_tables.first, of_tables.stride);
  }
  // Of any pair of the diagonal.
  __device__ __forceinline__ void add_of_diagonal(const Problem& problem, int row, int column, const float* sums,
                                                  const SumsOfTables& of_tables) const {
    add_sums_of_diagonal(problem, call, b, h, position(row), column, distance({row, column}), sums, of_tables.first,
                         of_tables.stride);
  }
  // Of the element of a table that has this place among a thread's sums.
  __device__ __forceinline__ void add_of_table(const Problem& problem, int place, float sum) const {
    add_sum_of_table(problem, call, b, h, 0, 0, 0, place, sum);
  }
};

template <>
struct PairFunctions<false> {
  __device__ __forceinline__ PairFunctions(const Problem&, const Extent&, int) {}
  __device__ __forceinline__ void enter(const Problem&, int) {}
  __device__ __forceinline__ int kind_of(const Problem&, const Extent&, int, int) const { return full_block; }
  template <bool knows_kind>
  __device__ __forceinline__ bool keeps(const Problem&, const Extent&, const Pair&, int) const {
    return true;
  }
  __device__ __forceinline__ float score(const Problem&, float x, const Pair&, float&) const { return x; }
  __device__ __forceinline__ DiagonalValue of_diagonal(const Problem&, int) const { return 0; }
  __device__ __forceinline__ void add(const Problem&, float, const Pair&, float, float*, float*, float*, float*,
                                      const SumsOfTables&) const {}
  __device__ __forceinline__ void add_of_head(const Problem&, const float*) const {}
  __device__ __forceinline__ void add_of_key(const Problem&, int, const float*) const {}
  __device__ __forceinline__ void add_of_row(const Problem&, int, const float*, const SumsOfTables&) const {}
  __device__ __forceinline__ void add_of_diagonal(const Problem&, int, int, const float*, const SumsOfTables&) const {}
  __device__ __forceinline__ void add_of_table(const Problem&, int, float) const {}
};

struct BlockKinds {
  bool any_pairs;  // whether a block is not empty
  bool all_pairs;  // whether all are full
};

// The blocks of a block mask that tiles of `size` rows or keys meet; the other side's rows [begin, end) and query heads
// are the block's.
template <int size, bool present>
struct BlockTiles {
  const Problem& problem;
  const Extent& extent;
  Heads heads;
  bool of_keys;     // the tiles
  int first, last;  // blocks of the other side

  __device__ __forceinline__ BlockTiles(const Problem& problem, const Extent& extent, const Heads& heads, bool of_keys,
                                        int begin, int end)
      : problem(problem), extent(extent), heads(heads), of_keys(of_keys) {
    const int own = of_keys ? mask_block_rows : mask_block_keys;
    first = begin / own;
    last = at_least(at_most(end, of_keys ? extent.q.length : extent.kv.length) - 1, begin) / own;
  }

  // What the blocks are that a tile meets, of any head.
  __device__ __forceinline__ BlockKinds kinds(int tile) const {
    const int other = of_keys ? mask_block_keys : mask_block_rows;
    const int length = of_keys ? extent.kv.length : extent.q.length;
    const int begin = tile * size / other;
    // Mostly a tile lies in one block.
    const int end = other % size == 0 ? begin : at_least(at_most((tile + 1) * size, length) - 1, tile * size) / other;
    const int planes = problem.mask_blocks_strides.head ? heads.count : 1;
    BlockKinds found{false, true};
    for (int head = heads.first; head < heads.first + planes; ++head) {
      for (int i = first; i <= last; ++i) {
        for (int j = begin; j <= end; ++j) {
          const int kind =
              of_keys ? kind_of_block(problem, extent, head, i, j) : kind_of_block(problem, extent, head, j, i);
          found.any_pairs |= kind != empty_block;
          found.all_pairs &= kind == full_block;
          if (found.any_pairs && !found.all_pairs) return found;
        }
      }
    }
    return found;
  }
  // For a head, of the one block in which a tile lies and which for some head is not full.
  __device__ __forceinline__ int kind_if_not_full(int head, int tile) const {
    if (!problem.mask_blocks_strides.head || heads.count == 1) return partial_block;
    const int block = tile * size / (of_keys ? mask_block_keys : mask_block_rows);
    return of_keys ? kind_of_block(problem, extent, head, first, block)
                   : kind_of_block(problem, extent, head, block, first);
  }
};
template <int size>
struct BlockTiles<size, false> {
  __device__ __forceinline__ BlockTiles(const Problem&, const Extent&, const Heads&, bool, int, int) {}
  __device__ __forceinline__ int kind_if_not_full(int, int) const { return full_block; }
  __device__ __forceinline__ BlockKinds kinds(int) const { return {true, true}; }
};

}  // namespace jax_flash
