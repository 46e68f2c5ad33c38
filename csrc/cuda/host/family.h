// Which kernel family serves a GPU, and which variant a pass.
#pragma once

#include <limits>
#include <string>

#include "cuda/host/cuda.h"
#include "cuda/host/jit.h"
#include "cuda/tiles.h"

namespace jax_flash::cuda {

struct Family {
  const char* name;
  int from, to;           // compute capabilities
  const char* fallback;   // the family whose kernels serve passes without a tile row here; "": none
  const char* suffix;     // of NVRTC's target: "a" allows instructions of this architecture only
  bool float16_only;      // its matrix instructions take float16 only: bfloat16 is passed as float16 with descale
  int separate_dq_above;  // head_dim above which dQ always has a pass of its own
  bool orders_dq;         // its backward that adds dQ can do so in one order
  int lean_without_dq;    // head_dim up to which the backward without dQ has too few registers for some operands
  int short_blocks;       // head_dim up to which a forward without options has blocks of kShortRows too; 0: none
  int tall_tiles;         // head_dim up to which a backward without options has tiles of kTallRows too; 0: none
};
constexpr int kAll = std::numeric_limits<int>::max();
// In order of preference: the first that serves a GPU is taken.
inline constexpr Family kFamilies[] = {
    // Above head_dim 128 a block of Hopper's backward has only 64 keys, and would add to dQ too often. Up to 128 its
    // schedule is made for a pass with dQ: without dQ some options find too few registers.
    {"sm90a", 90, 90, "sm80", "a", false, 128, true, 128, 64, 128},
    {"sm80", 80, kAll, "", "", false, kAll, false, 0, 0, 0},
    {"sm75", 75, kAll, "", "", true, kAll, false, 0, 0, 0},
    {"sm70", 70, kAll, "", "", true, 0, false, 0, 0, 0},  // always, since it has no other way to sum dQ
};
const Family& family_named(const std::string& name);

// The family of that name, or for "" the best one; nullptr if none serves `arch`. Throws std::runtime_error if `arch`
// can't run the named one; the message names `by`, the setting that has the name.
const Family* family_of(int arch, const std::string& name, const char* by);
// The same with the name in JAX_FLASH_CUDA_FAMILY, by which a newer GPU can run the kernels of an older one.
const Family* family_of(int arch);
// The same; throws std::invalid_argument if there is none.
const Family& served_family(int arch);

// The family whose kernel serves a pass: this one, or its fallback.
const Family& pass_family(const Family& family, int arch, int limbs, Pass pass, int head_dim, Calls calls = Calls::all);

// Whether blocks add dQ in the order of their keys, as with Options::ordered_dq they may.
bool orders_dq(const Family& family, const Options& options, int largest_head_dim);
// Whether dQ has a pass of its own.
bool separate_dq(const Family& family, const Options& options, int largest_head_dim);

// `gpu` is the driver's name of a device whose tuned rows take precedence; empty: only the table's rows.
Variant variant_of(const Family& device_family, int arch, Pass pass, DType dtype, int head_dim, int value_head_dim,
                   const Options& options, int rows = 0, const std::string& gpu = "");

// The kernels that make the float16 arrays of calls with these options, up to this head_dim: there are three sizes.
Variant scale_variant(const Family& device_family, int arch, const Options& options, int largest_head_dim);

// Whether the single-tile forward serves calls with these options and head dims.
bool serves_single_tile(const Family& family, int arch, const Options& options, int head_dim, int value_head_dim);

// Whether the split-KV forward can follow this plan of plan_split_kv().
bool serves_split_kv(const Family& family, int arch, const Problem& p, const SplitKvPlan& plan);

}  // namespace jax_flash::cuda
