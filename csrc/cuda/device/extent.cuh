// The extents of rows and keys that attend to each other: a batch entry, or one sequence of a packed one.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

constexpr bool packed = has_cu_q_lengths;

// Rows of a batch entry: those that are read, and those that results are written for, zeros for the rest.
struct Rows {
  int first;
  int length;
  int stored;
};

// Positions, the option's per-sequence arrays and dropout count from the first row of an extent.
struct Extent {
  int batch;
  int index;  // batch * sequences + sequence, of arrays per sequence
  Rows q;
  Rows kv;
};

// Sequence `sequences` is what follows the last one: padding, which attends to nothing.
JAX_FLASH_DEVICE Extent extent_of(const Problem& problem, int batch, int sequence) {
  if constexpr (packed) {
    const int sequences = problem.options.sequences;
    const int* q = problem.cu_q_lengths + static_cast<i64>(batch) * (sequences + 1) + sequence;
    const int* kv = problem.cu_kv_lengths + static_cast<i64>(batch) * (sequences + 1) + sequence;
    if (sequence == sequences) {
      return {batch, 0, {*q, 0, problem.q_length - *q}, {*kv, 0, problem.kv_length - *kv}};
    }
    const int rows = q[1] - q[0], keys = kv[1] - kv[0];
    return {batch, batch * sequences + sequence, {q[0], rows, rows}, {kv[0], keys, keys}};
  } else {
    const int rows = has_q_lengths ? at_most(problem.q_lengths[batch], problem.q_length) : problem.q_length;
    const int keys = has_kv_lengths ? at_most(problem.kv_lengths[batch], problem.kv_length) : problem.kv_length;
    return {batch, batch, {0, rows, problem.q_length}, {0, keys, problem.kv_length}};
  }
}

// The list of the rows of K and V that are keys of a batch entry (kv_rows of options.h), and the row of one of them.
static_assert(!has_kv_rows || (has_kv_lengths && !packed), "kept keys come first, and are counted");
constexpr bool loads_by_list = has_kv_rows && !has_descale;  // scaled rows stand in the list's order (scaling.h)
JAX_FLASH_DEVICE const int* listed_rows(const Problem& problem, int batch) {
  return problem.kv_rows + static_cast<i64>(batch) * problem.kv_length;
}
JAX_FLASH_DEVICE int row_of_key(const Problem& problem, int batch, int key) {
  return has_kv_rows ? listed_rows(problem, batch)[at_most(key, problem.kv_length - 1)] : key;
}

JAX_FLASH_DEVICE int blocks_of(const Problem& problem, int length, int size) {
  return blocks_of(packed, problem.options.sequences, length, size);
}

// The sequence of block `block` of blocks_of, which becomes the block within it. Sequence d begins at block
// cu[d] / size + d: every sequence has as many blocks there as it needs, whatever the lengths.
JAX_FLASH_DEVICE int sequence_of(const Problem& problem, const int* cu_lengths, int batch, int size, int& block) {
  if constexpr (!packed) return 0;
  const int sequences = problem.options.sequences;
  const int* cu = cu_lengths + static_cast<i64>(batch) * (sequences + 1);
  int low = 0, high = sequences;  // the last sequence that begins at or before `block`
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cu[middle] / size + middle <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  block -= cu[low] / size + low;
  return low;
}

}  // namespace jax_flash
