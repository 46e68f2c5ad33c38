// The interface of the CUDA module. Nothing here needs a CUDA header, a driver or a GPU until it is called.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda/tensor_maps.h"
#include "cuda/tiles.h"
#include "problem.h"
#include "scaling.h"
#include "study.h"

namespace jax_flash::cuda {

using Stream = void*;  // CUstream

// Paths; set by Python at import. Another source_dir holds for kernels that are fetched afterwards; calls that have
// their kernels keep them until tune().
struct Settings {
  std::string source_dir;                  // the device sources, shipped as package data
  std::vector<std::string> prebuilt_dirs;  // folders of cubins from `kernels build`, searched first
  std::vector<std::string> nvrtc_paths;    // libraries to try before the loader's own search
  // The files of these folders' packs for a compute capability, by name; searched after the folders' own files. Packs
  // are compressed, and Python has the decompressor. Called once for each compute capability. May be empty.
  std::function<std::map<std::string, std::string>(int arch)> packed;
};
void configure(Settings settings);

// Makes the kernels of this call ready on the device: from memory, prebuilt, cached on disk, or compiled. Called
// when XLA initialises the call, never inside a CUDA graph capture. Throws std::runtime_error. Problem::scratch has
// `scratch_elements` elements.
void prepare(int device, Pass pass, DType dtype, const Problem& problem, int64_t scratch_elements);

// Begins to load a call's kernels, for every device here, on threads of their own, and returns at once: a program that
// is lowered will need those of all its calls, while XLA makes them ready one after the other. Throws nothing: what
// fails, such as a driver that is not there, is told by prepare(). finish_loading() waits for these threads, as a
// process must before it ends.
void begin_to_load(Pass pass, DType dtype, const Problem& problem, int64_t scratch_elements);
void finish_loading();

// Enqueues the kernels. After prepare() it neither allocates nor compiles nor synchronises. Throws
// std::invalid_argument if the scratch has fewer elements than the call needs.
void launch(int device, Stream stream, Pass pass, DType dtype, const Problem& problem, int64_t scratch_elements);

// The same for the kernels that make float16 arrays of float32 ones, or with `bfloat16` of bfloat16 ones: each with two
// limbs, or one.
void prepare_scale(int device, bool two_limbs, bool bfloat16, const Scaling& scaling);
void launch_scale(int device, Stream stream, bool two_limbs, bool bfloat16, const Scaling& scaling);

// Kernel `entry` of cuda/study/<file>.cu, with `constants`, lines of C++, in front of it: compiled when first needed.
struct StudyKernel {
  std::string file, entry, constants;
};
// Needs no driver: compiles it, and returns the dynamic shared memory that a block wants.
int study_shared_bytes(int arch, const StudyKernel& kernel);
void prepare_study(int device, const StudyKernel& kernel);
void launch_study(int device, Stream stream, const StudyKernel& kernel, int blocks, const Study& study);

// How the split-KV forward serves a call: rows of a block, and slices of the keys. The plan is a function of the shape
// alone, so that results are the same on every GPU of a family; it assumes kMultiprocessors for all of them.
struct SplitKvPlan {
  int rows;    // of kSplitKvRows; 0: the split-KV forward does not serve the call
  int slices;  // 1 to kMostSlices
};
constexpr int kSplitKvRows[] = {16, 64};
constexpr int kMultiprocessors = 132;
SplitKvPlan plan_split_kv(const Problem& problem);

// The plan of a forward call, if its family can follow it: a function of shape, options and scratch.
struct ForwardPlan {
  SplitKvPlan split_kv{0, 1};
  bool single_tile = false;
};

// Whether the single-tile forward is the best for a call's shape; whether it serves its options and head dims is
// serves_single_tile().
bool is_single_tile(const Problem& problem);

// Backward: into how many shares the query heads of a key head are split, a divisor of their number. More than 1 if a
// block for each key head leaves multiprocessors idle. A function of the shape alone, as plan_split_kv() is.
int group_splits(const Problem& problem);

// A forward call whose kernels XLA records into a CUDA graph. For other arrays XLA then updates the parameters of the
// nodes, while it would have to capture a handler's launches again; and a recorded kernel may begin before its
// predecessor has ended (programmatic launch), which a captured one may not. The kernels of a graph must stay the same
// even if tune() or the environment change before an update: so they are found once for a graph and kept.
struct Found;
struct Recorded {
  int device;
  const Found* found;  // lives as long as the process
  ForwardPlan plan;
};
// Makes the kernels ready first, unless prepare() has.
Recorded record(int device, DType dtype, const Problem& problem, int64_t scratch_elements);

// One of its kernels.
struct GraphNode {
  const char* name;
  const std::string* cubin;
  unsigned blocks, cluster, threads, shared_bytes;
  bool overlaps;  // it waits itself for the kernel before it
  Problem problem;
  TensorMaps maps;
  bool has_maps;
};
// Their nodes for these arrays, in the order of launch.
std::vector<GraphNode> graph_nodes(const Recorded& recorded, const Problem& problem);
void count_recorded();  // counts a call whose kernels XLA has recorded

// How many calls this process has launched, how many of these went into a CUDA graph, whose replays are not counted,
// and how many of those XLA has recorded instead of captured.
struct Launches {
  int64_t all, captured, recorded;
};
Launches launches();

// Elements of float that a call wants in Problem::scratch: a function of shape and options alone, since a call may be
// lowered on another machine than it runs on. A call that has less gets a plan that fits. Indispensable are only the
// accumulator of dQ, if its kernels add to one, and the sums for the gradient of slopes.
int64_t forward_scratch(DType dtype, const Problem& problem);
int64_t backward_scratch(DType dtype, const Problem& problem);

// What `python -m jax_flash` shows.
struct Device {
  std::string name;
  int compute_capability;  // 90 for 9.0
  std::string family;      // "sm80", or empty when no family serves it
};
struct Status {
  std::string driver;              // "13.0", or empty
  std::string driver_error;        // why there is no driver
  std::vector<std::string> nvrtc;  // "12.9 (path)" each
  std::string nvrtc_error;
  std::string cache_dir;      // empty if caching on disk is off or impossible
  std::string cache_problem;  // why it is impossible; empty if it is off
  std::vector<Device> devices;
};
Status status();

// The largest head_dim with kernels for an architecture. With highest_precision it may be smaller: two limbs take twice
// the shared memory.
int largest_head_dim(int arch, bool highest_precision);

// The kernel families whose matrix instructions take float16 only.
std::vector<std::string> float16_families();

// Whether dQ has a pass of its own on an architecture even in calls without Options::separate_dq.
bool separate_dq(int arch, int largest_head_dim);
// Whether a backward should add dQ in one order, rather than compute it in a pass of its own or add it in any: see
// Options::ordered_dq.
bool orders_dq(int arch, const Problem& problem);

// Whether the kernels of a call with a mask of keys take kv_rows in its place: those of its main pass. Scaled arrays
// need not be asked for.
bool lists_keys(int arch, Pass pass, const Problem& problem);

struct Kernel {
  std::string name;  // the variant's name
  std::string path;  // of the cubin
  std::string pass;  // "forward", "forward_split_kv", "forward_single_tile", "backward", "backward_dq",
                     // "backward_bias" or "scale"; the kernel is jax_flash_<pass>
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
  int float32_registers;          // the most of the float32 kernels in this cubin (device/float32.cuh); 0: none
  int float32_local_bytes;        // spill stores, spill loads and stack frames of all of them
  std::string compiler_warnings;  // lines of ptxas's log that warn of lost performance
};
// These passes for every combination of dtypes, head dims and options. Head dims are pairs of head_dim and
// value_head_dim.
struct Variants {
  std::vector<DType> dtypes;
  std::vector<std::pair<int, int>> head_dims;
  std::vector<Options> options;
  std::vector<Pass> passes;
};
// Compiles them for an architecture such as 80 or 90 into a folder for Settings::prebuilt_dirs, without a driver or a
// GPU. `family` is one that the architecture runs (else std::runtime_error), or empty for the best. Throws
// std::invalid_argument for an architecture that no family serves.
std::vector<Kernel> build(int arch, const Variants& wanted, const std::string& out_dir, const std::string& family);

// The names of what build() would compile for the best family.
std::vector<std::string> names(int arch, const Variants& wanted);

// Where a kernel came from: "prebuilt", "cached" (on disk) or "compiled", and how long that took.
struct Origin {
  std::string name;
  std::string origin;
  double seconds;
};
// Fetches their kernels as calls on an architecture do, but without a driver: those that are neither prebuilt nor
// cached are compiled into the cache. The tuned rows of `gpu` apply, unless that is empty. Throws as build().
std::vector<Origin> fetch(int arch, const Variants& wanted, const std::string& gpu);

// The same for the kernel of one pass; returns where it came from.
std::string fetch(int arch, Pass pass, DType dtype, int head_dim, int value_head_dim, const Options& options,
                  const std::string& gpu = "");

// The tile row of a plain call on an architecture, on the GPU of that name, or of one with `functions`.
struct Choice {
  std::string family;
  TileRow row;
  bool tuned;
  int most_shared_bytes;  // of a block on that architecture
};
Choice choose(int arch, Pass pass, int head_dim, const std::string& gpu, bool functions);

// Compiles one plain variant with the given tile row, as build() does. Throws std::runtime_error if it does not
// compile.
Kernel build_row(int arch, Pass pass, DType dtype, int head_dim, const Options& options, const TileRow& row,
                 const std::string& out_dir);

}  // namespace jax_flash::cuda
