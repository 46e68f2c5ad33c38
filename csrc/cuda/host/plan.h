// How a call is divided into blocks, slices of the keys and shares of query heads, and how much scratch that takes:
// functions of shape and options alone, so that a call can be lowered on another machine than it runs on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/host/cuda.h"
#include "layout.h"

namespace jax_flash::cuda {

inline int64_t whole_fours(int64_t x) { return round_up(x, 4); }

// The number of blocks of `size` rows in a batch entry.
inline int64_t blocks_of(const Problem& p, int64_t length, int size) {
  return jax_flash::blocks_of(p.options.has_cu_q_lengths, p.options.sequences, length, size);
}

// block_q of the forward, for families that have short blocks, and of the backward, for those that have tall tiles; 0:
// that of the table's first row.
constexpr int kShortRows = 128, kTallRows = 80;
int rows_of_blocks(Pass pass, const Problem& p);
// Whether a backward has tall tiles in long calls of these options.
bool has_tall_tiles(const Options& options, int head_dim);

// The scratch limits the number of slices: if a call was lowered for another batch size or in another environment, it
// may be smaller than forward_scratch(), or missing.
ForwardPlan plan_of(Pass pass, const Problem& problem, int64_t scratch_elements);

// The sizes of dbias: [batch, heads] planes of [rows, columns], and all its elements.
int64_t bias_planes(const Problem& p);
int64_t bias_elements(const Problem& p);

// Tiles of kDqRows rows of dQ in a batch entry.
int64_t dq_tiles(const Problem& p);
// The elements of the accumulator of dQ alone and with its counters, and of the slopes' sums that follow it.
int64_t dq_sums(const Problem& p);
int64_t dq_scratch(const Problem& p);
// Problem::dq_ahead: how many parts of dQ's sums a kernel zeroes before Hopper's backward; 0: all, and it needs none.
int zeroed_before(const Problem& p, int block_keys);
// Problem::downwards_from, of a problem that has all else.
int downwards_from(const Problem& p, int block_keys);
// Likewise Problem::downwards_group.
int downwards_group(const Problem& p);
int64_t slope_scratch(const Problem& p);

// Elements of float in Problem::group_sums, and whether these fit in dq, which is still unused then.
int64_t sums_of_splits(const Problem& p, int64_t splits);
bool sums_fit_dq(const Problem& p, int64_t splits);

// Of blocks of `block_keys` keys, which own the keys of a share of `splits` of each group: how many there are, whether
// two of Hopper's share the rows of one (Problem::halved), and the elements of float in which they meet.
int64_t blocks_of_keys(const Problem& p, int block_keys);
bool halves_rows(const Problem& p, int splits, int block_keys);
int64_t sums_of_halves(const Problem& p, int block_keys);

// The shares that the query heads of a key head are split into, and the sums that these have of dK and dV: one each in
// a pass without dQ, one for all where `adds_dq`, and in between where that adds in order. `scratch_elements`: the size
// of the call's whole scratch.
struct Shares {
  int splits, sums;
};
Shares shares_of_groups(const Problem& p, bool adds_dq, int64_t scratch_elements);

}  // namespace jax_flash::cuda
