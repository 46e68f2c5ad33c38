// What is done to the scores of one query head, whatever the layout of the accumulators that hold them: score_rows.cuh
// has rows of query along their rows, score_columns.cuh keys.
#pragma once

#include "cuda/device/dropout.cuh"
#include "cuda/device/mask.cuh"
#include "cuda/device/scores.cuh"

namespace jax_flash {

// Whether what functions keep may be asked apart from ranges: they drop pairs, and nothing changes scores. What they
// load for every pair is to be loaded earlier (a tree of drafts took a fifth longer).
constexpr bool functions_apart = has_functions && !loads_pairs && !modifies_scores && !has_mask && !tests_keys;

struct HeadScores {
  const Problem& problem;
  const Extent& extent;
  Keep keep;
  Scores modified;
  Plane<Bias> biases;
  Plane<bool> masks;
  Dropout dropout;
  float scale_log2;  // of scores that nothing modifies, to units of log2; Scores::logit has its own

  __device__ __forceinline__ HeadScores(const Problem& problem, const Extent& extent, const Band& band, int head,
                                        float scale)
      : problem(problem),
        extent(extent),
        keep{{problem, extent, head}, {problem, extent, head}, problem, extent, band},
        modified(problem, extent, head, scale),
        biases(static_cast<const Bias*>(problem.bias), problem.bias_strides, extent.batch, head),
        masks(problem.mask, problem.mask_strides, extent.batch, head),
        dropout(problem, extent, head),
        scale_log2(modifies_scores ? 1.f : scale * kLog2e) {}

  // What depends on the head.
  __device__ __forceinline__ void enter(int head) {
    keep.enter(head);
    modified.enter(head);
    biases = {static_cast<const Bias*>(problem.bias), problem.bias_strides, extent.batch, head};
    masks = {problem.mask, problem.mask_strides, extent.batch, head};
    dropout.enter(problem, extent, head);
  }
};

// lse of a row in the backward pass, as it is subtracted from logits before exp2. Infinite for rows beyond the end, and
// for those whose keys are all masked: their weights are 0 then, and not exp2(-inf + inf).
JAX_FLASH_DEVICE float backward_lse(float lse, bool valid) {
  return valid && lse != -JAX_FLASH_INFINITY ? probability_lse(lse) : JAX_FLASH_INFINITY;
}

// A weight that is dropped is kept with its sign turned: dS wants it, dV does not.
JAX_FLASH_DEVICE bool is_dropped(float p) { return __float_as_int(p) < 0; }
JAX_FLASH_DEVICE float weight_of(float p) { return with_dropout_rate ? fabsf(p) : p; }

// dS = P * (dP - delta), of a raw product dO V^T. dp_factor makes dP of it where arrays are scaled, dropout_factor is
// that of the weights that are kept.
JAX_FLASH_DEVICE float derived(float p, float product, float delta, float dp_factor, float dropout_factor) {
  float dp = has_descale ? product * dp_factor : product;
  if constexpr (with_dropout_rate) dp = is_dropped(p) ? 0.f : dp * dropout_factor;
  return weight_of(p) * (dp - delta);
}

}  // namespace jax_flash
