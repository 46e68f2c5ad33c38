// How a call is cut into blocks, slices and shares, and how much scratch that takes: functions of shape and options
// alone, so that a call can be lowered on another machine than it runs on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/host/cuda.h"
#include "layout.h"

namespace jax_flash::cuda {

inline int64_t whole_fours(int64_t x) { return round_up(x, 4); }

// Blocks of `size` rows in a batch entry.
inline int64_t blocks_of(const Problem& p, int64_t length, int size) {
  return jax_flash::blocks_of(p.options.has_cu_q_lengths, p.options.sequences, length, size);
}

// block_q of the forward's blocks where a family has short ones; 0: as the table's first row has it.
constexpr int kShortRows = 128;
int rows_of_blocks(Pass pass, const Problem& p);

// The available scratch limits into how many slices keys are split: where a call was lowered for another batch size or
// in another environment, that may be less than what forward_scratch() says, or nothing.
ForwardPlan plan_of(Pass pass, const Problem& problem, int64_t scratch_elements);

// Of dbias: [batch, heads] planes of [rows, columns], and all its elements.
int64_t bias_planes(const Problem& p);
int64_t bias_elements(const Problem& p);

// The accumulator of dQ, and behind it the sums for the gradient of slopes.
int64_t dq_scratch(const Problem& p);
int64_t slope_scratch(const Problem& p);

// Elements of float that shares of a group's query heads leave for jax_flash_sum_splits (Problem::group_sums), and
// whether these fit in dq, which nobody has written yet.
int64_t sums_of_splits(const Problem& p, int splits);
bool sums_fit_dq(const Problem& p, int splits);

// Into how many shares a group is split; `common`: all add to one sum, beside an accumulator of dQ. The scratch has
// `scratch_elements` elements for all that lies in it.
int shares_of_groups(const Problem& p, bool common, int64_t scratch_elements);

}  // namespace jax_flash::cuda
