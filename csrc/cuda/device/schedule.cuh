// Which block of which head a thread block takes, in a flat grid.
#pragma once

#include "cuda/device/mask.cuh"

namespace jax_flash {

struct Work {
  int block;  // of rows or keys, in its batch entry
  int head;
  int batch;
  int order;  // of the head of the batch entry, in the order of the grid
};

// A block of the head that is the `order`-th of all. Batch entries that share bias or mask read the same parts of it at
// about the same time.
JAX_FLASH_DEVICE Work work_at(int block, int order, int heads, int batch) {
  if (has_bias || has_mask) return {block, order / batch, order % batch, order};
  return {block, order % heads, order / heads, order};
}

constexpr int row_bytes = (head_dim + value_head_dim) * sizeof(Element);  // of two arrays
// What the rows of a group of heads may take of L2, and what a row takes.
struct RowsInL2 {
  int group_bytes = kGroupBytes;
  int row_bytes = jax_flash::row_bytes;
};

// Of an ordered grid: the first head whose blocks walk over their rows downwards, and of how many such heads the blocks
// are interleaved.
struct Downwards {
  int from = 0;
  int group = 1;
};

// Whether the hardware hands out blocks as others end, or as many as fit at once walk over the items of work.
// `ordered`: the first, where blocks of a head add to the same sums one after the other.
enum class Grid { block_an_item, persistent, ordered };

// Blocks start in the order of their index. Without causal all are alike, and those of one head stand together, so that
// they share what they read in L2. Under causal they are not: the longest, `block` 0 here, have to go first, or the
// last of them leaves the GPU idle. So groups of heads are taken one after the other, and in a group the longest blocks
// of all its heads first. A group is as many heads as fit in a part of L2 with the `length` rows that each reads; a
// backward that adds dQ has its own part (backward_block.cuh). Of 4, 8, 16, 32 MB and no limit, 32 did best on an H200
// (60 MB of L2): at head_dim 128 forward 356 TFLOP/s at S 4096, against 325, 328, 352 and 357, and at S 1024 271
// against 255, 258, 267 and 269; without groups but a head after the other 324 and 252, without a limit the backward at
// head_dim 256 and S 1024 fell from 166 to 141.
//
// The last group under causal has more heads where the others have few (layout.h): it takes about as long as its
// longest block, which is twice the average. Without that the multiprocessors are idle for 5% of a backward of 16384
// rows.
//
// A block mask may be like causal or not. Of its heads only the last make a group, of some two blocks a multiprocessor:
// a group of all made the backward of blocks kept at random 25% slower.
//
// Of a persistent grid block i takes items i, i + blocks, and so on. There the longest-first order would give some
// blocks the longer items of every round; so the number of groups is even, and every other one goes the other way, the
// last one longest first. Counted in tiles, 95 to 99.8% of what the blocks could do (S 1024 to 16384, head_dim 64 to
// 256).
//
// Blocks of an ordered grid walk over their rows upwards, each behind the one before it: so those stand first that
// begin with the last rows, where something bounds the keys of a row to the right. Under causal these are the shortest,
// so that the last ones would be the longest: blocks of the last heads go the other way, in groups of their own, and
// those of all heads where each has several query heads, whose rows L2 would not hold else. And heads are interleaved
// even where all blocks are alike, so that some time lies between blocks of the same head.
template <Grid grid = Grid::block_an_item>
JAX_FLASH_DEVICE Work work_of(int index, int blocks, int heads, int batch, int length, const RowsInL2& rows = {},
                              const Downwards& downwards = {}) {
  int block = index % blocks;
  int head = index / blocks;
  const int all = heads * batch;
  int group = heads_of_group(option_causal, rows.group_bytes, rows.row_bytes, all, blocks, length);
  if (grid == Grid::ordered && !option_causal) group = ordered_group(all, length);
  if (grid == Grid::persistent) group = ceil_div(all, 2 * ceil_div(all, 2 * group));
  const int grouped = option_causal || grid == Grid::ordered ? 0 : all - group;  // the first head in a group
  // The first head of the last group.
  const int last = grid == Grid::ordered                          ? downwards.from
                   : option_causal && grid == Grid::block_an_item ? last_group(group, all, blocks)
                                                                  : all;
  if ((option_causal || has_mask_blocks || grid == Grid::ordered) && head >= grouped) {
    const bool among_last = head >= last, downward = grid == Grid::ordered && among_last;
    if (downward) group = downwards.group;
    const int begin = downward ? last : grouped, end = among_last ? all : last;
    // Else the last ones are one group, of which this knows without a division: with it the forward spills 12 bytes.
    const bool one_group = among_last && !downward;
    const int first = one_group ? last : head - (head - begin) % group;
    const int members = one_group ? all - last : at_most(group, end - first);
    const int within = index - first * blocks;
    block = within / members;
    if (grid == Grid::ordered && bounded_right && head < last) block = blocks - 1 - block;
    if (grid == Grid::persistent && (ceil_div(all, group) - 1 - first / group) % 2 != 0) block = blocks - 1 - block;
    head = first + within % members;
  }
  return work_at(block, head, heads, batch);
}

}  // namespace jax_flash
