// For calls without score and mask functions: what jax_flash/_functions/cuda.py prints for calls that have some.
#pragma once

#include "cuda/device/position.cuh"
#include "problem.h"

namespace jax_flash {

constexpr bool has_functions = false, has_score_function = false, has_mask_function = false, has_partial_mask = false;
constexpr bool captures_arrays = false;
constexpr bool has_long_score = false;  // a score function that takes many instructions
constexpr bool loads_pairs = false;     // whether functions load something for every pair
// Whether the derivative of a score by the score before differs from 1; whether gradients of captured arrays are
// wanted; and whether these depend on the score.
constexpr bool derives_scores = false, adds_captured = false, captured_take_score = false;
// Of the elements whose gradients are wanted, how many a head, a key, a row and a diagonal have that all its pairs
// read.
constexpr int captured_of_heads = 0, captured_of_keys = 0, captured_of_rows = 0, captured_of_diagonals = 0;
constexpr int captured_of_tables = 0;  // elements of small tables of which every pair of a head chooses one
// Whether a score function takes a value of h and q - kv alone that is slow to compute.
constexpr bool has_diagonal_value = false;
constexpr int function_batch = 0;  // batch entries of a call, where vmap has joined several; 0: all are one call's
constexpr int mask_block_rows = 1, mask_block_keys = 1;

static __device__ __forceinline__ float score_function(const Problem&, int, float score, int, int, int, int, int,
                                                       float&) {
  return score;
}
using DiagonalValue = float;
static __device__ __forceinline__ DiagonalValue diagonal_value(const Problem&, int, int, int, int) { return 0.f; }
static __device__ __forceinline__ float score_of_diagonal(const Problem&, int, float score, int, int, int, int, int,
                                                          DiagonalValue, float&) {
  return score;
}
static __device__ __forceinline__ bool mask_function(const Problem&, int, int, int, int, int, int) { return true; }
static __device__ __forceinline__ bool partial_mask(const Problem&, int, int, int, int, int, int) { return true; }
static __device__ __forceinline__ void add_to_captured(const Problem&, int, float, int, int, int, int, int, float,
                                                       float*, float*, float*, float*, float*, int) {}
static __device__ __forceinline__ void add_sums_of_head(const Problem&, int, int, int, int, int, int, const float*,
                                                        float*, int) {}
static __device__ __forceinline__ void add_sums_of_key(const Problem&, int, int, int, int, int, int, const float*,
                                                       float*, int) {}
static __device__ __forceinline__ void add_sums_of_row(const Problem&, int, int, int, int, int, int, const float*,
                                                       float*, int) {}
static __device__ __forceinline__ void add_sums_of_diagonal(const Problem&, int, int, int, int, int, int, const float*,
                                                            float*, int) {}
static __device__ __forceinline__ void add_sum_of_table(const Problem&, int, int, int, int, int, int, int, float) {}

}  // namespace jax_flash
