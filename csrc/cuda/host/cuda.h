// The interface of the CUDA module. Nothing here needs a CUDA header, a driver or a GPU until it is called.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/tensor_maps.h"
#include "cuda/tiles.h"
#include "problem.h"

namespace jax_flash::cuda {

using Stream = void*;  // CUstream

// Where things are; set by Python at import. With another folder of sources, kernels that are fetched from then on are
// made of those; calls that have theirs keep them until tune().
struct Settings {
  std::string source_dir;                  // the device sources, shipped as package data
  std::vector<std::string> prebuilt_dirs;  // cubins of `kernels build`, looked at first
  std::vector<std::string> nvrtc_paths;    // libraries to try before the loader's own search
};
void configure(Settings settings);

// Makes the kernels of this call ready on the device: from memory, prebuilt, cached on disk, or compiled. Called
// when XLA initialises the call, never inside a CUDA graph capture. Throws std::runtime_error. Problem::scratch has
// `scratch_elements` elements.
void prepare(int device, Pass pass, DType dtype, const Problem& problem, int64_t scratch_elements);

// Enqueues the kernels. Neither allocates nor compiles nor synchronises when prepare() came before. Throws
// std::invalid_argument where the scratch has fewer elements than the call needs.
void launch(int device, Stream stream, Pass pass, DType dtype, const Problem& problem, int64_t scratch_elements);

// How the split-KV forward serves a call: by blocks of so many rows, on so many slices of the keys. The plan is a
// function of the shape alone, so that results are the same on every GPU of a family; that a GPU has kMultiprocessors
// is a guess.
struct SplitKvPlan {
  int rows;    // of kSplitKvRows; 0: the split-KV forward does not serve the call
  int slices;  // 1 to kMostSlices
};
constexpr int kSplitKvRows[] = {16, 64};
constexpr int kMultiprocessors = 132;
SplitKvPlan plan_split_kv(const Problem& problem);

// How a forward call is to be served where its family can: a function of shape, options and scratch.
struct ForwardPlan {
  SplitKvPlan split_kv{0, 1};
  bool single_tile = false;
};

// Whether the single-tile forward serves a call, where it serves its options and head dims: a function of the shape
// alone.
bool is_single_tile(const Problem& problem);

// Backward: into how many shares the query heads of a key head are split, where blocks for every key head are too few
// for the multiprocessors; a divisor of their number, and a function of the shape alone, as plan_split_kv is.
int group_splits(const Problem& problem);

// A forward call whose kernels XLA puts into a CUDA graph by itself: with other arrays it then changes the kernels'
// parameters, where what a handler launches would be captured anew; and a kernel may begin before the one that it
// follows has ended, which one that is captured may not. The kernels of a graph stay what they were when it was made,
// whatever tune() or the environment say by the time of an update: so this is found once for a graph and kept.
struct Found;
struct Recorded {
  int device;
  const Found* found;  // lives as long as the process
  ForwardPlan plan;
};
// Makes the kernels ready first, where prepare() did not come before.
Recorded record(int device, DType dtype, const Problem& problem, int64_t scratch_elements);

// One of its kernels.
struct GraphNode {
  const char* name;
  const std::string* cubin;
  unsigned blocks, cluster, threads, shared_bytes;
  bool overlaps;  // it waits by itself for the kernel before
  Problem problem;
  TensorMaps maps;
  bool has_maps;
};
// With these arrays, one behind the other.
std::vector<GraphNode> graph_nodes(const Recorded& recorded, const Problem& problem);
void count_recorded();  // that XLA has put a call's kernels into a graph

// How many calls this process has launched, and how many of these went into a CUDA graph, which replays them without
// us; and of how many of these XLA has made nodes itself.
struct Launches {
  int64_t all, captured, recorded;
};
Launches launches();

// Elements of float that a call wants in Problem::scratch: a function of shape and options alone, since a call may be
// lowered on another machine than it runs on. A call that has less is planned within what it has; what it can't do
// without is the accumulator of dQ, where its kernels add to one, and the sums for the gradient of slopes.
int64_t forward_scratch(DType dtype, const Problem& problem);
int64_t backward_scratch(DType dtype, const Problem& problem);

// What the command line shows.
struct Device {
  std::string name;
  int compute_capability;  // 90 for 9.0
  std::string family;      // "sm80", or empty when no family serves it
};
struct Status {
  std::string driver;              // "13.0", or empty
  std::string driver_error;        // why there is none
  std::vector<std::string> nvrtc;  // "12.9 (path)" each
  std::string nvrtc_error;
  std::string cache_dir;      // empty when caching on disk is off or impossible
  std::string cache_problem;  // why it is impossible; empty where it is off
  std::vector<Device> devices;
};
Status status();

// Up to which head_dim there are kernels for an architecture: with two limbs, which take twice the shared memory, up to
// less than otherwise on some.
int largest_head_dim(int arch, bool highest_precision);

// The kernel families whose matrix products take float16 alone.
std::vector<std::string> float16_families();

// Whether dQ has a pass of its own on an architecture, also where nobody asks for one order of its sums.
bool separate_dq(int arch, int largest_head_dim);

struct Kernel {
  std::string name;  // the variant's name
  std::string path;  // of the cubin
  std::string pass;  // "forward", "forward_split_kv", "forward_single_tile", "backward", "backward_dq" or
                     // "backward_bias"; the kernel is jax_flash_<pass>
  int head_dim;
  int value_head_dim;
  int block_q;       // rows of query in a step of the main loop
  int block_kv;      // and keys
  int registers;     // per thread
  int shared_bytes;  // per block
  int threads;       // per block
  int spill_bytes;   // stores plus loads
  int local_bytes;   // stack frame
  int64_t cubin_bytes;
  int float32_registers;          // of the kernels beside it for heads that are computed in float32, the most; 0: none
  int float32_local_bytes;        // spill stores, loads and stack frames of all of them
  std::string compiler_warnings;  // lines of the assembler's log that warn of lost speed
};
// Compiles these passes of every combination for an architecture such as 80 or 90 into a folder for
// Settings::prebuilt_dirs, without a driver or a GPU. Head dims are pairs of head_dim and value_head_dim. `family` is
// one that the architecture runs (else std::runtime_error), or empty for its own. Throws std::invalid_argument for an
// architecture that no family serves.
std::vector<Kernel> build(int arch, const std::vector<DType>& dtypes, const std::vector<std::pair<int, int>>& head_dims,
                          const std::vector<Options>& options, const std::string& out_dir, const std::string& family,
                          const std::vector<Pass>& passes);

// Fetches the kernels of one call for an architecture through the cache, without a driver; returns where they came
// from: "prebuilt", "cached" or "compiled".
// With the tuned rows of `gpu`, unless that is empty.
std::string fetch(int arch, Pass pass, DType dtype, int head_dim, int value_head_dim, const Options& options,
                  const std::string& gpu = "");

// Which tile row a plain call takes on an architecture, on a GPU of that name.
struct Choice {
  std::string family;
  TileRow row;
  bool tuned;
  int most_shared_bytes;  // that a block may have there
};
Choice choose(int arch, Pass pass, int head_dim, const std::string& gpu);

// Compiles one plain variant with a tile row of its own, as build() does. Throws std::runtime_error where it does not
// compile.
Kernel build_row(int arch, Pass pass, DType dtype, int head_dim, const Options& options, const TileRow& row,
                 const std::string& out_dir);

}  // namespace jax_flash::cuda
