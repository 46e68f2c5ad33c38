// Which kernel family serves a GPU, and which of its variants a pass.
#pragma once

#include <limits>
#include <string>

#include "cuda/host/cuda.h"
#include "cuda/host/jit.h"

namespace jax_flash::cuda {

struct Family {
  const char* name;
  int from, to;           // compute capabilities
  const char* fallback;   // the family whose kernels serve passes that it has no tile row for; "": none
  const char* suffix;     // of NVRTC's target: the instructions of this architecture alone
  bool float16_only;      // its matrix products take float16 alone: bfloat16 comes as float16 with descale
  int separate_dq_above;  // head_dim above which dQ has a pass of its own, whatever is asked for
  int lean_without_dq;    // head_dim up to which the backward without dQ has fewer registers left for operands
  int short_blocks;       // head_dim up to which a forward without options has blocks of kShortRows too; 0: none
};
constexpr int kAll = std::numeric_limits<int>::max();
// The best for a GPU comes first.
inline constexpr Family kFamilies[] = {
    // Above head_dim 128 a block of Hopper's owns 64 keys only and would add to dQ all the more often. Up to there its
    // backward is made for its dQ: without it some options find too few registers.
    {"sm90a", 90, 90, "sm80", "a", false, 128, 128, 64},
    {"sm80", 80, kAll, "", "", false, kAll, 0, 0},
    {"sm75", 75, kAll, "", "", true, kAll, 0, 0},
    {"sm70", 70, kAll, "", "", true, 0, 0, 0},  // which has no other way to sum dQ
};
const Family& family_named(const std::string& name);

// The family of that name, "" the best, which `arch` has to be able to run. `by` is what asks for it. Throws
// std::runtime_error; nullptr where none serves `arch`.
const Family* family_of(int arch, const std::string& name, const char* by);
// With the one that JAX_FLASH_CUDA_FAMILY names, so that a newer GPU can run the kernels of an older one.
const Family* family_of(int arch);
// Throws std::invalid_argument where there is none.
const Family& served_family(int arch);

// The family whose kernel serves a pass: this one, or its fallback.
const Family& pass_family(const Family& family, int arch, int limbs, Pass pass, int head_dim, bool plain = false);

// Whether dQ has a pass of its own.
bool separate_dq(const Family& family, const Options& options, int largest_head_dim);

// `gpu` is the driver's name of the device whose tuned rows come first; empty: the table's alone.
Variant variant_of(const Family& device_family, int arch, Pass pass, DType dtype, int head_dim, int value_head_dim,
                   const Options& options, int rows = 0, const std::string& gpu = "");

// Whether the single-tile forward serves calls with these options and head dims.
bool serves_single_tile(const Family& family, int arch, const Options& options, int head_dim, int value_head_dim);

// Whether the split-KV forward serves a call as plan_split_kv() plans it.
bool serves_split_kv(const Family& family, int arch, const Problem& p, const SplitKvPlan& plan);

}  // namespace jax_flash::cuda
