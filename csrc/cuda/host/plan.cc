#include "cuda/host/plan.h"

#include <cstdlib>
#include <optional>
#include <string>

#include "cuda/kernel_traits.h"
#include "cuda/tiles.h"

namespace jax_flash::cuda {
namespace {

// Whether the offsets of all elements fit in an int.
bool fits_int(const Problem& p) {
  auto fits = [&](const Tensor& t, int64_t rows, int64_t heads, int64_t columns) {
    const int64_t last = (p.batch - 1) * t.batch_stride + (rows - 1) * t.row_stride + (heads - 1) * t.head_stride;
    return last + columns <= std::numeric_limits<int>::max();
  };
  return fits(p.q, round_up(p.q_length, 16), p.q_heads, p.head_dim) &&
         fits(p.k, round_up(p.kv_length, 16), p.kv_heads, p.head_dim) &&
         fits(p.v, round_up(p.kv_length, 16), p.kv_heads, p.value_head_dim) &&
         fits(p.out, round_up(p.q_length, 16), p.q_heads, p.value_head_dim);
}

// Whether tiles of kTallRows rows take less time, by 2 to 4%. Of 1,024 rows they took up to 8% longer, under causal of
// 4,096 rows up to 2%, and of 4,096 rows with few blocks up to 6%.
bool wants_tall_tiles(const Problem& p) {
  const bool served = has_tall_tiles(p.options, p.head_dim) && std::max(p.head_dim, p.value_head_dim) <= 128;
  const int64_t blocks = ceil_div(p.kv_length, 128) * p.kv_heads * p.batch;
  return served && p.q_length >= (p.options.causal ? 16384 : blocks > kMultiprocessors ? 4096 : 8192);
}

}  // namespace

// Blocks that add dQ in order took up to 6% longer with them: each waits for those before it. And beside descaling or
// listed keys ptxas orders no product behind another one.
bool has_tall_tiles(const Options& o, int head_dim) {
  return only_causal(o) && head_dim > 64 && !(o.has_descale || o.separate_dq);
}

// Up to head_dim 64 Hopper's blocks of the forward of 192 rows make 557 TFLOP/s and those of 128 rows 485; but with few
// blocks smaller ones finish sooner.
int rows_of_blocks(Pass pass, const Problem& p) {
  if (p.options.highest_precision || !is_plain(p.options)) return 0;
  if (pass == Pass::backward) return wants_tall_tiles(p) ? kTallRows : 0;
  if (pass != Pass::forward || std::max(p.head_dim, p.value_head_dim) > 64) return 0;
  auto time = [&](int64_t rows, double rate) {
    const int64_t blocks = ceil_div(p.q_length, rows) * p.q_heads * p.batch;
    const int64_t whole = rows * p.kv_length;  // a block's scores
    // Under causal a block keeps half of them on average, the longest block all, and the longest go first.
    const int64_t scores = p.options.causal ? std::max(whole, blocks * (whole + rows * rows) / 2 / kMultiprocessors)
                                            : whole * ceil_div(blocks, kMultiprocessors);
    return scores / rate;
  };
  return time(kShortRows, 485) < time(192, 557) ? kShortRows : 0;
}

namespace {

int64_t extent(int64_t stride, int64_t size) { return stride ? size : 1; }

bool is_single_tile(const Problem& p, const SplitKvPlan& split_kv) {
  const int64_t blocks = ceil_div(p.q_length, 16) * p.q_heads * p.batch;
  return split_kv.rows && p.kv_length <= kSingleTileKeys && blocks <= kMultiprocessors && fits_int(p);
}

// The elements that a slice of the keys leaves for jax_flash_combine.
int64_t slice_elements(const Problem& p) {
  return jax_flash::slice_elements(int64_t{p.batch} * p.q_heads * p.q_length, p.value_head_dim);
}

}  // namespace

ForwardPlan plan_of(Pass pass, const Problem& problem, int64_t scratch_elements) {
  if (pass != Pass::forward) return {};
  SplitKvPlan split_kv = plan_split_kv(problem);
  if (split_kv.slices > 1) {
    split_kv.slices =
        static_cast<int>(std::clamp<int64_t>(scratch_elements / slice_elements(problem), 1, split_kv.slices));
  }
  return {split_kv, is_single_tile(problem, split_kv)};
}

int64_t bias_planes(const Problem& p) {
  return extent(p.dbias_strides.batch, p.batch) * extent(p.dbias_strides.head, p.q_heads);
}

int64_t bias_elements(const Problem& p) {
  return bias_planes(p) * extent(p.dbias_strides.row, p.q_length) * extent(p.dbias_strides.column, p.kv_length);
}

// Tall tiles are added as a whole.
int64_t dq_tiles(const Problem& p) {
  const int tall = rows_of_blocks(Pass::backward, p);
  return tall ? ceil_div(p.q_length, tall) * (tall / kDqRows) : blocks_of(p, p.q_length, kDqRows);
}

int64_t dq_sums(const Problem& p) { return jax_flash::dq_sums(int64_t{p.batch} * p.q_heads, dq_tiles(p), p.head_dim); }

int64_t dq_scratch(const Problem& p) {
  const int64_t heads = int64_t{p.batch} * p.q_heads;
  const int64_t turns = p.options.ordered_dq ? heads * (dq_tiles(p) + blocks_of(p, p.kv_length, kTurnKeys)) : 0;
  return dq_elements(heads, dq_tiles(p), p.head_dim, turns);
}

namespace {

// Of a backward that adds dQ: its heads and the blocks of each, and under causal how many heads make a group, and which
// is the first of the last group (device/schedule.cuh). Too many blocks for an int are refused by who launches them.
struct BlocksOfHeads {
  int heads, blocks, group = 1, last = 0;

  static std::optional<BlocksOfHeads> of(const Problem& p, int block_keys) {
    const int64_t heads = int64_t{p.batch} * p.kv_heads * p.group_splits;
    const int64_t blocks = blocks_of(p, p.kv_length, block_keys);
    if (heads * blocks > std::numeric_limits<int>::max()) return {};
    BlocksOfHeads found{static_cast<int>(heads), static_cast<int>(blocks)};
    if (p.options.causal) {
      const int bytes = row_bytes_with_sums(2 * (p.head_dim + p.value_head_dim), p.head_dim);
      found.group = heads_of_group(true, kGroupBytesOfSums, bytes, found.heads, found.blocks, p.q_length);
      found.last = last_group(found.group, found.heads, found.blocks);
    }
    return found;
  }
};

}  // namespace

int zeroed_before(const Problem& p, int block_keys) {
  const auto of = BlocksOfHeads::of(p, block_keys);
  if (!of) return 0;
  // All parts of the heads whose blocks are interleaved must be zero before the first of these adds. Zeroing takes some
  // time, in which some more blocks start.
  constexpr int64_t kSpare = 64;
  int64_t interleaved = 1;
  if (p.options.causal) {
    interleaved = std::max(of->group, of->heads - of->last);
  } else if (p.options.has_mask_blocks) {
    const int row = 2 * (p.head_dim + p.value_head_dim);
    interleaved = heads_of_group(false, kGroupBytes, row, of->heads, of->blocks, p.q_length);
  }
  const int64_t ahead = interleaved * of->blocks + kSpare;
  return ahead < int64_t{of->heads} * of->blocks ? static_cast<int>(ahead) : 0;
}

int downwards_from(const Problem& p, int block_keys) {
  const auto of = BlocksOfHeads::of(p, block_keys);
  if (!of) return 0;
  // Of blocks that share rows the other half would wait for the end of the half of the block before.
  if (!p.options.causal || bounded_left(p.options) || p.halved) return of->heads;
  // Blocks that go upwards are as far apart as they have tiles less, which is too far for L2 with several heads each.
  if (p.q_heads > p.kv_heads * p.group_splits) return 0;
  // Where all blocks run at once or nearly, the longest of one half of the heads run beside the shortest of the other.
  return std::max(of->last, ceil_div(of->heads, 2));
}

int downwards_group(const Problem& p) {
  // Blocks of a key head that walk downwards are in the same rows, which stay in L2 for all of them if they start close
  // to one another. Twice as many tiles of 64 rows took up to 10% longer, four times as many up to 34% (H200).
  constexpr int64_t kTiles = 2048, kFewest = 4;
  const int64_t shares = int64_t{p.kv_heads} * p.group_splits, heads = p.batch * shares - p.downwards_from;
  const int64_t tiles = std::max<int64_t>(1, ceil_div(p.q_length, 64) * (p.q_heads / shares));
  // Evenly, or the longest blocks of a small last group would end long after all others.
  return heads < 1 ? 1 : ceil_div(heads, ceil_div(heads, std::max(kTiles / tiles, kFewest)));
}

int64_t slope_scratch(const Problem& p) {
  return p.options.has_dalibi_slopes ? int64_t{p.batch} * p.q_heads * blocks_of(p, p.kv_length, kSlopeKeys) : 0;
}

// Whether the call needs an accumulator of dQ.
bool accumulates_dq(const Problem& p) {
  return p.options.ordered_dq || !(p.options.separate_dq || p.options.highest_precision);
}

// Of the scratch of a backward, what begins as zeros.
int64_t zeroed_scratch(const Problem& p) { return (accumulates_dq(p) ? dq_scratch(p) : 0) + slope_scratch(p); }

// Elements of float in Problem::group_sums.
int64_t sums_of_splits(const Problem& p, int64_t splits) {
  return splits * p.batch * p.kv_heads * p.kv_length * (p.head_dim + p.value_head_dim);
}
// Whether these fit in dq, which is still unused then.
bool sums_fit_dq(const Problem& p, int64_t splits) {
  const int64_t elements = int64_t{p.batch} * p.q_length * p.q_heads * p.head_dim;
  return sums_of_splits(p, splits) * 4 <= elements * (p.options.has_descale ? 4 : 2);
}

constexpr int64_t kUnlimitedScratch = std::numeric_limits<int64_t>::max();

// The cost of summing shares, in tiles of rows: 128 KB a block that are written and read back, and a launch.
constexpr int64_t kSumSteps = 8;

// The most heads of a group that a block should walk over. Under causal blocks start and end at different times: so L2
// would have to hold the rows of all heads at once, and the longest of few blocks end late. Of groups of more than 4
// heads a backward took up to 1.5 times as long for either, at any length; and 4 heads are too many of long rows.
// Blocks are not few if some are wanting for `enough`: 256 of 4 heads and 4096 rows took 1.18 times as long in shares.
int64_t heads_together(const Problem& p, int64_t blocks, int64_t keys, int64_t enough) {
  const Options& o = p.options;
  const int64_t group = p.q_heads / p.kv_heads, length = p.q_length / o.sequences;
  const bool all_rows = !bounded_left(o) && !skips_tiles(o);
  if (!o.causal || !all_rows || length < 64 * kSumSteps) return group;
  // Of blocks of 128 keys; larger ones read rows more seldom.
  const int row_bytes = row_bytes_with_sums(2 * (p.head_dim + p.value_head_dim), p.head_dim);
  const int64_t bytes = length * row_bytes * 128 / keys;
  if (group <= 4 && group * bytes <= (10 * blocks < 9 * enough ? 1 : 2) * kGroupBytesOfSums) return group;
  return bytes > kGroupBytesOfSums ? 1 : 2;
}

// The keys by which blocks are counted: those of Hopper's, and up to head_dim 64 of two of them, by which shares of
// groups were timed. Tile rows with fewer keys have more blocks than are counted by it.
int keys_of_block(const Problem& p) {
  const int largest = std::max(p.head_dim, p.value_head_dim);
  return largest <= 64 ? 256 : largest <= 128 ? 128 : 64;
}

int64_t blocks_of_keys(const Problem& p, int block_keys) {
  return int64_t{blocks_of(p, p.kv_length, block_keys)} * p.kv_heads * p.batch;
}
// Where all blocks fit on half of the GPU at once.
bool halves_rows(const Problem& p, int splits, int block_keys) {
  const Options& o = p.options;
  const int64_t rows = int64_t{p.q_length} * (p.q_heads / p.kv_heads);
  if (splits > 1 || o.has_cu_q_lengths || skips_tiles(o) || rows < 64 * kSumSteps) return false;
  return 2 * blocks_of_keys(p, block_keys) <= kMultiprocessors;
}
int64_t sums_of_halves(const Problem& p, int block_keys) {
  return blocks_of_keys(p, block_keys) * block_keys * (round_up(p.head_dim, 8) + round_up(p.value_head_dim, 8));
}

Shares shares_of_groups(const Problem& p, bool adds_dq, int64_t scratch_elements) {
  const int64_t group = p.q_heads / p.kv_heads;
  const int keys = keys_of_block(p);
  const int64_t blocks = blocks_of_keys(p, keys);
  const int64_t tiles =
      ceil_div(p.q_length, int64_t{64} * p.options.sequences);  // of query rows, for each query head of a block
  // Under causal the longest block is twice as long as the average one, and should end with the others.
  const int64_t enough = (p.options.causal ? 2 : 1) * kMultiprocessors;
  // The length of the critical path, in tiles of rows.
  auto steps = [&](int64_t splits) {
    const int64_t longest = tiles * (group / splits), all = blocks * splits;
    const int64_t loop = p.options.causal ? std::max(longest, longest * all / enough) : longest * ceil_div(all, enough);
    return loop + (splits > 1 ? kSumSteps : 0);
  };
  auto fits = [&](int64_t sums) {
    // The sums may take as much as an accumulator, but no more than that.
    const int64_t elements = sums_of_splits(p, sums);
    return (!adds_dq && sums_fit_dq(p, sums)) ||
           (elements <= dq_scratch(p) && whole_fours(zeroed_scratch(p)) + elements <= scratch_elements);
  };
  const bool any_order = adds_dq && !p.options.ordered_dq;
  const int64_t heads = any_order ? heads_together(p, blocks, keys, enough) : group;
  int64_t best = 1;
  for (int64_t splits = 2; splits <= group && (blocks * best < enough || group > heads * best); ++splits) {
    if (group % splits != 0) continue;
    if (!fits(adds_dq ? 1 : splits)) break;
    if (group > heads * best || 10 * steps(splits) <= 9 * steps(best)) best = splits;
  }
  // In order they wait for one another, the less the more sums there are.
  int64_t sums = any_order ? 1 : best;
  while (sums > 1 && !fits(sums)) --sums;
  return {static_cast<int>(best), static_cast<int>(sums)};
}

SplitKvPlan plan_split_kv(const Problem& p) {
  const char* wanted_at_all = std::getenv("JAX_FLASH_SPLIT_KV");
  if (wanted_at_all && std::string(wanted_at_all) == "0") return {0, 1};
  const bool packed = p.options.has_cu_q_lengths;
  const int64_t group = packed ? 1 : p.q_heads / p.kv_heads, sets = int64_t{p.batch} * (p.q_heads / group);
  const int64_t rows = p.q_length * group;  // rows that may share a block
  auto blocks = [&](int64_t size) { return ceil_div(rows, size) * sets; };
  // If there are more rows than a block has, the other kernels are better as soon as their blocks occupy two fifths of
  // the multiprocessors.
  const int64_t many = blocks_of(p, p.q_length, 128) * p.q_heads * p.batch;
  if (rows > 64 && 5 * many > 2 * kMultiprocessors) return {0, 1};
  const bool small = p.kv_length <= 1024;
  const int block = rows <= 32 || (small && blocks(16) <= kMultiprocessors) ? 16 : 64;
  // As many slices of 256 keys or more as fill the multiprocessors. Twice as many took 1.5 times as long (T 64, S 8192,
  // 32 heads), because of their partial results in scratch. Up to 1024 keys the second launch costs what slices save.
  const int64_t slices = small ? 1 : std::min(kMultiprocessors / blocks(block), int64_t{p.kv_length} / 256);
  return {block, static_cast<int>(std::clamp<int64_t>(slices, 1, kMostSlices))};
}

bool is_single_tile(const Problem& p) { return is_single_tile(p, plan_split_kv(p)); }

// FLOP, some 0.3 ms: zeroing the counter takes 2 us.
constexpr double kLongCall = 2e11;

int64_t forward_scratch(DType, const Problem& p) {
  const SplitKvPlan split_kv = plan_split_kv(p);
  if (split_kv.rows) return split_kv.slices == 1 ? 0 : split_kv.slices * slice_elements(p);
  // Hopper's blocks count their items of work where these differ in length by what is in arrays, and in long calls.
  // There some blocks may begin late, as their multiprocessors send to other GPUs: of items dealt out beforehand theirs
  // were the last, and a call beside a send took up to twice as long.
  const Options& o = p.options;
  const double pairs = double(p.batch) * p.q_heads * p.q_length * p.kv_length / (o.causal ? 2 : 1);
  return skips_tiles(o) || o.has_cu_q_lengths || 2 * pairs * (p.head_dim + p.value_head_dim) > kLongCall;
}

int64_t backward_scratch(DType, const Problem& p) {
  const int64_t zeros = zeroed_scratch(p);
  const bool adds_dq = accumulates_dq(p);
  const auto [splits, sums] = shares_of_groups(p, adds_dq, kUnlimitedScratch);
  const int keys = keys_of_block(p);
  if (adds_dq && halves_rows(p, splits, keys)) {
    return whole_fours(zeros + blocks_of_keys(p, keys)) + sums_of_halves(p, keys);
  }
  if (splits == 1 || (!adds_dq && sums_fit_dq(p, splits))) return zeros;
  return whole_fours(zeros) + sums_of_splits(p, sums);
}

int group_splits(const Problem& p) { return shares_of_groups(p, accumulates_dq(p), kUnlimitedScratch).splits; }

}  // namespace jax_flash::cuda
