// Which pairs of query and key are kept, as ranges of tiles: a bare range, where every pair is kept and no test is
// made, and a masked range beside it.
#pragma once

#include "cuda/shared/prelude.cuh"

namespace jax_flash {

// Query row t of this batch keeps key s when s <= t + offset; without causal the offset is of no account. Beyond
// [-q_length, kv_length] it changes nothing more, so it is clamped there, where sums with indices fit an int.
JAX_FLASH_DEVICE int offset_of(const Problem& problem, int batch) {
  if (!has_q_offset) return 0;
  return at_most(at_least(problem.q_offset[batch], -problem.q_length), problem.kv_length);
}

JAX_FLASH_DEVICE bool kept(int offset, int row, int column, int kv_length) {
  return column < kv_length && (!option_causal || column <= row + offset);
}

// For rows [row, row + rows): keys [0, bare) are tiles kept whole, [bare, end) tiles to mask.
struct KeyTiles {
  int bare;
  int end;
};
template <int tile>
JAX_FLASH_DEVICE KeyTiles key_tiles(int offset, int row, int rows, int q_length, int kv_length) {
  if (!option_causal) return {kv_length / tile, ceil_div(kv_length, tile)};
  const int kept_by_all = at_least(0, at_most(kv_length, row + offset + 1));
  const int kept_by_any = at_least(0, at_most(kv_length, at_most(row + rows, q_length) + offset));
  return {kept_by_all / tile, ceil_div(kept_by_any, tile)};
}

// For keys [column, column + columns): tiles of rows [begin, bare) are to mask, [bare, end) kept whole.
struct RowTiles {
  int begin;
  int bare;
  int end;
};
template <int tile>
JAX_FLASH_DEVICE RowTiles row_tiles_of(int offset, int column, int columns, int q_length, int kv_length) {
  const int end = ceil_div(q_length, tile);
  const bool ragged = column + columns > kv_length;  // keys beyond the end are masked against every row
  if (!option_causal) return {0, ragged ? end : 0, end};
  const int first = at_least(0, column - offset);                // the first row that keeps any of the keys
  const int whole = at_least(0, column + columns - 1 - offset);  // the first row that keeps all of them
  const int begin = at_most(first / tile, end);
  return {begin, ragged ? end : at_most(at_least(begin, ceil_div(whole, tile)), end), end};
}

}  // namespace jax_flash
