// From a variant to its kernels: kernels_of() is the one interface to prebuilt, cached and newly compiled ones.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/host/cuda.h"
#include "cuda/host/driver.h"
#include "cuda/kernel_traits.h"
#include "cuda/tiles.h"

namespace jax_flash::cuda {

// The kernel of a pass, and the pass's name.
const char* entry_point(Pass pass);
const char* pass_name(Pass pass);

// Everything that is compiled into a kernel.
struct Variant {
  std::string family;  // which sources, "sm80"
  int arch;            // compute capability of the device, 90
  Pass pass;
  DType dtype;
  int head_dim;        // a multiple of 8
  int value_head_dim;  // a multiple of 8
  Options options;     // the constants, and which features and operands are present
  TileRow tile;
  int rows = 0;        // the wanted block_q; 0: the table's first row
  bool tuned = false;  // the row is not the table's

  void set_tuned(const TileRow& row) {
    tile = row;
    rows = 0;
    tuned = true;
  }
  // Readable and unique: includes the tile row if it is tuned, and block_q if it was chosen.
  std::string name() const;
  std::string source() const;  // the named constants, and the include of the family's file
};

constexpr char kCombine[] = "jax_flash_combine";
constexpr char kRowSizes[] = "jax_flash_row_sizes";
constexpr char kFloat32Forward[] = "jax_flash_float32_forward", kFloat32Backward[] = "jax_flash_float32_backward";
constexpr char kFloat32Bias[] = "jax_flash_float32_bias";
// The kernel beside a variant's own that computes in float32 the heads that this one passes over; nullptr: none. And
// whether there is one for what such heads add to the gradient of a bias.
const char* float32_entry(const Variant& variant);
bool has_float32_bias(const Variant& variant);

struct Loaded {
  KernelTraits traits;
  const std::string* cubin;  // lives as long as the process
  const char* name;          // of main
  CuKernel main;
  CuKernel zero_dq;     // backward of the families that zero a part of dQ's sums in blocks before only
  CuKernel convert_dq;  // backward with atomic additions only
  CuKernel sum_slopes;  // backward with a gradient of alibi_slopes only
  CuKernel sum_splits;  // backward of the families that split groups of query heads only
  CuKernel combine;     // forward_split_kv only
  CuKernel row_sizes;   // scale only
  // With descale only, for heads that the others pass over: forward, forward_split_kv and backward; and backward and
  // backward_bias with a gradient of bias.
  CuKernel float32, float32_bias;
};

// The cubin of a variant: prebuilt, else cached on disk, else compiled. Needs no driver.
struct Fetched {
  std::string cubin;
  const char* origin;  // "prebuilt", "cached" or "compiled"
};
Fetched fetch(const Variant& variant);
// The same of a source that is no variant, and never prebuilt. It includes the device sources by their names.
Fetched fetch_source(const std::string& name, const std::string& source, int arch);

// The kernels of a variant, ready to launch on the device. Thread-safe: a variant is compiled once, different variants
// concurrently.
Loaded kernels_of(const Variant& variant, int device);
// Begins that on a thread of its own.
void begin_to_load(const Variant& variant);

// Compiles a variant, without a driver, and stores it under `out_dir` for `prebuilt_dirs`. Registers and other figures
// are those of its main kernel.
Kernel build(const Variant& variant, const std::string& out_dir);

// A hash of the device sources and the table.
std::string sources_key();

Settings settings();
std::vector<Nvrtc> nvrtcs(std::string* error);

}  // namespace jax_flash::cuda
