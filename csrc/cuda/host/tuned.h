// Tile rows that `python -m jax_flash bench tune` found for a GPU: they come before the table's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/tiles.h"

namespace jax_flash::cuda {

// For calls of one head dim, which query and value share, with no option but `causal` and `separate_dq`.
struct TunedRow {
  std::string gpu;  // by the driver's name
  std::string family;
  Pass pass;
  int head_dim;
  TileRow row;
};

// From now on these, and no others: every call looks for its kernels anew. Those that are loaded stay loaded.
void tune(std::vector<TunedRow> rows);

std::optional<TileRow> tuned_row(const std::string& gpu, const std::string& family, Pass pass, int head_dim);

// Another number after each tune().
int64_t tuned_generation();

}  // namespace jax_flash::cuda
