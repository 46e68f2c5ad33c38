// Problem: what a kernel reads at run time. Compiled by the host compiler and by NVRTC, so it includes nothing but
// the field list.
#pragma once

#include "options.h"

namespace jax_flash {

enum class DType { f16, bf16, f32, f64 };
// The passes. backward_dq and backward_bias are parts of backward; forward_split_kv is a forward whose keys are split
// over blocks, forward_single_tile one for a single tile of keys and columns. scale makes float16 arrays of float32
// ones for the others (scaling.h). The kernel of a pass is jax_flash_<pass>, in <family>/<pass>.cu.
#define JAX_FLASH_PASSES(PASS) \
  PASS(forward)                \
  PASS(backward) PASS(backward_dq) PASS(backward_bias) PASS(forward_split_kv) PASS(forward_single_tile) PASS(scale)
enum class Pass {
#define JAX_FLASH_PASS(name) name,
  JAX_FLASH_PASSES(JAX_FLASH_PASS)
#undef JAX_FLASH_PASS
};

// The most slices into which the keys of a head are split.
constexpr int kMostSlices = 64;

// The most arrays that the functions of a call capture.
constexpr int kMostCaptured = 16;

// A [batch, length, heads, head_dim] array whose head_dim is contiguous. Strides are in elements.
struct Tensor {
  void* data;
  long long batch_stride;
  long long row_stride;
  long long head_stride;
};

// Strides in elements of a [batch, sequences, heads, rows, columns] array; 0 where a dimension is broadcast.
struct BlockStrides {
  long long batch;
  long long sequence;
  long long head;
  long long row;
  long long column;
};

// Strides in elements of a [batch, heads, rows, columns] array; 0 where a dimension is broadcast.
struct Strides {
  long long batch;
  long long head;
  long long row;
  long long column;
};

struct Problem {
  Options options;

  int batch;           // B >= 1
  int q_length;        // T >= 1, of a batch entry, with all its sequences
  int kv_length;       // S >= 1
  int q_heads;         // N, a multiple of kv_heads
  int kv_heads;        // K >= 1
  int kv_slices;       // forward_split_kv only: slices of the keys, 1 to kMostSlices
  int head_dim;        // H >= 1, of query and key
  int value_head_dim;  // V >= 1, of value and out

  Tensor q;    // [B, T, N, H]
  Tensor k;    // [B, S, K, H]
  Tensor v;    // [B, S, K, V]
  Tensor out;  // [B, T, N, V]; written by forward, read by backward on CPUs

  // Statistics are float, or double for float64 inputs, contiguous.
  void* lse;    // [B, N, T] natural logarithm; written by forward, read by backward
  void* delta;  // [B, N, T] rowsum(dout * out) - dlse; backward on GPUs only, see dlse

  Tensor dout;    // [B, T, N, V], backward only
  Tensor dq;      // [B, T, N, H], backward only
  Tensor dk;      // [B, S, K, H], backward only
  Tensor dv;      // [B, S, K, V], backward only
  void* scratch;  // see the kernel that uses it; null if it needs none

  Strides bias_strides;
  Strides dbias_strides;  // dbias may have batch and heads that bias broadcasts: the caller sums over them
  Strides mask_strides;
  // Rows of these are the rows, keys or blocks that they are of, columns the elements of an interval or a record.
  Strides kv_intervals_strides;
  Strides q_intervals_strides;
  Strides kv_interval_ranges_strides;
  Strides q_interval_ranges_strides;

  // The operands, null if absent, and the gradients of the trainable ones: float, or double for float64 inputs. The
  // pass adds to these, so they are zeroed before it.
#define JAX_FLASH_CONSTANT(type, name)
#define JAX_FLASH_FEATURE(type, name, absent)
#define JAX_FLASH_POINTER(type, name, dims) const type* name;
#define JAX_FLASH_POINTERS(type, name, dims) \
  const type* name;                          \
  void* d##name;
  JAX_FLASH_OPTIONS(JAX_FLASH_CONSTANT, JAX_FLASH_CONSTANT, JAX_FLASH_FEATURE, JAX_FLASH_POINTER, JAX_FLASH_POINTERS)
#undef JAX_FLASH_POINTERS
#undef JAX_FLASH_POINTER
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_CONSTANT

  // backward on GPUs only: the shares into which the query heads of a key head are split, a divisor of their number;
  // each share has blocks of its own. With more than one, each leaves its sums of dK and dV in group_sums, and
  // jax_flash_sum_splits adds these up. In a pass that adds to dQ atomically all shares add to one sum there instead,
  // which is zeroed first. In one that adds in order they do so by turns, to sums_of_group sums.
  int group_splits;  // >= 1
  // That of the options, for kernels without a register for what a conversion gives. Here, since before `batch` it
  // moves all that follows, and a forward of sm_75 spills.
  float scale;
  void* group_sums;  // float [B, K, sums_of_group, S, H + V]; null where group_splits is 1 and `halved` 0

  // Hopper's backward: a block zeroes that part of the sums of dQ which comes dq_ahead after the one of its number;
  // with 0 none (cuda/sm90a/dq_sums.cuh).
  int dq_ahead;
  // There: 1 if two blocks share the rows of what is one block otherwise, and meet in group_sums, float
  // [blocks, block_kv, H + V] in the order of the registers; else 0.
  int halved;

  void* dlse;  // [B, N, T]; backward on CPUs only, where the kernels make delta of it and of out

  BlockStrides mask_blocks_strides;
  // The arrays that score and mask functions captured; null beyond them. The functions' source knows shapes and dtypes.
  const void* captured[kMostCaptured];
  // backward only: the gradients of those that have one, in their order, and how many floats they take: float, or with
  // exact_sums [elements, kSumDigits + 1] of 64 bits. The pass adds to them.
  void* dcaptured[kMostCaptured];
  long long dcaptured_elements[kMostCaptured];

  // Hopper's backward that adds dQ in order: the first head, in the order of the grid, whose blocks walk over their
  // rows downwards, the longest first (cuda/device/schedule.cuh): all of them where blocks have several query heads.
  int downwards_from;
  int downwards_group;  // of so many of these heads the blocks are interleaved

  int heads_of_share;  // q_heads / (kv_heads * group_splits), for kernels that have no registers to divide
  int sums_of_group;   // of dK and dV, for each key head: from 1 to group_splits (above)
};

}  // namespace jax_flash
