// Scores of which keys run along the rows of the accumulators, and rows of query along their columns, in the backward
// pass. An accumulator is of 16 keys, of which a lane has `key` and key + 8, and of n8 tiles of rows from `first_row`
// on, of which it has 8 n + lane % 4 * 2 and the one behind it; m more of them are of the 16 keys 16 * m on.
#pragma once

#include "cuda/device/backward_block.cuh"
#include "cuda/device/head_scores.cuh"

namespace jax_flash {

struct ScoreColumns : HeadScores {
  using HeadScores::HeadScores;

  // Scores become weights; d logit / d (scale * score) goes to `derivatives` where these are kept, or the product with
  // keeps_products. `lse_of(column)` are those of two rows, as backward_lse gives them; -inf may stand for a row whose
  // pairs are all masked, unless something modifies the scores. `rows_of(i)` is the interval of key
  // 8 * i + `key`, where keys have such. `told` is the kind of the tile's block of the block mask, unless that is
  // unread_block.
  template <bool masked, int m_tiles, int n_tiles, int n_derivatives, typename LseOf, typename RowsOf,
            typename Diagonals = DiagonalValues<8 * n_tiles, 16 * m_tiles, false>>
  __device__ __forceinline__ void weigh(FragmentC (&scores)[m_tiles][n_tiles],
                                        FragmentC (&derivatives)[m_tiles][n_derivatives], int first_row, int key,
                                        int lane, const LseOf& lse_of, const RowsOf& rows_of, int told = unread_block,
                                        const Diagonals& diagonals = {}) const {
    constexpr bool knows_kind = masked && in_one_block<8 * n_tiles, 16>;
    // One test for all ends, where that takes fewer registers (on sm_80 Graphormer's tables spill 96 bytes with it, 44
    // without; on sm_90 276 without).
    constexpr bool has_row_ends = masked && has_functions && (knows_kind || one_warp_loads);
    const Pairs<has_functions> pairs = pairs_from(first_row + lane % 4 * 2, key);
    int kinds[m_tiles], row_ends[m_tiles][2];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      kinds[m] = knows_kind ? told : full_block;
      if (knows_kind && told == unread_block) {
        kinds[m] = keep.functions().kind_of(problem, extent, first_row, key + 16 * m);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = key + 16 * m + 8 * half < extent.kv.length;
        row_ends[m][half] = has_row_ends && there ? keep.row_end<knows_kind>(kinds[m]) : 0;
      }
    }
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      const float2 lse_log2 = lse_of(column);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = first_row + column + odd;
        const Bias* bias = nullptr;
        const bool* mask = nullptr;
        const int2 keys = keep.keys_of(row);
        if constexpr (has_bias) bias = biases.row(row, extent);
        if constexpr (has_mask) mask = masks.row(row, extent);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
          for (int e = odd; e < 4; e += 2) {
            const int own_key = key + 16 * m + e / 2 * 8;
            Pair pair = pairs.at(8 * n + odd, 16 * m + e / 2 * 8);
            diagonals.tell(pair, 8 * n + odd, 16 * m + e / 2 * 8);
            float& x = scores[m][n].x[e];
            float logit = x * scale_log2;
            if constexpr (modifies_scores) {
              float b = 0.f, unused;
              if constexpr (has_bias) {
                b = as_float(masked ? biases.at(bias, own_key, extent) : bias[own_key * biases.column_stride]);
              }
              logit = modified.logit(keep.functions(), x, b, pair,
                                     keeps_derivatives && !keeps_products ? derivatives[m][n].x[e] : unused);
            }
            if constexpr (keeps_products) derivatives[m][n].x[e] = x;
            x = probability(logit, odd ? lse_log2.y : lse_log2.x);
            bool kept = true;
            if constexpr (has_row_ends) {
              kept = (row < row_ends[m][e / 2]) & keep.within<knows_kind, false>(pair, keys, kinds[m]);
            } else if constexpr (masked) {
              kept = keep.operator()<knows_kind, false>(pair, keys, kinds[m]);
            }
            if constexpr (masked && has_q_intervals) kept &= holds(rows_of(2 * m + e / 2), row);
            if constexpr (has_mask) {
              kept &= masked ? masks.at(mask, own_key, extent) : mask[own_key * masks.column_stride];
            }
            if constexpr (masked || has_mask) {
              x = kept ? x : 0.f;
              // Where a pair is dropped the derivative may be anything.
              if constexpr (derives_scores && !keeps_products) {
                derivatives[m][n].x[e] = kept ? derivatives[m][n].x[e] : 0.f;
              }
            }
          }
        }
      }
    }
  }

  // Weights that are dropped change their sign.
  template <int m_tiles, int n_tiles>
  __device__ __forceinline__ void drop(FragmentC (&weights)[m_tiles][n_tiles], int first_row, int key, int lane) const {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      const int own_key = key + 16 * m;
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint4 bits = dropout.bits(first_row + 8 * n + lane % 4 * 2 + odd, own_key);
          const bool second = own_key / 16 % 2 != 0;  // of the 32 keys that a call serves
          const u32 words[2] = {second ? bits.z : bits.x, second ? bits.w : bits.y};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& weight = weights[m][n + i % 2].x[i / 2 * 2 + odd];
            if (!dropout.keeps(words[i / 2], i % 2)) weight = -weight;
          }
        }
      }
    }
  }

  // Products V dO^T become dS^T, of these weights and of a query head, and add to the gradients of its operands unless
  // another warp does that for the same pairs. `sums_of(m)` is where sums of diagonals go, of keys 16 * m and on.
  template <int m_tiles, int n_tiles, int n_derivatives, typename DeltaOf, typename SumsOf>
  __device__ __forceinline__ void derive(FragmentC (&products)[m_tiles][n_tiles],
                                         const FragmentC (&weights)[m_tiles][n_tiles],
                                         const FragmentC (&derivatives)[m_tiles][n_derivatives],
                                         OperandGradients (&gradients)[m_tiles], bool counts, int head, int first_row,
                                         int key, int lane, float dp_factor, const DeltaOf& delta_of,
                                         const SumsOf& sums_of) const {
    SumsOfDiagonals<(adds_captured && captured_of_diagonals > 0)> of_diagonals[m_tiles];
    const Pairs<has_functions> pairs = pairs_from(first_row + lane % 4 * 2, key);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      const float2 delta = delta_of(column);
      SumsOfRow<adds_captured> of_rows[2];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        FragmentC& ds = products[m][n];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          ds.x[e] = derived(weights[m][n].x[e], ds.x[e], e % 2 ? delta.y : delta.x, dp_factor, dropout.factor);
        }
        if constexpr (has_score_function && (keeps_products || adds_captured || has_dbias || has_dalibi_slopes)) {
          derive_function(ds, weights[m][n], derivatives[m][keeps_derivatives ? n : 0], gradients[m], of_rows,
                          of_diagonals[m], counts, head, pairs, 8 * n, 16 * m);
          if (counts) {
            of_diagonals[m].flush(problem, keep.functions(), sums_of(m), gradients[m].sums_of_tables(),
                                  first_row + column, key + 16 * m + 8, lane);
          }
        } else {
          if constexpr (has_dbias || has_dalibi_slopes) {
            if (counts) gradients[m].add(problem, extent, modified, head, first_row + column, key + 16 * m, ds);
          }
          if constexpr (keeps_derivatives) {
#pragma unroll
            for (int e = 0; e < 4; ++e) ds.x[e] *= derivatives[m][n].x[e];
          }
        }
      }
      if constexpr (adds_captured && captured_of_rows > 0) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          if (counts) {
            of_rows[odd].flush(problem, extent, keep.functions(), gradients[0].sums_of_tables(),
                               first_row + column + odd, lane);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      const int row = first_row + 8 * (n_tiles - 1) + lane % 4 * 2;
      if (counts) {
        of_diagonals[m].end(problem, keep.functions(), sums_of(m), gradients[m].sums_of_tables(), row, key + 16 * m + 8,
                            lane);
      }
    }
  }

 private:
  // What the compiler knows of rows and keys it keeps in more registers than Hopper's kernels have where they load
  // elements of arrays, and they spilled up to 100 bytes. Those of sm_80 spill where it knows nothing.
  static __device__ __forceinline__ Pairs<has_functions> pairs_from(int row, int key) {
    constexpr bool hidden = captures_arrays && one_warp_loads;
    return {hidden ? opaque_number(row) : row, hidden ? opaque_number(key) : key};
  }

  // The last step of derive(), with a score function: gradients of what it captured are of dS; those of bias and slopes
  // of dS times its derivative; and the product's of that times the derivative of what comes before it. The pairs are
  // from `first_row` and `first_key` on, constants, beyond the first of `pairs`.
  __device__ __forceinline__ void derive_function(
      FragmentC& ds, const FragmentC& weights, const FragmentC& kept, OperandGradients& gradients,
      SumsOfRow<adds_captured> (&of_rows)[2],
      SumsOfDiagonals<(adds_captured && captured_of_diagonals > 0)>& of_diagonals, bool counts, int head,
      const Pairs<has_functions>& pairs, int first_row, int first_key) const {
    float inner[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Pair pair = pairs.at(first_row + e % 2, first_key + e / 2 * 8);
      float x = 0.f, outer = 1.f;
      inner[e] = 1.f;
      if constexpr (keeps_products) {
        float bias = 0.f;
        if constexpr (has_bias) bias = as_float(biases.at(biases.row(pair.row, extent), pair.column, extent));
        x = modified.before_function(kept.x[e], bias, pair.row, pair.column, inner[e]);
        if constexpr (derives_scores) keep.functions().score(problem, x, pair, outer);
        // Where a pair is dropped the derivatives may be anything.
        if (weights.x[e] == 0.f) outer = inner[e] = 0.f;
      } else if constexpr (derives_scores && !with_softcap) {
        outer = kept.x[e];
      } else if constexpr (keeps_derivatives) {
        inner[e] = kept.x[e];
      }
      if constexpr (adds_captured) {
        if (counts) {
          keep.functions().add(problem, x, pair, ds.x[e] * gradients.descale, gradients.sums_of_head(),
                               gradients.sums_of_key(e / 2), of_rows[e % 2].sums, of_diagonals.of(e / 2, e % 2),
                               gradients.sums_of_tables());
        }
      }
      ds.x[e] *= outer;
    }
    if constexpr (has_dbias || has_dalibi_slopes) {
      if (counts) gradients.add(problem, extent, modified, head, pairs.row + first_row, pairs.column + first_key, ds);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) ds.x[e] *= inner[e];
  }
};

}  // namespace jax_flash
