// Scores of which rows of query run along the rows of the accumulators, between the product and the next one.
#pragma once

#include "cuda/device/diagonals.cuh"
#include "cuda/device/head_scores.cuh"

namespace jax_flash {

struct ScoreRows : HeadScores {
  __device__ __forceinline__ ScoreRows(const Problem& problem, const Extent& extent, int head, float scale)
      : HeadScores(problem, extent, band_of(problem, extent), head, scale) {}

  // Scores of one row, keys `first_key` and on, become logits; those that are not kept, -inf. d logit / d (scale *
  // score), or with `of_bias` d logit / d bias, goes to `derivatives` where these are kept (keeps_derivatives), unless
  // that is null. With `in_order` the rows of a warp's fragments follow one another. The keys' block of the block mask
  // has the kind `told`, unless that is unread_block.
  template <bool masked, bool of_bias = false, bool in_order = true, int tiles,
            typename Diagonals = DiagonalValues<16, 8 * tiles, false>>
  __device__ __forceinline__ void logits(FragmentC (&scores)[tiles], FragmentC* derivatives, int row, int half,
                                         int first_key, int lane, const Diagonals& diagonals = {}) const {
    const KeysOfRows<tiles, 8, masked && decides_keys && in_order> keys(keep, row, first_key, lane);
    logits<masked, of_bias>(scores, derivatives, row, half, first_key, lane, keys, diagonals);
  }
  template <bool masked, bool of_bias, int tiles, typename Keys, typename Diagonals>
  __device__ __forceinline__ void logits(FragmentC (&scores)[tiles], FragmentC* derivatives, int row, int half,
                                         int first_key, int lane, const Keys& keys, const Diagonals& diagonals,
                                         int told = unread_block) const {
    if (keys.decides) {
      logits_of<masked, of_bias, false>(scores, derivatives, row, half, first_key, lane, diagonals, told);
    } else {
      logits_of<masked, of_bias, true>(scores, derivatives, row, half, first_key, lane, diagonals, told);
    }
    if (keys.decides) keys.hide(scores, half);  // in the branch above the assembler spills
  }

  // Scores of both rows of a lane, `row` and the one 8 below, become -inf where they are not kept, if functions drop
  // pairs and nothing changes scores (functions_apart). Functions and ranges are each asked in tiles that they do not
  // keep whole.
  template <int tiles>
  __device__ __forceinline__ void hide(FragmentC (&scores)[tiles], int row, int first_key, int lane, int told) const {
    constexpr bool knows_kind = in_one_block<1, 8 * tiles>, by_kind = knows_kind && !has_mask_function;
    const int own_key = first_key + lane % 4 * 2;
    if (!by_kind || told != full_block) {
      const Pairs<true> pairs(row, own_key);
      keep_where(scores, [&](int i, int j) {
        return keep.by_functions<knows_kind>(pairs.at(i, j), by_kind ? partial_block : told);
      });
    }
    int first_kept[2], last_kept[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first_kept[half] = keep.first(row + 8 * half) - own_key;
      last_kept[half] = keep.last(row + 8 * half) - own_key;
      if (row + 8 * half >= keep.row_end<knows_kind>(told)) last_kept[half] = -1;
    }
    const bool all = at_most(last_kept[0], last_kept[1]) >= 8 * tiles - 7;
    constexpr bool bounded_first = bounded_left || has_kv_intervals;
    if (all && (!bounded_first || at_least(first_kept[0], first_kept[1]) <= 0)) return;
    keep_where(scores,
               [&](int i, int j) { return (!bounded_first || j >= first_kept[i / 8]) && j <= last_kept[i / 8]; });
  }

  // Logits of two rows become weights against the rows' lse (backward_lse). Those of -inf are 0 by themselves; but with
  // `mask` the assembler spills where it is not told so (dQ, sm_70 and sm_80).
  template <int tiles>
  __device__ __forceinline__ void weigh(FragmentC (&scores)[tiles], const float (&lse_log2)[2]) const {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = scores[n].x[e];
        const bool kept = !has_mask || x != -JAX_FLASH_INFINITY;
        x = weight(x, lse_log2[e / 2]);
        x = kept ? x : 0.f;
      }
    }
  }
  __device__ __forceinline__ float weight(float logit, float lse_log2) const {
    return probability(logit * scale_log2, lse_log2);
  }

  // Products dO V^T become dS, of these weights; derivatives as logits() has left them.
  template <int tiles>
  __device__ __forceinline__ void derive(FragmentC (&products)[tiles], const FragmentC (&weights)[tiles],
                                         const FragmentC* derivatives, const float (&deltas)[2], float dp_factor,
                                         float dropout_factor) const {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = products[n].x[e];
        x = derived(weights[n].x[e], x, deltas[e / 2], dp_factor, dropout_factor);
        if constexpr (keeps_derivatives) {
          if (derivatives) x *= derivatives[n].x[e];
        }
      }
    }
  }

  // Weights of rows `row` and `row` + 8 that are dropped become 0, or with `turn` change their sign; those that are
  // kept get their factor at the end.
  template <bool turn, int tiles>
  __device__ __forceinline__ void drop(FragmentC (&weights)[tiles], int row, int first_key, int lane) const {
    if constexpr (tiles == 2) {  // 16 keys, of the 32 that a call serves
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint4 bits = dropout.bits(row, first_key + lane % 4 * 2 + odd);
        const bool second = first_key / 16 % 2 != 0;
        drop_words<turn>(weights, odd, 0, {second ? bits.z : bits.x, second ? bits.w : bits.y, 0, 0});
      }
    } else if (tiles % 4 == 0 || first_key % 32 == 0) {
      drop_from<turn, 0>(weights, row, first_key, lane);
    } else {
      drop_from<turn, 2>(weights, row, first_key - 16, lane);
    }
  }

  // The same of one of the two rows, where they are of different heads.
  template <int tiles>
  __device__ __forceinline__ void drop_half(FragmentC (&weights)[tiles], int row, int half, int first_key,
                                            int lane) const {
    constexpr int together = at_most(tiles, 4);
    const int high = row / 8 % 2;
#pragma unroll
    for (int n = 0; n < tiles; n += together) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint4 bits = dropout.bits(row, first_key + n * 8 + lane % 4 * 2 + odd);
        u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
        if (tiles == 2 && first_key / 16 % 2 != 0) {
          words[0] = bits.z;
          words[1] = bits.w;
        }
#pragma unroll
        for (int i = 0; i < together; ++i) {
          if (!dropout.keeps(words[i], high)) weights[n + i].x[2 * half + odd] = 0.f;
        }
      }
    }
  }

 private:
  // Scores of pairs become -inf unless `keeps` is true for the rows and columns between them and the lane's first one.
  template <int tiles, typename Keeps>
  static __device__ __forceinline__ void keep_where(FragmentC (&scores)[tiles], const Keeps& keeps) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n].x[e] = keeps(e / 2 * 8, 8 * n + e % 2) ? scores[n].x[e] : -JAX_FLASH_INFINITY;
      }
    }
  }

  // Four n8 tiles at a time, or what is read for all of them crowds out the accumulators. Unless it `asks_keys`, the
  // intervals of keys are not asked one by one.
  template <bool masked, bool of_bias, bool asks_keys, int tiles, typename Diagonals>
  __device__ __forceinline__ void logits_of(FragmentC (&scores)[tiles], FragmentC* derivatives, int row, int half,
                                            int first_key, int lane, const Diagonals& diagonals, int told) const {
    constexpr int together = tiles % 4 == 0 ? 4 : 2;
    // The assembler would read for all rows at once, and spill. Of 16 keys or 64 it spills more with the barrier.
    if (loads_take_registers && tiles == 4 && (has_bias || has_mask || in_segments || has_functions)) __syncwarp();
    // Against what is constant, a column of a lane is tested by one instruction for each end. Where loads take
    // registers too, the two ends would be spilled.
    constexpr bool bounded_first = bounded_left || has_kv_intervals;
    constexpr bool by_ends = !(loads_take_registers && (has_bias || has_mask || in_segments));
    // Of the tile's keys, which begin at a multiple of their number.
    constexpr bool knows_kind = masked && block_kv % (8 * tiles) == 0 && in_one_block<1, 8 * tiles>;
    int kind = knows_kind ? told : full_block;
    if (knows_kind && kind == unread_block) kind = keep.functions().kind_of(problem, extent, row, first_key);
    const int own_key = first_key + lane % 4 * 2;
    // Where no pair is tested, Hopper's forward at head_dim 64 took 3% longer with it (ALiBi).
    const Pairs<(has_functions && masked)> pairs(row - 8 * half, own_key);
    const int first_kept = masked ? keep.first(row) - own_key : 0;
    int last_kept = masked ? keep.last(row) - own_key : 0;
    if (masked && has_functions && row >= keep.row_end<knows_kind>(kind)) last_kept = -1;
#pragma unroll
    for (int first_n = 0; first_n < tiles; first_n += together) {
      const int first = own_key + first_n * 8;
      Bias bias[together][2];
      bool mask[together][2];
      if constexpr (has_bias) biases.read<masked>(bias, row, first, extent);
      if constexpr (has_mask) masks.read<masked>(mask, row, first, extent);
#pragma unroll
      for (int n = 0; n < together; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score = scores[first_n + n].x[2 * half + odd];
          const int column = first + n * 8 + odd;
          Pair pair = pairs.at(8 * half, (first_n + n) * 8 + odd);
          diagonals.tell(pair, 8 * half, (first_n + n) * 8 + odd);
          if constexpr (modifies_scores) {
            float b = 0.f, derivative;
            if constexpr (has_bias) b = as_float(bias[n][odd]);
            score = modified.logit<of_bias>(keep.functions(), score, b, pair, derivative);
            if constexpr (keeps_derivatives) {
              if (derivatives) derivatives[first_n + n].x[2 * half + odd] = derivative;
            }
          }
          if constexpr (has_mask) score = mask[n][odd] ? score : -JAX_FLASH_INFINITY;
          if constexpr (masked) {
            const int here = (first_n + n) * 8 + odd;
            bool kept;
            if constexpr (by_ends) {
              kept = !bounded_first || here >= first_kept;
              // Else KeysOfRows hides keys beyond the end.
              if constexpr (asks_keys || bounded_right || has_kv_intervals) kept &= here <= last_kept;
              // What is read is read always: a branch for each would cost registers.
              if constexpr (tests_keys) kept &= keep.keeps_of_key<asks_keys>(row, column);
              if constexpr (has_functions) kept &= keep.by_functions<knows_kind>(pair, kind);
            } else {
              kept = keep.operator()<knows_kind, asks_keys>(pair, keep.keys_of(row), kind);
            }
            score = kept ? score : -JAX_FLASH_INFINITY;
          }
          if constexpr (derives_scores && (masked || has_mask)) {
            // Where a pair is dropped the derivative may be anything.
            if (derivatives && score == -JAX_FLASH_INFINITY) derivatives[first_n + n].x[2 * half + odd] = 0.f;
          }
        }
      }
    }
  }

  // The first `before` n8 tiles of the 32 keys from `first_key` on are not there.
  template <bool turn, int before, int tiles>
  __device__ __forceinline__ void drop_from(FragmentC (&weights)[tiles], int row, int first_key, int lane) const {
#pragma unroll
    for (int n = 0; n < tiles + before; n += 4) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        drop_words<turn>(weights, odd, n - before, dropout.bits(row, first_key + n * 8 + lane % 4 * 2 + odd));
      }
    }
  }
  template <bool turn, int tiles>
  __device__ __forceinline__ void drop_words(FragmentC (&weights)[tiles], int odd, int first, const uint4& bits) const {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < 0 || first + i >= tiles) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& weight = weights[first + i].x[2 * half + odd];
        if (!dropout.keeps(words[i], half)) weight = turn ? -weight : 0.f;
      }
    }
  }
};

}  // namespace jax_flash
