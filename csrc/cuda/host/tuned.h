// Tile rows that `python -m jax_flash bench tune` found for a GPU: they take precedence over the table's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/tiles.h"

namespace jax_flash::cuda {

// For calls whose query and value have the same head dim, with no option but `causal` and `separate_dq`.
struct TunedRow {
  std::string gpu;  // by the driver's name
  std::string family;
  Pass pass;
  int head_dim;
  TileRow row;
};

// Replaces all tuned rows: every call looks its kernels up anew. Kernels that are loaded stay loaded.
void tune(std::vector<TunedRow> rows);

std::optional<TileRow> tuned_row(const std::string& gpu, const std::string& family, Pass pass, int head_dim);

// A number that changes with each tune().
int64_t tuned_generation();

}  // namespace jax_flash::cuda
